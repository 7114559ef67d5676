"""Variance scaling: one factor on every standard deviation."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from trueup.calibrators.regression.base import Recalibrator, standardised
from trueup.core.optimize import warn_at_bound

LEAST = 1e-12
"""The scale where every target is its mean, so that a likelihood remains."""


class VarianceScaling(Recalibrator):
    """Multiply every standard deviation by one number: N(μ, s²σ²).

    By likelihood s² = mean of ((y − μ)/σ)². The means stay, and so does the order of the doubts. Not for forecasts that
    are biased, skewed or long-tailed.
    Laves et al., "Well-calibrated regression uncertainty in medical imaging with deep learning" (2020).

    >>> import numpy as np
    >>> scaling = VarianceScaling.fit([0.0, 0.0, 1.0], [1.0, 1.0, 2.0], [3.0, -1.0, 5.0])
    >>> scaling
    VarianceScaling(scale=2.16025)
    >>> mean, std = scaling(np.array([0.5]), np.array([2.0]))
    >>> mean, std.round(4)
    (array([0.5]), array([4.3205]))
    >>> [f"{end.item():.4f}" for end in scaling.interval([0.5], [2.0], level=0.9)]
    ['-6.6066', '7.6066']
    """

    scale: Tensor

    def __init__(self, scale: Tensor | float) -> None:
        super().__init__()
        self.keep("scale", scale)
        if not (self.scale.ndim == 0 and self.scale > 0 and torch.isfinite(self.scale)):
            raise ValueError(f"scale must be one positive number, got {scale}")

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any) -> Self:
        """Minimise the Gaussian negative log-likelihood: s is the root mean square of (y − μ)/σ."""
        z = np.abs(standardised(mean, std, targets, at_least=1))
        largest = float(z.max())
        if largest == 0:
            warn_at_bound("scale", LEAST, "every target is its mean")
            return cls(LEAST)
        return cls(largest * math.sqrt(float(np.mean((z / largest) ** 2))))  # no overflow in the squares

    def standard_quantiles(self, levels: np.ndarray) -> np.ndarray:
        """s·Φ⁻¹(q)."""
        z: np.ndarray = float(self.scale) * ndtri(levels)
        return z

    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """Φ(z/s)."""
        shares: np.ndarray = ndtr(z / float(self.scale))
        return shares

    def moments(self) -> tuple[float, float]:
        """0 and s."""
        return 0.0, float(self.scale)
