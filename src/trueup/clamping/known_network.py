"""How a file knows the network again that it was written for: by shapes, and by a few sums of its weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from trueup.models.freezing import unwrap

_SHOWN = 4
_PROJECTIONS = 4
_ALIKE = 0.02  # of projections that differ by about 1 where weights do; half precision moves them by 0.001


def model_shapes(model: nn.Module) -> dict[str, list[int]]:
    """The shape of every parameter and buffer of a network, by name."""
    return {name: list(tensor.shape) for name, tensor in unwrap(model, compiled=True).state_dict().items()}


def compare_shapes(wanted: Mapping[str, list[int]], found: Mapping[str, list[int]], participle: str) -> None:
    """Refuse a model whose parameters have other names or shapes than those of the one that was fitted to."""
    differing = [
        f"{name} {_shape(found, name)} instead of {_shape(wanted, name)}"
        for name in {**wanted, **found}
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ValueError(f"model must be the one that was {participle}, got {'; '.join(differing[:_SHOWN])}{more}")


def _shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return f"{tuple(shapes[name])}" if name in shapes else "missing"


def project_weights(network: nn.Module, without: Collection[str] = ()) -> list[float]:
    """A few numbers by which a network's weights are known again: Σ_t r·w_t/‖w_t‖ over √t, r being random signs.

    The last is Σ_t ln‖w_t‖ over √t, which a temperature folded into a layer changes. What is not finite counts as zero.

    >>> one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    >>> project_weights(one) == project_weights(one), project_weights(one) == project_weights(other)
    (True, False)
    """
    rng, sums, tensors = np.random.default_rng(0), np.zeros(_PROJECTIONS + 1), 0
    skipped = _all_names(network, without)
    for name, tensor in unwrap(network, compiled=True).state_dict().items():
        if name in skipped or not tensor.is_floating_point():
            continue
        values = np.nan_to_num(tensor.detach().cpu().double().flatten().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
        signs = (2 * rng.integers(0, 2, size=len(values), dtype=np.int8) - 1 for _ in range(_PROJECTIONS))
        size = float(np.linalg.norm(values)) or 1.0
        sums += [*(float(values @ row) / size for row in signs), math.log(size)]
        tensors += 1
    return [float(total) for total in sums / math.sqrt(max(tensors, 1))]


def compare_weights(wanted: Any, found: Sequence[float], participle: str) -> None:
    """Refuse a model whose weights are others, though their shapes are the same."""
    if isinstance(wanted, list) and len(wanted) == _PROJECTIONS:  # files of former versions have no sizes
        found = found[:_PROJECTIONS]
    if not isinstance(wanted, list) or len(wanted) != len(found) or not all(isinstance(w, float) for w in wanted):
        raise ValueError(f"the header must have {len(found)} numbers for the weights")
    if not all(abs(a - b) <= _ALIKE for a, b in zip(wanted, found, strict=True)):
        raise ValueError(f"model must be the one that was {participle}, got one of the same shapes but other weights")


def _all_names(network: nn.Module, names: Collection[str]) -> set[str]:
    """These tensors by every name that they have, since a network may hold a module twice.

    >>> norm = nn.BatchNorm1d(2)
    >>> sorted(_all_names(nn.Sequential(norm, nn.ReLU(), norm), ["0.running_mean"]))
    ['0.running_mean', '2.running_mean']
    """
    modules = dict(unwrap(network, compiled=True).named_modules(remove_duplicate=False))
    wanted = [name.rpartition(".") for name in names]
    return {
        f"{path}.{leaf}" if path else leaf
        for own, _, leaf in wanted
        for path, module in modules.items()
        if module is modules.get(own)
    }
