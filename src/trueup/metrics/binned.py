"""Calibration errors by bins: of the predicted class, class-wise, and over other quantities than confidence."""

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
"""Bin rules of other code, for comparison with printed numbers, always of the predicted class: "guo" uses float32 edges
and leaves confidence 0 in no bin; "torchmetrics" closes bins on the left and gives confidence 1 a bin of its own."""


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
    """Expected calibration error Σ_b (n_b/n) |acc_b − conf_b| over equal-width bins of confidence.

    Of two classes the confidence is P(class 1) and the accuracy how often class 1 happens; `top_label=True` takes the
    predicted class, as for more classes, which hides what is too high below ½ and too low above.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> round(ece([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469
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
    """Maximum calibration error: the largest |acc_b − conf_b| of a bin that is not empty.

    >>> round(mce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.9526
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).mce()


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
    """Root mean square calibration error, the root of Σ_b (n_b/n) (acc_b − conf_b)².

    >>> round(rmsce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.5756
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).rmsce()


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
    """Average calibration error: the mean |acc_b − conf_b| over the bins that are not empty.

    >>> round(average_ce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469
    """
    return _top(logits, labels, bins, closed, compat, top_label, sample_weight).average_ce()


def overconfidence(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    closed: Closed = "right",
    top_label: bool = False,
    sample_weight: WeightsLike = None,
) -> float:
    """The part of ECE from bins that claim too much, Σ_b (n_b/n) max(conf_b − acc_b, 0).

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
    """The part of ECE from bins that claim too little, Σ_b (n_b/n) max(acc_b − conf_b, 0).

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
    """Adaptive ECE: over bins that hold equally many rows.

    Equal confidences stay in one bin; `ties="split"` keeps sizes exact instead and depends on the rows' order.
    `compat="mukhoti"` interpolates edges as that code does, losing the rows of lowest confidence.
    Nixon et al. (2019); Mukhoti et al. (2020).

    >>> round(aece([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], bins=2), 4)
    0.3674
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


_QUICK_ERROR = 4e-7
"""Quick confidences are right to this."""


def _equal_mass_tally(z: np.ndarray, y: np.ndarray, bins: int, top_label: bool) -> Bins:
    """Bins of equal mass by quick scores, which are made exact where a bin may end: equal scores are not to be parted.

    Each row is in the bin in which exact scores alone would put it: none that is further from an end than the errors of
    two scores can change sides.
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
        np.add.at(near, np.searchsorted(c, ends - 5 * _QUICK_ERROR), 1)
        np.add.at(near, np.searchsorted(c, ends + 5 * _QUICK_ERROR, side="right"), -1)
        places = np.flatnonzero(np.cumsum(near[:-1]))
        c[places] = confidences(z[order[places]])[0]
        again = np.argsort(c[places])
        c[places], order[places] = c[places][again], order[places][again]
    starts = equal_mass_starts(c, bins)
    sums = np.add.reduceat(c, starts), np.add.reduceat(a[order], starts)
    return Bins(equal_width(len(starts)), np.diff(starts, append=n).astype(np.float64), *sums)


def _order_single(scores: np.ndarray) -> np.ndarray:
    """The order of scores, none negative, as far as single precision tells them apart.

    It sorts by 16 bits at a time, which numpy does by counting: a third of the time of comparing.
    """
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
    """Static (class-wise) calibration error (1/K) Σ_k Σ_b (n_bk/n) |freq_bk − conf_bk| of p_k against 1[y = k].

    `compat="nctoolkit"` averages over the classes 0..max(labels) only. Nixon et al. (2019).

    >>> round(sce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.4469
    """
    tally = Bins.of(logits, labels, bins=bins, closed=closed, classwise=True, sample_weight=sample_weight)
    if compat not in (None, "nctoolkit"):
        raise ValueError(f'compat must be "nctoolkit" or None, got {compat!r}')
    if compat is None or not tally.n:
        return tally.ece()
    seen = int(np.flatnonzero(tally.hits.sum(axis=1)).max()) + 1
    return Bins(tally.edges, tally.count[:seen], tally.confidence[:seen], tally.hits[:seen]).ece()


def thresholded_sce(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    threshold: float = 1e-3,
    bins: int = BINS,
    sample_weight: WeightsLike = None,
) -> float:
    """Class-wise calibration error of the probabilities above a threshold; the others contribute nothing.

    With a thousand classes nearly every probability is next to zero and trivially right; this leaves those out.

    >>> round(thresholded_sce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], threshold=0.1), 4)
    0.2881
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must lie in [0, 1), got {threshold}")
    z, y = as_arrays(logits, labels)
    inner = cut_points(equal_width(bins), rounding=rounding_error(z))
    inner = np.unique(np.concatenate([inner[inner > threshold], [threshold]]))
    w = as_weights(sample_weight, len(z))
    tally = score_rows_and_classes(z, y, ClassCells(inner, weights=w))[1]
    gap = np.abs(tally.hits - tally.confidence)[:, 1:]  # bin 0 is what lies at or below the threshold
    return float(gap.sum(axis=1).mean() / (len(z) if w is None else w.sum())) if len(z) else float("nan")


def uce(logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> float:
    """Uncertainty calibration error Σ_b (n_b/n) |err_b − u_b| over equal-width bins of u = H(p)/ln K.

    Zero is not attainable in general: of a calibrated network with p = 0.9, u is 0.469 and the error 0.1.
    Laves et al. (2019).

    >>> round(uce([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]), 4)
    0.6972
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
    """Proximity-informed ECE Σ (n_mh/n) |acc_mh − conf_mh| over cells of proximity (equal mass) and confidence.

    `bins` are the numbers of bins of confidence and of proximity; a single number is that of confidence.
    It is at least the ECE with the same confidence bins: errors that cancel between dense and sparse regions show.
    Proximity is to the `neighbours` nearest rows of `reference` features (a held-out set), or of the others given; the
    logits serve where there are no features. Xiong et al. (2023).

    >>> rng = np.random.default_rng(0)
    >>> z, y = rng.normal(size=(200, 3)), rng.integers(0, 3, 200)
    >>> piece(z, y, features=rng.normal(size=(200, 8))) >= ece(z, y)
    True
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
        wanted = f'be None with compat="{compat}", which has none'
        raise InputError("sample_weight", wanted, type(sample_weight).__name__)


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
    """Edges as `torch.linspace` computes them in this type: by steps from both ends."""
    step, place = kind(1) / kind(size), np.arange(size + 1).astype(kind)
    edges = np.where(np.arange(size + 1) < (size + 1) // 2, step * place, kind(1) - step * place[::-1])
    return edges.astype(np.float64)


def _mukhoti(c: np.ndarray, a: np.ndarray, bins: int) -> float:
    if not (n := len(c)):
        return float("nan")
    edges = np.interp(np.linspace(0, n, bins + 1), np.arange(n), np.sort(c))
    index = np.searchsorted(edges, c, side="left") - 1
    kept = (index >= 0) & (index < bins)
    gaps = np.bincount(index[kept], weights=(a - c)[kept], minlength=bins)
    return float(np.abs(gaps).sum() / n)
