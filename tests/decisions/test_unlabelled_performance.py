"""Performance without labels: intervals hold what labels show, and the formulas are those of the expectation."""

import json
import math
import warnings

import numpy as np
import pytest
from scipy.special import softmax

from trueup import METHODS
from trueup._core.errors import InputError
from trueup.calibrators import Temperature
from trueup.decisions import PerformanceMetrics, estimate_performance, estimate_prior
from trueup.decisions.refits import Refits
from trueup.decisions.unlabelled_performance import soft_roc_auc
from trueup.metrics.ranking import roc_area


def draw(n, seed, sharper=2.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 4)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return sharper * z, y


def test_intervals_hold_what_labels_show():
    held = []
    for seed in range(40):
        z, y = draw(900, seed)
        asked = PerformanceMetrics(("accuracy", "error_above", "f1", "roc_auc"), 0.8)
        result = estimate_performance(
            z[:600], val=(z[600:], y[600:]), metrics=asked,
            n_resamples=60, seed=seed,
        )  # fmt: skip
        soft = z[:600] / float(Temperature.fit(z[600:], y[600:]).temperature)
        p = softmax(soft, axis=1)
        kept, event, predicted = p.max(axis=1) >= 0.8, y[:600] == 1, z[:600].argmax(axis=1)
        truth = {
            "accuracy": (predicted == y[:600]).mean(),
            "error_above": (predicted != y[:600])[kept].mean(),
            "f1": 2 * (event & (predicted == 1)).sum() / (event.sum() + (predicted == 1).sum()),
            "roc_auc": roc_area(p[:, 1], event.astype(float)),
        }
        held.append([result[name].low <= truth[name] <= result[name].high for name in truth])
    assert np.mean(held) > 0.86
    assert (np.mean(held, axis=0) > 0.8).all()


def test_point_estimates_are_the_expected_counts():
    p = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    result = estimate_performance(np.log(p), metrics=("accuracy", "error_above", "f1", "roc_auc"), n_resamples=5)
    assert result["accuracy"].value == pytest.approx((0.9 + 0.6 + 0.8) / 3)
    assert result["error_above"].value == pytest.approx(1 - (0.9 + 0.6 + 0.8) / 3)
    assert result["f1"].value == pytest.approx(2 * 0.8 / (1 + 1.3))
    high = estimate_performance(np.log(p), metrics=PerformanceMetrics("error_above", 0.85), n_resamples=5)
    assert high["error_above"].value == pytest.approx(0.1)
    json.dumps(result.to_dict(), allow_nan=False)
    assert "assuming calibrated" in str(result)


def test_hard_labels_give_the_usual_area():
    rng = np.random.default_rng(0)
    s, y = rng.random(200).round(1), rng.integers(0, 2, 200).astype(float)
    assert soft_roc_auc(s, y) == pytest.approx(roc_area(s, y))


@pytest.mark.parametrize("method", ["temperature", "bias_corrected_temperature"])
def test_one_newton_step_is_nearly_a_new_fit(method):
    z, y = draw(3000, 1)
    refits = Refits(method, z, y)
    again, rows = refits.draw(np.random.default_rng(0))
    exact = METHODS[method](z[rows], y[rows])
    moved, expected, start = (softmax(one(z), axis=1) for one in (again, exact, refits.calibrator))
    assert np.abs(moved - expected).max() < 0.15 * np.abs(expected - start).max()


def test_other_methods_are_fitted_anew_and_shift_is_corrected():
    z, y = draw(800, 2)
    result = estimate_performance(z[:400], val=(z[400:], y[400:]), calibrate="vector", n_resamples=5)
    assert 0.5 < result["accuracy"].value < 0.9
    shifted = estimate_performance(z[:400], val=(z[400:], y[400:]), shift=True, n_resamples=5)
    assert shifted.shifted
    assert "with new class frequencies" in str(shifted)


def shifted_rows(seed, n=1500):
    """Draw labelled rows with equal class frequencies, and new rows in which class 0 is frequent."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([rng.integers(0, 3, n), rng.choice(3, n, p=[0.8, 0.15, 0.05])])
    z = 2 * (1.5 * np.eye(3)[y] + rng.normal(size=(2 * n, 3)))
    return (z[:n], y[:n]), (z[n:], y[n:])


def test_under_shift_the_network_and_its_correction_are_estimated_separately():
    covered = []
    for seed in range(30):
        val, (z, y) = shifted_rows(seed)
        result = estimate_performance(z, val=val, shift=True, n_resamples=60, seed=seed)
        corrected = np.asarray(estimate_prior(z, val=val, n_resamples=1).calibrator(z)).argmax(axis=1)
        accuracy = [float((predicted == y).mean()) for predicted in (z.argmax(axis=1), corrected)]
        assert accuracy[1] > accuracy[0] + 0.03
        estimates = result["accuracy"], result.corrected["accuracy"]
        covered.append([one.low <= truth <= one.high for one, truth in zip(estimates, accuracy, strict=True)])
    assert (np.mean(covered, axis=0) > 0.8).all()
    assert set(result.to_dict()["corrected"]) == {"accuracy"}
    assert "as deployed" in str(result)
    assert "corrected" in str(result)
    assert estimate_performance(z, val=val, n_resamples=5).corrected is None


def test_bad_input():
    z, _ = draw(20, 0)
    for options, words in (
        ({"metrics": ("recall",)}, "metrics must be of"),
        ({"metrics": PerformanceMetrics(event=4)}, "event must be a class"),
        ({"shift": True}, "needs val"),
        ({"level": 1.0}, "level must lie"),
    ):
        with pytest.raises(ValueError, match=words):
            estimate_performance(z, **options)


def test_a_network_that_is_wrong_or_right_everywhere_is_said_to_be():
    z = 3 * np.random.default_rng(0).normal(size=(700, 3))
    best = z.argmax(axis=1)
    with pytest.warns(UserWarning, match="stopped at its bound"):
        wrong = estimate_performance(z[300:], val=(z[:300], (best[:300] + 1) % 3), n_resamples=20)["accuracy"]
    assert wrong.high < 0.02
    with pytest.warns(UserWarning, match="stopped at its bound"):
        right = estimate_performance(z[300:], val=(z[:300], best[:300]), n_resamples=20)["accuracy"]
    assert right.low < right.value < 1
    assert right.value == pytest.approx(300.5 / 301)


def test_what_cannot_be_estimated_is_said_without_warnings():
    z = np.zeros((5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = estimate_performance(z, metrics=PerformanceMetrics(("error_above", "roc_auc"), 0.99), n_resamples=5)
    assert math.isnan(result["error_above"].value)
    with pytest.raises(InputError, match="val must have the 3 classes of logits, got 4"):
        estimate_performance(z, val=(np.zeros((5, 4)), np.arange(5) % 4))
    with pytest.raises(InputError, match="threshold must lie between 0 and 1"):
        estimate_performance(z, metrics=PerformanceMetrics(threshold=5))
