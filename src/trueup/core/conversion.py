"""Any array of numbers as a torch tensor: NumPy, pandas, polars, xarray, Arrow, JAX, lists.

Whatever has `__array__`, `__dlpack__` or `__arrow_array__` is taken, and shares its memory where torch can. What has
missing entries, or is no array of real numbers, is refused by name.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trueup.core.errors import InputError

_NUMBERS = "be an array of real numbers"


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
        return _unmasked(x, name)
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


def _unmasked(x: Any, name: str) -> np.ndarray:
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
