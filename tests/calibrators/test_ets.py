"""Ensemble temperature scaling: against grids, and the laws of a mixture."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import softmax
from strategies import calibrated, pairs
from trueup import metrics
from trueup.calibrators import EnsembleTemperature, Temperature
from trueup.calibrators.ets import simplex_minimum
from trueup.calibrators.temperature import _brier, brier_inverse_temperature

CORNERS = [(i / 40, j / 40, (40 - i - j) / 40) for i in range(41) for j in range(41 - i)]


def slow_brier(probs, labels):
    return np.mean([sum((p - (k == y)) ** 2 for k, p in enumerate(row)) for row, y in zip(probs, labels, strict=True)])


def mixture(logits, temperature, weights):
    uniform = 1 / logits.shape[1]
    return weights[0] * softmax(logits / temperature) + weights[1] * softmax(logits) + weights[2] * uniform


@given(st.integers(0, 10_000))
def test_the_simplex_minimum_beats_every_point_of_a_grid(seed):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(rng.integers(1, 5), 3))  # singular half of the time
    square, linear = factors.T @ factors, rng.normal(size=3)
    w = simplex_minimum(square, linear)
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1)

    def value(w):
        return w @ square @ w - 2 * linear @ w

    assert value(w) <= min(value(np.array(corner)) for corner in CORNERS) + 1e-9


def test_the_temperature_of_least_brier_score_beats_a_grid():
    for seed, (temperature, scale) in enumerate([(2.5, 4.0), (0.4, 1.0), (1.0, 100.0), (1.0, 0.05)]):
        logits, labels = calibrated(300, 4, temperature=temperature, scale=scale, seed=seed)
        beta, certificate = brier_inverse_temperature(logits, labels)
        assert certificate.loss == pytest.approx(slow_brier(softmax(logits * beta), labels), abs=1e-10)
        grid = [slow_brier(softmax(logits * b), labels) for b in np.geomspace(0.02, 100, 81) / scale]
        assert certificate.loss <= min(grid) + 1e-9
        if certificate.status == "converged":
            around = [slow_brier(softmax(logits * beta * f), labels) for f in (0.999, 1.001)]
            assert min(around) >= certificate.loss - 1e-12


def test_the_derivatives_are_those_of_finite_differences():
    logits, labels = calibrated(40, 4)
    h, at = 1e-4, 0.7
    low, here, high = (_brier(logits, labels, at + step) for step in (-h, 0.0, h))
    assert here[0] == pytest.approx(slow_brier(softmax(at * logits), labels), abs=1e-12)
    assert here[1] == pytest.approx((high[0] - low[0]) / (2 * h), rel=1e-6)
    assert here[2] == pytest.approx((high[1] - low[1]) / (2 * h), rel=1e-6)


def test_a_large_sample_takes_the_valley_of_a_small_one():
    logits, labels = calibrated(9000, 3, temperature=3.0, scale=6.0)
    beta, _ = brier_inverse_temperature(logits, labels)
    assert 1 / beta == pytest.approx(3.0, rel=0.05)


@pytest.mark.filterwarnings("ignore:temperature stopped at its bound")
@settings(max_examples=15)
@given(pairs(max_rows=30, max_classes=4, min_rows=4))
def test_the_weights_beat_every_mixture_of_a_grid(pair):
    logits, labels = pair
    for loss, slow in (
        ("brier", slow_brier),
        ("nll", lambda p, y: -np.mean(np.log(p[np.arange(len(y)), y].clip(1e-300)))),
    ):
        ets = EnsembleTemperature.fit(logits, labels, loss=loss)
        temperature = ets.temperature
        assert np.exp(ets(logits)) == pytest.approx(mixture(logits, temperature, ets.weights), abs=1e-9)
        best = min(slow(mixture(logits, temperature, corner), labels) for corner in CORNERS[::7])
        trace = 2e-3 if ets.weights[2] > 0.998 else 0.0  # what keeping the prediction may cost
        assert slow(mixture(logits, temperature, ets.weights), labels) <= best + trace + 1e-9


def test_a_known_mixture_is_recovered():
    rng = np.random.default_rng(0)
    logits, labels = calibrated(100_000, 5, scale=3.0)
    labels = np.where(rng.random(len(labels)) < 0.3, rng.integers(0, 5, len(labels)), labels)
    ets = EnsembleTemperature.fit(logits, labels, loss="nll")
    truth = 0.7 * softmax(logits[:500]) + 0.06
    assert np.exp(ets(logits[:500])) == pytest.approx(truth, abs=0.02)
    assert ets.weights[2].item() == pytest.approx(0.3, abs=0.03)


def test_chance_labels_keep_the_predictions():
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 4
    for scale in (0.02, 1.0, 500.0):
        logits = (rng.normal(size=(3000, 4)) * scale).astype(np.float32)
        for loss in ("brier", "nll"):
            after = EnsembleTemperature.fit(logits, labels, loss=loss)(logits)
            assert (after.argmax(axis=1) == logits.argmax(axis=1)).all()
            assert np.exp(after).max() < 0.3


def test_constant_rows_are_told_nothing_of():
    logits = np.zeros((9, 3))
    logits[0, 0] = 5.0
    for rows in (logits, logits * 0):
        for loss in ("brier", "nll"):
            after = EnsembleTemperature.fit(rows, [1] * 9, loss=loss)(rows)
            assert np.isfinite(after).all()
            assert after[1:] == pytest.approx(np.log(1 / 3))


def test_separable_labels_end_at_the_bound_with_a_warning():
    logits = np.random.default_rng(0).normal(size=(50, 3))
    with pytest.warns(UserWarning, match="temperature stopped at its bound"):
        ets = EnsembleTemperature.fit(logits, logits.argmax(axis=1), loss="nll")
    assert np.isfinite(ets(logits * 1e4)).all()


def test_both_losses_are_no_worse_than_temperature_in_their_own_score():
    logits, labels = calibrated(2000, 6, temperature=2.0, scale=5.0, seed=3)
    scaled = Temperature.fit(logits, labels)(logits)
    by_nll = EnsembleTemperature.fit(logits, labels, loss="nll")(logits)
    by_brier = EnsembleTemperature.fit(logits, labels, loss="brier")(logits)
    assert metrics.nll(by_nll, labels) <= metrics.nll(scaled, labels) + 1e-12
    assert metrics.brier(by_brier, labels) <= metrics.brier(scaled, labels) + 1e-12


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match='loss must be "brier" or "nll", got .ece.'):
        EnsembleTemperature.fit([[0.0, 1.0]], [1], loss="ece")
    with pytest.raises(ValueError, match="weights must be three, not negative, of sum 1, not all on the uniform"):
        EnsembleTemperature(1.0, [0.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="temperature must be one positive number, got -1"):
        EnsembleTemperature(-1.0, [1.0, 0.0, 0.0])


def test_real_predictions_get_better(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        val, test = ((file[f"{half}_logits"], file[f"{half}_labels"]) for half in ("val", "test"))
    ets = EnsembleTemperature.fit(*val, loss="brier")
    assert ets.temperature == pytest.approx(2.799, abs=1e-3)
    for loss, nll in (("brier", 0.22693), ("nll", 0.22556)):
        after = EnsembleTemperature.fit(*val, loss=loss)(test[0])
        assert metrics.nll(after, test[1]) == pytest.approx(nll, abs=2e-5)
        assert metrics.ece(after, test[1]) < 0.012
