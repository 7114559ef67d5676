"""Errors by group: observed − predicted rate in groups of rows, with simultaneous intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from trueup._core.formatting import format_percent
from trueup.metrics.groups import GroupTable
from trueup.metrics.intervals import count_rows
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Panel, Section, Table, percent, stages, words_for
from trueup.reports.plot import Axis, Bars, Mark, Plot, Rule, interval_dots

MAX_GROUPS_DRAWN = 25


@dataclass(frozen=True, eq=False)
class GroupErrors:
    """Observed − predicted rate in the groups of one column."""

    column: str
    """Name of the column."""
    names: tuple[str, ...]
    """Names of the groups, the strongest evidence of an error first; the arrays have one entry per group."""
    rows: np.ndarray
    """Number of rows."""
    predicted: np.ndarray
    """Mean prediction."""
    observed: np.ndarray
    """Mean outcome."""
    low: np.ndarray
    """Lower end of the interval of observed − predicted; the intervals hold for all groups of all columns at once."""
    high: np.ndarray
    """Upper end of the interval."""
    detectable: np.ndarray
    """Smallest error that a group of this size shows with a probability of 80 %."""
    level: float
    """Level of the intervals."""
    heterogeneity: float
    """P-value of a test that one recalibration is right for all groups; NaN for a single group."""
    event: bool = True
    """Whether predictions are probabilities of class 1; otherwise they are confidences, and outcomes are accuracies."""

    @property
    def difference(self) -> np.ndarray:
        """Observed − predicted."""
        return self.observed - self.predicted

    @property
    def too_high(self) -> np.ndarray:
        """Which groups are shown to have too high predictions."""
        return self.high < 0

    @property
    def too_low(self) -> np.ndarray:
        """Which groups are shown to have too low predictions."""
        return self.low > 0


def group_errors(
    table: GroupTable, column: str | None = None, *, event: bool = True, order: Iterable[str] | None = None
) -> GroupErrors:
    """Return the groups of one column of a table, the strongest evidence first.

    Parameters
    ----------
    table
        Table of groups, from `evaluate_groups`.
    column
        Name of the column, if there are several.
    event
        Whether predictions are probabilities of class 1 rather than confidences.
    order
        Names of the groups in another order.

    Returns
    -------
    GroupErrors
        The record.

    Examples
    --------
    >>> from trueup.metrics.groups import evaluate_groups
    >>> table = evaluate_groups([0.2, 0.2, 0.3, 0.9], [0, 0, 1, 1], ["a", "a", "b", "b"])
    >>> record = group_errors(table)
    >>> record.names, record.difference.round(2)
    (('a', 'b'), array([-0.2,  0.4]))
    """
    columns = list(dict.fromkeys(row.column for row in table.rows))
    if column is None and len(columns) > 1:
        raise ValueError(f"column must be one of {', '.join(columns)}, got none")
    if column is not None and column not in columns:
        raise ValueError(f"column must be one of {', '.join(columns) or 'none'}, got {column!r}")
    chosen = column if column is not None else next(iter(columns), "")
    members = [row for row in table.rows if row.column == chosen]
    if order is not None:
        ranks = {name: k for k, name in enumerate(order)}
        members.sort(key=lambda row: ranks.get(str(row.group), len(ranks)))

    def numbers_of(attribute: str) -> np.ndarray:
        return np.array([attrgetter(attribute)(row) for row in members], dtype=np.float64)

    return GroupErrors(
        column=chosen,
        names=tuple(str(row.group) for row in members),
        rows=numbers_of("rows").astype(np.int64),
        predicted=numbers_of("predicted"),
        observed=numbers_of("observed"),
        low=numbers_of("difference.low"),
        high=numbers_of("difference.high"),
        detectable=numbers_of("detectable"),
        level=table.level,
        heterogeneity=float(table.heterogeneity.get(chosen, np.nan)),
        event=event,
    )


def section(audit: Audit) -> Section | None:
    """Return the section: the groups of each column before and after calibration; None without groups."""
    tables = audit.scores.group_tables
    shown = [stage for stage in stages(audit) if stage.method in tables and tables[stage.method].rows]
    if not shown:
        return None
    event = audit.scores.is_event
    rates = "the accuracy and the mean confidence"
    if event:
        rates = "the event's observed rate and its mean predicted probability"
    panels = []
    evidence: dict[tuple[str, str], float] = {}  # the smaller p-value of before and after
    for stage in shown:
        for row in tables[stage.method].rows:
            key = row.column, str(row.group)
            evidence[key] = min(row.p_value, evidence.get(key, 1.0))
    for k, column in enumerate(dict.fromkeys(row.column for row in tables[shown[0].method].rows)):
        order = [group for of, group in sorted(evidence, key=evidence.__getitem__) if of == column]
        records = [group_errors(tables[stage.method], column, event=event, order=order) for stage in shown]
        shown_ends = (np.abs([record.low, record.high])[:, :MAX_GROUPS_DRAWN] for record in records)
        limit = max(float(ends.max()) for ends in shown_ends)
        for stage, record in zip(shown, records, strict=True):
            title = f"{stage.title}, by {column}" if column else stage.title
            panels.append(Panel(f"groups-{k}-{stage.name}", title, record, {"limit": limit, "legend": False}))
    words, level = words_for(event), format_percent(audit.scores.level)
    return Section(
        name="groups",
        title="Where is it wrong?",
        text=f"A dot is the difference between {rates} in a group of rows; its line is an interval. All "
        f"intervals of a chart hold at once with a probability of {level}. A group whose line misses 0 is shown to be "
        "wrong on average. The grey bar shows errors too small to be detected reliably in a group of this size. "
        "The groups with the strongest evidence come first.",
        legend=(("wrong", words.over), ("right", words.under), ("band", "too small to be detected at this size")),
        panels=tuple(panels),
    )


def plot(record: GroupErrors, *, most: int = MAX_GROUPS_DRAWN, limit: float | None = None) -> Plot:
    """Plot a dot with its interval for each of the first `most` groups; the x-axis ends beyond ±`limit`."""
    shown = min(most, len(record.names))
    if limit is None:
        limit = float(np.abs([record.low[:shown], record.high[:shown]]).max(initial=0.0))
    limit = 1.06 * max(limit, 0.01)
    hidden, row = np.minimum(record.detectable[:shown], limit), np.arange(shown)
    band: dict[str, Any] = {"width": 0.72, "horizontal": True, "color": style.BAND, "name": "too small to be detected"}
    marks: list[Mark] = [Bars(at=row, size=2 * hidden, base=-hidden, **band), Rule(at=0.0, color=style.INK)]
    words, wrong = words_for(record.event), record.too_high | record.too_low
    kinds = [
        (words.over, record.too_high[:shown], style.VERMILION, "square"),
        (words.under, record.too_low[:shown], style.BLUE, "circle"),
        ("not shown to be wrong", ~wrong[:shown], style.MUTED, "circle-open"),
    ]
    text = "{}: {} rows\npredicted {}, observed {}\ndifference {}, interval {}\nan error below {} could be missed"
    hover = [text.format(*row) for row in numbers(record, shown)[1]]
    marks += interval_dots(kinds, record.difference, (record.low, record.high), hover=hover, size=8.0)
    part = f", {shown} of {len(record.names):,} groups" if shown < len(record.names) else ""
    counts = [f"{rows:,}" for rows in record.rows[:shown]]
    title = "Observed − predicted" if record.event else "Accuracy − mean confidence"
    return Plot(
        title=f"By {record.column or 'group'}{part}",
        marks=marks,
        x=Axis(title=title, range=(-limit, limit), percent=True),
        y=Axis(title="" if shown else "Group", rows=record.names[:shown], notes=counts),
        legend=("lower right", 2),
        empty="" if shown else "no groups",
    )


def summary(record: GroupErrors) -> str:
    """Return the groups shown to be wrong, the worst one, the detectable errors, and whether the groups differ."""
    if not record.names:
        return "There are no groups."
    wrong = record.too_high | record.too_low
    n_groups = len(record.names)
    if wrong.any():
        k = int(np.where(wrong, np.abs(record.difference), -np.inf).argmax())
        error = max(record.low[k], -record.high[k])
        count = "The one group" if n_groups == 1 else f"{int(wrong.sum()):,} of {n_groups:,} groups"
        text = f"{count} {'is' if wrong.sum() == 1 else 'are'} shown to be wrong on average. "
        text += f"The worst is {record.names[k]}: {_rates(record, k)}, off by at least {percent(error)}."
    elif n_groups == 1:
        text = f"The one group is not shown to be wrong on average: {_rates(record, 0)}."
    else:
        text = f"None of {n_groups:,} groups is shown to be wrong on average."
    small, large = int(record.detectable.argmax()), int(record.detectable.argmin())
    text += f" An error below {percent(record.detectable[large])} could have been missed"
    if n_groups > 1 and percent(record.detectable[small]) != percent(record.detectable[large]):
        text += f" in {record.names[large]} ({count_rows(record.rows[large])}), one below "
        text += f"{percent(record.detectable[small])} in {record.names[small]} ({count_rows(record.rows[small])})"
    text += "."
    p = record.heterogeneity
    if not np.isnan(p):
        p_value = f"p {'=' if p > 0.001 else '≤'} {max(p, 0.001):.3f}"
        differ = "Once all groups are corrected alike, chance could explain their differences"
        if p <= 0.05:
            differ = "The groups differ by more than chance: one correction would not be right for all of them"
        text += f" {differ} ({p_value})."
    if n_groups > MAX_GROUPS_DRAWN:
        rest = n_groups - MAX_GROUPS_DRAWN
        text += f" The chart shows {MAX_GROUPS_DRAWN} groups; {rest:,} with weaker evidence are not drawn."
    return text


def _rates(record: GroupErrors, k: int) -> str:
    outcome, prediction = percent(record.observed[k]), percent(record.predicted[k])
    if record.event:
        return f"{outcome} happened where {prediction} were predicted"
    return f"{outcome} were right at a mean confidence of {prediction}"


def numbers(record: GroupErrors, most: int = 200) -> Table:
    """Return one row for each of the first `most` groups."""
    means = ("Predicted", "Observed") if record.event else ("Mean confidence", "Accuracy")
    head = [record.column or "Group", "Rows", *means, "Difference", f"{format_percent(record.level)} interval"]
    rows = []
    for k in range(min(most, len(record.names))):
        rates = percent(record.predicted[k]), percent(record.observed[k]), _points(record.difference[k])
        interval = f"{_points(record.low[k])} to {_points(record.high[k])}"
        rows.append([record.names[k], f"{record.rows[k]:,}", *rates, interval, percent(record.detectable[k])])
    return [*head, "Could be missed below"], rows


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−") + " %"
