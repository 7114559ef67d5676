"""How close an input lies to others the network has seen: dense regions are close, outliers far."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import as_matrix

NEIGHBOURS = 10
Rule = Literal["distance", "similarity"]


def proximity(
    features: Any,
    reference: Any = None,
    *,
    neighbours: int = NEIGHBOURS,
    rule: Rule = "distance",
) -> np.ndarray:
    """Proximity exp(−(1/k) Σ_j d_j) of each row of features to its k nearest rows of `reference`.

    d is the Euclidean distance between rows scaled to length one. Without a reference the rows are each other's
    neighbours, never their own. `rule="similarity"` averages exp(−d²) instead, as the authors' script does.
    Xiong et al., "Proximity-informed calibration for deep neural networks" (2023).

    >>> proximity(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), neighbours=1).round(4)
    array([1.    , 1.    , 0.2431])
    """
    if rule not in ("distance", "similarity"):
        raise ValueError(f'rule must be "distance" or "similarity", got {rule!r}')
    x = as_matrix(features, "features", rows=len(features))
    base = x if reference is None else as_matrix(reference, "reference", rows=len(reference)).to(x.device)
    if base.shape[1] != x.shape[1]:
        raise ValueError(f"reference must have {x.shape[1]} columns as features have, got {base.shape[1]}")
    check_neighbours(neighbours, len(base) - (reference is None))
    return closeness(x, base, neighbours=neighbours, rule=rule, exclude_self=reference is None).cpu().numpy()


def check_neighbours(neighbours: int, available: int) -> None:
    """Refuse more neighbours than there are rows for."""
    if not 1 <= neighbours <= available:
        raise ValueError(f"neighbours must lie in 1..{available}, the other rows there are, got {neighbours}")


def closeness(
    x: Tensor, base: Tensor, *, neighbours: int, rule: Rule = "distance", exclude_self: bool = False
) -> Tensor:
    """Proximity of trusted tensors, in double; `exclude_self` where the rows of x are those of base.

    Differentiable, and exportable: then in one block, else in blocks that never hold the whole matrix of distances.
    """
    x, base = _unit(x), _unit(base)
    if torch.compiler.is_compiling():
        return _closeness(x, base, neighbours, rule, 0 if exclude_self else None)
    blocks = native.row_chunks(len(x), len(base), native.BLOCK)
    return torch.cat([_closeness(x[at], base, neighbours, rule, at.start if exclude_self else None) for at in blocks])


def _closeness(x: Tensor, base: Tensor, neighbours: int, rule: Rule, own: int | None) -> Tensor:
    # |u − v|² = 2 − 2u·v between unit vectors: one matrix product.
    square = 2 - 2 * x @ base.T
    if own is not None:
        row = torch.arange(len(x), device=x.device)
        square = square.index_put((row, row + own), square.new_tensor(torch.inf))
    near = square.topk(neighbours, dim=1, largest=False).values
    # Held off zero, where the root has no derivative and a neighbour in the same place would make the gradient NaN.
    near = near.clamp(min=1e-30)
    return torch.exp(-near.sqrt().mean(dim=1)) if rule == "distance" else torch.exp(-near).mean(dim=1)


def _unit(x: Tensor) -> Tensor:
    # Double, because 2 − 2u·v of near neighbours cancels: float32 would put a floor of 3e-4 under every distance.
    return torch.nn.functional.normalize(x.double(), dim=1)
