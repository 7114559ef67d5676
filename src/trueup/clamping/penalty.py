"""How much penalty: λ in units of the inputs, and the λ that samples left out of the fit like best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trueup.clamping.coordinates import Chart
from trueup.clamping.folds import HELD_OUT, dealt, left_out, parted
from trueup.clamping.objective import Norm
from trueup.clamping.problem import Problem
from trueup.clamping.projection import Projected, descend, first_unit

WORSE = 1.02
"""Less penalty is tried until the loss on the samples left out is so many times the least."""


def penalties(strengths: Sequence[float], chart: Chart, norm: Norm) -> list[float]:
    """The λ at which a δ as long as a typical input has these penalties."""
    length = chart.reach**2 if norm == "l2sq" else chart.reach
    return [strength / length for strength in strengths]


def choose(
    problem: Problem, chart: Chart, start: np.ndarray, lams: Sequence[float], *, passes: float
) -> tuple[float, dict[float, float]]:
    """The λ of least loss on a fifth of the samples when fitted to the others, and the losses of all that were tried.

    From the largest down, each from where the last one ended, in so many passes; infinity is temperature alone.
    """
    network, loss = problem.network, problem.loss
    out = left_out(dealt(network, loss), HELD_OUT // 2, HELD_OUT)
    plain, labels = network.plain(), network.labels
    temperature = loss.temperature(plain[~out], labels[~out])
    fitted, judged = parted(network, ~out), parted(network, out)
    tried = {math.inf: loss.mean(plain[out], labels[out], temperature)}
    unit: float | None = None
    for lam in sorted(lams, reverse=True):
        objective = Projected(problem, chart, lam, temperature=temperature, inputs=fitted, budget=passes)
        unit = first_unit(objective, start) if unit is None else unit
        point = descend(objective, start, unit=unit)
        start = point.theta
        z = network.logits(chart.map(start)[0], inputs=judged)
        tried[lam] = loss.mean(z, labels[out], point.temperature)
        if tried[lam] > WORSE * min(tried.values()):
            break
    return min(tried, key=lambda lam: (tried[lam], -lam)), tried
