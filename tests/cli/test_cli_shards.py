"""Shards, logs, and files without labels."""

import numpy as np
import pytest

import trueup
from trueup import load


@pytest.fixture
def shards(folder, draw):
    z, y = draw(900, 3)
    (folder / "parts").mkdir()
    for i in range(3):
        trueup.save((z[i::3], y[i::3]), f"parts/{i}.npz")
    trueup.save((z, y), "whole.npz")
    return folder


@pytest.mark.parametrize("where", ["parts", "parts/*.npz"])
def test_shards_are_evaluated_as_one(shards, asked, where):
    ours, whole = asked("evaluate", where), asked("evaluate", "whole.npz")
    assert ours["scores"]["rows"] == 900
    for metric in ("accuracy", "nll", "ece"):
        one, other = (r["scores"]["methods"]["network"]["metrics"][metric]["value"] for r in (ours, whole))
        assert one == pytest.approx(other, abs=1e-9)
    assert ours["verdict"] == whole["verdict"]


def test_shards_are_fitted_as_one(shards, asked):
    ours = asked("fit", "parts", "-m", "temperature", "-o", "a.safetensors")
    whole = asked("fit", "whole.npz", "-m", "temperature", "-o", "b.safetensors")
    assert (ours["rows"], ours["n_classes"]) == (900, 3)
    assert ours["calibrator"] == whole["calibrator"]


def test_a_pool_may_read_them(shards, asked):
    assert asked("evaluate", "parts", "--scheduler", "processes:1")["scores"] == asked("evaluate", "parts")["scores"]


def test_what_shards_cannot_do_is_told(shards, command):
    assert "shards take one of the methods temperature" in command("fit", "parts", "-o", "c.safetensors", code=2).stderr
    assert "--scheduler is for a folder" in command("evaluate", "whole.npz", "--scheduler", "local", code=2).stderr
    (shards / "parts" / "1.npz").write_bytes(b"PK nothing")
    assert "1.npz" in command("evaluate", "parts", code=2).stderr
    result = command("evaluate", "parts", "--skip-bad")
    assert "600 rows" in result.stdout
    assert "1 bad shards were left out" in result.stderr


def test_logs_are_replayed(folder, draw, asked, command):
    for day, sharper in enumerate((1.0, 1.0, 3.0)):
        trueup.save(draw(1500, 10 + day, sharper), f"day{day}.npz")
    calm = asked("monitor", "day0.npz", "day1.npz")
    assert calm["status"]["rows"] == 3000
    assert calm["status"]["alarm"] is None
    result = command("monitor", "day*.npz", code=3)
    assert "ALARM at row 3," in result.stdout
    assert "Overconfident" in result.stdout or "often" in result.stdout


def test_a_state_goes_on(folder, draw, asked, command):
    trueup.save(draw(700, 1, 1.0), "one.npz")
    trueup.save(draw(700, 2, 1.0), "two.npz")
    asked("monitor", "one.npz", "--state", "watch.safetensors")
    later = asked("monitor", "two.npz", "--state", "watch.safetensors")
    assert later["status"] == asked("monitor", "one.npz", "two.npz")["status"]
    assert load("watch.safetensors").rows == 1400
    refused = command("monitor", "one.npz", "--state", "watch.safetensors", "--level", "0.9", code=2)
    assert "stores its own settings: leave out --level" in refused.stderr


@pytest.mark.parametrize("suffix", ["npz", "npy", "csv", "parquet", "safetensors"])
def test_a_calibrator_needs_no_labels(folder, draw, command, suffix):
    from trueup.io import load_logits, save_logits

    z, _ = draw(50, 5)
    save_logits(f"new.{suffix}", z)
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    command("apply", "cal.safetensors", f"new.{suffix}", "-o", f"after.{suffix}")
    wanted = trueup.load("cal.safetensors")(z)
    np.testing.assert_allclose(load_logits(f"after.{suffix}"), wanted, rtol=1e-6)
    assert "label" in command("evaluate", f"new.{suffix}", code=2).stderr
