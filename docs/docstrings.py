"""An extension of griffe for the reference: doctests outside a numpydoc section become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^Examples\n-{3,}$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Docstrings(griffe.Extension):
    """Without a fence, Markdown reads a prompt as a quotation and a printed list as a link."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each doctest, unless numpydoc's section Examples holds it."""
        if obj.docstring and not obj.is_alias and not SECTION.search(obj.docstring.value):
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
