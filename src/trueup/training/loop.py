"""A plain training loop on Lightning Fabric, which brings devices, precision and processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from trueup import metrics
from trueup.calibrators.temperature import WIDE, Temperature
from trueup.disk import blaming, replacing
from trueup.models import collect
from trueup.predictions import Predictions
from trueup.progress import track
from trueup.training.history import Epoch, History

Transform = Callable[[Tensor, torch.Generator], Tensor]


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the epoch, the cause, and where the last good checkpoint is."""


@dataclass(frozen=True)
class Trained:
    """What a run made of a network."""

    model: nn.Module
    history: History
    val: Predictions | None
    """The last epoch's predictions on the validation half."""
    test: Predictions | None


def train(
    model: nn.Module,
    data: Any,
    loss: nn.Module | Callable[..., Tensor],
    epochs: int,
    *,
    batch: int = 128,
    optimiser: Literal["sgd", "adamw"] = "sgd",
    rate: float = 0.1,
    momentum: float = 0.9,
    decay: float = 1e-4,
    schedule: Literal["constant", "cosine", "steps"] = "cosine",
    drops: Sequence[float] = (0.5, 0.75),
    augment: Transform | None = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    fabric: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> Trained:
    """Train a network in place, and look at its calibration after every epoch.

    `data` has `train`, `val` and `test` (the last two may be None), or is a triple of them: sets of (input, label).
    `loss` takes logits and labels; one that declares `takes_model` takes the network, the inputs and the labels, and
    does its own passes. The rate falls by a cosine to zero, or tenfold at each of `drops` (shares of the epochs).
    `augment(inputs, generator)` changes a batch. `patience` ends a run whose validation NLL has not fallen for so many
    epochs. With `checkpoint`, a file, a run that was killed goes on where its last epoch ended and comes to the same
    result. `fabric` is a launched `lightning.fabric.Fabric`; `batch` is that of each process. The global random state
    is as before afterwards.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(400, 2, generator=generator)
    >>> pairs = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> halves = torch.utils.data.random_split(pairs, [300, 100], generator)
    >>> done = train(nn.Linear(2, 2), (*halves, None), nn.CrossEntropyLoss(), epochs=5)
    >>> [epoch.number for epoch in done.history.epochs], done.history.epochs[-1].accuracy > 0.9
    ([1, 2, 3, 4, 5], True)
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    if optimiser not in ("sgd", "adamw"):
        raise ValueError(f'optimiser must be "sgd" or "adamw", got {optimiser!r}')
    halves = data if isinstance(data, tuple) else (data.train, data.val, data.test)
    fabric = fabric or _fabric()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        run = _Run(fabric, model, halves, loss, epochs, batch, augment, seed, progress)
        run.optimise(optimiser, rate, momentum, decay, _factors(schedule, drops, epochs))
        return run.go(None if checkpoint is None else Path(checkpoint), patience)


def _fabric() -> Any:
    for room in ("lightning.fabric", "lightning_fabric"):  # the whole of Lightning brings it under another name
        with suppress(ImportError):
            fabric = import_module(room).Fabric(accelerator="auto", devices=1)
            fabric.launch()
            return fabric
    raise ImportError("training needs Lightning Fabric: pip install 'trueup[train]'")


def _factors(schedule: str, drops: Sequence[float], epochs: int) -> list[float]:
    """What the learning rate is multiplied with in each epoch."""
    if schedule == "constant":
        return [1.0] * epochs
    if schedule == "cosine":
        return [(1 + math.cos(math.pi * number / epochs)) / 2 for number in range(epochs)]
    if schedule == "steps":
        return [0.1 ** sum(number >= drop * epochs for drop in drops) for number in range(epochs)]
    raise ValueError(f'schedule must be "constant", "cosine" or "steps", got {schedule!r}')


class _Run:
    def __init__(
        self,
        fabric: Any,
        model: nn.Module,
        halves: tuple[Dataset[Any], Dataset[Any] | None, Dataset[Any] | None],
        loss: Callable[..., Tensor],
        epochs: int,
        batch: int,
        augment: Transform | None,
        seed: int,
        progress: bool,
    ) -> None:
        self.fabric, self.plain, self.halves, self.loss = fabric, model, halves, loss
        self.epochs, self.batch, self.augment, self.seed, self.progress = epochs, batch, augment, seed, progress
        self.size = len(halves[0])  # type: ignore[arg-type]
        if isinstance(loss, nn.Module):
            loss.to(fabric.device)

    def optimise(self, kind: str, rate: float, momentum: float, decay: float, factors: list[float]) -> None:
        self.rate, self.factors = rate, factors
        made: torch.optim.Optimizer = (
            torch.optim.SGD(self.plain.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
            if kind == "sgd"
            else torch.optim.AdamW(self.plain.parameters(), lr=rate, weight_decay=decay)
        )
        self.model, self.optimiser = self.fabric.setup(self.plain, made)

    def go(self, checkpoint: Path | None, patience: int | None) -> Trained:
        history = self.resume(checkpoint)
        while len(history.epochs) < self.epochs and not _stalled(history, patience):
            number = len(history.epochs) + 1
            start = perf_counter()
            loss = self.epoch(number, checkpoint)
            seen = self.predictions(0)
            assert seen is not None
            correct = np.asarray(seen.logits).argmax(axis=1) == np.asarray(seen.labels)
            epoch = self.judged(number, loss, correct, perf_counter() - start)
            history = history.and_then(epoch, correct)
            self.keep(checkpoint, history)
        return Trained(self.plain, history, self.predictions(1), self.predictions(2))

    def epoch(self, number: int, checkpoint: Path | None) -> float:
        """Go over the training half once, in an order and with noise that are this epoch's own."""
        torch.manual_seed(_seed_of(self.seed, number))
        generator = torch.Generator().manual_seed(_seed_of(self.seed, -number))
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * self.factors[number - 1]
        self.model.train()
        total = 0.0
        note = [""]
        steps = math.ceil(self.size / (self.batch * self.fabric.world_size))
        batches = self.shuffled(generator)
        for inputs, labels, share in track(
            batches, steps, f"epoch {number}/{self.epochs}", self.progress, lambda: note[0]
        ):
            inputs, labels = self.fabric.to_device((inputs, labels))
            if self.augment is not None:
                inputs = self.augment(inputs, generator)
            self.optimiser.zero_grad()
            value = self.step(inputs, labels)
            # Shares differ where the last batch does not part evenly; processes average what they have.
            self.fabric.backward(value * share)
            seen = float(self.fabric.all_reduce(value.detach() * share, reduce_op="mean"))
            if not math.isfinite(seen):
                where = f"; the last good state is in {checkpoint}" if checkpoint and checkpoint.exists() else ""
                raise TrainingError(f"the loss is {seen} in epoch {number}: a smaller rate may help{where}")
            self.optimiser.step()
            total += seen * min(self.batch * self.fabric.world_size, self.size)
            note[0] = f"loss {seen:.4f}"
        return total / (steps * min(self.batch * self.fabric.world_size, self.size))

    def step(self, inputs: Any, labels: Tensor) -> Tensor:
        if getattr(self.loss, "takes_model", False):
            return self.loss(self.model, inputs, labels)
        return self.loss(self.model(inputs), labels)

    def shuffled(self, generator: torch.Generator) -> Iterator[tuple[Any, Tensor, float]]:
        """This process's part of each batch in a new order, and its size in units of an equal part."""
        order = torch.randperm(self.size, generator=generator).tolist()
        ranks, rank = self.fabric.world_size, self.fabric.global_rank
        whole = self.batch * ranks
        mine, shares = [], []
        for at in range(0, self.size, whole):
            places = order[at : at + whole]
            bounds = [len(places) * r // ranks for r in range(ranks + 1)]
            mine.append(places[bounds[rank] : bounds[rank + 1]])
            shares.append(len(mine[-1]) * ranks / len(places))
        loader = DataLoader(self.halves[0], batch_sampler=mine)
        yield from ((inputs, labels, share) for (inputs, labels), share in zip(loader, shares, strict=True))

    def predictions(self, half: int) -> Predictions | None:
        """Logits of a half in its own order; each process does an equal stretch."""
        rows = self.halves[half]
        if rows is None:
            return None
        n, ranks, rank = len(rows), self.fabric.world_size, self.fabric.global_rank  # type: ignore[arg-type]
        stretch = Subset(rows, range(n * rank // ranks, n * (rank + 1) // ranks))
        return collect(self.plain, DataLoader(stretch, batch_size=4 * self.batch), progress=False)

    def judged(self, number: int, loss: float, correct: np.ndarray, seconds: float) -> Epoch:
        val, test = self.predictions(1), self.predictions(2)
        best = math.nan
        if test is not None:
            fitted = Temperature.fit_ece(*test, temperatures=WIDE)
            best = metrics.ece(fitted(test.logits), test.labels)
        return Epoch(
            number=number,
            rate=self.rate * self.factors[number - 1],
            loss=loss,
            train_accuracy=float(correct.mean()),
            accuracy=math.nan if val is None else metrics.accuracy(*val),
            nll=math.nan if val is None else metrics.nll(*val),
            ece=math.nan if val is None else metrics.ece(*val),
            test_ece=math.nan if test is None else metrics.ece(*test),
            optimal_ece=best,
            seconds=seconds,
        )

    def keep(self, checkpoint: Path | None, history: History) -> None:
        if checkpoint is not None and self.fabric.is_global_zero:
            state = {
                "settings": self.settings(),
                "model": self.plain.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "loss": self.loss.state_dict() if isinstance(self.loss, nn.Module) else {},
                "history": history.as_state(),
            }
            with replacing(checkpoint) as (draft,):
                torch.save(state, draft)
        self.fabric.barrier()

    def resume(self, checkpoint: Path | None) -> History:
        if checkpoint is None or not checkpoint.exists():
            return History()
        with blaming(checkpoint):
            state = torch.load(checkpoint, weights_only=True, map_location="cpu")
            if state["settings"] != self.settings():
                raise ValueError(f"it is of a run with {state['settings']}, this one has {self.settings()}")
            self.plain.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            if isinstance(self.loss, nn.Module):
                self.loss.load_state_dict(state["loss"])
            return History.of_state(state["history"])

    def settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that was stopped."""
        return {"epochs": self.epochs, "batch": self.batch, "seed": self.seed, "rate": self.rate, "samples": self.size}


def _stalled(history: History, patience: int | None) -> bool:
    if patience is None or not history.epochs:
        return False
    losses = [epoch.nll for epoch in history.epochs]
    return len(losses) - 1 - int(np.nanargmin(losses)) >= patience


def _seed_of(seed: int, number: int) -> int:
    """A seed of its own for every epoch, so that a run can go on from any."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, number & 0xFFFFFFFF]).generate_state(1)[0])
