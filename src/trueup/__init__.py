"""Makes a neural network's confidence honest: measures how far it is from accuracy, and repairs it.

Every public package and name is reachable from here; nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.core import __version__
from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS, RECALIBRATIONS, lazy_names

if TYPE_CHECKING:
    from trueup import (
        calibrators,
        clamping,
        decisions,
        integrations,
        io,
        losses,
        metrics,
        models,
        monitor,
        report,
        study,
        training,
    )
    from trueup.calibrators.compose import chain, choose, cross_fit, for_event, grid, one_vs_rest, refinement
    from trueup.calibrators.prompt_bias import contextual_bias, position_bias
    from trueup.calibrators.sharded import fit_shards
    from trueup.clamping import clamp, load_clamped, load_repaired, repair, save_clamped, save_repaired
    from trueup.core.conversion import (
        as_event,
        event_logits,
        flatten,
        from_binary,
        from_confidence,
        from_probs,
        from_topk,
    )
    from trueup.core.tally import Tally
    from trueup.io.artifacts import load_calibrator, save_calibrator
    from trueup.io.load_save import load, save, stream
    from trueup.io.predictions import Predictions, from_multilabel
    from trueup.io.shards import Shards
    from trueup.metrics.forecast_table import ForecastScores, compare_forecasts, evaluate_forecasts
    from trueup.metrics.sharded import evaluate_shards
    from trueup.metrics.table import Scores, compare, evaluate
    from trueup.models.calibrated import Calibrated, collect, on_model
    from trueup.monitor import Monitor
    from trueup.report.figures.reliability import plot_reliability

_PACKAGES = (
    "calibrators",
    "clamping",
    "decisions",
    "integrations",
    "io",
    "losses",
    "metrics",
    "models",
    "monitor",
    "report",
    "study",
    "training",
)

__all__ = [
    "LOSSES",
    "METHODS",
    "METRICS",
    "NETWORKS",
    "RECALIBRATIONS",
    "Calibrated",
    "ForecastScores",
    "Monitor",
    "Predictions",
    "Scores",
    "Shards",
    "Tally",
    "__version__",
    "as_event",
    "calibrators",
    "chain",
    "choose",
    "clamp",
    "clamping",
    "collect",
    "compare",
    "compare_forecasts",
    "contextual_bias",
    "cross_fit",
    "decisions",
    "evaluate",
    "evaluate_forecasts",
    "evaluate_shards",
    "event_logits",
    "fit_shards",
    "flatten",
    "for_event",
    "from_binary",
    "from_confidence",
    "from_multilabel",
    "from_probs",
    "from_topk",
    "grid",
    "integrations",
    "io",
    "load",
    "load_calibrator",
    "load_clamped",
    "load_repaired",
    "losses",
    "metrics",
    "models",
    "monitor",
    "on_model",
    "one_vs_rest",
    "plot_reliability",
    "position_bias",
    "refinement",
    "repair",
    "report",
    "save",
    "save_calibrator",
    "save_clamped",
    "save_repaired",
    "stream",
    "study",
    "training",
]

if not TYPE_CHECKING:  # a checker is to find what is misspelt
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(_PACKAGES, ""),
            "calibrators.compose": "chain choose cross_fit for_event grid one_vs_rest refinement",
            "calibrators.prompt_bias": "contextual_bias position_bias",
            "calibrators.sharded": "fit_shards",
            "clamping.clamped_file": "load_clamped save_clamped",
            "clamping.fit": "clamp",
            "clamping.input_repair": "repair",
            "clamping.repaired_file": "load_repaired save_repaired",
            "core.conversion": "as_event event_logits flatten from_binary from_confidence from_probs from_topk",
            "core.tally": "Tally",
            "io.artifacts": "load_calibrator save_calibrator",
            "io.load_save": "load save stream",
            "io.predictions": "Predictions from_multilabel",
            "io.shards": "Shards",
            "metrics.forecast_table": "ForecastScores compare_forecasts evaluate_forecasts",
            "metrics.sharded": "evaluate_shards",
            "metrics.table": "Scores compare evaluate",
            "models.calibrated": "Calibrated collect on_model",
            "monitor.monitor": "Monitor",
            "report.figures.reliability": "plot_reliability",
        },
    )
