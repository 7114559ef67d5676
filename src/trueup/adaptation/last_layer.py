"""Correct a network's last layer by a convex fit: z = s·(W₀h + b₀) + ΔW ĥ + Δb with a ridge penalty."""

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
"""Penalties λ of the term λ‖(ΔW, Δb)‖² in the mean loss, from a small correction to a large one."""
MIN_SPREAD = 0.25
"""Smallest standard deviation used for standardising, relative to the root mean square over features. A unit that is
active in one sample of hundreds would otherwise get a huge weight. The next sample with this unit active would suffer.
"""
HALF_PRECISION_TOLERANCE = 0.02
"""Relative difference that rounding to half precision may make."""
MAX_PARAMETERS = 200_000
"""Largest number of parameters of a last layer that is corrected."""


class Correction(NamedTuple):
    """Correction of a last layer, in units of standardised features."""

    scale: float
    weight: np.ndarray
    """ΔW (K, d)."""
    bias: np.ndarray
    centre: np.ndarray
    """Mean of the features, (d,)."""
    spread: np.ndarray

    def logits(self, logits: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Return the corrected logits (n, K)."""
        standardised = (features - self.centre) / self.spread
        return self.scale * logits + standardised @ self.weight.T + self.bias

    def layer(self, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the corrected layer."""
        change = self.weight / self.spread
        old = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        weight = self.scale * layer.weight.detach().double().cpu() + torch.from_numpy(change)
        bias = self.scale * old.double().cpu() + torch.from_numpy(self.bias - change @ self.centre)
        return weight.to(layer.weight), bias.to(layer.weight)


def fit_correction(
    logits: np.ndarray,
    features: np.ndarray,
    labels: np.ndarray,
    ridge: float,
    start: Correction | None = None,
    weights: np.ndarray | None = None,
) -> Correction:
    """Minimise the weighted mean cross-entropy plus λ‖(ΔW, Δb)‖² over s, ΔW and Δb, which is convex.

    >>> rng = np.random.default_rng(0)
    >>> h, y = rng.normal(size=(300, 2)), rng.integers(0, 2, 300)
    >>> z = np.zeros((300, 2))
    >>> correction = fit_correction(z, h + np.eye(2)[y], y, 0.01)
    >>> bool(correction.weight[0, 0] > 0.3 > -0.3 > correction.weight[1, 0])
    True
    """
    n, classes = logits.shape
    centre, spread = features.mean(axis=0), features.std(axis=0)
    typical = math.sqrt(float((spread**2).mean())) if spread.size else 0.0
    dead = spread <= 1e-6 * max(1e-300, typical)
    spread = np.where(dead, np.inf, np.maximum(spread, MIN_SPREAD * typical))
    design = np.column_stack([(features - centre) / spread, np.ones(n)])
    onehot = np.eye(classes)[labels]
    shares = np.full(n, 1 / n) if weights is None else weights / weights.sum()
    size = float(np.abs(logits).mean()) or 1.0

    def objective(v: np.ndarray) -> tuple[float, np.ndarray]:
        change = v[1:].reshape(classes, -1)
        z = (v[0] / size) * logits + design @ change.T
        z -= z.max(axis=1, keepdims=True)
        e = np.exp(z)
        total = e.sum(axis=1)
        loss = float(shares @ (np.log(total) - (onehot * z).sum(axis=1))) + ridge * float((change**2).sum())
        slope = (e / total[:, None] - onehot) * shares[:, None]
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
    """Return the name of the only linear layer whose output is the model's logits, if there is one."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if output.ndim == 2:
                # Later modules may change their input in place, so copies are kept.
                calls.setdefault(name, []).append((first_input(args, kwargs).clone(), output.clone()))

        return record

    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            logits = call()
    finally:
        for handle in handles:
            handle.remove()
    names = [name for name, pairs in calls.items() if any(torch.equal(z, logits) for _, z in pairs)]
    if len(names) != 1 or len(calls[names[0]]) > 1:
        return None
    ((x, _),) = calls[names[0]]
    return names[0] if _computes(layers[names[0]], x, logits) else None


def _is_linear(module: nn.Module) -> bool:
    """Check whether a layer is linear and small, with the weight as a parameter (not with old weight norm)."""
    has_weight = type(module) is nn.Linear and "weight" in module._parameters
    return has_weight and module.weight.numel() <= MAX_PARAMETERS  # type: ignore[operator]


def _computes(layer: nn.Module, x: Tensor, logits: Tensor) -> bool:
    """Check whether the layer's parameters give the logits, up to half precision; hooks may change the output."""
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    return bool((expected - logits.double()).abs().max() <= HALF_PRECISION_TOLERANCE * expected.abs().max())


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of a layer, passed by position or by name."""
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
    folds: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], labels: np.ndarray, weights: np.ndarray | None = None
) -> dict[float, np.ndarray]:
    """Return held-out logits of all samples for each λ.

    A fold is (held-out mask, logits, features) of all samples at the fold's map.
    """
    held_out = {ridge: np.empty(folds[0][1].shape) for ridge in RIDGES}
    for out, logits, features in folds:
        start = None
        for ridge in RIDGES:
            kept = None if weights is None else weights[~out]
            start = fit_correction(logits[~out], features[~out], labels[~out], ridge, start, kept)
            held_out[ridge][out] = start.logits(logits[out], features[out])
    return held_out
