"""One line on a terminal that tells how far a long loop has come."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TypeVar

PATIENCE = 2.0
"""Seconds before the line appears: what is shorter needs none."""
PAUSE = 0.1
"""Seconds between two drawings of it."""

T = TypeVar("T")


def track(
    iterable: Iterable[T],
    total: int | None = None,
    label: str = "",
    enabled: bool = True,
    note: Callable[[], str] | None = None,
) -> Iterator[T]:
    """Yield the items, telling how many are done in one line of stderr, `label 12/40  note`, from two seconds on.

    It is drawn only on a terminal or with `TRUEUP_PROGRESS=1`, and gone when the loop ends, also by an exception.

    >>> [2 * i for i in track([1, 2, 3], label="doubling")]
    [2, 4, 6]
    """
    if not (enabled and _visible()):
        yield from iterable
        return
    total = _length(iterable) if total is None else total
    started = monotonic()
    drawn: float | None = None
    try:
        for done, item in enumerate(iterable, start=1):
            yield item
            now = monotonic()
            if now - started >= PATIENCE and (drawn is None or now - drawn >= PAUSE):
                count = f"{done}" if total is None else f"{done}/{total}"
                _draw(f"{label} {count}  {note() if note else ''}".strip())
                drawn = now
    finally:
        if drawn is not None:
            _draw("")


def _draw(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1  # a longer line would wrap, and the next one not cover it
    sys.stderr.write(f"\r\x1b[K{text[:width]}")
    sys.stderr.flush()


def _visible() -> bool:
    if sys.stderr is None:  # a process without a console
        return False
    return os.environ.get("TRUEUP_PROGRESS") == "1" or sys.stderr.isatty()


def _length(iterable: Iterable[object]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
