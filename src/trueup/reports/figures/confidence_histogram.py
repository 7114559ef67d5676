"""The histogram of confidences, right and wrong predictions apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.bins import Bins
from trueup._core.formatting import format_percent
from trueup._core.row_scores import is_event
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Section, Table, panels, percent, stages
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

    @property
    def words(self) -> tuple[str, str, str, str]:
        """What its axis, bars and first line are called."""
        if self.event:
            return "predicted probability", "happened", "did not", "observed"
        return "confidence", "right", "wrong", "accuracy"

    @property
    def mean_word(self) -> str:
        """What its second line is called."""
        return "mean predicted" if self.event else "mean confidence"


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
    n = tally.n or np.nan
    mean, accuracy = float(tally.confidence.sum() / n), float(tally.hits.sum() / n)
    return ConfidenceHistogram(
        tally.edges, tally.hits, tally.count - tally.hits, mean, accuracy, is_event(z, top_label)
    )


def section(audit: Audit, class_names: Sequence[str] | None) -> Section:
    """The histogram before and after calibration, on the same scale."""
    records = [confidence_histogram(*stage.pair, sample_weight=audit.sample_weight) for stage in stages(audit)]
    total = float((records[0].right + records[0].wrong).sum())
    top = max(float((record.right + record.wrong).max()) for record in records) / total
    _, right, wrong, rate = records[0].words
    event = records[0].event
    named = audit.scores.event_name
    about = f"How many rows have which predicted probability of {named}, and in how many of them it happened."
    return Section(
        name="confidence",
        title="What does it predict?" if event else "How confident is it?",
        text=about if event else "How many predictions have which confidence, and how many of each are wrong.",
        legend=(("right", right), ("wrong", wrong), ("says", records[0].mean_word), ("hits", rate)),
        panels=panels("confidence", stages(audit), records, top=top),
    )


def plot(record: ConfidenceHistogram, *, top: float | None = None) -> Plot:
    """Stacked bars, with lines at the mean confidence and the accuracy; the y-axis ends above the share `top`."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    total = float((record.right + record.wrong).sum())
    score, right, wrong, rate = record.words
    marks: list[Mark] = [
        Bars(
            at=middle, size=count / max(total, 1.0), width=0.86 * width, color=colour, data=count,
            name=f"{name} ({count.sum():,.0f})",
            hover=f"{score} near %{{x:.0%}}<br>{name}: %{{customdata:,.0f}} rows",
        )
        for name, count, colour in ((right, record.right, style.RIGHT), (wrong, record.wrong, style.WRONG))
    ]  # fmt: skip
    if total:
        lines = (record.mean_word, record.mean, "dot"), (rate, record.accuracy, "solid")
        marks += [
            Rule(at=at, color=style.INK, dash=dash, name=f"{name} {format_percent(at, 1)}") for name, at, dash in lines
        ]
    high = 1.08 * (float((record.right + record.wrong).max(initial=0.0)) / max(total, 1.0) if top is None else top)
    return Plot(
        title="Predicted probability" if record.event else "Confidence of right and wrong predictions",
        marks=marks,
        x=Axis(title=score.capitalize(), range=(0, 1), percent=True),
        y=Axis(title="Share of rows", range=(0, high or 1), percent=True),
        stacked=True,
        legend="upper left",
        columns=2,
        empty="" if total else "no rows",
    )


def summary(record: ConfidenceHistogram) -> str:
    """Mean confidence and accuracy, and the predictions of highest confidence."""
    total = record.right + record.wrong
    last = total[-1] / max(total.sum(), 1.0)
    wrong = record.wrong[-1] / max(total[-1], 1.0)
    if record.event:
        return (
            f"The mean predicted probability is {percent(record.mean)} (dotted line), the observed frequency "
            f"{percent(record.accuracy)} (solid line). {percent(last, 0)} of the rows have a predicted probability "
            f"above {100 * record.edges[-2]:.3g} %"
            + (f"; in {percent(1 - wrong)} of those it happened." if total[-1] else ".")
        )
    return (
        f"The mean confidence is {percent(record.mean)} (dotted line), the accuracy {percent(record.accuracy)} "
        f"(solid line). {percent(last, 0)} of the rows have a confidence above {100 * record.edges[-2]:.3g} %; "
        f"{percent(wrong)} of those are wrong."
    )


def numbers(record: ConfidenceHistogram) -> Table:
    """A row for each bin that holds any."""
    rows = [
        [f"{100 * a:.3g} % – {100 * b:.3g} %", f"{right:,.0f}", f"{wrong:,.0f}"]
        for a, b, right, wrong in zip(record.edges[:-1], record.edges[1:], record.right, record.wrong, strict=True)
        if right + wrong
    ]
    return [word.capitalize() for word in record.words[:3]], rows
