"""Kernel calibration errors: of probability vectors (SKCE), of the confidence (MMCE), and a test of calibration.

The term of a pair of rows is h_ij = exp(−‖p_i − p_j‖/ν) (e_{y_i} − p_i)ᵀ(e_{y_j} − p_j). Its mean is 0 if the
probability vectors are calibrated, and positive if they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr, softmax

from trueup._core import native
from trueup._core.arrays import as_arrays, as_logits, as_weights
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.resampling import check_resamples

MEDIAN_ROWS = 1000
"""The median distance is taken over all pairs of at most this many rows."""

QUADRATIC_ROWS = 4096
"""Up to this many rows the test uses every pair by default."""


def skce(
    logits: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None, sample_weight: WeightsLike = None
) -> float:
    """Compute the squared kernel calibration error, unbiased: the mean of h_ij over all pairs of rows i < j.

    h_ij = exp(−‖p_i − p_j‖/ν) (e_{y_i} − p_i)ᵀ(e_{y_j} − p_j). Its mean is 0 under calibration, so single values may be
    negative. A pair weighs w_i·w_j. Time grows with n², memory does not.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bandwidth
        Bandwidth ν; by default the median distance of two rows, see `median_distance`.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error; NaN with fewer than two rows.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{skce(logits, [0, 1, 1], bandwidth=0.5):.4f}"
    '-0.1203'

    References
    ----------
    Widmann, Lindsten & Zachariah (2019), Calibration tests in multi-class classification, arXiv:1910.11385.
    """
    pairs = _Pairs.of(logits, labels, bandwidth, sample_weight)
    return pairs.sum() / pairs.count() if pairs.count() else math.nan


def skce_biased(
    logits: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None, sample_weight: WeightsLike = None
) -> float:
    """Compute the squared kernel calibration error with each row also paired with itself.

    It is 1/n² Σ_{i,j} h_ij, with h and ν as in `skce`. It is never negative and biased upwards.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bandwidth
        Bandwidth ν; by default the median distance of two rows, see `median_distance`.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error; NaN with fewer than two rows.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{skce_biased(logits, [0, 1, 1], bandwidth=0.5):.4f}"
    '0.0998'

    References
    ----------
    Widmann, Lindsten & Zachariah (2019), Calibration tests in multi-class classification, arXiv:1910.11385.
    """
    pairs = _Pairs.of(logits, labels, bandwidth, sample_weight)
    n = len(pairs.labels)
    return max(0.0, 2 * pairs.sum() + pairs.diagonal_sum()) / n**2 if n > 1 else math.nan


def skce_linear(
    logits: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None, sample_weight: WeightsLike = None
) -> float:
    """Compute the squared kernel calibration error from neighbouring rows only: unbiased, in linear time, noisier.

    It is 1/⌊n/2⌋ Σ_i h_{2i−1,2i}, with h and ν as in `skce`. It depends on the order of the rows.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bandwidth
        Bandwidth ν; by default the median distance of two rows, see `median_distance`.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error; NaN with fewer than two rows.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{skce_linear(logits, [0, 1, 1], bandwidth=0.5):.4f}"
    '-0.3635'

    References
    ----------
    Widmann, Lindsten & Zachariah (2019), Calibration tests in multi-class classification, arXiv:1910.11385.
    """
    pairs = _Pairs.of(logits, labels, bandwidth, sample_weight)
    weights = pairs.weights[: len(pairs.labels) // 2 * 2]
    total = float((weights[::2] * weights[1::2]).sum())
    return float(pairs.neighbours().sum()) / total if total else math.nan


def mmce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bandwidth: float = 0.4,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the maximum mean calibration error, a kernel-smoothed error of the confidence.

    MMCE² = 1/n² Σ_{i,j} (a_i − c_i)(a_j − c_j) exp(−|c_i − c_j|/bandwidth), over all pairs, in n log n steps.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bandwidth
        Width of the kernel.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    >>> f"{mmce(logits, [0, 1, 1]):.4f}"
    '0.2177'

    References
    ----------
    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """
    z, y = as_arrays(logits, labels)
    width = _positive(bandwidth)
    n = len(z)
    if n == 0:
        return math.nan
    w = as_weights(sample_weight, n)
    share = np.full(n, 1 / n) if w is None else w / w.sum()
    score, outcome = scores_and_outcomes(z, y, top_label=top_label)
    order = np.argsort(score, kind="stable")
    return math.sqrt(max(0.0, _laplacian_form(score[order], (share * (outcome - score))[order], width)))


@dataclass(frozen=True)
class KernelTest:
    """The result of the kernel test of calibration."""

    statistic: float
    """The estimate of the squared kernel calibration error."""
    p_value: float
    """Probability of a statistic at least this large under calibration."""
    method: Literal["quadratic", "linear"]


def skce_test(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    method: Literal["quadratic", "linear"] | None = None,
    bandwidth: float | None = None,
    sample_weight: WeightsLike = None,
    n_resamples: int = 1000,
    seed: int = 0,
) -> KernelTest:
    """Test whether the probability vectors are calibrated, by the squared kernel calibration error.

    "quadratic" compares T = Σ_{i<j} h_ij with T* = Σ_{i<j} w_i w_j h_ij under random signs w = ±1: p = (1 + #{T* ≥
    T})/(1 + n_resamples). "linear" treats the mean of h over neighbouring rows as normal, which is fast but much less
    powerful. Both are one-sided; fewer than two rows give NaN.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    method
        "quadratic" (default up to 4096 rows) or "linear" (default above).
    bandwidth
        Bandwidth ν; by default the median distance of two rows, see `median_distance`.
    sample_weight
        Weight of each row, shape (n,).
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.

    Returns
    -------
    KernelTest
        The statistic, its p-value and the method.

    Examples
    --------
    >>> logits = np.log([[0.05, 0.95]] * 40)
    >>> print(f"{skce_test(logits, [0, 1] * 20).p_value:.3f}")
    0.001

    References
    ----------
    Widmann, Lindsten & Zachariah (2019), Calibration tests in multi-class classification, arXiv:1910.11385.
    Arcones & Giné (1992), On the bootstrap of U and V statistics.
    """
    z, y = as_arrays(logits, labels)
    if method not in (None, "quadratic", "linear"):
        raise ValueError(f'method must be "quadratic", "linear" or None, got {method!r}')
    check_resamples(n_resamples)
    n = len(z)
    chosen = method or ("quadratic" if n <= QUADRATIC_ROWS else "linear")
    pairs = _Pairs.of(z, y, bandwidth, sample_weight)
    if n < 2:
        return KernelTest(math.nan, math.nan, chosen)
    if chosen == "linear":
        return KernelTest(*_normal_test(pairs.neighbours()), "linear")
    # Residuals of calibrated predictions have mean 0 for every p, so random signs need no centring. Subtracting their
    # mean rejects too often below some 50 rows.
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n, n_resamples))
    total, resampled = 0.0, np.zeros(n_resamples)
    for i, j, tile in pairs.upper():
        total += float(tile.sum())
        resampled += np.einsum("ij,ij->j", signs[i], tile @ signs[j])
    exceeding = int((resampled >= total - 1e-9 * abs(total)).sum())  # equal signs give T again, up to rounding
    return KernelTest(total / pairs.count(), (1 + exceeding) / (1 + n_resamples), "quadratic")


def median_distance(logits: Any) -> float:
    """Return the median Euclidean distance of the probability vectors of two rows, over all pairs of at most 1000 rows.

    More rows are thinned to 1000 evenly spaced ones in the order of ‖p‖. So neither the order of the rows nor that of
    the classes matters. If half of the pairs coincide, it is the median of the other distances; if all do, it is 1.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).

    Returns
    -------
    float
        The distance.

    Examples
    --------
    >>> f"{median_distance([[0.0, 0.0], [99.0, 0.0], [0.0, 99.0]]):.4f}"
    '0.7071'
    """
    z = as_logits(logits)
    n = len(z)
    if n > MEDIAN_ROWS:
        norms = np.concatenate([(_probs(z[at]) ** 2).sum(axis=1) for at in _slices(n)])
        ranks = ((np.arange(MEDIAN_ROWS) + 0.5) * n / MEDIAN_ROWS).astype(np.int64)
        z = z[np.argsort(norms, kind="stable")[ranks]]
    distance = _pair_distances(_probs(z))
    apart = distance[distance > 1e-12]
    if len(apart) == 0:
        return 1.0
    return float(np.median(distance if 2 * len(apart) > len(distance) else apart))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The matrix w_i w_j h_ij of a pair, computed tile by tile."""

    logits: np.ndarray
    labels: np.ndarray
    bandwidth: float
    weights: np.ndarray
    """Weights with mean 1."""

    @classmethod
    def of(cls, logits: Any, labels: Any, bandwidth: float | None, sample_weight: Any) -> _Pairs:
        z, y = as_arrays(logits, labels)
        w = as_weights(sample_weight, len(z))
        mean_one = np.ones(len(z)) if w is None else w / w.mean()
        return cls(z, y, median_distance(z) if bandwidth is None else _positive(bandwidth), mean_one)

    def part(self, at: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities p and weighted residuals w(e_y − p) of some rows."""
        probs = _probs(self.logits[at])
        residual = -probs
        residual[np.arange(len(probs)), self.labels[at]] += 1
        return probs, residual * self.weights[at, None]

    def count(self) -> float:
        """Return Σ_{i<j} w_i w_j, the number of pairs."""
        count = float(self.weights.sum() ** 2 - self.weights @ self.weights) / 2
        return count if count > 1e-9 else 0.0

    def upper(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield tiles of h with zeros on and below the diagonal, each with its rows and columns."""
        for i in _slices(len(self.logits)):
            probs, residual = self.part(i)
            for j in _slices(len(self.logits), i.start):
                others, other_residual = self.part(j)
                tile = self._distances(probs, others)
                tile /= -self.bandwidth
                np.exp(tile, out=tile)
                tile *= residual @ other_residual.T
                yield i, j, np.triu(tile, 1) if i == j else tile

    def _distances(self, probs: np.ndarray, others: np.ndarray) -> np.ndarray:
        # Squared distances from a matrix product err by about 1e-16, so small distances err by 1e-8. That is negligible
        # for an ordinary bandwidth but not for a tiny one.
        if self.bandwidth <= 0.05:
            from scipy.spatial.distance import cdist  # seldom needed, slow to import

            return np.asarray(cdist(probs, others))
        tile = probs @ (-2 * others.T)
        tile += np.einsum("ij,ij->i", probs, probs)[:, None]
        tile += np.einsum("ij,ij->i", others, others)
        np.maximum(tile, 0.0, out=tile)
        return np.sqrt(tile, out=tile)

    def sum(self) -> float:
        """Return Σ_{i<j} h_ij."""
        return sum(float(tile.sum()) for _, _, tile in self.upper())

    def diagonal_sum(self) -> float:
        """Return Σ_i h_ii."""
        return sum(float((self.part(at)[1] ** 2).sum()) for at in _slices(len(self.logits)))

    def neighbours(self) -> np.ndarray:
        """Return h of rows 1 and 2, of rows 3 and 4, and so on."""
        parts = []
        for at in _slices(len(self.logits) // 2 * 2):
            probs, residual = self.part(at)
            distance = np.sqrt(((probs[::2] - probs[1::2]) ** 2).sum(axis=1))
            parts.append(np.exp(distance / -self.bandwidth) * (residual[::2] * residual[1::2]).sum(axis=1))
        return np.concatenate(parts)


def _pair_distances(points: np.ndarray) -> np.ndarray:
    """Return the distances of all pairs: by a matrix product, or by differences for near rows, where it cancels."""
    first, second = np.triu_indices(len(points), 1)
    size = np.einsum("ij,ij->i", points, points)
    squared = (size[:, None] + size - 2 * (points @ points.T))[first, second]
    near = np.flatnonzero(squared < 1e-5)
    for some in native.row_chunks(len(near), points.shape[1]):
        pairs = near[some]
        squared[pairs] = ((points[first[pairs]] - points[second[pairs]]) ** 2).sum(axis=1)
    return np.sqrt(squared)


def _slices(n: int, start: int = 0) -> Iterator[slice]:
    return native.row_chunks(n, 1, native.TILE_ROWS, start=start)


def _probs(z: np.ndarray) -> np.ndarray:
    return softmax(z.astype(np.float64), axis=1)


def _positive(bandwidth: Any) -> float:
    if not isinstance(bandwidth, (int, float, np.number)) or not 0 < bandwidth < math.inf:
        raise ValueError(f"bandwidth must be a positive number, got {bandwidth!r}")
    return float(bandwidth)


def _normal_test(h: np.ndarray) -> tuple[float, float]:
    """Return the mean of h and its one-sided p-value if the true mean is 0."""
    mean = float(h.mean())
    if len(h) < 2:
        return mean, math.nan
    error = float(h.std(ddof=1)) / math.sqrt(len(h))
    if error == 0:
        return mean, 0.0 if mean > 0 else 1.0
    return mean, float(ndtr(-mean / error))


def _laplacian_form(c: np.ndarray, d: np.ndarray, bandwidth: float) -> float:
    """Return Σ_{i,j} d_i d_j exp(−|c_i − c_j|/bandwidth) for ascending c.

    The sum over j ≤ i, decayed to c_i, is a running sum of d_j exp(c_j/bandwidth) divided by exp(c_i/bandwidth).
    Exponents are taken from the start of blocks 500 bandwidths wide, so that none overflows.
    """
    block = np.floor((c - c[0]) / (500 * bandwidth))
    cuts = [0, *(np.flatnonzero(np.diff(block)) + 1), len(c)]
    total, carried, at = 0.0, 0.0, c[0]
    for start, stop in pairwise(cuts):
        x, w = c[start:stop], d[start:stop]
        growth = np.exp((x - x[0]) / bandwidth)
        decayed = (carried * math.exp((at - x[0]) / bandwidth) + np.cumsum(w * growth)) / growth
        total += float(w @ (2 * decayed - w))
        carried, at = float(decayed[-1]), x[-1]
    return total
