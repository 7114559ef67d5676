"""Rows of a study as the tables that papers print: mean ± std, the best and the second marked."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trueup.io.atomic import atomic_write
from trueup.training.calibratability import t_test as t_test

MISSING = "–"
ARROWS = {"higher": "↑", "lower": "↓", "": ""}
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MISSING: "--"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}
SIGNS = {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "δ": r"$\delta$", "γ": r"$\gamma$"}


@dataclass(frozen=True)
class Column:
    """A figure of the rows and how to print it."""

    name: str
    """Its name in the rows."""
    title: str = ""
    """Its name in the table; the same if empty."""
    better: Literal["lower", "higher", ""] = "lower"
    """Which end is marked as the best."""
    scale: float = 1.0
    """What a value is multiplied with, as 100 for per cent."""
    digits: int = 4
    error: str = ""
    """Where the rows have the error of the value themselves: its name there. Then there is no spread over rows."""

    @property
    def heading(self) -> str:
        """What stands above it."""
        return self.title or self.name


@dataclass(frozen=True)
class Entry:
    """One figure over the seeds, already scaled."""

    mean: float
    std: float
    """Of the sample, so NaN of one seed; or the error that the rows gave."""
    count: int
    place: int = 0
    """1 for the best of its group, 2 for the second, else 0. Means that print equally share a place."""
    mark: Literal["higher", "lower", ""] = ""
    """Than the reference, if a two-sample t-test says so."""


@dataclass(frozen=True)
class Table:
    """Competitors in rows, figures in columns, in groups such as one network each."""

    title: str
    head: str
    """What the competitors are."""
    columns: tuple[Column, ...]
    groups: Mapping[str, Mapping[str, Mapping[str, Entry]]]
    """By group, competitor and name of a column. What was not run is not there."""
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """A table of GitHub's kind: the best is **bold**, the second *italic*, a mark ↑ or ↓.

        >>> rows = [{"method": "raw", "ece": 0.05}, {"method": "temperature", "ece": 0.01}]
        >>> print(tabulate(rows, by="method", columns=[Column("ece", scale=100, digits=2)]).markdown())
        | method | ece |
        |:--|--:|
        | raw | *5.00* |
        | temperature | **1.00** |
        """
        wraps = {0: "{}", 1: "**{}**", 2: "*{}*"}
        lines = [self.title, ""] if self.title else []
        lines += [_piped([self.head, *self._headings()]), "|:--|" + "--:|" * len(self.columns)]
        for group, members in self.groups.items():
            if group:
                lines.append(_piped([f"**{group}**", *[""] * len(self.columns)]))
            lines += [
                _piped([name, *(self._text(entries, column, wraps) for column in self.columns)])
                for name, entries in members.items()
            ]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def latex(self) -> str:
        r"""A `tabular` for the booktabs package: the best is \textbf, the second \underline.

        >>> rows = [{"method": "raw", "ece": 0.05}, {"method": "temperature", "ece": 0.01}]
        >>> print(tabulate(rows, by="method", columns=[Column("ece", scale=100, digits=2)]).latex())
        \begin{tabular}{lr}
        \toprule
        method & ece \\
        \midrule
        raw & \underline{5.00} \\
        temperature & \textbf{1.00} \\
        \bottomrule
        \end{tabular}
        """
        wraps = {0: "{}", 1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
        lines = [f"% {line}" for line in [self.title, *self.notes] if line]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\toprule"]
        lines.append(_ampersands([_tex(self.head), *map(_tex, self._headings())]))
        for group, members in self.groups.items():
            lines.append(r"\midrule")
            if group:
                lines.append(rf"\multicolumn{{{1 + len(self.columns)}}}{{l}}{{\emph{{{_tex(group)}}}}} \\")
            for name, entries in members.items():
                cells = [self._text(entries, column, wraps, _signs) for column in self.columns]
                lines.append(_ampersands([_tex(name), *cells]))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def csv(self) -> str:
        """One line a figure, in all its digits.

        >>> rows = [{"method": "raw", "ece": 0.05}]
        >>> print(tabulate(rows, by="method", columns=[Column("ece", scale=100)]).csv(), end="")
        group,method,figure,mean,std,count,place,mark
        ,raw,ece,5.0,,1,1,
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["group", self.head, "figure", "mean", "std", "count", "place", "mark"])
        for group, members in self.groups.items():
            for name, entries in members.items():
                for column in self.columns:
                    if entry := entries.get(column.name):
                        std = "" if math.isnan(entry.std) else entry.std
                        place = entry.place or ""
                        writer.writerow([group, name, column.heading, entry.mean, std, entry.count, place, entry.mark])
        return out.getvalue()

    def _headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def _text(self, entries: Mapping[str, Entry], column: Column, wraps: Mapping[int, str], signs: Any = str) -> str:
        entry = entries.get(column.name)
        if entry is None or math.isnan(entry.mean):
            return str(signs(MISSING))
        spread = "" if math.isnan(entry.std) else f" ± {entry.std:.{column.digits}f}"
        return wraps[entry.place].format(signs(f"{entry.mean:.{column.digits}f}{spread}")) + signs(ARROWS[entry.mark])


def tabulate(
    rows: Iterable[Mapping[str, Any]],
    *,
    by: str,
    columns: Sequence[Column],
    group: str | Sequence[str] = (),
    order: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
    reference: str | None = None,
    level: float = 0.05,
    title: str = "",
    notes: Sequence[str] = (),
) -> Table:
    """Mean ± std, over the rows alike in `by` and `group`, of each column.

    `by` names the competitors, among which the best and the second of a group are marked; `order` puts some of them
    first, and also shows, as missing, those that no row is of; `titles` gives names to print. With a `reference`, a
    two-sample t-test marks who is higher or lower than that competitor.

    >>> means = {"ce": 0.05, "ls": 0.02}
    >>> rows = [{"loss": loss, "ece": means[loss] + 0.001 * seed} for loss in means for seed in range(3)]
    >>> print(tabulate(rows, by="loss", columns=[Column("ece", scale=100, digits=2)], reference="ce").markdown())
    | loss | ece |
    |:--|--:|
    | ce | *5.10 ± 0.10* |
    | ls | **2.10 ± 0.10**↓ |
    """
    keys = (group,) if isinstance(group, str) else tuple(group)
    titles = titles or {}
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        members = found.setdefault(", ".join(str(row[key]) for key in keys), {name: [] for name in order})
        members.setdefault(str(row[by]), []).append(row)
    groups = {}
    for name, members in found.items():
        entries: dict[str, dict[str, Entry]] = {member: {} for member in members}
        for column in columns:
            values = {member: _values(column, alike) for member, alike in members.items()}
            for member, entry in _entries(column, values, members, reference, level).items():
                entries[member][column.name] = entry
        groups[name] = {titles.get(member, member): each for member, each in entries.items()}
    return Table(title, by, tuple(columns), groups, tuple(notes))


def save(tables: Mapping[str, Table], folder: str | Path) -> list[Path]:
    """Write each table as Markdown, LaTeX and CSV, and tell the files."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables.items():
        texts = {"md": table.markdown() + "\n", "tex": table.latex() + "\n", "csv": table.csv()}
        for suffix, text in texts.items():
            path = target / f"{name}.{suffix}"
            with atomic_write(path) as [draft]:
                draft.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def _values(column: Column, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    values = [row.get(column.name) for row in rows]
    return column.scale * np.array([value for value in values if value is not None], dtype=float)


def _entries(
    column: Column,
    values: Mapping[str, np.ndarray],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    reference: str | None,
    level: float,
) -> dict[str, Entry]:
    """Of the competitors that have any."""
    means = {member: float(found.mean()) for member, found in values.items() if len(found)}
    places = _places(column, means)
    entries = {}
    for member, mean in means.items():
        ours = values[member]
        if column.error:
            std = column.scale * float(np.mean([row[column.error] for row in rows[member]]))
        else:
            std = float(ours.std(ddof=1)) if len(ours) > 1 else math.nan
        mark: Literal["higher", "lower", ""] = ""
        if reference is not None and member != reference and reference in means:
            theirs = values[reference]
            if t_test(ours, theirs) < level:
                mark = "higher" if mean > means[reference] else "lower"
        entries[member] = Entry(mean, std, len(ours), places.get(member, 0), mark)
    return entries


def _places(column: Column, means: Mapping[str, float]) -> dict[str, int]:
    """The places of what is printed: a reader would not understand why one of two equal numbers is the best."""
    if not column.better:
        return {}
    printed = {member: round(mean, column.digits) for member, mean in means.items() if not math.isnan(mean)}
    best = sorted(set(printed.values()), reverse=column.better == "higher")[:2]
    return {member: best.index(value) + 1 for member, value in printed.items() if value in best}


def _piped(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _signs(text: str) -> str:
    return "".join(SIGNS.get(sign, LATEX.get(sign, sign)) for sign in text)


def _tex(text: str) -> str:
    return _signs(text)
