"""Confidence intervals of metrics, and of paired differences between methods.

Everything is resampled from tallies (counts in some hundred cells of confidence), not from the logits. A thousand
replicates cost the same with a thousand rows as with a billion. Within a cell all rows take its mean confidence, which
changes a variance of about 0.1 by less than 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Unpack

import numpy as np
from scipy.special import betaincinv, ndtri

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import BINS, Bins, bin_index, equal_mass, equal_width, rounding_error
from trueup._core.clusters import (
    Clusters,
    ClustersLike,
    block_sums,
    degrees_of_freedom,
    mean_error,
    t_quantile,
    weighted_clusters,
)
from trueup._core.row_scores import RowScores, event_log_odds, is_event, score_rows_and_classes
from trueup._core.splits import random_groups
from trueup._core.tally import MEAN_METRICS, TABLE_METRICS, ClusterSums, Mean, Tally, class_cells, row_values
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.event_intervals import NOISE_INCREASES, ClusteredPoints, Samples, invert_noise, smoothed_bins
from trueup.metrics.events import EVENT_CELLS, EVENT_METRICS, Points, event_values, log_odds
from trueup.metrics.resampling import (
    BootstrapBins,
    Classwise,
    Resampling,
    ResamplingOptions,
    jackknife_error,
    paired_classwise,
    paired_interval,
    resample_cells,
    sum_columns,
)

_SMALLER = {"rmsce": ("ece",), "mce": ("ece", "rmsce")}
"""Binned errors that are never larger than another."""
_NEED_BOTH = ("nll", "event_brier", "miscalibration", "discrimination", "aece", "ici")
"""Metrics without an interval if an event happened in no row or in every row: the other outcome's loss is unseen."""
_SHARES = ("accuracy", "observed")
"""Means of 0 and 1, which have Wilson's interval."""
_DEFAULT_RESAMPLING = Resampling()
_JOINT_PARTS = 4  # cells per bin and method when two methods are resampled together


@dataclass(frozen=True)
class Interval:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """A data set after one pass over its rows."""

    rows: RowScores
    tally: Tally
    rounding: float
    sample_weight: np.ndarray | None
    odds: np.ndarray | None
    """Log-odds of an event, which are more exact than its probability."""
    clusters: Clusters | None
    """Clusters of the rows with weight."""
    logits: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(
        cls,
        logits: Any,
        labels: Any,
        *,
        bins: int = BINS,
        top_label: bool = False,
        sample_weight: Any = None,
        clusters: Any = None,
        paired_with: ScoredRows | None = None,
    ) -> ScoredRows:
        """Score a pair; with `paired_with`, rows fall into the same groups as those of that method."""
        z, y = as_arrays(logits, labels)
        w = as_weights(sample_weight, len(z))
        of_row = weighted_clusters(clusters, None, len(z)) if paired_with is None else paired_with.clusters
        if paired_with is None:
            weighted_clusters(of_row, w, len(z), min_clusters=2)
        size = (*z.shape, bins)
        if paired_with is not None and (shape := (paired_with.tally.n, *paired_with.tally.classes.count.shape)) != size:
            raise ValueError(f"paired methods must have the same (rows, classes, bins), got {shape} and {size}")
        unit = rounding_error(z)
        cells = class_cells(z.shape[1], bins, unit)
        if of_row is not None:
            group = of_row.code % cells.groups
        else:
            group = random_groups(z, y, cells.groups) if paired_with is None else paired_with.rows.group
        odds = event_log_odds(z) if is_event(z, top_label) else None
        rows, classes = score_rows_and_classes(z, y, replace(cells, group=group, weights=w), top_label=top_label)
        tally = Tally.from_rows(rows, classes, bins, unit, top_label=top_label, sample_weight=w)
        if of_row is not None:
            sums = ClusterSums.of(rows, of_row.block, int(of_row.block.max(initial=0)) + 1, bins, unit, w)
            tally = replace(tally, clusters=sums)
        return cls(rows, tally, unit, w, odds, of_row, z, y)

    @cached_property
    def points(self) -> Points:
        """The distinct scores."""
        return Points.from_rows(self.rows.score, self.rows.outcome, self.odds, self.sample_weight)

    @cached_property
    def cells(self) -> tuple[Points, np.ndarray]:
        """The scores of an event in cells of equal mass, and the cell of each row."""
        score, w = self.rows.score, self.sample_weight
        cell = np.unique(bin_index(score, equal_mass(score, EVENT_CELLS, w)), return_inverse=True)[1]
        odds = log_odds(score) if self.odds is None else self.odds
        return Points.from_cells(cell, score, odds, self.rows.outcome, np.ones(len(score)) if w is None else w), cell

    def values(self, metrics: Iterable[str]) -> dict[str, float]:
        """Compute metrics of the table; unlike the tally's, the adaptive error and event metrics are exact."""
        return {name: self.value(name) for name in metrics}

    def value(self, metric: str) -> float:
        """Compute one metric of the table."""
        if metric in EVENT_METRICS:
            return float(EVENT_METRICS[metric](self.points))
        return self.adaptive_bins()[0].ece() if metric == "aece" else self.tally.value(metric)

    def adaptive_bins(self) -> tuple[Bins, np.ndarray]:
        """Return the bins of equal mass, and the bin of each row."""
        index, edges = self.bin_of_row(adaptive=True)
        claims = self.rows.score, self.rows.outcome
        return Bins.from_indices(index, *claims, edges, sample_weight=self.sample_weight), index

    def cluster_bins(self, adaptive: bool, resampling: Resampling) -> BootstrapBins:
        """Return bins of equal width or (adaptive) equal mass, with the noise of clusters."""
        if not adaptive:
            return cluster_bins(self.tally, resampling)
        assert self.clusters is not None
        bins, index = self.adaptive_bins()
        gap, w = self.rows.outcome - self.rows.score, self.sample_weight
        size, block = len(bins.count), self.clusters.block
        shape = int(block.max()) + 1, size
        count, gaps = (
            np.bincount(block * size + index, x, math.prod(shape)).reshape(shape).astype(np.float64)
            for x in (w, gap if w is None else w * gap)
        )
        return BootstrapBins.of_blocks(bins, count, gaps, resampling)

    def clustered_points(self) -> ClusteredPoints:
        """Return the scores of an event in cells, by block of clusters."""
        assert self.clusters is not None
        block = self.clusters.code % _EVENT_BLOCKS
        return ClusteredPoints.of(*self.cells, self.rows.outcome, block, self.sample_weight)

    def bin_of_row(self, *, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the bin of each row, of equal width or (adaptive) equal mass, and the edges."""
        c, bins = self.rows.score, self.tally.grid.bins
        edges = equal_mass(c, bins, self.sample_weight) if adaptive else equal_width(bins)
        return bin_index(c, edges, rounding=0.0 if adaptive else self.rounding), edges


def bootstrap(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    metric: str = "ece",
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    **resampling: Unpack[ResamplingOptions],
) -> Interval:
    """Compute the confidence interval of a metric of the table by resampling rows.

    Means have the normal interval, which is the limit of their bootstrap; accuracy has Wilson's. Noise increases
    calibration errors, so their interval holds the true errors under which the observed value is not extreme. It
    corrects for the bias, starts at 0 where calibration cannot be excluded, and may lie below the value itself. With
    clusters, whole clusters are resampled.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    metric
        Name of a metric of the table.
    bins
        Number of bins.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), or a mapping {"image": values}, where rows are correlated.
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    Interval
        The metric with its interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrated, overconfident = bootstrap(z, y), bootstrap(2 * z, y)
    >>> calibrated.low, overconfident.low > 0.1
    (0.0, True)
    """
    scored = ScoredRows.of(
        logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters
    )
    return intervals(scored.tally, {metric: scored.value(metric)}, Resampling(**resampling), scored=scored)[metric]


def intervals(
    tally: Tally,
    values: Mapping[str, float] | Iterable[str] = TABLE_METRICS,
    resampling: Resampling = _DEFAULT_RESAMPLING,
    *,
    scored: ScoredRows | None = None,
) -> dict[str, Interval]:
    """Compute intervals of several metrics from one tally; `values` may hold more exact values than the tally's."""
    tail, level, points = resampling.tail, resampling.level, Points.of_grid(tally.grid)
    if not isinstance(values, Mapping):
        values = {name: _tally_value(tally, points, name) for name in values}
    of_event = {name: value for name, value in values.items() if name in EVENT_METRICS}
    sums = None if tally.clusters is None else tally.clusters.drop_empty()
    ends = dict.fromkeys(of_event, (math.nan, math.nan))
    if of_event and sums is None:
        ends = _event_intervals(points, of_event, resampling)
    elif of_event and scored is not None and sums is not None and len(sums.weight) > 1:
        ends = scored.clustered_points().intervals(of_event, resampling)

    @cache
    def noisy_bins(adaptive: bool) -> BootstrapBins:
        if sums is None:
            return BootstrapBins.of_grid(tally.grid, adaptive, resampling)
        return cluster_bins(tally, resampling) if scored is None else scored.cluster_bins(adaptive, resampling)

    @cache
    def binned_interval(name: str) -> tuple[float, float]:
        """Return the interval of a binned error; larger errors use its low end, so theirs has a smaller tail."""
        bins, low_tail = noisy_bins(name == "aece"), tail / (1 + len(_SMALLER.get(name, ())))
        low, high = bins.interval("ece" if name == "aece" else name, tail, low_tail)
        if name in ("ece", "aece") and sums is None:
            # Observed gaps are noisier than true ones, so noise adds less to true gaps of equal sign and size.
            equal_gaps = math.copysign(1.0, bins.gap.sum()) * bins.counts
            high = max(high, bins.truth("ece", tail, find_last=True, direction=equal_gaps))
        return low, high

    if _lacks_an_outcome(tally):
        ends |= dict.fromkeys(set(_NEED_BOTH).intersection(values), (math.nan, math.nan))
    result = {}
    for name, value in values.items():
        if name == "uncertainty" and (sums is None or len(sums.weight) > 1):
            of_block = None if sums is None else (sums.mean("observed"), sums.weight)
            rates = mean_interval("observed", tally.observed, tail, of_block)
            spreads = [rate * (1 - rate) for rate in rates]
            ends[name] = min(spreads), 0.25 if rates[0] <= 0.5 <= rates[1] else max(spreads)
        if name in ends:
            result[name] = Interval(value, *ends[name], level)
            continue
        is_single_row = tally.n < 2 and name not in _SHARES  # one row shows no spread
        if is_single_row or (sums is not None and (len(sums.weight) < 2 or (name == "aece" and scored is None))):
            low, high = math.nan, math.nan
        elif name in MEAN_METRICS:
            of_block = None if sums is None else (sums.mean(name), sums.weight)
            low, high = mean_interval(name, getattr(tally, name), tail, of_block)
        elif name == "sce":
            low, high = sorted(Classwise.of(tally).interval(tail))  # without noise the ends differ only by rounding
        else:
            low, high = binned_interval(name)
            # True errors keep the order ECE ≤ RMSCE ≤ MCE, and the ECE is the least noisy.
            low = max([low, *(binned_interval(other)[0] for other in _SMALLER.get(name, ()))])
            high = max(high, low) if high > 0 else value
        # No metric is negative, but a normal interval with few rows may extend below 0.
        high = high if name in ("nll", "entropy", "brier") else min(high, 1.0)
        result[name] = Interval(value, max(low, 0.0), high, level)
    return result


def paired_bootstrap(
    first: tuple[Any, Any],
    second: tuple[Any, Any],
    *,
    metric: str = "ece",
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    **resampling: Unpack[ResamplingOptions],
) -> Interval:
    """Compute the interval of a metric's change from the first pair to the second, on the same rows.

    Both pairs are resampled together, so the difficulty of the rows cancels.

    Parameters
    ----------
    first
        Logits and labels of the first method.
    second
        Logits and labels of the second method.
    metric
        Name of a metric of the table.
    bins
        Number of bins.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), or a mapping {"image": values}, where rows are correlated.
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    Interval
        Second − first, with its interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3)); y = z.argmax(axis=1)
    >>> paired_bootstrap((z, y), (2 * z, y), metric="nll").high < 0
    True
    """
    one = ScoredRows.of(*first, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    two = ScoredRows.of(*second, bins=bins, top_label=top_label, sample_weight=sample_weight, paired_with=one)
    return differences(one, two, (metric,), Resampling(**resampling))[metric]


def differences(
    first: ScoredRows, second: ScoredRows, metrics: Iterable[str], resampling: Resampling = _DEFAULT_RESAMPLING
) -> dict[str, Interval]:
    """Compute paired intervals of second − first for several metrics; both must have the same groups of rows."""
    tail, names = resampling.tail, list(metrics)
    before, after = first.values(names), second.values(names)
    one_outcome = _lacks_an_outcome(first.tally)
    undefined = [name for name in names if name == "kuiper" or (one_outcome and name in _NEED_BOTH)]
    of_event = [name for name in names if name in EVENT_METRICS and name not in undefined]
    ends = _event_differences(first, second, of_event, resampling) if of_event and first.tally.n else {}

    @cache
    def noisy_bins(adaptive: bool) -> tuple[BootstrapBins, BootstrapBins]:
        if first.clusters is None:
            return _resample_jointly(first, second, adaptive, resampling)
        # Both use the same random factors of the same clusters.
        return first.cluster_bins(adaptive, resampling), second.cluster_bins(adaptive, resampling)

    result = {}
    for name in names:
        value = after[name] - before[name]
        if name in ends:
            low, high = value + ends[name][0], value + ends[name][1]
        elif not first.tally.n or name in undefined:
            low, high = math.nan, math.nan
        elif name in MEAN_METRICS:
            change = row_values(second.rows, name) - row_values(first.rows, name)
            mean = Mean.of(change, first.sample_weight)
            of_block = None if first.clusters is None else block_sums(change, first.sample_weight, first.clusters)
            low, high = mean_interval("difference", mean, tail, of_block)
        elif name == "sce":
            low, high = paired_classwise(Classwise.of(first.tally), Classwise.of(second.tally), tail)
        else:
            low, high = paired_interval(*noisy_bins(name == "aece"), "ece" if name == "aece" else name, tail)
            limit = _max_difference(first, second, name)
            low, high = max(low, -limit), min(high, limit)
        if abs(value) <= _ROUNDING and max(abs(low), abs(high)) <= _ROUNDING:  # NaN stays
            value, low, high = 0.0, 0.0, 0.0
        result[name] = Interval(value, low, high, resampling.level)
    return result


def _lacks_an_outcome(tally: Tally) -> bool:
    """Return whether an event happened in no row, or in every row."""
    return tally.is_event and not 0 < tally.observed.value < 1


_ROUNDING = 1e-12
"""Differences of two methods up to this are rounding errors."""
_EVENT_BLOCKS = 200
"""Number of blocks of clusters in the jackknife of an event's metrics."""


def cluster_bins(tally: Tally, resampling: Resampling) -> BootstrapBins:
    """Return bins of equal width with the noise of clusters."""
    assert tally.clusters is not None
    return BootstrapBins.of_blocks(tally.score_bins, tally.clusters.count, tally.clusters.gap, resampling)


def _tally_value(tally: Tally, points: Points, metric: str) -> float:
    """Compute a metric of the table from a tally; event metrics are accurate to the width of a grid cell."""
    return float(EVENT_METRICS[metric](points)) if metric in EVENT_METRICS else tally.value(metric)


def _event_intervals(
    points: Points, values: Mapping[str, float], resampling: Resampling
) -> dict[str, tuple[float, float]]:
    """Compute intervals of event metrics: Wald's for the regression, else by inversion or bootstrap."""
    fit, z = points.recalibration, float(-ndtri(resampling.tail))
    wald = {"calibration_intercept": fit.intercept_error, "calibration_slope": fit.slope_error}
    if "calibration_in_the_large" in values:
        wald["calibration_in_the_large"] = points.in_the_large[1]
    ends = {name: (x - z * wald[name], x + z * wald[name]) for name, x in values.items() if name in wald}
    if points.effective_rows > 1 + 1e-9:
        cells = points.merge(EVENT_CELLS)
        noisy = [name for name in values if name in NOISE_INCREASES and name != "ici"]
        ends |= invert_noise(cells, noisy, resampling)
        drawn = [name for name in values if name not in (*ends, "kuiper", "ici")]
        if drawn or "ici" in values:
            some = cells.rows > 0
            rows = np.zeros((resampling.n_resamples, *some.shape))
            rows[:, some] = resample_cells(cells.rows[some], cells.squared[some], resampling)
            samples, in_cells = Samples(cells, rows), event_values(cells, drawn)
            if "ici" in values:
                ends["ici"] = smoothed_bins(cells, samples).interval("ece", resampling.tail)
            for name, replicates in samples.values(drawn).items():
                low, high = (values[name] + end - in_cells[name] for end in _ends(replicates, resampling.tail))
                ends[name] = max(low, 0.0), high
    return {name: ends.get(name, (math.nan, math.nan)) for name in values}


def _ends(replicates: np.ndarray, tail: float) -> tuple[float, float]:
    """Return the two quantiles of the finite replicates."""
    some = replicates[np.isfinite(replicates)]  # a resample may lack an outcome
    return (float(np.quantile(some, tail)), float(np.quantile(some, 1 - tail))) if len(some) else (math.nan, math.nan)


def _event_differences(
    first: ScoredRows, second: ScoredRows, names: list[str], resampling: Resampling
) -> dict[str, tuple[float, float]]:
    """Return the ends of paired intervals of event metrics, relative to the differences.

    Both methods share the resamples. With clusters the ends come from the jackknife over clusters, since noise adds
    about the same to both methods.
    """
    (before, before_cell), (after, after_cell) = first.cells, second.cells
    old, new = event_values(before, names), event_values(after, names)
    observed = {name: new[name] - old[name] for name in names}
    if first.clusters is not None:
        one, two = first.clustered_points(), second.clustered_points()
        old_without, new_without = one.without.values(names), two.without.values(names)
        t = t_quantile(resampling.tail, one.df)
        errors = {name: t * jackknife_error(observed[name], new_without[name] - old_without[name]) for name in names}
        return {name: (-error, error) for name, error in errors.items()}
    # The outcomes of two methods may differ if they are about the predicted class.
    outcomes = [scored.rows.outcome.astype(np.int64) for scored in (first, second)]
    key = ((before_cell * len(after.score) + after_cell) * 2 + outcomes[0]) * 2 + outcomes[1]
    row, _, _, drawn = _draw_cells(key, first.sample_weight, resampling)
    samples = []
    for (points, cell), outcome in zip((first.cells, second.cells), outcomes, strict=True):
        size = len(points.score)
        rows = sum_columns(drawn, cell[row] + size * outcome[row], 2 * size)
        samples.append(Samples(points, rows.reshape(len(drawn), 2, size)))
    names = [name for name in names if name != "ici"]
    values = [each.values(names) for each in samples]
    ends = {name: _ends(values[1][name] - values[0][name], resampling.tail) for name in names}
    # Noise adds to the difference, and again in the resamples: reflecting the ends removes this bias.
    result = {name: (observed[name] - high, observed[name] - low) for name, (low, high) in ends.items()}
    if "ici" in observed:
        sides = [smoothed_bins(points, each) for points, each in zip((before, after), samples, strict=True)]
        low, high = paired_interval(sides[0], sides[1], "ece", resampling.tail)
        result["ici"] = low - observed["ici"], high - observed["ici"]
    return result


def count_rows(count: int) -> str:
    """Return the number of rows in words."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def binomial_bounds(hits: np.ndarray, trials: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute one-sided lower and upper bounds of a share, each wrong with probability α at most.

    Parameters
    ----------
    hits
        Number of successes.
    trials
        Number of trials.
    alpha
        Probability of error of each bound.

    Returns
    -------
    tuple[np.ndarray, np.ndarray]
        The lower and the upper bounds.

    Examples
    --------
    >>> [bound.round(4).tolist() for bound in binomial_bounds(np.array([0.0, 3.0]), np.array([50.0, 50.0]), 0.05)]
    [[0.0, 0.0166], [0.0582, 0.1478]]

    References
    ----------
    Clopper & Pearson (1934), The use of confidence or fiducial limits illustrated in the case of the binomial.
    """
    missed = trials - hits
    low = np.where(hits > 0, betaincinv(np.maximum(hits, 1), missed + 1, alpha), 0.0)
    high = np.where(missed > 0, betaincinv(hits + 1, np.maximum(missed, 1), 1 - alpha), 1.0)
    return low, high


def mean_interval(
    name: str, mean: Mean, tail: float, of_block: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[float, float]:
    """Return the normal interval, Wilson's for a share, log-normal for "nll"; with sums by block Student's."""
    z, error, n, p = float(-ndtri(tail)), mean.error, mean.effective_rows, mean.value
    if of_block is not None:
        sums, weight = of_block
        z = t_quantile(tail, degrees_of_freedom(weight))
        # Clusters that agree by accident carry no more information than independent rows.
        error = max(mean_error(sums, weight), 0.0 if math.isnan(error) else error)
        effective = p * (1 - p) / error**2 if error > 0 else math.inf
        n = min(effective, n) if 0 < p < 1 else float(weight.sum() ** 2 / (weight @ weight))
    if name == "nll" and p > 0:  # skewed, above all for rare events: the interval is symmetric on a log scale
        factor = math.exp(min(z * error / p, 700.0))
        return p / factor, p * factor
    if name not in _SHARES:
        return p - z * error, p + z * error
    if not n:
        return float("nan"), float("nan")
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def _max_difference(first: ScoredRows, second: ScoredRows, metric: str) -> float:
    """Return the largest possible difference of two methods' errors; 0 if no row differs.

    An expected error is a sum of absolute sums over bins. A row that stays in its bin changes it by at most its own
    change; a row that moves, by at most the sum of its old and new gap.
    """
    adaptive = metric == "aece"
    gaps = [one.rows.outcome - one.rows.score for one in (first, second)]
    moved = first.bin_of_row(adaptive=adaptive)[0] != second.bin_of_row(adaptive=adaptive)[0]
    change = np.where(moved, np.abs(gaps[0]) + np.abs(gaps[1]), np.abs(gaps[1] - gaps[0]))
    bounded = metric in ("ece", "aece", "overconfidence", "underconfidence")
    return float(np.average(change, weights=first.sample_weight)) if bounded or not change.any() else 1.0


def _resample_jointly(
    first: ScoredRows, second: ScoredRows, adaptive: bool, resampling: Resampling
) -> tuple[BootstrapBins, BootstrapBins]:
    """Resample two methods' rows together, in cells of one method's confidence and outcome times the other's."""
    bins, keys = [], []
    for side in (first, second):
        index, edges = side.bin_of_row(adaptive=adaptive)
        low, high = edges[index], edges[index + 1]
        part = np.clip((side.rows.score - low) / (high - low) * _JOINT_PARTS, 0, _JOINT_PARTS - 1).astype(np.int64)
        keys.append((index * _JOINT_PARTS + part) * 2 + side.rows.outcome.astype(np.int64))
        bins.append(index)
    row, cell, count, drawn = _draw_cells(keys[0] * (int(keys[1].max()) + 1) + keys[1], first.sample_weight, resampling)
    result = []
    for index, side in zip(bins, (first, second), strict=True):
        gap = side.rows.outcome - side.rows.score
        sums = np.bincount(cell, gap if first.sample_weight is None else first.sample_weight * gap)
        result.append(BootstrapBins.of_cells(index[row], count, sums, drawn))
    return result[0], result[1]


def _draw_cells(
    key: np.ndarray, sample_weight: np.ndarray | None, resampling: Resampling
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Resample rows by cells of equal key: a row of each cell, each row's cell, the cells' weights, the draws."""
    w = np.ones(len(key)) if sample_weight is None else sample_weight
    some = np.flatnonzero(w > 0)
    _, first, of_some = np.unique(key[some], return_index=True, return_inverse=True)
    cell = np.zeros(len(key), np.int64)
    cell[some] = of_some
    count, squared = np.bincount(cell, w), np.bincount(cell, w**2)
    return some[first], cell, count, resample_cells(count, squared, resampling)
