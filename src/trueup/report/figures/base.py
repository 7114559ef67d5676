"""What a figure gives to the page: a section with one or several charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr, bdtrik

from trueup.core.formatting import format_percent
from trueup.report.audit import RAW, Audit, Pair, method_title

Table = tuple[list[str], list[list[str]]]
"""The head and the rows."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One chart of a section."""

    name: str
    """Its id on the page."""
    title: str
    record: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    """For `chart`."""
    summary: str = ""
    """Instead of the summary of the record alone."""


@dataclass(frozen=True, eq=False)
class Section:
    """A section of the page."""

    name: str
    """Its id on the page."""
    title: str
    text: str
    """What a reader needs to know to read the charts."""
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, str], ...] = ()
    """Of all charts together: CSS classes and their text."""
    html: str = ""
    """More to show above the charts, trusted."""


class Stage(NamedTuple):
    """Test predictions before or after calibration."""

    name: str
    title: str
    method: str
    pair: Pair


def stages(audit: Audit) -> list[Stage]:
    """The uncalibrated network and, if a method was chosen, the calibrated one."""
    before = Stage("before", "Uncalibrated", RAW, audit.pairs[RAW])
    if audit.chosen == RAW:
        return [before]
    after = f"After {_lower_title(method_title(audit.chosen))}"
    return [before, Stage("after", after, audit.chosen, audit.pairs[audit.chosen])]


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, or a dash."""
    return "–" if np.isnan(share) else format_percent(share, digits)


def binomial_band(n: int, chance: np.ndarray, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """The shares of n rows beyond which less than `tail` lies on each side, if each row falls in with this chance.

    >>> binomial_band(100, np.array([0.5]), 0.025)
    (array([0.4]), array([0.6]))
    """
    low, high = np.zeros(len(chance)), np.ones(len(chance))
    for k, p in enumerate(chance):
        # bdtrik solves for a real number of rows; the least whole one that leaves no more than the tail is near it.
        ends = []
        for q in (tail, 1 - tail):
            count = max(math.ceil(float(bdtrik(q, n, p))) - 1, 0)
            while bdtr(count, n, p) < q:
                count += 1
            ends.append(min(count, n) / n)
        low[k], high[k] = ends
    return low, high


def _lower_title(title: str) -> str:
    """A method's title inside a sentence: no capital, unless it is somebody's name."""
    keep = title.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max")
    return title if keep else title[:1].lower() + title[1:]
