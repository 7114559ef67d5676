import io
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason="drawings need matplotlib")

from matplotlib import _pylab_helpers, rcParams  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from strategies import calibrated  # noqa: E402
from trueup import reports as r  # noqa: E402
from trueup.calibrators.compose import Choice  # noqa: E402
from trueup.metrics import compare  # noqa: E402
from trueup.metrics.groups import evaluate_groups  # noqa: E402
from trueup.reports import (  # noqa: E402
    draw,
    style,
)

LOGITS, LABELS = calibrated(400, 4, temperature=2.0)
NOTHING = np.zeros((0, 4)), np.zeros(0, dtype=np.int64)
SURE = np.tile(np.log([[0.97, 0.03]]), (50, 1)), np.arange(50) % 5 // 4
MANY = np.random.default_rng(0).normal(size=(60, 1000)), np.arange(60) * 7


def methods(count, metric="ece"):
    pairs = {f"method {k}": (LOGITS / (1 + k / 8), LABELS) for k in range(count)}
    return r.comparison(compare(pairs, metrics=(metric,), n_resamples=50), metric)


def choice(**changes):
    scores, errors = {"a": 0.5, "b": 0.52, "identity": 0.9}, {"a": 0.0, "b": 0.03, "identity": 0.1}
    known = Choice("a", scores, {"c": "too slow"}, errors, {"a": 1.0}, 0.5, 0.2)
    return known._replace(**changes)


def grouped(count=3, rows=600):
    rng = np.random.default_rng(0)
    p, group = rng.uniform(0.05, 0.6, rows), rng.integers(0, max(count, 1), rows)
    happened = rng.random(rows) < p + 0.3 * (group == 1)
    return r.group_errors(evaluate_groups(p, happened, [f"a group of number {k}" for k in group]))


RECORDS = {
    "reliability": lambda: r.reliability(LOGITS, LABELS),
    "reliability of one bin": lambda: r.reliability(*SURE),
    "reliability in one bin": lambda: r.reliability(LOGITS, LABELS, bins=1),
    "reliability of nothing": lambda: r.reliability(*NOTHING),
    "reliability of timid": lambda: r.reliability(LOGITS / 9, LABELS),
    "reliability of many classes": lambda: r.reliability(*MANY),
    "confidences": lambda: r.confidence_histogram(LOGITS, LABELS),
    "confidences of one bin": lambda: r.confidence_histogram(*SURE),
    "confidences of nothing": lambda: r.confidence_histogram(*NOTHING),
    "risk": lambda: r.risk_coverage(LOGITS, LABELS),
    "promise": lambda: r.promise(LOGITS, LABELS),
    "decision_curve": lambda: r.decision_curve(LOGITS, LABELS),
    "risk of one row": lambda: r.risk_coverage(LOGITS[:1], LABELS[:1]),
    "risk of no errors": lambda: r.risk_coverage(LOGITS, LOGITS.argmax(axis=1)),
    "risk of nothing": lambda: r.risk_coverage(*NOTHING),
    "classes": lambda: r.class_errors(
        LOGITS, LABELS, class_names=["cat", "dog", "a very long name of a class indeed", "$x$"]
    ),
    "two classes": lambda: r.class_errors(*SURE),
    "many classes": lambda: r.class_errors(*MANY),
    "classes of nothing": lambda: r.class_errors(*NOTHING),
    "sweep": lambda: r.temperature_sweep(LOGITS, LABELS),
    "sweep of one": lambda: r.temperature_sweep(LOGITS, LABELS, temperatures=[2.0]),
    "sweep over decades": lambda: r.temperature_sweep(LOGITS, LABELS, temperatures=np.geomspace(1e-3, 1e3, 20)),
    "choice": lambda: r.method_choice(choice()),
    "choice of a mixture": lambda: r.method_choice(choice(chosen="mixture", weights={"a": 0.7, "b": 0.3})),
    "choice of one": lambda: r.method_choice(Choice("a", {"a": 0.5}, {})),
    "groups": grouped,
    "groups of one": lambda: grouped(1),
    "groups of nothing": lambda: r.group_errors(evaluate_groups([], [], [])),
    "many groups": lambda: grouped(60),
    "comparison": lambda: methods(4),
    "comparison of accuracy": lambda: methods(3, "accuracy"),
    "comparison of entropy": lambda: methods(3, "entropy"),
    "comparison without intervals": lambda: methods(3, "smooth_ece"),
    "comparison of one": lambda: methods(1),
    "comparison of thirty": lambda: methods(30),
    "comparison with NaN": lambda: replace(methods(3), value=np.array([0.1, np.nan, 0.2])),
}


@cache
def made(name):
    return RECORDS[name]()


@pytest.fixture(params=RECORDS)
def record(request):
    return made(request.param)


def saved(ax, kind):
    file = io.BytesIO()
    ax.figure.savefig(file, format=kind)
    return file.getvalue()


def words_of(ax):
    legend = [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []
    return [*(text.get_text() for text in ax.texts), *legend]


def test_every_record_is_drawn_in_a_column_and_leaves_no_trace(record):
    before = dict(rcParams)
    ax = draw(record)
    assert ax.figure.get_figwidth() == pytest.approx(3.3)
    ax.figure.draw_without_rendering()
    assert dict(rcParams) == before
    assert _pylab_helpers.Gcf.get_all_fig_managers() == []
    assert any(axes.get_xlabel() for axes in ax.figure.axes)
    assert ax.get_ylabel() or [label.get_text() for label in ax.get_yticklabels()]
    assert ax.get_title(loc="left")


@pytest.mark.parametrize("name", [name for name in RECORDS if " " not in name])
def test_the_given_axes_are_drawn_on(name):
    figure, record = Figure(), made(name)
    others, given = figure.subplots(1, 2)
    assert draw(record, given, title="mine") is given
    assert given.get_title(loc="left") == "mine"
    assert not others.has_data()
    assert draw(record, figure.add_subplot(), title="").get_title(loc="left") == ""


@pytest.mark.parametrize("name", ["reliability", "confidences"])
def test_vectors_stay_vectors(name):
    ax = draw(made(name))
    svg, pdf = saved(ax, "svg"), saved(ax, "pdf")
    assert b"<svg" in svg
    assert b"<image" not in svg
    assert pdf.startswith(b"%PDF")
    assert b"/Subtype /Image" not in pdf


@pytest.mark.parametrize(
    "name", ["reliability", "confidences", "risk", "classes", "many classes", "sweep", "comparison"]
)
def test_print_is_legible_and_lies_inside_the_figure(name):
    ax = draw(made(name))
    ax.figure.draw_without_rendering()
    frame = ax.figure.bbox
    ticks = [tick for axis in (ax.xaxis, ax.yaxis) for tick in axis._update_ticks()]  # those within view
    texts = [*(tick.label1 for tick in ticks), *ax.texts, ax.xaxis.label, ax.yaxis.label, ax._left_title]
    texts += [*ax.get_legend().get_texts()] if ax.get_legend() else []
    for text in texts:
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= 5.5
            box = text.get_window_extent()
            assert frame.x0 - 1 <= box.x0
            assert box.x1 <= frame.x1 + 1
            assert frame.y0 - 1 <= box.y0
            assert box.y1 <= frame.y1 + 1


@pytest.mark.parametrize(
    "name", ["comparison", "comparison of thirty", "classes", "many classes", "confidences", "sweep"]
)
def test_the_legend_lies_in_its_own_room(name):
    ax = draw(made(name))
    ax.figure.draw_without_rendering()
    shared = next(part for part in ax.figure.axes if part.get_legend())
    box = shared.get_legend().get_window_extent()
    bars = [bar.get_window_extent() for bar in ax.patches]
    points = [part.transData.transform(line.get_xydata()) for part in ax.figure.axes for line in part.lines[:9]]
    vertical = [xy for xy in points if len(xy) == 2 and xy[0, 0] == xy[1, 0]]  # of the mean, say: from end to end
    for bar in bars:
        assert not (bar.width and box.overlaps(bar))
    for xy in points:
        if not any(xy is line for line in vertical):
            inside = (box.x0 < xy[:, 0]) & (xy[:, 0] < box.x1) & (box.y0 < xy[:, 1]) & (xy[:, 1] < box.y1)
            assert not inside.any()


def test_reliability_shows_gaps_band_and_counts():
    record = r.reliability(LOGITS, LABELS)
    ax = draw(record)
    some = record.count > 0
    bars = {(round(bar.get_x(), 9), round(bar.get_y(), 9), round(bar.get_height(), 9)) for bar in ax.patches}
    left, width = record.edges[:-1], np.diff(record.edges)
    for b in np.flatnonzero(some):
        gap = record.accuracy[b] - record.confidence[b]
        assert (round(left[b] + 0.1 * width[b], 9), round(record.confidence[b], 9), round(gap, 9)) in bars
        assert (round(left[b], 9), round(record.low[b], 9), round(record.high[b] - record.low[b], 9)) in bars
    strip = [bar for bar in ax.patches if bar.get_y() < 0 and bar.get_height() > 0 and bar.get_y() == ax.get_ylim()[0]]
    assert len(strip) == some.sum()
    assert int(np.argmax([bar.get_height() for bar in strip])) == int(np.argmax(record.count[some]))
    assert ax.get_legend().get_title().get_text() == f"ECE {record.ece:.4f}, 400 rows"
    assert any(f"at most {record.count.max():.0f}" in words for words in words_of(ax))
    assert "95 % band if calibrated" in words_of(ax)


def test_sides_are_told_apart_by_hatches_too():
    ax = draw(r.reliability(LOGITS, np.where(LOGITS.max(axis=1) > 3, LABELS, LOGITS.argmax(axis=1))))
    hatches = {bar.get_hatch() for bar in ax.patches if bar.get_hatch()}
    assert len(hatches) == 2


def test_the_worst_of_many_classes_are_shown():
    record = r.class_errors(*MANY)
    ax = draw(record)
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == [record.class_names[k] for k in np.argsort(-record.error, kind="stable")[:20]]
    assert ax.get_title(loc="left") == "20 worst of 1,000 classes"
    assert f"mean of all {record.error.mean():.4f}" in words_of(ax)
    assert len(draw(record, most=5).get_yticklabels()) == 5


def test_methods_follow_from_the_best_behind_the_first():
    for metric, way in (("ece", 1), ("accuracy", -1)):
        record = replace(methods(4), metric=metric, value=np.array([0.2, 0.3, 0.1, 0.4]))
        shown = [label.get_text() for label in draw(record).get_yticklabels()]
        assert shown == ["method 0", *(f"method {k}" for k in (2, 1, 3)[::way])]


def test_sure_differences_are_marked():
    record = replace(
        methods(4),
        change_low=np.array([np.nan, -2, 1, -1]),
        change_high=np.array([np.nan, -1, 2, 1]),
        value=np.array([0.2, 0.1, 0.3, 0.25]),
    )
    for metric, marked in (
        ("ece", ("better", "worse")),
        ("accuracy", ("worse", "better")),
        ("entropy", ("lower", "higher")),
    ):
        ax = draw(replace(record, metric=metric))
        result = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
        assert result[marked[0]].get_xdata() == [0.1]
        assert result[marked[1]].get_xdata() == [0.3]
        assert result["not significant"].get_xdata() == [0.25]
        assert len({line.get_marker() for line in result.values()}) == 3


def test_what_has_no_interval_claims_nothing():
    ax = draw(methods(3, "smooth_ece"))
    assert ax.get_xlabel() == "Smooth ECE"
    assert ax.get_legend() is None


def test_nothing_is_said_to_be_nothing():
    for name in (
        "reliability of nothing",
        "confidences of nothing",
        "risk of nothing",
        "classes of nothing",
    ):
        assert "no rows" in words_of(draw(made(name)))


def test_styles_differ_without_colour():
    places = range(3 * len(style.SERIES))
    assert len({(look["linestyle"], look["marker"]) for look in map(style.line_style, places)}) == len(places)
    first = [style.line_style(place) for place in range(len(style.SERIES))]
    for key in ("color", "linestyle", "marker"):
        assert len({look[key] for look in first}) == len(first)


def test_colours_are_those_of_okabe_and_ito():
    for colour, bytes_ in {
        style.ORANGE: (230, 159, 0),
        style.SKY: (86, 180, 233),
        style.GREEN: (0, 158, 115),
        style.YELLOW: (240, 228, 66),
        style.BLUE: (0, 114, 178),
        style.VERMILION: (213, 94, 0),
        style.PURPLE: (204, 121, 167),
    }.items():
        assert tuple(round(255 * part) for part in to_rgb(colour)) == bytes_


def test_names_are_written_as_they_are():
    ax = draw(made("classes"))
    assert "a very lon…ss indeed" in [label.get_text() for label in ax.get_yticklabels()]


def test_dark_grounds_are_written_on_in_light():
    with matplotlib.rc_context({"axes.labelcolor": "white", "axes.facecolor": "black"}):
        ax = draw(r.confidence_histogram(LOGITS, LABELS))
    assert {line.get_color() for line in ax.lines} == {"white"}


def test_what_is_no_record_is_refused():
    with pytest.raises(TypeError, match="record must be a record of trueup.reports, got dict"):
        draw({})


def test_a_real_network_is_drawn_quietly(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        pair = file["test_logits"], file["test_labels"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (r.reliability, r.confidence_histogram, r.risk_coverage, r.class_errors):
            draw(make(*pair)).figure.draw_without_rendering()


def test_the_package_gives_the_function_also_after_its_modules_were_imported():
    assert r.draw is draw
    assert callable(r.reliability)
