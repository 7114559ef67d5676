"""Calibrators: fitted maps from logits to logits, one method a file; their classes are found here by name."""

from __future__ import annotations

from trueup.registry import CALIBRATORS, lazy_names

_NAMES = {
    "base": "Calibrator TopLabel",
    "compose": "chain choose cross_fit grid one_vs_rest refinement",
    "multilabel": "per_label",
    "per_group": "per_group",
    "prompt_bias": "average_orders contextual_bias position_bias",
    "regression": "IsotonicQuantiles Recalibrator VarianceScaling",
}

__all__ = sorted([*CALIBRATORS, *" ".join(_NAMES.values()).split()])  # noqa: PLE0605 (a list of strings)
__getattr__, __dir__ = lazy_names(__name__, _NAMES, CALIBRATORS)
