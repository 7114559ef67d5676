"""Isotonic regression against slow loops and scikit-learn, by hand, and on real data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

import reference
from optional import torch
from strategies import calibrated, pairs
from trueup import load, metrics
from trueup.calibrators import Isotonic, IsotonicOvR, IsotonicPooled, Temperature
from trueup.calibrators.isotonic import pool_adjacent_violators


def test_a_near_miss_below_the_lowest_positive_is_a_block_of_its_own():
    below = 0.5 * (1 - 5e-15)  # further than rounding, nearer than anything else
    knots, values = pool_adjacent_violators(np.array([0.1, below, 0.5]), np.array([2]))
    assert knots.tolist() == [0.1, below, 0.5]
    assert values.tolist() == [0.0, 0.0, 1.0]


def tame(pair):
    """Logits small enough for equal probabilities to be told from near ones."""
    return np.clip(pair[0], -6, 6), pair[1]


def slow_isotonic(scores, hits):
    """Equal scores as one; then max over starts of the min over ends of the mean between: the textbook formula."""
    scores = [round(float(s), 12) for s in scores]
    places = sorted(set(scores))
    count = [sum(s == p for s in scores) for p in places]
    total = [sum(h for s, h in zip(scores, hits, strict=True) if s == p) for p in places]
    fitted = []
    for i in range(len(places)):
        best = -1.0
        for start in range(i + 1):
            means = [sum(total[start : end + 1]) / sum(count[start : end + 1]) for end in range(i, len(places))]
            best = max(best, min(means))
        fitted.append(best)
    return np.array(places), np.array(fitted)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=20))
def test_pooling_equals_the_slow_loop(drawn):
    scores, hits = np.array([s / 8 for s, _ in drawn]), np.array([h for _, h in drawn], bool)
    places, values = slow_isotonic(list(scores), list(hits))
    knots, at_knots = pool_adjacent_violators(scores, hits)
    assert (np.diff(knots) > 0).all()
    between = np.concatenate([places, (places[1:] + places[:-1]) / 2, [-1.0, 2.0]])
    np.testing.assert_allclose(np.interp(between, knots, at_knots), np.interp(between, places, values), atol=1e-12)
    knots, at_knots = pool_adjacent_violators(scores, hits, np.full(len(scores), 0.5))
    np.testing.assert_allclose(np.interp(between, knots, at_knots), np.interp(between, places, values), atol=1e-12)


@given(pairs(max_rows=60))
def test_equals_scikit_learn(pair):
    logits, labels = tame(pair)
    n = len(logits)
    confidence, correct = reference.claims(logits, labels)
    confidence = confidence.round(12)  # scikit-learn parts ties that differ by rounding
    peer = IsotonicRegression(out_of_bounds="clip").fit(confidence, correct)
    wanted = np.clip(peer.predict(confidence), 1 / (n + 2), 1 - 1 / (n + 2))
    np.testing.assert_allclose(Isotonic.fit(logits, labels).confidence(logits), wanted, atol=1e-7)


@given(pairs())
def test_one_vs_rest_equals_the_slow_loop(pair):
    logits, labels = tame(pair)
    n, classes = logits.shape
    probs = reference.softmax(logits)
    out = np.empty_like(probs)
    for k in range(classes):
        places, values = slow_isotonic(list(probs[:, k]), list(labels == k))
        out[:, k] = np.clip(np.interp(probs[:, k], places, values), 1 / (n + 2), 1 - 1 / (n + 2)) + 1e-9 * probs[:, k]
    out /= out.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(IsotonicOvR.fit(logits, labels)(logits)), out, atol=1e-9)


@given(pairs(max_rows=12, max_classes=3))
def test_pooled_equals_the_slow_loop(pair):
    logits, labels = tame(pair)
    probs = reference.softmax(logits)
    hits = np.zeros_like(probs)
    hits[np.arange(len(labels)), labels] = 1
    places, values = slow_isotonic(list(probs.ravel()), list(hits.ravel()))
    low = 1 / (probs.size + 2)
    out = np.clip(np.interp(probs, places, values), low, 1 - low) + 1e-9 * probs
    out /= out.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(IsotonicPooled.fit(logits, labels)(logits)), out, atol=1e-9)


@given(pairs(), st.sampled_from([np.float32, np.float64]))
def test_pooled_keeps_the_order(pair, dtype):
    logits = pair[0].astype(dtype)
    out = IsotonicPooled.fit(logits, pair[1])(logits)
    np.testing.assert_array_equal(out.argmax(axis=1), logits.argmax(axis=1))
    order = np.argsort(logits, axis=1, kind="stable")
    assert (np.diff(np.take_along_axis(out, order, axis=1), axis=1) >= -1e-6).all()


def test_pooled_keeps_strict_order_on_a_flat_stretch():
    flat = IsotonicPooled([0.2, 0.9], [0.4, 0.4])
    out = flat(np.log([[0.3, 0.45, 0.25]]))
    assert out[0, 1] > out[0, 0] > out[0, 2]
    np.testing.assert_allclose(np.exp(out), 1 / 3, atol=1e-8)
    narrow = flat(torch.log(torch.tensor([[0.3, 0.3000001, 0.3999999]])[:, [0, 2, 1]]))
    assert narrow.argmax() == 1


def test_a_missing_class_keeps_little():
    logits, labels = calibrated(200, 4)
    labels = np.where(labels == 3, 2, labels)
    fitted = IsotonicOvR.fit(logits, labels)
    assert np.exp(fitted(logits))[:, 3].max() < 0.02
    assert np.isfinite(fitted(logits)).all()


def test_scaled_is_temperature_then_curves():
    logits, labels = calibrated(2000, 5, temperature=2.5)
    fitted = IsotonicOvR.fit_scaled(logits, labels)
    scaler = Temperature.fit(logits, labels)
    after = IsotonicOvR.fit(scaler(logits), labels)
    np.testing.assert_allclose(fitted(logits), after(scaler(logits)), atol=1e-9)
    assert fitted.certificate.status == "converged"
    half = IsotonicOvR.fit_scaled(logits.astype(np.float16), labels)
    single = IsotonicOvR.fit_scaled(logits.astype(np.float16).astype(np.float32), labels)
    assert np.array_equal(half.knots, single.knots)


def test_many_rows_are_mapped_in_parts_as_in_one(monkeypatch):
    logits, labels = calibrated(500, 4)
    fitted = IsotonicOvR.fit(logits, labels)
    whole = fitted(logits)
    monkeypatch.setattr("trueup._core.native.LARGE_CHUNK", 64)
    np.testing.assert_allclose(fitted(logits), whole, rtol=1e-14)
    assert np.array_equal(IsotonicOvR.fit(logits, labels).values, fitted.values)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="logits must have at least 1 rows"):
        Isotonic.fit(np.zeros((0, 3)), [])
    with pytest.raises(ValueError, match="knots must be finite and ascending"):
        Isotonic([0.5, 0.2], [0.1, 0.2])
    with pytest.raises(ValueError, match="temperature must be one positive number"):
        IsotonicOvR([[0.5]], [[0.5]], -1.0)
    with pytest.raises(ValueError, match="logits must have the 2 classes of the fit, got 3"):
        IsotonicOvR([[0.5], [0.5]], [[0.5], [0.5]])(np.zeros((1, 3)))


@pytest.mark.parametrize("fit", [Isotonic.fit, IsotonicOvR.fit, IsotonicOvR.fit_scaled, IsotonicPooled.fit])
def test_real_data(data, fit):
    path = data / "logits" / "cifar10_densenet40.npz"
    val, test = load(path, split="val"), load(path, split="test")
    out = fit(*val)(test.logits)
    assert metrics.ece(out, test.labels) < 0.35 * metrics.ece(*test)
    assert metrics.nll(out, test.labels) < 0.9 * metrics.nll(*test)


def slow_centred(scores, hits):
    """The blocks of equal isotonic values, each at the mean of its scores."""
    places, fitted = slow_isotonic(scores, hits)
    level = {place: round(value, 9) for place, value in zip(places, fitted, strict=True)}
    blocks = {}
    for score, hit in zip(scores, hits, strict=True):
        blocks.setdefault(level[round(float(score), 12)], []).append((score, hit))
    curve = [(np.mean([s for s, _ in block]), np.mean([h for _, h in block])) for _, block in sorted(blocks.items())]
    return np.array(curve).T


@given(pairs(max_rows=25, max_classes=3))
def test_centred_curves_equal_the_slow_loop(pair):
    logits, labels = tame(pair)
    n, classes = logits.shape
    probs = reference.softmax(logits)
    out = np.empty_like(probs)
    for k in range(classes):
        knots, values = slow_centred(probs[:, k], (labels == k).astype(float))
        values = np.clip(values, 1 / (n + 2), 1 - 1 / (n + 2))
        out[:, k] = np.interp(probs[:, k], knots, values) + 1e-9 * probs[:, k]
    out /= out.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(IsotonicOvR.fit_centred(logits, labels)(logits)), out, atol=1e-9)


def test_centred_curves_rise_between_blocks_and_two_classes_complement():
    z, y = calibrated(400, 2, temperature=2.0)
    fitted = IsotonicOvR.fit_centred(z, y)
    assert (np.diff(fitted.values, axis=1) > 0).all()
    new = np.linspace(-8, 8, 200)
    p = np.exp(fitted(np.stack([np.zeros(200), new], axis=1)))[:, 1]
    assert (np.diff(p) >= 0).all()
    knots, values = fitted.knots[1], fitted.values[1]
    assert p == pytest.approx(np.interp(1 / (1 + np.exp(-new)), knots, values), abs=1e-8)


def test_knots_that_nearly_coincide_have_a_value():
    curves = IsotonicOvR([[0.0, 5e-324, 0.5]] * 2, [[0.1, 0.6, 0.9]] * 2)
    out = np.exp(curves(np.array([[0.0, -1000.0], [0.0, 0.0]])))
    np.testing.assert_allclose(out, [[0.9, 0.1], [0.5, 0.5]], atol=1e-8)
