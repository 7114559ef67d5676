"""How an event's metrics vary from sample to sample: many samples at once, on points gathered into cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from trueup._core.clusters import degrees_of_freedom, jackknife, t_quantile
from trueup.metrics.events import EVENT_METRICS, Points, event_values, fit_in_the_large, fit_isotonic, fit_recalibration
from trueup.metrics.resampling import Resampling, normal_draws

NOISE_ADDS = ("miscalibration", "discrimination", "ici", "e50", "e90")
"""What noise makes larger: the interval holds the true values under which the one seen is no outlier."""
_TRUTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7)
"""True deviations that are considered, in units of the one observed."""


def values_of_resamples(cells: Points, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """`EVENT_METRICS` of many samples, rows (samples, 2, points) at the same points; NaN where one lacks an outcome."""
    no, yes = rows[:, 0], rows[:, 1]
    total, hits = rows.sum(axis=(1, 2)), yes.sum(axis=1)
    found: dict[str, np.ndarray] = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in names:
            if name in found:
                continue
            if name == "event_brier":
                found[name] = (no @ cells.score**2 + yes @ (1 - cells.score) ** 2) / total
            elif name == "uncertainty":
                found[name] = hits / total * (1 - hits / total)
            elif name == "observed_expected":
                found[name] = hits / ((no + yes) @ cells.score)
            elif name == "auroc":
                wins = (yes * (np.cumsum(no, axis=1) - no / 2)).sum(axis=1)
                found[name] = wins / (hits * (total - hits))
            elif name in ("calibration_slope", "calibration_intercept"):
                found["calibration_intercept"], found["calibration_slope"] = _regressions(cells, no + yes, yes)
            elif name == "calibration_in_the_large":
                found[name] = _shifts(cells, no + yes, yes)
    others = [name for name in names if name not in found]
    return found | (_after_isotonic(cells, rows, others) if others else {})


def _after_isotonic(cells: Points, rows: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """What needs the isotonic regression of each sample."""
    yes, count = rows[:, 1], rows.sum(axis=1)
    total = count.sum(axis=1)
    fitted = np.zeros_like(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = yes / count
    for number, (rate, weight) in enumerate(zip(rates, count, strict=True)):
        some = weight > 0
        fitted[number, some] = fit_isotonic(rate[some], weight[some])
    off, found = np.abs(cells.score - fitted), {}
    base = (yes.sum(axis=1) / total)[:, None]
    for name in names:
        if name == "miscalibration":  # Σ(p − y)² − Σ(p̂ − y)², p̂ being the mean of y wherever it is constant
            found[name] = ((count * (cells.score**2 - fitted**2)) - 2 * yes * (cells.score - fitted)).sum(
                axis=1
            ) / total
        elif name == "discrimination":
            found[name] = (count * (fitted - base) ** 2).sum(axis=1) / total
        elif name == "ici":
            found[name] = (count * off).sum(axis=1) / total
        elif name in ("e50", "e90"):
            order = np.argsort(off, axis=1)
            below = np.cumsum(np.take_along_axis(count, order, axis=1), axis=1)
            at = (below < int(name[1:]) / 100 * total[:, None] * (1 - 1e-12)).sum(axis=1)
            found[name] = np.take_along_axis(off, order, axis=1)[np.arange(len(at)), at]
        else:
            raise ValueError(f"{name} has no interval by resampling")
    return found


def _regressions(cells: Points, count: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intercept and slope of each sample, by Newton's steps from those of all rows, which lie near."""
    start = fit_recalibration(cells)
    x = cells.odds
    a, b = np.full(len(count), start.intercept), np.full(len(count), start.slope)
    for _ in range(8):
        p = expit(a[:, None] + b[:, None] * x)
        residual, bend = count * p - hits, count * p * (1 - p)
        g, h = residual.sum(axis=1), residual @ x
        aa, ab, bb = bend.sum(axis=1), bend @ x, bend @ x**2
        det = aa * bb - ab**2
        a, b = a - (bb * g - ab * h) / det, b - (aa * h - ab * g) / det
    return a, b


def _shifts(cells: Points, count: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Calibration-in-the-large of each sample."""
    a = np.full(len(count), fit_in_the_large(cells)[0])
    for _ in range(8):
        p = expit(cells.odds + a[:, None])
        a = a - (count * p - hits).sum(axis=1) / (count * p * (1 - p)).sum(axis=1)
    return a


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
    seen, found = event_values(cells, names), {}
    rate = float(cells.hits.sum() / cells.total)
    for base, some in (
        (cells.score, [name for name in names if name != "discrimination"]),
        (np.full(len(cells.score), rate), [name for name in names if name == "discrimination"]),
    ):
        if not some:
            continue
        truths = [np.clip(base + t * (cells.recalibrated - base), 0.0, 1.0) for t in _TRUTHS]
        ends: dict[str, list[np.ndarray]] = {name: [] for name in some}
        for truth in truths:
            if draw is None:
                hits = generator.binomial(whole.astype(np.int64), truth, size=(draws, len(truth)))
                rows = np.stack([unit * (whole - hits), unit * hits], axis=1)
            else:
                rows = draw(truth, draws)
            for name, values in values_of_resamples(cells, rows, some).items():
                ends[name].append(np.quantile(values, [tail, 1 - tail]))
        for name in some:
            value = np.array([_true_value(name, cells, truth) for truth in truths])
            low, high = np.maximum.accumulate(np.array(ends[name]), axis=0).T
            found[name] = (_first_at_least(high, value, seen[name]), max(_last_at_most(low, value, seen[name]), 0.0))
    return found


def _true_value(name: str, cells: Points, truth: np.ndarray) -> float:
    """The metric of endless rows that happen with these probabilities."""
    endless = np.stack([cells.count * (1 - truth), cells.count * truth])
    return EVENT_METRICS[name](Points(cells.score, cells.odds, endless, endless))


def _first_at_least(rising: np.ndarray, value: np.ndarray, target: float) -> float:
    """The least true value under which what is seen can reach the target."""
    at = int(np.argmax(rising >= target)) if (rising >= target).any() else len(rising)
    return float(value[0] if at == 0 else np.interp(target, rising, value))


def _last_at_most(rising: np.ndarray, value: np.ndarray, target: float) -> float:
    """The greatest true value under which what is seen can stay as low as the target."""
    return float(value[0] if rising[0] > target else np.interp(target, rising, value))


class ClusteredPoints(NamedTuple):
    """An event's scores gathered into cells, with the rows of each block of clusters."""

    cells: Points
    rows: np.ndarray
    """(blocks, 2, points): how many rows, or their weight, without and with the event."""

    @classmethod
    def of(
        cls, cells: Points, place: np.ndarray, outcome: np.ndarray, block: np.ndarray, sample_weight: np.ndarray
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
        weight: np.ndarray = self.rows.sum(axis=(1, 2))
        return weight

    @property
    def df(self) -> float:
        """Degrees of freedom."""
        return degrees_of_freedom(self.weight)

    def without(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Metrics that leave out each block in turn, (blocks,)."""
        return values_of_resamples(self.cells, self.cells.rows - self.rows, list(names))

    def intervals(self, values: Mapping[str, float], resampling: Resampling) -> dict[str, tuple[float, float]]:
        """Intervals of an event's metrics."""
        noisy = [name for name in values if name in NOISE_ADDS]
        names = [name for name in values if name != "kuiper"]
        found = dict.fromkeys(values, (math.nan, math.nan))
        if noisy:
            found |= invert_noise(self.cells, noisy, resampling, self._draw(resampling.seed))
        here = event_values(self.cells, names)
        reach = t_quantile(resampling.tail, self.df)
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
