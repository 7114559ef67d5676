"""Odd options, models and inputs: each works as meant, or is named in an error that says what was wanted."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from overconfident import sample
from torch import nn

from flat_options import clamp_with as clamp
from trueup._core.optimize import FitError
from trueup.clamping import RECIPES
from trueup.clamping.published_recipes import code, paper
from trueup.models import calibrate

SHORT = {**RECIPES, "paper": partial(paper, epochs=2, batch_size=64), "code": partial(code, epochs=2, batch_size=64)}


def fitted(**options):
    model, x, y = sample(150)
    return clamp(model, [(x + 0.5, y)], progress=False, **options)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"loss": "focal", "gamma": np.float32(1), "penalty": 0.01}, {"loss": "focal", "gamma": 1.0, "penalty": 0.01}),
        (
            {"loss": "focal", "gamma": torch.tensor(1), "penalty": 0.01},
            {"loss": "focal", "gamma": 1.0, "penalty": 0.01},
        ),
        (
            {"loss": "focal", "gamma": np.array([0, 1.0]), "penalty": 0.1},
            {"loss": "focal", "gamma": (0, 1), "penalty": 0.1},
        ),
        ({"penalty": np.float64(0.01)}, {"penalty": 0.01}),
        ({"penalty": torch.tensor(0.5)}, {"penalty": 0.5}),
        ({"penalty": 0}, {"penalty": 0.0}),
        ({"seed": np.int64(3), "penalty": 0.01, "start": "random"}, {"seed": 3, "penalty": 0.01, "start": "random"}),
        (
            {"start": lambda network: torch.ones(4, dtype=torch.int64), "penalty": 0.01},
            {"start": lambda network: torch.ones(4), "penalty": 0.01},
        ),
    ],
)
def test_numbers_of_any_kind_are_numbers(given, plain):
    found, expected = fitted(**given), fitted(**plain)
    assert torch.equal(found.before.delta, expected.before.delta)
    ours, theirs = found.fit_record, expected.fit_record
    assert (ours.penalty, ours.gamma, ours.gammas, ours.seed) == (
        theirs.penalty,
        theirs.gamma,
        theirs.gammas,
        theirs.seed,
    )
    assert {type(value) for value in (ours.penalty, ours.gamma, *ours.gammas)} == {float}
    assert type(ours.seed) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty": None}, 'penalty must be a number, "auto", "R1" or "R2", got None'),
        ({"penalty": [0.1]}, r'penalty must be a number, "auto", "R1" or "R2", got \[0.1\]'),
        ({"penalty": torch.ones(2)}, 'penalty must be a number, "auto", "R1" or "R2", got tensor'),
        ({"penalty": True}, 'penalty must be a number, "auto", "R1" or "R2", got True'),
        ({"penalty": math.nan}, "penalty must not be negative, got nan"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*63 - 1, got -1"),
        ({"seed": 1.5}, "seed must be an integer from 0 .* got 1.5"),
        ({"seed": None}, "seed must be an integer from 0 .* got None"),
        ({"seed": 1 << 70}, "seed must be an integer from 0 .* got 1180591620717411303424"),
        ({"loss": "focal", "gamma": "12"}, "gamma must be a non-negative number, or a pool of them, got '12'"),
        ({"loss": "focal", "gamma": [1.0, None]}, "gamma must be a non-negative number, or a pool of them, got None"),
        ({"loss": "focal", "gamma": [0.0, 1.0], "gamma_folds": 2.5}, "gamma_folds must lie between 2 and .* got 2.5"),
        (
            {"loss": "focal", "gamma": np.float32(1), "gamma_folds": 2},
            "gamma_folds need a pool of gamma to choose from, got 1",
        ),
        ({"loss": None}, 'loss must be "ce" or "focal", got None'),
        ({"norm": 2}, 'norm must be "l2sq" or "l2", got 2'),
        ({"recipe": None}, "recipe must be one of subspace, .* or a function, got None"),
        ({"recipe": lambda problem: 3}, "recipe must be a function that returns a Solution, got int of <lambda>"),
        ({"start": torch.zeros(4)}, "start must be one of zero, random, data, or a function, got tensor"),
        ({"box": (torch.zeros(5) - 9, 9)}, r"box must have ends that are .* broadcast to one input \(4,\), got shape "),
        ({"box": ("a", "b")}, r"box must have ends that are numbers or .* got 'a'"),
        ({"box": (9, -9)}, "box must have its lower end below its upper one, got 9 and -9"),
        ({"box": (math.nan, 9)}, "box must have its lower end below its upper one, got nan and 9"),
    ],
)
def test_odd_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fitted(**options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x, "model must be an nn.Module, got function; wrap the function in a module with this forward"),
        (nn.Linear, "model must be an nn.Module, got the class Linear$"),
        (None, "model must be an nn.Module, got NoneType$"),
    ],
)
def test_what_is_no_model_is_named(model, message):
    with pytest.raises(ValueError, match=message):
        clamp(model, [sample(150)[1:]], progress=False)


def test_what_is_no_loader_is_named():
    with pytest.raises(ValueError, match="loader must give batches of inputs and labels, got NoneType"):
        clamp(sample(150)[0], None, progress=False)


@pytest.mark.parametrize("recipe", ["subspace", "varpro", "paper"])
@pytest.mark.parametrize(
    ("start", "fact"),
    [
        (torch.zeros(5), r"shape \(4,\), got shape \(5,\)"),
        (torch.zeros(()), r"shape \(4,\), got shape \(\)"),
        (np.zeros(4), r"shape \(4,\), got ndarray"),
        (torch.full((4,), math.nan), r"shape \(4,\) with finite numbers, got NaN or infinity"),
    ],
)
def test_a_start_that_is_none_is_named(recipe, start, fact):
    with pytest.raises(ValueError, match=f"start must give a tensor of {fact}"):
        fitted(recipe=SHORT[recipe], start=lambda network: start, penalty=0.01)


class Within(nn.Module):
    """A network that is called inside of a context."""

    def __init__(self, context):
        super().__init__()
        self.model, self.context = sample(150)[0], context

    def forward(self, x):
        with self.context():
            return self.model(x)


class ThroughNumpy(nn.Module):
    def forward(self, x):
        return 3 * torch.from_numpy(x.detach().numpy() * 1.0)


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 3 * x


MODELS = {
    "no_grad": (Within(torch.no_grad), "without a graph, as from no_grad, inference_mode or NumPy"),
    "inference mode": (Within(torch.inference_mode), "without a graph, as from no_grad, inference_mode or NumPy"),
    "numpy": (ThroughNumpy(), "without a graph, as from no_grad, inference_mode or NumPy"),
}


@pytest.mark.parametrize("recipe", SHORT)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_without_gradients_is_told_of_with_what_needs_none(kind, recipe):
    model, fact = MODELS[kind]
    _, x, y = sample(150)
    wish = f"the model must be differentiable by its input.* got .*{fact}.*needs no gradients: trueup.calibrate"
    with pytest.raises(ValueError, match=wish):
        clamp(model, [(x, y)], recipe=SHORT[recipe], box=(-9, 9), progress=False)
    assert float(calibrate(model, [(x, y)], progress=False).after.temperature) > 0


@pytest.mark.parametrize("recipe", ["subspace", "paper"])
@pytest.mark.parametrize(
    ("forward", "fact"),
    [
        (WithoutBackward.apply, "backward"),
        (lambda x: x * torch.igamma(x.abs() + 0.1, torch.ones_like(x)), "the derivative for 'igamma: input' is not"),
        (lambda x: x * torch.histogram(x, 4).hist, "derivative for aten::histogram is not implemented"),
    ],
)
def test_a_backward_that_is_not_there_is_named(recipe, forward, fact):
    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    _, x, y = sample(150)
    with pytest.raises(ValueError, match=f"the model must be differentiable by its input.*, got .*{fact}"):
        clamp(Model(), [(x, y)], recipe=SHORT[recipe], progress=False)


@pytest.mark.parametrize("recipe", ["subspace", "paper"])
def test_an_input_that_is_not_used_is_named_and_other_failures_stay_what_they_are(recipe):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [sample(150)[0]]  # its parameters are not this model's, and want gradients

        def forward(self, x, other):
            return self.hidden[0](other)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 3 * x

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError("out of memory")

    class Failing(nn.Module):
        def forward(self, x):
            return Broken.apply(x)

    _, x, y = sample(150)
    with pytest.raises(ValueError, match="differentiable by its input.*, got logits that do not depend on it"):
        clamp(Other(), [(x, x, y)], recipe=SHORT[recipe], progress=False)
    with pytest.raises(RuntimeError, match="^out of memory"):
        clamp(Failing(), [(x, y)], recipe=SHORT[recipe], progress=False)


@pytest.mark.parametrize("recipe", ["subspace", "varpro", "paper"])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_the_callers_own_mode_is_no_hindrance(recipe, context):
    model, x, y = sample(150)
    expected = clamp(model, [(x + 0.5, y)], recipe=SHORT[recipe], penalty=0.01, input_map="affine", progress=False)
    with context():
        found = clamp(model, [(x + 0.5, y)], recipe=SHORT[recipe], penalty=0.01, input_map="affine", progress=False)
        assert torch.is_inference_mode_enabled() is (context is torch.inference_mode)
        assert not torch.is_grad_enabled()
    assert torch.equal(found.before.delta, expected.before.delta)
    assert torch.equal(found.before.scale, expected.before.scale)
    assert not found.before.delta.is_inference()
    found(x.requires_grad_()).sum().backward()  # what came back is a network like any other


@pytest.mark.parametrize("recipe", ["subspace", "varpro", "paper"])
def test_inputs_without_features_are_named(recipe):
    class Scores(nn.Module):
        def forward(self, x):
            return torch.stack([x, -x], dim=1)

    _, x, y = sample(150)
    with pytest.raises(ValueError, match=r"input must have shape \(n, features\).* got \(150,"):
        clamp(Scores(), [(x[:, 0], y % 2)], recipe=SHORT[recipe], progress=False)

    class Constant(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 4)

    with pytest.raises(ValueError, match=r"input must have shape.* got \(150, 0\)"):
        clamp(Constant(), [(x[:, :0], y)], recipe=SHORT[recipe], progress=False)


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 4), nn.Flatten()),
            torch.uint8,
            "floating-point numbers for this model, got uint8",
        ),
        (nn.Flatten(), torch.int64, "inputs are integers.*images must be floating-point numbers, got int64"),
    ],
)
def test_images_of_integers_are_named(model, dtype, message):
    images = torch.zeros(20, 3, 4, 4, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        clamp(model, [(images, torch.arange(20) % 4)], progress=False)


def test_a_model_that_gives_other_rows_than_there_are_labels_is_told_of():
    """As one does whose samples come in a heap without rows of their own."""

    class Heap(nn.Module):
        def forward(self, x, where):
            return torch.zeros(int(where.max()) + 1, 4).index_add(0, where, x)

    _, x, y = sample(200)
    batches = [(x[:100], torch.arange(50).repeat_interleave(2), y[:100:2])] * 2
    with pytest.raises(
        ValueError, match=r"one row of logits per sample, got shape \(50, 4\) for 40 samples.*shared by all samples"
    ):
        clamp(Heap(), batches, recipe="varpro", progress=False)


def test_a_recipe_that_ends_nowhere_gives_no_fit():
    model, x, y = sample(150)

    def astray(problem, **wrong):
        return replace(RECIPES["varpro"](problem), **wrong)

    for wrong in (
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"penalty_value": math.inf},
        {"logits": torch.full((150, 4), math.nan)},
    ):
        with pytest.raises(FitError, match="the recipe astray did not end at a finite objective: T = .*no fit is"):
            clamp(model, [(x, y)], recipe=partial(astray, **wrong), penalty=0.1, progress=False)
    found = clamp(model, [(x, y)], recipe=partial(astray, temperature=2.0), penalty=0.1, progress=False)
    assert found.fit_record.temperature == 2.0
