"""Risk–coverage curve: the error rate among the most confident predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup._core.types import ArrayLike
from trueup.metrics import ranking
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Panel, Section, Table, percent, stages
from trueup.reports.plot import Axis, Line, Plot


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error rate among the most confident rows, for each share of rows kept."""

    coverage: np.ndarray
    """Share of rows kept; the other arrays have one entry per share."""
    risk: np.ndarray
    """Error rate among them."""
    aurc: float
    """Area under the curve, over all rows."""
    best: np.ndarray
    """Risk if all errors had the lowest confidences: the best possible at this accuracy."""
    best_aurc: float
    """Area under the curve of `best`."""


def risk_coverage(
    logits: ArrayLike, labels: ArrayLike, *, points: int = 200, sample_weight: ArrayLike | None = None
) -> RiskCoverage:
    """Compute the error rate R_k among the k most confident rows, at evenly spread shares k/n.

    The area is (1/n) Σ_k R_k over all rows, for any number of points. The best possible order has
    R_k = max(0, k − right)/k, where `right` is the number of right predictions.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    points
        Number of points of the curve.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    RiskCoverage
        The record.

    Examples
    --------
    >>> record = risk_coverage(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 1, 0, 1], points=2)
    >>> record.coverage, record.risk, record.best, f"{record.aurc:.4f}"
    (array([0.25, 1.  ]), array([0. , 0.5]), array([0. , 0.5]), '0.3333')

    References
    ----------
    Geifman, Uziel and El-Yaniv (2019), arXiv:1805.08206.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    curve = ranking.risk_coverage(logits, labels, sample_weight=sample_weight)
    n = len(curve.risk)
    kept = np.round(n * curve.coverage, 9)  # removes rounding errors; numbers of rows are integers without weights
    right = round(n * (1 - curve.risk[-1]), 9) if n else 0.0
    best = ranking.RiskCoverage(curve.coverage, np.maximum(kept - right, 0.0) / kept)
    at = np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(np.int64))
    return RiskCoverage(curve.coverage[at], curve.risk[at], curve.area(), best.risk[at], best.area())


def section(audit: Audit) -> Section:
    """Return the section: the curves before and after calibration in one chart."""
    first, *others = (risk_coverage(*stage.arrays, sample_weight=audit.sample_weight) for stage in stages(audit))
    options = {"after": others[0]} if others else {}
    return Section(
        name="risk",
        title="Does its confidence separate right from wrong?",
        text="Predictions with low confidence can be left to review. The lower the curve, the better confidence "
        "separates right predictions from wrong ones; the dotted line is the best possible.",
        panels=(Panel("risk-chart", "Error rate among the most confident", first, options, summary(first, **options)),),
    )


def plot(record: RiskCoverage, *, after: RiskCoverage | None = None) -> Plot:
    """Plot the curve, the curve `after` calibration if given, and the best possible one."""
    final, curves = record, [("by confidence", record, style.BLUE)]
    if after is not None:
        final, curves = after, [("before", record, style.VERMILION), ("after", after, style.BLUE)]
    marks = []
    for name, curve, color in curves:
        points = zip(curve.risk, curve.coverage, strict=True)
        hover = [f"{name}: {percent(y)} wrong\namong the most confident {percent(x, 0)}" for y, x in points]
        marks.append(Line(x=curve.coverage, y=curve.risk, color=color, name=name, hover=hover))
    marks.append(Line(x=final.coverage, y=final.best, color=style.MUTED, dash="dot", width=1.5, name="best possible"))
    top = max(curve.risk.max(initial=0.01) for _, curve, _ in curves)
    return Plot(
        title="Risk and coverage",
        marks=marks,
        x=Axis(title="Coverage: most confident rows kept", range=(0, 1), percent=True),
        y=Axis(title="Error rate among them", range=(0, 1.05 * top), percent=True),
        height=320,
        legend=("upper left", 1),
        legend_title=f"Area {final.aurc:.4f}, at best {final.best_aurc:.4f}",
        empty="" if len(record.risk) else "no rows",
    )


def summary(record: RiskCoverage, *, after: RiskCoverage | None = None) -> str:
    """Return the error rates of all rows and of the more confident half, and the areas."""
    final = after or record
    half = min(int(np.searchsorted(final.coverage, 0.5)), len(final.risk) - 1)
    rates = f"Of all rows {percent(final.risk[-1])} are wrong; of the more confident half {percent(final.risk[half])}."
    area = f"The area under the curve (AURC) is {final.aurc:.4f}, at best {final.best_aurc:.4f}"
    return f"{rates} {area}." if after is None else f"{rates} {area}; before calibration it was {record.aurc:.4f}."


def numbers(record: RiskCoverage) -> Table:
    """Return one row for each tenth of the rows."""
    at = np.unique(np.searchsorted(record.coverage, np.linspace(0.1, 1.0, 10)).clip(max=len(record.coverage) - 1))
    rows = [[percent(record.coverage[k], 0), percent(record.risk[k]), percent(record.best[k])] for k in at]
    return ["Rows kept", "Wrong among them", "At best"], rows
