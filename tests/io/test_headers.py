"""A file of one kind, given to what reads another, says what reads it."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flat_options import clamp_with as clamp
from trueup import load, save
from trueup._core.errors import Hint
from trueup._core.registry import ARTIFACTS
from trueup.adaptation import repair
from trueup.calibrators import Temperature, VarianceScaling
from trueup.decisions import ConformalQuantiles, PredictionSets, threshold
from trueup.io import load_artifact
from trueup.monitor import Monitor


def saved_monitor(path):
    monitor = Monitor(2)
    monitor.update(np.array([[1.0, 0.0]]), [0])
    save(monitor, path)


def saved_clamped(path):
    pair = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    save(clamp(nn.Identity(), [pair], penalty=0.01, progress=False), path)


def saved_repaired(path):
    pair = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    save(repair(nn.Identity(), [pair], progress=False), path)


WRITE = {
    "calibrator": lambda path: save(Temperature(2.0), path),
    "clamped": saved_clamped,
    "repaired": saved_repaired,
    "recalibrator": lambda path: save(VarianceScaling(1.5), path),
    "monitor": saved_monitor,
    "prediction_sets": lambda path: save(PredictionSets("lac", -0.3, 0.1), path),
    "threshold": lambda path: save(threshold(np.eye(3)[[0, 1, 2] * 30] * 9, [0, 1, 2] * 30), path),
    "conformal_regression": lambda path: save(ConformalQuantiles(0.5, 0.1), path),
}


@pytest.mark.parametrize("held", ARTIFACTS)
def test_a_reader_of_one_kind_names_another(tmp_path, held):
    path = tmp_path / "x.safetensors"
    WRITE[held](path)
    model = {"model": nn.Identity()} if ARTIFACTS[held].needs_model else {}
    assert type(load(path, **model)).__name__ in ARTIFACTS[held].classes
    for kind, (title, *_) in ARTIFACTS.items():
        if kind != held:
            with pytest.raises(ValueError) as error:
                load_artifact(path, kind)
            hint = Hint[f"LOAD_{held.upper()}"]
            got = f"got a {ARTIFACTS[held].title}; {hint}"
            assert str(error.value) == f"{path}: the file must hold a {title}, {got}"
            assert error.value.hint is hint


@pytest.mark.parametrize("kind", ["clamped", "repaired"])
def test_a_network_needs_its_model(tmp_path, kind):
    WRITE[kind](path := tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=f"model must be the network of the {kind} network, whose weights are not in"):
        load(path)


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_other_files_are_told_by_what_they_hold(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=f"the file must hold a {ARTIFACTS[kind].title}, got weight"):
        load_artifact(path, kind)
    save_file({"weight": torch.ones(2)}, path, metadata={"trueup": "[]"})
    with pytest.raises(ValueError, match="the schema must be 1 or 2, got None; a newer version of trueup may read it"):
        load_artifact(path, kind)
