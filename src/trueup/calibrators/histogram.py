"""Histogram binning: what a confidence of this size was worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from trueup.calibrators.base import (
    Calibrator,
    TopLabel,
    check_margin,
    clip_frequencies,
    keep_curve,
    one_vs_rest,
    row_weights,
    step,
)
from trueup.core.arrays import as_weighted, find_absent
from trueup.core.bins import BINS, Bins, cut_points, equal_mass, equal_width, rounding_error
from trueup.core.row_scores import scores_and_outcomes, top_label_tally

Empty = Literal["midpoint", "zero", "mean"]


class Histogram(TopLabel):
    """Replace the confidence by the accuracy of its bin: c′ = Σ_{i∈b} a_i / n_b, one set of bins for all classes.

    Of two classes the confidence is P(class 1), and a whether it was. Bins are right-closed, of equal width or of equal
    mass. In the row of log-probabilities c′ is kept in [1/(n+2), 1 − 1/(n+2)]; `confidence` gives it as it is. Not for
    ranking: confidences of one bin become equal.
    Zadrozny & Elkan, "Obtaining calibrated probability estimates" (2001).

    >>> logits = np.log([[0.1, 0.9], [0.2, 0.8], [0.4, 0.6], [0.7, 0.3]])
    >>> binned = Histogram.fit(logits, [1, 0, 1, 0], bins=4)
    >>> binned.confidence(logits).round(4)
    array([0.5, 0.5, 1. , 0. ])
    """

    sample_invariant = False  # twice the samples, and rows come closer to 0 and 1; equal-mass bins are cut elsewhere
    differentiable = False

    edges: Tensor
    values: Tensor

    def __init__(self, edges: Any, values: Any, margin: float = 0.0, event: bool = False) -> None:
        super().__init__()
        keep_curve(self, "edges", edges, values, more=-1)
        self.margin, self.event = check_margin(margin), event

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """The bin's accuracy."""
        return step(confidence.double(), self.edges[1:-1], self.values)

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        bins: int = BINS,
        edges: Literal["width", "mass"] = "width",
        empty: Empty = "midpoint",
        weights: Any = None,
    ) -> Self:
        """Histogram binning: count hits in the bins; an empty one gets its midpoint, zero, or the mean accuracy."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        if edges not in ("width", "mass"):
            raise ValueError(f'edges must be "width" or "mass", got {edges!r}')
        event, each = z.shape[1] == 2, row_weights(w)
        if edges == "width" and each is None and not event:
            places = slack_edges(bins, z)
            count, _, hits = top_label_tally(z, y, places[1:-1].copy())
        else:
            scores, outcomes = scores_and_outcomes(z, y, quick=True)
            places = equal_mass(scores, bins, each) if edges == "mass" else slack_edges(bins, z)
            tally = Bins.from_scores(scores, outcomes, places, weights=each)
            count, hits = tally.count, tally.hits
        return cls.from_counts(count, hits, places, empty, event=event)

    @classmethod
    def from_counts(
        cls, count: np.ndarray, hits: np.ndarray, edges: np.ndarray, empty: Empty = "midpoint", *, event: bool = False
    ) -> Self:
        """From trusted counts of rows and hits in bins."""
        return cls(edges, _frequency(count, hits, edges, empty), 1 / (count.sum() + 2), event)

    @classmethod
    def fit_mass(cls, logits: Any, labels: Any, *, bins: int = BINS, weights: Any = None) -> Self:
        """Histogram binning, equal mass: fit with bins of equal mass, none of which is empty."""
        return cls.fit(logits, labels, bins=bins, edges="mass", weights=weights)


class HistogramOvR(Calibrator):
    """Replace each class's probability by the frequency of that class in its bin, then normalise the row.

    q_k ∝ Σ_{i: p_ik∈b} 1[y_i = k] / n_kb, with bins of equal width, kept in [1/(n+2), 1 − 1/(n+2)]. Not for many
    classes with few samples each, nor where the predicted class must stay: it may change.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]])
    >>> binned = HistogramOvR.fit(logits, [0, 1, 0, 1], bins=2)
    >>> np.exp(binned(logits)).round(4)
    array([[0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.1667, 0.8333]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and frequencies come closer to 0 and 1
    differentiable = False

    edges: Tensor
    values: Tensor

    def __init__(self, edges: Any, values: Any) -> None:
        super().__init__()
        keep_curve(self, "edges", edges, values, more=-1)

    def map(self, logits: Tensor) -> Tensor:
        """The classes' frequencies, normalised."""
        self._check_classes(logits, len(self.values))
        bins = self.edges.shape[-1] - 1
        every = self.edges[1:-1].expand(len(self.values), bins - 1).contiguous()
        return one_vs_rest(logits, lambda p: step(p, every, self.values))

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, bins: int = BINS, empty: Empty = "midpoint", weights: Any = None) -> Self:
        """Histogram binning, one against the rest: count each class's labels in the bins of its probability; an empty
        one gets midpoint, zero or mean.
        """
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        places, each = slack_edges(bins, z), row_weights(w)
        return cls.from_counts(tally_options(z, y, bins=bins, weights=each), places, empty)

    @classmethod
    def from_counts(cls, tally: Bins, edges: np.ndarray, empty: Empty = "midpoint") -> Self:
        """From a class-wise tally."""
        return cls(edges, clip_frequencies(_frequency(tally.count, tally.hits, edges, empty), tally.n))


def tally_options(z: Tensor, y: Tensor, *, bins: int = BINS, weights: np.ndarray | None = None) -> Bins:
    """A class-wise tally of the options that rows have: an absent one is in no bin, not even that of 0."""
    tally = Bins.of(z, y, bins=bins, classwise=True, weights=weights)
    if (absent := find_absent(z)) is None:
        return tally
    gone = absent.cpu().numpy()
    count = tally.count.copy()
    count[:, 0] = np.maximum(count[:, 0] - (gone.sum(axis=0) if weights is None else weights @ gone), 0.0)
    return replace(tally, count=np.where(count > 1e-9, count, 0.0))


def slack_edges(bins: int, z: Tensor) -> np.ndarray:
    """Edges of equal width, each moved by the rounding of the logits, so that what lies on one stays below it."""
    return np.concatenate([[0.0], cut_points(equal_width(bins), rounding=rounding_error(z)), [1.0]])


def _frequency(count: np.ndarray, hits: np.ndarray, edges: np.ndarray, empty: Empty) -> np.ndarray:
    """Hits per count in each bin, on the last axis."""
    fallbacks = {
        "midpoint": (edges[1:] + edges[:-1]) / 2,
        "zero": np.zeros(1),
        "mean": hits.sum(axis=-1, keepdims=True) / np.maximum(count.sum(axis=-1, keepdims=True), 1e-300),
    }
    if empty not in fallbacks:
        raise ValueError(f'empty must be "midpoint", "zero" or "mean", got {empty!r}')
    return np.where(count > 0, hits / np.where(count > 0, count, 1.0), fallbacks[empty])
