"""Calibration errors corrected for the bias of finite samples and of a fixed number of bins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import BINS, Bins, bin_index, equal_mass, folded_mean
from trueup._core.row_scores import class_probs, scores_and_outcomes
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.events import Points


def debiased_l2(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    classwise: bool = False,
    pool: bool = False,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the root mean square calibration error without its sampling bias, over equal-mass bins.

    It is the root of Σ_b (n_b/n) [(conf_b − acc_b)² − acc_b(1 − acc_b)/(n_b − 1)], or 0 where that is negative. Bins
    with one row add nothing. With weights, n_b in the bias term is (Σw)²/Σw² of the bin.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    classwise
        Average over the classes instead of scoring the confidence.
    pool
        Average the classes before, not after, negative values are cut at 0; this is less biased.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error; 0 where the bias exceeds the plug-in value.

    Examples
    --------
    >>> z = np.log(np.array([[0.8, 0.2]] * 4 + [[0.6, 0.4]] * 4))
    >>> round(debiased_l2(z, [0, 1, 1, 1, 0, 1, 1, 1], bins=2), 4)
    0.3873

    References
    ----------
    Kumar, Liang & Ma (2019), Verified uncertainty calibration, arXiv:1909.10155.
    """
    z, y = as_arrays(logits, labels)
    if not len(z):
        return math.nan
    w = as_weights(sample_weight, len(z))
    squares = np.array([_debiased_square(p, hit, bins, w) for p, hit in _columns(z, y, classwise, top_label)])
    return float(np.sqrt(max(squares.mean(), 0.0) if pool else np.maximum(squares, 0.0).mean()))


def debiased_l1(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the ECE without its sampling bias, over equal-mass bins; it may be negative.

    It is twice the plug-in value minus the mean value under redrawn accuracies, acc_b ~ N(acc_b, acc_b(1 − acc_b)/n_b).
    The mean of |N(μ, σ²)| is computed by formula, not by simulation. With weights, n_b in the variance is (Σw)²/Σw² of
    the bin.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The corrected error.

    Examples
    --------
    >>> z = np.log(np.array([[0.8, 0.2]] * 4 + [[0.6, 0.4]] * 4))
    >>> round(debiased_l1(z, [0, 1, 1, 1, 0, 1, 1, 1], bins=2), 4)
    0.4448

    References
    ----------
    Kumar, Liang & Ma (2019), Verified uncertainty calibration, arXiv:1909.10155.
    """
    z, y = as_arrays(logits, labels)
    w = as_weights(sample_weight, len(z))
    c, a = scores_and_outcomes(z, y, top_label=top_label)
    tally, rows = _equal_mass_bins(c, a, bins, w)
    full = tally.count > 0
    n, acc, gap = tally.count[full], tally.accuracy[full], tally.gap[full]
    redrawn = folded_mean(gap, np.sqrt(np.maximum(acc * (1 - acc), 0.0) / rows[full]))
    return float((n * (2 * np.abs(gap) - redrawn)).sum() / n.sum()) if n.size else math.nan


def ece_sweep(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    norm: Literal[1, 2] = 1,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the ECE with the largest number of equal-mass bins whose accuracies still increase.

    The number of bins grows from 2 and stops before the first bin with a lower accuracy than the bin before it. Rows
    with equal confidence stay in one bin, so their order does not matter.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    norm
        1 for the ECE, 2 for the root mean square.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> z = np.log(np.array([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]]))
    >>> round(ece_sweep(z, [1, 0, 0, 0]), 4)
    0.3

    References
    ----------
    Roelofs et al. (2022), Mitigating bias in calibration error estimation, arXiv:2012.08668.
    """
    if norm not in (1, 2):
        raise ValueError(f"norm must be 1 or 2, got {norm!r}")
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    if not points.total:
        return math.nan
    sums = np.stack([points.count, points.hits, points.count * points.score])

    def binned(b: int) -> np.ndarray:
        """Count, hits and confidence of the bins that hold rows."""
        return np.add.reduceat(sums, points.chunk_starts(b), axis=1)

    # If the hit rates of the points increase, so do those of any bins; trying each number of bins would take n² steps.
    values = len(points.score)
    best = 1 if (np.diff(points.hits / points.count) < 0).any() else max(values - 1, 1)
    while best < values - 1:
        size, right, _ = binned(best + 1)
        if (np.diff(right / size) < -1e-12).any():  # allow for rounding of the sums
            break
        best += 1
    size, right, confidence = binned(best)
    return float((size / points.total * np.abs((right - confidence) / size) ** norm).sum() ** (1 / norm))


def _columns(z: np.ndarray, y: np.ndarray, classwise: bool, top_label: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not classwise:
        yield scores_and_outcomes(z, y, top_label=top_label)
        return
    for first, probs in class_probs(z):
        yield from ((p, (y == k) * 1.0) for k, p in enumerate(probs, first))


def _equal_mass_bins(
    p: np.ndarray, hit: np.ndarray, bins: int, sample_weight: np.ndarray | None
) -> tuple[Bins, np.ndarray]:
    """Equal-mass bins, and the effective number of rows in each."""
    edges = equal_mass(p, bins, sample_weight)
    tally = Bins.from_scores(p, hit, edges, sample_weight=sample_weight)
    if sample_weight is None:
        return tally, tally.count
    squared = np.bincount(bin_index(p, edges), sample_weight**2, minlength=len(tally.count))
    return tally, tally.count**2 / np.where(squared > 0, squared, 1.0)


def _debiased_square(p: np.ndarray, hit: np.ndarray, bins: int, sample_weight: np.ndarray | None) -> float:
    tally, rows = _equal_mass_bins(p, hit, bins, sample_weight)
    some = rows > (1.0 if sample_weight is None else 1 + 1e-9)
    n, acc, gap = tally.count[some], tally.accuracy[some], tally.gap[some]
    return float((n * (gap**2 - acc * (1 - acc) / (rows[some] - 1))).sum() / tally.n)
