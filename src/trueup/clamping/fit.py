"""One call from a trained network and a loader to a clamped network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from trueup.calibrators.temperature import Temperature
from trueup.calibrators.temperature_search import bound_reason, inverse_temperature, scale_of
from trueup.clamping import arguments as options
from trueup.clamping import starts
from trueup.clamping.calibration_set import Inputs
from trueup.clamping.closed import closed
from trueup.clamping.fit_record import Clamped, FitRecord
from trueup.clamping.folds import dealt, left_out, parted
from trueup.clamping.lemma import lemma_residual
from trueup.clamping.maps import Box
from trueup.clamping.network import Network
from trueup.clamping.objective import Loss, Norm, Penalty
from trueup.clamping.problem import InputMap, Lam, Problem, Recipe, Solution
from trueup.clamping.projected import projected
from trueup.clamping.published import code, paper
from trueup.clamping.subspace import subspace
from trueup.core.bins import BINS
from trueup.core.distributed import rank
from trueup.core.optimize import FitError
from trueup.core.progress import track
from trueup.metrics import ece
from trueup.models.batches import Device
from trueup.models.calibrated import device_of, frozen, unwrapped

RECIPES: Mapping[str, Recipe] = {
    "subspace": subspace,
    "projected": projected,
    "paper": paper,
    "code": code,
    "closed": closed,
}
"""Ways to fit, by name; `functools.partial` binds the options of each."""

Start: TypeAlias = str | Callable[[Network], Tensor]


def clamp(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    recipe: str | Recipe = "subspace",
    loss: Literal["ce", "focal"] = "ce",
    gamma: float | Sequence[float] | None = None,
    gamma_folds: int | None = None,
    lam: Lam = "auto",
    norm: Norm = "l2sq",
    start: Start | None = None,
    box: Box | None = None,
    input_map: InputMap = "shift",
    seed: int = 0,
    device: Device | None = None,
    progress: bool = True,
) -> Clamped:
    """Fit an input shift δ and a temperature T to a trained network: q = softmax(f(x + δ)/T).

    The objective is the mean focal loss (γ = 0, cross-entropy, by default) plus λ‖δ‖². What comes back is a network of
    the same signature with the model inside, which is left exactly as it was; its `fit_record` says what was found,
    whether δ earned its place, and what that cost.
    A recipe is a name of `RECIPES` or a function with its options bound. A start is "zero", "random", "data" (Theorem
    3.2) or a function; unless given, the published recipes start at random and the others at zero. γ may be a pool:
    that of least ECE on the calibration set is kept, or, with `gamma_folds`, on folds left out of the fit. `box` (low,
    high) holds x + δ in a range; `input_map="affine"` adds a scale a channel.
    Of the model's arguments those go with the samples that have as many rows as labels in every batch; whatever has not
    is shared by all of them. The model must be differentiable by its input.
    In a `torch.distributed` group each rank gives its share of the samples, and all get the same δ and T.
    Tang et al., "Neural Clamping: joint input perturbation and temperature scaling for neural network calibration"
    (2024).

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(600, 3, generator=generator)
    >>> y = torch.multinomial(torch.softmax(2 * x, dim=1), 1, generator=generator)[:, 0]
    >>> moved = [(x + torch.tensor([2.0, 0.0, -1.0]), y)]  # what the network meets is not what it was made for
    >>> clamped = clamp(nn.Identity(), moved)
    >>> print(f"{clamped.fit_record.baseline:.4f} {clamped.fit_record.objective:.4f}")
    0.9765 0.5834
    >>> print(clamped.fit_record.verdict[:64])
    Yes: on a fifth of the samples that was left out, the input map
    """
    model, loader = options.model_of(model), options.loader_of(loader)
    options.one_of("loss", loss, ("ce", "focal"))
    options.one_of("input_map", input_map, ("shift", "affine"))
    options.one_of("norm", norm, ("l2sq", "l2"))
    pool, lam, seed = options.pool_of(loss, gamma, gamma_folds), options.lam_of(lam), options.seed_of(seed)
    fit, name = _recipe(recipe)
    begin = _start(start, seed)
    inner = unwrapped(model)
    where = device_of(inner) if device is None else torch.device(device)
    # The caller may be in inference mode, in which no gradient could be had.
    with torch.inference_mode(False), frozen(inner), _told(progress) as tell:
        network = Network(inner, Inputs.read(loader, device=where), box=box)
        starts.check_box(network)
        folds = None if gamma_folds is None else options.folds_of(gamma_folds, len(network.labels))
        problem = Problem(network, Loss(pool[0]), lam, norm, begin, input_map, seed, tell)
        gammas = {} if len(pool) == 1 else _errors(problem, fit, pool, folds)
        # A tie goes to the smaller γ.
        best = min(pool) if not gammas else min(gammas, key=lambda g: (gammas[g], g))
        problem = replace(problem, loss=Loss(best))
        solution = fit(problem)
        record = _record(problem, solution, name, loss, gammas)
        _warn_at_a_bound(solution, network.labels)
        found = Clamped(model, before=solution.before, after=Temperature(solution.temperature).to(where))
    found.fit_record = record
    return found


def _recipe(recipe: str | Recipe) -> tuple[Recipe, str]:
    if isinstance(recipe, str) and recipe in RECIPES:
        return _sound(RECIPES[recipe], recipe), recipe
    if isinstance(recipe, str) or not callable(recipe):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a function, got {recipe!r}")
    inner = recipe.func if isinstance(recipe, partial) else recipe
    name = getattr(inner, "__name__", type(inner).__name__)
    return _sound(recipe, name), name


def _sound(recipe: Recipe, name: str) -> Recipe:
    """The same recipe, held to an end that is one."""

    def fit(problem: Problem) -> Solution:
        found = recipe(problem)
        if not isinstance(found, Solution):
            raise ValueError(f"recipe must be a function that returns a Solution, got {type(found).__name__} of {name}")
        tensors = [found.logits, found.before.delta, getattr(found.before, "scale", found.before.delta)]
        numbers = math.isfinite(found.temperature) and math.isfinite(found.penalty or 0.0)
        if not numbers or found.temperature <= 0 or not all(bool(torch.isfinite(t).all()) for t in tensors):
            raise FitError(
                f"the recipe {name} did not end at a finite objective: T = {found.temperature:.4g}, "
                f"‖δ‖ = {float(found.before.delta.norm()):.4g}, λ = {found.lam:.4g}; no fit is returned"
            )
        return found

    return fit


def _start(start: Start | None, seed: int) -> Callable[[Network], Tensor] | None:
    named: dict[str, Callable[[Network], Tensor]] = {
        "zero": starts.zero,
        "random": partial(starts.random, seed=seed),
        "data": starts.data_driven,
    }
    if start is None or (callable(start) and not isinstance(start, str)):
        return start
    if not isinstance(start, str) or start not in named:
        raise ValueError(f"start must be one of {', '.join(named)}, or a function, got {start!r}")
    return named[start]


def _errors(problem: Problem, fit: Recipe, pool: list[float], folds: int | None) -> dict[float, float]:
    """The ECE of each γ: of the samples that were fitted, or of folds left out of the fit."""
    found = {}
    for gamma in pool:
        own = replace(problem, loss=Loss(gamma))
        if folds is None:
            solution = fit(own)
            found[gamma] = ece(solution.logits / solution.temperature, problem.network.labels, bins=BINS)
        else:
            found[gamma] = _cross_fitted(own, fit, folds)
    return found


def _cross_fitted(problem: Problem, fit: Recipe, folds: int) -> float:
    network, labels = problem.network, problem.network.labels
    order = dealt(network, Loss())
    logits = torch.zeros_like(network.plain(), dtype=torch.float64)
    for fold in range(folds):
        out = left_out(order, fold, folds)
        solution = fit(replace(problem, network=network.part(parted(network, ~out))))
        judged = network.logits(solution.before, inputs=parted(network, out))
        logits[out] = judged.double() / solution.temperature
    return ece(logits, labels, bins=BINS)


def _record(problem: Problem, solution: Solution, name: str, loss: str, gammas: Mapping[float, float]) -> FitRecord:
    network, fitted = problem.network, problem.loss
    cost = network.cost()  # before the baseline, which is no part of the fit
    mean = fitted.mean(solution.logits, network.labels, solution.temperature)
    delta = solution.before.delta.detach().double().cpu()
    norm = solution.norm or problem.norm
    penalty = solution.penalty
    if penalty is None:
        penalty = Penalty(solution.lam, norm).value(delta.numpy()) if math.isfinite(solution.lam) else 0.0
    plain = network.plain()
    baseline = fitted.mean(plain, network.labels, fitted.temperature(plain, network.labels))
    return FitRecord(
        recipe=name,
        loss=loss,
        gamma=fitted.gamma,
        gammas=gammas,
        lam=solution.lam,
        candidates=solution.candidates,
        norm=norm,
        input_map=problem.input_map,
        temperature=solution.temperature,
        delta_norm=float(delta.norm()),
        objective=mean + penalty,
        baseline=baseline,
        forwards=cost.forwards,
        backwards=cost.backwards,
        backward_cost=cost.backward,
        equivalents=cost.equivalents,
        lemma_residual=lemma_residual(
            solution.logits, network.labels, temperature=solution.temperature, gamma=fitted.gamma
        ).relative,
        evidence=solution.evidence,
        verdict=solution.verdict
        or f"Not asked: on the samples of the fit themselves the loss went from {baseline:.4f} to {mean:.4f}.",
        samples=len(network.labels),
        seed=problem.seed,
        notes=solution.notes,
    )


def _warn_at_a_bound(solution: Solution, labels: Tensor) -> None:
    beta, certificate = inverse_temperature(solution.logits, labels)
    if certificate.status == "bound":
        why = bound_reason(beta, scale_of(solution.logits))
        warnings.warn(f"temperature has no best value, and is {solution.temperature:.3g}: {why}", stacklevel=3)


@contextmanager
def _told(progress: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a line on a terminal, from two seconds on."""
    text = ""
    steps = track(count(), label="clamping", enabled=progress and rank() == 0, note=lambda: text)

    def tell(line: str) -> None:
        nonlocal text
        text = line
        next(steps)

    try:
        yield tell
    finally:
        steps.close()  # type: ignore[attr-defined]
