"""The default: δ in the span of a few label-free directions, after asking whether there is anything to gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trueup._core.splits import fold_mask
from trueup.clamping import linearized
from trueup.clamping.calibration_set import local_subset
from trueup.clamping.input_parameters import InputParameters, channel_norms, directions
from trueup.clamping.linearized import CrossValidation, LinearizedModel, cross_validate, gradient_test
from trueup.clamping.problem import Problem, Solution, paired_gain, penalty_weight, sample_order, temperature_alone
from trueup.clamping.theory import entropy_gradient
from trueup.clamping.varpro import HELD_OUT, Point, VarProObjective, descend, penalty_grid

STRENGTHS = (30.0, 3.0, 0.3, 0.03, 0.003)
"""Penalties that are tried beside infinity, which is temperature alone: of a δ as long as a typical input."""
SUBSAMPLE = 1250
"""Samples whose derivatives are taken."""
STANDARD_ERRORS = 1.64
"""A gain on samples left out must exceed so many: one in twenty useless maps would pass."""
SIGNIFICANCE = 0.01
"""The input gradient is taken to be noise above this p-value."""
PASSES = 23.0
"""Forward-backward passes that the search through the network may take."""
AFFORDED = 80.0
"""What a whole fit may cost in forward passes, even where a backward pass costs two."""
WORTHWHILE = 3.0
"""Passes that must be left for the search to go on over all samples."""
PARTS = (1.0, 0.5, 0.25)
"""Shares of the step from few samples that are tried on the held-out ones."""
FEW = 500
"""The first part of the search is over so many samples, or a fifth if that is more."""
SHARE = 0.15
"""The share of all passes that the first part may take."""
FEWEST_PASSES = 8
"""Passes over these samples that it may take in any case."""
MIN_DECREASE = 1e-4
"""Some passes together must lower the mean loss by this to be followed by more."""
MIN_SAMPLES = 50
"""Samples below which only a temperature is fitted."""


class _NoGain(Exception):
    """The input map does not lower the held-out loss."""


def subspace(
    problem: Problem,
    *,
    frequencies: int = 2,
    penalties: Sequence[float] | None = None,
    n_folds: int = 5,
    significance: float = SIGNIFICANCE,
    subsample: int = SUBSAMPLE,
    passes: float | None = None,
) -> Solution:
    """Fit δ in a span of few directions: see if there is anything to gain, and only then go through the network.

    First, derivatives of the logits along the directions make every λ and every fold a small problem: unless one λ is
    better than temperature alone by 1.64 standard errors, on held-out folds, and the mean gradient is not what noise
    gives, δ is zero. Otherwise L-BFGS goes through the network, T eliminated, at most so many forward-backward passes
    (`PASSES`, or as many as `AFFORDED` leaves): on four fifths of the samples, and if it is better than temperature by
    1.64 standard errors on the last fifth, on all of them.
    Unless `penalties` are given, they are `STRENGTHS` over the mean square norm of the inputs, so that the units of the
    inputs do not matter. A λ that the problem gives is not questioned.
    """
    network, loss = problem.network, problem.loss
    if n_folds < 2 or subsample < 2 * n_folds:
        raise ValueError(f"n_folds must be at least 2, and subsample twice that, got {n_folds} and {subsample}")
    if frequencies < 1:
        raise ValueError(f"frequencies must be at least 1, got {frequencies}")
    if penalties is not None and not all(0 < penalty < math.inf for penalty in penalties):
        raise ValueError(f"penalties must be positive and finite, got {list(penalties)}; infinity is always tried")
    if len(network.labels) < MIN_SAMPLES:
        few = f"No: {len(network.labels)} samples are too few to judge an input map by, {MIN_SAMPLES} are needed."
        return temperature_alone(problem, loss.temperature(network.plain_logits(), network.labels), few)
    basis = directions(network, entropy_gradient(network), frequencies=frequencies, seed=problem.seed)
    parameters = InputParameters(network, basis, channel_norms(network), has_scale=problem.input_map == "affine")
    plain, labels = network.plain_logits(), network.labels
    temperature = loss.temperature(plain, labels)
    order = sample_order(network, loss)
    most = linearized.max_samples_in_memory(min(subsample, len(order)), plain.shape[1], parameters.size)
    chosen = order[torch.arange(most) * len(order) // most]
    problem.progress(f"derivatives of the logits along {parameters.size} directions")
    numbers, back = chosen.sort()  # passes over the network give the samples by number
    inputs = local_subset(network.inputs, numbers)
    linear = linearized.linearize(parameters, inputs, plain[numbers], labels[numbers]).rows(torch.argsort(back))
    evidence = gradient_test(*linear.scores(loss, temperature), seed=problem.seed)
    context = SearchContext(problem, parameters, order, linear, plain, temperature, evidence)
    passes = affordable(parameters.size * most / len(order)) if passes is None else passes
    if problem.penalty != "auto":
        penalty = penalty_weight(problem, problem.start_delta())
        if math.isinf(penalty):
            return context.temperature_alone("Temperature alone was asked for.")
        return _search_at_given_penalty(context, penalty, passes)
    tried = penalty_grid(STRENGTHS, parameters, problem.norm) if penalties is None else list(penalties)
    validation = cross_validate(linear, loss, problem.norm, tried, n_folds=n_folds)
    best = validation.best()
    gain, error = validation.nested_gain()
    if math.isinf(best) or gain <= STANDARD_ERRORS * error or evidence > significance:
        why = (
            "A test of the mean input gradient finds no more than noise "
            f"(p = {evidence:.2g}, it takes {significance:g} or less)."
            if evidence > significance
            else "On folds left out, the map that other samples choose changes the loss "
            f"by {-gain:+.2g} with a standard error of {error:.2g}; it takes a fall of {STANDARD_ERRORS:g} of these."
        )
        return context.temperature_alone(f"No: temperature is enough. {why}", validation.candidates())
    return _search_and_judge(context, validation, _smallest_comparable_penalty(validation, best), passes)


def affordable(differences: float) -> float:
    """How many passes `AFFORDED` leaves, given the forward passes that the derivatives took: at most `PASSES`.

    The entropy gradient takes a pass forward and backward, and the samples left out are looked at for each of `PARTS`
    and at the end. Where derivatives are very many, half of the passes are kept.

    >>> [f"{affordable(forwards):.1f}" for forwards in (6.5, 13, 60)]
    ['23.0', '21.1', '11.5']
    """
    judging = (len(PARTS) + 1) / HELD_OUT
    return min(PASSES, max(PASSES / 2, (AFFORDED - 3 - differences - judging) / 3))


def _smallest_comparable_penalty(validation: CrossValidation, best: float) -> float:
    """The least λ that is not worse than the best by the standard error of the difference.

    The linear model, which chose, sees less of a large shift than there is, and wants more penalty than the network.
    """
    rows = {penalty: validation.rows[i] for i, penalty in enumerate(validation.penalties)}
    for penalty in sorted(rows):
        worse = rows[penalty] - rows[best]
        if penalty == best or worse.mean() <= worse.std(ddof=1) / math.sqrt(len(worse)):
            return penalty
    return best


def _search_and_judge(context: SearchContext, validation: CrossValidation, penalty: float, passes: float) -> Solution:
    problem, parameters, order = context.problem, context.parameters, context.order
    network, loss, labels = problem.network, problem.loss, problem.network.labels
    out = fold_mask(order, HELD_OUT // 2, HELD_OUT)
    held = local_subset(network.inputs, out)
    alone = loss.temperature(context.plain[~out], labels[~out])
    before = loss.rows(context.plain[out], labels[out], alone).numpy()

    def held_out_gain(point: Point) -> tuple[Tensor, float, float]:
        """Logits of the samples left out, by how much their loss falls, and the standard error of that."""
        z = network.logits(parameters.map(point.theta)[0], inputs=held)
        return z, *paired_gain(before, loss.rows(z, labels[out], point.temperature).numpy())

    def check(point: Point) -> None:
        # Few samples are followed too far, so that a part of the way may be right where all of it is not.
        parts = (
            replace(point, theta=s * point.theta, temperature=alone * (point.temperature / alone) ** s) for s in PARTS
        )
        # What is within a standard error of nothing rarely survives the rest of the search, which is most of the cost.
        if all(gain <= error for _, gain, error in map(held_out_gain, parts)):
            raise _NoGain

    try:
        point, used = search(context, penalty, ~out, passes=passes, check=check)
        z, gain, error = held_out_gain(point)
        if gain <= STANDARD_ERRORS * error:
            raise _NoGain
    except _NoGain:
        why = (
            "No: temperature is enough. An input map that promised something did not lower the loss on a fifth of the "
            f"samples, left out until the end, by {STANDARD_ERRORS:g} standard errors."
        )
        return context.temperature_alone(why, validation.candidates())
    if passes - used >= WORTHWHILE:
        everything = torch.ones_like(out)
        objective = _objective(context, penalty, everything, passes - used, point.temperature)
        point = descend(objective, point.theta, precondition=_inverse(context, penalty, point.temperature))
    else:  # the same map over all samples, with the temperature that is best for them
        logits = torch.empty(len(out), z.shape[1], dtype=z.dtype)
        logits[out], logits[~out] = z, point.logits
        point = replace(point, logits=logits, temperature=loss.temperature(logits, labels, near=point.temperature))
    verdict = (
        f"Yes: on a fifth of the samples that was left out, the input map lowered "
        f"the loss from {before.mean():.4f} to {before.mean() - gain:.4f} (standard error {error:.4f})."
    )
    notes = {"held_out_gain": gain, "held_out_error": error}
    return context.solution(point, penalty, verdict, notes, validation.candidates())


def _search_at_given_penalty(context: SearchContext, penalty: float, passes: float) -> Solution:
    point, _ = search(context, penalty, torch.ones(len(context.order), dtype=torch.bool), passes=passes)
    alone = context.problem.loss.mean(context.plain, context.problem.network.labels, context.temperature)
    if point.value > alone:
        return context.temperature_alone(f"No: no input map is worth its penalty at λ = {penalty:.3g}.")
    verdict = "Not asked, since λ was given" + (
        f", though the mean input gradient is what noise gives (p = {context.evidence:.2g})."
        if context.evidence > SIGNIFICANCE
        else f"; the mean input gradient is more than noise (p = {context.evidence:.2g})."
    )
    return context.solution(point, penalty, verdict, {}, {})


@dataclass(frozen=True)
class SearchContext:
    """What is known before any search."""

    problem: Problem
    parameters: InputParameters
    order: Tensor
    """All samples in the order of their loss, see `sample_order`."""
    linear: LinearizedModel
    """Logits and derivatives of some samples as they are."""
    plain: Tensor
    """Logits of all samples as they are."""
    temperature: float
    """The best for them."""
    evidence: float

    def temperature_alone(self, verdict: str, candidates: Mapping[float, float] | None = None) -> Solution:
        """The solution that leaves the inputs as they are."""
        more = {"candidates": candidates or {}, "notes": {"directions": self.parameters.size}}
        return temperature_alone(self.problem, self.temperature, verdict, evidence=self.evidence, **more)

    def solution(
        self, point: Point, penalty: float, verdict: str, notes: Mapping[str, float], candidates: Mapping[float, float]
    ) -> Solution:
        """The solution with an input map."""
        more = {"candidates": candidates, "notes": {"directions": self.parameters.size, **notes}}
        return point.solution(self.parameters, penalty, verdict=verdict, evidence=self.evidence, **more)


def search(
    context: SearchContext,
    penalty: float,
    which: Tensor,
    *,
    passes: float,
    check: Callable[[Point], None] | None = None,
) -> tuple[Point, float]:
    """Minimise over the samples of a mask from the problem's start; `check` may raise after the first part.

    Returns the point, and the passes forward and backward in units of all samples.
    """
    candidates = context.order[which[context.order]]
    number = min(len(candidates), max(FEW, len(which) // 5))
    few = torch.zeros_like(which)
    few[candidates[torch.arange(number) * len(candidates) // number]] = True
    first = max(SHARE * passes, FEWEST_PASSES * number / len(which)) if number < len(candidates) else 0.0
    coarse = _objective(context, penalty, few, first, context.temperature) if first else None
    objective = _objective(context, penalty, which, passes - first, context.temperature)
    start = context.parameters.theta_of(context.problem.start_delta())
    inverse = _inverse(context, penalty, context.temperature)
    point = descend(objective, start, precondition=inverse, coarse=coarse, check=check)
    return point, objective.used + (coarse.used if coarse else 0.0)


def _objective(
    context: SearchContext, penalty: float, which: Tensor, budget: float, temperature: float
) -> VarProObjective:
    problem, parameters = context.problem, context.parameters
    inputs = None if bool(which.all()) else local_subset(problem.network.inputs, which)
    return VarProObjective(
        problem,
        parameters,
        penalty,
        temperature=temperature,
        inputs=inputs,
        budget=budget,
        min_decrease=MIN_DECREASE,
    )


def _inverse(context: SearchContext, penalty: float, temperature: float) -> np.ndarray:
    """A coarse inverse of the curvature, which falls with the square of the temperature."""
    fall = (context.temperature / temperature) ** 2
    curvature = fall * context.linear.curvature(context.temperature)
    level = float(np.trace(curvature)) / len(curvature)
    # The plain norm has no curvature along δ, but a slope that may point where the logits have none either.
    damping = penalty / context.parameters.input_norm + 1e-3 * level
    if context.problem.norm == "l2sq":
        damping = 2 * penalty + 1e-6 * level
    return np.linalg.inv(curvature + (damping or 1.0) * np.eye(len(curvature)))
