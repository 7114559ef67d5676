from ._tallies import METRICS as METRICS, Bins as Bins, Mean as Mean, Tally as Tally
from .binned import (
    average_ce as average_ce,
    aece as aece,
    ece as ece,
    mce as mce,
    overconfidence as overconfidence,
    piece as piece,
    rmsce as rmsce,
    sce as sce,
    thresholded_sce as thresholded_sce,
    uce as uce,
    underconfidence as underconfidence,
)
from .debiased import debiased_l1 as debiased_l1, debiased_l2 as debiased_l2, ece_sweep as ece_sweep
from .detection import d_ece as d_ece, from_detections as from_detections
from .events import (
    calibration_in_the_large as calibration_in_the_large,
    calibration_intercept as calibration_intercept,
    calibration_slope as calibration_slope,
    corp as corp,
    discrimination as discrimination,
    e50 as e50,
    e90 as e90,
    auroc as auroc,
    event_brier as event_brier,
    ici as ici,
    kuiper as kuiper,
    miscalibration as miscalibration,
    observed as observed,
    observed_expected as observed_expected,
    predicted as predicted,
    uncertainty as uncertainty,
)
from .forecast_table import (
    ForecastScores as ForecastScores,
    compare_forecasts as compare_forecasts,
    evaluate_forecasts as evaluate_forecasts,
)
from .forecasts import central_coverage as central_coverage, pit as pit
from .hypothesis_tests import (
    consistency as consistency,
    detectable_error as detectable_error,
    hosmer_lemeshow as hosmer_lemeshow,
    kuiper_test as kuiper_test,
    spiegelhalter as spiegelhalter,
)
from .intervals import bootstrap as bootstrap, paired_bootstrap as paired_bootstrap
from .kernel import (
    mmce as mmce,
    skce as skce,
    skce_biased as skce_biased,
    skce_linear as skce_linear,
    skce_test as skce_test,
)
from .limits import Check as Check, check as check
from .multilabel import LabelScores as LabelScores, evaluate_labels as evaluate_labels
from .proper import (
    accuracy as accuracy,
    brier as brier,
    brier_decomposition as brier_decomposition,
    entropy as entropy,
    nll as nll,
    normalised_entropy as normalised_entropy,
    top_k as top_k,
    top_label_brier as top_label_brier,
)
from .ranking import (
    misclassification_aupr as misclassification_aupr,
    aurc as aurc,
    misclassification_auroc as misclassification_auroc,
    eaurc as eaurc,
    misclassification_fpr95 as misclassification_fpr95,
    ood_aupr as ood_aupr,
    ood_auroc as ood_auroc,
    ood_fpr95 as ood_fpr95,
    risk_coverage as risk_coverage,
)
from .regression import REGRESSION as REGRESSION
from .segmentation import SegmentationTally as SegmentationTally
from .sharded import evaluate_shards as evaluate_shards
from .smooth import (
    kde_ece as kde_ece,
    ks as ks,
    ks_classwise as ks_classwise,
    ks_within as ks_within,
    smooth_ece as smooth_ece,
)
from .table import Scores as Scores, compare as compare, evaluate as evaluate
