"""The way through the network: first on few samples, then, with the curvature seen there, on as many as are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.chart import Chart
from trueup.clamping.folds import parted
from trueup.clamping.linear import Linear, differentiate
from trueup.clamping.objective import Penalty
from trueup.clamping.projected import Point, Projected, descend
from trueup.clamping.recipe import Problem

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
    """Logits and derivatives at zero."""
    plain: Tensor
    """Logits of all samples as they are."""
    temperature: float
    """The best for them."""
    evidence: float
    reach: float
    """The norm of a typical input."""


@dataclass(frozen=True)
class Search:
    """A search that has come near its end."""

    ground: Ground
    lam: float
    point: Point
    inverse: np.ndarray
    """Of the curvature there."""
    used: float
    """Passes forward and backward, in units of all samples."""


def approach(ground: Ground, lam: float, among: Tensor, *, passes: float) -> Search:
    """Descend from the start on few of the samples `among` (a mask), and take the curvature where that ends."""
    problem, chart = ground.problem, ground.chart
    candidates = ground.order[among[ground.order]]
    number = min(len(candidates), max(FEW, len(among) // 5))
    few = torch.zeros_like(among)
    few[candidates[torch.arange(number) * len(candidates) // number]] = True
    budget = max(SHARE * passes, FEWEST * number / len(among))
    objective = _objective(ground, lam, few, budget, ground.temperature)
    start = chart.place(problem.start(problem.network))
    point = descend(objective, start, precondition=_inverse(ground, ground.linear, ground.temperature, lam))
    problem.progress(f"derivatives of the logits along {chart.size} directions")
    near = differentiate(chart, objective.inputs, point.logits, objective.labels, reach=ground.reach, at=point.theta)
    return Search(ground, lam, point, _inverse(ground, near, point.temperature, lam), objective.used)


def settle(search: Search, which: Tensor, *, passes: float) -> Search:
    """Go on over the samples of a mask, for so many passes at most."""
    objective = _objective(search.ground, search.lam, which, passes, search.point.temperature)
    point = descend(objective, search.point.theta, precondition=search.inverse)
    return Search(search.ground, search.lam, point, search.inverse, search.used + objective.used)


def _objective(ground: Ground, lam: float, which: Tensor, budget: float, temperature: float) -> Projected:
    problem = ground.problem
    return Projected(
        ground.chart,
        problem.loss,
        Penalty(lam, problem.norm),
        temperature=temperature,
        enough=ENOUGH,
        inputs=None if bool(which.all()) else parted(problem.network, which.nonzero()[:, 0]),
        budget=budget,
        progress=problem.progress,
    )


def _inverse(ground: Ground, linear: Linear, temperature: float, lam: float) -> np.ndarray:
    curvature = linear.curvature(temperature)
    damping = 2 * lam if ground.problem.norm == "l2sq" else 0.0
    damping += 1e-6 * float(np.trace(curvature)) / len(curvature)
    return np.linalg.inv(curvature + (damping or 1.0) * np.eye(len(curvature)))
