"""Weighted fits against scikit-learn, slow sums, and what weights of rows do to folds and compositions."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from optional import torch
from strategies import calibrated
from trueup import METHODS, metrics
from trueup._core.arrays import as_weighted
from trueup._core.bins import equal_mass
from trueup._core.loss_sums import _numpy_temperature, _numpy_vector, temperature_sums, vector_sums
from trueup.calibrators import Beta, Isotonic, Platt, Temperature, chain, choose, cross_fit, grid, one_vs_rest
from trueup.calibrators.compose import simplest
from trueup.integrations.sklearn import CalibratedClassifier, LogitCalibrator

RNG = np.random.default_rng(0)
Z, Y = calibrated(300, 2, temperature=2.0)
W = RNG.gamma(0.5, size=300)
ODDS = Z[:, 1] - Z[:, 0]


def test_isotonic_equals_scikit_learn():
    p = expit(ODDS)
    peer = IsotonicRegression(out_of_bounds="clip").fit(p, Y, sample_weight=W)
    fitted = Isotonic.fit(Z, Y, sample_weight=W)
    margin = 1 / (W.sum() ** 2 / (W @ W) + 2)
    wanted = np.clip(peer.predict(p), margin, 1 - margin)
    np.testing.assert_allclose(fitted.confidence(Z), wanted, atol=1e-8)
    assert fitted.event


def test_platt_with_plain_targets_equals_logistic_regression():
    peer = LogisticRegression(C=np.inf, tol=1e-12, solver="newton-cholesky").fit(ODDS[:, None], Y, sample_weight=W)
    fitted = Platt.fit(Z, Y, targets="plain", sample_weight=W)
    assert float(fitted.slope[1]) == pytest.approx(peer.coef_[0, 0], abs=1e-8)
    assert float(fitted.offset[1]) == pytest.approx(peer.intercept_[0], abs=1e-8)


def test_beta_with_plain_targets_equals_logistic_regression_on_both_logarithms():
    p = RNG.beta(1, 2, 1000)
    y, w = (RNG.random(1000) < p**1.5).astype(int), RNG.gamma(2.0, size=1000)
    x = np.stack([np.log(p), -np.log1p(-p)], axis=1)
    peer = LogisticRegression(C=np.inf, tol=1e-12, solver="newton-cholesky").fit(x, y, sample_weight=w)
    z = np.stack([np.log1p(-p), np.log(p)], axis=1)
    found = np.exp(Beta.fit(z, y, targets="plain", sample_weight=w)(z))[:, 1]
    np.testing.assert_allclose(found, peer.predict_proba(x)[:, 1], atol=1e-8)


@pytest.mark.parametrize("classes", [2, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_sums_equal_the_slow_ones(classes, dtype):
    z, y = (torch.from_numpy(x) for x in calibrated(60, classes))
    z, w = z.to(dtype), torch.from_numpy(RNG.gamma(1.0, size=60))
    log_p = torch.log_softmax(0.7 * z.double(), dim=1)
    wanted = float(-(w * log_p.gather(1, y[:, None])[:, 0]).sum())
    for quick, error in ((False, 1e-12), (True, 1e-5)):
        found = temperature_sums(z, y, 0.7, w, quick=quick)
        assert found[0] == pytest.approx(wanted, rel=error)
        assert found == pytest.approx(
            _numpy_temperature(z.double().numpy(), y.numpy(), 0.7, np.asarray(w)), rel=10 * error
        )
        weight, bias, shift = RNG.normal(1, 0.2, classes), RNG.normal(size=classes), RNG.normal(size=60)
        found = vector_sums(z, y, weight, bias, scale=0.7, shift=shift, sample_weight=w, quick=quick)
        slow = _numpy_vector(z.double().numpy(), y.numpy(), (weight, bias), 0.7, shift, np.asarray(w))
        np.testing.assert_allclose(found, slow, rtol=10 * error, atol=100 * error)


def test_weights_add_up_to_the_effective_number_of_rows():
    z, y, w = as_weighted(Z, Y, np.where(np.arange(300) < 100, 0.0, W))
    assert len(z) == len(y) == 200
    kept = W[100:]
    assert float(w.sum()) == pytest.approx(kept.sum() ** 2 / (kept @ kept))
    assert as_weighted(Z, Y, np.full(300, 7.0))[2] is None
    huge = as_weighted(Z, Y, W * 1e300)[2]
    np.testing.assert_allclose(huge, as_weighted(Z, Y, W)[2])


def test_weighted_chunks_have_equal_weight():
    scores = np.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(equal_mass(scores, 2, np.array([3.0, 1.0, 1.0, 1.0])), [0, 0.15, 1])
    np.testing.assert_allclose(equal_mass(scores, 2, np.ones(4)), equal_mass(scores, 2))


def test_compositions_pass_weights_on():
    copies = np.repeat(np.arange(300), whole := RNG.integers(0, 4, 300))
    for fit in (chain("temperature", "vector"), one_vs_rest("temperature")):
        np.testing.assert_allclose(fit(Z, Y, sample_weight=whole)(Z), fit(Z[copies], Y[copies])(Z), atol=1e-5)
    heavy = np.where((ODDS > 0) == Y, 1.0, 1.5)
    for fit in (grid("matrix", penalty=[1e-3, 1.0]), choose(["temperature", "svs"])):
        calm = fit(Z, Y, sample_weight=heavy)(Z)
        assert metrics.entropy(calm, Y) > metrics.entropy(fit(Z, Y)(Z), Y) + 0.02
    held_out = cross_fit("temperature")(Z, Y, sample_weight=np.where(np.arange(300) == 0, 0.0, heavy))
    assert held_out.shape == Z.shape
    assert metrics.entropy(held_out, Y) > metrics.entropy(cross_fit("temperature")(Z, Y), Y) + 0.02


def test_the_simplest_by_weighted_rows():
    one, two = np.array([0.9, 0.4, 0.8, 0.3]), np.array([0.8, 0.5, 0.6, 0.4])
    losses = {"identity": one, "temperature": two}
    assert simplest(losses, standard_errors=0.0, sample_weight=np.array([1.0, 9.0, 1.0, 9.0])) == "identity"
    assert simplest(losses, standard_errors=0.0, sample_weight=np.array([9.0, 1.0, 9.0, 1.0])) == "temperature"


def test_estimators_pass_sample_weights_on():
    heavy = np.where((ODDS > 0) == Y, 1.0, 1.5)
    by_hand = Temperature.fit(Z, Y, sample_weight=heavy)
    found = LogitCalibrator().fit(Z, Y, sample_weight=heavy)
    assert float(found.calibrator_.temperature) == pytest.approx(float(by_hand.temperature))
    model = CalibratedClassifier(LogisticRegression(), cv=3)
    plain, weighted = (model.fit(Z, Y, sample_weight=w).predict_proba(Z) for w in (None, np.where(Y == 1, 5.0, 1.0)))
    assert weighted[:, 1].mean() > plain[:, 1].mean() + 0.1
    with pytest.raises(ValueError, match="[Nn]egative"):
        model.fit(Z, Y, sample_weight=-np.ones(300))


def test_two_classes_are_an_event():
    """Of scores that say too little for class 1 on both sides of a half, no top-label map can say so."""
    p = np.linspace(0.02, 0.98, 4000)
    y = (np.random.default_rng(1).random(4000) < np.sqrt(p)).astype(int)
    z = np.log(np.stack([1 - p, p], axis=1))
    for name in ("isotonic", "histogram", "histogram_mass", "spline", "imax", "scaling_binning", "density_ratio"):
        fitted = METHODS[name](z, y)
        said = np.exp(fitted(z))[:, 1]
        assert not fitted.keeps_argmax
        if name != "scaling_binning":  # whose scaler is a temperature
            assert np.abs(said[1000:3000] - np.sqrt(p[1000:3000])).mean() < 0.05, name
        fold = type(fitted)(**{**fitted.config(), "event": False})  # what files of before hold
        assert fold.keeps_argmax
        assert np.array_equal(fold(z).argmax(axis=1), z.argmax(axis=1))
