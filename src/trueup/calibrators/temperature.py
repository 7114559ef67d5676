"""Temperature scaling, by likelihood, by Brier score, by focal loss, and by the ECE over a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature_search import (
    bound_reason,
    brier_inverse_temperature,
    focal_inverse_temperature,
    inverse_temperature,
    scale_of,
)
from trueup.core.arrays import as_weighted
from trueup.core.bins import BINS, Bins, equal_width, rounding_error
from trueup.core.optimize import Certificate, warn_at_bound
from trueup.core.row_scores import confidences, confidences_and_hits

FINE_GRID = tuple(i / 1000 for i in range(1, 5001))
"""0.001 … 5.000, the grid of Neural Clamping's baseline."""
WIDE_GRID = tuple(i / 100 for i in range(1, 1001))
"""0.01 … 10.00, the grid of Rethinking Calibration."""


class Temperature(Calibrator):
    """Divide the logits by one number: q = softmax(z/T).

    By likelihood, T minimises Σ_i ln Σ_k exp(z_ik/T) − z_iy/T, which is convex in 1/T. It keeps the ranking and is hard
    to overfit. Not for networks whose miscalibration differs between classes or regions of confidence.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Temperature.fit(2.5 * z, y)
    Temperature(temperature=2.51869)
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = True
    differentiable = True

    def __init__(self, temperature: Tensor | float) -> None:
        super().__init__()
        self.keep("temperature", temperature)
        if not (self.temperature.ndim == 0 and self.temperature > 0 and torch.isfinite(self.temperature)):
            raise ValueError(f"temperature must be one positive number, got {temperature}")

    temperature: Tensor

    def map(self, logits: Tensor) -> Tensor:
        """Divide by T."""
        return logits / self.temperature.to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, smooth: float = 0.0, weights: Any = None) -> Self:
        """Temperature scaling: minimise the negative log-likelihood, by Newton steps from a subsample's optimum.

        `smooth` rows more are taken to have all classes alike, as in Platt's targets, so that rows whose labels are all
        right do not make it infinitely sure.
        """
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        if not 0 <= smooth < math.inf:
            raise ValueError(f"smooth must be a number from 0 on, got {smooth}")
        beta, certificate = inverse_temperature(z, y, w, smooth=smooth)
        return cls.from_search(beta, certificate, scale_of(z))

    @classmethod
    def from_search(cls, beta: float, certificate: Certificate, scale: float) -> Self:
        """The end of a search for 1/T by likelihood, of logits of this scale; at a bound it warns."""
        if certificate.status == "bound":
            warn_at_bound("temperature", 1 / beta, bound_reason(beta, scale), stacklevel=3)
        return cls(1 / beta).with_certificate(certificate)

    @classmethod
    def fit_ece(
        cls,
        logits: Any,
        labels: Any,
        *,
        temperatures: Sequence[float] = FINE_GRID,
        bins: int = BINS,
        weights: Any = None,
    ) -> Self:
        """Temperature scaling (least ECE): take the temperature of a grid with the least ECE; of equal ones the one
        nearest to 1 (in its logarithm).

        The default grid is 0.001 … 5.000; `WIDE_GRID` is 0.01 … 10.00.
        """
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        grid = np.asarray(temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not (grid > 0).all():
            raise ValueError("temperatures must be a list of positive numbers")
        errors = grid_errors(z, y, grid, bins, w)
        best = np.flatnonzero(errors <= errors.min() + 1e-12)
        return cls(float(grid[best[np.abs(np.log(grid[best])).argmin()]]))

    @classmethod
    def fit_ece_wide(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Temperature scaling (least ECE, wide search): take the temperature of 0.01 … 10.00 with the least ECE."""
        return cls.fit_ece(logits, labels, temperatures=WIDE_GRID, weights=weights)

    @classmethod
    def fit_focal(cls, logits: Any, labels: Any, *, gamma: float = 1.0, weights: Any = None) -> Self:
        """Temperature scaling (focal loss): minimise the focal loss −(1 − p_y)^γ ln p_y: a grid finds the valley, since
        it is not convex.
        """
        if not gamma >= 0 or math.isinf(gamma):
            raise ValueError(f"gamma must be a number from 0 on, got {gamma}")
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        beta, certificate = focal_inverse_temperature(z, y, gamma, w=w)
        if certificate.status == "bound":
            warn_at_bound("temperature", 1 / beta)
        return cls(1 / beta).with_certificate(certificate)

    @classmethod
    def fit_brier(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Temperature scaling (Brier score): minimise the mean squared distance from the one-hot label."""
        beta, certificate = brier_inverse_temperature(*as_weighted(logits, labels, weights, at_least=1))
        if certificate.status == "bound":
            warn_at_bound("temperature", 1 / beta)
        return cls(1 / beta).with_certificate(certificate)


def grid_errors(z: Tensor, y: Tensor, temperatures: np.ndarray, bins: int, w: Tensor | None = None) -> np.ndarray:
    """The ECE at each temperature that could have the least, and infinity at those that could not.

    ECE is at least |mean confidence − accuracy|, and the mean confidence falls as T rises: from where it crosses the
    accuracy, walk outwards until that gap alone exceeds the least ECE found.
    """
    correct = confidences_and_hits(z, y)[1]
    weights = None if w is None else w.cpu().numpy()
    accuracy, edges, unit = np.average(correct, weights=weights), equal_width(bins), rounding_error(z)
    order = np.argsort(temperatures, kind="stable")
    errors = np.full(len(order), np.inf)

    def gap(place: int) -> float:
        """Mean confidence − accuracy at a place of the sorted grid, where the ECE is noted."""
        confidence, _ = confidences(z, beta=1 / float(temperatures[order[place]]))
        tally = Bins.from_scores(confidence, correct, edges, rounding=unit, weights=weights)
        errors[order[place]] = tally.ece()
        return float(np.average(confidence, weights=weights) - accuracy)

    low, high = 0, len(order) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if gap(middle) > 0 else (low, middle)
    for places in (range(low, len(order)), range(low - 1, -1, -1)):
        for place in places:
            if abs(gap(place)) > errors.min() + 1e-9:
                break
    return errors
