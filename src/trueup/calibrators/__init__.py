"""Calibrators: fitted maps from logits to logits, one method a file; their classes are found here by name."""

from __future__ import annotations

from typing import Any

from trueup.registry import CALIBRATORS, lazy_attribute

_MODULES = {
    "Calibrator": "base",
    "TopLabel": "base",
    **dict.fromkeys(("chain", "choose", "cross_fit", "grid", "one_vs_rest", "refinement"), "compose"),
    "per_group": "per_group",
    **dict.fromkeys(("average_orders", "contextual_bias", "position_bias"), "prompt_bias"),
    "per_label": "multilabel",
    **dict.fromkeys(("IsotonicQuantiles", "Recalibrator", "VarianceScaling"), "regression"),
}

__all__ = sorted([*CALIBRATORS, *_MODULES])  # noqa: PLE0605 (a list of strings)


def __getattr__(name: str) -> Any:
    return CALIBRATORS[name] if name in CALIBRATORS else lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
