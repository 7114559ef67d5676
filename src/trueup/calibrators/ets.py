"""Ensemble temperature scaling: a mixture of the scaled, the original and the uniform distribution."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, Self

import numpy as np

from trueup._core.arrays import MASKED_LOGIT, as_weighted, count_options
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import FitError, warn_at_bound
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator, check_positive
from trueup.calibrators.temperature import (
    MAX_BRIER_RATIO,
    brier_inverse_temperature,
    inverse_temperature,
    scale_of,
    shifted_chunks,
)

Loss = Literal["brier", "nll"]

_TRACE = 1e-3
"""What the scaled distribution keeps where the uniform would take all, so that there still is a predicted class."""


class EnsembleTemperature(Calibrator):
    """Mix three distributions: q = w₁ softmax(z/T) + w₂ softmax(z) + w₃/K, with w ≥ 0 and Σw = 1, K a row's options.

    T minimises the NLL (or, as published, the Brier score, which pays for it in NLL), then w does, exactly. The ranking
    stays, and no rare error can cost more than ln(K/w₃). Not for networks whose miscalibration differs between classes.
    Zhang et al., "Mix-n-match: ensemble and compositional methods for uncertainty calibration in deep learning" (2020).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = np.where(rng.random(5000) < 0.2, rng.integers(0, 10, 5000), (z + rng.gumbel(size=z.shape)).argmax(axis=1))
    >>> ets = EnsembleTemperature.fit(z, y)
    >>> ets.weights.round(2)
    array([0.  , 0.82, 0.18])
    """

    keeps_argmax = True
    sample_invariant = True

    temperature: float
    weights: np.ndarray

    def __init__(self, temperature: float, weights: Any) -> None:
        self.set_parameters(temperature=temperature, weights=weights)
        check_positive(self.temperature, "temperature")
        w = self.weights
        if not (w.shape == (3,) and bool((w >= 0).all()) and abs(float(w.sum()) - 1) < 1e-9 and float(w[2]) < 1):
            raise ValueError(f"weights must be three, not negative, of sum 1, not all on the uniform, got {weights}")

    def map(self, xp: Namespace, z: Any) -> Any:
        """The logarithm of the mixture."""
        x = xp.double(z)
        uniform = xp.zeros_like(x) - xp.log_options(x, x.dtype)
        scaled, plain = (xp.clip(xp.log_softmax(part), min=MASKED_LOGIT) for part in (x / self.temperature, x))
        parts = xp.stack([scaled, plain, uniform]) + xp.log(self.weights)[:, None, None]
        return xp.astype(xp.logsumexp(parts, axis=0), z.dtype)

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, loss: Loss = "nll", sample_weight: WeightsLike = None
    ) -> Self:
        """Ensemble temperature scaling: minimise the loss in T alone, then in the weights."""
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
        told_apart = mixture[0] * min(1.0, beta * scale) + mixture[1] * min(1.0, scale)
        if told_apart < _TRACE and (scale > 0 or mixture[2] > 0):
            # All but uniform: the predictions carry little. What they do carry shows at the logits' own scale.
            beta = 1 / scale if scale else 1.0
            mixture = weigh(z, y, w, beta)
            mixture = mixture if mixture[2] <= 1 - _TRACE else np.array([_TRACE, 0.0, 1 - _TRACE])
        elif certificate.status == "bound" and mixture[0] > 0:
            warn_at_bound("temperature", 1 / beta, "the loss falls beyond it")
        return cls(1 / beta, mixture).with_certificate(certificate)


def simplex_minimum(square: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The w ≥ 0 of sum 1 that minimises wᵀ(square)w − 2(linear)ᵀw: the best of the minima on all faces of the simplex.

    >>> simplex_minimum(np.eye(3), np.array([1.0, 0.5, 0.0]))
    array([0.75, 0.25, 0.  ])
    """
    size = len(linear)
    best, least = np.full(size, 1 / size), math.inf
    for number in range(1, size + 1):
        for face in map(list, itertools.combinations(range(size), number)):
            # Stationary with a multiplier for the sum; least squares, as the parts may be one and the same.
            system = np.ones((number + 1, number + 1))
            system[:number, :number] = square[np.ix_(face, face)]
            system[number, number] = 0.0
            inner = np.linalg.lstsq(system, np.append(linear[face], 1.0), rcond=1e-13)[0][:number]
            w = np.zeros(size)
            w[face] = np.maximum(inner, 0.0)  # a minimum outside the face loses to one on its rim
            w /= w.sum()
            value = float(w @ square @ w - 2 * linear @ w)
            if value < least - 1e-14:  # of equal ones the fewest parts
                best, least = w, value
    return best


def _uniform(z: np.ndarray) -> np.ndarray:
    """The uniform distribution's probability in each row, (n,): one over its options."""
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
    """Newton's steps on −mean ln(w·a), a the label's three probabilities; each model is minimised on the simplex."""
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
