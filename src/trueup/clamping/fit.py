"""Fit a clamped network: the function `clamp`, its recipes and its record.

The recipes themselves are in other files: the default in subspace_search.py, affine maps in varpro.py, and the steps of
the paper and of the released code in published_recipes.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trueup._core.bins import BINS
from trueup._core.errors import InputError
from trueup._core.optimize import FitError
from trueup._core.progress import track
from trueup._core.splits import fold_mask
from trueup.calibrators.temperature import Temperature, bound_reason, inverse_temperature, scale_of
from trueup.clamping.calibration_set import CalibrationSet, local_subset
from trueup.clamping.clamped import Clamped, FitRecord
from trueup.clamping.network import Network, check_box
from trueup.clamping.problem import (
    Loss,
    MapOptions,
    Objective,
    Penalty,
    Problem,
    Recipe,
    Solution,
    parse_seed,
    parse_whole,
    sample_order,
)
from trueup.clamping.published_recipes import closed_form, code, paper
from trueup.clamping.subspace_search import subspace
from trueup.clamping.theory import lemma_residual
from trueup.clamping.varpro import varpro
from trueup.metrics import ece
from trueup.models._distributed import rank
from trueup.models._tensors import to_numpy
from trueup.models.batches import Device, Reading, unpacked
from trueup.models.calibrated import device_of
from trueup.models.freezing import frozen, unwrap

_RECIPES: tuple[Recipe, ...] = (subspace, varpro, paper, code, closed_form)
RECIPES: Mapping[str, Recipe] = {recipe.__name__: recipe for recipe in _RECIPES}
"""Fitting methods by name; `functools.partial` sets their options."""


def clamp(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    recipe: str | Recipe = "subspace",
    objective: Objective | None = None,
    input_map: MapOptions | None = None,
    seed: int = 0,
    device: Device | None = None,
    progress: bool = True,
    **reading: Unpack[Reading],
) -> Clamped:
    """Fit an input shift δ and a temperature T to a trained network: q = softmax(f(x + δ)/T).

    The model itself does not change; it must be differentiable by its input. An argument of the model with as many rows
    as labels in every batch has one row per sample. Every other argument is shared by all samples. In a
    `torch.distributed` group each rank gives its share of the samples, and all get the same δ and T.

    Parameters
    ----------
    model
        Network from inputs to logits; it is only read.
    loader
        Batches of inputs and labels.
    recipe
        Fitting method: a name in `RECIPES`, or one of its functions with options set by `functools.partial`.
    objective
        Loss and penalty; None takes the mean cross-entropy plus λ‖δ‖².
    input_map
        Kind, start and box of the input map; None takes the defaults of `MapOptions`.
    seed
        Seed of every random draw.
    device
        Device to run the model on; None keeps the model's device.
    progress
        Whether to show a progress line on a terminal.
    **reading
        `unpack`, a function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    Clamped
        A network with the model's signature. Its `fit_record` has the held-out verdict on δ and the cost.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(600, 3, generator=generator)
    >>> y = torch.multinomial(torch.softmax(2 * x, dim=1), 1, generator=generator)[:, 0]
    >>> shifted = [(x + torch.tensor([2.0, 0.0, -1.0]), y)]  # the inputs differ from those of the training
    >>> clamped = clamp(nn.Identity(), shifted)
    >>> print(f"{clamped.fit_record.baseline:.4f} {clamped.fit_record.objective:.4f}")
    0.9765 0.5834
    >>> print(clamped.fit_record.verdict[:64])
    Yes: on a held-out fifth of the samples, the input map lowered t

    References
    ----------
    Tang et al. (2024), "Neural Clamping: joint input perturbation and temperature scaling for neural network
    calibration", arXiv:2209.11604.
    """
    model, loader, seed = check_model(model), unpacked(check_loader(loader), **reading), parse_seed(seed)
    objective = Objective() if objective is None else objective
    input_map = MapOptions() if input_map is None else input_map
    fit, name = _recipe(recipe)
    inner = unwrap(model, compiled=True)
    target = device_of(inner) if device is None else torch.device(device)
    # Inference mode of the caller would forbid gradients.
    with torch.inference_mode(False), frozen(inner), progress_line(progress) as show_progress:
        samples = CalibrationSet.read(loader, device=target, model=inner)
        network = Network(inner, samples, box=input_map.box, finite=True)
        check_box(network)
        pool, start = objective.gammas, input_map.start_function(seed)
        loss, kind = Loss(pool[0]), input_map.kind
        problem = Problem(network, loss, objective.penalty, objective.norm, start, kind, seed, show_progress)
        errors = {} if len(pool) == 1 else _ece_by_gamma(problem, fit, pool, objective.gamma_folds)
        # A tie goes to the smaller γ.
        best = min(pool) if not errors else min(errors, key=lambda gamma: (errors[gamma], gamma))
        problem = replace(problem, loss=Loss(best))
        solution = fit(problem)
        record = _record(problem, solution, name, objective.loss, errors)
        warn_at_a_bound(solution.logits, network.labels, solution.temperature, stacklevel=3)
        clamped = Clamped(model, before=solution.before, after=Temperature(solution.temperature))
    clamped.fit_record = record
    clamped.training = model.training  # the model was in evaluation mode during the fit
    return clamped


def check_model(model: Any) -> nn.Module:
    """Check that a model is an nn.Module with usable parameters."""
    if isinstance(model, type):
        raise InputError("model", "be an nn.Module", f"the class {model.__name__}")
    if not isinstance(model, nn.Module):
        hint = "wrap the function in a module with this forward" if callable(model) else None
        raise InputError("model", "be an nn.Module", type(model).__name__, hint)
    if any(not is_lazy(parameter) and parameter.is_inference() for parameter in model.parameters()):
        hint = "such parameters allow no gradients"
        raise InputError("model", "be made outside of inference mode", "parameters made inside of it", hint)
    return model


def check_loader(loader: Any) -> Iterable[Any]:
    """Check that a loader can be read."""
    if not isinstance(loader, Iterable):
        raise InputError("loader", "give batches of inputs and labels", type(loader).__name__)
    return loader


def _recipe(recipe: str | Recipe) -> tuple[Recipe, str]:
    """Return a recipe with checks of its solution, and its name."""
    chosen = RECIPES.get(recipe) if isinstance(recipe, str) else recipe
    if not callable(chosen):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a function, got {recipe!r}")
    function = chosen.func if isinstance(chosen, partial) else chosen
    name = getattr(function, "__name__", type(function).__name__)

    def fit(problem: Problem) -> Solution:
        solution = chosen(problem)
        if not isinstance(solution, Solution):
            got = f"{type(solution).__name__} of {name}"
            raise ValueError(f"recipe must be a function that returns a Solution, got {got}")
        tensors = [solution.logits, solution.before.delta, getattr(solution.before, "scale", solution.before.delta)]
        numbers = math.isfinite(solution.temperature) and math.isfinite(solution.penalty_value or 0.0)
        if not numbers or solution.temperature <= 0 or not all(bool(torch.isfinite(t).all()) for t in tensors):
            raise FitError(
                f"the recipe {name} did not end at a finite objective: T = {solution.temperature:.4g}, "
                f"‖δ‖ = {float(solution.before.delta.norm()):.4g}, λ = {solution.penalty:.4g}; no fit is returned"
            )
        return solution

    return fit, name


def _ece_by_gamma(problem: Problem, fit: Recipe, pool: Sequence[float], folds: Any) -> dict[float, float]:
    """Compute the ECE of each γ, on the calibration set or on held-out folds."""
    errors, n = {}, len(problem.network.labels)
    if folds is not None:
        folds = parse_whole("gamma_folds", folds, 2, n, f"lie between 2 and the number of samples, {n}")
    for gamma in pool:
        with_gamma = replace(problem, loss=Loss(gamma))
        if folds is None:
            solution = fit(with_gamma)
            logits = solution.logits / solution.temperature
        else:
            logits = _cross_fitted_logits(with_gamma, fit, folds)
        errors[gamma] = ece(logits, problem.network.labels, bins=BINS)
    return errors


def _cross_fitted_logits(problem: Problem, fit: Recipe, n_folds: int) -> Tensor:
    network, order = problem.network, sample_order(problem.network, Loss())
    logits = torch.zeros_like(network.plain_logits(), dtype=torch.float64)
    for fold in range(n_folds):
        out = fold_mask(order, fold, n_folds)
        solution = fit(replace(problem, network=network.subset(local_subset(network.inputs, ~out))))
        held_out = network.logits(solution.before, inputs=local_subset(network.inputs, out))
        logits[out] = held_out.double() / solution.temperature
    return logits


def _record(problem: Problem, solution: Solution, name: str, loss: str, gammas: Mapping[float, float]) -> FitRecord:
    network, fitted = problem.network, problem.loss
    cost = network.cost()  # the baseline's pass below does not count
    mean = fitted.mean(solution.logits, network.labels, solution.temperature)
    delta = solution.before.delta.detach().double().cpu()
    norm = solution.norm or problem.norm
    penalty = solution.penalty_value
    if penalty is None:
        penalty = Penalty(solution.penalty, norm).value(delta.numpy()) if math.isfinite(solution.penalty) else 0.0
    plain = network.plain_logits()
    baseline = fitted.mean(plain, network.labels, fitted.temperature(plain, network.labels))
    temperature = solution.temperature
    residual = lemma_residual(solution.logits, network.labels, temperature=temperature, gamma=fitted.gamma)
    not_tested = "Not tested on held-out samples: on the calibration set the loss went"
    return FitRecord(
        recipe=name,
        loss=loss,
        gamma=fitted.gamma,
        gammas=gammas,
        penalty=solution.penalty,
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
        lemma_residual=residual.relative,
        evidence=solution.evidence,
        verdict=solution.verdict or f"{not_tested} from {baseline:.4f} to {mean:.4f}.",
        samples=len(network.labels),
        seed=problem.seed,
        notes=solution.notes,
    )


def warn_at_a_bound(logits: Tensor, labels: Tensor, temperature: float, *, stacklevel: int) -> None:
    """Warn if the loss has no minimum over the temperature; `stacklevel` is that of `warnings.warn`."""
    z, y = to_numpy(logits, labels)
    beta, certificate = inverse_temperature(z, y)
    if certificate.status == "bound":
        why = bound_reason(beta, scale_of(z))
        warnings.warn(f"temperature has no optimum and is set to {temperature:.3g}: {why}", stacklevel=stacklevel)


@contextmanager
def progress_line(progress: bool, label: str = "clamping") -> Iterator[Callable[[str], None]]:
    """Return a function that shows a progress line on a terminal, after two seconds."""
    text = ""
    steps = track(count(), label=label, enabled=progress and rank() == 0, note=lambda: text)

    def show(line: str) -> None:
        nonlocal text
        text = line
        next(steps)

    try:
        yield show
    finally:
        steps.close()  # type: ignore[attr-defined]
