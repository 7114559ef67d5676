"""Validation of arrays: every public function passes `logits, labels` through here first.

Any array of numbers is taken: NumPy, torch, pandas, polars, xarray, Arrow, JAX, lists. Whatever has `__array__`,
`__dlpack__` or `__arrow_array__` shares its memory where torch can.

What comes back has the right shape, type and range and holds no NaN, so that inner functions check nothing. A logit of
−∞ is an option that its row does not have: `find_absent` says where they are, and nothing else is infinite. A pair is
checked once: the tensors that come back are aliases that carry a mark, with the version of their memory, and those that
carry a valid mark are returned as they are. The caller's own arrays are never marked.
"""

from __future__ import annotations

import sys
import warnings
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.utils.dlpack import from_dlpack

from trueup.core import native
from trueup.core.errors import Hint, InputError, LooksLikeProbabilities, PaddedOptions

Array: TypeAlias = np.ndarray | Tensor
A = TypeVar("A", np.ndarray, Tensor)

NEVER = -1e15
"""A logit, less the largest of its row, that stands for −∞ where 0 · ∞ would be no number: its square is finite."""


MIN_PADDING = 9000.0
"""Finite logits read as absent options are at least so far below zero."""

_FAR = 10.0
"""And so many times as far from zero as any other logit of their row."""


ROUNDING = 1e-6
"""How far probabilities may stray from [0, 1] and their rows from a sum of one before they are refused."""

_NUMBERS = "be an array of real numbers"


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
    y = to_tensor(labels, "labels").to(z.device)
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
    return read_padding(to_tensor(logits, "logits")), to_tensor(labels, "labels")


def as_labels(labels: Any, logits: Any) -> Any:
    """Check labels (n,) of logits that have passed here, keeping the kind of array the logits are."""
    return match_kind(_check_labels(to_tensor(labels, "labels"), to_tensor(logits, "logits")), logits)


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
    z = to_tensor(logits, name)
    if z.ndim != 2:
        of_one = Hint.CONFIDENCE if lies_in_unit_interval(z) else Hint.BINARY_SCORE
        hint = {1: of_one, 3: Hint.FLATTEN, 4: Hint.FLATTEN}.get(z.ndim)
        raise InputError(name, "have shape (n, classes)", shape_of(z), hint)
    if z.shape[1] < 2:
        hint = Hint.CONFIDENCE if lies_in_unit_interval(z) else Hint.BINARY_SCORE
        raise InputError(name, "have at least 2 classes", f"shape {shape_of(z)}", hint)
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
    z = logits if isinstance(logits, Tensor) else to_tensor(logits, "logits")
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
    for some in native.row_chunks(len(z), z.shape[1]):
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
    if z.device.type == "cpu" and z.numel() <= native.ONE_THREAD and not is_half(z.dtype):
        low, high = float(z.numpy().min()), float(z.numpy().max())  # by torch it would wake all cores
    else:
        low, high = (float(end) for end in torch.aminmax(z))
    if low > -MIN_PADDING and high < torch.inf:
        return z, False
    if not high < torch.inf:
        check_finite(torch.where(z == -torch.inf, 0.0, z), name)
    # Some rows at a time: of a whole vocabulary a mask, and all the more a copy in float64, is large.
    z, padded, number = _read_padded_rows(z) if padding else (z, 0, 0.0)
    if padded:
        warn_users(
            f"{padded:,} {name} are {number:g} or another number that code pads with; they are read as absent options, "
            "as -inf is",
            PaddedOptions,
        )
    rows = native.row_chunks(len(z), z.shape[1])
    options = torch.cat([(z[some] > -torch.inf).sum(dim=1) for some in rows])
    if bool((options < 2).any()):
        row = int((options < 2).nonzero()[0])
        got = f"{int(options[row])} in row {row} (an absent one is -inf, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got, Hint.EXACT_ZEROS)
    return z, bool((options < z.shape[1]).any())


def _look_like_probabilities(z: Tensor) -> bool:
    """Whether rows are distributions: a few are looked at first, and one-hot rows alone say nothing."""
    between = False
    for few in (z[:3], z[:1000]):
        for some in native.row_chunks(len(few), z.shape[1]):
            rows = few[some].cpu().double()
            if not len(rows) or rows.min() < 0 or ((rows.sum(dim=1) - 1).abs() > 1e-3).any():
                return False
            between = between or bool(((rows > 0) & (rows < 1)).any())
    return between


def lies_in_unit_interval(x: Tensor) -> bool:
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
    x = to_tensor(values, name)
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {shape_of(x)}")
    if length is not None and len(x) != length:
        raise ValueError(f"{name} must have {length} entries, one a row, got {len(x)}")
    if x.dtype == torch.bool or not x.is_floating_point():
        x = x.to(torch.float64)
    return check_finite(x, name).to("cpu", torch.float64)


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
    x = to_tensor(values, name)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(f"{name} must have shape ({rows}, width), got {shape_of(x)}")
    return check_finite(x if x.is_floating_point() else x.double(), name)


def match_kind(result: Tensor, original: Any) -> Any:
    """Return `result` as the kind of array that `original` is: torch for torch, NumPy for anything else.

    NumPy has no bfloat16: JAX's comes back as float32.
    """
    if isinstance(original, Tensor):
        return result.detach() if _is_checked(result) else result  # whoever gets it may write to it through NumPy
    array = (result.float() if result.dtype == torch.bfloat16 else result).cpu().numpy()
    if isinstance(original, np.ndarray) and not original.flags.writeable and np.may_share_memory(array, original):
        array.flags.writeable = False  # a read-only memory map stays read-only
    return array


def upcast_half(x: Tensor) -> Tensor:
    """Half precision is computed in float32; other types stay as they are."""
    return x.float() if is_half(x.dtype) else x


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


def is_half(dtype: torch.dtype) -> bool:
    """Whether a type has 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)


def shape_of(x: Any) -> str:
    """The shape as errors write it."""
    return str(tuple(x.shape))


def check_finite(x: Tensor, name: str) -> Tensor:
    """A tensor of floating point in which every number is finite."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}".replace("torch.", ""))
    # A sum reads memory once and makes no copy; it is finite only if every entry is. (Finite entries may overflow it:
    # then the exact check decides.) A sum of half precision would overflow, or be made of a copy in float32.
    if not x.numel():
        return x
    if x.device.type == "cpu" and x.numel() <= native.ONE_THREAD and not is_half(x.dtype):
        with np.errstate(all="ignore"):  # where other work keeps the cores, waking them takes longer than the sum
            finite = bool(np.isfinite(x.numpy().sum()))
    else:
        finite = all(torch.isfinite(s) for s in (torch.aminmax(x) if is_half(x.dtype) else (x.sum(),)))
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
        raise InputError("labels", f"have shape ({n},)", shape_of(y), hint)
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
        raise ValueError(f"soft labels must have the logits' shape {shape_of(z)}, got {shape_of(y)}")
    if not y.is_floating_point():
        y = y.to(torch.float64)
    y = check_finite(y, "labels").to(torch.float64)
    if len(y) and (y.min() < -ROUNDING or ((y.sum(dim=1) - 1).abs() > ROUNDING).any()):
        raise ValueError("soft labels must be distributions: non-negative rows that sum to 1")
    if (absent := find_absent(z)) is not None:
        _check_offered((absent & (y > ROUNDING)).any(dim=1, keepdim=True), y)
    return y


def to_tensor(x: Any, name: str) -> Tensor:
    """View an array as a tensor, by the name of the argument it came as.

    Whole numbers in lists become floating point, unless they are labels.

    >>> to_tensor([[1, 2]], "logits")
    tensor([[1., 2.]], dtype=torch.float64)
    >>> to_tensor(np.array([[1, "a"]], dtype=object), "logits")
    Traceback (most recent call last):
        ...
    trueup.core.errors.InputError: logits must be an array of real numbers, got an ndarray of Python objects; \
.astype(float) makes numbers of them
    """
    if not isinstance(x, Tensor):
        a = _to_numpy(x, name)
        if isinstance(a, Tensor):
            x = a
        else:
            return _from_numpy(a, name, literal=isinstance(x, (list, tuple)))
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        kind = "a quantised tensor" if x.is_quantized else "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise InputError(name, "be a dense tensor", kind)
    if x.is_complex():
        raise InputError(name, _NUMBERS, f"{x.dtype}".removeprefix("torch."))
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise InputError(name, "have at least 16 bits a number", f"{x.dtype}".removeprefix("torch."))
    if x.device.type == "meta":
        raise InputError(name, "hold numbers", "a tensor of the meta device, which has none")
    return x.detach()


def _to_numpy(x: Any, name: str) -> np.ndarray | Tensor:
    """What an object says of itself as an array; torch takes over where NumPy cannot follow, as on other devices."""
    if isinstance(x, np.ma.MaskedArray):
        return _from_masked(x, name)
    if (arrow := sys.modules.get("pyarrow")) is not None and isinstance(x, (arrow.Array, arrow.ChunkedArray)):
        return _from_arrow(x, name)
    if not hasattr(x, "__array__"):
        if hasattr(x, "__dlpack__"):
            return from_dlpack(x)
        if any(hasattr(x, way) for way in ("__arrow_array__", "__arrow_c_array__", "__arrow_c_stream__")):
            return _from_arrow(_read_arrow(x), name)
    try:
        a = np.asarray(x)
    except TypeError:  # CuPy, and JAX on a device that NumPy cannot read
        if not hasattr(x, "__dlpack__"):
            raise
        return from_dlpack(x)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array of numbers: {error}") from None
    if a.dtype.kind == "V" and a.dtype.names is None and hasattr(x, "__dlpack__"):
        return from_dlpack(x)  # JAX's bfloat16, which NumPy knows only as bytes
    if a.dtype == object and hasattr(x, "to_numpy"):
        return _from_nullable(x, a, name)
    return a


def _from_numpy(a: np.ndarray, name: str, *, literal: bool) -> Tensor:
    kind, size = a.dtype.kind, a.dtype.itemsize
    if kind == "f" and size > 8:
        a = a.astype(np.float64)  # torch has no longer type
    elif kind not in "fiub" or size > 8:
        raise InputError(name, _NUMBERS, _describe(a), _remedy(a, name))
    if kind == "u" and size == 8:
        if a.size and a.max() > np.iinfo(np.int64).max:
            raise InputError(name, f"be at most {np.iinfo(np.int64).max}", f"{a.max()}")
        a = a.astype(np.int64)  # np.ulonglong is a type of its own, which torch does not know
    if literal and name != "labels" and kind in "iu":
        a = a.astype(np.float64)
    if not a.dtype.isnative:
        a = a.astype(a.dtype.newbyteorder("="))
    if any(stride < 0 or stride % a.itemsize for stride in a.strides):
        a = np.ascontiguousarray(a)
    return torch.from_numpy(a if a.flags.writeable else np.asarray(_Readable(a)))


def _describe(a: np.ndarray) -> str:
    if a.ndim == 0:
        return f"one {type(a.item()).__name__}"
    if a.dtype == object:
        return "an ndarray of Python objects"
    return "texts" if a.dtype.kind in "US" else f"dtype {a.dtype}"


def _remedy(a: np.ndarray, name: str) -> str | None:
    if name == "labels" and a.ndim and a.dtype.kind in "USO":
        return "number the classes by their columns, from 0"
    if a.dtype == object and not a.ndim and hasattr(a.item(), "collect"):
        return ".collect() makes a table of it"
    return ".astype(float) makes numbers of them" if a.ndim and a.dtype == object else None


def _from_masked(x: Any, name: str) -> np.ndarray:
    if masked := int(np.ma.getmaskarray(x).sum()):
        raise InputError(name, "hold a number everywhere", f"{masked} masked entries", "leave out those rows")
    return np.asarray(x)


def _from_nullable(x: Any, a: np.ndarray, name: str) -> np.ndarray:
    """A pandas object of nullable or mixed columns: numbers if nothing is missing."""
    try:
        numbers = x.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise InputError(name, _NUMBERS, f"a {type(x).__name__} of dtype object", _remedy(a, name)) from None
    if missing := int(np.isnan(numbers).sum()):
        raise InputError(name, "hold a number everywhere", f"{missing} missing", "leave out those rows")
    return numbers


def _read_arrow(x: Any) -> Any:
    import pyarrow

    if hasattr(x, "__arrow_array__"):
        return pyarrow.array(x)
    return pyarrow.array(x) if hasattr(x, "__arrow_c_array__") else pyarrow.chunked_array(x)


def _from_arrow(x: Any, name: str) -> np.ndarray:
    """An Arrow array of numbers, or of lists of one length, which are rows."""
    import pyarrow

    if isinstance(x, pyarrow.ChunkedArray):
        x = x.combine_chunks()
    rows = len(x)
    is_list = pyarrow.types.is_fixed_size_list(x.type) or pyarrow.types.is_list(x.type)
    missing = x.null_count
    if is_list:
        lengths = set(x.value_lengths().to_pylist()) - {None}
        if len(lengths) > 1:
            raise InputError(name, "have rows of one length", f"lists of {min(lengths)} to {max(lengths)}")
        x = x.flatten()
        missing += x.null_count
    if missing:
        raise InputError(name, "hold a number everywhere", f"{missing} missing", "leave out those rows")
    if not (pyarrow.types.is_floating(x.type) or pyarrow.types.is_integer(x.type) or pyarrow.types.is_boolean(x.type)):
        raise InputError(name, _NUMBERS, f"an Arrow array of {x.type}")
    a = x.to_numpy(zero_copy_only=False)
    return a.reshape(rows, -1) if is_list and rows else a


class _Readable:
    """A view of a read-only array (a memory map, say) that torch takes without a warning; we never write to it."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array
