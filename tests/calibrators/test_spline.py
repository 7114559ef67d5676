"""Spline calibration against slow loops, laws of the spline, and real data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.interpolate import CubicSpline

import reference
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup.calibrators.spline import (
    Spline,
    SplineMap,
    _second_derivatives,
    _weights,
    rank_score,
    spline_rank,
    spline_within,
    within_score,
)


def slow_spline(scores, hits):
    """SciPy's natural splines through unit vectors as the basis; equal scores share their hits and their values."""
    n = len(scores)
    order = sorted(range(n), key=lambda i: scores[i])
    s = [scores[i] for i in order]
    ties = [[j for j in range(n) if abs(s[j] - s[i]) < 1e-12] for i in range(n)]
    t = [np.mean([hits[order[j]] for j in ties[i]]) for i in range(n)]
    h = np.cumsum(np.array(t) - s) / n
    u = np.linspace(0, 1, n)
    knots = np.linspace(0, 1, 6)
    basis = [CubicSpline(knots, unit, bc_type="natural") for unit in np.eye(6)]
    at_knots = np.linalg.lstsq(np.stack([b(u) for b in basis], axis=1), h, rcond=None)[0]
    slope = CubicSpline(knots, at_knots, bc_type="natural")(u, 1)
    v = [min(max(s[i] + np.mean([slope[j] for j in ties[i]]), 0.0), 1.0) for i in range(n)]
    out = np.empty(n)
    out[order] = v
    return out


@given(pairs(min_rows=6))
def test_equals_the_slow_loop(pair):
    logits, labels = np.clip(pair[0], -6, 6), pair[1]  # so that equal confidences can be told from near ones
    confidence, correct = reference.top_label(logits, labels)
    np.testing.assert_allclose(
        Spline.fit(logits, labels).confidence(logits), slow_spline(confidence, correct), atol=1e-8
    )


def test_the_basis_is_the_natural_spline():
    values = np.array([0.3, -1.0, 2.0, 0.5, 0.1, 0.7])
    u = np.linspace(0, 1, 37)
    natural = CubicSpline(np.linspace(0, 1, 6), values, bc_type="natural")
    second = _second_derivatives(6)
    np.testing.assert_allclose(_weights(u, second, slope=False) @ values, natural(u), atol=1e-12)
    np.testing.assert_allclose(_weights(u, second, slope=True) @ values, natural(u, 1), atol=1e-11)


def test_goes_straight_between_two_scores():
    between = SplineMap(np.array([0.2, 0.6]), np.array([0.1, 0.5]))
    np.testing.assert_allclose(between(np.array([0.0, 0.3, 0.5, 0.9])), [0.1, 0.2, 0.4, 0.5])
    assert isinstance(between(torch.tensor([0.3])), torch.Tensor)


@given(pairs(min_rows=6))
def test_monotone_never_falls(pair):
    fitted = Spline.fit(*pair, monotone=True)
    assert (fitted.values.diff() >= -1e-15).all()


def test_recovers_the_truth_and_leaves_calibrated_data_alone():
    logits, labels = calibrated(20_000, 4, temperature=2.5)
    fitted = Spline.fit(logits, labels)
    assert metrics.ece(fitted(logits), labels) < 0.02 < metrics.ece(logits, labels)
    logits, labels = calibrated(20_000, 4)
    confidence, _ = reference.top_label(logits[:500], labels[:500])
    np.testing.assert_allclose(Spline.fit(logits, labels).confidence(logits[:500]), confidence, atol=0.05)


def test_rank_and_within():
    logits, labels = calibrated(400, 5, temperature=2.5)
    probs = np.sort(reference.softmax(logits), axis=1)[:, ::-1]
    order = np.argsort(-logits, axis=1)
    second = spline_rank(logits, labels, rank=2)
    np.testing.assert_allclose(rank_score(logits, rank=2), probs[:, 1], atol=1e-12)
    np.testing.assert_allclose(
        second(rank_score(logits, rank=2)), slow_spline(probs[:, 1], order[:, 1] == labels), atol=1e-8
    )
    within = spline_within(logits, labels, top=3)
    inside = (order[:, :3] == labels[:, None]).any(axis=1)
    np.testing.assert_allclose(
        within(within_score(logits, top=3)), slow_spline(probs[:, :3].sum(axis=1), inside), atol=1e-8
    )
    first = spline_rank(logits, labels)
    np.testing.assert_allclose(first(rank_score(logits)), Spline.fit(logits, labels).confidence(logits), atol=1e-12)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="logits must have at least 6 rows, got 5"):
        Spline.fit(np.zeros((5, 2)), [0] * 5)
    with pytest.raises(ValueError, match=r"rank must lie in 1..2, the number of classes, got 3"):
        spline_rank(np.zeros((6, 2)), [0] * 6, rank=3)
    with pytest.raises(ValueError, match=r"top must lie in 1..2, the number of classes, got 0"):
        spline_within(np.zeros((6, 2)), [0] * 6, top=0)


@pytest.mark.parametrize("monotone", [False, True])
def test_real_data(data, monotone):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = Spline.fit(*val, monotone=monotone)(test.logits)
    assert metrics.ece(out, test.labels) < 0.3 * metrics.ece(*test)
    assert metrics.ks(out, test.labels) < 0.3 * metrics.ks(*test)
    assert metrics.accuracy(out, test.labels) == metrics.accuracy(*test)
