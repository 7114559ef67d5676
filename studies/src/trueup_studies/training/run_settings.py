"""Settings of a training run; a resumed run must have the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

Optimiser = Literal["sgd", "adamw"]
Schedule = Literal["constant", "cosine", "steps"]
StopOn = Literal["nll", "refinement"]
FORMER_NAMES = {"batch": "batch_size", "rate": "lr", "decay": "weight_decay", "drops": "milestones"}
"""Former name → name, in checkpoints and in the settings of stored results."""


@dataclass(frozen=True)
class RunSettings:
    """Everything that the result of a run depends on, except for the network and the data.

    The learning rate follows a cosine to zero, or falls tenfold at each of `milestones` (shares of the epochs). With
    `stop_on` the network gets the weights of its best epoch. "nll" takes the epoch of lowest validation NLL.
    "refinement" takes the lowest NLL after temperature scaling, fitted on other validation samples, because
    overconfidence can be corrected later.
    """

    epochs: int
    batch_size: int = 128
    """Batch size of each process."""
    seed: int = 0
    optimiser: Optimiser = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Schedule = "cosine"
    milestones: Sequence[float] = (0.5, 0.75)
    stop_on: StopOn | None = None
    """Metric that selects the best epoch; None in older checkpoints."""
    patience: int | None = None
    """End if the metric of `stop_on`, or else the validation NLL or RMSE, has not fallen for this many epochs."""
    evaluate_train: bool = True
    """Whether to evaluate the training half after each epoch; the history needs it for learned epochs."""
    loss: str = ""
    task: str = ""
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, got {getattr(self, name)}")
        if self.optimiser not in ("sgd", "adamw"):
            raise ValueError(f'optimiser must be "sgd" or "adamw", got {self.optimiser!r}')
        if self.schedule not in ("constant", "cosine", "steps"):
            raise ValueError(f'schedule must be "constant", "cosine" or "steps", got {self.schedule!r}')
        if self.stop_on not in (None, "nll", "refinement"):
            raise ValueError(f"stop_on must be nll or refinement, got {self.stop_on!r}")

    def make_optimiser(self, network: nn.Module) -> torch.optim.Optimizer:
        """Create an optimiser of the network's parameters."""
        if self.optimiser == "sgd":
            return torch.optim.SGD(
                network.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
            )
        return torch.optim.AdamW(network.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def lr_in(self, number: int) -> float:
        """Return the learning rate of an epoch, counted from 1."""
        done = number - 1
        if self.schedule == "cosine":
            return self.lr * ((1 + math.cos(math.pi * done / self.epochs)) / 2)
        if self.schedule == "steps":
            return self.lr * 0.1 ** sum(done >= milestone * self.epochs for milestone in self.milestones)
        return self.lr

    def as_state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return asdict(self) | {"milestones": list(self.milestones)}

    def check(self, stored: Mapping[str, Any]) -> None:
        """Reject the settings of another run, naming the differences."""
        ours, theirs = self.as_state(), {"evaluate_train": True, **with_current_names(stored)}
        wrong = [name for name in ours if theirs.get(name) != ours[name]]
        if wrong:
            stored_text, our_text = (", ".join(f"{n} {x.get(n, 'unknown')}" for n in wrong) for x in (theirs, ours))
            raise ValueError(f"it is of a run with {stored_text}, and this one has {our_text}")


def with_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the former names of options of `train` from a file.

    >>> with_current_names({"batch": 32, "rate": 0.1, "epochs": 5})
    {'batch_size': 32, 'lr': 0.1, 'epochs': 5}
    """
    return {FORMER_NAMES.get(name, name): value for name, value in options.items()}
