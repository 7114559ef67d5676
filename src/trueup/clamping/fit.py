"""One call from a trained network and a loader to a clamped network."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from trueup.calibrators.temperature import Temperature
from trueup.calibrators.temperature_search import inverse_temperature, scale_of
from trueup.clamping import starts
from trueup.clamping.calibration_set import Inputs, local_subset
from trueup.clamping.fit_record import Clamped, FitRecord
from trueup.clamping.maps import Box
from trueup.clamping.network import Network, check_box
from trueup.clamping.problem import InputMap, Lam, Loss, Norm, Penalty, Problem, Recipe, Solution, dealt, left_out
from trueup.clamping.published import closed, code, paper
from trueup.clamping.subspace import subspace
from trueup.clamping.theory import lemma_residual
from trueup.clamping.varpro import projected
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

_SEEDS = 1 << 63
_RULES = ("auto", "R1", "R2")
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
    model, loader = _model_of(model), _loader_of(loader)
    _one_of("loss", loss, ("ce", "focal"))
    _one_of("input_map", input_map, ("shift", "affine"))
    _one_of("norm", norm, ("l2sq", "l2"))
    pool, lam, seed = _pool_of(loss, gamma, gamma_folds), _lam_of(lam), _seed_of(seed)
    fit, name = _recipe(recipe)
    begin = _start(start, seed)
    inner = unwrapped(model)
    where = device_of(inner) if device is None else torch.device(device)
    # The caller may be in inference mode, in which no gradient could be had.
    with torch.inference_mode(False), frozen(inner), _told(progress) as tell:
        network = Network(inner, Inputs.read(loader, device=where), box=box)
        check_box(network)
        folds = None if gamma_folds is None else _folds_of(gamma_folds, len(network.labels))
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


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check a choice between names.

    >>> _one_of("norm", "l1", ("l2sq", "l2"))
    Traceback (most recent call last):
        ...
    ValueError: norm must be "l2sq" or "l2", got 'l1'
    """
    if not isinstance(value, str) or value not in allowed:
        wish = " or ".join(f'"{name}"' for name in allowed)
        raise ValueError(f"{name} must be {wish}, got {value!r}")


def _model_of(model: Any) -> nn.Module:
    """Check that a model is one."""
    if not isinstance(model, nn.Module):
        fact = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = "; a function can be the forward of one" if callable(model) and not isinstance(model, type) else ""
        raise ValueError(f"model must be an nn.Module, got {fact}{hint}")
    return model


def _loader_of(loader: Any) -> Iterable[Any]:
    """Check that a loader can be read."""
    if not isinstance(loader, Iterable):
        raise ValueError(f"loader must give batches of inputs and labels, got {type(loader).__name__}")
    return loader


def _lam_of(lam: Any) -> Lam:
    """Parse a penalty: a number from 0 on, infinity with it, or the name of a rule.

    >>> _lam_of(np.float32(0.5)), _lam_of("R1")
    (0.5, 'R1')
    """
    wish = 'lam must be a number, "auto", "R1" or "R2"'
    if isinstance(lam, str):
        if lam not in _RULES:
            raise ValueError(f"{wish}, got {lam!r}")
        return lam  # type: ignore[return-value]
    found = _number(lam, wish)
    if not found >= 0:
        raise ValueError(f"lam must not be negative, got {lam}")
    return found


def _seed_of(seed: Any) -> int:
    """Parse a seed, which generators of torch and NumPy alike can take."""
    try:
        found = operator.index(seed)
    except TypeError:
        found = -1
    if not 0 <= found < _SEEDS:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
    return found


def _pool_of(loss: str, gamma: Any, folds: Any) -> list[float]:
    """The exponents of the focal loss to choose from, sorted; cross-entropy has 0 alone.

    >>> _pool_of("focal", (1, 0.5), None), _pool_of("focal", np.float32(1), None), _pool_of("ce", None, None)
    ([0.5, 1.0], [1.0], [0.0])
    """
    wish = "gamma must be a number from 0 on, or a pool of them"
    if loss == "ce" and gamma is not None:
        raise ValueError(f'gamma is of the focal loss, so loss must be "focal", got {loss!r} with gamma {gamma}')
    many = isinstance(gamma, Iterable) and not isinstance(gamma, str) and getattr(gamma, "ndim", 1) > 0
    if folds is not None and not many:
        raise ValueError(f"gamma_folds choose from a pool of gamma, got {gamma} alone")
    if gamma is None:
        return [0.0 if loss == "ce" else 1.0]
    pool = [_number(entry, wish) for entry in (gamma if many else [gamma])]
    if not pool:
        raise ValueError(f"{wish}, got an empty pool")
    return sorted(set(pool))


def _folds_of(folds: Any, samples: int) -> int:
    """Parse the number of parts that samples are dealt into."""
    wish = f"gamma_folds must lie between 2 and the number of samples, {samples}"
    try:
        found = operator.index(folds)
    except TypeError:
        raise ValueError(f"{wish}, got {folds!r}") from None
    if not 2 <= found <= samples:
        raise ValueError(f"{wish}, got {folds}")
    return found


def _number(value: Any, wish: str) -> float:
    """A number of any kind as a float: Python's, NumPy's, or a tensor of one."""
    if not isinstance(value, str | bool | np.bool_) and not getattr(value, "shape", ()):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise ValueError(f"{wish}, got {value!r}")


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
        solution = fit(replace(problem, network=network.part(local_subset(network.inputs, ~out))))
        judged = network.logits(solution.before, inputs=local_subset(network.inputs, out))
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
