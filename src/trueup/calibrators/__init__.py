"""Calibrators: fitted maps from logits to logits, one method a file; their classes are found here by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trueup.registry import CALIBRATORS

_MODULES = {
    "Calibrator": "base",
    "TopLabel": "base",
    **dict.fromkeys(("chain", "choose", "cross_fit", "grid", "one_vs_rest", "refinement"), "compose"),
    **dict.fromkeys(("IsotonicQuantiles", "Recalibrator", "VarianceScaling"), "regression"),
}

__all__ = [*CALIBRATORS, *_MODULES]  # noqa: PLE0604 (both hold strings)


def __getattr__(name: str) -> Any:
    if name in CALIBRATORS:
        return CALIBRATORS[name]
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
