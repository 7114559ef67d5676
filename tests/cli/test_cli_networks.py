"""clamp and repair."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import trueup
from trueup.cli.resolve import load_model

MODELS = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x

def make():
    return Scaled()

ready = Scaled()
number = 3
"""


@pytest.fixture
def models(folder, monkeypatch):
    """A module with networks, and inputs that a camera has shifted."""
    (folder / "own_models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3)).astype(np.float32)
    y = (3 * x + rng.gumbel(size=x.shape)).argmax(axis=1)
    x = x + np.array([2.0, 0.0, -1.0], np.float32)
    np.savez("own.npz", val_inputs=x[:300], val_labels=y[:300], test_inputs=x[300:], test_labels=y[300:])
    np.savez("whole.npz", inputs=x, labels=y)
    save_file({"scale": torch.tensor(2.0)}, "own.safetensors")
    return folder


def test_clamp_fits_judges_and_saves(models, command):
    out = command("clamp", "own_models:make", "--data", "own.npz", "-o", "clamped.safetensors").stdout
    lines = out.splitlines()
    assert lines[0] == "200 rows, 3 classes, 15 bins"
    assert [line.split()[0] for line in lines[3:6]] == ["raw", "temperature", "clamping"]
    assert "Does the input map help? Yes: " in out
    assert lines[-1] == "Written: clamped.safetensors"
    clamped = trueup.load("clamped.safetensors", model=load_model("own_models:make"))
    assert clamped.before.delta.detach().numpy() == pytest.approx([-1.5, 0.5, 1.5], abs=1.5)


def test_repair_fits_judges_draws_and_saves(models, command, asked):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = ("repair", "own_models:make", "--data", "own.npz", "-o", "repaired.safetensors")
    lines = command(*words, "--figure", "steps.png").stdout.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["raw", "temperature", "repair"]
    assert any(line.startswith("Was there anything to repair? Yes: feature 0 offset -") for line in lines)
    assert lines[-1] == "Written: repaired.safetensors"
    assert (models / "steps.png").stat().st_size > 1000
    repaired = trueup.load("repaired.safetensors", model=load_model("own_models:make"))
    found = asked(*words, "--part", "input", "--map", "offset")
    assert found["record"]["parts"] == ["input"]
    assert "offset" in found["record"]["p_values"]
    assert repaired.repair_record.parts == ("input",)
    assert list(found["scores"]["methods"]) == ["raw", "temperature", "repair"]
    said = asked(*words, "--no-labels")["record"]
    assert "adaptation without labels needs new batch-norm statistics" in said["verdict"]
    notes = ["batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics"]
    assert said["notes"] == notes


def test_repair_takes_data_without_labels_and_writes_a_page(models, command, asked):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with np.load("own.npz") as file:
        inputs = file["val_inputs"]
    np.savez("bare.npz", inputs=inputs)
    words = ("repair", "own_models:make", "-o", "r.safetensors", "--data")
    found = asked(*words, "bare.npz", "--no-labels", "--page", "bare.html")
    assert found["scores"] is None
    assert found["record"]["samples"] == len(inputs)
    assert "adaptation without labels needs" in (models / "bare.html").read_text("utf-8")
    assert "Was there anything to repair? No" in command(*words, "bare.npz", "--no-labels").stdout
    command(*words, "own.npz", "--page", "own.html", "-q")
    page = (models / "own.html").read_text("utf-8")
    assert all(words in page for words in ("Effect of the map on every input: feature 0 offset -", "On test samples"))
    refused = command(*words, "bare.npz", code=2).stderr
    assert "--data must have labels, or come with --no-labels" in refused


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--temperature", "2"), "--temperature must come with --no-labels"),
        (("--entropy",), "--entropy must come with --no-labels"),
        (("--reference", "own.npz"), "--reference must come with --no-labels"),
        (("--labelled", "own.npz"), "--labelled must come with --no-labels"),
        (("--mean", "0.5"), "--mean must come with --std"),
        (("--mean", "0.5", "--std", "x"), "--std must be numbers separated by commas"),
        (("--no-labels", "--figure", "f.png"), "--figure must be left out with --no-labels"),
        (("--page", "page.pdf"), "page.pdf: the suffix must be .html"),
    ],
)
def test_options_of_repair_that_do_not_go_together_are_refused(models, command, option, message):
    found = command("repair", "own_models:make", "--data", "own.npz", "-o", "r.safetensors", *option, code=2)
    assert message in found.stderr
    assert not (models / "r.safetensors").exists()


CAMERA = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)).eval()
"""


def test_repair_knows_what_pixels_are_and_takes_inputs_of_home_and_a_few_labels(folder, asked, command, monkeypatch):
    (folder / "camera_models.py").write_text(CAMERA, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    x = np.random.default_rng(0).random((240, 3, 8, 8)).astype(np.float32)
    network = load_model("camera_models:make")
    y = network(torch.from_numpy(x)).argmax(dim=1).numpy()
    inputs = (x - 0.5) / 0.25
    np.savez("inputs.npz", inputs=inputs, labels=y)
    np.savez("images.npz", images=(255 * x).astype(np.uint8).transpose(0, 2, 3, 1), labels=y)
    words = ("repair", "camera_models:make", "-o", "r.safetensors", "--data")
    assert "gamma" not in asked(*words, "inputs.npz")["record"]["p_values"]
    assert "gamma" in asked(*words, "images.npz")["record"]["p_values"]
    said = asked(*words, "inputs.npz", "--mean", "0.5", "--std", "0.25,0.25,0.25")["record"]
    assert "gamma" in said["p_values"]
    assert not any("rarely" in note for note in said["notes"])
    moved = ("--no-labels", "--no-crop", "--reference", "inputs.npz", "--labelled", "inputs.npz", "--budget", "5")
    np.savez("moved.npz", inputs=inputs + 2)
    record = asked(*words, "moved.npz", *moved)["record"]
    assert record["labelled"]
    assert any("those of 240 reference inputs" in note for note in record["notes"])
    assert "240 labelled samples chose among the corrections made without labels" in record["notes"]
    said = command(*words, "inputs.npz", "--no-labels", "--reference", "images.npz", code=2).stderr
    assert "--reference must have inputs, as inputs.npz has, got images" in said


def test_clamp_passes_its_options_on(models, asked):
    words = ("clamp", "own_models:ready", "--data", "own.npz", "-o", "c.safetensors", "--loss", "focal")
    found = asked(*words, "--recipe", "closed_form", "--gamma", 0.5, "--seed", 4, "--box", -9, 9)
    record = found["record"]
    assert (record["recipe"], record["loss"], record["gamma"]) == ("closed_form", "focal", 0.5)
    assert (record["seed"], record["samples"]) == (4, 300)
    pool = asked(*words, "--gamma", 1, "--gamma", 0.5, "--penalty", 0.1, "--input-map", "affine")["record"]
    assert (sorted(pool["gammas"]), pool["penalty"], pool["input_map"]) == (["0.5", "1.0"], 0.1, "affine")
    assert set(found) == {"schema", "verb", "model", "data", "output", "verdict", "record", "scores", "warnings"}
    assert list(found["scores"]["methods"]) == ["raw", "temperature", "clamping"]


def test_clamp_follows_the_paper_with_other_steps(models, asked):
    words = ("clamp", "own_models:make", "--data", "own.npz", "-o", "c.safetensors", "--recipe", "paper")
    mean = asked(*words, "--epochs", "5", "--start", "zero", "--norm", "l2", "--penalty", "0")["record"]
    total = asked(*words, "--epochs", "5", "--start", "zero", "--reduction", "sum", "--penalty", "0")["record"]
    fast = asked(*words, "--epochs", "5", "--start", "zero", "--lr", "0.3", "--penalty", "0")["record"]
    assert mean["recipe"] == total["recipe"] == "paper"
    assert total["objective"] < mean["objective"]
    assert total["delta_norm"] == pytest.approx(fast["delta_norm"], rel=1e-4)  # one batch of 300 rows


def test_clamp_loads_weights(models, asked):
    words = ("--data", "own.npz", "-o", "c.safetensors")
    plain = asked("clamp", "own_models:make", *words)
    heavy = asked("clamp", "own_models:make", *words, "--weights", "own.safetensors")
    torch.save({"scale": torch.tensor(2.0)}, "own.pt")
    pickled = asked("clamp", "own_models:make", *words, "--weights", "own.pt")
    assert heavy["scores"] == pickled["scores"] != plain["scores"]


def test_clamp_halves_a_file_without_parts(models, asked):
    found = asked("clamp", "own_models:make", "--data", "whole.npz", "-o", "c.safetensors")
    assert found["record"]["samples"] + found["scores"]["rows"] == 500
    assert found["scores"]["rows"] == 250


def test_clamp_reads_images_as_pixels(models, command, asked):
    images = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8)
    np.savez("digits.npz", images=images, labels=np.arange(120) % 10)
    (models / "flat.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
        encoding="utf-8",
    )
    with torch.random.fork_rng():
        found = asked("clamp", "flat:make", "--data", "digits.npz", "-o", "c.safetensors")
    assert found["scores"]["rows"] == 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_models"], "the model must be package.module:make_model or a folder that train wrote"),
        (["nowhere:make"], "there is no module nowhere"),
        (["own_models:nothing"], "own_models has no nothing; it has: torch, nn, Scaled, make"),
        (["own_models:number"], "must be or make a torch network, got int"),
        (["own_models:make", "--weights", "none.safetensors"], "none.safetensors: no such file"),
        (["own_models:make", "--weights", "wrong.safetensors"], "scale is missing in the file, () in the network"),
        (["own_models:make", "--recipe", "papr"], "no recipe is called 'papr'; did you mean paper"),
        (["own_models:make", "--penalty", "R3"], "penalty must be"),
    ],
)
def test_what_clamp_refuses(models, command, words, said):
    save_file({"weight": torch.zeros(2)}, "wrong.safetensors")
    line = command("clamp", *words, "--data", "own.npz", "-o", "c.safetensors", code=2).stderr
    assert said in line
    assert not (models / "c.safetensors").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("own.csv", "own.csv: the data must be a .npz file, a folder of images"),
        ("none.npz", "none.npz: no such file"),
        ("test.npz", "wanted the arrays train_images"),
        ("short.npz", "val must have a label for each of its 5 inputs, got 4"),
    ],
)
def test_what_data_clamp_refuses(models, command, data, said):
    x = np.zeros((5, 3), np.float32)
    np.savez("short.npz", val_inputs=x, val_labels=np.zeros(4, int), test_inputs=x, test_labels=np.zeros(5, int))
    assert said in command("clamp", "own_models:make", "--data", data, "-o", "c.safetensors", code=2).stderr
