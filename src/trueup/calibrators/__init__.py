"""Calibrators: fitted maps from logits to logits, one method a file; their classes are found here by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import CALIBRATORS, lazy_names

if TYPE_CHECKING:
    from trueup.calibrators.base import Calibrator, Identity, TopLabel
    from trueup.calibrators.bbq import BBQ
    from trueup.calibrators.compose import Chain, OneVsRest, chain, choose, cross_fit, grid, one_vs_rest, refinement
    from trueup.calibrators.diagonal import Diagonal
    from trueup.calibrators.ets import EnsembleTemperature
    from trueup.calibrators.fold_networks import OrderInvariant, Residual
    from trueup.calibrators.groupwise import PerGroup, per_group
    from trueup.calibrators.histogram import Histogram, HistogramOvR
    from trueup.calibrators.imax import IMax, IMaxShared
    from trueup.calibrators.isotonic import Isotonic, IsotonicOvR, IsotonicPooled
    from trueup.calibrators.linear import Dirichlet, Linear, Matrix, Structured, Vector
    from trueup.calibrators.logistic import Beta, Platt, Quadratic
    from trueup.calibrators.low_rank import LowRank
    from trueup.calibrators.multilabel import PerLabel, per_label
    from trueup.calibrators.pool import Mixture, UniformMixture
    from trueup.calibrators.prompt_bias import average_orders, contextual_bias, position_bias
    from trueup.calibrators.proximity_aware import BinMeanShift, DensityRatio
    from trueup.calibrators.regression import IsotonicQuantiles, Recalibrator, VarianceScaling
    from trueup.calibrators.scaling_binning import ScalingBinning
    from trueup.calibrators.shrunken_histogram import ShrunkenHistogram
    from trueup.calibrators.smoothing_spline import SmoothingSpline
    from trueup.calibrators.spline import Spline
    from trueup.calibrators.temperature import Temperature
    from trueup.calibrators.venn_abers import VennAbers

__all__ = [
    "BBQ",
    "Beta",
    "BinMeanShift",
    "Calibrator",
    "Chain",
    "DensityRatio",
    "Diagonal",
    "Dirichlet",
    "EnsembleTemperature",
    "Histogram",
    "HistogramOvR",
    "IMax",
    "IMaxShared",
    "Identity",
    "Isotonic",
    "IsotonicOvR",
    "IsotonicPooled",
    "IsotonicQuantiles",
    "Linear",
    "LowRank",
    "Matrix",
    "Mixture",
    "OneVsRest",
    "OrderInvariant",
    "PerGroup",
    "PerLabel",
    "Platt",
    "Quadratic",
    "Recalibrator",
    "Residual",
    "ScalingBinning",
    "ShrunkenHistogram",
    "SmoothingSpline",
    "Spline",
    "Structured",
    "Temperature",
    "TopLabel",
    "UniformMixture",
    "VarianceScaling",
    "Vector",
    "VennAbers",
    "average_orders",
    "chain",
    "choose",
    "contextual_bias",
    "cross_fit",
    "grid",
    "one_vs_rest",
    "per_group",
    "per_label",
    "position_bias",
    "refinement",
]

if not TYPE_CHECKING:  # a checker is to find what is misspelt
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "base": "Calibrator TopLabel",
            "compose": "chain choose cross_fit grid one_vs_rest refinement",
            "groupwise": "per_group",
            "multilabel": "per_label",
            "prompt_bias": "average_orders contextual_bias position_bias",
            "regression": "IsotonicQuantiles Recalibrator VarianceScaling",
        },
        CALIBRATORS,
    )
