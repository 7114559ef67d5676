"""train, clamp and repair."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import trueup
from trueup.cli.resolve import load_model
from trueup.training.data import load_data

pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")

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


@pytest.fixture
def trained(folder, command):
    """The folder of a short run on the digits."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    words = ("--data", "digits", "--network", "mlp", "--epochs", 2, "--lr", 0.05, "--seed", 1)
    return command("train", *words, "-o", "run").stdout


def test_clamp_fits_judges_and_saves(models, command):
    out = command("clamp", "own_models:make", "--data", "own.npz", "-o", "clamped.safetensors").stdout
    lines = out.splitlines()
    assert lines[0] == "200 rows, 3 classes, 15 bins"
    assert [line.split()[0] for line in lines[3:6]] == ["raw", "temperature", "clamping"]
    assert "Did the input map earn its place? Yes: " in out
    assert lines[-1] == "Written: clamped.safetensors"
    clamped = trueup.load_clamped(load_model("own_models:make"), "clamped.safetensors")
    assert clamped.before.delta.detach().numpy() == pytest.approx([-1.5, 0.5, 1.5], abs=1.5)


def test_repair_fits_judges_draws_and_saves(models, command, asked):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = ("repair", "own_models:make", "--data", "own.npz", "-o", "repaired.safetensors")
    lines = command(*words, "--figure", "ladder.png").stdout.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["raw", "temperature", "repair"]
    assert any(line.startswith("Was there anything to repair? Yes: feature 0 offset -") for line in lines)
    assert lines[-1] == "Written: repaired.safetensors"
    assert (models / "ladder.png").stat().st_size > 1000
    repaired = trueup.load_repaired(load_model("own_models:make"), "repaired.safetensors")
    found = asked(*words, "--part", "input", "--map", "offset")
    assert found["record"]["parts"] == ["input"]
    assert "offset" in found["record"]["p_values"]
    assert repaired.repair_record.parts == ("input",)
    assert list(found["scores"]["methods"]) == ["raw", "temperature", "repair"]
    said = asked(*words, "--no-labels")["record"]
    assert "without labels nothing but new batch-norm statistics can teach" in said["verdict"]
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
    assert "can teach" in (models / "bare.html").read_text("utf-8")
    assert "Was there anything to repair? No" in command(*words, "bare.npz", "--no-labels").stdout
    command(*words, "own.npz", "--page", "own.html", "-q")
    page = (models / "own.html").read_text("utf-8")
    assert all(words in page for words in ("What the map does to every input: feature 0 offset -", "On test samples"))
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
        (("--mean", "0.5", "--std", "x"), "--std must be numbers with commas between them"),
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
    assert not any("seldom" in note for note in said["notes"])
    moved = ("--no-labels", "--no-crop", "--reference", "inputs.npz", "--labelled", "inputs.npz", "--budget", "5")
    np.savez("moved.npz", inputs=inputs + 2)
    record = asked(*words, "moved.npz", *moved)["record"]
    assert record["labelled"]
    assert any("those of 240 inputs of home" in note for note in record["notes"])
    assert "240 labelled samples chose among what was made without labels" in record["notes"]
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
    assert set(found) == {"schema", "verb", "model", "data", "output", "verdict", "record", "scores"}
    assert list(found["scores"]["methods"]) == ["raw", "temperature", "clamping"]


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
    data = load_data("digits")
    images = np.stack([np.asarray(data.val[i][0][0]) for i in range(120)])
    labels = np.array([int(data.val[i][1]) for i in range(120)])
    np.savez("digits.npz", images=(255 * images).round().astype(np.uint8), labels=labels)
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
        ("digitz", "no data set is called 'digitz'; did you mean digits"),
        ("own.csv", "the data must be a .npz file or a name"),
        ("none.npz", "none.npz: no such file"),
        ("test.npz", "wanted the arrays train_images"),
        ("short.npz", "val must have a label for each of its 5 inputs, got 4"),
    ],
)
def test_what_data_clamp_refuses(models, command, data, said):
    x = np.zeros((5, 3), np.float32)
    np.savez("short.npz", val_inputs=x, val_labels=np.zeros(4, int), test_inputs=x, test_labels=np.zeros(5, int))
    assert said in command("clamp", "own_models:make", "--data", data, "-o", "c.safetensors", code=2).stderr


def test_train_leaves_all_that_the_other_verbs_need(folder, trained, command, asked):
    assert " ".join(trained.split()[:11]) == "epoch loss train accuracy accuracy nll ece test ece optimal ece"
    files = {path.name for path in (folder / "run").iterdir()}
    assert files == {"weights.safetensors", "history.json", "run.json", "val.npz", "test.npz"}
    history = json.loads((folder / "run/history.json").read_text(encoding="utf-8"))
    assert history["schema"] == 1
    assert [epoch["number"] for epoch in history["epochs"]] == [1, 2]
    assert history["epoch"] == json.loads((folder / "run/run.json").read_text(encoding="utf-8"))["epoch"] == 2
    assert "Kept the weights" not in trained
    val = trueup.load("run/val.npz")
    assert history["epochs"][-1]["ece"] == pytest.approx(trueup.metrics.ece(*val), abs=1e-6)

    model = load_model("run")
    data = load_data("digits", seed=1)
    with torch.no_grad():
        found = model.eval()(torch.stack([data.val[i][0] for i in range(5)]))
    assert found.numpy() == pytest.approx(val.logits[:5], abs=1e-4)
    assert isinstance(model, nn.Sequential)
    assert set(load_file("run/weights.safetensors")) == set(model.state_dict())

    clamped = asked("clamp", "run", "-o", "run/clamped.safetensors")
    assert (clamped["data"], clamped["record"]["samples"]) == ("digits", 360)
    assert asked("fit", "run/val.npz", "-m", "temperature", "-o", "run/cal.safetensors")["rows"] == 360


def test_train_goes_on_where_it_was_stopped(folder, trained, command, monkeypatch):
    words = ("train", "--data", "digits", "--network", "mlp", "--epochs", 2, "--lr", 0.05, "--seed", 1)
    from trueup.training import loop

    evaluate = loop._Run.evaluate

    def stopped(self, number, *rest, **options):
        if number == 2:
            raise KeyboardInterrupt
        return evaluate(self, number, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Run, "evaluate", stopped)
        command(*words, "-o", "again", code=130)
    assert (folder / "again/checkpoint.pt").exists()
    other = command("train", "--data", "digits", "--network", "cnn", "--epochs", 2, "-o", "again", code=2)
    assert "again/checkpoint.pt is of another run" in other.stderr
    assert "resuming from again/checkpoint.pt" in command(*words, "-o", "again").stderr
    assert not (folder / "again/checkpoint.pt").exists()
    one, two = (load_file(f"{name}/weights.safetensors") for name in ("run", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("stop_on", "named"), [("refinement", "refinement"), ("nll", "NLL")])
def test_train_says_which_epoch_it_kept(folder, command, asked, stop_on, named):
    pytest.importorskip("lightning", reason="lightning is not installed")
    how = ("--epochs", 6, "--lr", 0.2, "--schedule", "constant")
    words = ("train", "--data", "digits", "--network", "mlp", *how, "--stop-on", stop_on)
    out = command(*words, "-o", "run").stdout
    assert ("refinement" in out.splitlines()[0]) == (stop_on == "refinement")
    run, history = (json.loads((folder / f"run/{name}.json").read_text("utf-8")) for name in ("run", "history"))
    scores = [epoch[stop_on] for epoch in history["epochs"]]
    kept = 1 + int(np.argmin(scores))
    assert history["epoch"] == run["epoch"] == kept < 6
    assert f"Kept the weights of epoch {kept} of 6 (least {named} on the validation half)" in out.splitlines()
    val = trueup.load("run/val.npz")
    assert trueup.metrics.nll(*val) == pytest.approx(history["epochs"][kept - 1]["nll"], abs=1e-6)
    assert asked(*words, "-o", "again")["run"]["epoch"] == kept


def test_train_goes_on_where_it_was_killed_as_it_ended(folder, command, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed")
    words = ("train", "--data", "digits", "--network", "mlp", "--epochs", 1, "--stop-on", "nll", "-o", "run")
    from trueup.io import load_save

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(load_save, "save", killed)
        command(*words, code=130)
    assert json.loads((folder / "run/run.json").read_text("utf-8"))["epoch"] == 1
    assert "resuming from run/checkpoint.pt" in command(*words).stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--stop-on", "accuracy"), "stop_on must be nll or refinement, got 'accuracy'"),
        (("--optimiser", "lion"), "optimiser must be"),
        (("--schedule", "linear"), "schedule must be"),
        (("--lr", "-1"), "lr must be a number from 0 on"),
        (("--epochs", "0"), "epochs must be at least 1"),
    ],
)
def test_train_refuses_options_before_it_writes(folder, command, option, message):
    pytest.importorskip("lightning", reason="lightning is not installed")
    line = command("train", "--data", "digits", "--network", "mlp", *option, "-o", "run", code=2).stderr
    assert message in line
    assert not (folder / "run").exists()


def test_train_refuses_networks_that_do_not_fit(folder, command):
    line = command("train", "--data", "digits", "--network", "text_cnn", "-o", "run", code=2).stderr
    assert "text_cnn is not for images such as digits" in line
    assert not (folder / "run").exists()
