"""Files: predictions in many formats, artifacts of what was fitted, shards, and atomic writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import lazy_attribute

if TYPE_CHECKING:
    from trueup.io.artifacts import (
        load_calibrator,
        load_recalibrator,
        read_header,
        save_calibrator,
        save_recalibrator,
    )
    from trueup.io.load_save import from_rows, load, load_logits, load_table, save, save_logits, stream
    from trueup.io.predictions import Predictions, PredictionTable, from_multilabel, open_predictions
    from trueup.io.shards import BadShard, Shards

_MODULES = {
    "BadShard": "shards",
    "PredictionTable": "predictions",
    "Predictions": "predictions",
    "Shards": "shards",
    "from_multilabel": "predictions",
    "from_rows": "load_save",
    "load": "load_save",
    "load_calibrator": "artifacts",
    "load_logits": "load_save",
    "load_recalibrator": "artifacts",
    "load_table": "load_save",
    "open_predictions": "predictions",
    "read_header": "artifacts",
    "save": "load_save",
    "save_calibrator": "artifacts",
    "save_logits": "load_save",
    "save_recalibrator": "artifacts",
    "stream": "load_save",
}

__all__ = [
    "BadShard",
    "PredictionTable",
    "Predictions",
    "Shards",
    "from_multilabel",
    "from_rows",
    "load",
    "load_calibrator",
    "load_logits",
    "load_recalibrator",
    "load_table",
    "open_predictions",
    "read_header",
    "save",
    "save_calibrator",
    "save_logits",
    "save_recalibrator",
    "stream",
]


if not TYPE_CHECKING:  # a checker is to find what is misspelt

    def __getattr__(name: str) -> Any:
        return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
