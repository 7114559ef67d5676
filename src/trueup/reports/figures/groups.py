"""Where is it wrong? Observed − predicted rate in groups of rows, with intervals that hold for all at once."""

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
from trueup.reports.plot import Axis, Bars, Mark, Plot, Rule, interval_dots, plain_text

MOST = 25
"""Groups that are drawn; the others are counted."""


@dataclass(frozen=True, eq=False)
class GroupErrors:
    """Observed − predicted rate in the groups of one column."""

    column: str
    names: tuple[str, ...]
    """The strongest evidence of an error first; the arrays have one entry a group."""
    rows: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    low: np.ndarray
    """Ends of the intervals of observed − predicted, which hold for all groups of all columns at once."""
    high: np.ndarray
    detectable: np.ndarray
    """The least error that such a group would have shown with a probability of 80 %."""
    level: float
    heterogeneity: float
    """The p-value of one recalibration being right for all groups; NaN of a single group."""
    event: bool = True
    """Whether it is the probability of class 1 and how often that happens, instead of confidence and accuracy."""

    @property
    def difference(self) -> np.ndarray:
        """Observed − predicted."""
        return self.observed - self.predicted

    @property
    def too_high(self) -> np.ndarray:
        """Where predictions are shown to be too high."""
        return self.high < 0

    @property
    def too_low(self) -> np.ndarray:
        """Where predictions are shown to be too low."""
        return self.low > 0


def group_errors(
    table: GroupTable, column: str | None = None, *, event: bool = True, order: Iterable[str] | None = None
) -> GroupErrors:
    """The groups of one column of a table, the strongest evidence first, or in the order of names given.

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
    """The groups before and after calibration, column after column, on the same scale; none if there are no groups."""
    tables = audit.scores.group_tables
    shown = [stage for stage in stages(audit) if stage.method in tables and tables[stage.method].rows]
    if not shown:
        return None
    event = audit.scores.is_event
    what = "the accuracy and the mean confidence"
    if event:
        what = "how often the event happened and its mean predicted probability"
    panels = []
    evidence: dict[tuple[str, str], float] = {}  # the strongest, before or after
    for stage in shown:
        for row in tables[stage.method].rows:
            key = row.column, str(row.group)
            evidence[key] = min(row.p_value, evidence.get(key, 1.0))
    for k, column in enumerate(dict.fromkeys(row.column for row in tables[shown[0].method].rows)):
        order = [group for of, group in sorted(evidence, key=evidence.__getitem__) if of == column]
        records = [group_errors(tables[stage.method], column, event=event, order=order) for stage in shown]
        reach = max(float(np.abs([record.low[:MOST], record.high[:MOST]]).max()) for record in records)
        for stage, record in zip(shown, records, strict=True):
            title = f"{stage.title}, by {column}" if column else stage.title
            panels.append(Panel(f"groups-{k}-{stage.name}", title, record, {"reach": reach, "legend": False}))
    words, level = words_for(event), format_percent(audit.scores.level)
    return Section(
        name="groups",
        title="Where is it wrong?",
        text=f"A dot is the difference between {what} in a group of rows; its line is an interval, and all "
        f"intervals of a chart hold at once with a probability of {level}. A group whose line misses 0 is shown to be "
        "wrong on average. The grey bar is the error that a group of this size could hide: a smaller one would often "
        "have been missed. The groups with the strongest evidence come first.",
        legend=(("wrong", words.over), ("right", words.under), ("band", "too small to be seen at this size")),
        panels=tuple(panels),
    )


def plot(record: GroupErrors, *, most: int = MOST, reach: float | None = None) -> Plot:
    """A dot with its interval for each of the first `most` groups; the x-axis goes to ±`reach`."""
    shown = min(most, len(record.names))
    far = np.abs([record.low[:shown], record.high[:shown]]).max(initial=0.01) if reach is None else max(reach, 0.01)
    far = 1.06 * float(far)
    unseen, row = np.minimum(record.detectable[:shown], far), np.arange(shown)
    band: dict[str, Any] = {"width": 0.72, "horizontal": True, "color": style.BAND, "name": "too small to be seen"}
    marks: list[Mark] = [Bars(at=row, size=2 * unseen, base=-unseen, **band), Rule(at=0.0, color=style.INK)]
    words, wrong = words_for(record.event), record.too_high | record.too_low
    kinds = [
        (words.over, record.too_high[:shown], style.VERMILION, "square"),
        (words.under, record.too_low[:shown], style.BLUE, "circle"),
        ("not shown to be wrong", ~wrong[:shown], style.MUTED, "circle-open"),
    ]
    columns = record.rows, record.predicted, record.observed, record.low, record.high, record.detectable
    hover = (
        "%{text}: %{customdata[0]:,} rows<br>observed %{customdata[2]:.1%}, predicted %{customdata[1]:.1%}<br>"
        "difference %{x:+.1%}, interval %{customdata[3]:+.1%} to %{customdata[4]:+.1%}<br>"
        "less than %{customdata[5]:.1%} could be missed"
    )
    dots: dict[str, Any] = {"texts": [*map(plain_text, record.names)], "data": np.stack(columns, axis=1)}
    marks += interval_dots(kinds, record.difference, (record.low, record.high), **dots, hover=hover, size=8.0)
    part = f", {shown} of {len(record.names):,} groups" if shown < len(record.names) else ""
    counts = [f"{rows:,}" for rows in record.rows[:shown]]
    title = "Observed − predicted" if record.event else "Accuracy − mean confidence"
    return Plot(
        title=f"By {record.column or 'group'}{part}",
        marks=marks,
        x=Axis(title=title, range=(-far, far), percent=True),
        y=Axis(title="" if shown else "Group", rows=record.names[:shown], notes=counts),
        legend=("lower right", 2),
        empty="" if shown else "no groups",
    )


def summary(record: GroupErrors) -> str:
    """The groups that are shown to be wrong, the worst one, what could be missed, and whether the groups differ."""
    if not record.names:
        return "There are no groups to judge."
    wrong = record.too_high | record.too_low
    many = len(record.names)
    if wrong.any():
        sure = np.where(wrong, np.maximum(record.low, -record.high), -np.inf)
        k = int(sure.argmax())
        count = "The one group" if many == 1 else f"{int(wrong.sum()):,} of {many:,} groups"
        text = f"{count} {'is' if wrong.sum() == 1 else 'are'} shown to be wrong on average. "
        text += f"The worst is {record.names[k]}: {_rates(record, k)}, off by at least {percent(sure[k])}."
    elif many == 1:
        text = f"The one group is not shown to be wrong on average: {_rates(record, 0)}."
    else:
        text = f"None of {many:,} groups is shown to be wrong on average."
    small, large = int(record.detectable.argmax()), int(record.detectable.argmin())
    least = f"an error below {percent(record.detectable[large])} could have been missed"
    if many > 1 and percent(record.detectable[small]) != percent(record.detectable[large]):
        least += f" in {record.names[large]} ({count_rows(record.rows[large])}), one below "
        least += f"{percent(record.detectable[small])} in {record.names[small]} ({count_rows(record.rows[small])})"
    text += f" {least[0].upper()}{least[1:]}."
    p = record.heterogeneity
    if not np.isnan(p):
        chance = f"p {'=' if p > 0.001 else '≤'} {max(p, 0.001):.3f}"
        differ = "Chance could explain how the groups differ once all are corrected alike"
        if p <= 0.05:
            differ = "The groups differ by more than chance: one correction would not be right for all of them"
        text += f" {differ} ({chance})."
    if many > MOST:
        text += f" The chart shows {MOST} groups; {many - MOST:,} with weaker evidence are not drawn."
    return text


def _rates(record: GroupErrors, k: int) -> str:
    happened, claimed = percent(record.observed[k]), percent(record.predicted[k])
    if record.event:
        return f"{happened} happened where {claimed} were predicted"
    return f"{happened} were right where it said {claimed}"


def numbers(record: GroupErrors, most: int = 200) -> Table:
    """A row for each of the first `most` groups."""
    claim, outcome = ("Predicted", "Observed") if record.event else ("Mean confidence", "Accuracy")
    head = [record.column or "Group", "Rows", claim, outcome, "Difference", f"{format_percent(record.level)} interval"]
    rows = []
    for k in range(min(most, len(record.names))):
        rates = percent(record.predicted[k]), percent(record.observed[k]), _points(record.difference[k])
        interval = f"{_points(record.low[k])} to {_points(record.high[k])}"
        rows.append([record.names[k], f"{record.rows[k]:,}", *rates, interval, percent(record.detectable[k])])
    return [*head, "Could be missed below"], rows


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−") + " %"
