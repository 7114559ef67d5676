"""The figures of a report, one file each: a frozen record of numbers, its computation, its drawings and its words.

What a figure gives to the page, a section with one or several charts, is here; a figure's file is imported when it has
something to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trueup._core.formatting import format_percent
from trueup.reports.audit import RAW, Audit, Pair, method_title
from trueup.reports.plot import draw_plot, plotly_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

__all__ = ["FIGURES", "Panel", "Section", "chart", "draw", "numbers", "sections", "summary"]

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
    after = f"After {lower_title(method_title(audit.chosen))}"
    return [before, Stage("after", after, audit.chosen, audit.pairs[audit.chosen])]


def panels(name: str, shown: Sequence[Any], records: Sequence[Any], **options: Any) -> tuple[Panel, ...]:
    """The charts of stages next to each other, which share their options and have no legends of their own."""
    options |= {"legend": False}
    pairs = zip(shown, records, strict=True)
    return tuple(Panel(f"{name}-{stage.name}", stage.title, record, options) for stage, record in pairs)


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, or a dash."""
    return "–" if np.isnan(share) else format_percent(share, digits)


def lower_title(title: str) -> str:
    """A method's title inside a sentence: no capital, unless it is somebody's name."""
    keep = title.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max")
    return title if keep else title[:1].lower() + title[1:]


def _always(audit: Audit) -> bool:
    return True


def _of_classes(audit: Audit) -> bool:
    """Of an event no class is predicted."""
    return not audit.scores.is_event


def _of_independent_rows(audit: Audit) -> bool:
    return audit.clusters is None


FIGURES: Mapping[str, Callable[[Audit], bool]] = MappingProxyType(
    {
        "reliability": _always,
        "confidence_histogram": _always,
        "groups": lambda audit: bool(audit.scores.group_tables),
        "comparison": _always,
        "method_choice": _always,
        "temperature_sweep": _always,
        "risk_coverage": _of_classes,
        "promise": lambda audit: _of_classes(audit) and _of_independent_rows(audit) and audit.sample_weight is None,
        "net_benefit": lambda audit: audit.scores.is_event and _of_independent_rows(audit),
        "class_errors": _of_classes,
    }
)
"""Module with a record, its `section`, `plot`, `summary` and `numbers` → whether an audit has something to
show, in the order of the page."""


FORECAST_FIGURES = ("pit_histogram", "coverage_curve")
"""The same of forecasts of a number, which have a page of their own."""


def sections(audit: Audit, class_names: Sequence[str] | None) -> Iterator[Section]:
    """The sections of the page about an audit, in order; `names` are those of the classes."""
    for name, shown in FIGURES.items():
        if shown(audit):
            section = import_module(f"{__name__}.{name}").section(audit, class_names)
            if section is not None:
                yield section


def draw(record: Any, ax: Axes | None = None, *, title: str | None = None, **options: Any) -> Axes:
    """Draw a record on the axes given, or on those of a new figure, one column of a paper wide.

    The figure is `draw(record).figure`; `figure.savefig("name.pdf")` writes it. pyplot does not hold it, and no
    setting of matplotlib is changed. `title=""` draws none.

    >>> from trueup.reports import reliability
    >>> ax = draw(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Confidence', 'Accuracy')
    """
    return draw_plot(_figure_of(record).plot(record, **options), ax, title=title)


def chart(record: Any, *, legend: bool = True, **options: Any) -> Figure:
    """An interactive plotly figure of a record, without a title of its own.

    >>> from trueup.reports import reliability
    >>> chart(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1])).layout.xaxis.title.text
    'Confidence'
    """
    return plotly_figure(_figure_of(record).plot(record, **options), legend=legend)


def summary(record: Any, **options: Any) -> str:
    """What a record shows, in a sentence or two.

    >>> from trueup.reports import reliability
    >>> summary(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    'Over 3 rows, confidence and accuracy differ by 0.497 on average (ECE). ...'
    """
    return _figure_of(record).summary(record, **options)


def numbers(record: Any) -> Table:
    """The numbers of a record as a table's head and rows.

    >>> from trueup.reports import reliability
    >>> head, rows = numbers(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1], bins=2))
    >>> rows
    [['50 % – 100 %', '3', '77.6 %', '66.7 %', '33.3 % – 100.0 %']]
    """
    return _figure_of(record).numbers(record)


def _figure_of(record: Any) -> ModuleType:
    """The module of a record, which has imported it."""
    package, _, name = type(record).__module__.rpartition(".")
    if package != __name__ or name not in (*FIGURES, *FORECAST_FIGURES):
        raise TypeError(f"record must be one of trueup.reports's records, got {type(record).__name__}")
    return import_module(f"{package}.{name}")
