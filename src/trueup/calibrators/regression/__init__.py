"""Recalibration of Gaussian forecasts of a number: maps of (μ, σ) and of quantile levels, each with its `fit`."""

from trueup.calibrators.regression.base import Recalibrator
from trueup.calibrators.regression.quantiles import IsotonicQuantiles
from trueup.calibrators.regression.variance import VarianceScaling
from trueup.io.artifacts import load_recalibrator, save_recalibrator

__all__ = ["IsotonicQuantiles", "Recalibrator", "VarianceScaling", "load_recalibrator", "save_recalibrator"]
