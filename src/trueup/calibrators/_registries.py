"""Registries of the foundations that belong to the public calibrators."""

from trueup._core.registry import FORECAST_METHODS, METHODS

__all__ = ["FORECAST_METHODS", "METHODS"]
