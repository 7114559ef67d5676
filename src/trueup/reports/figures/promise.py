"""Guarantees on the error rate: for each allowed rate, the confidence threshold and the share of answered rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup._core.types import ArrayLike
from trueup.decisions.thresholds import format_score, threshold
from trueup.metrics.hypothesis_tests import detectable_error
from trueup.reports import style
from trueup.reports.audit import RAW, Audit
from trueup.reports.figures import Panel, Section, Table, percent
from trueup.reports.plot import Axis, Dots, Line, Plot, Slider

ALLOWED = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
"""Allowed error rates on the slider."""


@dataclass(frozen=True, eq=False)
class Promise:
    """Threshold, share of answered rows and observed error rate for each allowed error rate."""

    allowed: np.ndarray
    """Allowed error rates; the other arrays have one entry per rate."""
    threshold: np.ndarray
    """Confidence threshold; infinite where nothing can be promised."""
    coverage: np.ndarray
    """Share of rows that are answered."""
    observed: np.ndarray
    """Observed error rate of the answered rows."""
    level: float
    """Certainty of each promise."""
    rows: int
    """Number of rows."""
    detectable: float
    """Smallest calibration error that these rows detect reliably."""


def promise(
    logits: ArrayLike, labels: ArrayLike, *, allowed: Sequence[float] = ALLOWED, level: float = 0.95, seed: int = 0
) -> Promise:
    """Find the threshold that guarantees each allowed error rate.

    Parameters
    ----------
    logits
        Calibrated logits, shape (n, classes), of rows that neither fitted nor chose the calibrator.
    labels
        Classes, shape (n,).
    allowed
        Allowed error rates.
    level
        Certainty of each promise.
    seed
        Seed of the simulation.

    Returns
    -------
    Promise
        The record.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 5
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> record = promise(z, y, allowed=(0.01, 0.05, 0.1))
    >>> record.coverage.round(2), record.threshold.round(2)
    (array([0.36, 0.78, 0.94]), array([0.99, 0.8 , 0.57]))
    """
    thresholds = [threshold(logits, labels, max_risk=share, level=level) for share in allowed]
    detectable = detectable_error(logits, labels, n_resamples=400, seed=seed).error
    limit, coverage, observed = (
        np.array([getattr(one, name) for one in thresholds]) for name in ("threshold", "coverage", "observed")
    )
    return Promise(np.array(allowed), limit, coverage, observed, level, thresholds[0].rows, detectable)


def section(audit: Audit) -> Section:
    """Return the section: the promises of the chosen method on rows that did not fit it."""
    record = promise(*audit.pairs[audit.chosen], seed=audit.seed)
    text = (
        "Answer only if the confidence is high enough, and leave the other rows to review. The chart shows how high it "
        f"must be to keep the error rate below a limit with {percent(record.level, 0)} certainty. Move the slider to "
        "the errors you allow. Each promise holds by itself, so choose the limit before you look at the results."
    )
    if audit.cross_fitted and audit.chosen != RAW:
        text += " The rows were cross-fitted, so the promise is approximate; separate test rows make it exact."
    words = ""
    if not np.isnan(record.detectable):
        words = f"With {record.rows:,} rows, a calibration error below {record.detectable:.2g} may go unnoticed."
    return Section(
        name="promise",
        title="What can I promise?",
        text=text,
        panels=(Panel("promise-chart", "Answered rows at each allowed error rate", record),),
        html=f"<p>{words}</p>" if words else "",
    )


def plot(record: Promise) -> Plot:
    """Plot the share of answered rows against the allowed error rate; a chart has a slider."""
    words = [sentence(record, i) for i in range(len(record.allowed))]
    # The slider starts at 2 %, or at the lowest rate above that can be promised.
    possible = np.flatnonzero(np.isfinite(record.threshold) & (record.allowed >= 0.02))
    start = int(possible[0]) if len(possible) else len(record.allowed) - 1
    labels = [percent(share).replace(".0", "") for share in record.allowed]
    slider = Slider(title="Allow errors in", labels=labels, texts=words, active=start)
    line: dict[str, Any] = {"color": style.BLUE, "steps": True, "markers": True, "hover": words}
    return Plot(
        title="What can be promised",
        marks=[
            Line(x=record.allowed, y=record.coverage, **line),
            Dots(x=[record.allowed[start]], y=[record.coverage[start]], color=style.VERMILION, size=12.0),
        ],
        x=Axis(title="Errors allowed among the answers", log=True, percent=True, ticks=record.allowed[::2]),
        y=Axis(title="Share of rows answered", range=(0, 1.02), percent=True),
        height=340,
        slider=slider,
    )


def summary(record: Promise) -> str:
    """Return the promises at 1 % and 5 %, or the strictest one."""
    at = [i for i, share in enumerate(record.allowed) if share in (0.01, 0.05) and np.isfinite(record.threshold[i])]
    if not np.isfinite(record.threshold).any():
        return f"Nothing can be promised from {record.rows:,} rows."
    return " ".join(sentence(record, i) for i in at or [int(np.flatnonzero(np.isfinite(record.threshold))[0])])


def numbers(record: Promise) -> Table:
    """Return one row per allowed error rate."""
    head = ["Errors allowed", "Confidence at least", "Rows answered", "Errors observed"]
    columns = zip(record.allowed, record.threshold, record.coverage, record.observed, strict=True)
    return head, [
        [percent(share), format_score(limit) if np.isfinite(limit) else "–", percent(kept), percent(seen)]
        for share, limit, kept, seen in columns
    ]


def sentence(record: Promise, i: int) -> str:
    """Return the promise at one allowed error rate."""
    allowed = percent(record.allowed[i]).replace(".0", "")
    if not np.isfinite(record.threshold[i]):
        return f"At most {allowed} wrong: cannot be promised from {record.rows:,} rows."
    return (
        f"At most {allowed} wrong: answer if the confidence is at least {format_score(record.threshold[i])}, "
        f"{percent(record.coverage[i])} of the rows."
    )
