"""Promised thresholds: the guarantee by simulation, small cases by hand, and input people have."""

import json
import math

import numpy as np
import pytest
from scipy.stats import binom

import trueup
from optional import torch
from trueup._core.errors import InputError
from trueup.decisions import EventRisk, GroupThresholds, Recheck, calibrated_threshold, threshold
from trueup.decisions.thresholds import least_rows


def draw(n, seed, classes=4, scale=3.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * scale
    return z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def event_pair(probs, happened):
    return np.stack([np.log1p(-probs), np.log(probs)], axis=1), happened.astype(int)


def population(size=100_000, seed=5):
    """Confidences, and how often each is right: too sure by a temperature of 1.3."""
    rng = np.random.default_rng(seed)
    c = np.clip(rng.beta(4, 0.7, size), 0.01, 0.9999)
    odds = np.log(c / (1 - c)) / 1.3
    return c, 1 / (1 + np.exp(-odds))


@pytest.mark.parametrize("rounded", [False, True])
def test_a_promise_fails_no_more_often_than_stated(rounded):
    c, right = population()
    c = np.clip(c.round(2), 0.01, 0.99) if rounded else c
    order = np.argsort(-c)
    risk = np.cumsum(1 - right[order]) / np.arange(1, len(c) + 1)
    rng = np.random.default_rng(0)
    failed, promised, trials = 0, 0, 300
    for _ in range(trials):
        at = rng.integers(0, len(c), 600)
        result = threshold(
            *event_pair(c[at], rng.random(600) < right[at]), risk="false_discovery_rate", max_risk=0.1, level=0.9
        )
        kept = np.searchsorted(-c[order], -result.threshold * (1 - 1e-9), side="right")
        promised += result.promised
        failed += bool(kept and risk[kept - 1] > 0.1)
    assert promised > 0.9 * trials
    assert failed <= binom.ppf(0.999, trials, 0.1)
    assert failed > 0  # not so careful that it says nothing


def test_false_positives_are_bounded_by_the_exact_quantile():
    rng = np.random.default_rng(0)
    probs = rng.random(3000)
    happened = rng.random(3000) < probs
    result = threshold(*event_pair(probs, happened), risk="false_positive_rate", max_risk=0.05)
    negatives = np.sort(probs[~happened])[::-1]
    allowed = int(binom.ppf(0.05, len(negatives), 0.05)) - 1
    passed = (negatives >= result.threshold - 1e-12).sum()
    assert allowed - 1 <= passed <= allowed + 1
    assert binom.cdf(passed, len(negatives), 0.05) <= 0.05


def test_the_threshold_is_a_score_and_its_rows_are_answered():
    z, y = draw(3000, 0)
    result = threshold(z, y, max_risk=0.1)
    answers = result.answers(z)
    assert answers.dtype == bool
    assert answers.sum() == result.answered
    assert result.observed == pytest.approx((z.argmax(axis=1) != y)[answers].mean())
    assert result.observed < result.bound <= 0.1 + 1e-9
    assert isinstance(result.answers(torch.from_numpy(z)), torch.Tensor)
    assert result.coverage + result.review == 1
    json.dumps(result.to_dict(), allow_nan=False)


def test_discrete_scores_are_one_step():
    c = np.repeat([0.9, 0.6], [400, 400])
    wrong = np.zeros(800, bool)
    wrong[:8] = True  # 2 % of the first
    wrong[400:520] = True  # 30 % of the others
    result = threshold(*event_pair(c, ~wrong), risk="false_discovery_rate", max_risk=0.05)
    assert result.answered == 400
    assert result.threshold == pytest.approx(0.9)


def test_nothing_to_promise_is_said_with_the_labels_it_takes():
    z, y = draw(60, 1)
    result = threshold(z, y, max_risk=0.01)
    assert not result.promised
    assert math.isinf(result.threshold)
    assert result.answered == 0
    assert not result.answers(z).any()
    assert result.labels_needed is None or result.labels_needed > 60
    assert "Nothing can be promised from 60 rows" in str(result)
    useless = threshold(np.zeros((500, 2)), np.arange(500) % 2, max_risk=0.05)
    assert useless.labels_needed is None
    assert "not likely to help" in str(useless)


def test_the_labels_needed_are_about_enough():
    c, right = population()
    rng = np.random.default_rng(1)

    def promised(n):
        at = rng.integers(0, len(c), n)
        return threshold(*event_pair(c[at], rng.random(n) < right[at]), risk="false_discovery_rate", max_risk=0.05)

    needed = [one.labels_needed for one in (promised(150) for _ in range(20)) if not one.promised]
    guess = int(np.median([n for n in needed if n is not None]))
    assert np.mean([promised(guess).promised for _ in range(40)]) > 0.5


def test_all_right_needs_no_fewer_rows_than_the_law_says():
    for n in (149, 151):
        pair = event_pair(np.linspace(0.9, 0.99, n), np.ones(n, bool))
        assert threshold(*pair, risk="false_discovery_rate").promised == (n > least_rows(0.02, 0.05) + 1)


def test_groups_share_the_certainty():
    z, y = draw(4000, 2)
    groups = np.where(np.arange(4000) % 2 == 0, "left", "right")
    both = threshold(z, y, max_risk=0.1, groups=groups)
    assert isinstance(both, GroupThresholds)
    assert list(both) == ["left", "right"]
    alone = threshold(z[::2], y[::2], max_risk=0.1, level=0.975)
    assert both["left"].threshold == alone.threshold
    assert both.answers(z, groups).mean() == pytest.approx(both.coverage)
    assert not both.answers(z[:1], ["elsewhere"]).any()
    json.dumps(both.to_dict(), allow_nan=False)
    assert "left: Answer when" in str(both)


def test_costs_of_two_values_are_errors_and_others_are_bounded():
    z, y = draw(4000, 3)
    errors = threshold(z, y, max_risk=0.1)
    scaled = threshold(z, y, risk=5.0 * (1 - np.eye(4)), max_risk=0.5)
    assert scaled.threshold == errors.threshold
    uneven = 1 - np.eye(4)
    uneven[0] *= 10
    result = threshold(z, y, risk=uneven, max_risk=0.5)
    cost = uneven[y, z.argmax(axis=1)]
    assert result.promised
    assert cost[result.answers(z)].mean() < 0.5
    assert threshold(z, y, risk=uneven, max_risk=11.0).coverage == 1


def test_a_method_is_fitted_on_other_rows():
    z, y = draw(4000, 4)
    split = calibrated_threshold(3 * z, y, max_risk=0.1)
    assert split.rows == 2000
    assert "Half of the rows" in str(split)
    crossed = calibrated_threshold(3 * z, y, "temperature", max_risk=0.1, n_folds=5)
    assert crossed.rows == 4000
    assert "approximate" in str(crossed)
    assert crossed.answers(3 * z).mean() == pytest.approx(crossed.coverage, abs=0.02)


def test_a_recheck_is_valid_whenever_one_looks_and_finds_what_is_broken():
    rng = np.random.default_rng(0)
    alarms, outside = 0, 0
    for _ in range(300):
        check = Recheck(max_risk=0.05, level=0.9)
        low, high = 0.0, 1.0
        for _ in range(10):
            check = check.update(rng.random(100) < 0.05)
            low, high = max(low, check.low), min(high, check.high)
        alarms += check.refuted
        outside += not low <= 0.05 <= high
    assert alarms <= binom.ppf(0.999, 300, 0.1)
    assert outside <= binom.ppf(0.999, 300, 0.1)
    broken = Recheck(max_risk=0.05).update(rng.random(2000) < 0.1)
    assert broken.refuted
    assert broken.low > 0.05
    assert "is broken" in str(broken)
    assert Recheck(max_risk=0.05).wealth == pytest.approx(1)
    assert (Recheck(0.1).low, Recheck(0.1).high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_risk": 0.0}, "max_risk must lie between 0 and 1"),
        ({"level": 1.0}, "level must lie between 0 and 1"),
        ({"risk": "errors"}, "risk must be error"),
        ({"risk": EventRisk("false_positive_rate", 4)}, "event must be a class, 0..3"),
        ({"groups": [1, 2]}, "groups must have shape"),
        ({"risk": np.eye(3)}, "risk must be a name, an EventRisk or costs of shape"),
        ({"risk": -np.eye(4)}, "risk must be costs that are finite and not negative"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(InputError, match=words):
        threshold(*draw(50, 0), **options)


def test_no_rows_promise_nothing():
    result = threshold(np.zeros((0, 3)), np.zeros(0, int))
    assert not result.promised
    assert "Nothing can be promised from 0 rows" in str(result)


def test_correlated_rows_do_not_carry_a_promise_as_if_they_were_many():
    """Patients whose visits are all right or all wrong: 20 visits each are no more than one."""
    failed = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        wrong = rng.random(150) < 0.1
        score = np.repeat(rng.uniform(0.6, 0.99, 150), 20)
        pair = event_pair(score, np.repeat(~wrong, 20))
        patient = np.repeat(np.arange(150), 20)
        result = threshold(*pair, risk="false_discovery_rate", max_risk=0.1, clusters={"patient": patient}, seed=seed)
        failed.append(result.promised)  # no threshold keeps the risk below 0.1
        assert result.rows == 150
        assert "One row of each of 150 patients" in str(result)
    assert np.mean(failed) < 0.15


def test_a_promise_kept_for_long_is_not_called_broken():
    """The tail of the mixture underflows after some ten thousand right answers."""
    for wrong in (np.zeros(100_000), np.arange(100_000) % 100 == 0):
        check = Recheck(max_risk=0.05).update(wrong)
        assert not check.refuted
        assert check.wealth == 0
    assert not check.update(np.ones(4_000)).refuted  # 4.8 % of 104,000 rows
    assert check.update(np.ones(5_000)).refuted  # 5.7 % of 105,000


def test_costs_of_one_and_two_are_not_counted_as_none_and_one():
    z, y = draw(3000, 3)
    error = threshold(z, y, max_risk=0.1)
    result = threshold(z, y, risk=2 - np.eye(z.shape[1]), max_risk=1.1)
    assert 0 < result.answered <= error.answered
    assert 1 < result.observed <= 1.1


def test_few_rows_do_not_say_that_more_are_no_help():
    z, y = draw(60, 0)
    y[z.max(axis=1).argmax()] = (z[z.max(axis=1).argmax()].argmax() + 1) % z.shape[1]
    result = threshold(z, y, max_risk=0.02)
    assert result.labels_needed is None
    assert "too few rows to say" in str(result)
    assert "too few rows to say" in str(threshold(z[:0], y[:0]))


def test_rows_that_tie_at_the_top_are_no_matter_of_labels():
    tied = threshold(np.zeros((1000, 2)), np.arange(1000) % 2, risk="false_positive_rate", max_risk=0.05)
    assert tied.labels_needed is None
    assert "not likely to help" in str(tied)
    few = threshold(*draw(40, 0, classes=2), risk="false_positive_rate", max_risk=0.05)
    assert few.labels_needed > 40


def test_labels_that_fit_the_calibrator_are_counted_among_those_needed():
    z = np.stack([np.zeros(60), np.linspace(1, 5, 60)], axis=1)
    halved = calibrated_threshold(z, np.ones(60, int), "identity", max_risk=0.05)
    assert halved.labels_needed == 2 * threshold(z[::2], np.ones(30, int), max_risk=0.05).labels_needed


def test_a_row_without_a_group_is_an_error():
    z, y = draw(50, 0)
    with pytest.raises(InputError, match="NaN in row 1 and 24 others"):
        threshold(z, y, groups=np.where(np.arange(50) % 2, np.nan, 1.0))
    assert threshold(z, y, max_risk=np.float32(0.5)).promised


@pytest.mark.parametrize("kind", ["errors", "groups", "costs", "calibrated", "nothing"])
def test_a_threshold_can_be_saved(tmp_path, kind):
    z, y = draw(1000, 0)
    n_classes = z.shape[1]
    result = {
        "errors": lambda: threshold(z, y, max_risk=0.2),
        "groups": lambda: threshold(z, y, max_risk=0.3, groups=y % 2),
        "costs": lambda: threshold(z, y, max_risk=0.3, risk=1 - np.eye(n_classes)),
        "calibrated": lambda: calibrated_threshold(z, y, max_risk=0.3),
        "nothing": lambda: threshold(z[:20], y[:20], max_risk=1e-4),
    }[kind]()
    trueup.save(result, tmp_path / "threshold.safetensors")
    loaded = trueup.load(tmp_path / "threshold.safetensors")
    assert str(loaded) == str(result)
    options = {"groups": y % 2} if kind == "groups" else {}
    np.testing.assert_array_equal(loaded.answers(z, **options), result.answers(z, **options))
