"""Callbacks for a training loop: early stopping by calibrated loss, and the epoch in which samples were learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup.calibrators.compose import refinement
from trueup.metrics import nll

StopOn: TypeAlias = Literal["nll", "refinement"]


class EarlyStopping:
    """Keeps the weights of the epoch with the lowest validation loss, and stops when it has not fallen for a while.

    Parameters
    ----------
    stop_on
        "nll" for the loss itself. "refinement" for the loss after a temperature fitted on other validation samples, so
        that overconfidence, which a temperature can correct, is no reason to stop.
    patience
        Number of epochs without improvement after which `update` returns True; None never stops.

    Examples
    --------
    >>> import torch
    >>> model, stopping = nn.Linear(2, 2), EarlyStopping(patience=2)
    >>> x, y = torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20)
    >>> for epoch in range(10):
    ...     with torch.no_grad():  # an epoch of training would be here
    ...         _ = model.weight.copy_(torch.eye(2) * (1.0 if epoch == 1 else 0.5))
    ...     if stopping.update(model, model(x).detach(), y):
    ...         break
    >>> stopping.best_epoch, epoch, stopping.restore(model).weight.diagonal().tolist()
    (2, 3, [1.0, 1.0])

    References
    ----------
    Berta et al. (2025), Rethinking early stopping: refine, then calibrate, arXiv:2501.19195.
    """

    def __init__(self, stop_on: StopOn = "nll", *, patience: int | None = None) -> None:
        if stop_on not in ("nll", "refinement"):
            raise InputError("stop_on", 'be "nll" or "refinement"', repr(stop_on))
        self.stop_on, self.patience = stop_on, patience
        self.scores: list[float] = []
        """Validation loss of each epoch."""
        self.weights: Mapping[str, Tensor] | None = None
        """Weights of the best epoch."""

    @property
    def best_epoch(self) -> int:
        """Number of the best epoch, from 1; 0 before the first update."""
        return 1 + min(range(len(self.scores)), key=self.scores.__getitem__) if self.scores else 0

    def update(self, model: nn.Module, logits: ArrayLike, labels: ArrayLike) -> bool:
        """Score the validation logits of an epoch; return whether training should stop.

        Parameters
        ----------
        model
            The model after the epoch.
        logits
            Validation logits, shape (n, classes).
        labels
            True classes, shape (n,).

        Returns
        -------
        bool
            Whether training should stop.
        """
        score = nll(logits, labels) if self.stop_on == "nll" else refinement(logits, labels).refinement
        if score < min(self.scores, default=math.inf):
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.scores.append(score)
        return self.patience is not None and len(self.scores) - self.best_epoch >= self.patience

    def restore(self, model: nn.Module) -> nn.Module:
        """Load the weights of the best epoch into a model.

        Parameters
        ----------
        model
            The model to change.

        Returns
        -------
        nn.Module
            The same model.
        """
        if self.weights is not None:
            model.load_state_dict(self.weights)
        return model


class LearnedEpochs:
    """Records after every epoch which training samples are correct; their order must not change.

    Examples
    --------
    >>> tracker = LearnedEpochs()
    >>> for logits in ([[0, 1], [1, 0]], [[1, 0], [1, 0]]):
    ...     tracker.update(np.array(logits), np.array([0, 0]))
    >>> tracker.epochs()
    array([2., 1.])
    """

    def __init__(self) -> None:
        self.correct: list[np.ndarray] = []
        """Correctness of each sample (n,), per epoch."""

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Record an epoch from its logits (n, classes) and labels (n,).

        Parameters
        ----------
        logits
            Validation logits, shape (n, classes).
        labels
            True classes, shape (n,).
        """
        z, y = (np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x) for x in (logits, labels))
        self.correct.append(z.argmax(axis=1) == y)

    def epochs(self) -> np.ndarray:
        """Return the first epoch from which each sample stays correct; infinity if there is none."""
        return learned_epochs(np.array(self.correct))


def learned_epochs(correct: np.ndarray) -> np.ndarray:
    """Return the first epoch from which each sample stays correct; infinity if there is none.

    `correct` has shape (epochs, n). Wang et al., "Rethinking calibration of deep neural networks" (2021).

    >>> learned_epochs(np.array([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]], dtype=bool))
    array([ 2.,  3.,  1., inf])
    """
    wrong_until = np.where(~correct, np.arange(1, len(correct) + 1)[:, None], 0).max(axis=0, initial=0)
    return np.where(wrong_until < len(correct), wrong_until + 1.0, np.inf)
