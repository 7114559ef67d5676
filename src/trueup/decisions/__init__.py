"""What to do with an honest probability: thresholds with a promise, prediction sets, label shift, performance without
labels, label planning, net benefit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import lazy_attribute

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

_MODULES = {
    "ConformalQuantiles": "conformal_regression",
    "ConformalResiduals": "conformal_regression",
    "GroupThresholds": "thresholds",
    "NetBenefit": "decision_curve",
    "PerformanceEstimate": "unlabelled_performance",
    "Plan": "planning",
    "PredictionSets": "prediction_sets",
    "PriorEstimate": "label_shift",
    "Recheck": "recheck",
    "SetScores": "prediction_sets",
    "Threshold": "thresholds",
    "estimate_performance": "unlabelled_performance",
    "estimate_prior": "label_shift",
    "evaluate_sets": "prediction_sets",
    "load_conformal": "conformal_regression",
    "load_prediction_sets": "prediction_sets",
    "net_benefit": "decision_curve",
    "plan": "planning",
    "save_conformal": "conformal_regression",
    "save_prediction_sets": "prediction_sets",
    "shift_prior": "label_shift",
    "threshold": "thresholds",
}

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

    def __getattr__(name: str) -> Any:
        return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
