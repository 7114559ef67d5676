"""Questions with different numbers of options on the command line, from a table with empty cells and from shards."""

import numpy as np
import pytest

import trueup


@pytest.fixture
def choice(tmp_path, monkeypatch):
    """A table with the options A to D, some of them empty, and the same pair."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    absent = np.arange(4) >= rng.integers(2, 5, size=(900, 1))
    z = np.where(absent, -np.inf, 2 * rng.normal(size=(900, 4)))
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    lines = [",".join("" if np.isneginf(x) else repr(float(x)) for x in row) for row in z]
    table = "\n".join(f"{line},{label}" for line, label in zip(lines, y, strict=True))
    (tmp_path / "choice.csv").write_text(f"logit_0,logit_1,logit_2,logit_3,label\n{table}\n")
    return z, y


def test_evaluate_fit_and_apply(choice, command, asked):
    z, y = choice
    nll = asked("evaluate", "choice.csv")["scores"]["methods"]["network"]["metrics"]["nll"]["value"]
    assert nll == pytest.approx(trueup.metrics.nll(z, y))
    command("fit", "choice.csv", "-m", "svs", "-o", "c.safetensors")
    command("apply", "c.safetensors", "choice.csv", "-o", "after.csv")
    after, _ = trueup.load("after.csv")
    assert np.array_equal(np.isneginf(after), np.isneginf(z))
    assert trueup.metrics.nll(after, y) < nll
    assert "classes on average" in command("sets", "choice.csv").stdout


def test_a_label_of_an_absent_option_is_named(choice, command, tmp_path):
    (tmp_path / "bad.csv").write_text("logit_0,logit_1,logit_2,label\n1,2,3,0\n1,2,,2\n")
    said = command("evaluate", "bad.csv", code=2)
    assert "labels must be options that their rows have, got 2 in row 1" in said.stderr


def test_shards(choice, tmp_path):
    z, y = choice
    for i in range(3):
        trueup.save((z[i::3], y[i::3]), tmp_path / f"part{i}.parquet")
    shards = trueup.io.Shards.of(tmp_path / "part*.parquet")
    assert trueup.metrics.evaluate_shards(shards)["nll"].value == pytest.approx(trueup.metrics.nll(z, y))
    for method in ("temperature", "vector", "sms", "histogram_ovr"):
        apart, whole = trueup.calibrators.fit_shards(method, shards).calibrator(z), trueup.METHODS[method](z, y)(z)
        here = np.isfinite(z)
        assert np.array_equal(np.isfinite(apart), here)
        centred = [
            x - np.where(here, x, 0).sum(axis=1, keepdims=True) / here.sum(axis=1)[:, None] for x in (apart, whole)
        ]
        assert np.allclose(centred[0][here], centred[1][here], atol=1e-3)
