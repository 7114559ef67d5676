"""Repair (labels) and adapt (none) a network for changed inputs: input maps, batch-norm statistics, the last layer."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
