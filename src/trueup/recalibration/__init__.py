"""Recalibration of Gaussian forecasts of a number: maps of (μ, σ) and of quantile levels, each with its `fit`."""

from trueup.recalibration.base import Recalibrator
from trueup.recalibration.file import load_recalibrator, save_recalibrator
from trueup.recalibration.quantiles import IsotonicQuantiles
from trueup.recalibration.variance import VarianceScaling

__all__ = ["IsotonicQuantiles", "Recalibrator", "VarianceScaling", "load_recalibrator", "save_recalibrator"]
