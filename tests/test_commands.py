"""The commands of the README and the benchmark, in their small form."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_prints_a_table():
    out = run("examples/digits.py")
    assert "997 rows, 10 classes, 15 bins" in out
    assert "It is miscalibrated and overconfident" in out


def test_the_benchmark_runs_small_and_without_peers():
    out = run("benchmarks/metrics.py", "--small")
    assert "log_softmax" in out


def test_the_calibrators_benchmark_runs_small_and_without_peers():
    out = run("benchmarks/calibrators.py", "--small")
    assert "temperature, 500 × 20" in out
    assert "memory" in out
