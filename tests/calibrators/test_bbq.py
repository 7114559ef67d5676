"""Bayesian binning against a slow loop over the binnings, and on real data."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import reference
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup._core.bins import equal_mass
from trueup.calibrators import BBQ


def slow_bbq(scores, hits, at):
    """One number of bins at a time, one bin at a time."""
    n = len(scores)
    log_scores, estimates = [], []
    for bins in range(max(1, int(n ** (1 / 3) / 10)), min(n, math.ceil(10 * n ** (1 / 3))) + 1):
        edges = equal_mass(np.array(scores), bins)
        left = len(edges) - 1
        score, theta = 0.0, []
        for b in range(left):
            inside = [i for i in range(n) if sum(scores[i] > e for e in edges[1:-1]) == b]
            m = sum(hits[i] for i in inside)
            middle = min(max((edges[b] + edges[b + 1]) / 2, 1e-6), 1 - 1e-6)
            alpha, beta = 2 / left * middle, 2 / left * (1 - middle)
            score += math.lgamma(2 / left) - math.lgamma(len(inside) + 2 / left)
            score += math.lgamma(m + alpha) - math.lgamma(alpha)
            score += math.lgamma(len(inside) - m + beta) - math.lgamma(beta)
            theta.append((alpha + m) / (alpha + beta + len(inside)))
        log_scores.append(score)
        estimates.append([theta[sum(x > e for e in edges[1:-1])] for x in at])
    weight = np.exp(np.array(log_scores) - max(log_scores))
    return weight @ np.array(estimates) / weight.sum()


@given(pairs(max_rows=15, max_classes=3), st.integers(0, 2**32 - 1))
def test_equals_the_slow_loop(pair, seed):
    logits, labels = pair
    probs = reference.softmax(logits).round(12)
    new = np.random.default_rng(seed).dirichlet(np.ones(logits.shape[1]), 5)
    fitted = BBQ.fit(np.log(np.maximum(probs, 1e-300)), labels)
    wanted = [slow_bbq(list(p), list(labels == k), x) for k, (p, x) in enumerate(zip(probs.T, new.T, strict=True))]
    wanted = np.array(wanted).T + 1e-9 * new
    np.testing.assert_allclose(np.exp(fitted(np.log(new))), wanted / wanted.sum(axis=1, keepdims=True), atol=1e-7)


def test_larger_data_equal_the_slow_loop():
    logits, labels = calibrated(100, 2, temperature=2.5)
    probs = reference.softmax(logits)
    at = np.linspace(0.01, 0.99, 20)
    curve = slow_bbq(list(probs[:, 1]), list(labels == 1), at)
    fitted = BBQ.fit(logits, labels)
    found = fitted.values[1][np.searchsorted(fitted.cuts[1], at)]
    np.testing.assert_allclose(found, curve, atol=1e-9)


def test_recovers_the_truth():
    logits, labels = calibrated(20_000, 2, temperature=2.5, scale=3.0)
    fitted = BBQ.fit(logits, labels)
    x = np.linspace(-8, 8, 9)
    new = np.stack([np.zeros(9), x], axis=1)
    np.testing.assert_allclose(np.exp(fitted(new))[:, 1], 1 / (1 + np.exp(-x / 2.5)), atol=0.06)


def test_ties_and_tiny_data():
    same = BBQ.fit(np.zeros((50, 3)), np.arange(50) % 2)
    np.testing.assert_allclose(np.exp(same(np.zeros((1, 3)))), [[0.5, 0.5, 0.0]], atol=0.02)
    one = BBQ.fit(np.array([[1.0, 0.0]]), [0])
    assert np.isfinite(one(np.array([[1.0, 0.0], [-1e4, 1e4]]))).all()
    far = np.array([[1e4, -1e4, 0.0]] * 5 + [[-1e4, 1e4, 0.0]] * 5)
    assert np.isfinite(BBQ.fit(far, [0] * 5 + [1] * 5)(far)).all()


def test_real_data(data):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = BBQ.fit(*val)(test.logits)
    assert metrics.ece(out, test.labels) < 0.35 * metrics.ece(*test)
    assert metrics.nll(out, test.labels) < 0.9 * metrics.nll(*test)
