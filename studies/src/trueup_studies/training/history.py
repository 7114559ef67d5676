"""The history of a training run: the figures of each epoch, and which training samples were classified correctly."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup_studies.training.run_settings import with_current_names


@dataclass(frozen=True)
class Epoch:
    """One epoch's figures; those of a half that is not there, or of another task, are NaN."""

    number: int
    """From 1."""
    lr: float
    """Learning rate at its start."""
    loss: float
    """Mean training loss."""
    seconds: float
    train_accuracy: float = math.nan
    accuracy: float = math.nan
    """On the validation half, as the next two; of tokens, over all that count."""
    nll: float = math.nan
    """In a regression that of the Gaussian forecasts; NaN where the network announces no variance."""
    ece: float = math.nan
    refinement: float = math.nan
    """`loop.refinement` of the validation half, its NLL after a cross-fitted temperature; NaN unless the run stops on
    it."""
    test_ece: float = math.nan
    optimal_ece: float = math.nan
    """The least test ECE that any one temperature could give: below what a validation half can choose."""
    rmse: float = math.nan
    """Of a regression, on the validation half, as the next, in the units of the targets."""
    ence: float = math.nan
    test_ence: float = math.nan


@dataclass(frozen=True)
class History:
    """All epochs of a run.

    >>> import numpy as np
    >>> History((), np.array([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]], dtype=bool)).learned_epochs()
    array([ 2.,  3.,  1., inf])
    """

    epochs: tuple[Epoch, ...] = ()
    correct: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    """(epochs, n): whether a training sample was classified correctly at the end of each epoch; n = 0 of numbers."""

    def learned_epochs(self) -> np.ndarray:
        """The first epoch from which on each training sample was right to the end; infinity if there is none.

        Wang et al., "Rethinking calibration of deep neural networks" (2021).
        """
        last_wrong = np.where(~self.correct, np.arange(1, len(self.correct) + 1)[:, None], 0).max(axis=0, initial=0)
        return np.where(last_wrong < len(self.correct), last_wrong + 1.0, np.inf)

    def append(self, epoch: Epoch, correct: np.ndarray) -> History:
        """With one more epoch."""
        before = self.correct if len(self.correct) else np.zeros((0, len(correct)), bool)
        return History((*self.epochs, epoch), np.concatenate([before, correct[None]]))

    def until(self, number: int) -> History:
        """Up to and with an epoch, the first being 1."""
        return History(self.epochs[:number], self.correct[:number])

    def as_state(self) -> dict[str, Any]:
        """Plain numbers and tensors, for a checkpoint."""
        return {"epochs": [asdict(epoch) for epoch in self.epochs], "correct": torch.from_numpy(self.correct)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """From what `as_state` gave."""
        correct: Tensor = state["correct"]
        return cls(tuple(Epoch(**with_current_names(epoch)) for epoch in state["epochs"]), correct.numpy())
