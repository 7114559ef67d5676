"""Temperature scaling averaged over the posterior of T."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import posterior_of_temperature
from strategies import calibrated
from trueup import METHODS, metrics
from trueup.calibrators.pool import bayesian_temperature

NEVER_WRONG = {"bayesian_temperature": {}, "temperature": {"smooth": 0.1}}


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), n=st.sampled_from([10, 40]), sharper=st.sampled_from([0.3, 1.0, 4.0]))
def test_it_is_the_mean_over_the_posterior(seed, n, sharper):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    new = 3 * rng.normal(size=(5, 3))
    found = np.exp(bayesian_temperature(sharper * z, y)(sharper * new))
    np.testing.assert_allclose(found, posterior_of_temperature(sharper * z, y, sharper * new), atol=0.02)


def test_the_prior_rules_few_rows_and_the_likelihood_many():
    z, y = calibrated(3000, 3, temperature=2.0)
    held = bayesian_temperature(z[:12], y[:12], scale=1e-3)
    np.testing.assert_allclose(
        held(z), METHODS["identity"](z, y)(z) - np.logaddexp.reduce(z, axis=1)[:, None], atol=0.1
    )
    free, best = bayesian_temperature(z, y), METHODS["temperature"](z, y)
    assert metrics.nll(free(z), y) == pytest.approx(metrics.nll(best(z), y), abs=1e-3)


def test_rows_that_are_all_right_leave_a_doubt():
    (z, _), row = calibrated(30, 3), np.array([[4.0, 0.0, 0.0]])
    found, one = (METHODS[name](z, z.argmax(axis=1), **options) for name, options in NEVER_WRONG.items())
    assert found.keeps_argmax
    doubt, less = (float(1 - np.exp(np.asarray(c(row)) - np.logaddexp.reduce(c(row)[0])).max()) for c in (found, one))
    assert 2 * less < doubt < 0.1


def test_rows_without_weight_do_not_count():
    z, y = calibrated(40, 3)
    rows = np.arange(40) % 2
    alone = bayesian_temperature(z[rows > 0], y[rows > 0])
    np.testing.assert_allclose(bayesian_temperature(z, y, sample_weight=3.0 * rows)(z), alone(z), atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_prior_without_a_width_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a positive number"):
        bayesian_temperature([[1.0, 0.0], [0.0, 1.0]], [0, 1], scale=scale)
