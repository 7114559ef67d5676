"""What a calibrator is: a fitted map from logits to logits, often by curves from a probability to a calibrated one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import (
    as_logits,
    as_weighted,
    count_options,
    find_absent,
    is_traced,
    match_kind,
    read_padding,
    upcast_half,
)
from trueup.core.module import ParametricModule, count_below
from trueup.core.optimize import Certificate
from trueup.core.row_scores import class_probs, event_probs

TIE_MARGIN = 1e-5
"""By how much of itself the predicted class's probability stays above the others where it would not by itself."""
ORDER_WEIGHT = 1e-9
"""How much of the old probability is added to the new one, so that a flat stretch of a curve keeps the order."""
PADDING = 2.0
"""Where places that only fill up a row of a table lie: above every probability."""

_TRACE = 1e-12

_LARGEST = 1e15
"""To so much logits are scaled down whose map would overflow: any two that differ are still worlds apart."""


class Calibrator(ParametricModule):
    """A map from logits to logits, fitted: its constructor takes its parameters, `fit` estimates them.

    NumPy in, NumPy out; torch in, torch out; dtype out = dtype in. Half precision is computed in float32.
    An option that a row does not have, a logit of −∞, stays at −∞. What mixes classes takes the mean of the row's other
    inputs for it; what treats them one by one learns from the rows that have them, and shares a row out among its own.
    """

    keeps_argmax: ClassVar[bool]
    """The predicted class stays the same."""
    shift_invariant: ClassVar[bool]
    """Adding a constant to a row of logits changes nothing."""
    sample_invariant: ClassVar[bool]
    """Order and duplication of samples do not change the fit."""
    differentiable: ClassVar[bool]
    """The output has a useful gradient in the input."""

    certificate: Certificate | None = None
    """How the fit ended; None where the calibrator was made from its parameters, or the fit needs no search."""

    def __call__(self, logits: Any, **extra: Any) -> Any:
        """Map logits (n, classes), of any kind of array."""
        if isinstance(logits, Tensor):
            return super().__call__(logits, **extra)
        return match_kind(super().__call__(as_logits(logits), **extra), logits)

    def forward(self, logits: Tensor, **extra: Any) -> Tensor:
        """Map a tensor of logits (n, classes)."""
        if logits.ndim != 2:
            raise ValueError(f"logits must have shape (n, classes), got {tuple(logits.shape)}")
        z, traced = upcast_half(logits), is_traced()
        if not traced:  # an exported graph knows −∞ alone
            z = read_padding(z)
        absent = find_absent(z)
        mapped = self.map(z, **extra).to(logits.dtype)
        if not traced and not bool(torch.isfinite(mapped.sum())):
            mapped = self._saturate(z, mapped, extra)
        return mapped if absent is None else mapped.masked_fill(absent, -math.inf)

    def _saturate(self, z: Tensor, mapped: Tensor, extra: dict[str, Any]) -> Tensor:
        """Rows that the map takes out of the numbers' range, inside it: scaled down before, shifted down after."""
        finite = torch.isfinite(z)
        overflown = (finite.any(dim=1) & (~torch.isfinite(mapped) & finite).any(dim=1))[:, None]
        if not bool(overflown.any()):
            return mapped  # the sum overflowed, or what came was not finite itself
        size = torch.where(finite, z.abs(), 0.0).amax(dim=1, keepdim=True)
        out = self.map(torch.where(overflown, z * (_LARGEST / size.clamp(min=_LARGEST)), z), **extra)
        limit = torch.finfo(mapped.dtype).max
        shifted = (out - out.amax(dim=1, keepdim=True)).clamp(min=-limit)  # the order and the differences stay
        return torch.where(overflown, torch.where(finite, shifted, out).to(mapped.dtype), mapped)

    @abstractmethod
    def map(self, logits: Tensor) -> Tensor:
        """Map logits in float32 or float64."""

    def with_certificate(self, certificate: Certificate | None) -> Self:
        """This calibrator, with a note of how its fit ended."""
        self.certificate = certificate
        return self

    def _check_classes(self, logits: Tensor, classes: int) -> None:
        if logits.shape[1] != classes:
            raise ValueError(f"logits must have the {classes} classes of the fit, got {logits.shape[1]}")


class Identity(Calibrator):
    """Return the logits as they are, q = softmax(z): the baseline that every method must beat.

    Not for miscalibrated networks.

    >>> Identity.fit([[1.0, 2.0]], [1])([[1.0, 2.0]])
    array([[1., 2.]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = True
    differentiable = True

    def map(self, logits: Tensor) -> Tensor:
        """Return them."""
        return logits

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """No calibration: check the pair, as every method does."""
        as_weighted(logits, labels, weights, at_least=1)
        return cls()


class TopLabel(Calibrator):
    """A calibrator of the predicted class's confidence alone; the other classes share the rest.

    With `event`, as every fit to two classes is, it maps P(class 1) instead, and class 0 has
    the rest.
    """

    shift_invariant = True
    event: bool = False
    margin: float = 0.0
    """How far a row's confidence stays from 0 and 1."""

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """Unless it maps P(class 1), which may come out on the other side of a half."""
        return not self.event

    def confidence(self, logits: Any) -> Any:
        """The calibrated confidence itself, (n,), as the method gives it; of an event its probability."""
        z = upcast_half(as_logits(logits))
        return match_kind(self.map_confidence(self.score(z)).to(z.dtype), logits)

    def count_clipped(self, logits: Any) -> int:
        """In how many rows the confidence is below 1/K, so that the vector of probabilities cannot show it."""
        if self.event:
            return 0
        confidence = torch.as_tensor(self.confidence(logits))[:, None]
        return int((confidence < (1 + TIE_MARGIN) / count_options(upcast_half(as_logits(logits)))).sum())

    def score(self, logits: Tensor) -> Tensor:
        """What is mapped, (n,) in double: single precision cannot tell those near one apart, where most lie."""
        if self.event:
            self._check_classes(logits, 2)
            return event_probs(logits)
        return torch.softmax(logits.double(), dim=1).amax(dim=1)

    @abstractmethod
    def map_confidence(self, confidence: Tensor) -> Tensor:
        """Map confidences (n,)."""

    def map(self, logits: Tensor) -> Tensor:
        """Give the predicted class, or the event, its calibrated confidence and share the rest."""
        mapped = self.map_confidence(self.score(logits)).clamp(self.margin, 1 - self.margin)
        return set_confidence(logits, mapped, event=self.event)


def set_confidence(logits: Tensor, confidence: Tensor, *, event: bool) -> Tensor:
    """Log-probabilities with this confidence, in double, on the predicted class, or on class 1 of two."""
    if not event:
        return set_top_confidence(logits, confidence)
    tiny, eps = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).eps
    c = confidence.clamp(min=tiny, max=1 - eps / 2)
    return torch.stack([torch.log1p(-c), torch.log(c)], dim=1).to(logits.dtype)


def set_top_confidence(logits: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities with this confidence on the predicted class, which stays the predicted one.

    The rest is shared in proportion to the other probabilities, none of them above the confidence: what exceeds it goes
    to those that do not. A confidence under 1/K, which no vector could keep on top, is raised to 1/K and a hair. Absent
    options count for nothing.
    """
    absent, classes = find_absent(logits), count_options(logits)
    best = logits.argmax(dim=1, keepdim=True)
    least = (1 + TIE_MARGIN) / classes
    top = confidence.to(logits.dtype)[:, None].clamp(max=1.0).clamp(min=least)
    cap = top - top * (TIE_MARGIN / 2)  # a factor this near to one would be optimised away in ONNX
    others = logits.scatter(1, best, -math.inf)
    share = torch.softmax(others, dim=1)
    tiny = torch.finfo(logits.dtype).tiny
    rest = (1 - top).clamp(min=tiny)
    log_shared = torch.log_softmax(others, dim=1) + torch.log(rest)
    over = (share * rest).amax(dim=1, keepdim=True) > cap

    def capped(rows: Any) -> Tensor:
        # Classes whose probability has vanished can take an excess only if they have a trace to be scaled up.
        options = classes[rows] if isinstance(classes, Tensor) else classes
        mass = (share[rows] + _TRACE).scatter(1, best[rows], 0.0) / (1 + (options - 1) * _TRACE) * rest[rows]
        mass = mass if absent is None else mass.masked_fill(absent[rows], 0.0)
        return torch.log(_cap_masses(mass, rest[rows], cap[rows]).clamp(min=tiny))

    if torch.compiler.is_compiling():
        log_shared = torch.where(over, capped(slice(None)), log_shared)
    elif bool(over.any()):  # sorting takes longest, and few rows need it
        rows = over[:, 0].nonzero()[:, 0]
        log_shared = log_shared.index_put((rows,), capped(rows))
    return log_shared.scatter(1, best, torch.log(top))


def break_ties(logits: Tensor, calibrated: Tensor) -> Tensor:
    """Where rounding leaves another class level with the predicted one, put it below by a few units of rounding."""
    best = logits.argmax(dim=1, keepdim=True)
    top = calibrated.gather(1, best)
    below = top - 4 * torch.finfo(calibrated.dtype).eps * (1 + top.abs())
    return torch.where(logits < logits.gather(1, best), torch.minimum(calibrated, below), calibrated)


def _cap_masses(mass: Tensor, total: Tensor, cap: Tensor) -> Tensor:
    """Scale the masses up and cap them so that they still add up to the total: find how many reach the cap."""
    ordered = mass.sort(dim=1, descending=True).values
    number = torch.arange(mass.shape[1], device=mass.device, dtype=mass.dtype)
    below = ordered.flip(1).cumsum(dim=1).flip(1)  # what lies from each place on
    tiny = torch.finfo(mass.dtype).tiny
    scale = (total - number * cap).clamp(min=0) / below.clamp(min=tiny)
    fits = ordered * scale <= cap
    first = fits.to(torch.int64).argmax(dim=1, keepdim=True)  # the fewest capped with which the others fit
    return torch.minimum(mass * scale.gather(1, first), cap)


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
    blocks = [part(logits[at]) for at in native.row_chunks(len(logits), logits.shape[1], native.BLOCK)]
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
