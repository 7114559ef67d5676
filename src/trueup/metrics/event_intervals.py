"""Sampling variation of an event's metrics: many samples at once, with the scores gathered into cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from trueup._core.clusters import degrees_of_freedom, t_quantile
from trueup.metrics.events import EVENT_METRICS, Points, Recalibration, event_values, fit_isotonic
from trueup.metrics.resampling import BootstrapBins, Resampling, jackknife_error, normal_draws

NOISE_INCREASES = ("miscalibration", "discrimination", "ici", "e50", "e90")
"""Metrics that noise increases; see `invert_noise`."""
_MIN_DRAWS = 250
"""Smallest number of draws per candidate truth, unless fewer resamples are asked for."""
_TRUE_DEVIATIONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.3, 1.7, 2.5)
"""Candidate true deviations, as multiples of the observed one."""


class Samples(Points):
    """Many samples of the same points, rows (samples, 2, points); fits start from the fit to all rows."""

    def __init__(self, cells: Points, rows: np.ndarray) -> None:
        super().__init__(cells.score, cells.odds, rows, cells.squared)
        self.cells = cells

    @cached_property
    def recalibrated(self) -> np.ndarray:
        """Isotonic regression of each sample."""
        fitted = np.zeros_like(self.count)
        for fit, hits, count in zip(fitted, self.hits, self.count, strict=True):
            some = count > 0
            fit[some] = fit_isotonic(hits[some] / count[some], count[some])
        return fitted

    @cached_property
    def smoothed(self) -> np.ndarray:
        """Smooth curve of each sample."""
        return self.cells.loess.fit(self.hits, self.count)

    @cached_property
    def recalibration(self) -> Recalibration:
        """Intercept and slope of each sample, by Newton's method."""
        x, start = self.odds, self.cells.recalibration
        a: Any = np.full(len(self.rows), start.intercept)
        b: Any = np.full(len(self.rows), start.slope)
        for _ in range(8):
            p = expit(a[:, None] + b[:, None] * x)
            residual, curvature = self.count * p - self.hits, self.count * p * (1 - p)
            g, h = residual.sum(axis=1), residual @ x
            aa, ab, bb = curvature.sum(axis=1), curvature @ x, curvature @ x**2
            det = aa * bb - ab**2
            a, b = a - (bb * g - ab * h) / det, b - (aa * h - ab * g) / det
        return Recalibration(a, b, math.nan, math.nan)

    @cached_property
    def in_the_large(self) -> tuple[Any, Any]:
        """Calibration-in-the-large of each sample, by Newton's method."""
        a = np.full(len(self.rows), self.cells.in_the_large[0])
        for _ in range(8):
            p = expit(self.odds + a[:, None])
            a = a - (self.count * p - self.hits).sum(axis=1) / (self.count * p * (1 - p)).sum(axis=1)
        return a, math.nan

    def values(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Compute `EVENT_METRICS` of each sample, (samples,); NaN where an outcome is missing."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: EVENT_METRICS[name](self) for name in names}


def invert_noise(
    cells: Points, names: list[str], resampling: Resampling, draw: Callable[[np.ndarray, int], np.ndarray] | None = None
) -> dict[str, tuple[float, float]]:
    """Invert a simulation for intervals of metrics that noise increases.

    Isotonic regression follows noise, so even calibrated predictions show a miscalibration. The interval holds the true
    values under which the observed value is not extreme. The candidate truths deviate from calibration along the smooth
    curve, or for the discrimination from a constant along the isotonic regression, by different amounts. The smooth
    curve may fall, so reversed predictions have a true value too. Rows and outcomes are drawn from each truth, or by
    `draw(truth, draws)`, which returns rows (draws, 2, points).

    Parameters
    ----------
    cells
        The scores of the event, gathered into cells.
    names
        Names in `NOISE_INCREASES`.
    resampling
        Level, number of resamples and seed.
    draw
        Draws outcomes with correlated noise.

    Returns
    -------
    dict[str, tuple[float, float]]
        Low and high end by name.
    """
    generator, tail = resampling.generator(), resampling.tail
    draws = max(resampling.n_resamples // 4, min(resampling.n_resamples, _MIN_DRAWS))
    # A cell of weight W counts as W²/Σw² rows of equal weight.
    n_rows = np.maximum(np.rint(cells.count**2 / cells.squared.sum(axis=0)), 1.0)
    unit = cells.count / n_rows
    observed, result = event_values(cells, names), {}
    for base, curve, some in (
        (cells.score, cells.smoothed, [name for name in names if name != "discrimination"]),
        (cells.rate, cells.recalibrated, [name for name in names if name == "discrimination"]),
    ):
        if not some:
            continue
        ends: dict[str, list[np.ndarray]] = {name: [] for name in some}
        truths = np.clip(base + np.array(_TRUE_DEVIATIONS)[:, None] * (curve - base), 0.0, 1.0)
        for truth in truths:
            if draw is None:
                rows = unit * generator.poisson(n_rows * np.stack([1 - truth, truth]), size=(draws, 2, len(truth)))
            else:
                rows = draw(truth, draws)
            for name, values in Samples(cells, rows).values(some).items():
                ends[name].append(np.quantile(values, [tail, 1 - tail]))
        # The metrics of infinitely many rows with these true rates.
        population = cells.count * np.stack([1 - truths, truths], axis=1)
        for name, value in Samples(cells, population).values(some).items():
            low, high = np.maximum.accumulate(np.array(ends[name]), axis=0).T
            # The smallest truth that can give a value as high as observed, and the largest that can give one as low.
            lowest = value[0] if high[0] >= observed[name] else np.interp(observed[name], high, value)
            highest = value[0] if low[0] > observed[name] else np.interp(observed[name], low, value)
            result[name] = max(float(lowest), 0.0), max(float(highest), 0.0)
    return result


def smoothed_bins(cells: Points, samples: Samples) -> BootstrapBins:
    """Return the gaps of the smooth curve as bins: their expected error is the integrated calibration index."""
    gap = cells.count * (cells.smoothed - cells.score)
    return BootstrapBins(cells.count, gap, cells.count * (samples.smoothed - cells.score) - gap)


class ClusteredPoints(NamedTuple):
    """An event's scores gathered into cells, with the rows of each block of clusters."""

    cells: Points
    rows: np.ndarray
    """(blocks, 2, points): number of rows, or their weight, without and with the event."""

    @classmethod
    def of(
        cls, cells: Points, cell: np.ndarray, outcome: np.ndarray, block: np.ndarray, sample_weight: np.ndarray | None
    ) -> ClusteredPoints:
        """Count rows by block, outcome and cell."""
        size = len(cells.score)
        blocks = int(block.max()) + 1
        index = (block * 2 + outcome.astype(np.int64)) * size + cell
        rows = np.bincount(index, sample_weight, blocks * 2 * size).reshape(blocks, 2, size)
        return cls(cells, rows[rows.sum(axis=(1, 2)) > 0])

    @property
    def weight(self) -> np.ndarray:
        """Total weight of each block."""
        return self.rows.sum(axis=(1, 2))

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return degrees_of_freedom(self.weight)

    @property
    def without(self) -> Samples:
        """The points without each block in turn."""
        return Samples(self.cells, self.cells.rows - self.rows)

    def intervals(self, values: Mapping[str, float], resampling: Resampling) -> dict[str, tuple[float, float]]:
        """Compute intervals of an event's metrics."""
        noisy = [name for name in values if name in NOISE_INCREASES]
        names = [name for name in values if name != "kuiper"]
        result = dict.fromkeys(values, (math.nan, math.nan))
        if noisy:
            result |= invert_noise(self.cells, noisy, resampling, self._draw(resampling.seed))
        t = t_quantile(resampling.tail, self.df)
        for name, error in self.errors(names).items():
            low, high = values[name] - t * error, values[name] + t * error
            if name in noisy:  # the clusters' scores may vary too
                low, high = max(min(low, result[name][0]), 0.0), max(high, result[name][1])
            result[name] = low, high
        return result

    def errors(self, names: Iterable[str]) -> dict[str, float]:
        """Compute the jackknife standard errors of metrics, ignoring the bias from noise."""
        without = self.without.values(names)
        return {name: jackknife_error(x, without[name]) for name, x in event_values(self.cells, without).items()}

    def _draw(self, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
        """Return a function that draws rows and outcomes of the cells, given true rates, with the clusters' noise."""
        count, inflation = self.rows.sum(axis=1), math.sqrt(len(self.rows) / (len(self.rows) - 1))
        spread = inflation * (count - (self.weight / self.weight.sum())[:, None] * self.cells.count)
        residual = inflation * (self.rows[:, 1] - count * self.cells.recalibrated)

        def draw(truth: np.ndarray, draws: int) -> np.ndarray:
            factors = normal_draws(len(residual), self.df, draws, seed)
            drawn = np.maximum(self.cells.count + factors @ spread, 0.0)
            hits = np.clip(drawn * truth + factors @ residual, 0.0, drawn)
            return np.stack([drawn - hits, hits], axis=1)

        return draw
