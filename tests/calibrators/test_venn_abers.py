import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

import trueup
from strategies import calibrated
from trueup.calibrators import VennAbers
from trueup.calibrators.isotonic import bracket_curves


def slow_bracket(scores, positive, new):
    """p₀ and p₁ of a new score by two isotonic regressions with the score itself added."""
    values = []
    for label in (0.0, 1.0):
        x, y = np.append(scores, new), np.append(positive.astype(float), label)
        distinct, where, count = np.unique(x, return_inverse=True, return_counts=True)
        mean = np.bincount(where, weights=y) / count
        values.append(isotonic_regression(mean, weights=count).x[np.searchsorted(distinct, new)])
    return values


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=25),
    st.lists(st.integers(-1, 13), min_size=1, max_size=6),
)
def test_it_equals_two_isotonic_regressions(rows, new):
    scores, positive = np.array([r[0] for r in rows]) / 8, np.array([r[1] for r in rows])
    distinct, low, high = bracket_curves(scores, positive)
    for x in np.array(new) / 16:  # on the scores, between and beyond them
        slow = slow_bracket(scores, positive, x)
        fast = low[np.searchsorted(distinct, x, side="right")], high[np.searchsorted(distinct, x, side="left")]
        assert fast == pytest.approx(slow, abs=1e-12)


def test_the_single_probability_lies_between_the_brackets():
    z, y = calibrated(300, 2, temperature=2.0)
    for fitted in (VennAbers.fit(z, y), VennAbers.fit_cross(z, y)):
        low, high = fitted.brackets(z)
        p = np.exp(fitted(z))[:, 1]
        assert (low <= high).all()
        assert ((low[:, 1] - 1e-6 <= p) & (p <= high[:, 1] + 1e-6)).all()
        # What is not class 0 is class 1, so that the brackets mirror each other.
        assert low[:, 0] == pytest.approx(1 - high[:, 1], abs=1e-9)


def test_brackets_hold_the_truth_on_average():
    """Of a calibrated source, the mean probability lies between the mean brackets, whatever the scores."""
    rng = np.random.default_rng(0)
    p = rng.choice([0.1, 0.35, 0.8], size=4000)
    y = (rng.random(4000) < p).astype(int)
    z = trueup.convert.from_log_odds(5 * np.log(p / (1 - p)))  # five times too sure
    low, high = VennAbers.fit(z[:2000], y[:2000]).brackets(z[2000:])
    for level in (0.1, 0.35, 0.8):
        rows = p[2000:] == level
        assert low[rows, 1].mean() - 0.05 < level < high[rows, 1].mean() + 0.05


def test_one_fold_is_the_inductive_predictor():
    z, y = calibrated(60, 3)
    one = VennAbers.fit(z, y)
    again = VennAbers(*(np.repeat(part, 2, axis=0) for part in one.config().values()))
    assert again(z) == pytest.approx(one(z), abs=1e-12)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 4))), "scores must be"),
        ((np.zeros((1, 2, 3)), np.zeros((1, 2, 3)), np.zeros((1, 2, 4))), "one longer"),
        ((np.zeros((1, 2, 3)), np.ones((1, 2, 4)), np.zeros((1, 2, 4))), "lower at most upper"),
    ],
)
def test_other_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        VennAbers(*parameters)
