"""Charts: they hold the records' numbers, keep to the house's colours, and show words as words."""

from __future__ import annotations

import json

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
from trueup.reports.style import DARK

pytest.importorskip("plotly", reason="plotly is not installed")


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


@pytest.mark.parametrize("name", RECORDS)
def test_is_json_without_holes_in_its_layout(name):
    figure = json.loads(chart(RECORDS[name]).to_json())
    assert figure["data"]
    assert figure["layout"]["height"] > 100
    assert "colorway" not in json.dumps(figure["layout"]["template"])  # the house's own style, not plotly's


@pytest.mark.parametrize("name", RECORDS)
def test_every_colour_has_a_dark_counterpart(name):
    clear = "rgba(0,0,0,0)"
    for colour in colours(json.loads(chart(RECORDS[name]).to_json())):
        assert colour in DARK or colour == clear, colour


def colours(value):
    if isinstance(value, dict):
        for key, each in value.items():
            if "color" in key and isinstance(each, str):
                yield each
            else:
                yield from colours(each)
    elif isinstance(value, list):
        for each in value:
            yield from colours(each)


def test_reliability_shows_bins_with_rows_alone():
    record = RECORDS["reliability"]
    figure = chart(record)
    (dots,) = [trace for trace in figure.data if trace.name == "accuracy"]
    some = record.count > 0
    np.testing.assert_array_equal(dots.x, record.confidence[some])
    np.testing.assert_array_equal(dots.y, record.accuracy[some])
    for trace in figure.data:
        assert np.isfinite(np.asarray(trace.x, float)).all()
        assert np.isfinite(np.asarray(trace.y, float)).all()
    (over,) = [trace for trace in figure.data if trace.name == "overconfident"]
    assert (np.asarray(over.y, float) < 0).all()
    (band,) = [trace for trace in figure.data if "band if calibrated" in trace.name]
    np.testing.assert_allclose(np.asarray(band.base, float) + np.asarray(band.y, float), record.high[some])


def test_confidences_add_up():
    right, wrong, *_ = chart(RECORDS["confidence_histogram"]).data
    assert np.sum(right.y) + np.sum(wrong.y) == pytest.approx(1.0)
    assert right.marker.color == style.BLUE


def test_curves_beside_each_other():
    one = RECORDS["risk_coverage"]
    assert [trace.name for trace in chart(one).data] == ["by confidence", "best possible"]
    assert [trace.name for trace in chart(one, after=one).data] == ["before", "after", "best possible"]


def test_comparison_tells_better_from_worse():
    figure = chart(RECORDS["comparison"], titles={"third": "<i>Third</i>"}, chosen="third")
    members = {trace.name: list(trace.text) for trace in figure.data}
    assert members == {"uncalibrated": ["raw"], "better": ["&lt;i&gt;Third&lt;/i&gt;"], "worse": ["more"]}
    assert "<b>&lt;i&gt;Third&lt;/i&gt;</b>" in [note.text for note in figure.layout.annotations]
    best, worst = (next(trace.y[0] for trace in figure.data if trace.name == name) for name in ("better", "worse"))
    lower, upper = figure.layout.yaxis.range
    assert abs(best - upper) < abs(worst - upper)  # the better one stands higher
    assert lower > upper


def test_class_names_are_words():
    z, y = pair()
    record = class_errors(z, y, class_names=["<a href='http://x'>", "b & c", "d" * 90, "e"])
    shown = chart(record).layout.yaxis.ticktext
    assert "&lt;a href='http://x'&gt;" in shown
    assert max(map(len, shown)) < 60
    assert len(chart(record, most=2).data[0].y) <= 2


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
    assert "confidence and accuracy differ by 0.400 on average" in summary(record)
    assert "has confidence 90.0 % and accuracy 50.0 %: overconfident" in summary(record)
    assert "band of a calibrated network: 1 of 1 bins." in summary(record)


def test_the_colours_are_exported():
    assert DARK[style.BLUE] != style.BLUE
