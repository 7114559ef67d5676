"""What to do with an honest probability: thresholds with a promise, prediction sets, label shift, performance without
labels, label planning, net benefit."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
