"""Errors and warnings as data, so that a command line or a web page can phrase them for its own readers.

An error keeps its parts as fields. Warnings are recorded, silenced, or written where a user reads them.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

_DEFAULT_WORDS: Mapping[Any, str] = MappingProxyType({})


class Hint(StrEnum):
    """Remedies in the library's words; each interface may replace them by its own words."""

    BINARY_SCORE = "a binary score goes through from_log_odds, a network with one logit through models.TwoClasses"
    CONFIDENCE = "probabilities of one event go through from_probs, log-odds through from_log_odds"
    PER_CENT = "divide per cent by 100"
    LOG_ODDS = "log-odds go through from_log_odds"
    RENORMALISE = "rounded probabilities come in with renormalise=True"
    FLATTEN = "tokens or pixels go through flatten"
    IGNORE_INDEX = "flatten leaves out an ignore_index"
    NOT_PROBABILITIES = "logits need no from_probs"
    EXACT_ZEROS = "log-probabilities of exact zeros come through from_probs"
    NULL = "null stands for an option that a row does not have"
    PROBS = "say probs=True to read probabilities"
    PROBABILITIES = "from_probs converts probabilities; from real logits subtract 1, which leaves the softmax unchanged"
    PROBABILITIES_IN_FILE = "probs=True reads probabilities, probs=False insists on logits"
    SPLIT = "choose the split {0}"
    STATED = "a stated confidence is read by confidence= with correct="
    COLUMNS = "name the columns by logits=[…] and labels="
    FORECAST = "forecasts of a number are read by load_forecasts"
    LEVELS = "levels= gives them"
    CLASSES = "class_names= names the classes of labels that are texts"
    COLUMN_ORDER = "list the columns of the classes in that order with logits=[…]"
    LOAD_CALIBRATOR = "load(path) reads a calibrator"
    LOAD_CLAMPED = "load(path, model=network) reads a clamped network"
    LOAD_REPAIRED = "load(path, model=network) reads a repaired network"
    LOAD_RECALIBRATOR = "load(path) reads a recalibrator"
    LOAD_PREDICTION_SETS = "load(path) reads a rule of prediction sets"
    LOAD_CONFORMAL_REGRESSION = "load(path) reads a rule of conformal intervals"
    LOAD_THRESHOLD = "load(path) reads a threshold"
    LOAD_MONITOR = "load(path) reads a monitor"


class InputError(ValueError):
    """Bad input: the argument, its requirement, the value received, and a hint if there is one.

    `choices` fill a hint: its {0} with all of them, {1} with the first, and so on. `file` is the file that was read;
    `where` is the part of it, such as "row 5".

    >>> error = InputError("probs", "be at most 1", "85 at [0]", Hint.PER_CENT)
    >>> print(error)
    probs must be at most 1, got 85 at [0]; divide per cent by 100
    >>> error.message({Hint.PER_CENT: "the column is in per cent"})
    'probs must be at most 1, got 85 at [0]; the column is in per cent'
    >>> print(error.replace(file="net.npz", hint=None))
    net.npz: probs must be at most 1, got 85 at [0]
    """

    def __init__(
        self,
        argument: str,
        requirement: str,
        got: str,
        hint: Hint | str | None = None,
        *,
        choices: Sequence[str] = (),
        file: str | os.PathLike[str] | None = None,
        where: str = "",
    ) -> None:
        self.argument, self.requirement, self.got, self.hint = argument, requirement, got, hint
        self.choices, self.file, self.where = choices, file, where
        super().__init__(argument, requirement, got, hint)

    def replace(self, **fields: object) -> Self:
        """Return the same error with some fields changed."""
        changed = copy(self)
        vars(changed).update(fields)
        return changed

    def message(self, hints: Mapping[Hint, str] = _DEFAULT_WORDS, names: Mapping[str, str] = _DEFAULT_WORDS) -> str:
        """Format the sentence with an interface's words for hints and arguments; a hint mapped to "" is omitted."""
        hint = hints.get(self.hint, self.hint) if isinstance(self.hint, Hint) else self.hint
        if hint and self.choices:
            hint = hint.format(" or ".join(self.choices), *self.choices)
        prefix = f"{os.fspath(self.file)}: " if self.file is not None else ""
        prefix += f"{self.where}, " if self.where else ""
        sentence = f"{prefix}{names.get(self.argument, self.argument)} must {self.requirement}, got {self.got}"
        return f"{sentence}; {hint}" if hint else sentence

    def __str__(self) -> str:
        return self.message()


def error_message(
    error: BaseException, hints: Mapping[Hint, str] = _DEFAULT_WORDS, names: Mapping[str, str] = _DEFAULT_WORDS
) -> str:
    """Format any error, in an interface's words where the error carries fields.

    >>> error_message(ValueError("no rows"))
    'no rows'
    """
    worded = getattr(error, "message", None)
    return worded(hints, names) if callable(worded) else str(error)


class PaddedOptions(UserWarning):
    """Finite logits that were read as absent options."""


_RECORDING = threading.RLock()
"""Lock: the warning filters are shared by all threads, so only one block at a time may record."""


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Collect the messages of warnings raised inside, each once and on one line; the list is filled at the end.

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
    """Show no warnings inside the block, or none whose text begins with a pattern.

    >>> with silence_warnings():
    ...     warnings.warn("nobody reads this")
    """
    with warnings.catch_warnings():
        if enabled:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def write_warnings(write: Callable[[str], None]) -> Iterator[None]:
    """Write warnings for users with `write`, on one line without the code location; drop all others.

    >>> with write_warnings(print):
    ...     warnings.warn("40 exact zeros were raised to 0.05")
    ...     warnings.warn("only developers need this", DeprecationWarning)
    40 exact zeros were raised to 0.05
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: write(_line(message))
        yield


def _line(text: object) -> str:
    return " ".join(str(text).split())
