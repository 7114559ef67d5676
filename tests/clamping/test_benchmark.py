"""The benchmark of clamping, in its small form."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "benchmarks/clamping.py"]


def test_it_runs_small_and_without_data():
    alone = {name: value for name, value in os.environ.items() if name != "TRUEUP_DATA"}
    out = subprocess.run([*COMMAND, "--small"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    for what in ("untouched", "bit for bit", "in distribution", "share of the oracle's gain", "the worst", "varpro"):
        assert what in out
    assert "MISS" not in out


def test_the_benchmark_of_repair_prints_means():
    command = [sys.executable, "benchmarks/repair.py", "--small", "--methods", "temperature", "repair", "head"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",")[:5] for line in out.splitlines() if line.startswith("drawn,")]
    methods = ("temperature", "repair", "head")
    assert [tuple(row[2:4]) for row in rows] == [(shift, method) for shift in ("none", "gamma") for method in methods]
    assert {row[4] for row in rows} == {"1"}


def test_without_data_it_says_what_it_wants(monkeypatch):
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["clamping.py"])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with pytest.raises(SystemExit, match="^TRUEUP_DATA must name the folder"):
        runpy.run_path(str(ROOT / "benchmarks" / "clamping.py"), run_name="__main__")
