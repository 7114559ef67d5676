"""The figures of a report, one file per figure: a frozen record of numbers, its computation, drawing and summary.

Each file also makes the figure's section of the page. It is imported only when the page needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from trueup._core.formatting import format_percent
from trueup.reports.audit import RAW, Audit, method_title
from trueup.reports.audit import percent as percent
from trueup.reports.plot import Chart, draw_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trueup.reports.forecasts import ForecastAudit

Table = tuple[list[str], list[list[str]]]
"""Head and rows of a table."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One chart of a section."""

    name: str
    """HTML id."""
    title: str
    record: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `chart`."""
    summary: str = ""
    """Text that replaces the record's own summary."""
    numbered: bool = True
    """Whether the page has a folded table of the record's numbers."""


@dataclass(frozen=True, eq=False)
class Section:
    """A section of the page."""

    name: str
    """HTML id."""
    title: str
    text: str
    """Explanation of the charts."""
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, str], ...] = ()
    """Common legend of the charts: CSS classes and their text."""
    html: str = ""
    """Further HTML above the charts; it is not escaped."""


class Stage(NamedTuple):
    """Test predictions before or after calibration."""

    name: str
    title: str
    method: str
    arrays: tuple[Any, ...]
    """Logits and labels, or the three arrays of a forecast."""


def stages(audit: Audit | ForecastAudit) -> list[Stage]:
    """Return the original predictions and, if a method was chosen, those after it."""
    chosen, arrays = audit.chosen, audit.pairs if isinstance(audit, Audit) else audit.triples
    first, title = ("Uncalibrated", method_title(chosen)) if isinstance(audit, Audit) else ("As forecast", audit.title)
    before = Stage("before", first, RAW, arrays[RAW])
    after = Stage("after", f"After {lower_title(title)}", chosen, arrays[chosen])
    return [before] if chosen == RAW else [before, after]


def panels(name: str, audit: Audit | ForecastAudit, records: Sequence[Any], **options: Any) -> tuple[Panel, ...]:
    """Return the charts of all stages, side by side, with common options and without legends."""
    options |= {"legend": False}
    pairs = zip(stages(audit), records, strict=True)
    return tuple(Panel(f"{name}-{stage.name}", stage.title, record, options) for stage, record in pairs)


class Words(NamedTuple):
    """Terms for predictions and outcomes."""

    score: str
    outcome: str
    over: str
    under: str
    right: str
    wrong: str
    mean: str
    rate: str


def words_for(event: bool) -> Words:
    """Return the terms for the probability of an event, or for the confidence of a prediction."""
    if event:
        names = "predicted probability", "observed frequency", "predicted too high", "predicted too low"
        return Words(*names, "happened", "did not", "mean predicted", "observed")
    names = "confidence", "accuracy", "overconfident", "underconfident"
    return Words(*names, "right", "wrong", "mean confidence", "accuracy")


def band_title(level: float) -> str:
    """Return the name of the band of a calibrated network in legends and tables."""
    return f"{format_percent(level)} band if calibrated"


def lower_title(title: str) -> str:
    """Return a method's title for use inside a sentence: lower case, except names of people and abbreviations."""
    keep = title.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max", "Venn–Abers")
    return title if keep else title[:1].lower() + title[1:]


def _figures(audit: Audit | ForecastAudit) -> list[str]:
    """Return the modules of the figures for an audit, in the order of the page.

    Each has a record class, and functions `section`, `plot`, `summary` and `numbers`.
    """
    if not isinstance(audit, Audit):
        return ["pit_histogram", "coverage_curve"]
    names = ["reliability", "confidence_histogram", "groups", "comparison", "temperature_sweep"]
    independent = audit.clusters is None
    if audit.scores.is_event:  # no class is predicted
        return [*names, "net_benefit"] if independent else names
    promise = ["promise"] if independent and audit.sample_weight is None else []
    return [*names, "risk_coverage", *promise, "class_errors"]


def sections(audit: Audit | ForecastAudit, class_names: Sequence[str] | None) -> Iterator[Section]:
    """Yield the sections of an audit's page, in order."""
    for name in _figures(audit):
        options = {"class_names": class_names} if name == "class_errors" else {}
        section = import_module(f"{__name__}.{name}").section(audit, **options)
        if section is not None:
            yield section


def draw(record: Any, ax: Axes | None = None, *, title: str | None = None, **options: Any) -> Axes:
    """Draw a record with matplotlib.

    The figure is `draw(record).figure`, and `figure.savefig("name.pdf")` writes it. pyplot does not register it, and
    no setting of matplotlib is changed.

    Parameters
    ----------
    record
        A record of `trueup.reports`, such as `reliability(logits, labels)`.
    ax
        Axes to draw on; by default those of a new figure one column wide.
    title
        Title; by default that of the record. An empty string draws none.
    **options
        Options of the figure.

    Returns
    -------
    Axes
        The axes.

    Examples
    --------
    >>> from trueup.reports import reliability
    >>> ax = draw(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Confidence', 'Accuracy')
    """
    return draw_plot(_figure_of(record).plot(record, **options), ax, title=title)


def chart(record: Any, *, legend: bool = True, **options: Any) -> Chart:
    """Return an interactive chart of a record, without a title; notebooks show it.

    Parameters
    ----------
    record
        A record of `trueup.reports`.
    legend
        Whether to show the legend.
    **options
        Options of the figure.

    Returns
    -------
    Chart
        The chart: `.html()` is a page with the chart alone.

    Examples
    --------
    >>> from trueup.reports import reliability
    >>> drawn = chart(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    >>> drawn.to_dict()["x"]["title"], len(drawn.html()) < 30_000
    ('Confidence', True)
    """
    return Chart(_figure_of(record).plot(record, **options), legend)


def summary(record: Any, **options: Any) -> str:
    """Summarise a record in a few sentences.

    Parameters
    ----------
    record
        A record of `trueup.reports`.
    **options
        Options of the figure.

    Returns
    -------
    str
        The sentences.

    Examples
    --------
    >>> from trueup.reports import reliability
    >>> summary(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    'Over 3 rows, confidence and accuracy differ by 0.4965 on average (ECE). ...'
    """
    return _figure_of(record).summary(record, **options)


def numbers(record: Any) -> Table:
    """Return the numbers of a record as a table's head and rows.

    Parameters
    ----------
    record
        A record of `trueup.reports`.

    Returns
    -------
    tuple[list[str], list[list[str]]]
        Head and rows.

    Examples
    --------
    >>> from trueup.reports import reliability
    >>> head, rows = numbers(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1], bins=2))
    >>> rows
    [['50 % – 100 %', '3', '77.6 %', '66.7 %', '33.3 % – 100.0 %']]
    """
    return _figure_of(record).numbers(record)


def _figure_of(record: Any) -> ModuleType:
    """Return the module that defines a record's class."""
    module = type(record).__module__
    if not module.startswith(f"{__name__}."):
        raise TypeError(f"record must be a record of trueup.reports, got {type(record).__name__}")
    return import_module(module)
