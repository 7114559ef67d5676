"""Progress of a long loop or a long step: one line on a terminal, or occasional lines in a log."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

FIRST_LINE_SECONDS = 2.0
"""Delay before the line appears, so that short work shows none."""
REDRAW_SECONDS = 0.1
"""Time between two updates of the line."""
LOG_SECONDS = 10.0
"""Delay before the first line in a log, and between two lines."""
MAX_SILENT_SECONDS = 60.0
"""Time without a finished item after which a log shows that the work continues."""
_logging: list[bool] = []
_shown: dict[str, Any] = {"text": "", "at": 0.0}
"""The text on the terminal's line, and the time of the latest output."""

T = TypeVar("T")


def track(
    iterable: Iterable[T],
    total: int | None = None,
    label: str = "",
    enabled: bool = True,
    note: Callable[[], str] | None = None,
) -> Iterator[T]:
    """Yield the items and show how many are done: `label 12/40  note  about 30 s left`.

    The remaining time is estimated from the mean time per item.

    On a terminal, or with `TRUEUP_PROGRESS=1`, progress is one line of stderr, shown after two seconds and removed at
    the end. Inside `log_lines`, if stderr is no terminal, a plain line appears every ten seconds. It appears every
    minute while a single item takes longer.

    >>> [2 * i for i in track([1, 2, 3], label="doubling")]
    [2, 4, 6]
    """
    show = _writer(enabled)
    if show is None:
        yield from iterable
        return
    patience, pause = (FIRST_LINE_SECONDS, REDRAW_SECONDS) if show is _draw else (LOG_SECONDS, LOG_SECONDS)
    total = _length(iterable) if total is None else total
    started = latest = monotonic()
    done, drawn = 0, False

    def counted() -> str:
        return f"{label} {done}{'' if total is None else f'/{total}'}".strip()

    def break_silence() -> float:
        nonlocal latest
        silent_left = latest + MAX_SILENT_SECONDS - monotonic()
        if silent_left > 0:
            return silent_left
        _log(f"{counted()}  still working")
        latest = monotonic()
        return MAX_SILENT_SECONDS

    due = started + patience
    try:
        with nullcontext() if show is _draw else _ticking(break_silence, MAX_SILENT_SECONDS):
            for item in iterable:
                yield item
                done, now = done + 1, monotonic()
                if now >= due:
                    rest = ""
                    if total is not None and done < total:
                        rest = format_time_left((now - started) / done * (total - done))
                    show("  ".join(filter(None, (counted(), note() if note else "", rest))))
                    latest, due, drawn = now, now + pause, show is _draw
    finally:
        if drawn:
            _draw("")


@contextmanager
def _ticking(tick: Callable[[], float], wait: float) -> Iterator[None]:
    """Call `tick` in a thread after `wait` seconds, then after each number of seconds that it returns."""
    over = Event()

    def run() -> None:
        seconds = wait
        while not over.wait(seconds):
            seconds = tick()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def show_elapsed(label: str, enabled: bool = True) -> Iterator[None]:
    """Show how long a step without a count has taken: `label  12 s`.

    The line disappears while a loop inside shows its own. It appears in the same places as that of `track`.
    """
    show = _writer(enabled)
    if show is None:
        yield
        return
    patience, pause = (FIRST_LINE_SECONDS, 1.0) if show is _draw else (LOG_SECONDS, LOG_SECONDS)
    started, drawn = monotonic(), ""

    def tick() -> float:
        nonlocal drawn
        now = monotonic()
        if _shown["text"] in ("", drawn) and (show is _draw or now - _shown["at"] >= pause):  # no loop has the line
            line = f"{label}  {now - started:.0f} s"
            drawn = line if show is _draw else ""
            show(line)
        return pause

    try:
        with _ticking(tick, patience):
            yield
    finally:
        if drawn and _shown["text"] == drawn:
            clear_line()


def clear_line() -> None:
    """Remove the line from the terminal, so that other text can be written."""
    if _shown["text"]:
        _draw("")


@contextmanager
def log_lines() -> Iterator[None]:
    """Show progress as plain lines if stderr is no terminal, as a command does but a library does not."""
    _logging.append(True)
    try:
        yield
    finally:
        _logging.pop()


def format_time_left(seconds: float) -> str:
    """Format a remaining time.

    >>> format_time_left(0.4), format_time_left(42), format_time_left(600), format_time_left(9000)
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


def _writer(enabled: bool) -> Callable[[str], None] | None:
    """Return the function that shows a line, on a terminal or inside `log_lines`; None otherwise."""
    if not enabled or sys.stderr is None:  # a process without a console
        return None
    if os.environ.get("TRUEUP_PROGRESS") == "1" or sys.stderr.isatty():
        return _draw
    return _log if _logging else None


def _length(iterable: Iterable[object]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
