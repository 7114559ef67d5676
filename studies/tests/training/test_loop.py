import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")

from trueup import losses, metrics
from trueup.calibrators import refinement
from trueup_studies.networks import MLP
from trueup_studies.training.history import Epoch, History
from trueup_studies.training.loop import TrainingError, _has_stalled, check_options, train
from trueup_studies.training.run_settings import RunSettings
from trueup_studies.training.tasks import Classification


def drawn(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    y = torch.multinomial(torch.softmax(2 * x[:, :3], dim=1), 1, generator=generator)[:, 0]
    return TensorDataset(x, y)


DATA = (drawn(300, 0), drawn(200, 1), drawn(200, 2))


def network(seed=0, dropout=0.0):
    return MLP(3, inputs=5, hidden=(16,), dropout=dropout, seed=seed)


def augmented(halves, function):
    return SimpleNamespace(**dict(zip(("train", "val", "test"), halves, strict=True)), augment=function)


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


def test_without_a_look_at_the_training_half_the_run_is_the_same():
    first, second = (
        train(network(dropout=0.5), DATA, losses.CrossEntropy(), 3, evaluate_train=seen) for seen in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert [epoch.nll for epoch in first.history.epochs] == [epoch.nll for epoch in second.history.epochs]
    assert all(np.isnan(epoch.train_accuracy) for epoch in second.history.epochs)
    assert second.history.correct.shape == (3, 0)


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


@pytest.mark.parametrize("stop_on", ["nll", "refinement"])
def test_the_network_ends_with_the_weights_of_its_best_epoch(tmp_path, stop_on):
    how = {"lr": 2.0, "schedule": "constant", "stop_on": stop_on}
    done = train(network(), DATA, losses.CrossEntropy(), epochs=8, **how)
    scores = [getattr(epoch, stop_on) for epoch in done.history.epochs]
    assert done.epoch == 1 + int(np.argmin(scores))
    left = metrics.nll(*done.val) if stop_on == "nll" else refinement(*done.val).refinement
    assert left == pytest.approx(min(scores), abs=1e-12)
    # A run that was stopped after five epochs remembers its best one.
    file = tmp_path / "run.pt"
    steps = iter(range(5 * 3))  # three batches an epoch

    def interrupt(inputs, generator):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return inputs

    with pytest.raises(KeyboardInterrupt):
        train(network(), augmented(DATA, interrupt), losses.CrossEntropy(), epochs=8, checkpoint=file, **how)
    again = train(network(), DATA, losses.CrossEntropy(), epochs=8, checkpoint=file, **how)
    assert again.epoch == done.epoch
    assert torch.equal(again.val.logits, done.val.logits)


def test_one_wrong_label_does_not_make_the_first_epoch_the_best():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    x = x[(x[:, 0] - x[:, 1]).abs() > 0.3][:300]
    y = (x[:, 0] > x[:, 1]).long()
    y[250] = 1 - y[250]
    parts = (TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:]), None)
    done = train(nn.Linear(2, 2), parts, nn.CrossEntropyLoss(), epochs=12, batch_size=20, lr=0.5, stop_on="refinement")
    scores = [epoch.refinement for epoch in done.history.epochs]
    assert max(scores) < 1
    assert done.epoch == 1 + int(np.argmin(scores)) > 1
    assert metrics.accuracy(*done.val) == max(epoch.accuracy for epoch in done.history.epochs) == 0.99


def test_what_to_stop_on_must_make_sense():
    few = TensorDataset(*DATA[1][:4])
    for halves, stop_on, message in (
        (DATA, "ece", "stop_on must be nll or refinement, got 'ece'"),
        ((DATA[0], None, None), "nll", "stop_on looks at the validation half"),
        (
            (DATA[0], few, None),
            "refinement",
            "^stop_on 'refinement' needs a validation half with at least 5 rows for its temperatures, got 4$",
        ),
    ):

        def refuse(inputs, generator):
            raise AssertionError("nothing is to be trained")

        with pytest.raises(ValueError, match=message):
            train(network(), augmented(halves, refuse), losses.CrossEntropy(), epochs=1, stop_on=stop_on)
    train(network(), (DATA[0], few, None), losses.CrossEntropy(), epochs=1, stop_on="nll")


def test_rows_to_stop_on_are_tokens_that_count():
    x, y = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(48).reshape(8, 6) % 3
    how = {"task": Classification(class_axis="last"), "epochs": 1, "stop_on": "refinement"}
    for known in (4, 5):
        labels = torch.where(torch.arange(6) < known, y[:1], -100)
        halves = (TensorDataset(x, y), TensorDataset(x[:1], labels), None)
        if known == 4:
            with pytest.raises(ValueError, match="at least 5 rows for its temperatures, got 4"):
                train(nn.Linear(5, 3), halves, nn.CrossEntropyLoss(), **how)
        else:
            assert train(nn.Linear(5, 3), halves, nn.CrossEntropyLoss(), **how).epoch == 1


@pytest.mark.parametrize("before", [None, "nll", "refinement"])
@pytest.mark.parametrize("after", [None, "nll", "refinement"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_checkpoint_knows_what_its_run_stops_on(tmp_path, before, after, epochs):
    file = tmp_path / "run.pt"
    steps = iter(range(3 * epochs))  # three batches an epoch

    def interrupt(inputs, generator):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return inputs

    how = {"epochs": 2, "checkpoint": file, "patience": 5}
    with suppress(KeyboardInterrupt):  # killed after the first epoch, or ended
        train(network(), augmented(DATA, interrupt), losses.CrossEntropy(), stop_on=before, **how)
    if before == after:
        assert len(train(network(), DATA, losses.CrossEntropy(), stop_on=after, **how).history.epochs) == 2
        return
    message = f"run.pt: it is of a run with stop_on {before}, and this one has stop_on {after}"
    with pytest.raises(ValueError, match=message):
        train(network(), DATA, losses.CrossEntropy(), stop_on=after, **how)


def test_an_older_checkpoint_counts_as_one_that_stops_on_nothing(tmp_path):
    file = tmp_path / "run.pt"
    how = {"epochs": 6, "lr": 2.0, "schedule": "constant", "checkpoint": file}
    stopped = train(network(), DATA, losses.CrossEntropy(), stop_on="nll", **how)
    assert stopped.epoch < 6
    state = torch.load(file, weights_only=True)
    del state["settings"]["stop_on"]
    torch.save(state, file)
    with pytest.raises(ValueError, match="a run with stop_on unknown, and this one has stop_on nll"):
        train(network(), DATA, losses.CrossEntropy(), stop_on="nll", **how)
    done = train(network(), DATA, losses.CrossEntropy(), **how)
    assert done.epoch == 6
    assert metrics.nll(*done.val) == done.history.epochs[-1].nll


def test_an_unknown_score_does_not_decide_when_to_stop():
    for scores, ends in (
        ([np.nan] * 9, False),
        ([np.nan, 0.5, 0.4, 0.6], False),
        ([0.4, np.nan, np.nan, 0.6], True),
        ([0.5, 0.4, 0.3, np.nan], False),
    ):
        epochs = tuple(Epoch(i + 1, 0.1, 1.0, 0.0, nll=0.1, refinement=score) for i, score in enumerate(scores))
        assert _has_stalled(History(epochs), RunSettings(50, patience=3, stop_on="refinement")) == ends


def test_a_history_up_to_an_epoch():
    done = train(network(), DATA, losses.CrossEntropy(), epochs=3)
    short = done.history.until(2)
    assert short.epochs == done.history.epochs[:2]
    assert short.learned_epochs().tolist() == History((), done.history.correct[:2]).learned_epochs().tolist()
    assert short.correct.shape == (2, 300)


def test_options_are_checked_without_training():
    check_options(DATA, losses.CrossEntropy(), 3, stop_on="refinement", patience=2)
    for options, message in (
        ({"stop_on": "ece"}, "stop_on must be"),
        ({"schedule": "x"}, "schedule must be"),
        ({"lr": -1.0}, "lr must be a number from 0 on, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number from 0 on, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            check_options(DATA, losses.CrossEntropy(), 3, **options)


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
import sys
sys.path.insert(0, {tests!r})
from training.test_loop import train_with_checkpoint
train_with_checkpoint({file!r})
"""


def train_with_checkpoint(file):
    model = train(
        network(dropout=0.3), DATA, losses.CrossEntropy(), 20, batch_size=8, checkpoint=file, progress=False
    ).model
    return [parameter.detach() for parameter in model.parameters()]


def test_a_killed_run_goes_on_to_the_same_result_bit_for_bit(tmp_path):
    whole, file = train_with_checkpoint(tmp_path / "whole.pt"), tmp_path / "killed.pt"
    text = SCRIPT.format(tests=os.path.dirname(os.path.dirname(__file__)), file=str(file))
    process = subprocess.Popen([sys.executable, "-c", text])
    while not file.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 1 <= len(torch.load(file, weights_only=True)["history"]["epochs"]) < 20
    assert all(torch.equal(a, b) for a, b in zip(whole, train_with_checkpoint(file), strict=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"epochs": 0}, "epochs must be"), ({"optimiser": "lion"}, "optimiser must be"), ({"schedule": "x"}, "schedule")],
)
def test_wrong_settings_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        train(network(), DATA, losses.CrossEntropy(), **{"epochs": 1, **options})


TOGETHER = """
import os, sys, json
sys.path.insert(0, {tests!r})
from lightning_fabric import Fabric
from training.test_loop import loss_curves
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
rows = loss_curves(16, fabric)
if fabric.is_global_zero:
    with open({out!r}, "w") as file:
        json.dump(rows, file)
fabric.barrier()
os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there
"""


def loss_curves(batch, fabric=None):
    rows = []
    for loss in (losses.CrossEntropy(), losses.Focal(gamma=2.0), losses.CLUE(passes=1)):
        done = train(network(), DATA, loss, 3, batch_size=batch, fabric=fabric, lr=0.05, progress=False)
        rows += [[epoch.loss, epoch.nll, epoch.train_accuracy] for epoch in done.history.epochs]
    return rows


def test_two_processes_equal_one_with_the_doubled_batch(tmp_path):
    out, script = tmp_path / "two.json", tmp_path / "two.py"
    script.write_text(TOGETHER.format(tests=os.path.dirname(os.path.dirname(__file__)), out=str(out)))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert np.allclose(json.loads(out.read_text()), loss_curves(32), atol=1e-4)
