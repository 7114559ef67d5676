from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import reference
from optional import torch
from trueup.metrics import REGRESSION, regression

numbers = st.floats(-5, 5).map(lambda x: round(x, 6))
forecasts = st.lists(st.tuples(numbers, st.floats(0.01, 4), numbers), min_size=1, max_size=30)


def columns(rows):
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def sample(n: int = 20_000, honesty: float = 1.0, seed: int = 0):
    """Forecasts whose targets really spread with σ/honesty."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(size=n) * 0.5)
    return mean, std, mean + std / honesty * rng.normal(size=n)


@given(forecasts)
def test_likelihood_and_errors_equal_the_formulas(rows):
    mean, std, targets = columns(rows)
    nll = -stats.norm.logpdf(targets, mean, std).mean()
    assert regression.gaussian_nll(mean, std, targets) == pytest.approx(nll, rel=1e-10, abs=1e-10)
    squared = [(y - m) ** 2 for m, y in zip(mean, targets, strict=True)]
    assert regression.rmse(mean, std, targets) == pytest.approx(math.sqrt(sum(squared) / len(squared)))
    assert regression.sharpness(mean, std, targets) == pytest.approx(math.sqrt(sum(std**2) / len(std)))


@pytest.mark.parametrize(("mean", "std", "target"), [(0, 1, 0), (0, 1, 3.2), (2, 0.3, -1), (-1, 5, 0.5)])
def test_crps_equals_its_integral(mean, std, target):
    fast = regression.crps([float(mean)], [float(std)], [float(target)])
    assert fast == pytest.approx(reference.gaussian_crps(mean, std, target), rel=1e-6)


def test_crps_without_doubt_is_the_absolute_error():
    assert regression.crps([1.0, 2.0], [0.0, 0.0], [4.0, 2.0]) == pytest.approx(1.5)


def test_scores_of_honest_forecasts_approach_their_expectations():
    mean, std, targets = sample(200_000)
    assert regression.crps(mean, std, targets) == pytest.approx(std.mean() / math.sqrt(math.pi), abs=0.005)
    entropy = 0.5 * math.log(2 * math.pi * math.e) + np.log(std).mean()
    assert regression.gaussian_nll(mean, std, targets) == pytest.approx(entropy, abs=0.01)
    assert regression.rmse(mean, std, targets) == pytest.approx(regression.sharpness(mean, std, targets), rel=0.01)


@pytest.mark.parametrize("metric", [regression.gaussian_nll, regression.crps])
def test_proper_scores_are_best_for_the_honest(metric):
    mean, std, targets = sample()
    honest = metric(mean, std, targets)
    assert metric(mean, std * 1.3, targets) > honest
    assert metric(mean, std / 1.3, targets) > honest
    assert metric(mean + 0.3, std, targets) > honest


@pytest.mark.parametrize("level", [0.1, 0.5, 0.68, 0.95])
def test_coverage_of_honest_forecasts_is_the_level(level):
    mean, std, targets = sample()
    slack = 4 * math.sqrt(level * (1 - level) / len(mean))
    assert regression.coverage(mean, std, targets, level=level) == pytest.approx(level, abs=slack)
    low, high = stats.norm.interval(level, mean, std)
    inside = ((low <= targets) & (targets <= high)).mean()
    assert regression.coverage(mean, std, targets, level=level) == pytest.approx(inside, abs=2 / len(mean))
    assert regression.interval_width(mean, std, targets, level=level) == pytest.approx((high - low).mean())


def test_coverage_at_the_ends():
    exact, off = ([0.0, 0.0], [1.0, 0.0], [0.0, 0.0]), ([0.0, 0.0], [1.0, 0.0], [50.0, -50.0])
    assert regression.coverage(*exact, level=0) == 1.0
    assert regression.coverage(*off, level=0) == 0.0
    assert regression.coverage(*off, level=1) == 1.0
    assert regression.interval_width(*off, level=0) == 0.0
    assert regression.interval_width(*off, level=1) == math.inf


@given(forecasts, st.lists(st.floats(0, 1), max_size=6))
def test_shares_equal_the_counts(rows, levels):
    mean, std, targets = columns(rows)
    z = (targets - mean) / std
    quantiles = regression.quantile_calibration(mean, std, targets, levels=levels)
    intervals = regression.interval_calibration(mean, std, targets, levels=levels)
    assert quantiles.shape == intervals.shape == (len(levels),)
    for q, below, inside in zip(levels, quantiles, intervals, strict=True):
        assert below == pytest.approx(sum(v <= stats.norm.ppf(q) for v in z) / len(z))
        assert inside == pytest.approx(sum(abs(v) <= stats.norm.ppf((1 + q) / 2) for v in z) / len(z))


def test_the_two_kinds_of_shares_are_two():
    # Everything lies half a deviation above the mean: below no quantile under Φ(½), inside no interval under 2Φ(½) − 1.
    mean, std, targets = np.zeros(3), np.ones(3), np.full(3, 0.5)
    levels = [0.38, 0.39, 0.69, 0.70]
    assert regression.quantile_calibration(mean, std, targets, levels=levels).tolist() == [0, 0, 0, 1]
    assert regression.interval_calibration(mean, std, targets, levels=levels).tolist() == [0, 1, 1, 1]
    for error in (
        regression.miscalibration_area,
        regression.mean_calibration_error,
        regression.rms_calibration_error,
    ):
        assert error(mean, std, targets) != error(mean, std, targets, shares="quantiles")


def test_calibration_errors_by_hand():
    grid = np.linspace(0, 1, 100)
    exact, hopeless = (np.zeros(4), np.ones(4), np.zeros(4)), (np.zeros(4), np.full(4, 1e-6), np.ones(4))
    # Every target at the mean: every interval holds it, P̂ = 1.
    assert regression.miscalibration_area(*exact) == pytest.approx(0.5)
    assert regression.mean_calibration_error(*exact) == pytest.approx(0.5)
    assert regression.rms_calibration_error(*exact) == pytest.approx(math.sqrt(((1 - grid) ** 2).mean()))
    # Every target beyond every interval: P̂ = 0 up to the last level but one, then 1.
    assert regression.miscalibration_area(*hopeless) == pytest.approx(0.5 * 98 / 99)
    assert regression.mean_calibration_error(*hopeless) == pytest.approx(grid[:-1].sum() / 100)
    # Below no quantile under ½, below every one above: gaps 0, −1/3, 1/3, 0, which cross zero in the middle.
    assert regression.miscalibration_area(*exact, shares="quantiles", points=4) == pytest.approx(1 / 6)
    assert regression.mean_calibration_error(*exact, shares="quantiles", points=4) == pytest.approx(1 / 6)
    assert regression.rms_calibration_error(*exact, shares="quantiles", points=4) == pytest.approx(math.sqrt(1 / 18))


@settings(max_examples=30, deadline=None)
@given(forecasts, st.integers(2, 30), st.sampled_from(["intervals", "quantiles"]))
def test_the_area_is_that_of_the_broken_line(rows, points, shares):
    mean, std, targets = columns(rows)
    levels = np.linspace(0, 1, points)
    observe = regression.interval_calibration if shares == "intervals" else regression.quantile_calibration
    observed = observe(mean, std, targets, levels=levels)
    fine = (np.arange(100_000) + 0.5) / 100_000
    slow = np.abs(np.interp(fine, levels, observed) - fine).mean()
    assert regression.miscalibration_area(mean, std, targets, shares=shares, points=points) == pytest.approx(
        slow, abs=1e-6
    )


@pytest.mark.parametrize("honesty", [0.5, 2.0])
def test_calibration_errors_of_dishonest_forecasts_approach_the_closed_form(honesty):
    triple = sample(100_000, honesty)

    def inside(q):
        return 2 * stats.norm.cdf(stats.norm.ppf((1 + q) / 2) * honesty) - 1

    def below(q):
        return stats.norm.cdf(stats.norm.ppf(q) * honesty)

    for shares, share in (("intervals", inside), ("quantiles", below)):
        area = integrate.quad(lambda q, share=share: abs(share(q) - q), 0, 1, points=[0.5])[0]
        mean_square = integrate.quad(lambda q, share=share: (share(q) - q) ** 2, 0, 1)[0]
        assert area > 0.05
        assert regression.miscalibration_area(*triple, shares=shares) == pytest.approx(area, abs=0.005)
        assert regression.mean_calibration_error(*triple, shares=shares) == pytest.approx(area, abs=0.005)
        assert regression.rms_calibration_error(*triple, shares=shares) == pytest.approx(
            math.sqrt(mean_square), abs=0.005
        )


def test_honest_forecasts_have_small_errors():
    triple = sample(50_000)
    for shares in ("intervals", "quantiles"):
        assert regression.miscalibration_area(*triple, shares=shares) < 0.005
        assert regression.rms_calibration_error(*triple, shares=shares) < 0.006
    assert regression.ence(*triple) < 0.02
    assert regression.ence(*sample(50_000, honesty=2.0)) == pytest.approx(0.5, abs=0.02)  # half of σ is made up
    assert regression.ence(*sample(50_000, honesty=0.5)) == pytest.approx(1.0, abs=0.03)
    mean, std, targets = sample(50_000, honesty=2.0)
    assert regression.variance_error(mean, std, targets) == pytest.approx(0.75 * (std**2).mean(), rel=0.05)
    assert regression.variance_error(*triple) < 0.1 * (triple[1] ** 2).mean()


distinct = st.lists(st.tuples(st.integers(1, 400), numbers), min_size=1, max_size=40, unique_by=lambda row: row[0])


@given(distinct, st.integers(1, 12))
def test_ence_equals_the_slow_loop(rows, bins):
    std, error = columns([(s / 100, e) for s, e in rows])
    mean = np.linspace(-1, 1, len(std))
    triple = (mean, std, mean + error)
    slow = reference.expected_normalised_error(std, error, bins)
    assert regression.ence(*triple, bins=bins) == pytest.approx(slow, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.1, 3), numbers), min_size=1, max_size=40), st.integers(1, 12))
def test_the_variance_error_equals_the_slow_loop(rows, bins):
    std, error = columns(rows)
    fast = regression.variance_error(np.zeros(len(std)), std, error, bins=bins)
    assert fast == pytest.approx(reference.variance_error(std, error, bins), rel=1e-6, abs=1e-9)


def test_binned_errors_by_hand():
    mean, std, targets = np.zeros(4), np.array([1.0, 3.0, 1.0, 2.0]), np.array([2.0, 1.0, 1.0, 2.0])
    # σ² between 1 and 9 in three bins, {1, 1}, {4}, {9}: sums of (y−μ)² − σ² are 3, 0 and −8.
    assert regression.variance_error(mean, std, targets, bins=3) == pytest.approx(11 / 4)
    # Two of equal mass: {1, 1} and {4, 9}, with sums 3 and −8.
    assert regression.variance_error(mean, std, targets, bins=2, binning="mass") == pytest.approx(11 / 4)
    # One bin: |mean of 4, 1, 1, 4 − mean of 1, 9, 1, 4|.
    assert regression.variance_error(mean, std, targets, bins=1) == pytest.approx(5 / 4)
    # RMV and RMSE are 1 and √2.5, then √6.5 and √2.5.
    expected = (math.sqrt(2.5) - 1 + (math.sqrt(6.5) - math.sqrt(2.5)) / math.sqrt(6.5)) / 2
    assert regression.ence(mean, std, targets, bins=2) == pytest.approx(expected)


def test_equal_width_and_equal_mass_differ():
    std = np.sqrt([1.0, 1.1, 1.2, 9.0])
    targets = np.sqrt([4.0, 0.0, 0.0, 9.0])
    # {1, 1.1, 1.2} and {9}: sums 0.7 and 0; {1, 1.1} and {1.2, 9}: sums 1.9 and −1.2.
    triple = (np.zeros(4), std, targets)
    assert regression.variance_error(*triple, bins=2) == pytest.approx(0.7 / 4)
    assert regression.variance_error(*triple, bins=2, binning="mass") == pytest.approx(3.1 / 4)


@pytest.mark.parametrize("metric", [regression.ence, regression.variance_error])
def test_the_order_of_rows_does_not_matter_even_with_ties(metric):
    rng = np.random.default_rng(1)
    mean, std, targets = np.zeros(200), rng.integers(1, 8, 200) * 0.1, rng.normal(size=200)
    value = metric(mean, std, targets)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(200)
        assert metric(mean[order], std[order], targets[order]) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_constant_std_makes_one_bin(scale):
    rng = np.random.default_rng(2)
    mean, targets = np.zeros(300), rng.normal(size=300) * scale
    noise = 1 + rng.integers(0, 2, 300) * 2.0**-52  # constant but for rounding
    mse = (targets**2).mean()
    wide, honest = 2 * scale * noise, math.sqrt(mse) * noise
    assert regression.ence(mean, wide, targets) == pytest.approx((2 * scale - math.sqrt(mse)) / (2 * scale))
    # The trap that the coefficient of variation guards against: a constant that is right on average.
    assert regression.ence(mean, honest, targets) == pytest.approx(0, abs=1e-12)
    assert regression.variation(honest) == pytest.approx(0, abs=1e-12)
    for binning in ("width", "mass"):
        assert regression.variance_error(mean, wide, targets, binning=binning) == pytest.approx(4 * scale**2 - mse)
        assert regression.variance_error(mean, honest, targets, binning=binning) < 1e-12 * mse


def test_a_variance_on_an_edge_lies_below_it_whatever_rounding_says():
    # 0.2 lies midway between 0.1 and 0.3, though (0.2 − 0.1)/(0.3 − 0.1) comes out above ½.
    std, targets = np.sqrt([0.1, 0.2, 0.3]), np.sqrt([0.2, 0.1, 0.3])
    assert regression.variance_error(np.zeros(3), std, targets, bins=2) == pytest.approx(0, abs=1e-12)


def test_bins_without_std_are_left_out_with_a_warning():
    mean, std, targets = np.zeros(4), np.array([0.0, 0.0, 2.0, 2.0]), np.array([1.0, 0.0, 1.0, 1.0])
    with pytest.warns(UserWarning, match="1 of 2 bins have no std"):
        assert regression.ence(mean, std, targets, bins=2) == pytest.approx(0.5)
    with pytest.warns(UserWarning, match="1 of 1 bins have no std"):
        assert math.isnan(regression.ence(mean, np.zeros(4), targets))


def test_variation():
    std = np.exp(np.random.default_rng(0).normal(size=200_000) * 0.5)
    assert regression.variation(std) == pytest.approx(math.sqrt(math.expm1(0.25)), rel=0.02)  # of the log-normal
    assert regression.variation([3.0]) == 0.0


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_units(scale):
    mean, std, targets = sample(500)
    scaled = (mean * scale, std * scale, targets * scale)
    power = dict.fromkeys(("crps", "rmse", "sharpness", "interval_width"), 1) | {"variance_error": 2}
    for name, metric in REGRESSION.items():
        value = metric(mean, std, targets)
        expected = value + math.log(scale) if name == "gaussian_nll" else value * scale ** power.get(name, 0)
        assert metric(*scaled) == pytest.approx(expected, rel=1e-9), name
        assert metric(mean + 3, std, targets + 3) == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("name", REGRESSION)
def test_every_metric_takes_every_kind_of_array_and_gives_a_float(name):
    metric, triple = REGRESSION[name], sample(300)
    value = metric(*triple)
    assert isinstance(value, float)
    assert math.isfinite(value)
    assert metric(*map(torch.from_numpy, triple)) == value
    assert metric(*(x.tolist() for x in triple)) == value
    assert math.isnan(metric([], [], []))


@pytest.mark.parametrize("name", REGRESSION)
def test_every_metric_refuses_bad_forecasts(name):
    metric = REGRESSION[name]
    with pytest.raises(ValueError, match=r"std must not be negative, got -0.5 at \[1\]"):
        metric([0.0, 0.0], [1.0, -0.5], [0.0, 0.0])
    with pytest.raises(ValueError, match="std must be finite"):
        metric([0.0, 0.0], [1.0, math.nan], [0.0, 0.0])
    with pytest.raises(ValueError, match="std must have 2 entries"):
        metric([0.0, 0.0], [1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="targets must have 2 entries"):
        metric([0.0, 0.0], [1.0, 1.0], [0.0])


def test_errors_name_the_argument():
    triple = ([0.0, 0.0], [1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"level must lie in \[0, 1\], got 95"):
        regression.coverage(*triple, level=95)
    with pytest.raises(ValueError, match=r"level must lie in \[0, 1\], got -0.1"):
        regression.interval_width(*triple, level=-0.1)
    with pytest.raises(ValueError, match=r"levels must lie in \[0, 1\], got 0.5..1.5"):
        regression.quantile_calibration(*triple, levels=[0.5, 1.5])
    with pytest.raises(ValueError, match='shares must be "intervals" or "quantiles"'):
        regression.miscalibration_area(*triple, shares="centred")
    with pytest.raises(ValueError, match="points must be a whole number of at least 2, got 1"):
        regression.miscalibration_area(*triple, points=1)
    with pytest.raises(ValueError, match="bins must be a whole number"):
        regression.ence(*triple, bins=0)
    with pytest.raises(ValueError, match="bins must be a whole number"):
        regression.variance_error(*triple, bins=0)
    with pytest.raises(ValueError, match='binning must be "width" or "mass"'):
        regression.variance_error(*triple, binning="sorted")


@pytest.mark.parametrize("name", ["bostonHousing", "concrete", "energy", "wine-quality-red", "yacht"])
def test_a_line_through_real_data(name):
    if "TRUEUP_DATA" not in os.environ:
        pytest.skip("TRUEUP_DATA names no folder of real data")
    file = Path(os.environ["TRUEUP_DATA"]) / "tabular" / f"uci_{name}.npz"
    if not file.exists():
        pytest.skip(f"{file} does not exist")
    with np.load(file) as data:
        x, y = data["x"].astype(np.float64), data["y"].astype(np.float64)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[: len(y) // 2], order[len(y) // 2 :]
    design = np.column_stack([np.ones(len(y)), (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9)])
    mean = design @ np.linalg.lstsq(design[train], y[train], rcond=None)[0]
    std = np.full(len(test), math.sqrt(((y - mean)[train] ** 2).mean()))
    line = {key: metric(mean[test], std, y[test]) for key, metric in REGRESSION.items()}
    assert all(math.isfinite(value) for value in line.values())
    blind = {
        key: metric(np.full(len(test), y[train].mean()), np.full(len(test), y[train].std()), y[test])
        for key, metric in REGRESSION.items()
    }
    for key in ("gaussian_nll", "crps", "rmse", "sharpness", "interval_width"):
        assert line[key] < blind[key], key
    assert 0.88 < line["coverage"] < 0.99
    assert line["miscalibration_area"] < 0.2
    assert line["variation"] == pytest.approx(0, abs=1e-12)
    # Claiming a third of the doubt makes it visibly dishonest.
    assert regression.miscalibration_area(mean[test], std / 3, y[test]) > line["miscalibration_area"]
    assert regression.coverage(mean[test], std / 3, y[test]) < 0.8
