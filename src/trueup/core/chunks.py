"""How much of an array is worked on at a time, in numbers, and the slices that come of it."""

from __future__ import annotations

from collections.abc import Iterator

CACHE = 1 << 18
"""Several small steps on the same numbers: they stay in the second-level cache."""
PRODUCT = 1 << 19
"""Matrix products of a likelihood."""
STEP = 1 << 20
"""Work in float64 that makes a few copies."""
FIT = 1 << 21
"""Columns of classes that are fitted together."""
BLOCK = 1 << 22
"""Curves, distances and probabilities of many classes."""
KEPT = 1 << 25
"""What is kept between the steps of a search; more is computed anew each time."""
TILE_ROWS = 1024
"""Rows and columns of the part of an n × n matrix that is in memory at once."""
ONE_THREAD = 1 << 20
"""Below this many numbers, waking a second core costs more than it saves."""


def row_chunks(n: int, width: int, numbers: int = STEP, *, start: int = 0) -> Iterator[slice]:
    """Slices of start..n, each of as many rows of this width as hold so many numbers, at least one row.

    Without rows it is one empty slice, so that what is made of the chunks can be concatenated.

    >>> list(row_chunks(5, 10, numbers=20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = max(1, numbers // max(1, width))
    return (slice(first, min(first + rows, n)) for first in range(start, max(n, start + 1), rows))
