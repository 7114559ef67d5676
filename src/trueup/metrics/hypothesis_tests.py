"""Tests of the hypothesis that a network is calibrated, on tallies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
from scipy.special import chdtrc, erfc, expit, fdtrc, gammaln, logit, ndtr, ndtri

from trueup._core import native
from trueup._core.arrays import as_arrays, as_weights, check_share
from trueup._core.bins import BINNED_ERRORS, BINS
from trueup._core.clusters import ClustersLike, as_clusters, degrees_of_freedom, t_quantile, z_of_t
from trueup._core.errors import InputError
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.tally import ClusterSums, Tally
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.events import Points, kuiper_of, log_odds
from trueup.metrics.intervals import ScoredRows, cluster_bins, mean_interval
from trueup.metrics.resampling import (
    CELLS_PER_BIN,
    Resampling,
    ResamplingOptions,
    coarse_cells,
    gather_cells,
    membership,
    student_factors,
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
    scored = ScoredRows.of(
        logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters
    )
    return consistency_of_tally(scored.tally, Resampling(**resampling), metric=metric, scored=scored)


def consistency_of_tally(
    tally: Tally, resampling: Resampling, *, metric: str = "ece", scored: ScoredRows | None = None
) -> Consistency:
    """Test calibration from a tally, as `consistency` does; the adaptive error with clusters needs the rows."""
    tail, n_resamples, adaptive = resampling.tail, resampling.n_resamples, metric == "aece"
    if metric not in (*BINNED_ERRORS, "aece"):
        raise ValueError(f"metric must be one of {', '.join((*BINNED_ERRORS, 'aece'))}, got {metric!r}")
    if not tally.n:
        empty = np.full(tally.grid.bins, np.nan)
        return Consistency(math.nan, math.nan, math.nan, empty, empty, n_resamples)
    error = BINNED_ERRORS["ece" if adaptive else metric]
    if tally.clusters is not None:
        weight = _check_clusters(tally.clusters).weight
        if adaptive and scored is None:
            got = "aece, whose bins are not those of the tally"
            raise InputError("metric", f"be one of {', '.join(BINNED_ERRORS)} with clusters", got)
        noisy = cluster_bins(tally, resampling) if scored is None else scored.cluster_bins(adaptive, resampling)
        bins = scored.adaptive_bins()[0] if scored is not None and adaptive else tally.score_bins
        assert noisy.blocks is not None
        rows, claimed, right = bins.count, bins.confidence, bins.hits
        # Under calibration the gaps of a cluster are as likely with the opposite sign. Student's factor allows for the
        # skewness of the gaps with few clusters: without it the test at 5 % rejects in up to 12 % with ten clusters.
        rng = resampling.generator()
        signs = rng.integers(0, 2, (n_resamples, len(weight))) * 2.0 - 1.0
        signs *= student_factors(degrees_of_freedom(weight), n_resamples, rng)
        simulated = error(rows, claimed, claimed + signs @ noisy.blocks[1])
        # The expected error uses the spread of the clusters about their mean, not about 0.
        drawn = claimed + noisy.noise
        under_null = error(rows, claimed, drawn)
        drawn = np.clip(drawn, 0.0, rows)
    else:
        index, count, confidence, squared = gather_cells(tally.grid, adaptive)
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
    scored = ScoredRows.of(logits, labels, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    return spiegelhalter_of_tally(scored.tally)


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
    """All tests of the hypothesis that a method's scores are calibrated, and their combination."""

    p_value: float
    """Smallest p-value of `components` after Holm's correction."""
    components: Mapping[str, float]
    """P-values by test.

    "ece" and "aece" are consistency tests with bins of equal width and of equal mass. "mean" compares the mean score
    with the outcome. "intercept" and "slope" are Wald's tests of the logistic regression, "regression" is the score
    test of both. "classes" is the smallest score test of a class's probability, corrected for the number of classes.
    """
    expected: float
    """Mean ECE of a calibrated network with these confidences."""
    spiegelhalter: float
    """Spiegelhalter's z."""
    spiegelhalter_p: float
    overconfidence_z: float
    """Σ(c − a) / √Σ c(1 − c), standard normal under calibration, positive if overconfident."""
    n_resamples: int = 1000
    """Number of resamples of the consistency tests."""
    slope: float = math.nan
    """Slope of the logistic regression of the outcome on the log-odds of the score; below 1, too extreme."""
    slope_error: float = math.nan
    """Its standard error; with clusters scaled so that 1.96 of it is the half-width of Student's interval."""
    independent_rows: float = math.nan
    """Number of independent rows of equal weight with the same information about the mean."""

    @classmethod
    def of(cls, tally: Tally, resampling: Resampling, scored: ScoredRows | None = None) -> CalibrationTests:
        """Run all tests on a tally; with clusters, those that need the rows are left out without them."""
        test, normal = consistency_of_tally(tally, resampling, scored=scored), spiegelhalter_of_tally(tally)
        p_values = {"ece": test.p_value}
        points = Points.of_grid(tally.grid)
        fit = (points if scored is None else scored.points).recalibration
        errors = {"intercept": fit.intercept_error, "slope": fit.slope_error}
        excess, variance = tally.predicted.total - tally.observed.total, tally.score_variance.total
        z = excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
        independent = tally.effective_rows
        if tally.clusters is None:
            p_values["aece"] = consistency_of_tally(tally, resampling, metric="aece").p_value
            p_values["mean"], p_values["regression"] = _score_tests(points, resampling)
        elif tally.n:
            sums = tally.clusters.drop_empty()
            z = _cluster_z(sums.mean("predicted") - sums.mean("observed"), sums.weight)
            unit = tally.effective_rows / tally.accuracy.count  # weights in rows of equal weight
            gaps = unit * (sums.mean("observed") - sums.mean("predicted")), unit * sums.mean("slope_gap")
            p_values |= {
                "mean": float(2 * ndtr(-abs(z))),
                "regression": _cluster_score_test(*gaps, sums.weight, unit**2 * variance),
            }
            independent = _independent_rows(tally, sums)
            errors = dict.fromkeys(errors, math.nan)
            if scored is not None:
                p_values["aece"] = consistency_of_tally(tally, resampling, metric="aece", scored=scored).p_value
                points_by_cluster = scored.clustered_points()
                scale = t_quantile(0.025, points_by_cluster.df) / float(-ndtri(0.025))
                by_name = points_by_cluster.errors(["calibration_intercept", "calibration_slope"])
                errors = {name.removeprefix("calibration_"): scale * error for name, error in by_name.items()}
        for name, value in (("intercept", fit.intercept), ("slope", fit.slope - 1)):
            p_values[name] = float(2 * ndtr(-abs(value) / errors[name])) if errors[name] > 0 else math.nan
        if not tally.is_event:
            p_values["classes"] = _class_test(tally) if scored is None else _class_test_of_rows(scored)
        components = {name: p for name, p in p_values.items() if not math.isnan(p)}
        return cls(
            p_value=min(1.0, len(components) * min(components.values())) if components else math.nan,
            components=components,
            expected=test.expected,
            spiegelhalter=normal.z,
            spiegelhalter_p=normal.p_value,
            overconfidence_z=z if tally.n else math.nan,
            n_resamples=resampling.n_resamples,
            slope=fit.slope,
            slope_error=errors["slope"],
            independent_rows=independent,
        )


_MAX_KURTOSIS = 1 / 20
"""Excess kurtosis of a score statistic up to which it is taken as normal: 20 expected events or non-events."""
_NULL_CELLS = 128
"""Number of cells in which the null distribution of score statistics is simulated."""
_MIN_VARIANCE = 20
"""Smallest Σ p(1 − p), in independent rows, for score tests of a class or with clusters."""
_MAX_CLASS_PROBS = 1 << 21
"""Largest number of probabilities in the tests by class; more are limited to the most frequent classes."""


def _score_z(gap: np.ndarray, variance: np.ndarray, odds: np.ndarray) -> np.ndarray:
    """Return score statistics of the mean and of the slope at a free mean, (…, 2): independent standard normals.

    `gap` are sums of outcome − score by cell (…, cells) with these variances; a slope without spread is 0.
    """
    total = variance.sum()
    centred = odds - variance @ odds / total
    spread = float(variance @ centred**2)
    slope = gap @ centred / math.sqrt(spread) if spread > 1e-9 * total else np.zeros(gap.shape[:-1])
    return np.stack([gap.sum(axis=-1) / math.sqrt(total), slope], axis=-1)


def _score_tests(points: Points, resampling: Resampling) -> tuple[float, float]:
    """Return the p-values of the mean, and of intercept 0 and slope 1 by the score test.

    The p-values come from normal tails, or from simulated outcomes where few events or non-events are expected.
    """
    unit = points.total / points.squared.sum() if points.total else 0.0  # weights in rows of equal weight
    variance = unit**2 * points.squared.sum(axis=0) * points.score * (1 - points.score)
    if not variance.sum() > 0:
        return math.nan, math.nan
    centred = points.odds - variance @ points.odds / variance.sum()
    fourth = variance * np.maximum(1 - 6 * points.score * (1 - points.score), 0.0)
    kurtosis = [fourth @ u**4 / max(float(variance @ u**2) ** 2, 1e-300) for u in (np.ones_like(centred), centred)]
    if max(kurtosis) <= _MAX_KURTOSIS:
        mean, slope = _score_z(unit * (points.hits - points.count * points.score), variance, points.odds)
        return float(2 * ndtr(-abs(mean))), float(chdtrc(2 if slope else 1, mean**2 + slope**2))
    cells = points.merge(_NULL_CELLS)
    rows = np.maximum(np.rint(cells.count**2 / cells.squared.sum(axis=0)), 1.0)
    drawn = resampling.generator().binomial(rows.astype(np.int64), cells.score, (resampling.n_resamples, len(rows)))
    gap = np.concatenate([[cells.hits], cells.count / rows * drawn]) - cells.count * cells.score
    squares = _score_z(gap, cells.count**2 / rows * cells.score * (1 - cells.score), cells.odds) ** 2
    return _rarity(squares[1:, 0], squares[0, 0]), _rarity(squares[1:].sum(axis=1), squares[0].sum())


def _cluster_score_test(gap: np.ndarray, slope_gap: np.ndarray, weight: np.ndarray, variance: float) -> float:
    """Return the p-value of intercept 0 and slope 1 from sums by cluster, by Hotelling's F test.

    `variance` is that of the sum of `gap` for independent rows. NaN if clusters leave too little of it for the test.
    """
    inflation = max(float(gap @ gap) / variance, 1.0) if variance > 0 else math.inf
    if variance / inflation < _MIN_VARIANCE:
        return math.nan
    sums = np.stack([gap, slope_gap], axis=1)
    sums = sums / np.maximum(np.sqrt((sums**2).sum(axis=0)), 1e-300)
    squares, total = sums.T @ sums, sums.sum(axis=0)
    rank = int(np.linalg.matrix_rank(squares, tol=1e-9, hermitian=True))
    # One degree of freedom less than Hotelling's: skewed sums of ten clusters otherwise reject too often in the tail.
    clusters, df = len(gap), degrees_of_freedom(weight) - rank
    if not rank or df < 1:
        return math.nan
    statistic = min(float(total @ np.linalg.pinv(squares, rcond=1e-9, hermitian=True) @ total), clusters * (1 - 1e-12))
    return float(fdtrc(rank, df, (clusters - rank) / rank * statistic / (clusters - statistic)))


def _class_test_of_rows(scored: ScoredRows) -> float:
    """Return the smallest score test of a class's probability, corrected for the number of classes tested."""
    z, y, w = scored.logits, scored.labels, scored.sample_weight
    expected = scored.tally.classes.confidence.sum(axis=1)
    most_frequent = np.argsort(-expected, kind="stable")[: max(_MAX_CLASS_PROBS // max(len(z), 1), 1)]
    predicted = scored.rows.predicted.astype(np.intp)
    # ln Σ exp(z) from the scores of the rows: another pass over all logits would take as long as the first.
    log_total = z[np.arange(len(z)), predicted].astype(np.float64) - np.log(scored.rows.confidence)
    p_values = []
    weight = np.ones(len(z)) if w is None else w
    weight = weight * (weight.sum() / (weight @ weight)) if len(z) else weight  # in rows of equal weight
    for k in most_frequent if len(expected) > 2 else [1]:
        p = np.minimum(np.exp(z[:, k].astype(np.float64) - log_total), 1.0)
        variance = weight**2 * p * (1 - p)
        if variance.sum() < _MIN_VARIANCE:
            continue
        gap, odds = weight * ((y == k) - p), log_odds(p)
        if scored.clusters is None:
            mean, slope = _score_z(gap, variance, odds)
            p_values.append(float(chdtrc(2 if slope else 1, mean**2 + slope**2)))
        else:
            block = scored.clusters.block
            sums = np.stack([np.bincount(block, x) for x in (weight, gap, gap * odds)])
            of_block, of_gap, of_slope = sums[:, sums[0] > 0]
            p_values.append(_cluster_score_test(of_gap, of_slope, of_block, float(variance.sum())))
    return _smallest_of(p_values)


def _class_test(tally: Tally) -> float:
    """Return the same from a tally: each class's probabilities are known by bin; NaN with clusters."""
    if tally.clusters is not None or not tally.n:
        return math.nan
    unit, classes, p_values = tally.effective_rows / tally.accuracy.count, tally.classes, []
    for count, confidence, hits in zip(classes.count, classes.confidence, classes.hits, strict=True):
        p = np.clip(confidence / np.where(count > 0, count, 1.0), 0.0, 1.0)
        variance = unit * count * p * (1 - p)
        if variance.sum() >= _MIN_VARIANCE:
            mean, slope = _score_z(unit * (hits - confidence), variance, log_odds(p))
            p_values.append(float(chdtrc(2 if slope else 1, mean**2 + slope**2)))
    return _smallest_of(p_values)


def _smallest_of(p_values: list[float]) -> float:
    known = [p for p in p_values if not math.isnan(p)]
    return min(1.0, len(known) * min(known)) if known else math.nan


def _independent_rows(tally: Tally, sums: ClusterSums) -> float:
    """Return the number of independent rows that estimate the outcome's rate as precisely as these clusters."""
    rate, rows = tally.observed.value, tally.effective_rows
    if not 0 < rate < 1 or len(sums.weight) < 2:
        return min(rows, float(len(sums.weight)))
    low, high = mean_interval("observed", tally.observed, 0.025, (sums.mean("observed"), sums.weight))
    return min(rows, rate * (1 - rate) * (2 * float(-ndtri(0.025)) / (high - low)) ** 2)


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
