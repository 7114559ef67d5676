"""The baselines as the paper fits them: a thousand full-batch gradient steps at rate 0.001.

The paper writes the likelihood as a sum over samples. With the mean, a thousand steps are often too few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup import metrics
from trueup.calibrators.likelihood import Penalty
from trueup.calibrators.linear import PENALTIES, Dirichlet, Linear, Matrix, Vector
from trueup.calibrators.temperature import Temperature
from trueup.models._tensors import as_tensors

STEPS, RATE = 1000, 1e-3
DIVERGED = "the descent diverged"
LARGEST = 1e6
"""Parameters beyond this come from a descent that diverges."""
Reduction: TypeAlias = Literal["mean", "sum"]


def temperature_by_descent(
    logits: Any, labels: Any, *, steps: int = STEPS, lr: float = RATE, reduction: Reduction = "mean"
) -> Temperature:
    """Fit temperature scaling by gradient descent from T = 1.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> z = generator.normal(size=(2000, 5))
    >>> y = (z + generator.gumbel(size=z.shape)).argmax(axis=1)
    >>> [f"{float(fit(3 * z, y).temperature):.4f}" for fit in (temperature_by_descent, Temperature.fit)]
    ['1.5745', '3.0135']
    """
    z, y = as_tensors(logits, labels)
    z, lr = z.double(), lr * len(y) if reduction == "sum" else lr
    label_logits, t = z.gather(1, y[:, None])[:, 0], 1.0
    for _ in range(steps):
        expected = (torch.softmax(z / t, dim=1) * z).sum(dim=1)
        t -= lr * float((label_logits - expected).mean()) / t**2
    if not 0 < t < math.inf:
        raise FloatingPointError(DIVERGED)
    return Temperature(t)


def linear_by_descent(
    logits: Any,
    labels: Any,
    *,
    kind: type[Linear],
    odir: bool = False,
    steps: int = STEPS,
    lr: float = RATE,
    reduction: Reduction = "mean",
) -> Linear:
    """Fit a linear map by gradient descent from the identity; ODIR chooses the penalty with the lowest ECE on the rows.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> z = generator.normal(size=(500, 3))
    >>> y = (z + generator.gumbel(size=z.shape)).argmax(axis=1)
    >>> [f"{float(fit.weight.mean()):.3f}" for fit in (linear_by_descent(3 * z, y, kind=Vector), Vector.fit(3 * z, y))]
    ['0.780', '0.352']
    """
    z, y = as_tensors(logits, labels)
    lr = lr * len(y) if reduction == "sum" else lr
    u = z.double() if kind is not Dirichlet else torch.log_softmax(z.double(), dim=1)
    classes = u.shape[1]
    penalties = [Penalty.odir(strength, classes) for strength in PENALTIES] if odir else [Penalty()]
    descents: list[Any] = [_descend(u, y, penalty, kind is Vector, steps, lr) for penalty in penalties]
    finite = [parts for parts in descents if all(bool((part.abs() < LARGEST).all()) for part in parts)]
    if not finite:
        raise FloatingPointError(DIVERGED)
    fits = [kind(*(part.cpu() for part in parts)) for parts in finite]
    return min(fits, key=lambda fit: metrics.ece(fit(logits), labels)) if odir else fits[0]


def _descend(u: Tensor, y: Tensor, penalty: Penalty, vector: bool, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    classes = u.shape[1]
    identity = torch.eye(classes, dtype=u.dtype, device=u.device)
    weight = identity.diagonal().clone() if vector else identity
    bias, one_hot, off = torch.zeros_like(u[0]), F.one_hot(y, classes).to(u.dtype), 1 - identity
    for _ in range(steps):
        logits = (u * weight if vector else u @ weight.T) + bias
        residual = (torch.softmax(logits, dim=1) - one_hot) / len(y)
        slope = (residual * u).sum(0) if vector else residual.T @ u + 2 * penalty.off * off * weight
        bias = bias - lr * (residual.sum(0) + 2 * penalty.bias * bias)
        weight = weight - lr * slope
    return weight, bias


_FITS: Mapping[str, Callable[..., Any]] = {
    "temperature": temperature_by_descent,
    "vector": partial(linear_by_descent, kind=Vector),
    "matrix": partial(linear_by_descent, kind=Matrix),
    "ms_odir": partial(linear_by_descent, kind=Matrix, odir=True),
    "dirichlet_odir": partial(linear_by_descent, kind=Dirichlet, odir=True),
}
BY_STEPS: Mapping[str, Callable[..., Any]] = {f"{name}_steps": fit for name, fit in _FITS.items()} | {
    f"{name}_sum": partial(fit, reduction="sum") for name, fit in _FITS.items()
}
"""Name in the study → fit by gradient steps, of the mean (`_steps`) and of the sum (`_sum`) over samples."""
