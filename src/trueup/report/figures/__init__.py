"""The figures of a report, one file each: a frozen record of numbers, its computation, its drawings and its words."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from trueup.report.figures import (
    class_errors,
    comparison,
    confidence_histogram,
    groups,
    method_choice,
    promise,
    reliability,
    risk_coverage,
    temperature_sweep,
)
from trueup.report.figures.base import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

__all__ = ["FIGURES", "chart", "draw", "numbers", "summary"]

FIGURES: Mapping[type, ModuleType] = MappingProxyType(
    {
        reliability.Reliability: reliability,
        confidence_histogram.ConfidenceHistogram: confidence_histogram,
        groups.GroupErrors: groups,
        comparison.Comparison: comparison,
        method_choice.MethodChoice: method_choice,
        temperature_sweep.TemperatureSweep: temperature_sweep,
        risk_coverage.RiskCoverage: risk_coverage,
        promise.Promise: promise,
        class_errors.ClassErrors: class_errors,
    }
)
"""Record → the module with its `section`, `chart`, `draw`, `summary` and `numbers`, in the order of the page."""


def draw(record: Any, ax: Axes | None = None, *, title: str | None = None, **options: Any) -> Axes:
    """Draw a record on the axes given, or on those of a new figure, one column of a paper wide.

    The figure is `draw(record).figure`; `figure.savefig("name.pdf")` writes it. pyplot does not hold it, and no
    setting of matplotlib is changed. `title=""` draws none.

    >>> from trueup.report import reliability
    >>> ax = draw(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Confidence', 'Accuracy')
    """
    return _figure_of(record).draw(record, ax, title=title, **options)


def chart(record: Any, **options: Any) -> Figure:
    """An interactive plotly figure of a record, without a title of its own.

    >>> from trueup.report import reliability
    >>> chart(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1])).layout.xaxis.title.text
    'Confidence'
    """
    return _figure_of(record).chart(record, **options)


def summary(record: Any, **options: Any) -> str:
    """What a record shows, in a sentence or two.

    >>> from trueup.report import reliability
    >>> summary(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]))
    'Over 3 rows, confidence and accuracy differ by 0.497 on average (ECE). ...'
    """
    return _figure_of(record).summary(record, **options)


def numbers(record: Any) -> Table:
    """The numbers of a record as a table's head and rows.

    >>> from trueup.report import reliability
    >>> head, rows = numbers(reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1], bins=2))
    >>> rows
    [['50 % – 100 %', '3', '77.6 %', '66.7 %', '33.3 % – 100.0 %']]
    """
    return _figure_of(record).numbers(record)


def _figure_of(record: Any) -> ModuleType:
    if type(record) in FIGURES:
        return FIGURES[type(record)]
    module = sys.modules.get(type(record).__module__)  # of the records of forecasts, which have a page of their own
    if module is not None and module.__name__.startswith(f"{__name__}."):
        return module
    raise TypeError(f"record must be one of trueup.report's records, got {type(record).__name__}")
