"""Coverage: how many targets central intervals hold, against how many they should."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import bdtr, bdtrik

from trueup._core.arrays import as_weights, effective_rows
from trueup._core.formatting import format_percent
from trueup.metrics.forecasts import central_coverage, check_forecast
from trueup.metrics.resampling import tail_share
from trueup.reports import style
from trueup.reports.figures import Section, Table, panels, percent
from trueup.reports.plot import Area, Axis, Line, Mark, Plot

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit


@dataclass(frozen=True, eq=False)
class CoverageCurve:
    """The share of targets in central intervals of each level, with the band of a calibrated forecast."""

    levels: np.ndarray
    coverage: np.ndarray
    low: np.ndarray
    """Ends of the band."""
    high: np.ndarray
    level: float
    """The probability with which a calibrated forecast's coverage lies in the band, level by level."""
    rows: int


def coverage_curve(
    mean: Any, std: Any, targets: Any, *, sample_weight: Any = None, level: float = 0.95
) -> CoverageCurve:
    """The share of targets inside the central interval of each level; of quantiles, of each pair of levels.

    The band holds the middle `level` of a binomial share whose chance is the level of the interval.

    >>> record = coverage_curve(np.zeros(4), np.ones(4), [-2.0, 0.1, 0.2, 2.0])
    >>> record.levels[[9, 18]], record.coverage[[9, 18]]
    (array([0.5 , 0.95]), array([0.5, 0.5]))

    Kuleshov, Fenner and Ermon (2018).
    """
    y = check_forecast(mean, std, targets).targets
    levels, share = central_coverage(mean, std, targets, sample_weight=sample_weight)
    n = max(round(effective_rows(as_weights(sample_weight, len(y)), len(y))), 1)
    tail = tail_share(level)
    low, high = binomial_band(n, levels, tail)
    return CoverageCurve(levels, share, low, high, level, len(y))


def section(audit: ForecastAudit) -> Section | None:
    """The curve before and after recalibration."""
    level = audit.scores.level
    records = [
        coverage_curve(*stage.triple, sample_weight=audit.sample_weight, level=level) for stage in audit.stages()
    ]
    if not len(records[0].levels):
        return None
    return Section(
        name="coverage",
        title="Do the intervals hold what they promise?",
        text="A central 80 % interval should hold 80 % of the targets. Dots below the dotted diagonal are intervals "
        "that are too narrow, above it too wide. Dots inside the grey band are no further off than chance would put "
        "calibrated forecasts.",
        legend=(("dot", "share of targets inside"), ("band", f"{format_percent(level)} band if calibrated")),
        panels=panels("coverage", audit.stages(), records),
    )


def plot(record: CoverageCurve) -> Plot:
    """A line of the coverage, and the band."""
    marks: list[Mark] = [Line(x=[0, 1], y=[0, 1], color=style.MUTED, dash="dot", width=1)]
    if len(record.levels):
        name = f"{format_percent(record.level)} band if calibrated"
        hover = "%{x:.0%} intervals hold %{y:.1%}<br>if calibrated %{customdata[0]:.1%} to %{customdata[1]:.1%}"
        ends = np.stack([record.low, record.high], axis=1)
        dots: dict[str, Any] = {"x": record.levels, "y": record.coverage, "width": 1.5, "hover": hover, "data": ends}
        marks += [
            Area(x=record.levels, low=record.low, high=record.high, color=style.BAND, name=name),
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
    """The levels outside the band, and the one that is furthest off."""
    gap = record.coverage - record.levels
    outside = int(((record.coverage < record.low) | (record.coverage > record.high)).sum())
    worst = int(np.abs(gap).argmax())
    side = "too narrow" if gap[worst] < 0 else "too wide"
    far = (
        f"Furthest off are the {format_percent(float(record.levels[worst]))} intervals, which hold "
        f"{percent(float(record.coverage[worst]))} of the targets: {side}."
    )
    lie = f"{outside or 'none'} {'lies' if outside == 1 else 'lie'}"
    return f"Of {len(gap)} levels over {record.rows:,} rows, {lie} outside the band. {far}"


def numbers(record: CoverageCurve) -> Table:
    """A row for each level."""
    rows = [
        [format_percent(float(level)), percent(float(share)), f"{percent(float(low))} – {percent(float(high))}"]
        for level, share, low, high in zip(record.levels, record.coverage, record.low, record.high, strict=True)
    ]
    return ["Interval", "Targets inside", f"{format_percent(record.level)} band if calibrated"], rows


def binomial_band(n: int, chance: np.ndarray, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """The shares of n rows beyond which less than `tail` lies on each side, if each row falls in with this chance.

    >>> binomial_band(100, np.array([0.5]), 0.025)
    (array([0.4]), array([0.6]))
    """
    low, high = np.zeros(len(chance)), np.ones(len(chance))
    for k, p in enumerate(chance):
        # bdtrik solves for a real number of rows; the least whole one that leaves no more than the tail is near it.
        ends = []
        for q in (tail, 1 - tail):
            count = max(math.ceil(float(bdtrik(q, n, p))) - 1, 0)
            while bdtr(count, n, p) < q:
                count += 1
            ends.append(min(count, n) / n)
        low[k], high[k] = ends
    return low, high
