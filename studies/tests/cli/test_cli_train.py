"""train, and what the other verbs read from its folder."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trueup
from trueup.cli.resolve import load_model
from trueup_studies.training.data import load_data

pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")


@pytest.fixture
def trained(folder, command):
    """The folder of a short run on the digits."""
    pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
    words = ("--data", "digits", "--network", "mlp", "--epochs", 2, "--lr", 0.05, "--seed", 1)
    return command("train", *words, "-o", "run").stdout


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
    from trueup_studies.training import loop

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
    pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
    how = ("--epochs", 6, "--lr", 0.2, "--schedule", "constant")
    words = ("train", "--data", "digits", "--network", "mlp", *how, "--stop-on", stop_on)
    out = command(*words, "-o", "run").stdout
    assert ("refinement" in out.splitlines()[0]) == (stop_on == "refinement")
    run, history = (json.loads((folder / f"run/{name}.json").read_text("utf-8")) for name in ("run", "history"))
    scores = [epoch[stop_on] for epoch in history["epochs"]]
    kept = 1 + int(np.argmin(scores))
    assert history["epoch"] == run["epoch"] == kept < 6
    assert f"Kept the weights of epoch {kept} of 6 (lowest {named} on the validation half)" in out.splitlines()
    val = trueup.load("run/val.npz")
    assert trueup.metrics.nll(*val) == pytest.approx(history["epochs"][kept - 1]["nll"], abs=1e-6)
    assert asked(*words, "-o", "again")["run"]["epoch"] == kept


def test_train_goes_on_where_it_was_killed_as_it_ended(folder, command, monkeypatch):
    pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
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
    pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
    line = command("train", "--data", "digits", "--network", "mlp", *option, "-o", "run", code=2).stderr
    assert message in line
    assert not (folder / "run").exists()


def test_train_refuses_networks_that_do_not_fit(folder, command):
    line = command("train", "--data", "digits", "--network", "text_cnn", "-o", "run", code=2).stderr
    assert "text_cnn is not for images such as digits" in line
    assert not (folder / "run").exists()


def test_a_data_set_that_does_not_exist_is_refused(folder, command):
    line = command("clamp", "torch.nn:Identity", "--data", "digitz", "-o", "c.safetensors", code=2).stderr
    assert "no data set is called 'digitz'; did you mean digits" in line
