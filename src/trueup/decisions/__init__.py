"""What to do with an honest probability: thresholds with a promise, prediction sets, label shift, performance without
labels, label planning, net benefit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import lazy_names

if TYPE_CHECKING:
    from trueup.decisions.conformal_regression import (
        ConformalQuantiles,
        ConformalResiduals,
        load_conformal,
        save_conformal,
    )
    from trueup.decisions.decision_curve import NetBenefit, net_benefit
    from trueup.decisions.label_shift import PriorEstimate, estimate_prior, shift_prior
    from trueup.decisions.planning import Plan, plan
    from trueup.decisions.prediction_sets import (
        PredictionSets,
        SetScores,
        evaluate_sets,
        load_prediction_sets,
        save_prediction_sets,
    )
    from trueup.decisions.recheck import Recheck
    from trueup.decisions.thresholds import GroupThresholds, Threshold, threshold
    from trueup.decisions.unlabelled_performance import PerformanceEstimate, estimate_performance


__all__ = [
    "ConformalQuantiles",
    "ConformalResiduals",
    "GroupThresholds",
    "NetBenefit",
    "PerformanceEstimate",
    "Plan",
    "PredictionSets",
    "PriorEstimate",
    "Recheck",
    "SetScores",
    "Threshold",
    "estimate_performance",
    "estimate_prior",
    "evaluate_sets",
    "load_conformal",
    "load_prediction_sets",
    "net_benefit",
    "plan",
    "save_conformal",
    "save_prediction_sets",
    "shift_prior",
    "threshold",
]

if not TYPE_CHECKING:  # a checker is to find what is misspelt
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "conformal_regression": "ConformalQuantiles ConformalResiduals load_conformal save_conformal",
            "decision_curve": "NetBenefit net_benefit",
            "label_shift": "PriorEstimate estimate_prior shift_prior",
            "planning": "Plan plan",
            "prediction_sets": "PredictionSets SetScores evaluate_sets load_prediction_sets save_prediction_sets",
            "recheck": "Recheck",
            "thresholds": "GroupThresholds Threshold threshold",
            "unlabelled_performance": "PerformanceEstimate estimate_performance",
        },
    )
