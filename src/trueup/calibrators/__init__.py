"""Calibrators: fitted maps from logits to logits, one method a file."""
