"""Histogram of confidences, with separate counts of right and wrong predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.bins import Bins
from trueup._core.row_scores import is_event
from trueup._core.types import ArrayLike, WeightsLike
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Section, Table, panels, percent, stages, words_for
from trueup.reports.plot import Axis, Bars, Mark, Plot, Rule

_MAX_ZOOMS = 6


@dataclass(frozen=True, eq=False)
class ConfidenceHistogram:
    """Numbers of right and wrong predictions in bins of confidence."""

    edges: np.ndarray
    """Edges of the bins; one more than there are bins. A narrow range with nearly all predictions has narrow bins, and
    the rest of 0 to 1 is one bin on each side."""
    right: np.ndarray
    """Number of right predictions in each bin, or the sum of their weights."""
    wrong: np.ndarray
    """Number of wrong predictions in each bin, or the sum of their weights."""
    mean: float
    """Mean confidence."""
    accuracy: float
    """Share of right predictions."""
    event: bool = False
    """Whether bins are of the probability of class 1; then "right" counts the rows of class 1."""


def confidence_histogram(
    logits: ArrayLike, labels: ArrayLike, *, bins: int = 20, top_label: bool = False, sample_weight: WeightsLike = None
) -> ConfidenceHistogram:
    """Count right and wrong predictions in bins of confidence, which are finer where nearly all predictions are.

    With two classes, the bins are of the probability of class 1, and rows with and without class 1 are counted.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    bins
        Number of bins.
    top_label
        Whether to use the predicted class also with two classes.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    ConfidenceHistogram
        The record.

    Examples
    --------
    >>> record = confidence_histogram(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), [0, 1, 1], bins=4)
    >>> record.right, record.wrong, f"{record.mean:.4f} {record.accuracy:.4f}"
    (array([1., 0., 1., 0.]), array([1., 0., 0., 0.]), '0.3333 0.6667')
    """
    z, y = as_arrays(logits, labels)
    tally = Bins.of(z, y, bins=bins, top_label=top_label, sample_weight=sample_weight)
    unit = tally.edges
    for _ in range(_MAX_ZOOMS if bins >= 5 and tally.n >= 20 * bins else 0):
        pair = tally.count[1:] + tally.count[:-1]
        k = int(np.argmax(pair))
        if pair[k] < 0.99 * tally.count.sum():
            break  # else two neighbours have nearly all rows, and are divided into smaller bins
        edges = np.unique(np.r_[0.0, tally.edges[k] + (tally.edges[k + 2] - tally.edges[k]) * unit, 1.0])
        tally = Bins.of(z, y, bins=edges, top_label=top_label, sample_weight=sample_weight)
    mean, accuracy = (float(total.sum() / (tally.n or np.nan)) for total in (tally.confidence, tally.hits))
    counts = tally.hits, tally.count - tally.hits
    return ConfidenceHistogram(tally.edges, *counts, mean, accuracy, is_event(z, top_label))


def section(audit: Audit) -> Section:
    """Return the section: the histogram before and after calibration, with the same y-axis."""
    records = [confidence_histogram(*stage.arrays, sample_weight=audit.sample_weight) for stage in stages(audit)]
    top = max(float((record.right + record.wrong).max() / (record.right + record.wrong).sum()) for record in records)
    event = records[0].event
    words = words_for(event)
    text = "The number of predictions at each confidence, and how many of them are wrong."
    if event:
        text = (
            f"The number of rows at each predicted probability of {audit.scores.event_name}, and how often it happened."
        )
    return Section(
        name="confidence",
        title="What does it predict?" if event else "How confident is it?",
        text=text,
        legend=(("right", words.right), ("wrong", words.wrong), ("says", words.mean), ("hits", words.rate)),
        panels=panels("confidence", audit, records, top=top),
    )


def plot(record: ConfidenceHistogram, *, top: float | None = None) -> Plot:
    """Plot stacked bars, with lines at the mean confidence and the accuracy; the y-axis ends above the share `top`."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    total = float((record.right + record.wrong).sum())
    words = words_for(record.event)
    marks: list[Mark] = []
    for name, count, color in ((words.right, record.right, style.RIGHT), (words.wrong, record.wrong, style.WRONG)):
        hover = [f"{words.score} near {percent(x)}\n{name}: {n:,.0f} rows" for x, n in zip(middle, count, strict=True)]
        look: dict[str, Any] = {"color": color, "name": f"{name} ({count.sum():,.0f})", "hover": hover}
        marks.append(Bars(at=middle, size=count / max(total, 1.0), width=0.86 * width, **look))
    if total:
        lines = (words.mean, record.mean, "dot"), (words.rate, record.accuracy, "solid")
        marks += [Rule(at=at, color=style.INK, dash=dash, name=f"{name} {percent(at)}") for name, at, dash in lines]
    high = 1.08 * (float((record.right + record.wrong).max(initial=0.0)) / max(total, 1.0) if top is None else top)
    return Plot(
        title="Predicted probability" if record.event else "Confidence of right and wrong predictions",
        marks=marks,
        x=Axis(title=words.score.capitalize(), range=_range(record), percent=True),
        y=Axis(title="Share of rows", range=(0, high or 1), percent=True),
        stacked=True,
        legend=("upper left", 2),
        empty="" if total else "no rows",
    )


def _range(record: ConfidenceHistogram) -> tuple[float, float]:
    """Return the range that the narrow bins cover."""
    width = np.diff(record.edges)
    narrow = np.flatnonzero(width < 1.5 * np.median(width))
    return float(record.edges[narrow[0]]), float(record.edges[narrow[-1] + 1])


def summary(record: ConfidenceHistogram) -> str:
    """Return the mean confidence, the accuracy, and the share of the most confident predictions."""
    total, end = record.right + record.wrong, "."
    top_share = total[-1] / max(total.sum(), 1.0)
    if total[-1]:
        share = percent((record.right if record.event else record.wrong)[-1] / total[-1])
        end = f"; the event happened in {share} of them." if record.event else f"; {share} of them are wrong."
    words = words_for(record.event)
    return (
        f"The mean {words.score} is {percent(record.mean)} (dotted line), the {words.outcome} "
        f"{percent(record.accuracy)} (solid line). {percent(top_share)} of the rows have a {words.score} above "
        f"{100 * record.edges[-2]:.3g} %{end}"
    )


def numbers(record: ConfidenceHistogram) -> Table:
    """Return one row per bin that is not empty."""
    rows = [
        [f"{100 * a:.3g} % – {100 * b:.3g} %", f"{right:,.0f}", f"{wrong:,.0f}"]
        for a, b, right, wrong in zip(record.edges[:-1], record.edges[1:], record.right, record.wrong, strict=True)
        if right + wrong
    ]
    words = words_for(record.event)
    return [word.capitalize() for word in (words.score, words.right, words.wrong)], rows
