import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning.fabric", reason="Lightning Fabric is not installed")

from trueup import losses, metrics
from trueup.models.networks import MLP
from trueup.training.history import History
from trueup.training.loop import TrainingError, train


def drawn(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    y = torch.multinomial(torch.softmax(2 * x[:, :3], dim=1), 1, generator=generator)[:, 0]
    return TensorDataset(x, y)


DATA = (drawn(300, 0), drawn(200, 1), drawn(200, 2))


def network(seed=0, dropout=0.0):
    return MLP(3, inputs=5, hidden=(16,), dropout=dropout, seed=seed)


def test_a_run_learns_and_its_record_is_what_the_network_says():
    state = torch.random.get_rng_state()
    done = train(network(), DATA, losses.CrossEntropy(), epochs=4, batch_size=32)
    assert torch.equal(torch.random.get_rng_state(), state)
    last = done.history.epochs[-1]
    assert last.loss < done.history.epochs[0].loss
    done.model.eval()
    with torch.no_grad():
        val, test, seen = (done.model(half.tensors[0]) for half in (DATA[1], DATA[2], DATA[0]))
    assert last.accuracy == pytest.approx(metrics.accuracy(val, DATA[1].tensors[1]))
    assert last.nll == pytest.approx(metrics.nll(val, DATA[1].tensors[1]), rel=1e-6)
    assert last.test_ece == pytest.approx(metrics.ece(test, DATA[2].tensors[1]), abs=1e-6)
    pool = [metrics.ece(test / (i / 100), DATA[2].tensors[1]) for i in range(1, 1001)]
    assert last.optimal_ece == pytest.approx(min(pool), abs=1e-6)
    assert np.array_equal(done.history.correct[-1], (seen.argmax(dim=1) == DATA[0].tensors[1]).numpy())
    assert [e.lr for e in done.history.epochs] == pytest.approx([0.1, 0.0853553, 0.05, 0.0146447], rel=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_another():
    runs = [train(network(dropout=0.5), DATA, losses.CrossEntropy(), 2, seed=seed).model for seed in (1, 1, 2)]
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_learned_epochs_by_scanning_from_the_end():
    rng = np.random.default_rng(0)
    correct = rng.random((6, 40)) < 0.7
    found = History((), correct).learned_epochs()
    for column, epoch in zip(correct.T, found, strict=True):
        expected = np.inf
        for number in range(6, 0, -1):
            if not column[number - 1]:
                break
            expected = number
        assert epoch == expected


def test_losses_that_do_their_own_passes_get_the_network():
    class Own(nn.Module):
        takes_model = True

        def forward(self, model, inputs, labels):
            return nn.functional.cross_entropy(model(inputs), labels)

    own = train(network(), DATA, Own(), epochs=2).history.epochs
    plain = train(network(), DATA, nn.CrossEntropyLoss(), epochs=2).history.epochs
    assert own[-1].loss == plain[-1].loss


def test_patience_ends_a_run():
    done = train(network(), DATA, losses.CrossEntropy(), epochs=50, lr=1.0, schedule="constant", patience=3)
    assert 4 <= len(done.history.epochs) < 50
    best = int(np.argmin([epoch.nll for epoch in done.history.epochs]))
    assert len(done.history.epochs) - 1 - best == 3


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(tmp_path):
    class Breaks(nn.Module):
        calls = 0

        def forward(self, logits, labels):
            Breaks.calls += 1
            return nn.functional.cross_entropy(logits, labels) * (float("nan") if Breaks.calls > 4 else 1.0)

    file = tmp_path / "run.pt"
    with pytest.raises(TrainingError, match=r"the loss is nan in epoch 2.*last good state is in .*run.pt"):
        train(network(), DATA, Breaks(), epochs=3, checkpoint=file)
    assert len(torch.load(file, weights_only=True)["history"]["epochs"]) == 1


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.pt"
    train(network(), DATA, losses.CrossEntropy(), epochs=1, checkpoint=file)
    with pytest.raises(ValueError, match=r"run.pt: it is of a run with epochs 1, and this one has epochs 2"):
        train(network(), DATA, losses.CrossEntropy(), epochs=2, checkpoint=file)


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from training.test_loop import DATA, network
from trueup import losses
from trueup.training.loop import train
done = train(network(dropout=0.3), DATA, losses.CrossEntropy(), 30, batch_size=8, checkpoint={file!r}, progress=False)
torch.save([p.detach() for p in done.model.parameters()], {out!r})
"""


def test_a_killed_run_goes_on_to_the_same_result_bit_for_bit(tmp_path):
    def script(file, out):
        text = SCRIPT.format(tests=os.path.dirname(os.path.dirname(__file__)), file=str(file), out=str(out))
        return [sys.executable, "-c", textwrap.dedent(text)]

    subprocess.run(script(tmp_path / "whole.pt", tmp_path / "whole.out"), check=True)
    file, out = tmp_path / "killed.pt", tmp_path / "killed.out"
    process = subprocess.Popen(script(file, out))
    while not file.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert 1 <= len(torch.load(file, weights_only=True)["history"]["epochs"]) < 30
    subprocess.run(script(file, out), check=True)
    whole, killed = (torch.load(path, weights_only=True) for path in (tmp_path / "whole.out", out))
    assert all(torch.equal(a, b) for a, b in zip(whole, killed, strict=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"epochs": 0}, "epochs must be"), ({"optimiser": "lion"}, "optimiser must be"), ({"schedule": "x"}, "schedule")],
)
def test_wrong_settings_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        train(network(), DATA, losses.CrossEntropy(), **{"epochs": 1, **options})


TOGETHER = """
import os, sys, torch, json
sys.path.insert(0, {tests!r})
from lightning.fabric import Fabric
from training.test_loop import DATA, network
from trueup import losses
from trueup.training.loop import train
fabric = Fabric(accelerator="cpu", devices={devices}, strategy="ddp" if {devices} > 1 else "auto")
fabric.launch()
rows = []
for loss in (losses.CrossEntropy(), losses.Focal(gamma=2.0), losses.CLUE(passes=1)):
    done = train(network(), DATA, loss, 3, batch_size={batch}, fabric=fabric, lr=0.05, progress=False)
    rows += [[e.loss, e.nll, e.train_accuracy] for e in done.history.epochs]
if fabric.is_global_zero:
    with open({out!r}, "w") as file:
        json.dump(rows, file)
fabric.barrier()
os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there
"""


def test_two_processes_equal_one_with_the_doubled_batch(tmp_path):
    rows = []
    for devices, batch in ((1, 32), (2, 16)):
        out, script = tmp_path / f"{devices}.json", tmp_path / f"{devices}.py"
        tests = os.path.dirname(os.path.dirname(__file__))
        script.write_text(TOGETHER.format(tests=tests, devices=devices, batch=batch, out=str(out)))
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        done = subprocess.run([*run, str(script)], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        rows.append(json.loads(out.read_text()))
    assert np.allclose(*rows, atol=1e-4)
