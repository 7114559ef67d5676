"""Makes a neural network's confidence honest: measures how far it is from accuracy, and repairs it.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS, RECALIBRATIONS
from trueup.version import __version__

if TYPE_CHECKING:
    from trueup import losses, metrics
    from trueup.arrays import flatten, from_binary, from_probs
    from trueup.artifact import load_calibrator, save_calibrator
    from trueup.clamping import clamp, load_clamped, save_clamped
    from trueup.combine import chain, choose, cross_fit, grid, one_vs_rest, refinement
    from trueup.models import Calibrated, collect, on_model
    from trueup.monitor import Monitor
    from trueup.predictions import Predictions, load, save, stream
    from trueup.scores import Scores, compare, evaluate
    from trueup.tally import Tally

_WHERE = {
    "flatten": "arrays",
    "from_binary": "arrays",
    "from_probs": "arrays",
    "Predictions": "predictions",
    "load": "predictions",
    "save": "predictions",
    "stream": "predictions",
    "Scores": "scores",
    "compare": "scores",
    "evaluate": "scores",
    "Monitor": "monitor",
    "Tally": "tally",
    "Calibrated": "models",
    "collect": "models",
    "on_model": "models",
    "clamp": "clamping",
    "load_clamped": "clamping",
    "save_clamped": "clamping",
    "chain": "combine",
    "choose": "combine",
    "cross_fit": "combine",
    "grid": "combine",
    "load_calibrator": "artifact",
    "one_vs_rest": "combine",
    "refinement": "combine",
    "save_calibrator": "artifact",
}

_ROOMS = (
    "clamping",
    "corruptions",
    "losses",
    "metrics",
    "models",
    "monitor",
    "networks",
    "recalibration",
    "training",
    "uncertainty",
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
