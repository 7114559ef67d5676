"""I-Max binning: its formulas against slow loops, its laws, and real data."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit, logit

import reference
from optional import torch
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup._core.namespace import NUMPY
from trueup.calibrators import IMax, IMaxShared
from trueup.calibrators.binning import _boundaries, _odds, _representatives, _seeds


def softplus(x):
    return math.log1p(math.exp(x))


def test_boundaries_by_the_formula_and_by_their_meaning():
    phi = np.array([-3.0, -1.0, 0.5, 4.0])
    formula = [
        math.log((softplus(b) - softplus(a)) / (softplus(-a) - softplus(-b))) for a, b in itertools.pairwise(phi)
    ]
    np.testing.assert_allclose(_boundaries(phi), formula, atol=1e-12)

    def code_length(x, r):  # nats for a label of odds x, told the odds r
        return -expit(x) * math.log(expit(r)) - expit(-x) * math.log(expit(-r))

    # On a cut both neighbours' representatives describe the label equally well.
    for a, b, g in zip(phi, phi[1:], _boundaries(phi), strict=False):
        assert g == pytest.approx(brentq(lambda x, a=a, b=b: code_length(x, a) - code_length(x, b), a, b))
    np.testing.assert_array_equal(_boundaries(np.array([1.0, 1.0, 1.0])), [1.0, 1.0])
    far = _boundaries(np.array([-700.0, -600.0, 600.0, 700.0]))
    assert np.isfinite(far).all()
    assert (np.diff(far) > 0).all()


def information(odds, cuts):
    """Nats that the bin tells about a label drawn from σ(λ)."""
    index = np.searchsorted(cuts, odds, side="right")
    p, overall = expit(odds), expit(odds).mean()

    def entropy(q):
        return -sum(x * math.log(x) for x in (q, 1 - q) if x > 0)

    inside = [p[index == b] for b in range(len(cuts) + 1)]
    return entropy(overall) - sum(len(q) / len(p) * entropy(q.mean()) for q in inside if len(q))


@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_representatives_are_means_and_the_information_rises(seed, bins):
    odds = np.sort(np.random.default_rng(seed).normal(2, 4, 300))
    start = _seeds(odds, np.arange(len(odds) + 1.0), bins, seed)
    phi = _representatives(odds, np.ones(len(odds)), start)
    cuts = _boundaries(phi)
    index = np.searchsorted(cuts, odds, side="right")
    if len(np.unique(index)) == bins:
        means = [logit(expit(odds[index == b]).mean()) for b in range(bins)]
        np.testing.assert_allclose(phi, means, atol=1e-8)
    assert information(odds, cuts) >= information(odds, _boundaries(start)) - 1e-12
    quantiles = np.quantile(odds, np.arange(1, bins) / bins)
    assert information(odds, cuts) >= 0.97 * information(odds, quantiles)


def test_representatives_do_not_overflow():
    odds = np.sort(np.concatenate([np.full(5, -700.0), [-40.0, 0.0, 38.0, 60.0], np.full(5, 700.0)]))
    phi = _representatives(odds, np.ones(len(odds)), np.array([-700.0, -50.0, 0.0, 50.0, 700.0]))
    assert np.isfinite(phi).all()
    assert (np.diff(phi) >= 0).all()
    assert phi[-1] == pytest.approx(
        60 + math.log(6)
    )  # the mean of 60 and five of 700, whose 1 − σ is nothing beside it


@given(pairs(), st.integers(1, 6))
def test_values_are_frequencies(pair, bins):
    logits, labels = pair
    fitted = IMax.fit(logits, labels, bins=bins)
    confidence, correct = reference.claims(logits, labels)
    out = fitted.confidence(logits)
    for value in np.unique(out):
        inside = out == value
        assert correct[inside].mean() == pytest.approx(value)
    assert len(np.unique(out)) <= bins
    clear = (confidence < 1 - 1e-9) & (confidence > 1e-9)  # elsewhere the confidence no longer tells the odds apart
    near = np.abs(logit(confidence)[clear, None] - fitted.cuts).min(axis=1, initial=1.0) < 1e-6
    from_confidence = fitted.map_confidence(NUMPY, logit(confidence))
    np.testing.assert_allclose(from_confidence[clear][~near], out[clear][~near])


@given(pairs(), st.integers(1, 6))
def test_shared_values_are_frequencies_of_all_pairs(pair, bins):
    logits, labels = pair
    fitted = IMaxShared.fit(logits, labels, bins=bins)
    probs = reference.softmax(logits).clip(1e-300, None)
    others = np.array([[sum(row) - row[k] for k in range(len(row))] for row in probs]).clip(1e-300, None)
    odds = np.log(probs) - np.log(others)
    if (np.abs(odds[..., None] - fitted.cuts).min(initial=1.0) < 1e-6) or np.abs(odds).max() > 30:
        return
    index = np.searchsorted(fitted.cuts, odds, side="right")
    hits = np.arange(logits.shape[1]) == labels[:, None]
    low = 1 / (logits.size + 2)
    q = np.empty_like(probs)
    for b in np.unique(index):
        q[index == b] = min(max(hits[index == b].mean(), low), 1 - low)
    q += 1e-9 * probs
    np.testing.assert_allclose(np.exp(fitted(logits)), q / q.sum(axis=1, keepdims=True), atol=1e-9)


def test_order_and_duplication_of_samples_do_not_matter():
    logits, labels = calibrated(1500, 4, temperature=2.5)
    fitted = IMax.fit(logits, labels)
    order = np.random.default_rng(0).permutation(1500)
    for again in (IMax.fit(logits[order], labels[order]), IMax.fit(np.tile(logits, (3, 1)), np.tile(labels, 3))):
        np.testing.assert_allclose(again.cuts, fitted.cuts, atol=1e-9)
        np.testing.assert_allclose(again.values, fitted.values, atol=1e-12)
    assert fitted.margin == pytest.approx(1 / 1502)
    assert not np.array_equal(IMax.fit(logits, labels, seed=1).cuts, fitted.cuts)


def test_single_precision_tells_high_odds_apart():
    logits = torch.tensor([[20.0, 0.0], [30.0, 0.0], [50.0, 0.0], [60.0, 0.0]] * 10)
    labels = torch.tensor([1, 1, 0, 0] * 10)
    fitted = IMax([40.0], [0.5, 1.0])
    np.testing.assert_array_equal(fitted.confidence(logits)[:4], [0.5, 0.5, 1.0, 1.0])
    np.testing.assert_allclose(fitted(logits).exp().amax(dim=1)[:4], [0.5, 0.5, 1.0, 1.0], atol=1e-5)
    assert IMax.fit(logits, labels, bins=2).cuts.item() < 60


def test_bins_are_left_closed():
    assert IMax([0.0], [0.6, 0.9]).confidence(np.zeros((1, 2))) == 0.9
    logits = np.array([[1.0, 0.2, -0.3]])
    top = _odds(NUMPY, logits)[0, :1]
    shared = IMaxShared(top, [0.1, 0.8])
    np.testing.assert_allclose(np.exp(shared(logits)), [[0.8, 0.1, 0.1]], atol=1e-8)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="bins must be a whole number"):
        IMax.fit(np.eye(3), [0, 1, 2], bins=0)
    with pytest.raises(ValueError, match="values must have .* entries for cuts"):
        IMaxShared([0.0], [0.5])


@pytest.mark.parametrize("fit", [IMax.fit, IMaxShared.fit])
def test_real_data(data, fit):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = fit(*val)(test.logits)
    assert metrics.ece(out, test.labels) < 0.4 * metrics.ece(*test)
    assert metrics.nll(out, test.labels) < metrics.nll(*test)
