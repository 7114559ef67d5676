"""The compiled passes, and how rows are shared out: to threads, and to chunks of so many numbers at a time.

`compiled` is None where no C compiler was at hand at installation; torch then does the same work, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

compiled: Any
try:
    compiled = import_module("trueup.core._native")
except ImportError:
    compiled = None

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
_FEW_NUMBERS = 1 << 21  # up to so many one thread is faster where the work is a chain of small steps


def row_chunks(n: int, width: int, numbers: int = STEP, *, start: int = 0) -> Iterator[slice]:
    """Slices of start..n, each of as many rows of this width as hold so many numbers, at least one row.

    Without rows it is one empty slice, so that what is made of the chunks can be concatenated.

    >>> list(row_chunks(5, 10, numbers=20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = max(1, numbers // max(1, width))
    return (slice(first, min(first + rows, n)) for first in range(start, max(n, start + 1), rows))


def usable(logits: Tensor) -> bool:
    """Whether the compiled passes can read these logits."""
    return compiled is not None and logits.device.type == "cpu"


T = TypeVar("T")


def map_threads(
    logits: Tensor, part: Callable[[Iterator[tuple[int, Tensor]]], T], *, max_threads: int | None = None
) -> Iterator[T]:
    """Call `part` with the chunks of a share of the rows, on as many threads as torch uses, or at most so many."""
    workers = 1 if logits.numel() < ONE_THREAD else max(1, torch.get_num_threads())
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

    # Plain threads: an executor costs as much again as a pass over a million numbers takes.
    others = [Thread(target=run, args=(number,)) for number in range(1, workers)]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    yield from results


def _contiguous_chunks(logits: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Rows start..stop as contiguous float32 or float64, each chunk with the number of its first row.

    They come whole if they are that already, else copied a chunk at a time.
    """
    if logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64):
        yield start, logits[start:stop]
        return
    half = logits.dtype in (torch.float16, torch.bfloat16)
    for rows in row_chunks(stop, logits.shape[1], CACHE, start=start):
        yield rows.start, (logits[rows].float() if half else logits[rows]).contiguous()


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """Keep torch to this thread while it works on so few numbers that waking others would take longer.

    Two threads took three times as long as one for matrix products of 10,000 × 100, where anything else was running.
    """
    before = torch.get_num_threads()
    if numbers > _FEW_NUMBERS or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_below(cuts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many of the sorted cuts lie below each value."""
    if compiled is None or not (values.flags.c_contiguous and values.dtype == np.float64):
        return np.searchsorted(cuts, values, side="left")
    count = np.empty(len(values), np.int64)
    compiled.run_locate(_address(values), len(values), _address(cuts), len(cuts), _address(count))
    return count


def all_within(logits: Tensor, least: float) -> bool | None:
    """Whether all logits are finite and above the least, read once; None where C cannot read them."""
    if not (usable(logits) and logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64)):
        return None
    is_double = logits.dtype == torch.float64

    def part(parts: Iterator[tuple[int, Tensor]]) -> bool:
        return all(compiled.run_within(_address(rows), is_double, rows.numel(), least) for _, rows in parts)

    return all(map_threads(logits, part))


def hash_rows(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, bool] | None:
    """The quick hash of each row (see splits.py), and whether any two rows share one; None where C cannot read them."""
    if not (usable(logits) and logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64)):
        return None
    mixed = np.empty(len(logits), np.uint64)
    y, is_double = labels.contiguous(), logits.dtype == torch.float64
    return mixed, compiled.run_hash(_address(logits), is_double, _address(y), *logits.shape, _address(mixed))


def score_pass(
    logits: Tensor,
    labels: Tensor | None,
    scores: Sequence[np.ndarray],
    group: np.ndarray,
    cuts: np.ndarray | None,
    sums: Sequence[np.ndarray],
    weights: np.ndarray | None = None,
    *,
    hash_groups: bool,
    quick: bool,
    beta: float,
) -> None:
    """Score contiguous rows of softmax(βz) and add their class-wise sums; arrays of results are written to.

    `scores` are confidence, predicted class, NLL, Brier score, entropy and probability of the label; `sums` are the
    counts and hits (bins, classes) and the gaps (groups, bins, classes), left alone without `cuts`; a row adds 1 to
    them, or its weight.
    """
    compiled.run_pass(
        _address(logits),
        logits.dtype == torch.float64,
        *logits.shape,
        len(sums[0]),
        len(sums[2]),
        hash_groups,
        quick,
        beta,
        _address(labels),
        *map(_address, scores),
        _address(cuts),
        _address(group),
        *(0 if cuts is None else _address(array) for array in sums),
        _address(weights),
    )


def tally_pass(logits: Tensor, labels: Tensor, cuts: np.ndarray, sums: np.ndarray) -> None:
    """Add count, confidence and hits of the predicted class of contiguous rows to sums (3, bins)."""
    is_double, bins = logits.dtype == torch.float64, len(cuts) + 1
    compiled.run_top(_address(logits), is_double, _address(labels), *logits.shape, _address(cuts), bins, _address(sums))


def temperature_pass(
    logits: Tensor, labels: Tensor, beta: float, weights: Tensor | None, *, quick: bool
) -> tuple[float, float, float]:
    """The loss of softmax(βz) summed over contiguous rows, and its first two derivatives in β."""
    is_double = logits.dtype == torch.float64
    sums: tuple[float, float, float] = compiled.run_temperature(
        _address(logits), is_double, _address(labels), *logits.shape, beta, _address(weights), quick
    )
    return sums


def vector_pass(
    logits: Tensor,
    labels: Tensor,
    weight: np.ndarray,
    bias: np.ndarray,
    shift: np.ndarray | None,
    weights: Tensor | None,
    sums: np.ndarray,
    *,
    scale: float,
    quick: bool,
) -> None:
    """Add the loss of softmax(w ⊙ (scale·z − shift) + b) of contiguous rows and its gradient to sums (1 + 2K,)."""
    compiled.run_vector(
        _address(logits),
        logits.dtype == torch.float64,
        _address(labels),
        *logits.shape,
        _address(weight),
        _address(bias),
        scale,
        _address(shift),
        _address(weights),
        _address(sums),
        quick,
    )


def _address(array: np.ndarray | Tensor | None) -> int:
    """Where an array begins in memory; 0 of none."""
    if array is None:
        return 0
    return array.data_ptr() if isinstance(array, Tensor) else int(array.ctypes.data)


def as_float64(x: Tensor) -> np.ndarray:
    """As float64 in NumPy."""
    result: np.ndarray = x.to("cpu", torch.float64).numpy()
    return result
