"""Parts of every measured page: the commit that it was made from, tables in Markdown and CSV, and a figure of dots."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trueup._core import __version__
from trueup.reports import style

ROOT = Path(__file__).parents[1]
LINES = 10
"""Rows of a table on a page; the others are in its CSV file."""


def made_from(ref: str = "HEAD") -> str:
    """Return the version and the commit that are measured; without git, the version alone."""
    command = ["git", "log", "-n1", "--format=%h of %cs", ref]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"trueup {__version__}" + (f", commit {done.stdout.strip()}" if done.returncode == 0 else "")


def table(cells: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its headings first."""
    rows = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
    return "\n".join([rows[0], f"|{'---|' * len(cells[0])}", *rows[1:]])


def first_lines(cells: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return the headings and as many rows as a page shows."""
    return cells[: 1 + LINES]


def write_csv(path: Path, cells: Sequence[Sequence[str]]) -> None:
    """Write a table to a CSV file, its headings first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(cells)


def fill(page: Path, content: str) -> None:
    """Replace the measured part of a page, between two comments."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- measured -->\n")
    _, mark, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}<!-- measured -->\n\n{content}\n\n{mark}{after}", encoding="utf-8")


def draw_dots(
    path: Path, values: Mapping[str, Sequence[float]], *, label: str, reference: float, log: bool = False
) -> None:
    """Draw one line of dots per name, and a vertical line at the value of a draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.26 * len(values)), layout="constrained", facecolor="white")
    ax = figure.subplots()
    for row, numbers in enumerate(values.values()):
        ax.plot(numbers, [row] * len(numbers), "o", color=style.BLUE, alpha=0.6, markersize=5)
    ax.axvline(reference, color=style.GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
