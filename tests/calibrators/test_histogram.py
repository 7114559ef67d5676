"""Histogram binning against a slow loop, by hand, and on real data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup._core.namespace import NUMPY
from trueup.calibrators import Histogram, HistogramOvR


def slow_bin(p, bins):
    """Right-closed, 0 in the first; a hair beyond an edge counts as on it."""
    for b in range(bins):
        if p <= (b + 1) / bins * (1 + 1e-15):
            return b
    return bins - 1


def slow_frequencies(scores, targets, bins):
    values = []
    for b in range(bins):
        inside = [t for p, t in zip(scores, targets, strict=True) if slow_bin(p, bins) == b]
        values.append(sum(inside) / len(inside) if inside else (b + 0.5) / bins)
    return values


@given(pairs(), st.integers(1, 7))
def test_top_label_equals_the_slow_loop(pair, bins):
    confidence, correct = reference.claims(*pair)
    values = slow_frequencies(confidence, correct, bins)
    fitted = Histogram.fit(*pair, bins=bins)
    np.testing.assert_allclose(fitted.values, values, atol=1e-12)
    np.testing.assert_allclose(fitted.confidence(pair[0]), [values[slow_bin(c, bins)] for c in confidence], atol=1e-12)


@given(pairs(), st.integers(1, 7))
def test_one_vs_rest_equals_the_slow_loop(pair, bins):
    logits, labels = pair
    n, classes = logits.shape
    probs = reference.softmax(logits)
    out = np.empty_like(probs)
    for k in range(classes):
        values = slow_frequencies(probs[:, k], labels == k, bins)
        low = 1 / (n + 2)
        out[:, k] = [min(max(values[slow_bin(p, bins)], low), 1 - low) + 1e-9 * p for p in probs[:, k]]
    out /= out.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(HistogramOvR.fit(logits, labels, bins=bins)(logits)), out, atol=1e-12)


def test_by_hand_and_empty_bins():
    logits = np.log([[0.9, 0.05, 0.05], [0.95, 0.03, 0.02], [0.4, 0.35, 0.25]])
    labels = [0, 1, 0]
    fitted = Histogram.fit(logits, labels, bins=4)
    np.testing.assert_allclose(fitted.values[1:], [1.0, 0.625, 0.5], atol=1e-6)
    per_class = HistogramOvR.fit(logits, labels, bins=2)
    np.testing.assert_allclose(per_class.values, [[0.8, 0.5], [1 / 3, 0.75], [0.2, 0.75]], atol=1e-12)


def test_equal_mass_bins_hold_equally_many():
    pair = calibrated(1003, 4)
    fitted = Histogram.fit_mass(*pair, bins=10)
    confidence, _ = reference.claims(*pair)
    count, _ = np.histogram(confidence, fitted.edges)
    assert set(count) == {100, 101}
    out = fitted.confidence(pair[0])
    assert metrics.accuracy(*pair) == pytest.approx(out.mean(), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_confidence_on_an_edge_stays_below_it(dtype):
    logits = np.log(np.array([[0.4, 0.6], [0.3, 0.7]])).astype(dtype)
    fitted = Histogram.fit(logits, [1, 0], bins=5)
    np.testing.assert_array_equal(fitted.values[2:4], [1.0, 0.0])
    np.testing.assert_array_equal(fitted.confidence(logits), [1.0, 0.0])
    given_edges = Histogram([0.0, 0.5, 1.0], [0.2, 0.8])
    np.testing.assert_array_equal(
        given_edges.map_confidence(NUMPY, np.array([0.0, 0.5, 0.6, 1.0])), [0.2, 0.2, 0.8, 0.8]
    )


def test_rows_stay_off_certainty_and_the_confidence_does_not():
    logits, labels = np.log([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]] * 2), [1] * 6
    fitted = Histogram.fit(logits, labels, bins=2)
    np.testing.assert_allclose(np.exp(fitted(logits))[:, 1], 1 - 1 / 8)
    np.testing.assert_array_equal(fitted.confidence(logits), 1.0)


def test_single_precision_tells_high_confidences_apart():
    logits, labels = calibrated(2000, 4, temperature=5.0, scale=12.0)
    narrow = logits.astype(np.float32)
    fitted = Histogram.fit_mass(narrow, labels)
    np.testing.assert_allclose(np.exp(fitted(narrow)), np.exp(fitted(narrow.astype(np.float64))), atol=1e-5)


def test_a_row_of_unseen_bins_becomes_uniform():
    fitted = HistogramOvR([0, 0.5, 1], [[0.25, 0.9]] * 3)
    np.testing.assert_allclose(np.exp(fitted(np.zeros((1, 3)))), [[1 / 3] * 3])


def test_errors_name_the_argument():
    pair = np.zeros((2, 3)), [0, 1]
    with pytest.raises(ValueError, match="bins must be a whole number"):
        Histogram.fit(*pair, bins=0)
    with pytest.raises(ValueError, match="logits must have at least 1 rows, got 0"):
        Histogram.fit(np.zeros((0, 3)), [])
    with pytest.raises(ValueError, match="values must have .* entries for edges"):
        Histogram([0, 0.5, 1], [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"values must lie in \[0, 1\], got 0.1..2"):
        Histogram([0, 0.5, 1], [0.1, 2.0])
    with pytest.raises(ValueError, match=r"margin must lie in \[0, 0.5\), got 0.7"):
        Histogram([0, 1], [0.1], 0.7)
    with pytest.raises(ValueError, match="edges must be finite and ascending"):
        Histogram([0, 1.5, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="logits must have the 3 classes of the fit, got 2"):
        HistogramOvR.fit(*pair)(np.zeros((1, 2)))


@pytest.mark.parametrize("fit", [Histogram.fit, Histogram.fit_mass])
def test_real_data(data, fit):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    fitted = fit(*val)
    out = fitted(test.logits)
    assert metrics.ece(out, test.labels) < 0.4 * metrics.ece(*test)
    assert metrics.accuracy(out, test.labels) == metrics.accuracy(*test)
    assert metrics.ece(fitted(val.logits), val.labels) < 0.002
    per_class = HistogramOvR.fit(*val)(test.logits)
    assert metrics.ece(per_class, test.labels) < 0.5 * metrics.ece(*test)
    assert metrics.nll(per_class, test.labels) < metrics.nll(*test)
