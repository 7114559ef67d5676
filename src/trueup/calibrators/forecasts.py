"""Recalibration of Gaussian forecasts N(μ, σ²): maps of (μ, σ), maps of quantile levels, and the choice of one."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr, ndtri, ndtri_exp

from trueup._core.arrays import as_vector, as_weights, effective_rows, match_kind
from trueup._core.clusters import as_clusters, block_sums, mean_error
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY, Namespace, namespace_of
from trueup._core.optimize import warn_at_bound
from trueup._core.registry import FORECAST_METHODS
from trueup._core.splits import cluster_folds, stratified_folds
from trueup._core.tally import Mean
from trueup._core.types import Array, ArrayLike, ArrayT, WeightsLike
from trueup._core.values import Value
from trueup.metrics.forecasts import LEVELS, GaussianForecast, check_forecast, scaled_pinball

_MIN_SCALE = 1e-12  # scale used if every target equals its mean, so that the likelihood stays finite.


class ForecastMap(Value):
    """A fitted map of means and standard deviations; the output is the same kind of array, with the input's dtype."""

    def __call__(self, mean: ArrayT, std: ArrayLike) -> Any:
        """Map the means and standard deviations of forecasts, two arrays of one shape."""
        xp = namespace_of(mean)
        if xp is not None and not xp.is_numpy and namespace_of(std) is xp:
            return self.bind(xp, mean).forward(xp, mean, std)
        mapped = self.forward(NUMPY, *_forecast(mean, std))
        if isinstance(mapped, tuple):
            return tuple(match_kind(_cast(x, original), mean) for x, original in zip(mapped, (mean, std), strict=True))
        return match_kind(_cast(mapped, mean), mean)

    @abstractmethod
    def forward(self, xp: Namespace, mean: Array, std: Array) -> Array:
        """Map arrays of the namespace, of any shape."""


class Recalibrator(ForecastMap):
    """A map from a forecast N(μ, σ²) to the distribution of μ + σZ.

    The constructor takes the parameters of Z, and `fit` estimates them. Calling the map on (μ, σ) returns the mean and
    the standard deviation of μ + σZ. Quantiles and probabilities are computed in float64. `at_levels` returns a map to
    quantiles that can be placed behind a network or exported.
    """

    def at_levels(self, levels: ArrayLike) -> QuantilesAt:
        """Return the map from (μ, σ) to the calibrated quantiles of these levels.

        Parameters
        ----------
        levels
            Levels between 0 and 1, shape (levels,).

        Returns
        -------
        QuantilesAt
            The map.

        Examples
        --------
        >>> VarianceScaling(2.0).at_levels([0.1, 0.5])([1.0], [1.0]).round(4)
        array([[-1.5631,  1.    ]])
        """
        q = _check_levels(levels)
        if len(q) and (q.min() <= 0 or q.max() >= 1):
            raise ValueError(f"levels must lie between 0 and 1, got {q.min():g}..{q.max():g}")
        return QuantilesAt(q, self.standard_quantiles(q))

    @abstractmethod
    def standard_quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Return the quantiles of Z at these levels; −∞ and ∞ at 0 and 1.

        Parameters
        ----------
        levels
            Levels in [0, 1].

        Returns
        -------
        ndarray
            The quantiles.
        """

    @abstractmethod
    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """Return the probability that Z ≤ z.

        Parameters
        ----------
        z
            Values of Z.

        Returns
        -------
        ndarray
            The probabilities.
        """

    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Return the mean and the standard deviation of Z."""

    def forward(self, xp: Namespace, mean: Array, std: Array) -> tuple[Array, Array]:
        """Return μ + σ·E[Z] and σ·std(Z), for arrays of any shape."""
        if mean.shape != std.shape:
            raise ValueError(f"std must have the shape of mean, {tuple(mean.shape)}, got {tuple(std.shape)}")
        centre, scale = self.moments()
        m, s = xp.upcast_half(mean), xp.upcast_half(std)
        return xp.astype(m + centre * s, mean.dtype), xp.astype(scale * s, std.dtype)

    def levels(self, levels: ArrayT) -> ArrayT:
        """Return the forecast's levels that have the calibrated quantiles of these levels: Φ(Q(q)), Q that of Z.

        Parameters
        ----------
        levels
            Calibrated levels from 0 to 1, shape (levels,).

        Returns
        -------
        array
            Levels of the forecast, shape (levels,).
        """
        q = _check_levels(levels)
        return match_kind(_cast(ndtr(self.standard_quantiles(q)), levels), levels)

    def quantiles(self, mean: ArrayT, std: ArrayLike, *, levels: ArrayLike) -> ArrayT:
        """Return the calibrated quantiles μ + σ·Q(q).

        Parameters
        ----------
        mean
            Means of the forecasts, shape (n,).
        std
            Standard deviations, shape (n,).
        levels
            Levels from 0 to 1, shape (levels,).

        Returns
        -------
        array
            Quantiles, shape (n, levels).
        """
        m, s = (x[:, None] for x in _forecast(mean, std))
        z = self.standard_quantiles(_check_levels(levels))
        with np.errstate(invalid="ignore"):
            spread = np.where(s == 0, 0.0, s * z)  # a forecast without spread has none at any level: 0·∞ = 0
        return match_kind(_cast(m + spread, mean), mean)

    def interval(self, mean: ArrayT, std: ArrayLike, *, level: float = 0.95) -> tuple[ArrayT, ArrayT]:
        """Return the ends of central intervals, which leave (1 − level)/2 on either side.

        Parameters
        ----------
        mean
            Means of the forecasts, shape (n,).
        std
            Standard deviations, shape (n,).
        level
            Probability of the interval.

        Returns
        -------
        tuple of arrays
            Lower and upper ends, shape (n,) each.
        """
        level = float(_check_levels([level], "level")[0])
        ends: Any = self.quantiles(mean, std, levels=[(1 - level) / 2, (1 + level) / 2])
        return ends[:, 0], ends[:, 1]

    def probabilities(self, mean: ArrayT, std: ArrayLike, targets: ArrayLike) -> ArrayT:
        """Return P(Y ≤ y) of each target; these are uniform on [0, 1] if the forecasts are calibrated.

        Parameters
        ----------
        mean
            Means of the forecasts, shape (n,).
        std
            Standard deviations, all positive, shape (n,).
        targets
            Observed values, shape (n,).

        Returns
        -------
        array
            Probabilities, shape (n,).
        """
        return match_kind(_cast(self.standard_shares(_standardise(mean, std, targets)), mean), mean)


class QuantilesAt(ForecastMap):
    """A map from means and standard deviations to quantiles of fixed levels: μ + σ·z, with one z per level.

    Parameters
    ----------
    levels
        The levels, shape (levels,).
    z
        Calibrated quantile of (Y − μ)/σ at each level, shape (levels,).
    """

    levels: np.ndarray
    z: np.ndarray

    def __init__(self, levels: ArrayLike, z: ArrayLike) -> None:
        self.set_parameters(levels=levels, z=z)

    def forward(self, xp: Namespace, mean: Array, std: Array) -> Array:
        """Return quantiles (…, levels) of forecasts of any shape."""
        m, s = xp.upcast_half(mean)[..., None], xp.upcast_half(std)[..., None]
        return xp.astype(m + s * xp.astype(self.z, m.dtype), mean.dtype)


class VarianceScaling(Recalibrator):
    """Multiply every standard deviation by one number: N(μ, s²σ²).

    By likelihood s² is the mean of ((y − μ)/σ)². The means and the ranking of the uncertainties stay.
    Not for forecasts that are biased, skewed or long-tailed.

    Parameters
    ----------
    scale
        The factor s > 0.

    Examples
    --------
    >>> import numpy as np
    >>> scaling = VarianceScaling.fit([0.0, 0.0, 1.0], [1.0, 1.0, 2.0], [3.0, -1.0, 5.0])
    >>> scaling
    VarianceScaling(scale=2.16025)
    >>> mean, std = scaling(np.array([0.5]), np.array([2.0]))
    >>> mean, std.round(4)
    (array([0.5]), array([4.3205]))
    >>> [f"{end.item():.4f}" for end in scaling.interval([0.5], [2.0], level=0.9)]
    ['-6.6066', '7.6066']

    References
    ----------
    Laves et al., "Well-calibrated regression uncertainty in medical imaging with deep learning" (2020), PMLR 121.
    """

    scale: float

    def __init__(self, scale: float) -> None:
        self.set_parameters(scale=scale)
        if np.ndim(self.scale) or not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be one positive number, got {scale}")

    @classmethod
    def fit(cls, mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Minimise the Gaussian negative log-likelihood: s is the root mean square of (y − μ)/σ.

        Parameters
        ----------
        mean
            Means of the forecasts, shape (n,).
        std
            Standard deviations, all positive, shape (n,).
        targets
            Observed values, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z = np.abs(_standardise(mean, std, targets, min_rows=1))
        w = as_weights(sample_weight, len(z))
        largest = float(z.max())
        if largest == 0:
            warn_at_bound("scale", _MIN_SCALE, "every target is its mean")
            return cls(_MIN_SCALE)
        return cls(largest * math.sqrt(float(np.average((z / largest) ** 2, weights=w))))  # the squares do not overflow

    def standard_quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Return s·Φ⁻¹(q)."""
        return np.asarray(self.scale * ndtri(levels))

    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """Return Φ(z/s)."""
        return np.asarray(ndtr(z / self.scale))

    def moments(self) -> tuple[float, float]:
        """Return 0 and s."""
        return 0.0, self.scale


class IsotonicQuantiles(Recalibrator):
    """Read the quantile of level q at the level R⁻¹(q) of the forecast: μ + σ·Φ⁻¹(R⁻¹(q)).

    R is the empirical distribution function of u = Φ((y − μ)/σ), which is isotonic. At the i-th smallest of n values it
    is i/(n+1), the probability that the next u lies below; levels near 1 then stay finite. Knots are stored as z =
    Φ⁻¹(u), because u rounds to one beyond 8σ. Between the knots R is linear in z. Beyond them, where there are no data,
    it follows the Gaussian tails, scaled to the remaining probability 1/(n+1) on each side. Not for fewer than about
    ten samples per quantile of interest.

    Parameters
    ----------
    knots
        Ascending values of (y − μ)/σ, shape (knots,).
    values
        R at the knots, ascending between 0 and 1, shape (knots,).

    Examples
    --------
    >>> import numpy as np
    >>> recalibrated = IsotonicQuantiles.fit(np.zeros(9), np.ones(9), np.arange(-2.0, 7.0))
    >>> recalibrated.quantiles([10.0], [2.0], levels=[0.1, 0.5, 0.85])
    array([[ 6., 14., 21.]])
    >>> recalibrated.levels(np.array([0.1, 0.5])).round(4)
    array([0.0228, 0.9772])
    >>> mean, std = recalibrated([10.0], [2.0])
    >>> mean.round(4), std.round(4)
    (array([13.9571]), array([5.6291]))

    References
    ----------
    Kuleshov, Fenner & Ermon, "Accurate uncertainties for deep learning using calibrated regression" (2018),
    arXiv:1807.00263.
    """

    knots: np.ndarray
    values: np.ndarray
    mean_and_std: np.ndarray
    """The mean and the standard deviation of Z."""

    def __init__(self, knots: ArrayLike, values: ArrayLike) -> None:
        self.set_parameters(knots=knots, values=values)
        shapes = np.shape(self.knots), np.shape(self.values)
        if len(shapes[0]) != 1 or not len(self.knots) or shapes[0] != shapes[1]:
            raise ValueError(f"knots and values must be two vectors of one length, got {shapes[0]} and {shapes[1]}")
        if not np.isfinite(self.knots).all() or (np.diff(self.knots) < 0).any():
            raise ValueError("knots must be finite and in order")
        if not (np.diff(self.values, prepend=0.0, append=1.0) > 0).all():
            raise ValueError("values must be strictly ascending between 0 and 1")
        self.set_parameters(mean_and_std=_moments(self.knots, self.values))

    @classmethod
    def fit(cls, mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Take the empirical distribution function of (y − μ)/σ; equal values keep their first and last knot.

        Parameters
        ----------
        mean
            Means of the forecasts, shape (n,).
        std
            Standard deviations, all positive, shape (n,).
        targets
            Observed values, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z = _standardise(mean, std, targets, min_rows=1)
        w = as_weights(sample_weight, len(z))
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
        """Return R⁻¹ on the scale of z."""
        knots, values = self.knots, self.values
        z = np.interp(levels, values, knots)
        with np.errstate(divide="ignore"):  # log 0 at the levels 0 and 1
            below, above = levels < values[0], levels > values[-1]
            z[below] = ndtri_exp(np.log(levels[below] / values[0]) + log_ndtr(knots[0]))
            z[above] = -ndtri_exp(np.log((1 - levels[above]) / (1 - values[-1])) + log_ndtr(-knots[-1]))
        return z

    def standard_shares(self, z: np.ndarray) -> np.ndarray:
        """Return R on the scale of z; at a knot with several values, the highest."""
        knots, values = self.knots, self.values
        at = np.searchsorted(knots, z, side="right")
        left, right = np.clip(at - 1, 0, None), np.clip(at, None, len(knots) - 1)
        gap = np.where(right > left, knots[right] - knots[left], 1.0)
        shares = values[left] + (values[right] - values[left]) * np.clip((z - knots[left]) / gap, 0, 1)
        below, above = at == 0, at == len(knots)
        shares[below] = values[0] * np.exp(log_ndtr(z[below]) - log_ndtr(knots[0]))
        shares[above] = 1 - (1 - values[-1]) * np.exp(log_ndtr(-z[above]) - log_ndtr(-knots[-1]))
        return shares

    def moments(self) -> tuple[float, float]:
        """Return the moments of R's density: steps between the knots, and two tails."""
        return self.mean_and_std[0], self.mean_and_std[1]


def _moments(knots: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the mean and standard deviation of the distribution with these quantiles and Gaussian tails."""
    low, high, mass = knots[:-1], knots[1:], np.diff(values)
    # Relative to a central point, so that knots far from zero keep their digits.
    centre = float(mass @ (low + high) / 2 + values[0] * knots[0] + (1 - values[-1]) * knots[-1])
    a, b = low - centre, high - centre
    parts = [(mass, (a + b) / 2, (a * a + a * b + b * b) / 3)]
    for share, end, sign in ((values[0], -knots[0], -1), (1 - values[-1], knots[-1], 1)):
        over, square = _tail(float(end))
        d = sign * end - centre
        parts.append((share, d + sign * over, d * d + 2 * d * sign * over + square))
    first, second = (float(sum(np.sum(part[0] * part[k]) for part in parts)) for k in (1, 2))
    return centre + first, math.sqrt(max(second - first**2, 0.0))


def _standardise(mean: Any, std: Any, targets: Any, *, min_rows: int = 0) -> np.ndarray:
    """Return z = (y − μ)/σ of each row in float64; σ must be positive."""
    m, s = _forecast(mean, std)
    y = as_vector(targets, "targets", length=len(m))
    if len(m) < min_rows:
        raise ValueError(f"mean must have at least {min_rows} rows, got {len(m)}")
    if len(s) and float(s.min()) == 0:
        raise ValueError(f"std must be positive, got 0 at [{int(s.argmin())}]")
    with np.errstate(over="ignore"):
        z = (y - m) / s
    if not np.isfinite(z).all():
        at = int(np.flatnonzero(~np.isfinite(z))[0])
        raise ValueError(f"std must not vanish against targets − mean, got {s[at]:g} for {y[at] - m[at]:g} at [{at}]")
    return z


def _check_levels(levels: Any, name: str = "levels") -> np.ndarray:
    """Return checked probabilities (m,)."""
    q = as_vector(levels, name)
    if len(q) and (q.min() < 0 or q.max() > 1):
        raise ValueError(f"{name} must lie in [0, 1], got {q.min():g}..{q.max():g}")
    return q


def _forecast(mean: Any, std: Any) -> tuple[np.ndarray, np.ndarray]:
    m = as_vector(mean, "mean")
    s = as_vector(std, "std", length=len(m))
    if len(s) and float(s.min()) < 0:
        raise ValueError(f"std must not be negative, got {s.min():g} at [{int(s.argmin())}]")
    return m, s


def _cast(x: np.ndarray, original: Any) -> np.ndarray:
    """Cast to the floating type of a NumPy array; `match_kind` converts other kinds."""
    floating = isinstance(original, np.ndarray) and original.dtype.kind == "f"
    return x.astype(original.dtype.newbyteorder("=")) if floating else x


def _tail(a: float) -> tuple[float, float]:
    """Return E[Z − a | Z > a] and E[(Z − a)² | Z > a] of a standard normal Z."""
    if a > 1e3:  # the differences below would lose their digits; the tail is nearly exponential
        return 1 / a, 2 / a**2
    over = math.sqrt(2 / math.pi) / float(erfcx(a / math.sqrt(2))) - a
    return over, max(1 - a * over, 0.0)


RAW = "raw"
"""Name of the unchanged forecasts."""


@dataclass(frozen=True, eq=False, repr=False)
class RecalibrationChoice:
    """Result of cross-validation: the chosen recalibration, fitted to all rows, and the others."""

    chosen: str
    """A name of FORECAST_METHODS, or "raw" if none helps."""
    losses: Mapping[str, float]
    """Held-out pinball loss of each candidate, `raw` first."""
    recalibrators: Mapping[str, Recalibrator]
    """Each recalibration, fitted to all rows."""
    bounds: Mapping[str, np.ndarray]
    """Quantiles at `LEVELS` of each candidate and fold in units of σ, shape (folds, levels)."""
    fold: np.ndarray
    """The fold of each row."""

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {loss:.4g}" for name, loss in self.losses.items())
        return f"{self.chosen}{self.why()} (held-out pinball loss: {losses})"

    @property
    def recalibrator(self) -> Recalibrator | None:
        """Return the chosen recalibration; None if the forecasts are best unchanged."""
        return self.recalibrators.get(self.chosen)

    def why(self) -> str:
        """Return why the chosen candidate is not the one with the smallest loss, as the end of a sentence, or "".

        Returns
        -------
        str
            The end of a sentence.

        Examples
        --------
        >>> losses = {"raw": 0.56, "variance": 0.544, "quantiles": 0.542}
        >>> RecalibrationChoice("variance", losses, {}, {}, np.zeros(0)).why()
        ', the simplest within one standard error of the best, quantiles'
        """
        best = min(self.losses, key=self.losses.__getitem__)
        return "" if self.chosen == best else f", the simplest within one standard error of the best, {best}"


def choose_recalibration(
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike,
    *,
    methods: Sequence[str] | None = None,
    sample_weight: WeightsLike = None,
    clusters: ArrayLike | None = None,
    n_folds: int = 5,
) -> RecalibrationChoice:
    """Fit each recalibration on folds, and choose one by the pinball loss of the held-out rows.

    The first of raw, variance and quantiles with a loss within one standard error of the best is chosen.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations, all positive, shape (n,).
    targets
        Observed values, shape (n,).
    methods
        Names in FORECAST_METHODS; all by default.
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.
    clusters
        Cluster of each row, shape (n,), where rows are correlated. Clusters stay in one fold, and the standard error is
        taken over clusters.
    n_folds
        Number of folds.

    Returns
    -------
    RecalibrationChoice
        The choice, with every recalibration fitted to all rows.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> choose_recalibration(np.zeros(500), np.ones(500), 2 * rng.normal(size=500))
    variance (held-out pinball loss: raw 0.622, variance 0.5746, quantiles 0.576)
    """
    forecast = check_forecast(mean, std, targets)
    if not isinstance(forecast, GaussianForecast):
        raise InputError("forecasts", "be means and standard deviations to be recalibrated", "quantiles")
    m, s, y = forecast.mean, forecast.std, forecast.targets
    w = as_weights(sample_weight, len(y))
    if isinstance(n_folds, bool) or int(n_folds) != n_folds or not 2 <= n_folds <= len(y):
        raise InputError("n_folds", f"be a whole number of 2..{len(y)}, the number of rows", repr(n_folds))
    fits = {name: FORECAST_METHODS[name] for name in (FORECAST_METHODS if methods is None else methods)}
    rows, one_class = np.stack([m, s, y], axis=1), np.zeros(len(y), np.int64)
    blocks = as_clusters(clusters, len(y), min_clusters=n_folds)
    fold = stratified_folds(rows, one_class, n_folds) if blocks is None else cluster_folds(one_class, blocks, n_folds)
    bounds = {RAW: np.tile(ndtri(LEVELS), (n_folds, 1))}
    fitted: dict[str, Recalibrator] = {}
    for name, fit in fits.items():
        fitted[name] = fit(m, s, y, sample_weight=w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the fit to all rows has already warned
            masks = [fold != k for k in range(n_folds)]
            parts = [fit(m[kept], s[kept], y[kept], sample_weight=None if w is None else w[kept]) for kept in masks]
        bounds[name] = np.stack([part.standard_quantiles(LEVELS) for part in parts])
    losses = {name: held_out_losses(m, s, y, fold, bound) for name, bound in bounds.items()}
    means = {name: Mean.of(loss, w).value for name, loss in losses.items()}
    best = min(means, key=means.__getitem__)

    def is_near_best(name: str) -> bool:
        gap = losses[name] - losses[best]
        behind = Mean.of(gap, w)
        return behind.value <= (behind.error if blocks is None else mean_error(*block_sums(gap, w, blocks)))

    chosen = next(filter(is_near_best, losses), best)
    return RecalibrationChoice(chosen, means, fitted, bounds, fold)


def held_out_losses(
    mean: np.ndarray, std: np.ndarray, targets: np.ndarray, fold: np.ndarray, bounds: np.ndarray
) -> np.ndarray:
    """Return the pinball loss of each row under the recalibration fitted without its fold."""
    losses = np.empty(len(targets))
    for k, bound in enumerate(bounds):
        rows = fold == k
        losses[rows] = scaled_pinball(targets[rows] - mean[rows], std[rows], LEVELS, bound)
    return losses
