"""Wrong options and odd sets are told of, and no fit is worse than the temperature it starts from."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from overconfident import sample
from torch import nn

from flat_options import clamp_with as clamp
from trueup import metrics
from trueup.clamping.subspace_search import subspace
from trueup.models import collect

SHIFT = torch.tensor([1.5, 0.0, -1.0, 0.0])


@pytest.mark.parametrize("recipe", ["subspace", "varpro", "paper", "code", "closed_form"])
def test_a_box_that_does_not_hold_the_inputs_is_refused(recipe):
    model, x, y = sample(200)
    with pytest.raises(ValueError, match=r"box must hold every input, got inputs in -.*for a box of 0..1"):
        clamp(model, [(x, y)], recipe=recipe, box=(0, 1), progress=False)


def test_a_box_that_is_none_is_named():
    model, x, y = sample(200)
    with pytest.raises(ValueError, match=r"box must be a pair \(low, high\), got 5.0"):
        clamp(model, [(x, y)], box=5.0, progress=False)


def test_in_a_box_the_record_is_that_of_the_network_that_comes_back():
    model, x, y = sample()
    fitted = clamp(model, [(x + SHIFT, y)], box=(-6.0, 6.0), penalty=1e-3, progress=False)
    after = collect(fitted, [(x + SHIFT, y)], progress=False)
    assert metrics.nll(*after) == pytest.approx(fitted.fit_record.objective - _penalty(fitted), abs=1e-6)


def _penalty(fitted):
    return fitted.fit_record.penalty * float(fitted.before.delta.double().square().sum())


@pytest.mark.parametrize("norm", ["l2sq", "l2"])
@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("recipe", ["subspace", "varpro"])
def test_both_norms_find_the_shift_from_either_start(norm, start, recipe):
    model, x, y = sample()
    fitted = clamp(model, [(x + SHIFT, y)], recipe=recipe, penalty=1e-3, norm=norm, start=start, progress=False)
    record = fitted.fit_record
    assert record.objective < record.baseline - 0.08
    assert record.delta_norm > 1


@pytest.mark.parametrize("norm", ["l2sq", "l2"])
@pytest.mark.parametrize("recipe", ["subspace", "varpro"])
def test_a_penalty_beyond_all_gain_leaves_temperature_alone(norm, recipe):
    model, x, y = sample(300)
    fitted = clamp(model, [(x + SHIFT, y)], recipe=recipe, penalty=1e4, norm=norm, start="random", progress=False)
    assert fitted.fit_record.objective <= fitted.fit_record.baseline + 1e-9
    assert fitted.fit_record.delta_norm < 1e-3


def test_projected_goes_down_the_penalties_as_far_as_it_pays():
    model, x, y = sample(2000)
    fitted = clamp(model, [(x + SHIFT, y)], recipe="varpro", progress=False)
    given = clamp(model, [(x + SHIFT, y)], recipe="varpro", penalty=1e-3, progress=False)
    loss = fitted.fit_record.objective - _penalty(fitted)
    assert loss <= given.fit_record.objective - _penalty(given) + 0.005


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "focal", "gamma": [0.0, 0.5], "gamma_folds": 0}, "gamma_folds must lie between 2 and .* 200, got 0"),
        ({"loss": "focal", "gamma": [0.0, 0.5], "gamma_folds": 500}, "gamma_folds must lie between 2 and"),
        (
            {"loss": "focal", "gamma": 0.5, "gamma_folds": 5},
            "gamma_folds need a pool of gamma to choose from, got 0.5",
        ),
        ({"recipe": partial(subspace, n_folds=1)}, "n_folds must be at least 2"),
        ({"recipe": partial(subspace, frequencies=0)}, "frequencies must be at least 1, got 0"),
        ({"recipe": partial(subspace, penalties=[-1.0])}, "penalties must be positive and finite"),
        ({"recipe": "paper", "penalty": math.inf}, "penalty must be finite for this recipe"),
    ],
)
def test_wrong_options_are_named(options, named):
    model, x, y = sample(200)
    with pytest.raises(ValueError, match=named):
        clamp(model, [(x, y)], progress=False, **options)


@pytest.mark.parametrize("recipe", ["subspace", "varpro", "paper", "code"])
def test_labels_and_inputs_that_no_fit_could_use_are_named(recipe):
    model, x, y = sample(100)
    with pytest.raises(ValueError, match="labels must lie in 0..3, got"):
        clamp(model, [(x[:50], y[:50]), (x[50:], torch.full((50,), 7))], recipe=recipe, progress=False)
    broken = x.clone()
    broken[70, 0] = math.nan
    with pytest.raises(ValueError, match="logits must be finite, got nan"):
        clamp(model, [(broken[:50], y[:50]), (broken[50:], y[50:])], recipe=recipe, progress=False)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_few_samples_leave_temperature_alone_and_say_so(n):
    model, x, y = sample(n)
    y = (model(x).argmax(dim=1) + 1) % 4 if n == 1 else y
    with pytest.warns(UserWarning, match="temperature has no optimum") if n == 1 else nullcontext():
        fitted = clamp(model, [(x, y)], progress=False)
    assert f"{n} samples are too few" in fitted.fit_record.verdict
    assert fitted.fit_record.delta_norm == 0


def test_what_comes_one_a_sample_goes_with_its_sample():
    _, x, y = sample(400)
    parts = [slice(0, 150), slice(150, 400)]
    batches = [{"image": x[p], "names": [str(float(v)) for v in x[p, 0]], "label": y[p]} for p in parts]

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = sample()[0]

        def forward(self, image, names):
            assert len(names) == len(image)
            return self.model(image)

    assert clamp(Named(), batches, progress=False).fit_record.samples == 400
