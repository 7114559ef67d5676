"""Training networks: a loop that watches calibration, tasks, data sets, and how calibratable losses leave networks."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
