import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from strategies import calibrated, pairs
from trueup import METHODS, metrics
from trueup.calibrators import ShrunkenHistogram
from trueup.calibrators.binning import STRENGTHS, choose_strength


def slow_likelihood(count, hits, mean, m):
    def log_beta(a, b):
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    return sum(
        log_beta(h + m * p, n - h + m * (1 - p)) - log_beta(m * p, m * (1 - p))
        for n, h, p in zip(count, hits, mean, strict=True)
    )


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1), st.floats(0.01, 0.99)), min_size=1, max_size=6))
def test_the_strength_is_the_likeliest(rows):
    count = np.array([n for n, _, _ in rows])
    hits = np.array([round(n * share) for n, share, _ in rows], dtype=float)
    mean = np.array([p for _, _, p in rows])
    best = max(slow_likelihood(count, hits, mean, m) for m in STRENGTHS)
    chosen = choose_strength(count, hits, mean)
    assert chosen in STRENGTHS
    assert slow_likelihood(count, hits, mean, chosen) >= best - 1e-6  # at 1e6 lgamma has few digits left


@given(pairs(max_classes=2, min_rows=4), st.integers(1, 5))
def test_two_classes_equal_the_slow_loop(pair, bins):
    """P(class 1) is binned, and class 0 is what is left."""
    logits, labels = np.clip(pair[0], -6, 6), pair[1]
    fitted = ShrunkenHistogram.fit(logits, labels, bins=bins)
    p = reference.softmax(logits)[:, 1]
    index = np.array(reference.equal_mass_index(p, bins))
    n, expected = len(p), np.empty(len(p))
    bins_of = sorted(set(index.tolist()))
    count = [int((index == b).sum()) for b in bins_of]
    hits = [int((labels[index == b] == 1).sum()) for b in bins_of]
    mean = [float(p[index == b].mean()) for b in bins_of]
    m = choose_strength(np.array(count), np.array(hits, dtype=float), np.array(mean))
    for i in range(n):
        b = bins_of.index(index[i])
        frequency = min(max(hits[b] / count[b], 1 / (n + 2)), 1 - 1 / (n + 2))
        expected[i] = (count[b] * frequency + m * p[i]) / (count[b] + m)
    assert np.exp(fitted(logits))[:, 1] == pytest.approx(expected, abs=1e-7)


def test_a_calibrated_network_is_left_as_it_is_and_a_bad_one_is_binned():
    z, y = calibrated(3000, 3)
    left = ShrunkenHistogram.fit(z, y)
    assert left.weights.mean() > 0.4
    new, truth = calibrated(3000, 3, seed=1)
    assert metrics.nll(left(new), truth) < metrics.nll(new, truth) + 0.01
    assert ShrunkenHistogram.fit(5 * z, y).weights.mean() < left.weights.mean()
    assert metrics.nll(ShrunkenHistogram.fit(5 * z, y)(5 * new), truth) < 0.7 * metrics.nll(5 * new, truth)


def test_votes_of_a_forest():
    """Exact zeros and eleven distinct values."""
    rng = np.random.default_rng(0)
    p = rng.integers(0, 11, 500) / 10
    z, y = np.log(np.maximum(np.stack([1 - p, p], axis=1), 1e-30)), (rng.random(500) < 0.2 + 0.6 * p).astype(int)
    q = np.exp(METHODS["shrunken_histogram"](z, y)(z))
    assert np.isfinite(np.log(q)).all()
    for value in np.unique(p):
        assert len(np.unique(q[p == value].round(9), axis=0)) == 1
    assert metrics.nll(np.log(q), y) < metrics.nll(METHODS["temperature"](z, y)(z), y)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((np.zeros(3), np.zeros(4), np.zeros(4)), "cuts must be"),
        ((np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 3))), "cuts must be"),
        ((np.zeros((2, 3)), np.zeros((2, 4)), np.full((2, 4), 1.5)), "weights must lie"),
        ((np.zeros((2, 3)), np.full((2, 4), 1.5), np.zeros((2, 4))), "values must lie"),
    ],
)
def test_other_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        ShrunkenHistogram(*parameters)
