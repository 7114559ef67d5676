"""Scaling-binning against a slow loop, its splits, and real data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup._core.bins import equal_mass
from trueup.calibrators import ScalingBinning, Temperature


@given(pairs(min_rows=3), st.integers(1, 6))
@pytest.mark.filterwarnings("ignore:temperature stopped at its bound")
def test_equals_the_slow_loop(pair, bins):
    logits, labels = pair
    scaled = Temperature.fit(logits, labels)(logits)
    confidence, _ = reference.claims(scaled, labels)
    fitted = ScalingBinning.fit(logits, labels, bins=bins)
    edges = equal_mass(confidence, bins)
    wanted = []
    for c in confidence:
        b = next(i for i in range(len(edges) - 1) if c <= edges[i + 1] or i == len(edges) - 2)
        inside = [d for d in confidence if (d > edges[b] or b == 0) and (d <= edges[b + 1] or b == len(edges) - 2)]
        wanted.append(np.mean(inside))
    np.testing.assert_allclose(fitted.confidence(logits), wanted, atol=1e-9)


def test_the_map_is_the_confidence_and_keeps_the_mean():
    logits, labels = calibrated(3000, 6, temperature=2.5)
    fitted = ScalingBinning.fit(logits, labels)
    out = fitted(logits)
    assert np.exp(out.max(axis=1)) == pytest.approx(fitted.confidence(logits), abs=1e-9)
    scaled = metrics.accuracy(logits, labels)
    assert fitted.confidence(logits).mean() == pytest.approx(scaled, abs=0.01)
    assert len(np.unique(fitted.confidence(logits))) == 10


def test_three_splits_use_each_row_once():
    logits, labels = calibrated(900, 6, temperature=2.5)
    one, other = (ScalingBinning.fit(logits, labels, splits=3, seed=seed) for seed in (0, 1))
    again = ScalingBinning.fit(logits, labels, splits=3, seed=0)
    assert one.temperature == again.temperature != other.temperature
    first, second, third = np.array_split(np.random.default_rng(0).permutation(900), 3)
    scaler = Temperature.fit(logits[first], labels[first])
    assert one.temperature == pytest.approx(float(scaler.temperature))
    confidence, _ = reference.claims(scaler(logits), labels)
    np.testing.assert_allclose(one.edges, equal_mass(confidence[second], 10), atol=1e-9)
    tops = confidence[third]
    mean = tops[(tops > float(one.edges[4])) & (tops <= float(one.edges[5]))].mean()
    assert float(one.values[4]) == pytest.approx(mean)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="splits must be 1 or 3, got 2"):
        ScalingBinning.fit(np.eye(3), [0, 1, 2], splits=2)
    with pytest.raises(ValueError, match="logits must have at least 3 rows, got 2"):
        ScalingBinning.fit(np.eye(3)[:2], [0, 1], splits=3)
    with pytest.raises(ValueError, match="temperature must be one positive number"):
        ScalingBinning(0.0, [0, 1], [0.5])


@pytest.mark.parametrize("splits", [1, 3])
def test_real_data(data, splits):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = ScalingBinning.fit(*val, splits=splits)(test.logits)
    assert metrics.ece(out, test.labels) < 0.4 * metrics.ece(*test)
    assert metrics.nll(out, test.labels) < 0.9 * metrics.nll(*test)
    assert metrics.accuracy(out, test.labels) == metrics.accuracy(*test)
