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

from trueup.bins import BINS
from trueup.calibrators.inverse import inverse_temperature, scale_of
from trueup.calibrators.temperature import Temperature
from trueup.clamping import starts
from trueup.clamping.closed import closed
from trueup.clamping.folds import dealt, parted
from trueup.clamping.inputs import Inputs
from trueup.clamping.lemma import lemma_residual
from trueup.clamping.network import Network
from trueup.clamping.objective import Loss, Norm, Penalty
from trueup.clamping.projected import projected
from trueup.clamping.recipe import InputMap, Lam, Problem, Recipe, Solution
from trueup.clamping.record import Clamped, FitRecord
from trueup.clamping.sgd import code, paper
from trueup.clamping.shift import Box
from trueup.clamping.subspace import subspace
from trueup.distributed import rank
from trueup.metrics import ece
from trueup.models import device_of, frozen, unwrapped
from trueup.outputs import Device
from trueup.progress import track

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
    if loss not in ("ce", "focal"):
        raise ValueError(f'loss must be "ce" or "focal", got {loss!r}')
    if loss == "ce" and gamma is not None:
        raise ValueError(f'gamma is of the focal loss, so loss must be "focal", got {loss!r} with gamma {gamma}')
    if input_map not in ("shift", "affine"):
        raise ValueError(f'input_map must be "shift" or "affine", got {input_map!r}')
    if norm not in ("l2sq", "l2"):
        raise ValueError(f'norm must be "l2sq" or "l2", got {norm!r}')
    if isinstance(lam, str) and lam not in ("auto", "R1", "R2"):
        raise ValueError(f'lam must be a number, "auto", "R1" or "R2", got {lam!r}')
    if not isinstance(lam, str) and not lam >= 0:
        raise ValueError(f"lam must not be negative, got {lam}")
    if gamma_folds is not None and (gamma is None or isinstance(gamma, int | float)):
        raise ValueError(f"gamma_folds choose from a pool of gamma, got {gamma} alone")
    fit, name = _recipe(recipe)
    pool = _pool(loss, gamma)
    inner = unwrapped(model)
    with frozen(inner), _told(progress) as tell:
        inputs = Inputs.read(loader, device=device_of(inner) if device is None else torch.device(device))
        network = Network(inner, inputs, box=box)
        starts.check_box(network)
        if gamma_folds is not None and not 2 <= gamma_folds <= len(network.labels):
            raise ValueError(
                f"gamma_folds must lie between 2 and the number of samples, {len(network.labels)}, got {gamma_folds}"
            )
        problem = Problem(network, Loss(pool[0]), lam, norm, _start(start, seed), input_map, seed, tell)
        gammas = {} if len(pool) == 1 else _errors(problem, fit, pool, gamma_folds)
        # A tie goes to the smaller γ.
        best = min(pool) if not gammas else min(gammas, key=lambda g: (gammas[g], g))
        problem = replace(problem, loss=Loss(best))
        solution = fit(problem)
        record = _record(problem, solution, name, loss, gammas)
    _warn_at_a_bound(solution, network.labels)
    after = Temperature(solution.temperature).to(device_of(inner) if device is None else torch.device(device))
    found = Clamped(model, before=solution.before, after=after)
    found.fit_record = record
    return found


def _recipe(recipe: str | Recipe) -> tuple[Recipe, str]:
    if not isinstance(recipe, str):
        inner = recipe.func if isinstance(recipe, partial) else recipe
        return recipe, getattr(inner, "__name__", type(inner).__name__)
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a function, got {recipe!r}")
    return RECIPES[recipe], recipe


def _start(start: Start | None, seed: int) -> Callable[[Network], Tensor] | None:
    named: dict[str, Callable[[Network], Tensor]] = {
        "zero": starts.zero,
        "random": partial(starts.random, seed=seed),
        "data": starts.data_driven,
    }
    if start is None or not isinstance(start, str):
        return start
    if start not in named:
        raise ValueError(f"start must be one of {', '.join(named)}, or a function, got {start!r}")
    return named[start]


def _pool(loss: str, gamma: float | Sequence[float] | None) -> list[float]:
    if loss == "ce":
        return [0.0]
    pool = [1.0] if gamma is None else [float(gamma)] if isinstance(gamma, int | float) else [float(g) for g in gamma]
    if not pool:
        raise ValueError("gamma must be a number or a pool of them, got an empty pool")
    return sorted(set(pool))


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
        out = torch.zeros(len(order), dtype=torch.bool)
        out[order[fold::folds]] = True
        part = network.part(parted(network, (~out).nonzero()[:, 0]))
        solution = fit(replace(problem, network=part))
        judged = network.logits(solution.before, inputs=parted(network, out.nonzero()[:, 0]))
        logits[out] = judged.double() / solution.temperature
    return ece(logits, labels, bins=BINS)


def _record(problem: Problem, solution: Solution, name: str, loss: str, gammas: Mapping[float, float]) -> FitRecord:
    network, fitted = problem.network, problem.loss
    forwards, backwards, equivalents = network.forwards, network.backwards, network.equivalents()
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
        forwards=forwards,
        backwards=backwards,
        backward_cost=network.backward_cost,
        equivalents=equivalents,
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
        sure = beta * scale_of(solution.logits) > 1
        why = (
            "every label has its row's largest logit" if sure else "the logits tell labels apart no better than chance"
        )
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
