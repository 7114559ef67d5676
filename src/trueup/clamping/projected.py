"""Variable projection: L-BFGS over every coordinate of δ through the frozen network, T eliminated at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trueup.clamping.coordinates import Chart, channel_spread
from trueup.clamping.maps import detached
from trueup.clamping.penalty import choose, penalties
from trueup.clamping.problem import Problem, Solution, given_lam, temperature_alone
from trueup.clamping.projection import Projected, descend, first_unit

STRENGTHS = (3000.0, 300.0, 30.0, 3.0, 0.3, 0.03, 0.003)
"""Penalties that are tried by default: of a δ as long as a typical input."""


def projected(problem: Problem, *, passes: float = 18.0, lams: Sequence[float] | None = None) -> Solution:
    """Fit every coordinate of δ by L-BFGS with T eliminated, in at most so many forward-backward passes.

    With lam="auto" each of `lams` is first fitted, from the largest down, to four fifths of the samples in half as many
    passes, and the one of least loss on the last fifth is taken, or infinity, which is temperature alone. Unless they
    are given, they are `STRENGTHS` over the mean square norm of the inputs.
    Golub & Pereyra, "Separable nonlinear least squares: the variable projection method and its applications" (2003).
    """
    network, loss = problem.network, problem.loss
    chart = Chart(network, None, channel_spread(network), scaled=problem.input_map == "affine")
    delta = problem.begin()
    start = chart.place(delta)
    plain = network.plain()
    temperature = loss.temperature(plain, network.labels)
    tried: dict[float, float] = {}
    if problem.lam == "auto":
        some = penalties(STRENGTHS, chart, problem.norm) if lams is None else lams
        lam, tried = choose(problem, chart, start, some, passes=passes / 2)
        alone = "No input map lowered the loss on samples left out of its fit: temperature alone is kept."
    else:
        lam = given_lam(problem, delta)
        alone = "Temperature alone was asked for."
    if not math.isinf(lam):
        objective = Projected(problem, chart, lam, temperature=temperature, budget=passes)
        found = descend(objective, start, unit=first_unit(objective, start))
        if found.value <= loss.mean(plain, network.labels, temperature):
            return Solution(
                before=detached(chart.map(found.theta)[0]),
                temperature=found.temperature,
                lam=lam,
                logits=found.logits,
                penalty=found.penalty,
                candidates=tried,
            )
        alone = f"No input map is worth its penalty at λ = {lam:.3g}: temperature alone is kept."
    return temperature_alone(problem, temperature, alone, candidates=tried)
