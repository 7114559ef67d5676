"""Histogram binning of each class, drawn towards what the network says by as much as the data ask for."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy.special import betaln
from torch import Tensor

from trueup.calibrators.base import (
    PADDING,
    Calibrator,
    clip_frequencies,
    each_class,
    keep_curve,
    one_vs_rest,
    pad_curves,
    row_count,
    step,
)
from trueup.core.arrays import as_weighted
from trueup.core.bins import BINS, Bins, cut_points, equal_mass

STRENGTHS = np.geomspace(0.1, 1e6, 57)
"""Pseudo-counts among which the likelihood chooses."""


class ShrunkenHistogram(Calibrator):
    """Mix each class's probability with its frequency in a bin: q_k ∝ (h_b + m p_k)/(n_b + m).

    n_b rows of the fit lie in the bin of p_k, h_b of them of class k, in bins of equal mass. The m pseudo-counts of
    each class have the largest beta-binomial likelihood: ∏_b B(h_b + m p̄_b, n_b − h_b + m(1 − p̄_b)) / B(m p̄_b,
    m(1 − p̄_b)), p̄_b the bin's mean probability. So a calibrated network is left as it is, and a bad one binned. With
    two classes the curves complement each other. Not for many classes, whose small probabilities fill nearly all bins.

    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(2000)
    >>> z, y = np.log(np.stack([1 - p, p], axis=1)), (rng.random(2000) < 0.2 + 0.6 * (p > 0.5)).astype(int)
    >>> np.exp(ShrunkenHistogram.fit(z, y)(np.log([[0.7, 0.3], [0.3, 0.7]]))).round(1)
    array([[0.8, 0.2],
           [0.2, 0.8]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples weigh twice as much beside the pseudo-counts
    differentiable = False

    cuts: Tensor
    values: Tensor
    weights: Tensor

    def __init__(self, cuts: Any, values: Any, weights: Any) -> None:
        super().__init__()
        keep_curve(self, "cuts", cuts, values, more=1)
        self.keep("weights", weights)
        if self.cuts.ndim != 2 or self.weights.shape != self.values.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.cuts, self.values, self.weights))
            raise ValueError(f"cuts must be (classes, bins − 1), values and weights (classes, bins), got {shapes}")
        if not bool(((self.weights >= 0) & (self.weights <= 1)).all()):
            raise ValueError(f"weights must lie in [0, 1], got {self.weights.min():.6g}..{self.weights.max():.6g}")

    def map(self, logits: Tensor) -> Tensor:
        """The classes' mixtures, normalised."""
        self._check_classes(logits, len(self.cuts))
        return one_vs_rest(logits, self._curve)

    def _curve(self, p: Tensor) -> Tensor:
        weight = step(p, self.cuts, self.weights)
        return (1 - weight) * step(p, self.cuts, self.values) + weight * p

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, bins: int = BINS, weights: Any = None) -> Self:
        """Histogram binning, shrunken: count each class's labels in bins, and choose pseudo-counts by likelihood."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        curves = [_curve_of(*rows, bins) for rows in each_class(z, y, w)]
        if z.shape[1] == 2:
            cuts, values, own = curves[1]
            curves[0] = 1 - cuts[::-1], 1 - values[::-1], own[::-1]
        # A last cut that no probability reaches, so that one bin has a cut too.
        places = pad_curves([np.append(cuts, PADDING) for cuts, _, _ in curves], PADDING)
        width = places.shape[1] + 1
        values, own = (
            np.stack([np.pad(curve[part], (0, width - len(curve[part])), mode="edge") for curve in curves])
            for part in (1, 2)
        )
        return cls(places, clip_frequencies(values, row_count(z, w)), own)


def _curve_of(
    p: np.ndarray, positive: np.ndarray, weights: np.ndarray | None, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts, the frequency in each bin, and the weight m/(n_b + m) of the network's own probability there."""
    edges, came_true = equal_mass(p, bins, weights), np.zeros(len(p))
    came_true[positive] = 1.0
    tally = Bins.from_scores(p, came_true, edges, weights=weights)
    count, hits = tally.count, tally.hits
    strength = choose_strength(count, hits, tally.mean_confidence)
    return cut_points(edges), hits / count, strength / (count + strength)


def choose_strength(count: np.ndarray, hits: np.ndarray, mean: np.ndarray) -> float:
    """The pseudo-counts of `STRENGTHS` under which the hits are likeliest, beta-binomial about the mean predictions.

    >>> count, mean = np.array([100, 100]), np.array([0.3, 0.7])
    >>> [round(choose_strength(count, np.array(hits), mean), 1) for hits in ([30, 70], [20, 80], [5, 95])]
    [1000000.0, 23.7, 1.8]
    """
    mean = np.clip(mean, 1e-12, 1 - 1e-12)
    a, b = STRENGTHS[:, None] * mean, STRENGTHS[:, None] * (1 - mean)
    likelihood = (betaln(hits + a, count - hits + b) - betaln(a, b)).sum(axis=1)
    return float(STRENGTHS[likelihood.argmax()])
