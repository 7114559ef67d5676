"""Calibration errors without bins: the Kolmogorov–Smirnov error, and errors of smoothed residuals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.fft import dct, idct
from scipy.special import spherical_jn

from trueup._core import native
from trueup._core.arrays import as_arrays, as_weights, effective_rows
from trueup._core.bins import tie_ends
from trueup._core.row_scores import class_probs, log_sum_exp, scores_and_outcomes
from trueup._core.types import ArrayLike, WeightsLike

_FINEST = 1 << 16
"""Number of points of the finest mesh of [0, 1] for smooth ECE."""


def ks(
    logits: ArrayLike, labels: ArrayLike, *, rank: int = 1, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the Kolmogorov–Smirnov error, the largest cumulated gap between hits and scores.

    KS = max_t |1/n Σ_{i: s_i ≤ t} (a_i − s_i)|, with s the score of a class and a whether that class is the label. The
    class is class 1 of two, or the predicted class of more. Among equal logits the lowest class ranks first.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    rank
        Rank of the class to score, 1 for the predicted one.
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
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{ks(logits, [0, 1, 1]):.4f}"
    '0.2667'

    References
    ----------
    Gupta et al. (2021), Calibration of neural networks using splines, arXiv:2006.12800.
    """
    z, y = as_arrays(logits, labels)
    _check_rank(rank, "rank", z)
    w = as_weights(sample_weight, len(z))
    if rank == 1:
        score, outcome = scores_and_outcomes(z, y, top_label=top_label)
        return _largest_drift(score, outcome == 1, w)
    scores, label_rank = _largest_probs(z, y, int(rank))
    return _largest_drift(scores[:, -1], label_rank == rank, w)


def ks_within(logits: ArrayLike, labels: ArrayLike, *, top: int = 2, sample_weight: WeightsLike = None) -> float:
    """Compute the Kolmogorov–Smirnov error of the sum of the `top` largest probabilities.

    KS = max_t |1/n Σ_{i: s_i ≤ t} (a_i − s_i)|, with s the sum and a whether the label is among those classes.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top
        Number of classes in the sum.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> logits = np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    >>> f"{ks_within(logits, [2, 0]):.4f}"
    '0.4000'

    References
    ----------
    Gupta et al. (2021), Calibration of neural networks using splines, arXiv:2006.12800.
    """
    z, y = as_arrays(logits, labels)
    _check_rank(top, "top", z)
    scores, label_rank = _largest_probs(z, y, int(top))
    return _largest_drift(scores.sum(axis=1), label_rank <= top, as_weights(sample_weight, len(z)))


def ks_classwise(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the mean over the classes of the Kolmogorov–Smirnov error of a class's probability.

    1/K Σ_k max_t |1/n Σ_{i: p_ik ≤ t} (1[y_i = k] − p_ik)|.

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
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{ks_classwise(logits, [0, 1, 1]):.4f}"
    '0.2167'

    References
    ----------
    Gupta et al. (2021), Calibration of neural networks using splines, arXiv:2006.12800.
    """
    z, y = as_arrays(logits, labels)
    w, total = as_weights(sample_weight, len(z)), 0.0
    for first, probs in class_probs(z):
        total += sum(_largest_drift(p, y == k, w) for k, p in enumerate(probs, first))
    return total / z.shape[1]


def smooth_ece(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the smooth ECE: the bandwidth σ at which the smoothed absolute residual smECE_σ equals σ.

    smECE_σ = ∫₀¹ |1/n Σ_i (c_i − a_i) K_σ(t, c_i)| dt, where K_σ is the Gaussian reflected at 0 and 1. It decreases in
    σ, so the crossing is found by bisection. The result is accurate to 1e-6, or to 3e-5 if it is below 3e-5.

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

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> f"{smooth_ece(np.log([[0.3, 0.7], [0.9, 0.1]]), [1, 0]):.4f}"
    '0.1825'

    References
    ----------
    Błasiok & Nakkiran (2024), Smooth ECE: principled reliability diagrams via kernel smoothing, arXiv:2309.12236.
    """
    z, y = as_arrays(logits, labels)
    if len(z) == 0:
        return math.nan
    share = _shares(sample_weight, len(z))
    score, outcome = scores_and_outcomes(z, y, top_label=top_label)
    waves = _cosines(score, share * (score - outcome), _FINEST)
    low, high = 0.0, 1.0
    for _ in range(40):
        sigma = (low + high) / 2
        low, high = (sigma, high) if _smooth(waves, sigma) > sigma else (low, sigma)
    # At the crossing the value equals σ; the value is exact when all residuals have one sign.
    return min(_smooth(waves, high), 1.0)


def kde_ece(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    grid: int = 1 << 15,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the ECE from kernel estimates of two densities: of all confidences, f, and of the correct ones, f₁.

    ∫₀¹ |t − min(π f₁(t)/f(t), 1)| f(t) dt, with π the accuracy. The kernel is the triweight of half-width 3h, reflected
    at 0 and 1. Both densities use h = std(confidence of the correct) · (2n)^(−1/5); with weights n is (Σw)²/Σw². 3h is
    at least 8 steps of the grid. The result is accurate to 1e-4, and to 1e-6 from 256 steps on. If the correct
    confidences are all equal, it is |accuracy − mean confidence|.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    grid
        Number of steps of the range [0, 1].
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
    >>> logits = np.log([[0.3, 0.7], [0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    >>> f"{kde_ece(logits, [1, 0, 1, 0]):.4f}"
    '0.2678'

    References
    ----------
    Zhang, Kailkhura & Han (2020), Mix-n-Match, arXiv:2003.07329.
    """
    z, y = as_arrays(logits, labels)
    if not isinstance(grid, (int, np.integer)) or grid < 64:
        raise ValueError(f"grid must be a whole number of at least 64, got {grid!r}")
    n = len(z)
    if n == 0:
        return math.nan
    w, share = as_weights(sample_weight, n), _shares(sample_weight, n)
    confidence, hits = scores_and_outcomes(z, y, top_label=top_label)
    right = float(share @ hits)
    centre = float(share @ (hits * confidence)) / right if right else 0.0
    spread = math.sqrt(float(share @ (hits * (confidence - centre) ** 2)) / right) if right else 0.0
    if spread < 1e-12:
        return abs(float(share @ (hits - confidence)))
    half_width = max(3 * spread * (2 * effective_rows(w, n)) ** -0.2, 8 / grid)
    damping = _triweight_waves(math.pi * half_width * np.arange(grid))
    # f is π f₁ plus the part of the wrong ones, with one bandwidth: the ratio is at most 1, so no division is needed.
    both = np.stack([_cosines(confidence, weight, grid) for weight in (share, share * hits)])
    density, hit_density = _on_mesh(both * damping)
    mesh = (np.arange(grid) + 0.5) / grid
    return float(np.mean(np.abs(mesh * density - hit_density)))


def _check_rank(rank: Any, name: str, z: np.ndarray) -> None:
    """Reject a rank above the number of classes."""
    if not isinstance(rank, (int, np.integer)) or not 1 <= rank <= z.shape[1]:
        raise ValueError(f"{name} must lie in 1..{z.shape[1]}, the number of classes, got {rank!r}")


def _shares(sample_weight: Any, n: int) -> np.ndarray:
    """Return each row's share of the total weight."""
    w = as_weights(sample_weight, n)
    return np.full(n, 1 / n) if w is None else w / w.sum()


def _largest_drift(score: np.ndarray, hit: np.ndarray, sample_weight: np.ndarray | None) -> float:
    """Return max_t |1/n Σ_{s_i ≤ t} (hit_i − s_i)| over the ends of runs of ties, whatever the order of rows."""
    n = len(score)
    if n == 0:
        return math.nan
    if sample_weight is not None:
        order = np.argsort(score, kind="stable")
        drift = np.cumsum((sample_weight * (hit - score))[order])
        return float(np.abs(drift[tie_ends(score[order])]).max() / sample_weight.sum())
    ordered = np.sort(score)
    # Sorting values is several times faster than sorting indices; binary search locates the hits.
    hits = np.bincount(np.searchsorted(ordered, score[hit]), minlength=n)
    drift = np.cumsum(hits - ordered)
    return float(np.abs(drift[tie_ends(ordered)]).max()) / n


def _largest_probs(z: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest probabilities per row, descending (n, count), and the label's rank, from 1."""
    n, classes = z.shape
    scores, label_rank = np.empty((n, count)), np.empty(n, np.int64)
    order = np.arange(classes)
    for at in native.row_chunks(n, classes, native.DEFAULT_CHUNK):
        part, label = z[at], y[at, None]
        largest = np.partition(part, classes - count, axis=1)[:, classes - count :]
        scores[at] = np.exp(np.sort(largest, axis=1)[:, ::-1] - log_sum_exp(part)[:, None])
        of_label = np.take_along_axis(part, label, axis=1)
        ahead = (part > of_label) | ((part == of_label) & (order < label))
        label_rank[at] = 1 + ahead.sum(axis=1)
    return scores, label_rank


def _cosines(points: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """Return Σ_i w_i cos(πk x_i) for k = 0..size−1, x in [0, 1].

    Cubic B-splines spread the weights on the mesh (j + ½)/size, reflected at both ends. Their known damping is then
    divided out. The remaining error falls with the fourth power of k/size.
    """
    position = points * size - 0.5
    left = np.floor(position)
    u = position - left
    spline = ((1 - u) ** 3, 4 - 6 * u**2 + 3 * u**3, 1 + 3 * u + 3 * u**2 - 3 * u**3, u**3)
    mass = np.zeros(size)
    for shift, share in enumerate(spline, -1):
        j = left.astype(np.int64) + shift
        j = np.where(j < 0, -1 - j, np.where(j >= size, 2 * size - 1 - j, j))
        mass += np.bincount(j, weights=weights * share / 6, minlength=size)
    return dct(mass) / 2 / np.sinc(np.arange(size) / (2 * size)) ** 4


def _on_mesh(waves: np.ndarray) -> np.ndarray:
    """Return w_0 + 2 Σ_k w_k cos(πkt) at t = (j + ½)/size: the density with these cosine averages."""
    return idct(waves, axis=-1) * (2 * waves.shape[-1])


def _smooth(waves: np.ndarray, sigma: float) -> float:
    """Return ∫|r_σ|: the reflected Gaussian multiplies the k-th cosine by exp(−σ²π²k²/2), exactly.

    The mesh follows σ with 256 points per σ. σ is at least 2 points, below which the finest mesh would ring.
    """
    sigma = max(sigma, 2 / len(waves))
    size = min(len(waves), 1 << math.ceil(math.log2(256 / sigma)))
    damping = np.exp(-0.5 * (math.pi * sigma * np.arange(size)) ** 2)
    return float(np.mean(np.abs(_on_mesh(waves[:size] * damping))))


def _triweight_waves(frequency: np.ndarray) -> np.ndarray:
    """Return ∫ 35/32 (1 − v²)³ cos(ωv) dv = 105 j₃(ω)/ω³, near zero by its series."""
    near = frequency < 1e-2
    safe = np.where(near, 1.0, frequency)
    return np.where(near, 1 - frequency**2 / 18, 105 * spherical_jn(3, safe) / safe**3)
