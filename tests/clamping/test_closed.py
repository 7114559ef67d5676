"""The efficient variant: its δ, its T, and what it costs."""

import warnings
from functools import partial

import pytest
import torch

from flat_options import clamp_with as clamp
from trueup.calibrators import Temperature
from trueup.clamping.published_recipes import SCALES, closed_form
from trueup.models import Calibrated, collect
from trueup_studies.networks import MLP


def sample(n=200, reach=0.6):
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(0)) * reach + (1 - reach) / 2
    model = MLP(4, inputs=3, hidden=(16,), seed=3).eval()
    with torch.no_grad():
        labels = torch.distributions.Categorical(logits=model(x) / 2)
        gumbel = -torch.empty_like(labels.logits).exponential_(generator=torch.Generator().manual_seed(1)).log()
    return model, [(x, (labels.logits + gumbel).argmax(dim=1))]


def fit(model, loader, *, input_map="shift", loss="ce", **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Theorem 3.2 predicts")
        return clamp(
            model,
            loader,
            recipe=partial(closed_form, **options),
            box=(0.0, 1.0),
            loss=loss,
            input_map=input_map,
            progress=False,
        )


def test_delta_is_the_theorems_and_the_temperature_the_best_there():
    model, loader = sample()
    fitted, (x, _) = fit(model, loader), loader[0]
    down, up = -x.amin(dim=0), 1 - x.amax(dim=0)
    for d, a, b in zip(fitted.before.delta, down, up, strict=True):
        assert torch.isclose(d, a) or torch.isclose(d, b)
    pair = collect(Calibrated(model, before=fitted.before), loader)
    assert fitted.fit_record.temperature == pytest.approx(float(Temperature.fit(*pair).temperature), rel=1e-6)
    assert fitted.fit_record.lemma_residual < 1e-6


def test_it_costs_a_forward_backward_and_a_forward():
    record = fit(*sample()).fit_record
    assert (record.forwards, record.backwards) == (2.0, 1.0)
    assert fit(*sample(), scale=SCALES).fit_record.forwards == 1.0 + len(SCALES)


def test_of_several_scales_the_one_of_least_loss_is_kept():
    model, loader = sample()
    each = {s: fit(model, loader, scale=s).fit_record for s in SCALES}
    best = fit(model, loader, scale=SCALES)
    least = min(each, key=lambda s: each[s].objective)
    assert best.fit_record.notes["scale"] == least
    assert best.fit_record.objective == pytest.approx(each[least].objective)
    assert best.fit_record.delta_norm == pytest.approx(least * each[1.0].delta_norm, rel=1e-5)


def test_the_temperature_follows_the_loss():
    model, loader = sample()
    fitted = fit(model, loader, loss="focal")
    pair = collect(Calibrated(model, before=fitted.before), loader)
    expected = float(Temperature.fit_focal(*pair, gamma=1.0).temperature)
    assert fitted.fit_record.temperature == pytest.approx(expected, rel=1e-3)
    assert fitted.fit_record.lemma_residual < 1e-6


def test_where_there_is_no_room_it_is_temperature_scaling():
    model, loader = sample(reach=1.0)
    x, y = loader[0]
    x[0], x[1] = 0.0, 1.0
    with pytest.warns(UserWarning, match="gives δ = 0"):
        fitted = clamp(model, [(x, y)], recipe="closed_form", box=(0.0, 1.0), progress=False)
    assert not fitted.before.delta.any()
    assert fitted.fit_record.forwards == 1.0
    pair = collect(model, [(x, y)])
    assert fitted.fit_record.temperature == pytest.approx(float(Temperature.fit(*pair).temperature), rel=1e-6)
    assert fit(model, [(x, y)], quantile=0.05).before.delta.any()


def test_an_affine_map_is_returned_where_it_is_asked_for():
    fitted = fit(*sample(), input_map="affine")
    assert torch.equal(fitted.before.scale, torch.ones(3))


def test_a_bad_scale_and_a_missing_box_are_named():
    model, loader = sample()
    for scale in (0.0, 1.5, []):
        with pytest.raises(ValueError, match=r"scale must lie in \(0, 1\], got"):
            fit(model, loader, scale=scale)
    with pytest.raises(ValueError, match="box must be given"):
        clamp(model, loader, recipe="closed_form", progress=False)
