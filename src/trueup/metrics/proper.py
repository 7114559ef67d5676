"""Means of row scores: accuracy, likelihood, Brier score and entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

from trueup._core import native
from trueup._core.arrays import as_arrays, as_logits, as_weights, count_options, upcast_half
from trueup._core.bins import BINS, bin_index, equal_width, rounding_error
from trueup._core.row_scores import class_probs, score_rows
from trueup._core.types import ArrayLike, WeightsLike


def accuracy(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the share of rows whose largest logit is the label's; among equal logits the lowest class counts.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The share, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> accuracy([[2.0, 1.0], [0.0, 3.0]], [0, 0])
    0.5
    """
    return _mean(score_rows(*as_arrays(logits, labels)).correct, sample_weight)


def top_k(logits: ArrayLike, labels: ArrayLike, *, k: int = 5, sample_weight: WeightsLike = None) -> float:
    """Compute the share of rows whose label is among the k largest logits.

    Among equal logits the lower classes come first.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    k
        Number of classes that count as right.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The share, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> top_k([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0]], [1, 0], k=2)
    0.5
    """
    z, y = as_arrays(logits, labels)
    if not 1 <= k <= z.shape[1]:
        raise ValueError(f"k must lie in 1..{z.shape[1]}, got {k}")
    order = np.arange(z.shape[1])
    hits = np.empty(len(z))
    for rows in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
        part, label = z[rows], y[rows, None]
        of_label = np.take_along_axis(part, label, axis=1)
        ahead = (part > of_label) | ((part == of_label) & (order < label))
        hits[rows] = ahead.sum(axis=1) < k
    return _mean(hits, sample_weight)


def nll(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the mean negative log-likelihood −ln p_y in nats, or −Σ_k y_k ln p_k for soft labels.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,), or soft labels, shape (n, classes).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The loss; NaN without rows.

    Examples
    --------
    >>> round(nll([[0.0, 0.0], [1.0, 0.0]], [0, 0]), 4)
    0.5032
    """
    z, y = as_arrays(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).nll, sample_weight)
    losses = [-np.where(q > 0, q * log_p, 0.0).sum(axis=1) for log_p, q in _soft(z, y)]
    return _mean(np.concatenate(losses), sample_weight)


def brier(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the Brier score: the mean squared distance Σ_k (p_k − e_k)² from the one-hot (or soft) label.

    For two classes it is twice the Brier score of the event, `event_brier`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,), or soft labels, shape (n, classes).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The score, between 0 and 2; NaN without rows.

    Examples
    --------
    >>> brier([[0.0, 0.0]], [1])
    0.5

    References
    ----------
    Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    z, y = as_arrays(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).brier, sample_weight)
    return _mean(np.concatenate([((np.exp(log_p) - q) ** 2).sum(axis=1) for log_p, q in _soft(z, y)]), sample_weight)


def top_label_brier(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the mean squared difference (c − a)² of the confidence and the correctness of the prediction.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The score, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> top_label_brier([[0.0, 0.0]], [1])
    0.25
    """
    scored = score_rows(*as_arrays(logits, labels))
    return _mean((scored.confidence - scored.correct) ** 2, sample_weight)


def entropy(logits: ArrayLike, labels: ArrayLike | None = None, *, sample_weight: WeightsLike = None) -> float:
    """Compute the mean entropy −Σ_k p_k ln p_k of the predictions, in nats.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Not used.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The entropy; NaN without rows.

    Examples
    --------
    >>> round(entropy([[0.0, 0.0]]), 4)
    0.6931
    """
    z = as_logits(logits)
    return _mean(score_rows(z, np.zeros(len(z), np.int64)).entropy, sample_weight)


def normalised_entropy(
    logits: ArrayLike, labels: ArrayLike | None = None, *, sample_weight: WeightsLike = None
) -> float:
    """Compute the mean entropy of a row divided by ln K, with K the number of its options.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Not used.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The entropy, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> normalised_entropy([[0.0, 0.0, 0.0]])
    1.0
    """
    z = as_logits(logits)
    of_row = score_rows(z, np.zeros(len(z), np.int64)).entropy
    return _mean(of_row / np.log(np.ravel(count_options(upcast_half(z))).astype(np.float64)), sample_weight)


class Decomposition(NamedTuple):
    """Parts of a Brier score: score = reliability − resolution + uncertainty + within_variance − within_covariance."""

    score: float
    reliability: float
    """Σ_b (n_b/n)(conf_b − freq_b)²: the loss that calibration could remove."""
    resolution: float
    """Σ_b (n_b/n)(freq_b − base)²: the gain from separating the rows."""
    uncertainty: float
    """base (1 − base)."""
    within_variance: float
    """(1/n) Σ (p − conf_b)², inside the bins."""
    within_covariance: float
    """(2/n) Σ (p − conf_b)(o − freq_b), inside the bins."""


def brier_decomposition(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> Decomposition:
    """Split the Brier score exactly by equal-width bins, summed over classes (or for the top label alone).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    top_label
        Split the Brier score of the predicted class.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    Decomposition
        The score and its parts, which add up exactly.

    Examples
    --------
    >>> parts = brier_decomposition([[2.0, 0.0], [0.0, 1.0], [1.0, 0.5]], [0, 1, 1], bins=5)
    >>> between = parts.reliability - parts.resolution + parts.uncertainty
    >>> abs(between + parts.within_variance - parts.within_covariance - parts.score) < 1e-12
    True

    References
    ----------
    Murphy (1973), A new vector partition of the probability score.
    Stephenson, Coelho & Jolliffe (2008), Two extra components in the Brier score decomposition.
    """
    z, y = as_arrays(logits, labels)
    edges, unit, w = equal_width(bins), rounding_error(z), as_weights(sample_weight, len(z))
    if top_label:
        scored = score_rows(z, y)
        index = bin_index(scored.confidence, edges, rounding=unit)
        return Decomposition(*_murphy(scored.confidence, scored.correct, index, w).tolist())
    parts = np.zeros(6)
    for first, probs in class_probs(z):
        for k, p in enumerate(probs, first):
            parts += _murphy(p, (y == k) * 1.0, bin_index(p, edges, rounding=unit), w)
    return Decomposition(*parts.tolist())


def _murphy(p: np.ndarray, hit: np.ndarray, index: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
    if not len(p):
        return np.full(6, np.nan)
    w = np.full(len(p), 1 / len(p)) if sample_weight is None else sample_weight / sample_weight.sum()
    count = np.bincount(index, w)
    count[count == 0] = 1.0
    mean_p, mean_hit = (np.bincount(index, weights=w * x, minlength=len(count)) / count for x in (p, hit))
    base = np.average(hit, weights=w)  # at most 1, unlike w @ hit
    conf, freq = mean_p[index], mean_hit[index]
    score, reliability, resolution, within = (w @ x**2 for x in (p - hit, conf - freq, freq - base, p - conf))
    covariance = 2 * (w @ ((p - conf) * (hit - freq)))
    return np.array([score, reliability, resolution, base * (1 - base), within, covariance])


def _soft(z: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield log-probabilities and soft labels in float64, chunk by chunk."""
    for rows in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
        yield log_softmax(z[rows].astype(np.float64), axis=1), y[rows]


def _mean(values: np.ndarray, sample_weight: Any = None) -> float:
    w = as_weights(sample_weight, len(values))
    if not len(values):
        return float("nan")
    return float(values.mean() if w is None else w @ values / w.sum())
