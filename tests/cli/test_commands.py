"""The commands of the README and the benchmark, in their small form."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_prints_a_table():
    out = run("examples/digits.py")
    assert "997 rows, 10 classes, 15 bins" in out
    assert "It is miscalibrated and overconfident" in out


def test_lightning_logs_the_streaming_metrics():
    pytest.importorskip("lightning", reason="lightning is not installed")
    out = run("-W", "ignore", "examples/lightning_digits.py")
    ece = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
    assert len(ece) == 4
    assert 0 < ece[0] < 0.5
    assert "brier" in out.split("The table of the last:")[1]


def test_the_benchmark_runs_small_and_without_peers():
    out = run("benchmarks/metrics.py", "--small")
    assert "log_softmax" in out


def test_the_calibrators_benchmark_runs_small_and_without_peers():
    out = run("benchmarks/calibrators.py", "--small")
    assert "temperature, 500 × 20" in out
    assert "memory" in out


def test_the_shards_benchmark_runs_small():
    """Also where it counts: the answers of one worker, of two and of memory are the same number."""
    out = run("benchmarks/shards.py", "--small")
    apart = [float(line.split("answers ")[1].split()[0]) for line in out.splitlines() if "answers" in line]
    assert len(apart) == 2
    assert max(apart) < 1e-9
    assert "peak of a worker" in out


def test_the_monitor_benchmark_runs_small():
    out = run("benchmarks/monitor.py", "--small")
    assert out.count("false alarms") == 2
    assert out.count("found  20 of  20") >= 4
