"""Warnings as part of a result: recorded, silenced, or written where a user reads them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RECORDING = threading.RLock()
"""The warning filters are one state for all threads: only one block at a time may record."""


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Collect the messages of the warnings inside, each once and in one line; the list is filled when the block ends.

    >>> with record_warnings() as messages:
    ...     warnings.warn("the fit ended at its bound")
    >>> messages
    ['the fit ended at its bound']
    """
    messages: list[str] = []
    with _RECORDING, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            messages += dict.fromkeys(_line(warning.message) for warning in caught)


@contextmanager
def silence_warnings(*, message: str = "", enabled: bool = True) -> Iterator[None]:
    """Show no warnings inside, or none whose text begins with a pattern.

    >>> with silence_warnings():
    ...     warnings.warn("nobody reads this")
    """
    with warnings.catch_warnings():
        if enabled:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def write_warnings(write: Callable[[str], None]) -> Iterator[None]:
    """Write warnings for users with `write`, in one line without the place in the code; leave out all others.

    The doubt whether logits are probabilities is left out as well: a command line looks at the file itself, and knows
    which option to name.

    >>> with write_warnings(print):
    ...     warnings.warn("40 exact zeros were raised to 0.05")
    ...     warnings.warn("only developers need this", DeprecationWarning)
    40 exact zeros were raised to 0.05
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.filterwarnings(
            "ignore", message=r"(each row of|all) \w+ (sums to 1|lie in \[0, 1\]) like probabilities"
        )
        warnings.showwarning = lambda message, *_, **__: write(_line(message))
        yield


def _line(text: object) -> str:
    return " ".join(str(text).split())
