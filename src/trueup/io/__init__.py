"""Files: predictions in many formats, artifacts of what was fitted, shards, and atomic writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import lazy_names

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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "artifacts": "load_calibrator load_recalibrator read_header save_calibrator save_recalibrator",
            "load_save": "from_rows load load_logits load_table save save_logits stream",
            "predictions": "PredictionTable Predictions from_multilabel open_predictions",
            "shards": "BadShard Shards",
        },
    )
