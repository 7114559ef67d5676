"""Temperature scaling averaged over the posterior of the temperature."""

from __future__ import annotations

import math

import numpy as np

from trueup._core.arrays import as_weighted
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import row_count
from trueup.calibrators.pool import Mixture
from trueup.calibrators.temperature import Temperature, inverse_temperature, smoothed_loss

_SMOOTH = 0.1  # pseudo-rows with uniform labels bound the likelihood where every prediction is correct;
_NODES = np.linspace(-5.0, 5.0, 21)  # points of the sum over the posterior, in its standard deviations
_MIN_WEIGHT = 1e-3  # nodes with less weight are dropped


def bayesian_temperature(
    logits: ArrayLike, labels: ArrayLike, *, scale: float = 0.5, sample_weight: WeightsLike = None
) -> Mixture:
    """Average temperature scaling over the posterior of T: the mean of q = softmax(z/T).

    The prior of ln T is Student's t with three degrees of freedom around 0. With few rows the logits stay nearly
    unchanged; with many rows the data determine T. One best-fitting T is overconfident where few rows leave T
    uncertain; the average is less confident there. Not for thousands of rows, where it gives the same result as
    `temperature`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    scale
        Scale of the prior of ln T.
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.

    Returns
    -------
    Mixture
        A mixture of temperatures.

    Examples
    --------
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
    kept = share >= _MIN_WEIGHT * share.sum()
    return Mixture([Temperature(math.exp(-x)) for x in points[kept]], share[kept] / share[kept].sum())
