"""Makes a neural network's confidence honest: measures how far it is from accuracy, and repairs it.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trueup.core.version import __version__
from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS, RECALIBRATIONS

if TYPE_CHECKING:
    from trueup import losses, metrics
    from trueup.calibrators.compose import chain, choose, cross_fit, grid, one_vs_rest, refinement
    from trueup.clamping import clamp, load_clamped, save_clamped
    from trueup.core.arrays import flatten, from_binary, from_probs
    from trueup.core.tally import Tally
    from trueup.io.artifacts import load_calibrator, save_calibrator
    from trueup.io.predictions import Predictions, load, save, stream
    from trueup.metrics.table import Scores, compare, evaluate
    from trueup.models.calibrated import Calibrated, collect, on_model
    from trueup.monitor import Monitor

_WHERE = {
    "flatten": "core.arrays",
    "from_binary": "core.arrays",
    "from_probs": "core.arrays",
    "Predictions": "io.predictions",
    "load": "io.predictions",
    "save": "io.predictions",
    "stream": "io.predictions",
    "Scores": "metrics.table",
    "compare": "metrics.table",
    "evaluate": "metrics.table",
    "Monitor": "monitor",
    "Tally": "core.tally",
    "Calibrated": "models.calibrated",
    "collect": "models.calibrated",
    "on_model": "models.calibrated",
    "clamp": "clamping",
    "load_clamped": "clamping",
    "save_clamped": "clamping",
    "chain": "calibrators.compose",
    "choose": "calibrators.compose",
    "cross_fit": "calibrators.compose",
    "grid": "calibrators.compose",
    "load_calibrator": "io.artifacts",
    "one_vs_rest": "calibrators.compose",
    "refinement": "calibrators.compose",
    "save_calibrator": "io.artifacts",
}

_ROOMS = (
    "calibrators",
    "clamping",
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
    "Monitor",
    "Predictions",
    "Scores",
    "Tally",
    "__version__",
    "chain",
    "choose",
    "clamp",
    "collect",
    "compare",
    "cross_fit",
    "evaluate",
    "flatten",
    "from_binary",
    "from_probs",
    "grid",
    "load",
    "load_calibrator",
    "load_clamped",
    "losses",
    "metrics",
    "on_model",
    "one_vs_rest",
    "refinement",
    "save",
    "save_calibrator",
    "save_clamped",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"trueup.{name}")
    if name in _WHERE:
        return getattr(import_module(f"trueup.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'trueup' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
