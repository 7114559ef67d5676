"""Focal loss, with one exponent or with Mukhoti's two."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.core.loss_sums import focal_loss, label_rest
from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import at_least


@per_sample(gamma=at_least(0))
def focal(logits: Tensor, labels: Tensor, *, gamma: float = 3.0, detach_weight: bool = False) -> Tensor:
    """The cross-entropy, weighted down where the label is already probable: −(1−p_y)^γ ln p_y.

    It keeps confidence down. With `detach_weight` no gradient flows through (1−p_y)^γ. Not proper: its minimum is less
    confident than the truth, so a network that is underconfident gets worse.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.0510', '1.2226']

    Lin et al. (2017), Focal loss for dense object detection; Mukhoti et al. (2020), Calibrating deep neural networks
    using focal loss. Wang, Feng & Zhang (2021) detach the weight.
    """
    log_p = -functional.cross_entropy(logits, labels, reduction="none")
    return focal_loss(log_p, gamma, detach_weight=detach_weight)


@per_sample()
def flsd53(logits: Tensor, labels: Tensor, *, detach_weight: bool = False) -> Tensor:
    """Focal loss that presses harder on improbable labels: −(1−p_y)^γ ln p_y with γ = 5 where p_y < 0.2, else 3.

    It is the authors' recommendation where γ cannot be tuned. Not for an underconfident network; and its value jumps
    at p_y = 0.2, so that a line search may stumble.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> [f"{v:.4f}" for v in flsd53(logits, torch.tensor([0, 2]))]
    ['0.0023', '1.2753']

    Mukhoti et al. (2020), Calibrating deep neural networks using focal loss.
    """
    nll = functional.cross_entropy(logits, labels, reduction="none")
    rest = label_rest(-nll)
    weight = rest.pow(3) * torch.where(rest > 0.8, rest.square(), 1.0)
    return (weight.detach() if detach_weight else weight) * nll


class Focal(Loss, function=focal, neutral={"gamma": 0.0}):
    """The `focal` loss as a Module."""


class FLSD53(Loss, function=flsd53):
    """The focal loss `flsd53` as a Module."""
