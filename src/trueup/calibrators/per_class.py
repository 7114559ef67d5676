"""Curves from a probability to a calibrated one, and their application to all classes of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.core import chunks
from trueup.core.arrays import find_absent
from trueup.core.module import count_below
from trueup.core.row_scores import class_probs

ORDER_WEIGHT = 1e-9
"""How much of the old probability is added to the new one, so that a flat stretch of a curve keeps the order."""
PADDING = 2.0
"""Where places that only fill up a row of a table lie: above every probability."""


def one_vs_rest(
    logits: Tensor, curve: Callable[[Tensor], Tensor], *, score: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Log-probabilities in proportion to curve(p_k) + 1e-9 p_k; the curve takes and gives (classes, rows) in float64.

    With `score`, which takes logits, the curve is of that instead of the probabilities.
    """
    weight = order_weight(logits.dtype)

    def part(z: Tensor) -> Tensor:
        p = torch.softmax(z.double(), dim=1)
        x = p if score is None else score(z.double())
        q = curve(x.T.contiguous()).T + weight * p
        if (absent := find_absent(z)) is not None:
            q = q.masked_fill(absent, 0.0)
        return torch.log(q / q.sum(dim=1, keepdim=True)).to(z.dtype)

    if torch.compiler.is_compiling():
        return part(logits)
    blocks = [part(logits[at]) for at in chunks.row_chunks(len(logits), logits.shape[1], chunks.BLOCK)]
    return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def order_weight(dtype: torch.dtype) -> float:
    """`ORDER_WEIGHT`, or eight units of rounding: in single precision it would vanish beside the curve's value."""
    return max(ORDER_WEIGHT, 8 * torch.finfo(dtype).eps)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Go straight between the knots, and stay constant outside; one curve for all x, or one for each of its rows."""
    above = count_below(knots, x, right=True)
    low, high = (above - 1).clamp(min=0), above.clamp(max=knots.shape[-1] - 1)
    left, right = _take(knots, low), _take(knots, high)
    share = (x - left) / torch.where(right > left, right - left, 1.0)
    start = _take(values, low)
    return start + share.clamp(0.0, 1.0) * (_take(values, high) - start)


def step(x: Tensor, cuts: Tensor, values: Tensor, *, right: bool = False) -> Tensor:
    """The value of the bin #{cuts < x}, or with `right` #{cuts ≤ x}; one curve for all x, or one for each row."""
    return _take(values, count_below(cuts, x, right=right))


def rows_by_class(y: Tensor, classes: int) -> list[np.ndarray]:
    """The rows of each class."""
    labels = y.cpu().numpy()
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def each_class(z: Tensor, y: Tensor, w: Tensor | None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Of each class its probabilities in the rows that have it as an option, the places of its own rows, and weights.

    A class that no row has is given one row, of probability 0, that is not its own.
    """
    weights, of_class, absent = row_weights(w), rows_by_class(y, z.shape[1]), find_absent(z)
    labels = y.cpu().numpy()
    for first, block in class_probs(z):
        for k, scores in enumerate(block, first):
            if absent is None or not bool(absent[:, k].any()):
                yield scores, of_class[k], weights
                continue
            here = ~absent[:, k].cpu().numpy()
            if here.any():
                yield scores[here], np.flatnonzero(labels[here] == k), None if weights is None else weights[here]
            else:
                yield np.zeros(1), np.zeros(0, np.int64), None if weights is None else np.ones(1)


def row_weights(w: Tensor | None) -> np.ndarray | None:
    """Weights of `as_weighted` in NumPy."""
    return None if w is None else w.cpu().numpy()


def row_count(z: Tensor, w: Tensor | None) -> float:
    """How many rows there are, effectively."""
    return float(len(z) if w is None else w.sum())


def pad_curves(curves: Sequence[np.ndarray], fill: float | None = None) -> np.ndarray:
    """Curves of different lengths as one array, filled up with a number or with each one's last value."""
    width = max(len(curve) for curve in curves)
    rows = np.empty((len(curves), width))
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve)] = curve
        row[len(curve) :] = curve[-1] if fill is None else fill
    return rows


def keep_curve(to: Calibrator, name: str, places: Any, values: Any, *, more: int = 0) -> None:
    """Keep rising places under `name`, and as many values in [0, 1], or one more (fewer) of them."""
    to.keep(name, places)
    to.keep("values", values)
    x, v = (to.get_buffer(key) for key in (name, "values"))
    if x.ndim not in (1, 2) or not torch.isfinite(x).all() or (x.diff(dim=-1) < 0).any():
        raise ValueError(f"{name} must be finite numbers that rise, (places,) or (classes, places), got {places!r}")
    if v.shape[-1:] != (x.shape[-1] + more,) or (x.ndim == 2 and v.shape[:-1] != x.shape[:-1]):
        raise ValueError(f"values must go with {name} {tuple(x.shape)}, one a place {more:+d}, got {tuple(v.shape)}")
    if not ((v >= 0) & (v <= 1)).all():
        raise ValueError(f"values must lie in [0, 1], got {v.min():.6g}..{v.max():.6g}")


def check_margin(margin: float) -> float:
    """How far a row's confidence stays from 0 and 1."""
    if not 0 <= margin < 0.5:
        raise ValueError(f"margin must lie in [0, 0.5), got {margin!r}")
    return float(margin)


def clip_frequencies(values: np.ndarray, n: float) -> np.ndarray:
    """Keep frequencies among n samples off 0 and 1: at least 1/(n+2), at most 1 − 1/(n+2)."""
    return np.clip(values, 1 / (n + 2), 1 - 1 / (n + 2))


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values[index] if values.ndim == 1 else values.gather(1, index)
