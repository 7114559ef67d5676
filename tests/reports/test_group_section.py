"""Where is it wrong: the section of the page, its record and words; and a page whose rows have weights."""

import numpy as np
import pytest

from trueup import from_probs
from trueup.metrics.groups import evaluate_groups
from trueup.reports import (
    Report,
    class_errors,
    confidence_histogram,
    group_errors,
    numbers,
    report,
    risk_coverage,
    summary,
    temperature_sweep,
)

RNG = np.random.default_rng(0)
P = RNG.uniform(0.05, 0.6, 1500)
WARD = RNG.choice(["A", "B", "C"], 1500, p=[0.6, 0.35, 0.05])
SEX = RNG.choice(["f", "m"], 1500)
Y = (RNG.random(1500) < P + 0.2 * (WARD == "B")).astype(int)
PAIR = from_probs(np.stack([1 - P, P], axis=1)), Y


@pytest.fixture(scope="module")
def outcome():
    return report(PAIR, methods=["temperature", "platt"], groups={"ward": WARD, "sex": SEX}, progress=False).audit


def test_record_holds_the_groups_of_a_column(outcome):
    table = outcome.scores.group_tables["raw"]
    record = group_errors(table, "ward")
    assert [row for row in table.rows if row.column == "ward"] == list(record.table.rows)
    assert [row.group for row in record.table.rows if row.stands_out] == ["B"]
    assert record.table.heterogeneity == {"ward": table.heterogeneity["ward"]}
    with pytest.raises(ValueError, match="column must be one of ward, sex, got none"):
        group_errors(table)
    with pytest.raises(ValueError, match="column must be one of ward, sex, got 'age'"):
        group_errors(table, "age")


def test_words_name_the_worst_group_and_the_test(outcome):
    record = group_errors(outcome.scores.group_tables["raw"], "ward")
    rates = f"{Y[WARD == 'B'].mean():.1%} happened where {P[WARD == 'B'].mean():.1%} were predicted".replace("%", " %")
    assert summary(record) == f"The worst group is ward=B: {rates}. The groups of ward differ (p ≤ 0.001)."
    same = group_errors(evaluate_groups(np.full(400, 0.5), np.arange(400) % 2, np.arange(400) // 200))
    assert summary(same).startswith("No group is shown to be wrong on average; differences of")
    assert summary(group_errors(evaluate_groups([], [], []))) == "There are no groups to score."
    says = group_errors(outcome.scores.group_tables["raw"], "ward", event=False)
    assert "were right where" in summary(says)
    assert numbers(says)[0][:4] == ["ward", "Rows", "Mean confidence", "Accuracy"]


def test_more_groups_than_are_drawn_are_counted():
    from trueup.reports import chart

    record = group_errors(evaluate_groups(P, Y, np.arange(1500) % 40))
    assert "The chart shows 25 groups; 15 with weaker evidence are not drawn." in summary(record)
    assert len(chart(record).plot.y.rows) == 25
    assert len(numbers(record)[1]) == 40


def test_page_has_the_section_only_with_groups(outcome):
    page = Report(outcome).html()
    assert "Where is it wrong?" in page
    stages = ["before"] if outcome.chosen == "raw" else ["before", "after"]
    for k in range(2):
        for stage in stages:
            assert f'id="groups-{k}-{stage}"' in page
    assert "by ward" in page
    assert "by sex" in page
    plain = report(PAIR, methods=["temperature"], progress=False).audit
    assert "Where is it wrong?" not in Report(plain).html()


def test_both_stages_have_one_order_in_which_no_error_is_hidden(outcome):
    from trueup.reports.figures.groups import section

    panels = section(outcome).panels
    for before, after in zip(panels[::2], panels[1::2], strict=True):
        names = [[row.group for row in panel.record.table.rows] for panel in (before, after)]
        assert names[0] == names[1]
        assert before.options["limit"] == after.options["limit"]


WEIGHTS = 1.0 + np.arange(1500) % 3
COPIES = np.repeat(np.arange(1500), WEIGHTS.astype(int))
Z3 = RNG.normal(size=(1500, 3))
Y3 = (Z3 / 2 + RNG.gumbel(size=Z3.shape)).argmax(axis=1)


def test_weighted_figures_are_those_of_duplicated_rows():
    for make, fields in (
        (confidence_histogram, ("right", "wrong", "mean", "accuracy")),
        (class_errors, ("error", "probability", "frequency")),
        (temperature_sweep, ("temperatures", "nll", "ece")),
    ):
        weighted, copied = make(Z3, Y3, sample_weight=WEIGHTS), make(Z3[COPIES], Y3[COPIES])
        for field in fields:
            np.testing.assert_allclose(getattr(weighted, field), getattr(copied, field), rtol=1e-5, atol=1e-7)
    weighted, copied = risk_coverage(Z3, Y3, sample_weight=WEIGHTS), risk_coverage(Z3[COPIES], Y3[COPIES])
    np.testing.assert_allclose(
        np.interp(0.5, weighted.coverage, weighted.risk), np.interp(0.5, copied.coverage, copied.risk), atol=5e-3
    )
    assert weighted.risk[-1] == pytest.approx(copied.risk[-1])
    assert weighted.aurc == pytest.approx(copied.aurc, abs=2e-3)
    np.testing.assert_allclose(weighted.best[-1], weighted.risk[-1])


def test_a_factor_in_all_weights_changes_nothing_on_the_page():
    pages = []
    for factor in (1.0, 1e-3):
        result = report((Z3, Y3), methods=["temperature"], sample_weight=factor * WEIGHTS, progress=False).audit
        page = Report(result).html()
        assert "All figures of this page weight the rows" in page
        assert "1,500 rows are equivalent to 1,286 rows of equal weight" in page
        pages.append(result)
    one, two = pages
    assert one.sample_weight.mean() == pytest.approx(1.0)
    np.testing.assert_allclose(one.sample_weight, two.sample_weight)
    for metric in one.scores.metrics:
        assert one.scores["raw", metric].value == pytest.approx(two.scores["raw", metric].value, abs=1e-9)


def test_the_worst_group_has_the_largest_error_of_those_shown_to_be_wrong():
    # The large group is wrong most certainly, the small one by most; one of five rows proves nothing.
    rows = [("large", 4000, 0.10), ("small", 300, 0.20), ("tiny", 5, 0.45)]
    groups = np.repeat([name for name, _, _ in rows], [n for _, n, _ in rows])
    outcomes = np.concatenate([np.arange(n) < round((0.5 + error) * n) for _, n, error in rows]).astype(float)
    table = evaluate_groups(np.full(len(groups), 0.5), outcomes, groups)
    assert table.worst.group == "small"
    assert "The worst group is small" in table.verdict()
    assert "The worst group is small" in summary(group_errors(table))
