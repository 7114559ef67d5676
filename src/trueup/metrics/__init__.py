"""Measures of calibration, `(logits, labels, *, …) -> float`; `METRICS` maps their names to them.

A metric's module is imported when the metric is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import METRICS, lazy_names

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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".core.bins": "Bins",
            ".core.tally": "Mean Tally",
            "detection": "d_ece from_detections",
            "events": "corp",
            "forecast_table": "compare_forecasts evaluate_forecasts",
            "forecasts": "central_coverage pit",
            "hypothesis_tests": "consistency detectable_error hosmer_lemeshow kuiper_test spiegelhalter",
            "intervals": "bootstrap paired_bootstrap",
            "kernel": "skce_test",
            "multilabel": "LabelScores evaluate_labels",
            "proper": "brier_decomposition",
            "ranking": "ood_aupr ood_auroc ood_fpr95 risk_coverage",
            "regression": "REGRESSION",
            "segmentation": "SegmentationTally",
        },
        METRICS,
    )
