"""Rows of a study as the tables that papers print: mean ± std, the best and the second marked."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pandas import DataFrame

from trueup.io.atomic import atomic_write
from trueup.reports.html import TableCell
from trueup.reports.html import table as html_table
from trueup_studies.statistics import LEVEL, paired_t_test, t_test

if TYPE_CHECKING:
    from trueup_studies.claims import ClaimTable

MISSING = "–"
RUNS = "runs"
"""What stands above how many runs each row is of."""
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


def columns(*keys: str) -> tuple[Column, ...]:
    """Columns by their keys in columns.csv.

    >>> [column.heading for column in columns("accuracy", "nll")]
    ['accuracy, %', 'NLL']
    """
    return tuple(_known_columns()[key] for key in keys)


@cache
def _known_columns() -> dict[str, Column]:
    lines = csv.reader(files("trueup_studies").joinpath("columns.csv").read_text(encoding="utf-8").splitlines()[1:])
    return {
        key: Column(name, title, cast("Literal['lower', 'higher', '']", better), float(scale), int(digits), error)
        for key, name, title, better, scale, digits, error in lines
    }


@dataclass(frozen=True)
class Entry:
    """One figure over the seeds, already scaled."""

    mean: float
    std: float
    """Of the sample, so NaN of one seed; or the error that the rows gave."""
    count: int
    rank: Literal[0, 1, 2] = 0
    """1 for the best of its group, 2 for the second, else 0. Means that print equally share a rank."""
    mark: Literal["higher", "lower", ""] = ""
    """Than the reference, if a t-test finds it significant."""


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
    count_runs: bool = False
    """Whether each row says how many runs it is of, also where all are of as many."""

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
        headings = self._headings()
        lines += [pipe_row([self.head, *headings]), "|:--|" + "--:|" * len(headings)]
        for group, members in self.groups.items():
            if group:
                lines.append(pipe_row([f"**{group}**", *[""] * len(headings)]))
            for name, entries in members.items():
                cells = [self._text(entries, column, wraps) for column in self.columns]
                lines.append(pipe_row([name, *cells, *self._runs(entries)]))
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
        headings = self._headings()
        lines += [rf"\begin{{tabular}}{{l{'r' * len(headings)}}}", r"\toprule"]
        lines.append(latex_row([latex_text(self.head), *map(latex_text, headings)]))
        for group, members in self.groups.items():
            lines.append(r"\midrule")
            if group:
                lines.append(rf"\multicolumn{{{1 + len(headings)}}}{{l}}{{\emph{{{latex_text(group)}}}}} \\")
            for name, entries in members.items():
                cells = [self._text(entries, column, wraps, latex_text) for column in self.columns]
                lines.append(latex_row([latex_text(name), *cells, *map(latex_text, self._runs(entries))]))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def csv(self) -> str:
        """One line a figure, in all its digits.

        >>> rows = [{"method": "raw", "ece": 0.05}]
        >>> print(tabulate(rows, by="method", columns=[Column("ece", scale=100)]).csv(), end="")
        group,method,figure,mean,std,count,place,mark
        ,raw,ece,5.0,,1,1,
        """
        lines = [
            [group, name, column.heading, entry.mean, entry.std, entry.count, entry.rank or "", entry.mark]
            for group, members in self.groups.items()
            for name, entries in members.items()
            for column in self.columns
            if (entry := entries.get(column.name))
        ]
        return to_csv(lines, ["group", self.head, "figure", "mean", "std", "count", "place", "mark"])

    def html(self) -> str:
        """A table of a page: the best is bold, the second underlined, a mark ↑ or ↓.

        >>> rows = [{"method": "raw", "ece": 0.05}, {"method": "temperature", "ece": 0.01}]
        >>> table = tabulate(rows, by="method", columns=[Column("ece", scale=100, digits=2)])
        >>> "<td><strong>1.00</strong></td>" in table.html()
        True
        """
        rows: list[str | list[str | TableCell]] = []
        for group, members in self.groups.items():
            rows += [group] if group else []
            for name, entries in members.items():
                rows.append([name, *(self._cell(entries, column) for column in self.columns), *self._runs(entries)])
        return html_table(self.title or self.head, [self.head, *self._headings()], rows)

    def _cell(self, entries: Mapping[str, Entry], column: Column) -> TableCell:
        entry = entries.get(column.name)
        if entry is None or math.isnan(entry.mean):
            return TableCell(MISSING)
        return TableCell(format_mean(entry.mean, entry.std, column.digits), rank=entry.rank, mark=ARROWS[entry.mark])

    def _headings(self) -> list[str]:
        return [*(column.heading for column in self.columns), *([RUNS] if self._counted else [])]

    @property
    def _counted(self) -> bool:
        """Whether each row says how many runs it is of, as it does where some are of fewer than others."""
        return (
            self.count_runs
            or len({_count(entries) for members in self.groups.values() for entries in members.values()} - {0}) > 1
        )

    def _runs(self, entries: Mapping[str, Entry]) -> list[str]:
        return [str(_count(entries))] if self._counted else []

    def _text(self, entries: Mapping[str, Entry], column: Column, wraps: Mapping[int, str], signs: Any = str) -> str:
        entry = entries.get(column.name)
        if entry is None or math.isnan(entry.mean):
            return str(signs(MISSING))
        return wraps[entry.rank].format(signs(format_mean(entry.mean, entry.std, column.digits))) + signs(
            ARROWS[entry.mark]
        )


def _count(entries: Mapping[str, Entry]) -> int:
    return max((entry.count for entry in entries.values()), default=0)


def to_csv(lines: Iterable[Sequence[Any]], head: Sequence[str]) -> str:
    """Lines of values in all their digits, nothing where one is NaN."""
    return str(DataFrame(lines, columns=list(head)).to_csv(index=False, lineterminator="\n"))


def format_mean(mean: float, std: float, digits: int) -> str:
    """A mean and, where there is one, its standard deviation; a dash for what is not defined.

    >>> format_mean(1.234, 0.056, 2), format_mean(1.234, math.nan, 2)
    ('1.23 ± 0.06', '1.23')
    """
    if math.isnan(mean):
        return MISSING
    return f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def tabulate(
    rows: Iterable[Mapping[str, Any]],
    *,
    by: str,
    columns: Sequence[Column],
    group: str | Sequence[str] = (),
    order: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
    reference: str | None = None,
    level: float = LEVEL,
    title: str = "",
    notes: Sequence[str] = (),
) -> Table:
    """Mean ± std, over the rows alike in `by` and `group`, of each column.

    `by` names the competitors, among which the best and the second of a group are marked; `order` puts some of them
    first, and also shows, as missing, those without rows; `titles` gives names to print. With a `reference`, an arrow
    marks who is significantly higher or lower than that competitor by a two-sample t-test.

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
    by_group: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        members = by_group.setdefault(", ".join(str(row[key]) for key in keys), {name: [] for name in order})
        members.setdefault(str(row[by]), []).append(row)
    groups = {}
    for name, members in by_group.items():
        entries: dict[str, dict[str, Entry]] = {member: {} for member in members}
        for column in columns:
            values = {member: _values(column, own_rows) for member, own_rows in members.items()}
            for member, entry in _entries(column, values, members, reference, level).items():
                entries[member][column.name] = entry
        groups[name] = {titles.get(member, member): figures for member, figures in entries.items()}
    return Table(title, by, tuple(columns), groups, tuple(notes))


def paired_differences(
    rows: Iterable[Mapping[str, Any]], ours: str, theirs: str, columns: Iterable[Column], *, resplit_ratio: float = 0.0
) -> dict[str, Entry]:
    """The difference of two methods in each figure, seed by seed, marked where a paired t-test finds it significant.

    `resplit_ratio` is that of `standard_error`.

    >>> rows = [{"method": m, "seed": s, "nll": s + (m == "a") * (9 + s)} for m in "ab" for s in range(3)]
    >>> paired_differences(rows, "a", "b", [Column("nll")])["nll"].mark
    'higher'
    """
    by_method: dict[str, dict[Any, Mapping[str, Any]]] = {ours: {}, theirs: {}}
    for row in rows:
        if row["method"] in by_method:
            by_method[row["method"]][row["seed"]] = row
    seeds = sorted(by_method[ours].keys() & by_method[theirs].keys())
    entries = {}
    for column in columns if seeds else ():
        first, second = (np.array([by_method[name][seed][column.name] for seed in seeds]) for name in (ours, theirs))
        differences = column.scale * (first - second)
        mean, std = float(differences.mean()), float(differences.std(ddof=1)) if len(seeds) > 1 else math.nan
        mark: Literal["higher", "lower", ""] = ""
        if paired_t_test(differences, resplit_ratio=resplit_ratio) < LEVEL:
            mark = "higher" if mean > 0 else "lower"
        entries[column.name] = Entry(mean, std, len(seeds), mark=mark)
    return entries


def save_tables(tables: Mapping[str, Table | ClaimTable], folder: str | Path) -> list[Path]:
    """Write each table as Markdown, LaTeX and CSV; return the files."""
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
    means = {member: float(column_values.mean()) for member, column_values in values.items() if len(column_values)}
    ranks = _ranks(column, means)
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
        entries[member] = Entry(mean, std, len(ours), ranks.get(member, 0), mark)
    return entries


def _ranks(column: Column, means: Mapping[str, float]) -> dict[str, Literal[0, 1, 2]]:
    """The ranks of what is printed: a reader would not understand why one of two equal numbers is the best."""
    if not column.better:
        return {}
    printed = {member: round(mean, column.digits) for member, mean in means.items() if not math.isnan(mean)}
    best = sorted(set(printed.values()), reverse=column.better == "higher")[:2]
    return {member: 1 if value == best[0] else 2 for member, value in printed.items() if value in best}


def pipe_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def latex_row(cells: Iterable[str]) -> str:
    """A row of a LaTeX table, of cells whose signs are LaTeX's already."""
    return " & ".join(cells) + r" \\"


def latex_text(text: str) -> str:
    """Text with the signs of LaTeX."""
    return "".join(SIGNS.get(sign, LATEX.get(sign, sign)) for sign in text)
