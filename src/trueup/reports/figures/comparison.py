"""Comparison of methods: one metric with its intervals, and the table of all metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from trueup._core.formatting import TableCell, format_interval, format_number, format_percent
from trueup.metrics.intervals import Interval
from trueup.metrics.table import Scores
from trueup.reports import style
from trueup.reports.audit import RAW, Audit, method_title
from trueup.reports.figures import Panel, Section, Table, percent
from trueup.reports.figures.method_choice import choice_panels
from trueup.reports.html import details, paragraph, table
from trueup.reports.plot import Axis, Plot, Rule, Text, cut_outliers, interval_dots

_COLUMNS = {"nll": "Log‑loss", "brier": "Brier score", "sce": "Class‑wise error"}
_EVENT_COLUMNS = {"nll": "Log‑loss", "event_brier": "Brier score", "miscalibration": "Miscali\u00adbration"}
_EVENT_COLUMNS |= {"auroc": "AUROC", "calibration_slope": "Slope", "calibration_intercept": "Intercept"}
"""Metric → its column head, after the columns of the mean and the ECE."""


_METHODS_SHOWN = 10  # the chosen one, the uncalibrated network and the best eight; the others are folded


@dataclass(frozen=True, eq=False)
class Comparison:
    """One metric of several methods on the same rows, with intervals and paired changes from the first method."""

    metric: str
    """Name of the metric."""
    methods: tuple[str, ...]
    """Names of the methods; the arrays have one entry per method."""
    value: np.ndarray
    """Value of the metric."""
    low: np.ndarray
    """Lower end of the interval of the true metric; for binned errors the interval may lie below the value."""
    high: np.ndarray
    """Upper end of the interval; NaN if unknown."""
    change: np.ndarray
    """Paired difference from the first method; NaN for the first itself."""
    change_low: np.ndarray
    """Lower end of the interval of the difference."""
    change_high: np.ndarray
    """Upper end of the interval of the difference."""
    level: float
    """Level of the intervals."""


def comparison(scores: Scores, metric: str = "ece") -> Comparison:
    """Return one metric of a table of methods with its intervals and paired changes from the first method.

    Parameters
    ----------
    scores
        Table of methods, from `compare`.
    metric
        Name of the metric.

    Returns
    -------
    Comparison
        The record.

    Examples
    --------
    >>> from trueup.metrics.table import compare
    >>> logits, labels = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 0, 1, 0]
    >>> record = comparison(compare(raw=(logits, labels), halved=(logits / 2, labels)), "nll")
    >>> record.methods, record.value.round(4), record.change.round(4)
    (('raw', 'halved'), array([0.5108, 0.5543]), array([   nan, 0.0435]))
    """
    if metric not in scores.metrics:
        raise ValueError(f"metric must be one of {', '.join(scores.metrics)}, got {metric!r}")
    values = [scores.values[name][metric] for name in scores.methods]
    unknown = Interval(np.nan, np.nan, np.nan)
    changes = [scores.changes.get(name, {}).get(metric, unknown) for name in scores.methods]
    ends = "value", "low", "high"
    value, low, high = (np.array([getattr(interval, end) for interval in values]) for end in ends)
    change, change_low, change_high = (np.array([getattr(interval, end) for interval in changes]) for end in ends)
    return Comparison(metric, scores.methods, value, low, high, change, change_low, change_high, scores.level)


def section(audit: Audit) -> Section:
    """Return the section: the table of methods, and a chart of their calibration errors."""
    rows = "held-out rows" if audit.cross_fitted else "the test rows"
    event, methods, record = audit.scores.is_event, audit.scores.methods, comparison(audit.scores)
    titles = {name: method_title(name) for name in methods}
    # The chosen method first, then the uncalibrated network, then the others by held-out loss.
    losses = {name: loss for name, (loss, _) in audit.losses.items()}
    order = sorted(methods, key=lambda name: (name != audit.chosen, name != RAW, losses.get(name, -math.inf)))
    drawn = _select(record, [name for name in methods if name in order[:_METHODS_SHOWN]])
    options, words = {"titles": titles, "chosen": audit.chosen}, summary(record, titles=titles)
    texts = [
        f"The table shows each on {rows}. The change of ECE is the paired difference from the uncalibrated network. "
        f"It is statistically significant if its {format_percent(audit.scores.level)} interval excludes 0; by "
        "chance alone, that happens for one method in twenty."
    ]
    if event:
        observed = percent(audit.scores[RAW, "observed"].value)
        texts.append(
            f"The event is {audit.scores.event_name}; it happens in {observed} of the rows. Miscalibration is "
            "the part of the Brier score that calibration can remove. A slope below 1 means that predictions are too "
            "extreme. With a slope of 1, an intercept below 0 means that they are too high."
        )
    cells = [_cells(audit, name) for name in order]
    head = ["Method", "Held‑out log‑loss", "Mean predicted" if event else "Accuracy", "ECE", "Change of ECE"]
    head += (_EVENT_COLUMNS if event else _COLUMNS).values()
    shown = table(f"Methods on {rows}", head, cells[:_METHODS_SHOWN], sortable=True, chosen=0)
    parts = [*map(paragraph, texts), shown]
    if rest := cells[_METHODS_SHOWN:]:
        words += f" The chart has the methods of the table; the other {len(rest)} have a larger held-out log-loss."
        hidden = table("Methods with a larger held-out log-loss", head, rest, sortable=True)
        parts.append(details(f"Show all {len(cells)} methods", hidden))
    panel = Panel("methods-chart", "Calibration error of each method", drawn, options, words, numbered=False)
    if audit.failures:
        failed = "; ".join(f"{method_title(name)} ({why})" for name, why in audit.failures.items())
        parts.append(paragraph(f"Could not be fitted: {failed}.", "words"))
    return Section(
        name="methods",
        title="Which method is best?",
        text="Every method is fitted to the calibration rows, and cross-validation chooses one there. "
        f"{method_title(audit.chosen)} is the simplest whose log-loss on held-out folds is within a standard error of "
        "the lowest. Methods are sorted by this loss.",
        html="".join(parts),
        panels=(panel, *choice_panels(audit)) if len(methods) > 1 else choice_panels(audit),
    )


def _select(record: Comparison, names: Sequence[str]) -> Comparison:
    """Return the record of these methods alone."""
    rows = [record.methods.index(name) for name in names]
    arrays = {each.name: getattr(record, each.name)[rows] for each in fields(record) if each.type == "np.ndarray"}
    return replace(record, methods=tuple(names), **arrays)


def plot(record: Comparison, *, titles: Mapping[str, str] | None = None, chosen: str | None = None) -> Plot:
    """Plot a dot with its interval for each method: the first on top, the others from the best to the worst."""
    better = style.better(record.metric)
    # The first stays on top, because the others are compared with it.
    order = np.append(0, 1 + np.argsort(-(better or -1) * record.value[1:], kind="stable"))[: len(record.methods)]
    names = [(titles or {}).get(record.methods[k], record.methods[k]) for k in order]
    value, low, high = (column[order] for column in (record.value, record.low, record.high))
    lower, higher = (record.change_high < 0)[order], (record.change_low > 0)[order]
    unknown = np.isnan(record.change_low)[order] & (order > 0)
    words = {1: ("worse", "better"), -1: ("better", "worse"), 0: ("lower", "higher")}[better]
    looks = {"better": (style.BETTER, "diamond"), "worse": (style.WORSE, "square")}
    looks |= {"lower": (style.BLUE, "triangle-down"), "higher": (style.PURPLE, "triangle-up")}
    kinds = [
        ("uncalibrated", order == 0, style.INK, "circle"),
        *((word, members, *looks[word]) for word, members in sorted(zip(words, (lower, higher), strict=True))),
        ("not significant", ~((order == 0) | lower | higher | unknown), style.MUTED, "circle-open"),
        ("", unknown, style.MUTED, "circle"),
    ]
    columns = zip(names, value, low, high, strict=True)
    hover = ["{}\n{:.4f}, true value {:.4f} to {:.4f}".format(*row) for row in columns]
    marks = interval_dots(kinds, value, (low, high), hover=hover)
    marks[0] = replace(marks[0], listed=False)  # the row already has its name
    if len(record.methods) > 1:
        marks.append(Rule(at=float(record.value[0]), color=style.INK, dash="dot"))
    undefined = np.flatnonzero(np.isnan(value))
    marks += [Text(x=0.02, y=float(row), text="not defined", color=style.INK) for row in undefined]
    limits, texts = cut_outliers(low, value, high, reference=float(value[0]))
    marks += texts
    label = style.label(record.metric)
    interval = "" if np.isnan(record.low).all() else f", {format_percent(record.level)} interval"
    bold = frozenset(row for row, k in enumerate(order) if record.methods[k] == chosen)
    return Plot(
        title=f"{label} by method",
        marks=marks,
        x=Axis(title=label + interval, range=limits),
        y=Axis(rows=names, bold=bold, names_above=True),
        legend=("lower right", 3),
    )


def _cells(audit: Audit, name: str) -> list[TableCell]:
    values, change = audit.scores.values[name], audit.scores.changes.get(name, {}).get("ece")
    loss, ece = audit.losses.get(name, (math.nan,))[0], values["ece"]
    columns, mean = (_EVENT_COLUMNS, "predicted") if audit.scores.is_event else (_COLUMNS, "accuracy")
    return [
        TableCell(method_title(name), note="chosen" if name == audit.chosen else ""),
        TableCell(format_number(loss), loss),
        TableCell(percent(values[mean].value), values[mean].value),
        TableCell(format_number(ece.value), ece.value, format_interval(ece.low, ece.high)),
        TableCell("–", 0.0) if change is None else _change(change),
        *(TableCell(format_number(values[metric].value), values[metric].value) for metric in columns),
    ]


def _change(change: Interval) -> TableCell:
    value, interval = format_number(change.value, sign=True), format_interval(change.low, change.high, sign=True)
    return TableCell(value.replace("-", "−"), change.value, interval.replace("-", "−"))


def summary(record: Comparison, *, titles: Mapping[str, str] | None = None) -> str:
    """Return the best method and the number of methods that lower the metric significantly."""
    label, titles = style.label(record.metric), titles or {}
    best, first = (record.methods[k] for k in (int(np.nanargmin(record.value)), 0))
    lower = int((record.change_high < 0).sum())
    return (
        f"{titles.get(best, best)} has the lowest {label}, {np.nanmin(record.value):.4f}; "
        f"{titles.get(first, first).lower()} gives {record.value[0]:.4f}. "
        f"{lower} of the {len(record.methods) - 1} others lower it by a statistically significant amount: their paired "
        f"{format_percent(record.level)} bootstrap interval lies below 0. Noise makes a calibration error look larger "
        "than it is, so an interval may lie below its dot."
    )


def numbers(record: Comparison) -> Table:
    """Return one row per method."""
    rows = []
    for k, name in enumerate(record.methods):
        value = format_number(record.value[k]), format_interval(record.low[k], record.high[k])
        ends = format_interval(record.change_low[k], record.change_high[k], sign=True)
        rows.append([name, *value, format_number(record.change[k], sign=True), ends])
    level = format_percent(record.level)
    return ["Method", style.label(record.metric), f"{level} interval", "Change", f"{level} interval, paired"], rows
