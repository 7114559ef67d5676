"""Records as matplotlib drawings for papers: one column wide, in vectors, and legible without colour."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.core.formatting import format_percent
from trueup.report import canvas, drawings_of_studies, palette, studies
from trueup.report.canvas import SMALL, TICKS
from trueup.report.labels import better, label
from trueup.report.records import ClassErrors, Comparison, Confidences, Reliability, RiskCoverage, TemperatureSweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OVER: dict[str, Any] = {
    "facecolor": palette.OVERCONFIDENT + "80",
    "edgecolor": palette.OVERCONFIDENT,
    "hatch": "//////",
}
_UNDER: dict[str, Any] = {"facecolor": palette.UNDERCONFIDENT + "80", "edgecolor": palette.BLUE, "hatch": "......"}
_STRIP = (-0.25, -0.11)
"""Where the strip of counts lies, below the accuracies and its own caption."""


@singledispatch
def draw(record: Any, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw a record on the axes given, or on those of a new figure, one column of a paper wide.

    The figure is `draw(record).figure`; `figure.savefig("name.pdf")` writes it. pyplot knows nothing of it, and no
    setting of matplotlib is changed. `title=""` draws none.

    >>> from trueup.report.records import reliability
    >>> ax = draw(reliability([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Confidence', 'Accuracy')
    """
    raise TypeError(f"record must be one of trueup.report's records, got {type(record).__name__}")


@draw.register(Reliability)
def _reliability(record: Reliability, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    ax = canvas.axes_for(ax, height=3.3)
    left, width, some = record.edges[:-1], np.diff(record.edges), record.count > 0
    ax.plot([0, 1], [0, 1], color=palette.IDEAL, linewidth=0.8, linestyle="--", zorder=1)
    band: dict[str, Any] = {"color": palette.GREY, "alpha": 0.35, "linewidth": 0}
    name = f"{format_percent(record.level)} band if calibrated"
    ax.bar(
        left[some], (record.high - record.low)[some], width[some], record.low[some], align="edge", label=name, **band
    )
    gap = record.accuracy - record.confidence
    for words, chosen, style in (("says too much", gap < 0, _OVER), ("says too little", gap > 0, _UNDER)):
        if chosen.any():
            at = left[chosen] + 0.1 * width[chosen], gap[chosen], 0.8 * width[chosen], record.confidence[chosen]
            ax.bar(*at, align="edge", label=words, linewidth=0.4, **style)
    ends = left[some], left[some] + width[some]
    ax.hlines(record.accuracy[some], *ends, color=canvas.ink(ax), linewidth=1.4, label="accuracy", clip_on=False)
    _strip(ax, record, some)
    canvas.dress(ax, "Reliability" if title is None else title, "Confidence", "Accuracy")
    ax.set(xlim=(0, 1), ylim=(_STRIP[0], 1))
    if record.rows:
        canvas.legend(ax, title=f"ECE {record.ece:.4f}, {record.rows:,} rows", alignment="left")
    else:
        canvas.nothing(ax, "no rows")
    return ax


def _strip(ax: Axes, record: Reliability, some: np.ndarray) -> None:
    """How many rows each bin holds, by the logarithm, since nearly all lie in few."""
    low, high = _STRIP
    most = record.count.max(initial=1.0)
    height = np.log1p(record.count) / np.log1p(most) * (high - low)
    left, width = record.edges[:-1] + 0.1 * np.diff(record.edges), 0.8 * np.diff(record.edges)
    ax.bar(left[some], height[some], width[some], low, align="edge", color=palette.GREY, linewidth=0)
    ax.axhline(0, color=canvas.ink(ax), linewidth=0.6)
    words = f"rows in each bin, log scale, at most {most:,.0f}" if record.rows else "rows in each bin"
    ax.text(0.012, high / 2, words, fontsize=SMALL, va="center")
    ax.set_yticks(np.linspace(0, 1, 6))


@draw.register(Confidences)
def _confidences(record: Confidences, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    ax = canvas.axes_for(ax)
    floor = 0.5  # below one row, for nothing lies at 0 on a logarithmic scale
    for words, count, colour, hatch in (
        ("right", record.right, palette.RIGHT, ""),
        ("wrong", record.wrong, palette.WRONG, "/////"),
    ):
        name = f"{words} ({count.sum():,.0f})"
        shown: dict[str, Any] = {"facecolor": colour + "50", "edgecolor": colour, "hatch": hatch, "linewidth": 1.0}
        ax.stairs(np.maximum(count, floor), record.edges, baseline=floor, fill=True, label=name, **shown)
    if record.right.any() or record.wrong.any():
        for value, words, style in (
            (record.mean, "mean confidence", (0, (4.0, 1.5))),
            (record.accuracy, "accuracy", "-"),
        ):
            ax.axvline(value, color=canvas.ink(ax), linewidth=1, linestyle=style, label=f"{words} {100 * value:.1f} %")
    else:
        canvas.nothing(ax, "no rows")
    ax.set_yscale("log")
    ax.set(xlim=(0, 1), ylim=(floor, 1.3 * max(record.right.max(), record.wrong.max(), 10)))
    canvas.dress(ax, "Confidence of right and wrong predictions" if title is None else title, "Confidence", "Rows")
    canvas.legend(ax, at="upper left", columns=2)
    return ax


@draw.register(RiskCoverage)
def _risk_coverage(record: RiskCoverage, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    ax = canvas.axes_for(ax)
    x, risk, best = (100 * part for part in (record.coverage, record.risk, record.best))
    ax.fill_between(x, best, risk, color=palette.BLUE, alpha=0.15, linewidth=0)
    ax.plot(x, risk, color=palette.BLUE, linewidth=1.4, label=f"by confidence, area {record.aurc:.4f}")
    best_style: dict[str, Any] = {"color": palette.IDEAL, "linewidth": 1.2, "linestyle": "--"}
    ax.plot(x, best, **best_style, label=f"errors last, area {record.best_aurc:.4f}")
    ax.set(xlim=(0, 100), ylim=(0, 1.05 * max(risk.max(initial=0), 1)))
    words = "Risk and coverage" if title is None else title
    canvas.dress(ax, words, "Coverage: most certain rows kept (%)", "Error rate among them (%)")
    if len(x):
        canvas.legend(ax, at="upper left")
    else:
        canvas.nothing(ax, "no rows")
    return ax


@draw.register(ClassErrors)
def _class_errors(record: ClassErrors, ax: Axes | None = None, *, title: str | None = None, most: int = 20) -> Axes:
    order = np.argsort(-record.error, kind="stable")[:most]
    ax = canvas.axes_for(ax, height=0.9 + 0.14 * max(len(order), 4))
    places, error, more = np.arange(len(order)), record.error[order], (record.said > record.seen)[order]
    less = (record.said <= record.seen)[order]
    for words, chosen, style in (("said too often", more, _OVER), ("said too rarely", less, _UNDER)):
        if chosen.any():
            ax.barh(places[chosen], error[chosen], 0.75, label=words, linewidth=0.4, **style)
    classes, mean = len(record.error), float(record.error.mean())
    if np.isnan(mean):
        canvas.nothing(ax, "no rows")
    else:
        ax.axvline(mean, color=canvas.ink(ax), linewidth=0.9, linestyle="--", label=f"mean of all {mean:.4f}")
    ax.set_yticks(places, labels=[canvas.shortened(record.names[k]) for k in order])
    ax.set_ylim(max(len(order), 1) - 0.4, -0.6)
    words = f"{most} worst of {classes:,} classes" if classes > most else "Calibration by class"
    canvas.dress(ax, words if title is None else title, label("sce"), "")
    ax.tick_params(axis="y", labelsize=SMALL, length=0)
    ax.locator_params(axis="x", nbins=4)
    canvas.legend(ax, at="lower right", columns=2)
    return ax


@draw.register(TemperatureSweep)
def _temperature_sweep(record: TemperatureSweep, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    ax = canvas.axes_for(ax)
    order = np.argsort(record.temperatures)
    t = record.temperatures[order]
    other = ax.twinx()
    for side, values, best, name, place in (
        (ax, record.nll[order], record.best_nll, "NLL", 0),
        (other, record.ece[order], record.best_ece, "ECE", 1),
    ):
        style = {**canvas.line_style(place), "marker": ""}
        side.plot(t, values, **style, label=f"{name}, least at T = {best:.3g}")
        at = np.interp(np.log(best), np.log(t), values, left=np.nan, right=np.nan)
        side.plot([best], [at], marker="os"[place], markersize=4, color=style["color"], linestyle="")
        side.tick_params(axis="y", labelcolor=style["color"])
    ax.set_xscale("log")
    ax.axvline(1, color=palette.IDEAL, linewidth=0.8, linestyle=":")
    canvas.dress(ax, "Temperature sweep" if title is None else title, "Temperature T", "NLL (nats)")
    canvas.second_axis(ax, other, "ECE")
    canvas.plain_log_ticks(ax, t)
    return ax


@draw.register(Comparison)
def _comparison(record: Comparison, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    methods = len(record.methods)
    ax = canvas.axes_for(ax, height=0.95 + 0.16 * max(methods, 3))
    # The first stays on top, as what the others are compared with; they follow from the best to the worst.
    order = np.append(0, 1 + np.argsort(-(better(record.metric) or -1) * record.value[1:], kind="stable"))[:methods]
    place_of = np.argsort(order)
    for words, chosen, style in _kinds(record, ax):
        if chosen.any():
            places = place_of[chosen]
            ax.hlines(places, record.low[chosen], record.high[chosen], color=style["color"], linewidth=1.4)
            ax.plot(record.value[chosen], places, linestyle="", markersize=4, label=words, **style)
    if methods > 1:
        ax.axvline(record.value[0], color=canvas.ink(ax), linewidth=0.6, linestyle=":", zorder=0)
    for k in np.flatnonzero(np.isnan(record.value)):
        ax.text(0.02, place_of[k], "not defined", transform=ax.get_yaxis_transform(), fontsize=SMALL, va="center")
    ax.set_yticks(range(methods), labels=[canvas.shortened(record.methods[k]) for k in order])
    ax.set_ylim(max(methods, 1) - 0.4, -0.6)
    name = label(record.metric)
    known = "" if np.isnan(record.low).all() else f", {format_percent(record.level)} interval"
    canvas.dress(ax, f"{name} by method" if title is None else title, name + known, "")
    ax.tick_params(axis="y", labelsize=SMALL if methods > 12 else TICKS, length=0)
    ax.locator_params(axis="x", nbins=5)
    canvas.legend(ax, at="lower right", columns=3)
    return ax


def _kinds(record: Comparison, ax: Axes) -> list[tuple[str | None, np.ndarray, dict[str, Any]]]:
    """Words, members and looks of the first method, of those that surely differ from it, and of the others."""
    way = better(record.metric)
    lower, higher = record.change_high < 0, record.change_low > 0
    first = np.arange(len(record.methods)) == 0
    unknown = np.isnan(record.change_low) & ~first
    words = {1: ("worse", "better"), -1: ("better", "worse"), 0: ("lower", "higher")}[way]
    looks = {
        "better": {"color": palette.BETTER, "marker": "D"},
        "worse": {"color": palette.WORSE, "marker": "s"},
        "lower": {"color": palette.BLUE, "marker": "v"},
        "higher": {"color": palette.PURPLE, "marker": "^"},
    }
    grey: dict[str, Any] = {"color": palette.GREY, "marker": "o", "markerfacecolor": ax.get_facecolor()}
    kinds = [(word, chosen, looks[word]) for word, chosen in zip(words, (lower, higher), strict=True)]
    return [
        (None, first, {"color": canvas.ink(ax), "marker": "o"}),
        *sorted(kinds, key=lambda kind: kind[0]),
        ("no sure difference", ~(first | lower | higher | unknown), grey),
        (None, unknown, {"color": palette.GREY, "marker": "o"}),
    ]


draw.register(studies.LearnedEpochs, drawings_of_studies.learned_epochs)
draw.register(studies.MaxLogits, drawings_of_studies.max_logits)
draw.register(studies.GammaSweep, drawings_of_studies.gamma_sweep)
draw.register(studies.Starts, drawings_of_studies.starts)
draw.register(studies.ShiftCurves, drawings_of_studies.shift_curves)
