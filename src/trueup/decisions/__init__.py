"""Decisions from calibrated probabilities: thresholds with a guarantee, prediction sets, label shift and planning."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
