"""Makes a neural network's confidence honest: measures how far it is from accuracy, and repairs it.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trueup.registry import METHODS, METRICS

if TYPE_CHECKING:
    from trueup import metrics
    from trueup.arrays import flatten, from_binary, from_probs
    from trueup.artifact import load_calibrator, save_calibrator
    from trueup.combine import chain, choose, cross_fit, grid, one_vs_rest, refinement
    from trueup.predictions import Predictions, load, save, stream
    from trueup.scores import Scores, compare, evaluate
    from trueup.tally import Tally

__version__ = "0.1.0"

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
    "Tally": "tally",
    "chain": "combine",
    "choose": "combine",
    "cross_fit": "combine",
    "grid": "combine",
    "load_calibrator": "artifact",
    "one_vs_rest": "combine",
    "refinement": "combine",
    "save_calibrator": "artifact",
}

__all__ = [
    "METHODS",
    "METRICS",
    "Predictions",
    "Scores",
    "Tally",
    "chain",
    "choose",
    "compare",
    "cross_fit",
    "evaluate",
    "flatten",
    "from_binary",
    "from_probs",
    "grid",
    "load",
    "load_calibrator",
    "metrics",
    "one_vs_rest",
    "refinement",
    "save",
    "save_calibrator",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return import_module("trueup.metrics")
    if name in _WHERE:
        return getattr(import_module(f"trueup.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'trueup' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
