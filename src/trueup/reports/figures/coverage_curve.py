"""Coverage curve: the share of targets in central intervals, against the intervals' nominal level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import bdtr, bdtrik

from trueup._core.arrays import as_weights, effective_rows
from trueup._core.formatting import format_percent
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.forecasts import central_coverage, check_forecast
from trueup.metrics.resampling import tail_share
from trueup.reports import style
from trueup.reports.figures import Section, Table, band_title, panels, percent, stages
from trueup.reports.plot import Area, Axis, Line, Mark, Plot

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit


@dataclass(frozen=True, eq=False)
class CoverageCurve:
    """The share of targets in central intervals of each level, with the band of a calibrated forecast."""

    levels: np.ndarray
    """Levels of the intervals; the other arrays have one entry per level."""
    coverage: np.ndarray
    """Share of targets inside."""
    low: np.ndarray
    """Lower end of the band."""
    high: np.ndarray
    """Upper end of the band."""
    level: float
    """Probability with which a calibrated forecast's coverage at one level lies in the band."""
    rows: int
    """Number of rows."""


def coverage_curve(
    mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, sample_weight: WeightsLike = None, level: float = 0.95
) -> CoverageCurve:
    """Compute the share of targets inside the central interval of each level.

    The band is the central interval of a binomial share whose probability is the level of the interval.

    Parameters
    ----------
    mean
        Predicted means, shape (n,), or quantiles, shape (n, levels).
    std
        Predicted standard deviations, shape (n,), or the levels of the quantiles.
    targets
        Observed targets, shape (n,).
    sample_weight
        Weights of the rows, shape (n,).
    level
        Probability of the band.

    Returns
    -------
    CoverageCurve
        The record.

    Examples
    --------
    >>> record = coverage_curve(np.zeros(4), np.ones(4), [-2.0, 0.1, 0.2, 2.0])
    >>> record.levels[[9, 18]], record.coverage[[9, 18]]
    (array([0.5 , 0.95]), array([0.5, 0.5]))

    References
    ----------
    Kuleshov, Fenner and Ermon (2018), arXiv:1807.00263.
    """
    rows = len(check_forecast(mean, std, targets).targets)
    levels, share = central_coverage(mean, std, targets, sample_weight=sample_weight)
    low, high = binomial_band(levels, rows, as_weights(sample_weight, rows), level)
    return CoverageCurve(levels, share, low, high, level, rows)


def section(audit: ForecastAudit) -> Section | None:
    """Return the section: the curve before and after recalibration."""
    options: dict[str, Any] = {"sample_weight": audit.sample_weight, "level": audit.scores.level}
    records = [coverage_curve(*stage.arrays, **options) for stage in stages(audit)]
    if not len(records[0].levels):
        return None
    return Section(
        name="coverage",
        title="Do the intervals have their nominal coverage?",
        text="A central 80 % interval should contain 80 % of the targets. Dots below the dotted diagonal are intervals "
        "that are too narrow; dots above it are too wide. Dots inside the grey band are compatible with calibrated "
        "forecasts.",
        legend=(("dot", "share of targets inside"), ("band", band_title(audit.scores.level))),
        panels=panels("coverage", audit, records),
    )


def plot(record: CoverageCurve) -> Plot:
    """Plot the coverage and the band."""
    marks: list[Mark] = [Line(x=[0, 1], y=[0, 1], color=style.MUTED, dash="dot", width=1)]
    if len(record.levels):
        text = "{} intervals contain {}\nif calibrated {} to {}"
        columns = zip(record.levels, record.coverage, record.low, record.high, strict=True)
        hover = [text.format(percent(level, 0), *map(percent, shares)) for level, *shares in columns]
        dots: dict[str, Any] = {"x": record.levels, "y": record.coverage, "width": 1.5, "hover": hover}
        marks += [
            Area(x=record.levels, low=record.low, high=record.high, color=style.BAND, name=band_title(record.level)),
            Line(name="share of targets inside", color=style.BLUE, markers=True, **dots),
        ]
    return Plot(
        title="Coverage",
        marks=marks,
        x=Axis(title="Level of the interval", range=(0, 1), percent=True),
        y=Axis(title="Targets inside", range=(0, 1), percent=True),
        height=360,
        legend_title=f"{record.rows:,} rows",
        empty="" if len(record.levels) else "no central intervals",
    )


def summary(record: CoverageCurve) -> str:
    """Return the number of levels outside the band, and the level with the largest error."""
    gap = record.coverage - record.levels
    worst = int(np.abs(gap).argmax())
    side = "too narrow" if gap[worst] < 0 else "too wide"
    largest_error = (
        f"The {format_percent(float(record.levels[worst]))} intervals have the largest error: they contain "
        f"{percent(float(record.coverage[worst]))} of the targets and are {side}."
    )
    return f"{outside_band('levels', record.coverage, record)} {largest_error}"


def numbers(record: CoverageCurve) -> Table:
    """Return one row per level."""
    columns = zip(record.levels, record.coverage, record.low, record.high, strict=True)
    rows = [[format_percent(a), percent(b), f"{percent(low)} – {percent(high)}"] for a, b, low, high in columns]
    return ["Interval", "Targets inside", band_title(record.level)], rows


def binomial_band(
    probability: np.ndarray, rows: int, sample_weight: np.ndarray | None, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the central interval of a binomial share with this probability.

    >>> binomial_band(np.array([0.5]), 100, None, 0.95)
    (array([0.4]), array([0.6]))
    """
    n, tail = max(round(effective_rows(sample_weight, rows)), 1), tail_share(level)

    def quantile(q: float) -> np.ndarray:
        # bdtrik gives a real number; the smallest integer with a distribution function of at least q is next to it.
        count = np.ceil(bdtrik(q, n, probability))
        below = np.maximum(count - 1, 0)
        return np.where(bdtr(below, n, probability) >= q, below, count) / n

    return quantile(tail), quantile(1 - tail)


def outside_band(parts: str, values: np.ndarray, record: Any) -> str:
    """Return a sentence with the number of values outside the band of a record."""
    outside = int(((values < record.low) | (values > record.high)).sum())
    lie = f"{outside or 'none'} {'lies' if outside == 1 else 'lie'}"
    return f"Of {len(values)} {parts} over {record.rows:,} rows, {lie} outside the band."
