"""History of a training run: the metrics of each epoch, and which training samples were classified correctly."""

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
    """Metrics of one epoch; NaN where a half is missing or the task is another."""

    number: int
    """Number of the epoch, from 1."""
    lr: float
    """Learning rate at its start."""
    loss: float
    """Mean training loss."""
    seconds: float
    train_accuracy: float = math.nan
    accuracy: float = math.nan
    """Validation accuracy; over all counted tokens for sequences."""
    nll: float = math.nan
    """Validation NLL; for a regression that of Gaussian forecasts, NaN without predicted variances."""
    ece: float = math.nan
    refinement: float = math.nan
    """Validation NLL after a cross-fitted temperature; NaN unless the run stops on it."""
    test_ece: float = math.nan
    optimal_ece: float = math.nan
    """Lowest test ECE over all temperatures, a lower bound for any temperature chosen on validation samples."""
    rmse: float = math.nan
    """Validation RMSE in the units of the targets; regression only, like the ENCE."""
    ence: float = math.nan
    test_ence: float = math.nan


@dataclass(frozen=True)
class History:
    """The epochs of a run.

    >>> import numpy as np
    >>> History((), np.array([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]], dtype=bool)).learned_epochs()
    array([ 2.,  3.,  1., inf])
    """

    epochs: tuple[Epoch, ...] = ()
    correct: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    """(epochs, n): whether each training sample was correct at the end of each epoch; n = 0 for a regression."""

    def learned_epochs(self) -> np.ndarray:
        """Return, for each training sample, the first epoch from which it stays correct; infinity if there is none.

        Wang et al., "Rethinking calibration of deep neural networks" (2021).
        """
        last_wrong = np.where(~self.correct, np.arange(1, len(self.correct) + 1)[:, None], 0).max(axis=0, initial=0)
        return np.where(last_wrong < len(self.correct), last_wrong + 1.0, np.inf)

    def append(self, epoch: Epoch, correct: np.ndarray) -> History:
        """Return the history with one additional epoch."""
        before = self.correct if len(self.correct) else np.zeros((0, len(correct)), bool)
        return History((*self.epochs, epoch), np.concatenate([before, correct[None]]))

    def until(self, number: int) -> History:
        """Return the history up to an epoch, counted from 1."""
        return History(self.epochs[:number], self.correct[:number])

    def as_state(self) -> dict[str, Any]:
        """Return plain numbers and tensors for a checkpoint."""
        return {"epochs": [asdict(epoch) for epoch in self.epochs], "correct": torch.from_numpy(self.correct)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Restore a history from `as_state`."""
        correct: Tensor = state["correct"]
        return cls(tuple(Epoch(**with_current_names(epoch)) for epoch in state["epochs"]), correct.numpy())
