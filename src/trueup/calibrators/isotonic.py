"""Isotonic regression, and Venn–Abers prediction, which brackets each probability by two isotonic fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeAlias

import numpy as np
from scipy.optimize import isotonic_regression

from trueup._core.arrays import as_logits, as_weighted, find_absent, match_kind, take_weighted, upcast_half
from trueup._core.bins import tie_ends
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.types import Array, ArrayLike, ArrayT, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import TopLabel, break_ties, clip_frequencies, row_count
from trueup.calibrators.curves import PADDING, ClassCurves, Knots, each_class, one_vs_rest, order_weight, pad_curves
from trueup.calibrators.folds import k_fold
from trueup.calibrators.temperature import Temperature


class Isotonic(Knots, TopLabel):
    """Map the confidence by the non-decreasing g that minimises Σ_i (g(c_i) − a_i)², linear between its blocks.

    With two classes c is P(class 1), and a_i = 1 if the label is 1. g is constant outside the confidences of the fit,
    and clipped to [1/(n+2), 1 − 1/(n+2)]. Not for few samples, where it follows the noise.

    Parameters
    ----------
    knots
        Ascending confidences, shape (knots,).
    values
        Calibrated confidence at each knot, shape (knots,).
    event
        Map P(class 1) of two classes instead of the confidence.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curve = Isotonic.fit(logits, [1, 0, 1, 0])
    >>> curve.confidence(np.log([[0.65, 0.35], [0.75, 0.25], [0.85, 0.15]])).round(4)
    array([0.6667, 0.5   , 0.3333])

    References
    ----------
    Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability estimates" (2002),
    doi:10.1145/775047.775151.
    """

    def __init__(self, knots: ArrayLike, values: ArrayLike, event: bool = False) -> None:
        super().__init__(knots, values)
        self.event = event

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Pool adjacent violators.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        scores, outcomes = scores_and_outcomes(z, y, quick=True)
        knots, values = pool_adjacent_violators(scores, outcomes > 0, w)
        return cls(knots, clip_frequencies(values, row_count(z, w)), z.shape[1] == 2)


class IsotonicOvR(Knots, ClassCurves):
    """Map each class's probability by an isotonic curve of its own, then normalise the row: q_k ∝ g_k(p_k) + 1e-9 p_k.

    With `fit_scaled`, p is the softmax of z/T, and T is fitted first. With `fit_centred` each flat stretch is replaced
    by one point at its mean probability, and the points are joined, so the curve rises strictly. Not for many classes
    with few samples each, nor where the predicted class must stay: it may change.

    Parameters
    ----------
    knots
        Ascending probabilities, shape (classes, knots).
    values
        Calibrated probability at each knot, shape (classes, knots).
    temperature
        Divisor of the logits.

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curves = IsotonicOvR.fit(logits, [1, 0, 1, 0])
    >>> np.exp(curves(logits)).round(4)
    array([[0.1667, 0.8333],
           [0.5   , 0.5   ],
           [0.5   , 0.5   ],
           [0.8333, 0.1667]])

    References
    ----------
    Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability estimates" (2002),
    doi:10.1145/775047.775151. Zhang, Kailkhura & Han, "Mix-n-match" (2020), arXiv:2003.07329. Oron & Flournoy,
    "Centered isotonic regression" (2017), arXiv:1701.05964.
    """

    temperature: float

    def __init__(self, knots: ArrayLike, values: ArrayLike, temperature: float = 1.0) -> None:
        super().__init__(knots, values)
        self.set_parameters(temperature=Temperature(temperature).temperature)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves to the scaled logits' probabilities and normalise."""
        return super().map(xp, z / self.temperature)

    def formula(self, classes: int) -> e.Formula:
        """Return the scaling and the curves as steps."""
        curves = super().formula(classes)
        if self.temperature == 1:
            return curves
        return e.join(e.Formula("logits", (e.scale(1 / self.temperature),), "logits"), curves)

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Pool adjacent violators in each class.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls._of([pool_adjacent_violators(*rows) for rows in each_class(z, y, w)], row_count(z, w))

    @classmethod
    def fit_scaled(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Fit a temperature, then pool adjacent violators in each class.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        scaler = Temperature.fit(z, y, sample_weight=w)
        curves = [pool_adjacent_violators(*rows) for rows in each_class(scaler(upcast_half(z)), y, w)]
        return cls._of(curves, row_count(z, w), scaler.temperature).with_certificate(scaler.certificate)

    @classmethod
    def fit_centred(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Pool adjacent violators in each class, and connect the centres of the blocks.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        curves = [centre_blocks(*rows) for rows in each_class(z, y, w)]
        if z.shape[1] == 2:  # P(class 1) is fitted, and class 0 is its complement
            curves[0] = 1 - curves[1][0][::-1], 1 - curves[1][1][::-1]
        return cls._of(curves, row_count(z, w))

    @classmethod
    def _of(cls, curves: list[tuple[np.ndarray, np.ndarray]], n: float, temperature: float = 1.0) -> Self:
        """Build the calibrator from each class's knots and values, and the number of rows."""
        knots, values = zip(*curves, strict=True)
        return cls(pad_curves(knots, PADDING), clip_frequencies(pad_curves(values), n), temperature)


class IsotonicPooled(Knots, ClassCurves):
    """Map every class's probability by the same isotonic curve, then normalise the row: q_k ∝ g(p_k) + 1e-9 p_k.

    g is fitted to all pairs (p_ik, 1[y_i = k]) and clipped to [1/(nK+2), 1 − 1/(nK+2)]. The order of the classes stays.
    Not for networks whose miscalibration differs between classes.

    Parameters
    ----------
    knots
        Ascending probabilities, shape (knots,).
    values
        Calibrated probability at each knot, shape (knots,).

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> curve = IsotonicPooled.fit(logits, [1, 0, 1, 0])
    >>> np.exp(curve(logits)).round(4)
    array([[0.5, 0.5],
           [0.5, 0.5],
           [0.5, 0.5],
           [0.9, 0.1]])

    References
    ----------
    Zhang, Kailkhura & Han, "Mix-n-match: ensemble and compositional methods for uncertainty calibration in deep
    learning" (2020), arXiv:2003.07329.
    """

    keeps_argmax = True

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curve to every class's probability and normalise."""
        return break_ties(xp, z, super().map(xp, z))

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Pool adjacent violators among all classes' probabilities.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        absent = find_absent(z)
        offered = [absent is None or not bool(absent[:, k].all()) for k in range(z.shape[1])]
        classes = [rows for rows, some in zip(each_class(z, y, w), offered, strict=True) if some]
        starts = np.cumsum([0, *(len(scores) for scores, _, _ in classes)])
        scores = np.concatenate([scores for scores, _, _ in classes])
        positive = np.concatenate([rows + start for (_, rows, _), start in zip(classes, starts, strict=False)])
        sample_weight = None if w is None else np.concatenate([each for _, _, each in classes])
        knots, values = pool_adjacent_violators(scores, positive, sample_weight)
        return cls(knots, clip_frequencies(values, len(scores) if sample_weight is None else sample_weight.sum()))


def pool_adjacent_violators(
    scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the isotonic regression of binary outcomes on scores: both ends of each block.

    `positive` has the indices, or a mask, of the rows with outcome 1. A block can only start at a score with a positive
    row. Rows are grouped from one such score to the next, so there are at most as many groups as positive rows. Scores
    below the lowest positive one need no sorting.

    >>> pool_adjacent_violators(np.array([0.1, 0.2, 0.3, 0.4]), np.array([1, 3]), np.array([1.0, 3.0, 1.0, 1.0]))
    (array([0.1, 0.2, 0.3, 0.4]), array([0.  , 0.75, 0.75, 1.  ]))
    """
    if sample_weight is not None:
        ordered, ends, sums = _runs(scores, positive, sample_weight)
        blocks = isotonic_regression(sums[2] / sums[0], weights=sums[0]).blocks
        first, last_index = np.append(0, ends[:-1] + 1)[blocks[:-1]], ends[blocks[1:] - 1]
        value = np.add.reduceat(sums[2], blocks[:-1]) / np.add.reduceat(sums[0], blocks[:-1])
        return _block_ends(ordered, first, last_index, value)
    positive_scores = scores[positive]
    if len(positive_scores) == 0:
        return np.zeros(1), np.zeros(1)
    low = scores < positive_scores.min() * (1 - 1e-14)  # a margin above rounding, so that no run of ties is cut
    upper = np.sort(scores[~low])
    ends = np.flatnonzero(tie_ends(upper))
    run = np.searchsorted(ends, np.searchsorted(upper, np.sort(positive_scores)))  # searching sorted values is faster
    starts, hits = np.unique(np.where(run > 0, ends[run - 1] + 1, 0), return_counts=True)
    if starts[0] > 0:
        starts, hits = np.append(0, starts), np.append(0, hits)
    counts = np.diff(starts, append=len(upper))
    blocks = isotonic_regression(hits / counts, weights=counts).blocks[:-1]
    first = starts[blocks]
    last_index = np.append(first[1:], len(upper)) - 1
    value = np.add.reduceat(hits, blocks) / np.add.reduceat(counts, blocks)
    knots, values = _block_ends(upper, first, last_index, value)
    if low.any():
        return np.append(scores[low].max(), knots), np.append(0.0, values)
    return knots, values


def _block_ends(
    ordered: np.ndarray, first: np.ndarray, last_index: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    knots = ordered[np.stack([first, last_index], axis=1).ravel()]
    distinct = np.diff(knots, prepend=-1.0) > 0  # a block with a single score has a single knot
    return knots[distinct], np.repeat(value, 2)[distinct]


def _runs(
    scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sorted scores, the index of the last score in each run of ties, and each run's sums, (3, runs).

    The sums are those of the weight, of the weight times the score, and of the weight of positives.
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    ends = np.flatnonzero(tie_ends(ordered))
    outcomes = np.zeros(len(scores))
    outcomes[positive] = 1.0
    w = np.ones(len(scores)) if sample_weight is None else sample_weight[order]
    columns = np.stack([w, w * ordered, w * outcomes[order]])
    return ordered, ends, np.add.reduceat(columns, np.append(0, ends[:-1] + 1), axis=1)


def centre_blocks(
    scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the isotonic regression of binary outcomes on scores: the mean score and the value of each block.

    >>> centre_blocks(np.array([0.1, 0.2, 0.4, 0.9]), np.array([False, True, False, True]))
    (array([0.1, 0.3, 0.9]), array([0. , 0.5, 1. ]))
    """
    _, _, sums = _runs(scores, positive, sample_weight)
    blocks = isotonic_regression(sums[2] / sums[0], weights=sums[0]).blocks[:-1]
    rows, totals, hits = np.add.reduceat(sums, blocks, axis=1)
    return totals / rows, hits / rows


Curves: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Distinct scores, and the lower and upper probabilities between them."""
_TIE = 1e-12  # scores no further apart are equal: softmax may return the same probability with different last digits.


class VennAbers(ClassCurves):
    """Bracket each class's probability: p₀ and p₁ are isotonic fits with the row itself added as 0 and as 1.

    One of the two is calibrated under any distribution. The single probability is p = p₁/(1 − p₀ + p₁). With several
    folds it is p = GM(p₁)/(GM(1 − p₀) + GM(p₁)), where GM is the geometric mean over the folds. Several classes are
    treated one against the rest and normalised. Not for ranking: a step function makes many rows equal.

    Parameters
    ----------
    scores
        Distinct scores, ascending, shape (folds, curves, m); one curve serves two classes.
    lower
        p₀ between the scores, shape (folds, curves, m + 1).
    upper
        p₁ between the scores, shape (folds, curves, m + 1).

    Examples
    --------
    >>> logits = np.log([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
    >>> fitted = VennAbers.fit(logits, [1, 0, 1, 0])
    >>> low, high = fitted.brackets(np.log([[0.65, 0.35]]))
    >>> low.round(4), high.round(4)
    (array([[0.    , 0.3333]]), array([[0.6667, 1.    ]]))

    References
    ----------
    Vovk, Petej & Fedorova, "Large-scale probabilistic predictors with and without guarantees of validity" (2015),
    arXiv:1511.00213.
    """

    scores: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def __init__(self, scores: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> None:
        self.set_parameters(scores=scores, lower=lower, upper=upper)
        shape = (*self.scores.shape[:-1], self.scores.shape[-1] + 1)
        if self.scores.ndim != 3 or tuple(self.lower.shape) != shape or tuple(self.upper.shape) != shape:
            shapes = [tuple(x.shape) for x in (self.scores, self.lower, self.upper)]
            raise ValueError(f"scores must be (folds, curves, m), lower and upper one longer, got {shapes}")
        if not ((self.lower >= 0) & (self.lower <= self.upper) & (self.upper <= 1)).all():
            raise ValueError("lower and upper must lie in [0, 1], lower at most upper")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the normalised single probabilities as log-probabilities."""
        self._check_classes(z, self._classes)
        if self._classes > 2:
            return one_vs_rest(xp, z, lambda p: self.curve(xp, p))
        p, weight = _two_probs(xp, xp.double(z)), order_weight(xp, z.dtype)
        return xp.astype(xp.log((self.curve(xp, p) + weight * p) / (1 + weight)).T, z.dtype)

    def brackets(self, logits: ArrayT) -> tuple[ArrayT, ArrayT]:
        """Return p₀ and p₁ of each class; with folds, from the geometric means of p₁ and of 1 − p₀.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).

        Returns
        -------
        tuple of arrays
            p₀ and p₁, shape (n, classes) each.
        """
        z = as_logits(logits).astype(np.float64)
        self._check_classes(z, self._classes)
        not_low, high = self._means(NUMPY, _two_probs(NUMPY, z) if self._classes == 2 else NUMPY.softmax(z).T)
        return match_kind((1 - not_low).T, logits), match_kind(high.T, logits)

    @property
    def _classes(self) -> int:
        """Return the number of classes; one curve, that of class 1, serves two classes."""
        return max(2, self.scores.shape[1])

    def curve(self, xp: Namespace, p: Array) -> Array:
        """Return the single probabilities."""
        not_low, high = self._means(xp, p)
        return high / (not_low + high)

    def _means(self, xp: Namespace, p: Array) -> tuple[Array, Array]:
        """Return geometric means over the folds of 1 − p₀ and p₁, at probabilities (classes, n)."""
        two = self._classes == 2
        folds = [self._fold(xp, p[1:, :] if two else p, k) for k in range(self.scores.shape[0])]
        not_low, high = (
            x[0] if len(folds) == 1 else xp.exp(xp.mean(xp.log(xp.stack(x)), axis=0)) for x in zip(*folds, strict=True)
        )
        # The brackets of class 0 are the reversed brackets of class 1.
        return (xp.concat([high, not_low]), xp.concat([not_low, high])) if two else (not_low, high)

    def _fold(self, xp: Namespace, p: Array, fold: int) -> tuple[Array, Array]:
        """Return 1 − p₀ and p₁ of one fold, at the counts #{c ≤ p} and #{c < p} of its scores."""
        scores, lower, upper = (table[fold, ...] for table in (self.scores, self.lower, self.upper))
        below = xp.searchsorted(scores + _TIE, p)
        following = xp.take(scores, xp.clip(below, max=scores.shape[1] - 1))
        up_to = xp.where((following - _TIE <= p) & (below < scores.shape[1]), below + 1, below)
        return 1 - xp.take(lower, up_to), xp.take(upper, below)

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Fit the inductive predictor: all rows calibrate.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls._of([_curves(*as_weighted(logits, labels, sample_weight, min_rows=1))])

    @classmethod
    def fit_cross(
        cls, logits: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, sample_weight: WeightsLike = None
    ) -> Self:
        """Fit an inductive predictor on each of several stratified folds, and combine them by geometric means.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        n_folds
            Number of folds.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2 * n_folds)
        return cls._of([_curves(*take_weighted(z, y, w, held_out)) for _, held_out in k_fold(z, y, n_folds)])

    @classmethod
    def _of(cls, folds: Sequence[list[Curves]]) -> Self:
        curves = [curve for classes in folds for curve in classes]

        def stacked(part: int, fill: float | None = None) -> np.ndarray:
            return pad_curves([curve[part] for curve in curves], fill).reshape(len(folds), len(folds[0]), -1)

        return cls(stacked(0, PADDING), stacked(1), stacked(2))


def _curves(z: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> list[Curves]:
    if z.shape[1] == 2:
        return [bracket_curves(_two_probs(NUMPY, z.astype(np.float64))[1], y == 1, w)]
    return [bracket_curves(*rows) for rows in each_class(z, y, w)]


def _two_probs(xp: Namespace, z: Array) -> Array:
    """Return the probabilities of two classes, (2, n), ten times faster than a softmax."""
    odds = z[:, 1] - z[:, 0]
    return xp.sigmoid(xp.stack([-odds, odds]))


def bracket_curves(scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None = None) -> Curves:
    """Return the distinct scores c (m,), and arrays of p₀ and p₁ (m + 1,).

    For a new score s, p₀ is entry #{c ≤ s} and p₁ is entry #{c < s} of its array. A row added as 1 joins the block of
    the next score at or above it, a row added as 0 the block at or below it. So both are step functions with steps at
    the scores of the fit. The added row has weight one.

    >>> c, low, high = bracket_curves(np.array([0.1, 0.2, 0.3]), np.array([False, True, False]))
    >>> low.round(3), high.round(3)
    (array([0.   , 0.   , 0.333, 0.333]), array([0.5  , 0.667, 0.667, 1.   ]))
    """
    order = np.argsort(scores)  # the order of ties does not matter: they form one group
    ordered = scores[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-np.inf) > _TIE)
    w = np.ones(len(ordered)) if sample_weight is None else sample_weight[order]
    outcomes = np.zeros(len(scores))
    outcomes[positive] = 1.0
    count, hits = np.add.reduceat(np.stack([w, w * outcomes[order]]), first, axis=1)
    high = _isotonic_with_one(count, hits)
    # In reversed order with reversed labels, a row added as 0 is a row added as 1.
    low = 1 - _isotonic_with_one(count[::-1], (count - hits)[::-1])[::-1]
    high = np.clip(high, 0.0, 1.0)  # sums of weights are rounded
    return ordered[first], np.clip(low, 0.0, high), high


def _isotonic_with_one(count: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Return the isotonic value at each group of ties if one more positive is added there, and 1 above them all.

    Put the added row at (−1, −1) before the cumulative sums (count, hits). Its isotonic value is the slope of the first
    edge of the lower convex hull. The loop updates the hull as the row moves up one group.
    """
    x = [-1.0, 0.0, *np.cumsum(count).tolist()]
    y = [-1.0, 0.0, *np.cumsum(hits).tolist()]
    # The corners of the hull, the leftmost last. The loops are written out: a call per corner doubles the time.
    corner_x, corner_y = [x[-1]], [y[-1]]
    for a, b in zip(reversed(x[:-1]), reversed(y[:-1]), strict=True):
        while len(corner_x) > 1:
            c, d = corner_x[-1], corner_y[-1]
            if (c - a) * (corner_y[-2] - d) > (corner_x[-2] - c) * (d - b):
                break  # else the hull passes below this corner
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
