import csv
import io
import math

import pytest
from scipy import stats

from trueup_studies.published import published_values
from trueup_studies.tables import Column, save_tables, tabulate

ECE = Column("ece", "ECE, %", scale=100, digits=2)


def rows(**values):
    return [
        {"method": method, "seed": seed, "ece": value}
        for method, each in values.items()
        for seed, value in enumerate(each)
    ]


def entry(table, method, column="ece", group=""):
    return table.groups[group][method][column]


def test_mean_and_standard_deviation_of_the_sample():
    table = tabulate(rows(a=[0.01, 0.02, 0.06], b=[0.05]), by="method", columns=[ECE])
    found = entry(table, "a")
    assert found.mean == pytest.approx(3.0)
    assert found.std == pytest.approx(math.sqrt(7.0))  # deviations −2, −1, 3 over two degrees of freedom
    assert found.count == 3
    assert math.isnan(entry(table, "b").std)
    assert "| a | **3.00 ± 2.65** |" in table.markdown()
    assert "| b | *5.00* |" in table.markdown()


def test_places_of_either_direction_and_of_none():
    columns = [ECE, Column("accuracy", better="higher"), Column("temperature", better="")]
    values = {"a": (0.02, 0.9, 1.5), "b": (0.01, 0.8, 2.5), "c": (0.03, 0.7, 0.5), "d": (0.04, 0.95, 1.0)}
    names = ("ece", "accuracy", "temperature")
    table = tabulate(
        [{"method": method, **dict(zip(names, each, strict=True))} for method, each in values.items()],
        by="method",
        columns=columns,
    )
    assert [entry(table, m).rank for m in "abcd"] == [2, 1, 0, 0]
    assert [entry(table, m, "accuracy").rank for m in "abcd"] == [2, 0, 0, 1]
    assert [entry(table, m, "temperature").rank for m in "abcd"] == [0, 0, 0, 0]


def test_what_prints_equally_shares_a_place():
    table = tabulate(rows(a=[0.01001], b=[0.01002], c=[0.02], d=[0.02004], e=[0.03]), by="method", columns=[ECE])
    assert [entry(table, m).rank for m in "abcde"] == [1, 1, 2, 2, 0]


def test_nothing_that_is_not_a_number_wins():
    table = tabulate(rows(a=[math.nan], b=[0.02], c=[None], d=[0.03]), by="method", columns=[ECE], order=["z"])
    assert [entry(table, m).rank for m in "abd"] == [0, 1, 2]
    assert "ece" not in table.groups[""]["c"]
    lines = table.markdown().splitlines()
    assert lines[2:] == ["| z | – |", "| a | – |", "| b | **2.00** |", "| c | – |", "| d | *3.00* |"]
    assert "z & -- \\\\" in table.latex()


def test_groups_are_judged_apart():
    data = [
        {"net": net, "size": 1, **row} for net, best in (("x", 0.01), ("y", 0.09)) for row in rows(a=[best], b=[0.05])
    ]
    table = tabulate(data, by="method", group=["net", "size"], columns=[ECE], titles={"a": "Alpha"})
    assert list(table.groups) == ["x, 1", "y, 1"]
    assert entry(table, "Alpha", group="x, 1").rank == 1
    assert entry(table, "Alpha", group="y, 1").rank == 2
    assert "| **x, 1** |  |\n| Alpha | **1.00** |\n| b | *5.00* |" in table.markdown()
    assert r"\multicolumn{2}{l}{\emph{x, 1}} \\" in table.latex()


def test_marks_are_those_of_the_two_sample_t_test():
    reference, lower, alike = [0.050, 0.052, 0.049], [0.030, 0.033, 0.031], [0.051, 0.048, 0.053]
    found = rows(ce=reference, ls=lower, focal=alike, brier=[0.09, 0.1, 0.09])
    table = tabulate(found, by="method", columns=[ECE], reference="ce")
    assert [entry(table, m).mark for m in ("ce", "ls", "focal", "brier")] == ["", "lower", "", "higher"]
    assert stats.ttest_ind(lower, reference).pvalue < 0.05 < stats.ttest_ind(alike, reference).pvalue
    assert "| brier | 9.33 ± 0.58↑ |" in table.markdown()
    assert r"$\uparrow$" in table.latex()


def test_an_error_of_the_rows_own():
    column = Column("regret", digits=3, error="regret error")
    table = tabulate([{"method": "a", "regret": 0.5, "regret error": 0.25}], by="method", columns=[column])
    assert "**0.500 ± 0.250**" in table.markdown()


def test_latex_and_markdown_signs_are_kept_apart():
    data = [{"a_b": "50% & more|less", "ece": 0.01}]
    table = tabulate(data, by="a_b", columns=[ECE]).captioned("100 % of it", ["a note"])
    assert r"50\% \& more|less & \textbf{1.00} \\" in table.latex()
    assert r"a\_b & ECE, \%" in table.latex()
    assert table.latex().startswith("% 100 % of it\n% a note\n")
    assert r"| 50% & more\|less |" in table.markdown()
    assert table.markdown().startswith("100 % of it\n\n| a_b |")
    assert table.markdown().endswith("\n\na note")


def test_csv_has_every_digit():
    [line] = csv.DictReader(io.StringIO(tabulate(rows(a=[0.1, 0.2]), by="method", columns=[ECE]).csv()))
    assert float(line["mean"]) == 15.000000000000002 or float(line["mean"]) == 15.0
    assert float(line["std"]) == pytest.approx(50**0.5, rel=1e-12)
    assert (line["method"], line["figure"], line["count"], line["place"], line["mark"]) == (
        "a",
        "ECE, %",
        "2",
        "1",
        "",
    )


def test_tables_are_saved_in_three_formats(tmp_path):
    table = tabulate(rows(a=[0.01]), by="method", columns=[ECE])
    files = save_tables({"main": table}, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["main.md", "main.tex", "main.csv"]
    assert files[0].read_text() == table.markdown() + "\n"
    assert files[1].read_text() == table.latex() + "\n"
    assert files[2].read_text() == table.csv()


def test_an_empty_table_is_a_table():
    table = tabulate([], by="method", columns=[ECE])
    assert table.markdown() == "| method | ECE, % |\n|:--|--:|"
    assert r"\bottomrule" in table.latex()


def test_published_numbers():
    table_1 = published_values("neural-clamping", "table 1", metric="ece_pct")
    assert {fact.method: fact.mean for fact in table_1}["Uncalibrated"] == 5.77
    assert len(table_1) == 9
    [gap] = published_values(
        "neural-clamping", "table 2", model="Wide-ResNet-40-10", method="Neural Clamping (FL)", metric="ece_pct"
    )
    assert math.isnan(gap.mean)
    [fact] = published_values(
        "rethinking", "table 2", dataset="CIFAR-10", method="Cross-Entropy", metric="ece_pct_after_ts"
    )
    assert fact.mean > 0
    assert fact.std > 0
    assert published_values("rethinking", "table 9") == []
    with pytest.raises(ValueError, match="paper must be one of neural-clamping, rethinking, got 'clue'"):
        published_values("clue")
    with pytest.raises(ValueError, match="fields must be among dataset, model, method, metric, mean, std, got 'net'"):
        published_values("rethinking", net="x")
