"""Confidence intervals of metrics, and of paired differences between methods.

Everything is resampled from tallies (counts in some hundred cells of confidence), never from the logits: a thousand
replicates cost the same at a thousand rows as at a billion. Inside a cell all rows take its mean confidence, which
changes a variance of about 0.1 by less than 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
from scipy.special import betaincinv, ndtri

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import BINS, Bins, bin_index, equal_mass, equal_width, rounding_error
from trueup._core.clusters import (
    Clusters,
    as_clusters,
    block_sums,
    degrees_of_freedom,
    jackknife,
    mean_error,
    t_quantile,
)
from trueup._core.row_scores import RowScores, event_log_odds, is_event, score_rows_and_classes
from trueup._core.splits import random_groups
from trueup._core.tally import MEAN_METRICS, TABLE_METRICS, ClusterSums, Mean, Tally, class_cells, row_values
from trueup.metrics.events import EVENT_METRICS, Points, event_values, fit_in_the_large, fit_recalibration, log_odds
from trueup.metrics.resampling import (
    BootstrapBins,
    Classwise,
    Resampling,
    ResamplingOptions,
    gap_noise,
    paired_classwise,
    paired_interval,
    resample_cells,
    sum_columns,
)

if TYPE_CHECKING:
    from trueup.metrics.event_intervals import ClusteredPoints

_SHARES = ("accuracy", "observed")
"""What is 0 or 1 in each row: it has Wilson's interval."""
_USUAL = Resampling()
_JOINT_PARTS = 4  # cells a bin and method when two methods are resampled together


@dataclass(frozen=True)
class Interval:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float
    level: float = 0.95


class Scored(NamedTuple):
    """A data set after its one pass."""

    rows: RowScores
    tally: Tally
    rounding: float
    sample_weight: np.ndarray | None
    odds: np.ndarray | None
    """The log-odds of an event, which are known better than its probability."""
    clusters: Clusters | None = None
    """Of the rows that have weight."""

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
        beside: Scored | None = None,
    ) -> Scored:
        """Pass over a pair; rows fall into the same groups as those of another method, if it is to stand beside one."""
        z, y = as_arrays(logits, labels)
        w = as_weights(sample_weight, len(z))
        together = as_clusters(clusters, len(z)) if beside is None else beside.clusters
        if together is not None and beside is None:
            counted = together if w is None else together.take(w > 0)
            as_clusters(counted, len(counted.code), at_least=2)
        if beside is not None and (shape := (beside.tally.n, *beside.tally.classes.count.shape)) != (*z.shape, bins):
            raise ValueError(
                f"paired methods must have the same (rows, classes, bins), got {shape} and {(*z.shape, bins)}"
            )
        unit = rounding_error(z)
        cells = class_cells(z.shape[1], bins, unit)
        if together is not None:
            group = together.code % cells.groups
        else:
            group = random_groups(z, y, cells.groups) if beside is None else beside.rows.group
        odds = event_log_odds(z) if is_event(z, top_label) else None
        rows, classes = score_rows_and_classes(z, y, replace(cells, group=group, weights=w), top_label=top_label)
        tally = Tally.from_rows(rows, classes, bins, unit, top_label=top_label, sample_weight=w)
        if together is not None:
            sums = ClusterSums.of(rows, together.block, int(together.block.max(initial=0)) + 1, bins, unit, w)
            tally = replace(tally, clusters=sums)
        return cls(rows, tally, unit, w, odds, together)

    @property
    def points(self) -> Points:
        """Its distinct scores."""
        return Points.from_rows(self.rows.score, self.rows.outcome, self.odds, self.sample_weight)

    def values(self, metrics: Iterable[str]) -> dict[str, float]:
        """Numbers of the table; unlike the tally's, the adaptive error and those of an event are exact."""
        names = list(metrics)
        of_event = [name for name in names if name in EVENT_METRICS]
        found = event_values(self.points, of_event) if of_event else {}
        return {name: found[name] if name in found else self.value(name) for name in names}

    def value(self, metric: str) -> float:
        """One number of the table."""
        if metric in EVENT_METRICS:
            return EVENT_METRICS[metric](self.points)
        if metric != "aece":
            return self.tally.value(metric)
        index, edges = self.bin_of_row(adaptive=True)
        return Bins.from_indices(
            index, self.rows.score, self.rows.outcome, edges, sample_weight=self.sample_weight
        ).ece()

    def adaptive_noise(self, resampling: Resampling) -> BootstrapBins:
        """The bins of equal mass, and how clusters make their gaps vary."""
        assert self.clusters is not None
        index, edges = self.bin_of_row(adaptive=True)
        found = Bins.from_indices(index, self.rows.score, self.rows.outcome, edges, sample_weight=self.sample_weight)
        gap = self.rows.outcome - self.rows.score
        gap = gap if self.sample_weight is None else self.sample_weight * gap
        size, block = len(found.count), self.clusters.block
        blocks = int(block.max()) + 1
        of_block = np.bincount(block * size + index, gap, blocks * size).reshape(blocks, size)
        count = np.bincount(block * size + index, self.sample_weight, blocks * size).reshape(blocks, size)
        weight = np.bincount(block, self.sample_weight, blocks)
        some = weight > 0
        noise = gap_noise(of_block[some], weight[some], resampling)
        sides = count[some].astype(np.float64), of_block[some]
        return BootstrapBins(found.count, found.confidence, found.hits - found.confidence, noise, sides)

    def clustered_points(self) -> ClusteredPoints:
        """The scores of an event in cells, by block of clusters."""
        assert self.clusters is not None
        weights = np.ones(len(self.rows.score)) if self.sample_weight is None else self.sample_weight
        some = weights > 0
        score, outcome, weights = self.rows.score[some], self.rows.outcome[some], weights[some]
        odds = log_odds(score) if self.odds is None else self.odds[some]
        place = bin_index(score, equal_mass(score, _EVENT_CELLS, weights))
        place = np.unique(place, return_inverse=True)[1]
        cells = Points.from_cells(place, score, odds, outcome, weights)
        from trueup.metrics.event_intervals import ClusteredPoints  # only tables of an event need it

        return ClusteredPoints.of(cells, place, outcome, self.clusters.code[some] % _EVENT_BLOCKS, weights)

    def bin_of_row(self, *, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
        """The bin of each row, of equal width or (adaptive) equal mass, and the edges."""
        c, bins = self.rows.score, self.tally.grid.bins
        edges = equal_mass(c, bins, self.sample_weight) if adaptive else equal_width(bins)
        return bin_index(c, edges, rounding=0.0 if adaptive else self.rounding), edges


def bootstrap(
    logits: Any,
    labels: Any,
    *,
    metric: str = "ece",
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: Any = None,
    clusters: Any = None,
    **resampling: Unpack[ResamplingOptions],
) -> Interval:
    """Confidence interval of a metric of the table by resampling the rows.

    Means have the normal interval that their bootstrap tends to, accuracy Wilson's. Calibration errors, which noise
    makes larger, have the interval of the true errors under which the value seen is no outlier: it is aware of the
    bias, starts at 0 where calibration cannot be excluded, and may lie below the value itself. With `clusters`, one
    value a row, whole clusters are what varies, as pixels of one image are correlated; see `trueup.evaluate`.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrated, overconfident = bootstrap(z, y), bootstrap(2 * z, y)
    >>> calibrated.low, overconfident.low > 0.1
    (0.0, True)
    """
    scored = Scored.of(logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return intervals(scored.tally, {metric: scored.value(metric)}, Resampling(**resampling), scored=scored)[metric]


def intervals(
    tally: Tally,
    values: Mapping[str, float] | Iterable[str] = TABLE_METRICS,
    resampling: Resampling = _USUAL,
    *,
    scored: Scored | None = None,
) -> dict[str, Interval]:
    """Intervals of several metrics from one tally; `values` may hold better values than the tally's own.

    Where the tally has clusters, the adaptive error and the metrics of an event have intervals only if the rows
    themselves are there as `scored`; else NaN.
    """
    tail, level = resampling.tail, resampling.level
    known = dict(values) if isinstance(values, Mapping) else _values_of_tally(tally, values)
    noisy: dict[bool, BootstrapBins] = {}
    reached: dict[str, tuple[float, float]] = {}

    def reach(name: str) -> tuple[float, float]:
        """The interval of a binned error, which those of larger errors ask for too."""
        if name not in reached:
            adaptive = name == "aece"
            if adaptive not in noisy:
                noisy[adaptive] = BootstrapBins.of_grid(tally.grid, adaptive, resampling)
            reached[name] = noisy[adaptive].interval("ece" if adaptive else name, tail)
        return reached[name]

    of_event = {name: value for name, value in known.items() if name in EVENT_METRICS}
    sums = None if tally.clusters is None else tally.clusters.drop_empty()
    ends: dict[str, tuple[float, float]] = {}
    if sums is not None:
        noisy = _cluster_bins(tally, sums, scored, resampling)
        if of_event:
            ends = dict.fromkeys(of_event, (math.nan, math.nan))
            if scored is not None and len(sums.weight) > 1:
                ends = scored.clustered_points().intervals(of_event, resampling)
    elif of_event:
        ends = _event_intervals(Points.of_grid(tally.grid), of_event, resampling)
    found = {}
    for name, value in known.items():
        if name in ends:
            found[name] = Interval(value, *ends[name], level)
            continue
        alone = tally.n < 2 and name not in _SHARES  # one row shows no spread
        if alone or (sums is not None and (len(sums.weight) < 2 or (name == "aece" and True not in noisy))):
            low, high = float("nan"), float("nan")
        elif name in MEAN_METRICS:
            of_block = None if sums is None else (sums.mean(name), sums.weight)
            low, high = mean_interval(name, getattr(tally, name), tail, of_block)
        elif name == "sce":
            low, high = sorted(Classwise.of(tally).interval(tail))  # without noise they differ by rounding
        else:
            low, high = reach(name)
            # True errors keep the order ECE ≤ RMSCE ≤ MCE, and noise blurs the first the least.
            smaller = {"rmsce": ("ece",), "mce": ("ece", "rmsce")}.get(name, ())
            low = max([low, *(reach(other)[0] for other in smaller)])
            high = max(high, low) if high > 0 else value
        # Nothing in the table is negative, though the normal interval of few rows may reach below 0.
        high = high if name in ("nll", "entropy", "brier") else min(high, 1.0)
        found[name] = Interval(value, max(low, 0.0), high, level)
    return found


def paired_bootstrap(
    first: tuple[Any, Any],
    second: tuple[Any, Any],
    *,
    metric: str = "ece",
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: Any = None,
    clusters: Any = None,
    **resampling: Unpack[ResamplingOptions],
) -> Interval:
    """Interval of how much a metric changes from the first pair to the second, on the same rows.

    Both are resampled together, so what is hard in the data cancels. `clusters` are those of `trueup.evaluate`.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3)); y = z.argmax(axis=1)
    >>> paired_bootstrap((z, y), (2 * z, y), metric="nll").high < 0
    True
    """
    one = Scored.of(*first, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    two = Scored.of(*second, bins=bins, top_label=top_label, sample_weight=sample_weight, beside=one)
    return differences(one, two, (metric,), Resampling(**resampling))[metric]


def differences(
    first: Scored, second: Scored, metrics: Iterable[str], resampling: Resampling = _USUAL
) -> dict[str, Interval]:
    """Paired intervals of second − first for several metrics; both must have the same groups of rows."""
    tail = resampling.tail
    joint: dict[bool, tuple[BootstrapBins, BootstrapBins]] = {}
    names = list(metrics)
    before, after = first.values(names), second.values(names)
    of_event = [name for name in names if name in EVENT_METRICS and name != "kuiper"]
    ends = _event_differences(first, second, of_event, resampling) if of_event and first.tally.n else {}
    found = {}
    for name in names:
        value = after[name] - before[name]
        if name in ends:
            low, high = ends[name]
        elif not first.tally.n or name == "kuiper":
            low, high = float("nan"), float("nan")
        elif name in MEAN_METRICS:
            change = row_values(second.rows, name) - row_values(first.rows, name)
            mean = Mean.of(change, first.sample_weight)
            of_block = None if first.clusters is None else block_sums(change, first.sample_weight, first.clusters)
            low, high = mean_interval("difference", mean, tail, of_block)
        elif name == "sce":
            low, high = paired_classwise(Classwise.of(first.tally), Classwise.of(second.tally), tail)
        else:
            adaptive = name == "aece"
            if adaptive not in joint and first.clusters is None:
                joint[adaptive] = _resample_jointly(first, second, adaptive, resampling)
            elif adaptive not in joint:  # the same factors of the same clusters for both
                one, two = (_cluster_noise(each, adaptive, resampling) for each in (first, second))
                joint[adaptive] = one, two
            low, high = paired_interval(*joint[adaptive], "ece" if adaptive else name, tail)
            most = _most(first, second, name)
            low, high = max(low, -most), min(high, most)
        found[name] = Interval(value, low, high, resampling.level)
    return found


_EVENT_BLOCKS = 200
"""Into how many blocks of clusters an event's metrics are divided: each has an isotonic regression without it."""
_EVENT_CELLS = 256
"""Into how many cells the scores of an event are gathered to be resampled."""


def _cluster_bins(
    tally: Tally, sums: ClusterSums, scored: Scored | None, resampling: Resampling
) -> dict[bool, BootstrapBins]:
    """Bins with the noise of clusters, of equal width and, where the rows are there, of equal mass."""
    if len(sums.weight) < 2:
        return {}
    top = tally.top
    noise = gap_noise(sums.gap, sums.weight, resampling)
    sides = sums.count, sums.gap
    found = {False: BootstrapBins(top.count, top.confidence, top.hits - top.confidence, noise, sides)}
    return found if scored is None else found | {True: scored.adaptive_noise(resampling)}


def _cluster_noise(scored: Scored, adaptive: bool, resampling: Resampling) -> BootstrapBins:
    if adaptive:
        return scored.adaptive_noise(resampling)
    assert scored.tally.clusters is not None
    return _cluster_bins(scored.tally, scored.tally.clusters.drop_empty(), None, resampling)[False]


def _values_of_tally(tally: Tally, names: Iterable[str]) -> dict[str, float]:
    """Numbers of the table from a tally alone; those of an event are off by no more than the width of a grid cell."""
    wanted = list(names)
    of_event = [name for name in wanted if name in EVENT_METRICS]
    found = event_values(Points.of_grid(tally.grid), of_event) if of_event else {}
    return {name: found[name] if name in found else tally.value(name) for name in wanted}


def _event_intervals(
    points: Points, values: Mapping[str, float], resampling: Resampling
) -> dict[str, tuple[float, float]]:
    """Intervals of an event's metrics: Wald's of the regression's, by inversion what noise adds to, else bootstrap."""
    from trueup.metrics.event_intervals import NOISE_ADDS, invert_noise  # only tables of an event need it

    tail = resampling.tail
    z = float(-ndtri(tail))
    fit, shift = fit_recalibration(points), fit_in_the_large(points)
    wald = {
        "calibration_intercept": fit.intercept_error,
        "calibration_slope": fit.slope_error,
        "calibration_in_the_large": shift[1],
    }
    drawn = [name for name in values if name not in wald and name not in NOISE_ADDS and name != "kuiper"]
    noisy = [name for name in values if name in NOISE_ADDS]
    enough = points.effective_rows > 1 + 1e-9
    cells = points.merge(_EVENT_CELLS)
    replicates = _resample_points(cells, drawn, resampling) if drawn and enough else {}
    here = event_values(cells, drawn) if replicates else {}
    ends = invert_noise(cells, noisy, resampling) if noisy and enough else {}
    found = {}
    for name, value in values.items():
        low = high = math.nan
        if name in wald:
            low, high = value - z * wald[name], value + z * wald[name]
        elif name in ends:
            low, high = ends[name]
        elif name in replicates:
            low, high = (value + end - here[name] for end in _ends(replicates[name], tail))
            low = max(low, 0.0)
        found[name] = low, high
    return found


def _ends(replicates: np.ndarray, tail: float) -> tuple[float, float]:
    some = replicates[np.isfinite(replicates)]  # a resample may lack what a metric needs
    return (float(np.quantile(some, tail)), float(np.quantile(some, 1 - tail))) if len(some) else (math.nan, math.nan)


def _resample_points(cells: Points, names: list[str], resampling: Resampling) -> dict[str, np.ndarray]:
    """Metrics of points whose rows are drawn again."""
    from trueup.metrics.event_intervals import values_of_resamples

    some = cells.rows.ravel() > 0
    rows = np.zeros((resampling.n_resamples, cells.rows.size))
    rows[:, some] = resample_cells(cells.rows.ravel()[some], cells.squared.ravel()[some], resampling)
    return values_of_resamples(cells, rows.reshape(len(rows), 2, -1), names)


def _event_differences(
    first: Scored, second: Scored, names: list[str], resampling: Resampling
) -> dict[str, tuple[float, float]]:
    """Paired intervals of an event's metrics: both methods' rows are drawn together."""
    if first.clusters is not None:
        return _clustered_event_differences(first, second, names, resampling.tail)
    from trueup.metrics.event_intervals import values_of_resamples

    outcome = first.rows.outcome.astype(np.int64)
    weights = np.ones(len(outcome)) if first.sample_weight is None else first.sample_weight
    index, cells = [], []
    for one in (first, second):
        place = bin_index(one.rows.score, equal_mass(one.rows.score, _EVENT_CELLS, one.sample_weight))
        place = np.unique(place, return_inverse=True)[1]
        index.append(place)
        odds = log_odds(one.rows.score) if one.odds is None else one.odds
        cells.append(Points.from_cells(place, one.rows.score, odds, one.rows.outcome, weights))
    sizes = [len(one.score) for one in cells]
    some = weights > 0
    joint, cell = np.unique((index[0] * sizes[1] + index[1])[some] * 2 + outcome[some], return_inverse=True)
    count, squared = np.bincount(cell, weights[some]), np.bincount(cell, weights[some] ** 2)
    drawn = resample_cells(count, squared, resampling)
    values = []
    for points, place, size in zip(cells, (joint // 2 // sizes[1], joint // 2 % sizes[1]), sizes, strict=True):
        rows = sum_columns(drawn, place + size * (joint % 2), 2 * size).reshape(len(drawn), 2, size)
        values.append((values_of_resamples(points, rows, names), event_values(points, names)))
    (before, before_here), (after, after_here) = values
    exact = first.values(names), second.values(names)
    found = {}
    for name in names:
        low, high = _ends(after[name] - before[name], resampling.tail)
        here, value = after_here[name] - before_here[name], exact[1][name] - exact[0][name]
        # Noise adds to both methods, in resamples once more: what it adds to the difference is taken off.
        found[name] = (value + here - high, value + here - low)
    return found


def _clustered_event_differences(
    first: Scored, second: Scored, names: list[str], tail: float
) -> dict[str, tuple[float, float]]:
    """The same by the jackknife over clusters: what noise adds is much the same in both methods."""
    one, two = first.clustered_points(), second.clustered_points()
    without = one.without(names), two.without(names)
    here = event_values(one.cells, names), event_values(two.cells, names)
    before, after = first.values(names), second.values(names)
    reach, found = t_quantile(tail, one.df), {}
    for name in names:
        parts = jackknife(here[1][name] - here[0][name], without[1][name] - without[0][name])
        error, value = float(np.sqrt((parts**2).sum())), after[name] - before[name]
        found[name] = value - reach * error, value + reach * error
    return found


def binomial_bounds(hits: np.ndarray, trials: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """One-sided lower and upper bounds of a share, each wrong with probability α at most.

    >>> [bound.round(4).tolist() for bound in binomial_bounds(np.array([0.0, 3.0]), np.array([50.0, 50.0]), 0.05)]
    [[0.0, 0.0166], [0.0582, 0.1478]]

    Clopper and Pearson (1934).
    """
    missed = trials - hits
    low = np.where(hits > 0, betaincinv(np.maximum(hits, 1), missed + 1, alpha), 0.0)
    high = np.where(missed > 0, betaincinv(hits + 1, np.maximum(missed, 1), 1 - alpha), 1.0)
    return low, high


def mean_interval(
    name: str, mean: Mean, tail: float, of_block: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[float, float]:
    """The normal or, of a share, Wilson's interval; with sums and weights by block Student's, over clusters."""
    z, error, n, p = float(-ndtri(tail)), mean.error, mean.effective_rows, mean.value
    if of_block is not None:
        sums, weight = of_block
        z = t_quantile(tail, degrees_of_freedom(weight))
        # Clusters that agree by chance tell no more than independent rows would.
        error = max(mean_error(sums, weight), 0.0 if math.isnan(error) else error)
        known = p * (1 - p) / error**2 if error > 0 else math.inf
        n = min(known, n) if 0 < p < 1 else float(weight.sum() ** 2 / (weight @ weight))
    if name not in _SHARES:
        return p - z * error, p + z * error
    if not n:
        return float("nan"), float("nan")
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _most(first: Scored, second: Scored, metric: str) -> float:
    """The most by which two methods' errors can differ: not at all where no row differs.

    An expected error is a sum of absolute sums over bins: a row that stays in its bin changes it by no more than its
    own change, a row that moves by no more than what it was and is.
    """
    adaptive = metric == "aece"
    gaps = [one.rows.outcome - one.rows.score for one in (first, second)]
    moved = first.bin_of_row(adaptive=adaptive)[0] != second.bin_of_row(adaptive=adaptive)[0]
    change = np.where(moved, np.abs(gaps[0]) + np.abs(gaps[1]), np.abs(gaps[1] - gaps[0]))
    bounded = metric in ("ece", "aece", "overconfidence", "underconfidence")
    return float(np.average(change, weights=first.sample_weight)) if bounded or not change.any() else 1.0


def _resample_jointly(
    first: Scored, second: Scored, adaptive: bool, resampling: Resampling
) -> tuple[BootstrapBins, BootstrapBins]:
    """Resample two methods' rows together, by cells of one method's confidence and outcome times the other's."""
    bins, keys = [], []
    for one in (first, second):
        index, edges = one.bin_of_row(adaptive=adaptive)
        low, high = edges[index], edges[index + 1]
        part = np.clip((one.rows.score - low) / (high - low) * _JOINT_PARTS, 0, _JOINT_PARTS - 1).astype(np.int64)
        keys.append((index * _JOINT_PARTS + part) * 2 + one.rows.outcome.astype(np.int64))
        bins.append(index)
    joint = keys[0] * (int(keys[1].max()) + 1) + keys[1]
    some = np.ones(len(joint), bool) if first.sample_weight is None else first.sample_weight > 0
    weights = np.ones(int(some.sum())) if first.sample_weight is None else first.sample_weight[some]
    _, cell = np.unique(joint[some], return_inverse=True)
    count, squared = np.bincount(cell, weights), np.bincount(cell, weights**2)
    drawn = resample_cells(count, squared, resampling)
    result = []
    for index, one in zip(bins, (first, second), strict=True):
        bin_of_cell = np.zeros(len(count), np.int64)
        bin_of_cell[cell] = index[some]
        confidence, hits = (np.bincount(cell, weights * x[some]) for x in (one.rows.score, one.rows.outcome))
        result.append(BootstrapBins.of_cells(bin_of_cell, count, confidence, hits, drawn))
    return result[0], result[1]
