"""Isotonic regression: the non-decreasing curve nearest to what came true."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy.optimize import isotonic_regression
from torch import Tensor

from trueup.calibrators.base import Calibrator, TopLabel, break_ties
from trueup.calibrators.per_class import (
    PADDING,
    clip_frequencies,
    interpolate,
    keep_curve,
    map_top_confidence,
    one_vs_rest,
    pad_curves,
    rows_by_class,
)
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import as_tensors, upcast_half
from trueup.core.bins import tie_ends
from trueup.core.optimize import Certificate
from trueup.core.row_scores import class_probs, confidences_and_hits


class Isotonic(TopLabel):
    """Map the confidence by the non-decreasing g that minimises Σ_i (g(c_i) − a_i)², straight between its blocks.

    g is constant outside the confidences of the fit, and kept in [1/(n+2), 1 − 1/(n+2)]. Not for few samples, where it
    follows the noise.
    Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability estimates" (2002).

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curve = Isotonic.fit(logits, [1, 0, 1, 0])
    >>> curve.confidence(np.log([[0.65, 0.35], [0.75, 0.25], [0.85, 0.15]])).round(4)
    array([0.3333, 0.5   , 0.6667])
    """

    sample_invariant = False  # twice the samples, and the curve's ends come closer to 0 and 1
    differentiable = False

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)

    def map(self, logits: Tensor) -> Tensor:
        """Give the predicted class the curve's value and share the rest."""
        return map_top_confidence(logits, self.map_confidence)

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """The curve."""
        return interpolate(confidence.double(), self.knots, self.values)

    @classmethod
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Isotonic regression: pool adjacent violators."""
        z, y = as_tensors(logits, labels, at_least=1)
        confidence, hits = confidences_and_hits(z, y, quick=True)
        knots, values = pool_adjacent_violators(confidence, confidence[hits > 0])
        return cls(knots, clip_frequencies(values, len(z)))


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
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Isotonic regression, one against the rest: pool adjacent violators in each class."""
        return cls._fitted(*as_tensors(logits, labels, at_least=1), temperature=1.0)

    @classmethod
    def fit_scaled(cls, logits: Any, labels: Any) -> Self:
        """Isotonic regression after temperature: fit a temperature first, then the curves to what it gives."""
        z, y = as_tensors(logits, labels, at_least=1)
        scaler = Temperature.fit(z, y)
        return cls._fitted(scaler(upcast_half(z)), y, float(scaler.temperature), scaler.certificate)

    @classmethod
    def fit_centred(cls, logits: Any, labels: Any) -> Self:
        """Centred isotonic regression: pool adjacent violators in each class, and join the blocks at their middles."""
        z, y = as_tensors(logits, labels, at_least=1)
        labels = y.cpu().numpy()
        curves = [
            centre_blocks(scores, labels == k)
            for first, block in class_probs(z)
            for k, scores in enumerate(block, first)
        ]
        if z.shape[1] == 2:  # P(class 1) is fitted, and class 0 is what is left
            curves[0] = 1 - curves[1][0][::-1], 1 - curves[1][1][::-1]
        knots, values = zip(*curves, strict=True)
        return cls(pad_curves(knots, PADDING), clip_frequencies(pad_curves(values), len(z)))

    @classmethod
    def _fitted(cls, z: Tensor, y: Tensor, temperature: float, certificate: Certificate | None = None) -> Self:
        of_class = rows_by_class(y, z.shape[1])
        curves = [
            pool_adjacent_violators(scores, scores[of_class[k]])
            for first, block in class_probs(z)
            for k, scores in enumerate(block, first)
        ]
        knots, values = zip(*curves, strict=True)
        fitted = cls(pad_curves(knots, PADDING), clip_frequencies(pad_curves(values), len(z)), temperature)
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
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Isotonic regression, classes pooled: pool adjacent violators among all classes' probabilities."""
        z, y = as_tensors(logits, labels, at_least=1)
        of_class = rows_by_class(y, z.shape[1])
        blocks = list(class_probs(z))
        positive = [block[k - first, of_class[k]] for first, block in blocks for k in range(first, first + len(block))]
        scores = np.concatenate([block.ravel() for _, block in blocks])
        knots, values = pool_adjacent_violators(scores, np.concatenate(positive))
        return cls(knots, clip_frequencies(values, z.numel()))


def pool_adjacent_violators(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression of what came true, given all scores and those that did: first and last score of each block.

    The curve can only rise where a run of equal scores that holds a positive begins. So a group reaches from one such
    run to the next, there are no more groups than positives, and nothing below the lowest positive need be sorted.
    """
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
    knots = upper[np.stack([first, last], axis=1).ravel()]
    distinct = np.diff(knots, prepend=-1.0) > 0  # a block of one score has one knot
    knots, values = knots[distinct], np.repeat(value, 2)[distinct]
    if low.any():
        return np.append(scores[low].max(), knots), np.append(0.0, values)
    return knots, values


def centre_blocks(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression of what came true: the mean score and the value of each block.

    >>> centre_blocks(np.array([0.1, 0.2, 0.4, 0.9]), np.array([False, True, False, True]))
    (array([0.1, 0.3, 0.9]), array([0. , 0.5, 1. ]))
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    ends = np.flatnonzero(tie_ends(ordered))
    starts = np.append(0, ends[:-1] + 1)
    counts, totals = np.diff(ends, prepend=-1), np.add.reduceat(ordered, starts)
    hits = np.add.reduceat(positive[order].astype(np.float64), starts)
    blocks = isotonic_regression(hits / counts, weights=counts).blocks[:-1]
    rows, totals, hits = (np.add.reduceat(x, blocks) for x in (counts, totals, hits))
    return totals / rows, hits / rows
