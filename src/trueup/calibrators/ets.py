"""Ensemble temperature scaling: a mixture of the scaled, the original and the uniform distribution."""

from __future__ import annotations

import itertools
import math
from typing import Literal, Self

import numpy as np

from trueup._core.arrays import MASKED_LOGIT, as_weighted, count_options
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import FitError, warn_at_bound
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, check_positive
from trueup.calibrators.temperature import (
    MAX_BRIER_RATIO,
    brier_inverse_temperature,
    inverse_temperature,
    scale_of,
    shifted_chunks,
)

Loss = Literal["brier", "nll"]

_MIN_WEIGHT = 1e-3
"""Weight of the scaled distribution where the uniform one would take all, so that a predicted class remains."""


class EnsembleTemperature(Calibrator):
    """Mix three distributions: q = w₁ softmax(z/T) + w₂ softmax(z) + w₃/K, with w ≥ 0 and Σw = 1.

    K is the number of options of a row. The fit first minimises the NLL over T (or the Brier score, as published, which
    costs NLL), then over the weights. The ranking stays, and the loss of a row is at most ln(K/w₃).
    Not for networks whose miscalibration differs between classes.

    Parameters
    ----------
    temperature
        The divisor T > 0 of the first distribution.
    weights
        The weights (w₁, w₂, w₃).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = np.where(rng.random(5000) < 0.2, rng.integers(0, 10, 5000), (z + rng.gumbel(size=z.shape)).argmax(axis=1))
    >>> ets = EnsembleTemperature.fit(z, y)
    >>> ets.weights.round(2)
    array([0.  , 0.82, 0.18])

    References
    ----------
    Zhang, Kailkhura & Han, "Mix-n-match: ensemble and compositional methods for uncertainty calibration in deep
    learning" (2020), arXiv:2003.07329.
    """

    keeps_argmax = True
    sample_invariant = True

    temperature: float
    weights: np.ndarray

    def __init__(self, temperature: float, weights: ArrayLike) -> None:
        self.set_parameters(temperature=temperature, weights=weights)
        check_positive(self.temperature, "temperature")
        w = self.weights
        if not (w.shape == (3,) and bool((w >= 0).all()) and abs(float(w.sum()) - 1) < 1e-9 and float(w[2]) < 1):
            raise ValueError(f"weights must be three, not negative, of sum 1, not all on the uniform, got {w}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the log-probabilities of the mixture."""
        x = xp.double(z)
        uniform = xp.zeros_like(x) - xp.log_options(x, x.dtype)
        scaled, plain = (xp.clip(xp.log_softmax(part), min=MASKED_LOGIT) for part in (x / self.temperature, x))
        parts = xp.stack([scaled, plain, uniform]) + xp.log(self.weights)[:, None, None]
        return xp.astype(xp.logsumexp(parts, axis=0), z.dtype)

    def formula(self, classes: int) -> e.Formula:
        """Return the mixture of the three distributions."""
        scaled, plain, uniform = self.weights
        parts = (e.scale(1 / self.temperature), e.op("softmax")), (e.op("softmax"),)
        mixed = e.mix((scaled, plain), parts), e.piecewise(e.polynomial(uniform / classes, 1.0))
        return e.Formula("logits", mixed, "probs")

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, loss: Loss = "nll", sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise the loss over T, then over the weights.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        loss
            "nll", or "brier" as published.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        scale = scale_of(z)
        if loss == "brier":
            weigh = _brier_weights
            beta, certificate = brier_inverse_temperature(z, y, w)
        elif loss == "nll":
            weigh = _nll_weights
            beta, certificate = inverse_temperature(z, y, w)
            beta = max(beta, 1 / (MAX_BRIER_RATIO * scale)) if scale else beta
        else:
            raise ValueError(f'loss must be "brier" or "nll", got {loss!r}')
        mixture = weigh(z, y, w, beta)
        informative_weight = mixture[0] * min(1.0, beta * scale) + mixture[1] * min(1.0, scale)
        if informative_weight < _MIN_WEIGHT and (scale > 0 or mixture[2] > 0):
            # Nearly uniform: the predictions carry little information. Use the logits' own scale.
            beta = 1 / scale if scale else 1.0
            mixture = weigh(z, y, w, beta)
            mixture = mixture if mixture[2] <= 1 - _MIN_WEIGHT else np.array([_MIN_WEIGHT, 0.0, 1 - _MIN_WEIGHT])
        elif certificate.status == "bound" and mixture[0] > 0:
            warn_at_bound("temperature", 1 / beta, "the loss falls beyond it")
        return cls(1 / beta, mixture).with_certificate(certificate)


def simplex_minimum(square: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """Return the w ≥ 0 with sum 1 that minimises wᵀ(square)w − 2(linear)ᵀw: the best minimum over all faces.

    >>> simplex_minimum(np.eye(3), np.array([1.0, 0.5, 0.0]))
    array([0.75, 0.25, 0.  ])
    """
    size = len(linear)
    best, least = np.full(size, 1 / size), math.inf
    for number in range(1, size + 1):
        for face in map(list, itertools.combinations(range(size), number)):
            # Stationary point with a multiplier for the sum; least squares, since parts may be identical.
            system = np.ones((number + 1, number + 1))
            system[:number, :number] = square[np.ix_(face, face)]
            system[number, number] = 0.0
            inner = np.linalg.lstsq(system, np.append(linear[face], 1.0), rcond=1e-13)[0][:number]
            w = np.zeros(size)
            w[face] = np.maximum(inner, 0.0)  # a minimum outside the face is worse than one on its boundary
            w /= w.sum()
            value = float(w @ square @ w - 2 * linear @ w)
            if value < least - 1e-14:  # ties go to the smallest number of parts
                best, least = w, value
    return best


def _uniform(z: np.ndarray) -> np.ndarray:
    """Return the uniform distribution's probability in each row, (n,): one over its number of options."""
    return np.ones(len(z)) / np.ravel(count_options(z))


def _brier_weights(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, beta: float) -> np.ndarray:
    uniform = _uniform(z)
    mean = float(uniform.mean() if w is None else (w @ uniform) / w.sum())
    square, linear = np.full((3, 3), mean), np.array([0.0, 0.0, mean])
    square[:2, :2] = 0.0
    for part, labels, share in shifted_chunks(z, y, w):
        both = np.stack([NUMPY.softmax(beta * part), NUMPY.softmax(part)])
        square[:2, :2] += np.einsum("ank,bnk->ab", share * both, both)
        linear[:2] += (share * np.take_along_axis(both, labels[None], axis=2)).sum(axis=(1, 2))
    return simplex_minimum(square, linear)


def _nll_weights(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, beta: float, max_iter: int = 100) -> np.ndarray:
    """Minimise −mean ln(w·a) by Newton's method on the simplex, where a holds the label's three probabilities."""
    rows = []
    for part, labels, _ in shifted_chunks(z, y):
        probs = [np.take_along_axis(NUMPY.softmax(b * part), labels, axis=1) for b in (beta, 1.0)]
        rows.append(np.concatenate(probs, axis=1))
    a = np.concatenate([np.concatenate(rows), _uniform(z)[:, None]], axis=1)
    share = np.full(len(a), 1 / len(a)) if w is None else w / w.sum()
    mixture = np.full(3, 1 / 3)
    for _ in range(max_iter):
        mixed = a @ mixture
        scaled = a / mixed[:, None]
        slope, bend = -(share @ scaled), (scaled * share[:, None]).T @ scaled
        step = simplex_minimum(bend, bend @ mixture - slope) - mixture
        if -slope @ step < 1e-13:
            return mixture
        length = 1.0
        with np.errstate(divide="ignore"):
            while not share @ np.log(a @ (mixture + length * step) / mixed) >= -1e-4 * length * (slope @ step):
                length /= 2
                if length < 1e-12:
                    return mixture
        mixture = np.maximum(mixture + length * step, 0.0)
        mixture /= mixture.sum()
    raise FitError(f"no weights were found in {max_iter} steps: the loss can still fall by {-slope @ step:g}")
