import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm

import reference
from trueup.calibrators import IsotonicQuantiles, VarianceScaling
from trueup.metrics import regression
from trueup.models import as_module

both = pytest.mark.parametrize("kind", [VarianceScaling, IsotonicQuantiles])
numbers = st.floats(-5, 5).map(lambda v: round(v, 3))


def forecasts(n, *, seed=0, factor=1.0, bias=0.0):
    """Means, claimed σ, and targets whose σ is `factor` times the claim and which lie `bias` claims too high."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2.0, size=n)
    return mean, std, mean + std * (bias + factor * rng.normal(size=n))


def test_scale_by_hand():
    # Residuals 3/1, −1/1, 4/2: mean square (9 + 1 + 4)/3.
    scaling = VarianceScaling.fit([0, 0, 1], [1, 1, 2], [3, -1, 5])
    assert float(scaling.scale) == pytest.approx(math.sqrt(14 / 3), rel=1e-15)
    mean, std = scaling([7.0], [3.0])
    assert mean == [7.0]
    assert std[0] == pytest.approx(3 * math.sqrt(14 / 3), rel=1e-15)


@given(st.lists(numbers.filter(bool), min_size=1, max_size=20), st.floats(0.9, 1.1).filter(lambda f: f != 1))
def test_no_other_scale_is_likelier(residuals, factor):
    zero, one = np.zeros(len(residuals)), np.ones(len(residuals))
    best = float(VarianceScaling.fit(zero, one, residuals).scale)
    least = regression.gaussian_nll(zero, best * one, residuals)
    assert regression.gaussian_nll(zero, factor * best * one, residuals) >= least


def test_a_known_scale_is_found_and_repairs():
    mean, std, targets = forecasts(20_000, factor=2.5)
    scaling = VarianceScaling.fit(mean[:10_000], std[:10_000], targets[:10_000])
    assert float(scaling.scale) == pytest.approx(2.5, rel=0.03)
    test = mean[10_000:], std[10_000:], targets[10_000:]
    after = (*scaling(*test[:2]), test[2])
    assert regression.coverage(*test) < 0.6
    assert regression.coverage(*after) == pytest.approx(0.95, abs=0.01)
    assert regression.ence(*after) < 0.05 < 1 < regression.ence(*test)


def test_targets_that_are_their_means_stop_at_the_bound():
    with pytest.warns(UserWarning, match="scale stopped at its bound, 1e-12: every target is its mean"):
        assert float(VarianceScaling.fit([1.0, 2.0], [1.0, 1.0], [1.0, 2.0]).scale) == 1e-12


def test_huge_residuals_do_not_overflow():
    assert float(VarianceScaling.fit([0.0, 0.0], [1.0, 1.0], [3e200, 4e200]).scale) == pytest.approx(
        math.sqrt(12.5) * 1e200
    )


def test_quantiles_by_hand():
    # Three residuals −1, 0, 3 in units of σ: they are the quantiles of levels 1/4, 2/4, 3/4, straight between.
    curve = IsotonicQuantiles.fit([5.0, 5.0, 5.0], [2.0, 1.0, 2.0], [3.0, 5.0, 11.0])
    np.testing.assert_allclose(curve.knots, [-1.0, 0.0, 3.0])
    found = curve.quantiles([10.0, 0.0], [1.0, 2.0], levels=[0.25, 0.375, 0.5, 0.625, 0.75])
    np.testing.assert_allclose(found, [[9, 9.5, 10, 11.5, 13], [-2, -1, 0, 3, 6]], atol=1e-12)
    # Above the last knot a quarter is left: half of it lies beyond the z with (1 − Φ(z))/(1 − Φ(3)) = 1/2.
    upper = curve.quantiles([0.0], [1.0], levels=[0.875])[0, 0]
    assert norm.sf(upper) == pytest.approx(norm.sf(3) / 2, rel=1e-9)
    lower = curve.quantiles([0.0], [1.0], levels=[0.05])[0, 0]
    assert norm.cdf(lower) == pytest.approx(norm.cdf(-1) / 5, rel=1e-9)
    assert curve.quantiles([1.0], [1.0], levels=[0.0, 1.0]).tolist() == [[-math.inf, math.inf]]


@given(st.lists(numbers, min_size=1, max_size=12), st.floats(0.001, 0.999))
def test_quantiles_equal_the_slow_ones(z, level):
    curve = IsotonicQuantiles.fit(np.zeros(len(z)), np.ones(len(z)), z)
    fast = curve.quantiles([0.0], [1.0], levels=[level])[0, 0]
    assert fast == pytest.approx(reference.empirical_quantile(z, level), abs=1e-7)


@both
@given(st.lists(numbers.filter(bool), min_size=1, max_size=12), st.lists(st.floats(0.001, 0.999), min_size=2))
def test_levels_rise_and_probabilities_undo_quantiles(kind, z, levels):
    found = kind.fit(np.zeros(len(z)), np.ones(len(z)), z)
    levels = np.sort(levels)
    at = found.quantiles([0.0], [1.0], levels=levels)[0]
    assert (np.diff(at) >= 0).all()
    np.testing.assert_allclose(found.levels(levels), ndtr(at), atol=1e-12)
    back = found.probabilities(np.zeros(len(at)), np.ones(len(at)), at)
    assert (back >= levels - 1e-9).all()  # a tie is a jump, past the level
    if len(set(z)) == len(z):
        np.testing.assert_allclose(back, levels, atol=1e-6)


@settings(max_examples=15)
@given(st.lists(numbers, min_size=1, max_size=6))
def test_moments_are_those_of_the_law(z):
    curve = IsotonicQuantiles.fit(np.zeros(len(z)), np.ones(len(z)), z)
    inside = np.arange(1, len(z) + 1) / (len(z) + 1)

    def integral(power):
        ends = [0.0, *inside, 1.0]
        parts = (
            quad(lambda q: float(curve.standard_quantiles(np.array([q]))[0]) ** power, a, b, limit=200)[0]
            for a, b in itertools.pairwise(ends)
        )
        return sum(parts)

    mean, std = curve.moments()
    assert mean == pytest.approx(integral(1), abs=1e-5)
    assert std == pytest.approx(math.sqrt(integral(2) - integral(1) ** 2), abs=1e-5)


def test_moments_of_knots_far_away():
    # A third of the law in the upper tail, which starts at 1e6 + 1 and is 1e-6 long, one between the knots, and one in
    # the lower tail, which is a whole standard normal law around 0.
    mean, std = IsotonicQuantiles([1e6, 1e6 + 1], [1 / 3, 2 / 3]).moments()
    assert mean == pytest.approx((0 + 1e6 + 0.5 + 1e6 + 1) / 3, rel=1e-12)
    assert std == pytest.approx(math.sqrt(2) / 3 * (1e6 + 0.75), rel=1e-9)
    mean, std = IsotonicQuantiles([-2e6, 2e6], [1e-300, 1 - 1e-16]).moments()
    assert mean == pytest.approx(0, abs=1e-6)
    assert std == pytest.approx(4e6 / math.sqrt(12), rel=1e-12)


def test_biased_long_tailed_forecasts_are_repaired():
    rng = np.random.default_rng(1)
    n = 20_000
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2.0, size=n)
    targets = mean + std * (1 + 0.7 * rng.standard_t(3, size=n))
    half = n // 2
    fit, test = ([x[part] for x in (mean, std, targets)] for part in (slice(half), slice(half, n)))
    curve = IsotonicQuantiles.fit(*fit)
    for level in (0.5, 0.9, 0.95, 0.99):
        low, high = curve.interval(*test[:2], level=level)
        assert np.mean((low <= test[2]) & (test[2] <= high)) == pytest.approx(level, abs=0.012)
    shares = np.sort(curve.probabilities(*test))
    assert np.abs(shares - (np.arange(half) + 0.5) / half).max() < 0.02
    assert regression.gaussian_nll(*curve(*test[:2]), test[2]) < regression.gaussian_nll(*test)


def test_the_map_of_mean_and_std_is_that_of_the_moments():
    curve = IsotonicQuantiles.fit(np.zeros(9), np.ones(9), np.arange(-2.0, 7.0))
    centre, scale = curve.moments()
    assert centre == pytest.approx(2, abs=0.1)
    mean, std = curve([10.0, 0.0], [2.0, 1.0])
    np.testing.assert_allclose(mean, [10 + 2 * centre, centre])
    np.testing.assert_allclose(std, [2 * scale, scale])


def test_calibrated_forecasts_stay():
    fit = forecasts(20_000)
    for kind in (VarianceScaling, IsotonicQuantiles):
        found = kind.fit(*fit)
        levels = np.linspace(0.01, 0.99, 50)
        np.testing.assert_allclose(found.levels(levels), levels, atol=0.012)
        mean, std = found(*fit[:2])
        np.testing.assert_allclose(mean, fit[0], atol=0.03)
        np.testing.assert_allclose(std, fit[1], rtol=0.03)


def test_residuals_beyond_what_a_probability_can_tell():
    # Φ(50) and Φ(60) are both 1 in float64; their quantiles are not the same.
    curve = IsotonicQuantiles.fit(np.zeros(2), np.full(2, 0.1), [5.0, 6.0])
    found = curve.quantiles([0.0], [0.1], levels=[1 / 3, 0.5, 2 / 3, 0.9])
    np.testing.assert_allclose(found[0, :3], [5, 5.5, 6])
    assert 6 < found[0, 3] < 6.1
    assert curve.probabilities([0.0], [0.1], [5.5]) == pytest.approx(0.5)


def test_ties_keep_their_share():
    curve = IsotonicQuantiles.fit(np.zeros(4), np.ones(4), [0.0, 1.0, 1.0, 1.0])
    assert curve.knots.tolist() == [0.0, 1.0, 1.0]
    np.testing.assert_allclose(curve.values, [0.2, 0.4, 0.8])
    np.testing.assert_allclose(curve.quantiles([0.0], [1.0], levels=[0.3, 0.4, 0.6, 0.8])[0], [0.5, 1, 1, 1])
    np.testing.assert_allclose(curve.probabilities(np.zeros(2), np.ones(2), [0.999999, 1.0]), [0.4, 0.8], atol=1e-6)


@both
def test_kind_of_array_and_type(kind):
    mean, std, targets = forecasts(200, factor=2.0)
    found = kind.fit(mean, std, targets)
    as_torch = kind.fit(*(torch.from_numpy(x) for x in (mean, std, targets)))
    for key, value in found.config().items():
        assert np.array_equal(value, as_torch.config()[key])
    m, s = (x[:3].astype(np.float32) for x in (mean, std))
    for out in (*found(m, s), found.quantiles(m, s, levels=[0.5]), *found.interval(m, s)):
        assert isinstance(out, np.ndarray)
        assert out.dtype == np.float32
    half = torch.from_numpy(m).half().requires_grad_()
    new_mean, new_std = found(half, torch.from_numpy(s))
    assert new_mean.dtype == torch.float16
    assert new_std.dtype == torch.float32
    new_mean.sum().backward()
    assert half.grad is not None
    assert found.quantiles(half, s, levels=[0.2, 0.5]).dtype == torch.float16
    image = torch.ones(2, 1, 4, 4)
    assert found(image, image)[1].shape == image.shape
    assert all(len(x) == 0 for x in found([], []))
    whole = found(np.array([1]), np.array([2]))[1]
    assert whole.dtype == np.float64


@both
def test_config_pickle_and_copy_give_the_same(kind):
    mean, std, targets = forecasts(50, factor=2.0)
    found = kind.fit(mean, std, targets)
    again = type(found)(**found.config())
    for other in (again, pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert repr(other) == repr(found)
        for a, b in zip(other(mean, std), found(mean, std), strict=True):
            np.testing.assert_array_equal(a, b)
    module = as_module(found)
    assert set(module.state_dict()) >= set(found.config())
    assert not list(module.parameters())


@both
def test_inputs_are_untouched_and_checked(kind):
    mean, std, targets = forecasts(20)
    before = [x.copy() for x in (mean, std, targets)]
    found = kind.fit(mean, std, targets)
    found.quantiles(mean, std, levels=[0.1])
    for x, old in zip((mean, std, targets), before, strict=True):
        np.testing.assert_array_equal(x, old)
    with pytest.raises(ValueError, match="mean must have at least 1 rows, got 0"):
        kind.fit([], [], [])
    with pytest.raises(ValueError, match=r"std must be positive, got 0 at \[1\]"):
        kind.fit([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"std must not be negative, got -1 at \[0\]"):
        kind.fit([0.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match="targets must have 2 entries, one per row, got 1"):
        kind.fit([0.0, 0.0], [1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="levels must lie in .0, 1., got -0.1..0.5"):
        found.quantiles([0.0], [1.0], levels=[-0.1, 0.5])
    with pytest.raises(ValueError, match="level must lie in"):
        found.interval([0.0], [1.0], level=1.5)
    with pytest.raises(ValueError, match=r"std must have the shape of mean, \(2,\), got \(3,\)"):
        found(torch.zeros(2), torch.ones(3))
    assert found.quantiles([3.0], [0.0], levels=[0.0, 0.5, 1.0]).tolist() == [[3.0, 3.0, 3.0]]
    with pytest.raises(ValueError, match="std must not vanish against targets − mean, got 1e-310"):
        kind.fit([0.0], [1e-310], [1.0])


@pytest.mark.parametrize(
    ("knots", "values", "message"),
    [
        ([0.0], [0.5, 0.6], r"two vectors of one length, got \(1,\) and \(2,\)"),
        ([], [], "two vectors of one length"),
        ([1.0, 0.0], [0.2, 0.4], "knots must be finite and in order"),
        ([0.0, 1.0], [0.4, 0.4], "values must be strictly ascending"),
        ([0.0, 1.0], [0.4, 1.0], "values must be strictly ascending between 0 and 1"),
    ],
)
def test_curves_are_checked(knots, values, message):
    with pytest.raises(ValueError, match=message):
        IsotonicQuantiles(knots, values)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, [1.0, 2.0]])
def test_scales_are_checked(scale):
    with pytest.raises(ValueError, match="scale must be one positive number"):
        VarianceScaling(scale)
