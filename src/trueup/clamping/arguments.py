"""What `clamp` is asked for, checked where it comes in: an error names the option, what it may be, and what came."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from trueup.clamping.problem import Lam

_SEEDS = 1 << 63
_RULES = ("auto", "R1", "R2")


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check a choice between names.

    >>> one_of("norm", "l1", ("l2sq", "l2"))
    Traceback (most recent call last):
        ...
    ValueError: norm must be "l2sq" or "l2", got 'l1'
    """
    if not isinstance(value, str) or value not in allowed:
        wish = " or ".join(f'"{name}"' for name in allowed)
        raise ValueError(f"{name} must be {wish}, got {value!r}")


def model_of(model: Any) -> nn.Module:
    """Check that a model is one."""
    if not isinstance(model, nn.Module):
        fact = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = "; a function can be the forward of one" if callable(model) and not isinstance(model, type) else ""
        raise ValueError(f"model must be an nn.Module, got {fact}{hint}")
    return model


def loader_of(loader: Any) -> Iterable[Any]:
    """Check that a loader can be read."""
    if not isinstance(loader, Iterable):
        raise ValueError(f"loader must give batches of inputs and labels, got {type(loader).__name__}")
    return loader


def lam_of(lam: Any) -> Lam:
    """Parse a penalty: a number from 0 on, infinity with it, or the name of a rule.

    >>> lam_of(np.float32(0.5)), lam_of("R1")
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


def seed_of(seed: Any) -> int:
    """Parse a seed, which generators of torch and NumPy alike can take."""
    try:
        found = operator.index(seed)
    except TypeError:
        found = -1
    if not 0 <= found < _SEEDS:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
    return found


def pool_of(loss: str, gamma: Any, folds: Any) -> list[float]:
    """The exponents of the focal loss to choose from, sorted; cross-entropy has 0 alone.

    >>> pool_of("focal", (1, 0.5), None), pool_of("focal", np.float32(1), None), pool_of("ce", None, None)
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


def folds_of(folds: Any, samples: int) -> int:
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
