"""One increasing function, applied to the logits of all classes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Self

import numpy as np

from trueup._core import native
from trueup._core.arrays import as_weighted, find_absent
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import Certificate, lbfgs
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator
from trueup.calibrators.likelihood import mask_scores
from trueup.calibrators.temperature import Temperature

_SMOOTH = 1e-3  # penalty on the squared differences between the logarithms of neighbouring slopes.


class Diagonal(Calibrator):
    """Map every logit, centred in its row, by the same increasing function: o_k = g(z_k − z̄).

    The slope of g is positive, linear between knots and constant beyond them. So g is smooth, and g(u) = u/T is one of
    the candidates. The fit starts there and maximises the likelihood with a small penalty on the roughness of ln g′.
    (The paper integrates a positive network; knots approximate any such function as well and need no seed.) Not for
    networks whose miscalibration differs between classes.

    Parameters
    ----------
    knots
        Ascending knots, shape (knots,).
    slopes
        Slope of g at each knot, positive, shape (knots,).

    Examples
    --------
    >>> Diagonal(knots=[-1.0, 0.0, 1.0], slopes=[2.0, 1.0, 1.0])(np.array([[2.0, 1.0, 0.0]]))
    array([[2.5, 1.5, 0. ]])

    References
    ----------
    Rahimi et al., "Intra order-preserving functions for calibration of multi-class neural networks" (2020),
    arXiv:2003.06820.
    """

    keeps_argmax = True
    sample_invariant = True

    knots: np.ndarray
    slopes: np.ndarray

    def __init__(self, knots: ArrayLike, slopes: ArrayLike) -> None:
        self.set_parameters(knots=knots, slopes=slopes)
        if np.ndim(self.knots) != 1 or len(self.knots) < 2 or not (np.diff(self.knots) > 0).all():
            raise ValueError(f"knots must be at least two ascending numbers, got {self.knots}")
        if np.shape(self.slopes) != self.knots.shape or not (self.slopes > 0).all():
            raise ValueError(f"slopes must be positive, one for each of {len(self.knots)} knots, got {self.slopes}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply g, with g = 0 at the first knot."""
        u, knots, slopes = centre_rows(xp, xp.double(z)), self.knots, self.slopes
        number = knots.shape[0]
        result = slopes[0] * xp.clip(u - knots[0], max=0.0)
        result = result + slopes[number - 1] * xp.clip(u - knots[number - 1], min=0.0)
        for i in range(number - 1):
            gap = knots[i + 1] - knots[i]
            inside = xp.minimum(xp.clip(u - knots[i], min=0.0), gap)
            result = result + inside * (slopes[i] + (slopes[i + 1] - slopes[i]) / (2 * gap) * inside)
        return xp.astype(result, z.dtype)

    def formula(self, classes: int) -> e.Formula:
        """Return the centring and the piecewise parabolas of g."""
        gaps, slopes = np.diff(self.knots), self.slopes
        heights = np.append(0.0, np.cumsum(gaps * (slopes[:-1] + slopes[1:]) / 2))
        bends = np.append(np.diff(slopes) / (2 * gaps), 0.0)
        g = e.curve(self.knots, [[0.0, slopes[0]], *zip(heights, slopes, bends, strict=True)])
        return e.Formula("logits", (e.matrix(np.eye(classes) - 1 / classes), e.piecewise(g)), "logits")

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, knots: int = 8, sample_weight: WeightsLike = None) -> Self:
        """Minimise the negative log-likelihood in the logarithms of the slopes, starting at temperature scaling.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        knots
            Number of knots.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        if knots < 2:
            raise ValueError(f"knots must be at least 2, got {knots}")
        start = Temperature.fit(z, y, sample_weight=w)
        positions = _knots(z, w, start.temperature, knots)
        slopes, certificate = _increasing(z, y, w, positions, 1 / start.temperature)
        if start.certificate is not None:
            certificate = dataclasses.replace(certificate, status=start.certificate.status)
        return cls(positions, slopes).with_certificate(certificate)


def centre_rows(xp: Namespace, z: Array) -> Array:
    """Subtract each row's mean, since a constant shift of a row changes nothing; an absent option becomes 0."""
    # Subtract the largest first: the mean of logits far from zero would lose digits.
    z = xp.fill_absent(z - xp.max(z, axis=1, keepdims=True), xp.find_absent(z))
    return z - xp.mean(z, axis=1, keepdims=True)


def _integrals(u: np.ndarray, knots: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the integral of each knot's hat function up to u; the outer two stay at 1 beyond the ends."""
    carried = np.minimum(u - knots[0], 0.0)
    for low, high in itertools.pairwise(knots):
        inside = np.clip(u - low, 0.0, high - low)
        rising = inside**2 / (2 * (high - low))
        yield carried + inside - rising
        carried = rising
    yield carried + np.maximum(u - knots[-1], 0.0)


def _knots(z: np.ndarray, w: np.ndarray | None, temperature: float, number: int) -> np.ndarray:
    """Return knots with equal information p(1 − p) between them, over each row's ten largest logits."""
    values, weights = [], []
    for rows in native.row_chunks(len(z), z.shape[1], native.DEFAULT_CHUNK):
        u = centre_rows(NUMPY, z[rows].astype(np.float64))
        p = NUMPY.softmax(mask_scores(u / temperature, find_absent(z[rows])))
        if z.shape[1] > 10:
            largest = np.argpartition(p, -10, axis=1)[:, -10:]
            u, p = (np.take_along_axis(table, largest, axis=1) for table in (u, p))
        values.append(u.ravel())
        information = p * (1 - p)
        weights.append((information if w is None else information * w[rows, None]).ravel())
    u, weight = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(u, kind="stable")
    share = np.cumsum(weight[order] + 1e-9 * weight.mean() + 1e-300)
    middles = (np.arange(number) + 0.5) / number * share[-1]
    quantiles = u[order][np.minimum(np.searchsorted(share, middles), len(u) - 1)]
    # Merge knots that nearly coincide.
    distinct = np.append(True, np.diff(quantiles) > 1e-6 * max(quantiles[-1] - quantiles[0], temperature))
    return quantiles[distinct] if distinct.sum() > 1 else quantiles[0] + np.array([0.0, temperature])


def _increasing(
    z: np.ndarray, y: np.ndarray, w: np.ndarray | None, knots: np.ndarray, start: float
) -> tuple[np.ndarray, Certificate]:
    """Return the slopes at the knots that maximise the penalised likelihood."""
    n, classes = z.shape
    share = np.full(n, 1 / n) if w is None else w / w.sum()

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray | None, slice]]:
        for rows in native.row_chunks(n, classes * len(knots), native.DEFAULT_CHUNK):
            u = centre_rows(NUMPY, z[rows].astype(np.float64)).ravel()
            yield np.stack(list(_integrals(u, knots))), find_absent(z[rows]), rows

    cache = list(pieces()) if z.size * len(knots) <= native.MAX_CACHED_NUMBERS else None

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        slopes = start * np.exp(theta)
        value, gradient = 0.0, np.zeros_like(slopes)
        for basis, absent, rows in cache or pieces():
            log_q = NUMPY.log_softmax(mask_scores((slopes @ basis).reshape(-1, classes), absent))
            at = np.arange(len(log_q)), y[rows]
            value -= float(share[rows] @ log_q[at])
            off = np.exp(log_q)
            off[at] -= 1
            off *= share[rows, None]
            gradient += basis @ off.ravel()
        steps = np.diff(theta)
        # The level is penalised a hundred times less: this only matters where the data do not determine it.
        value += _SMOOTH * (float(steps @ steps) + 0.01 * float(theta @ theta))
        rough = np.zeros_like(theta)
        rough[1:] += steps
        rough[:-1] -= steps
        return value, gradient * slopes + 2 * _SMOOTH * (rough + 0.01 * theta)

    theta, certificate = lbfgs(objective, np.zeros(len(knots)))
    return start * np.exp(theta), certificate
