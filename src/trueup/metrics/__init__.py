"""Measures of calibration, `(logits, labels, *, …) -> float`; `METRICS` maps their names to them.

A metric's module is imported when the metric is used.
"""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
