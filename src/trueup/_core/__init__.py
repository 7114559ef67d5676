"""Private foundations of the library: arrays, bins, one pass over logits, minimisers, splits."""

__version__ = "0.3.0"
"""The version that this package writes into its files."""
