"""Focal losses: with one exponent, with Mukhoti's two, dual and inverse; and the factor of their gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, at_least, over_labels, per_sample

_LEAST_REST = 1e-12
"""Smallest 1 − p that is raised to a power; at 0 a power below 1 has an infinite slope."""

MAX_MONOTONE_GAMMA = 3.5911
"""Largest γ̄ with a loss that falls in p_y everywhere: the minimum of (1+p)/(−p ln p), attained at p = 0.278."""


@per_sample(gamma=at_least(0))
def focal(logits: Tensor, labels: Tensor, *, gamma: float = 3.0, detach_weight: bool = False) -> Tensor:
    """Compute the cross-entropy with a smaller weight for probable labels: −(1−p_y)^γ ln p_y.

    It lowers confidence. Do not use it for an underconfident network: it is not a proper score, and its minimum is less
    confident than the truth.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    gamma
        Exponent γ; 0 gives the cross-entropy.
    detach_weight
        Whether to stop the gradient through the weight of the log-probability.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.0510', '1.2226']

    References
    ----------
    Lin et al. (2017), Focal loss for dense object detection, arXiv:1708.02002; Mukhoti et al. (2020), Calibrating deep
    neural networks using focal loss, arXiv:2002.09437. Wang, Feng & Zhang (2021) detach the weight.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    return over_labels(log_probs, labels, lambda log_p: focal_loss(log_p, gamma, detach_weight=detach_weight))


@per_sample()
def flsd53(logits: Tensor, labels: Tensor, *, detach_weight: bool = False) -> Tensor:
    """Compute the focal loss −(1−p_y)^γ ln p_y with γ = 5 where p_y < 0.2, else 3.

    The authors recommend it if γ cannot be tuned. Do not use it for an underconfident network. The value jumps at
    p_y = 0.2, which can disturb a line search.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    detach_weight
        Whether to stop the gradient through the weight of the log-probability.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> [f"{v:.4f}" for v in flsd53(logits, torch.tensor([0, 2]))]
    ['0.0023', '1.2753']

    References
    ----------
    Mukhoti et al. (2020), Calibrating deep neural networks using focal loss, arXiv:2002.09437.
    """

    def loss(log_p: Tensor) -> Tensor:
        rest = label_rest(log_p)
        weight = rest.pow(3) * torch.where(rest > 0.8, rest.square(), 1.0)
        return -(weight.detach() if detach_weight else weight) * log_p

    return over_labels(torch.log_softmax(logits, dim=1), labels, loss)


class Focal(Loss, function=focal, neutral={"gamma": 0.0}):
    """Module of `focal(gamma=3.0, detach_weight=False)`; see `Loss` for the other parameters."""


class FLSD53(Loss, function=flsd53):
    """The focal loss `flsd53` as a Module."""


@per_sample(gamma=at_least(0))
def dual_focal(logits: Tensor, labels: Tensor, *, gamma: float = 5.0) -> Tensor:
    """Compute the focal loss with the gap to the next class: −(1−p_y+p_j)^γ ln p_y.

    p_j is the largest probability strictly below p_y, or 0. The loss lowers confidence less than `focal` with the same
    γ. Do not use it for two classes, where it adds little: p_j is 1−p_y or 0.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    gamma
        Exponent γ; 0 gives the cross-entropy.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in dual_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.0765', '1.2226']

    References
    ----------
    Tao, Dong & Xu (2023), Dual focal loss for calibration, arXiv:2305.13665.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    rising = log_probs.sort(dim=1).values
    padded = functional.pad(rising, (1, 0), value=-math.inf)  # before each value, the largest one below it

    def loss(log_p: Tensor) -> Tensor:
        columns = log_p if log_p.ndim == 2 else log_p[:, None]
        below = padded.gather(1, torch.searchsorted(rising.detach(), columns.detach())).reshape(log_p.shape)
        return -(label_rest(log_p) + below.exp()).pow(gamma) * log_p

    return over_labels(log_probs, labels, loss)


class DualFocal(Loss, function=dual_focal, neutral={"gamma": 0.0}):
    """Module of `dual_focal(gamma=5.0)`; see `Loss` for the other parameters."""


def _check_gamma(name: str, options: Mapping[str, Any]) -> None:
    at_least(0)(name, options)
    if options[name] > MAX_MONOTONE_GAMMA and not options["detach_weight"]:
        warnings.warn(
            f"inverse focal loss with {name} {options[name]} > {MAX_MONOTONE_GAMMA} rises with the label's "
            "probability around p = 0.28, where samples may stay; use a smaller one, or detach_weight=True",
            stacklevel=3,
        )


@per_sample(gamma=_check_gamma)
def inverse_focal(logits: Tensor, labels: Tensor, *, gamma: float = 2.0, detach_weight: bool = False) -> Tensor:
    """Compute the cross-entropy with a larger weight for probable labels: −(1+p_y)^γ̄ ln p_y.

    It spreads the logits. Do not use it without post-hoc calibration: the network becomes overconfident. A warning is
    issued for γ̄ > 3.59 without `detach_weight`, where the loss rises with p_y.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    gamma
        Exponent γ̄; 0 gives the cross-entropy.
    detach_weight
        Whether to stop the gradient through the weight of the log-probability.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in inverse_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.4281', '1.8803']

    References
    ----------
    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """

    def loss(log_p: Tensor) -> Tensor:
        weight = (1 + torch.exp(log_p)).pow(gamma)
        return -(weight.detach() if detach_weight else weight) * log_p

    return over_labels(torch.log_softmax(logits, dim=1), labels, loss)


class InverseFocal(Loss, function=inverse_focal, neutral={"gamma": 0.0}):
    """Module of `inverse_focal(gamma=2.0, detach_weight=False)`; see `Loss` for the other parameters."""


def label_rest(log_p: Tensor) -> Tensor:
    """Compute 1 − p from log-probabilities without cancellation; at least a tiny positive number."""
    return (-torch.expm1(log_p)).clamp(min=_LEAST_REST)


def focal_loss(log_p: Tensor, gamma: float, *, detach_weight: bool = False) -> Tensor:
    """Compute the focal loss −(1 − p)^γ ln p from the labels' log-probabilities.

    `detach_weight` stops the gradient through (1 − p)^γ.

    >>> f"{focal_loss(torch.tensor(0.5).log(), 1.0):.4f}"
    '0.3466'
    """
    weight = label_rest(log_p).pow(gamma)
    return -(weight.detach() if detach_weight else weight) * log_p


def focal_weight(log_p: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute the focal loss's factor w of the cross-entropy gradient, ∂L/∂s = w (p − e_y), and p dw/dp.

    w = (1 − p)^γ (1 + γ r) with r = −p ln p/(1 − p); the limit of r at p = 1 is 1.

    >>> print(*(f"{float(x):.4f}" for x in focal_weight(torch.tensor(0.5).log(), 1.0)))
    0.8466 -0.6534
    """
    p, rest, safe = log_p.exp(), -torch.expm1(log_p), label_rest(log_p)
    ratio = torch.where(rest > _LEAST_REST, -p * log_p / safe, torch.ones_like(p))
    weight = rest**gamma * (1 + gamma * ratio)
    turn = -gamma * safe ** (gamma - 1) * p * (2 + log_p + (gamma - 1) * ratio)
    return weight, turn if gamma else torch.zeros_like(p)
