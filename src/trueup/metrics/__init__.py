"""Measures of calibration, `(logits, labels, *, …) -> float`; `METRICS` maps their names to them."""

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
from trueup.metrics.hypothesis_tests import consistency, spiegelhalter
from trueup.metrics.intervals import bootstrap, paired_bootstrap
from trueup.metrics.kernel import mmce, skce, skce_biased, skce_linear, skce_test
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
from trueup.metrics.smooth import kde_ece, ks, ks_classwise, ks_within, smooth_ece
from trueup.registry import METRICS

__all__ = [
    "METRICS",
    "REGRESSION",
    "Bins",
    "Mean",
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
    "consistency",
    "debiased_l1",
    "debiased_l2",
    "eaurc",
    "ece",
    "ece_sweep",
    "entropy",
    "fpr95",
    "kde_ece",
    "ks",
    "ks_classwise",
    "ks_within",
    "mce",
    "mmce",
    "nll",
    "normalised_entropy",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr95",
    "overconfidence",
    "paired_bootstrap",
    "piece",
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
    "underconfidence",
]
