"""Types of public signatures."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

from numpy.typing import ArrayLike

Array: TypeAlias = Any
"""An array of any library: NumPy, torch, JAX and others."""

ArrayT = TypeVar("ArrayT")
"""An array of any library. Functions return the same kind of array that they were given."""

WeightsLike: TypeAlias = ArrayLike | None
"""One weight per row, shape (n,); with None all rows count the same."""

__all__ = ["Array", "ArrayLike", "ArrayT", "WeightsLike"]
