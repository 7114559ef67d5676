"""Isotonic quantile recalibration: read each quantile at the level that has held in the past."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch
from scipy.special import erfcx, log_ndtr, ndtri_exp
from torch import Tensor

from trueup.calibrators.regression.base import Recalibrator, standardised


class IsotonicQuantiles(Recalibrator):
    """Read the quantile of level q at the level R⁻¹(q) of the forecast: μ + σ·Φ⁻¹(R⁻¹(q)).

    R is the empirical distribution function of u = Φ((y − μ)/σ), non-decreasing by itself. At the i-th smallest of n it
    is i/(n+1), the chance that a next u is below, so that levels near 1 stay open. The knots are kept as z = Φ⁻¹(u),
    since in u everything beyond 8σ would be one; R is straight in z between them, and beyond them, where it has seen
    nothing, straight in u: the tails of the Gaussian, scaled to the share 1/(n+1) that is left to each.
    Not for fewer than some ten samples for each quantile that matters.
    Kuleshov, Fenner and Ermon, "Accurate uncertainties for deep learning using calibrated regression" (2018).

    >>> import numpy as np
    >>> recalibrated = IsotonicQuantiles.fit(np.zeros(9), np.ones(9), np.arange(-2.0, 7.0))
    >>> recalibrated.quantiles([10.0], [2.0], levels=[0.1, 0.5, 0.85])
    array([[ 6., 14., 21.]])
    >>> recalibrated.levels(np.array([0.1, 0.5])).round(4)
    array([0.0228, 0.9772])
    >>> mean, std = recalibrated([10.0], [2.0])
    >>> mean.round(4), std.round(4)
    (array([13.9571]), array([5.6291]))
    """

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any) -> None:
        super().__init__()
        self.keep("knots", knots)
        self.keep("values", values)
        if self.knots.ndim != 1 or not len(self.knots) or self.knots.shape != self.values.shape:
            shapes = tuple(self.knots.shape), tuple(self.values.shape)
            raise ValueError(f"knots and values must be two vectors of one length, got {shapes[0]} and {shapes[1]}")
        if not bool(torch.isfinite(self.knots).all()) or bool((self.knots.diff() < 0).any()):
            raise ValueError("knots must be finite and in order")
        rising = torch.cat([torch.zeros(1), self.values.cpu(), torch.ones(1)]).diff() > 0
        if not bool(rising.all()):
            raise ValueError("values must rise, strictly between 0 and 1")

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any) -> Self:
        """Take the shares of (y − μ)/σ that lie below each of them; of equal ones the first and the last."""
        z = np.sort(standardised(mean, std, targets, at_least=1))
        share = np.arange(1, len(z) + 1) / (len(z) + 1)
        new = np.diff(z, prepend=-np.inf) > 0
        kept = new | np.append(new[1:], True)
        return cls(z[kept], share[kept])

    def standard_quantiles(self, levels: np.ndarray) -> np.ndarray:
        """R⁻¹, on the scale of z."""
        knots, values = self._curve()
        z = np.interp(levels, values, knots)
        with np.errstate(divide="ignore"):  # log 0 at the levels 0 and 1
            below, above = levels < values[0], levels > values[-1]
            z[below] = ndtri_exp(np.log(levels[below] / values[0]) + log_ndtr(knots[0]))
            z[above] = -ndtri_exp(np.log((1 - levels[above]) / (1 - values[-1])) + log_ndtr(-knots[-1]))
        return z

    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """R, on the scale of z; at a knot that holds several values, the highest."""
        knots, values = self._curve()
        at = np.searchsorted(knots, z, side="right")
        left, right = np.clip(at - 1, 0, None), np.clip(at, None, len(knots) - 1)
        gap = np.where(right > left, knots[right] - knots[left], 1.0)
        shares = values[left] + (values[right] - values[left]) * np.clip((z - knots[left]) / gap, 0, 1)
        below, above = at == 0, at == len(knots)
        shares[below] = values[0] * np.exp(log_ndtr(z[below]) - log_ndtr(knots[0]))
        shares[above] = 1 - (1 - values[-1]) * np.exp(log_ndtr(-z[above]) - log_ndtr(-knots[-1]))
        return shares

    def moments(self) -> tuple[float, float]:
        """The mean and the standard deviation of the density that R has: steps between the knots, and two tails."""
        knots, values = self._curve()
        low, high, mass = knots[:-1], knots[1:], np.diff(values)
        # Around a point inside, so that knots far from zero keep their digits.
        centre = float(mass @ (low + high) / 2 + values[0] * knots[0] + (1 - values[-1]) * knots[-1])
        a, b = low - centre, high - centre
        parts = [(mass, (a + b) / 2, (a * a + a * b + b * b) / 3)]
        for share, end, sign in ((values[0], -knots[0], -1), (1 - values[-1], knots[-1], 1)):
            over, square = _tail(float(end))
            d = sign * end - centre
            parts.append((share, d + sign * over, d * d + 2 * d * sign * over + square))
        first, second = (float(sum(np.sum(part[0] * part[k]) for part in parts)) for k in (1, 2))
        return centre + first, math.sqrt(max(second - first**2, 0.0))

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        return self.knots.cpu().numpy(), self.values.cpu().numpy()


def _tail(a: float) -> tuple[float, float]:
    """E[Z − a | Z > a] and E[(Z − a)² | Z > a] of a standard normal Z."""
    if a > 1e3:  # the differences below lose their digits; the tail is an exponential one by then
        return 1 / a, 2 / a**2
    over = math.sqrt(2 / math.pi) / float(erfcx(a / math.sqrt(2))) - a
    return over, max(1 - a * over, 0.0)
