"""Makes a neural network's confidence honest: measures how far it is from accuracy, and repairs it.

Every public package and name is reachable from here; nothing heavy is imported until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trueup.core import __version__
from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS, RECALIBRATIONS, lazy_attribute

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
_NAMES = {
    "Calibrated": "models.calibrated",
    "ForecastScores": "metrics.forecast_table",
    "Monitor": "monitor",
    "Predictions": "io.predictions",
    "Scores": "metrics.table",
    "Shards": "io.shards",
    "Tally": "core.tally",
    "as_event": "core.conversion",
    "chain": "calibrators.compose",
    "choose": "calibrators.compose",
    "clamp": "clamping",
    "collect": "models.calibrated",
    "contextual_bias": "calibrators.prompt_bias",
    "compare": "metrics.table",
    "compare_forecasts": "metrics.forecast_table",
    "cross_fit": "calibrators.compose",
    "evaluate": "metrics.table",
    "evaluate_forecasts": "metrics.forecast_table",
    "evaluate_shards": "metrics.sharded",
    "event_logits": "core.conversion",
    "fit_shards": "calibrators.sharded",
    "flatten": "core.conversion",
    "for_event": "calibrators.compose",
    "from_binary": "core.conversion",
    "from_confidence": "core.conversion",
    "from_multilabel": "io.predictions",
    "from_probs": "core.conversion",
    "from_topk": "core.conversion",
    "grid": "calibrators.compose",
    "load": "io.load_save",
    "load_calibrator": "io.artifacts",
    "load_clamped": "clamping",
    "load_repaired": "clamping",
    "on_model": "models.calibrated",
    "one_vs_rest": "calibrators.compose",
    "plot_reliability": "report.figures.reliability",
    "position_bias": "calibrators.prompt_bias",
    "refinement": "calibrators.compose",
    "repair": "clamping",
    "save": "io.load_save",
    "save_calibrator": "io.artifacts",
    "save_clamped": "clamping",
    "save_repaired": "clamping",
    "stream": "io.load_save",
}

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

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"trueup.{name}")
        return lazy_attribute(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
