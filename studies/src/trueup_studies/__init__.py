"""Experiments as data: a grid of independent cells, rows in a file, tables and figures out of the rows, and a page."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
