"""Training of networks: a loop that measures calibration, tasks, data sets, and calibratability after training."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
