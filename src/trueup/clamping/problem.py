"""What every way to fit is given, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from trueup.clamping.maps import Shift, scale_shape
from trueup.clamping.network import Network
from trueup.clamping.objective import Loss, Norm
from trueup.clamping.starts import zero

Lam: TypeAlias = float | Literal["auto", "R1", "R2"]
InputMap: TypeAlias = Literal["shift", "affine"]


@dataclass(frozen=True)
class Problem:
    """What a recipe is given."""

    network: Network
    loss: Loss
    lam: Lam
    """A number; "auto", the recipe's own rule; or a rule of the papers, see `lam_by_rule`."""
    norm: Norm
    start: Callable[[Network], Tensor] | None
    """Where δ starts; None leaves it to the recipe."""
    input_map: InputMap
    seed: int
    progress: Callable[[str], None]
    """Takes one line that says how far the fit has come."""

    def begin(self, otherwise: Callable[[Network], Tensor] = zero) -> Tensor:
        """Where δ starts: where it was asked to, else where the recipe says."""
        network = self.network
        found = (self.start or otherwise)(network)
        wish = f"start must give a tensor of shape {network.shape}"
        if not isinstance(found, Tensor) or found.shape != network.shape:
            fact = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{wish}, got {fact}")
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"{wish} with finite numbers, got others")
        return found.detach().to(network.device, network.dtype)

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
    lam: float
    logits: Tensor
    """Of the mapped calibration inputs, not yet divided by the temperature."""
    norm: Norm | None = None
    """Of the penalty, where it is not the problem's."""
    penalty: float | None = None
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
        lam=math.inf,
        logits=problem.network.plain(),
        penalty=0.0,
        candidates=candidates or {},
        evidence=evidence,
        verdict=verdict,
        notes=notes or {},
    )


def given_lam(problem: Problem, start: Tensor) -> float:
    """The λ that a problem gives, as a number or by a rule of the papers."""
    if not isinstance(problem.lam, str):
        return float(problem.lam)
    if problem.lam == "auto":
        raise ValueError('lam="auto" is for the recipe to decide')
    network = problem.network
    first = network.logits(network.mapping(start)) if bool(start.any()) else network.plain()
    return lam_by_rule(problem.lam, problem.loss.mean(first, network.labels, 1.0), start)


def lam_by_rule(rule: Literal["R1", "R2"], loss: float, start: Tensor) -> float:
    """λ by a rule of thumb of the paper, from the mean loss at the start with T = 1.

    R1 is λ = L₀/10; R2 makes the penalty a tenth of the loss, λ = L₀/(10‖δ₀‖²). The paper's words allow both.

    >>> print(f"{lam_by_rule('R1', 0.5, torch.ones(4)):.4f} {lam_by_rule('R2', 0.5, torch.ones(4)):.4f}")
    0.0500 0.0125
    """
    if rule == "R1":
        return 0.1 * loss
    squared = float(start.detach().double().square().sum())
    if not squared:
        raise ValueError('lam="R2" divides by the size of the start, so start must not be zero, got zero')
    return 0.1 * loss / squared
