"""What the papers print, to set beside what was run here."""

from __future__ import annotations

import csv
import math
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Fact(NamedTuple):
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


def printed(paper: str, table: str | None = None, **wanted: str) -> list[Fact]:
    """The numbers of a paper, or of one of its tables, with these values in the other fields, in printed order.

    >>> wanted = {"model": "ResNet-110", "method": "Temperature Scaling", "metric": "ece_pct"}
    >>> [fact] = printed("neural-clamping", "table 2", **wanted)
    >>> f"{fact.mean:.2f} {fact.std:.2f}"
    '1.71 0.00'
    >>> sorted({fact.table for fact in printed("rethinking")})
    ['coefficients', 'figure 4', 'figure 6e', 'figure 6f', 'table 1', 'table 2']

    Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
    calibration; Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of
    overconfidence.
    """
    if unknown := sorted(set(wanted) - set(Fact._fields)):
        raise ValueError(f"fields must be among {', '.join(Fact._fields[2:])}, got {unknown[0]!r}")
    papers = sorted({fact.paper for fact in _facts()})
    if paper not in papers:
        raise ValueError(f"paper must be one of {', '.join(papers)}, got {paper!r}")
    wanted = {"paper": paper, **({} if table is None else {"table": table}), **wanted}
    return [fact for fact in _facts() if all(getattr(fact, name) == value for name, value in wanted.items())]


@cache
def _facts() -> tuple[Fact, ...]:
    text = files("trueup.study").joinpath("published.csv").read_text(encoding="utf-8")
    found = []
    for paper, table, dataset, model, method, metric, mean, std in list(csv.reader(text.splitlines()))[1:]:
        found.append(Fact(paper, table, dataset, model, method, metric, _number(mean), _number(std)))
    return tuple(found)


def _number(text: str) -> float:
    return float(text) if text else math.nan
