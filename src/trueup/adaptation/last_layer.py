"""A network's last layer, corrected by a convex fit: z = s·(W₀h + b₀) + ΔW ĥ + Δb with a ridge penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.optimize import FitError, Stage, lbfgs

RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Penalties λ‖(ΔW, Δb)‖² of the mean loss that are tried, from a small correction to a large one."""
MIN_SPREAD = 0.25
"""Of the root mean square over features: one that varies less is measured by this. A unit that is active in one sample
of hundreds would get a weight of thousands for it, and the next sample in which it is active would pay."""
HALF_PRECISION_TOLERANCE = 0.02
"""Relative difference that rounding to half precision may make."""
MAX_PARAMETERS = 200_000
"""Numbers in a last layer that a few hundred labels can still be asked about."""


class Correction(NamedTuple):
    """What is added to a last layer, in units of standardised features."""

    scale: float
    weight: np.ndarray
    """ΔW (K, d)."""
    bias: np.ndarray
    centre: np.ndarray
    """Of the features, (d,)."""
    spread: np.ndarray

    def logits(self, logits: np.ndarray, features: np.ndarray) -> np.ndarray:
        """The corrected logits (n, K)."""
        standardised = (features - self.centre) / self.spread
        return self.scale * logits + standardised @ self.weight.T + self.bias

    def layer(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        """Weight and bias of the corrected layer."""
        change = self.weight / self.spread
        old = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        weight = self.scale * layer.weight.detach().double().cpu() + torch.from_numpy(change)
        bias = self.scale * old.double().cpu() + torch.from_numpy(self.bias - change @ self.centre)
        return weight.to(layer.weight), bias.to(layer.weight)


def fit_correction(
    logits: np.ndarray, features: np.ndarray, labels: np.ndarray, ridge: float, start: Correction | None = None
) -> Correction:
    """Minimise the mean cross-entropy plus λ‖(ΔW, Δb)‖² over s, ΔW and Δb; convex, so from any start.

    >>> rng = np.random.default_rng(0)
    >>> h, y = rng.normal(size=(300, 2)), rng.integers(0, 2, 300)
    >>> z = np.zeros((300, 2))
    >>> found = fit_correction(z, h + np.eye(2)[y], y, 0.01)
    >>> bool(found.weight[0, 0] > 0.3 > -0.3 > found.weight[1, 0])
    True
    """
    n, classes = logits.shape
    centre, spread = features.mean(axis=0), features.std(axis=0)
    typical = math.sqrt(float((spread**2).mean())) if spread.size else 0.0
    dead = spread <= 1e-6 * max(1e-300, typical)
    spread = np.where(dead, np.inf, np.maximum(spread, MIN_SPREAD * typical))
    design = np.column_stack([(features - centre) / spread, np.ones(n)])
    onehot = np.eye(classes)[labels]
    size = float(np.abs(logits).mean()) or 1.0

    def objective(v: np.ndarray) -> tuple[float, np.ndarray]:
        change = v[1:].reshape(classes, -1)
        z = (v[0] / size) * logits + design @ change.T
        z -= z.max(axis=1, keepdims=True)
        e = np.exp(z)
        total = e.sum(axis=1)
        loss = float((np.log(total) - (onehot * z).sum(axis=1)).mean()) + ridge * float((change**2).sum())
        slope = (e / total[:, None] - onehot) / n
        by_change = slope.T @ design + 2 * ridge * change
        return loss, np.concatenate([[float((slope * logits).sum()) / size], by_change.ravel()])

    width = classes * design.shape[1]
    first = np.append(size, np.zeros(width))
    if start is not None:
        first = np.append(start.scale * size, np.column_stack([start.weight, start.bias]).ravel())
    inverse = np.concatenate([[1.0], np.full(width, 1 / (0.1 / classes + 2 * ridge))])
    try:
        v, _ = lbfgs(Stage(objective, 1e-8), first, tolerance=1e-6, precondition=lambda g: inverse * g)
    except FitError:  # the loss is flat to rounding, or the folds are separable
        v = first
    change = v[1:].reshape(classes, -1)
    return Correction(float(v[0]) / size, change[:, :-1], change[:, -1], centre, spread)


def find_head(model: nn.Module, call: Callable[[], Tensor]) -> str | None:
    """The name of the one linear layer whose output is the logits that a call of the model returns, if there is one."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if output.ndim == 2:
                # Copies: what follows may change its input in place, and would then seem to be the layer itself.
                calls.setdefault(name, []).append((first_input(args, kwargs).clone(), output.clone()))

        return note

    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            logits = call()
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, seen in calls.items() if any(torch.equal(z, logits) for _, z in seen)]
    if len(names) != 1 or len(calls[names[0]]) > 1:
        return None
    ((x, _),) = calls[names[0]]
    return names[0] if _computes(layers[names[0]], x, logits) else None


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is linear, small, and has a weight of its own: old ways of weight norm make it of others."""
    own = type(module) is nn.Linear and "weight" in module._parameters
    return own and module.weight.numel() <= MAX_PARAMETERS  # type: ignore[operator]


def _computes(layer: nn.Module, x: Tensor, logits: Tensor) -> bool:
    """Whether the layer's numbers give the logits, up to rounding to half precision: hooks may do something else."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    return bool((expected - logits.double()).abs().max() <= HALF_PRECISION_TOLERANCE * expected.abs().max())


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer of one input was given, by its place or by its name."""
    return (args[0] if args else kwargs["input"]).detach()


@contextmanager
def watch_inputs(layers: Mapping[str, nn.Module], action: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
    """Call `action` with the name, the layer and its input before each call of a layer, while the body runs."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, kwargs: action(name, module, first_input(args, kwargs))

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cross_fit_head(
    folds: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], labels: np.ndarray
) -> dict[float, np.ndarray]:
    """λ → logits of the samples, each from the fit that left it out.

    A fold is (held-out mask, logits, features), of all samples at the fold's own map.
    """
    held_out = {ridge: np.empty(folds[0][1].shape) for ridge in RIDGES}
    for out, logits, features in folds:
        start = None
        for ridge in RIDGES:
            start = fit_correction(logits[~out], features[~out], labels[~out], ridge, start)
            held_out[ridge][out] = start.logits(logits[out], features[out])
    return held_out
