"""Temperature scaling averaged over what the rows leave open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trueup._core.arrays import as_weighted
from trueup.calibrators.base import row_count
from trueup.calibrators.pool import Mixture
from trueup.calibrators.temperature import Temperature, inverse_temperature, smoothed_loss

_SMOOTH = 0.1  # rows that have all classes alike: the likelihood is then bounded where every row is right
_NODES = np.linspace(-5.0, 5.0, 21)  # standard deviations of the posterior, whose tails are the prior's
_LEAST = 1e-3  # weights below are left out


def bayesian_temperature(logits: Any, labels: Any, *, scale: float = 0.5, sample_weight: Any = None) -> Mixture:
    """Bayesian temperature scaling: the mean of q = softmax(z/T) over the posterior of T.

    The prior of ln T is Student's t with three degrees of freedom around 0, of this `scale`: few rows leave the logits
    nearly as they are, and many rule alone. One T that fits them best is too sure of itself; a mean over all that they
    allow is less so where logits are far apart. Not for thousands of rows, of which it makes temperature scaling.

    >>> z = np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    >>> bayesian_temperature(z, [0, 0, 1, 1])(z[:1]).round(3)
    array([[-0.13 , -2.105]])
    """
    z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")
    n = row_count(z, w)
    loss = smoothed_loss(z, y, w, _SMOOTH)
    likeliest = math.log(inverse_temperature(z, y, w, smooth=_SMOOTH)[0])

    def energy(x: float) -> float:
        return n * loss(math.exp(x))[0] + 2 * math.log1p((x / scale) ** 2 / 3)

    ends = sorted((0.0, likeliest))  # the prior's mode and the likelihood's
    mode = likeliest
    if ends[1] - ends[0] > 1e-3:
        from scipy.optimize import minimize_scalar  # slow to import

        mode = float(minimize_scalar(energy, bounds=ends, method="bounded", options={"xatol": 1e-3}).x)
    beta = math.exp(mode)
    width = 1 / math.sqrt(n * max(loss(beta)[2], 0.0) * beta**2 + 4 / 3 * scale**-2)
    points = mode + width * _NODES
    energies = np.array([energy(x) for x in points])
    share = np.exp(energies.min() - energies)
    kept = share >= _LEAST * share.sum()
    return Mixture([Temperature(math.exp(-x)) for x in points[kept]], share[kept] / share[kept].sum())
