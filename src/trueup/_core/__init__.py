"""Private foundations: arrays, bins, one pass over logits, minimisers, splits. Everything else stands on them."""

__version__ = "0.2.0"
"""Files made by this package carry it."""
