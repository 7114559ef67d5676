"""Proximity of an input to others: high in dense regions, low for outliers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from trueup._core import native
from trueup._core.arrays import as_matrix, match_kind
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.types import ArrayLike

NEIGHBOURS = 10
Rule = Literal["distance", "similarity"]


def proximity(
    features: ArrayLike, reference: ArrayLike | None = None, *, neighbours: int = NEIGHBOURS, rule: Rule = "distance"
) -> Any:
    """Compute the proximity exp(−(1/k) Σ_j d_j) of each row of features to its k nearest rows of `reference`.

    d is the Euclidean distance between rows scaled to length 1.

    Parameters
    ----------
    features
        Features, shape (n, d).
    reference
        Features of other rows, shape (m, d); by default each row is compared with the other rows.
    neighbours
        Number k of nearest neighbours.
    rule
        "distance" as above, or "similarity" for the mean of exp(−d²), as in the authors' script.

    Returns
    -------
    Any
        One number per row, shape (n,), of the kind of `features`.

    Examples
    --------
    >>> proximity(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), neighbours=1).round(4)
    array([1.    , 1.    , 0.2431])

    References
    ----------
    Xiong et al. (2023), Proximity-informed calibration for deep neural networks, arXiv:2306.04590.
    """
    if rule not in ("distance", "similarity"):
        raise ValueError(f'rule must be "distance" or "similarity", got {rule!r}')
    x = as_matrix(features, "features", rows=np.shape(features)[0])
    base = x if reference is None else as_matrix(reference, "reference", rows=np.shape(reference)[0])
    if base.shape[1] != x.shape[1]:
        raise ValueError(f"reference must have {x.shape[1]} columns as features have, got {base.shape[1]}")
    check_neighbours(neighbours, len(base) - (reference is None))
    nearness = closeness(NUMPY, x, base, neighbours=neighbours, rule=rule, exclude_self=reference is None)
    return match_kind(nearness, features)


def check_neighbours(neighbours: int, available: int) -> None:
    """Reject more neighbours than there are rows."""
    if not 1 <= neighbours <= available:
        raise ValueError(f"neighbours must lie in 1..{available}, the other rows there are, got {neighbours}")


def closeness(
    xp: Namespace, x: Any, base: Any, *, neighbours: int, rule: Rule = "distance", exclude_self: bool = False
) -> Any:
    """Return the proximity of trusted arrays in double; `exclude_self` if the rows of x are those of base."""
    # Differentiable and exportable: one block when traced, else blocks that never hold the whole distance matrix.
    x, base = _unit(xp, x), _unit(xp, base)
    if xp.is_traced(x):
        return _closeness(xp, x, base, neighbours, rule, None)
    blocks = native.row_chunks(x.shape[0], base.shape[0], native.DEFAULT_CHUNK)
    parts = [_closeness(xp, x[at, :], base, neighbours, rule, at.start if exclude_self else None) for at in blocks]
    return xp.concat(parts)


def _closeness(xp: Namespace, x: Any, base: Any, neighbours: int, rule: Rule, first: int | None) -> Any:
    """Return the proximity of some rows; `first` is the index in the base of the first of them, None if not in it."""
    # |u − v|² = 2 − 2u·v between unit vectors: one matrix product.
    square = 2 - 2 * (x @ base.T)
    if first is not None:
        rows = np.arange(len(x))
        square[rows, rows + first] = np.inf
    near = np.partition(square, neighbours - 1)[:, :neighbours] if xp.is_numpy else -xp.top_k(-square, neighbours)[0]
    # The root has no derivative at 0, so an identical neighbour would make the gradient NaN.
    near = xp.clip(near, min=1e-30)
    return xp.exp(-xp.mean(xp.sqrt(near), axis=1)) if rule == "distance" else xp.mean(xp.exp(-near), axis=1)


def _unit(xp: Namespace, x: Any) -> Any:
    # In double, since 2 − 2u·v cancels for near neighbours: in float32 no distance would be below 3e-4.
    x = xp.double(x)
    return x / xp.sqrt(xp.clip(xp.sum(x * x, axis=1, keepdims=True), min=1e-24))
