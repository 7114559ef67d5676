"""A plain training loop on Lightning Fabric, which brings devices, precision and processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from trueup._core.progress import track
from trueup.calibrators.compose import FOLDS, refinement
from trueup.io.atomic import atomic_write, errors_name_file
from trueup.io.predictions import Predictions
from trueup.models._distributed import all_gather_object, all_gather_rows, raise_on_all_ranks
from trueup.models.batches import arguments_of, logits_of, replace_at, tensors_in
from trueup.models.freezing import frozen
from trueup_studies.training.history import Epoch, History
from trueup_studies.training.run_settings import RunSettings, StopOn
from trueup_studies.training.tasks import KINDS, Classification, Forecasts, Task

Transform = Callable[[Tensor, torch.Generator], Tensor]
Halves: TypeAlias = tuple[Dataset[Any], Dataset[Any] | None, Dataset[Any] | None]


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the epoch, the cause, and where the last good checkpoint is."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained network, the history of its epochs, and its predictions."""

    model: nn.Module
    history: History
    val: Predictions | Forecasts | None
    """Its predictions on the validation half; of a regression `mean, std, targets`."""
    test: Predictions | Forecasts | None
    epoch: int = 0
    """Whose weights the network has: the last, or with `stop_on` the best."""


def train(
    model: nn.Module,
    data: Any,
    loss: nn.Module | Callable[..., Tensor],
    epochs: int,
    *,
    task: Task | None = None,
    augment: Transform | None = None,
    patience: int | None = None,
    evaluate_train: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    fabric: Any = None,
    progress: bool = True,
    **settings: Any,
) -> TrainingResult:
    """Train a network in place, and look at its calibration after every epoch.

    `data` has `train`, `val` and `test` (the last two may be None), or is a triple of them: sets of (inputs, label),
    the inputs being a tensor, a tuple of arguments or a mapping of keywords. `loss` takes logits and labels; one that
    declares `takes_model` takes the network, the inputs and the labels, and does its own passes. `settings` are those
    of `RunSettings`: `batch_size`, `optimiser`, `lr`, `momentum`, `weight_decay`, `schedule`, `milestones`, `stop_on`
    and `seed`. The `task` is that of the kind of data that `load_data` gives, else `Classification()`; tokens are
    `Classification(class_axis="last")`, and numbers `Regression()`. `augment(inputs, generator)` changes a batch.
    `patience` ends a run in which what `stop_on` looks at has not fallen for so many epochs; without `stop_on`, the
    validation NLL, or the RMSE where there is none. `evaluate_train=False` saves the pass over the training half that
    ends each epoch; the history then has no training accuracy and does not know which samples were right. With
    `checkpoint`, a file, a run that was killed goes on where its last epoch ended and comes to the same result.
    `fabric` is a launched `lightning.fabric.Fabric`. The global random state is as before afterwards.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(400, 2, generator=generator)
    >>> pairs = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> halves = torch.utils.data.random_split(pairs, [300, 100], generator)
    >>> done = train(nn.Linear(2, 2), (*halves, None), nn.CrossEntropyLoss(), epochs=5)
    >>> [epoch.number for epoch in done.history.epochs], done.history.epochs[-1].accuracy > 0.9
    ([1, 2, 3, 4, 5], True)
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        halves, task, known = _prepare(data, loss, epochs, task=task, patience=patience, **settings)
        run = _Run(fabric or make_fabric(), model, halves, loss, task, known)
        run.augment, run.progress, run.evaluate_train = augment, progress, evaluate_train
        return run.run(None if checkpoint is None else Path(checkpoint), patience)


def check_options(data: Any, loss: nn.Module | Callable[..., Tensor], epochs: int, **options: Any) -> None:
    """Refuse what `train` would refuse of its options, before anything is trained or written.

    >>> pairs = torch.utils.data.TensorDataset(torch.zeros(9, 2), torch.zeros(9).long())
    >>> check_options((pairs, None, None), nn.CrossEntropyLoss(), 5, patience=3)
    Traceback (most recent call last):
    ValueError: patience looks at the validation half, so data must have one, got None with 3
    """
    _prepare(data, loss, epochs, **options)


def _prepare(
    data: Any,
    loss: nn.Module | Callable[..., Tensor],
    epochs: int,
    *,
    task: Task | None = None,
    patience: int | None = None,
    **settings: Any,
) -> tuple[Halves, Task, RunSettings]:
    """The parts of the data, the task and the settings of a run, all of them checked."""
    halves = _halves(data)
    task = _task_of(data) if task is None else task
    loss_name = repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", type(loss).__name__)
    samples = len(halves[0])  # type: ignore[arg-type]
    known = RunSettings(epochs, **settings, loss=loss_name, task=repr(task), samples=samples)
    if patience is not None and halves[1] is None:
        raise ValueError(f"patience looks at the validation half, so data must have one, got None with {patience}")
    if known.stop_on is not None:
        _check_stop_on(known.stop_on, halves[1], task)
    return halves, task, known


def _halves(data: Any) -> Halves:
    halves: Any = data
    if not isinstance(data, tuple | list):
        halves = [getattr(data, name, None) for name in ("train", "val", "test")]
    if len(halves) != 3 or not hasattr(halves[0], "__len__"):
        wanted = "data must have train, val and test, or be a triple of them (the last two may be None)"
        raise ValueError(f"{wanted}, got {', '.join(type(half).__name__ for half in halves)}")
    for name, half in zip(("train", "val", "test"), halves, strict=True):
        if half is not None and not len(half):
            raise ValueError(f"data must have at least one sample for {name}, got none")
    return tuple(halves)


def _task_of(data: Any) -> Task:
    return KINDS.get(getattr(data, "kind", "image"), Classification())


def make_fabric(device: str | None = None) -> Any:
    """A launched Fabric of one process, on a device such as "cpu" or "cuda:1"; without one on what there is.

    >>> make_fabric("cpu").device
    device(type='cpu')
    """
    target = None if device is None else torch.device(device)
    where = {"accelerator": "auto" if target is None else target.type, "devices": 1}
    if target is not None and target.index is not None and target.type != "cpu":
        where["devices"] = [target.index]
    for module in ("lightning.fabric", "lightning_fabric"):  # the whole of Lightning brings it under another name
        with suppress(ImportError):
            fabric = import_module(module).Fabric(**where)
            fabric.launch()
            return fabric
    raise ImportError("training needs Lightning Fabric: pip install 'trueup-studies[train]'")


class _Run:
    augment: Transform | None = None
    progress = evaluate_train = True

    def __init__(
        self,
        fabric: Any,
        model: nn.Module,
        halves: Halves,
        loss: Callable[..., Tensor],
        task: Task,
        settings: RunSettings,
    ) -> None:
        self.fabric, self.network, self.halves, self.loss, self.task = fabric, model, halves, loss, task
        self.settings, self.stop_on, self.best = settings, settings.stop_on, _Best()
        if isinstance(loss, nn.Module):
            loss.to(fabric.device)
        self.model, self.optimiser = fabric.setup(model, settings.make_optimiser(model))

    def run(self, checkpoint: Path | None, patience: int | None) -> TrainingResult:
        history = self.resume(checkpoint)
        while len(history.epochs) < self.settings.epochs and not _has_stalled(history, patience, self.stop_on):
            number = len(history.epochs) + 1
            start = perf_counter()
            loss = self.train_epoch(number, checkpoint)
            try:
                epoch, correct = self.evaluate(number, loss, start)
            except FloatingPointError as error:
                raise TrainingError(f"{error} after epoch {number}: {_advice(checkpoint)}") from None
            history = history.append(epoch, correct)
            if self.stop_on is not None and (score := getattr(epoch, self.stop_on)) < self.best.score:
                weights = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
                self.best = _Best(score, number, weights)
            self.save_checkpoint(checkpoint, history)
        if self.best.weights:
            self.network.load_state_dict(self.best.weights)
        epoch_number = self.best.number or len(history.epochs)
        return TrainingResult(self.network, history, self.predictions(1), self.predictions(2), epoch_number)

    def train_epoch(self, number: int, checkpoint: Path | None) -> float:
        """Go over the training half once, in an order and with noise of this epoch."""
        torch.manual_seed(_epoch_seed(self.settings.seed, number))
        generator = torch.Generator().manual_seed(_epoch_seed(self.settings.seed, -number))
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.lr_in(number)
        self.model.train()
        total, note = 0.0, [""]
        steps = math.ceil(self.settings.samples / (self.settings.batch_size * self.fabric.world_size))
        name = f"epoch {number}/{self.settings.epochs}"
        for inputs, labels, share in track(
            self.training_batches(generator), steps, name, self.progress and self.fabric.is_global_zero, lambda: note[0]
        ):
            inputs, labels = self.fabric.to_device((inputs, labels))
            if self.augment is not None:
                inputs = self.augment(inputs, generator)
            self.optimiser.zero_grad()
            value = self.step(inputs, labels)
            # Shares differ where the last batch does not divide evenly; processes average what they have.
            self.fabric.backward(value * share)
            mean_loss = float(self.fabric.all_reduce(value.detach() * share, reduce_op="mean"))
            if not math.isfinite(mean_loss):
                raise TrainingError(f"the loss is {mean_loss} in epoch {number}: {_advice(checkpoint)}")
            self.optimiser.step()
            total += mean_loss
            note[0] = f"loss {mean_loss:.4f}"
        return total / steps

    def step(self, inputs: Any, labels: Tensor) -> Tensor:
        if getattr(self.loss, "takes_model", False):
            return self.loss(self.model, inputs, labels)
        args, kwargs = arguments_of(inputs)
        return self.loss(self.task.for_loss(logits_of(self.model(*args, **kwargs)), labels), labels)

    def training_batches(self, generator: torch.Generator) -> Iterator[tuple[Any, Tensor, float]]:
        """This process's part of each batch in a new order, and its size in units of an equal part."""
        n = self.settings.samples
        order = torch.randperm(n, generator=generator).tolist()
        ranks, rank = self.fabric.world_size, self.fabric.global_rank
        whole = self.settings.batch_size * ranks
        mine, shares = [], []
        for at in range(0, n, whole):
            indices = order[at : at + whole]
            bounds = [len(indices) * r // ranks for r in range(ranks + 1)]
            mine.append(indices[bounds[rank] : bounds[rank + 1]])
            shares.append(len(mine[-1]) * ranks / len(indices))
        loader = DataLoader(self.halves[0], batch_sampler=mine)
        yield from ((inputs, labels, share) for (inputs, labels), share in zip(loader, shares, strict=True))

    def predictions(self, half: int) -> Predictions | Forecasts | None:
        """The network's predictions on a half, in its own order."""
        if self.halves[half] is None:
            return None
        return self.task.predictions(self.collect_rows(half, lambda rows: rows))

    def collect_rows(self, half: int, keep: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The rows that `keep` takes of each batch of a half, in order; each process does an equal stretch."""
        whole: Any = self.halves[half]
        n, ranks, rank = len(whole), self.fabric.world_size, self.fabric.global_rank
        stretch = Subset(whole, range(n * rank // ranks, n * (rank + 1) // ranks))
        kept: list[tuple[Tensor, ...]] = []
        # The network itself, since a wrapper would wait for processes that have no batch.
        with raise_on_all_ranks(), frozen(self.network), torch.no_grad():
            for inputs, labels in DataLoader(stretch, batch_size=4 * self.settings.batch_size):
                outputs = self.task.predict(self.network, self.to_device(inputs)).cpu()
                if not bool(torch.isfinite(outputs).all()):
                    raise FloatingPointError("the network's outputs are not finite")
                kept.append(keep(self.task.to_rows(outputs, labels.cpu())))
        parts: list[Any] = list(zip(*kept, strict=True))
        parts += [[torch.empty(0)]] * (max(all_gather_object(len(parts))) - len(parts))  # where a process has no rows
        return tuple(all_gather_rows(torch.cat(part)) for part in parts)

    def to_device(self, inputs: Any) -> Any:
        """On the network's device, and numbers in its precision, as Fabric does it in training."""
        inputs = self.fabric.to_device(inputs)
        types = [p.dtype for p in self.network.parameters() if p.is_floating_point()]
        for keys, tensor in list(tensors_in(inputs)) if types else []:
            if tensor.is_floating_point() and tensor.dtype != types[0]:
                inputs = replace_at(inputs, keys, lambda x: x.to(types[0]))
        return inputs

    def evaluate(self, number: int, loss: float, start: float) -> tuple[Epoch, np.ndarray]:
        """The epoch's figures, and which training samples are right: of these no more is kept."""
        correct = np.zeros(0, dtype=bool)
        if self.evaluate_train:
            [right] = self.collect_rows(0, lambda rows: (self.task.correct(rows),))
            correct = right.numpy()
        seconds = perf_counter() - start
        val: Any = self.predictions(1)
        test: Any = self.predictions(2)
        figures = dict(self.task.figures(val, test))
        if self.stop_on == "refinement":
            figures["refinement"] = refinement(*val).refinement
        accuracy = float(correct.mean()) if len(correct) else math.nan
        return Epoch(number, self.settings.lr_in(number), loss, seconds, train_accuracy=accuracy, **figures), correct

    def save_checkpoint(self, checkpoint: Path | None, history: History) -> None:
        if checkpoint is not None and self.fabric.is_global_zero:
            state = {
                "settings": self.settings.as_state(),
                "model": self.network.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "loss": self.loss.state_dict() if isinstance(self.loss, nn.Module) else {},
                "history": history.as_state(),
                "best": self.best._asdict(),
            }
            with atomic_write(checkpoint) as (draft,):
                torch.save(state, draft)
        self.fabric.barrier()

    def resume(self, checkpoint: Path | None) -> History:
        if checkpoint is None or not checkpoint.exists():
            return History()
        with errors_name_file(checkpoint):
            state = torch.load(checkpoint, weights_only=True, map_location="cpu")
            self.settings.check(state["settings"])
            self.network.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            if isinstance(self.loss, nn.Module):
                self.loss.load_state_dict(state["loss"])
            if self.stop_on is not None:  # an older checkpoint has a best epoch, but not by what it was chosen
                self.best = _Best(**state["best"])
            return History.from_state(state["history"])


class _Best(NamedTuple):
    """The epoch of the best score so far, and its weights."""

    score: float = math.inf
    number: int = 0
    weights: Mapping[str, Tensor] | None = None


def _check_stop_on(stop_on: StopOn, val: Any, task: Task) -> None:
    if val is None:
        raise ValueError(f"stop_on looks at the validation half, so data must have one, got None with {stop_on!r}")
    if not isinstance(task, Classification):
        raise ValueError(f"stop_on is for classification, got {stop_on!r} with {task!r}")
    if stop_on == "refinement":
        rows = 0
        for i in range(len(val)):  # a text has many rows, so that a few samples are read
            rows += int((torch.as_tensor(val[i][1]) != task.ignore_index).sum())
            if rows >= FOLDS:
                return
        wanted = f"stop_on 'refinement' fits temperatures to the validation half, which must have at least {FOLDS} rows"
        raise ValueError(f"{wanted}, got {rows}")


def _has_stalled(history: History, patience: int | None, stop_on: StopOn | None) -> bool:
    if patience is None or not history.epochs:
        return False
    losses = [epoch.rmse if math.isnan(epoch.nll) else epoch.nll for epoch in history.epochs]
    scores = [epoch.refinement for epoch in history.epochs] if stop_on == "refinement" else losses
    known = [i for i, score in enumerate(scores) if not math.isnan(score)]
    return bool(known) and len(scores) - 1 - min(known, key=scores.__getitem__) >= patience


def _advice(checkpoint: Path | None) -> str:
    state = f"; the last good state is in {checkpoint}" if checkpoint and checkpoint.exists() else ""
    return f"a smaller lr may help{state}"


def _epoch_seed(seed: int, number: int) -> int:
    """A seed of its own for every epoch, so that a run can go on from any."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, number & 0xFFFFFFFF]).generate_state(1)[0])
