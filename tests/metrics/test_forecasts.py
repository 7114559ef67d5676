"""Forecasts of numbers: each row of the table against a peer, a slow loop or a hand-worked case."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from sklearn.metrics import mean_pinball_loss

from optional import torch
from trueup.metrics import compare_forecasts, evaluate_forecasts, regression
from trueup.metrics.forecasts import LEVELS

TAU = np.array([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95])
UNCERTAINTY_TOOLBOX = {
    "crps": 1.0908526596458972,
    "nll": 2.3720771578547106,
    "pinball": 0.5502501232437811,
    "rmse": 2.406585231968649,
    "mae": 1.445899391730401,
    "sharpness": 1.3521927297441474,
    "interval_error": 0.11192857142857146,
    "pit_error": 0.06736060606060607,
    "coverage_50": 0.35714285714285715,
    "coverage_80": 0.6328571428571429,
    "coverage_95": 0.7957142857142857,
}
"""Values of uncertainty-toolbox 0.1.1 on the rows of `skewed`: crps_gaussian, nll_gaussian, check_score, sharpness,
mean_absolute_calibration_error of intervals and of quantiles, get_proportion_in_interval, prediction_error_metrics."""


def skewed(n=700):
    """Too narrow, too low and with heavy tails."""
    rng = np.random.default_rng(20)
    mean, std = rng.normal(size=n) * 3, np.exp(rng.normal(size=n) * 0.6)
    return mean, std, mean + 0.2 + 1.4 * std * rng.standard_t(5, size=n)


def honest(n=500, seed=0):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(size=n) * 0.4)
    return mean, std, mean + std * rng.normal(size=n)


def quantiles_of(mean, std, levels=TAU):
    return mean[:, None] + std[:, None] * ndtri(levels)


def values(scores):
    return {metric: result.value for metric, result in scores.values[scores.methods[0]].items()}


def test_the_table_equals_uncertainty_toolbox():
    result = values(evaluate_forecasts(*skewed(), n_resamples=20))
    for metric, expected in UNCERTAINTY_TOOLBOX.items():
        assert result[metric] == pytest.approx(expected, abs=1e-9), metric


def test_the_table_equals_the_metrics_of_the_package():
    forecast = honest(60)
    result = values(evaluate_forecasts(*forecast, coverage=(0.9,), n_resamples=20))
    assert result["crps"] == pytest.approx(regression.crps(*forecast), abs=1e-12)
    assert result["nll"] == pytest.approx(regression.gaussian_nll(*forecast), abs=1e-12)
    assert result["width_90"] == pytest.approx(regression.interval_width(*forecast, level=0.9), abs=1e-12)
    assert result["interval_error"] == pytest.approx(regression.mean_calibration_error(*forecast), abs=1e-12)
    assert result["pit_error"] == pytest.approx(
        regression.mean_calibration_error(*forecast, shares="quantiles"), abs=1e-12
    )


def test_pinball_loss_equals_scikit_learn_of_quantiles_and_of_gaussians():
    mean, std, y = skewed(200)
    for levels in (TAU, np.array([0.3, 0.9])):
        q = quantiles_of(mean, std, levels)
        expected = np.mean([mean_pinball_loss(y, q[:, k], alpha=level) for k, level in enumerate(levels)])
        assert values(evaluate_forecasts(q, levels, y, n_resamples=20))["pinball"] == pytest.approx(expected, abs=1e-12)
    q = quantiles_of(mean, std, LEVELS)
    expected = np.mean([mean_pinball_loss(y, q[:, k], alpha=level) for k, level in enumerate(LEVELS)])
    assert values(evaluate_forecasts(mean, std, y, n_resamples=20))["pinball"] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(*[st.integers(-4, 4)] * 3), min_size=1, max_size=12))
def test_quantiles_equal_the_loops(rows):
    y = np.array([row[0] for row in rows], float)
    q = np.array([[row[1] - 1.5, row[1], row[1] + 0.5 * row[2]] for row in rows], float)  # the last two may cross
    result = values(evaluate_forecasts(q, [0.1, 0.5, 0.9], y, n_resamples=20))
    inside = [low <= target <= high for target, (low, _, high) in zip(y, q, strict=True)]
    assert result["coverage_80"] == pytest.approx(sum(inside) / len(inside))
    shares = [sum(target <= row[k] for target, row in zip(y, q, strict=True)) / len(y) for k in range(3)]
    gaps = [abs(share - level) for share, level in zip(shares, (0.1, 0.5, 0.9), strict=True)]
    assert result["pit_error"] == pytest.approx(sum(gaps) / 3)
    assert result["interval_error"] == pytest.approx(abs(sum(inside) / len(inside) - 0.8))
    losses = [mean_pinball_loss(y, q[:, k], alpha=level) for k, level in enumerate((0.1, 0.5, 0.9))]
    assert result["crps"] == pytest.approx(2 * np.dot([0.3, 0.4, 0.3], losses))  # by the widths of the levels' cells


def test_many_quantiles_have_the_crps_of_their_law():
    mean, std, y = honest(100)
    levels = (np.arange(400) + 0.5) / 400
    result = values(evaluate_forecasts(quantiles_of(mean, std, levels), levels, y, n_resamples=20))
    assert result["crps"] == pytest.approx(regression.crps(mean, std, y), rel=2e-3)


@pytest.mark.parametrize("kind", ["gaussian", "quantiles"])
def test_whole_weights_are_copies_of_rows_and_the_order_does_not_matter(kind):
    mean, std, y = honest(40)
    counts = np.random.default_rng(1).integers(0, 4, size=40)
    left, right = (mean, std) if kind == "gaussian" else (quantiles_of(mean, std), TAU)
    copies = np.repeat(np.arange(40), counts)
    again = (left[copies], right[copies] if kind == "gaussian" else right, y[copies])
    whole = evaluate_forecasts(left, right, y, sample_weight=counts, n_resamples=20)
    assert values(whole) == pytest.approx(values(evaluate_forecasts(*again, n_resamples=20)), abs=1e-12)
    assert whole.effective_rows == pytest.approx(counts.sum() ** 2 / (counts**2).sum())
    turned = (left[::-1], right[::-1] if kind == "gaussian" else right, y[::-1])
    one, two = evaluate_forecasts(left, right, y), evaluate_forecasts(*turned)
    assert values(one) == pytest.approx(values(two), abs=1e-12)


def test_torch_lists_and_unsorted_levels_are_taken():
    mean, std, y = honest(30)
    expected = values(evaluate_forecasts(mean, std, y, n_resamples=20))
    assert values(evaluate_forecasts(*map(torch.from_numpy, (mean, std, y)), n_resamples=20)) == expected
    assert values(evaluate_forecasts(mean.tolist(), std.tolist(), y.tolist(), n_resamples=20)) == expected
    q, order = quantiles_of(mean, std), np.array([3, 0, 6, 1, 5, 2, 4])
    sorted_one = values(evaluate_forecasts(quantiles=q, levels=TAU, targets=y, n_resamples=20))
    assert values(evaluate_forecasts(q[:, order], TAU[order], y, n_resamples=20)) == sorted_one


def test_intervals_hold_the_truth_of_honest_and_of_narrow_forecasts():
    held = {"crps": 0, "coverage_95": 0, "pit_error": 0, "narrow": 0}
    for seed in range(40):
        mean, std, y = honest(300, seed)
        scores = evaluate_forecasts(mean, std, y, n_resamples=100, seed=seed)
        expected = std.mean() / math.sqrt(math.pi)  # given the deviations drawn
        held["crps"] += scores["crps"].low <= expected <= scores["crps"].high
        held["coverage_95"] += scores["coverage_95"].low <= 0.95 <= scores["coverage_95"].high
        held["pit_error"] += scores["pit_error"].low == 0
        narrow = evaluate_forecasts(mean, std / 2, y, n_resamples=100, seed=seed)["pit_error"]
        held["narrow"] += narrow.low <= TRUE_PIT_ERROR <= narrow.high
    assert all(count >= 34 for count in held.values()), held  # 38 of 40 expected


TRUE_PIT_ERROR = float(np.mean([abs(ndtr(ndtri(level) / 2) - level) for level in np.linspace(0, 1, 100)]))
"""Coverage of forecasts with half of the true deviation."""


def test_the_test_of_calibration_keeps_its_level_and_names_the_fault():
    scores = [evaluate_forecasts(*honest(200, seed), n_resamples=99, seed=seed) for seed in range(60)]
    p = [each.tests["forecast"].p_value for each in scores]
    assert 0 <= np.mean(np.array(p) <= 0.05) <= 0.12
    mean, std, y = honest(2000)
    for forecast, words in (
        ((mean, std / 2, y), "its intervals are too narrow"),
        ((mean, std * 2, y), "its intervals are too wide"),
        ((mean - 1, std * 1.3, y), "its forecasts are too low"),
        ((mean + 1, std * 1.3, y), "its forecasts are too high"),
        ((mean, std, y), "No evidence of miscalibration"),
    ):
        assert words in evaluate_forecasts(*forecast, n_resamples=99).verdict()
        quantile = (quantiles_of(*forecast[:2]), TAU, y)
        assert words in evaluate_forecasts(*quantile, n_resamples=99).verdict()


def test_few_rows_are_not_called_calibrated():
    mean, std, y = honest(3)
    words = evaluate_forecasts(mean, std, y, n_resamples=99).verdict()
    assert "3 rows are too few to tell whether it is calibrated" in words
    assert "Nothing speaks" not in words
    one = evaluate_forecasts(mean[:1], std[:1], mean[:1], n_resamples=99).verdict()
    assert "1 row is too few" in one


def test_paired_differences_have_signs_and_know_what_is_equal():
    mean, std, y = honest(400)
    scores = compare_forecasts(raw=(mean, std / 2, y), scaled=(mean, std, y), same=(mean, std / 2, y))
    change = scores.changes["scaled"]
    for metric in ("crps", "nll", "pinball", "interval_error", "pit_error"):
        assert change[metric].high < 0, metric
    assert change["coverage_95"].low > 0
    assert change["sharpness"].low > 0
    assert change["rmse"].value == 0
    assert change["rmse"].low == change["rmse"].high == 0
    same = scores.changes["same"]
    assert all(result.value == 0 for result in same.values())
    assert all(result.low <= 0 <= result.high for result in same.values())


def test_gaussians_compared_with_quantiles_use_the_same_levels():
    mean, std, y = honest(100)
    scores = compare_forecasts(gaussian=(mean, std, y), quantiles=(quantiles_of(mean, std), TAU, y))
    assert scores.levels == tuple(TAU)
    assert all(result.value == pytest.approx(0, abs=1e-12) for result in scores.changes["quantiles"].values())
    assert "quantiles of the levels 0.05, 0.1" in scores.caption()


def test_certain_forecasts_have_finite_scores_but_no_likelihood():
    scores = evaluate_forecasts([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 5.0, 2.0], n_resamples=20)
    result = values(scores)
    assert result["crps"] == result["mae"] == pytest.approx(4 / 3)
    assert result["pinball"] == pytest.approx(2 / 3)
    assert result["coverage_50"] == result["coverage_95"] == pytest.approx(1 / 3)
    assert math.isnan(result["nll"])
    assert "std is 0 in 3 rows" in str(scores)
    tiny = values(evaluate_forecasts([0.0, 0.0], [1e-320, 1.0], [1.0, 0.0], n_resamples=20))
    assert tiny["crps"] == pytest.approx((1 + regression.crps([0.0], [1.0], [0.0])) / 2)


def test_crossing_quantiles_are_scored_as_given_with_a_remark():
    y = np.array([0.0, 1.0, 2.0])
    q = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
    scores = evaluate_forecasts(q, [0.1, 0.9], y, n_resamples=20)
    assert scores["coverage_80"].value == pytest.approx(2 / 3)
    assert "Quantiles cross in 1 of 3 rows" in str(scores)


def test_constant_targets_one_row_and_large_or_small_units():
    constant = evaluate_forecasts(np.zeros(50), np.ones(50), np.zeros(50))
    assert constant["rmse"].value == 0
    assert constant["coverage_50"].value == 1
    assert "too wide" in constant.verdict()
    one = evaluate_forecasts([0.0], [1.0], [0.5])
    assert math.isnan(one["crps"].low)
    assert one.caption().startswith("1 row,")
    mean, std, y = honest(50)
    large, small = (evaluate_forecasts(mean * c, std * c, y * c, n_resamples=20) for c in (1e6, 1e-6))
    cells = [{row[0]: row[1] for row in scores.table()} for scores in (large, small)]
    assert float(cells[0]["crps"]) == pytest.approx(1e12 * float(cells[1]["crps"]), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0.0, 1.0], [1.0, -2.0], [0.0, 1.0]), "std must not be negative, got -2 in row 1"),
        (([0.0, math.nan], [1.0, 1.0], [0.0, 1.0]), "mean must be finite, got nan"),
        (([0.0, 1.0], [1.0, 1.0], [0.0, math.inf]), "targets must be finite"),
        (([0.0, 1.0], [1.0], [0.0, 1.0]), "std must have 2 entries"),
        (([], [], []), "mean must have at least one row"),
        (([[0.0, 1.0]], [0.5, 95.0], [0.0]), "levels must lie between 0 and 1, got 0.5..95; divide per cent"),
        (([[0.0, 1.0]], [0.5, 0.5], [0.0]), "levels must be distinct, got 0.5 twice"),
        (([[0.0, 1.0]], [0.5], [0.0]), "levels must be 2, one for each column of quantiles, got 1"),
        (([[0.0, 1.0]], [0.1, 0.9], [0.0, 1.0]), "quantiles must have shape (2, width)"),
        (([0.0], [1.0]), "targets must be given"),
        (([[0.0], [1.0]], [[1.0], [1.0]], [0.0, 1.0]), "mean must have shape (n,), got (2, 1)"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        evaluate_forecasts(*arguments)


def test_more_refusals():
    mean, std, y = honest(10)
    with pytest.raises(ValueError, match="both"):
        evaluate_forecasts(mean, std, y, quantiles=quantiles_of(mean, std), levels=TAU)
    with pytest.raises(ValueError, match="levels must come with quantiles|levels must be given|come with"):
        evaluate_forecasts(quantiles=quantiles_of(mean, std), targets=y)
    with pytest.raises(ValueError, match=r"coverage must be among 0\.5, 0\.8, 0\.9"):
        evaluate_forecasts(quantiles_of(mean, std), TAU, y, coverage=[0.6])
    with pytest.raises(ValueError, match="b must have the targets of a.*row 3"):
        compare_forecasts(a=(mean, std, y), b=(mean, std, np.where(np.arange(10) == 3, 9.0, y)))
    with pytest.raises(ValueError, match="b, std must not be negative"):
        compare_forecasts(a=(mean, std, y), b=(mean, -std, y))
    with pytest.raises(ValueError, match="the levels of b must be those of a"):
        compare_forecasts(a=(quantiles_of(mean, std), TAU, y), b=(quantiles_of(mean, std, TAU[1:]), TAU[1:], y))


def test_it_is_plain_data_html_and_pandas():
    mean, std, y = honest(80)
    scores = compare_forecasts(raw=(mean, std, y), wide=(mean, 2 * std, y))
    plain = json.loads(scores.to_json(allow_nan=False))
    assert plain["methods"]["wide"]["change"]["crps"]["value"] == scores.changes["wide"]["crps"].value
    assert plain["methods"]["raw"]["test"]["n_resamples"] == 1000
    assert "<table" in scores._repr_html_()
    assert "coverage_95" in scores._repr_html_()
    assert len(scores.to_pandas()) == 2 * len(scores.metrics)
    assert str(scores) == repr(scores)
    certain = evaluate_forecasts(mean, 0 * std, y, n_resamples=20)
    assert certain.to_dict()["methods"]["forecast"]["metrics"]["nll"]["value"] is None
    assert evaluate_forecasts(mean, std, y, seed=1).to_dict() == evaluate_forecasts(mean, std, y, seed=1).to_dict()


def correlated(seed, clusters=30, size=40):
    """Honest forecasts whose errors are mostly shared within a cluster."""
    rng = np.random.default_rng(seed)
    shared = np.repeat(rng.normal(size=clusters), size)
    error = np.sqrt(0.7) * shared + np.sqrt(0.3) * rng.normal(size=clusters * size)
    mean = rng.normal(size=clusters * size)
    return (mean, np.ones(clusters * size), mean + error), np.repeat(np.arange(clusters), size)


def test_intervals_and_tests_are_by_cluster():
    held, alarms = {"crps": 0, "coverage_95": 0, "mae": 0}, {False: 0, True: 0}
    truth = {"crps": 1 / math.sqrt(math.pi), "coverage_95": 0.95, "mae": math.sqrt(2 / math.pi)}
    for seed in range(40):
        forecast, ids = correlated(seed)
        scores = evaluate_forecasts(*forecast, clusters={"patient": ids}, n_resamples=99, seed=seed)
        for metric, value in truth.items():
            held[metric] += scores[metric].low <= value <= scores[metric].high
        alarms[True] += scores.tests["forecast"].p_value <= 0.05
        alarms[False] += evaluate_forecasts(*forecast, n_resamples=99, seed=seed).tests["forecast"].p_value <= 0.05
    assert min(held.values()) >= 34, held  # 38 of 40 expected
    assert alarms[True] <= 6 < 25 <= alarms[False], alarms
    assert "30 clusters (patient): intervals by patient" in scores.caption()
    assert "consistency test by patient" in scores.verdict()
    assert scores.to_dict()["clusters"] == 30


def test_clusters_of_one_row_are_no_clusters_and_one_cluster_is_refused():
    mean, std, y = honest(300)
    alone, each = (evaluate_forecasts(mean, std, y, clusters=c) for c in (None, np.arange(300)))
    assert values(alone) == values(each)
    for metric in ("crps", "rmse", "coverage_95"):
        width = alone[metric].high - alone[metric].low
        assert each[metric].high - each[metric].low == pytest.approx(width, rel=0.03)
    both = compare_forecasts(a=(mean, std, y), b=(mean, 2 * std, y), clusters=np.arange(300) // 3)
    assert both.changes["b"]["crps"].low > 0
    assert both.changes["b"]["rmse"].value == 0
    with pytest.raises(ValueError, match="clusters must be at least 2, got 1"):
        evaluate_forecasts(mean, std, y, clusters=np.zeros(300))
