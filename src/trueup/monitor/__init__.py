"""Calibration monitored over time: `Monitor` in a service, with an alarm whose false-alarm rate is guaranteed."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
