"""Results on stdout: a table on a terminal, aligned text in a pipe, or JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any

from trueup.core.formatting import Row, text_table

SCHEMA = 1
"""Raised when what a key of the JSON means changes."""


def print_json(verb: str, **content: Any) -> None:
    """One object, with its schema and the verb; what is not a number is null."""
    whole = plain({"schema": SCHEMA, "verb": verb, **content})
    print(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """The same as JSON can hold it.

    >>> plain({"ece": float("nan"), "methods": ("raw", "svs")})
    {'ece': None, 'methods': ['raw', 'svs']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return fspath(value) if isinstance(value, PathLike) else value


def print_table(rows: list[Row], *, words: bool = False) -> None:
    """A table whose first row is its head, numbers to the right; `words` go to the left and are wrapped."""
    if not sys.stdout.isatty():
        print(text_table(_padded(rows, str.ljust) if words else rows))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    head, *body = rows if words else _padded(rows, str.rjust)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(
            Text(name),
            overflow="fold",
            no_wrap=not words or i == 0,
            ratio=2 if words and i == len(head) - 1 else None,
        )
    for row in body:
        table.add_row(*(Text(cell, style="bold" if i == 0 else "") for i, cell in enumerate(row)))
    Console(highlight=False).print(table)


def print_remarks(*lines: str, quiet: bool = False) -> None:
    """Sentences below a table, each after an empty line, wrapped on a terminal."""
    if quiet:
        return
    for line in filter(None, lines):
        print()
        if not sys.stdout.isatty():
            print(line)
            continue
        from rich.console import Console

        Console(highlight=False).print(line, markup=False, emoji=False)


def _padded(rows: list[Row], pad: Callable[[str, int], str]) -> list[Row]:
    """Cells as wide as their column; not left to a table, which would take the blank from beside a number's mark."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if i == 0 else pad(cell, width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
