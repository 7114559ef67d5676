"""Curves from a probability to a calibrated probability: piecewise linear and step functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from trueup._core import native
from trueup._core.arrays import find_absent
from trueup._core.namespace import Namespace
from trueup._core.row_scores import class_probs
from trueup._core.types import Array, ArrayLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, TopLabel

Function = Callable[[Any], Any]
ORDER_WEIGHT = 1e-9
"""Weight of the original probability that is added to the new one; it keeps the order on flat parts of a curve."""
PADDING = 2.0
"""Fill value of tables of curves, above every probability."""


class Curve(Calibrator):
    """A calibrator that maps probabilities by one curve, or by one curve per class."""

    values: np.ndarray

    @abstractmethod
    def curve(self, xp: Namespace, p: Array) -> Array:
        """Map probabilities in float64, shape (n,) or (classes, n)."""

    def map_confidence(self, xp: Namespace, confidence: Array) -> Array:
        """Map confidences (n,) by the curve."""
        return self.curve(xp, confidence)

    def curve_steps(self, order_weight: float = 0.0) -> list[e.Step]:
        """Return the curve as a piecewise polynomial, or that of each class, plus `order_weight` times p.

        Parameters
        ----------
        order_weight
            Weight of the probability itself.

        Returns
        -------
        list of Step
            One curve, or one per class.
        """
        raise ValueError(f"{type(self).__name__} has no expression: {self.no_formula}")

    def formula(self, classes: int) -> e.Formula:
        """Return the curve of the score as steps."""
        if isinstance(self, TopLabel):
            return self.curve_formula(*self.curve_steps())
        return super().formula(classes)


class Knots(Curve):
    """Piecewise linear curves."""

    knots: np.ndarray

    def __init__(self, knots: ArrayLike, values: ArrayLike) -> None:
        keep_curve(self, "knots", knots, values)

    def curve(self, xp: Namespace, p: Array) -> Array:
        """Interpolate between the knots."""
        return interpolate(xp, p, self.knots, self.values)

    def curve_steps(self, order_weight: float = 0.0) -> list[e.Step]:
        """Return the lines between the knots."""
        knots, values = (np.atleast_2d(x) for x in (self.knots, self.values))
        return [e.lines(x[x < PADDING], y[x < PADDING], order_weight) for x, y in zip(knots, values, strict=True)]


class Edges(Curve):
    """Step functions, stored with the edges of all bins, 0 and 1 included."""

    edges: np.ndarray

    def __init__(self, edges: ArrayLike, values: ArrayLike) -> None:
        keep_curve(self, "edges", edges, values, extra=-1)

    def curve(self, xp: Namespace, p: Array) -> Array:
        """Return the value of the bin."""
        return xp.take(self.values, xp.searchsorted(self.edges[1:-1], p))

    def curve_steps(self, order_weight: float = 0.0) -> list[e.Step]:
        """Return the stairs between the inner edges."""
        return [e.stairs(self.edges[1:-1], row, order_weight) for row in np.atleast_2d(self.values)]


class Cuts(Curve):
    """Step functions, stored with the cuts between bins: the bin of p is #{cuts < p}, or #{cuts ≤ p} if left-closed."""

    left_closed: ClassVar[bool] = False
    cuts: np.ndarray

    def __init__(self, cuts: ArrayLike, values: ArrayLike) -> None:
        keep_curve(self, "cuts", cuts, values, extra=1)

    def curve(self, xp: Namespace, p: Array) -> Array:
        """Return the value of the bin."""
        return xp.take(self.values, xp.searchsorted(self.cuts, p, right=self.left_closed))

    def curve_steps(self, order_weight: float = 0.0) -> list[e.Step]:
        """Return the stairs between the cuts."""
        rows = zip(np.atleast_2d(self.cuts), np.atleast_2d(self.values), strict=True)
        return [e.stairs(x, y, order_weight, left_closed=self.left_closed) for x, y in rows]


class ClassCurves(Curve):
    """A curve of each class's probability, or one curve for all classes; the rows are then normalised."""

    differentiable = False

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves and normalise the rows."""
        if self.values.ndim == 2:
            self._check_classes(z, self.values.shape[0])
        return one_vs_rest(xp, z, lambda p: self.curve(xp, p))

    def formula(self, classes: int) -> e.Formula:
        """Return the curves of the probabilities as steps, with the weight that keeps the order."""
        return e.Formula("probs", (e.piecewise(*self.curve_steps(ORDER_WEIGHT)), e.op("normalise")), "probs")


def one_vs_rest(xp: Namespace, z: Array, curve: Function, *, score: Function | None = None) -> Array:
    """Return log-probabilities proportional to curve(p_k) + 1e-9 p_k; the curve maps arrays (classes, rows) in float64.

    With `score`, a function of the logits, the curve is applied to that score instead of the probabilities.
    """
    weight = order_weight(xp, z.dtype)

    def part(z: Any) -> Any:
        double = xp.double(z)
        p = xp.softmax(xp.transpose(double), axis=0)  # with few classes, sums along this axis are faster
        q = curve(p if score is None else xp.transpose(score(double))) + weight * p
        if (absent := xp.find_absent(z)) is not None:
            q = xp.where(absent.T, 0.0, q)
        return xp.astype(xp.transpose(xp.log(q / xp.sum(q, axis=0, keepdims=True))), z.dtype)

    if xp.is_traced(z):
        return part(z)
    blocks = [part(z[at, :]) for at in native.row_chunks(z.shape[0], z.shape[1], native.LARGE_CHUNK)]
    return xp.concat(blocks) if len(blocks) > 1 else blocks[0]


def order_weight(xp: Namespace, dtype: Any) -> float:
    """Return `ORDER_WEIGHT`, or eight units of rounding in float32, where it would vanish next to the curve's value."""
    return max(ORDER_WEIGHT, 8 * float(xp.finfo(dtype).eps))


def interpolate(xp: Namespace, x: Array, knots: Array, values: Array) -> Array:
    """Interpolate linearly between the knots, constant outside them; one curve for all x, or one per row of x."""
    if xp.is_numpy:
        curves = [np.interp(*row) for row in zip(x, knots, values, strict=True)] if knots.ndim == 2 else None
        lines = np.interp(x, knots, values) if curves is None else np.stack(curves)
        if np.isfinite(lines).all():  # slopes may overflow between knots that nearly coincide
            return lines
    above = xp.searchsorted(knots, x, right=True)
    low, high = xp.clip(above - 1, min=0), xp.clip(above, max=knots.shape[-1] - 1)
    left, right = xp.take(knots, low), xp.take(knots, high)
    share = (x - left) / xp.where(right > left, right - left, 1.0)
    start = xp.take(values, low)
    return start + xp.clip(share, 0.0, 1.0) * (xp.take(values, high) - start)


def each_class(
    z: np.ndarray, y: np.ndarray, w: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield each class's probabilities in the rows that offer it, the indices of rows with that label, and the weights.

    A class that no row offers yields one row with probability 0 and another label.
    """
    absent = find_absent(z)
    of_class = np.split(np.argsort(y, kind="stable"), np.cumsum(np.bincount(y, minlength=z.shape[1]))[:-1])
    for first, block in class_probs(z):
        for k, scores in enumerate(block, first):
            offered = None if absent is None else ~absent[:, k]
            if offered is None or offered.all():
                yield scores, of_class[k], w
            elif offered.any():
                yield scores[offered], np.flatnonzero(y[offered] == k), None if w is None else w[offered]
            else:
                yield np.zeros(1), np.zeros(0, np.int64), None if w is None else np.ones(1)


def pad_curves(curves: Sequence[np.ndarray], fill: float | None = None) -> np.ndarray:
    """Stack curves of different lengths, padded with `fill` or with each curve's final value."""
    width = max(len(curve) for curve in curves)
    rows = np.empty((len(curves), width))
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve)] = curve
        row[len(curve) :] = curve[-1] if fill is None else fill
    return rows


def keep_curve(calibrator: Calibrator, name: str, positions: Any, values: Any, *, extra: int = 0) -> None:
    """Store ascending positions under `name`, and their values in [0, 1], `extra` more (or fewer) than positions."""
    calibrator.set_parameters(**{name: positions, "values": values})
    x, v = (np.asarray(getattr(calibrator, key)) for key in (name, "values"))
    if x.ndim not in (1, 2) or not np.isfinite(x).all() or (np.diff(x) < 0).any():
        raise ValueError(f"{name} must be finite and ascending, (points,) or (classes, points), got {positions!r}")
    if v.shape[-1:] != (x.shape[-1] + extra,) or (x.ndim == 2 and v.shape[:-1] != x.shape[:-1]):
        raise ValueError(f"values must have {x.shape[-1] + extra} entries for {name} of shape {x.shape}, got {v.shape}")
    if not ((v >= 0) & (v <= 1)).all():
        raise ValueError(f"values must lie in [0, 1], got {v.min():.6g}..{v.max():.6g}")
