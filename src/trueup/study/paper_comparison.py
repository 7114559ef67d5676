"""Our numbers beside those that a paper prints: which agree, which differ, and which settings may explain it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trueup.study.grid import Rows
from trueup.study.published import Fact, printed
from trueup.study.tables import Table

UNITS = (("_pct", 100.0), ("_x1e-2", 100.0), ("_x1e-3", 1000.0), ("_nats", 1.0))
AFTER = {"ece_after_ts": "ece_temperature", "ece_after_hb": "ece_histogram"}
"""Where a column of ours is called otherwise than the fact without its unit."""
APART = 2.0
"""Two means are told apart if they differ by more than so many standard deviations of their difference."""
DIGITS = {"accuracy": 2, "ece": 2, "aece": 2, "entropy": 4, "sce": 4}

Verdict = Literal["agrees", "differs", "same way", "other way", "not told apart", "no number"]


class Reason(NamedTuple):
    """A setting that is not the paper's."""

    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"another {self.what} ({self.ours} instead of {self.theirs})"


@dataclass(frozen=True)
class Compared:
    """One figure, in the unit of the paper."""

    method: str
    figure: str
    unit: str
    ours: float
    our_std: float
    theirs: float
    their_std: float
    verdict: Verdict
    """Of the same data set and network "agrees" or "differs"; of others which way it departs from the reference."""

    @property
    def digits(self) -> int:
        """As the paper prints it."""
        return DIGITS.get(self.figure, 2)


@dataclass(frozen=True)
class Beside:
    """One of our groups beside one data set and network of a printed table."""

    table: str
    """The paper's."""
    name: str
    """Of our table."""
    group: str
    dataset: str
    model: str
    reference: str
    """The first method of both, from which the others depart."""
    reasons: tuple[Reason, ...]
    """Settings that differ; none where data set and network are the same."""
    figures: tuple[Compared, ...]

    def of(self, *verdicts: Verdict) -> list[Compared]:
        """The figures with one of these verdicts."""
        return [figure for figure in self.figures if figure.verdict in verdicts]


def beside(tables: Mapping[str, Table], rows: Rows, paper: str) -> list[Beside]:
    """Each printed table beside the one of ours that shares the most of its methods and figures, group by group.

    Where one of our groups is of the same data set and network, the others are not set beside the same numbers.
    """
    facts: dict[str, list[Fact]] = {}
    for fact in printed(paper):
        facts.setdefault(fact.table, []).append(fact)
    found = []
    for table, known in facts.items():
        shared = {name: _shared(ours, known) for name, ours in tables.items()}
        name = max(shared, key=shared.__getitem__, default=None)
        if name is None or not shared[name]:
            continue
        for dataset, model in dict.fromkeys((fact.dataset, fact.model) for fact in known):
            alike = [fact for fact in known if (fact.dataset, fact.model) == (dataset, model)]
            pairs = [(group, _reasons(group, rows, dataset, model)) for group in tables[name].groups]
            exact = [pair for pair in pairs if not pair[1]]
            for group, reasons in exact or pairs:
                found.append(_beside(table, name, tables[name], group, alike, reasons))
    return [each for each in found if each.figures]


def _beside(table: str, name: str, ours: Table, group: str, facts: Sequence[Fact], reasons: Sequence[Reason]) -> Beside:
    members = {plain_name(member): (member, entries) for member, entries in ours.groups[group].items()}
    here = [fact for fact in facts if plain_name(fact.method) in members]
    reference = here[0].method if here else ""
    base: dict[str, tuple[float, float, Fact]] = {}
    figures = []
    for fact in here:
        figure, factor = figure_of(fact.metric)
        column = next((column for column in ours.columns if column.name == figure), None)
        member, entries = members[plain_name(fact.method)]
        entry = entries.get(figure)
        if column is None or entry is None:
            continue
        mean, std = factor * entry.mean / column.scale, factor * entry.std / column.scale
        if fact.method == reference:
            base[figure] = (mean, std, fact)
        verdict = _verdict(mean, std, fact, base.get(figure), bool(reasons))
        unit = fact.metric.removeprefix(figure).replace("_", " ").strip()
        figures.append(Compared(member, figure, unit, mean, std, fact.mean, fact.std, verdict))
    return Beside(table, name, group, facts[0].dataset, facts[0].model, reference, tuple(reasons), tuple(figures))


def _verdict(mean: float, std: float, fact: Fact, base: tuple[float, float, Fact] | None, other: bool) -> Verdict:
    if math.isnan(mean) or math.isnan(fact.mean):
        return "no number"
    if not other:
        return "differs" if _told(mean, std, fact.mean, fact.std) else "agrees"
    if base is None or base[2] is fact:
        return "no number"  # the reference departs from nothing
    ours = _told(mean, std, base[0], base[1]) * math.copysign(1, mean - base[0])
    theirs = _told(fact.mean, fact.std, base[2].mean, base[2].std) * math.copysign(1, fact.mean - base[2].mean)
    if not ours * theirs:
        return "not told apart"
    return "same way" if ours * theirs > 0 else "other way"


def _told(a: float, a_std: float, b: float, b_std: float) -> bool:
    """Whether two means differ by more than their spread; one number alone has none."""
    spread = math.hypot(*(0.0 if math.isnan(std) else std for std in (a_std, b_std)))
    return abs(a - b) > max(APART * spread, 1e-9)


def _shared(ours: Table, facts: Iterable[Fact]) -> int:
    members = {plain_name(member) for group in ours.groups.values() for member in group}
    columns = {column.name for column in ours.columns}
    pairs = {(plain_name(fact.method), figure_of(fact.metric)[0]) for fact in facts}
    return sum(method in members and figure in columns for method, figure in pairs)


def _reasons(group: str, rows: Rows, dataset: str, model: str) -> tuple[Reason, ...]:
    """What of a group's data set and network is not the paper's."""
    data, _, network = group.partition(", ")
    mine = [row for row in rows if plain_name(str(row.get("data", ""))) == plain_name(data)]
    networks = [network] if network else sorted({str(row["network"]) for row in mine if "network" in row})
    reasons = []
    if plain_name(data) != plain_name(dataset):
        reasons.append(Reason("data set", data, dataset))
    if model and {plain_name(name) for name in networks} != {plain_name(model)}:
        reasons.append(Reason("network", ", ".join(networks) or "not told", model))
    return tuple(reasons)


def figure_of(metric: str) -> tuple[str, float]:
    """The column of ours that a printed metric is, and what a plain number is multiplied with for its unit.

    >>> figure_of("ece_pct"), figure_of("sce_x1e-3"), figure_of("ece_pct_after_ts")
    (('ece', 100.0), ('sce', 1000.0), ('ece_temperature', 100.0))
    """
    for unit, factor in UNITS:
        if unit in metric:
            name = metric.replace(unit, "")
            return AFTER.get(name, name), factor
    return metric, 1.0


def plain_name(name: str) -> str:
    """A name without case and punctuation, under the one of its spellings that papers use.

    >>> plain_name("CIFAR-100"), plain_name("resnet110"), plain_name("newsgroups20")
    ('cifar100', 'resnet110', '20newsgroups')
    """
    short = re.sub(r"[^a-z0-9*]", "", name.lower().removeprefix("timm:"))
    return SPELLINGS.get(short, short)


SPELLINGS: Mapping[str, Any] = {
    "newsgroups20": "20newsgroups",
    "imagenet": "imagenet1k",
    "wrn40x10": "wideresnet4010",
    "textcnn": "8layer1dcnn",
    "vitsmallpatch16224": "vits16",
    "mixerb16224": "mlpmixerb16",
}
"""Ours, or timm's, on the left."""
