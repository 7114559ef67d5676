"""What every reader of a file gives: its columns, each described in words, and pairs of rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Pair: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""Logits with labels, or without where none were asked for."""


class Source(NamedTuple):
    """An open file: its columns, each described in words, and `read(logits, labels, rows)`, which yields pairs.

    `logits` names one column (n, classes) or one column a class; `labels` may be None. At least one pair comes, though
    it may have no rows.
    """

    columns: dict[str, str]
    read: Callable[[Sequence[str], str | None, int], Iterator[Pair]]


def matrix(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The only part as it is, or one column a part.

    >>> matrix([np.array([1, 2]), np.array([3, 4])])
    array([[1, 3],
           [2, 4]])
    """
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
