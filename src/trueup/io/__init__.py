"""Files: predictions in many formats, artifacts of what was fitted, shards, and atomic writes."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
