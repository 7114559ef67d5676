"""An extension of griffe: the doctests of a docstring become blocks of code on the reference page."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class DoctestBlocks(griffe.Extension):
    """Without a fence, Markdown takes a prompt for a quotation and a printed list for a link."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each doctest."""
        if obj.docstring and not obj.is_alias:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
