"""Calibrators: fitted maps from logits to logits, one method a file; their classes are found here by name."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
