"""What the library says to programmers, said to those who have a file and a form to fill in."""

from __future__ import annotations

import re
from collections.abc import Mapping

_OF_FILES = {
    r"a binary score(?: \(n,\))? goes through from_binary": "a binary score x needs two columns in the file, 0 and x",
    r"tokens or pixels go through flatten": "tokens or pixels must be in the file as rows, one each",
    r"flatten leaves out an ignore_index": "what is to be ignored must be left out of the file",
}


def of_files(message: str, own: Mapping[str, str]) -> str:
    """A message without functions and arguments: patterns of the library's words, and what they become here.

    >>> of_files("labels must lie in 0..9, got -100..9; flatten leaves out an ignore_index", {})
    'labels must lie in 0..9, got -100..9; what is to be ignored must be left out of the file'
    >>> of_files("say probs=True to read probabilities", {"probs=True": "--probs"})
    'say --probs to read probabilities'
    """
    for said, here in {**_OF_FILES, **own}.items():
        message = re.sub(said, here, message)
    return message
