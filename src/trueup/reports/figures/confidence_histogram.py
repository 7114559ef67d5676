"""The histogram of confidences, right and wrong predictions apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.bins import Bins
from trueup._core.formatting import format_percent
from trueup._core.row_scores import is_event
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Section, Table, panels, percent, stages, words_for
from trueup.reports.plot import Axis, Bars, Mark, Plot, Rule


@dataclass(frozen=True, eq=False)
class ConfidenceHistogram:
    """How many predictions have which confidence, right and wrong ones apart."""

    edges: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    """Numbers of rows, or their weights, as are those of `right`."""
    mean: float
    """Mean confidence."""
    accuracy: float
    event: bool = False
    """Whether it is the probability of class 1, and where that happened, instead of confidence and right ones."""


def confidence_histogram(
    logits: Any, labels: Any, *, bins: int = 20, top_label: bool = False, sample_weight: Any = None
) -> ConfidenceHistogram:
    """How many predictions of each confidence were right, and how many wrong.

    Of two classes it is the probability of class 1, and where that happened; `top_label=True` takes the predicted
    class. With `sample_weight`, one a row, they are sums of weights.

    >>> record = confidence_histogram(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), [0, 1, 1], bins=4)
    >>> record.right, record.wrong, f"{record.mean:.4f} {record.accuracy:.4f}"
    (array([1., 0., 1., 0.]), array([1., 0., 0., 0.]), '0.3333 0.6667')
    """
    z, y = as_arrays(logits, labels)
    tally = Bins.of(z, y, bins=bins, top_label=top_label, sample_weight=sample_weight)
    mean, accuracy = (float(total.sum() / (tally.n or np.nan)) for total in (tally.confidence, tally.hits))
    counts = tally.hits, tally.count - tally.hits
    return ConfidenceHistogram(tally.edges, *counts, mean, accuracy, is_event(z, top_label))


def section(audit: Audit) -> Section:
    """The histogram before and after calibration, on the same scale."""
    records = [confidence_histogram(*stage.arrays, sample_weight=audit.sample_weight) for stage in stages(audit)]
    top = max(float((record.right + record.wrong).max() / (record.right + record.wrong).sum()) for record in records)
    event, named = records[0].event, audit.scores.event_name
    words = words_for(event)
    about = f"How many rows have which predicted probability of {named}, and in how many of them it happened."
    return Section(
        name="confidence",
        title="What does it predict?" if event else "How confident is it?",
        text=about if event else "How many predictions have which confidence, and how many of each are wrong.",
        legend=(("right", words.right), ("wrong", words.wrong), ("says", words.mean), ("hits", words.rate)),
        panels=panels("confidence", audit, records, top=top),
    )


def plot(record: ConfidenceHistogram, *, top: float | None = None) -> Plot:
    """Stacked bars, with lines at the mean confidence and the accuracy; the y-axis ends above the share `top`."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    total = float((record.right + record.wrong).sum())
    words = words_for(record.event)
    marks: list[Mark] = []
    for name, count, color in ((words.right, record.right, style.RIGHT), (words.wrong, record.wrong, style.WRONG)):
        hover = f"{words.score} near %{{x:.0%}}<br>{name}: %{{customdata:,.0f}} rows"
        look: dict[str, Any] = {"color": color, "name": f"{name} ({count.sum():,.0f})", "hover": hover}
        marks.append(Bars(at=middle, size=count / max(total, 1.0), width=0.86 * width, data=count, **look))
    if total:
        lines = (words.mean, record.mean, "dot"), (words.rate, record.accuracy, "solid")
        marks += [
            Rule(at=at, color=style.INK, dash=dash, name=f"{name} {format_percent(at, 1)}") for name, at, dash in lines
        ]
    high = 1.08 * (float((record.right + record.wrong).max(initial=0.0)) / max(total, 1.0) if top is None else top)
    return Plot(
        title="Predicted probability" if record.event else "Confidence of right and wrong predictions",
        marks=marks,
        x=Axis(title=words.score.capitalize(), range=(0, 1), percent=True),
        y=Axis(title="Share of rows", range=(0, high or 1), percent=True),
        stacked=True,
        legend=("upper left", 2),
        empty="" if total else "no rows",
    )


def summary(record: ConfidenceHistogram) -> str:
    """Mean confidence and accuracy, and the predictions of highest confidence."""
    total = record.right + record.wrong
    last = total[-1] / max(total.sum(), 1.0)
    wrong = record.wrong[-1] / max(total[-1], 1.0)
    if record.event:
        end = f"; in {percent(1 - wrong)} of those it happened." if total[-1] else "."
    else:
        end = f"; {percent(wrong)} of those are wrong."
    words = words_for(record.event)
    return (
        f"The mean {words.score} is {percent(record.mean)} (dotted line), the {words.outcome} "
        f"{percent(record.accuracy)} (solid line). {percent(last, 0)} of the rows have a {words.score} above "
        f"{100 * record.edges[-2]:.3g} %{end}"
    )


def numbers(record: ConfidenceHistogram) -> Table:
    """A row for each bin that holds any."""
    rows = [
        [f"{100 * a:.3g} % – {100 * b:.3g} %", f"{right:,.0f}", f"{wrong:,.0f}"]
        for a, b, right, wrong in zip(record.edges[:-1], record.edges[1:], record.right, record.wrong, strict=True)
        if right + wrong
    ]
    words = words_for(record.event)
    return [word.capitalize() for word in (words.score, words.right, words.wrong)], rows
