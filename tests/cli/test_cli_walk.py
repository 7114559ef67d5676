"""A user's whole walk over real logits: measure, repair, measure again, choose, report."""

import os
import pty
import subprocess
import sys

import pytest


def test_the_walk_over_real_logits(data, tmp_path, monkeypatch, command, asked):
    monkeypatch.chdir(tmp_path)
    both = data / "logits" / "cifar10_densenet40.npz"
    before = asked("evaluate", both, "--split", "test")["scores"]["methods"]["network"]["metrics"]
    command("fit", both, "-m", "temperature", "-o", "cal.safetensors")
    command("apply", "cal.safetensors", both, "--split", "test", "-o", "after.npz")
    after = asked("evaluate", "after.npz")["scores"]["methods"]["network"]["metrics"]
    assert before["ece"]["value"] == pytest.approx(0.0550, abs=5e-4)
    assert after["ece"]["value"] == pytest.approx(0.0095, abs=5e-4)
    assert after["accuracy"] == before["accuracy"]
    found = asked("rank", both, "-m", "temperature", "-m", "svs")["audit"]["scores"]["methods"]
    assert found["raw"]["metrics"]["ece"] == before["ece"]
    assert found["temperature"]["metrics"]["ece"]["value"] == pytest.approx(after["ece"]["value"], abs=1e-6)


def test_a_terminal_of_eighty_columns_is_not_overrun():
    """On a pseudo-terminal tables have a line under their head, and sentences are wrapped."""
    code = """
from trueup.cli.output import print_remarks, print_table
print_table([["method", "ece"], ["raw", "0.0550 "], ["temperature [x]", "0.0095*"]])
print_table([["name", "what it is"], ["one", "many words " * 20]], words=True)
print_remarks("It says [97 %] on average :smile: " * 5)
"""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=subprocess.DEVNULL, env=environment)
    os.close(slave)
    seen = b""
    while part := _read(master):
        seen += part
    os.close(master)
    assert process.wait() == 0
    lines = seen.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(set(line.strip()) == {"─"} for line in lines)
    assert "temperature [x]" in seen.decode()
    assert len({line.index(".") for line in lines[2:4]}) == 1
    assert "[97 %] on average :smile:" in seen.decode()
    assert sum("many words" in line for line in lines) > 2


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""
