"""The operations that maps of logits are written with: one set of names for NumPy, torch, JAX and other arrays.

`namespace_of(x)` is array-api-compat's namespace of an array plus a few missing operations. This module imports neither
torch nor JAX: code that has such an array has imported its package.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from types import ModuleType
from typing import Any

import array_api_compat
import array_api_compat.numpy as compat_numpy
import numpy as np


class Namespace:
    """The array API of one package, with further operations for maps of logits.

    >>> xp = namespace_of(np.zeros(1))
    >>> xp.log_softmax(np.array([[0.0, 0.0]])).round(4)
    array([[-0.6931, -0.6931]])
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.is_numpy, self.is_torch, self.is_jax = (
            module.__name__.removeprefix("array_api_compat.").split(".")[0] == name
            for name in ("numpy", "torch", "jax")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def is_traced(self, x: Any) -> bool:
        """Return whether operations are compiled, exported or transformed, so that branches on data are impossible."""
        if self.is_torch:
            torch = sys.modules["torch"]
            is_traced = torch.compiler.is_compiling() or torch._C._is_tracing()
            return bool(is_traced or torch._C._functorch.peek_interpreter_stack() is not None)
        return self.is_jax and isinstance(x, sys.modules["jax"].core.Tracer)

    def double(self, x: Any) -> Any:
        """Convert to float64, or to the widest type that the device or package supports."""
        return self.astype(x, self._double_type(x))

    def upcast_half(self, x: Any) -> Any:
        """Convert half precision to float32; other types stay unchanged."""
        return self.astype(x, self.float32) if self.finfo(x.dtype).bits < 32 else x

    def astype(self, x: Any, kind: Any) -> Any:
        """Convert to another type; return the array itself if it has that type."""
        if x.dtype == kind:
            return x
        return x.to(kind) if self.is_torch else self._module.astype(x, kind)

    def constant(self, value: Any, like: Any, *, dtype: Any = None) -> Any:
        """Convert a parameter to an array on the device of `like`, in float64 unless `dtype` says otherwise."""
        kind = self._double_type(like) if dtype is None else dtype
        if self.is_numpy:
            return np.asarray(value, dtype=kind)
        if self.is_torch:
            torch = self._module
            if isinstance(value, torch.Tensor):
                return value.to(like.device, kind)
            return torch.tensor(value, dtype=kind, device=like.device)
        return self.asarray(value, dtype=kind, device=array_api_compat.device(like))

    def _double_type(self, x: Any) -> Any:
        if self.is_torch:
            return self.float32 if x.device.type == "mps" else self.float64
        if self.is_jax and not sys.modules["jax"].config.jax_enable_x64:
            return self.float32
        return self.float64

    def softmax(self, x: Any, axis: int = 1) -> Any:
        """Compute exp(x) / Σ exp(x)."""
        if self.is_torch:
            return self._module.softmax(x, dim=axis)
        if self.is_numpy and axis == 1:
            return _softmax(x, log=False)
        rest = self.exp(x - self.max(x, axis=axis, keepdims=True))
        return rest / self.sum(rest, axis=axis, keepdims=True)

    def log_softmax(self, x: Any, axis: int = 1) -> Any:
        """Compute the logarithm of `softmax`."""
        if self.is_torch:
            return self._module.log_softmax(x, dim=axis)
        if self.is_numpy and axis == 1:
            return _softmax(x, log=True)
        shifted = x - self.max(x, axis=axis, keepdims=True)
        return shifted - self.log(self.sum(self.exp(shifted), axis=axis, keepdims=True))

    def logsumexp(self, x: Any, axis: int = 1, *, keepdims: bool = False) -> Any:
        """Compute ln Σ exp(x)."""
        if self.is_torch:
            return self._module.logsumexp(x, dim=axis, keepdim=keepdims)
        top = self.max(x, axis=axis, keepdims=True)
        top = self.where(top == -math.inf, 0.0, top)  # a sum of zeros
        with np.errstate(divide="ignore"):
            total = top + self.log(self.sum(self.exp(x - top), axis=axis, keepdims=True))
        return total if keepdims else self.squeeze(total, axis=axis)

    def softplus(self, x: Any) -> Any:
        """Compute ln(1 + eˣ) without overflow; its derivative at zero is ½.

        >>> namespace_of(np.zeros(1)).softplus(np.array([-40.0, 0.0, 40.0]))
        array([4.24835426e-18, 6.93147181e-01, 4.00000000e+01])
        """
        return self.maximum(x, self.zeros_like(x)) + self.log1p(self.exp(-self.abs(x)))

    def sigmoid(self, x: Any) -> Any:
        """Compute 1/(1 + e⁻ˣ) without overflow."""
        if self.is_torch:
            return self._module.sigmoid(x)
        small = self.exp(-self.abs(x))
        return self.where(x >= 0, 1.0, small) / (1.0 + small)

    def put_along_axis(self, x: Any, index: Any, value: Any) -> Any:
        """Return a copy of (n, K) with `value` at the indices (n, 1), one per row."""
        if self.is_numpy:
            out = x.copy()
            np.put_along_axis(out, index, value, axis=1)
            return out
        if self.is_torch:
            value = value if isinstance(value, self._module.Tensor) else self.full_like(x[:, :1], value)
            return x.scatter(1, index, value)
        return self.where(self.arange_like(x.shape[1], index)[None, :] == index, value, x)

    def take_along_axis(self, x: Any, index: Any, *, axis: int = 1) -> Any:
        """Select entries of each row of (n, K) at its indices (n, m)."""
        return x.gather(axis, index) if self.is_torch else self._module.take_along_axis(x, index, axis=axis)

    def sort(self, x: Any, *, axis: int = 1) -> Any:
        """Sort the entries of each row, ascending."""
        return x.sort(dim=axis).values if self.is_torch else self._module.sort(x, axis=axis)

    def arange_like(self, n: int, like: Any) -> Any:
        """Return 0, 1, …, n − 1 with the type and device of an array."""
        return self.arange(n, dtype=like.dtype, device=array_api_compat.device(like))

    def take(self, values: Any, index: Any) -> Any:
        """Select entries of values (m,) at any indices, or of values (rows, m) at indices (rows, n) row by row."""
        if values.ndim == 2 and self.is_numpy and len(values):  # faster than take_along_axis
            return np.stack([row.take(indices) for row, indices in zip(values, index, strict=True)])
        if values.ndim == 2:
            return self.take_along_axis(values, index, axis=1)
        if self.is_numpy or self.is_torch or self.is_jax:
            return values[index]
        return self.reshape(self._module.take(values, self.reshape(index, (-1,))), index.shape)

    def transpose(self, x: Any) -> Any:
        """Return the columns of (n, K) as rows, contiguous in memory if the package supports it."""
        if self.is_numpy:
            return np.ascontiguousarray(x.T)
        return x.T.contiguous() if self.is_torch else x.T

    def take_rows(self, x: Any, rows: np.ndarray) -> Any:
        """Select rows by number."""
        if self.is_numpy:
            return x[rows]
        return self._module.take(x, self.constant(rows, x, dtype=self.int64), axis=0)

    def top_k(self, x: Any, k: int) -> tuple[Any, Any]:
        """Return the k largest entries of each row in descending order, and their indices; ties keep their order."""
        if self.is_torch:
            return tuple(self._module.topk(x, k, dim=1))
        indices = self.argsort(x, axis=1, descending=True, stable=True)[:, :k]
        return self.take_along_axis(x, indices, axis=1), indices

    def restore_order(self, values: Any, order: Any) -> Any:
        """Return values (n, K) to the positions that an order took them from: the inverse of `take_along_axis`."""
        if self.is_torch:
            return self.zeros_like(values).scatter(1, order, values)
        return self.take_along_axis(values, self.argsort(order, axis=1), axis=1)

    def searchsorted(self, boundaries: Any, x: Any, *, right: bool = False) -> Any:
        """Count the ascending boundaries below each x, #{boundaries < x}, or with `right` #{boundaries ≤ x}.

        Boundaries (m,) serve all x; boundaries (rows, m) go with x (rows, n) row by row. Under tracing, and in packages
        other than NumPy and torch, it is a binary search of comparisons, with one step per bit of m.

        >>> namespace_of(np.zeros(1)).searchsorted(np.array([0.2, 0.5, 0.8]), np.array([0.1, 0.5, 0.9]))
        array([0, 1, 3])
        """
        if self.is_numpy:
            side: Any = "right" if right else "left"
            if boundaries.ndim == 1:
                return np.searchsorted(boundaries, x, side=side)
            rows = [np.searchsorted(row, values, side=side) for row, values in zip(boundaries, x, strict=True)]
            return np.stack(rows) if rows else np.zeros(x.shape, np.int64)
        if self.is_torch and not self.is_traced(x):
            return self._module.searchsorted(boundaries, x, right=right)
        return self.binary_search(boundaries, x, right=right)

    def binary_search(self, boundaries: Any, x: Any, *, right: bool = False) -> Any:
        """Compute `searchsorted` from comparisons."""
        m = boundaries.shape[-1]
        narrow = self.is_jax and self._double_type(x) == self.float32
        count = self.zeros_like(x, dtype=self.int32 if narrow else self.int64)
        for bit in reversed(range(m.bit_length())):
            candidate = count + (1 << bit)
            boundary = self.take(boundaries, self.clip(candidate, max=m) - 1)
            below = boundary <= x if right else boundary < x
            count = self.where(below & (candidate <= m), candidate, count)
        return count

    def find_absent(self, logits: Any) -> Any:
        """Return a mask of the options that rows do not have (logit −∞); None if all rows have all options."""
        if not self.is_traced(logits) and (not math.prod(logits.shape) or bool(self.min(logits) > -math.inf)):
            return None
        return logits == -math.inf

    def fill_absent(self, values: Any, absent: Any) -> Any:
        """Replace absent options by the mean of the row's other values; `absent` is a mask or None.

        >>> xp = namespace_of(np.zeros(1))
        >>> xp.fill_absent(np.array([[2.0, 1.0, -np.inf]]), np.array([[False, False, True]]))
        array([[2. , 1. , 1.5]])
        """
        if absent is None:
            return values
        total = self.sum(self.where(absent, 0.0, values), axis=1, keepdims=True)
        return self.where(absent, total / self._count(~absent, values.dtype), values)

    def count_options(self, logits: Any, absent: Any = None) -> Any:
        """Count the options of each row: the number of classes, or a column (n, 1) if some options are absent."""
        return logits.shape[1] if absent is None else self._count(~absent, logits.dtype)

    def log_options(self, logits: Any, kind: Any) -> Any:
        """Compute the logarithm of `count_options`: a number, or a column (n, 1) of this type."""
        absent = self.find_absent(logits)
        return math.log(logits.shape[1]) if absent is None else self.log(self._count(~absent, kind))

    def _count(self, mask: Any, kind: Any) -> Any:
        return self.sum(self.astype(mask, kind), axis=1, keepdims=True)


_FEW_COLUMNS = 64
"""Up to this number of columns NumPy is several times faster on their transpose."""


def _softmax(x: np.ndarray, *, log: bool) -> np.ndarray:
    """Compute the softmax of each row of (n, K), or its logarithm."""
    few = x.shape[1] <= _FEW_COLUMNS
    s, axis = (np.array(x.T, order="C"), 0) if few else (x.copy(), 1)
    s -= s.max(axis=axis, keepdims=True)
    weights = np.exp(s, out=None if log else s)
    total = weights.sum(axis=0) if few else np.einsum("ij->i", weights)[:, None]
    if log:
        s -= np.log(total)
    else:
        s /= total
    return np.ascontiguousarray(s.T) if few else s


def namespace_of(x: Any) -> Namespace | None:
    """Return the operations of an array's package; None for lists, tables and other objects.

    >>> namespace_of([1.0]) is None, namespace_of(np.zeros(1)).is_numpy
    (True, True)
    """
    if isinstance(x, np.ndarray):
        return NUMPY
    return _wrap(array_api_compat.array_namespace(x)) if array_api_compat.is_array_api_obj(x) else None


_wrap = cache(Namespace)
NUMPY = _wrap(compat_numpy)
