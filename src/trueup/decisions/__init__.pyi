from .conformal_regression import ConformalQuantiles as ConformalQuantiles, ConformalResiduals as ConformalResiduals
from .decision_curve import NetBenefit as NetBenefit, net_benefit as net_benefit
from .judges import JudgeRate as JudgeRate, judge_rate as judge_rate
from .label_shift import PriorEstimate as PriorEstimate, estimate_prior as estimate_prior, shift_prior as shift_prior
from .planning import (
    Comparison as Comparison,
    Detection as Detection,
    JudgePlan as JudgePlan,
    Plan as Plan,
    Promise as Promise,
    plan as plan,
    plan_judge as plan_judge,
)
from .prediction_sets import (
    PredictionSets as PredictionSets,
    Raps as Raps,
    SetScores as SetScores,
    evaluate_sets as evaluate_sets,
)
from .recheck import Recheck as Recheck
from .thresholds import (
    EventRisk as EventRisk,
    GroupThresholds as GroupThresholds,
    Threshold as Threshold,
    calibrated_threshold as calibrated_threshold,
    threshold as threshold,
)
from .unlabelled_performance import (
    PerformanceEstimate as PerformanceEstimate,
    PerformanceMetrics as PerformanceMetrics,
    estimate_performance as estimate_performance,
)
