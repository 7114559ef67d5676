"""Neural Clamping: an input shift and a temperature fitted to a frozen network."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
