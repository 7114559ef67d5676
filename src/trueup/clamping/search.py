"""The way through the network: its first part on few samples, the rest on as many as are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.coordinates import Chart
from trueup.clamping.folds import parted
from trueup.clamping.linearized import Linear
from trueup.clamping.problem import Problem
from trueup.clamping.projection import Point, Projected, descend

FEW = 500
"""So many samples, or a fifth if that is more, show the first part of the way."""
SHARE = 0.15
"""What part of all passes that may take."""
FEWEST = 8
"""Passes over the few samples that it may take in any case."""
ENOUGH = 1e-4
"""Some passes together must lower the mean loss by this to be followed by more."""


@dataclass(frozen=True)
class Ground:
    """What is known before any search."""

    problem: Problem
    chart: Chart
    order: Tensor
    """All samples, dealt by what they hold."""
    linear: Linear
    """Logits and derivatives of some samples as they are."""
    plain: Tensor
    """Logits of all samples as they are."""
    temperature: float
    """The best for them."""
    evidence: float


@dataclass(frozen=True)
class Search:
    """Where a search ended."""

    ground: Ground
    lam: float
    point: Point
    used: float
    """Passes forward and backward, in units of all samples."""


def search(
    ground: Ground, lam: float, which: Tensor, *, passes: float, check: Callable[[Point], None] | None = None
) -> Search:
    """Minimise over the samples of a mask from the problem's start; `check` may raise after the first part."""
    problem, chart = ground.problem, ground.chart
    candidates = ground.order[which[ground.order]]
    number = min(len(candidates), max(FEW, len(which) // 5))
    few = torch.zeros_like(which)
    few[candidates[torch.arange(number) * len(candidates) // number]] = True
    first = max(SHARE * passes, FEWEST * number / len(which)) if number < len(candidates) else 0.0
    rough = _objective(ground, lam, few, first, ground.temperature) if first else None
    objective = _objective(ground, lam, which, passes - first, ground.temperature)
    point = descend(
        objective,
        chart.place(problem.begin()),
        precondition=_inverse(ground, lam, ground.temperature),
        rough=rough,
        check=check,
    )
    return Search(ground, lam, point, objective.used + (rough.used if rough else 0.0))


def widened(found: Search, *, passes: float) -> Search:
    """Go on from where a search ended, over all samples."""
    ground, point = found.ground, found.point
    everything = torch.ones(len(ground.order), dtype=torch.bool)
    objective = _objective(ground, found.lam, everything, passes, point.temperature)
    point = descend(objective, point.theta, precondition=_inverse(ground, found.lam, point.temperature))
    return Search(ground, found.lam, point, found.used + objective.used)


def _objective(ground: Ground, lam: float, which: Tensor, budget: float, temperature: float) -> Projected:
    problem = ground.problem
    inputs = None if bool(which.all()) else parted(problem.network, which)
    return Projected(problem, ground.chart, lam, temperature=temperature, inputs=inputs, budget=budget, enough=ENOUGH)


def _inverse(ground: Ground, lam: float, temperature: float) -> np.ndarray:
    """A rough inverse of the curvature, which falls with the square of the temperature."""
    fall = (ground.temperature / temperature) ** 2
    curvature = fall * ground.linear.curvature(ground.temperature)
    level = float(np.trace(curvature)) / len(curvature)
    # The plain norm has no curvature along δ, but a slope that may point where the logits have none either.
    damping = 2 * lam + 1e-6 * level if ground.problem.norm == "l2sq" else lam / ground.chart.reach + 1e-3 * level
    return np.linalg.inv(curvature + (damping or 1.0) * np.eye(len(curvature)))
