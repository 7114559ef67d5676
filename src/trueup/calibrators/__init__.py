"""Calibrators: fitted maps from logits to logits, and functions that fit and combine them."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
