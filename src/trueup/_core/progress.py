"""How far a long loop has come, or how long a step takes: one line on a terminal, or now and then a line in a log."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

PATIENCE = 2.0
"""Seconds before the line appears: what is shorter needs none."""
PAUSE = 0.1
"""Seconds between two drawings of it."""
LOG_PAUSE = 10.0
"""Seconds before the first line in a log, and between two lines."""
SILENCE = 60.0
"""Seconds after which a log has a line though no item is done: what takes hours is not to look like what hangs."""
_logging: list[bool] = []
_shown: dict[str, Any] = {"text": "", "at": 0.0}
"""What stands on the terminal's line, and when something was last drawn or logged."""

T = TypeVar("T")


def track(
    iterable: Iterable[T],
    total: int | None = None,
    label: str = "",
    enabled: bool = True,
    note: Callable[[], str] | None = None,
    left: Callable[[], str] | None = None,
) -> Iterator[T]:
    """Yield the items, telling from two seconds on how many are done: `label 12/40  note  about 30 s left`.

    What is left is told by the mean time of an item; `left` says it better where items are unlike.

    On a terminal, or with `TRUEUP_PROGRESS=1`, it is one line of stderr that is gone when the loop ends, also by an
    exception. Inside `log_lines`, where stderr is no terminal, there is a plain line every ten seconds instead, and one
    every minute while a single item takes longer.

    >>> [2 * i for i in track([1, 2, 3], label="doubling")]
    [2, 4, 6]
    """
    drawing = _visible()
    if not enabled or not (drawing or _logging) or sys.stderr is None:
        yield from iterable
        return
    patience, pause = (PATIENCE, PAUSE) if drawing else (LOG_PAUSE, LOG_PAUSE)
    total = _length(iterable) if total is None else total
    started = monotonic()
    drawn: float | None = None
    silence = None if drawing else _Silence(label, total)
    try:
        for done, item in enumerate(iterable, start=1):
            yield item
            if silence is not None:
                silence.done = done
            now = monotonic()
            if now - started >= patience and (drawn is None or now - drawn >= pause):
                count = f"{done}" if total is None else f"{done}/{total}"
                if total is None or done >= total:
                    rest = ""
                else:
                    rest = left() if left else time_left((now - started) / done * (total - done))
                text = "  ".join(filter(None, (f"{label} {count}".strip(), note() if note else "", rest)))
                (_draw if drawing else _log)(text)
                drawn = now
                if silence is not None:
                    silence.broken.set()
    finally:
        if silence is not None:
            silence.end()
        if drawn is not None and drawing:
            _draw("")


class _Silence:
    """A thread that writes a line to the log whenever nobody has for so long."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.done = label, total, 0
        self.broken, self.over = Event(), False
        self.thread = Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.over:
            if not self.broken.wait(SILENCE):
                count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
                _log(f"{self.label} {count}  still at work".strip())
            self.broken.clear()

    def end(self) -> None:
        """Leave the log alone from now on."""
        self.over = True
        self.broken.set()
        self.thread.join()


@contextmanager
def waiting(label: str, enabled: bool = True) -> Iterator[None]:
    """Tell from two seconds on how long a step without a count takes: `label  12 s`.

    It keeps still while a loop inside tells how far it has come. Where and when there is a line is as in `track`.
    """
    drawing = _visible()
    if not enabled or not (drawing or _logging) or sys.stderr is None:
        yield
        return
    patience, pause = (PATIENCE, 1.0) if drawing else (LOG_PAUSE, LOG_PAUSE)
    started, over, own = monotonic(), Event(), ""

    def tick() -> None:
        nonlocal own
        wait = patience
        while not over.wait(wait):
            wait = pause
            now = monotonic()
            if _shown["text"] not in ("", own) or (not drawing and now - _shown["at"] < pause):
                continue  # a loop has the line
            own = f"{label}  {now - started:.0f} s"
            (_draw if drawing else _log)(own)
            own = own if drawing else ""

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if own and _shown["text"] == own:
            clear_line()


def clear_line() -> None:
    """Take the line off the terminal, so that something else can be written there."""
    if _shown["text"]:
        _draw("")


@contextmanager
def log_lines() -> Iterator[None]:
    """Tell of progress in plain lines inside, where stderr is no terminal: what a command does, a library does not."""
    _logging.append(True)
    try:
        yield
    finally:
        _logging.pop()


def time_left(seconds: float) -> str:
    """How long it will take still, roughly.

    >>> time_left(0.4), time_left(42), time_left(600), time_left(9000)
    ('about 1 s left', 'about 42 s left', 'about 10 min left', 'about 2.5 h left')
    """
    if seconds >= 5400:
        return f"about {seconds / 3600:.1f} h left"
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {max(1, round(seconds))} s left"


def _log(text: str) -> None:
    _shown["at"] = monotonic()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _draw(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1  # a longer line would wrap, and the next one not cover it
    _shown.update(text=text, at=monotonic())
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
