"""Calibration errors freed of the bias that finite samples and a chosen number of bins bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from trueup.core.arrays import as_tensors
from trueup.core.bins import BINS, Bins, equal_mass, folded_mean, tie_ends
from trueup.core.row_scores import class_probs, confidences_and_hits


def debiased_l2(logits: Any, labels: Any, *, bins: int = BINS, classwise: bool = False, pool: bool = False) -> float:
    """Root mean square calibration error less its sampling bias, over equal-mass bins.

    The root of Σ_b (n_b/n) [(conf_b − acc_b)² − acc_b(1 − acc_b)/(n_b − 1)], 0 where that is negative; bins of one row
    add nothing. Class-wise it is the root of the mean over classes of the positive parts, or with `pool=True` of the
    mean itself, which is less biased. Kumar et al., "Verified uncertainty calibration" (2019).

    >>> z = np.log(np.array([[0.8, 0.2]] * 4 + [[0.6, 0.4]] * 4))
    >>> round(debiased_l2(z, [0, 1, 1, 1, 0, 1, 1, 1], bins=2), 4)
    0.3873
    """
    z, y = as_tensors(logits, labels)
    if not len(z):
        return float("nan")
    squares = np.array([_debiased_square(p, hit, bins) for p, hit in _columns(z, y, classwise)])
    return float(np.sqrt(max(squares.mean(), 0.0) if pool else np.maximum(squares, 0.0).mean()))


def debiased_l1(logits: Any, labels: Any, *, bins: int = BINS) -> float:
    """ECE less its sampling bias, over equal-mass bins; it may be negative.

    Twice the plug-in value less what it would be on average if acc_b were drawn again from
    N(acc_b, acc_b(1 − acc_b)/n_b), here by the formula for the mean of |N(μ, σ²)| instead of by simulation.
    Kumar et al. (2019).

    >>> z = np.log(np.array([[0.8, 0.2]] * 4 + [[0.6, 0.4]] * 4))
    >>> round(debiased_l1(z, [0, 1, 1, 1, 0, 1, 1, 1], bins=2), 4)
    0.4448
    """
    z, y = as_tensors(logits, labels)
    c, a = confidences_and_hits(z, y)
    tally = Bins.from_scores(c, a, equal_mass(c, bins))
    full = tally.count > 0
    n, acc, gap = tally.count[full], tally.accuracy[full], tally.gap[full]
    again = folded_mean(gap, np.sqrt(acc * (1 - acc) / n))
    return float((n * (2 * np.abs(gap) - again)).sum() / n.sum()) if n.size else float("nan")


def ece_sweep(logits: Any, labels: Any, *, norm: Literal[1, 2] = 1) -> float:
    """ECE with as many equal-mass bins as keep their accuracies in rising order.

    b grows from 2 while no bin's accuracy is below its predecessor's; the last such b is used. `norm=2` gives the root
    mean square. Rows of equal confidence share their mean accuracy, so that their order does not matter.
    Roelofs et al., "Mitigating bias in calibration error estimation" (2022).

    >>> z = np.log(np.array([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]]))
    >>> round(ece_sweep(z, [1, 0, 0, 0]), 4)
    0.15
    """
    if norm not in (1, 2):
        raise ValueError(f"norm must be 1 or 2, got {norm!r}")
    c, a = confidences_and_hits(*as_tensors(logits, labels))
    n = len(c)
    if not n:
        return float("nan")
    order = np.argsort(c, kind="stable")
    c, a = c[order], _tie_means(c[order], a[order])
    sum_a, sum_c = (np.concatenate([[0.0], np.cumsum(v)]) for v in (a, c))

    def binned(b: int) -> tuple[np.ndarray, np.ndarray]:
        bounds = (np.arange(b + 1) * n + b - 1) // b  # bin j holds the ranks r with r·b // n = j
        size = np.diff(bounds)
        return np.diff(sum_a[bounds]) / size, np.diff(sum_c[bounds]) / size

    # Where the hits themselves rise, so do those of any bins; asking each number of bins would take n² steps.
    best = 1 if (np.diff(a) < 0).any() else max(n - 1, 1)
    while best < n - 1:
        accuracy = binned(best + 1)[0]
        if (np.diff(accuracy) < -1e-12).any():  # cumulative sums round
            break
        best += 1
    accuracy, confidence = binned(best)
    weight = np.diff((np.arange(best + 1) * n + best - 1) // best) / n
    return float((weight * np.abs(accuracy - confidence) ** norm).sum() ** (1 / norm))


def _columns(z: torch.Tensor, y: torch.Tensor, classwise: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not classwise:
        yield confidences_and_hits(z, y)
        return
    label = y.cpu().numpy()
    for first, probs in class_probs(z):
        yield from ((p, (label == k) * 1.0) for k, p in enumerate(probs, first))


def _debiased_square(p: np.ndarray, hit: np.ndarray, bins: int) -> float:
    tally = Bins.from_scores(p, hit, equal_mass(p, bins))
    some = tally.count >= 2
    n, acc, gap = tally.count[some], tally.accuracy[some], tally.gap[some]
    return float((n * (gap**2 - acc * (1 - acc) / (n - 1))).sum() / len(p))


def _tie_means(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    run = np.concatenate([[0], np.cumsum(tie_ends(ordered))[:-1]])
    means: np.ndarray = (np.bincount(run, weights=values) / np.bincount(run))[run]
    return means
