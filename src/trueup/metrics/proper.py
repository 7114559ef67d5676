"""Scores of single rows, averaged: accuracy, likelihood, Brier score and entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from trueup.core import chunks
from trueup.core.arrays import as_logits, as_tensors
from trueup.core.bins import BINS, bin_index, equal_width, rounding_error
from trueup.core.row_scores import RowScores, class_probs, score_rows


def accuracy(logits: Any, labels: Any) -> float:
    """Share of rows whose largest logit is the label's; of equal ones the lowest class counts.

    >>> accuracy([[2.0, 1.0], [0.0, 3.0]], [0, 0])
    0.5
    """
    return _mean(_rows(logits, labels).correct)


def top_k(logits: Any, labels: Any, *, k: int = 5) -> float:
    """Share of rows whose label is among the k largest logits; of equal ones the lower classes come first.

    >>> top_k([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0]], [1, 0], k=2)
    0.5
    """
    z, y = as_tensors(logits, labels)
    if not 1 <= k <= z.shape[1]:
        raise ValueError(f"k must lie in 1..{z.shape[1]}, got {k}")
    order = torch.arange(z.shape[1], device=z.device)
    hits = 0
    for rows in chunks.row_chunks(len(z), z.shape[1], chunks.CACHE):
        part, label = z[rows], y[rows, None]
        of_label = part.gather(1, label)
        ahead = (part > of_label) | ((part == of_label) & (order < label))
        hits += int((ahead.sum(dim=1) < k).sum())
    return hits / len(z) if len(z) else float("nan")


def nll(logits: Any, labels: Any) -> float:
    """Mean negative log-likelihood −ln p_y, in nats; −Σ_k y_k ln p_k for soft labels (n, K).

    >>> round(nll([[0.0, 0.0], [1.0, 0.0]], [0, 0]), 4)
    0.5032
    """
    z, y = as_tensors(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).nll)
    return _mean(np.concatenate([-(q * log_p).sum(axis=1) for log_p, q in _soft(z, y)]))


def brier(logits: Any, labels: Any) -> float:
    """Mean squared distance Σ_k (p_k − e_k)² from the one-hot (or soft) label, between 0 and 2.

    For two classes it is twice the binary Brier score. Brier (1950).

    >>> brier([[0.0, 0.0]], [1])
    0.5
    """
    z, y = as_tensors(logits, labels, soft=True)
    if y.ndim == 1:
        return _mean(score_rows(z, y).brier)
    return _mean(np.concatenate([((np.exp(log_p) - q) ** 2).sum(axis=1) for log_p, q in _soft(z, y)]))


def top_label_brier(logits: Any, labels: Any) -> float:
    """Mean squared difference (c − a)² of the confidence and whether the prediction was right.

    >>> top_label_brier([[0.0, 0.0]], [1])
    0.25
    """
    scored = _rows(logits, labels)
    return _mean((scored.confidence - scored.correct) ** 2)


def entropy(logits: Any, labels: Any = None) -> float:
    """Mean entropy −Σ_k p_k ln p_k of the predictions, in nats. The labels are not used.

    >>> round(entropy([[0.0, 0.0]]), 4)
    0.6931
    """
    z = as_logits(logits)
    return _mean(score_rows(z, torch.zeros(len(z), dtype=torch.int64, device=z.device)).entropy)


def normalised_entropy(logits: Any, labels: Any = None) -> float:
    """Mean entropy divided by ln K, between 0 and 1. The labels are not used.

    >>> normalised_entropy([[0.0, 0.0, 0.0]])
    1.0
    """
    return entropy(logits) / float(np.log(as_logits(logits).shape[1]))


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


def brier_decomposition(logits: Any, labels: Any, *, bins: int = BINS, top_label: bool = False) -> Decomposition:
    """Split the Brier score exactly by equal-width bins, summed over classes (or for the top label alone).

    Murphy (1973), with the within-bin terms of Stephenson et al. (2008), so that the parts add up to the score.

    >>> parts = brier_decomposition([[2.0, 0.0], [0.0, 1.0], [1.0, 0.5]], [0, 1, 1], bins=5)
    >>> between = parts.reliability - parts.resolution + parts.uncertainty
    >>> abs(between + parts.within_variance - parts.within_covariance - parts.score) < 1e-12
    True
    """
    z, y = as_tensors(logits, labels)
    edges, unit = equal_width(bins), rounding_error(z)
    if top_label:
        scored = score_rows(z, y)
        index = bin_index(scored.confidence, edges, rounding=unit)
        return Decomposition(*_murphy(scored.confidence, scored.correct, index).tolist())
    parts, label = np.zeros(6), y.cpu().numpy()
    for first, probs in class_probs(z):
        for k, p in enumerate(probs, first):
            parts += _murphy(p, (label == k) * 1.0, bin_index(p, edges, rounding=unit))
    return Decomposition(*parts.tolist())


def _murphy(p: np.ndarray, hit: np.ndarray, index: np.ndarray) -> np.ndarray:
    if not len(p):
        return np.full(6, np.nan)
    count = np.maximum(np.bincount(index), 1)
    mean_p, mean_hit = (np.bincount(index, weights=w, minlength=len(count)) / count for w in (p, hit))
    base = hit.mean()
    conf, freq = mean_p[index], mean_hit[index]
    return np.array(
        [
            np.mean((p - hit) ** 2),
            np.mean((conf - freq) ** 2),
            np.mean((freq - base) ** 2),
            base * (1 - base),
            np.mean((p - conf) ** 2),
            2 * np.mean((p - conf) * (hit - freq)),
        ]
    )


def _rows(logits: Any, labels: Any) -> RowScores:
    return score_rows(*as_tensors(logits, labels))


def _soft(z: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities and soft labels in float64, a chunk of rows at a time."""
    for rows in chunks.row_chunks(len(z), z.shape[1], chunks.CACHE):
        yield torch.log_softmax(z[rows].double(), dim=1).cpu().numpy(), y[rows].cpu().numpy()


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
