"""The objective with T eliminated: for each δ the best T is known exactly, and L-BFGS moves δ alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.calibration_set import Inputs
from trueup.clamping.coordinates import Chart
from trueup.clamping.linearized import STEP
from trueup.clamping.objective import Penalty
from trueup.clamping.problem import Problem
from trueup.core.distributed import all_gather_rows
from trueup.core.optimize import FitError, Stage, lbfgs

STALE = 0.03
"""By how much (in its logarithm) the T of a gradient may miss the best T before the pass is made again."""
DECREMENT = 1e-5
"""The search is over where a step promises to lower the mean loss by less than about this."""
PATIENCE = 4
"""It is over, too, where so many passes together have not lowered the loss by enough."""


class Spent(Exception):
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


class Projected:
    """The objective min_T L(θ, T) + λ‖θ‖² of a problem, with its gradient; it remembers the best point it saw.

    It is over all samples unless some are given, and ends the search when its budget of passes is used up, or when some
    passes together did not lower it by `enough`.
    """

    def __init__(
        self,
        problem: Problem,
        chart: Chart,
        lam: float,
        *,
        temperature: float,
        inputs: Inputs | None = None,
        budget: float = math.inf,
        enough: float = 0.0,
    ) -> None:
        self.chart, self.loss, self.penalty = chart, problem.loss, Penalty(lam, problem.norm)
        self.network = chart.network
        self.inputs = self.network.inputs if inputs is None else inputs
        self.labels = all_gather_rows(self.inputs.labels)
        self.share = len(self.labels) / len(self.network.labels)
        """What part of a whole pass one over these samples is."""
        self.left = budget
        self.used = 0.0
        self.enough = enough
        self.temperature = temperature
        self.progress = problem.progress
        self.best: Point | None = None
        self._last: tuple[np.ndarray, float, np.ndarray] | None = None
        self._lowest: list[float] = []
        self._over = False

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient; the pass is made with the last T, and again only where that matters."""
        if self._over:
            raise Spent
        if self._last is not None and np.array_equal(theta, self._last[0]):
            return self._last[1:]
        if self._lowest[-PATIENCE - 1 : -PATIENCE] and self._lowest[-PATIENCE - 1] - self._lowest[-1] < self.enough:
            self._over = True
            raise Spent
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
        self._lowest.append(self.best.value)
        size = float(np.linalg.norm(theta))
        self.progress(f"loss {point.loss:.4f}  T {point.temperature:.3f}  ‖δ‖ {size:.3f}")
        self._last = theta.copy(), point.value, self._penalised(theta, gradient)
        return self._last[1:]

    def _pass(self, theta: np.ndarray) -> tuple[Point | None, np.ndarray]:
        if self.left < self.share and self.best is not None:  # the start is looked at in any case
            self._over = True
            raise Spent
        self.left -= self.share
        self.used += self.share
        before, leaves = self.chart.map(theta)
        temperature = self.temperature
        z, gradients = self.network.pull(
            before, leaves, lambda z, y: self.loss.slope(z, y, temperature), inputs=self.inputs
        )
        if not bool(torch.isfinite(z).all()):
            return None, theta
        best = self.loss.temperature(z, self.labels, near=temperature)
        loss, penalty = self.loss.mean(z, self.labels, best), self.penalty.value(theta)
        return Point(theta.copy(), best, loss, penalty, z), self.chart.gradient(theta, gradients) / len(z)

    def _penalised(self, theta: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        size = float(np.linalg.norm(gradient))
        if self.penalty.norm == "l2" and not theta.any() and size:
            # At zero the plain norm has many slopes; the shortest sum with the loss's own says whether to leave.
            return gradient * max(0.0, 1 - self.penalty.lam / size)
        return gradient + self.penalty.slope(theta)


def descend(
    objective: Projected,
    start: np.ndarray,
    *,
    unit: float = 1.0,
    precondition: np.ndarray | None = None,
    rough: Projected | None = None,
    check: Callable[[Point], None] | None = None,
    decrement: float = DECREMENT,
) -> Point:
    """Minimise until no step promises anything, or the passes are used up: the best point seen.

    `unit` is a length of which about one is a good first step; `precondition` a rough inverse of the curvature, and
    `rough` the same objective over fewer samples, which does the first part of the way; `check` looks at where that
    ended, and may raise.
    """
    noise = 1e-6 if objective.network.dtype == torch.float32 else 1e-12

    def exact(x: np.ndarray) -> tuple[float, np.ndarray]:
        if rough is not None and rough.best is not None and objective.best is None:
            objective.temperature = rough.best.temperature
            if check is not None:
                check(rough.best)
        value, gradient = objective(unit * x)
        return value, unit * gradient

    def roughly(x: np.ndarray) -> tuple[float, np.ndarray]:
        assert rough is not None
        try:
            value, gradient = rough(unit * x)
        except Spent:
            return math.inf, np.zeros_like(x)  # so that its part of the way ends here
        return value, unit * gradient

    try:
        lbfgs(
            exact,
            start / unit,
            tolerance=1e-9 * unit,
            ftol=decrement,
            f_noise=noise,
            precondition=None if precondition is None else lambda g: precondition @ g / unit**2,
            coarse=None if rough is None else Stage(roughly, 10 * decrement, noise),
            step_growth=3.0,
        )
    except Spent:
        pass
    except FitError:
        if objective.best is None:
            raise
    assert objective.best is not None
    return objective.best


def first_unit(objective: Projected, start: np.ndarray) -> float:
    """A length scale for the first step: one over the root of the curvature along the gradient, by one more pass."""
    _, gradient = objective(start)
    size = float(np.linalg.norm(gradient))
    if not size or objective.best is None:
        return 1.0
    at = objective.best
    step = STEP * objective.chart.reach
    moved = start - step * gradient / size
    z = objective.network.logits(objective.chart.map(moved)[0], inputs=objective.inputs)
    rise = (z.double() - at.logits.double()) / step
    p = torch.softmax(at.logits.double() / at.temperature, dim=1)
    variance = (p * rise.square()).sum(dim=1) - (p * rise).sum(dim=1).square()
    curvature = float(variance.mean()) / at.temperature**2
    if objective.penalty.norm == "l2sq":
        curvature += 2 * objective.penalty.lam
    return 1 / math.sqrt(curvature) if curvature > 0 and math.isfinite(curvature) else 1.0
