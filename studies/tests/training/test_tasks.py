"""Tokens and numbers are trained, judged and resumed as classes are."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")

from trueup import losses, metrics
from trueup.calibrators import VarianceScaling
from trueup.metrics import regression
from trueup.models import mc_dropout, moments
from trueup_studies.networks import MLP
from trueup_studies.sequences import CharTransformer
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.loop import TrainingError, train
from trueup_studies.training.tasks import Classification, Forecasts, Regression

TOKENS = Classification(class_axis="last")


def book(n, seed):
    """Rows of a rule with exceptions, in which every fifth place does not count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(5, (n, 10), generator=generator)
    y = torch.where(torch.rand(n, 10, generator=generator) < 0.8, (x + 1) % 5, x)
    y[:, ::5] = -100
    return TensorDataset(x, y)


def numbers(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, x[:, 0] - x[:, 1] + 0.3 * torch.randn(n, generator=generator))


BOOK = (book(60, 0), book(30, 1), book(30, 2))
NUMBERS = (numbers(200, 0), numbers(80, 1), numbers(80, 2))


def reader(dropout=0.0):
    return CharTransformer(5, context=10, width=16, heads=2, layers=2, dropout=dropout)


def guesser(outputs=1, dropout=0.2):
    return MLP(outputs, inputs=3, hidden=(16, 16), dropout=dropout)


def last(done):
    return done.history.epochs[-1]


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        losses.Focal(gamma=1.0),
        losses.DCA(),
        losses.CLUE(measure=partial(losses.error_and_entropy, class_axis="last"), passes=2),
    ],
    ids=repr,
)
def test_tokens_are_learned_and_judged_one_by_one(loss):
    dropout = 0.1 if isinstance(loss, losses.CLUE) else 0.0
    done = train(reader(dropout), BOOK, loss, 4, task=TOKENS, batch_size=16, optimiser="adamw", lr=1e-2, progress=False)
    assert last(done).loss < done.history.epochs[0].loss
    x, y = BOOK[1].tensors
    with torch.no_grad():
        z = done.model.eval()(x)
    kept = y.flatten() >= 0
    pair = z.flatten(end_dim=1)[kept], y.flatten()[kept]
    assert last(done).nll == pytest.approx(metrics.nll(*pair), rel=1e-5)
    assert last(done).ece == pytest.approx(metrics.ece(*pair), abs=1e-6)
    assert last(done).optimal_ece <= last(done).test_ece
    assert math.isnan(last(done).rmse)
    assert done.val.logits.shape == (30 * 8, 5)
    assert done.history.correct.shape == (4, 60 * 8)
    assert last(done).train_accuracy == pytest.approx(done.history.correct[-1].mean())


def test_classes_may_come_first():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = reader()

        def forward(self, tokens):
            return self.inside(tokens).movedim(-1, 1)

    runs = [
        train(model, BOOK, losses.CrossEntropy(), 1, task=Classification(class_axis=classes), progress=False)
        for model, classes in ((reader(), "last"), (First(), "first"))
    ]
    assert last(runs[0]).nll == pytest.approx(last(runs[1]).nll, rel=1e-5)
    assert last(runs[0]).loss == pytest.approx(last(runs[1]).loss, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (nn.MSELoss(), False),
        (losses.gaussian_nll, True),
        (losses.CLUE(measure=losses.error_and_variance), False),
        (losses.CLUE(measure=partial(losses.error_and_variance, variance_head=True)), True),
    ],
    ids=["squared", "gaussian", "clue", "clue with a head"],
)
def test_numbers_are_learned_and_their_forecasts_judged(loss, head):
    task = Regression(variance_head=head)
    done = train(guesser(1 + head), NUMBERS, loss, 5, task=task, optimiser="adamw", lr=1e-2, progress=False)
    assert last(done).rmse < done.history.epochs[0].rmse
    x, y = NUMBERS[1].tensors
    found = moments(mc_dropout(done.model, x).double(), variance_head=head)
    std = found.variance.clamp(min=1e-6).sqrt()
    assert last(done).rmse == pytest.approx(regression.rmse(found.mean, std, y), rel=1e-5)
    assert last(done).nll == pytest.approx(regression.gaussian_nll(found.mean, std, y), rel=1e-4)
    assert last(done).ence == pytest.approx(regression.ence(found.mean, std, y), rel=1e-4)
    assert last(done).test_ence == pytest.approx(regression.ence(*done.test))
    assert done.history.correct.shape == (5, 0)
    assert all(math.isnan(value) for value in (last(done).accuracy, last(done).ece, last(done).train_accuracy))
    assert isinstance(done.val, Forecasts)
    assert float(VarianceScaling.fit(*done.val).scale) > 0


def test_a_network_that_announces_no_error_has_an_rmse_and_may_still_stop_early():
    done = train(
        guesser(dropout=0.0),
        NUMBERS,
        nn.MSELoss(),
        60,
        task=Regression(),
        lr=0.3,
        schedule="constant",
        patience=2,
        progress=False,
    )
    scores = [epoch.rmse for epoch in done.history.epochs]
    assert len(scores) < 60
    assert len(scores) - 1 - int(np.argmin(scores)) == 2
    assert all(math.isnan(epoch.nll) and math.isnan(epoch.ence) for epoch in done.history.epochs)
    assert not done.val.std.any()


def test_targets_and_outputs_may_have_several_columns():
    x, y = NUMBERS[0].tensors
    pairs = TensorDataset(x, torch.stack([y, -y], dim=1))
    done = train(guesser(2), (pairs, pairs, None), nn.MSELoss(), 1, task=Regression(), progress=False)
    assert done.val.mean.shape == (400,)
    one = TensorDataset(x, y[:, None])
    done = train(guesser(1), (one, one, None), nn.MSELoss(), 1, task=Regression(), progress=False)
    assert done.val.mean.shape == (200,)


def test_the_kind_of_data_says_which_task_it_is():
    done = train(guesser(), Data("table", "tabular", *NUMBERS), nn.MSELoss(), 1, progress=False)
    assert last(done).rmse > 0
    done = train(reader(), Data("book", "characters", *BOOK), nn.CrossEntropyLoss(), 1, progress=False)
    assert last(done).nll > 0


def test_inputs_may_be_several_and_outputs_an_object():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(3, 2)

        def forward(self, a, b):
            return {"logits": self.inside(a + b)}

    x, y = NUMBERS[0].tensors
    rows = [((a, 0 * a), int(b > 0)) for a, b in zip(x, y, strict=True)]
    by_name = [({"b": 0 * a, "a": a}, int(b > 0)) for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    model = Two()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for data in (rows, by_name):
        model.load_state_dict(start)
        found.append(last(train(model, (data, data, None), nn.CrossEntropyLoss(), 3, progress=False)))
    assert found[0].accuracy > 0.6
    assert found[0].nll == found[1].nll


@pytest.mark.parametrize("kind", ["tokens", "numbers"])
def test_a_run_that_stops_goes_on_to_the_same_result_bit_for_bit(tmp_path, kind):
    def run(file, fails_in=None):
        torch.manual_seed(0)
        model = reader(dropout=0.2) if kind == "tokens" else guesser()
        calls = []

        def loss(outputs, labels):
            calls.append(0)
            broken = fails_in is not None and len(calls) > fails_in
            value = torch.nn.functional.mse_loss if kind == "numbers" else torch.nn.functional.cross_entropy
            return value(outputs, labels) * (math.nan if broken else 1.0)

        data, task = (BOOK, TOKENS) if kind == "tokens" else (NUMBERS, Regression())
        return train(model, data, loss, 4, task=task, batch_size=20, checkpoint=file, lr=0.01, progress=False)

    whole = run(tmp_path / "whole.pt")
    steps = 3 if kind == "tokens" else 10
    with pytest.raises(TrainingError, match="in epoch 3"):
        run(tmp_path / "broken.pt", fails_in=2 * steps + 1)
    again = run(tmp_path / "broken.pt")
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.history.epochs, again.history.epochs, strict=True):
        assert (a.loss, a.nll, a.number, a.lr) == (b.loss, b.nll, b.number, b.lr)
    assert np.array_equal(whole.history.correct, again.history.correct)


@pytest.mark.parametrize(
    ("model", "data", "loss", "task", "message"),
    [
        (guesser(), NUMBERS, nn.MSELoss(), None, r"integers, or numbers with task=Regression\(\), got float32"),
        (
            guesser(2),
            NUMBERS,
            nn.MSELoss(),
            Regression(),
            r"shape of the targets, \(128,\), got \(128, 2\); a mean and",
        ),
        (guesser(3), NUMBERS, nn.MSELoss(), Regression(), r"shape of the targets, \(128,\), got \(128, 3\)$"),
        (reader(), BOOK, nn.MSELoss(), Regression(), r"shape of the targets, \(60, 10\), got \(60, 10, 5\)$"),
        (
            reader(),
            BOOK,
            losses.CrossEntropy(),
            None,
            r"tokens with task=Classification\(class_axis=…\), got \(60, 10, 5\)",
        ),
        (nn.Linear(3, 2), NUMBERS[:2], nn.MSELoss(), None, "data must have train, val and test, or be a triple"),
        (nn.Linear(3, 2), None, nn.MSELoss(), None, "data must have train, val and test.*got NoneType"),
    ],
)
def test_what_does_not_fit_is_named(model, data, loss, task, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(model, data, loss, 1, task=task, progress=False)


def test_outputs_that_are_not_finite_stop_with_the_last_good_checkpoint(tmp_path):
    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(3, 2)
            self.epochs = 0

        def forward(self, x):
            return self.inside(x) if self.training or self.epochs < 4 else self.inside(x) / 0

    x, y = NUMBERS[0].tensors
    pairs, model = TensorDataset(x, (y > 0).long()), Overflows()

    def loss(z, y):
        model.epochs += 1
        return nn.functional.cross_entropy(z, y)

    with pytest.raises(TrainingError, match=r"outputs are not finite after epoch 2: .*last good state is in .*run.pt"):
        train(model, (pairs, pairs, None), loss, 3, batch_size=100, checkpoint=tmp_path / "run.pt", progress=False)


def test_patience_without_a_validation_half_is_refused():
    with pytest.raises(ValueError, match="patience looks at the validation half"):
        train(guesser(2), (NUMBERS[0], None, None), nn.MSELoss(), 1, patience=2)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_the_precision_of_training_is_that_of_judging(precision):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    done = train(
        guesser(),
        NUMBERS,
        losses.CLUE(measure=losses.error_and_variance),
        1,
        task=Regression(),
        fabric=fabric,
        progress=False,
    )
    assert math.isfinite(last(done).rmse)
    x, y = NUMBERS[0].tensors
    pairs = TensorDataset(x, (y > 0).long())
    done = train(guesser(2), (pairs, pairs, None), losses.Focal(), 2, fabric=fabric, progress=False)
    assert last(done).accuracy > 0.5


def test_gaussian_nll_is_the_metric_and_has_its_slopes():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    found = moments(outputs[None], variance_head=True)
    wanted = regression.gaussian_nll(*(v.detach().reshape(-1) for v in (found.mean, found.within.sqrt(), targets)))
    assert losses.gaussian_nll(outputs, targets).item() == pytest.approx(wanted, rel=1e-12)
    assert torch.autograd.gradcheck(lambda z: losses.gaussian_nll(z, targets), outputs)
    with pytest.raises(ValueError, match=r"targets must have shape \(6, 2\) for outputs \(6, 4\), got \(6,\)"):
        losses.gaussian_nll(outputs, targets[:, 0])
