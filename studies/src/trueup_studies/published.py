"""Published values of the papers, and the comparison of our numbers with them."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from trueup.reports.html import TableCell, paragraph, section, table
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.tables import Table, format_mean, to_csv

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
EXPLANATION = " ".join(_WORDS["explanation"].split())
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


class ComparedNumber(NamedTuple):
    """One metric of one method: our number and the published one, in the paper's unit."""

    table: str
    """Table of the paper."""
    dataset: str
    model: str
    group: str
    """Our data set and network."""
    settings: str
    """Settings that differ from the paper's; empty if data set, network and any published weights are the same."""
    method: str
    figure: str
    heading: str
    """Name and unit of the metric."""
    ours: float
    our_std: float
    theirs: float
    their_std: float
    verdict: Verdict
    """With the same settings "agrees" or "differs"; else it compares the directions of change from the first method."""


def compare_with_paper(tables: Mapping[str, Table], rows: Rows, paper: str) -> list[ComparedNumber]:
    """Compare each published table with our table that shares most of its methods and metrics, group by group.

    A group of ours with the same data set and network is preferred to all others.
    """
    by_table: dict[str, list[PublishedValue]] = {}
    for value in published_values(paper):
        by_table.setdefault(value.table, []).append(value)
    numbers: list[ComparedNumber] = []
    for values in by_table.values():
        shared = {name: _count_shared(ours, values) for name, ours in tables.items()}
        name = max(shared, key=shared.__getitem__, default=None)
        if name is None or not shared[name]:
            continue
        for dataset, model in dict.fromkeys((value.dataset, value.model) for value in values):
            theirs = [value for value in values if (value.dataset, value.model) == (dataset, model)]
            groups = [(group, _settings(group, rows, dataset, model)) for group in tables[name].groups]
            exact = [(group, _weights(group, rows, paper)) for group, settings in groups if not settings]
            for group, settings in exact or groups:
                numbers += _compare_group(tables[name], group, theirs, settings)
    return numbers


def _compare_group(
    ours: Table, group: str, values: Sequence[PublishedValue], settings: str
) -> Iterator[ComparedNumber]:
    members = {normalize_name(member): (member, entries) for member, entries in ours.groups[group].items()}
    shared = [value for value in values if normalize_name(value.method) in members]
    base: dict[str, tuple[float, float, PublishedValue]] = {}
    for value in shared:
        figure, factor = column_and_factor(value.metric)
        column = next((column for column in ours.columns if column.name == figure), None)
        member, entries = members[normalize_name(value.method)]
        entry = entries.get(figure)
        if column is None or entry is None:
            continue
        mean, std = factor * entry.mean / column.scale, factor * entry.std / column.scale
        if value.method == shared[0].method:
            base[figure] = (mean, std, value)
        verdict = _verdict(mean, std, value, base.get(figure), bool(settings))
        sign = next((facts["sign"] for unit, facts in UNITS.items() if unit in value.metric), "")
        heading = f"{figure.replace('_', ', ')}, {sign}" if sign else figure.replace("_", ", ")
        row = value.table, value.dataset, value.model, group, settings
        yield ComparedNumber(*row, member, figure, heading, mean, std, value.mean, value.std, verdict)


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


def _settings(group: str, rows: Rows, dataset: str, model: str) -> str:
    """Say how a group's data set and network differ from the paper's."""
    data, _, network = group.partition(", ")
    group_rows = [row for row in rows if normalize_name(str(row.get("data", ""))) == normalize_name(data)]
    networks = [network] if network else sorted({str(row["network"]) for row in group_rows if "network" in row})
    differences = [f"data set {data} instead of {dataset}"] * (normalize_name(data) != normalize_name(dataset))
    if model and {normalize_name(name) for name in networks} != {normalize_name(model)}:
        differences.append(f"network {', '.join(networks) or 'not named'} instead of {model}")
    return "; ".join(differences)


def _weights(group: str, rows: Rows, paper: str) -> str:
    """Say how our weights differ from the paper's."""
    if paper not in CALIBRATE_NETWORKS:
        return ""
    ours = {_other_weights(row["how"]) for row in rows if group == f"{row['data']}, {row['network']}"}
    return "; ".join(f"weights {name} instead of the paper's" for name in sorted(ours - {""}))


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


def comparison_csv(numbers: Sequence[ComparedNumber]) -> str:
    """Format as CSV, one line per number: ours and the published one in the paper's unit, and the verdict."""
    lines = [
        [n.table, n.dataset, n.model, n.group, n.method, n.heading, n.ours, n.our_std, n.theirs, n.their_std, n.verdict]
        for n in numbers
    ]
    head = ["table", "data", "network", "ours on", "method", "figure"]
    return to_csv(lines, [*head, "ours", "our std", "paper", "paper std", "verdict"])


def comparison_section(paper: str, numbers: Sequence[ComparedNumber], options: Options) -> str:
    """Return the section of a page with our numbers, the published ones, and the settings that explain differences."""
    title = "Comparison with the paper"
    if not numbers:
        none = "None of the runs is in one of the paper's tables." if paper else "No published numbers are known."
        return section("paper", title, paragraph(none))
    lines: list[str | list[str | TableCell]] = []
    for n in numbers:
        heading = f"{n.table.capitalize()}: {n.dataset} {n.model}; ours is {n.group}" + f" ({n.settings})" * bool(
            n.settings
        )
        if heading not in lines:
            lines.append(heading)
        digits = int(DIGITS.get(n.figure, 2))
        ours, theirs = (format_mean(*pair, digits) for pair in ((n.ours, n.our_std), (n.theirs, n.their_std)))
        warn = n.verdict in ("differs", "opposite direction")
        lines.append([n.method, n.heading, TableCell(ours, note=theirs, mark=MARKS.get(n.verdict, ""), warn=warn)])
    counts = ", ".join(f"{verdict} {count}" for verdict, count in Counter(n.verdict for n in numbers).items())
    half = "test samples, as an oracle" if options.oracle else "validation samples"
    words = f"{EXPLANATION} Numbers by verdict: {counts}. Coefficients were chosen on {half}."
    link = '<p class="files">all numbers: <a href="paper.csv">csv</a></p>'
    return section("paper", title, paragraph(words), link, table(title, ["method", "metric", "ours, paper"], lines))
