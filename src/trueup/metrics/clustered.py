"""Noise where rows of one cluster are correlated: estimates that leave out each cluster in turn tell how they vary.

A mean, a slope or an area under a curve has Student's interval by the jackknife over clusters. Calibration errors,
which noise makes larger, keep their inversion (`resampling`): only the noise in the bins is that of the clusters,
normal with the jackknife's covariance, and its scale as uncertain as so few clusters make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from trueup.core.clusters import degrees_of_freedom, jackknife, t_quantile
from trueup.core.tally import ClusterSums
from trueup.metrics.event_intervals import NOISE_ADDS, invert_noise, values_of_resamples
from trueup.metrics.events import Points, event_values


def gap_noise(sums: ClusterSums | np.ndarray, weight: np.ndarray, n_resamples: int, seed: int) -> np.ndarray:
    """What sampling clusters adds to the sums of outcome − score in the bins, (n_resamples, bins)."""
    gap = sums.gap if isinstance(sums, ClusterSums) else sums
    whole, total = gap.sum(axis=0), weight.sum()
    parts = total * jackknife(whole / total, (whole - gap) / (total - weight)[:, None])
    return normal_draws(len(weight), degrees_of_freedom(weight), n_resamples, seed) @ parts


def normal_draws(clusters: int, df: float, n_resamples: int, seed: int) -> np.ndarray:
    """A factor for each cluster in each resample, (n_resamples, clusters): together they have Student's tails."""
    rng = np.random.default_rng(seed)
    draws: np.ndarray = rng.standard_normal((n_resamples, clusters))
    return draws * np.sqrt(df / rng.chisquare(df, size=(n_resamples, 1)))


def sign_flips(clusters: int, n_resamples: int, seed: int) -> np.ndarray:
    """A sign for each cluster in each resample: under calibration what a cluster shows is as likely turned over."""
    signs: np.ndarray = np.random.default_rng(seed).integers(0, 2, (n_resamples, clusters)) * 2.0 - 1.0
    return signs


class ClusteredPoints(NamedTuple):
    """An event's scores gathered into cells, with the rows of each block of clusters."""

    cells: Points
    rows: np.ndarray
    """(blocks, 2, points): how many rows, or their weight, without and with the event."""

    @classmethod
    def of(
        cls, cells: Points, place: np.ndarray, outcome: np.ndarray, block: np.ndarray, weights: np.ndarray
    ) -> ClusteredPoints:
        """Count rows by block, outcome and cell."""
        size = len(cells.score)
        blocks = int(block.max()) + 1
        index = (block * 2 + outcome.astype(np.int64)) * size + place
        rows = np.bincount(index, weights, blocks * 2 * size).reshape(blocks, 2, size)
        return cls(cells, rows[rows.sum(axis=(1, 2)) > 0])

    @property
    def weight(self) -> np.ndarray:
        """Of each block."""
        weight: np.ndarray = self.rows.sum(axis=(1, 2))
        return weight

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return degrees_of_freedom(self.weight)

    def without(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Metrics that leave out each block in turn, (blocks,)."""
        return values_of_resamples(self.cells, self.cells.rows - self.rows, list(names))

    def intervals(
        self, values: Mapping[str, float], tail: float, n_resamples: int, seed: int
    ) -> dict[str, tuple[float, float]]:
        """Intervals of an event's metrics."""
        noisy = [name for name in values if name in NOISE_ADDS]
        names = [name for name in values if name != "kuiper"]
        found = dict.fromkeys(values, (math.nan, math.nan))
        if noisy:
            found |= invert_noise(self.cells, noisy, tail, n_resamples, seed, self._draw(seed))
        here = event_values(self.cells, names)
        reach = t_quantile(tail, self.df)
        without = self.without(names)
        for name in names:
            error = _error(here[name], without[name])
            low, high = values[name] - reach * error, values[name] + reach * error
            if name in noisy:  # noise may also have come from which scores the clusters have
                low, high = max(min(low, found[name][0]), 0.0), max(high, found[name][1])
            found[name] = low, high
        return found

    def error(self, name: str) -> float:
        """The standard error of a smooth metric."""
        return _error(event_values(self.cells, [name])[name], self.without([name])[name])

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


def _error(whole: float, without: np.ndarray) -> float:
    return float(np.sqrt((jackknife(whole, without) ** 2).sum())) if len(without) > 1 else math.nan
