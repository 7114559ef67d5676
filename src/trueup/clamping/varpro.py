"""Variable projection: for each δ the best T is known exactly, so L-BFGS moves δ verdict through the frozen network."""

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
"""Penalties that are tried by default: of a δ as long as a typical input."""
HELD_OUT = 5
"""One sample in so many is held out of a fit to judge it."""
WORSE = 1.02
"""Smaller penalties are tried until the held-out loss is so many times the least."""
STALE = 0.03
"""By how much (in its logarithm) the T of a gradient may miss the best T before the pass is made again."""
DECREMENT = 1e-5
"""The search is over where a step promises to lower the mean loss by less than about this."""
PATIENCE = 4
"""It is over, too, where so many passes together have not lowered the loss by enough."""


def varpro(problem: Problem, *, passes: float = 18.0, penalties: Sequence[float] | None = None) -> Solution:
    """Fit every coordinate of δ by L-BFGS with T eliminated, in at most so many forward-backward passes.

    With penalty="auto" each of `penalties` is first fitted, from the largest down, to four fifths of the samples in
    half as many passes, and the one of least loss on the held-out fifth is taken, or infinity, which is temperature
    alone. Unless they are given, they are `STRENGTHS` over the mean square norm of the inputs.
    Golub & Pereyra, "Separable nonlinear least squares: the variable projection method and its applications" (2003).
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
        verdict = "Temperature alone was asked for."
    if not math.isinf(penalty):
        objective = VarProObjective(problem, parameters, penalty, temperature=temperature, budget=passes)
        point = descend(objective, start, step_length=first_step_length(objective, start))
        if point.value <= loss.mean(plain, network.labels, temperature):
            return point.solution(parameters, penalty, candidates=candidates)
        verdict = f"No input map is worth its penalty at λ = {penalty:.3g}: temperature alone is kept."
    return temperature_alone(problem, temperature, verdict, candidates=candidates)


def penalty_grid(strengths: Sequence[float], parameters: InputParameters, norm: Norm) -> list[float]:
    """The λ at which a δ as long as a typical input has these penalties."""
    length = parameters.input_norm**2 if norm == "l2sq" else parameters.input_norm
    return [strength / length for strength in strengths]


def choose_penalty(
    problem: Problem, parameters: InputParameters, start: np.ndarray, penalties: Sequence[float], *, passes: float
) -> tuple[float, dict[float, float]]:
    """The λ of least loss on a fifth of the samples when fitted to the others, and the losses of all that were tried.

    From the largest down, each from where the last one ended, in so many passes; infinity is temperature alone.
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
        if tried[penalty] > WORSE * min(tried.values()):
            break
    return min(tried, key=lambda penalty: (tried[penalty], -penalty)), tried


class BudgetExhausted(Exception):
    """The passes that were allowed are used up."""


@dataclass(frozen=True)
class Point:
    """An input map with its best temperature."""

    theta: np.ndarray
    temperature: float
    loss: float
    """Mean loss over the samples of the fit."""
    penalty: float
    logits: Tensor
    """Of these samples."""

    @property
    def value(self) -> float:
        """The objective."""
        return self.loss + self.penalty

    def solution(self, parameters: InputParameters, penalty: float, **more: Any) -> Solution:
        """The solution of this map with a penalty of weight λ; `more` are further fields of it."""
        before = detach_map(parameters.map(self.theta)[0])
        return Solution(before, self.temperature, penalty, self.logits, penalty_value=self.penalty, **more)


class VarProObjective:
    """The objective min_T L(θ, T) + λ‖θ‖² of a problem, with its gradient; it remembers the best point it saw.

    It is over all samples unless some are given, and ends the search when its budget of passes is used up, or when some
    passes together did not lower it by `min_decrease`.
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
        """What part of a whole pass one over these samples is."""
        self.left, self.used, self.min_decrease = budget, 0.0, min_decrease
        self.temperature, self.progress = temperature, problem.progress
        self.best: Point | None = None
        self._last: tuple[np.ndarray, float, np.ndarray] | None = None
        self._best_values: list[float] = []
        self._exhausted = False

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient; the pass is made with the last T, and again only where that matters."""
        if self._exhausted:
            raise BudgetExhausted
        if self._last is not None and np.array_equal(theta, self._last[0]):
            return self._last[1:]
        values = self._best_values
        if len(values) > PATIENCE and values[-PATIENCE - 1] - values[-1] < self.min_decrease:
            self._exhausted = True
            raise BudgetExhausted
        point, gradient = self._pass(theta)
        if point is None:
            return math.inf, np.zeros_like(theta)
        if self.best is None or point.value < self.best.value:
            # A point that is not better will be left by the line search, whatever its exact gradient.
            if abs(math.log(point.temperature / self.temperature)) > STALE:
                self.temperature = point.temperature
                point, gradient = self._pass(theta)
                assert point is not None
            self.best, self.temperature = point, point.temperature
        self._best_values.append(self.best.value)
        size = float(np.linalg.norm(theta))
        self.progress(f"loss {point.loss:.4f}  T {point.temperature:.3f}  ‖δ‖ {size:.3f}")
        self._last = theta.copy(), point.value, self._with_penalty(theta, gradient)
        return self._last[1:]

    def _pass(self, theta: np.ndarray) -> tuple[Point | None, np.ndarray]:
        if self.left < self.share and self.best is not None:  # the start is looked at in any case
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
            # At zero the plain norm has many slopes; the shortest sum with the loss's own says whether to leave.
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
    decrement: float = DECREMENT,
) -> Point:
    """Minimise until no step promises anything, or the passes are used up: the best point seen.

    `step_length` is about the length of a good first step, `precondition` a rough inverse of the curvature, and
    `coarse` the same objective over fewer samples, which does the first part of the search; `check` looks at where that
    ended, and may raise.
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
        return math.inf, np.zeros_like(x)  # so that its part of the way ends here

    inverse = None if precondition is None else lambda g: precondition @ g / step_length**2
    first = None if coarse is None else Stage(coarse_value, 10 * decrement, noise)
    try:
        lbfgs(
            Stage(exact, decrement, noise),
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
    """A length scale for the first step: one over the root of the curvature along the gradient, by one more pass."""
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
