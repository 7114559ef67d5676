"""Charts: they hold the records' numbers, keep to the house's colours, and show words as words."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest

from trueup import compare, evaluate
from trueup.calibrators import choose
from trueup.reports import (
    chart,
    class_errors,
    comparison,
    confidence_histogram,
    group_errors,
    method_choice,
    numbers,
    reliability,
    risk_coverage,
    style,
    summary,
    temperature_sweep,
)


def pair(n=500, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes))
    return 3 * z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def made():
    z, y = pair()
    return {
        "reliability": reliability(z, y),
        "confidence_histogram": confidence_histogram(z, y),
        "risk_coverage": risk_coverage(z, y),
        "class_errors": class_errors(z, y),
        "group_errors": group_errors(evaluate(z, y, groups=np.arange(500) % 3, n_resamples=19).groups, event=False),
        "temperature_sweep": temperature_sweep(z, y),
        "method_choice": method_choice(choose(["identity", "temperature", "svs"])(z, y).choice),
        "comparison": comparison(compare(raw=(z, y), third=(z / 3, y), more=(2 * z, y))),
    }


RECORDS = made()


def marks_of(record, **options):
    """The marks of a chart, as the page's script reads them."""
    drawn = chart(record, **options).to_dict()
    return drawn["marks"] + drawn.get("below", {}).get("marks", [])


@pytest.mark.parametrize("name", RECORDS)
def test_a_chart_is_plain_json(name):
    drawn = chart(RECORDS[name]).to_dict()
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn
    assert drawn["marks"]
    assert {mark["kind"] for mark in marks_of(RECORDS[name])} <= {"bars", "line", "area", "dots", "rule", "text"}


@pytest.mark.parametrize("name", RECORDS)
def test_every_colour_is_a_variable_of_the_style_sheet(name):
    sheet = files("trueup.reports").joinpath("chart.css").read_text("utf-8")
    light, dark = sheet.split("@media", 1)
    for mark in marks_of(RECORDS[name]):
        variable = mark["color"].removeprefix("var(").removesuffix(")")
        assert f"{variable}: " in light
        assert f"{variable}: " in dark


def test_reliability_shows_bins_with_rows_alone():
    record = RECORDS["reliability"]
    marks = {mark.get("name"): mark for mark in marks_of(record)}
    some = record.count > 0
    np.testing.assert_allclose(marks["accuracy"]["x"], record.confidence[some], rtol=1e-6)
    np.testing.assert_allclose(marks["accuracy"]["y"], record.accuracy[some], rtol=1e-6)
    assert (np.asarray(marks["overconfident"]["size"], float) < 0).all()
    band = marks["95 % band if calibrated"]
    np.testing.assert_allclose(np.add(band["base"], band["size"]), record.high[some], rtol=1e-6)


def test_confidences_add_up():
    right, wrong, *_ = marks_of(RECORDS["confidence_histogram"])
    assert np.sum(right["size"]) + np.sum(wrong["size"]) == pytest.approx(1.0, abs=1e-5)
    assert right["color"] == style.CSS[style.BLUE]


def test_curves_beside_each_other():
    one = RECORDS["risk_coverage"]
    assert [mark["name"] for mark in marks_of(one)] == ["by confidence", "best possible"]
    assert [mark["name"] for mark in marks_of(one, after=one)] == ["before", "after", "best possible"]


def test_comparison_tells_better_from_worse():
    drawn = chart(RECORDS["comparison"], titles={"third": "<i>Third</i>"}, chosen="third").to_dict()
    members = {mark["name"]: mark for mark in drawn["marks"] if mark["kind"] == "dots"}
    assert set(members) == {"uncalibrated", "better", "worse"}
    assert [members["better"]["hover"][0].split("\n")[0], members["worse"]["hover"][0].split("\n")[0]] == [
        "<i>Third</i>", "more",
    ]  # fmt: skip
    assert drawn["y"]["rows"] == ["raw", "<i>Third</i>", "more"]  # the better one is higher
    assert drawn["y"]["bold"] == [1]
    assert [members[name]["y"] for name in ("better", "worse")] == [[1], [2]]


def test_an_outlier_does_not_stretch_the_axis():
    z, y = pair()
    far = comparison(
        compare(
            raw=(z, y),
            third=(z / 3, y),
            half=(z / 2, y),
            half_more=(1.1 * z / 2, y),
            wrong=(-99 * z, y),
            n_resamples=99,
        )
    )
    drawn = chart(far).to_dict()
    assert drawn["x"]["range"][1] < far.value.max()
    assert [mark["text"] for mark in drawn["marks"] if mark["kind"] == "text"] == [f"{far.value.max():.4f} →"]


def test_a_chart_alone_is_a_page():
    page = chart(RECORDS["comparison"], titles={"third": "</script><b>"}).html()
    assert page.count("<script") == page.count("</script>") == 1
    assert "http://www.w3.org/2000/svg" in page
    assert page.count("http") == 1
    assert "&lt;script" in chart(RECORDS["comparison"])._repr_html_()


def test_class_names_are_words():
    z, y = pair()
    record = class_errors(z, y, class_names=["<a href='http://x'>", "b & c", "d" * 90, "e"])
    assert "<a href='http://x'>" in chart(record).to_dict()["y"]["rows"]
    assert len(marks_of(record, most=2)[0]["at"]) <= 2


def test_nothing_but_records():
    for function in (chart, summary, numbers):
        with pytest.raises(TypeError, match="record must be a record of trueup.reports, got int"):
            function(3)


@pytest.mark.parametrize("name", RECORDS)
def test_words_and_numbers_of_every_record(name):
    words = summary(RECORDS[name])
    assert words.endswith(".")
    assert "nan" not in words
    head, rows = numbers(RECORDS[name])
    assert rows
    assert all(len(row) == len(head) for row in rows)


def test_words_say_the_numbers():
    record = reliability(np.log([[0.9, 0.1]] * 10), [0] * 5 + [1] * 5)
    assert "predicted probability 10.0 % and observed frequency 50.0 %: predicted too low" in summary(record)
    record = reliability(np.log([[0.9, 0.1]] * 10), [0] * 5 + [1] * 5, top_label=True)
    assert "confidence and accuracy differ by 0.4000 on average" in summary(record)
    assert "has confidence 90.0 % and accuracy 50.0 %: overconfident" in summary(record)
    assert "band of a calibrated network: 1 of 1 bins." in summary(record)
