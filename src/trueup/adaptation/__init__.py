"""Correct a network for changed inputs: `repair` uses labelled samples, `adapt` unlabelled ones.

Both can add an input map and renew batch-norm statistics. `repair` can also correct the last layer.
"""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
