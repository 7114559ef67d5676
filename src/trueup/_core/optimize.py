"""The two minimisers: a safeguarded Newton method in one dimension, and L-BFGS in many. Each returns a certificate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Certificate:
    """How a fit ended, and its cost."""

    status: Literal["converged", "bound"]
    """"bound": the search stopped at an end of the allowed range, so no minimum was found inside."""
    gradient: float
    """Norm of the gradient of the mean loss at the end."""
    iterations: int
    passes: int
    """Number of passes over all data."""
    loss: float
    """Objective per row at the end."""


_NEARLY = 1000
"""A gradient within this many tolerances counts as converged if no further step helps."""
_HUGE = 1e10  # gradient norm from which an error suggests that the numbers are too large
_TOO_LARGE = "; are some of the numbers too large?"


class FitError(ValueError):
    """A fit that did not end at a minimum; the message names the cause."""


def warn_at_bound(name: str, value: float, reason: str = "", *, stacklevel: int = 2) -> None:
    """Warn that a search stopped at a bound of its parameter, and why; `stacklevel` counts from the caller."""
    because = f": {reason}" if reason else ""
    warnings.warn(f"{name} stopped at its bound, {value:.3g}{because}", stacklevel=stacklevel + 1)


def newton(
    derivatives: Callable[[float], tuple[float, float, float]],
    start: float,
    *,
    low: float,
    high: float,
    tolerance: float = 1e-6,
    max_iter: int = 100,
) -> tuple[float, Certificate]:
    """Minimise a convex function of one positive number, given its value, slope and curvature.

    Newton steps in ln x. Each evaluation narrows a bracket around the minimum, and steps stay inside it. If a step
    leaves the bracket, or the slope has hardly decreased, the bracket is halved on the log scale. The search ends with
    a step below `tolerance`, or at an end of [low, high]. The final step is Halley's, with the third derivative taken
    from the two latest curvatures. Its error is far below the square of the tolerance.
    """
    left, right = low, high
    x = min(max(start, low), high)
    previous_slope, previous = math.inf, (x, 0.0)
    for iteration in range(1, max_iter + 1):
        value, slope, curvature = derivatives(x)
        if not math.isfinite(value + slope + curvature):
            raise FitError(f"the loss is not finite at {x:g}: value {value}, slope {slope}, curvature {curvature}")
        left, right = (x, right) if slope < 0 else (left, x)
        # In u = ln x the slope is x·f′ and the curvature x²f″ + x·f′; where that is not positive, x²f″ alone is.
        bend = curvature * x + slope if curvature * x + slope > 0 else curvature * x
        step = -slope / bend if bend > 0 else math.copysign(math.inf, -slope)
        if slope == 0 or abs(step) <= tolerance:
            end = x * math.exp(step if slope else 0.0)
            if iteration > 1 and slope:
                final_step = halley(slope, curvature, (curvature - previous[1]) / (x - previous[0]))
                end = x + final_step if abs(final_step) <= 2 * tolerance * x else end
            return end, Certificate("converged", abs(slope), iteration, iteration, value)
        if right <= left * (1 + tolerance):
            status: Literal["converged", "bound"] = "bound" if left <= low or right >= high else "converged"
            return x, Certificate(status, abs(slope), iteration, iteration, value)
        following = x * math.exp(min(max(step, -50.0), 50.0))
        if not left < following < right or abs(slope) > 0.9 * previous_slope:
            following = math.sqrt(left * right)
        previous_slope, previous = abs(slope), (x, curvature)
        x = following
    raise FitError(f"no minimum was found in {max_iter} steps: slope {slope:g} at {x:g}")


def halley(slope: float, curvature: float, third: float) -> float:
    """Return the step to the root of the slope for a constant third derivative; its error is about its own cube.

    >>> f"{halley(-0.39, 3.8, 2.0):.4f}"  # of x³/3 + x² − 3x at 0.9, whose minimum is at 1
    '0.0999'
    """
    denominator = 2 * curvature * curvature - slope * third
    return -2 * slope * curvature / denominator if denominator > 0 else math.inf


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""Returns value and gradient at a point."""
Curvature = Callable[[np.ndarray], np.ndarray]
"""Multiplies a gradient by the inverse curvature."""
_MEMORY = 20
"""Number of steps whose curvature is kept."""
_MAX_IDLE_STEPS = 10
"""The search ends after this many consecutive steps that lower the value by no more than rounding."""
_REFRESH_EVERY = 40
"""Number of steps after which the preconditioner is computed again."""


@dataclass(frozen=True)
class Stage:
    """An objective and its numerical precision."""

    objective: Objective
    ftol: float = 0.0
    """The search ends when the next step is predicted to lower the value by no more than this."""
    f_noise: float = 1e-15
    """Relative rounding error of the value."""


def lbfgs(
    objective: Objective | Stage,
    start: np.ndarray,
    *,
    tolerance: float = 1e-7,
    max_iter: int = 500,
    precondition: Curvature | None = None,
    refresh: Callable[[np.ndarray], Curvature] | None = None,
    coarse: Stage | None = None,
    step_growth: float = math.inf,
) -> tuple[np.ndarray, Certificate]:
    """Minimise a smooth function of many numbers, given its value and gradient, to a gradient norm of `tolerance`.

    Limited-memory BFGS with a line search that satisfies the Wolfe conditions. `coarse` is a cheaper objective with
    less precision, used until its `ftol` is reached. `precondition` multiplies a gradient by an approximate inverse of
    the curvature; `refresh` computes a new one at the current point of a long search. `step_growth` limits the first
    trial step relative to the previous step, for functions that are far from quadratic.

    It also counts as converged if no step lowers the value beyond rounding and the gradient norm is below 1000 ×
    `tolerance`. So it does if ten steps in a row lowered the value by no more than rounding. Anything else raises.

    Nocedal & Wright, "Numerical optimization" (2006), chapters 3 and 7.
    """
    exact = objective if isinstance(objective, Stage) else Stage(objective)
    f_noise = exact.f_noise
    stage = coarse or exact
    x = start.astype(np.float64).copy()
    value, gradient = stage.objective(x)
    passes, previous_length, idle = 1, math.inf, 0
    steps: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    for iteration in range(max_iter + 1):
        size = _norm(gradient)
        if not math.isfinite(value + size):
            raise FitError(
                f"the loss is not finite after {iteration} steps: value {value}, gradient norm {size}{_TOO_LARGE}"
            )
        if refresh and iteration and iteration % _REFRESH_EVERY == 0:
            steps, changes, precondition = [], [], refresh(x)
        direction = -_two_loops(gradient, steps, changes, precondition)
        if _dot(direction, gradient) >= 0:
            steps, changes, precondition, direction = [], [], None, -gradient
        done = size <= tolerance or (iteration > 0 and -(_dot(direction, gradient)) <= 2 * stage.ftol)
        if done and stage is exact:
            return x, Certificate("converged", size, iteration, passes, value)
        if not done:
            first = 1.0 if steps or precondition else min(1.0, 1.0 / size)
            if step_growth * previous_length < first * _norm(direction):
                first = step_growth * previous_length / _norm(direction)
            trial = _line_search(stage, x, value, gradient, direction, first)
            passes += trial.evaluations
            if stage is not exact and value - trial.value <= stage.ftol:
                # The decrease is below the precision of this stage; switch to the exact one.
                x, done = x + trial.length * direction, True
        if done:
            stage, passes = exact, passes + 1  # the estimated curvature remains valid
            value, gradient = stage.objective(x)
            continue
        if trial.value >= value and trial.length == 0:
            if steps or precondition:  # the estimated curvature may be stale: retry along the gradient
                steps, changes, precondition = [], [], None
                continue
            if size <= _NEARLY * tolerance or size**2 <= 1000 * f_noise * abs(value):
                return x, Certificate("converged", size, iteration, passes, value)
            large = _TOO_LARGE if size > _HUGE else ""
            raise FitError(f"no descent is possible at a gradient norm of {size:g}, required {tolerance:g}{large}")
        idle = idle + 1 if value - trial.value <= f_noise * abs(value) else 0
        if idle == _MAX_IDLE_STEPS:
            return x, Certificate("converged", size, iteration, passes, value)
        step, change = trial.length * direction, trial.gradient - gradient
        if _dot(step, change) > 1e-12 * _norm(step) * _norm(change):
            steps, changes = [*steps, step][-_MEMORY:], [*changes, change][-_MEMORY:]
        x, value, gradient, previous_length = x + step, trial.value, trial.gradient, _norm(step)
    if size <= _NEARLY * tolerance:  # nearly separable rows: the loss keeps falling by tiny amounts
        return x, Certificate("converged", size, max_iter, passes, value)
    raise FitError(f"no minimum was found in {max_iter} steps: the gradient norm is {size:g}, required {tolerance:g}")


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sum products on one core; starting another core takes longer than the sum."""
    return float(np.einsum("i,i", a, b))


def _norm(a: np.ndarray) -> float:
    return math.sqrt(_dot(a, a))


def _two_loops(
    gradient: np.ndarray, steps: list[np.ndarray], changes: list[np.ndarray], precondition: Curvature | None
) -> np.ndarray:
    """Multiply the gradient by the inverse Hessian estimated from recent steps."""
    q = gradient.copy()
    weights = []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        weight = _dot(step, q) / _dot(step, change)
        q -= weight * change
        weights.append(weight)
    if precondition is not None:
        q = precondition(q)
    elif steps:
        q *= _dot(steps[-1], changes[-1]) / _dot(changes[-1], changes[-1])
    for step, change, weight in zip(steps, changes, reversed(weights), strict=True):
        q += (weight - _dot(change, q) / _dot(step, change)) * step
    return q


class _LineSearchResult(NamedTuple):
    length: float
    value: float
    gradient: np.ndarray
    evaluations: int


def _line_search(
    stage: Stage, x: np.ndarray, value: float, gradient: np.ndarray, direction: np.ndarray, length: float
) -> _LineSearchResult:
    """Return a length with enough decrease in value and slope; 0 if there is none within rounding."""
    slope, rounding = _dot(gradient, direction), stage.f_noise * abs(value)
    low, high = 0.0, math.inf
    best = _LineSearchResult(0.0, value, gradient, 0)
    for evaluation in range(1, 31):
        new_value, new_gradient = stage.objective(x + length * direction)
        new_slope = _dot(new_gradient, direction)
        lower = math.isfinite(new_value) and new_value <= value + 1e-4 * length * slope + rounding
        if lower:
            if new_value <= best.value + rounding:
                best = _LineSearchResult(length, new_value, new_gradient, evaluation)
            if abs(new_slope) <= -0.9 * slope:
                return _LineSearchResult(length, new_value, new_gradient, evaluation)
        low, high = (length, high) if lower and new_slope < 0 else (low, length)
        if math.isinf(high):
            length *= 2
        elif low == 0 and new_value > value:  # go to the minimum of a parabola through both ends
            length *= min(max(-slope * length / (2 * (new_value - value - slope * length)), 0.05), 0.5)
        else:
            length = (low + high) / 2
    return best._replace(evaluations=30)
