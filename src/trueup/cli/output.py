"""Printing of results as tables, text or JSON, and checks of output files; warnings go to stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup._core.errors import silence_warnings, write_warnings
from trueup._core.formatting import Row, text_table
from trueup._core.progress import clear_line, show_elapsed

if TYPE_CHECKING:
    from trueup.metrics.forecast_table import ForecastScores
    from trueup.metrics.table import Scores

SCHEMA = 1
"""Version of the JSON output; it increases when the meaning of a key changes."""


COMMAND_WARNINGS: list[str] = []
"""Warnings of the running command, which its JSON output repeats."""


@contextmanager
def working(label: str, *, quiet: bool) -> Iterator[None]:
    """Show elapsed time and warnings of the work inside, unless `quiet`."""
    with collect_warnings(quiet=quiet), show_elapsed(label, enabled=not quiet):
        yield


def collect_warnings(*, quiet: bool) -> AbstractContextManager[None]:
    """Collect warnings in `COMMAND_WARNINGS`, and print them unless `quiet`."""
    if sys.warnoptions or os.environ.get("TRUEUP_DEBUG"):
        return silence_warnings(enabled=quiet)

    def write(message: str) -> None:
        if message not in COMMAND_WARNINGS:
            COMMAND_WARNINGS.append(message)
            if not quiet:
                print_stderr(f"warning: {message}")

    return write_warnings(write)


def print_json(verb: str, **content: Any) -> None:
    """Print one JSON object with its schema, the verb and warnings; NaN and infinity become null."""
    result = to_json({"schema": SCHEMA, "verb": verb, "warnings": COMMAND_WARNINGS, **content})
    print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def to_json(value: Any) -> Any:
    """Convert a value to types of JSON.

    >>> to_json({"ece": float("nan"), "methods": ("raw", "svs")})
    {'ece': None, 'methods': ['raw', 'svs']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def print_table(rows: list[Row], *, words: bool = False) -> None:
    """Print a table whose first row is its header; numbers are right-aligned, `words` left-aligned and wrapped.

    On a narrow terminal, the columns of a table of numbers are split over several tables.
    """
    if not sys.stdout.isatty():
        print(text_table(_pad(rows, str.ljust) if words else rows))
        return
    parts = [rows] if words else split_columns(rows, shutil.get_terminal_size().columns)
    for part in parts:
        if part is not parts[0]:
            print()
        _print_rich(part, words)


def split_columns(rows: list[Row], width: int) -> list[list[Row]]:
    """Split the columns of a table into parts that fit a width; each part repeats the first column.

    >>> split_columns([["method", "accuracy", "nll"], ["raw", "0.91", "0.3"]], 18)
    [[['method', 'accuracy'], ['raw', '0.91']], [['method', 'nll'], ['raw', '0.3']]]
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[list[int]] = [[]]
    used = widths[0]
    for i in range(1, len(widths)):
        if parts[-1] and used + _GAP + widths[i] > width:
            parts.append([])
            used = widths[0]
        parts[-1].append(i)
        used += _GAP + widths[i]
    return [[[row[0], *(row[i] for i in part)] for row in rows] for part in parts]


_GAP = 2
"""Blanks between two columns."""


def _print_rich(rows: list[Row], words: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    head, *body = rows if words else _pad(rows, str.rjust)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, name in enumerate(head):
        ratio = 2 if words and i == len(head) - 1 else None
        table.add_column(Text(name), overflow="fold", no_wrap=not words or i == 0, ratio=ratio)
    for row in body:
        table.add_row(*(Text(cell, style="bold" if i == 0 else "") for i, cell in enumerate(row)))
    Console(highlight=False).print(table)


def print_remarks(*lines: str, quiet: bool = False) -> None:
    """Print each sentence after an empty line, wrapped on a terminal."""
    if quiet:
        return
    for line in filter(None, lines):
        print()
        if not sys.stdout.isatty():
            print(line)
            continue
        from rich.console import Console

        Console(highlight=False).print(line, markup=False, emoji=False)


def print_scores(scores: Scores | ForecastScores, *, quiet: bool = False) -> None:
    """Print the table of scores, its notes and its groups."""
    if not quiet:
        print(f"{scores.caption()}\n")
    print_table(scores.table())
    notes = scores.notes()
    without_groups = len(notes) - len(getattr(scores, "group_tables", ()))  # groups are printed below
    print_remarks(*notes[:without_groups], quiet=quiet)
    print_groups(getattr(scores, "groups", None), quiet)


def print_caption(scores: Any, audit: Any) -> None:
    """Print the caption of a table of methods, and how the methods were fitted."""
    fits = f"cross-fitted in {audit.n_folds} folds" if audit.cross_fitted else f"fitted to {audit.calibration_rows:,}"
    print(f"{scores.caption()}; {fits}\n")


def select_metrics(scores: Any, metrics: Iterable[str]) -> Any:
    """Return the table with some of its metrics."""
    values, changes = (
        {name: {metric: row[metric] for metric in metrics} for name, row in table.items()}
        for table in (scores.values, scores.changes)
    )
    return replace(scores, values=values, changes=changes)


def print_groups(groups: Any, quiet: bool) -> None:
    """Print the table of groups, if there is one."""
    if groups is not None:
        print()
        print_table(groups.table())
        print_remarks(groups.verdict(), quiet=quiet)


def print_stderr(line: str) -> None:
    """Print a line on stderr, after the name of the command."""
    clear_line()
    sys.stderr.write(f"trueup: {line}\n")
    sys.stderr.flush()


def require_output(path: Path, *suffixes: str, reads: tuple[Path | None, ...] = ()) -> Path:
    """Check, before any work, that a path can be written and is none of the inputs `reads`; return it."""
    from trueup.io.atomic import require_writable
    from trueup.io.source import file_list, suffix_of

    if suffixes and suffix_of(path) not in suffixes:
        raise ValueError(f"{path}: the suffix must be {' or '.join(suffixes)}, got {suffix_of(path)!r}")
    for written in file_list(path):
        require_writable(written)
    for source in filter(None, reads):
        for read in file_list(source):
            if any(read.exists() and written.exists() and read.samefile(written) for written in file_list(path)):
                raise ValueError(f"{path}: this would overwrite the input {source}; choose another name")
    return path


def _pad(rows: list[Row], pad: Callable[[str, int], str]) -> list[Row]:
    """Pad cells to the width of their column; rich would strip the blank that replaces a missing mark."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([pad(cell, width) if i else cell.ljust(width) for cell in column])
    return [list(row) for row in zip(*columns, strict=True)]
