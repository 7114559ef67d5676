"""The figures of a report, one file each: a frozen record of numbers, its computation, its drawings and its words.

What a figure gives to the page, a section with one or several charts, is here; a figure's file is imported when it has
something to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trueup._core.formatting import format_percent
from trueup.reports.audit import RAW, Audit, method_title
from trueup.reports.plot import draw_plot, plotly_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

    from trueup.reports.forecasts import ForecastAudit

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
    arrays: tuple[Any, ...]
    """Logits and labels, or the three arrays of a forecast."""


def stages(audit: Audit | ForecastAudit) -> list[Stage]:
    """The predictions as they are and, if a method was chosen, after it."""
    chosen, arrays = audit.chosen, audit.pairs if isinstance(audit, Audit) else audit.triples
    first, title = ("Uncalibrated", method_title(chosen)) if isinstance(audit, Audit) else ("As forecast", audit.title)
    before = Stage("before", first, RAW, arrays[RAW])
    after = Stage("after", f"After {lower_title(title)}", chosen, arrays[chosen])
    return [before] if chosen == RAW else [before, after]


def panels(name: str, audit: Audit | ForecastAudit, records: Sequence[Any], **options: Any) -> tuple[Panel, ...]:
    """The charts of stages next to each other, which share their options and have no legends of their own."""
    options |= {"legend": False}
    pairs = zip(stages(audit), records, strict=True)
    return tuple(Panel(f"{name}-{stage.name}", stage.title, record, options) for stage, record in pairs)


class Words(NamedTuple):
    """The words for predictions and outcomes."""

    score: str
    outcome: str
    over: str
    under: str
    right: str
    wrong: str
    mean: str
    rate: str


def words_for(event: bool) -> Words:
    """The words for the probability of an event, or for the confidence of a prediction."""
    if event:
        names = "predicted probability", "observed frequency", "predicted too high", "predicted too low"
        return Words(*names, "happened", "did not", "mean predicted", "observed")
    names = "confidence", "accuracy", "overconfident", "underconfident"
    return Words(*names, "right", "wrong", "mean confidence", "accuracy")


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, or a dash."""
    return "–" if np.isnan(share) else format_percent(share, digits)


def band_title(level: float) -> str:
    """The name of the band of a calibrated network in legends and tables."""
    return f"{format_percent(level)} band if calibrated"


def lower_title(title: str) -> str:
    """A method's title inside a sentence: no capital, unless it is somebody's name."""
    keep = title.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max", "Venn–Abers")
    return title if keep else title[:1].lower() + title[1:]


def _figures(audit: Audit | ForecastAudit) -> list[str]:
    """The modules whose figures suit an audit, in the order of the page.

    Each has a record and its `section`, `plot`, `summary` and `numbers`.
    """
    if not isinstance(audit, Audit):
        return ["pit_histogram", "coverage_curve"]
    names = ["reliability", "confidence_histogram", "groups", "comparison", "method_choice", "temperature_sweep"]
    independent = audit.clusters is None
    if audit.scores.is_event:  # no class is predicted
        return [*names, "net_benefit"] if independent else names
    promise = ["promise"] if independent and audit.sample_weight is None else []
    return [*names, "risk_coverage", *promise, "class_errors"]


def sections(audit: Audit | ForecastAudit, class_names: Sequence[str] | None) -> Iterator[Section]:
    """The sections of the page about an audit, in order."""
    for name in _figures(audit):
        options = {"class_names": class_names} if name == "class_errors" else {}
        section = import_module(f"{__name__}.{name}").section(audit, **options)
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
    module = type(record).__module__
    if not module.startswith(f"{__name__}."):
        raise TypeError(f"record must be one of trueup.reports's records, got {type(record).__name__}")
    return import_module(module)
