"""Reports on calibration: an audit of a network and its calibration, figures as frozen records, and the page."""

from trueup._core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
