"""The default: δ in the span of a few label-free directions, after asking whether there is anything to gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.chart import Chart, channel_spread
from trueup.clamping.directions import directions, entropy_gradient
from trueup.clamping.evidence import gradient_test
from trueup.clamping.folds import HELD_OUT, dealt, parted
from trueup.clamping.linear import Linear, Validated, differentiate, room, validate
from trueup.clamping.projected import Point, detached
from trueup.clamping.recipe import Problem, Solution, lam_by_rule
from trueup.clamping.search import Ground, Search, approach, settle

LAMS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Weights of the penalty that are tried beside infinity, which is temperature alone."""
SUBSAMPLE = 2000
"""Samples whose derivatives are taken."""
SIGNIFICANCE = 0.01
"""The input gradient is taken to be noise above this p-value."""


def subspace(
    problem: Problem,
    *,
    frequencies: int = 2,
    lams: Sequence[float] = LAMS,
    folds: int = 5,
    significance: float = SIGNIFICANCE,
    subsample: int = SUBSAMPLE,
    passes: float = 23.0,
) -> Solution:
    """Fit δ in a span of few directions: see if there is anything to gain, and only then go through the network.

    First, derivatives of the logits along the directions make every λ and every fold a small problem: unless one λ is
    better than temperature alone by its standard error, on samples left out, and the mean gradient is not what noise
    gives, δ is zero. Otherwise L-BFGS goes through the network, T eliminated, at most so many forward-backward passes:
    on four fifths of the samples, and if the last fifth agrees that it is better than temperature, on all of them.
    A λ that is given is not questioned.
    """
    network, loss = problem.network, problem.loss
    basis = directions(network, entropy_gradient(network), frequencies=frequencies, seed=problem.seed)
    spread = channel_spread(network)
    chart = Chart(network, basis, spread if problem.input_map == "affine" else None)
    plain, labels = network.plain(), network.labels
    temperature = loss.temperature(plain, labels)
    order = dealt(network, loss)
    most = room(min(subsample, len(order)), plain.shape[1], chart.size)
    chosen = order[torch.arange(most) * len(order) // most]
    problem.progress(f"derivatives of the logits along {chart.size} directions")
    reach = float(spread.square().sum().sqrt())
    linear = _linear(chart, chosen, plain, labels, reach)
    evidence = gradient_test(*linear.scores(loss, temperature), seed=problem.seed)
    ground = Ground(problem, chart, order, linear, plain, temperature, evidence, reach)
    if problem.lam != "auto":
        delta = problem.start(network)
        lam = (
            lam_by_rule(problem.lam, loss.mean(plain, labels, 1.0), delta)
            if isinstance(problem.lam, str)
            else float(problem.lam)
        )
        if math.isinf(lam):
            return _temperature_alone(ground, {}, "Temperature alone was asked for.")
        return _given(ground, lam, passes)
    validated = validate(linear, loss, problem.norm, lams, folds=folds)
    best = validated.best()
    gain, error = validated.gain(best)
    if gain <= error or evidence > significance:
        return _temperature_alone(
            ground,
            validated.candidates(),
            f"No: temperature is enough, for the mean input gradient is what noise gives (p = {evidence:.2g})."
            if evidence > significance
            else f"No: temperature is enough, for no input map is better by its standard error (p = {evidence:.2g}).",
        )
    return _through_the_network(ground, validated, _lenient(validated, best), passes)


def _linear(chart: Chart, chosen: Tensor, plain: Tensor, labels: Tensor, reach: float) -> Linear:
    """Derivatives of the chosen samples, in their given order; passes over the network give them by number."""
    sorted_, back = chosen.sort()
    found = differentiate(chart, parted(chart.network, sorted_), plain[sorted_], labels[sorted_], reach=reach)
    again = torch.argsort(back)
    return Linear(found.logits[again], found.jacobian[again], found.labels[again])


def _lenient(validated: Validated, best: float) -> float:
    """The least λ that is not worse than the best by the standard error of the difference.

    The linear model, which chose, sees less of a large shift than there is, and wants more penalty than the network.
    """
    rows = {lam: validated.rows[i] for i, lam in enumerate(validated.lams)}
    for lam in sorted(rows):
        worse = rows[lam] - rows[best]
        if lam == best or worse.mean() <= worse.std(ddof=1) / math.sqrt(len(worse)):
            return lam
    return best


def _through_the_network(ground: Ground, validated: Validated, lam: float, passes: float) -> Solution:
    problem, chart, order = ground.problem, ground.chart, ground.order
    network, loss, labels = problem.network, problem.loss, problem.network.labels
    out = torch.zeros(len(order), dtype=torch.bool)
    out[order[HELD_OUT // 2 :: HELD_OUT]] = True
    held = parted(network, out.nonzero()[:, 0])
    alone = loss.temperature(ground.plain[~out], labels[~out])
    before = loss.rows(ground.plain[out], labels[out], alone).numpy()

    def gain(point: Point) -> tuple[float, float]:
        """By how much the loss falls on the samples left out, and the standard error of that."""
        z = network.logits(chart.map(point.theta)[0], inputs=held)
        gains = before - loss.rows(z, labels[out], point.temperature).numpy()
        return float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))

    search = approach(ground, lam, ~out, passes=passes)
    found, error = gain(search.point)
    if found > 0:
        search = settle(search, ~out, passes=passes / 2)
        found, error = gain(search.point)
    if found <= error:
        return _temperature_alone(
            ground,
            validated.candidates(),
            "No: temperature is enough, for the input map that promised something did not keep it on a fifth of the "
            f"samples that was left out (p = {ground.evidence:.2g}).",
        )
    whole = settle(search, torch.ones_like(out), passes=passes - search.used)
    return _solution(
        whole,
        validated.candidates(),
        f"Yes: on a fifth of the samples that was left out, the input map lowered the loss from {before.mean():.4f} to "
        f"{before.mean() - found:.4f} (standard error {error:.4f}).",
        {"held_out_gain": found, "held_out_error": error},
    )


def _given(ground: Ground, lam: float, passes: float) -> Solution:
    everything = torch.ones(len(ground.order), dtype=torch.bool)
    search = approach(ground, lam, everything, passes=passes)
    search = settle(search, everything, passes=passes - search.used)
    verdict = "Not asked, since λ was given" + (
        f", though the mean input gradient is what noise gives (p = {ground.evidence:.2g})."
        if ground.evidence > SIGNIFICANCE
        else f"; the mean input gradient is more than noise (p = {ground.evidence:.2g})."
    )
    return _solution(search, {}, verdict, {})


def _solution(search: Search, candidates: dict[float, float], verdict: str, notes: dict[str, object]) -> Solution:
    ground, point = search.ground, search.point
    return Solution(
        before=detached(ground.chart.map(point.theta)[0]),
        temperature=point.temperature,
        lam=search.lam,
        logits=point.logits,
        penalty=point.penalty,
        candidates=candidates,
        evidence=ground.evidence,
        verdict=verdict,
        notes={"directions": ground.chart.size, **notes},
    )


def _temperature_alone(ground: Ground, candidates: dict[float, float], verdict: str) -> Solution:
    return Solution(
        before=detached(ground.chart.map(np.zeros(ground.chart.size))[0]),
        temperature=ground.temperature,
        lam=math.inf,
        logits=ground.plain,
        penalty=0.0,
        candidates=candidates,
        evidence=ground.evidence,
        verdict=verdict,
        notes={"directions": ground.chart.size},
    )
