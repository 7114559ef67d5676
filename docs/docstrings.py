"""An extension of griffe for the reference: public names come from stubs, and doctests become blocks of code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

SECTION = re.compile(r"^Examples\n-{3,}$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Docstrings(griffe.Extension):
    """Make the public names of a package visible, which it imports lazily and lists in `__init__.pyi`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Export the names of each stub."""
        for module in [pkg, *pkg.modules.values()]:
            stub = Path(str(module.filepath)).with_suffix(".pyi")
            if stub.name == "__init__.pyi" and stub.is_file():
                imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
                names = [name.name for node in imports if node.module for name in node.names]
                module.exports = [name for name in names if name in module.members]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each doctest, unless numpydoc's section Examples holds it.

        Without a fence, Markdown reads a prompt as a quotation and a printed list as a link.
        """
        if obj.docstring and not obj.is_alias and not SECTION.search(obj.docstring.value):
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
