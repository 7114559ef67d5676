"""Experiments as data: a grid of independent cells, rows in a file, tables out of the rows."""

from __future__ import annotations

from trueup.study.cell import Cell
from trueup.study.grid import STUDIES, Options, Study, product
from trueup.study.run import Ran, executor_for, run
from trueup.study.store import Outcome, Store

__all__ = ["STUDIES", "Cell", "Options", "Outcome", "Ran", "Store", "Study", "executor_for", "product", "run"]
