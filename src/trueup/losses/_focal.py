"""Focal losses: one exponent, Mukhoti's two, dual and inverse; and the factor of their gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, at_least, per_sample

_LEAST_REST = 1e-12
"""The least 1 − p that is raised to a power: of a power below 1 the slope has no bound at 0."""

MAX_MONOTONE_GAMMA = 3.5911
"""Up to this γ̄ the loss falls with p_y everywhere: the least over p of (1+p)/(−p ln p), attained at p = 0.278."""


@per_sample(gamma=at_least(0))
def focal(logits: Tensor, labels: Tensor, *, gamma: float = 3.0, detach_weight: bool = False) -> Tensor:
    """The cross-entropy, weighted down where the label is already probable: −(1−p_y)^γ ln p_y.

    It keeps confidence down. With `detach_weight` no gradient flows through (1−p_y)^γ. Not proper: its minimum is less
    confident than the truth, so a network that is underconfident gets worse.

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


@per_sample(gamma=at_least(0))
def dual_focal(logits: Tensor, labels: Tensor, *, gamma: float = 5.0) -> Tensor:
    """Focal loss that also widens the gap to the next class: −(1−p_y+p_j)^γ ln p_y.

    p_j is the largest probability strictly below p_y, 0 if there is none. Between focal loss and cross-entropy in how
    far it keeps confidence down. Not for two classes, where it has little left to add: p_j is 1−p_y or 0.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in dual_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.0765', '1.2226']

    Tao, Dong & Xu (2023), Dual focal loss for calibration.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    of_label = log_probs.gather(1, labels[:, None])
    below = log_probs.masked_fill(log_probs >= of_label, -math.inf).max(dim=1).values.exp()
    log_p = of_label.squeeze(1)
    return -(label_rest(log_p) + below).pow(gamma) * log_p


class DualFocal(Loss, function=dual_focal, neutral={"gamma": 0.0}):
    """The `dual_focal` loss as a Module."""


def _check_gamma(name: str, options: Mapping[str, Any]) -> None:
    at_least(0)(name, options)
    if options[name] > MAX_MONOTONE_GAMMA and not options["detach_weight"]:
        warnings.warn(
            f"inverse focal loss with {name} {options[name]} > {MAX_MONOTONE_GAMMA} rises with the label's "
            "probability around p = 0.28, and may hold samples there; take a smaller one, or detach_weight=True",
            stacklevel=3,
        )


@per_sample(gamma=_check_gamma)
def inverse_focal(logits: Tensor, labels: Tensor, *, gamma: float = 2.0, detach_weight: bool = False) -> Tensor:
    """The cross-entropy, weighted up where the label is already probable: −(1+p_y)^γ̄ ln p_y.

    It spreads the logits, for a calibrator to shrink afterwards. With `detach_weight` no gradient flows through the
    weight; without, a warning says when γ̄ > 3.59 makes the loss rise with p_y. Not without such a calibrator: the
    network itself becomes overconfident.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in inverse_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.4281', '1.8803']

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    nll = functional.cross_entropy(logits, labels, reduction="none")
    weight = (1 + torch.exp(-nll)).pow(gamma)
    return (weight.detach() if detach_weight else weight) * nll


class InverseFocal(Loss, function=inverse_focal, neutral={"gamma": 0.0}):
    """The `inverse_focal` loss as a Module."""


def label_rest(log_p: Tensor) -> Tensor:
    """1 − p of log-probabilities without cancellation, never quite 0."""
    return (-torch.expm1(log_p)).clamp(min=_LEAST_REST)


def focal_loss(log_p: Tensor, gamma: float, *, detach_weight: bool = False) -> Tensor:
    """The focal loss −(1 − p)^γ ln p of the labels' log-probabilities; with γ = 0 the cross-entropy.

    With `detach_weight` no gradient flows through (1 − p)^γ.

    >>> f"{focal_loss(torch.tensor(0.5).log(), 1.0):.4f}"
    '0.3466'
    """
    weight = label_rest(log_p).pow(gamma)
    return -(weight.detach() if detach_weight else weight) * log_p


def focal_weight(log_p: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The factor w that the focal loss puts before cross-entropy's gradient, ∂L/∂s = w (p − e_y), and p dw/dp.

    w = (1 − p)^γ (1 + γ r) with r = −p ln p/(1 − p), which is 1 where p is 1 to the last digit.

    >>> print(*(f"{float(x):.4f}" for x in focal_weight(torch.tensor(0.5).log(), 1.0)))
    0.8466 -0.6534
    """
    p, rest, safe = log_p.exp(), -torch.expm1(log_p), label_rest(log_p)
    ratio = torch.where(rest > _LEAST_REST, -p * log_p / safe, torch.ones_like(p))
    weight = rest**gamma * (1 + gamma * ratio)
    turn = -gamma * safe ** (gamma - 1) * p * (2 + log_p + (gamma - 1) * ratio)
    return weight, turn if gamma else torch.zeros_like(p)
