"""Calibration errors from bins of confidence, of class probabilities, and of other quantities."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from scipy.special import softmax

from trueup._core.arrays import as_arrays, as_vector, as_weights, fill_absent, find_absent, upcast_half
from trueup._core.bins import (
    BINS,
    Bins,
    Closed,
    bin_index,
    cut_points,
    equal_mass,
    equal_mass_chunks,
    equal_mass_starts,
    equal_width,
    rounding_error,
)
from trueup._core.errors import InputError
from trueup._core.row_scores import (
    ClassCells,
    confidences,
    is_event,
    score_rows,
    score_rows_and_classes,
    scores_and_outcomes,
)
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.proximity import proximity

BinConvention = Literal["guo", "torchmetrics"]
"""Bin rules of other code, to reproduce published numbers; they score the predicted class.

"guo" uses float32 edges and drops confidence 0. "torchmetrics" closes bins on the left and adds a bin for confidence 1.
"""


def ece(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    compat: BinConvention | None = None,
) -> float:
    """Compute the expected calibration error Σ_b (n_b/n) |acc_b − conf_b| over equal-width bins of confidence.

    With two classes the confidence is P(class 1) and the accuracy is the frequency of class 1. `top_label=True` scores
    the predicted class instead. That lets errors below ½ cancel with errors above ½.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    compat
        Bin rule of other code, see `BinConvention`; it scores the predicted class.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(ece([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469

    References
    ----------
    Guo et al. (2017), On calibration of modern neural networks, arXiv:1706.04599.
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).ece()


def mce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    compat: BinConvention | None = None,
) -> float:
    """Compute the maximum calibration error: the largest |acc_b − conf_b| over bins that hold rows.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    compat
        Bin rule of other code, see `BinConvention`; it scores the predicted class.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(mce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.9526

    References
    ----------
    Guo et al. (2017), On calibration of modern neural networks, arXiv:1706.04599.
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).error("mce")


def rmsce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    compat: BinConvention | None = None,
) -> float:
    """Compute the root mean square calibration error, the root of Σ_b (n_b/n) (acc_b − conf_b)².

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    compat
        Bin rule of other code, see `BinConvention`; it scores the predicted class.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(rmsce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.5756
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).error("rmsce")


def average_ce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    compat: BinConvention | None = None,
) -> float:
    """Compute the average calibration error: the mean |acc_b − conf_b| over bins that hold rows.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    compat
        Bin rule of other code, see `BinConvention`; it scores the predicted class.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(average_ce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).error("average_ce")


def overconfidence(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the part of ECE from overconfident bins, Σ_b (n_b/n) max(conf_b − acc_b, 0).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The part, between 0 and the ECE.

    Examples
    --------
    >>> round(overconfidence([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.0397
    """
    return _top(logits, labels, bins, closed, None, top_label, sample_weight).error("overconfidence")


def underconfidence(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the part of ECE from underconfident bins, Σ_b (n_b/n) max(acc_b − conf_b, 0).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The part, between 0 and the ECE.

    Examples
    --------
    >>> round(underconfidence([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4072
    """
    return _top(logits, labels, bins, closed, None, top_label, sample_weight).error("underconfidence")


def aece(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    ties: Literal["merge", "split"] = "merge",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    compat: Literal["mukhoti"] | None = None,
) -> float:
    """Compute the adaptive ECE, over bins that hold equally many rows.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    ties
        "merge" keeps equal confidences in one bin; "split" keeps the sizes exact, so the order of the rows matters.
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).
    compat
        "mukhoti" interpolates the edges as that code does, which drops the rows with the lowest confidence.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(aece([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], bins=2), 4)
    0.3674

    References
    ----------
    Nixon et al. (2019), Measuring calibration in deep learning, arXiv:1904.01685.
    Mukhoti et al. (2020), Calibrating deep neural networks using focal loss, arXiv:2002.09437.
    """
    z, y = as_arrays(logits, labels)
    equal_width(bins)
    w = as_weights(sample_weight, len(z))
    top_label = top_label or compat is not None
    if ties == "merge" and compat is None and w is None:
        return _equal_mass_tally(z, y, bins, top_label).ece()
    c, a = scores_and_outcomes(z, y, top_label=top_label)
    if compat == "mukhoti":
        _refuse_weights(sample_weight, compat)
        return _mukhoti(c, a, bins)
    if compat is not None:
        raise ValueError(f'compat must be "mukhoti" or None, got {compat!r}')
    if ties == "merge":
        return Bins.from_scores(c, a, equal_mass(c, bins, w), sample_weight=w).ece()
    if ties != "split":
        raise ValueError(f'ties must be "merge" or "split", got {ties!r}')
    index = np.empty(len(c), np.int64)
    order = np.argsort(c, kind="stable")
    size = np.ones(len(c)) if w is None else w[order]
    index[order] = equal_mass_chunks(np.cumsum(size) - size, size.sum() or 1.0, bins)
    return Bins.from_indices(index, c, a, equal_width(bins), sample_weight=w).ece()


_MAX_QUICK_ERROR = 4e-7
"""Largest error of the approximate confidences."""


def _equal_mass_tally(z: np.ndarray, y: np.ndarray, bins: int, top_label: bool) -> Bins:
    """Bin rows to equal mass by approximate scores; scores near a bin's end are computed exactly.

    Each row lands in the bin that exact scores would give it, since only scores near an end can change sides.
    """
    c, a = scores_and_outcomes(z, y, top_label=top_label, quick=True)
    if not (n := len(c)):
        return Bins.from_scores(c, a, equal_width(1))
    quick = z.dtype != np.float64 and not is_event(z, top_label)
    order = _order_single(c) if quick else np.argsort(c)
    c = c[order]
    if quick:
        first = -(-np.arange(1, bins) * n // bins)
        ends = c[np.minimum(np.concatenate([[0], first - 1, first]), n - 1)]
        near = np.zeros(n + 1, np.int64)
        np.add.at(near, np.searchsorted(c, ends - 5 * _MAX_QUICK_ERROR), 1)
        np.add.at(near, np.searchsorted(c, ends + 5 * _MAX_QUICK_ERROR, side="right"), -1)
        near_rows = np.flatnonzero(np.cumsum(near[:-1]))
        c[near_rows] = confidences(z[order[near_rows]])[0]
        resorted = np.argsort(c[near_rows])
        c[near_rows], order[near_rows] = c[near_rows][resorted], order[near_rows][resorted]
    starts = equal_mass_starts(c, bins)
    sums = np.add.reduceat(c, starts), np.add.reduceat(a[order], starts)
    return Bins(equal_width(len(starts)), np.diff(starts, append=n).astype(np.float64), *sums)


def _order_single(scores: np.ndarray) -> np.ndarray:
    """Order non-negative scores to single precision, 16 bits at a time: three times faster than `np.argsort`."""
    bits = scores.astype(np.float32).view(np.uint32)
    order = np.argsort(bits.astype(np.uint16), kind="stable")
    high = (bits >> 16).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")]


def sce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    sample_weight: WeightsLike = None,
    compat: Literal["nctoolkit"] | None = None,
) -> float:
    """Compute the static (class-wise) calibration error (1/K) Σ_k Σ_b (n_bk/n) |freq_bk − conf_bk|.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    closed
        End of a bin that belongs to it, "right" or "left".
    sample_weight
        Weight of each row, shape (n,).
    compat
        "nctoolkit" averages over the classes 0..max(labels) only.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(sce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469

    References
    ----------
    Nixon et al. (2019), Measuring calibration in deep learning, arXiv:1904.01685.
    """
    tally = Bins.of(logits, labels, bins=bins, closed=closed, classwise=True, sample_weight=sample_weight)
    if compat not in (None, "nctoolkit"):
        raise ValueError(f'compat must be "nctoolkit" or None, got {compat!r}')
    if compat is None or not tally.n:
        return tally.ece()
    present = int(np.flatnonzero(tally.hits.sum(axis=1)).max()) + 1
    return Bins(tally.edges, tally.count[:present], tally.confidence[:present], tally.hits[:present]).ece()


def thresholded_sce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    threshold: float = 1e-3,
    bins: int = BINS,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the class-wise calibration error of the probabilities above a threshold.

    With a thousand classes nearly every probability is close to zero and trivially right. The threshold leaves those
    out.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    threshold
        Smallest probability that counts, in [0, 1).
    bins
        Number of bins.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(thresholded_sce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], threshold=0.1), 4)
    0.2881

    References
    ----------
    Nixon et al. (2019), Measuring calibration in deep learning, arXiv:1904.01685.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must lie in [0, 1), got {threshold}")
    z, y = as_arrays(logits, labels)
    inner = cut_points(equal_width(bins), rounding=rounding_error(z))
    inner = np.unique(np.concatenate([inner[inner > threshold], [threshold]]))
    w = as_weights(sample_weight, len(z))
    tally = score_rows_and_classes(z, y, ClassCells(inner, weights=w))[1]
    gap = np.abs(tally.hits - tally.confidence)[:, 1:]  # bin 0 holds the probabilities up to the threshold
    return float(gap.sum(axis=1).mean() / (len(z) if w is None else w.sum())) if len(z) else float("nan")


def uce(logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> float:
    """Compute the uncertainty calibration error Σ_b (n_b/n) |err_b − u_b| over equal-width bins of u = H(p)/ln K.

    Even a calibrated network does not reach 0: with two classes and p = 0.9, u is 0.469 but the error rate is 0.1.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    bins
        Number of bins.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(uce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.6972

    References
    ----------
    Laves et al. (2019), Well-calibrated model uncertainty with temperature scaling for dropout variational inference,
    arXiv:1909.13550.
    """
    z, y = as_arrays(logits, labels)
    scored = score_rows(z, y)
    u = np.clip(scored.entropy / np.log(z.shape[1]), 0.0, 1.0)
    w, unit = as_weights(sample_weight, len(z)), rounding_error(z)
    return Bins.from_scores(u, 1 - scored.correct, equal_width(bins), rounding=unit, sample_weight=w).ece()


def piece(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    features: ArrayLike | None = None,
    reference: ArrayLike | None = None,
    bins: int | tuple[int, int] = (BINS, 10),
    neighbours: int = 10,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """Compute the proximity-informed ECE over cells of proximity (equal mass) and confidence (equal width).

    Σ (n_mh/n) |acc_mh − conf_mh| is at least the ECE with the same confidence bins: errors of dense and sparse regions
    do not cancel.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    features
        Features to measure proximity with, shape (n, d); by default the logits.
    reference
        Features of a held-out set, shape (m, d); by default each row is compared with the other rows.
    bins
        Numbers of bins of confidence and of proximity; a single number is that of confidence.
    neighbours
        Number of nearest neighbours that define the proximity.
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
    >>> rng = np.random.default_rng(0)
    >>> z, y = rng.normal(size=(200, 3)), rng.integers(0, 3, 200)
    >>> piece(z, y, features=rng.normal(size=(200, 8))) >= ece(z, y)
    True

    References
    ----------
    Xiong et al. (2023), Proximity-informed calibration for deep neural networks, arXiv:2306.04590.
    """
    z, y = as_arrays(logits, labels)
    if not len(z):
        return float("nan")
    if features is None:
        features = fill_absent(upcast_half(z), find_absent(z))
    near = as_vector(proximity(features, reference, neighbours=neighbours), "features", length=len(z))
    w = as_weights(sample_weight, len(z))
    c, a = scores_and_outcomes(z, y, top_label=top_label)
    columns, rows = bins if isinstance(bins, tuple) else (bins, 10)
    row = bin_index(near, equal_mass(near, rows, w))
    cell = row * columns + bin_index(c, equal_width(columns), rounding=rounding_error(z))
    return Bins.from_indices(cell, c, a, equal_width(columns * rows), sample_weight=w).ece()


def _refuse_weights(sample_weight: Any, compat: str) -> None:
    if sample_weight is not None:
        expected = f'be None with compat="{compat}", which supports no weights'
        raise InputError("sample_weight", expected, type(sample_weight).__name__)


def _top(
    logits: Any,
    labels: Any,
    bins: int,
    closed: Closed,
    compat: BinConvention | None,
    top_label: bool,
    sample_weight: Any,
) -> Bins:
    if compat is None:
        return Bins.of(logits, labels, bins=bins, closed=closed, top_label=top_label, sample_weight=sample_weight)
    _refuse_weights(sample_weight, compat)
    z, y = as_arrays(logits, labels)
    size = len(equal_width(bins)) - 1
    probs = softmax(upcast_half(z), axis=1)
    c, a = probs.max(axis=1).astype(np.float64), (probs.argmax(axis=1) == y).astype(np.float64)
    if compat == "guo":
        edges = _rounded_edges(size, np.float32)
        kept = c > 0
        return Bins.from_indices(bin_index(c[kept], edges), c[kept], a[kept], equal_width(size))
    if compat == "torchmetrics":
        edges = _rounded_edges(size, probs.dtype.type)
        return Bins.from_indices(np.searchsorted(edges, c, side="right") - 1, c, a, equal_width(size + 1))
    raise ValueError(f'compat must be "guo", "torchmetrics" or None, got {compat!r}')


def _rounded_edges(size: int, kind: type[np.floating[Any]]) -> np.ndarray:
    """Bin edges as `torch.linspace` rounds them in this type: by steps from both ends."""
    step, number = kind(1) / kind(size), np.arange(size + 1).astype(kind)
    edges = np.where(np.arange(size + 1) < (size + 1) // 2, step * number, kind(1) - step * number[::-1])
    return edges.astype(np.float64)


def _mukhoti(c: np.ndarray, a: np.ndarray, bins: int) -> float:
    if not (n := len(c)):
        return float("nan")
    edges = np.interp(np.linspace(0, n, bins + 1), np.arange(n), np.sort(c))
    index = np.searchsorted(edges, c, side="left") - 1
    kept = (index >= 0) & (index < bins)
    gaps = np.bincount(index[kept], weights=(a - c)[kept], minlength=bins)
    return float(np.abs(gaps).sum() / n)
