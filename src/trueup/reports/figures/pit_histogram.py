"""The histogram of the PIT, F(y): flat if forecasts are calibrated, with the band in which its bars would lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup._core.arrays import as_weights, effective_rows
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent
from trueup.metrics.forecasts import QuantileForecast, check_forecast, pit
from trueup.metrics.resampling import tail_share
from trueup.reports import style
from trueup.reports.figures import Section, Table, panels
from trueup.reports.figures.coverage_curve import binomial_band
from trueup.reports.plot import Axis, Bars, Plot, Rule

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit


@dataclass(frozen=True, eq=False)
class PitHistogram:
    """How the PIT is distributed, as a density: 1 everywhere if forecasts are calibrated."""

    edges: np.ndarray
    """Of the bars, one more than there are; of quantiles these are the levels."""
    density: np.ndarray
    low: np.ndarray
    """Ends of the band."""
    high: np.ndarray
    level: float
    """The probability with which a calibrated forecast's bar lies in the band, bar by bar."""
    rows: int
    mean: float
    """Of the PIT; ½ if calibrated."""


def pit_histogram(
    mean: Any, std: Any, targets: Any, *, bins: int = 20, sample_weight: Any = None, level: float = 0.95
) -> PitHistogram:
    """The density of F(y) in bins of equal width; of quantiles, between up to as many of their levels.

    The band holds the middle `level` of the share that falls into a bar of width b, binomial with chance b.

    >>> record = pit_histogram(np.zeros(4), np.ones(4), [-2.0, 0.1, 0.2, 2.0], bins=4)
    >>> record.density
    array([1., 0., 2., 1.])

    Diebold, Gunther and Tay (1998).
    """
    forecast = check_forecast(mean, std, targets)
    if isinstance(bins, bool) or int(bins) != bins or bins < 1:
        raise InputError("bins", "be a whole number of at least 1", repr(bins))
    if isinstance(forecast, QuantileForecast):
        edges = np.concatenate([[0.0], forecast.levels, [1.0]])
        if len(edges) > bins + 1:  # of many levels those nearest to even ones
            edges = edges[np.unique(np.abs(edges[:, None] - np.linspace(0, 1, bins + 1)).argmin(axis=0))]
    else:
        edges = np.linspace(0.0, 1.0, int(bins) + 1)
    u = pit(mean, std, targets)
    w = as_weights(sample_weight, len(u))
    tail, width = tail_share(level), np.diff(edges)
    density = np.histogram(u, edges, weights=w)[0] / (len(u) if w is None else w.sum()) / width
    n = max(round(effective_rows(w, len(u))), 1)
    low, high = (end / width for end in binomial_band(n, width, tail))
    return PitHistogram(edges, density, low, high, level, len(u), float(np.average(u, weights=w)))


def section(audit: ForecastAudit) -> Section:
    """The histogram before and after recalibration, on the same scale."""
    level = audit.scores.level
    records = [pit_histogram(*stage.triple, sample_weight=audit.sample_weight, level=level) for stage in audit.stages()]
    top = max(float(max(record.density.max(), record.high.max())) for record in records)
    return Section(
        name="pit",
        title="Do targets fall where the forecasts say?",
        text="The PIT of a row is the probability that its forecast gave to targets below the one that came. If the "
        "forecasts are calibrated all its values are equally frequent, and the bars are flat. High bars at both ends "
        "mean intervals that are too narrow, a hump in the middle intervals that are too wide, a slope forecasts that "
        "are too high or too low.",
        legend=(("right", "share of the targets"), ("band", f"{format_percent(level)} band if calibrated")),
        panels=panels("pit", audit.stages(), records, top=top),
    )


def plot(record: PitHistogram, *, top: float | None = None) -> Plot:
    """Bars of the density, and the band."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    high = float(max(record.density.max(), record.high.max())) if top is None else top
    hover = "PIT near %{x:.2f}<br>%{customdata[0]:.1%} of the targets, %{customdata[1]:.1%} if calibrated"
    band, shares = f"{format_percent(record.level)} band if calibrated", np.stack([record.density * width, width], 1)
    bars = {"at": middle, "size": record.density, "width": 0.94 * width, "hover": hover, "data": shares}
    return Plot(
        title="Probability integral transform",
        marks=[
            Bars(name=f"targets ({record.rows:,} rows)", color=style.BLUE, **bars),
            Bars(at=middle, size=record.high - record.low, base=record.low, width=width, color=style.BAND, name=band),
            Rule(at=1.0, horizontal=True, color=style.INK, dash="dot"),
        ],
        x=Axis(title="PIT", range=(0, 1)),
        y=Axis(title="Density", range=(0, 1.08 * high)),
        legend="upper center",
        columns=2,
    )


def summary(record: PitHistogram) -> str:
    """The bars outside the band, and the shares at the two ends."""
    outside = int(((record.density < record.low) | (record.density > record.high)).sum())
    width = np.diff(record.edges)
    ends = [f"{format_percent(float(record.density[k] * width[k]), 1)} of the targets" for k in (0, -1)]
    lie = f"{outside or 'none'} {'lies' if outside == 1 else 'lie'}"
    return (
        f"Of {len(width)} bars over {record.rows:,} rows, {lie} outside the band. {ends[0]} have a "
        f"PIT below {record.edges[1]:g} ({format_percent(float(width[0]), 1)} if calibrated), {ends[1]} above "
        f"{record.edges[-2]:g} ({format_percent(float(width[-1]), 1)}). The mean is {record.mean:.3f}, ½ if calibrated."
    )


def numbers(record: PitHistogram) -> Table:
    """A row for each bar."""
    width = np.diff(record.edges)
    rows = []
    for k, share in enumerate(record.density * width):
        band = " – ".join(format_percent(float(x[k] * width[k]), 1) for x in (record.low, record.high))
        rows.append([f"{record.edges[k]:.3g} – {record.edges[k + 1]:.3g}", format_percent(float(share), 1), band])
    return ["PIT", "Targets", f"{format_percent(record.level)} band if calibrated"], rows
