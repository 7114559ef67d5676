"""Measures and repairs the calibration of predicted probabilities.

Every public name and package is reachable from here; nothing is imported until it is used.
"""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
