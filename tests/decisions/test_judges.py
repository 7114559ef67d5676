"""The rate of right answers from a judge's labels and some human labels."""

import csv
import importlib
from pathlib import Path

import numpy as np
import pytest

from trueup.decisions import judge_rate, plan_judge

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "judges.py"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    return importlib.import_module("judges")


def answers(rows=2000, labels=300, seed=0, rate=0.7, sensitivity=0.95, specificity=0.7):
    """Return the judge's labels, human labels, and the truth."""
    rng = np.random.default_rng(seed)
    right = rng.random(rows) < rate
    judge = rng.random(rows) < np.where(right, sensitivity, 1 - specificity)
    return judge.astype(float), np.where(np.arange(rows) < labels, right, np.nan), right


def test_the_estimate_is_the_judge_s_mean_corrected_by_its_mean_error():
    judge, human, _ = answers()
    result, labelled = judge_rate(judge, human), ~np.isnan(human)
    correction = result.judge_weight * (judge[~labelled].mean() - judge[labelled].mean())
    assert result.rate.value == pytest.approx(human[labelled].mean() + correction)
    assert result.people_alone.value == pytest.approx(human[labelled].mean())
    assert result.judge_alone == pytest.approx(judge.mean())
    assert result.judge_error.value == pytest.approx(judge.mean() - result.rate.value)
    assert 0 < result.judge_weight <= 1
    assert result.rate.high - result.rate.low < result.people_alone.high - result.people_alone.low
    assert (result.rows, result.human_labels, result.method) == (2000, 300, "ppi")


def test_rogan_gladen_divides_by_sensitivity_and_specificity():
    judge, human, _ = answers()
    labelled = ~np.isnan(human)
    sensitivity, slips = judge[human == 1].mean(), judge[human == 0].mean()
    result = judge_rate(judge, human, method="rogan-gladen")
    assert result.rate.value == pytest.approx((judge[~labelled].mean() - slips) / (sensitivity - slips))
    assert result.right_if_right.value == pytest.approx(sensitivity)
    assert result.right_if_wrong.value == pytest.approx(slips)
    useless = judge_rate(np.random.default_rng(5).random(2000) < 0.5, human, method="rogan-gladen")
    assert useless.method == "ppi"
    assert "This is PPI++" in useless.verdict()


def test_a_useless_judge_does_not_widen_the_interval():
    _, human, _ = answers()
    result = judge_rate(np.random.default_rng(1).random(2000) < 0.5, human)
    widths = [i.high - i.low for i in (result.rate, result.people_alone)]
    assert widths[0] < 1.05 * widths[1]
    assert "do not make the interval shorter" in result.verdict()


def test_strata_count_by_their_share_of_all_answers():
    judge, human, right = answers(3000, 0)
    stratum = np.repeat(["a", "b", "c"], [1500, 900, 600])
    for name, labels in (("a", 20), ("b", 100), ("c", 60)):
        rows = np.flatnonzero(stratum == name)[:labels]
        human[rows] = right[rows]
    result = judge_rate(judge, human, strata=stratum)
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    means = {name: np.nanmean(human[stratum == name]) for name in shares}
    assert result.people_alone.value == pytest.approx(sum(shares[name] * means[name] for name in shares))
    assert set(result.strata) == set(shares)
    with pytest.raises(ValueError, match="strata must have at least 2 human labels each, got 0 in 'd'"):
        judge_rate([*judge, 1, 1], [*human, None, None], strata=[*stratum, "d", "d"])


def test_copies_of_an_answer_in_a_cluster_are_no_news():
    judge, human, _ = answers(600, 150)
    once = judge_rate(judge, human)
    question = np.repeat(np.arange(600), 4)
    copied = judge_rate(np.repeat(judge, 4), np.repeat(human, 4), clusters=question)
    assert copied.rate.value == pytest.approx(once.rate.value, abs=1e-3)
    assert copied.rate.high - copied.rate.low == pytest.approx(once.rate.high - once.rate.low, rel=0.05)
    assert copied.clusters == 150
    with pytest.raises(ValueError, match="clusters must have human labels in at least 2, got 1"):
        judge_rate(judge, human, clusters=np.zeros(600))


def test_human_labels_that_are_no_random_sample_are_reported():
    judge, human, _ = answers(2000, 2000)
    rng = np.random.default_rng(5)
    chosen = rng.random(2000) < np.where(judge == 1, 0.05, 0.3)
    result = judge_rate(judge, np.where(chosen, human, np.nan))
    assert result.biased_sample
    assert "hardly a random sample" in result.verdict()
    assert not judge_rate(judge, np.where(rng.random(2000) < 0.1, human, np.nan)).biased_sample


def test_labels_are_words_numbers_or_missing():
    judge = ["yes", "No", "true", "FALSE", 1, 0]
    human = ["yes", "", None, "no", float("nan"), 0]
    result = judge_rate(judge, human)
    assert (result.human_labels, result.judge_alone, result.people_alone.value) == (3, 0.5, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("judge", "human", "options", "message"),
    [
        ([1, 0, 1], [1, 0], {}, "human must have 3 entries, one for each of judge, got 2"),
        ([1, np.nan, 1], [1, 0, 1], {}, "judge must have a label in every row"),
        ([1, 0, 1], [1, None, None], {}, "human must have at least 2 labels, got 1"),
        ([1, 0, 5], [1, 0, 1], {}, r"judge must lie in \[0, 1\], got 5 in row 2"),
        ([1, 0, 80], [1, 0, 1], {}, "divide per cent by 100"),
        (["right", 0, 1], [1, 0, 1], {}, "true or false, or yes or no, got 'right'"),
        ([1, 0, 1], [0.5, 0, 1], {"method": "rogan-gladen"}, "human must be 0 or 1 for Rogan–Gladen"),
        ([1, 0, 1], [1, 0, 1], {"method": "ppi++"}, 'method must be "ppi" or "rogan-gladen"'),
        ([1, 0, 1], [1, 0, 1], {"level": 95}, "level"),
    ],
)
def test_wrong_input_is_refused_with_a_remedy(judge, human, options, message):
    with pytest.raises(ValueError, match=message):
        judge_rate(judge, human, **options)


def test_the_planned_number_of_labels_gives_the_precision():
    plan = plan_judge(5000, precision=0.04, rate=0.7, sensitivity=0.95, specificity=0.8)
    assert plan.labels < plan.labels_without_judge
    widths = []
    for seed in range(60):
        judge, human, _ = answers(5000, plan.labels, seed, 0.7, 0.95, 0.8)
        interval = judge_rate(judge, human).rate
        widths.append((interval.high - interval.low) / 2)
    assert np.mean(widths) == pytest.approx(0.04, rel=0.05)
    judge, human, _ = answers(5000, 300, 0, 0.7, 0.95, 0.8)
    assert judge_rate(judge, human).plan(0.04).labels == pytest.approx(plan.labels, rel=0.25)


@pytest.mark.parametrize("number", [20, 25, 48, 79])
def test_intervals_hold_in_some_worlds_of_the_simulation(bench, number):
    """Three Monte-Carlo errors below the bar; the benchmark has 2,000 data sets per world."""
    world = list(bench.worlds())[number]
    found = bench.measure(world, 200)
    for name in bench.ESTIMATES:
        assert found[name] >= bench.bar(world) - 3 * np.sqrt(0.05 * 0.95 / 200), (world, name)


def test_the_stored_simulation_keeps_its_bars_and_is_on_the_page(bench):
    with bench.TABLE.open(newline="") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(list(bench.worlds()))
    for record in records:
        for name in bench.ESTIMATES:
            assert float(record[name]) >= bench.MIN_COVERAGE[min(int(record["labels"]), 100)], record
        assert int(record["data_sets"]) >= 2000
    assert bench.summary(records) in bench.PAGE.read_text(encoding="utf-8")
