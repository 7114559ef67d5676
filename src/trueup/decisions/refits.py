"""Calibrators fitted to resamples of the labelled rows, which carry their uncertainty into what follows.

Temperature scaling with or without a bias is refitted by one Newton step from the fit to all rows, which is as good as
a new fit to first order and costs one product of matrices; other methods are fitted anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.linear import Vector
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import take_rows, upcast_half
from trueup.registry import METHODS

Fit = Callable[..., Calibrator]


class Resample(NamedTuple):
    """A calibrator of resampled rows, and which rows they were."""

    calibrator: Calibrator
    rows: np.ndarray


class Refits:
    """A method, its fit to labelled rows, and fits to resamples of them."""

    def __init__(self, method: str | Fit, logits: Tensor, labels: Tensor) -> None:
        self.fit: Fit = METHODS[method] if isinstance(method, str) else method
        self.pair = logits, labels
        self.calibrator = self.fit(logits, labels)
        kind = method if isinstance(method, str) else ""
        self.steps: tuple[np.ndarray, np.ndarray] | None = None
        if kind in ("temperature", "bias_corrected_temperature"):
            self.steps = _newton(self.calibrator, logits, labels, biased=kind != "temperature")

    def draw(self, rng: np.random.Generator) -> Resample:
        """Fit to rows drawn with replacement."""
        n = len(self.pair[0])
        rows = rng.integers(0, n, n)
        if self.steps is None:
            part = take_rows(*self.pair, torch.from_numpy(rows).to(self.pair[0].device))
            return Resample(self.fit(*part), rows)
        parameters, influence = self.steps
        moved = parameters + np.bincount(rows, minlength=n) @ influence
        beta = max(float(moved[0]), 1e-6)
        if len(moved) == 1:
            return Resample(Temperature(1 / beta), rows)
        classes = len(moved) - 1
        return Resample(Vector(torch.full((classes,), beta), torch.from_numpy(moved[1:] - moved[1:].mean())), rows)


def _newton(calibrator: Any, logits: Tensor, labels: Tensor, *, biased: bool) -> tuple[np.ndarray, np.ndarray]:
    """(β, b) of softmax(βz + b), and by how much each row moves them: −H⁻¹ times its gradient."""
    z = upcast_half(logits).double().cpu().numpy()
    z = np.where(z > -np.inf, z, 0.0)  # an absent option has no probability, whatever stands here
    p = torch.softmax(upcast_half(calibrator(logits)).double(), dim=1).cpu().numpy()
    n, classes = z.shape
    gap = p.copy()
    gap[np.arange(n), labels.cpu().numpy()] -= 1
    mean = (p * z).sum(axis=1)
    variance = float(((p * z * z).sum(axis=1) - mean**2).sum())
    slope = (gap * z).sum(axis=1, keepdims=True)
    if not biased:
        beta = 1 / float(calibrator.temperature)
        return np.array([beta]), -slope / max(variance, 1e-12)
    gradient = np.concatenate([slope, gap], axis=1)
    hessian = np.zeros((classes + 1, classes + 1))
    hessian[0, 0] = variance
    hessian[0, 1:] = hessian[1:, 0] = (p * (z - mean[:, None])).sum(axis=0)
    hessian[1:, 1:] = np.diag(p.sum(axis=0)) - p.T @ p
    # A constant added to the bias changes nothing, and a class that never occurs has no curvature.
    hessian[1:, 1:] += 1.0 / classes + 1e-3 * np.eye(classes)
    parameters = np.concatenate([[float(calibrator.weight[0])], calibrator.bias.cpu().numpy()])
    return parameters, -np.linalg.solve(hessian, gradient.T).T
