"""Tests of the hypothesis that a network is calibrated, on tallies."""

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
"""Number of score cells when the range is simulated by cluster."""
_ROUNDING_SHARE = 1e-9
"""Gaps between sums below this share of the rows are rounding errors."""


@dataclass(frozen=True, eq=False)
class Consistency:
    """A test of the hypothesis that a network is calibrated."""

    statistic: float
    p_value: float
    expected: float
    """Mean statistic under calibration with these confidences, its bias."""
    low: np.ndarray
    """Lower end of each bin's band of accuracies under calibration; NaN where the bin is empty."""
    high: np.ndarray
    n_resamples: int

    @property
    def excess(self) -> float:
        """The statistic minus its mean under calibration."""
        return self.statistic - self.expected


class Spiegelhalter(NamedTuple):
    """The result of Spiegelhalter's test."""

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
    """Test calibration by drawing outcomes from the probabilities (consistency resampling).

    With two classes the outcome is class 1. With more classes, or with `top_label`, it is that the prediction is right.
    The p-value is (1 + #{S_r ≥ S}) / (R + 1), with S_r the metric of outcomes drawn from the scores. With clusters, S_r
    is computed with the gaps (outcome − score) of whole clusters under random signs. Drawing rows one by one would
    reject too often, since the rows of a cluster are correlated.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    metric
        Name of a binned error: "ece", "aece", "mce", "rmsce", "average_ce", "overconfidence" or "underconfidence".
    bins
        Number of bins.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    Consistency
        The statistic, its p-value, and the band of accuracies under calibration.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> consistency(z, y).p_value > 0.01 > consistency(3 * z, y).p_value
    True

    References
    ----------
    Bröcker & Smith (2007), Increasing the reliability of reliability diagrams.
    Vaicenavicius et al. (2019), Evaluating model calibration in classification, arXiv:1902.06977.
    Cameron, Gelbach & Miller (2008), Bootstrap-based improvements for inference with clustered errors.
    """
    tally = _tally(logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return consistency_of_tally(tally, Resampling(**resampling), metric=metric)


def _tally(logits: Any, labels: Any, **options: Any) -> Tally:
    """Return a tally with the sums of every cluster."""
    if options["clusters"] is None:
        return Tally.of(logits, labels, **options)
    return ScoredRows.of(logits, labels, **options).tally


def consistency_of_tally(tally: Tally, resampling: Resampling, *, metric: str = "ece") -> Consistency:
    """Test calibration from a tally, as `consistency` does."""
    tail, n_resamples = resampling.tail, resampling.n_resamples
    if metric not in (*BINNED_ERRORS, "aece"):
        raise ValueError(f"metric must be one of {', '.join((*BINNED_ERRORS, 'aece'))}, got {metric!r}")
    if not tally.n:
        empty = np.full(tally.grid.bins, np.nan)
        return Consistency(math.nan, math.nan, math.nan, empty, empty, n_resamples)
    error = BINNED_ERRORS["ece" if metric == "aece" else metric]
    if tally.clusters is not None:
        if metric == "aece":
            got = "aece, whose bins are not those of the tally"
            raise InputError("metric", f"be one of {', '.join(BINNED_ERRORS)} with clusters", got)
        sums, top = _check_clusters(tally.clusters), tally.score_bins
        rows, claimed, right = top.count, top.confidence, top.hits
        # Under calibration the gaps of a cluster are as likely with the opposite sign.
        signs = resampling.generator().integers(0, 2, (n_resamples, len(sums.weight))) * 2.0 - 1.0
        simulated = error(rows, claimed, claimed + signs @ sums.gap)
        # The expected error uses the spread of the clusters about their mean, not about 0.
        drawn = claimed + gap_noise(sums.gap, sums.weight, resampling)
        under_null = error(rows, claimed, drawn)
        drawn = np.clip(drawn, 0.0, rows)
    else:
        index, count, confidence, squared = gather_cells(tally.grid, metric == "aece")
        both, stated, squares = count.sum(axis=0), confidence.sum(axis=0), squared.sum(axis=0)
        full, member = both > 0, membership(index)
        mean_score = np.clip(stated / np.where(full, both, 1.0), 0.0, 1.0)
        # A cell of weight W counts as W²/Σw² rows of equal weight.
        rows_of_cell = np.where(full, np.rint(both**2 / np.where(full, squares, 1.0)), 0.0)
        size = n_resamples, len(index)
        hits = resampling.generator().binomial(rows_of_cell.astype(np.int64), mean_score, size=size)
        rows, claimed, right = both @ member, stated @ member, count[1] @ member
        drawn = (both / np.maximum(rows_of_cell, 1.0) * hits) @ member
        simulated = under_null = error(rows, claimed, drawn)
    statistic = float(error(rows, claimed, right))
    low, high = np.quantile(drawn / np.where(rows > 0, rows, np.nan), [tail, 1 - tail], axis=0)
    return Consistency(statistic, _rarity(simulated, statistic), float(under_null.mean()), low, high, n_resamples)


def _rarity(simulated: np.ndarray, statistic: float) -> float:
    """Return the p-value (1 + #{S_r ≥ S}) / (R + 1)."""
    return (1 + int((simulated >= statistic - 1e-12).sum())) / (len(simulated) + 1)


def _check_clusters(clusters: ClusterSums) -> ClusterSums:
    """Return the sums of clusters with rows; reject a single cluster, which shows no noise."""
    sums = clusters.drop_empty()
    if len(sums.weight) < 2:
        raise InputError("clusters", "be at least 2", f"{len(sums.weight)}", "intervals need several clusters")
    return sums


def _cluster_z(sums: np.ndarray, weight: np.ndarray) -> float:
    """Convert Student's t of cluster sums with true mean 0 to a standard normal number."""
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
    """Run Spiegelhalter's test, z = Σ(a − c)(1 − 2c) / √Σ(1 − 2c)² c(1 − c).

    Under calibration z is standard normal; the p-value is two-sided. Above ½ a positive z means overconfidence, below ½
    a negative one. NaN where every confidence is ½ or 1. With two classes c = P(class 1), which gives the same z as the
    predicted class. With weights the sums are Σw and, in the root, Σw². With clusters, Student's t of the cluster sums
    is converted to a standard normal z.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).

    Returns
    -------
    Spiegelhalter
        z and its p-value.

    Examples
    --------
    >>> spiegelhalter([[0.0, 0.0]], [1]).z
    nan
    >>> round(spiegelhalter([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]).z, 4)
    1.7302

    References
    ----------
    Spiegelhalter (1986), Probabilistic prediction in patient management and clinical trials.
    """
    tally = _tally(logits, labels, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return spiegelhalter_of_tally(tally)


def spiegelhalter_of_tally(tally: Tally) -> Spiegelhalter:
    """Run Spiegelhalter's test on a tally."""
    if tally.clusters is not None and tally.n:
        sums = _check_clusters(tally.clusters)
        z = _cluster_z(sums.mean("calibration_gap"), sums.weight)
    else:
        variance = tally.calibration_variance.total
        # A confidence of ½ may be rounded, so that 1 − 2c is about 1e-16 instead of 0.
        smallest = 1e-24 * tally.accuracy.squared_weights
        z = tally.calibration_gap.total / math.sqrt(variance) if variance > smallest else math.nan
    return Spiegelhalter(z, float(2 * ndtr(-abs(z))))


@dataclass(frozen=True)
class CalibrationTests:
    """Tests of the hypothesis that a method's confidences are calibrated."""

    p_value: float
    """P-value of the ECE, by consistency resampling."""
    expected: float
    """Mean ECE of a calibrated network with these confidences."""
    spiegelhalter: float
    """Spiegelhalter's z."""
    spiegelhalter_p: float
    overconfidence_z: float
    """Σ(c − a) / √Σ c(1 − c), standard normal under calibration, positive if overconfident."""
    n_resamples: int = 1000
    """Number of resamples of the consistency test."""
    slope: float = math.nan
    """Slope of the logistic regression of the outcome on the log-odds of the score; below 1, too extreme."""
    slope_error: float = math.nan

    @classmethod
    def of(cls, tally: Tally, resampling: Resampling, scored: ScoredRows | None = None) -> CalibrationTests:
        """Test a tally; with clusters the slope's error needs the rows of an event, else it is NaN."""
        test, normal = consistency_of_tally(tally, resampling), spiegelhalter_of_tally(tally)
        event = None if scored is None or scored.odds is None else scored
        fit = (Points.of_grid(tally.grid) if event is None else event.points).recalibration
        slope_error = fit.slope_error
        excess, variance = tally.predicted.total - tally.observed.total, tally.score_variance.total
        z = excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
        if tally.clusters is not None:
            sums, slope_error = tally.clusters.drop_empty(), math.nan
            z = _cluster_z(sums.mean("predicted") - sums.mean("observed"), sums.weight) if tally.n else math.nan
            if event is not None:  # scaled so that 1.96 of it is Student's interval
                clustered = event.clustered_points()
                (error,) = clustered.errors(["calibration_slope"]).values()
                slope_error = error * t_quantile(0.025, clustered.df) / 1.96
        z = z if tally.n else math.nan
        return cls(test.p_value, test.expected, *normal, z, resampling.n_resamples, fit.slope, slope_error)


@dataclass(frozen=True)
class DetectableError:
    """The smallest calibration error that the consistency test detects with a number of rows."""

    rows: int
    error: float
    """The larger of the two below; NaN where even the largest error would be missed."""
    overconfident: float
    """Mean |confidence − truth| of the smallest detectable overconfidence."""
    underconfident: float
    """Mean |confidence − truth| of the smallest detectable underconfidence."""
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
    """Find the smallest calibration error that the consistency test of `rows` rows detects with this power.

    Truths are distortions σ(s·logit c) of the file's own confidences c. s < 1 means overconfidence, s > 1
    underconfidence. The error is the mean |c − σ(s·logit c)| at which the test rejects in the share `power` of
    simulated data sets. It depends on the confidences only, not on the labels.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    rows
        Number of rows; by default that of the file.
    power
        Probability of detection.
    level
        Level of the test, such as 0.95 for a test at 5 %.
    bins
        Number of bins.
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.

    Returns
    -------
    DetectableError
        The smallest errors in both directions.

    Examples
    --------
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
    """Find the smallest detectable error from a tally, as `detectable_error` does."""
    check_share(power, "power")
    simulation = Resampling(**resampling)
    level, n_resamples, rng = simulation.level, simulation.n_resamples, simulation.generator()
    n = tally.n if rows is None else int(rows)
    if not tally.n or n < 1:
        return DetectableError(n, math.nan, math.nan, math.nan, power, level)
    # The truth is distorted in the cells of the grid: near 1 a distortion varies within coarser cells.
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
    # The critical value grows with the error rate that the drawn confidences imply.
    scale = _poisson_deviation((drawn * gather(stated * (1 - stated))) @ member).sum(axis=1) / n

    def statistics(truth: np.ndarray, n_sets: int = n_resamples) -> np.ndarray:
        """Return the ECE of simulated data sets, relative to that of calibrated ones."""
        right = rng.binomial(drawn[:n_sets], gather(truth)) @ member
        ece = BINNED_ERRORS["ece"](rows_of_bin[:n_sets], claimed[:n_sets], right)
        return ece / np.maximum(scale[:n_sets], 1e-300)

    critical = float(np.quantile(np.concatenate([statistics(stated) for _ in range(_N_NEAR)]), level))

    def find_error(sign: float) -> float:
        def truth(size: float) -> np.ndarray:
            return expit(odds * math.exp(sign * size))

        def power_at(size: float, n_sets: int = n_resamples) -> float:
            return float((statistics(truth(size), n_sets) > critical).mean())

        low, high = 0.0, 6.0
        if power_at(high) < power:
            return math.nan
        n_coarse = max(n_resamples // 4, 1)
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (low, middle) if power_at(middle, n_coarse) >= power else (middle, high)
        size = high
        for width in (0.2, 0.08):
            size = _solve_power(power_at, size, power, width, 0.5 / n_resamples)
        return float(weight @ np.abs(truth(size) - stated))

    over, under = find_error(-1.0), find_error(1.0)
    return DetectableError(n, max(over, under), over, under, power, level)


_N_NEAR = 6
"""Number of sizes near the answer at which the power is simulated again."""


def _solve_power(
    power_at: Callable[[float], float], start: float, power: float, width: float, min_power: float
) -> float:
    """Find the size with this power by a line through the normal quantiles of powers near `start`."""
    sizes = start * np.linspace(1 - width, 1 + width, _N_NEAR)
    quantiles = ndtri(np.clip([power_at(size) for size in sizes], min_power, 1 - min_power))
    slope, level = np.polyfit(sizes - start, quantiles, 1)
    moved = start + (float(ndtri(power)) - level) / slope if slope > 0 else start
    return float(np.clip(moved, 0.8 * start, 1.2 * start))


def _poisson_deviation(mean: np.ndarray) -> np.ndarray:
    """Return E|X − λ| of a Poisson count: 2 e^(−λ) λ^(⌊λ⌋+1) / ⌊λ⌋!, about √(2λ/π) where λ is large."""
    whole, rate = np.floor(mean), np.maximum(mean, 1e-300)
    return 2 * np.exp((whole + 1) * np.log(rate) - rate - gammaln(whole + 1))


class EventTest(NamedTuple):
    """The result of a test that the probabilities of an event are calibrated."""

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
    """Run Kuiper's test of calibration: the statistic of `kuiper` over its standard error, √Σ p(1 − p)/n.

    Under calibration the cumulated gap is a random walk. Its range is that of Brownian motion over a unit of time: P(R
    > r) = 4 Σ_k (−1)^{k−1} k erfc(k r/√2). No bins are needed. With weights the sums are Σw and Σw². With clusters the
    null distribution comes from random signs of whole clusters.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.

    Returns
    -------
    EventTest
        The statistic and its p-value.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(500)
    >>> y = (rng.random(500) < p).astype(int)
    >>> kuiper_test(np.log(np.stack([1 - p, p], axis=1)), y).p_value > 0.05
    True

    References
    ----------
    Feller (1951), The asymptotic distribution of the range of sums of independent random variables.
    Arrieta-Ibarra et al. (2022), Metrics of calibration for probabilistic predictions, arXiv:2205.09680.
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    variance = float(points.squared.sum(axis=0) @ (points.score * (1 - points.score)))
    gap = kuiper_of(points) * points.total if points.total else 0.0
    if variance <= 0 and gap <= _ROUNDING_SHARE * points.total:
        return EventTest(math.nan, math.nan)
    statistic = gap / math.sqrt(variance) if variance > 0 else math.inf  # a certain outcome did not happen
    if clusters is None:
        return EventTest(statistic, brownian_range_tail(statistic))
    # Null distribution: the range under random signs of whole clusters.
    z, y = as_arrays(logits, labels)
    score, outcome = scores_and_outcomes(z, y, top_label=top_label)
    of_row = as_clusters(clusters, len(z), min_clusters=2)
    w = as_weights(sample_weight, len(z))
    assert of_row is not None
    gap = outcome - score if w is None else w * (outcome - score)
    cell = np.unique(score, return_inverse=True)[1]
    block, cells = of_row.block, int(cell.max()) + 1
    if cells > _RANGE_CELLS:
        cell, cells = cell * _RANGE_CELLS // cells, _RANGE_CELLS
    order = np.argsort(block, kind="stable")
    block, cell, gap = block[order], cell[order], gap[order]
    rng, steps = np.random.default_rng(seed), np.zeros((n_resamples + 1, cells))
    for some in native.row_chunks(int(block[-1]) + 1, cells + n_resamples, native.LARGE_CHUNK):
        rows, width = slice(*np.searchsorted(block, [some.start, some.stop])), some.stop - some.start
        index = (block[rows] - some.start) * cells + cell[rows]
        of_block = np.bincount(index, gap[rows], width * cells).reshape(-1, cells)
        steps[0] += of_block.sum(axis=0)
        steps[1:] += (rng.integers(0, 2, (n_resamples, width)) * 2.0 - 1.0) @ of_block
    walks = np.cumsum(steps, axis=1)
    ranges = np.maximum(walks.max(axis=1), 0.0) - np.minimum(walks.min(axis=1), 0.0)
    return EventTest(statistic, _rarity(ranges[1:], float(ranges[0])))


def brownian_range_tail(r: float) -> float:
    """Return P(R > r) for the range R of Brownian motion over a unit of time.

    >>> round(brownian_range_tail(2.497), 3)
    0.05
    """
    if r < 0.5:  # the series does not converge at 0; at ½ it is 1 to seven digits
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
    """Run Hosmer and Lemeshow's test, for those who must report it; prefer `kuiper_test` or `consistency`.

    χ² = Σ_g (O_g − E_g)² / (E_g (1 − E_g/n_g)) over groups of equal size by score. The degrees of freedom equal the
    number of groups, since the model was not fitted to these rows. The test depends on the groups, misses errors that
    cancel inside them, and rejects every model with many rows. With weights n is (Σw)²/Σw².

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    groups
        Number of groups.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    EventTest
        The statistic and its p-value.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(500)
    >>> y = (rng.random(500) < p).astype(int)
    >>> hosmer_lemeshow(np.log(np.stack([1 - p, p], axis=1)), y).p_value > 0.05
    True

    References
    ----------
    Hosmer & Lemeshow (1980), Goodness of fit tests for the multiple logistic regression model.
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
    if (np.abs(happened - expected) > _ROUNDING_SHARE * n)[~some].any():  # a certain outcome did not happen
        return EventTest(math.inf, 0.0)
    statistic = float(((happened - expected)[some] ** 2 / variance[some]).sum())
    return EventTest(statistic, float(chdtrc(max(int(some.sum()), 1), statistic)))
