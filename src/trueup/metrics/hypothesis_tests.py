"""Tests of the hypothesis that a network is calibrated, on tallies as the intervals are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np
from scipy.special import chdtrc, erfc, expit, gammaln, logit, ndtr, ndtri

from trueup._core import native
from trueup._core.arrays import as_arrays, as_weights, check_share
from trueup._core.bins import BINNED_ERRORS, BINS
from trueup._core.clusters import ClustersLike, as_clusters, degrees_of_freedom, t_quantile, z_of_t
from trueup._core.errors import InputError
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.tally import ClusterSums, Tally
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.events import Points, kuiper_of
from trueup.metrics.intervals import ScoredRows
from trueup.metrics.resampling import (
    CELLS_PER_BIN,
    Resampling,
    ResamplingOptions,
    coarse_cells,
    gap_noise,
    gather_cells,
    membership,
)

_RANGE_CELLS = 1024
"""Into how many cells the scores are gathered where the range of clusters is simulated."""
_ROUNDING = 1e-9
"""Of the rows: a smaller gap between sums is that of rounding."""


@dataclass(frozen=True, eq=False)
class Consistency:
    """A test of the hypothesis that a network is calibrated."""

    statistic: float
    p_value: float
    expected: float
    """The mean statistic of a calibrated network with these confidences: what is bias, not miscalibration."""
    low: np.ndarray
    """Lower end of each bin's band of accuracies under calibration; NaN where the bin is empty."""
    high: np.ndarray
    n_resamples: int

    @property
    def excess(self) -> float:
        """The statistic less what a calibrated network would show."""
        return self.statistic - self.expected


class Spiegelhalter(NamedTuple):
    """Spiegelhalter's test."""

    z: float
    p_value: float


def consistency(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    metric: str = "ece",
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    **resampling: Unpack[ResamplingOptions],
) -> Consistency:
    """Test calibration by drawing outcomes from the probabilities themselves: of class 1 where there are two classes,
    of the predicted class where there are more, or with `top_label`.

    p = (1 + #{S_r ≥ S}) / (R + 1), S_r the metric when each row comes true with its own probability.
    With `clusters`, one value a row, S_r turns over what whole clusters show, outcome − score in the bins, by random
    signs: rows of one cluster are correlated, and drawing them one by one would find errors where there are none.
    Bröcker & Smith (2007); Vaicenavicius et al. (2019); Cameron, Gelbach & Miller (2008).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> consistency(z, y).p_value > 0.01 > consistency(3 * z, y).p_value
    True
    """
    tally = _tally(logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return consistency_of_tally(tally, Resampling(**resampling), metric=metric)


def _tally(logits: Any, labels: Any, **options: Any) -> Tally:
    """A tally with a sum for each cluster, however many there are."""
    if options["clusters"] is None:
        return Tally.of(logits, labels, **options)
    return ScoredRows.of(logits, labels, **options).tally


def consistency_of_tally(tally: Tally, resampling: Resampling, *, metric: str = "ece") -> Consistency:
    """Test calibration from a tally, as `consistency` does."""
    tail, n_resamples = resampling.tail, resampling.n_resamples
    if metric not in (*BINNED_ERRORS, "aece"):
        raise ValueError(f"metric must be one of {', '.join((*BINNED_ERRORS, 'aece'))}, got {metric!r}")
    if not tally.n:
        nothing = np.full(tally.grid.bins, np.nan)
        return Consistency(math.nan, math.nan, math.nan, nothing, nothing, n_resamples)
    error = BINNED_ERRORS["ece" if metric == "aece" else metric]
    if tally.clusters is not None:
        if metric == "aece":
            got = "aece, whose bins are not those of the tally"
            raise InputError("metric", f"be one of {', '.join(BINNED_ERRORS)} with clusters", got)
        sums, top = _check_clusters(tally.clusters), tally.score_bins
        rows, claimed, right = top.count, top.confidence, top.hits
        # Under calibration what a cluster shows is as likely turned over.
        signs = resampling.generator().integers(0, 2, (n_resamples, len(sums.weight))) * 2.0 - 1.0
        simulated = error(rows, claimed, claimed + signs @ sums.gap)
        # What a calibrated network would show has the spread of the clusters about their mean, not about 0.
        drawn = claimed + gap_noise(sums.gap, sums.weight, resampling)
        shown = error(rows, claimed, drawn)
        drawn = np.clip(drawn, 0.0, rows)
    else:
        index, count, confidence, squared = gather_cells(tally.grid, metric == "aece")
        both, stated, squares = count.sum(axis=0), confidence.sum(axis=0), squared.sum(axis=0)
        full, member = both > 0, membership(index)
        chance = np.clip(stated / np.where(full, both, 1.0), 0.0, 1.0)
        # A cell of weight W counts as W²/Σw² rows of equal weight.
        rows_of_cell = np.where(full, np.rint(both**2 / np.where(full, squares, 1.0)), 0.0)
        size = n_resamples, len(index)
        hits = resampling.generator().binomial(rows_of_cell.astype(np.int64), chance, size=size)
        rows, claimed, right = both @ member, stated @ member, count[1] @ member
        drawn = (both / np.maximum(rows_of_cell, 1.0) * hits) @ member
        simulated = shown = error(rows, claimed, drawn)
    statistic = float(error(rows, claimed, right))
    low, high = np.quantile(drawn / np.where(rows > 0, rows, np.nan), [tail, 1 - tail], axis=0)
    return Consistency(statistic, _rarity(simulated, statistic), float(shown.mean()), low, high, n_resamples)


def _rarity(simulated: np.ndarray, statistic: float) -> float:
    """The p-value (1 + #{S_r ≥ S}) / (R + 1)."""
    return (1 + int((simulated >= statistic - 1e-12).sum())) / (len(simulated) + 1)


def _check_clusters(clusters: ClusterSums) -> ClusterSums:
    """The sums of clusters that have rows; a single cluster shows no noise."""
    sums = clusters.drop_empty()
    if len(sums.weight) < 2:
        raise InputError("clusters", "be at least 2", f"{len(sums.weight)}", "intervals need several clusters")
    return sums


def _cluster_z(sums: np.ndarray, weight: np.ndarray) -> float:
    """Student's t of sums by cluster that are 0 on average, as a standard normal number."""
    mean, spread = sums.mean(), sums.std(ddof=1)
    if not spread > 0:
        return math.nan
    return z_of_t(float(mean / spread * math.sqrt(len(sums))), degrees_of_freedom(weight))


def spiegelhalter(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
) -> Spiegelhalter:
    """Spiegelhalter's z = Σ(a − c)(1 − 2c) / √Σ(1 − 2c)² c(1 − c), standard normal under calibration; two-sided p.

    Above ½ a positive z means overconfidence, below ½ a negative one. NaN where every confidence is ½ or 1 and nothing
    can be learnt. Of two classes c = P(class 1), which gives the same z as folding them does. With weights the sums
    are Σw and, in the root, Σw². With `clusters` the numerator is summed by cluster and held against how these sums
    differ, by Student's t; z is the standard normal number that is as rare. Spiegelhalter (1986).

    >>> spiegelhalter([[0.0, 0.0]], [1]).z
    nan
    >>> round(spiegelhalter([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]).z, 4)
    1.7302
    """
    tally = _tally(logits, labels, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return spiegelhalter_of_tally(tally)


def spiegelhalter_of_tally(tally: Tally) -> Spiegelhalter:
    """Spiegelhalter's test from a tally."""
    if tally.clusters is not None and tally.n:
        sums = _check_clusters(tally.clusters)
        z = _cluster_z(sums.mean("calibration_gap"), sums.weight)
    else:
        variance = tally.calibration_variance.total
        # A confidence of ½ may come rounded, which makes 1 − 2c some 1e-16 instead of 0.
        least = 1e-24 * tally.accuracy.squared_weights
        z = tally.calibration_gap.total / math.sqrt(variance) if variance > least else math.nan
    return Spiegelhalter(z, float(2 * ndtr(-abs(z))))


@dataclass(frozen=True)
class CalibrationTests:
    """Whether the confidences of a method could be those of a calibrated network."""

    p_value: float
    """Of the ECE under calibration, by consistency resampling."""
    expected: float
    """The ECE that a calibrated network with these confidences would show on average."""
    spiegelhalter: float
    """Spiegelhalter's z."""
    spiegelhalter_p: float
    overconfidence_z: float
    """Σ(c − a) / √Σ c(1 − c), standard normal under calibration: positive where it claims too much."""
    n_resamples: int = 1000
    """Of the consistency test."""
    slope: float = math.nan
    """Of the logistic regression of what happened on the log-odds of what was predicted; below 1, too extreme."""
    slope_error: float = math.nan

    @classmethod
    def of(cls, tally: Tally, resampling: Resampling, scored: ScoredRows | None = None) -> CalibrationTests:
        """Run both tests on a tally; the slope is exact where the rows themselves are known, and are of an event.

        Where the tally has clusters, the error of the slope is that of points by cluster, or NaN.
        """
        test, normal = consistency_of_tally(tally, resampling), spiegelhalter_of_tally(tally)
        event = None if scored is None or scored.odds is None else scored
        fit = (Points.of_grid(tally.grid) if event is None else event.points).recalibration
        slope_error = fit.slope_error
        excess, variance = tally.predicted.total - tally.observed.total, tally.score_variance.total
        z = excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
        if tally.clusters is not None:
            sums, slope_error = tally.clusters.drop_empty(), math.nan
            z = _cluster_z(sums.mean("predicted") - sums.mean("observed"), sums.weight) if tally.n else math.nan
            if event is not None:  # as wide as Student's t asks, for those who take 1.96 of it
                clustered = event.clustered_points()
                (error,) = clustered.errors(["calibration_slope"]).values()
                slope_error = error * t_quantile(0.025, clustered.df) / 1.96
        z = z if tally.n else math.nan
        return cls(test.p_value, test.expected, *normal, z, resampling.n_resamples, fit.slope, slope_error)


@dataclass(frozen=True)
class DetectableError:
    """The smallest calibration error that the consistency test finds in so many rows."""

    rows: int
    error: float
    """The larger of the two below: every error of this size is found; NaN where even the largest would be missed."""
    overconfident: float
    """Mean |confidence − truth| where the truth is a softer version of the confidences."""
    underconfident: float
    power: float
    level: float


def detectable_error(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    rows: int | None = None,
    power: float = 0.8,
    level: float = 0.95,
    bins: int = BINS,
    n_resamples: int = 1000,
    seed: int = 0,
) -> DetectableError:
    """The smallest calibration error that the consistency test of `rows` rows detects with this power.

    Truth is distorted from the file's own confidences c by a temperature, σ(s·logit c), s below 1 for overconfidence
    and above for underconfidence, until the test at level α rejects in the share `power` of simulated data sets; the
    error is the mean |c − σ(s·logit c)| there. Only the confidences matter, not the labels.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> few, many = (detectable_error(z, y, rows=rows).error for rows in (500, 5000))
    >>> 0.05 < few < 0.08, 0.015 < many < 0.03
    (True, True)
    """
    options = ResamplingOptions(level=level, n_resamples=n_resamples, seed=seed)
    return detectable_error_of_tally(Tally.of(logits, labels, bins=bins), rows=rows, power=power, **options)


def detectable_error_of_tally(
    tally: Tally, *, rows: int | None = None, power: float = 0.8, **resampling: Unpack[ResamplingOptions]
) -> DetectableError:
    """The smallest detectable error from a tally, as `detectable_error` finds it."""
    check_share(power, "power")
    simulation = Resampling(**resampling)
    level, n_resamples, rng = simulation.level, simulation.n_resamples, simulation.generator()
    n = tally.n if rows is None else int(rows)
    if not tally.n or n < 1:
        return DetectableError(n, math.nan, math.nan, math.nan, power, level)
    # Truth is distorted in the grid's own cells: next to 1 a distortion is far from even within a coarser one.
    fine = np.flatnonzero(tally.grid.rows > 0)
    rows_of_cell = tally.grid.rows[fine]
    weight, stated = rows_of_cell / rows_of_cell.sum(), tally.grid.confidence.sum(axis=0)[fine] / rows_of_cell
    stated = np.clip(stated, 1e-12, 1 - 1e-12)
    odds = logit(stated)
    coarse, cell = np.unique(coarse_cells(tally.grid, False)[fine], return_inverse=True)
    mass, member = np.bincount(cell, weight), membership(coarse // CELLS_PER_BIN)

    def gather(values: np.ndarray) -> np.ndarray:
        return np.clip(np.bincount(cell, weight * values) / mass, 0.0, 1.0)

    mean = gather(stated)
    drawn = rng.multinomial(n, mass, size=n_resamples)
    rows_of_bin, claimed = drawn @ member, (drawn * mean) @ member
    # The test knows the confidences it is given, and its critical value is the larger the more errors they foresee.
    scale = _poisson_deviation((drawn * gather(stated * (1 - stated))) @ member).sum(axis=1) / n

    def statistics(truth: np.ndarray, n_sets: int = n_resamples) -> np.ndarray:
        """The ECE of simulated data sets, as a multiple of what calibration would show."""
        right = rng.binomial(drawn[:n_sets], gather(truth)) @ member
        ece = BINNED_ERRORS["ece"](rows_of_bin[:n_sets], claimed[:n_sets], right)
        return ece / np.maximum(scale[:n_sets], 1e-300)

    critical = float(np.quantile(np.concatenate([statistics(stated) for _ in range(_NEAR)]), level))

    def find(sign: float) -> float:
        def truth(size: float) -> np.ndarray:
            return expit(odds * math.exp(sign * size))

        def power_at(size: float, n_sets: int = n_resamples) -> float:
            return float((statistics(truth(size), n_sets) > critical).mean())

        low, high = 0.0, 6.0
        if power_at(high) < power:
            return math.nan
        few = max(n_resamples // 4, 1)
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (low, middle) if power_at(middle, few) >= power else (middle, high)
        size = high
        for width in (0.2, 0.08):
            size = _solve_power(power_at, size, power, width, 0.5 / n_resamples)
        return float(weight @ np.abs(truth(size) - stated))

    over, under = find(-1.0), find(1.0)
    return DetectableError(n, max(over, under), over, under, power, level)


_NEAR = 6
"""Simulations of the power are repeated at so many places around the answer, and a line through them gives it."""


def _solve_power(power_at: Callable[[float], float], start: float, power: float, width: float, least: float) -> float:
    """Where the power is the wanted one: near `start` its normal quantile is a line, so noise averages out."""
    sizes = start * np.linspace(1 - width, 1 + width, _NEAR)
    quantiles = ndtri(np.clip([power_at(size) for size in sizes], least, 1 - least))
    slope, level = np.polyfit(sizes - start, quantiles, 1)
    moved = start + (float(ndtri(power)) - level) / slope if slope > 0 else start
    return float(np.clip(moved, 0.8 * start, 1.2 * start))


def _poisson_deviation(mean: np.ndarray) -> np.ndarray:
    """E|X − λ| of a Poisson count: 2 e^(−λ) λ^(⌊λ⌋+1) / ⌊λ⌋!, about √(2λ/π) where λ is large."""
    whole, rate = np.floor(mean), np.maximum(mean, 1e-300)
    return 2 * np.exp((whole + 1) * np.log(rate) - rate - gammaln(whole + 1))


class EventTest(NamedTuple):
    """A test of the hypothesis that the probabilities of an event are calibrated."""

    statistic: float
    p_value: float


def kuiper_test(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    n_resamples: int = 1000,
    seed: int = 0,
) -> EventTest:
    """Kuiper's test of calibration: the statistic of `kuiper` over its standard error, √Σ p(1 − p)/n.

    Under calibration the cumulated gap is a random walk, and its range that of Brownian motion over a unit of time:
    P(R > r) = 4 Σ_k (−1)^{k−1} k erfc(k r/√2). Needs no bins. With weights the sums are Σw and Σw². With `clusters`,
    one value a row, rows of one cluster are correlated: its law is then that of random signs of whole clusters.

    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(500)
    >>> y = (rng.random(500) < p).astype(int)
    >>> kuiper_test(np.log(np.stack([1 - p, p], axis=1)), y).p_value > 0.05
    True

    Feller (1951), The asymptotic distribution of the range of sums; Arrieta-Ibarra et al. (2022).
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    variance = float(points.squared.sum(axis=0) @ (points.score * (1 - points.score)))
    gap = kuiper_of(points) * points.total if points.total else 0.0
    if variance <= 0 and gap <= _ROUNDING * points.total:
        return EventTest(math.nan, math.nan)
    statistic = gap / math.sqrt(variance) if variance > 0 else math.inf  # what was certain did not happen
    if clusters is None:
        return EventTest(statistic, brownian_range_tail(statistic))
    # How often is the range as large when the gaps of whole clusters are turned over at random?
    z, y = as_arrays(logits, labels)
    score, outcome = scores_and_outcomes(z, y, top_label=top_label)
    together = as_clusters(clusters, len(z), min_clusters=2)
    w = as_weights(sample_weight, len(z))
    assert together is not None
    gap = outcome - score if w is None else w * (outcome - score)
    place = np.unique(score, return_inverse=True)[1]
    block, cells = together.block, int(place.max()) + 1
    if cells > _RANGE_CELLS:
        place, cells = place * _RANGE_CELLS // cells, _RANGE_CELLS
    order = np.argsort(block, kind="stable")
    block, place, gap = block[order], place[order], gap[order]
    rng, steps = np.random.default_rng(seed), np.zeros((n_resamples + 1, cells))
    for some in native.row_chunks(int(block[-1]) + 1, cells + n_resamples, native.LARGE_CHUNK):
        rows, width = slice(*np.searchsorted(block, [some.start, some.stop])), some.stop - some.start
        index = (block[rows] - some.start) * cells + place[rows]
        of_block = np.bincount(index, gap[rows], width * cells).reshape(-1, cells)
        steps[0] += of_block.sum(axis=0)
        steps[1:] += (rng.integers(0, 2, (n_resamples, width)) * 2.0 - 1.0) @ of_block
    walks = np.cumsum(steps, axis=1)
    ranges = np.maximum(walks.max(axis=1), 0.0) - np.minimum(walks.min(axis=1), 0.0)
    return EventTest(statistic, _rarity(ranges[1:], float(ranges[0])))


def brownian_range_tail(r: float) -> float:
    """P(R > r) for the range R of Brownian motion over a unit of time.

    >>> round(brownian_range_tail(2.497), 3)
    0.05
    """
    if r < 0.5:  # the series alternates without end near 0; at ½ it is 1 to seven digits
        return 1.0
    k = np.arange(1, 101)
    return float(np.clip(4 * ((-1.0) ** (k - 1) * k * erfc(k * r / math.sqrt(2))).sum(), 0.0, 1.0))


def hosmer_lemeshow(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    groups: int = 10,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> EventTest:
    """Hosmer and Lemeshow's test, which is weak and arbitrary: here for those who are asked for it.

    χ² = Σ_g (O_g − E_g)² / (E_g (1 − E_g/n_g)) over groups of equal size by score, with as many degrees of freedom, as
    the model was not fitted to these rows. It depends on the groups, misses what cancels inside them, and rejects
    every model of many rows; `kuiper_test` and `consistency` serve better. With weights n is (Σw)²/Σw².

    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(500)
    >>> y = (rng.random(500) < p).astype(int)
    >>> hosmer_lemeshow(np.log(np.stack([1 - p, p], axis=1)), y).p_value > 0.05
    True

    Hosmer & Lemeshow (1980).
    """
    if isinstance(groups, bool) or not isinstance(groups, (int, np.integer)) or groups < 2:
        raise InputError("groups", "be a whole number of at least 2", repr(groups))
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    if not points.total:
        return EventTest(math.nan, math.nan)
    sums = np.stack([points.count, points.hits, points.count * points.score])
    unit = points.effective_rows / points.total
    n, happened, expected = unit * np.add.reduceat(sums, points.chunk_starts(int(groups)), axis=1)
    variance = expected * (1 - expected / n)
    some = variance > 0
    if (np.abs(happened - expected) > _ROUNDING * n)[~some].any():  # what was certain did not happen
        return EventTest(math.inf, 0.0)
    statistic = float(((happened - expected)[some] ** 2 / variance[some]).sum())
    return EventTest(statistic, float(chdtrc(max(int(some.sum()), 1), statistic)))
