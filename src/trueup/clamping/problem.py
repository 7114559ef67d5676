"""What every way to fit is given, what it minimises, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.temperature import focal_inverse_temperature, inverse_temperature, scale_of
from trueup.clamping.maps import Shift, scale_shape
from trueup.clamping.network import Network
from trueup.clamping.starts import zero
from trueup.core.arrays import upcast_half
from trueup.core.loss_sums import focal_loss, focal_weight, temperature_sums
from trueup.core.splits import stratified_order

Norm: TypeAlias = Literal["l2sq", "l2"]
PenaltyWeight: TypeAlias = float | Literal["auto", "R1", "R2"]
InputMap: TypeAlias = Literal["shift", "affine"]


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

    weight: float
    norm: Norm = "l2sq"

    def value(self, vector: np.ndarray) -> float:
        """The penalty of a vector."""
        squared = float((vector * vector).sum())
        return self.weight * (squared if self.norm == "l2sq" else math.sqrt(squared))

    def slope(self, vector: np.ndarray) -> np.ndarray:
        """Its gradient."""
        if self.norm == "l2sq":
            return 2 * self.weight * vector
        size = float(np.linalg.norm(vector))
        return self.weight * vector / size if size else np.zeros_like(vector)


@dataclass(frozen=True)
class Problem:
    """What a recipe is given."""

    network: Network
    loss: Loss
    penalty: PenaltyWeight
    """λ: a number; "auto", the recipe's own rule; or a rule of the papers, see `penalty_by_rule`."""
    norm: Norm
    start: Callable[[Network], Tensor] | None
    """Where δ starts; None leaves it to the recipe."""
    input_map: InputMap
    seed: int
    progress: Callable[[str], None]
    """Takes one line that says how far the fit has come."""

    def start_delta(self, otherwise: Callable[[Network], Tensor] = zero) -> Tensor:
        """Where δ starts: where it was asked to, else where the recipe says."""
        network = self.network
        start_delta = (self.start or otherwise)(network)
        wanted = f"start must give a tensor of shape {network.shape}"
        if not isinstance(start_delta, Tensor) or start_delta.shape != network.shape:
            got = f"shape {tuple(start_delta.shape)}" if isinstance(start_delta, Tensor) else type(start_delta).__name__
            raise ValueError(f"{wanted}, got {got}")
        if not bool(torch.isfinite(start_delta).all()):
            raise ValueError(f"{wanted} with finite numbers, got others")
        return start_delta.detach().to(network.device, network.dtype)

    def mapping(self, delta: Tensor) -> Shift:
        """The map with this shift, and scales of one where it has scales."""
        network = self.network
        if self.input_map == "shift":
            return network.mapping(delta)
        ones = torch.ones(scale_shape(network.shape), dtype=network.dtype, device=network.device)
        return network.mapping(delta, ones)


@dataclass(frozen=True)
class Solution:
    """What a recipe returns."""

    before: Shift
    temperature: float
    penalty: float
    """λ; infinite where temperature alone is kept."""
    logits: Tensor
    """Of the mapped calibration inputs, not yet divided by the temperature."""
    norm: Norm | None = None
    """Of the penalty, where it is not the problem's."""
    penalty_value: float | None = None
    """The penalty's value, where it is not λ‖δ‖² or λ‖δ‖."""
    candidates: Mapping[float, float] = field(default_factory=dict)
    """Each λ that was tried, with the loss on samples left out of its fit."""
    evidence: float | None = None
    """p-value of the hypothesis that the mean input gradient is zero."""
    verdict: str = ""
    notes: Mapping[str, object] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Problem], Solution]


def temperature_alone(
    problem: Problem,
    temperature: float,
    verdict: str,
    *,
    candidates: Mapping[float, float] | None = None,
    evidence: float | None = None,
    notes: Mapping[str, object] | None = None,
) -> Solution:
    """The solution that leaves the inputs as they are, λ being infinite."""
    return Solution(
        before=problem.mapping(zero(problem.network)),
        temperature=temperature,
        penalty=math.inf,
        logits=problem.network.plain_logits(),
        penalty_value=0.0,
        candidates=candidates or {},
        evidence=evidence,
        verdict=verdict,
        notes=notes or {},
    )


def penalty_weight(problem: Problem, start: Tensor) -> float:
    """The λ that a problem gives, as a number or by a rule of the papers."""
    if not isinstance(problem.penalty, str):
        return float(problem.penalty)
    if problem.penalty == "auto":
        raise ValueError('penalty="auto" is for the recipe to decide')
    network = problem.network
    first = network.logits(network.mapping(start)) if bool(start.any()) else network.plain_logits()
    return penalty_by_rule(problem.penalty, problem.loss.mean(first, network.labels, 1.0), start)


def penalty_by_rule(rule: Literal["R1", "R2"], loss: float, start: Tensor) -> float:
    """λ by a rule of thumb of the paper, from the mean loss at the start with T = 1.

    R1 is λ = L₀/10; R2 makes the penalty a tenth of the loss, λ = L₀/(10‖δ₀‖²). The paper's words allow both.

    >>> print(f"{penalty_by_rule('R1', 0.5, torch.ones(4)):.4f} {penalty_by_rule('R2', 0.5, torch.ones(4)):.4f}")
    0.0500 0.0125
    """
    if rule == "R1":
        return 0.1 * loss
    squared = float(start.detach().double().square().sum())
    if not squared:
        raise ValueError('penalty="R2" divides by the size of the start, so start must not be zero, got zero')
    return 0.1 * loss / squared


def sample_order(network: Network, loss: Loss) -> Tensor:
    """The samples of all ranks, sorted by their loss as the network is, so that folds taken in turn are alike."""
    plain = network.plain_logits()
    return stratified_order(loss.rows(plain, network.labels, 1.0), network.labels, plain[:, 0])
