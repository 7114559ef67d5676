"""What a recalibrator is: a law of (Y − μ)/σ, fitted, to put in the place of the standard normal one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from trueup.core.arrays import as_vector, match_kind, upcast_half
from trueup.core.module import ParametricModule


class Recalibrator(ParametricModule):
    """A forecast N(μ, σ²) becomes the law of μ + σZ; the constructor takes the parameters of Z, `fit` estimates them.

    Calling it maps (μ, σ) to the mean and the standard deviation of that law. NumPy in, NumPy out; torch in, torch out;
    dtype out = dtype in. Quantiles and probabilities are computed in float64.
    """

    @abstractmethod
    def standard_quantiles(self, levels: np.ndarray) -> np.ndarray:
        """The z that Z stays below with each probability; −∞ and ∞ at 0 and 1."""

    @abstractmethod
    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """The probability that Z ≤ z."""

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """The mean and the standard deviation of Z."""

    def __call__(self, mean: Any, std: Any) -> Any:
        """Map the means and standard deviations of forecasts, two arrays of one shape."""
        if isinstance(mean, Tensor) and isinstance(std, Tensor):
            return super().__call__(mean, std)
        m, s = _forecast(mean, std)
        return tuple(match_kind(x, mean) for x in super().__call__(_back(m, mean), _back(s, std)))

    def forward(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """μ + σ·E[Z] and σ·std(Z), for tensors of any one shape."""
        if mean.shape != std.shape:
            raise ValueError(f"std must have the shape of mean, {tuple(mean.shape)}, got {tuple(std.shape)}")
        centre, scale = self.moments()
        m, s = upcast_half(mean), upcast_half(std)
        return (m + centre * s).to(mean.dtype), (scale * s).to(std.dtype)

    def levels(self, levels: Any) -> Any:
        """At which level of the forecast to read the quantile of each calibrated level: Φ(Q(q)), Q being Z's."""
        q = as_levels(levels)
        return match_kind(_back(torch.from_numpy(ndtr(self.standard_quantiles(q))), levels), levels)

    def quantiles(self, mean: Any, std: Any, *, levels: Any) -> Any:
        """The calibrated quantiles μ + σ·Q(q), (n, levels)."""
        m, s = _forecast(mean, std)
        z = self.standard_quantiles(as_levels(levels))
        return match_kind(_back(m[:, None] + _times(s[:, None], torch.from_numpy(z)), mean), mean)

    def interval(self, mean: Any, std: Any, *, level: float = 0.95) -> Any:
        """The ends (low, high) of the interval that leaves (1 − level)/2 on either side."""
        level = float(as_levels([level], "level")[0])
        ends = self.quantiles(mean, std, levels=[(1 - level) / 2, (1 + level) / 2])
        return ends[:, 0], ends[:, 1]

    def probabilities(self, mean: Any, std: Any, targets: Any) -> Any:
        """P(Y ≤ y) of each target; uniform on [0, 1] when the forecasts are calibrated. `std` must be positive."""
        z = standardised(mean, std, targets)
        return match_kind(_back(torch.from_numpy(self.standard_shares(z)), mean), mean)


def standardised(mean: Any, std: Any, targets: Any, *, at_least: int = 0) -> np.ndarray:
    """z = (y − μ)/σ of each row, in float64; σ must be positive, for no scale makes up for a σ of zero."""
    m, s = _forecast(mean, std)
    y = as_vector(targets, "targets", length=len(m))
    if len(m) < at_least:
        raise ValueError(f"mean must have at least {at_least} rows, got {len(m)}")
    if len(s) and float(s.min()) == 0:
        raise ValueError(f"std must be positive, got 0 at [{int(s.argmin())}]")
    z = ((y - m) / s).numpy()
    if not np.isfinite(z).all():
        at = int(np.flatnonzero(~np.isfinite(z))[0])
        raise ValueError(f"std must not vanish beside targets − mean, got {s[at]:g} for {y[at] - m[at]:g} at [{at}]")
    return z


def as_levels(levels: Any, name: str = "levels") -> np.ndarray:
    """Check probabilities (m,)."""
    q: np.ndarray = as_vector(levels, name).numpy()
    if len(q) and (q.min() < 0 or q.max() > 1):
        raise ValueError(f"{name} must lie in [0, 1], got {q.min():g}..{q.max():g}")
    return q


def _forecast(mean: Any, std: Any) -> tuple[Tensor, Tensor]:
    m = as_vector(mean, "mean")
    s = as_vector(std, "std", length=len(m))
    if len(s) and float(s.min()) < 0:
        raise ValueError(f"std must not be negative, got {s.min():g} at [{int(s.argmin())}]")
    return m, s


def _back(x: Tensor, original: Any) -> Tensor:
    """To the floating type and the device of what was given; float64 for lists and whole numbers."""
    given = original if isinstance(original, Tensor) else torch.from_numpy(np.zeros(0, _dtype(original)))
    return x.to(given.device, given.dtype) if given.is_floating_point() else x.to(given.device)


def _dtype(original: Any) -> np.dtype[Any]:
    return original.dtype.newbyteorder("=") if isinstance(original, np.ndarray) else np.dtype(np.float64)


def _times(s: Tensor, z: Tensor) -> Tensor:
    """σ·z, where a certain forecast stays certain at every level: 0·∞ = 0."""
    return torch.where(s == 0, 0.0, s * z)
