"""How close an input lies to others the network has seen: dense regions are close, outliers far."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trueup.arrays import as_matrix

NEIGHBOURS = 10


def proximity(
    features: Any,
    reference: Any = None,
    *,
    neighbours: int = NEIGHBOURS,
    rule: Literal["distance", "similarity"] = "distance",
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
    x = _unit(as_matrix(features, "features", rows=len(features)))
    base = x if reference is None else _unit(as_matrix(reference, "reference", rows=len(reference))).to(x)
    if base.shape[1] != x.shape[1]:
        raise ValueError(f"reference must have {x.shape[1]} columns as features have, got {base.shape[1]}")
    available = len(base) - (reference is None)
    if not 1 <= neighbours <= available:
        raise ValueError(f"neighbours must lie in 1..{available}, the other rows there are, got {neighbours}")
    step = max(1, (1 << 22) // len(base))
    parts = []
    for start in range(0, len(x), step):
        # |u − v|² = 2 − 2u·v between unit vectors: one matrix product a block, never the whole matrix.
        square = (2 - 2 * x[start : start + step] @ base.T).clamp_(min=0)
        if reference is None:
            own = torch.arange(len(square), device=x.device)
            square[own, own + start] = torch.inf
        near = square.topk(neighbours, dim=1, largest=False).values
        parts.append(torch.exp(-near.sqrt().mean(dim=1)) if rule == "distance" else torch.exp(-near).mean(dim=1))
    return torch.cat(parts).double().cpu().numpy() if parts else np.empty(0)


def _unit(x: Tensor) -> Tensor:
    # Double, because 2 − 2u·v of near neighbours cancels: float32 would put a floor of 3e-4 under every distance.
    return torch.nn.functional.normalize(x.double(), dim=1)
