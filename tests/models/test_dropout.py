"""Monte-Carlo dropout leaves no trace, repeats no more than it must, and its numbers are those of slow loops."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference
from trueup.losses import CLUE, training_passes
from trueup.models import (
    dropout,
    insert_dropout,
    mc_dropout,
    moments,
    mutual_information,
    predictive_entropy,
    probability_variance,
)
from trueup.models.batches import Batch
from trueup_studies.networks import CNN, MLP, resnet8, wrn16x4

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Counted(nn.Module):
    """Remembers how many rows it was asked, each time."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.rows = []

    def forward(self, x):
        self.rows.append(len(x))
        return self.inside(x)


class Stranger(nn.Module):
    """A network without trunk and head, with batch-norm behind its dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 16), nn.BatchNorm1d(16)
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.layers(x))


def samples_of(passes, n, classes, scale=2.0, seed=0):
    return np.random.default_rng(seed).normal(size=(passes, n, classes)) * scale


def randomness():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002


# The passes


@pytest.mark.parametrize("make", [CNN, resnet8, wrn16x4], ids=["cnn", "resnet", "wide"])
def test_samples_differ_between_passes_and_depend_on_the_seed_alone(make):
    net = make(dropout=0.4)
    result = mc_dropout(net, X, 4, seed=1)
    assert result.shape == (4, 6, 10)
    assert not result.requires_grad
    assert len(result.unique(dim=0)) == 4
    torch.rand(7)
    assert torch.equal(result, mc_dropout(net, X, 4, seed=1))
    assert not torch.equal(result, mc_dropout(net, X, 4, seed=2))


def test_a_generator_draws_anew_each_time():
    net, rng = CNN(dropout=0.4), np.random.default_rng(3)
    one, other = mc_dropout(net, X, 2, seed=rng), mc_dropout(net, X, 2, seed=rng)
    assert not torch.equal(one, other)
    assert torch.equal(one, mc_dropout(net, X, 2, seed=np.random.default_rng(3)))
    assert torch.equal(mc_dropout(net, X, 2, seed=(1, 2)), mc_dropout(net, X, 2, seed=(1, 2)))


@pytest.mark.parametrize("fails", [False, True])
def test_network_and_random_states_are_left_as_they_were(fails):
    net = CNN(dropout=0.4).train()
    net.trunk[1].eval()  # a mode of its own
    net(X).sum().backward()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    grads = [p.grad.clone() for p in net.parameters()]
    torch.manual_seed(5)
    states, fast = randomness(), torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises(RuntimeError):
            mc_dropout(net, torch.ones(2, 7, 8, 8))
    else:
        mc_dropout(net, X)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert all(p.requires_grad and torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    torch_state, numpy_state, python_state = randomness()
    assert torch.equal(torch_state, states[0])
    assert np.array_equal(numpy_state, states[1])
    assert python_state == states[2]
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert "forward" not in vars(net)


def test_only_dropout_is_switched_on():
    """With batch-norm in training mode a row would depend on its batch."""
    net = Stranger()
    for _ in range(3):
        net(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) + 3)
    result = mc_dropout(net, torch.full((5, 4), 2.0), 400)
    net.eval()
    off = net(torch.full((1, 4), 2.0)).detach()
    spread = result.std(dim=(0, 1)) / (result.shape[0] * result.shape[1]) ** 0.5
    assert ((result.mean(dim=(0, 1)) - off).abs() < 5 * spread).all()  # no nonlinearity follows the dropout


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_every_kind_of_dropout(kind):
    net = nn.Sequential(nn.Unflatten(1, (4, 2)), kind(0.5), nn.Flatten())
    assert len(mc_dropout(net, torch.ones(3, 8), 6).unique(dim=0)) > 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.3, batch_first=True),
    ],
    ids=["lstm", "attention"],
)
def test_dropout_inside_of_torch_layers(layer):
    """In evaluation mode torch's attention has a fast path that passes over its dropout layers."""
    result = mc_dropout(layer, torch.ones(3, 5, 8), 4)
    assert result.shape == (4, 3, 5, 8)
    assert len(result.unique(dim=0)) == 4


def test_attention_drops_by_its_own_probability():
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    assert len(mc_dropout(attention, (x, x, x), 4).unique(dim=0)) == 4


def test_the_trunk_runs_once():
    net = CNN(dropout=0.4)
    expected = mc_dropout(net, X, 10, seed=1)
    net.trunk, net.head = Counted(net.trunk), Counted(net.head)
    mc_dropout(net, X, 1)  # after which it is known to be its head after its trunk
    net.trunk.rows, net.head.rows = [], []
    assert torch.equal(mc_dropout(net, X, 10, seed=1), expected)
    assert net.trunk.rows == [6]
    assert net.head.rows == [60]


def test_memory_bounds_what_goes_through_at_once():
    net = CNN(dropout=0.4)
    net.head = Counted(net.head)
    size = 6 * 128 * 4  # bytes of the features
    mc_dropout(net, X, 1)
    for memory, rows in ((0, [6] * 5), (size, [6] * 5), (2 * size, [12, 12, 6]), (5 * size, [30])):
        net.head.rows = []
        assert mc_dropout(net, X, 5, memory=memory).shape == (5, 6, 10)
        assert net.head.rows == rows


def test_passes_one_by_one_have_the_same_law():
    net = MLP(1, inputs=4, hidden=(30,), dropout=0.5)
    x = torch.ones(1, 4)
    one, other = (mc_dropout(net, x, 2000, seed=0, memory=m)[:, 0, 0] for m in (0, 2**25))
    assert abs(one.mean() - other.mean()) < 5 * (one.std() + other.std()) / 2000**0.5
    assert abs(one.std() / other.std() - 1) < 0.15


@pytest.mark.parametrize("where", ["input", "dropout", "names"])
def test_a_network_that_is_not_its_head_after_its_trunk_is_asked_whole(where):
    class Scaled(CNN):
        def forward(self, images):
            return super().forward(images * 100)

    net = Scaled(dropout=0.4) if where == "input" else CNN(dropout=0.4)
    if where == "dropout":
        net.trunk = nn.Sequential(nn.Dropout(0.3), net.trunk)
    if where == "names":
        net = Counted(net)
        net.trunk, net.head = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.zeros_like(X) if where == "input" else X  # zeros would not tell them apart
    mc_dropout(net, x, 2)
    result = mc_dropout(net, X, 3, seed=4, memory=0)
    with torch.no_grad():
        for module in net.modules():
            module.training = isinstance(module, nn.Dropout)
        torch.manual_seed(int(np.random.default_rng(4).integers(2**63)))
        expected = torch.stack([net(X) for _ in range(3)])
    torch.testing.assert_close(result, expected)


def test_dropout_put_into_the_trunk_later_is_noticed():
    net = CNN(dropout=0.4)
    mc_dropout(net, X, 2)
    net.trunk = nn.Sequential(net.trunk, nn.Dropout(0.9))
    net.head[0].p = net.head[3].p = 0.0
    assert len(mc_dropout(net, X, 5).unique(dim=0)) == 5


def test_inputs_are_a_tensor_a_tuple_a_mapping_or_a_batch():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x, scale):
            return {"logits": self.drop(x) * scale}

    x, scale = torch.ones(3, 8), torch.full((1,), 3.0)
    batch = Batch((x,), {"scale": scale}, torch.zeros(3))
    result = [mc_dropout(Two(), given, 4) for given in ((x, scale), {"x": x, "scale": scale}, batch)]
    assert all(torch.equal(one, result[0]) for one in result)
    assert set(result[0].unique().tolist()) == {0.0, 6.0}
    assert len(result[0].unique(dim=0)) == 4


def test_dropout_in_place_leaves_the_inputs():
    net, x = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Flatten()), torch.ones(3, 8)
    for memory in (0, 2**25):
        assert len(mc_dropout(net, x, 4, memory=memory).unique(dim=0)) == 4
        assert (x == 1).all()


def test_no_rows():
    net = MLP(3, inputs=4, dropout=0.5)
    assert mc_dropout(net, torch.empty(0, 4), 2).shape == (2, 0, 3)
    assert len(mc_dropout(net, torch.ones(1, 4), 2).unique(dim=0)) == 2
    assert predictive_entropy(np.zeros((2, 0, 3))).shape == (0,)


def test_errors_say_what_was_wanted():
    with pytest.raises(ValueError, match="model must have a dropout layer with p above 0, got none; insert_dropout"):
        mc_dropout(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="got 2 with p = 0"):
        mc_dropout(CNN(), X)
    with pytest.raises(ValueError, match="passes must be at least 1, got 0"):
        mc_dropout(CNN(dropout=0.5), X, 0)
    unused = nn.Linear(2, 2)
    unused.extra = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="model must use its dropout layers"):
        mc_dropout(unused, torch.ones(1, 2))
    with pytest.raises(ValueError, match="output must have a row for each input, got 1 for 6"):
        mc_dropout(nn.Sequential(nn.Dropout(0.5), nn.Flatten(0), nn.Unflatten(0, (1, -1))), torch.ones(2, 4), 3)


# Dropout put in


def test_insert_dropout_keeps_the_network_and_its_weights():
    net = resnet8(4).train()
    result = insert_dropout(net, 0.3)
    assert not any(hasattr(m, "dropout") for m in net.modules() if isinstance(m, nn.Linear))
    assert list(result.state_dict()) == list(net.state_dict())
    assert result.linear.dropout.p == 0.3
    assert result.linear.dropout.training
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(result.eval()(images), net.eval()(images))
    assert len(mc_dropout(result, images, 4).unique(dim=0)) == 4
    assert insert_dropout(net, 0.3, in_place=True) is net
    assert net.linear.dropout.p == 0.3
    assert len(mc_dropout(copy.deepcopy(net), images, 4).unique(dim=0)) == 4


def test_insert_dropout_before_several_or_named_layers():
    net = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def dropping(result):
        return [name for name, module in result.named_modules() if isinstance(module, nn.Dropout)]

    assert dropping(insert_dropout(net, 0.5)) == ["4.dropout"]
    assert dropping(insert_dropout(net, 0.5, layers=2)) == ["2.dropout", "4.dropout"]
    assert dropping(insert_dropout(net, 0.5, layers=["0"])) == ["0.dropout"]
    again = insert_dropout(insert_dropout(net, 0.5), 0.25)
    assert again[4].dropout.p == 0.25
    assert len(again[4]._forward_pre_hooks) == 1


def test_insert_dropout_passes_attention_by():
    """Its output layer is never called, so dropout there would do nothing."""
    net = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    assert hasattr(insert_dropout(net, 0.5)[0], "dropout")


def test_insert_dropout_errors():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for p in (0, 1, -0.1):
        with pytest.raises(ValueError, match="p must lie between 0 and 1, got"):
            insert_dropout(net, p)
    for layers in (0, 3, [], ["1"]):
        with pytest.raises(ValueError, match="layers must be one or more of 0, 2, or their number, got"):
            insert_dropout(net, 0.5, layers=layers)
    with pytest.raises(ValueError, match="must have a linear or convolutional layer, got none in"):
        insert_dropout(nn.ReLU(), 0.5)


# The numbers


@given(
    passes=st.integers(1, 5),
    n=st.integers(1, 6),
    classes=st.integers(2, 5),
    scale=st.sampled_from([0.02, 2.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_numbers_equal_the_slow_loop(passes, n, classes, scale, seed):
    samples = samples_of(passes, n, classes, scale, seed)
    expected = reference.forecast_of_passes(samples)
    for function, at in ((predictive_entropy, 1), (mutual_information, 2), (probability_variance, 3)):
        result = function(samples)
        assert isinstance(result, np.ndarray)
        np.testing.assert_allclose(result, [row[at] for row in expected], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(function(torch.from_numpy(samples)), result)
        np.testing.assert_allclose(function(samples.tolist()), result)


@pytest.mark.parametrize("function", [predictive_entropy, mutual_information, probability_variance])
def test_tokens_have_a_number_each(function):
    tokens = samples_of(3, 2 * 4, 5).reshape(3, 2, 4, 5)
    expected = function(tokens.reshape(3, 8, 5)).reshape(2, 4)
    np.testing.assert_allclose(function(tokens, class_axis="last"), expected)
    np.testing.assert_allclose(function(np.moveaxis(tokens, -1, 2), class_axis="first"), expected)
    with pytest.raises(
        ValueError, match=r'class_axis must be "first" .* or "last" .* for samples \(3, 2, 4, 5\), got No'
    ):
        function(tokens)


def test_by_hand():
    """Passes that are sure of opposite classes: all doubt is disagreement. Passes that agree: none is."""
    opposite = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])
    assert predictive_entropy(opposite).item() == pytest.approx(np.log(2))
    assert mutual_information(opposite).item() == pytest.approx(np.log(2))
    assert probability_variance(opposite).item() == pytest.approx(0.5)
    agreed = torch.zeros(3, 1, 4)
    assert predictive_entropy(agreed).item() == pytest.approx(np.log(4))
    assert mutual_information(agreed).item() == 0
    assert probability_variance(agreed).item() == 0


@pytest.mark.parametrize("function", [predictive_entropy, mutual_information, probability_variance])
def test_extremes_gradients_and_half_precision(function):
    samples = torch.tensor(samples_of(3, 4, 3) * 1e4, dtype=torch.float32).requires_grad_()
    function(samples).sum().backward()
    assert samples.grad.isfinite().all()
    x = torch.tensor(samples_of(3, 4, 3)).requires_grad_()
    assert torch.autograd.gradcheck(function, x)
    half = torch.tensor(samples_of(3, 4, 3)).bfloat16()
    assert torch.equal(function(half), function(half.float()))


def test_samples_are_checked():
    with pytest.raises(
        ValueError, match=r"samples must be real of shape \(passes, n, K\) with .* got torch.float64, \(3, 4\)"
    ):
        predictive_entropy(np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"got torch.float32, \(0, 2, 3\)"):
        predictive_entropy(torch.zeros(0, 2, 3))
    with pytest.raises(ValueError, match="got torch.int64"):
        predictive_entropy(torch.zeros(1, 2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="samples must be finite, got nan"):
        mutual_information(np.full((1, 1, 2), np.nan))
    with pytest.raises(ValueError, match="samples must have at least 2 classes"):
        mutual_information(np.zeros((1, 1, 1)))


def test_moments_without_and_with_a_variance_head():
    means, raw = samples_of(5, 4, 2), samples_of(5, 4, 2, seed=1)
    result = moments(means)
    np.testing.assert_allclose(result.mean, means.mean(axis=0))
    np.testing.assert_allclose(result.variance, means.var(axis=0))
    assert (result.within == 0).all()
    both = moments(np.concatenate([means, raw], axis=2), variance_head=True)
    np.testing.assert_allclose(both.between, result.between)
    np.testing.assert_allclose(both.variance, means.var(axis=0) + np.log1p(np.exp(raw)).mean(axis=0) + 1e-6)


def test_moments_are_those_of_the_mixture():
    """The law of total variance, by drawing from it."""
    samples = samples_of(4, 1, 2)
    result = moments(samples, variance_head=True)
    std = np.sqrt(np.log1p(np.exp(samples[:, 0, 1])) + 1e-6)
    rng = np.random.default_rng(0)
    which = rng.integers(0, 4, 400_000)
    draws = rng.normal(samples[which, 0, 0], std[which])
    assert result.mean.item() == pytest.approx(draws.mean(), abs=0.02)
    assert result.variance.item() == pytest.approx(draws.var(), rel=0.02)


def test_moments_of_one_target_are_vectors():
    means = samples_of(5, 4, 1)
    for samples in (means, means[:, :, 0]):
        assert moments(samples).mean.shape == (4,)
    assert moments(np.concatenate([means, means], axis=2), variance_head=True).variance.shape == (4,)
    assert moments(means[:1]).between.tolist() == [0] * 4
    assert moments(torch.tensor(means).requires_grad_()).variance.requires_grad


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_moments_at_extremes(extreme):
    samples = torch.full((3, 2, 2), extreme).requires_grad_()
    result = moments(samples, variance_head=True).variance
    assert result.isfinite().all()
    assert (result > 0).all()
    result.sum().backward()
    assert samples.grad.isfinite().all()


def test_moments_are_checked():
    for samples in (np.zeros((2, 3)), np.zeros((2, 3, 3))):
        with pytest.raises(
            ValueError, match=r"samples must be real of shape \(passes, n, 2·targets\), got torch.float64"
        ):
            moments(samples, variance_head=True)
    with pytest.raises(ValueError, match=r"shape \(passes, n\) or \(passes, n, targets\), got torch.float64, \(3,\)"):
        moments(np.zeros(3))


def test_insert_dropout_into_a_single_layer_and_into_subclasses():
    class Own(nn.Linear):
        pass

    alone = insert_dropout(nn.Linear(3, 2), 0.4)
    assert len(mc_dropout(alone, torch.ones(2, 3), 5).unique(dim=0)) > 1
    net = insert_dropout(nn.Sequential(nn.Linear(3, 3), Own(3, 2)), 0.4, layers="1")
    assert not hasattr(net[0], "dropout")
    assert net[1].dropout.p == 0.4


def test_inputs_may_be_numpy_arrays():
    net = MLP(2, inputs=3, dropout=0.3)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    assert torch.equal(mc_dropout(net, x, 3), mc_dropout(net, torch.from_numpy(x), 3))
    assert torch.equal(mc_dropout(net, {"inputs": x}, 3), mc_dropout(net, {"inputs": torch.from_numpy(x)}, 3))


def test_wrappers_are_taken_off():
    net = MLP(2, inputs=3, dropout=0.3)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    x = torch.ones(4, 3)
    assert torch.equal(mc_dropout(averaged, x, 3), mc_dropout(net, x, 3))


def late(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    )


def rows_through(layer, call):
    """The numbers of rows that a layer gets while `call` runs."""
    sizes = []
    handle = layer.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    call()
    handle.remove()
    return sizes


@pytest.mark.parametrize("run", [mc_dropout, training_passes])
def test_layers_before_a_late_dropout_run_once(run):
    net, x = late().train(run is training_passes), torch.randn(7, 4)
    run(net, x, 5)  # the first call tests the split on one row
    assert rows_through(net[0], lambda: run(net, x, 5)) == [7]
    assert rows_through(net[2][2], lambda: run(net, x, 5)) == [35]


def test_a_split_changes_no_sample(monkeypatch):
    net, x = late().eval(), torch.randn(7, 4)
    split = mc_dropout(net, x, 5, seed=3)
    monkeypatch.setattr(dropout, "_trace_halves", lambda model: None)
    dropout._traced.clear()
    torch.testing.assert_close(split, mc_dropout(net, x, 5, seed=3))


def test_a_layer_put_in_afterwards_is_used():
    net, x = late().eval(), torch.randn(7, 4)
    mc_dropout(net, x, 5)
    net[0] = nn.Linear(4, 32)
    net[0].weight.data.zero_()
    net[0].bias.data.zero_()
    torch.testing.assert_close(mc_dropout(net, x, 5), mc_dropout(net, torch.zeros(7, 4), 5))


class Residual(nn.Module):
    """Two tensors pass the dropout: its input too."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(x + self.dropout(x)) + x.sum(dim=1, keepdim=True)


class Noisy(nn.Module):
    """Draws a constant that tracing would keep."""

    def __init__(self):
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.dropout(x * 2 + torch.randn(4)))


def test_networks_that_draw_or_branch_keep_their_own_passes():
    x = torch.randn(7, 4)
    for network in (Residual().eval(), Noisy().eval()):
        samples = mc_dropout(network, x, 5, memory=0)
        assert samples.shape == (5, 7, 3)
        assert len(samples.unique(dim=0)) == 5
    noisy = Noisy().eval()
    assert rows_through(noisy.layer, lambda: mc_dropout(noisy, x, 5, memory=0)).count(7) == 5


def test_five_passes_cost_little_where_the_dropout_is_late():
    """CPU seconds of a training step: at most 1.5 times those of cross-entropy."""
    torch.manual_seed(0)
    front = (
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
    )
    net = nn.Sequential(*front, nn.Linear(64 * 256, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    clue, plain = CLUE(passes=5), nn.CrossEntropyLoss()

    def seconds(step):
        step(), step()
        times = []
        for _ in range(7):
            start = time.process_time()
            step().backward()
            times.append(time.process_time() - start)
        return min(times)

    one, five = seconds(lambda: plain(net(x), y)), seconds(lambda: clue(net, x, y))
    print(f"cross-entropy {one:.4f} s, CLUE of five passes {five:.4f} s")
    assert five < 1.5 * one
