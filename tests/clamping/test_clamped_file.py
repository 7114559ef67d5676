"""Clamped networks and their files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trueup.clamping import clamp
from trueup.clamping.clamped_file import load_clamped, save_clamped
from trueup.io.artifacts import load_calibrator, read_header
from trueup.models.calibrated import Calibrated


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
    save_clamped(clamped, tmp_path / "net.safetensors")
    loaded = load_clamped(model, tmp_path / "net.safetensors")
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
    save_clamped(clamped, path)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    assert metadata["trueup"].count('"penalty"') == 1
    save_file(tensors, path, {"trueup": metadata["trueup"].replace('"penalty"', '"lam"')})
    assert load_clamped(network(), path).fit_record == clamped.fit_record


def test_another_model_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "net.safetensors"
    save_clamped(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    with pytest.raises(ValueError, match=r"0\.weight \(8, 5\) instead of \(8, 4\)"):
        load_clamped(network(inputs=5), path)
    with pytest.raises(ValueError, match=r"3\.weight \(7, 8\) instead of \(3, 8\); 3\.bias \(7,\) instead of \(3,\)"):
        load_clamped(network(classes=7), path)
    with pytest.raises(ValueError, match=r"0\.weight missing instead of \(8, 4\).* and \d+ more"):
        load_clamped(nn.Identity(), path)
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(-1)
    with pytest.raises(ValueError, match="clamped, got one of the same shapes but other weights"):
        load_clamped(other, path)
    folded = network()
    with torch.no_grad():
        folded[3].weight.mul_(0.4)
    with pytest.raises(ValueError, match="other weights"):
        load_clamped(folded, path)


def test_a_mask_of_infinities_is_no_obstacle(tmp_path):
    model, path = network(), tmp_path / "net.safetensors"
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    clamped = clamp(model, [sample()], penalty=1e-3, progress=False)
    save_clamped(clamped, path)
    assert load_clamped(model, path).fit_record == clamped.fit_record


def test_files_that_hold_something_else(tmp_path):
    path = tmp_path / "net.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="must hold a clamped network, got weight"):
        load_clamped(network(), path)
    save_clamped(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    wish = (
        r"net.safetensors: the file must hold a calibrator, got a clamped network; load_clamped\(model, path\) reads it"
    )
    for read in (load_calibrator, read_header):
        with pytest.raises(ValueError, match=wish):
            read(path)
    with pytest.raises(FileNotFoundError):
        load_clamped(network(), tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content, tensors: content.update(schema=2), "the schema must be 1, got 2"),
        (lambda content, tensors: content["clamped"].update(before="Warp"), "no input map is called 'Warp'"),
        (lambda content, tensors: content["clamped"].pop("record"), "must tell of before, record and model"),
        (lambda content, tensors: tensors.pop("delta"), "the tensors must be delta, temperature, got temperature"),
        (lambda content, tensors: tensors.update(more=torch.ones(1)), "got delta, more, temperature"),
        (lambda content, tensors: content["clamped"]["record"]["dict"].pop("penalty"), "the record of the fit is none"),
    ],
)
def test_a_damaged_file_says_how(tmp_path, change, message):
    path = tmp_path / "net.safetensors"
    save_clamped(clamp(network(), [sample()], penalty=1e-3, progress=False), path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = json.loads(file.metadata()["trueup"])
    change(content, tensors)
    save_file(tensors, path, metadata={"trueup": json.dumps(content)})
    with pytest.raises(ValueError, match=message):
        load_clamped(network(), path)


def test_only_clamped_networks_are_saved(tmp_path):
    with pytest.raises(ValueError, match="clamped must be what clamp returns, got Calibrated"):
        save_clamped(Calibrated(network()), tmp_path / "net.safetensors")
    clamped = clamp(network(), [sample()], penalty=1e-3, progress=False)
    with pytest.raises(ValueError, match="the suffix must be .safetensors, got '.pt'"):
        save_clamped(clamped, tmp_path / "net.pt")
    clamped.after = None
    with pytest.raises(ValueError, match="a Temperature after the model, got Shift and NoneType"):
        save_clamped(clamped, tmp_path / "net.safetensors")
