"""Clamped networks and their files."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from artifact_files import rewrite_artifact
from flat_options import clamp_with as clamp
from trueup import load, save
from trueup.io import load_artifact, read_header
from trueup.models import Calibrated


def network(inputs=4, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)).eval()


def sample():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 4, generator=generator)
    with torch.no_grad():
        return x, torch.multinomial(torch.softmax(3 * network()(x), dim=1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize(
    "options", [{}, {"penalty": 1e-3}, {"input_map": "affine", "penalty": 1e-3, "box": (-9, 9 * torch.ones(4))}]
)
def test_what_is_loaded_is_what_was_saved(tmp_path, options):
    model, (x, y) = network(), sample()
    clamped = clamp(model, [(x, y)], loss="focal", gamma=(0.0, 1.0), progress=False, **options)
    save(clamped, tmp_path / "net.safetensors")
    loaded = load(tmp_path / "net.safetensors", model=model)
    assert loaded.fit_record == clamped.fit_record
    assert type(loaded.before) is type(clamped.before)
    assert torch.equal(loaded(x), clamped(x))
    assert loaded.model is model
    with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        assert {"delta", "temperature"} <= set(file.keys())
        json.loads(file.metadata()["trueup"])


def test_files_that_call_the_penalty_lam_are_read(tmp_path):
    path = tmp_path / "net.safetensors"
    clamped = clamp(network(), [sample()], penalty=1e-3, progress=False)
    save(clamped, path)

    def rename(header, arrays):
        record = header["content"]["record"]["dict"]
        record["lam"] = record.pop("penalty")

    rewrite_artifact(path, rename)
    assert load(path, model=network()).fit_record == clamped.fit_record


def test_another_model_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "net.safetensors"
    save(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    with pytest.raises(ValueError, match=r"0\.weight \(8, 5\) instead of \(8, 4\)"):
        load(path, model=network(inputs=5))
    with pytest.raises(ValueError, match=r"3\.weight \(7, 8\) instead of \(3, 8\); 3\.bias \(7,\) instead of \(3,\)"):
        load(path, model=network(classes=7))
    with pytest.raises(ValueError, match=r"0\.weight missing instead of \(8, 4\).* and \d+ more"):
        load(path, model=nn.Identity())
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(-1)
    with pytest.raises(ValueError, match="clamped, got one of the same shapes but other weights"):
        load(path, model=other)
    folded = network()
    with torch.no_grad():
        folded[3].weight.mul_(0.4)
    with pytest.raises(ValueError, match="other weights"):
        load(path, model=folded)


def test_a_mask_of_infinities_is_no_obstacle(tmp_path):
    model, path = network(), tmp_path / "net.safetensors"
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    clamped = clamp(model, [sample()], penalty=1e-3, progress=False)
    save(clamped, path)
    assert load(path, model=model).fit_record == clamped.fit_record


def test_files_that_hold_something_else(tmp_path):
    path = tmp_path / "net.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="must hold a fitted value, got weight"):
        load(path, model=network())
    save(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    message = r"net.safetensors: the file must hold a calibrator, got a clamped network; load\(path, model=network\)"
    for read in (load_artifact, read_header):
        with pytest.raises(ValueError, match=message):
            read(path, "calibrator")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors", model=network())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content, tensors: content.update(schema=3), "the schema must be 1 or 2, got 3"),
        (lambda content, tensors: content["content"].update(before="Warp"), "no input map is called 'Warp'"),
        (lambda content, tensors: content["content"].pop("record"), "must have before, record and model"),
        (lambda content, tensors: tensors.pop("delta"), "the tensors must be delta, temperature, got temperature"),
        (lambda content, tensors: tensors.update(more=np.ones(1)), "got delta, more, temperature"),
        (
            lambda content, tensors: content["content"]["record"]["dict"].pop("penalty"),
            "the record of the fit is incomplete",
        ),
    ],
)
def test_a_damaged_file_says_how(tmp_path, change, message):
    path = tmp_path / "net.safetensors"
    save(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    rewrite_artifact(path, change)
    with pytest.raises(ValueError, match=message):
        load(path, model=network())


def test_only_clamped_networks_are_saved(tmp_path):
    with pytest.raises(ValueError, match="obj must be .* clamped network, .* got Calibrated"):
        save(Calibrated(network()), tmp_path / "net.safetensors")
    clamped = clamp(network(), [sample()], penalty=1e-3, progress=False)
    with pytest.raises(ValueError, match="the suffix must be .safetensors, got '.pt'"):
        save(clamped, tmp_path / "net.pt")
    clamped.calibrator = None
    with pytest.raises(ValueError, match="a Temperature after the model, got Shift and NoneType"):
        save(clamped, tmp_path / "net.safetensors")
