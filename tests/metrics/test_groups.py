"""Groups of rows: by hand, sums that add up, laws of weights, errors, and a small simulation of coverage."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import beta

from trueup import compare, evaluate, from_probs
from trueup.calibrators import per_group
from trueup.metrics.groups import GroupTally, evaluate_groups
from trueup.monitor import Monitor
from trueup.reports import report

RNG = np.random.default_rng(0)
P = RNG.uniform(0.05, 0.6, 3000)
WARD = RNG.choice(["A", "B", "C"], 3000, p=[0.7, 0.25, 0.05])
Y = (RNG.random(3000) < P + 0.15 * (WARD == "B")).astype(int)


def numbers(table):
    rows = {row.name: row for row in table.rows}
    return np.array(
        [
            [r.predicted, r.observed, r.difference.low, r.difference.high, r.p_value, r.detectable]
            for _, r in sorted(rows.items())
        ]
    )


def test_means_by_hand_and_the_worst_group():
    table = evaluate_groups(P, Y, WARD)
    for group in "ABC":
        inside = group == WARD
        row = table[group]
        assert row.rows == inside.sum()
        assert row.predicted == pytest.approx(P[inside].mean())
        assert row.observed == pytest.approx(Y[inside].mean())
        assert row.difference.value == pytest.approx((Y - P)[inside].mean())
        assert row.difference.low < row.difference.value < row.difference.high
    assert table.worst.group == "B" == table.rows[0].group
    assert table.heterogeneity[""] <= 0.001
    assert "The worst group is B" in table.verdict()
    with pytest.raises(KeyError, match="no group is called 'D'; there are: B"):
        table["D"]


def test_groups_with_the_same_error_are_not_called_right():
    rng = np.random.default_rng(0)
    p, group = rng.uniform(0.2, 0.6, 4000), np.arange(4000) % 2
    table = evaluate_groups(p, rng.random(4000) < p + 0.2, group)
    assert table.heterogeneity[""] > 0.05
    assert table.verdict().startswith("The worst group is ")
    assert "There is no evidence that the groups differ from each other (p = " in table.verdict()


def test_one_group_of_one_score_is_a_binomial():
    """Mid-p intervals lie a little inside Clopper's and Pearson's."""
    for events in (0, 2, 15):
        y = np.arange(30) < events
        result = evaluate_groups(np.full(30, 0.1), y, np.zeros(30)).rows[0].difference
        low = beta.ppf(0.025, events, 31 - events) if events else 0.0
        high = beta.ppf(0.975, events + 1, 30 - events)
        assert low - 0.1 - 1e-9 <= result.low <= low - 0.1 + 0.03
        assert high - 0.1 - 0.04 <= result.high <= high - 0.1 + 1e-9


def test_parts_add_up_and_a_common_factor_changes_nothing():
    whole = evaluate_groups(P, Y, WARD)
    parts = [GroupTally.of(P[i::3], Y[i::3], WARD[i::3]) for i in range(3)]
    np.testing.assert_allclose(numbers((parts[0] + parts[1] + parts[2]).table()), numbers(whole), atol=1e-9)
    np.testing.assert_allclose(
        numbers(evaluate_groups(P, Y, WARD, sample_weight=np.full(3000, 7.0))), numbers(whole), atol=1e-9
    )
    whole_weights = RNG.integers(0, 3, 3000)
    copies = np.repeat(np.arange(3000), whole_weights)
    weighted, copied = (
        evaluate_groups(P, Y, WARD, sample_weight=whole_weights),
        evaluate_groups(P[copies], Y[copies], WARD[copies]),
    )
    np.testing.assert_allclose(numbers(weighted)[:, :2], numbers(copied)[:, :2])
    assert (numbers(weighted)[:, 3] > numbers(copied)[:, 3]).all()  # copies are no new rows


def test_intervals_of_several_columns_hold_at_once():
    table = evaluate_groups(P, Y, {"ward": WARD, "even": np.arange(3000) % 2})
    assert {row.name for row in table.rows} == {"ward=A", "ward=B", "ward=C", "even=0", "even=1"}
    assert set(table.heterogeneity) == {"ward", "even"}
    alone = evaluate_groups(P, Y, WARD)["A"].difference
    assert table["ward", "A"].difference.high > alone.high


def test_a_smaller_group_has_a_larger_detectable_difference():
    sizes = np.array([30, 300, 3000])
    group = np.repeat(["s", "m", "l"], sizes)
    p = np.tile([0.1, 0.3], len(group) // 2)
    table = evaluate_groups(p, RNG.random(len(p)) < p, group)
    small, middle, large = (table[g].detectable for g in "sml")
    assert small > 2.5 * middle > 6 * large > 0
    assert small / middle == pytest.approx(10**0.5, rel=0.15)


def test_scores_of_evaluate_and_compare():
    z = from_probs(P)
    scores = evaluate(z, Y, groups=WARD, metrics=("nll",), n_resamples=19)
    assert str(scores.groups) in str(scores)
    assert "B" in scores._repr_html_()
    assert json.loads(scores.to_json())["methods"]["network"]["groups"]["groups"][0]["group"] == "B"
    assert evaluate(z, Y, metrics=("nll",), n_resamples=19).groups is None
    both = compare(raw=(z, Y), flat=(z / 2, Y), groups=WARD, metrics=("nll",), n_resamples=19)
    assert set(both.group_tables) == {"raw", "flat"}
    assert both.groups["A"].predicted == pytest.approx(P[WARD == "A"].mean())


def test_bad_input_is_named():
    for arguments, message in (
        ((P, Y, WARD[1:]), "groups must have 3000 entries, one for each row, got 2999"),
        ((P, Y, {"ward": WARD[1:]}), r"groups\['ward'\] must have 3000 entries"),
        ((P, Y, {}), "groups must have at least one column"),
        ((P, Y, "ward"), "groups must have one value for each row, got the single value 'ward'"),
        ((P, Y, {"ward": 3}), r"groups\['ward'\] must have one value for each row, got the single value 3"),
        ((P, Y, np.stack([WARD, WARD], axis=1)), r"groups must have one value for each row, got shape \(3000, 2\)"),
        ((P, Y, [{"a": 1}] * 3000), "groups must be numbers, text or other hashable values, got dict"),
        ((P * 2, Y, WARD), r"scores must lie in \[0, 1\]"),
        ((P, Y * 2, WARD), "outcomes must be 0 or 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_groups(*arguments)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        evaluate_groups(P, Y, WARD, level=95)


@pytest.mark.parametrize("wrong", [WARD[1:], {"ward": WARD[1:]}], ids=["array", "mapping"])
def test_groups_of_another_length_are_one_clear_error_everywhere(wrong):
    z, labels = from_probs(P), Y
    doors = {
        "evaluate": lambda: evaluate(z, labels, groups=wrong, n_resamples=19),
        "compare": lambda: compare(raw=(z, labels), half=(z / 2, labels), groups=wrong, n_resamples=19),
        "audit": lambda: report((z, labels), methods=["temperature"], groups=wrong, progress=False).audit,
        "monitor": lambda: Monitor(2).update(z, labels, groups=wrong),
        "per_group": lambda: per_group("temperature")(z, labels, groups=wrong),
    }
    for name, call in doors.items():
        with pytest.raises(ValueError, match=r"groups.* must have 3000 entries, one for each row, got 2999"):
            pytest.fail(f"{name} took them: {call()}")


def test_nan_is_one_group():
    ages = np.where(np.arange(3000) % 3 == 0, np.nan, 40.0)
    table = evaluate_groups(P, Y, ages)
    assert {row.group: row.rows for row in table.rows} == {"(missing)": 1000, 40.0: 2000}


def test_packed_sums_are_restored():
    tally = GroupTally.of(P, Y, {"ward": WARD, "even": np.arange(3000) % 2})
    keys, index, sums = tally.pack()
    unpacked = GroupTally.unpack(json.loads(json.dumps(keys)), index, sums)
    assert str(unpacked.table()) == str(tally.table())
    assert GroupTally.unpack(*GroupTally({}).pack()).sums == {}
    for broken in ((keys[:1], index, sums), (keys, index[1:], sums), (keys, index, -sums), ([["a"]], index, sums)):
        with pytest.raises(ValueError, match="its groups"):
            GroupTally.unpack(*broken)


def test_simulations_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import group_repair
    import groups

    result = groups.simulate(groups.WORLDS[2], simulations=3, groups=6)
    assert 0 <= result.together <= 1
    assert result.width < 0.3
    losses = group_repair.compare("temperature", groups=3, size=100, differ=0.5, simulations=1)
    assert losses.mixed < 0.8
    for name in ("groups", "group_repair"):
        sys.modules.pop(name)
