"""Errors by group: observed − predicted rate in groups of rows, with simultaneous intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.formatting import format_percent
from trueup.metrics.groups import GroupRow, GroupTable
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
    table: GroupTable
    """Its groups, the strongest evidence of an error first."""
    event: bool = True
    """Whether predictions are probabilities of class 1; otherwise they are confidences, and outcomes are accuracies."""


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
    >>> [(row.group, round(row.difference.value, 2)) for row in record.table.rows]
    [('a', -0.2), ('b', 0.4)]
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

    p_values = {name: p for name, p in table.heterogeneity.items() if name == chosen}
    return GroupErrors(chosen, GroupTable(tuple(members), table.level, p_values), event)


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
        limit = max(_largest_end(record.table.rows[:MAX_GROUPS_DRAWN]) for record in records)
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


def _largest_end(rows: Sequence[GroupRow]) -> float:
    return max((max(abs(row.difference.low), abs(row.difference.high)) for row in rows), default=0.0)


def plot(record: GroupErrors, *, most: int = MAX_GROUPS_DRAWN, limit: float | None = None) -> Plot:
    """Plot a dot with its interval for each of the first `most` groups; the x-axis ends beyond ±`limit`."""
    groups, total, words = record.table.rows[:most], len(record.table), words_for(record.event)
    ends = [(row.difference.value, row.difference.low, row.difference.high, row.detectable) for row in groups]
    difference, low, high, detectable = np.array(ends).reshape(-1, 4).T
    limit = 1.06 * max(_largest_end(groups) if limit is None else limit, 0.01)
    hidden = np.minimum(detectable, limit)
    band: dict[str, Any] = {"width": 0.72, "horizontal": True, "color": style.BAND, "name": "too small to be detected"}
    marks: list[Mark] = [
        Bars(at=np.arange(len(groups)), size=2 * hidden, base=-hidden, **band),
        Rule(at=0.0, color=style.INK),
    ]
    kinds = [
        (words.over, high < 0, style.VERMILION, "square"),
        (words.under, low > 0, style.BLUE, "circle"),
        ("not shown to be wrong", (low <= 0) & (high >= 0), style.MUTED, "circle-open"),
    ]
    text = "{}: {} rows\npredicted {}, observed {}\ndifference {}, interval {}\nan error below {} could be missed"
    hover = [text.format(*row) for row in numbers(record, len(groups))[1]]
    marks += interval_dots(kinds, difference, (low, high), hover=hover, size=8.0)
    part = f", {len(groups)} of {total:,} groups" if len(groups) < total else ""
    title = "Observed − predicted" if record.event else "Accuracy − mean confidence"
    return Plot(
        title=f"By {record.column or 'group'}{part}",
        marks=marks,
        x=Axis(title=title, range=(-limit, limit), percent=True),
        y=Axis(
            title="" if groups else "Group",
            rows=[str(row.group) for row in groups],
            notes=[f"{row.rows:,}" for row in groups],
        ),
        legend=("lower right", 2),
        empty="" if groups else "no groups",
    )


def summary(record: GroupErrors) -> str:
    """Return the verdict on the groups, and the number of groups that are not drawn."""
    rest = len(record.table) - MAX_GROUPS_DRAWN
    hidden = f" The chart shows {MAX_GROUPS_DRAWN} groups; {rest:,} with weaker evidence are not drawn."
    return record.table.verdict(event=record.event) + (hidden if rest > 0 else "")


def numbers(record: GroupErrors, most: int = 200) -> Table:
    """Return one row for each of the first `most` groups."""
    means = ("Predicted", "Observed") if record.event else ("Mean confidence", "Accuracy")
    head = [record.column or "Group", "Rows", *means, "Difference", f"{format_percent(record.table.level)} interval"]
    rows = []
    for row in record.table.rows[:most]:
        rates = percent(row.predicted), percent(row.observed), _points(row.difference.value)
        interval = f"{_points(row.difference.low)} to {_points(row.difference.high)}"
        rows.append([str(row.group), f"{row.rows:,}", *rates, interval, percent(row.detectable)])
    return [*head, "Could be missed below"], rows


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−") + " %"
