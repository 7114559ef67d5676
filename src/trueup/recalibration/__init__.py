"""Recalibration of Gaussian forecasts of a number: maps of (μ, σ) and of quantile levels, each with its `fit`."""

from trueup.recalibration.base import Recalibrator
from trueup.recalibration.quantiles import IsotonicQuantiles
from trueup.recalibration.variance import VarianceScaling

__all__ = ["IsotonicQuantiles", "Recalibrator", "VarianceScaling"]
