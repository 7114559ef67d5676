"""The one call: what it takes, what it gives back, and that it leaves everything as it was."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from flat_options import clamp_with as clamp
from trueup import metrics
from trueup.calibrators import Temperature
from trueup.clamping import RECIPES, Clamped, FitRecord, Shift
from trueup.clamping.published_recipes import code, paper
from trueup.models import Calibrated, collect

SHORT = {**RECIPES, "paper": partial(paper, epochs=2, batch_size=64), "code": partial(code, epochs=2, batch_size=64)}


def network():
    """It has everything that a careless fit could disturb."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    model[0].weight.requires_grad = False
    model[1].eval()
    model[4].weight.grad = torch.ones_like(model[4].weight)
    model[2].register_forward_hook(lambda module, inputs, output: None)
    return model


def sample(n=150):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    with torch.no_grad():
        return x, torch.multinomial(torch.softmax(3 * network().eval()(x), dim=1), 1, generator=generator)[:, 0]


def loader(n=150, size=64):
    x, y = sample(n)
    return list(zip(torch.split(x, size), torch.split(y, size), strict=True))


class Snapshot:
    """The state of a model and of the global random generators."""

    def __init__(self, model):
        self.model = model
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.modes = [module.training for module in model.modules()]
        self.expected = [p.requires_grad for p in model.parameters()]
        self.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.hooks = [list(module._forward_hooks.values()) for module in model.modules()]
        self.randomness = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002

    def check(self):
        model, now = self.model, self.model.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in self.state.items())
        assert [module.training for module in model.modules()] == self.modes
        assert [p.requires_grad for p in model.parameters()] == self.expected
        for p, grad in zip(model.parameters(), self.grads, strict=True):
            assert p.grad is None if grad is None else torch.equal(p.grad, grad)
        assert [list(module._forward_hooks.values()) for module in model.modules()] == self.hooks
        assert torch.equal(torch.get_rng_state(), self.randomness[0])
        assert np.array_equal(np.random.get_state()[1], self.randomness[1])  # noqa: NPY002
        assert random.getstate() == self.randomness[2]


@pytest.mark.filterwarnings("ignore:Theorem 3.2", "ignore:temperature has no optimum")
@pytest.mark.parametrize("name", SHORT)
def test_the_callers_model_is_untouched(name):
    model = network()
    before = Snapshot(model)
    shuffled = torch.utils.data.DataLoader(list(zip(*sample(), strict=True)), batch_size=32, shuffle=True)
    fitted = clamp(model, shuffled, recipe=SHORT[name], box=(-9, 9), seed=3, progress=False)
    before.check()
    assert fitted.model is model
    assert isinstance(fitted, Clamped)
    assert fitted.fit_record.recipe == name


class Broken(nn.Module):
    """Fails at its n-th call."""

    def __init__(self, model, calls, error):
        super().__init__()
        self.model, self.left, self.error = model, calls, error

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.model(x)


@pytest.mark.filterwarnings("ignore:Theorem 3.2", "ignore:temperature has no optimum")
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", [0, 2, 5, 15])
@pytest.mark.parametrize("name", SHORT)
def test_the_callers_model_is_untouched_when_the_fit_fails(name, calls, error):
    model = Broken(network(), calls, error)
    before = Snapshot(model)
    try:
        clamp(model, loader(), recipe=SHORT[name], penalty=0.01, box=(-9, 9), progress=False)
    except type(error):
        pass
    else:
        assert calls == 15  # more than some recipes need
    before.check()


class InHalf(nn.Module):
    """Takes and gives half precision, though it multiplies matrices in single."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_result_is_a_network_of_the_same_kind(dtype):
    model = network().to(dtype) if dtype.itemsize > 2 else InHalf(network())
    x, y = sample()
    fitted = clamp(model, [(x.to(dtype), y)], penalty=0.01, progress=False)
    assert isinstance(fitted, Calibrated)
    assert isinstance(fitted.before, Shift)
    assert isinstance(fitted.after, Temperature)
    assert isinstance(fitted.fit_record, FitRecord)
    z = fitted.eval()(x.to(dtype))
    assert (z.dtype, z.shape) == (dtype, (150, 3))
    assert not fitted.before.delta.requires_grad
    with torch.no_grad():
        expected = model((x.to(dtype) + fitted.before.delta).to(dtype)) / fitted.fit_record.temperature
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(z, expected.to(dtype), **close)
    assert copy.deepcopy(fitted).fit_record == fitted.fit_record


def test_models_with_keywords_and_outputs_of_their_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, ids=None, values=None):
            return {"logits": self.inner(values), "ids": ids}

    x, _ = sample()
    batches = [{"ids": torch.arange(len(a)), "values": a, "labels": b} for a, b in loader()]
    fitted = clamp(Model(), batches, penalty=0.01, progress=False).eval()
    output = fitted(ids=torch.arange(3), values=x[:3])
    assert torch.equal(output["ids"], torch.arange(3))
    plain = clamp(Model().inner, loader(), penalty=0.01, progress=False).eval()
    torch.testing.assert_close(output["logits"], plain(x[:3]))


def test_tokens_get_one_vector():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 5), nn.Linear(5, 3)

        def forward(self, tokens):
            return self.head(torch.tanh(self.embedding(tokens)).mean(dim=1))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tokens()
        tokens = torch.randint(0, 20, (200, 7))
        y = torch.multinomial(torch.softmax(5 * model(tokens), dim=1).detach(), 1)[:, 0]
    for name in ("subspace", "varpro"):
        fitted = clamp(model, [(tokens, y)], recipe=name, penalty=1e-3, progress=False).eval()
        assert fitted.before.delta.shape == (5,)
        with torch.no_grad():
            expected = model.head(torch.tanh(model.embedding(tokens) + fitted.before.delta).mean(dim=1))
        torch.testing.assert_close(fitted(tokens), expected / fitted.fit_record.temperature)


def test_a_pool_of_gammas_goes_to_the_least_error():
    model, (x, y) = network(), sample(400)
    record = clamp(model, [(x, y)], loss="focal", gamma=[0.0, 1.0, 0.5], penalty=np.inf, progress=False).fit_record
    z = collect(model, [(x, y)]).logits
    expected = {g: metrics.ece(Temperature.fit_focal(z, y, gamma=g)(z), y) for g in (0.0, 0.5, 1.0)}
    assert list(record.gammas) == [0.0, 0.5, 1.0]
    assert record.gammas == pytest.approx(expected, abs=1e-4)
    assert record.gamma == min(expected, key=expected.get)
    assert record.loss == "focal"


def test_a_tie_goes_to_the_smaller_gamma_and_folds_leave_samples_out():
    sure = torch.eye(3).repeat(20, 1)
    y = torch.arange(3).repeat(20)
    y[:6] = torch.tensor([1, 2, 0, 1, 2, 0])
    flat = nn.Linear(3, 3)
    nn.init.zeros_(flat.weight)
    nn.init.zeros_(flat.bias)  # every γ gives the same flat probabilities
    record = clamp(flat, [(sure, y)], loss="focal", gamma=(2.0, 0.5), penalty=np.inf, progress=False).fit_record
    assert record.gamma == 0.5
    model, (x, y) = network(), sample(400)
    inside, outside = (
        clamp(model, [(x, y)], loss="focal", gamma=(0.0, 1.0), gamma_folds=f, penalty=np.inf, progress=False).fit_record
        for f in (None, 4)
    )
    assert outside.gammas != inside.gammas
    assert outside.gammas == pytest.approx(inside.gammas, abs=0.05)
    assert outside.forwards > inside.forwards


def test_starts_of_ones_own():
    model = network()
    better = clamp(model, loader(), recipe="varpro", penalty=0.0).before.delta
    once = partial(RECIPES["varpro"], passes=1)  # which only looks at the start
    fitted = clamp(model, loader(), recipe=once, penalty=0.0, start=lambda n: better)
    assert torch.equal(fitted.before.delta, better)
    worse = clamp(model, loader(), recipe=once, penalty=0.0, start=lambda n: torch.full((4,), 0.5))
    assert not worse.before.delta.any()  # than temperature alone, which is kept then


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "sgd"}, "recipe must be one of subspace, varpro, paper, code, closed_form, or a function"),
        ({"loss": "nll"}, 'loss must be "ce" or "focal", got \'nll\''),
        ({"gamma": 1.0}, "gamma belongs to the focal loss"),
        ({"loss": "focal", "gamma": -1}, "gamma must be a non-negative number, got -1"),
        ({"loss": "focal", "gamma": []}, "got an empty pool"),
        ({"penalty": -1}, "penalty must not be negative, got -1"),
        ({"penalty": "R3"}, 'penalty must be a number, "auto", "R1" or "R2", got \'R3\''),
        ({"norm": "l1"}, 'norm must be "l2sq" or "l2", got \'l1\''),
        ({"start": "one"}, "start must be one of zero, random, data, or a function, got 'one'"),
        ({"input_map": "linear"}, 'input_map must be "shift" or "affine", got \'linear\''),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        clamp(network(), loader(), progress=False, **options)


def test_it_tells_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setenv("TRUEUP_PROGRESS", "1")
    monkeypatch.setattr("trueup._core.progress.FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr("trueup._core.progress.REDRAW_SECONDS", 0.0)
    clamp(network(), loader(), penalty=0.01)
    told = capsys.readouterr()
    assert told.out == ""
    for word in ("clamping", "loss", "T ", "‖δ‖"):
        assert word in told.err
    clamp(network(), loader(), penalty=0.01, progress=False)
    assert capsys.readouterr().err == ""
