"""Histogram of the probability integral transform (PIT) F(y), which is flat if forecasts are calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup._core.arrays import as_weights
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup.metrics.forecasts import QuantileForecast, check_forecast, pit
from trueup.reports import style
from trueup.reports.figures import Section, Table, band_title, panels, percent, stages
from trueup.reports.figures.coverage_curve import binomial_band, outside_band
from trueup.reports.plot import Axis, Bars, Plot, Rule

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit


@dataclass(frozen=True, eq=False)
class PitHistogram:
    """Density of the PIT in bins, with the band of a calibrated forecast; 1 everywhere if calibrated."""

    edges: np.ndarray
    """Edges of the bins, one more than there are bins; for quantile forecasts, the levels."""
    density: np.ndarray
    """Density in each bin."""
    low: np.ndarray
    """Lower end of the band."""
    high: np.ndarray
    """Upper end of the band."""
    level: float
    """Probability with which one bar of a calibrated forecast lies in the band."""
    rows: int
    """Number of rows."""
    mean: float
    """Mean of the PIT; ½ if calibrated."""


def pit_histogram(
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike,
    *,
    bins: int = 20,
    sample_weight: ArrayLike | None = None,
    level: float = 0.95,
) -> PitHistogram:
    """Compute the density of F(y) in bins of equal width, or between the levels of quantile forecasts.

    The band is the central interval of a binomial share whose probability is the width of the bin.

    Parameters
    ----------
    mean
        Predicted means, shape (n,), or quantiles, shape (n, levels).
    std
        Predicted standard deviations, shape (n,), or the levels of the quantiles.
    targets
        Observed targets, shape (n,).
    bins
        Number of bins; for quantile forecasts, the largest number.
    sample_weight
        Weights of the rows, shape (n,).
    level
        Probability of the band.

    Returns
    -------
    PitHistogram
        The record.

    Examples
    --------
    >>> record = pit_histogram(np.zeros(4), np.ones(4), [-2.0, 0.1, 0.2, 2.0], bins=4)
    >>> record.density
    array([1., 0., 2., 1.])

    References
    ----------
    Diebold, Gunther and Tay (1998), doi:10.2307/2527342.
    """
    forecast = check_forecast(mean, std, targets)
    if isinstance(bins, bool) or int(bins) != bins or bins < 1:
        raise InputError("bins", "be a whole number of at least 1", repr(bins))
    if isinstance(forecast, QuantileForecast):
        edges = np.concatenate([[0.0], forecast.levels, [1.0]])
        if len(edges) > bins + 1:  # keep the levels nearest to an even grid
            edges = edges[np.unique(np.abs(edges[:, None] - np.linspace(0, 1, bins + 1)).argmin(axis=0))]
    else:
        edges = np.linspace(0.0, 1.0, int(bins) + 1)
    u = pit(mean, std, targets)
    w = as_weights(sample_weight, len(u))
    width = np.diff(edges)
    density = np.histogram(u, edges, weights=w)[0] / (len(u) if w is None else w.sum()) / width
    low, high = (end / width for end in binomial_band(width, len(u), w, level))
    return PitHistogram(edges, density, low, high, level, len(u), float(np.average(u, weights=w)))


def section(audit: ForecastAudit) -> Section:
    """Return the section: the histogram before and after recalibration, on the same scale."""
    options: dict[str, Any] = {"sample_weight": audit.sample_weight, "level": audit.scores.level}
    records = [pit_histogram(*stage.arrays, **options) for stage in stages(audit)]
    top = max(float(max(record.density.max(), record.high.max())) for record in records)
    return Section(
        name="pit",
        title="Are the predicted distributions right?",
        text="The PIT of a row is the predicted probability of a target below the observed one. If the forecasts are "
        "calibrated, all its values are equally frequent, and the bars are flat. High bars at both ends mean "
        "intervals that are too narrow. A hump in the middle means intervals that are too wide. A slope means "
        "forecasts that are too high or too low.",
        legend=(("right", "share of the targets"), ("band", band_title(audit.scores.level))),
        panels=panels("pit", audit, records, top=top),
    )


def plot(record: PitHistogram, *, top: float | None = None) -> Plot:
    """Plot the density as bars, and the band."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    high = float(max(record.density.max(), record.high.max())) if top is None else top
    shares, name = zip(middle, record.density * width, width, strict=True), band_title(record.level)
    text = "PIT near {:.2f}\n{} of the targets, {} if calibrated"
    hover = [text.format(at, percent(share), percent(expected)) for at, share, expected in shares]
    bars: dict[str, Any] = {"at": middle, "size": record.density, "width": 0.94 * width, "hover": hover}
    return Plot(
        title="Probability integral transform",
        marks=[
            Bars(name=f"targets ({record.rows:,} rows)", color=style.BLUE, **bars),
            Bars(at=middle, size=record.high - record.low, base=record.low, width=width, color=style.BAND, name=name),
            Rule(at=1.0, horizontal=True, color=style.INK, dash="dot"),
        ],
        x=Axis(title="PIT", range=(0, 1)),
        y=Axis(title="Density", range=(0, 1.08 * high)),
        legend=("upper center", 2),
    )


def summary(record: PitHistogram) -> str:
    """Return the number of bars outside the band, and the shares at the two ends."""
    width = np.diff(record.edges)
    shares = [percent(share) for share in (record.density * width)[[0, -1]]]
    lowest, highest = percent(width[0]), percent(width[-1])
    return (
        f"{outside_band('bars', record.density, record)} {shares[0]} of the targets have a PIT below "
        f"{record.edges[1]:g} ({lowest} if calibrated), {shares[1]} have one above {record.edges[-2]:g} ({highest}). "
        f"The mean is {record.mean:.3f}, ½ if calibrated."
    )


def numbers(record: PitHistogram) -> Table:
    """Return one row per bar."""
    width = np.diff(record.edges)
    shares, low, high = (density * width for density in (record.density, record.low, record.high))
    rows = [
        [f"{start:.3g} – {end:.3g}", percent(shares[k]), f"{percent(low[k])} – {percent(high[k])}"]
        for k, (start, end) in enumerate(pairwise(record.edges))
    ]
    return ["PIT", "Targets", band_title(record.level)], rows
