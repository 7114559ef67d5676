"""How an event's metrics vary from sample to sample: many samples at once, on points gathered into cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from trueup._core.clusters import degrees_of_freedom, t_quantile
from trueup.metrics.events import EVENT_METRICS, Points, Recalibration, event_values, fit_isotonic
from trueup.metrics.resampling import Resampling, jackknife_error, normal_draws

NOISE_ADDS = ("miscalibration", "discrimination", "ici", "e50", "e90")
"""What noise makes larger: the interval holds the true values under which the one seen is no outlier."""
_TRUTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7)
"""True deviations that are considered, in units of the one observed."""


class Samples(Points):
    """Many samples of the same points, rows (samples, 2, points): fits start from that of all rows, which lies near."""

    def __init__(self, cells: Points, rows: np.ndarray) -> None:
        super().__init__(cells.score, cells.odds, rows, cells.squared)
        self.cells = cells

    @cached_property
    def recalibrated(self) -> np.ndarray:
        """The isotonic regression of each sample."""
        fitted = np.zeros_like(self.count)
        for fit, hits, count in zip(fitted, self.hits, self.count, strict=True):
            some = count > 0
            fit[some] = fit_isotonic(hits[some] / count[some], count[some])
        return fitted

    @cached_property
    def recalibration(self) -> Recalibration:
        """Intercept and slope of each sample, by Newton's steps."""
        x, start = self.odds, self.cells.recalibration
        a: Any = np.full(len(self.rows), start.intercept)
        b: Any = np.full(len(self.rows), start.slope)
        for _ in range(8):
            p = expit(a[:, None] + b[:, None] * x)
            residual, bend = self.count * p - self.hits, self.count * p * (1 - p)
            g, h = residual.sum(axis=1), residual @ x
            aa, ab, bb = bend.sum(axis=1), bend @ x, bend @ x**2
            det = aa * bb - ab**2
            a, b = a - (bb * g - ab * h) / det, b - (aa * h - ab * g) / det
        return Recalibration(a, b, math.nan, math.nan)

    @cached_property
    def in_the_large(self) -> tuple[Any, Any]:
        """Calibration-in-the-large of each sample, by Newton's steps."""
        a = np.full(len(self.rows), self.cells.in_the_large[0])
        for _ in range(8):
            p = expit(self.odds + a[:, None])
            a = a - (self.count * p - self.hits).sum(axis=1) / (self.count * p * (1 - p)).sum(axis=1)
        return a, math.nan

    def values(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """`EVENT_METRICS` of each sample, (samples,); NaN where one lacks an outcome."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: EVENT_METRICS[name](self) for name in names}


def invert_noise(
    cells: Points, names: list[str], resampling: Resampling, draw: Callable[[np.ndarray, int], np.ndarray] | None = None
) -> dict[str, tuple[float, float]]:
    """Intervals of what noise makes larger: the true values under which the one seen is no outlier.

    Isotonic regression follows noise, so that even calibrated predictions show a miscalibration. The truths considered
    deviate from calibration (for the discrimination, from a constant) as observed, more or less; what happens is drawn
    from each of them again and again: row by row, unless `draw(truth, draws)` gives rows (draws, 2, points).
    """
    generator, tail = resampling.generator(), resampling.tail
    draws = max(resampling.n_resamples // 4, 1)
    # A cell of weight W counts as W²/Σw² rows of equal weight.
    whole = np.maximum(np.rint(cells.count**2 / cells.squared.sum(axis=0)), 1.0)
    unit = cells.count / whole
    seen, result = event_values(cells, names), {}
    for base, some in (
        (cells.score, [name for name in names if name != "discrimination"]),
        (cells.rate, [name for name in names if name == "discrimination"]),
    ):
        if not some:
            continue
        ends: dict[str, list[np.ndarray]] = {name: [] for name in some}
        truths = np.clip(base + np.array(_TRUTHS)[:, None] * (cells.recalibrated - base), 0.0, 1.0)
        for truth in truths:
            if draw is None:
                hits = generator.binomial(whole.astype(np.int64), truth, size=(draws, len(truth)))
                rows = np.stack([unit * (whole - hits), unit * hits], axis=1)
            else:
                rows = draw(truth, draws)
            for name, values in Samples(cells, rows).values(some).items():
                ends[name].append(np.quantile(values, [tail, 1 - tail]))
        # What endless rows that happen with these probabilities would show.
        endless = cells.count * np.stack([1 - truths, truths], axis=1)
        for name, value in Samples(cells, endless).values(some).items():
            low, high = np.maximum.accumulate(np.array(ends[name]), axis=0).T
            # The least true value under which what is seen can reach as high, and the greatest under which as low.
            least = value[0] if high[0] >= seen[name] else np.interp(seen[name], high, value)
            most = value[0] if low[0] > seen[name] else np.interp(seen[name], low, value)
            result[name] = float(least), max(float(most), 0.0)
    return result


class ClusteredPoints(NamedTuple):
    """An event's scores gathered into cells, with the rows of each block of clusters."""

    cells: Points
    rows: np.ndarray
    """(blocks, 2, points): how many rows, or their weight, without and with the event."""

    @classmethod
    def of(
        cls, cells: Points, place: np.ndarray, outcome: np.ndarray, block: np.ndarray, sample_weight: np.ndarray | None
    ) -> ClusteredPoints:
        """Count rows by block, outcome and cell."""
        size = len(cells.score)
        blocks = int(block.max()) + 1
        index = (block * 2 + outcome.astype(np.int64)) * size + place
        rows = np.bincount(index, sample_weight, blocks * 2 * size).reshape(blocks, 2, size)
        return cls(cells, rows[rows.sum(axis=(1, 2)) > 0])

    @property
    def weight(self) -> np.ndarray:
        """Of each block."""
        return self.rows.sum(axis=(1, 2))

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return degrees_of_freedom(self.weight)

    @property
    def without(self) -> Samples:
        """The points that leave out each block in turn."""
        return Samples(self.cells, self.cells.rows - self.rows)

    def intervals(self, values: Mapping[str, float], resampling: Resampling) -> dict[str, tuple[float, float]]:
        """Intervals of an event's metrics."""
        noisy = [name for name in values if name in NOISE_ADDS]
        names = [name for name in values if name != "kuiper"]
        result = dict.fromkeys(values, (math.nan, math.nan))
        if noisy:
            result |= invert_noise(self.cells, noisy, resampling, self._draw(resampling.seed))
        reach = t_quantile(resampling.tail, self.df)
        for name, error in self.errors(names).items():
            low, high = values[name] - reach * error, values[name] + reach * error
            if name in noisy:  # noise may also have come from which scores the clusters have
                low, high = max(min(low, result[name][0]), 0.0), max(high, result[name][1])
            result[name] = low, high
        return result

    def errors(self, names: Iterable[str]) -> dict[str, float]:
        """The standard errors of metrics, as if noise added nothing to them."""
        without = self.without.values(names)
        return {name: jackknife_error(x, without[name]) for name, x in event_values(self.cells, without).items()}

    def _draw(self, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
        """Draws the rows of the cells and what happens in them, given their true rates, with the clusters' noise."""
        count, factor = self.rows.sum(axis=1), math.sqrt(len(self.rows) / (len(self.rows) - 1))
        spread = factor * (count - (self.weight / self.weight.sum())[:, None] * self.cells.count)
        residual = factor * (self.rows[:, 1] - count * self.cells.recalibrated)

        def draw(truth: np.ndarray, draws: int) -> np.ndarray:
            each = normal_draws(len(residual), self.df, draws, seed)
            drawn = np.maximum(self.cells.count + each @ spread, 0.0)
            hits = np.clip(drawn * truth + each @ residual, 0.0, drawn)
            return np.stack([drawn - hits, hits], axis=1)

        return draw
