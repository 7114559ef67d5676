"""Training networks: a loop that watches calibration, tasks, data sets, and how calibratable losses leave networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import lazy_attribute

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

_MODULES = {
    "CalibratabilityRow": "calibratability",
    "Classification": "tasks",
    "DATASETS": "data",
    "Data": "data",
    "Epoch": "history",
    "Forecasts": "tasks",
    "History": "history",
    "LossSetting": "calibratability",
    "Regression": "tasks",
    "SizeRow": "calibratability",
    "TrainingError": "loop",
    "TrainingResult": "loop",
    "flip_and_crop": "augment",
    "list_settings": "calibratability",
    "load_data": "data",
    "measure_calibratability": "calibratability",
    "train": "loop",
    "validation_sizes": "calibratability",
}

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

    def __getattr__(name: str) -> Any:
        return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
