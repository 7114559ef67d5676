"""A file of one kind, given to what reads another, says what reads it."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trueup.calibrators.regression import VarianceScaling
from trueup.calibrators.temperature import Temperature
from trueup.clamping import clamp, load_clamped, load_repaired, repair, save_clamped, save_repaired
from trueup.decisions import (
    ConformalQuantiles,
    PredictionSets,
    load_conformal,
    load_prediction_sets,
    save_conformal,
    save_prediction_sets,
)
from trueup.io import load_recalibrator, save_recalibrator
from trueup.io.artifacts import KINDS, load_calibrator, save_calibrator
from trueup.monitor import Monitor, load_monitor, save_monitor


def saved_monitor(path):
    monitor = Monitor(2)
    monitor.update(np.array([[1.0, 0.0]]), [0])
    save_monitor(monitor, path)


def saved_clamped(path):
    pair = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    save_clamped(clamp(nn.Identity(), [pair], penalty=0.01, progress=False), path)


def saved_repaired(path):
    pair = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    save_repaired(repair(nn.Identity(), [pair], progress=False), path)


WRITE = {
    "calibrator": lambda path: save_calibrator(Temperature(2.0), path),
    "clamped": saved_clamped,
    "repaired": saved_repaired,
    "recalibrator": lambda path: save_recalibrator(VarianceScaling(1.5), path),
    "monitor": saved_monitor,
    "prediction_sets": lambda path: save_prediction_sets(PredictionSets("lac", -0.3, 0.1), path),
    "conformal_regression": lambda path: save_conformal(ConformalQuantiles(0.5, 0.1), path),
}
READ = {
    "calibrator": load_calibrator,
    "clamped": lambda path: load_clamped(nn.Identity(), path),
    "repaired": lambda path: load_repaired(nn.Identity(), path),
    "recalibrator": load_recalibrator,
    "monitor": load_monitor,
    "prediction_sets": load_prediction_sets,
    "conformal_regression": load_conformal,
}


@pytest.mark.parametrize("held", KINDS)
def test_every_reader_knows_the_files_of_the_others(tmp_path, held):
    path = tmp_path / "x.safetensors"
    WRITE[held](path)
    name, hint = KINDS[held]
    for wanted, read in READ.items():
        if wanted == held:
            read(path)
            continue
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value) == f"{path}: the file must hold a {KINDS[wanted][0]}, got a {name}; {hint}"
        assert error.value.hint is hint


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_are_told_by_what_they_hold(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=f"the file must hold a {KINDS[kind][0]}, got weight"):
        READ[kind](path)
    save_file({"weight": torch.ones(2)}, path, metadata={"trueup": "[]"})
    with pytest.raises(ValueError, match="the schema must be 1, got None; a newer version of trueup may read it"):
        READ[kind](path)
