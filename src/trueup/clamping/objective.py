"""What a clamped network is fitted to: the mean focal loss, of which cross-entropy is one, and a penalty on δ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.temperature_search import focal_inverse_temperature, inverse_temperature, scale_of
from trueup.core.arrays import upcast_half
from trueup.core.loss_sums import focal_loss, focal_weight, temperature_sums

Norm: TypeAlias = Literal["l2sq", "l2"]


@dataclass(frozen=True)
class Loss:
    """The focal loss −(1 − p_y)^γ ln p_y of softmax(z/T), averaged over the rows; γ = 0 is cross-entropy.

    >>> z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    >>> print(f"{Loss().mean(z, y, 1.0):.4f} {Loss(1.0).mean(z, y, 1.0):.4f} {Loss().temperature(z, y):.4f}")
    0.5845 0.3532 1.3222
    """

    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not self.gamma >= 0 or math.isinf(self.gamma):
            raise ValueError(f"gamma must be a number from 0 on, got {self.gamma}")

    def rows(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """The loss of each row, in float64."""
        log_p = torch.log_softmax(upcast_half(logits).double() / temperature, dim=1)
        label = log_p.gather(1, labels[:, None])[:, 0]
        return focal_loss(label, self.gamma)

    def mean(self, logits: Tensor, labels: Tensor, temperature: float) -> float:
        """The mean over the rows."""
        return float(self.rows(logits, labels, temperature).mean())

    def slope(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Each row's derivative by its logits: (w/T)(p − e_y), with w = (1 − p)^γ − γ (1 − p)^(γ−1) p ln p at p_y."""
        log_p = torch.log_softmax(upcast_half(logits).double() / temperature, dim=1)
        p = log_p.exp()
        weight = focal_weight(log_p.gather(1, labels[:, None]), self.gamma)[0] if self.gamma else 1.0
        return p.scatter_add(1, labels[:, None], torch.full_like(p[:, :1], -1.0)) * weight / temperature

    def temperature(self, logits: Tensor, labels: Tensor, near: float | None = None) -> float:
        """The temperature of least loss, exact to rounding; `near` is where a focal loss is searched first.

        Where there is none, since the logits are always right or no better than chance, it is the search's bound.
        """
        if self.gamma:
            return 1 / focal_inverse_temperature(logits, labels, self.gamma, near=None if near is None else 1 / near)[0]
        beta, certificate = inverse_temperature(logits, labels)
        if certificate.status == "bound" or not scale_of(logits):
            return 1 / beta
        # One more step of Newton's, since the search ends where that would be far below any noise, not at rounding.
        _, slope, curvature = temperature_sums(logits, labels, beta)
        return 1 / (beta - slope / curvature) if curvature > 0 else 1 / beta


@dataclass(frozen=True)
class Penalty:
    """λ‖δ‖², or λ‖δ‖ for the plain norm, whose slope at zero is taken to be zero.

    >>> print(Penalty(0.1).value(np.array([3.0, 4.0])), Penalty(0.1, "l2").value(np.array([3.0, 4.0])))
    2.5 0.5
    """

    lam: float
    norm: Norm = "l2sq"

    def value(self, vector: np.ndarray) -> float:
        """The penalty of a vector."""
        squared = float((vector * vector).sum())
        return self.lam * (squared if self.norm == "l2sq" else math.sqrt(squared))

    def slope(self, vector: np.ndarray) -> np.ndarray:
        """Its gradient."""
        if self.norm == "l2sq":
            return 2 * self.lam * vector
        size = float(np.linalg.norm(vector))
        return self.lam * vector / size if size else np.zeros_like(vector)
