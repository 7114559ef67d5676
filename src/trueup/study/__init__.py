"""Experiments as data: a grid of independent cells, rows in a file, tables out of the rows."""

from __future__ import annotations

from trueup.study.grid import STUDIES, Cell, Options, Study, product
from trueup.study.run import RunSummary, run
from trueup.study.store import Outcome, Store

__all__ = ["STUDIES", "Cell", "Options", "Outcome", "RunSummary", "Store", "Study", "product", "run"]
