"""Calibrators fitted to bootstrap resamples of the labelled rows, to carry their uncertainty into later estimates.

Temperature scaling, with or without a bias, is refitted by one Newton step from the fit to all rows. To first order
that equals a new fit, and it costs one matrix product. Other methods are fitted anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from trueup._core.arrays import as_arrays, as_logits, check_share, take_rows
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup._core.registry import METHODS
from trueup._core.types import ArrayLike
from trueup.calibrators.base import Calibrator
from trueup.calibrators.linear import Vector
from trueup.calibrators.temperature import Temperature
from trueup.metrics.resampling import check_resamples

Fit = Callable[..., Calibrator]


def check_rows(
    logits: ArrayLike, val: tuple[ArrayLike, ArrayLike] | None, level: float, n_resamples: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """Check unlabelled rows, optional labelled rows with the same classes, and the options of the intervals."""
    z = as_logits(logits)
    check_share(level, "level")
    check_resamples(n_resamples)
    if not len(z):
        raise InputError("logits", "have rows", "none")
    pair = None if val is None else as_arrays(*val, min_rows=2)
    if pair is not None and pair[0].shape[1] != z.shape[1]:
        raise InputError("val", f"have the {z.shape[1]} classes of logits", str(pair[0].shape[1]))
    return z, pair


class Resample(NamedTuple):
    """A calibrator fitted to resampled rows, and the indices of those rows."""

    calibrator: Calibrator
    rows: np.ndarray


class Refits:
    """The fit of a method to labelled rows, and fits to resamples of them."""

    def __init__(self, method: str | Fit, logits: np.ndarray, labels: np.ndarray) -> None:
        self.fit: Fit = METHODS[method] if isinstance(method, str) else method
        self.pair = logits, labels
        self.calibrator = self.fit(logits, labels)
        self.steps: tuple[np.ndarray, np.ndarray] | None = None
        if method in ("temperature", "bias_corrected_temperature"):
            self.steps = _newton_steps(self.calibrator, logits, labels, biased=method != "temperature")

    def draw(self, rng: np.random.Generator) -> Resample:
        """Fit to rows drawn with replacement.

        Parameters
        ----------
        rng
            Random generator.

        Returns
        -------
        Resample
            The fit and its rows.
        """
        n = len(self.pair[0])
        rows = rng.integers(0, n, n)
        if self.steps is None:
            return Resample(self.fit(*take_rows(*self.pair, rows)), rows)
        parameters, influence = self.steps
        moved = parameters + np.bincount(rows, minlength=n) @ influence
        beta = max(float(moved[0]), 1e-6)
        if len(moved) == 1:
            return Resample(Temperature(1 / beta), rows)
        return Resample(Vector(np.full(len(moved) - 1, beta), moved[1:] - moved[1:].mean()), rows)


def _newton_steps(
    calibrator: Calibrator, logits: np.ndarray, labels: np.ndarray, *, biased: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (β, b) of softmax(βz + b), and the change that one more copy of each row causes: −H⁻¹ · gradient."""
    z = logits.astype(np.float64)
    z = np.where(z > -np.inf, z, 0.0)  # an absent option has probability 0, so its value has no effect
    p = NUMPY.softmax(calibrator(logits).astype(np.float64))
    n, classes = z.shape
    gap = p.copy()
    gap[np.arange(n), labels] -= 1
    mean = (p * z).sum(axis=1)
    variance = float(((p * z * z).sum(axis=1) - mean**2).sum())
    slope = (gap * z).sum(axis=1, keepdims=True)
    if not biased:
        beta = 1 / float(cast("Temperature", calibrator).temperature)
        return np.array([beta]), -slope / max(variance, 1e-12)
    gradient = np.concatenate([slope, gap], axis=1)
    hessian = np.zeros((classes + 1, classes + 1))
    hessian[0, 0] = variance
    hessian[0, 1:] = hessian[1:, 0] = (p * (z - mean[:, None])).sum(axis=0)
    hessian[1:, 1:] = np.diag(p.sum(axis=0)) - p.T @ p
    # Two directions have no curvature: a constant added to the bias, and the bias of a class without rows.
    hessian[1:, 1:] += 1.0 / classes + 1e-3 * np.eye(classes)
    fitted = cast("Any", calibrator)
    parameters = np.concatenate([[float(fitted.weight[0])], np.asarray(fitted.bias)])
    return parameters, -np.linalg.solve(hessian, gradient.T).T
