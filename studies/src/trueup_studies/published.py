"""Published values of the papers, and the comparison of our numbers with them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from trueup.reports.html import TableCell, escape, paragraph, table
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.tables import MISSING, Table, format_mean, to_csv
from trueup_studies.templates import render

_WORDS = read_toml("trueup_studies", "published.toml")
UNITS: Mapping[str, Mapping[str, Any]] = _WORDS["units"]
"""Part of a published metric's name → its unit: the factor that brings our number to it, and its sign."""
AFTER: Mapping[str, str] = _WORDS["after"]
"""Published metric without its unit → our column, where the names differ."""
DIGITS: Mapping[str, int] = _WORDS["digits"]
"""Our column → number of decimals that the paper prints."""
SPELLINGS: Mapping[str, str] = _WORDS["spellings"]
"""Our name of a data set or network, or timm's → the papers' name; both are normalised."""
MAX_STDS = 2.0
"""Two means differ if their difference exceeds this many of its standard deviations."""
CALIBRATE_NETWORKS = ("neural-clamping",)
"""Papers that calibrate trained networks, so that other weights are another setting."""
MARKS = {"agrees": "=", "differs": "≠", "same direction": "✓", "opposite direction": "✗"}

Verdict = Literal["agrees", "differs", "same direction", "opposite direction", "within spread", "no number"]


class PublishedValue(NamedTuple):
    """A number as a paper prints it."""

    paper: str
    table: str
    dataset: str
    model: str
    method: str
    metric: str
    """With its unit: `_pct` is per cent, `_x1e-2` hundredths. A `(flag)` is a statement, its mean 1."""
    mean: float
    """NaN where the source has a gap."""
    std: float
    """NaN where none is printed."""


def published_values(paper: str, table: str | None = None, **matching: str) -> list[PublishedValue]:
    """Return the numbers of a paper, or of one of its tables, with these values of the other fields, in printed order.

    >>> fields = {"model": "ResNet-110", "method": "Temperature Scaling", "metric": "ece_pct"}
    >>> [value] = published_values("neural-clamping", "table 2", **fields)
    >>> f"{value.mean:.2f} {value.std:.2f}"
    '1.71 0.00'
    >>> sorted({value.table for value in published_values("rethinking")})
    ['coefficients', 'figure 4', 'figure 6e', 'figure 6f', 'table 1', 'table 2']

    Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
    calibration; Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of
    overconfidence.
    """
    if unknown := sorted(set(matching) - set(PublishedValue._fields)):
        raise ValueError(f"fields must be among {', '.join(PublishedValue._fields[2:])}, got {unknown[0]!r}")
    papers = sorted({value.paper for value in _all_values()})
    if paper not in papers:
        raise ValueError(f"paper must be one of {', '.join(papers)}, got {paper!r}")
    matching = {"paper": paper, **({} if table is None else {"table": table}), **matching}
    return [value for value in _all_values() if all(getattr(value, name) == field for name, field in matching.items())]


@cache
def _all_values() -> tuple[PublishedValue, ...]:
    text = files("trueup_studies").joinpath("published.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))[1:]
    return tuple(PublishedValue(*row[:6], *map(_float, row[6:])) for row in rows)  # type: ignore[arg-type]


def _float(text: str) -> float:
    return float(text) if text else math.nan


class Reason(NamedTuple):
    """A setting that differs from the paper's."""

    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"another {self.what} ({self.ours} instead of {self.theirs})"


@dataclass(frozen=True)
class ComparedNumber:
    """One metric of one method: our number and the published one, in the paper's unit."""

    method: str
    figure: str
    unit: str
    ours: float
    our_std: float
    theirs: float
    their_std: float
    verdict: Verdict
    """With the same settings "agrees" or "differs"; else it compares the directions of change from the reference."""

    @property
    def digits(self) -> int:
        """Number of digits that the paper prints."""
        return int(DIGITS.get(self.figure, 2))

    @property
    def heading(self) -> str:
        """Name and unit, the heading of its column."""
        name, sign = self.figure.replace("_", ", "), UNITS.get(f"_{self.unit.split(' ')[0]}", {}).get("sign", "")
        return f"{name}, {sign}" if sign else name


@dataclass(frozen=True)
class PaperComparison:
    """Comparison of one group of our results with one data set and network of a published table."""

    table: str
    """Table of the paper."""
    name: str
    """Name of our table."""
    group: str
    dataset: str
    model: str
    reference: str
    """The first method that both have; the changes of the others are relative to it."""
    reasons: tuple[Reason, ...]
    """Settings that differ; empty if data set, network and any published weights are the same."""
    figures: tuple[ComparedNumber, ...]

    def with_verdict(self, verdict: Verdict) -> list[ComparedNumber]:
        """Return the numbers with this verdict."""
        return [figure for figure in self.figures if figure.verdict == verdict]


def compare_with_paper(tables: Mapping[str, Table], rows: Rows, paper: str) -> list[PaperComparison]:
    """Compare each published table with our table that shares most of its methods and metrics, group by group.

    A group of ours with the same data set and network is preferred to all others.
    """
    by_table: dict[str, list[PublishedValue]] = {}
    for value in published_values(paper):
        by_table.setdefault(value.table, []).append(value)
    comparisons = []
    for values in by_table.values():
        shared = {name: _count_shared(ours, values) for name, ours in tables.items()}
        name = max(shared, key=shared.__getitem__, default=None)
        if name is None or not shared[name]:
            continue
        for dataset, model in dict.fromkeys((value.dataset, value.model) for value in values):
            theirs = [value for value in values if (value.dataset, value.model) == (dataset, model)]
            groups = [(group, _reasons(group, rows, dataset, model)) for group in tables[name].groups]
            exact = [(group, _weights_reasons(group, rows, paper)) for group, reasons in groups if not reasons]
            for group, reasons in exact or groups:
                comparisons.append(_compare_group(name, tables[name], group, theirs, reasons))
    return [comparison for comparison in comparisons if comparison.figures]


def _compare_group(
    name: str, ours: Table, group: str, values: Sequence[PublishedValue], reasons: Sequence[Reason]
) -> PaperComparison:
    members = {normalize_name(member): (member, entries) for member, entries in ours.groups[group].items()}
    shared = [value for value in values if normalize_name(value.method) in members]
    reference = shared[0].method if shared else ""
    base: dict[str, tuple[float, float, PublishedValue]] = {}
    figures = []
    for value in shared:
        figure, factor = column_and_factor(value.metric)
        column = next((column for column in ours.columns if column.name == figure), None)
        member, entries = members[normalize_name(value.method)]
        entry = entries.get(figure)
        if column is None or entry is None:
            continue
        mean, std = factor * entry.mean / column.scale, factor * entry.std / column.scale
        if value.method == reference:
            base[figure] = (mean, std, value)
        verdict = _verdict(mean, std, value, base.get(figure), bool(reasons))
        unit = value.metric.removeprefix(figure).replace("_", " ").strip()
        figures.append(ComparedNumber(member, figure, unit, mean, std, value.mean, value.std, verdict))
    first = values[0]
    return PaperComparison(
        first.table, name, group, first.dataset, first.model, reference, tuple(reasons), tuple(figures)
    )


def _verdict(
    mean: float, std: float, value: PublishedValue, base: tuple[float, float, PublishedValue] | None, other: bool
) -> Verdict:
    if math.isnan(mean) or math.isnan(value.mean):
        return "no number"
    if not other:
        return "differs" if _differ(mean, std, value.mean, value.std) else "agrees"
    if base is None or base[2] is value:
        return "no number"  # the reference itself
    ours = _differ(mean, std, base[0], base[1]) * math.copysign(1, mean - base[0])
    theirs = _differ(value.mean, value.std, base[2].mean, base[2].std) * math.copysign(1, value.mean - base[2].mean)
    if not ours * theirs:
        return "within spread"
    return "same direction" if ours * theirs > 0 else "opposite direction"


def _differ(a: float, a_std: float, b: float, b_std: float) -> bool:
    """Return whether two means differ by more than their spread; a single number has no spread."""
    spread = math.hypot(*(0.0 if math.isnan(std) else std for std in (a_std, b_std)))
    return abs(a - b) > max(MAX_STDS * spread, 1e-9)


def _count_shared(ours: Table, values: Iterable[PublishedValue]) -> int:
    members = {normalize_name(member) for group in ours.groups.values() for member in group}
    columns = {column.name for column in ours.columns}
    pairs = {(normalize_name(value.method), column_and_factor(value.metric)[0]) for value in values}
    return sum(method in members and figure in columns for method, figure in pairs)


def _reasons(group: str, rows: Rows, dataset: str, model: str) -> tuple[Reason, ...]:
    """List how a group's data set and network differ from the paper's."""
    data, _, network = group.partition(", ")
    group_rows = [row for row in rows if normalize_name(str(row.get("data", ""))) == normalize_name(data)]
    networks = [network] if network else sorted({str(row["network"]) for row in group_rows if "network" in row})
    reasons = []
    if normalize_name(data) != normalize_name(dataset):
        reasons.append(Reason("data set", data, dataset))
    if model and {normalize_name(name) for name in networks} != {normalize_name(model)}:
        reasons.append(Reason("network", ", ".join(networks) or "not named", model))
    return tuple(reasons)


def _weights_reasons(group: str, rows: Rows, paper: str) -> tuple[Reason, ...]:
    """List how our weights differ from the paper's."""
    if paper not in CALIBRATE_NETWORKS:
        return ()
    ours = {_other_weights(row["how"]) for row in rows if group == f"{row['data']}, {row['network']}"}
    return tuple(Reason("set of weights", name, "the paper's") for name in sorted(ours - {""}))


def _other_weights(how: Mapping[str, Any]) -> str:
    """Return the origin of our weights; empty for the paper's weights and those that timm publishes."""
    if how.get("weights"):
        published = any(how.get("split", ())[2:])  # the third field of `WeightsSplit`; absent if false
        return "" if published else str(how["weights"])
    return "trained here" if "epochs" in how else ""


def column_and_factor(metric: str) -> tuple[str, float]:
    """Return our column for a published metric, and the factor from a plain number to its unit.

    >>> column_and_factor("ece_pct"), column_and_factor("sce_x1e-3"), column_and_factor("ece_pct_after_ts")
    (('ece', 100.0), ('sce', 1000.0), ('ece_temperature', 100.0))
    """
    for unit, facts in UNITS.items():
        if unit in metric:
            name = metric.replace(unit, "")
            return AFTER.get(name, name), facts["factor"]
    return metric, 1.0


def normalize_name(name: str) -> str:
    """Normalise a name: no capitals or punctuation, and the papers' spelling.

    >>> normalize_name("CIFAR-100"), normalize_name("resnet110"), normalize_name("newsgroups20")
    ('cifar100', 'resnet110', '20newsgroups')
    """
    short = re.sub(r"[^a-z0-9*]", "", name.lower().removeprefix("timm:"))
    return str(SPELLINGS.get(short, short))


def comparison_csv(comparisons: Sequence[PaperComparison]) -> str:
    """Format as CSV, one line per number: ours and the published one in the paper's unit, and the verdict."""
    lines = [
        [c.table, c.dataset, c.model, c.group, f.method, f.heading, f.ours, f.our_std, f.theirs, f.their_std, f.verdict]
        for c in comparisons
        for f in c.figures
    ]
    head = ["table", "data", "network", "ours on", "method", "figure"]
    return to_csv(lines, [*head, "ours", "our std", "paper", "paper std", "verdict"])


def comparison_section(paper: str, comparisons: Sequence[PaperComparison], options: Options) -> str:
    """Return the section of a page with our numbers, the published ones, and the settings that explain differences."""
    parts = {"same": [c for c in comparisons if not c.reasons], "others": [c for c in comparisons if c.reasons]}
    known = {"count": _count, "figures": _list_figures, "reasons": _list_reasons, "compared": _comparison_table}
    return render("comparison.html.j2", paper=paper, comparisons=comparisons, oracle=options.oracle, **parts, **known)


def _count(comparisons: Sequence[PaperComparison], verdict: Verdict) -> int:
    return sum(len(comparison.with_verdict(verdict)) for comparison in comparisons)


def _list_reasons(comparisons: Sequence[PaperComparison]) -> str:
    """List each setting once: ours, and the paper's."""
    theirs: dict[tuple[str, str], dict[str, None]] = {}
    for reason in (reason for comparison in comparisons for reason in comparison.reasons):
        theirs.setdefault((reason.what, reason.ours), {})[reason.theirs] = None
    return "; ".join(f"{what} {ours} instead of {', '.join(names)}" for (what, ours), names in theirs.items())


def _list_figures(comparisons: Sequence[PaperComparison], verdict: Verdict) -> str:
    lines = []
    for comparison in comparisons:
        names = [f"{figure.method}: {figure.heading}" for figure in comparison.with_verdict(verdict)]
        if names:
            lines.append(f"{comparison.table}, {comparison.dataset} {comparison.model} ({'; '.join(names)})")
    return "; ".join(lines) + "."


def _comparison_table(comparison: PaperComparison) -> str:
    headings = list(dict.fromkeys(figure.heading for figure in comparison.figures))
    rows: list[list[str | TableCell]] = []
    for method in dict.fromkeys(figure.method for figure in comparison.figures):
        figures = {figure.heading: figure for figure in comparison.figures if figure.method == method}
        rows.append([method, *(_comparison_cell(figures.get(heading)) for heading in headings)])
    title = f"{comparison.table.capitalize()}: {comparison.dataset} {comparison.model}".strip()
    reasons = f": {' and '.join(map(str, comparison.reasons))}" if comparison.reasons else ""
    note = paragraph(f"Ours is {comparison.group}{reasons}.", "note")
    return f"<h3>{escape(title)}</h3>{note}{table(title, ['method', *headings], rows)}"


def _comparison_cell(figure: ComparedNumber | None) -> TableCell:
    if figure is None:
        return TableCell(MISSING)
    ours, theirs = (
        format_mean(mean, std, figure.digits)
        for mean, std in ((figure.ours, figure.our_std), (figure.theirs, figure.their_std))
    )
    warn = figure.verdict in ("differs", "opposite direction")
    return TableCell(ours, note=theirs, mark=MARKS.get(figure.verdict, ""), warn=warn)
