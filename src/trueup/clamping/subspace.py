"""The default: δ in the span of a few label-free directions, after asking whether there is anything to gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.calibration_set import local_subset
from trueup.clamping.directions import directions
from trueup.clamping.input_parameters import Chart, channel_spread
from trueup.clamping.linearized import Linear, Validated, differentiate, gradient_test, room, validate
from trueup.clamping.maps import detached
from trueup.clamping.problem import Problem, Solution, dealt, given_lam, left_out, temperature_alone
from trueup.clamping.theory import entropy_gradient
from trueup.clamping.varpro import HELD_OUT, Point, Projected, descend, penalties

STRENGTHS = (30.0, 3.0, 0.3, 0.03, 0.003)
"""Penalties that are tried beside infinity, which is temperature alone: of a δ as long as a typical input."""
SUBSAMPLE = 1250
"""Samples whose derivatives are taken."""
SIGNIFICANCE = 0.01
"""The input gradient is taken to be noise above this p-value."""
PASSES = 23.0
"""Forward-backward passes that the way through the network may take."""
AFFORDED = 80.0
"""What a whole fit may cost in forward passes, even where a backward pass costs two."""
WORTHWHILE = 3.0
"""Passes that must be left for the search to go on over all samples."""
PARTS = (1.0, 0.5, 0.25)
"""How much of the way that few samples show is tried on those left out."""
FEW = 500
"""So many samples, or a fifth if that is more, show the first part of the way."""
SHARE = 0.15
"""What part of all passes that may take."""
FEWEST_PASSES = 8
"""Passes over the few samples that it may take in any case."""
ENOUGH = 1e-4
"""Some passes together must lower the mean loss by this to be followed by more."""
_FEWEST = 50


class _Hopeless(Exception):
    """The samples left out say that the input map does harm."""


def subspace(
    problem: Problem,
    *,
    frequencies: int = 2,
    lams: Sequence[float] | None = None,
    folds: int = 5,
    significance: float = SIGNIFICANCE,
    subsample: int = SUBSAMPLE,
    passes: float | None = None,
) -> Solution:
    """Fit δ in a span of few directions: see if there is anything to gain, and only then go through the network.

    First, derivatives of the logits along the directions make every λ and every fold a small problem: unless one λ is
    better than temperature alone by its standard error, on samples left out, and the mean gradient is not what noise
    gives, δ is zero. Otherwise L-BFGS goes through the network, T eliminated, at most so many forward-backward passes
    (`PASSES`, or as many as `AFFORDED` leaves): on four fifths of the samples, and if the last fifth agrees that it is
    better than temperature, on all of them.
    Unless `lams` are given, they are `STRENGTHS` over the mean square norm of the inputs, so that the units of the
    inputs do not matter. A λ that the problem gives is not questioned.
    """
    network, loss = problem.network, problem.loss
    if folds < 2 or subsample < 2 * folds:
        raise ValueError(f"folds must be at least 2, and subsample twice that, got {folds} and {subsample}")
    if frequencies < 1:
        raise ValueError(f"frequencies must be at least 1, got {frequencies}")
    if lams is not None and not all(0 < lam < math.inf for lam in lams):
        raise ValueError(f"lams must be positive and finite, got {list(lams)}; infinity is always tried")
    if len(network.labels) < _FEWEST:
        return _too_few(problem)
    basis = directions(network, entropy_gradient(network), frequencies=frequencies, seed=problem.seed)
    chart = Chart(network, basis, channel_spread(network), scaled=problem.input_map == "affine")
    plain, labels = network.plain(), network.labels
    temperature = loss.temperature(plain, labels)
    order = dealt(network, loss)
    most = room(min(subsample, len(order)), plain.shape[1], chart.size)
    chosen = order[torch.arange(most) * len(order) // most]
    problem.progress(f"derivatives of the logits along {chart.size} directions")
    linear = _linear(chart, chosen, plain, labels)
    evidence = gradient_test(*linear.scores(loss, temperature), seed=problem.seed)
    ground = Ground(problem, chart, order, linear, plain, temperature, evidence)
    passes = affordable(chart.size * most / len(order)) if passes is None else passes
    if problem.lam != "auto":
        lam = given_lam(problem, problem.begin())
        if math.isinf(lam):
            return _temperature_alone(ground, {}, "Temperature alone was asked for.")
        return _given(ground, lam, passes)
    tried = penalties(STRENGTHS, chart, problem.norm) if lams is None else list(lams)
    validated = validate(linear, loss, problem.norm, tried, folds=folds)
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


def affordable(differences: float) -> float:
    """How many passes `AFFORDED` leaves, given the forward passes that the derivatives took: at most `PASSES`.

    The entropy gradient takes a pass forward and backward, and the samples left out are looked at for each of `PARTS`
    and at the end. Where derivatives are very many, half of the passes are kept.

    >>> [f"{affordable(forwards):.1f}" for forwards in (6.5, 13, 60)]
    ['23.0', '21.1', '11.5']
    """
    judging = (len(PARTS) + 1) / HELD_OUT
    return min(PASSES, max(PASSES / 2, (AFFORDED - 3 - differences - judging) / 3))


def _linear(chart: Chart, chosen: Tensor, plain: Tensor, labels: Tensor) -> Linear:
    """Derivatives of the chosen samples, in their given order; passes over the network give them by number."""
    sorted_, back = chosen.sort()
    found = differentiate(chart, local_subset(chart.network.inputs, sorted_), plain[sorted_], labels[sorted_])
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
    out = left_out(order, HELD_OUT // 2, HELD_OUT)
    held = local_subset(network.inputs, out)
    alone = loss.temperature(ground.plain[~out], labels[~out])
    before = loss.rows(ground.plain[out], labels[out], alone).numpy()

    def judged(point: Point) -> tuple[Tensor, float, float]:
        """Logits of the samples left out, by how much their loss falls, and the standard error of that."""
        z = network.logits(chart.map(point.theta)[0], inputs=held)
        gains = before - loss.rows(z, labels[out], point.temperature).numpy()
        return z, float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))

    def check(point: Point) -> None:
        # Few samples are followed too far, so that a part of the way may be right where all of it is not.
        parts = (
            replace(point, theta=s * point.theta, temperature=alone * (point.temperature / alone) ** s) for s in PARTS
        )
        # What is within a standard error of nothing rarely survives the rest of the search, which is most of the cost.
        if all(gain <= error for _, gain, error in map(judged, parts)):
            raise _Hopeless

    try:
        found = search(ground, lam, ~out, passes=passes, check=check)
        z, gain, error = judged(found.point)
        if gain <= 0:
            raise _Hopeless
    except _Hopeless:
        return _temperature_alone(
            ground,
            validated.candidates(),
            "No: temperature is enough, for the input map that promised something did not keep it on a fifth of the "
            f"samples that was left out (though the mean input gradient has p = {ground.evidence:.2g}).",
        )
    if passes - found.used >= WORTHWHILE:
        found = widened(found, passes=passes - found.used)
    else:
        found = replace(found, point=_joined(ground, found.point, out, z))
    return _solution(
        found,
        validated.candidates(),
        f"{'Yes' if gain > error else 'Probably'}: on a fifth of the samples that was left out, the input map lowered "
        f"the loss from {before.mean():.4f} to {before.mean() - gain:.4f} (standard error {error:.4f}).",
        {"held_out_gain": gain, "held_out_error": error},
    )


def _joined(ground: Ground, point: Point, out: Tensor, held: Tensor) -> Point:
    """The same map over all samples, with the temperature that is best for them."""
    loss, labels = ground.problem.loss, ground.problem.network.labels
    logits = torch.empty(len(out), held.shape[1], dtype=held.dtype)
    logits[out], logits[~out] = held, point.logits
    temperature = loss.temperature(logits, labels, near=point.temperature)
    return replace(point, logits=logits, temperature=temperature, loss=loss.mean(logits, labels, temperature))


def _given(ground: Ground, lam: float, passes: float) -> Solution:
    found = search(ground, lam, torch.ones(len(ground.order), dtype=torch.bool), passes=passes)
    alone = ground.problem.loss.mean(ground.plain, ground.problem.network.labels, ground.temperature)
    if found.point.value > alone:
        return _temperature_alone(ground, {}, f"No: no input map that was found is worth its penalty at λ = {lam:.3g}.")
    verdict = "Not asked, since λ was given" + (
        f", though the mean input gradient is what noise gives (p = {ground.evidence:.2g})."
        if ground.evidence > SIGNIFICANCE
        else f"; the mean input gradient is more than noise (p = {ground.evidence:.2g})."
    )
    return _solution(found, {}, verdict, {})


def _solution(found: Search, candidates: dict[float, float], verdict: str, notes: dict[str, object]) -> Solution:
    ground, point = found.ground, found.point
    return Solution(
        before=detached(ground.chart.map(point.theta)[0]),
        temperature=point.temperature,
        lam=found.lam,
        logits=point.logits,
        penalty=point.penalty,
        candidates=candidates,
        evidence=ground.evidence,
        verdict=verdict,
        notes={"directions": ground.chart.size, **notes},
    )


def _too_few(problem: Problem) -> Solution:
    n = len(problem.network.labels)
    temperature = problem.loss.temperature(problem.network.plain(), problem.network.labels)
    return temperature_alone(
        problem,
        temperature,
        f"No: {n} samples are too few to judge an input map by, {_FEWEST} are needed.",
    )


def _temperature_alone(ground: Ground, candidates: dict[float, float], verdict: str) -> Solution:
    return temperature_alone(
        ground.problem,
        ground.temperature,
        verdict,
        candidates=candidates,
        evidence=ground.evidence,
        notes={"directions": ground.chart.size},
    )


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
    first = max(SHARE * passes, FEWEST_PASSES * number / len(which)) if number < len(candidates) else 0.0
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
    inputs = None if bool(which.all()) else local_subset(problem.network.inputs, which)
    return Projected(problem, ground.chart, lam, temperature=temperature, inputs=inputs, budget=budget, enough=ENOUGH)


def _inverse(ground: Ground, lam: float, temperature: float) -> np.ndarray:
    """A rough inverse of the curvature, which falls with the square of the temperature."""
    fall = (ground.temperature / temperature) ** 2
    curvature = fall * ground.linear.curvature(ground.temperature)
    level = float(np.trace(curvature)) / len(curvature)
    # The plain norm has no curvature along δ, but a slope that may point where the logits have none either.
    damping = 2 * lam + 1e-6 * level if ground.problem.norm == "l2sq" else lam / ground.chart.reach + 1e-3 * level
    return np.linalg.inv(curvature + (damping or 1.0) * np.eye(len(curvature)))
