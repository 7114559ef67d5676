"""Small files of an overconfident network, and the command itself."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli import app


def drawn(n, seed, sharper=3.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return (sharper * z).astype(np.float32), y


@pytest.fixture
def draw():
    """Logits and labels of a network that is so many times too sure."""
    return drawn


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """val.npz, test.npz and both.npz, in the current folder."""
    monkeypatch.chdir(tmp_path)
    val, test = drawn(300, 0), drawn(400, 1)
    trueup.save(val, "val.npz")
    trueup.save(test, "test.npz")
    np.savez("both.npz", val_logits=val[0], val_labels=val[1], test_logits=test[0], test_labels=test[1])
    return tmp_path


@pytest.fixture
def command():
    """Run the command; with `code` it must end with it, else well. Gives what it printed."""

    def run(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def asked(command):
    """Run the command with --json, and read what it printed."""

    def run(*words):
        result = command(*words, "--json")

        def refuse(constant):
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(result.stdout, parse_constant=refuse)

    return run
