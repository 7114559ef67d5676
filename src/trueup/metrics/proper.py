"""Scores of single rows, averaged: accuracy, likelihood, Brier score and entropy."""

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
    """Share of rows whose largest logit is the label's; of equal ones the lowest class counts.

    >>> accuracy([[2.0, 1.0], [0.0, 3.0]], [0, 0])
    0.5
    """
    return _mean(score_rows(*as_arrays(logits, labels)).correct, sample_weight)


def top_k(logits: ArrayLike, labels: ArrayLike, *, k: int = 5, sample_weight: WeightsLike = None) -> float:
    """Share of rows whose label is among the k largest logits; of equal ones the lower classes come first.

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
    """Mean negative log-likelihood −ln p_y, in nats; −Σ_k y_k ln p_k for soft labels (n, K).

    >>> round(nll([[0.0, 0.0], [1.0, 0.0]], [0, 0]), 4)
    0.5032
    """
    z, y = as_arrays(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).nll, sample_weight)
    losses = [-np.where(q > 0, q * log_p, 0.0).sum(axis=1) for log_p, q in _soft(z, y)]
    return _mean(np.concatenate(losses), sample_weight)


def brier(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Mean squared distance Σ_k (p_k − e_k)² from the one-hot (or soft) label, between 0 and 2.

    For two classes it is twice the Brier score of the event, `event_brier`. Brier (1950).

    >>> brier([[0.0, 0.0]], [1])
    0.5
    """
    z, y = as_arrays(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).brier, sample_weight)
    return _mean(np.concatenate([((np.exp(log_p) - q) ** 2).sum(axis=1) for log_p, q in _soft(z, y)]), sample_weight)


def top_label_brier(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Mean squared difference (c − a)² of the confidence and whether the prediction was right.

    >>> top_label_brier([[0.0, 0.0]], [1])
    0.25
    """
    scored = score_rows(*as_arrays(logits, labels))
    return _mean((scored.confidence - scored.correct) ** 2, sample_weight)


def entropy(logits: ArrayLike, labels: ArrayLike | None = None, *, sample_weight: WeightsLike = None) -> float:
    """Mean entropy −Σ_k p_k ln p_k of the predictions, in nats. The labels are not used.

    >>> round(entropy([[0.0, 0.0]]), 4)
    0.6931
    """
    z = as_logits(logits)
    return _mean(score_rows(z, np.zeros(len(z), np.int64)).entropy, sample_weight)


def normalised_entropy(
    logits: ArrayLike, labels: ArrayLike | None = None, *, sample_weight: WeightsLike = None
) -> float:
    """Mean entropy of a row divided by ln K, K its options, between 0 and 1. The labels are not used.

    >>> normalised_entropy([[0.0, 0.0, 0.0]])
    1.0
    """
    z = as_logits(logits)
    each = score_rows(z, np.zeros(len(z), np.int64)).entropy
    return _mean(each / np.log(np.ravel(count_options(upcast_half(z))).astype(np.float64)), sample_weight)


class Decomposition(NamedTuple):
    """Parts of a Brier score: score = reliability − resolution + uncertainty + within_variance − within_covariance."""

    score: float
    reliability: float
    """Σ_b (n_b/n)(conf_b − freq_b)²: what calibration could repair."""
    resolution: float
    """Σ_b (n_b/n)(freq_b − base)²: what tells the rows apart."""
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

    Murphy (1973), with the within-bin terms of Stephenson et al. (2008), so that the parts add up to the score.

    >>> parts = brier_decomposition([[2.0, 0.0], [0.0, 1.0], [1.0, 0.5]], [0, 1, 1], bins=5)
    >>> between = parts.reliability - parts.resolution + parts.uncertainty
    >>> abs(between + parts.within_variance - parts.within_covariance - parts.score) < 1e-12
    True
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
    base = w @ hit
    conf, freq = mean_p[index], mean_hit[index]
    score, reliability, resolution, within = (w @ x**2 for x in (p - hit, conf - freq, freq - base, p - conf))
    covariance = 2 * (w @ ((p - conf) * (hit - freq)))
    return np.array([score, reliability, resolution, base * (1 - base), within, covariance])


def _soft(z: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities and soft labels in float64, a chunk of rows at a time."""
    for rows in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
        yield log_softmax(z[rows].astype(np.float64), axis=1), y[rows]


def _mean(values: np.ndarray, sample_weight: Any = None) -> float:
    w = as_weights(sample_weight, len(values))
    if not len(values):
        return float("nan")
    return float(values.mean() if w is None else w @ values / w.sum())
