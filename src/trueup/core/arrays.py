"""Validation of arrays: every public function passes `logits, labels` through here first.

What comes back has the right shape, type and range and holds no NaN, so that inner functions check nothing. A logit of
−∞ is an option that its row does not have: `find_absent` says where they are, and nothing else is infinite. A pair is
checked once: the tensors that come back are aliases that carry a mark, with the version of their memory, and those that
carry a valid mark are returned as they are. The caller's own arrays are never marked.
"""

from __future__ import annotations

import sys
import warnings
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack

from trueup.core import chunks, native
from trueup.core.conversion import to_tensor as _tensor
from trueup.core.errors import Hint, InputError, LooksLikeProbabilities, PaddedOptions

Array: TypeAlias = np.ndarray | Tensor
A = TypeVar("A", np.ndarray, Tensor)

NEVER = -1e15
"""A logit, less the largest of its row, that stands for −∞ where 0 · ∞ would be no number: its square is finite."""

FLOOR = 1e-6
"""What an exact zero becomes at least, unless a floor is given."""

CERTAIN = 1e-4
"""By how much a stated confidence of exactly 0 or 1 is moved at most, unless a floor is given."""

_ROUNDED_SUM = 0.1
"""How far a row of rounded probabilities may be from a sum of one to be divided by it."""

MIN_PADDING = 9000.0
"""Finite logits read as absent options are at least so far below zero."""

_FAR = 10.0
"""And so many times as far from zero as any other logit of their row."""

_ROUNDED_TOP = 1e-2
"""How far above 1 the largest probabilities of a row may sum: services round log-probabilities, or mix precisions."""

ROUNDING = 1e-6
"""How far probabilities may stray from [0, 1] and their rows from a sum of one before they are refused."""


def as_pair(
    logits: Any, labels: Any, *, soft: bool = False, at_least: int = 0, doubt: bool = True, padding: bool = True
) -> tuple[Any, Any]:
    """Check a pair of logits (n, classes) and labels (n,), keeping the kind of array it came as.

    Integer labels come back as int64. With `soft=True` labels may also be a distribution a row, (n, classes).
    Memory is shared with the input wherever its type allows. Logits that look like probabilities are doubted in a
    warning, unless the caller does that. `padding=False` leaves numbers that code pads with to whoever is next.

    >>> as_pair([[2.0, 1.0]], [2])
    Traceback (most recent call last):
        ...
    trueup.core.errors.InputError: labels must lie in 0..1, got 2..2
    """
    z, y = as_tensors(logits, labels, soft=soft, at_least=at_least, doubt=doubt, padding=padding)
    return match_kind(z, logits), match_kind(y, logits)


def as_tensors(
    logits: Any, labels: Any, *, soft: bool = False, at_least: int = 0, doubt: bool = True, padding: bool = True
) -> tuple[Tensor, Tensor]:
    """Check a pair as `as_pair` does, and view it as torch tensors on the logits' device.

    A pair that came from here is returned as it is, unless it was changed since.

    >>> z, y = as_tensors([[2.0, 1.0]], [0])
    >>> again = as_tensors(z, y)
    >>> again[0] is z, again[1] is y
    (True, True)
    """
    z = as_logits(logits, doubt=doubt, padding=padding)
    if len(z) < at_least:
        raise ValueError(f"logits must have at least {at_least} rows, got {len(z)}")
    if _are_checked_labels(labels, z, soft=soft):
        return z, labels
    y = _tensor(labels, "labels").to(z.device)
    y = _check_soft_labels(y, z) if soft and y.ndim == 2 else _check_labels(y, z)
    return z, _mark_checked(y, z.shape[1])


def take_rows(logits: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of a pair that came from `as_tensors`: they need no second check.

    >>> z, y = take_rows(*as_tensors([[2.0, 1.0], [0.0, 1.0]], [0, 1]), torch.tensor([1]))
    >>> as_tensors(z, y)[0] is z
    True
    """
    z, y = logits[rows], labels[rows]
    absent = not _is_checked(logits) or logits._absent  # type: ignore[attr-defined]
    return _mark_checked(z, z.shape[1], absent=absent), _mark_checked(y, z.shape[1])


def as_weighted(logits: Any, labels: Any, weights: Any, *, at_least: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check a pair and its weights for a fit: rows of weight zero are gone, and n is the sum of the weights.

    The weights come back scaled so that they add up to the effective number of rows, (Σw)²/Σw². So what a fit counts
    of rows it may sum of weights, and a common factor changes nothing. Equal ones come back as None.

    >>> as_weighted([[2.0, 1.0], [0.0, 1.0], [0.0, 2.0]], [0, 1, 0], [3.0, 0.0, 1.0])[1:]
    (tensor([0, 0]), tensor([1.2000, 0.4000], dtype=torch.float64))
    """
    if weights is None:
        return *as_tensors(logits, labels, at_least=at_least), None
    z, y = as_tensors(logits, labels)
    w = torch.from_numpy(as_weights(weights, len(z)))
    if bool((w == 0).any()):
        kept = w > 0
        (z, y), w = take_rows(z, y, kept.to(z.device)), w[kept]
    if len(z) < at_least:
        raise ValueError(f"logits must have at least {at_least} rows of positive weight, got {len(z)}")
    if bool((w == w[:1]).all()):
        return z, y, None
    w = w / w.max()
    return z, y, (w * (w.sum() / w.square().sum())).to(z.device)


def take_weighted(
    logits: Tensor, labels: Tensor, weights: Tensor | None, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Some rows of what came from `as_weighted`."""
    return *take_rows(logits, labels, rows), None if weights is None else weights[rows]


def given(weights: Any) -> dict[str, Any]:
    """Weights as a keyword argument, if there are any: functions that take none can still be called without."""
    return {} if weights is None else {"weights": weights}


def trusted_tensors(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """View a pair that has passed here as torch tensors, without a second look at every number."""
    return read_padding(_tensor(logits, "logits")), _tensor(labels, "labels")


def as_labels(labels: Any, logits: Any) -> Any:
    """Check labels (n,) of logits that have passed here, keeping the kind of array the logits are."""
    return match_kind(_check_labels(_tensor(labels, "labels"), _tensor(logits, "logits")), logits)


def as_logits(logits: Any, name: str = "logits", *, doubt: bool = True, padding: bool = True) -> Tensor:
    """Check logits (n, classes): floating point, at least two classes; −∞ is an option that the row does not have.

    Each row has at least two options. A finite logit is read as −∞ too if it is a number that code pads with: −10⁴,
    −10⁵, … , −9999, −99999, … , or the least number of a floating-point type. It must be ten times as far from zero as
    what else is in the row, at least two logits; a warning says so.

    >>> as_logits([[2.0, 1.0, -np.inf]])
    tensor([[2., 1., -inf]], dtype=torch.float64)
    >>> as_logits([[2.0, 1.0, 0.0], [2.0, -np.inf, -np.inf]])
    Traceback (most recent call last):
        ...
    trueup.core.errors.InputError: logits must have at least 2 options in each row, got 1 in row 1 (an absent one is \
-inf, or empty in a table); log-probabilities of exact zeros come through from_probs
    """
    if _is_checked(logits) and logits.ndim == 2 and logits.is_floating_point():
        return logits
    z = _tensor(logits, name)
    if z.ndim != 2:
        of_one = Hint.CONFIDENCE if _lies_in_unit_interval(z) else Hint.BINARY_SCORE
        hint = {1: of_one, 3: Hint.FLATTEN, 4: Hint.FLATTEN}.get(z.ndim)
        raise InputError(name, "have shape (n, classes)", _shape(z), hint)
    if z.shape[1] < 2:
        hint = Hint.CONFIDENCE if _lies_in_unit_interval(z) else Hint.BINARY_SCORE
        raise InputError(name, "have at least 2 classes", f"shape {_shape(z)}", hint)
    plain = bool(native.all_within(z, -MIN_PADDING))  # nearly always: then they are read once
    z, absent = (z, False) if plain else _check_options(z, name, padding=padding)
    if doubt and not absent and _look_like_probabilities(z):
        warn_users(
            f"each row of {name} sums to 1 like probabilities, but is read as logits; probabilities go through "
            "from_probs",
            LooksLikeProbabilities,
        )
    if not padding and not plain and z.numel() and bool(z.amin() <= -MIN_PADDING):
        return z  # to be looked at again
    return _mark_checked(z, z.shape[1], absent=absent)


def find_absent(logits: Tensor) -> Tensor | None:
    """Where a row does not have an option, which is where its logit is −∞, as a mask; None where all rows have all.

    >>> find_absent(torch.tensor([[2.0, 1.0, -torch.inf]]))
    tensor([[False, False,  True]])
    """
    if (_is_checked(logits) and not logits._absent) or not logits.numel():  # type: ignore[attr-defined]
        return None
    if not is_traced() and bool(logits.detach().amin() > -torch.inf):
        return None
    return logits == -torch.inf


def is_traced() -> bool:
    """Whether a compiler, a tracer or torch.func reads the operations, which cannot follow a branch on numbers."""
    return torch.compiler.is_compiling() or _is_tracing() or peek_interpreter_stack() is not None


def fill_absent(values: Tensor, absent: Tensor | None) -> Tensor:
    """The mean of what a row has where an option is absent, which then says nothing, and is finite.

    >>> fill_absent(torch.tensor([[2.0, 1.0, -torch.inf]]), torch.tensor([[False, False, True]]))
    tensor([[2.0000, 1.0000, 1.5000]])
    """
    if absent is None:
        return values
    total = torch.where(absent, 0.0, values).sum(dim=1, keepdim=True)
    return torch.where(absent, total / (~absent).sum(dim=1, keepdim=True), values)


def count_options(logits: Tensor) -> Tensor | int:
    """How many options a row has: the classes, or, where some are absent, a column (n, 1) in the logits' type."""
    absent = find_absent(logits)
    return logits.shape[1] if absent is None else (~absent).sum(dim=1, keepdim=True).to(logits.dtype)


def read_padding(logits: A) -> A:
    """Trusted logits, with −∞ where a finite number stands for an absent option; themselves where there is none.

    >>> read_padding(torch.tensor([[2.0, 1.0, -1e9]]))
    tensor([[2., 1., -inf]])
    """
    z = logits if isinstance(logits, Tensor) else _tensor(logits, "logits")
    if not z.numel() or not bool(z.detach().amin() <= -MIN_PADDING):
        return logits
    padding = _find_padding(z.detach())
    return match_kind(z.masked_fill(padding, -torch.inf), logits) if bool(padding.any()) else logits


def _padding_numbers() -> Tensor:
    """Numbers that code pads with, also as the narrower types round them."""
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    written = [-(10.0**power) + nine for power in range(4, 39) for nine in ((0.0, 1.0) if power <= 9 else (0.0,))]
    numbers = torch.tensor([torch.finfo(kind).min for kind in types] + written, dtype=torch.float64)
    rounded = torch.cat([numbers.to(kind).double() for kind in types])
    return rounded[torch.isfinite(rounded)]


def _find_padding(z: Tensor) -> Tensor:
    """Which finite logits stand for absent options."""
    low = (z <= -MIN_PADDING) & (z > -torch.inf)
    padding = torch.zeros_like(low)
    rows = low.any(dim=1).nonzero()[:, 0]
    some = z[rows].double()
    is_number = low[rows] & torch.isin(some, _padding_numbers().to(z.device))
    other = ~is_number & (some > -torch.inf)
    largest = torch.where(other, some.abs(), 0.0).amax(dim=1, keepdim=True)
    padding[rows] = is_number & (some.abs() >= _FAR * largest) & (other.sum(dim=1, keepdim=True) >= 2)
    return padding


def _read_padded_rows(z: Tensor) -> tuple[Tensor, int, float]:
    """Logits with −∞ where finite ones stand for absent options; how many do, and one of them."""
    filled, padded, number = z, 0, 0.0
    for some in chunks.row_chunks(len(z), z.shape[1]):
        padding = _find_padding(z[some])
        if not bool(padding.any()):
            continue
        if filled is z:
            filled, number = z.clone(), float(z[some][padding][0])
        padded += int(padding.sum())
        filled[some] = filled[some].masked_fill(padding, -torch.inf)
    return filled, padded, number


def _check_options(z: Tensor, name: str, *, padding: bool = True) -> tuple[Tensor, bool]:
    """Logits in which −∞ alone is not finite, and whether there is one; padding becomes −∞, unless it is left."""
    if not z.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {z.dtype}".replace("torch.", ""))
    if not z.numel():
        return z, False
    if z.device.type == "cpu" and z.numel() <= chunks.ONE_THREAD and not _is_half(z.dtype):
        low, high = float(z.numpy().min()), float(z.numpy().max())  # by torch it would wake all cores
    else:
        low, high = (float(end) for end in torch.aminmax(z))
    if low > -MIN_PADDING and high < torch.inf:
        return z, False
    if not high < torch.inf:
        _check_finite(torch.where(z == -torch.inf, 0.0, z), name)
    # Some rows at a time: of a whole vocabulary a mask, and all the more a copy in float64, is large.
    z, padded, number = _read_padded_rows(z) if padding else (z, 0, 0.0)
    if padded:
        warn_users(
            f"{padded:,} {name} are {number:g} or another number that code pads with; they are read as absent options, "
            "as -inf is",
            PaddedOptions,
        )
    rows = chunks.row_chunks(len(z), z.shape[1])
    options = torch.cat([(z[some] > -torch.inf).sum(dim=1) for some in rows])
    if bool((options < 2).any()):
        row = int((options < 2).nonzero()[0])
        got = f"{int(options[row])} in row {row} (an absent one is -inf, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got, Hint.EXACT_ZEROS)
    return z, bool((options < z.shape[1]).any())


_FEW_SCORES = 8
"""Fewer log-odds may all lie between 0 and 1 by chance."""


def _look_like_probabilities(z: Tensor) -> bool:
    """Whether rows are distributions: a few are looked at first, and one-hot rows alone say nothing."""
    between = False
    for few in (z[:3], z[:1000]):
        for some in chunks.row_chunks(len(few), z.shape[1]):
            rows = few[some].cpu().double()
            if not len(rows) or rows.min() < 0 or ((rows.sum(dim=1) - 1).abs() > 1e-3).any():
                return False
            between = between or bool(((rows > 0) & (rows < 1)).any())
    return between


def _lies_in_unit_interval(x: Tensor) -> bool:
    """Whether all numbers lie in [0, 1], and not only at its ends."""
    return bool(x.numel() and x.is_floating_point() and x.min() >= 0 and x.max() <= 1 and ((x > 0) & (x < 1)).any())


def warn_users(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package that called it, so that each such line warns once."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("trueup."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def as_vector(values: Any, name: str, *, length: int | None = None) -> Tensor:
    """Check a finite vector (n,) of numbers and return it in float64 on the CPU."""
    x = _tensor(values, name)
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {_shape(x)}")
    if length is not None and len(x) != length:
        raise ValueError(f"{name} must have {length} entries, one a row, got {len(x)}")
    if x.dtype == torch.bool or not x.is_floating_point():
        x = x.to(torch.float64)
    return _check_finite(x, name).to("cpu", torch.float64)


def check_share(value: float, name: str) -> float:
    """A number strictly between 0 and 1."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise InputError(name, "lie between 0 and 1", repr(value))
    return float(value)


def as_weights(weights: Any, rows: int) -> np.ndarray | None:
    """Check one weight a row, (n,): finite, not negative, not all zero; None stays None, which is a weight of 1 each.

    >>> as_weights([1, 0, 2.5], 3)
    array([1. , 0. , 2.5])
    >>> as_weights([1, -1], 2)
    Traceback (most recent call last):
        ...
    trueup.core.errors.InputError: weights must not be negative, got -1 in row 1
    """
    if weights is None:
        return None
    w = as_vector(weights, "weights", length=rows).numpy()
    if len(w) and w.min() < 0:
        row = int(np.argmax(w < 0))
        raise InputError("weights", "not be negative", f"{w[row]:g} in row {row}")
    if len(w) and not w.max() > 0:
        raise InputError("weights", "not all be zero", f"{len(w)} zeros")
    return w


def effective_rows(weights: np.ndarray | None, rows: int) -> float:
    """How many rows of equal weight tell as much: (Σw)²/Σw².

    >>> effective_rows(np.array([2.0, 2.0, 0.0]), 3)
    2.0
    """
    if weights is None or not rows:
        return float(rows)
    share = weights / weights.max()
    return float(share.sum() ** 2 / (share @ share))


def as_matrix(values: Any, name: str, *, rows: int) -> Tensor:
    """Check a finite matrix (rows, any width), such as features, keeping its dtype and device."""
    x = _tensor(values, name)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(f"{name} must have shape ({rows}, width), got {_shape(x)}")
    return _check_finite(x if x.is_floating_point() else x.double(), name)


def from_probs(probs: A, *, floor: float | None = None, renormalise: bool = False, name: str = "probs") -> A:
    """Turn probabilities (n, classes) into logits: log p, since softmax(log p) = p.

    Rounding up to 1e-6 is tolerated, in a row's sum 1e-6 for every thousand classes, since a float32 softmax of a whole
    vocabulary strays that far (for half precision, up to the type's own epsilon); anything worse is refused.
    Where there are exact zeros, as in the votes of a forest, whatever is smaller is raised to half the smallest
    positive probability, which is the resolution of the data, or to 1e-6 if that is more, and a warning says so. With
    `floor` nothing is smaller than that: give later, smaller batches the floor of the calibration set (`resolution`).
    With `renormalise` rows that sum to nearly 1, as probabilities rounded for a file do, are divided by their sum; a
    sum outside [0.9, 1.1] is refused all the same. NaN is an option that the row does not have, and becomes −∞; the
    others sum to 1.

    >>> from_probs(np.array([[0.5, 0.5]]))
    array([[-0.69314718, -0.69314718]])
    >>> np.exp(from_probs(np.array([[0.9, 0.1], [1.0, 0.0]]), floor=0.01))
    array([[0.9 , 0.1 ],
           [1.  , 0.01]])
    """
    _check_floor(floor)
    p = _tensor(probs, name)
    if p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(f"{name} must have shape (n, classes) with at least 2 classes, got {_shape(p)}")
    dtype, half = p.dtype, _is_half(p.dtype)
    tolerance = torch.finfo(dtype).eps if half else ROUNDING
    in_sum = tolerance if half else ROUNDING * max(1.0, p.shape[1] / 1000)
    p = p.float() if half else p
    absent = torch.isnan(p) if p.is_floating_point() and bool(torch.isnan(p.sum())) else None
    p = _check_finite(p if absent is None else p.masked_fill(absent, 0.0), name)
    if absent is not None and bool((few := p.shape[1] - absent.sum(dim=1) < 2).any()):
        got = f"fewer in row {int(few.nonzero()[0])} (an absent one is NaN, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got)
    if p.numel():
        low, high = p.min().item(), p.max().item()
        if low < -tolerance or high > 1 + tolerance:
            raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", Hint.NOT_PROBABILITIES)
        total = p.sum(dim=1, dtype=torch.float64)
        off = (total - 1).abs()
        row = int(off.argmax())
        if off[row] > (_ROUNDED_SUM if renormalise else in_sum):
            hint = Hint.RENORMALISE if not renormalise and off[row] <= _ROUNDED_SUM else None
            raise InputError(name, "sum to 1 in each row", f"{total[row].item():.8g} in row {row}", hint)
        if renormalise:
            p = (p / total[:, None]).to(p.dtype)
    gone = 0 if absent is None else int(absent.sum())
    if floor is None and (zeros := int((p <= 0).sum()) - gone):
        warn_of_zeros(zeros, p.numel() - gone, floor := resolution(p))
    logits = torch.log(p if floor is None else p.clamp(min=floor))
    logits = logits if absent is None else logits.masked_fill(absent, -torch.inf)
    return match_kind(logits.to(dtype), probs)


def from_confidence(confidence: A, *, floor: float | None = None, name: str = "confidence") -> A:
    """Turn stated confidences c (n,), the claimed probability of being right, into logits (ln(1 − c), ln c).

    The labels that go with them are 1 where the claim came true and 0 where it did not. Nothing is turned over: a
    confidence below ½ stays the probability of class 1. It serves a language model's or a judge's stated confidence, a
    risk score, a forecast. Confidences of exactly 0 or 1 are moved inwards by 1e-4, or by half of the distance that the
    nearest other one has if that is less, and a warning says so; or by `floor`. That hardly changes their mean; curves
    of the log-odds, such as Platt scaling, fit better with a larger floor, `auto` finds its own.

    >>> np.exp(from_confidence(np.array([0.9, 0.25])))
    array([[0.1 , 0.9 ],
           [0.75, 0.25]])
    """
    _check_floor(floor)
    x = _tensor(confidence, name)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,) or (n, 1), got {_shape(x)}")
    dtype = x.dtype if x.is_floating_point() else torch.float64
    tolerance = torch.finfo(dtype).eps if _is_half(dtype) else ROUNDING
    c = _check_finite(x.double(), name)
    if len(c):
        low, high = c.min().item(), c.max().item()
        if low < -tolerance or high > 1 + tolerance:
            hint = Hint.PER_CENT if low >= 0 and 1 < high <= 100 else Hint.LOG_ODDS
            raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", hint)
    both = torch.stack([1 - c, c], dim=1).clamp(min=0.0)
    if floor is None and (zeros := int((both <= 0).sum())):
        floor = min(CERTAIN, resolution(both))
        warn_of_certain(zeros, len(c), floor)
    return match_kind(torch.log(both if floor is None else both.clamp(min=floor)).to(dtype), confidence)


def _check_floor(floor: float | None) -> None:
    if floor is not None and not 0 < floor < 0.5:
        raise InputError("floor", "lie between 0 and 0.5", f"{floor}")


def resolution(probs: Any, *, least: float = FLOOR) -> float:
    """Half the smallest positive probability, and at least 1e-6 or `least`: what an exact zero may stand for.

    >>> resolution(np.array([[0.9, 0.1], [1.0, 0.0]]))
    0.05
    """
    p = _tensor(probs, "probs")
    smallest = float(torch.where(p > 0, p, 1.0).min()) if p.numel() else 1.0
    return least if smallest > 0.5 else max(smallest / 2, least)


def warn_of_zeros(zeros: int, numbers: int, floor: float) -> None:
    """Say that exact zeros among probabilities were raised, and to what."""
    warnings.warn(
        f"{zeros} exact zeros among {numbers} probabilities were raised to {floor:.4g}, "
        + ("the least floor by default" if floor == FLOOR else "which is half the smallest positive one"),
        stacklevel=3,
    )


def warn_of_certain(certain: int, rows: int, floor: float) -> None:
    """Say that confidences of exactly 0 or 1 were moved, and by how much."""
    warnings.warn(f"{certain} of {rows} confidences are exactly 0 or 1; they were moved by {floor:.4g}", stacklevel=3)


def from_topk(log_probs: A, *, floor: float = FLOOR, name: str = "log_probs") -> A:
    """Turn the log-probabilities of the k likeliest answers (n, k) into logits (n, k + 1): the last is of all others.

    That is ln(1 − Σp), which never falls below ln `floor`: of probabilities that sum to 1 up to rounding it would be
    noise. The labels that go with them are the place of the right answer among the k, or k where it is none of them.
    A row with fewer answers has −∞ in the places left over; so is −9999 read, which some services write for what was
    not told.

    >>> np.exp(from_topk(np.log([[0.7, 0.2], [0.5, 0.25]])))
    array([[0.7 , 0.2 , 0.1 ],
           [0.5 , 0.25, 0.25]])
    """
    _check_floor(floor)
    x = _tensor(log_probs, name)
    if x.ndim != 2 or not x.shape[1]:
        raise InputError(name, "have shape (n, k)", _shape(x))
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}".replace("torch.", ""))
    double = x.double()
    double = double.masked_fill(double <= -MIN_PADDING, -torch.inf)
    _check_finite(double.masked_fill(double == -torch.inf, 0.0), name)
    total = double.exp().sum(dim=1, keepdim=True)
    slack = max(_ROUNDED_TOP, torch.finfo(x.dtype).eps * x.shape[1])
    if len(x) and bool((total > 1 + slack).any()):
        row = int(total[:, 0].argmax())
        got = f"{total[row].item():.6g} in row {row}"
        raise InputError(name, "be logarithms of probabilities that sum to at most 1 in each row", got)
    # Where rounding, or the floor, makes the sum exceed one, the row is divided by it.
    rest = (1 - total).clamp(min=floor)
    logits = torch.cat([double, rest.log()], dim=1) - (total + rest).log()
    return match_kind(logits.to(x.dtype), log_probs)


def from_binary(scores: A, *, name: str = "scores") -> A:
    """Turn a binary score x (n,), the log-odds of class 1, into logits (0, x).

    >>> from_binary(np.array([1.5, -0.5]))
    array([[ 0. ,  1.5],
           [ 0. , -0.5]])
    """
    x = _tensor(scores, name)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,) or (n, 1), got {_shape(x)}")
    x = _check_finite(x, name)
    if len(x) >= _FEW_SCORES and _lies_in_unit_interval(x[:_FEW_SCORES]) and _lies_in_unit_interval(x):
        warn_users(
            f"all {name} lie in [0, 1] like probabilities, but are read as log-odds; probabilities of class 1 go "
            "through from_confidence",
            LooksLikeProbabilities,
        )
    return match_kind(torch.stack([torch.zeros_like(x), x], dim=1), scores)


@overload
def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: None = None,
) -> tuple[A, A]: ...


@overload
def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: Any,
) -> tuple[A, A, np.ndarray]: ...


def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: Any = None,
) -> tuple[Any, ...]:
    """Flatten tokens or pixels to a pair (m, K), (m,), leaving out what is labelled `ignore_index`.

    `classes="last"` reads logits as (n, …, K), as language models give them; `classes="first"` as (n, K, …), as
    segmentation networks do. It must be named, because a wrong guess would be silent. With `clusters`, which has a
    value for each of the n texts or images, or is True for their numbers, a third array (m,) says which one each row is
    of: rows of one image are correlated, and `evaluate(logits, labels, clusters=…)` has intervals that know it.

    >>> z, y = flatten(np.zeros((2, 3, 5)), np.array([[0, 4, -100], [1, -100, -100]]), classes="last")
    >>> z.shape, y
    ((3, 5), array([0, 4, 1]))
    >>> flatten(np.zeros((2, 5, 3)), np.array([[0, 4, -100], [1, 2, 2]]), classes="first", clusters=["a", "b"])[2]
    array(['a', 'a', 'b', 'b', 'b'], dtype='<U1')
    """
    z, y = _tensor(logits, "logits"), _tensor(labels, "labels")
    z = classes_last(z, classes)
    if tuple(z.shape[:-1]) != tuple(y.shape):
        raise ValueError(f"labels must have shape {tuple(z.shape[:-1])} to match the logits, got {_shape(y)}")
    n = len(y)
    y = y.to(z.device).reshape(-1)
    kept = y != ignore_index
    each = len(y) // max(n, 1)
    z, y = as_tensors(z.reshape(-1, z.shape[-1])[kept], y[kept])
    pair: tuple[Any, Any] = (match_kind(z, logits), match_kind(y, logits))
    if clusters is None or clusters is False:
        return pair
    ids = np.arange(n) if clusters is True else np.asarray(clusters)
    if ids.shape != (n,):
        raise InputError("clusters", f"have {n} entries, one for each text or image", str(ids.shape))
    return *pair, ids[np.flatnonzero(kept.cpu().numpy()) // max(each, 1)]


def classes_last(logits: Tensor, classes: Literal["first", "last"] | None) -> Tensor:
    """Logits of any dimension with the classes as their last, (n, …, K); `classes` says where they are.

    >>> classes_last(torch.zeros(2, 5, 3, 4), "first").shape
    torch.Size([2, 3, 4, 5])
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must have at least 2 dimensions, got {_shape(logits)}")
    if classes not in ("first", "last") and not (classes is None and logits.ndim == 2):
        raise ValueError(
            f'classes must be "first" (n, K, …) or "last" (n, …, K) for logits {_shape(logits)}, got {classes!r}'
        )
    return logits.movedim(1, -1) if classes == "first" else logits


def match_kind(result: Tensor, original: Any) -> Any:
    """Return `result` as the kind of array that `original` is: torch for torch, NumPy for anything else."""
    if isinstance(original, Tensor):
        return result.detach() if _is_checked(result) else result  # whoever gets it may write to it through NumPy
    array = result.cpu().numpy()
    if isinstance(original, np.ndarray) and not original.flags.writeable and np.may_share_memory(array, original):
        array.flags.writeable = False  # a read-only memory map stays read-only
    return array


def upcast_half(x: Tensor) -> Tensor:
    """Half precision is computed in float32; other types stay as they are."""
    return x.float() if _is_half(x.dtype) else x


def _mark_checked(x: Tensor, classes: int, *, absent: bool = True) -> Tensor:
    """Mark an alias of ours as checked, for so many classes, as long as its memory keeps its version.

    `absent` says whether options may be absent.
    """
    if not x.is_inference():  # such tensors have no version
        x._checked, x._absent = (x._version, classes), absent  # type: ignore[attr-defined]
    return x


def _is_checked(x: Any) -> bool:
    mark = getattr(x, "_checked", None) if isinstance(x, Tensor) else None
    return mark is not None and mark[0] == x._version


def _are_checked_labels(y: Any, z: Tensor, *, soft: bool) -> bool:
    """Whether labels were checked against as many rows, on the same device, and no more classes."""
    if not _is_checked(y) or len(y) != len(z) or y.device != z.device:
        return False
    if not _is_checked(z) or z._absent:  # type: ignore[attr-defined]
        return False  # they may have been checked beside other logits
    if y.ndim == 2:
        return soft and y.dtype == torch.float64 and y.shape == z.shape
    return y.dtype == torch.int64 and y._checked[1] <= z.shape[1]


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _shape(x: Any) -> str:
    return str(tuple(x.shape))


def _check_finite(x: Tensor, name: str) -> Tensor:
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}".replace("torch.", ""))
    # A sum reads memory once and makes no copy; it is finite only if every entry is. (Finite entries may overflow it:
    # then the exact check decides.) A sum of half precision would overflow, or be made of a copy in float32.
    if not x.numel():
        return x
    if x.device.type == "cpu" and x.numel() <= chunks.ONE_THREAD and not _is_half(x.dtype):
        with np.errstate(all="ignore"):  # where other work keeps the cores, waking them takes longer than the sum
            finite = bool(np.isfinite(x.numpy().sum()))
    else:
        finite = all(torch.isfinite(s) for s in (torch.aminmax(x) if _is_half(x.dtype) else (x.sum(),)))
    if not finite:
        bad = ~torch.isfinite(x)
        if bad.any():
            at = tuple(int(i) for i in bad.nonzero()[0])
            got = f"{x[at].item()} at {list(at)} and {int(bad.sum())} such in all"
            raise InputError(name, "be finite", got, Hint.EXACT_ZEROS if x[at] == -torch.inf else None)
    return x


def _check_labels(y: Tensor, z: Tensor) -> Tensor:
    n, classes = z.shape
    if y.ndim != 1:
        hint = "soft labels are defined for nll and brier only" if tuple(y.shape) == tuple(z.shape) else None
        raise InputError("labels", f"have shape ({n},)", _shape(y), hint)
    if len(y) != n:
        raise ValueError(f"labels must have {n} entries, one for each row of logits, got {len(y)}")
    if y.is_floating_point() and n:  # an empty list has no type to speak of
        if missing := int(torch.isnan(y).sum()):
            raise InputError("labels", "be integers", f"{missing} missing", "leave out those rows")
        raise ValueError(f"labels must be integers, got {y.dtype}".replace("torch.", ""))
    y = y.to(torch.int64)
    if n:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= classes:
            hint = Hint.IGNORE_INDEX if low < 0 or high == 255 else None  # 255 marks pixels of no class
            raise InputError("labels", f"lie in 0..{classes - 1}", f"{low}..{high}", hint)
        if find_absent(z) is not None:
            _check_offered(torch.isneginf(z.gather(1, y.to(z.device)[:, None])), y)
    return y


def _check_offered(wrong: Tensor, y: Tensor) -> None:
    """Refuse labels of absent options, by the mask (n, 1) of them."""
    if bool(wrong.any()):
        row = int(wrong[:, 0].nonzero()[0])
        got = (
            f"{int(y[row])} in row {row}, where that option is absent" if y.ndim == 1 else f"an absent one in row {row}"
        )
        got += f" (-inf), and {int(wrong.sum())} such in all"
        raise InputError("labels", "be options that their rows have", got, Hint.EXACT_ZEROS)


def _check_soft_labels(y: Tensor, z: Tensor) -> Tensor:
    if tuple(y.shape) != tuple(z.shape):
        raise ValueError(f"soft labels must have the logits' shape {_shape(z)}, got {_shape(y)}")
    if not y.is_floating_point():
        y = y.to(torch.float64)
    y = _check_finite(y, "labels").to(torch.float64)
    if len(y) and (y.min() < -ROUNDING or ((y.sum(dim=1) - 1).abs() > ROUNDING).any()):
        raise ValueError("soft labels must be distributions: non-negative rows that sum to 1")
    if (absent := find_absent(z)) is not None:
        _check_offered((absent & (y > ROUNDING)).any(dim=1, keepdim=True), y)
    return y
