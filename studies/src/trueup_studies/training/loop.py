"""A plain training loop on Lightning Fabric, which handles devices, precision and processes."""

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
    """Raised when a run cannot continue; the message names the epoch, the cause and the latest good checkpoint."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained network, the history of its epochs, and its predictions."""

    model: nn.Module
    history: History
    val: Predictions | Forecasts | None
    """Predictions on the validation half; `mean, std, targets` for a regression."""
    test: Predictions | Forecasts | None
    epoch: int = 0
    """Epoch whose weights the network has: the final one, or with `stop_on` the best."""


def train(
    model: nn.Module,
    data: Any,
    loss: nn.Module | Callable[..., Tensor],
    epochs: int,
    *,
    task: Task | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    fabric: Any = None,
    progress: bool = True,
    **settings: Any,
) -> TrainingResult:
    """Train a network in place, and measure its calibration after every epoch.

    The global random state does not change.

    Parameters
    ----------
    model
        The network.
    data
        An object with `train`, `val` and `test`, or a triple of them; val and test may be None. Each is a data set of
        (inputs, label), where inputs are a tensor, a tuple of arguments or a mapping of keywords. An attribute
        `augment` is a function `(inputs, generator)` that changes a training batch.
    loss
        Function of logits and labels. One with the attribute `takes_model` is called with the network, the inputs and
        the labels, and does its own passes.
    epochs
        Number of epochs.
    task
        By default that of the data's `kind`, or else `Classification()`. Tokens are
        `Classification(class_axis="last")`, and numbers `Regression()`.
    checkpoint
        File from which a killed run resumes after its latest epoch, with the same result.
    fabric
        A launched `lightning.fabric.Fabric`.
    progress
        Whether to show progress.
    settings
        Fields of `RunSettings`: `batch_size`, `optimiser`, `lr`, `momentum`, `weight_decay`, `schedule`, `milestones`,
        `stop_on`, `patience`, `evaluate_train` and `seed`.

    Returns
    -------
    TrainingResult
        The network, its history and its predictions.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(400, 2, generator=generator)
    >>> pairs = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> halves = torch.utils.data.random_split(pairs, [300, 100], generator)
    >>> done = train(nn.Linear(2, 2), (*halves, None), nn.CrossEntropyLoss(), epochs=5)
    >>> [epoch.number for epoch in done.history.epochs], done.history.epochs[-1].accuracy > 0.9
    ([1, 2, 3, 4, 5], True)
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        halves, task, known = _prepare(data, loss, epochs, task=task, **settings)
        run = _Run(fabric or make_fabric(), model, halves, loss, task, known)
        run.augment, run.progress = getattr(data, "augment", None), progress
        return run.run(None if checkpoint is None else Path(checkpoint))


def check_options(data: Any, loss: nn.Module | Callable[..., Tensor], epochs: int, **options: Any) -> None:
    """Reject the options that `train` would reject, before anything is trained or written.

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
    **settings: Any,
) -> tuple[Halves, Task, RunSettings]:
    """Return the parts of the data, the task and the settings of a run, all validated."""
    halves = _halves(data)
    task = _task_of(data) if task is None else task
    loss_name = repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", type(loss).__name__)
    samples = len(halves[0])  # type: ignore[arg-type]
    known = RunSettings(epochs, **settings, loss=loss_name, task=repr(task), samples=samples)
    if known.patience is not None and halves[1] is None:
        raise ValueError(
            f"patience looks at the validation half, so data must have one, got None with {known.patience}"
        )
    if known.stop_on is not None:
        _check_stop_on(known.stop_on, halves[1], task)
    return halves, task, known


def _halves(data: Any) -> Halves:
    halves: Any = data
    if not isinstance(data, tuple | list):
        halves = [getattr(data, name, None) for name in ("train", "val", "test")]
    if len(halves) != 3 or not hasattr(halves[0], "__len__"):
        message = "data must have train, val and test, or be a triple of them (val and test may be None)"
        raise ValueError(f"{message}, got {', '.join(type(half).__name__ for half in halves)}")
    for name, half in zip(("train", "val", "test"), halves, strict=True):
        if half is not None and not len(half):
            raise ValueError(f"data must have at least one sample for {name}, got none")
    return tuple(halves)


def _task_of(data: Any) -> Task:
    return KINDS.get(getattr(data, "kind", "image"), Classification())


def make_fabric(device: str | None = None) -> Any:
    """Launch a Fabric of one process on a device such as "cpu" or "cuda:1", by default on the best device.

    >>> make_fabric("cpu").device
    device(type='cpu')
    """
    target = None if device is None else torch.device(device)
    where = {"accelerator": "auto" if target is None else target.type, "devices": 1}
    if target is not None and target.index is not None and target.type != "cpu":
        where["devices"] = [target.index]
    for module in ("lightning.fabric", "lightning_fabric"):  # Lightning itself has it under another name
        with suppress(ImportError):
            fabric = import_module(module).Fabric(**where)
            fabric.launch()
            return fabric
    raise ImportError("training needs Lightning Fabric: pip install 'trueup-studies[train]'")


class _Run:
    augment: Transform | None = None
    progress = True

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

    def run(self, checkpoint: Path | None) -> TrainingResult:
        history = self.resume(checkpoint)
        while len(history.epochs) < self.settings.epochs and not _has_stalled(history, self.settings):
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
        """Train one epoch, with the order and noise of its number."""
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
            # Shares differ if the final batch does not divide evenly among the processes.
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
        """Yield this process's part of each batch in a new order, and its size relative to an equal part."""
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
        """Predict a half, in its own order."""
        if self.halves[half] is None:
            return None
        return self.task.predictions(self.collect_rows(half, lambda rows: rows))

    def collect_rows(self, half: int, keep: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Collect the rows that `keep` selects from each batch of a half, in order; processes share the work."""
        whole: Any = self.halves[half]
        n, ranks, rank = len(whole), self.fabric.world_size, self.fabric.global_rank
        stretch = Subset(whole, range(n * rank // ranks, n * (rank + 1) // ranks))
        kept: list[tuple[Tensor, ...]] = []
        # Not the wrapper, which would wait for processes without a batch.
        with raise_on_all_ranks(), frozen(self.network), torch.no_grad():
            for inputs, labels in DataLoader(stretch, batch_size=4 * self.settings.batch_size):
                outputs = self.task.predict(self.network, self.to_device(inputs)).cpu()
                if not bool(torch.isfinite(outputs).all()):
                    raise FloatingPointError("the network's outputs are not finite")
                kept.append(keep(self.task.to_rows(outputs, labels.cpu())))
        parts: list[Any] = list(zip(*kept, strict=True))
        parts += [[torch.empty(0)]] * (max(all_gather_object(len(parts))) - len(parts))  # a process may have no rows
        return tuple(all_gather_rows(torch.cat(part)) for part in parts)

    def to_device(self, inputs: Any) -> Any:
        """Move inputs to the network's device and precision, as Fabric does in training."""
        inputs = self.fabric.to_device(inputs)
        types = [p.dtype for p in self.network.parameters() if p.is_floating_point()]
        for keys, tensor in list(tensors_in(inputs)) if types else []:
            if tensor.is_floating_point() and tensor.dtype != types[0]:
                inputs = replace_at(inputs, keys, lambda x: x.to(types[0]))
        return inputs

    def evaluate(self, number: int, loss: float, start: float) -> tuple[Epoch, np.ndarray]:
        """Compute the epoch's metrics, and which training samples are correct."""
        correct = np.zeros(0, dtype=bool)
        if self.settings.evaluate_train:
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
            if self.stop_on is not None:  # older checkpoints have a best epoch, but no criterion
                self.best = _Best(**state["best"])
            return History.from_state(state["history"])


class _Best(NamedTuple):
    """The best score so far, its epoch and its weights."""

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
        for i in range(len(val)):  # a few texts already have many rows
            rows += int((torch.as_tensor(val[i][1]) != task.ignore_index).sum())
            if rows >= FOLDS:
                return
        message = f"stop_on 'refinement' needs a validation half with at least {FOLDS} rows for its temperatures"
        raise ValueError(f"{message}, got {rows}")


def _has_stalled(history: History, settings: RunSettings) -> bool:
    if settings.patience is None or not history.epochs:
        return False
    losses = [epoch.rmse if math.isnan(epoch.nll) else epoch.nll for epoch in history.epochs]
    scores = [epoch.refinement for epoch in history.epochs] if settings.stop_on == "refinement" else losses
    known = [i for i, score in enumerate(scores) if not math.isnan(score)]
    return bool(known) and len(scores) - 1 - min(known, key=scores.__getitem__) >= settings.patience


def _advice(checkpoint: Path | None) -> str:
    state = f"; the last good state is in {checkpoint}" if checkpoint and checkpoint.exists() else ""
    return f"a smaller lr may help{state}"


def _epoch_seed(seed: int, number: int) -> int:
    """Derive a seed for every epoch, so that a run can resume from any."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, number & 0xFFFFFFFF]).generate_state(1)[0])
