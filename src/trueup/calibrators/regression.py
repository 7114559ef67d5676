"""Recalibration of Gaussian forecasts N(μ, σ²): maps of (μ, σ) and of quantile levels, each with its `fit`."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Self

import numpy as np
import torch
from scipy.special import erfcx, log_ndtr, ndtr, ndtri, ndtri_exp
from torch import Tensor

from trueup.core.arrays import as_vector, as_weights, effective_rows, match_kind, upcast_half
from trueup.core.module import ParametricModule
from trueup.core.optimize import warn_at_bound

__all__ = ["IsotonicQuantiles", "QuantilesAt", "Recalibrator", "VarianceScaling"]

_LEAST_SCALE = 1e-12
"""The scale where every target is its mean, so that a likelihood remains."""


class Recalibrator(ParametricModule):
    """A forecast N(μ, σ²) becomes the law of μ + σZ; the constructor takes the parameters of Z, `fit` estimates them.

    Calling it maps (μ, σ) to the mean and the standard deviation of that law. NumPy in, NumPy out; torch in, torch out;
    dtype out = dtype in. Quantiles and probabilities are computed in float64. `at_levels` is the module that gives
    quantiles, to put behind a network or to export.
    """

    _moments: Tensor

    def _keep_moments(self) -> None:
        self.register_buffer("_moments", torch.tensor(self.moments(), dtype=torch.float64), persistent=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._keep_moments()

    def at_levels(self, levels: Any) -> QuantilesAt:
        """The module from (μ, σ) to the calibrated quantiles of these levels.

        >>> VarianceScaling(2.0).at_levels([0.1, 0.5])(torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([[-1.5631,  1.0000]])
        """
        q = _check_levels(levels)
        if len(q) and (q.min() <= 0 or q.max() >= 1):
            raise ValueError(f"levels must lie between 0 and 1, got {q.min():g}..{q.max():g}")
        return QuantilesAt(q, self.standard_quantiles(q))

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
        return tuple(match_kind(x, mean) for x in super().__call__(_restore(m, mean), _restore(s, std)))

    def forward(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """μ + σ·E[Z] and σ·std(Z), for tensors of any one shape."""
        if mean.shape != std.shape:
            raise ValueError(f"std must have the shape of mean, {tuple(mean.shape)}, got {tuple(std.shape)}")
        m, s = upcast_half(mean), upcast_half(std)
        centre, scale = self._moments.to(m.dtype)  # a buffer, so that exporters see a constant
        return (m + centre * s).to(mean.dtype), (scale * s).to(std.dtype)

    def levels(self, levels: Any) -> Any:
        """At which level of the forecast to read the quantile of each calibrated level: Φ(Q(q)), Q being Z's."""
        q = _check_levels(levels)
        return match_kind(_restore(torch.from_numpy(ndtr(self.standard_quantiles(q))), levels), levels)

    def quantiles(self, mean: Any, std: Any, *, levels: Any) -> Any:
        """The calibrated quantiles μ + σ·Q(q), (n, levels)."""
        m, s = _forecast(mean, std)
        z = self.standard_quantiles(_check_levels(levels))
        return match_kind(_restore(m[:, None] + _scale_quantile(s[:, None], torch.from_numpy(z)), mean), mean)

    def interval(self, mean: Any, std: Any, *, level: float = 0.95) -> Any:
        """The ends (low, high) of the interval that leaves (1 − level)/2 on either side."""
        level = float(_check_levels([level], "level")[0])
        ends = self.quantiles(mean, std, levels=[(1 - level) / 2, (1 + level) / 2])
        return ends[:, 0], ends[:, 1]

    def probabilities(self, mean: Any, std: Any, targets: Any) -> Any:
        """P(Y ≤ y) of each target; uniform on [0, 1] when the forecasts are calibrated. `std` must be positive."""
        z = _standardise(mean, std, targets)
        return match_kind(_restore(torch.from_numpy(self.standard_shares(z)), mean), mean)


class QuantilesAt(ParametricModule):
    """From means and standard deviations to quantiles of fixed levels: μ + σ·z, with one z for each level."""

    levels: Tensor
    z: Tensor

    def __init__(self, levels: Any, z: Any) -> None:
        super().__init__()
        self.keep("levels", levels)
        self.keep("z", z)

    def forward(self, mean: Tensor, std: Tensor) -> Tensor:
        """Quantiles (…, levels) of forecasts of any one shape."""
        m, s = upcast_half(mean)[..., None], upcast_half(std)[..., None]
        return (m + s * self.z.to(m.dtype)).to(mean.dtype)


class VarianceScaling(Recalibrator):
    """Multiply every standard deviation by one number: N(μ, s²σ²).

    By likelihood s² = mean of ((y − μ)/σ)². The means and the order of the uncertainties stay. Not for forecasts that
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
        self._keep_moments()

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any, *, weights: Any = None) -> Self:
        """Minimise the Gaussian negative log-likelihood: s is the root mean square of (y − μ)/σ."""
        z = np.abs(_standardise(mean, std, targets, at_least=1))
        w = as_weights(weights, len(z))
        largest = float(z.max())
        if largest == 0:
            warn_at_bound("scale", _LEAST_SCALE, "every target is its mean")
            return cls(_LEAST_SCALE)
        return cls(largest * math.sqrt(float(np.average((z / largest) ** 2, weights=w))))  # no overflow in the squares

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
        self._keep_moments()

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any, *, weights: Any = None) -> Self:
        """Take the shares of (y − μ)/σ that lie below each of them; of equal ones the first and the last."""
        z = _standardise(mean, std, targets, at_least=1)
        w = as_weights(weights, len(z))
        if w is None:
            z, share = np.sort(z), np.arange(1, len(z) + 1) / (len(z) + 1)
        else:
            order = np.argsort(z)
            order = order[w[order] > 0]
            z, total = z[order], np.cumsum(w[order])
            share = total / (total[-1] * (1 + 1 / effective_rows(w, len(w))))
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


def _standardise(mean: Any, std: Any, targets: Any, *, at_least: int = 0) -> np.ndarray:
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


def _check_levels(levels: Any, name: str = "levels") -> np.ndarray:
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


def _restore(x: Tensor, original: Any) -> Tensor:
    """To the floating type and the device of what was given; float64 for lists and whole numbers."""
    given = original if isinstance(original, Tensor) else torch.from_numpy(np.zeros(0, _dtype(original)))
    return x.to(given.device, given.dtype) if given.is_floating_point() else x.to(given.device)


def _dtype(original: Any) -> np.dtype[Any]:
    return original.dtype.newbyteorder("=") if isinstance(original, np.ndarray) else np.dtype(np.float64)


def _scale_quantile(s: Tensor, z: Tensor) -> Tensor:
    """σ·z, where a certain forecast stays certain at every level: 0·∞ = 0."""
    return torch.where(s == 0, 0.0, s * z)


def _tail(a: float) -> tuple[float, float]:
    """E[Z − a | Z > a] and E[(Z − a)² | Z > a] of a standard normal Z."""
    if a > 1e3:  # the differences below lose their digits; the tail is an exponential one by then
        return 1 / a, 2 / a**2
    over = math.sqrt(2 / math.pi) / float(erfcx(a / math.sqrt(2))) - a
    return over, max(1 - a * over, 0.0)
