"""The compiled passes, and how the rows are shared out to them.

`compiled` is None where no C compiler was at hand at installation; torch then does the same work, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trueup.core.arrays import upcast_half

compiled: Any
try:
    compiled = import_module("trueup.core._native")
except ImportError:
    compiled = None

CHUNK = 1 << 18
"""Numbers a chunk where a copy is needed: small enough for the second-level cache."""
_FEW_NUMBERS = 1 << 21  # and this many where the work is a chain of small steps
_ONE_THREAD = 1 << 20  # below this many numbers, waking a second core costs more than it saves


def usable(logits: Tensor) -> bool:
    """Whether the compiled passes can read these logits."""
    return compiled is not None and logits.device.type == "cpu"


T = TypeVar("T")


def in_threads(
    logits: Tensor, part: Callable[[Iterator[tuple[int, Tensor]]], T], *, most: int | None = None
) -> Iterator[T]:
    """Call `part` with the chunks of a share of the rows, on as many threads as torch uses, or at most so many."""
    workers = 1 if logits.numel() < _ONE_THREAD else max(1, torch.get_num_threads())
    workers = workers if most is None else min(workers, most)
    bounds = [len(logits) * i // workers for i in range(workers + 1)]
    shares = [contiguous_chunks(logits, start, stop) for start, stop in pairwise(bounds)]
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


def contiguous_chunks(logits: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Rows start..stop as contiguous float32 or float64, each chunk with the number of its first row.

    They come whole if they are that already, else copied a chunk at a time.
    """
    if logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64):
        yield start, logits[start:stop]
        return
    step = max(1, CHUNK // logits.shape[1])
    for at in range(start, max(stop, start + 1), step):
        yield at, upcast_half(logits[at : min(at + step, stop)]).contiguous()


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
    found = np.empty(len(values), np.int64)
    compiled.run_locate(address(values), len(values), address(cuts), len(cuts), address(found))
    return found


def address(array: np.ndarray, row: int = 0) -> int:
    """Where a row of eight-byte numbers lies."""
    return int(array.ctypes.data) + 8 * row


def double(x: Tensor) -> np.ndarray:
    """As float64 in NumPy."""
    result: np.ndarray = x.to("cpu", torch.float64).numpy()
    return result
