"""Errors that carry what happened as fields, so that a command line or a web page can word them for its own readers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Hint(StrEnum):
    """What to do instead, in the library's words; each interface may have words of its own for it."""

    BINARY_SCORE = "a binary score goes through from_binary"
    FLATTEN = "tokens or pixels go through flatten"
    IGNORE_INDEX = "flatten leaves out an ignore_index"
    NOT_PROBABILITIES = "logits need no from_probs"
    EXACT_ZEROS = "log-probabilities of exact zeros come through from_probs"


class InputError(ValueError):
    """Bad input: which argument it was, what was wanted, what came, and a hint where there is one.

    >>> error = InputError("logits", "have shape (n, classes)", "(5,)", Hint.BINARY_SCORE)
    >>> print(error)
    logits must have shape (n, classes), got (5,); a binary score goes through from_binary
    >>> error.message({Hint.BINARY_SCORE: "a binary score x needs two columns, 0 and x"})
    'logits must have shape (n, classes), got (5,); a binary score x needs two columns, 0 and x'
    """

    def __init__(self, argument: str, wanted: str, got: str, hint: Hint | str | None = None) -> None:
        self.argument, self.wanted, self.got, self.hint = argument, wanted, got, hint
        super().__init__(argument, wanted, got, hint)

    def message(
        self,
        hints: Mapping[Hint, str] = MappingProxyType({}),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The sentence, with an interface's own words for hints and arguments; a hint worded as "" is left out."""
        hint = hints.get(self.hint, self.hint) if isinstance(self.hint, Hint) else self.hint
        sentence = f"{names.get(self.argument, self.argument)} must {self.wanted}, got {self.got}"
        return f"{sentence}; {hint}" if hint else sentence

    def __str__(self) -> str:
        return self.message()
