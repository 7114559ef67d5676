"""Variable projection: the optimal T is known exactly for each δ, so L-BFGS searches only over δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup._core.optimize import FitError, Stage, lbfgs
from trueup._core.splits import fold_mask
from trueup.clamping.calibration_set import CalibrationSet, local_subset
from trueup.clamping.input_parameters import InputParameters, channel_norms
from trueup.clamping.linearized import STEP
from trueup.clamping.maps import detach_map
from trueup.clamping.problem import Norm, Penalty, Problem, Solution, penalty_weight, sample_order, temperature_alone
from trueup.models._distributed import all_gather_rows

STRENGTHS = (3000.0, 300.0, 30.0, 3.0, 0.3, 0.03, 0.003)
"""Default penalties of a δ of the norm of a typical input."""
HELD_OUT = 5
"""Reciprocal of the held-out share of the samples."""
MAX_LOSS_RATIO = 1.02
"""Ratio of the held-out loss to the lowest one at which the search for smaller penalties stops."""
MAX_LOG_T_ERROR = 0.03
"""Largest error of ln T at which a gradient is still used."""
DECREMENT = 1e-5
"""Expected decrease of the mean loss below which the search stops."""
PATIENCE = 4
"""Number of passes without a sufficient decrease after which the search stops."""


def varpro(problem: Problem, *, passes: float = 18.0, penalties: Sequence[float] | None = None) -> Solution:
    """Fit every coordinate of δ by L-BFGS with T eliminated, in at most `passes` forward-backward passes.

    With penalty="auto" λ is chosen by the loss on a held-out fifth of the samples. Each of `penalties` is fitted to the
    other samples in half as many passes, starting with the largest. Infinity, which is temperature alone, competes. The
    default penalties are `STRENGTHS` over the mean square norm of the inputs.
    Golub & Pereyra (2003), "Separable nonlinear least squares: the variable projection method and its applications",
    doi:10.1088/0266-5611/19/2/201.
    """
    network, loss, delta = problem.network, problem.loss, problem.start_delta()
    parameters = InputParameters(network, None, channel_norms(network), has_scale=problem.input_map == "affine")
    start, plain = parameters.theta_of(delta), network.plain_logits()
    temperature = loss.temperature(plain, network.labels)
    candidates: dict[float, float] = {}
    if problem.penalty == "auto":
        tried_penalties = penalty_grid(STRENGTHS, parameters, problem.norm) if penalties is None else penalties
        penalty, candidates = choose_penalty(problem, parameters, start, tried_penalties, passes=passes / 2)
        verdict = "No input map lowered the held-out loss: temperature alone is kept."
    else:
        penalty = penalty_weight(problem, delta)
        verdict = "Temperature alone was requested."
    if not math.isinf(penalty):
        objective = VarProObjective(problem, parameters, penalty, temperature=temperature, budget=passes)
        point = descend(objective, start, step_length=first_step_length(objective, start))
        if point.value <= loss.mean(plain, network.labels, temperature):
            return point.solution(parameters, penalty, candidates=candidates)
        verdict = f"No input map lowers the objective at λ = {penalty:.3g}: temperature alone is kept."
    return temperature_alone(problem, temperature, verdict, candidates=candidates)


def penalty_grid(strengths: Sequence[float], parameters: InputParameters, norm: Norm) -> list[float]:
    """Return the λ at which a δ of the norm of a typical input has these penalties."""
    length = parameters.input_norm**2 if norm == "l2sq" else parameters.input_norm
    return [strength / length for strength in strengths]


def choose_penalty(
    problem: Problem, parameters: InputParameters, start: np.ndarray, penalties: Sequence[float], *, passes: float
) -> tuple[float, dict[float, float]]:
    """Return the λ with the lowest loss on a held-out fifth of the samples, and the losses of all λ tried.

    The fits go from the largest λ down, each from the result before it; infinity is temperature alone.
    """
    network, loss = problem.network, problem.loss
    out = fold_mask(sample_order(network, loss), HELD_OUT // 2, HELD_OUT)
    plain, labels = network.plain_logits(), network.labels
    temperature = loss.temperature(plain[~out], labels[~out])
    train, held_out = local_subset(network.inputs, ~out), local_subset(network.inputs, out)
    tried = {math.inf: loss.mean(plain[out], labels[out], temperature)}
    step_length: float | None = None
    for penalty in sorted(penalties, reverse=True):
        objective = VarProObjective(problem, parameters, penalty, temperature=temperature, inputs=train, budget=passes)
        step_length = first_step_length(objective, start) if step_length is None else step_length
        point = descend(objective, start, step_length=step_length)
        start = point.theta
        z = network.logits(parameters.map(start)[0], inputs=held_out)
        tried[penalty] = loss.mean(z, labels[out], point.temperature)
        if tried[penalty] > MAX_LOSS_RATIO * min(tried.values()):
            break
    return min(tried, key=lambda penalty: (tried[penalty], -penalty)), tried


class BudgetExhausted(Exception):
    """The budget of passes is used up."""


@dataclass(frozen=True)
class Point:
    """An input map with its optimal temperature."""

    theta: np.ndarray
    temperature: float
    loss: float
    """Mean loss over the samples of the fit."""
    penalty: float
    logits: Tensor
    """Logits of these samples."""

    @property
    def value(self) -> float:
        """Value of the objective."""
        return self.loss + self.penalty

    def solution(self, parameters: InputParameters, penalty: float, **fields: Any) -> Solution:
        """Return the solution with this map at λ = `penalty`; `fields` are further fields of it."""
        before = detach_map(parameters.map(self.theta)[0])
        return Solution(before, self.temperature, penalty, self.logits, penalty_value=self.penalty, **fields)


class VarProObjective:
    """The objective min_T L(θ, T) + λ‖θ‖² of a problem, with its gradient and its best point so far.

    It uses all samples by default. It ends the search if the budget of passes is used up, or if several passes did not
    lower it by `min_decrease`.
    """

    def __init__(
        self,
        problem: Problem,
        parameters: InputParameters,
        penalty: float,
        *,
        temperature: float,
        inputs: CalibrationSet | None = None,
        budget: float = math.inf,
        min_decrease: float = 0.0,
    ) -> None:
        self.parameters, self.loss, self.penalty = parameters, problem.loss, Penalty(penalty, problem.norm)
        self.network = parameters.network
        self.inputs = self.network.inputs if inputs is None else inputs
        self.labels = all_gather_rows(self.inputs.labels)
        self.share = len(self.labels) / len(self.network.labels)
        """Cost of one pass over these samples, relative to all samples."""
        self.left, self.used, self.min_decrease = budget, 0.0, min_decrease
        self.temperature, self.progress = temperature, problem.progress
        self.best: Point | None = None
        self._latest: tuple[np.ndarray, float, np.ndarray] | None = None
        self._best_values: list[float] = []
        self._exhausted = False

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient. The pass uses the latest T, and is repeated only if T changes the gradient."""
        if self._exhausted:
            raise BudgetExhausted
        if self._latest is not None and np.array_equal(theta, self._latest[0]):
            return self._latest[1:]
        values = self._best_values
        if len(values) > PATIENCE and values[-PATIENCE - 1] - values[-1] < self.min_decrease:
            self._exhausted = True
            raise BudgetExhausted
        point, gradient = self._pass(theta)
        if point is None:
            return math.inf, np.zeros_like(theta)
        if self.best is None or point.value < self.best.value:
            # The line search rejects a worse point, so its gradient need not be exact.
            if abs(math.log(point.temperature / self.temperature)) > MAX_LOG_T_ERROR:
                self.temperature = point.temperature
                point, gradient = self._pass(theta)
                assert point is not None
            self.best, self.temperature = point, point.temperature
        self._best_values.append(self.best.value)
        size = float(np.linalg.norm(theta))
        self.progress(f"loss {point.loss:.4f}  T {point.temperature:.3f}  ‖δ‖ {size:.3f}")
        self._latest = theta.copy(), point.value, self._with_penalty(theta, gradient)
        return self._latest[1:]

    def _pass(self, theta: np.ndarray) -> tuple[Point | None, np.ndarray]:
        if self.left < self.share and self.best is not None:  # the start is always evaluated
            self._exhausted = True
            raise BudgetExhausted
        self.left -= self.share
        self.used += self.share
        before, leaves = self.parameters.map(theta)

        def slope(z: Tensor, y: Tensor) -> Tensor:
            return self.loss.slope(z, y, self.temperature)

        z, gradients = self.network.forward_backward(before, leaves, slope, inputs=self.inputs)
        if not bool(torch.isfinite(z).all()):
            return None, theta
        best = self.loss.temperature(z, self.labels, near=self.temperature)
        loss, penalty = self.loss.mean(z, self.labels, best), self.penalty.value(theta)
        return Point(theta.copy(), best, loss, penalty, z), self.parameters.gradient(theta, gradients) / len(z)

    def _with_penalty(self, theta: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        size = float(np.linalg.norm(gradient))
        if self.penalty.norm == "l2" and not theta.any() and size:
            # At zero ‖θ‖ has many subgradients; the one that gives the shortest sum decides about leaving zero.
            return gradient * max(0.0, 1 - self.penalty.weight / size)
        return gradient + self.penalty.slope(theta)


def descend(
    objective: VarProObjective,
    start: np.ndarray,
    *,
    step_length: float = 1.0,
    precondition: np.ndarray | None = None,
    coarse: VarProObjective | None = None,
    check: Callable[[Point], None] | None = None,
) -> Point:
    """Minimise until no step has an expected decrease, or the passes are used up; return the best point.

    `step_length` is a typical length of the first step, and `precondition` an approximate inverse of the curvature.
    `coarse` is the same objective over fewer samples, for the start of the search. `check` gets the best coarse point,
    and may raise.
    """
    noise = 1e-6 if objective.network.dtype == torch.float32 else 1e-12

    def scaled(objective: VarProObjective, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(step_length * x)
        return value, step_length * gradient

    def exact(x: np.ndarray) -> tuple[float, np.ndarray]:
        if coarse is not None and coarse.best is not None and objective.best is None:
            objective.temperature = coarse.best.temperature
            if check is not None:
                check(coarse.best)
        return scaled(objective, x)

    def coarse_value(x: np.ndarray) -> tuple[float, np.ndarray]:
        assert coarse is not None
        with suppress(BudgetExhausted):
            return scaled(coarse, x)
        return math.inf, np.zeros_like(x)  # this ends the coarse search

    inverse = None if precondition is None else lambda g: precondition @ g / step_length**2
    first = None if coarse is None else Stage(coarse_value, 10 * DECREMENT, noise)
    try:
        lbfgs(
            Stage(exact, DECREMENT, noise),
            start / step_length,
            tolerance=1e-9 * step_length,
            precondition=inverse,
            coarse=first,
            step_growth=3.0,
        )
    except (BudgetExhausted, FitError):
        if objective.best is None:
            raise
    assert objective.best is not None
    return objective.best


def first_step_length(objective: VarProObjective, start: np.ndarray) -> float:
    """Return a length for the first step, curvature^(−1/2) along the gradient; it costs one more pass."""
    _, gradient = objective(start)
    size = float(np.linalg.norm(gradient))
    if not size or objective.best is None:
        return 1.0
    best, step = objective.best, STEP * objective.parameters.input_norm
    before, _ = objective.parameters.map(start - step * gradient / size)
    z = objective.network.logits(before, inputs=objective.inputs)
    rise = (z.double() - best.logits.double()) / step
    p = torch.softmax(best.logits.double() / best.temperature, dim=1)
    variance = (p * rise.square()).sum(dim=1) - (p * rise).sum(dim=1).square()
    curvature = float(variance.mean()) / best.temperature**2
    if objective.penalty.norm == "l2sq":
        curvature += 2 * objective.penalty.weight
    return 1 / math.sqrt(curvature) if curvature > 0 and math.isfinite(curvature) else 1.0
