"""Spline calibration against slow loops, laws of the spline, and real data."""

import numpy as np
import pytest
from hypothesis import given
from scipy.interpolate import CubicSpline

import reference
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup._core.namespace import NUMPY
from trueup.calibrators import Spline


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
    confidence, correct = reference.claims(logits, labels)
    np.testing.assert_allclose(
        Spline.fit(logits, labels).confidence(logits), slow_spline(confidence, correct), atol=1e-8
    )


def test_goes_straight_between_two_confidences():
    between = Spline([0.2, 0.6], [0.1, 0.5]).map_confidence(NUMPY, np.array([0.0, 0.3, 0.5, 0.9]))
    np.testing.assert_allclose(between, [0.1, 0.2, 0.4, 0.5])


@given(pairs(min_rows=6))
def test_monotone_never_falls(pair):
    fitted = Spline.fit(*pair, monotone=True)
    assert (np.diff(fitted.values) >= -1e-15).all()


def test_recovers_the_truth_and_leaves_calibrated_data_alone():
    logits, labels = calibrated(20_000, 4, temperature=2.5)
    fitted = Spline.fit(logits, labels)
    assert metrics.ece(fitted(logits), labels) < 0.02 < metrics.ece(logits, labels)
    logits, labels = calibrated(20_000, 4)
    confidence, _ = reference.claims(logits[:500], labels[:500])
    np.testing.assert_allclose(Spline.fit(logits, labels).confidence(logits[:500]), confidence, atol=0.05)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="logits must have at least 6 rows, got 5"):
        Spline.fit(np.zeros((5, 2)), [0] * 5)


@pytest.mark.parametrize("monotone", [False, True])
def test_real_data(data, monotone):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = Spline.fit(*val, monotone=monotone)(test.logits)
    assert metrics.ece(out, test.labels) < 0.3 * metrics.ece(*test)
    assert metrics.ks(out, test.labels) < 0.3 * metrics.ks(*test)
    assert metrics.accuracy(out, test.labels) == metrics.accuracy(*test)
