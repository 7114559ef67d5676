"""The compiled passes, and how rows are divided among threads and into chunks.

`compiled` is None if no C compiler was available at installation; NumPy then does the same work more slowly. The chunk
sizes below count numbers (rows × columns).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from itertools import pairwise
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import numpy as np

from trueup._core.executors import count_cores

compiled: Any
try:
    compiled = import_module("trueup._core._native")
except ImportError:
    compiled = None

CACHE_CHUNK = 1 << 18
"""For several small steps on the same numbers, which stay in the second-level cache."""
PRODUCT_CHUNK = 1 << 19
"""For matrix products of a likelihood."""
DEFAULT_CHUNK = 1 << 20
"""For work in float64 that makes a few copies."""
FIT_CHUNK = 1 << 21
"""For columns of classes that are fitted at the same time."""
LARGE_CHUNK = 1 << 22
"""For curves, distances and probabilities with many classes."""
MAX_CACHED_NUMBERS = 1 << 25
"""Numbers kept between the steps of a search; larger arrays are computed again in each step."""
TILE_ROWS = 1024
"""Rows and columns of the tile of an n × n matrix that is in memory at a time."""
MIN_PARALLEL_NUMBERS = 1 << 20
"""With fewer numbers, starting a second thread costs more than it saves."""


def row_chunks(n: int, width: int, numbers: int = DEFAULT_CHUNK, *, start: int = 0) -> Iterator[slice]:
    """Divide start..n into slices of as many rows as hold `numbers` numbers, at least one row.

    Without rows there is one empty slice, so that results of the chunks can be concatenated.

    >>> list(row_chunks(5, 10, numbers=20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = max(1, numbers // max(1, width))
    return (slice(first, min(first + rows, n)) for first in range(start, max(n, start + 1), rows))


_thread_limit: ContextVar[int | None] = ContextVar("thread_limit", default=None)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit `map_threads` to this number of threads inside the block, as in a worker process."""
    before = _thread_limit.set(count)
    try:
        yield
    finally:
        _thread_limit.reset(before)


def count_threads() -> int:
    """Return the number of threads per array: OMP_NUM_THREADS if it is set, else the number of cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(setting) if setting.isdecimal() and int(setting) > 0 else count_cores()
    return min(threads, _thread_limit.get() or threads)


T = TypeVar("T")
Chunks: TypeAlias = Iterator[tuple[int, np.ndarray]]
"""Contiguous rows, each chunk with the number of its first row."""


def map_threads(logits: np.ndarray, part: Callable[[Chunks], T], *, max_threads: int | None = None) -> Iterator[T]:
    """Call `part` on each thread with chunks of its share of the rows, and yield the results in order."""
    workers = 1 if logits.size < MIN_PARALLEL_NUMBERS else count_threads()
    workers = workers if max_threads is None else min(workers, max_threads)
    bounds = [len(logits) * i // workers for i in range(workers + 1)]
    shares = [_contiguous_chunks(logits, start, stop) for start, stop in pairwise(bounds)]
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = part(shares[number])
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    # Plain threads: starting an executor costs as much as a pass over a million numbers.
    others = [Thread(target=run, args=(number,)) for number in range(1, workers)]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    yield from results


def _contiguous_chunks(logits: np.ndarray, start: int, stop: int) -> Chunks:
    """Yield rows start..stop as contiguous float32 or float64, each chunk with the number of its first row.

    Rows that are contiguous already come in one chunk; others are copied chunk by chunk.
    """
    kind = np.float32 if logits.dtype == np.float16 else logits.dtype
    if logits.flags.c_contiguous and logits.dtype == kind:
        yield start, logits[start:stop]
        return
    for rows in row_chunks(stop, max(1, logits[:1].size), CACHE_CHUNK, start=start):
        yield rows.start, np.ascontiguousarray(logits[rows], dtype=kind)


def count_below(cuts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Count the sorted cuts that lie below each value."""
    if compiled is None or not (values.flags.c_contiguous and values.dtype == np.float64):
        return np.searchsorted(cuts, values, side="left")
    count = np.empty(len(values), np.int64)
    compiled.run_locate(address(values), len(values), address(cuts), len(cuts), address(count))
    return count


def all_within(numbers: np.ndarray, least: float) -> bool:
    """Return whether all numbers are finite and above `least`, in one pass."""

    def part(chunks: Chunks) -> bool:
        return all(_is_within(rows, least) for _, rows in chunks)

    return all(map_threads(np.atleast_1d(numbers), part))


def sum_chunks(logits: np.ndarray, shape: Any, add: Callable[[int, np.ndarray, np.ndarray], None]) -> np.ndarray:
    """Sum over chunks: `add(first, rows, sums)` adds a chunk to an array of this shape; each thread has its own."""

    def part(chunks: Chunks) -> np.ndarray:
        sums = np.zeros(shape)
        for first, rows in chunks:
            add(first, rows, sums)
        return sums

    return sum(map_threads(logits, part), start=np.zeros(shape))


def _is_within(numbers: np.ndarray, least: float) -> bool:
    if compiled is None or numbers.dtype not in (np.float32, np.float64):
        return not numbers.size or bool(numbers.min() > least and numbers.max() < np.inf)
    return compiled.run_within(address(numbers), numbers.dtype == np.float64, numbers.size, least)


def hash_rows(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, bool] | None:
    """Return a quick hash of each row (see splits.py) and whether any two rows share one; None if C cannot."""
    if compiled is None or not logits.flags.c_contiguous or logits.dtype not in (np.float32, np.float64):
        return None
    mixed = np.empty(len(logits), np.uint64)
    y = np.ascontiguousarray(labels)
    return mixed, compiled.run_hash(*pair_arguments(logits, y), address(mixed))


def pair_arguments(logits: np.ndarray, labels: np.ndarray, start: int = 0) -> tuple[int, bool, int, int, int]:
    """Return the arguments for contiguous logits and their labels from a row on, as the compiled passes expect them."""
    n, classes = logits.shape
    return address(logits), logits.dtype == np.float64, address(labels, start), n, classes


def address(array: np.ndarray | None, start: int = 0) -> int:
    """Return the memory address of a row of an array; 0 for None."""
    return 0 if array is None else int(array.ctypes.data) + start * array.strides[0]
