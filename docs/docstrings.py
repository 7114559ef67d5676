"""An extension of griffe for the reference: names from stubs, doctests as blocks, formulas, and links to papers."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from reference_pages import link_papers

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
        """Put a fence around each doctest, unless numpydoc's section Examples holds it, and link papers.

        Without a fence, Markdown reads a prompt as a quotation and a printed list as a link.
        """
        if obj.docstring and not obj.is_alias:
            text = obj.docstring.value
            if not SECTION.search(text):
                text = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = link_papers(text)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Write `object` for a parameter or result that may be any object."""
        for each in [func, *(func.overloads or [])]:
            for parameter in each.parameters:
                name_any_object(parameter.annotation)
            name_any_object(each.returns)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Write `object` for an attribute that may be any object."""
        name_any_object(attr.annotation)


def name_any_object(annotation: str | griffe.Expr | None) -> None:
    """Replace `Any` in an annotation by `object`, which readers know."""
    if isinstance(annotation, griffe.Expr):
        for name in annotation.iterate(flat=True):
            if isinstance(name, griffe.ExprName) and name.name == "Any":
                name.name = "object"
