"""Experiments as data: a grid of independent cells, rows in a file, tables and figures out of the rows, and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import lazy_names
from trueup.study.grid import STUDIES, Cell, Options, Study, product
from trueup.study.run import RunSummary, run
from trueup.study.store import Outcome, Store

if TYPE_CHECKING:
    from trueup.study.published import PaperComparison, PublishedValue, compare_with_paper, published_values
    from trueup.study.study_page import save_page
    from trueup.study.tables import Column, Table, save_tables, tabulate

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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "published": "PaperComparison PublishedValue compare_with_paper published_values",
            "study_page": "save_page",
            "tables": "Column Table save_tables tabulate",
        },
    )
