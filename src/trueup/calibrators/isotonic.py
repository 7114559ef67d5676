"""Isotonic regression: the non-decreasing curve nearest to what came true."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy.optimize import isotonic_regression
from torch import Tensor

from trueup.calibrators.base import (
    PADDING,
    Calibrator,
    TopLabel,
    break_ties,
    clip_frequencies,
    each_class,
    interpolate,
    keep_curve,
    one_vs_rest,
    pad_curves,
    row_count,
    row_weights,
)
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import as_weighted, find_absent, upcast_half
from trueup.core.bins import tie_ends
from trueup.core.optimize import Certificate
from trueup.core.row_scores import scores_and_outcomes


class Isotonic(TopLabel):
    """Map the confidence by the non-decreasing g that minimises Σ_i (g(c_i) − a_i)², straight between its blocks.

    Of two classes c is P(class 1), and a whether it was. g is constant outside the confidences of the fit, and kept in
    [1/(n+2), 1 − 1/(n+2)]. Not for few samples, where it follows the noise.
    Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability estimates" (2002).

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curve = Isotonic.fit(logits, [1, 0, 1, 0])
    >>> curve.confidence(np.log([[0.65, 0.35], [0.75, 0.25], [0.85, 0.15]])).round(4)
    array([0.6667, 0.5   , 0.3333])
    """

    sample_invariant = False  # twice the samples, and the curve's ends come closer to 0 and 1
    differentiable = False

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any, event: bool = False) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)
        self.event = event

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """The curve."""
        return interpolate(confidence.double(), self.knots, self.values)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Isotonic regression: pool adjacent violators."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        scores, outcomes = scores_and_outcomes(z, y, quick=True)
        knots, values = pool_adjacent_violators(scores, outcomes > 0, row_weights(w))
        return cls(knots, clip_frequencies(values, row_count(z, w)), z.shape[1] == 2)


class IsotonicOvR(Calibrator):
    """Map each class's probability by its own isotonic curve, then normalise the row: q_k ∝ g_k(p_k) + 1e-9 p_k.

    With `fit_scaled`, p is the softmax of z/T, and T is fitted first. With `fit_centred` the curve goes straight from
    the middle of one flat stretch, the mean of its probabilities, to that of the next, so that it rises strictly.
    Not for many classes with few samples each, nor where the predicted class must stay: it may change.
    Zadrozny & Elkan (2002); Zhang et al., "Mix-n-Match" (2020); Oron & Flournoy, "Centered isotonic regression" (2017).

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curves = IsotonicOvR.fit(logits, [1, 0, 1, 0])
    >>> np.exp(curves(logits)).round(4)
    array([[0.1667, 0.8333],
           [0.5   , 0.5   ],
           [0.5   , 0.5   ],
           [0.8333, 0.1667]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the curves' ends come closer to 0 and 1
    differentiable = False

    knots: Tensor
    values: Tensor
    temperature: Tensor

    def __init__(self, knots: Any, values: Any, temperature: Tensor | float = 1.0) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)
        self.keep("temperature", Temperature(temperature).temperature)

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.knots))
        scaled = logits / self.temperature.to(logits.dtype)
        return one_vs_rest(scaled, lambda p: interpolate(p, self.knots, self.values))

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Isotonic regression, one against the rest: pool adjacent violators in each class."""
        return cls._fit(*as_weighted(logits, labels, weights, at_least=1), temperature=1.0)

    @classmethod
    def fit_scaled(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Isotonic regression after temperature: fit a temperature first, then the curves to what it gives."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        scaler = Temperature.fit(z, y, weights=w)
        return cls._fit(scaler(upcast_half(z)), y, w, float(scaler.temperature), scaler.certificate)

    @classmethod
    def fit_centred(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Centred isotonic regression: pool adjacent violators in each class, and join the blocks at their middles."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        curves = [centre_blocks(*rows) for rows in each_class(z, y, w)]
        if z.shape[1] == 2:  # P(class 1) is fitted, and class 0 is what is left
            curves[0] = 1 - curves[1][0][::-1], 1 - curves[1][1][::-1]
        knots, values = zip(*curves, strict=True)
        return cls(pad_curves(knots, PADDING), clip_frequencies(pad_curves(values), row_count(z, w)))

    @classmethod
    def _fit(
        cls, z: Tensor, y: Tensor, w: Tensor | None, temperature: float, certificate: Certificate | None = None
    ) -> Self:
        curves = [pool_adjacent_violators(*rows) for rows in each_class(z, y, w)]
        knots, values = zip(*curves, strict=True)
        fitted = cls(pad_curves(knots, PADDING), clip_frequencies(pad_curves(values), row_count(z, w)), temperature)
        return fitted.with_certificate(certificate)


class IsotonicPooled(Calibrator):
    """Map every class's probability by one isotonic curve, then normalise the row: q_k ∝ g(p_k) + 1e-9 p_k.

    g is fitted to all pairs (p_ik, 1[y_i = k]) together, kept in [1/(nK+2), 1 − 1/(nK+2)], and keeps the classes'
    order. Not for networks whose miscalibration differs between classes.
    Zhang et al., "Mix-n-Match: ensemble and compositional methods for uncertainty calibration" (2020).

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curve = IsotonicPooled.fit(logits, [1, 0, 1, 0])
    >>> np.exp(curve(logits)).round(4)
    array([[0.5, 0.5],
           [0.5, 0.5],
           [0.5, 0.5],
           [0.9, 0.1]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the curve's ends come closer to 0 and 1
    differentiable = False

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)

    def map(self, logits: Tensor) -> Tensor:
        """The curve of every class, normalised."""
        out = one_vs_rest(logits, lambda p: interpolate(p, self.knots, self.values))
        return break_ties(logits, out)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Isotonic regression, classes pooled: pool adjacent violators among all classes' probabilities."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        absent = find_absent(z)
        offered = [True] * z.shape[1] if absent is None else (~absent.all(dim=0)).tolist()
        classes = [rows for rows, some in zip(each_class(z, y, w), offered, strict=True) if some]
        starts = np.cumsum([0, *(len(scores) for scores, _, _ in classes)])
        scores = np.concatenate([scores for scores, _, _ in classes])
        positive = np.concatenate([rows + start for (_, rows, _), start in zip(classes, starts, strict=False)])
        weights = None if w is None else np.concatenate([each for _, _, each in classes])
        knots, values = pool_adjacent_violators(scores, positive, weights)
        return cls(knots, clip_frequencies(values, len(scores) if weights is None else weights.sum()))


def pool_adjacent_violators(
    scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression of what came true, given all scores and which of them did: both ends of each block.

    The curve can only rise where a run of equal scores that holds a positive begins. So a group reaches from one such
    run to the next, there are no more groups than positives, and nothing below the lowest positive need be sorted.

    >>> pool_adjacent_violators(np.array([0.1, 0.2, 0.3, 0.4]), np.array([1, 3]), np.array([1.0, 3.0, 1.0, 1.0]))
    (array([0.1, 0.2, 0.3, 0.4]), array([0.  , 0.75, 0.75, 1.  ]))
    """
    if weights is not None:
        ordered, ends, sums = _runs(scores, positive, weights)
        blocks = isotonic_regression(sums[2] / sums[0], weights=sums[0]).blocks
        first, last = np.append(0, ends[:-1] + 1)[blocks[:-1]], ends[blocks[1:] - 1]
        value = np.add.reduceat(sums[2], blocks[:-1]) / np.add.reduceat(sums[0], blocks[:-1])
        return _block_ends(ordered, first, last, value)
    positive = scores[positive]
    if len(positive) == 0:
        return np.zeros(1), np.zeros(1)
    low = scores < positive.min() * (1 - 1e-14)  # less a little more than rounding, so that no run of ties is cut
    upper = np.sort(scores[~low])
    ends = np.flatnonzero(tie_ends(upper))
    run = np.searchsorted(ends, np.searchsorted(upper, np.sort(positive)))  # sorted ones are found faster
    starts, hits = np.unique(np.where(run > 0, ends[run - 1] + 1, 0), return_counts=True)
    if starts[0] > 0:
        starts, hits = np.append(0, starts), np.append(0, hits)
    counts = np.diff(starts, append=len(upper))
    blocks = isotonic_regression(hits / counts, weights=counts).blocks[:-1]
    first = starts[blocks]
    last = np.append(first[1:], len(upper)) - 1
    value = np.add.reduceat(hits, blocks) / np.add.reduceat(counts, blocks)
    knots, values = _block_ends(upper, first, last, value)
    if low.any():
        return np.append(scores[low].max(), knots), np.append(0.0, values)
    return knots, values


def _block_ends(
    ordered: np.ndarray, first: np.ndarray, last: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    knots = ordered[np.stack([first, last], axis=1).ravel()]
    distinct = np.diff(knots, prepend=-1.0) > 0  # a block of one score has one knot
    return knots[distinct], np.repeat(value, 2)[distinct]


def _runs(
    scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted scores, the last place of each run of equal ones, and in each run the weight, that times the score, and
    that of what came true, (3, runs).
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    ends = np.flatnonzero(tie_ends(ordered))
    came_true = np.zeros(len(scores))
    came_true[positive] = 1.0
    w = np.ones(len(scores)) if weights is None else weights[order]
    columns = np.stack([w, w * ordered, w * came_true[order]])
    return ordered, ends, np.add.reduceat(columns, np.append(0, ends[:-1] + 1), axis=1)


def centre_blocks(
    scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression of what came true: the mean score and the value of each block.

    >>> centre_blocks(np.array([0.1, 0.2, 0.4, 0.9]), np.array([False, True, False, True]))
    (array([0.1, 0.3, 0.9]), array([0. , 0.5, 1. ]))
    """
    _, _, sums = _runs(scores, positive, weights)
    blocks = isotonic_regression(sums[2] / sums[0], weights=sums[0]).blocks[:-1]
    rows, totals, hits = np.add.reduceat(sums, blocks, axis=1)
    return totals / rows, hits / rows
