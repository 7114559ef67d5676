"""What a figure gives to the page: a section with one or several charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

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


def _lower_title(title: str) -> str:
    """A method's title inside a sentence: no capital, unless it is somebody's name."""
    keep = title.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max")
    return title if keep else title[:1].lower() + title[1:]
