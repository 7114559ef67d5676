import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

import trueup
from trueup import METHODS, metrics
from trueup.calibrators import Quadratic, SmoothingSpline, Vector, spline


def binary(n, curve, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 2
    return trueup.convert.from_log_odds(x), (rng.random(n) < expit(curve(x))).astype(int)


def test_quadratic_is_no_worse_than_a_general_minimiser():
    z, y = binary(500, lambda x: 0.3 + 0.7 * x - 0.2 * x**2)
    fitted = Quadratic.fit(z, y)
    x = z[:, 1]
    positive = y.sum()
    targets = np.where(y == 1, (positive + 1) / (positive + 2), 1 / (len(y) - positive + 2))

    def loss(w):
        odds = w[0] * x + w[1] * x**2 + w[2]
        return (np.logaddexp(0, odds) - targets * odds).mean()

    ours = np.array([fitted.slope[1], fitted.square[1], fitted.offset[1]])
    assert loss(ours) <= minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).fun + 1e-10


def test_a_bent_curve_is_found_where_a_logistic_one_cannot_follow():
    def bent(x):
        return 0.3 + 0.7 * x - 0.2 * x**2

    val, test = binary(5000, bent), binary(5000, bent, seed=1)
    losses = {name: metrics.nll(METHODS[name](*val)(test[0]), test[1]) for name in ("platt", "quadratic")}
    best = metrics.nll(trueup.convert.from_log_odds(bent(test[0][:, 1])), test[1])
    assert losses["quadratic"] < best + 0.003 < losses["platt"]


def test_beyond_the_rows_of_the_fit_a_parabola_stays_level():
    fitted = Quadratic.fit(*binary(500, lambda x: 1 - 0.5 * x**2))
    far, edge = (trueup.convert.from_log_odds(np.array([x])) for x in (100.0, float(fitted.high[1])))
    assert fitted(far) == pytest.approx(fitted(edge), abs=1e-9)


def test_a_smoothing_spline_follows_a_curve_and_stays_straight_without_one():
    def kinked(x):
        return np.minimum(x, 0.5)

    val, test = binary(5000, kinked), binary(5000, kinked, seed=1)
    best = metrics.nll(trueup.convert.from_log_odds(kinked(test[0][:, 1])), test[1])
    losses = {name: metrics.nll(METHODS[name](*val)(test[0]), test[1]) for name in ("platt", "smoothing_spline")}
    assert losses["smoothing_spline"] < best + 0.003 < losses["platt"]
    straight = SmoothingSpline.fit(*binary(5000, lambda x: 0.4 + 0.6 * x))
    x = np.linspace(-3, 3, 7)
    odds = straight(trueup.convert.from_log_odds(x))
    assert odds[:, 1] - odds[:, 0] == pytest.approx(0.4 + 0.6 * x, abs=0.25)


@pytest.mark.parametrize("scores", [[0.0], [-1.0, 1.0], [-1.0, 0.0, 2.0]])
def test_a_smoothing_spline_of_few_distinct_scores_gives_their_frequencies(scores):
    rng = np.random.default_rng(0)
    x = rng.choice(scores, size=3000)
    y = (rng.random(3000) < 0.3).astype(int)
    p = np.exp(SmoothingSpline.fit(trueup.convert.from_log_odds(x), y)(trueup.convert.from_log_odds(np.array(scores))))
    assert p[:, 1] == pytest.approx([y[x == score].mean() for score in scores], abs=0.01)


def test_bias_corrected_temperature_recovers_temperature_and_bias():
    rng = np.random.default_rng(0)
    z, bias = rng.normal(size=(20_000, 4)) * 2, np.array([1.0, 0.0, -0.5, -0.5])
    y = (z + bias + rng.gumbel(size=z.shape)).argmax(axis=1)
    fitted = Vector.fit_bias_corrected(2.5 * z, y)
    assert fitted.weight == pytest.approx(np.full(4, 0.4), abs=0.01)
    assert len(np.unique(fitted.weight)) == 1
    assert fitted.bias == pytest.approx(bias, abs=0.05)
    # No temperature with another bias does better: it is the minimum of vector scaling with equal weights.
    slack = metrics.nll(fitted(2.5 * z), y) - metrics.nll(Vector.fit(2.5 * z, y)(2.5 * z), y)
    assert 0 <= slack < 1e-3


def test_a_spline_whose_knots_all_but_touch_has_a_solution():
    design, targets = np.tile(np.eye(3), (4, 1)), np.array([0.0, 1.0, 1.0] * 4)
    bending = 1e20 * np.ones((3, 3))  # singular beside anything else
    weights = spline._solve(design, targets, np.ones(12), bending, np.zeros(3), tolerance=1e-8)
    assert np.isfinite(weights).all()
    assert float(weights @ bending @ weights) < 1e-6


def test_a_spline_of_log_odds_that_pile_up_at_the_ends_stays_in_bounds():
    """As naive Bayes has them: most are within rounding of the largest, and knots among those would nearly touch."""
    rng = np.random.default_rng(0)
    ends = rng.choice([-14.0, 14.0], size=250) + rng.uniform(-1e-7, 1e-7, size=250)
    x = np.concatenate([ends, rng.uniform(-14, 14, size=50)])
    z, y = trueup.convert.from_log_odds(x), (rng.random(300) < expit(0.2 * x)).astype(int)
    fitted = SmoothingSpline.fit(z, y)
    assert np.abs(fitted.values).max() < 8
    assert metrics.nll(fitted(z), y) < metrics.nll(METHODS["temperature"](z, y)(z), y) + 0.01


def test_a_spline_of_numbers_whose_squares_are_none_is_refused():
    z = np.random.default_rng(0).normal(size=(50, 3))
    z[z > 1] = np.finfo(np.float64).max
    with pytest.raises(ValueError, match=r"logits must have a finite spread, got log-odds up to 1\.\d+e\+308 from 0"):
        METHODS["smoothing_spline"](z, np.arange(50) % 3)
