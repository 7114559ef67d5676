"""Checks and row scores of forecasts of a number.

A forecast is a Gaussian N(μ, σ²), passed as `mean, std, targets`, or a list of quantiles, passed as `quantiles, levels,
targets`. Every number is a mean over the rows, the root of a mean, or an error of shares. The noise of the errors is
simulated from sums over at most a thousand groups of rows, so a million rows need one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from trueup._core.arrays import as_matrix, as_vector, as_weights
from trueup._core.clusters import Clusters
from trueup._core.errors import InputError
from trueup._core.tally import Mean
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.intervals import count_rows, mean_interval
from trueup.metrics.resampling import BootstrapBins, Resampling, paired_interval

COVERAGE = (0.5, 0.8, 0.95)
"""Default levels of the central intervals in the table."""
LEVELS = np.linspace(0.01, 0.99, 99)
"""Levels over which the pinball loss of a Gaussian forecast is averaged."""
_GRID = np.linspace(0.0, 1.0, 100)
"""Levels over which calibration errors of Gaussian forecasts are averaged, as in `mean_calibration_error`."""
_MAX_GROUPS = 1000
_ROOTS = ("rmse", "sharpness")
"""Metrics that are roots of means."""
SHARE_ERRORS = ("interval_error", "pit_error")
"""Metrics that are mean absolute errors of shares."""
_MAX_Z = 1e8
"""Beyond this many standard deviations a forecast counts as a point, since the formulas lose their digits."""


def pit(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> np.ndarray:
    """Compute the probability integral transform F(y) of each row, uniform on [0, 1] if the forecasts are calibrated.

    For quantiles it is the middle of the two levels between which the target lies.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,), or quantiles, shape (n, m).
    std
        Standard deviations, shape (n,), or the m levels of the quantiles.
    targets
        Values that came true, shape (n,).

    Returns
    -------
    np.ndarray
        One number per row, shape (n,).

    Examples
    --------
    >>> pit([0.0, 0.0], [1.0, 1.0], [0.0, 2.0]).round(4)
    array([0.5   , 0.9772])

    References
    ----------
    Dawid (1984), Statistical theory: the prequential approach.
    Gneiting, Balabdaoui & Raftery (2007), Probabilistic forecasts, calibration and sharpness.
    """
    forecast = check_forecast(mean, std, targets)
    if isinstance(forecast, QuantileForecast):
        cells = np.concatenate([[0.0], forecast.levels, [1.0]])
        return ((cells[1:] + cells[:-1]) / 2)[(forecast.targets[:, None] > forecast.quantiles).sum(axis=1)]
    return ndtr(_standardise(forecast.targets - forecast.mean, forecast.std))


def _standardise(error: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the error in standard deviations; a forecast without uncertainty is right or infinitely far off."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(error == 0, 0.0, error / std)


def central_coverage(
    mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, sample_weight: WeightsLike = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the share of targets inside central intervals, over a range of levels.

    For quantiles the levels are those whose two ends are both given.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,), or quantiles, shape (n, m).
    std
        Standard deviations, shape (n,), or the m levels of the quantiles.
    targets
        Values that came true, shape (n,).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    tuple[np.ndarray, np.ndarray]
        The levels, and the share of targets inside the interval of each.

    Examples
    --------
    >>> levels, share = central_coverage(np.zeros(2), np.ones(2), [0.5, 3.0])
    >>> levels[[0, 9, 18]], share[[0, 9, 18]]
    (array([0.05, 0.5 , 0.95]), array([0. , 0.5, 0.5]))
    """
    forecast = check_forecast(mean, std, targets)
    w, y = as_weights(sample_weight, len(forecast.targets)), forecast.targets
    if isinstance(forecast, GaussianForecast):
        levels = np.arange(1, 20) / 20
        error = np.abs(y - forecast.mean)
        inside = [error <= float(ndtri((1 + level) / 2)) * forecast.std for level in levels]
    else:
        pairs, q = _central_pairs(forecast.levels), forecast.quantiles
        levels = np.array(list(pairs))
        inside = [(q[:, low] <= y) & (y <= q[:, high]) for low, high in pairs.values()]
    return levels, np.array([float(np.average(each, weights=w)) for each in inside])


@dataclass(frozen=True, eq=False)
class GaussianForecast:
    """Checked means, standard deviations and targets."""

    mean: np.ndarray
    std: np.ndarray
    targets: np.ndarray
    levels: ClassVar[None] = None

    def take(self, rows: np.ndarray) -> GaussianForecast:
        """Return some of the rows."""
        return GaussianForecast(self.mean[rows], self.std[rows], self.targets[rows])

    def to_quantiles(self, levels: np.ndarray) -> QuantileForecast:
        """Return its quantiles at these levels."""
        return QuantileForecast(self.mean[:, None] + self.std[:, None] * ndtri(levels), levels, self.targets)


@dataclass(frozen=True, eq=False)
class QuantileForecast:
    """Checked quantiles (n, m) with their levels in increasing order, and targets."""

    quantiles: np.ndarray
    levels: np.ndarray
    targets: np.ndarray

    def take(self, rows: np.ndarray) -> QuantileForecast:
        """Return some of the rows."""
        return QuantileForecast(self.quantiles[rows], self.levels, self.targets[rows])

    def to_quantiles(self, levels: np.ndarray) -> QuantileForecast:
        """Return the forecast itself, which has these levels."""
        return self


Forecast = GaussianForecast | QuantileForecast


def check_forecast(mean: Any, std: Any, targets: Any) -> Forecast:
    """Check a forecast: vectors (mean, std, targets), or a matrix of quantiles with its levels and targets."""
    if np.ndim(mean) == 2 and np.ndim(std) == 1:
        return _check_quantiles(mean, std, targets)
    m = as_vector(mean, "mean")
    if not len(m):
        raise InputError("mean", "have at least one row", "none")
    s = as_vector(std, "std", length=len(m))
    if s.min() < 0:
        at = int(s.argmin())
        raise InputError("std", "not be negative", f"{s[at]:g} in row {at}")
    return GaussianForecast(m, s, as_vector(targets, "targets", length=len(m)))


def _check_quantiles(quantiles: Any, levels: Any, targets: Any) -> QuantileForecast:
    tau = as_vector(levels, "levels")
    y = as_vector(targets, "targets")
    q = as_matrix(quantiles, "quantiles", rows=len(y)).astype(np.float64, copy=False)
    if not len(y):
        raise InputError("targets", "have at least one row", "none")
    if q.shape[1] != len(tau):
        raise InputError("levels", f"be {q.shape[1]}, one for each column of quantiles", str(len(tau)))
    if not len(tau) or tau.min() <= 0 or tau.max() >= 1:
        got = f"{tau.min():g}..{tau.max():g}" if len(tau) else "none"
        raise InputError("levels", "lie between 0 and 1", got, "divide per cent by 100" if got != "none" else None)
    order = np.argsort(tau)
    tau = tau[order]
    if (np.diff(tau) <= 0).any():
        raise InputError("levels", "be distinct", f"{tau[int(np.argmin(np.diff(tau)))]:g} twice")
    return QuantileForecast(q[:, order], tau, y)


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Rows grouped by cluster, or at random into at most a thousand groups; their sums show the sampling noise."""

    index: np.ndarray
    count: int
    sample_weight: np.ndarray | None
    rows: np.ndarray
    """The weight of each group."""
    clustered: bool = False

    @classmethod
    def of(cls, n: int, sample_weight: np.ndarray | None, seed: int, clusters: Clusters | None = None) -> RowGroups:
        """Return the groups of n rows."""
        if clusters is not None:
            index = clusters.block
        else:
            index = np.arange(n) if n <= _MAX_GROUPS else np.random.default_rng(seed).permutation(n) % _MAX_GROUPS
        count = int(index.max()) + 1
        rows = np.bincount(index, sample_weight, minlength=count).astype(np.float64)
        return cls(index, count, sample_weight, rows, clusters is not None)

    def of_block(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return Σ w·value and Σ w of each cluster; None where rows are independent."""
        return (self.sums(values), self.rows) if self.clustered else None

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return Σ w·value of each group."""
        weighted = values if self.sample_weight is None else self.sample_weight * values
        return np.bincount(self.index, weighted, minlength=self.count)

    def cell_sums(self, cell: np.ndarray, cells: int) -> np.ndarray:
        """Return Σ w of each group in each cell, (groups, cells)."""
        flat = np.bincount(self.index * cells + cell, self.sample_weight, minlength=self.count * cells)
        return flat.reshape(self.count, cells).astype(np.float64)


class _Shares(NamedTuple):
    """The share of targets below the quantile (or inside the interval) of each level, and its sampling noise."""

    levels: np.ndarray
    share: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, levels: np.ndarray, sums: np.ndarray, groups: RowGroups, resampling: Resampling) -> _Shares:
        """Compute the shares from the sums of each group, (groups, levels)."""
        total = groups.rows.sum()
        share = sums.sum(axis=0) / total
        deviations = (sums - groups.rows[:, None] * share) / total * math.sqrt(groups.count / max(groups.count - 1, 1))
        drawn = resampling.generator().standard_normal((resampling.n_resamples, groups.count))
        return cls(levels, share, drawn @ deviations)

    @property
    def bins(self) -> BootstrapBins:
        """One bin per level, whose expected error is the mean of |share − level|."""
        return BootstrapBins(np.ones(len(self.levels)), self.share - self.levels, self.noise)


@dataclass(frozen=True, eq=False)
class ScoredForecast:
    """A forecast after one pass over its rows: the contribution of each row to each metric."""

    metrics: tuple[str, ...]
    means: Mapping[str, np.ndarray]
    """By metric: the rows' terms of a mean, or of a mean whose root is taken (`_ROOTS`)."""
    shares: Mapping[str, _Shares]
    """By metric in `SHARE_ERRORS`: the shares."""
    pit: np.ndarray
    cells: np.ndarray
    """Levels between which the PIT is known, with 0 and 1."""
    groups: RowGroups
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls, forecast: Forecast, coverage: Sequence[float] | None, groups: RowGroups, resampling: Resampling
    ) -> ScoredForecast:
        """Score every row."""
        if isinstance(forecast, GaussianForecast):
            return _score_gaussian(forecast, _coverage_levels(coverage), groups, resampling)
        return _score_quantiles(forecast, coverage, groups, resampling)

    def interval(self, metric: str, tail: float) -> tuple[float, float, float]:
        """Return a metric's value and the ends of its interval."""
        if metric in self.shares:
            bins = self.shares[metric].bins
            value = bins.observed("ece")
            return (value, *(bins.interval("ece", tail) if len(self.pit) > 1 else (math.nan, math.nan)))
        rows = self.means[metric]
        mean = Mean.of(rows, self.groups.sample_weight)
        kind = "observed" if metric.startswith("coverage_") else "mean"
        low, high = mean_interval(kind, mean, tail, self.groups.of_block(rows))
        low = low if metric == "nll" else max(low, 0.0)  # max(NaN, 0) is NaN
        if metric in _ROOTS:
            return math.sqrt(mean.value), math.sqrt(low), math.sqrt(high)
        return mean.value, low, high

    def change(self, first: ScoredForecast, metric: str, tail: float) -> tuple[float, float, float]:
        """Return a metric's paired difference from another forecast, and the ends of its interval."""
        before, after = first.interval(metric, tail)[0], self.interval(metric, tail)[0]
        value = after - before
        if metric in first.shares:
            if len(first.pit) < 2:
                return value, math.nan, math.nan
            return (value, *paired_interval(first.shares[metric].bins, self.shares[metric].bins, "ece", tail))
        old, new = first.means[metric], self.means[metric]
        if metric in _ROOTS:  # linearise the root, so that rows can be paired
            old, new = old / (2 * before or 1.0), new / (2 * after or 1.0)
        mean = Mean.of(new - old, first.groups.sample_weight)
        low, high = mean_interval("difference", mean, tail, first.groups.of_block(new - old))
        return value, value - (high - low) / 2, value + (high - low) / 2


def _coverage_levels(coverage: Sequence[float] | None) -> tuple[float, ...]:
    levels = COVERAGE if coverage is None else tuple(as_vector(coverage, "coverage").tolist())
    if any(not 0 < level < 1 for level in levels):
        got = ", ".join(f"{level:g}" for level in levels)
        raise InputError("coverage", "lie between 0 and 1", got, "divide per cent by 100")
    return tuple(sorted(set(levels)))


def _score_gaussian(
    forecast: GaussianForecast, coverage: tuple[float, ...], groups: RowGroups, resampling: Resampling
) -> ScoredForecast:
    m, s, y = forecast.mean, forecast.std, forecast.targets
    error = y - m
    z = _standardise(error, s)
    is_point = ~(np.abs(z) < _MAX_Z)
    z_inside = np.where(is_point, 0.0, z)
    pit = ndtr(z)
    density = np.exp(-0.5 * z_inside**2) / math.sqrt(2 * math.pi)
    crps = s * (z_inside * (2 * ndtr(z_inside) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    means = {"crps": np.where(is_point, np.abs(error) - s / math.sqrt(math.pi), crps)}
    remarks: list[str] = []
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        nll = 0.5 * math.log(2 * math.pi) + np.log(s) + 0.5 * z**2
    if np.isfinite(nll).all():
        means["nll"] = nll
    else:
        n_zero, n_undefined = int((s == 0).sum()), int((~np.isfinite(nll)).sum())
        small = f"too small for the error in {count_rows(n_undefined)}"
        reason = f"std is {f'0 in {count_rows(n_zero)}' if n_zero else small}"
        remarks.append(f"nll is not defined: {reason}, so the density has no finite value. The other numbers hold.")
        means["nll"] = np.full(len(y), math.nan)
    means["mae"], means["pinball"] = np.abs(error), scaled_pinball(error, s, LEVELS, ndtri(LEVELS))
    names = []
    for level in coverage:
        half = float(ndtri((1 + level) / 2))
        names.append(f"coverage_{100 * level:g}")
        means[names[-1]] = (np.abs(z) <= half).astype(np.float64)
    if coverage:
        names.append(f"width_{100 * coverage[-1]:g}")
        means[names[-1]] = 2 * float(ndtri((1 + coverage[-1]) / 2)) * s
    bounds = {"interval_error": (np.abs(z), ndtri((1 + _GRID) / 2)), "pit_error": (z, ndtri(_GRID))}
    shares = {}
    for name, (values, bound) in bounds.items():
        cell = np.minimum(np.searchsorted(bound, values, side="left"), len(_GRID) - 1)
        sums = np.cumsum(groups.cell_sums(cell, len(_GRID)), axis=1)
        shares[name] = _Shares.of(_GRID, sums, groups, resampling)
    metrics = ("crps", "nll", "rmse", "mae", "pinball", *names, "sharpness", *SHARE_ERRORS)
    means |= {"rmse": error**2, "sharpness": s**2}
    return ScoredForecast(metrics, means, shares, pit, np.linspace(0, 1, 10_001), groups, tuple(remarks))


def scaled_pinball(error: np.ndarray, std: np.ndarray, levels: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the mean pinball loss of the quantiles μ + σ·bound over levels, one number per row, from y − μ and σ."""
    z = _standardise(error, std)
    is_point, mean_level = ~(np.abs(z) < _MAX_Z), float(levels.mean())
    z = np.where(is_point, 0.0, z)
    above = len(bounds) - np.searchsorted(bounds, z, side="right")
    totals = np.concatenate([[0.0], np.cumsum(bounds[::-1])])
    scaled = z * levels.sum() - float(levels @ bounds) - (above * z - totals[above])
    point = np.where(error > 0, mean_level * error, (mean_level - 1) * error)
    return np.where(is_point | (std == 0), point, std * scaled / len(bounds))


def _score_quantiles(
    forecast: QuantileForecast, coverage: Sequence[float] | None, groups: RowGroups, resampling: Resampling
) -> ScoredForecast:
    q, tau, y = forecast.quantiles, forecast.levels, forecast.targets
    ends = np.concatenate([[0.0], (tau[1:] + tau[:-1]) / 2, [1.0]])
    cell_width = np.diff(ends)
    pinball, crps = np.zeros(len(y)), np.zeros(len(y))
    below = np.empty((groups.count, len(tau)))
    rank = np.zeros(len(y), np.int64)
    for k, level in enumerate(tau):
        error = y - q[:, k]
        loss = np.maximum(level * error, (level - 1) * error)
        pinball += loss / len(tau)
        crps += 2 * cell_width[k] * loss
        below[:, k] = groups.sums((error <= 0).astype(np.float64))
        rank += error > 0
    means = {"crps": crps, "pinball": pinball}
    median = np.flatnonzero(np.isclose(tau, 0.5, rtol=0, atol=1e-9))
    if len(median):
        means["mae"] = np.abs(y - q[:, median[0]])
    pairs = _central_pairs(tau)
    chosen = _chosen_pairs(pairs, coverage)
    inside = np.empty((groups.count, len(pairs)))
    for column, (level, (low, high)) in enumerate(pairs.items()):
        covered = ((q[:, low] <= y) & (y <= q[:, high])).astype(np.float64)
        inside[:, column] = groups.sums(covered)
        if level in chosen:
            means[f"coverage_{100 * level:g}"] = covered
    if chosen:
        low, high = pairs[chosen[-1]]
        means[f"width_{100 * chosen[-1]:g}"] = np.abs(q[:, high] - q[:, low])
    shares = {}
    if pairs:
        shares["interval_error"] = _Shares.of(np.array(list(pairs)), inside, groups, resampling)
    shares["pit_error"] = _Shares.of(tau, below, groups, resampling)
    cells = np.concatenate([[0.0], tau, [1.0]])
    pit = ((cells[1:] + cells[:-1]) / 2)[rank]
    remarks = []
    if crossing := int((np.diff(q, axis=1) < 0).any(axis=1).sum()):
        remarks.append(
            f"Quantiles cross in {crossing:,} of {len(y):,} rows. They are scored as given; sorting each row, "
            "np.sort(quantiles, axis=1), never increases the pinball loss."
        )
    return ScoredForecast((*means, *shares), means, shares, pit, cells, groups, tuple(remarks))


def _central_pairs(tau: np.ndarray) -> dict[float, tuple[int, int]]:
    """Map the level of each central interval to the columns of its two ends, the narrowest first."""
    pairs = {}
    for low in range(len(tau) - 1, -1, -1):
        high = np.flatnonzero(np.isclose(tau, 1 - tau[low], rtol=0, atol=1e-9))
        if tau[low] < 0.5 - 1e-9 and len(high):
            pairs[round(float(tau[high[0]] - tau[low]), 9)] = (low, int(high[0]))
    return pairs


def _chosen_pairs(pairs: Mapping[float, tuple[int, int]], coverage: Sequence[float] | None) -> list[float]:
    """Return the levels in the table: those passed, or all of up to four, or the usual ones and the widest."""
    available = list(pairs)
    if coverage is None:
        return available if len(available) <= 4 else [x for x in available if x in COVERAGE or x == available[-1]]
    chosen = [round(level, 9) for level in _coverage_levels(coverage)]
    missing = [level for level in chosen if level not in pairs]
    if missing:
        got = f"{missing[0]:g}, whose ends would be the levels {(1 - missing[0]) / 2:g} and {(1 + missing[0]) / 2:g}"
        raise InputError(
            "coverage", f"be among {list_levels(available) or 'none'}, whose ends are among the levels", got
        )
    return chosen


def list_levels(levels: Iterable[float], max_listed: int = 9) -> str:
    """List levels in a sentence; with many, the first and the last."""
    words = [f"{level:g}" for level in levels]
    return ", ".join(words) if len(words) <= max_listed else ", ".join([*words[:3], "…", *words[-2:]])
