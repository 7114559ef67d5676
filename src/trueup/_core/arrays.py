"""Validate arrays: every public function passes its `logits, labels` through here first.

Any array of numbers is accepted: NumPy, torch, pandas, polars, xarray, Arrow, JAX and lists. Memory is shared with the
input wherever NumPy can read it (`__array__`, `__dlpack__`, `__arrow_array__`). Inside the library all arrays are
NumPy's.

The arrays that come back have the right shape, type and range and hold no NaN, so inner functions check nothing. The
only infinite value is a logit of −∞, which marks an option that its row does not have (see `find_absent`). A pair is
checked once: the arrays returned are views marked as checked, and marked arrays are returned unchanged. The caller's
own arrays are never marked.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from trueup._core import native
from trueup._core.errors import Hint, InputError, PaddedOptions

MASKED_LOGIT = -1e15
"""A logit, relative to the largest of its row, that replaces −∞ where 0 · ∞ would be NaN. Its square is finite."""

MIN_PADDING = 9000.0
"""Finite logits at or below minus this number may be padding for absent options."""

_PADDING_RATIO = 10.0
"""Padding is at least this many times as far from zero as every other logit of its row."""

ROUNDING = 1e-6
"""Tolerance for probabilities: distance from [0, 1] and of row sums from 1."""

MIN_ROWS_OF_PROBABILITIES = 5
"""Fewer rows of logits may look like probabilities by chance."""

SUM_TOLERANCE = 0.02
"""Relative tolerance for the sums of rows that look like probabilities, which may be rounded."""

_NUMBERS = "be an array of real numbers"
_ONE_COLUMN = "labels.squeeze(1) has one dimension"


def as_pair(logits: Any, labels: Any, *, padding: bool = True) -> tuple[Any, Any]:
    """Check a pair of logits (n, classes) and labels (n,). Tensors stay tensors; all else becomes NumPy.

    Integer labels come back as int64. Memory is shared with the input wherever its type allows. `padding=False` leaves
    padding numbers for a later check. Logits that look like probabilities are rejected (see `as_logits`).

    >>> as_pair([[2.0, 1.0]], [2])
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: labels must lie in 0..1, got 2..2
    """
    array = to_array(logits, "logits")
    z, y = as_arrays(array, labels, padding=padding)
    if not is_tensor(logits):
        return z.view(), y.view()
    unchanged = np.may_share_memory(z, array)
    return logits.detach() if unchanged else match_kind(z, logits), _to_torch(y).to(logits.device)


def as_arrays(
    logits: Any, labels: Any, *, soft: bool = False, min_rows: int = 0, padding: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Check a pair as `as_pair` does, and view it as NumPy arrays. A pair checked before is returned unchanged.

    With `soft=True` labels may also be distributions, shape (n, classes).

    >>> z, y = as_arrays([[2.0, 1.0]], [0])
    >>> again = as_arrays(z, y)
    >>> again[0] is z, again[1] is y
    (True, True)
    """
    if getattr(logits, "ndim", 0) == 1 and getattr(labels, "ndim", 0) == 2:
        raise InputError("logits", "come first, then labels", "them in the other order")
    z = as_logits(logits, padding=padding)
    if len(z) < min_rows:
        raise ValueError(f"logits must have at least {min_rows} rows, got {len(z)}")
    if _are_checked_labels(labels, z, soft=soft):
        return z, labels
    y = to_array(labels, "labels")
    y = _check_soft_labels(y, z) if soft and y.ndim == 2 else _check_labels(y, z)
    return z, _mark_checked(y, z.shape[1])


def take_logits(logits: np.ndarray, rows: Any) -> np.ndarray:
    """Select rows of logits that came from `as_logits`; they stay marked as checked."""
    mark = _mark_of(logits)
    return _mark_checked(logits[rows], logits.shape[1], absent=mark is None or mark.absent)


def take_rows(logits: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Select rows of a pair that came from `as_arrays`; they stay marked as checked.

    >>> z, y = take_rows(*as_arrays([[2.0, 1.0], [0.0, 1.0]], [0, 1]), np.array([1]))
    >>> as_arrays(z, y)[0] is z
    True
    """
    return take_logits(logits, rows), _mark_checked(labels[rows], logits.shape[1])


def as_weighted(
    logits: Any, labels: Any, sample_weight: Any, *, min_rows: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Check a pair and its weights for a fit, and drop rows of weight zero.

    The weights come back scaled so that they sum to the effective number of rows, (Σw)²/Σw². A fit can therefore sum
    weights where it would count rows, and a common factor changes nothing. Equal weights come back as None.

    >>> as_weighted([[2.0, 1.0], [0.0, 1.0], [0.0, 2.0]], [0, 1, 0], [3.0, 0.0, 1.0])[1:]
    (array([0, 0]), array([1.2, 0.4]))
    """
    if sample_weight is None:
        return *as_arrays(logits, labels, min_rows=min_rows), None
    z, y = as_arrays(logits, labels)
    w = as_weights(sample_weight, len(z))
    assert w is not None
    if (w == 0).any():
        kept = w > 0
        (z, y), w = take_rows(z, y, kept), w[kept]
    if len(z) < min_rows:
        raise ValueError(f"logits must have at least {min_rows} rows of positive weight, got {len(z)}")
    if (w == w[:1]).all():
        return z, y, None
    w = w / w.max()
    return z, y, w * (w.sum() / (w @ w))


def take_weighted(
    logits: np.ndarray, labels: np.ndarray, sample_weight: np.ndarray | None, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Select rows of what `as_weighted` returned."""
    return *take_rows(logits, labels, rows), None if sample_weight is None else sample_weight[rows]


def weight_kwargs(sample_weight: Any) -> dict[str, Any]:
    """Return weights as a keyword argument, or nothing, for functions that may not accept weights."""
    return {} if sample_weight is None else {"sample_weight": sample_weight}


def trusted_arrays(logits: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """View a pair that was checked before as NumPy arrays, without reading every number again."""
    return read_padding(to_array(logits, "logits")), to_array(labels, "labels")


def as_logits(logits: Any, name: str = "logits", *, padding: bool = True) -> np.ndarray:
    """Check logits (n, classes): floating point, at least two classes; −∞ marks an option that the row does not have.

    Five or more rows that are non-negative and sum to 1 (or to 100) are probabilities, and are rejected. A caller who
    means logits subtracts a constant, which leaves the softmax unchanged.

    Each row has at least two options. Finite padding numbers are read as −∞ too, with a warning: −10⁴, −10⁵, …, −9999,
    −99999, …, and the smallest number of a floating-point type. The row must have at least two
    other logits, and padding is ten times as far from zero as they are.

    >>> as_logits([[2.0, 1.0, -np.inf]])
    array([[  2.,   1., -inf]])
    >>> as_logits([[2.0, 1.0, 0.0], [2.0, -np.inf, -np.inf]])
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: logits must have at least 2 options in each row, got 1 in row 1 (an absent one is \
    -inf, or empty in a table); log-probabilities of exact zeros come through from_probs
    """
    if _mark_of(logits) is not None and logits.ndim == 2 and logits.dtype.kind == "f":
        return np.asarray(logits)
    z = to_array(logits, name)
    if z.ndim != 2 or z.shape[1] < 2:
        of_one = Hint.CONFIDENCE if lies_in_unit_interval(z) else Hint.BINARY_SCORE
        if z.ndim == 2:
            raise InputError(name, "have at least 2 classes", f"shape {shape_of(z)}", of_one)
        hint = {1: of_one, 3: Hint.FLATTEN, 4: Hint.FLATTEN}.get(z.ndim)
        raise InputError(name, "have shape (n, classes)", shape_of(z), hint)
    if z.dtype.kind != "f":
        raise InputError(name, "be floating point", str(z.dtype), ".astype(float) converts them")
    plain = native.all_within(z, -MIN_PADDING)  # nearly always true, and then the logits are read once
    z, absent = (z, False) if plain else _check_options(z, name, padding=padding)
    if not absent and (total := _sum_of_probabilities(z)):
        got = f"rows of numbers in [0, {total}] that sum to {total}"
        raise InputError(name, "not be probabilities", got, Hint.PROBABILITIES)
    if not padding and not plain and z.min() <= -MIN_PADDING:
        return z  # not marked, since padding must still be read
    return _mark_checked(z, z.shape[1], absent=absent)


def find_absent(logits: np.ndarray) -> np.ndarray | None:
    """Return a mask of the options that rows do not have (logit −∞), or None where all rows have all options.

    >>> find_absent(np.array([[2.0, 1.0, -np.inf]]))
    array([[False, False,  True]])
    """
    mark = _mark_of(logits)
    if (mark is not None and not mark.absent) or not logits.size or logits.min() > -np.inf:
        return None
    return logits == -np.inf


def fill_absent(values: np.ndarray, absent: np.ndarray | None) -> np.ndarray:
    """Replace absent options by the mean of the row's other values, which is finite and neutral.

    >>> fill_absent(np.array([[2.0, 1.0, -np.inf]]), np.array([[False, False, True]]))
    array([[2. , 1. , 1.5]])
    """
    if absent is None:
        return values
    total = np.where(absent, 0, values).sum(axis=1, keepdims=True)
    options = (~absent).sum(axis=1, keepdims=True).astype(values.dtype)
    return np.where(absent, total / options, values)


def count_options(logits: np.ndarray) -> np.ndarray | int:
    """Count the options of each row: the number of classes, or a column (n, 1) where some options are absent."""
    absent = find_absent(logits)
    return logits.shape[1] if absent is None else (~absent).sum(axis=1, keepdims=True).astype(logits.dtype)


def read_padding(logits: Any) -> Any:
    """Replace padding numbers in trusted logits by −∞; return the same object if there are none.

    >>> read_padding(np.array([[2.0, 1.0, -1e9]]))
    array([[  2.,   1., -inf]])
    """
    z = to_array(logits, "logits")
    if native.all_within(z, -MIN_PADDING):
        return logits
    filled, padded, _ = _read_padded_rows(z)
    return match_kind(filled, logits) if padded else logits


@lru_cache(maxsize=1)
def _padding_numbers() -> np.ndarray:
    """Return the numbers that code pads with, also as narrower types round them."""
    powers = [-(10.0**power) + offset for power in range(4, 39) for offset in ((0.0, 1.0) if power <= 9 else (0.0,))]
    minima = [float(np.finfo(kind).min) for kind in (np.float64, np.float32, np.float16)] + [-(2.0**128 - 2.0**120)]
    numbers = np.array(minima + powers)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
        bits = narrow.view(np.uint32)  # the first half of a float32, rounded to even, is a bfloat16
        brain = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        rounded = np.concatenate([x.astype(np.float64) for x in (numbers, narrow, brain, numbers.astype(np.float16))])
    return np.unique(rounded[np.isfinite(rounded)])


def find_padding(z: np.ndarray) -> np.ndarray:
    """Return a mask of the finite logits that stand for absent options."""
    low = (z <= -MIN_PADDING) & (z > -np.inf)
    padding = np.zeros_like(low)
    rows = np.flatnonzero(low.any(axis=1))
    candidates = z[rows].astype(np.float64)
    is_number = low[rows] & np.isin(candidates, _padding_numbers())
    other = ~is_number & (candidates > -np.inf)
    largest = np.where(other, np.abs(candidates), 0.0).max(axis=1, keepdims=True)
    several = other.sum(axis=1, keepdims=True) >= 2
    padding[rows] = is_number & (np.abs(candidates) / _PADDING_RATIO >= largest) & several
    return padding


def _read_padded_rows(z: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Return logits with −∞ for padding, the number of padded entries, and one of the padding numbers."""
    filled, padded, number = z, 0, 0.0
    for some in native.row_chunks(len(z), z.shape[1]):
        padding = find_padding(z[some])
        if not padding.any():
            continue
        if filled is z:
            filled, number = z.copy(), float(z[some][padding][0])
        padded += int(padding.sum())
        filled[some][padding] = -np.inf
    return filled, padded, number


def _check_options(z: np.ndarray, name: str, *, padding: bool = True) -> tuple[np.ndarray, bool]:
    """Check that −∞ is the only infinite value, read padding, and return whether any option is absent."""
    if not z.max() < np.inf:
        check_finite(np.where(z == -np.inf, z.dtype.type(0), z), name)
    # Work on chunks of rows: with a whole vocabulary a mask or a float64 copy is large.
    z, padded, number = _read_padded_rows(z) if padding else (z, 0, 0.0)
    if padded:
        warn_users(
            f"{padded:,} {name} are {number:g} or another padding number; they are read as absent options, as -inf is",
            PaddedOptions,
        )
    options = np.concatenate([(z[some] > -np.inf).sum(axis=1) for some in native.row_chunks(len(z), z.shape[1])])
    if (options < 2).any():
        row = int(np.argmax(options < 2))
        got = f"{int(options[row])} in row {row} (an absent one is -inf, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got, Hint.EXACT_ZEROS)
    return z, bool((options < z.shape[1]).any())


def _sum_of_probabilities(z: np.ndarray) -> int | None:
    """Return 1 or 100 if rows look like probabilities or per cent with that sum; None for logits and one-hot rows."""
    first_sum = np.clip(z[:1], -1, 200).sum(dtype=np.float64)  # huge numbers must not overflow
    total = 100 if first_sum > 50 else 1
    if len(z) < MIN_ROWS_OF_PROBABILITIES or abs(first_sum - total) > SUM_TOLERANCE * total:
        return None
    fractional = False
    for chunk in native.row_chunks(min(len(z), 1000), z.shape[1]):
        rows = z[chunk].astype(np.float64)
        if rows.min() < 0 or rows.max() > 2 * total or (np.abs(rows.sum(axis=1) - total) > SUM_TOLERANCE * total).any():
            return None
        fractional = fractional or bool(((rows > 0) & (rows < total)).any())
    return total if fractional else None


def subtract_one(logits: np.ndarray) -> np.ndarray:
    """Subtract 1 from logits that look like probabilities, so that they are accepted; the softmax is unchanged.

    >>> subtract_one(np.full((5, 2), 0.5))[0]
    array([-0.5, -0.5])
    """
    is_matrix = logits.ndim == 2 and logits.dtype.kind == "f"
    return logits - logits.dtype.type(1) if is_matrix and _sum_of_probabilities(logits) else logits


def lies_in_unit_interval(x: np.ndarray) -> bool:
    """Return whether all numbers lie in [0, 1], and not only at its ends."""
    return bool(x.size and x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1 and ((x > 0) & (x < 1)).any())


def warn_users(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller outside this package, so that each such line warns once."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("trueup.", "contextlib")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def as_vector(values: Any, name: str, *, length: int | None = None) -> np.ndarray:
    """Check a finite vector (n,) of numbers and return it in float64."""
    x = to_array(values, name)
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {shape_of(x)}")
    if length is not None and len(x) != length:
        raise ValueError(f"{name} must have {length} entries, one per row, got {len(x)}")
    return check_finite(x.astype(np.float64, copy=False), name)


def check_share(value: float, name: str) -> float:
    """Check a number strictly between 0 and 1."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise InputError(name, "lie between 0 and 1", repr(value))
    return float(value)


def as_weights(sample_weight: Any, rows: int) -> np.ndarray | None:
    """Check sample weights (n,): finite, not negative, not all zero. None, which means equal weights, stays None.

    >>> as_weights([1, 0, 2.5], 3)
    array([1. , 0. , 2.5])
    >>> as_weights([1, -1], 2)
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: sample_weight must not be negative, got -1 in row 1
    """
    if sample_weight is None:
        return None
    w = np.ascontiguousarray(as_vector(sample_weight, "sample_weight", length=rows))
    if len(w) and w.min() < 0:
        row = int(np.argmax(w < 0))
        raise InputError("sample_weight", "not be negative", f"{w[row]:g} in row {row}")
    if len(w) and not w.max() > 0:
        raise InputError("sample_weight", "not all be zero", f"{len(w)} zeros")
    return w


def effective_rows(sample_weight: np.ndarray | None, rows: int) -> float:
    """Return the number of equally weighted rows that carry the same information: (Σw)²/Σw².

    >>> effective_rows(np.array([2.0, 2.0, 0.0]), 3)
    2.0
    """
    if sample_weight is None or not rows:
        return float(rows)
    share = sample_weight / sample_weight.max()
    return float(share.sum() ** 2 / (share @ share))


def as_matrix(values: Any, name: str, *, rows: int) -> np.ndarray:
    """Check a finite matrix (rows, any width), such as features, and keep its dtype."""
    x = to_array(values, name)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(f"{name} must have shape ({rows}, width), got {shape_of(x)}")
    return check_finite(x if x.dtype.kind == "f" else x.astype(np.float64), name)


def match_kind(result: np.ndarray, like: Any) -> Any:
    """Convert a result to the kind of array that came in: a torch tensor, a JAX array, or else NumPy.

    Floating-point results take the dtype and device of a floating-point tensor or JAX array.
    """
    if is_tensor(like):
        tensor = _to_torch(result).to(like.device)
        return tensor.to(like.dtype) if like.is_floating_point() and tensor.is_floating_point() else tensor
    if _is_a("jax", "Array", like):
        floating = result.dtype.kind == "f" and sys.modules["jax"].numpy.issubdtype(like.dtype, np.floating)
        return sys.modules["jax"].numpy.asarray(result, dtype=like.dtype if floating else None)
    return result if _mark_of(result) is None else result.view()  # the caller may write to it


def upcast_half(x: np.ndarray) -> np.ndarray:
    """Convert half precision to float32; other types stay unchanged."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def is_tensor(x: Any) -> bool:
    """Return whether an object is a torch tensor, without importing torch."""
    return _is_a("torch", "Tensor", x)


def _is_a(module: str, kind: str, x: Any) -> bool:
    return isinstance(x, getattr(sys.modules.get(module), kind, ()))


def _to_torch(x: np.ndarray) -> Any:
    """Return a tensor that shares the memory of a writable array, or a copy."""
    return sys.modules["torch"].from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy())


class _Mark(NamedTuple):
    """Facts about an array that was checked."""

    array: weakref.ref[np.ndarray]
    classes: int
    absent: bool
    """Whether options may be absent."""


_marks: dict[int, _Mark] = {}
"""Marks of the arrays that were checked, by identity; a mark disappears with its array."""


def _mark_checked(x: np.ndarray, classes: int, *, absent: bool = True) -> np.ndarray:
    """Return a view of an array marked as checked for this number of classes."""
    view = x.view()
    key = id(view)
    _marks[key] = _Mark(weakref.ref(view, lambda _: _marks.pop(key, None)), classes, absent)
    return view


def _mark_of(x: Any) -> _Mark | None:
    mark = _marks.get(id(x))
    return mark if mark is not None and mark.array() is x else None


def is_checked(x: Any) -> bool:
    """Return whether an array was checked here before."""
    return _mark_of(x) is not None


def _are_checked_labels(y: Any, z: np.ndarray, *, soft: bool) -> bool:
    """Return whether labels were checked against logits with as many rows and no more classes."""
    labels, logits = _mark_of(y), _mark_of(z)
    if labels is None or logits is None or logits.absent or len(y) != len(z):
        return False  # the labels may have been checked against logits with other absent options
    if y.ndim == 2:
        return soft and y.dtype == np.float64 and y.shape == z.shape
    return y.dtype == np.int64 and labels.classes <= z.shape[1]


def shape_of(x: Any) -> str:
    """Format a shape for errors."""
    return str(tuple(x.shape))


def check_finite(x: np.ndarray, name: str) -> np.ndarray:
    """Check that an array is floating point and that every number is finite."""
    if x.dtype.kind != "f":
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if x.size and not native.all_within(x, -np.inf):
        bad = ~np.isfinite(x)
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        got = f"{x[at]} at {list(at)} and {int(bad.sum())} such in all"
        raise InputError(name, "be finite", got, Hint.EXACT_ZEROS if x[at] == -np.inf else None)
    return x


def _check_labels(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    n, classes = z.shape
    if y.ndim != 1:
        hint: Any = "soft labels are defined for nll and brier only" if y.shape == z.shape else None
        if y.shape == z.shape and np.isin(y, (0, 1)).all():
            hint = "labels.argmax(axis=1) numbers one-hot labels"
            if not (y.sum(axis=1) == 1).all():
                hint = "metrics.evaluate_labels and calibrators.per_label take several labels per row"
        elif y.shape == (n, 1):
            hint = _ONE_COLUMN
        raise InputError("labels", f"have shape ({n},)", shape_of(y), hint)
    if len(y) != n:
        hint = "transpose logits of shape (classes, n)" if len(y) == classes else None
        raise InputError("labels", f"have {n} entries, one for each row of logits", f"{len(y)}", hint)
    if y.dtype.kind == "f":
        if missing := int(np.isnan(y).sum()):
            raise InputError("labels", "be integers", f"{missing} missing", "leave out those rows")
        if len(fractions := np.flatnonzero(y % 1)):
            raise InputError("labels", "be integers", f"{y[fractions[0]]:g} in row {fractions[0]}")
    y = y.astype(np.int64, copy=False)
    if n:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= classes:
            hint = Hint.IGNORE_INDEX if low < 0 or high == 255 else None  # 255 marks pixels of no class
            if low == 1 and high == classes:
                hint = "subtract 1 if classes are numbered from 1"
            elif classes == 2 and low == -1 and not (y == 0).any():
                hint = "(labels > 0).astype(int) turns -1 and 1 into 0 and 1"
            raise InputError("labels", f"lie in 0..{classes - 1}", f"{low}..{high}", hint)
        if (mark := _mark_of(z)) is None or mark.absent:
            _check_offered(z[np.arange(n), y] == -np.inf, y)
    return y


def _check_offered(wrong: np.ndarray, y: np.ndarray) -> None:
    """Reject labels of absent options, given a mask (n,) of them."""
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"{y[row]} in row {row}, where that option is absent" if y.ndim == 1 else f"an absent one in row {row}"
        got += f" (-inf), and {int(wrong.sum())} such in all"
        raise InputError("labels", "be options that their rows have", got, Hint.EXACT_ZEROS)


def _check_soft_labels(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    if y.shape != z.shape:
        hint = _ONE_COLUMN if y.shape == (len(z), 1) else None
        raise InputError("soft labels", f"have the logits' shape {shape_of(z)}", shape_of(y), hint)
    y = check_finite(y.astype(np.float64, copy=False), "labels")
    if len(y) and (y.min() < -ROUNDING or (np.abs(y.sum(axis=1) - 1) > ROUNDING).any()):
        raise ValueError("soft labels must be distributions: non-negative rows that sum to 1")
    if (absent := find_absent(z)) is not None:
        _check_offered(np.logical_and(absent, y > ROUNDING).any(axis=1), y)
    return y


def to_array(x: Any, name: str) -> np.ndarray:
    """View an array of any kind as NumPy, naming the argument in errors.

    Whole numbers in lists become floating point, unless they are labels. bfloat16 becomes float32.

    >>> to_array([[1, 2]], "logits")
    array([[1., 2.]])
    >>> to_array(np.array([[1, "a"]], dtype=object), "logits")
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: logits must be an array of real numbers, got an ndarray of Python objects; \
    .astype(float) makes numbers of them
    """
    if is_tensor(x):
        return _from_torch(x, name)
    a = x if type(x) is np.ndarray else _to_numpy(x, name)
    kind, size = a.dtype.kind, a.dtype.itemsize
    if kind == "f" and size > 8:
        a = a.astype(np.float64)
    elif a.dtype.name == "bfloat16":  # JAX's, from ml_dtypes
        return a.astype(np.float32)
    elif kind not in "fiub" or size > 8:
        raise InputError(name, _NUMBERS, _describe(a), _remedy(a, name))
    if kind == "u" and size == 8:
        if a.size and a.max() > np.iinfo(np.int64).max:
            raise InputError(name, f"be at most {np.iinfo(np.int64).max}", f"{a.max()}")
        a = a.astype(np.int64)
    if isinstance(x, (list, tuple)) and name != "labels" and kind in "iu":
        a = a.astype(np.float64)
    if not (a.dtype.isnative and a.flags.aligned):
        a = a.astype(a.dtype.newbyteorder("="))
    return a


def _from_torch(x: Any, name: str) -> np.ndarray:
    """View a tensor as an array; copy it in parts from other devices and from bfloat16."""
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        kind = "a quantised tensor" if x.is_quantized else "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise InputError(name, "be a dense tensor", kind)
    if x.is_complex():
        raise InputError(name, _NUMBERS, f"{x.dtype}".removeprefix("torch."))
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise InputError(name, "have at least 16 bits a number", f"{x.dtype}".removeprefix("torch."))
    if x.device.type == "meta":
        raise InputError(name, "hold numbers", "a tensor of the meta device, which has none")
    x = x.detach().resolve_neg()
    is_brain = x.dtype == torch.bfloat16
    if not x.ndim or (x.device.type == "cpu" and not is_brain):
        array = (x.float() if is_brain else x).cpu().numpy()
    else:
        array = np.empty(tuple(x.shape), np.float32 if is_brain else x[:0].cpu().numpy().dtype)
        for rows in native.row_chunks(len(x), x[:1].numel()):
            array[rows] = (x[rows].float() if is_brain else x[rows]).cpu().numpy()
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _to_numpy(x: Any, name: str) -> np.ndarray:
    """Convert an object through the array protocol that it supports."""
    if isinstance(x, np.ma.MaskedArray):
        _refuse_missing(np.ma.getmaskarray(x).sum(), name, "masked entries")
        return np.asarray(x)
    if (arrow := sys.modules.get("pyarrow")) is not None and isinstance(x, (arrow.Array, arrow.ChunkedArray)):
        return _from_arrow(x, name)
    if not hasattr(x, "__array__"):
        if hasattr(x, "__dlpack__"):
            return _from_dlpack(x, name)
        if any(hasattr(x, method) for method in ("__arrow_array__", "__arrow_c_array__", "__arrow_c_stream__")):
            return _from_arrow(x, name)
    try:
        a = np.asarray(x)
    except TypeError:  # CuPy, and JAX on a device that NumPy cannot read
        if not hasattr(x, "__dlpack__"):
            raise
        return _from_dlpack(x, name)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array of numbers: {error}") from None
    if a.dtype.kind == "V" and a.dtype.type is np.void and a.dtype.names is None and hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name)  # a bfloat16 that NumPy knows only as bytes
    if a.dtype == object and hasattr(x, "to_numpy"):
        return _from_nullable(x, a, name)
    return a


def _from_dlpack(x: Any, name: str) -> np.ndarray:
    """Convert through DLPack; if NumPy cannot, torch does where it is loaded."""
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError):
        if "torch" not in sys.modules:
            raise
        return _from_torch(sys.modules["torch"].from_dlpack(x), name)


def _describe(a: np.ndarray) -> str:
    if a.ndim == 0:
        return f"one {type(a.item()).__name__}"
    if a.dtype == object:
        return "an ndarray of Python objects"
    return "texts" if a.dtype.kind in "US" else f"dtype {a.dtype}"


def _remedy(a: np.ndarray, name: str) -> str | None:
    if name == "labels" and a.ndim and a.dtype.kind in "USO":
        values = a.ravel().tolist()
        if missing := sum(value is None or value != value for value in values):
            return f"leave out the {missing} rows without a label"
        if all(isinstance(value, Real) for value in values):
            return ".astype(int) makes numbers of them"
        return "convert.number_labels(labels, class_names) numbers the names of classes"
    if a.dtype == object and not a.ndim and hasattr(a.item(), "collect"):
        return ".collect() makes a table of it"
    return ".astype(float) makes numbers of them" if a.ndim and a.dtype == object else None


def _refuse_missing(count: int, name: str, what: str = "missing") -> None:
    if count:
        raise InputError(name, "hold a number everywhere", f"{count} {what}", "leave out those rows")


def _from_nullable(x: Any, a: np.ndarray, name: str) -> np.ndarray:
    """Convert a pandas object with nullable or mixed columns, if no value is missing."""
    columns = x.dtypes.items() if hasattr(x, "columns") and hasattr(x.dtypes, "items") else ()
    for column, kind in columns:
        if kind.kind in "mMb":  # pandas would make numbers of dates and of True
            raise InputError(name, _NUMBERS, f"a column {str(column)!r} of {kind}", "leave out that column")
    try:
        numbers: np.ndarray = x.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise InputError(name, _NUMBERS, f"a {type(x).__name__} of dtype object", _remedy(a, name)) from None
    _refuse_missing(np.isnan(numbers).sum(), name)
    return numbers


def _from_arrow(x: Any, name: str) -> np.ndarray:
    """Convert an Arrow array of numbers, or of equally long lists, which become rows."""
    import pyarrow

    if not isinstance(x, (pyarrow.Array, pyarrow.ChunkedArray)):
        in_one_piece = hasattr(x, "__arrow_array__") or hasattr(x, "__arrow_c_array__")
        x = pyarrow.array(x) if in_one_piece else pyarrow.chunked_array(x)
    if isinstance(x, pyarrow.ChunkedArray):
        x = x.combine_chunks()
    rows, missing = len(x), x.null_count
    is_list = pyarrow.types.is_fixed_size_list(x.type) or pyarrow.types.is_list(x.type)
    if is_list:
        lengths = set(x.value_lengths().to_pylist()) - {None}
        if len(lengths) > 1:
            raise InputError(name, "have rows of one length", f"lists of {min(lengths)} to {max(lengths)}")
        x = x.flatten()
        missing += x.null_count
    _refuse_missing(missing, name)
    if not (pyarrow.types.is_floating(x.type) or pyarrow.types.is_integer(x.type) or pyarrow.types.is_boolean(x.type)):
        raise InputError(name, _NUMBERS, f"an Arrow array of {x.type}")
    a: np.ndarray = x.to_numpy(zero_copy_only=False)
    return a.reshape(rows, -1) if is_list and rows else a
