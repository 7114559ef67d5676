"""The benchmark of training, in its small form."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "benchmarks/training.py"]
ALONE = {name: value for name, value in os.environ.items() if name != "TRUEUP_DATA"}


def test_it_runs_small_and_without_data():
    pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")
    out = subprocess.run([*COMMAND, "--small"], cwd=ROOT, env=ALONE, capture_output=True, text=True, check=True).stdout
    for what in (
        "CLUE, 5 passes of the head",
        "soft_binned_ece",
        "CLUE at batch level",
        "after HB %",
        "inverse_focal 2",
        "tinyshakespeare, 2 seeds",
        "paired difference to Gaussian NLL",
        "regression: level and α",
    ):
        assert what in out
    assert "MISS" not in out


def test_without_data_it_says_what_it_wants(monkeypatch):
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["training.py"])
    with pytest.raises(SystemExit, match="^TRUEUP_DATA must name the folder"):
        runpy.run_path(str(ROOT / "benchmarks" / "training.py"), run_name="__main__")
