"""Training networks: a loop that watches calibration, tasks, data sets, and how calibratable losses leave networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import lazy_names

if TYPE_CHECKING:
    from trueup.training.augment import flip_and_crop
    from trueup.training.calibratability import (
        CalibratabilityRow,
        LossSetting,
        SizeRow,
        list_settings,
        measure_calibratability,
        validation_sizes,
    )
    from trueup.training.data import DATASETS, Data, load_data
    from trueup.training.history import Epoch, History
    from trueup.training.loop import TrainingError, TrainingResult, train
    from trueup.training.tasks import Classification, Forecasts, Regression


__all__ = [
    "DATASETS",
    "CalibratabilityRow",
    "Classification",
    "Data",
    "Epoch",
    "Forecasts",
    "History",
    "LossSetting",
    "Regression",
    "SizeRow",
    "TrainingError",
    "TrainingResult",
    "flip_and_crop",
    "list_settings",
    "load_data",
    "measure_calibratability",
    "train",
    "validation_sizes",
]

if not TYPE_CHECKING:  # a checker is to find what is misspelt
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "augment": "flip_and_crop",
            "calibratability": "CalibratabilityRow LossSetting SizeRow "
            "list_settings measure_calibratability validation_sizes",
            "data": "DATASETS Data load_data",
            "history": "Epoch History",
            "loop": "TrainingError TrainingResult train",
            "tasks": "Classification Forecasts Regression",
        },
    )
