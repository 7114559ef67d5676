"""Live networks: their logits over a loader, calibrated networks, Monte-Carlo dropout, corruptions."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
