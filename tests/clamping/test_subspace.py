"""The default recipe: it leaves alone what is well, repairs what was shifted, and keeps to its budget."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from flat_options import clamp_with as clamp
from trueup import metrics
from trueup.clamping import Affine
from trueup.clamping.subspace_search import MAX_COST, search, subspace
from trueup.models import collect


class Blobs(nn.Module):
    """Tells small images apart by the brightness of their quarters, through one bend."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("first", torch.randn(3 * 16, 24, generator=generator).double() / 4)
        self.register_buffer("second", torch.randn(24, 4, generator=generator).double())

    def forward(self, x):
        return torch.tanh(x.flatten(1) @ self.first) @ self.second


def images(n, seed, shift=None, scale=1.0):
    """Smooth images with labels that the network's own probabilities gave, then seen through a tinted glass."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 3, 2, 2, generator=generator).double()
    x = nn.functional.interpolate(coarse, size=(4, 4), mode="bilinear")
    y = torch.multinomial(torch.softmax(Blobs()(x), dim=1), 1, generator=generator)[:, 0]
    tint = torch.tensor([0.0, 0.0, 0.0] if shift is None else shift).double().reshape(3, 1, 1)
    return scale * x + tint, y


def loader(x, y, size=200):
    return list(zip(torch.split(x, size), torch.split(y, size), strict=True))


def nll_of(model, x, y):
    return metrics.nll(*collect(model, loader(x, y), progress=False))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_that_is_well_is_left_alone(seed):
    x, y = images(1000, seed)
    record = clamp(Blobs(), loader(x, y), progress=False).fit_record
    assert record.delta_norm == 0
    assert math.isinf(record.penalty)
    assert record.equivalents <= 20
    assert record.verdict.startswith("No: temperature is enough")
    assert record.objective == record.baseline
    assert record.evidence > 0.01 or "standard error" in record.verdict
    assert record.temperature == pytest.approx(1.0, abs=0.2)
    assert len(record.candidates) == 6
    assert record.candidates[math.inf] == pytest.approx(record.baseline, abs=0.01)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tint_is_taken_off(seed):
    tint = [1.0, -0.8, 0.6]
    x, y = images(1000, seed, tint)
    clamped = clamp(Blobs(), loader(x, y), progress=False)
    record = clamped.fit_record
    test = images(2000, 10 + seed, tint)
    before, after = nll_of(Blobs(), *test), nll_of(clamped, *test)
    oracle = nll_of(Blobs(), *images(2000, 10 + seed))
    assert after < oracle + 0.15 * (before - oracle)
    assert record.evidence < 0.01
    assert record.verdict.startswith("Yes: ")
    assert record.equivalents <= 80
    np.testing.assert_allclose(clamped.before.delta.mean(dim=(1, 2)), [-t for t in tint], atol=0.25)
    assert record.objective < record.baseline
    assert record.lemma_residual < 1e-9
    assert record.notes["held_out_gain"] > 3 * record.notes["held_out_error"] > 0


@pytest.mark.parametrize("n", [300, 900, 1250, 2500])
@pytest.mark.parametrize("input_map", ["shift", "affine"])
def test_no_fit_costs_more_than_it_may_whatever_a_backward_pass_costs(n, input_map):
    x, y = images(n, 0, [1.0, -0.8, 0.6])
    record = clamp(Blobs(), loader(x, y), input_map=input_map, progress=False).fit_record
    assert record.delta_norm > 0
    assert record.backwards > 15
    assert record.forwards + 2 * record.backwards <= MAX_COST == 80


def test_a_map_without_held_out_gain_is_rejected(monkeypatch):
    x, y = images(1000, 0, [1.0, -0.8, 0.6])

    def astray(*args, **options):
        point, used = search(*args, **options)
        return replace(point, theta=-3 * point.theta), used

    monkeypatch.setattr("trueup.clamping.subspace_search.search", astray)
    record = clamp(Blobs(), loader(x, y), progress=False).fit_record
    assert record.delta_norm == 0
    assert record.objective == record.baseline
    assert "did not lower the loss on a held-out fifth of the samples" in record.verdict


def test_a_scale_a_channel_follows_contrast():
    x, y = images(1500, 0, scale=0.3)
    test = images(2000, 10, scale=0.3)
    shifted, scaled = (clamp(Blobs(), loader(x, y), input_map=m, progress=False) for m in ("shift", "affine"))
    assert isinstance(scaled.before, Affine)
    assert scaled.before.scale.shape == (3, 1, 1)
    assert nll_of(scaled, *test) < nll_of(shifted, *test) - 0.02
    assert 1.8 < float(scaled.before.scale.mean()) < 6
    assert scaled.fit_record.input_map == "affine"


def test_a_given_penalty_skips_the_test():
    x, y = images(600, 0)
    fitted = clamp(Blobs(), loader(x, y), penalty=1e-3, progress=False)
    assert fitted.fit_record.penalty == 1e-3
    assert fitted.fit_record.delta_norm > 0
    assert fitted.fit_record.verdict.startswith("Not tested on held-out samples, since λ was given")
    record = clamp(Blobs(), loader(x, y), penalty=math.inf, progress=False).fit_record
    assert record.delta_norm == 0
    by_rule = clamp(Blobs(), loader(x, y), penalty="R1", progress=False).fit_record
    assert by_rule.penalty == pytest.approx(0.1 * nll_of(Blobs(), x, y))


def test_it_ends_at_a_minimum_of_the_subspace():
    x, y = images(800, 0, [1.0, -0.8, 0.6])
    fitted = clamp(
        Blobs(), loader(x, y), penalty=1e-3, recipe=partial(subspace, frequencies=1, passes=60), progress=False
    )
    record, delta = fitted.fit_record, fitted.before.delta
    assert record.notes["directions"] == 4
    assert record.objective == pytest.approx(nll_of(fitted, x, y) + 1e-3 * float(delta.square().sum()), abs=1e-9)
    direction = torch.ones(1, 4, 4).double() / 4
    for channel in range(3):
        for step in (-0.05, 0.05):
            moved = delta.clone()
            moved[channel] += step * direction[0]
            with torch.no_grad():
                z = Blobs()(x + moved)
            other = metrics.nll(z / record.temperature, y) + 1e-3 * float(moved.square().sum())
            assert other > record.objective - 1e-5


def test_the_order_and_the_batches_of_the_samples_do_not_matter():
    x, y = images(700, 0, [1.0, -0.8, 0.6])
    order = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    one = clamp(Blobs(), loader(x, y), progress=False)
    other = clamp(Blobs(), loader(x[order], y[order], 64), progress=False)
    torch.testing.assert_close(one.before.delta, other.before.delta, atol=1e-6, rtol=1e-6)
    assert one.fit_record.temperature == pytest.approx(other.fit_record.temperature, rel=1e-6)
    assert one.fit_record.penalty == pytest.approx(other.fit_record.penalty)


def test_the_units_of_the_inputs_do_not_matter():
    class InUnits(nn.Module):
        def forward(self, x):
            return Blobs()(x / 100)

    x, y = images(700, 0, [1.0, -0.8, 0.6])
    one = clamp(Blobs(), loader(x, y), progress=False)
    other = clamp(InUnits(), loader(100 * x, y), progress=False)
    torch.testing.assert_close(one.before.delta, other.before.delta / 100, atol=1e-5, rtol=1e-5)
    assert one.fit_record.objective == pytest.approx(other.fit_record.objective, rel=1e-6)
    assert one.fit_record.penalty == pytest.approx(1e4 * other.fit_record.penalty, rel=1e-6)


@pytest.mark.parametrize("m", [3, 40])
def test_vectors_have_directions_of_their_own(m):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(m, 4).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).double()
    x = torch.randn(900, m, generator=generator).double() * torch.linspace(2, 0.1, m) + 0.5
    with torch.no_grad():
        y = torch.multinomial(torch.softmax(model(x), dim=1), 1, generator=generator)[:, 0]
    still = clamp(model, loader(x, y), progress=False).fit_record
    moved = clamp(model, loader(x + 2 * x.mean(dim=0), y), progress=False).fit_record
    assert still.objective <= still.baseline
    assert moved.objective < moved.baseline - 0.05
    assert moved.verdict.startswith("Yes")


def test_few_samples_end_well():
    x, y = images(40, 0)
    record = clamp(Blobs(), [(x, y)], progress=False).fit_record
    assert record.samples == 40
    assert record.objective <= record.baseline


def test_a_network_that_is_always_right_is_told_about():
    sure = torch.eye(3).double().repeat(30, 1)
    with pytest.warns(UserWarning, match="temperature has no optimum.*every label has its row's largest logit"):
        clamp(nn.Identity(), [(sure, torch.arange(3).repeat(30))], progress=False)
