"""Measures of calibration, `(logits, labels, *, …) -> float`; `METRICS` maps their names to them.

A metric's module is imported when the metric is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import METRICS, lazy_attribute

if TYPE_CHECKING:
    from trueup.core.bins import Bins
    from trueup.core.tally import Mean, Tally
    from trueup.metrics.binned import (
        ace,
        aece,
        ece,
        mce,
        overconfidence,
        piece,
        rmsce,
        sce,
        thresholded_sce,
        uce,
        underconfidence,
    )
    from trueup.metrics.debiased import debiased_l1, debiased_l2, ece_sweep
    from trueup.metrics.detection import d_ece, from_detections
    from trueup.metrics.events import (
        calibration_in_the_large,
        calibration_intercept,
        calibration_slope,
        corp,
        discrimination,
        e50,
        e90,
        event_auroc,
        event_brier,
        ici,
        kuiper,
        miscalibration,
        observed,
        observed_expected,
        predicted,
        uncertainty,
    )
    from trueup.metrics.forecast_table import compare_forecasts, evaluate_forecasts
    from trueup.metrics.forecasts import central_coverage, pit
    from trueup.metrics.hypothesis_tests import (
        consistency,
        detectable_error,
        hosmer_lemeshow,
        kuiper_test,
        spiegelhalter,
    )
    from trueup.metrics.intervals import bootstrap, paired_bootstrap
    from trueup.metrics.kernel import mmce, skce, skce_biased, skce_linear, skce_test
    from trueup.metrics.multilabel import LabelScores, evaluate_labels
    from trueup.metrics.proper import (
        accuracy,
        brier,
        brier_decomposition,
        entropy,
        nll,
        normalised_entropy,
        top_k,
        top_label_brier,
    )
    from trueup.metrics.ranking import (
        aupr,
        aurc,
        auroc,
        eaurc,
        fpr95,
        ood_aupr,
        ood_auroc,
        ood_fpr95,
        risk_coverage,
    )
    from trueup.metrics.regression import REGRESSION
    from trueup.metrics.segmentation import SegmentationTally
    from trueup.metrics.smooth import kde_ece, ks, ks_classwise, ks_within, smooth_ece

_MODULES = {
    "Bins": ".core.bins",
    "LabelScores": "multilabel",
    "Mean": ".core.tally",
    "REGRESSION": "regression",
    "SegmentationTally": "segmentation",
    "Tally": ".core.tally",
    "bootstrap": "intervals",
    "brier_decomposition": "proper",
    "central_coverage": "forecasts",
    "compare_forecasts": "forecast_table",
    "consistency": "hypothesis_tests",
    "corp": "events",
    "d_ece": "detection",
    "detectable_error": "hypothesis_tests",
    "evaluate_forecasts": "forecast_table",
    "evaluate_labels": "multilabel",
    "from_detections": "detection",
    "hosmer_lemeshow": "hypothesis_tests",
    "kuiper_test": "hypothesis_tests",
    "ood_aupr": "ranking",
    "ood_auroc": "ranking",
    "ood_fpr95": "ranking",
    "paired_bootstrap": "intervals",
    "pit": "forecasts",
    "risk_coverage": "ranking",
    "skce_test": "kernel",
    "spiegelhalter": "hypothesis_tests",
}
"""Where the names outside `METRICS` are."""

__all__ = [
    "METRICS",
    "REGRESSION",
    "Bins",
    "LabelScores",
    "Mean",
    "SegmentationTally",
    "Tally",
    "accuracy",
    "ace",
    "aece",
    "aupr",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "brier_decomposition",
    "calibration_in_the_large",
    "calibration_intercept",
    "calibration_slope",
    "central_coverage",
    "compare_forecasts",
    "consistency",
    "corp",
    "d_ece",
    "debiased_l1",
    "debiased_l2",
    "detectable_error",
    "discrimination",
    "e50",
    "e90",
    "eaurc",
    "ece",
    "ece_sweep",
    "entropy",
    "evaluate_forecasts",
    "evaluate_labels",
    "event_auroc",
    "event_brier",
    "fpr95",
    "from_detections",
    "hosmer_lemeshow",
    "ici",
    "kde_ece",
    "ks",
    "ks_classwise",
    "ks_within",
    "kuiper",
    "kuiper_test",
    "mce",
    "miscalibration",
    "mmce",
    "nll",
    "normalised_entropy",
    "observed",
    "observed_expected",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr95",
    "overconfidence",
    "paired_bootstrap",
    "piece",
    "pit",
    "predicted",
    "risk_coverage",
    "rmsce",
    "sce",
    "skce",
    "skce_biased",
    "skce_linear",
    "skce_test",
    "smooth_ece",
    "spiegelhalter",
    "thresholded_sce",
    "top_k",
    "top_label_brier",
    "uce",
    "uncertainty",
    "underconfidence",
]


if not TYPE_CHECKING:  # a checker is to find what is misspelt

    def __getattr__(name: str) -> Any:
        return METRICS[name] if name in METRICS else lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted({*__all__, *METRICS})
