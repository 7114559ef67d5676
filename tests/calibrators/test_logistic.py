"""Platt scaling and beta calibration: against a general minimiser, known truths, and data that break others' fits."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from optional import torch
from strategies import calibrated, pairs
from trueup import METHODS, metrics
from trueup._core.namespace import NUMPY
from trueup.calibrators import Beta, Platt
from trueup.calibrators.logistic import log_probs_and_rests


def slow_targets(labels, k):
    positive = sum(int(y == k) for y in labels)
    negative = len(labels) - positive
    return [(positive + 1) / (positive + 2) if y == k else 1 / (negative + 2) for y in labels]


def slow_logs(row, k):
    """ln p_k and ln(1 − p_k), each from sums of its own."""
    top = max(row)
    total = math.log(sum(math.exp(v - top) for v in row)) + top
    others = [v for j, v in enumerate(row) if j != k]
    peak = max(others)
    return row[k] - total, math.log(sum(math.exp(v - peak) for v in others)) + peak - total


def slow_loss(parameters, features, targets):
    total = 0.0
    for x, t in zip(features, targets, strict=True):
        odds = sum(w * v for w, v in zip(parameters, [*x, 1.0], strict=True))
        total += np.logaddexp(0.0, odds) - t * odds
    return total / len(targets)


def test_logs_are_exact_where_a_probability_is_all_but_one():
    z = np.array([[100.0, 0.0, -3.0], [0.0, 0.0, -800.0], [1e4, 1e4 - 60, 0.0]])
    log_p, log_rest = log_probs_and_rests(NUMPY, z)
    for i in range(3):
        for k in range(3):
            assert (float(log_p[i, k]), float(log_rest[i, k])) == pytest.approx(slow_logs(z[i].tolist(), k), abs=1e-11)
    assert float(log_rest[2, 0]) == pytest.approx(-60)


@given(pairs(max_rows=25, max_classes=4, min_rows=6))
def test_platt_is_no_worse_than_a_general_minimiser(pair):
    logits, labels = pair
    assume((logits.argmax(axis=1) != labels).any())  # where all are right, the identity may be kept
    platt = Platt.fit(logits, labels)
    for k in range(logits.shape[1]):
        odds = [[p - r] for p, r in (slow_logs(row, k) for row in logits)]
        scale = np.std(odds) or 1.0
        targets = slow_targets(labels, k)
        found = slow_loss([platt.slope[k].item(), platt.offset[k].item()], odds, targets)
        scaled = [[x / scale] for (x,) in odds]
        best = minimize(slow_loss, [0.0, 0.0], (scaled, targets), method="BFGS").fun
        assert found <= best + 1e-9


@settings(max_examples=15)
@given(pairs(max_rows=25, max_classes=3, min_rows=6))
def test_beta_is_no_worse_than_a_general_minimiser_within_its_bounds(pair):
    logits, labels = pair
    assume((logits.argmax(axis=1) != labels).any())
    beta = Beta.fit(logits, labels)
    assert bool((beta.a >= 0).all())
    assert bool((beta.b >= 0).all())
    for k in range(logits.shape[1]):
        x = np.array([[p, -r] for p, r in (slow_logs(row, k) for row in logits)])
        scale = x.std(axis=0) + 1e-9
        targets = slow_targets(labels, k)
        found = slow_loss([beta.a[k].item(), beta.b[k].item(), beta.c[k].item()], x, targets)
        bounds = [(0, None), (0, None), (None, None)]
        best = minimize(slow_loss, [0.1, 0.1, 0.0], (x / scale, targets), method="L-BFGS-B", bounds=bounds).fun
        assert found <= best + 1e-8


@pytest.mark.parametrize("method", [Platt, Beta])
def test_a_curve_that_falls_is_left_to_platt_alone(method):
    logits, labels = calibrated(2000, 2)
    fitted = method.fit(logits, 1 - labels)  # the network is wrong whenever it can be
    if method is Platt:
        assert float(fitted.slope.max()) < 0
    else:
        assert fitted.a.tolist() == fitted.b.tolist() == [0, 0]
        share = torch.softmax(torch.as_tensor(fitted(logits)), dim=1)[:, 1]
        assert float(share.std()) < 1e-12
        assert float(share[0]) == pytest.approx(np.mean(labels == 0), abs=1e-3)


def test_platt_recovers_the_curve_that_made_the_labels():
    rng = np.random.default_rng(0)
    odds = rng.normal(size=100_000) * 3
    labels = (rng.random(len(odds)) < 1 / (1 + np.exp(-(0.5 * odds - 1)))).astype(int)
    logits = np.stack([np.zeros_like(odds), odds], axis=1)
    platt = Platt.fit(logits, labels)
    assert platt.slope == pytest.approx([0.5, 0.5], abs=0.01)
    assert platt.offset == pytest.approx([1.0, -1.0], abs=0.02)
    beta = Beta.fit(logits, labels)
    assert beta.a[1].item() == pytest.approx(0.5, abs=0.03)
    assert beta.b[1].item() == pytest.approx(0.5, abs=0.03)


def test_beta_recovers_the_curve_that_made_the_labels():
    rng = np.random.default_rng(1)
    p = rng.beta(2, 2, size=200_000)
    truth = 1 / (1 + np.exp(-(2.0 * np.log(p) - 0.5 * np.log1p(-p) + 0.7)))
    beta = Beta.fit(np.log(np.stack([1 - p, p], axis=1)), (rng.random(len(p)) < truth).astype(int))
    assert (beta.a[1].item(), beta.b[1].item(), beta.c[1].item()) == pytest.approx((2.0, 0.5, 0.7), abs=0.05)


@pytest.mark.parametrize("method", [Platt, Beta])
def test_two_classes_are_one_curve_and_its_complement(method):
    logits, labels = calibrated(500, 2, temperature=2)
    fitted = method.fit(logits, labels)
    if method is Platt:
        assert fitted.slope[0].item() == pytest.approx(fitted.slope[1].item(), rel=1e-9)
        assert fitted.offset[0].item() == pytest.approx(-fitted.offset[1].item(), rel=1e-9)
        odds = fitted.slope[1].item() * (logits[:, 1] - logits[:, 0]) + fitted.offset[1].item()
    else:
        assert fitted.a.tolist() == pytest.approx(fitted.b.tolist()[::-1], rel=1e-9)
        log_p, log_rest = (x[:, 1] for x in log_probs_and_rests(NUMPY, logits))
        odds = fitted.a[1].item() * log_p - fitted.b[1].item() * log_rest + fitted.c[1].item()
    after = fitted(logits)
    assert after[:, 1] - after[:, 0] == pytest.approx(odds)


@pytest.mark.parametrize("method", [Platt, Beta])
@pytest.mark.parametrize("scale", [0.02, 1.0, 500.0])
def test_separable_and_missing_classes_have_finite_curves(method, scale):
    logits = np.random.default_rng(0).normal(size=(60, 5)) * scale
    labels = logits[:, :4].argmax(axis=1)  # class 4 never comes
    fitted = method.fit(logits, labels)
    assert fitted.certificate.status == "converged"
    after = fitted(np.concatenate([logits, logits * 1e4 / scale]))
    assert np.isfinite(after).all()
    assert np.exp(after[:60, 4]).mean() < 0.1
    assert metrics.accuracy(after[:60], labels) >= 0.8


@given(st.integers(1, 6), st.integers(2, 4))
def test_tiny_samples_work(n, classes):
    logits, labels = calibrated(n, classes, seed=n)
    for method in (Platt, Beta):
        assert np.isfinite(method.fit(logits, labels)(logits)).all()
        assert np.isfinite(method.fit(np.zeros_like(logits), labels)(logits)).all()


def test_classes_in_blocks_are_fitted_as_all_at_once(monkeypatch):
    logits, labels = calibrated(200, 7)
    for method in (Platt, Beta):
        whole = method.fit(logits, labels)
        with monkeypatch.context() as small:
            small.setattr("trueup._core.native.FIT_CHUNK", 500)
            parts = method.fit(logits, labels)
        for name, value in whole.config().items():
            assert getattr(parts, name) == pytest.approx(value, rel=1e-6, abs=1e-9)
        assert parts.certificate.loss == pytest.approx(whole.certificate.loss)


def test_wrong_parameters_are_named():
    with pytest.raises(ValueError, match="slope and offset must have the same classes, got .'slope': 2, 'offset': 3"):
        Platt([1.0, 1.0], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="a must be finite, one number for each of at least 2 classes"):
        Beta([1.0, math.nan], [1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="a and b must not be negative"):
        Beta([1.0, -1.0], [1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="logits must have the 2 classes of the fit, got 3"):
        Platt([1.0, 1.0], [0.0, 0.0])(np.zeros((1, 3)))


def test_real_predictions_get_better(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        val, test = ((file[f"{half}_logits"], file[f"{half}_labels"]) for half in ("val", "test"))
    for method, nll in ((Platt, 0.2222), (Beta, 0.2229)):
        after = method.fit(*val)(test[0])
        assert metrics.nll(after, test[1]) == pytest.approx(nll, abs=2e-4)
        assert metrics.ece(after, test[1]) < 0.01


def test_beta_with_plain_targets_is_a_logistic_regression_on_the_labels():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.01, 0.99, 1500)
    z, y = np.log(np.stack([1 - p, p], axis=1)), (rng.random(1500) < p**2).astype(int)
    features = np.stack([np.log(p), -np.log1p(-p)], axis=1)
    free = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000, solver="newton-cg").fit(features, y)
    assert (free.coef_ > 0).all()
    found = np.exp(Beta.fit(z, y, targets="plain")(z))[:, 1]
    assert found == pytest.approx(free.predict_proba(features)[:, 1], abs=1e-6)
    assert not np.allclose(found, np.exp(Beta.fit(z, y)(z))[:, 1], atol=1e-6)
    with pytest.raises(ValueError, match="targets must be"):
        Beta.fit(z, y, targets="smooth")


@pytest.mark.parametrize("method", ["platt", "beta", "quadratic"])
@pytest.mark.parametrize("sample_weight", [None, np.arange(1.0, 21)])
def test_labels_that_are_all_right_leave_a_sure_network_as_sure(method, sample_weight):
    z = np.random.default_rng(0).normal(size=(20, 3)) * 10
    y = z.argmax(axis=1)
    mapped = METHODS[method](z, y, sample_weight=sample_weight)(z)
    assert metrics.nll(mapped, y, sample_weight=sample_weight) <= metrics.nll(z, y, sample_weight=sample_weight) + 1e-12
    unsure = METHODS[method](z / 10, y, sample_weight=sample_weight)(
        z / 10
    )  # where the curves do better, they are taken
    assert (
        metrics.nll(unsure, y, sample_weight=sample_weight) < metrics.nll(z / 10, y, sample_weight=sample_weight) - 0.01
    )
