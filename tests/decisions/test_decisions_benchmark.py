"""The benchmark of what decisions promise runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_small_run_prints_its_figures():
    pytest.importorskip("torch", reason="one of the peers is in torch")
    script = Path(__file__).parents[2] / "benchmarks" / "decisions.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRUEUP_DATA"}
    done = subprocess.run(
        [sys.executable, script, "--small", "speed", "shift"],
        capture_output=True, text=True, check=False, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ours" in done.stdout
    assert "skipped: TRUEUP_DATA names no folder" in done.stdout
