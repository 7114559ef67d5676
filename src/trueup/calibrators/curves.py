"""Curves from a probability to a calibrated one: broken lines and step functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from trueup._core import native
from trueup._core.arrays import find_absent
from trueup._core.namespace import Namespace
from trueup._core.row_scores import class_probs
from trueup.calibrators.base import Calibrator

Function = Callable[[Any], Any]
ORDER_WEIGHT = 1e-9
"""Share of the old probability that is added to the new one, so that a flat part of a curve keeps the order."""
PADDING = 2.0
"""Fills up the rows of a table of curves: above every probability."""


class Curve(Calibrator):
    """A calibrator that maps probabilities by a curve, or by one curve for each class."""

    values: np.ndarray

    @abstractmethod
    def curve(self, xp: Namespace, p: Any) -> Any:
        """Map probabilities in double: (n,), or (classes, n)."""

    def map_confidence(self, xp: Namespace, confidence: Any) -> Any:
        """Map confidences (n,) by the curve."""
        return self.curve(xp, confidence)


class Knots(Curve):
    """Curves that are straight between knots."""

    knots: np.ndarray

    def __init__(self, knots: Any, values: Any) -> None:
        keep_curve(self, "knots", knots, values)

    def curve(self, xp: Namespace, p: Any) -> Any:
        """Interpolate between the knots."""
        return interpolate(xp, p, self.knots, self.values)


class Edges(Curve):
    """Step functions with the edges of all bins, 0 and 1 included."""

    edges: np.ndarray

    def __init__(self, edges: Any, values: Any) -> None:
        keep_curve(self, "edges", edges, values, more=-1)

    def curve(self, xp: Namespace, p: Any) -> Any:
        """The value of the bin."""
        return xp.take(self.values, xp.searchsorted(self.edges[1:-1], p))


class Cuts(Curve):
    """Step functions with the cuts between bins: the bin of p is #{cuts < p}, or left-closed #{cuts ≤ p}."""

    left_closed: ClassVar[bool] = False
    cuts: np.ndarray

    def __init__(self, cuts: Any, values: Any) -> None:
        keep_curve(self, "cuts", cuts, values, more=1)

    def curve(self, xp: Namespace, p: Any) -> Any:
        """The value of the bin."""
        return xp.take(self.values, xp.searchsorted(self.cuts, p, right=self.left_closed))


class ClassCurves(Curve):
    """A curve of each class's probability, or one for all classes; the rows are normalised."""

    differentiable = False

    def map(self, xp: Namespace, z: Any) -> Any:
        """The classes' curves, normalised."""
        if self.values.ndim == 2:
            self._check_classes(z, self.values.shape[0])
        return one_vs_rest(xp, z, lambda p: self.curve(xp, p))


def one_vs_rest(xp: Namespace, z: Any, curve: Function, *, score: Function | None = None) -> Any:
    """Log-probabilities in proportion to curve(p_k) + 1e-9 p_k; the curve takes and gives (classes, rows) in float64.

    With `score`, which takes logits, the curve is of that instead of the probabilities.
    """
    weight = order_weight(xp, z.dtype)

    def part(z: Any) -> Any:
        double = xp.double(z)
        p = xp.softmax(xp.transpose(double), axis=0)  # sums over few classes are faster along this axis
        q = curve(p if score is None else xp.transpose(score(double))) + weight * p
        if (absent := xp.find_absent(z)) is not None:
            q = xp.where(absent.T, 0.0, q)
        return xp.astype(xp.transpose(xp.log(q / xp.sum(q, axis=0, keepdims=True))), z.dtype)

    if xp.is_traced(z):
        return part(z)
    blocks = [part(z[at, :]) for at in native.row_chunks(z.shape[0], z.shape[1], native.LARGE_CHUNK)]
    return xp.concat(blocks) if len(blocks) > 1 else blocks[0]


def order_weight(xp: Namespace, dtype: Any) -> float:
    """`ORDER_WEIGHT`, or eight units of rounding: in single precision it would vanish next to the curve's value."""
    return max(ORDER_WEIGHT, 8 * float(xp.finfo(dtype).eps))


def interpolate(xp: Namespace, x: Any, knots: Any, values: Any) -> Any:
    """Go straight between the knots, and stay constant outside; one curve for all x, or one for each of its rows."""
    if xp.is_numpy:
        curves = [np.interp(*row) for row in zip(x, knots, values, strict=True)] if knots.ndim == 2 else None
        lines = np.interp(x, knots, values) if curves is None else np.stack(curves)
        if np.isfinite(lines).all():  # unless a slope overflows, between knots that nearly coincide
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
    """For each class: its probabilities in the rows that have the option, which of them are of the class, and weights.

    A class that no row has is given one row, of probability 0, that is not of the class.
    """
    absent = find_absent(z)
    of_class = np.split(np.argsort(y, kind="stable"), np.cumsum(np.bincount(y, minlength=z.shape[1]))[:-1])
    for first, block in class_probs(z):
        for k, scores in enumerate(block, first):
            here = None if absent is None else ~absent[:, k]
            if here is None or here.all():
                yield scores, of_class[k], w
            elif here.any():
                yield scores[here], np.flatnonzero(y[here] == k), None if w is None else w[here]
            else:
                yield np.zeros(1), np.zeros(0, np.int64), None if w is None else np.ones(1)


def pad_curves(curves: Sequence[np.ndarray], fill: float | None = None) -> np.ndarray:
    """Curves of different lengths as one array, filled up with a number or with each one's end value."""
    width = max(len(curve) for curve in curves)
    rows = np.empty((len(curves), width))
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve)] = curve
        row[len(curve) :] = curve[-1] if fill is None else fill
    return rows


def keep_curve(to: Calibrator, name: str, places: Any, values: Any, *, more: int = 0) -> None:
    """Keep rising places under `name`, and as many values in [0, 1], or one more (fewer) of them."""
    to.set_parameters(**{name: places, "values": values})
    x, v = (np.asarray(getattr(to, key)) for key in (name, "values"))
    if x.ndim not in (1, 2) or not np.isfinite(x).all() or (np.diff(x) < 0).any():
        raise ValueError(f"{name} must be finite numbers that rise, (places,) or (classes, places), got {places!r}")
    if v.shape[-1:] != (x.shape[-1] + more,) or (x.ndim == 2 and v.shape[:-1] != x.shape[:-1]):
        raise ValueError(f"values must go with {name} {x.shape}, one a place {more:+d}, got {v.shape}")
    if not ((v >= 0) & (v <= 1)).all():
        raise ValueError(f"values must lie in [0, 1], got {v.min():.6g}..{v.max():.6g}")
