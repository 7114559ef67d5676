"""The default recipe: δ in the span of a few label-free directions, after a test for any gain."""

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
"""Penalties of a δ of the norm of a typical input, tried besides infinity, which is temperature alone."""
SUBSAMPLE = 1250
"""Number of samples for the derivatives."""
STANDARD_ERRORS = 1.64
"""Standard errors that a held-out gain must exceed; one in twenty useless maps passes."""
SIGNIFICANCE = 0.01
"""Level of the test of the input gradient."""
MAX_PASSES = 23.0
"""Largest number of forward-backward passes of the search through the network."""
MAX_COST = 80.0
"""Largest cost of a fit in forward passes, for backward passes that cost two forward passes."""
MIN_FINAL_PASSES = 3.0
"""Number of remaining passes below which the search over all samples is skipped."""
STEP_SHARES = (1.0, 0.5, 0.25)
"""Shares of the coarse step that are tested on held-out samples."""
COARSE_SAMPLES = 500
"""Smallest number of samples of the coarse search; it uses a fifth of the samples if that is larger."""
COARSE_SHARE = 0.15
"""Share of all passes for the coarse search."""
MIN_COARSE_PASSES = 8
"""Smallest number of passes of the coarse search over its samples."""
MIN_DECREASE = 1e-4
"""Decrease of the mean loss over several passes below which the search stops."""
MIN_SAMPLES = 50
"""Number of samples below which only a temperature is fitted."""


class _NoGain(Exception):
    """The input map does not lower the held-out loss."""


def subspace(
    problem: Problem,
    *,
    frequencies: int = 2,
    penalties: Sequence[float] | None = None,
    n_folds: int = 5,
    subsample: int = SUBSAMPLE,
    passes: float | None = None,
) -> Solution:
    """Fit δ in the span of a few directions, after a test whether there is a gain.

    The logits are first linearised along the directions. Fits for every λ and fold are then small problems. δ stays
    zero unless one λ beats temperature alone by 1.64 standard errors on held-out folds, and the mean gradient is
    significant. Otherwise L-BFGS searches through the network with T eliminated, first on four fifths of the samples.
    If the result beats temperature alone by 1.64 standard errors on the last fifth, the search ends on all samples.
    `passes` limits the forward-backward passes; by default `MAX_PASSES`, or what `MAX_COST` allows.
    The default `penalties` are `STRENGTHS` over the mean square norm of the inputs, so units do not matter. A given λ
    skips the test.
    """
    network, loss = problem.network, problem.loss
    if n_folds < 2 or subsample < 2 * n_folds:
        raise ValueError(f"n_folds must be at least 2, and subsample twice that, got {n_folds} and {subsample}")
    if frequencies < 1:
        raise ValueError(f"frequencies must be at least 1, got {frequencies}")
    if penalties is not None and not all(0 < penalty < math.inf for penalty in penalties):
        raise ValueError(f"penalties must be positive and finite, got {list(penalties)}; infinity is always tried")
    if len(network.labels) < MIN_SAMPLES:
        verdict = f"No: {len(network.labels)} samples are too few to test an input map; {MIN_SAMPLES} are needed."
        return temperature_alone(problem, loss.temperature(network.plain_logits(), network.labels), verdict)
    basis = directions(network, entropy_gradient(network), frequencies=frequencies, seed=problem.seed)
    parameters = InputParameters(network, basis, channel_norms(network), has_scale=problem.input_map == "affine")
    plain, labels = network.plain_logits(), network.labels
    temperature = loss.temperature(plain, labels)
    order = sample_order(network, loss)
    most = linearized.max_samples_in_memory(min(subsample, len(order)), plain.shape[1], parameters.size)
    chosen = order[torch.arange(most) * len(order) // most]
    problem.progress(f"derivatives of the logits along {parameters.size} directions")
    numbers, positions = chosen.sort()  # passes through the network return the samples by number
    inputs = local_subset(network.inputs, numbers)
    linear = linearized.linearize(parameters, inputs, plain[numbers], labels[numbers]).rows(torch.argsort(positions))
    evidence = gradient_test(*linear.scores(loss, temperature), seed=problem.seed)
    context = SearchContext(problem, parameters, order, linear, plain, temperature, evidence)
    passes = affordable(parameters.size * most / len(order)) if passes is None else passes
    if problem.penalty != "auto":
        penalty = penalty_weight(problem, problem.start_delta())
        if math.isinf(penalty):
            return context.temperature_alone("Temperature alone was requested.")
        return _search_at_given_penalty(context, penalty, passes)
    tried = penalty_grid(STRENGTHS, parameters, problem.norm) if penalties is None else list(penalties)
    validation = cross_validate(linear, loss, problem.norm, tried, n_folds=n_folds)
    best = validation.best()
    gain, error = validation.nested_gain()
    if math.isinf(best) or gain <= STANDARD_ERRORS * error or evidence > SIGNIFICANCE:
        why = (
            f"The mean input gradient is not significant (p = {evidence:.2g}, required {SIGNIFICANCE:g})."
            if evidence > SIGNIFICANCE
            else f"On held-out folds the map changes the loss by {-gain:+.2g} with a standard error of {error:.2g}; "
            f"a decrease by {STANDARD_ERRORS:g} standard errors is required."
        )
        return context.temperature_alone(f"No: temperature is enough. {why}", validation.candidates())
    return _search_and_test(context, validation, _smallest_comparable_penalty(validation, best), passes)


def affordable(differences: float) -> float:
    """Return the number of passes that `MAX_COST` allows after the forward passes of the derivatives.

    The entropy gradient takes a pass forward and backward. Held-out samples are scored for each of `STEP_SHARES` and at
    the end. At least half of `MAX_PASSES` remain, even after very many derivatives.

    >>> [f"{affordable(forwards):.1f}" for forwards in (6.5, 13, 60)]
    ['23.0', '21.1', '11.5']
    """
    scoring = (len(STEP_SHARES) + 1) / HELD_OUT
    return min(MAX_PASSES, max(MAX_PASSES / 2, (MAX_COST - 3 - differences - scoring) / 3))


def _smallest_comparable_penalty(validation: CrossValidation, best: float) -> float:
    """Return the smallest λ within one standard error of the best.

    The linear model underestimates the gain of a large shift, so it prefers a larger penalty than the network does.
    """
    rows = {penalty: validation.rows[i] for i, penalty in enumerate(validation.penalties)}
    for penalty in sorted(rows):
        worse = rows[penalty] - rows[best]
        if penalty == best or worse.mean() <= worse.std(ddof=1) / math.sqrt(len(worse)):
            return penalty
    return best


def _search_and_test(context: SearchContext, validation: CrossValidation, penalty: float, passes: float) -> Solution:
    problem, parameters, order = context.problem, context.parameters, context.order
    network, loss, labels = problem.network, problem.loss, problem.network.labels
    out = fold_mask(order, HELD_OUT // 2, HELD_OUT)
    held = local_subset(network.inputs, out)
    alone = loss.temperature(context.plain[~out], labels[~out])
    before = loss.rows(context.plain[out], labels[out], alone).numpy()

    def held_out_gain(point: Point) -> tuple[Tensor, float, float]:
        """Return the held-out logits, the decrease of their loss, and its standard error."""
        z = network.logits(parameters.map(point.theta)[0], inputs=held)
        return z, *paired_gain(before, loss.rows(z, labels[out], point.temperature).numpy())

    def check(point: Point) -> None:
        # The coarse search overfits its few samples, so shorter steps are tested as well.
        points = (
            replace(point, theta=s * point.theta, temperature=alone * (point.temperature / alone) ** s)
            for s in STEP_SHARES
        )
        # A gain below one standard error rarely survives the rest of the search, which has most of the cost.
        if all(gain <= error for _, gain, error in map(held_out_gain, points)):
            raise _NoGain

    try:
        point, used = search(context, penalty, ~out, passes=passes, check=check)
        z, gain, error = held_out_gain(point)
        if gain <= STANDARD_ERRORS * error:
            raise _NoGain
    except _NoGain:
        why = (
            "No: temperature is enough. The input map did not lower the loss on a held-out fifth of the samples by "
            f"{STANDARD_ERRORS:g} standard errors."
        )
        return context.temperature_alone(why, validation.candidates())
    if passes - used >= MIN_FINAL_PASSES:
        everything = torch.ones_like(out)
        objective = _objective(context, penalty, everything, passes - used, point.temperature)
        point = descend(objective, point.theta, precondition=_inverse(context, penalty, point.temperature))
    else:  # the map stays, and the temperature is fitted to all samples
        logits = torch.empty(len(out), z.shape[1], dtype=z.dtype)
        logits[out], logits[~out] = z, point.logits
        point = replace(point, logits=logits, temperature=loss.temperature(logits, labels, near=point.temperature))
    verdict = (
        f"Yes: on a held-out fifth of the samples, the input map lowered "
        f"the loss from {before.mean():.4f} to {before.mean() - gain:.4f} (standard error {error:.4f})."
    )
    notes = {"held_out_gain": gain, "held_out_error": error}
    return context.solution(point, penalty, verdict, notes, validation.candidates())


def _search_at_given_penalty(context: SearchContext, penalty: float, passes: float) -> Solution:
    point, _ = search(context, penalty, torch.ones(len(context.order), dtype=torch.bool), passes=passes)
    alone = context.problem.loss.mean(context.plain, context.problem.network.labels, context.temperature)
    if point.value > alone:
        return context.temperature_alone(f"No: no input map lowers the objective at λ = {penalty:.3g}.")
    significant = "not significant" if context.evidence > SIGNIFICANCE else "significant"
    verdict = (
        "Not tested on held-out samples, since λ was given; the mean input gradient is "
        f"{significant} (p = {context.evidence:.2g})."
    )
    return context.solution(point, penalty, verdict, {}, {})


@dataclass(frozen=True)
class SearchContext:
    """Quantities that are computed before the search."""

    problem: Problem
    parameters: InputParameters
    order: Tensor
    """All samples in the order of their loss; see `sample_order`."""
    linear: LinearizedModel
    """Logits and derivatives of some original samples."""
    plain: Tensor
    """Logits of all original samples."""
    temperature: float
    """Temperature fitted to these logits."""
    evidence: float
    """p-value of the test of the mean input gradient."""

    def temperature_alone(self, verdict: str, candidates: Mapping[float, float] | None = None) -> Solution:
        """Return the solution without an input map."""
        fields = {"candidates": candidates or {}, "notes": {"directions": self.parameters.size}}
        return temperature_alone(self.problem, self.temperature, verdict, evidence=self.evidence, **fields)

    def solution(
        self, point: Point, penalty: float, verdict: str, notes: Mapping[str, float], candidates: Mapping[float, float]
    ) -> Solution:
        """Return the solution with an input map."""
        fields = {"candidates": candidates, "notes": {"directions": self.parameters.size, **notes}}
        return point.solution(self.parameters, penalty, verdict=verdict, evidence=self.evidence, **fields)


def search(
    context: SearchContext,
    penalty: float,
    which: Tensor,
    *,
    passes: float,
    check: Callable[[Point], None] | None = None,
) -> tuple[Point, float]:
    """Minimise over the samples of a mask from the problem's start; `check` may raise after the coarse search.

    Returns the point, and the number of forward-backward passes in units of all samples.
    """
    candidates = context.order[which[context.order]]
    number = min(len(candidates), max(COARSE_SAMPLES, len(which) // 5))
    chosen = torch.zeros_like(which)
    chosen[candidates[torch.arange(number) * len(candidates) // number]] = True
    is_smaller = number < len(candidates)
    first = max(COARSE_SHARE * passes, MIN_COARSE_PASSES * number / len(which)) if is_smaller else 0.0
    coarse = _objective(context, penalty, chosen, first, context.temperature) if first else None
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
    """Return an approximate inverse of the curvature, which is proportional to 1/T²."""
    factor = (context.temperature / temperature) ** 2
    curvature = factor * context.linear.curvature(context.temperature)
    level = float(np.trace(curvature)) / len(curvature)
    # The norm ‖δ‖ has no curvature along δ, and the logits may have none there either, so damping is needed.
    damping = penalty / context.parameters.input_norm + 1e-3 * level
    if context.problem.norm == "l2sq":
        damping = 2 * penalty + 1e-6 * level
    return np.linalg.inv(curvature + (damping or 1.0) * np.eye(len(curvature)))
