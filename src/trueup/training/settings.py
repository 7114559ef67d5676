"""The settings of a run: what one that goes on must have in common with the one that was stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

Optimiser = Literal["sgd", "adamw"]
Schedule = Literal["constant", "cosine", "steps"]


@dataclass(frozen=True)
class Recipe:
    """Everything that a run's result depends on, save for the network and the data themselves."""

    epochs: int
    batch: int
    seed: int
    optimiser: Optimiser
    rate: float
    momentum: float
    decay: float
    schedule: Schedule
    drops: Sequence[float]
    loss: str
    task: str
    samples: int

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.optimiser not in ("sgd", "adamw"):
            raise ValueError(f'optimiser must be "sgd" or "adamw", got {self.optimiser!r}')
        if self.schedule not in ("constant", "cosine", "steps"):
            raise ValueError(f'schedule must be "constant", "cosine" or "steps", got {self.schedule!r}')

    def optimiser_of(self, network: nn.Module) -> torch.optim.Optimizer:
        """Made anew."""
        if self.optimiser == "sgd":
            return torch.optim.SGD(network.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.decay)
        return torch.optim.AdamW(network.parameters(), lr=self.rate, weight_decay=self.decay)

    def rate_in(self, number: int) -> float:
        """The learning rate of an epoch, the first being 1."""
        done = number - 1
        if self.schedule == "cosine":
            return self.rate * ((1 + math.cos(math.pi * done / self.epochs)) / 2)
        if self.schedule == "steps":
            return self.rate * 0.1 ** sum(done >= drop * self.epochs for drop in self.drops)
        return self.rate

    def as_state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return asdict(self) | {"drops": list(self.drops)}

    def check(self, stored: Mapping[str, Any]) -> None:
        """Refuse what another run has stored, naming what differs."""
        mine = self.as_state()
        wrong = [name for name in mine if stored.get(name) != mine[name]]
        if wrong:
            theirs, ours = (", ".join(f"{n} {x.get(n)}" for n in wrong) for x in (stored, mine))
            raise ValueError(f"it is of a run with {theirs}, and this one has {ours}")
