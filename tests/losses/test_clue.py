"""CLUE: its three levels against slow loops and arithmetic, its training step, and two processes against one."""

import copy
import math
import os
import pickle
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from torch import distributed as dist
from torch import nn

import reference
from trueup.losses import CLUE, clue, error_and_entropy, error_and_variance, training_passes
from trueup.models import insert_dropout, mc_dropout
from trueup_studies.networks import CNN, MLP
from two_ranks import run_two_ranks

LEVELS = ("batch", "group", "sample")
levels = pytest.mark.parametrize("level", LEVELS)


def draws(*shape, seed=0, scale=2.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale)


def labels_of(*shape, classes=3, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, classes, shape))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


# The loss of errors and uncertainties


@given(
    m=st.integers(1, 50),
    level=st.sampled_from(LEVELS),
    alpha=st.floats(0.01, 1),
    group=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_it_equals_the_slow_loop(m, level, alpha, group, seed):
    error, uncertainty = draws(2, m, seed=seed).abs()
    result = clue(error, uncertainty, alpha=alpha, level=level, group=group)
    expected = reference.aligned(error.tolist(), uncertainty.tolist(), alpha, level, group)
    assert float(result) == pytest.approx(expected, rel=1e-9)


def test_groups_by_hand():
    """Sorted by u = 1, 1½ | 2, 4 the gaps are 1, −1 | 0, 2: of means 0 and 1 the square is ½, of each 1½, of all ¼."""
    uncertainty = torch.tensor([2.0, 1.0, 4.0, 1.5])
    error = uncertainty + torch.tensor([0.0, 1.0, 2.0, -1.0])
    for level, square in (("group", 0.5), ("sample", 1.5), ("batch", 0.25)):
        expected = (float(error.mean()) + square) / 2
        assert float(clue(error, uncertainty, alpha=0.5, level=level, group=2)) == pytest.approx(expected)


def test_levels_meet():
    error, uncertainty = draws(2, 40).abs()
    whole = clue(error, uncertainty, level="batch", alpha=0.3)
    torch.testing.assert_close(clue(error, uncertainty, level="group", group=40, alpha=0.3), whole)
    torch.testing.assert_close(clue(error[:9], uncertainty[:9], level="group"), clue(error[:9], uncertainty[:9]))
    each = clue(error, uncertainty, level="sample", alpha=0.3)
    torch.testing.assert_close(clue(error, uncertainty, level="group", group=1, alpha=0.3), each)


def test_alpha_by_default_depends_on_the_level():
    error, uncertainty = draws(2, 40).abs()
    for level, alpha in (("batch", 0.5), ("group", 0.5), ("sample", 0.9)):
        assert CLUE(level=level).alpha == alpha
        expected = clue(error, uncertainty, level=level, alpha=alpha)
        assert torch.equal(clue(error, uncertainty, level=level), expected)


@levels
def test_gradient_is_that_of_the_value(level):
    error, uncertainty = (draws(2, 40).abs()).requires_grad_()

    def loss(e, u):
        return clue(e, u, level=level, group=7)

    assert torch.autograd.gradcheck(loss, (error, uncertainty))


@levels
def test_detached_errors_learn_from_the_task_alone(level):
    error, uncertainty = (part.requires_grad_() for part in draws(2, 40).abs())
    free = torch.autograd.grad(clue(error, uncertainty, level=level), (error, uncertainty))
    held = torch.autograd.grad(clue(error, uncertainty, level=level, detach_error=True), (error, uncertainty))
    torch.testing.assert_close(held[0], torch.full((40,), (0.9 if level == "sample" else 0.5) / 40).double())
    assert not torch.allclose(held[0], free[0])
    torch.testing.assert_close(held[1], free[1])


def best_forecast(loss):
    """The q at which an expected loss is least."""
    result = minimize_scalar(lambda q: float(loss(torch.tensor(q, dtype=torch.float64))), bounds=(0.4, 0.95))
    return result.x


def pair_at(q, hits, rows):
    """Errors and entropies of forecasts q of class 1, `hits` of the rows being of that class."""
    y = (torch.arange(rows) < hits).to(torch.int64)
    return error_and_entropy(torch.stack([1 - q, q]).log().expand(1, rows, 2), y)


@pytest.mark.parametrize(
    ("alpha", "best"), [(1e-9, 0.5), (0.3, 0.563), (0.5, 0.626), (0.7, 0.693), (0.9, 0.761), (1.0, 0.8)]
)
def test_the_square_of_each_sample_is_biased(alpha, best):
    """Eight of ten rows are of class 1, so their mean loss is the expected loss at a true probability of 0.8."""
    assert best_forecast(lambda q: clue(*pair_at(q, 8, 10), alpha=alpha, level="sample")) == pytest.approx(
        best, abs=6e-4
    )


@pytest.mark.parametrize(("size", "best"), [(1, 0.626), (16, 0.783), (64, 0.796), (512, 0.7995)])
def test_the_bias_falls_with_the_size_of_a_batch(size, best):
    """The expectation over all batches, which have a binomial number of hits each."""
    hits = torch.arange(size + 1)
    weight = torch.from_numpy(binom.pmf(hits.numpy(), size, 0.8))

    def expected(q):
        (right, wrong), entropy = pair_at(q, 1, 2)
        error = (hits * right + (size - hits) * wrong) / size
        return sum(w * clue(e[None], entropy[:1]) for w, e in zip(weight, error, strict=True) if w > 1e-12)

    assert best_forecast(expected) == pytest.approx(best, abs=6e-4)


def test_simulated_batches_agree_with_the_arithmetic():
    """Batches of 16 drawn at 0.8: the least mean loss is near 0.783, with single samples near 0.626."""
    y = (np.random.default_rng(1).random((3000, 16)) < 0.8).sum(axis=1)

    def simulated(q, level):
        return np.mean([float(clue(*pair_at(q, k, 16), alpha=0.5, level=level)) for k in range(17)] @ np.eye(17)[:, y])

    assert best_forecast(lambda q: simulated(q, "batch")) == pytest.approx(0.783, abs=5e-3)
    assert best_forecast(lambda q: simulated(q, "sample")) == pytest.approx(0.626, abs=5e-3)


@pytest.mark.parametrize("alpha", [0, 0.0, -0.5, 1.5, math.nan])
def test_alpha_is_checked(alpha):
    error = torch.ones(3)
    for make in (lambda: clue(error, error, alpha=alpha), lambda: CLUE(alpha=alpha)):
        with pytest.raises(ValueError, match="alpha must lie above 0 and be at most 1, got"):
            make()
    if alpha == 0:
        with pytest.raises(ValueError, match="the uniform prediction optimal"):
            CLUE(alpha=0)


def test_options_are_checked():
    error = torch.ones(3)
    with pytest.raises(ValueError, match='level must be "batch", "group" or "sample", got \'all\''):
        clue(error, error, level="all")
    with pytest.raises(ValueError, match="level must be"):
        CLUE(level="all")
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        clue(error, error, group=0)
    with pytest.raises(ValueError, match="measure must be a function such as error_and_variance, got 'tokens'"):
        CLUE(measure="tokens")
    with pytest.raises(ValueError, match="passes must be at least 1, got 0"):
        CLUE(passes=0)
    with pytest.raises(ValueError, match="ramp must be a number of steps of at least 0, got -1"):
        CLUE(ramp=-1)


# Errors and uncertainties of samples


@given(passes=st.integers(1, 4), n=st.integers(1, 6), classes=st.integers(2, 4), seed=st.integers(0, 99))
def test_classified_equals_the_slow_loop(passes, n, classes, seed):
    samples, y = draws(passes, n, classes, seed=seed), labels_of(n, classes=classes, seed=seed)
    error, uncertainty = error_and_entropy(samples, y)
    expected = reference.forecast_of_passes(samples.tolist())
    np.testing.assert_allclose(error, [-math.log(row[0][k]) for row, k in zip(expected, y, strict=True)], atol=1e-9)
    np.testing.assert_allclose(uncertainty, [row[1] for row in expected], atol=1e-9)


def test_a_calibrated_forecast_has_the_error_it_expects():
    """Weighted by its own probabilities, the error of a forecast is its entropy."""
    samples = draws(4, 1, 5)
    probs = samples.softmax(dim=2).mean(dim=0)[0]
    error, uncertainty = error_and_entropy(samples.expand(4, 5, 5), torch.arange(5))
    torch.testing.assert_close((probs * error).sum(), uncertainty[0])


@pytest.mark.parametrize("classes", ["first", "last"])
@levels
def test_tokens_are_samples_and_masks_leave_out(classes, level):
    tokens, y = draws(3, 2, 4, 5), labels_of(2, 4, classes=5)
    given = tokens if classes == "last" else tokens.movedim(-1, 2)
    loss = CLUE(level=level, group=2, measure=partial(error_and_entropy, class_axis=classes, ignore_index=-1))
    kept = torch.tensor([[True, True, False, True], [False, True, False, True]])
    whole = CLUE(level=level, group=2)
    torch.testing.assert_close(loss.of_samples(given, y), whole.of_samples(tokens.reshape(3, 8, 5), y.reshape(-1)))
    expected = whole.of_samples(tokens[:, kept], y[kept])
    masked = given.clone().requires_grad_()
    result = loss.of_samples(masked, torch.where(kept, y, -1))
    torch.testing.assert_close(result, expected)
    result.backward()
    slope = masked.grad if classes == "last" else masked.grad.movedim(2, -1)
    assert (slope[:, ~kept] == 0).all()
    assert (slope[:, kept] != 0).all()


def test_tokens_must_say_where_their_classes_are():
    with pytest.raises(ValueError, match='class_axis must be "first"'):
        CLUE().of_samples(draws(3, 2, 4, 5), labels_of(2, 4))
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 4\)"):
        CLUE(measure=partial(error_and_entropy, class_axis="last")).of_samples(draws(3, 2, 4, 5), labels_of(2))
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2, got 0\.\.7"):
        CLUE().of_samples(draws(3, 2, 3), torch.tensor([0, 7]))


@levels
@pytest.mark.parametrize("kind", ["classes", "means", "variances"])
def test_gradients_of_samples(level, kind):
    samples, y = draws(3, 6, 4).requires_grad_(), labels_of(6)
    loss = CLUE(level=level, group=3)
    if kind != "classes":
        loss, y = (
            CLUE(level=level, group=3, measure=partial(error_and_variance, variance_head=kind == "variances")),
            draws(6, 4, seed=1),
        )
        y = y[:, :2] if kind == "variances" else y
    assert torch.autograd.gradcheck(lambda z: loss.of_samples(z, y), samples)


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_outputs_are_finite(level, dtype):
    rng = np.random.default_rng(0)
    outputs = torch.tensor(rng.choice([-1e4, 0.0, 1e4], size=(3, 40, 4)), dtype=dtype)
    for loss, y in (
        (CLUE(level=level), labels_of(40)),
        (CLUE(level=level, measure=error_and_variance), draws(40, 4)),
        (CLUE(level=level, measure=partial(error_and_variance, variance_head=True)), draws(40, 2)),
    ):
        z = outputs.clone().requires_grad_()
        result = loss.of_samples(z, y)
        result.backward()
        assert result.isfinite()
        assert z.grad.isfinite().all()
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@levels
def test_uniform_and_sure_right_predictions_are_aligned(level):
    y = labels_of(40, classes=4)
    uniform = torch.zeros(5, 40, 4, dtype=torch.float64)
    sure = (1e4 * nn.functional.one_hot(y, 4).double()).expand(5, 40, 4)
    for alpha in (0.1, 0.5, 1.0):
        loss = CLUE(alpha=alpha, level=level)
        assert float(loss.of_samples(uniform, y)) == pytest.approx(alpha * math.log(4))
        assert float(loss.of_samples(sure, y)) == pytest.approx(0, abs=1e-12)


@levels
def test_alpha_one_is_cross_entropy(level):
    z, y = draws(40, 4), labels_of(40, classes=4)
    z32 = z.clone().requires_grad_()
    CLUE(alpha=1, level=level).of_samples(z32[None], y).backward()
    z64 = z.clone().requires_grad_()
    nn.functional.cross_entropy(z64, y).backward()
    torch.testing.assert_close(z32.grad, z64.grad)


def test_regressed_by_hand():
    """Means 1 and 3 of a target 5: error 9, variance 1; with variances ln 2 each, 1 + ln 2."""
    for samples in (torch.tensor([[1.0], [3.0]]), torch.tensor([[[1.0]], [[3.0]]])):
        for targets in (torch.tensor([5.0]), torch.tensor([[5.0]]), torch.tensor([5])):
            assert [part.tolist() for part in error_and_variance(samples, targets)] == [[9.0], [1.0]]
    both = torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])
    error, uncertainty = error_and_variance(both, torch.tensor([5.0]), variance_head=True)
    assert error.tolist() == [9.0]
    assert uncertainty.item() == pytest.approx(1 + math.log(2), abs=1e-5)
    two = torch.stack([both[..., 0], both[..., 0] * 2], dim=2)
    assert [part.tolist() for part in error_and_variance(two, torch.tensor([[5.0, 4.0]]))] == [[9.0, 0.0], [1.0, 4.0]]


def test_targets_are_checked():
    with pytest.raises(ValueError, match=r"targets must have shape \(4,\) for samples \(3, 4, 1\), got \(3,\)"):
        error_and_variance(torch.zeros(3, 4, 1), torch.zeros(3))
    with pytest.raises(ValueError, match=r"targets must have shape \(4,\)"):
        error_and_variance(torch.zeros(3, 4, 2), torch.zeros(4, 2), variance_head=True)


def test_a_variance_head_learns_the_noise():
    """y = 0 + noise of variance 4, a network of two free numbers: CLUE alone at batch level finds mean and variance."""
    generator = torch.Generator().manual_seed(0)
    y = 2 * torch.randn(1000, generator=generator)
    free = torch.tensor([1.0, 0.0]).requires_grad_()
    optimiser = torch.optim.Adam([free], lr=0.1)
    loss = CLUE(measure=partial(error_and_variance, variance_head=True), passes=1)
    for _ in range(200):
        optimiser.zero_grad()
        loss.of_samples(free.expand(1, 1000, 2), y).backward()
        optimiser.step()
    error, uncertainty = error_and_variance(free.detach().expand(1, 1000, 2), y, variance_head=True)
    assert float(uncertainty[0]) == pytest.approx(float(error.mean()), rel=0.01)
    assert float(uncertainty[0]) == pytest.approx(4, rel=0.15)


# The step


def test_ramp_grows_over_its_steps_and_is_kept():
    samples, y = draws(3, 6, 4), labels_of(6)
    error, uncertainty = error_and_entropy(samples, y)
    loss = CLUE(alpha=0.2, ramp=4)

    def alpha_now():
        result = float(loss.of_samples(samples, y))
        square = float((error.mean() - uncertainty.mean()).square())
        return (result - square) / (float(error.mean()) - square)

    assert [round(alpha_now(), 6) for _ in range(3)] == [1.0, 0.8, 0.6]
    loss.eval()
    assert [round(alpha_now(), 6) for _ in range(2)] == [0.4, 0.4]
    resumed = CLUE(alpha=0.2, ramp=4)
    resumed.load_state_dict(loss.state_dict())
    loss = pickle.loads(pickle.dumps(copy.deepcopy(resumed)))
    assert [round(alpha_now(), 6) for _ in range(3)] == [0.4, 0.2, 0.2]


def test_a_step_is_the_passes_written_out():
    """The same masks, drawn from the same state, and everything by hand."""
    model, x, y = MLP(3, inputs=4, hidden=(8, 8), dropout=0.4).double(), draws(6, 4), labels_of(6)
    torch.manual_seed(3)
    CLUE(passes=5)(model, x, y).backward()
    result = gradients(model)
    model.zero_grad()
    torch.manual_seed(3)
    probs = model.head(model.trunk(x).repeat(5, 1)).reshape(5, 6, 3).softmax(dim=2).mean(dim=0)
    error = -probs[torch.arange(6), y].log().mean()
    entropy = -(probs * probs.log()).sum(dim=1).mean()
    (0.5 * error + 0.5 * (error - entropy) ** 2).backward()
    for one, other in zip(result, gradients(model), strict=True):
        torch.testing.assert_close(one, other)


def test_batch_norm_moves_once():
    model, x = CNN(dropout=0.4).train(), draws(6, 3, 8, 8).float()
    twin = copy.deepcopy(model)
    samples = training_passes(model, x, 5)
    twin(x)
    assert samples.shape == (5, 6, 10)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)
    whole = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    training_passes(whole, draws(6, 4).float(), 5)
    assert whole[1].num_batches_tracked == 1


def test_the_network_stays_as_it_is_and_may_have_a_forward_of_its_own():
    model, x = CNN(dropout=0.4).train(), draws(6, 3, 8, 8).float()
    training_passes(model, x)
    assert "forward" not in vars(model)
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    model, calls = CNN(dropout=0.4), []

    def own(images):
        calls.append(len(images))
        return CNN.forward(model, images) * 2

    model.forward = own
    training_passes(model, x, 3)
    assert model.forward is own
    assert calls == [1, 18]  # once to compare it with its parts, which it is not made of
    with pytest.raises(RuntimeError):
        training_passes(model, x[:, :1])
    assert model.forward is own


def test_only_the_head_repeats_with_gradients_through_all():
    model, x = CNN(dropout=0.4), draws(6, 3, 8, 8).float()
    rows = []
    model.trunk.register_forward_hook(lambda *a: rows.append(("trunk", len(a[2]))))
    model.head.register_forward_hook(lambda *a: rows.append(("head", len(a[2]))))
    training_passes(model, x, 5)
    rows.clear()
    samples = training_passes(model, x, 5)
    assert rows == [("trunk", 6), ("head", 30)]
    for one in samples:
        slope = torch.autograd.grad(one.sum(), model.trunk[0].weight, retain_graph=True)[0]
        assert (slope != 0).any()


def test_without_dropout_one_pass_is_deterministic_and_more_are_refused():
    model, x, y = MLP(3, inputs=4), draws(6, 4).float(), labels_of(6)
    state = torch.get_rng_state()
    loss = CLUE(passes=1)(model, x, y)
    assert torch.equal(loss, CLUE(passes=1)(model, x, y))
    assert torch.equal(state, torch.get_rng_state())
    for network in (model, MLP(3, inputs=4, dropout=0.5).eval()):
        with pytest.raises(
            ValueError, match="dropout with p above 0, in training mode, for 5 passes to differ, got none"
        ):
            CLUE()(network, x, y)
    assert CLUE()(insert_dropout(model, 0.3), x, y).isfinite()


def test_inputs_by_keyword_and_outputs_with_logits():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.drop, self.out = nn.Embedding(9, 8), nn.Dropout(0.3), nn.Linear(8, 9)

        def forward(self, input_ids, attention_mask=None):
            return {"logits": self.out(self.drop(self.embed(input_ids)))}

    ids = labels_of(2, 5, classes=9)
    targets = torch.where(torch.arange(5) < 3, ids, -100)
    model = Language()
    CLUE(measure=partial(error_and_entropy, class_axis="last"))(
        model, {"input_ids": ids, "attention_mask": torch.ones(2, 5)}, targets
    ).backward()
    assert all((p.grad != 0).any() for p in model.parameters())
    measured = (
        CLUE(measure=partial(error_and_entropy, class_axis="last"))
        .eval()
        .of_samples(mc_dropout(model, {"input_ids": ids}), targets)
    )
    assert measured.isfinite()
    assert not measured.requires_grad


def test_autocast_trains():
    model, x, y = MLP(3, inputs=4, hidden=(8,), dropout=0.4), draws(6, 4).float(), labels_of(6)
    for _ in range(2):  # the first finds out that it has a head
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = CLUE()(model, x, y)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(g.isfinite().all() and (g != 0).any() for g in gradients(model))


def test_it_trains():
    """Two overlapping classes: the loss falls, and uncertainty comes to equal the error."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (512,), generator=generator)
    x = torch.randn(512, 2, generator=generator) + y[:, None]
    model, loss = MLP(2, inputs=2, hidden=(32,), dropout=0.2), CLUE(level="group", ramp=10)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(150):
            optimiser.zero_grad()
            loss(model, x, y).backward()
            optimiser.step()
    error, uncertainty = error_and_entropy(mc_dropout(model, x, 20), y)
    assert error.mean() < 0.55
    assert abs(error.mean() - uncertainty.mean()) < 0.05


# Two processes

SHARES = (slice(0, 8), slice(8, 16))


class Masked(nn.Module):
    """Drops what it is told to: the same in one process as in two."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 6).double()
        self.out = nn.Linear(6, 3).double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(draws(*parameter.shape, seed=number, scale=0.5))

    def forward(self, x, mask):
        return self.out(torch.relu(self.trunk(x)) * mask)


def data(share=slice(None)):
    mask = (draws(5, 16, 6, seed=7) > -0.5).double()
    y = labels_of(16)
    y[2:5] = -100  # more tokens are left out on one rank than on the other
    return draws(16, 4, seed=5)[share], y[share], mask[:, share]


def distributed_steps(share, wrap):
    """Gradients at each level of sampled outputs, and a few steps of training in one pass."""
    x, y, mask = data(share)
    result = {}
    for level in LEVELS:
        model = wrap(Masked())
        samples = model(x.repeat(5, 1), mask.reshape(-1, 6)).reshape(5, len(x), 3)
        CLUE(level=level, alpha=0.3).of_samples(samples, y).backward()
        result[level] = gradients(model)
    model = wrap(MLP(3, inputs=4, hidden=(8,)).double())
    optimiser, loss, curve = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), CLUE(passes=1), []
    for _ in range(20):
        optimiser.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimiser.step()
        curve.append(float(value.detach()))
    result["curve"] = curve
    model = wrap(MLP(3, inputs=4, hidden=(8,), dropout=0.4).double())
    for _ in range(3):
        model.zero_grad()
        CLUE()(model, x, y).backward()
    result["dropped"] = gradients(model)
    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of two processes."""
    return run_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


def test_two_processes_are_one_with_the_doubled_batch(two):
    one = distributed_steps(slice(None), lambda model: model)
    for result in two:
        for expected, gradient in zip(one["batch"], result["batch"], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result["curve"], one["curve"], rtol=1e-9)
    assert one["curve"][-1] < one["curve"][0]


def test_other_levels_and_dropout_leave_both_with_the_same_gradients(two):
    for name in ("group", "sample", "dropped"):
        for a, b in zip(two[0][name], two[1][name], strict=True):
            assert torch.equal(a, b)
            assert (a != 0).any()


def test_fabric_wraps():
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(CNN(dropout=0.4))
    rows = []
    model.module.head.register_forward_hook(lambda *a: rows.append(len(a[2])))
    loss = CLUE()(model, draws(6, 3, 8, 8).float(), labels_of(6))
    fabric.backward(loss)
    assert rows == [1, 1, 30]
    assert all((p.grad != 0).any() for p in model.parameters())


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2, timeout=timedelta(seconds=600)
    )
    torch.manual_seed(number)
    torch.save(distributed_steps(SHARES[number], nn.parallel.DistributedDataParallel), folder / f"{number}.pt")
    dist.barrier()
    os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there


def test_a_trunk_that_draws_in_training_alone_is_run_no_oftener_at_first_than_later():
    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return nn.functional.dropout(self.norm(x), 0.3, self.training)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Trunk()
            self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))

        def forward(self, x):
            return self.head(self.trunk(x))

    torch.manual_seed(0)
    net = Net().train()
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    result = []
    for _ in range(2):  # the first asks how the network is divided
        net.trunk.norm.reset_running_stats()
        torch.manual_seed(1)
        result.append((CLUE()(net, x, y).item(), net.trunk.norm.running_mean.clone(), torch.get_rng_state()))
    assert result[0][0] == result[1][0]
    assert torch.equal(result[0][1], result[1][1])
    assert torch.equal(result[0][2], result[1][2])
    assert int(net.trunk.norm.num_batches_tracked) == 1


def test_a_network_may_be_called_by_position_and_by_name():
    net = MLP(3, inputs=4, dropout=0.3)
    x = torch.ones(5, 4)
    assert mc_dropout(net, x, 2).shape == mc_dropout(net, {"inputs": x}, 2).shape == (2, 5, 3)


SHARES = (0.6, 0.8, 0.95)


def rest_point(p, alpha, **options):
    """The probability at which gradient descent on 20 rows, a share p of them of class 1, comes to rest."""
    labels = (torch.arange(20) < round(20 * p)).long()
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        logits = torch.stack([torch.zeros_like(theta), theta]).expand(1, 20, 2)
        [slope] = torch.autograd.grad(clue(*error_and_entropy(logits, labels), alpha=alpha, **options), theta)
        with torch.no_grad():
            theta -= 5 * slope
    return float(torch.sigmoid(theta.detach()))


@pytest.mark.parametrize("alpha", [k / 10 for k in range(1, 10)])
@pytest.mark.parametrize("p", SHARES)
def test_the_consistent_form_recovers_the_true_probability(p, alpha):
    assert rest_point(p, alpha, level="sample", detach_error=True) == pytest.approx(p, abs=0.01)


def test_the_plain_form_is_underconfident():
    assert rest_point(0.8, 0.5, level="sample") == pytest.approx(0.626, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_consistent_form_recovers_a_variance(alpha):
    error = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(1.5).square()
    raw = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        loss = clue(error, raw.exp().expand(2000), alpha=alpha, level="sample", detach_error=True)
        [slope] = torch.autograd.grad(loss, raw)
        with torch.no_grad():
            raw -= 0.1 * slope
    assert float(raw.detach().exp()) == pytest.approx(float(error.mean()), rel=1e-3)
