"""Experiments as data: a grid of independent cells, rows in a file, tables and figures out of the rows, and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import lazy_attribute
from trueup.study.grid import STUDIES, Cell, Options, Study, product
from trueup.study.run import RunSummary, run
from trueup.study.store import Outcome, Store

if TYPE_CHECKING:
    from trueup.study.published import PaperComparison, PublishedValue, compare_with_paper, published_values
    from trueup.study.study_page import save_page
    from trueup.study.tables import Column, Table, save_tables, tabulate

_MODULES = {
    "Column": "tables",
    "PaperComparison": "published",
    "PublishedValue": "published",
    "Table": "tables",
    "compare_with_paper": "published",
    "published_values": "published",
    "save_page": "study_page",
    "save_tables": "tables",
    "tabulate": "tables",
}

__all__ = [
    "STUDIES",
    "Cell",
    "Column",
    "Options",
    "Outcome",
    "PaperComparison",
    "PublishedValue",
    "RunSummary",
    "Store",
    "Study",
    "Table",
    "compare_with_paper",
    "product",
    "published_values",
    "run",
    "save_page",
    "save_tables",
    "tabulate",
]


if not TYPE_CHECKING:  # a checker is to find what is misspelt

    def __getattr__(name: str) -> Any:
        return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
