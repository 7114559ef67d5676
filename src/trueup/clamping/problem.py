"""The fitting problem: its loss, penalty and options, and the solution that a recipe returns."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trueup._core.errors import InputError
from trueup._core.loss_sums import temperature_sums
from trueup._core.splits import stratified_order
from trueup.calibrators.temperature import focal_inverse_temperature, inverse_temperature, scale_of
from trueup.clamping.maps import Box, Shift, scale_shape
from trueup.clamping.network import Network
from trueup.clamping.theory import data_driven, random, zero
from trueup.losses._focal import focal_loss, focal_weight
from trueup.models._tensors import to_numpy, upcast_half

Norm: TypeAlias = Literal["l2sq", "l2"]
PenaltyWeight: TypeAlias = float | Literal["auto", "R1", "R2"]
InputMap: TypeAlias = Literal["shift", "affine"]
Start: TypeAlias = str | Callable[[Network], Tensor]
_SEEDS = 1 << 63  # number of seeds that generators of torch and NumPy both accept
_STARTS = ("zero", "random", "data")


@dataclass(frozen=True)
class Objective:
    """The objective: mean loss plus a penalty on δ.

    Parameters
    ----------
    loss
        "ce" for cross-entropy or "focal" for the focal loss.
    gamma
        Exponent of the focal loss, 1 by default. In a pool of exponents, the one with the lowest ECE is kept.
    gamma_folds
        Number of cross-validation folds for the ECE of each γ; None uses the calibration set itself.
    penalty
        λ: a number, "auto" for the recipe's own rule, or "R1" or "R2" for the paper's rules.
    norm
        "l2sq" for λ‖δ‖² or "l2" for λ‖δ‖.
    """

    loss: Literal["ce", "focal"] = "ce"
    """Loss of each sample."""
    gamma: float | Sequence[float] | None = None
    """Exponent of the focal loss, or a pool of exponents."""
    gamma_folds: int | None = None
    """Number of cross-validation folds for the ECE of each γ."""
    penalty: PenaltyWeight = "auto"
    """λ, or a rule for it."""
    norm: Norm = "l2sq"
    """Norm of the penalty."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choice("loss", self.loss, ("ce", "focal"))
        _check_choice("norm", self.norm, ("l2sq", "l2"))
        if self.loss == "ce" and self.gamma is not None:
            got = f"{self.loss!r} with gamma {self.gamma}"
            raise ValueError(f'gamma belongs to the focal loss, so loss must be "focal", got {got}')
        if self.gamma_folds is not None and not self._is_pool:
            raise ValueError(f"gamma_folds need a pool of gamma to choose from, got {self.gamma}")
        if not isinstance(self.penalty, str) or self.penalty not in ("auto", "R1", "R2"):
            number = _parse_number("penalty", self.penalty, 'be a number, "auto", "R1" or "R2"')
            if not number >= 0:
                raise InputError("penalty", "not be negative", f"{self.penalty}")
            object.__setattr__(self, "penalty", number)
        object.__setattr__(self, "gammas", self._parse_gammas())

    gammas: tuple[float, ...] = field(init=False)
    """Exponents to choose from, sorted; only 0 for cross-entropy."""

    @property
    def _is_pool(self) -> bool:
        gamma = self.gamma
        return isinstance(gamma, Iterable) and not isinstance(gamma, str) and getattr(gamma, "ndim", 1) > 0

    def _parse_gammas(self) -> tuple[float, ...]:
        if self.gamma is None:
            return (0.0 if self.loss == "ce" else 1.0,)
        expected = "be a non-negative number, or a pool of them"
        pool: Any = self.gamma if self._is_pool else [self.gamma]
        gammas = {_parse_number("gamma", entry, expected) for entry in pool}
        if not gammas:
            raise InputError("gamma", expected, "an empty pool")
        return tuple(sorted(gammas))


@dataclass(frozen=True)
class MapOptions:
    """Options of the input map.

    Parameters
    ----------
    kind
        "shift" adds δ; "affine" also scales each channel.
    start
        Start of δ: "zero", "random", "data" (Theorem 3.2) or a function of the network. None starts the published
        recipes at random and the others at zero.
    box
        Bounds (low, high) of the mapped inputs; None does not clip.
    """

    kind: InputMap = "shift"
    """Kind of the map."""
    start: Start | None = None
    """Start of δ."""
    box: Box | None = None
    """Bounds of the mapped inputs."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_choice("input_map", self.kind, ("shift", "affine"))
        start = self.start
        if not (start is None or (isinstance(start, str) and start in _STARTS) or callable(start)):
            raise ValueError(f"start must be one of {', '.join(_STARTS)}, or a function, got {start!r}")

    def start_function(self, seed: int) -> Callable[[Network], Tensor] | None:
        """Return the start of δ as a function; None leaves it to the recipe.

        Parameters
        ----------
        seed
            Random seed of a random start.

        Returns
        -------
        Callable | None
            Function of the network that returns the start.
        """
        if not isinstance(self.start, str):
            return self.start
        if self.start == "random":
            return partial(random, seed=seed)
        return zero if self.start == "zero" else data_driven


def _check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check a choice between names.

    >>> _check_choice("norm", "l1", ("l2sq", "l2"))
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: norm must be "l2sq" or "l2", got 'l1'
    """
    if not isinstance(value, str) or value not in allowed:
        choices = " or ".join(f'"{choice}"' for choice in allowed)
        raise InputError(name, f"be {choices}", repr(value))


def _parse_number(name: str, value: Any, expected: str) -> float:
    """Convert a number of Python, NumPy or torch to float."""
    if not isinstance(value, str | bool | np.bool_) and not getattr(value, "shape", ()):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise InputError(name, expected, repr(value))


def parse_whole(name: str, value: Any, low: int, high: int, expected: str) -> int:
    """Parse an integer from low to high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(name, expected, repr(value)) from None
    if not low <= number <= high:
        raise InputError(name, expected, f"{value}")
    return number


def parse_seed(seed: Any) -> int:
    """Parse a seed that generators of torch and of NumPy accept."""
    return parse_whole("seed", seed, 0, _SEEDS - 1, "be an integer from 0 to 2**63 - 1")


@dataclass(frozen=True)
class Loss:
    """The focal loss −(1 − p_y)^γ ln p_y of softmax(z/T), averaged over the rows; γ = 0 is cross-entropy.

    >>> z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    >>> print(f"{Loss().mean(z, y, 1.0):.4f} {Loss(1.0).mean(z, y, 1.0):.4f} {Loss().temperature(z, y):.4f}")
    0.5845 0.3532 1.3222
    """

    gamma: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.gamma >= 0 or math.isinf(self.gamma):
            raise ValueError(f"gamma must be a non-negative number, got {self.gamma}")

    def rows(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Return the loss of each row, in float64."""
        log_p = torch.log_softmax(upcast_half(logits).double() / temperature, dim=1)
        label = log_p.gather(1, labels[:, None])[:, 0]
        return focal_loss(label, self.gamma)

    def mean(self, logits: Tensor, labels: Tensor, temperature: float) -> float:
        """Return the mean loss over the rows."""
        return float(self.rows(logits, labels, temperature).mean())

    def slope(self, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Return dL/dz of each row: (w/T)(p − e_y), with w = (1 − p)^γ − γ (1 − p)^(γ−1) p ln p at p = p_y."""
        log_p = torch.log_softmax(upcast_half(logits).double() / temperature, dim=1)
        p = log_p.exp()
        weight = focal_weight(log_p.gather(1, labels[:, None]), self.gamma)[0] if self.gamma else 1.0
        return p.scatter_add(1, labels[:, None], torch.full_like(p[:, :1], -1.0)) * weight / temperature

    def temperature(self, logits: Tensor, labels: Tensor, near: float | None = None) -> float:
        """Return the temperature with the lowest loss, exact to rounding; `near` starts the search for a focal loss.

        There is no minimum if the logits are always right or no better than chance. The bound of the search is then
        returned.
        """
        z, y = to_numpy(logits, labels)
        if self.gamma:
            return 1 / focal_inverse_temperature(z, y, self.gamma, near=None if near is None else 1 / near)[0]
        beta, certificate = inverse_temperature(z, y)
        if certificate.status == "bound" or not scale_of(z):
            return 1 / beta
        # The search stops far below noise, but above rounding; one Newton step gives full precision.
        _, slope, curvature = temperature_sums(z, y, beta)
        return 1 / (beta - slope / curvature) if curvature > 0 else 1 / beta


@dataclass(frozen=True)
class Penalty:
    """Penalty λ‖δ‖², or λ‖δ‖ for norm "l2", with gradient zero at δ = 0.

    >>> print(Penalty(0.1).value(np.array([3.0, 4.0])), Penalty(0.1, "l2").value(np.array([3.0, 4.0])))
    2.5 0.5
    """

    weight: float
    norm: Norm = "l2sq"

    def value(self, vector: np.ndarray) -> float:
        """Return the penalty of a vector."""
        squared = float((vector * vector).sum())
        return self.weight * (squared if self.norm == "l2sq" else math.sqrt(squared))

    def slope(self, vector: np.ndarray) -> np.ndarray:
        """Return the gradient."""
        if self.norm == "l2sq":
            return 2 * self.weight * vector
        size = float(np.linalg.norm(vector))
        return self.weight * vector / size if size else np.zeros_like(vector)


@dataclass(frozen=True)
class Problem:
    """The input of a recipe."""

    network: Network
    loss: Loss
    penalty: PenaltyWeight
    """λ: a number, "auto" for the recipe's own rule, or a rule of the paper (see `penalty_by_rule`)."""
    norm: Norm
    start: Callable[[Network], Tensor] | None
    """Start of δ; None leaves it to the recipe."""
    input_map: InputMap
    seed: int
    progress: Callable[[str], None]
    """Shows one line about the progress of the fit."""

    def start_delta(self, default: Callable[[Network], Tensor] = zero) -> Tensor:
        """Return the start of δ: the requested one, or the recipe's default."""
        network = self.network
        delta = (self.start or default)(network)
        expected = f"start must give a tensor of shape {network.shape}"
        if not isinstance(delta, Tensor) or delta.shape != network.shape:
            got = f"shape {tuple(delta.shape)}" if isinstance(delta, Tensor) else type(delta).__name__
            raise ValueError(f"{expected}, got {got}")
        if not bool(torch.isfinite(delta).all()):
            raise ValueError(f"{expected} with finite numbers, got NaN or infinity")
        return delta.detach().to(network.device, network.dtype)

    def mapping(self, delta: Tensor) -> Shift:
        """Return the map with this shift, and scales of one for an affine map."""
        network = self.network
        if self.input_map == "shift":
            return network.mapping(delta)
        ones = torch.ones(scale_shape(network.shape), dtype=network.dtype, device=network.device)
        return network.mapping(delta, ones)


@dataclass(frozen=True)
class Solution:
    """The output of a recipe."""

    before: Shift
    temperature: float
    penalty: float
    """λ; infinite if only a temperature is kept."""
    logits: Tensor
    """Logits of the mapped calibration inputs, not divided by the temperature."""
    norm: Norm | None = None
    """Norm of the penalty, if it differs from the problem's."""
    penalty_value: float | None = None
    """Value of the penalty, if it differs from λ‖δ‖² or λ‖δ‖."""
    candidates: Mapping[float, float] = field(default_factory=dict)
    """Held-out loss of each λ that was tried."""
    evidence: float | None = None
    """p-value of the hypothesis that the mean input gradient is zero."""
    verdict: str = ""
    notes: Mapping[str, object] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Problem], Solution]


def temperature_alone(problem: Problem, temperature: float, verdict: str, **fields: Any) -> Solution:
    """Return the solution without an input map (λ = ∞); `fields` are further fields of it."""
    before, logits = problem.mapping(zero(problem.network)), problem.network.plain_logits()
    return Solution(before, temperature, math.inf, logits, penalty_value=0.0, verdict=verdict, **fields)


def paired_gain(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Return the decrease of the mean loss, and its standard error."""
    gains = before - after
    return float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))


def penalty_weight(problem: Problem, start: Tensor) -> float:
    """Return a problem's λ, given as a number or by a rule of the paper."""
    if not isinstance(problem.penalty, str):
        return float(problem.penalty)
    if problem.penalty == "auto":
        raise ValueError('penalty="auto" has no value; the recipe must choose λ')
    network = problem.network
    first = network.logits(network.mapping(start)) if bool(start.any()) else network.plain_logits()
    return penalty_by_rule(problem.penalty, problem.loss.mean(first, network.labels, 1.0), start)


def penalty_by_rule(rule: Literal["R1", "R2"], loss: float, start: Tensor) -> float:
    """Compute λ by a rule of the paper, from the mean loss L₀ at the start with T = 1.

    R1 is λ = L₀/10. R2 makes the penalty a tenth of the loss: λ = L₀/(10‖δ₀‖²). The paper's text allows both.

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
    """Sort the samples of all ranks by their loss at the original network; folds taken in turn are then balanced."""
    plain = network.plain_logits()
    return stratified_order(loss.rows(plain, network.labels, 1.0), network.labels, plain[:, 0])
