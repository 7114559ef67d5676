"""Sampling noise of binned calibration errors, simulated on tallies.

A calibration error is an absolute value, so noise increases it. Its plug-in value is biased upwards, and bootstrap
replicates are biased twice. Percentile and pivotal intervals therefore often miss the truth of a well calibrated
network. Instead, the interval holds every true error under which the observed value is not extreme. The candidate
truths have the observed gaps of the bins, scaled to the candidate error; their noise is the bootstrap's.
`make bench-coverage` measures how often the intervals hold the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypedDict

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import check_share
from trueup._core.bins import BINNED_ERRORS, Bins, folded_mean
from trueup._core.clusters import degrees_of_freedom, jackknife, t_quantile
from trueup._core.errors import InputError
from trueup._core.tally import Grid, Tally

CELLS_PER_BIN = 8


@dataclass(frozen=True)
class Resampling:
    """Options of the simulation of intervals and tests."""

    level: float = 0.95
    """Level of the intervals."""
    n_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        tail_share(self.level)
        check_resamples(self.n_resamples)

    @property
    def tail(self) -> float:
        """The share of the distribution beyond each end of an interval."""
        return tail_share(self.level)

    def generator(self) -> np.random.Generator:
        """Return a new generator with the seed."""
        return np.random.default_rng(self.seed)


class ResamplingOptions(TypedDict, total=False):
    """The fields of `Resampling` as keyword arguments."""

    level: float
    n_resamples: int
    seed: int


class BootstrapBins(NamedTuple):
    """Bins with their observed gaps, and the sampling noise of these."""

    counts: np.ndarray
    gap: np.ndarray
    """Σ(a − c) in each bin, (B,)."""
    noise: np.ndarray
    """Noise that the bootstrap adds to the gaps, (R, B)."""
    blocks: tuple[np.ndarray, np.ndarray] | None = None
    """Counts and gaps by block of clusters, (blocks, B), if clusters cause the noise."""

    @classmethod
    def of_grid(cls, grid: Grid, adaptive: bool, resampling: Resampling) -> BootstrapBins:
        """Resample a tally's rows, binned to equal width or (adaptive) equal mass."""
        index, count, confidence, squared = gather_cells(grid, adaptive)
        some = count > 0
        gap = count * np.array([[0.0], [1.0]]) - confidence
        drawn = resample_cells(count[some], squared[some], resampling)
        bins = cls.of_cells(np.tile(index, (2, 1))[some], count[some], gap[some], drawn)
        # A bin with few rows may show less noise than calibration implies, for example none if all its rows are right.
        both = count.sum(axis=0)
        score = np.clip(confidence.sum(axis=0) / np.where(both > 0, both, 1.0), 0.0, 1.0)
        variance = (squared.sum(axis=0) * score * (1 - score)) @ membership(index)
        shown = np.maximum(bins.noise.var(axis=0), 1e-300)
        return bins._replace(noise=bins.noise * np.sqrt(np.maximum(variance[: len(shown)] / shown, 1.0)))

    @classmethod
    def of_cells(cls, index: np.ndarray, count: np.ndarray, gap: np.ndarray, drawn: np.ndarray) -> BootstrapBins:
        """Sum the observed and the resampled gaps of cells over their bins."""
        member = membership(index)
        return cls(count @ member, gap @ member, (drawn / count) @ (gap[:, None] * member) - gap @ member)

    @classmethod
    def of_blocks(cls, bins: Bins, count: np.ndarray, gap: np.ndarray, resampling: Resampling) -> BootstrapBins:
        """Return bins with the noise of clusters, given counts and gaps by block, (blocks, B)."""
        some = count.sum(axis=1) > 0
        count, gap = count[some], gap[some]
        return cls(bins.count, bins.hits - bins.confidence, gap_noise(gap, count.sum(axis=1), resampling), (count, gap))

    def errors(self, error: str, gap: np.ndarray) -> np.ndarray:
        """Compute the errors of gaps (…, B)."""
        return BINNED_ERRORS[error](self.counts, np.zeros(1), gap)

    def observed(self, error: str) -> float:
        """Return the plug-in value."""
        return float(self.errors(error, self.gap))

    def direction(self, error: str) -> np.ndarray:
        """Return gaps with error 1: the observed gaps, scaled, or equal gaps in every bin if those give none."""
        return self._directions(error, self.gap, self.counts, -self.counts)[0]

    def _directions(self, error: str, *gaps: np.ndarray) -> list[np.ndarray]:
        """Scale gaps to an error of 1; gaps without error are left out."""
        sizes = [(gap, float(self.errors(error, gap))) for gap in gaps]
        return [gap / size for gap, size in sizes if size > 0]

    def simulate(self, error: str, direction: np.ndarray, truth: float) -> np.ndarray:
        """Return the errors of samples if the true error is `truth`."""
        return self.errors(error, truth * direction + self.noise)

    def truth(
        self, error: str, quantile: float, *, find_last: bool = False, direction: np.ndarray | None = None
    ) -> float:
        """Find the first (or last) true error of which the observed one is this quantile; 0 if there is none."""
        along = self.direction(error) if direction is None else direction
        value = self.observed(error)
        return solve(lambda truth: _quantile(self.simulate(error, along, truth), quantile), value, find_last=find_last)

    def interval(self, error: str, tail: float, low_tail: float | None = None) -> tuple[float, float]:
        """Return the range of true errors under which the observed one is not extreme.

        The noise of clusters moves all bins together and may have changed the sign of the true gaps. So candidate
        truths also include gaps with one sign in all bins, and gaps along the main direction of the noise.
        """
        low_tail = tail if low_tail is None else low_tail
        directions = [self.direction(error)]
        if self.blocks is not None:
            main_direction = np.linalg.svd(self.noise, full_matrices=False)[2][0]
            directions = self._directions(error, self.gap, self.counts, -self.counts, main_direction, -main_direction)
        low = min(self.truth(error, 1 - low_tail, direction=each) for each in directions)
        return low, max(self.truth(error, tail, find_last=True, direction=each) for each in directions)

    def without_each(self, error: str) -> np.ndarray:
        """Return the plug-in values without each block of clusters, (blocks,)."""
        assert self.blocks is not None
        count, gap = self.counts - self.blocks[0], self.gap - self.blocks[1]
        return BINNED_ERRORS[error](np.maximum(count, 0.0), np.zeros(1), gap)


def paired_interval(before: BootstrapBins, after: BootstrapBins, error: str, tail: float) -> tuple[float, float]:
    """Return the interval of a true difference; both sides must have been drawn with the same rows."""
    starts = before.truth(error, 0.5), after.truth(error, 0.5)
    if starts[0] < starts[1]:  # start from the larger one, see `solve_difference`
        return _negative(paired_interval(after, before, error, tail))
    directions = before.direction(error), after.direction(error)

    def observed_difference(quantile: float, first: float, second: float) -> float:
        simulated_before = before.simulate(error, directions[0], first)
        return _quantile(after.simulate(error, directions[1], second) - simulated_before, quantile)

    observed = after.observed(error) - before.observed(error)
    low = solve_difference(partial(observed_difference, 1 - tail), observed, starts[0])
    high = solve_difference(partial(observed_difference, tail), observed, starts[0], find_last=True)
    if before.blocks is None or after.blocks is None:
        return low, high
    # If one method is overconfident and the other underconfident, noise that moves all bins moves their errors apart.
    # So the observed gaps minus the noise are also considered as true gaps.
    old_errors, new_errors = (side.errors(error, side.gap - side.noise) for side in (before, after))
    ends = _quantile(new_errors - old_errors, tail), _quantile(new_errors - old_errors, 1 - tail)
    jackknifed = jackknife_error(observed, after.without_each(error) - before.without_each(error))
    half_width = t_quantile(tail, degrees_of_freedom(before.blocks[0].sum(axis=1))) * jackknifed
    return min(low, observed - half_width, ends[0]), max(high, observed + half_width, ends[1])


def jackknife_error(whole: float, without: np.ndarray) -> float:
    """Return the jackknife standard error from the values without each cluster; NaN with fewer than two clusters."""
    return float(np.sqrt((jackknife(whole, without) ** 2).sum())) if len(without) > 1 else math.nan


def gap_noise(gap: np.ndarray, weight: np.ndarray, resampling: Resampling) -> np.ndarray:
    """Simulate the sampling noise of clusters in the sums of outcome − score, (n_resamples, bins)."""
    whole, total = gap.sum(axis=0), weight.sum()
    parts = total * jackknife(whole / total, (whole - gap) / (total - weight)[:, None])
    return normal_draws(len(weight), degrees_of_freedom(weight), resampling.n_resamples, resampling.seed) @ parts


def normal_draws(clusters: int, df: float, n_resamples: int, seed: int) -> np.ndarray:
    """Draw a factor per cluster and resample, (n_resamples, clusters), so that sums have Student's tails."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n_resamples, clusters)) * student_factors(df, n_resamples, rng)


def student_factors(df: float, n_resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw factors (n_resamples, 1) that turn normal numbers into Student's t."""
    return np.sqrt(df / rng.chisquare(df, size=(n_resamples, 1)))


class Classwise(NamedTuple):
    """The class-wise error's sums over cells (class, bin), their noise, and the influence of groups of rows."""

    gap: np.ndarray
    sigma: np.ndarray
    scale: float
    influence: np.ndarray
    limit: float
    """Upper bound of the standard error."""
    observed: float
    """The plug-in value."""
    df: float = math.inf
    """Degrees of freedom of the noise, finite if clusters cause it."""

    @classmethod
    def of(cls, tally: Tally) -> Classwise:
        """Treat each cell's hits as binomial; the spread between groups of rows shows how cells are correlated."""
        # Weighted rows count as (Σw)²/Σw² rows of weight 1.
        unit = tally.effective_rows / tally.accuracy.count if tally.accuracy.count else 1.0
        classes = tally.classes
        of_cell, confidence, hits = (unit * x for x in (classes.count, classes.confidence, classes.hits))
        count = np.where(of_cell > 0, of_cell, 1.0)
        # Each cell's rate is shrunk to its mean probability by one pseudo-row, so that no cell seems free of noise.
        rate = np.clip((hits + confidence / count) / (count + 1), 0.0, 1.0)
        gap = hits - confidence
        scale = tally.effective_rows * gap.shape[0]
        rows = tally.weight_of_group
        groups = int((rows > 0).sum())
        shares = unit * np.einsum("gkb,kb->g", tally.gap, np.sign(gap))
        influence = (shares - rows / rows.sum() * shares.sum()) * math.sqrt(groups / max(groups - 1, 1)) / scale
        # A row adds at most Σ_k |e_k − p_k| = 2(1 − p_y), whose square is at most four times its Brier score. Groups
        # may exceed this bound if rows of a stream repeat, since equal rows share a group.
        limit = 2 * math.sqrt(max(unit * tally.brier.total, 0.0)) / scale
        observed = float(np.abs(gap).sum() / scale)
        if tally.clusters is not None:  # each group holds whole clusters
            some = rows > 0
            deviation = unit * (tally.gap - (rows / rows.sum())[:, None, None] * tally.gap.sum(axis=0))
            sigma = np.sqrt((deviation[some] ** 2).sum(axis=0) * groups / max(groups - 1, 1))
            return cls(gap, sigma, scale, influence, math.inf, observed, degrees_of_freedom(rows[some]))
        some = of_cell > 0  # with many classes nearly all cells are empty
        gap, rate, of_cell = gap[some], rate[some], of_cell[some]
        # The noise is at least that of calibrated rows: among few rows all may be right by chance.
        score = np.clip(confidence[some] / of_cell, 0.0, 1.0)
        sigma = np.sqrt(of_cell * np.maximum(rate * (1 - rate), score * (1 - score)))
        return cls(gap, sigma, scale, influence, limit, observed)

    def expected(self, truth: float) -> float:
        """Return the mean observed error if the true error is `truth` and the gaps have the observed proportions."""
        return float(folded_mean(truth / (self.observed or 1.0) * self.gap, self.sigma).sum() / self.scale)

    def interval(self, tail: float) -> tuple[float, float]:
        """Return the range of true errors under which the observed one is not extreme."""
        half_width = _half_width(self.influence, self.limit, tail, self.df)
        return solve(self.expected, self.observed - half_width), solve(
            self.expected, self.observed + half_width, find_last=True
        )


def paired_classwise(before: Classwise, after: Classwise, tail: float) -> tuple[float, float]:
    """Return the interval of a true difference of class-wise errors; both must have the same groups of rows."""
    start, other = (solve(side.expected, side.observed) for side in (before, after))
    if start < other:
        return _negative(paired_classwise(after, before, tail))
    observed = after.observed - before.observed
    half_width = _half_width(after.influence - before.influence, before.limit + after.limit, tail, before.df)

    def observed_difference(first: float, second: float) -> float:
        return after.expected(second) - before.expected(first)

    low = solve_difference(observed_difference, observed - half_width, start)
    return low, solve_difference(observed_difference, observed + half_width, start, find_last=True)


def solve(
    increasing: Callable[[float], float], target: float, *, low: float = 0.0, high: float = 1.0, find_last: bool = False
) -> float:
    """Find the first (or last) point at which an increasing function reaches the target; beyond the range, its end."""

    def beyond(x: float) -> bool:
        return increasing(x) > target if find_last else increasing(x) >= target

    if beyond(low):
        return low
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return low if find_last else high


def solve_difference(
    increasing: Callable[[float, float], float], target: float, start: float, *, find_last: bool = False
) -> float:
    """Find the true difference under which the observed difference reaches the target.

    The first true error stays at `start`, its best estimate, while the second moves. Once the second would be negative,
    it stays at 0 and the first moves on.
    """

    def at(difference: float) -> float:
        second = start + difference
        return increasing(start, second) if second >= 0 else increasing(-difference, 0.0)

    return solve(at, target, low=-1.0, high=1.0, find_last=find_last)


def _negative(interval: tuple[float, float]) -> tuple[float, float]:
    return -interval[1], -interval[0]


def _quantile(values: np.ndarray, quantile: float) -> float:
    """Return `np.quantile` to the bit, without its overhead: a search needs hundreds of quantiles."""
    position = quantile * (len(values) - 1)
    low = int(position)
    high, part = min(low + 1, len(values) - 1), position - low
    ordered = np.partition(values, (low, high))
    below, above = float(ordered[low]), float(ordered[high])
    return below + (above - below) * part if part < 0.5 else above - (above - below) * (1 - part)


def _half_width(influence: np.ndarray, limit: float, tail: float, df: float) -> float:
    z = float(-ndtri(tail)) if math.isinf(df) else t_quantile(tail, df)
    return z * min(math.sqrt(float((influence**2).sum())), limit)


def coarse_cells(grid: Grid, adaptive: bool) -> np.ndarray:
    """Return the coarser cell, one of eight per bin, of each cell of the grid."""
    index = grid.equal_mass_of_cell() if adaptive else grid.bin_of_cell()
    rank = np.arange(len(index)) - np.searchsorted(index, index)
    return index * CELLS_PER_BIN + rank * CELLS_PER_BIN // np.bincount(index)[index]


def gather_cells(grid: Grid, adaptive: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Merge the grid into at most eight cells per bin: the bin of each, and count, confidence and Σw² by outcome."""
    part = coarse_cells(grid, adaptive)
    size = (int(part.max()) // CELLS_PER_BIN + 1) * CELLS_PER_BIN
    count, confidence, squared = (
        np.array([np.bincount(part, weights=w, minlength=size) for w in sums])
        for sums in (grid.count, grid.confidence, grid.squared_weights)
    )
    return np.arange(size) // CELLS_PER_BIN, count, confidence, squared


def membership(index: np.ndarray) -> np.ndarray:
    """Return a matrix (cells, bins) with 1 where a cell lies in a bin."""
    return (index[:, None] == np.arange(int(index.max()) + 1)).astype(np.float64)


def resample_cells(count: np.ndarray, squared: np.ndarray, resampling: Resampling) -> np.ndarray:
    """Resample all rows with replacement: the number (or weight) of rows in each cell, (n_resamples, cells)."""
    rows = count**2 / squared
    n = rows.sum()
    drawn = resampling.generator().multinomial(max(round(n), 1), rows / n, size=resampling.n_resamples)
    return drawn if np.array_equal(squared, count) else drawn * (squared / count)


def sum_columns(values: np.ndarray, target: np.ndarray, size: int) -> np.ndarray:
    """Sum columns by their target, (rows, size)."""
    order = np.argsort(target, kind="stable")
    present, first = np.unique(target[order], return_index=True)
    sums = np.zeros((len(values), size))
    sums[:, present] = np.add.reduceat(values[:, order], first, axis=1)
    return sums


def tail_share(level: float) -> float:
    """Return the share of the distribution beyond each end of an interval of this level."""
    return (1 - check_share(level, "level")) / 2


def check_resamples(n_resamples: int) -> None:
    """Reject values that are not a number of resamples."""
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, (int, np.integer)) or n_resamples < 1:
        raise InputError("n_resamples", "be a whole number of at least 1", repr(n_resamples))
