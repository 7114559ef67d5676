"""Losses for training: functions `(logits, labels, *, …) -> (n,)`, each with a Module like torch's own losses."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
