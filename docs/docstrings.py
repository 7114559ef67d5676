"""An extension of griffe for the reference: doctests become blocks of code, and functions get a table of parameters."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
IMPLICIT = ("self", "cls")
LONGEST_DEFAULT = 40


class Docstrings(griffe.Extension):
    """Without a fence, Markdown takes a prompt for a quotation and a printed list for a link."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each doctest, and the table of parameters before the first one."""
        if obj.docstring and not obj.is_alias:
            text, table = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value), parameter_table(obj)
            before, fence, after = text.partition("```pycon")
            obj.docstring.value = f"{before.rstrip()}\n\n{table}\n\n{fence}{after}" if table else text


def parameter_table(obj: griffe.Object) -> str:
    """The parameters of a function or a class with their types and defaults, as a table; nothing if it has none."""
    if not isinstance(obj, griffe.Function | griffe.Class):
        return ""
    parameters = [p for p in obj.parameters if p.name not in IMPLICIT]
    if not any(p.annotation for p in parameters):
        return ""
    rows = ["| parameter | type | default |", "|---|---|---|"]
    return "\n".join(rows + [f"| `{name(p)}` | {code(p.annotation)} | {default(p)} |" for p in parameters])


def name(parameter: griffe.Parameter) -> str:
    """The name, with the stars of a signature."""
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    return f"{stars.get(parameter.kind, '')}{parameter.name}"


def code(expression: Any) -> str:
    """An expression in a cell of a table, where a bar needs an escape."""
    return "`{}`".format(str(expression).replace("|", r"\|")) if expression is not None else ""


def default(parameter: griffe.Parameter) -> str:
    """What a parameter is if nothing is given; long expressions are in the signature."""
    if parameter.required or parameter.default is None or name(parameter).startswith("*"):
        return "" if name(parameter).startswith("*") else "required"
    value = str(parameter.default)
    return code(value if len(value) <= LONGEST_DEFAULT else f"{value[:LONGEST_DEFAULT]}…")
