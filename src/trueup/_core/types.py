"""Types of public signatures."""

from __future__ import annotations

from typing import TypeVar

from numpy.typing import ArrayLike

ArrayT = TypeVar("ArrayT")
"""An array of any library: what comes out is of the kind that went in."""

__all__ = ["ArrayLike", "ArrayT"]
