"""The calibration error of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.bins import BINNED_ERRORS, BINS, Bins
from trueup._core.formatting import format_number
from trueup._core.types import ArrayLike
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Section, Table, panels, percent, stages
from trueup.reports.plot import Axis, Bars, Mark, Plot, Rule

_HIGH, _LOW = "probability too high", "probability too low"


@dataclass(frozen=True, eq=False)
class ClassErrors:
    """The calibration error of each class."""

    class_names: tuple[str, ...]
    """Names of the classes; the arrays have one entry per class."""
    error: np.ndarray
    """Binned calibration error of the class's probability; the mean is the class-wise error of the table."""
    probability: np.ndarray
    """Mean probability of the class."""
    frequency: np.ndarray
    """Share of rows with the class."""


def class_errors(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    class_names: Sequence[str] | None = None,
    sample_weight: ArrayLike | None = None,
) -> ClassErrors:
    """Compute the calibration error of each class's probability: Σ_b (n_kb/n) |acc_kb − conf_kb| for class k.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    bins
        Number of bins.
    class_names
        Names of the classes.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    ClassErrors
        The record.

    Examples
    --------
    >>> record = class_errors(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]), [0, 0, 1], class_names=["cat", "dog"])
    >>> for row in zip(record.class_names, record.error, record.probability, record.frequency):
    ...     print("{} {:.4f} {:.4f} {:.4f}".format(*row))
    cat 0.3333 0.8000 0.6667
    dog 0.3333 0.2000 0.3333

    References
    ----------
    Nixon et al., "Measuring calibration in deep learning" (2019), arXiv:1904.01685: static calibration error.
    """
    tally = Bins.of(logits, labels, bins=bins, classwise=True, sample_weight=sample_weight)
    classes = len(tally.count)
    names = tuple(str(k) for k in range(classes)) if class_names is None else tuple(map(str, class_names))
    if len(names) != classes:
        raise ValueError(f"class_names must have {classes} entries, one per class, got {len(names)}")
    n = tally.n or np.nan
    error = BINNED_ERRORS["ece"](tally.count, tally.confidence, tally.hits) if tally.n else np.full(classes, np.nan)
    return ClassErrors(names, error, tally.confidence.sum(axis=1) / n, tally.hits.sum(axis=1) / n)


def section(audit: Audit, class_names: Sequence[str] | None) -> Section:
    """Return the section: the classes before and after calibration, on the same scale."""
    options: dict[str, Any] = {"bins": audit.bins, "class_names": class_names, "sample_weight": audit.sample_weight}
    records = [class_errors(*stage.arrays, **options) for stage in stages(audit)]
    top, order = max(float(record.error.max()) for record in records), np.argsort(-records[0].error, kind="stable")
    return Section(
        name="classes",
        title="Which classes are miscalibrated?",
        text="Every class has a probability in every row, whether it is predicted or not. The error of a class is the "
        "difference between that probability and the frequency of the class, averaged over bins. The classes are "
        "sorted by their errors without calibration.",
        legend=(("over", _HIGH), ("under", _LOW)),
        panels=panels("classes", audit, records, top=top, order=order),
    )


def plot(record: ClassErrors, *, most: int = 20, top: float | None = None, order: np.ndarray | None = None) -> Plot:
    """Plot the `most` worst classes, the worst on top; the x-axis ends above `top`.

    `order` sets the order of the classes, so that two plots can be compared line by line.
    """
    order = (np.argsort(-record.error, kind="stable") if order is None else order)[:most]
    high, low = (way(record.probability, record.frequency)[order] for way in (np.greater, np.less_equal))
    marks: list[Mark] = []
    for name, members, color in ((_HIGH, high, style.GAP_OVER), (_LOW, low, style.GAP_UNDER)):
        if members.any():
            texts = "{}\nerror {}\nmean probability {}, frequency {}"
            hover = [texts.format(*_row(record, k)) for k in order[members]]
            look: dict[str, Any] = {"width": 0.75, "horizontal": True, "color": color, "name": name, "hover": hover}
            marks.append(Bars(at=np.flatnonzero(members), size=record.error[order[members]], **look))
    classes, mean = len(record.error), float(record.error.mean())
    if not np.isnan(mean):
        marks.append(Rule(at=mean, color=style.INK, dash="dash", name=f"mean of all {mean:.4f}"))
    return Plot(
        title=f"{most} worst of {classes:,} classes" if classes > most else "Calibration by class",
        marks=marks,
        x=Axis(title=style.label("sce"), range=(0, None if top is None else 1.04 * top)),
        y=Axis(rows=[record.class_names[k] for k in order]),
        legend=("lower right", 2),
        empty="no rows" if np.isnan(mean) else "",
    )


def summary(record: ClassErrors) -> str:
    """Return the mean error, the worst class, and the numbers of classes with too high or too low probabilities."""
    worst, classes = int(record.error.argmax()), len(record.class_names)
    high = int((record.probability > record.frequency).sum())
    name, _, probability, frequency = _row(record, worst)
    return (
        f"The mean over {classes:,} classes is {record.error.mean():.4f}. Class {name} is worst with "
        f"{record.error[worst]:.4f}: its mean probability is {probability}, its frequency {frequency}. The mean "
        f"probability is too high for {high:,} classes and too low for {classes - high:,}."
    )


def numbers(record: ClassErrors, most: int = 200) -> Table:
    """Return one row for each of the `most` worst classes."""
    rows = [_row(record, k) for k in np.argsort(-record.error, kind="stable")[:most]]
    return ["Class", "Error", "Mean probability", "Frequency"], rows


def _row(record: ClassErrors, k: int) -> list[str]:
    """Return the name of a class, its error, its mean probability and its frequency."""
    shares = percent(record.probability[k]), percent(record.frequency[k])
    return [record.class_names[k], format_number(record.error[k]), *shares]
