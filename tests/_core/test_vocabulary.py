"""Logits of a whole vocabulary: some rows at a time, never a copy of all of them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trueup
from optional import torch
from trueup._core.row_scores import score_rows
from trueup.calibrators import Temperature
from trueup.cli.options import Reader

VOCABULARY = 50_257


def drawn(n, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.empty(n, classes).normal_(generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    z[torch.arange(n), y] += 4
    return 2 * z, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_a_vocabulary_are_those_of_its_exact_values(dtype):
    z, y = drawn(7, VOCABULARY)
    z = z.to(dtype)
    log_p = torch.log_softmax(z.double(), dim=1)
    p = log_p.exp()
    scored = score_rows(z, y)
    np.testing.assert_allclose(scored.nll, -log_p.gather(1, y[:, None])[:, 0], rtol=1e-10)
    np.testing.assert_allclose(scored.confidence, p.amax(dim=1), rtol=1e-10)
    np.testing.assert_allclose(scored.entropy, -(p * log_p).sum(dim=1), rtol=1e-9)
    assert scored.predicted.tolist() == z.float().argmax(dim=1).tolist()


def test_a_temperature_of_many_classes_is_found_from_fewer_rows():
    z, y = drawn(450, 5000)
    exact = Temperature.fit(z.double(), y).temperature  # of so few rows all are asked from the start
    assert float(Temperature.fit(z, y).temperature) == pytest.approx(float(exact), rel=1e-6)
    assert float(Temperature.fit(z.half(), y).temperature) == pytest.approx(float(exact), rel=1e-3)


GROWTH = """
import json, torch, trueup
from trueup.calibrators.temperature import Temperature

def megabytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

torch.set_num_threads(1)
z, y = torch.empty(800, 50_257), torch.arange(800)
for some in range(0, 800, 50):
    z[some : some + 50].normal_(generator=torch.Generator().manual_seed(some))
z[torch.arange(800), y] += 4
trueup.evaluate(z[:20], y[:20]), Temperature.fit(z[:20], y[:20])
for case in ("float32", "-inf", "bfloat16"):
    if case == "-inf":
        z[:, -100:] = -torch.inf  # options that no row has
    z = z.to(torch.bfloat16) if case == "bfloat16" else z
    for name, run in {"evaluate": trueup.evaluate, "temperature": Temperature.fit}.items():
        open("/proc/self/clear_refs", "w").write("5")
        before = megabytes("VmRSS:")
        run(z, y)
        print(json.dumps([case, name, megabytes("VmHWM:") - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from /proc")
def test_no_copy_of_a_vocabulary_is_made():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=600)
    grown = [json.loads(line) for line in done.stdout.splitlines()]
    whole = 800 * VOCABULARY * 4 / 2**20  # in float32
    # The class-wise sums and their intervals take 90 MB of so many classes, however many rows there are.
    assert len(grown) == 6
    for case, _, megabytes in grown:  # NumPy has no bfloat16, which becomes float32, once
        assert megabytes < (1.9 if case == "bfloat16" else 0.9) * whole, grown


def test_the_command_leaves_the_logits_of_an_npy_file_on_disk(tmp_path):
    z, y = drawn(30, 20)
    trueup.save((z.half(), y), tmp_path / "a.npy")
    table = Reader().load(tmp_path / "a.npy")
    assert isinstance(table.logits, np.memmap)
    assert table.logits.dtype == np.float16
    whole = trueup.load(tmp_path / "a.npy")
    assert not isinstance(whole.logits, np.memmap)
    assert trueup.evaluate(*table)["ece"] == trueup.evaluate(*whole)["ece"]
