"""Venn–Abers prediction: two isotonic regressions that bracket the probability, one for each label a row could have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import PADDING, Calibrator, each_class, one_vs_rest, order_weight, pad_curves, row_weights
from trueup.core.arrays import as_logits, as_weighted, match_kind, take_weighted, upcast_half
from trueup.core.module import count_below
from trueup.core.splits import k_fold

Curves: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Distinct scores, and the lower and upper probabilities between them."""
_TIE = 1e-12
"""Scores no further apart are equal: the same probability may come out of a softmax with other last digits."""


class VennAbers(Calibrator):
    """Bracket each class's probability: p₀ and p₁ are isotonic fits with the row itself added as 0 and as 1.

    One of the two is calibrated whatever the distribution; the single probability is p = p₁/(1 − p₀ + p₁), and with
    several folds p = GM(p₁)/(GM(1 − p₀) + GM(p₁)) with geometric means over the folds. Several classes are taken one
    against the rest and normalised. Not for ranking: a step function makes many rows equal.
    Vovk, Petej & Fedorova, "Large-scale probabilistic predictors with and without guarantees of validity" (2015).

    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> fitted = VennAbers.fit(logits, [1, 0, 1, 0])
    >>> low, high = fitted.brackets(np.log([[0.65, 0.35]]))
    >>> low.round(4), high.round(4)
    (array([[0.    , 0.3333]]), array([[0.6667, 1.    ]]))
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # each row is a share of the evidence beside the added one
    differentiable = False

    scores: Tensor
    lower: Tensor
    upper: Tensor

    def __init__(self, scores: Any, lower: Any, upper: Any) -> None:
        super().__init__()
        for name, value in (("scores", scores), ("lower", lower), ("upper", upper)):
            self.keep(name, value)
        shape = (*self.scores.shape[:-1], self.scores.shape[-1] + 1)
        if self.scores.ndim != 3 or tuple(self.lower.shape) != shape or tuple(self.upper.shape) != shape:
            shapes = [tuple(x.shape) for x in (self.scores, self.lower, self.upper)]
            raise ValueError(f"scores must be (folds, curves, m), lower and upper one longer, got {shapes}")
        if not bool(((self.lower >= 0) & (self.lower <= self.upper) & (self.upper <= 1)).all()):
            raise ValueError("lower and upper must lie in [0, 1], lower at most upper")

    def map(self, logits: Tensor) -> Tensor:
        """The single probabilities, normalised."""
        self._check_classes(logits, self._classes)
        if self._classes > 2:
            return one_vs_rest(logits, self._single)
        p = _two_probs(logits.double())
        weight = order_weight(logits.dtype)
        return torch.log((self._single(p) + weight * p) / (1 + weight)).T.to(logits.dtype)

    def brackets(self, logits: Any) -> tuple[Any, Any]:
        """p₀ and p₁ of each class, (n, classes) each; geometric means over the folds of p₁ and of 1 − p₀."""
        z = as_logits(logits)
        self._check_classes(z, self._classes)
        x = upcast_half(z).double()
        not_low, high = self._means(_two_probs(x) if self._classes == 2 else torch.softmax(x, dim=1).T.contiguous())
        return match_kind((1 - not_low).T, logits), match_kind(high.T, logits)

    @property
    def _classes(self) -> int:
        """One curve serves two classes: that of class 1."""
        return max(2, self.scores.shape[1])

    def _single(self, p: Tensor) -> Tensor:
        not_low, high = self._means(p)
        return high / (not_low + high)

    def _means(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Geometric means over the folds of 1 − p₀ and p₁ at probabilities (classes, n)."""
        two = self._classes == 2
        folds = [self._fold(p[1:] if two else p, k) for k in range(len(self.scores))]
        not_low, high = (
            x[0] if len(folds) == 1 else torch.log(torch.stack(x)).mean(dim=0).exp() for x in zip(*folds, strict=True)
        )
        # What is not class 1 is class 0, whose brackets are those of class 1 turned around.
        return (torch.cat([high, not_low]), torch.cat([not_low, high])) if two else (not_low, high)

    def _fold(self, p: Tensor, fold: int) -> tuple[Tensor, Tensor]:
        """1 − p₀ and p₁ of one fold: places #{c ≤ p} and #{c < p} among its scores, which differ where p is one."""
        scores = self.scores[fold]
        below = count_below(scores + _TIE, p)
        following = scores.gather(1, below.clamp(max=scores.shape[1] - 1))
        up_to = below + ((following - _TIE <= p) & (below < scores.shape[1]))
        return 1 - self.lower[fold].gather(1, up_to), self.upper[fold].gather(1, below)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Venn–Abers: the inductive predictor, for which all rows calibrate."""
        return cls._of([_curves(*as_weighted(logits, labels, weights, at_least=1))])

    @classmethod
    def fit_cross(cls, logits: Any, labels: Any, *, folds: int = 5, weights: Any = None) -> Self:
        """Cross Venn–Abers: an inductive predictor on each of several stratified folds, and their geometric means."""
        z, y, w = as_weighted(logits, labels, weights, at_least=2 * folds)
        return cls._of([_curves(*take_weighted(z, y, w, held_out)) for _, held_out in k_fold(z, y, folds)])

    @classmethod
    def _of(cls, folds: Sequence[list[Curves]]) -> Self:
        curves = [curve for classes in folds for curve in classes]

        def stacked(part: int, fill: float | None = None) -> np.ndarray:
            return pad_curves([curve[part] for curve in curves], fill).reshape(len(folds), len(folds[0]), -1)

        return cls(stacked(0, PADDING), stacked(1), stacked(2))


def _curves(z: Tensor, y: Tensor, w: Tensor | None) -> list[Curves]:
    if z.shape[1] == 2:
        scores = _two_probs(upcast_half(z).double())[1].cpu().numpy()
        return [bracket_curves(scores, y.cpu().numpy() == 1, row_weights(w))]
    return [bracket_curves(*rows) for rows in each_class(z, y, w)]


def _two_probs(z: Tensor) -> Tensor:
    """The probabilities of two classes, (2, n): a softmax over so few is ten times slower."""
    odds = z[:, 1] - z[:, 0]
    return torch.sigmoid(torch.stack([-odds, odds]))


def bracket_curves(scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None) -> Curves:
    """Distinct scores c (m,), and p₀ and p₁ (m + 1,): p₀ of a new score s is at #{c ≤ s}, p₁ at #{c < s}.

    A row added as 1 joins the block of the next score at or above it, one added as 0 that of the score at or below, so
    both are step functions with steps at the scores of the fit. The added row has weight one.

    >>> c, low, high = bracket_curves(np.array([0.1, 0.2, 0.3]), np.array([False, True, False]))
    >>> low.round(3), high.round(3)
    (array([0.   , 0.   , 0.333, 0.333]), array([0.5  , 0.667, 0.667, 1.   ]))
    """
    order = np.argsort(scores)  # in any order among equals, which are counted together
    ordered = scores[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-np.inf) > _TIE)
    w = np.ones(len(ordered)) if weights is None else weights[order]
    came_true = np.zeros(len(scores))
    came_true[positive] = 1.0
    count, hits = np.add.reduceat(np.stack([w, w * came_true[order]]), first, axis=1)
    high = _isotonic_with_one(count, hits)
    # Turned around, a row added as 0 is one added as 1.
    low = 1 - _isotonic_with_one(count[::-1], (count - hits)[::-1])[::-1]
    high = np.clip(high, 0.0, 1.0)  # sums of weights are rounded
    return ordered[first], np.clip(low, 0.0, high), high


def _isotonic_with_one(count: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """The isotonic value at each group of equal scores if one more positive is put there, and 1 above them all.

    One walk along the cumulative sums (n, hits), led by a point (−1, −1) for the added row: the value is the slope of
    the first side of their convex minorant, and the added row moves on by one group at each step.
    """
    x = [-1.0, 0.0, *np.cumsum(count).tolist()]
    y = [-1.0, 0.0, *np.cumsum(hits).tolist()]
    # The corners of the minorant, the leftmost last. The loops are written out: a call for each corner takes as long.
    corner_x, corner_y = [x[-1]], [y[-1]]
    for a, b in zip(reversed(x[:-1]), reversed(y[:-1]), strict=True):
        while len(corner_x) > 1:
            c, d = corner_x[-1], corner_y[-1]
            if (c - a) * (corner_y[-2] - d) > (corner_x[-2] - c) * (d - b):
                break  # else the minorant passes below this corner
            corner_x.pop()
            corner_y.pop()
        corner_x.append(a)
        corner_y.append(b)
    values = []
    for i in range(1, len(x) - 1):
        left, base = corner_x[-1], corner_y[-1]
        slope = (corner_y[-2] - base) / (corner_x[-2] - left)
        values.append(slope)
        a, b = x[i - 1] + x[i + 1] - x[i], y[i - 1] + y[i + 1] - y[i]
        x[i], y[i] = a, b
        if b < base + slope * (a - left) - 1e-12:
            corner_x.pop()
            corner_y.pop()
            while len(corner_x) > 1:
                c, d = corner_x[-1], corner_y[-1]
                if (c - a) * (corner_y[-2] - d) > (corner_x[-2] - c) * (d - b):
                    break
                corner_x.pop()
                corner_y.pop()
            corner_x.append(a)
            corner_y.append(b)
    return np.array([*values, 1.0])
