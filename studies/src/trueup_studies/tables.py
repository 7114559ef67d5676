"""Tables of study rows in the form that papers print: mean ± std, with the best and second-best entries marked."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from pandas import DataFrame

from trueup.io.atomic import atomic_write
from trueup.reports.html import TableCell
from trueup.reports.html import table as html_table
from trueup_studies.statistics import LEVEL, paired_t_test, t_test

MISSING = "–"
RUNS = "runs"
"""Heading of the column with the number of runs."""
ARROWS = {"higher": "↑", "lower": "↓", "": ""}
LATEX_SIGNS = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MISSING: "--"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "δ": r"$\delta$", "γ": r"$\gamma$"}
)


class Markup(NamedTuple):
    """How a format escapes text, and marks the best (rank 1) and second-best (rank 2) entries."""

    escape: Callable[[str], str]
    best: str
    second: str

    def mark(self, text: str, rank: int) -> str:
        """Escape a text and mark it by its rank; rank 0 is unmarked."""
        return ("{}", self.best, self.second)[rank].format(self.escape(text))


MARKDOWN = Markup(lambda text: text.replace("|", r"\|"), "**{}**", "*{}*")
LATEX = Markup(lambda text: text.translate(LATEX_SIGNS), r"\textbf{{{}}}", r"\underline{{{}}}")


class PrintedTable:
    """Base of tables that print as Markdown and LaTeX."""

    title: str
    notes: tuple[str, ...]

    def layout(self) -> tuple[list[str], str]:
        """Return the headings, and l or r for the alignment of each column."""
        raise NotImplementedError

    def lines(self, markup: Markup) -> Iterator[str | list[str]]:
        """Yield the rows as escaped cells; a text alone is the name of a group."""
        raise NotImplementedError

    def markdown(self) -> str:
        """Format as a Markdown table, with ↑ or ↓ after a significant difference."""
        headings, align = self.layout()
        rules = {"l": ":--", "r": "--:"}
        cells = [[*map(MARKDOWN.escape, headings)], [rules[side] for side in align]]
        for line in self.lines(MARKDOWN):
            cells.append([f"**{line}**", *[""] * (len(align) - 1)] if isinstance(line, str) else line)
        rows = [f"| {' | '.join(row)} |" for row in cells]
        rows[1] = f"|{'|'.join(cells[1])}|"
        return "\n".join([*([self.title, ""] if self.title else []), *rows, *(f"\n{note}" for note in self.notes)])

    def latex(self) -> str:
        r"""Format as a `tabular` of the booktabs package: the best is \textbf, the second \underline."""
        headings, align = self.layout()
        text = [f"% {line}" for line in [self.title, *self.notes] if line]
        text += [rf"\begin{{tabular}}{{{align}}}", r"\toprule", " & ".join(map(LATEX.escape, headings)) + r" \\"]
        lines = list(self.lines(LATEX))
        text += [r"\midrule"] if not lines or isinstance(lines[0], list) else []
        for line in lines:
            if isinstance(line, str):
                text += [r"\midrule", rf"\multicolumn{{{len(align)}}}{{l}}{{\emph{{{line}}}}} \\"]
            else:
                text.append(" & ".join(line) + r" \\")
        return "\n".join([*text, r"\bottomrule", r"\end{tabular}"])

    def csv(self) -> str:
        """Format as CSV, in all digits."""
        raise NotImplementedError


@dataclass(frozen=True)
class Column:
    """One column of a table: a field of the rows, and how to print it."""

    name: str
    """Field of the rows."""
    title: str = ""
    """Heading; the field's name if empty."""
    better: Literal["lower", "higher", ""] = "lower"
    """Which end is marked as the best."""
    scale: float = 1.0
    """Factor for printing, such as 100 for per cent."""
    digits: int = 4
    error: str = ""
    """Field of the rows with the error of the value, printed in the place of the standard deviation over rows."""

    @property
    def heading(self) -> str:
        """The heading."""
        return self.title or self.name


def columns(*keys: str) -> tuple[Column, ...]:
    """Look up columns by their keys in columns.csv.

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
    """One number of a table: a mean over seeds, already scaled."""

    mean: float
    std: float
    """Sample standard deviation, NaN for one seed; or the mean of the column's `error` field."""
    count: int
    rank: Literal[0, 1, 2] = 0
    """1 for the best of its group, 2 for the second, else 0. Means that print equally share a rank."""
    mark: Literal["higher", "lower", ""] = ""
    """Significant difference from the reference, by a t-test."""

    def text(self, column: Column) -> str:
        """Print the number, with an arrow for a significant difference."""
        return format_mean(self.mean, self.std, column.digits)


@dataclass(frozen=True)
class Table(PrintedTable):
    r"""Competitors in rows and metrics in columns, in groups such as one per network.

    >>> rows = [{"method": "raw", "ece": 0.05}, {"method": "temperature", "ece": 0.01}]
    >>> table = tabulate(rows, by="method", columns=[Column("ece", scale=100, digits=2)])
    >>> print(table.markdown())
    | method | ece |
    |:--|--:|
    | raw | *5.00* |
    | temperature | **1.00** |
    >>> print(table.latex())
    \begin{tabular}{lr}
    \toprule
    method & ece \\
    \midrule
    raw & \underline{5.00} \\
    temperature & \textbf{1.00} \\
    \bottomrule
    \end{tabular}
    >>> print(table.csv(), end="")
    group,method,figure,mean,std,count,place,mark
    ,raw,ece,5.0,,1,2,
    ,temperature,ece,1.0,,1,1,
    >>> "<td><strong>1.00</strong></td>" in table.html()
    True
    """

    title: str
    head: str
    """Heading of the first column."""
    columns: tuple[Column, ...]
    groups: Mapping[str, Mapping[str, Mapping[str, Entry]]]
    """Group → competitor → name of a column → entry. Entries that were not run are absent."""
    notes: tuple[str, ...] = ()
    count_runs: bool = False
    """Whether to print the number of runs of each row even where all rows have the same number."""

    def captioned(self, title: str = "", notes: Sequence[str] = ()) -> Table:
        """Return the table with a title above and notes below."""
        return replace(self, title=title, notes=tuple(notes))

    def layout(self) -> tuple[list[str], str]:
        """Return the headings, and l or r for the alignment of each column."""
        headings = [self.head, *(column.heading for column in self.columns), *([RUNS] if self._counted else [])]
        return headings, "l" + "r" * (len(headings) - 1)

    def lines(self, markup: Markup) -> Iterator[str | list[str]]:
        """Yield the rows as escaped cells; a text alone is the name of a group."""
        for group, members in self.groups.items():
            if group:
                yield markup.escape(group)
            for name, entries in members.items():
                cells = [markup.escape(name)]
                for column in self.columns:
                    entry = entries.get(column.name)
                    if entry is None or math.isnan(entry.mean):
                        cells.append(markup.escape(MISSING))
                    else:
                        cells.append(markup.mark(entry.text(column), entry.rank) + markup.escape(ARROWS[entry.mark]))
                yield [*cells, *self._runs(entries)]

    def csv(self) -> str:
        """Format as CSV: one line per number, in all digits."""
        lines = [
            [group, name, column.heading, entry.mean, entry.std, entry.count, entry.rank or "", entry.mark]
            for group, members in self.groups.items()
            for name, entries in members.items()
            for column in self.columns
            if (entry := entries.get(column.name))
        ]
        return to_csv(lines, ["group", self.head, "figure", "mean", "std", "count", "place", "mark"])

    def html(self) -> str:
        """Format as an HTML table: the best is bold, the second underlined."""
        rows: list[str | list[str | TableCell]] = []
        for group, members in self.groups.items():
            rows += [group] if group else []
            for name, entries in members.items():
                rows.append([name, *(self._cell(entries, column) for column in self.columns), *self._runs(entries)])
        return html_table(self.title or self.head, self.layout()[0], rows)

    def _cell(self, entries: Mapping[str, Entry], column: Column) -> TableCell:
        entry = entries.get(column.name)
        if entry is None or math.isnan(entry.mean):
            return TableCell(MISSING)
        return TableCell(entry.text(column), rank=entry.rank, mark=ARROWS[entry.mark])

    @property
    def _counted(self) -> bool:
        """Whether the number of runs is printed: always where rows differ in it."""
        counts = {_count(entries) for members in self.groups.values() for entries in members.values()}
        return self.count_runs or len(counts - {0}) > 1

    def _runs(self, entries: Mapping[str, Entry]) -> list[str]:
        return [str(_count(entries))] if self._counted else []


def _count(entries: Mapping[str, Entry]) -> int:
    return max((entry.count for entry in entries.values()), default=0)


def to_csv(lines: Iterable[Sequence[Any]], head: Sequence[str]) -> str:
    """Format lines of values as CSV in all digits; NaN becomes empty."""
    return str(DataFrame(lines, columns=list(head)).to_csv(index=False, lineterminator="\n"))


def format_mean(mean: float, std: float, digits: int) -> str:
    """Format a mean and, if known, its standard deviation; a dash for NaN.

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
) -> Table:
    """Compute the mean ± std of each column, over the rows with equal `by` and `group`.

    `by` names the competitors. `order` puts some of them first and shows them as missing if they have no rows; `titles`
    gives names to print. With a `reference`, an arrow marks competitors that differ from it significantly by a
    two-sample t-test.

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
            for member, entry in _entries(column, members, reference).items():
                entries[member][column.name] = entry
        groups[name] = {titles.get(member, member): by_column for member, by_column in entries.items()}
    return Table("", by, tuple(columns), groups)


def paired_differences(
    rows: Iterable[Mapping[str, Any]], ours: str, theirs: str, columns: Iterable[Column], *, resplit_ratio: float = 0.0
) -> dict[str, Entry]:
    """Compute the difference of two methods in each metric, seed by seed; mark it if a paired t-test is significant.

    `resplit_ratio` is explained in `standard_error`.

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
        significant = paired_t_test(differences, resplit_ratio=resplit_ratio) < LEVEL
        mean = float(differences.mean())
        entries[column.name] = Entry(mean, _std(differences), len(seeds), mark=_direction(mean) if significant else "")
    return entries


def save_tables(tables: Mapping[str, PrintedTable], folder: str | Path) -> list[Path]:
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


def _entries(
    column: Column, members: Mapping[str, Sequence[Mapping[str, Any]]], reference: str | None
) -> dict[str, Entry]:
    """Compute one column of a group, for the competitors that have values."""
    values = {
        member: column.scale * np.array([row[column.name] for row in rows if row.get(column.name) is not None], float)
        for member, rows in members.items()
    }
    values = {member: numbers for member, numbers in values.items() if len(numbers)}
    means = {member: float(numbers.mean()) for member, numbers in values.items()}
    ranks = _ranks(column, means)
    entries = {}
    for member, mean in means.items():
        std = _std(values[member])
        if column.error:
            std = column.scale * float(np.mean([row[column.error] for row in members[member]]))
        compared = reference is not None and member != reference and reference in means
        significant = compared and t_test(values[member], values[str(reference)]) < LEVEL
        mark = _direction(mean - means[str(reference)]) if significant else ""
        entries[member] = Entry(mean, std, len(values[member]), ranks.get(member, 0), mark)
    return entries


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _direction(difference: float) -> Literal["higher", "lower"]:
    return "higher" if difference > 0 else "lower"


def _ranks(column: Column, means: Mapping[str, float]) -> dict[str, Literal[0, 1, 2]]:
    """Rank the means as printed: of two equal printed numbers, neither may look better."""
    if not column.better:
        return {}
    printed = {member: round(mean, column.digits) for member, mean in means.items() if not math.isnan(mean)}
    best = sorted(set(printed.values()), reverse=column.better == "higher")[:2]
    return {member: 1 if value == best[0] else 2 for member, value in printed.items() if value in best}
