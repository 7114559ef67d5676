"""Calibration and scores of a Gaussian forecast N(μ, σ²) of a number.

The functions take `mean, std, targets`, three vectors of the same length. A standard deviation below 1e-12 counts as
1e-12, so that a forecast without uncertainty has a likelihood; a negative one is rejected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr, ndtri

from trueup._core.arrays import as_vector
from trueup._core.bins import BINS, equal_mass_index, equal_width_index
from trueup._core.types import ArrayLike

Shares = Literal["intervals", "quantiles"]

STD_FLOOR = 1e-12


def gaussian_nll(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the mean negative log-likelihood ½·ln(2πσ²) + (y−μ)²/(2σ²), in nats.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).

    Returns
    -------
    float
        The loss; NaN without rows.

    Examples
    --------
    >>> f"{gaussian_nll([0.0, 1.0], [1.0, 2.0], [1.0, 1.0]):.4f}"
    '1.5155'

    References
    ----------
    Gneiting & Raftery (2007), Strictly proper scoring rules, prediction, and estimation.
    """
    _, s, _, z = _standardise(mean, std, targets)
    return _mean(0.5 * math.log(2 * math.pi) + np.log(s) + 0.5 * z**2)


def crps(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the mean continuous ranked probability score, ∫ (F(t) − 1[t ≥ y])² dt, in the units of the targets.

    For a Gaussian it is the mean of σ·[z·(2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y−μ)/σ.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).

    Returns
    -------
    float
        The score; NaN without rows.

    Examples
    --------
    >>> f"{crps([0.0, 1.0], [1.0, 2.0], [1.0, 1.0]):.4f}"
    '0.5349'

    References
    ----------
    Gneiting & Raftery (2007), Strictly proper scoring rules, prediction, and estimation.
    """
    _, s, _, z = _standardise(mean, std, targets)
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return _mean(s * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)))


def rmse(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the root mean squared error, √mean (y−μ)².

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations, shape (n,); not used.
    targets
        Values that came true, shape (n,).

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> f"{rmse([0.0, 1.0], [1.0, 2.0], [1.0, 1.0]):.4f}"
    '0.7071'
    """
    m, _, y, _ = _standardise(mean, std, targets)
    return math.sqrt(_mean((y - m) ** 2))


def sharpness(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the root of the mean variance, √mean σ²; smaller means narrower forecasts.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).

    Returns
    -------
    float
        The sharpness; NaN without rows.

    Examples
    --------
    >>> f"{sharpness([0.0, 1.0], [1.0, 2.0], [1.0, 1.0]):.4f}"
    '1.5811'

    References
    ----------
    Kuleshov, Fenner & Ermon (2018), Accurate uncertainties for deep learning using calibrated regression,
    arXiv:1807.00263.
    """
    _, s, _, _ = _standardise(mean, std, targets)
    return math.sqrt(_mean(s**2))


def variation(std: ArrayLike) -> float:
    """Compute the coefficient of variation std(σ)/mean(σ): 0 if every row has the same uncertainty.

    Read it together with `ence`: a constant σ = RMSE has ENCE 0 but distinguishes no rows.

    Parameters
    ----------
    std
        Standard deviations of the forecasts, shape (n,).

    Returns
    -------
    float
        The coefficient; NaN without rows.

    Examples
    --------
    >>> f"{variation([1.0, 2.0]):.4f}"
    '0.3333'

    References
    ----------
    Levi, Gispan, Giladi & Fetaya (2022), Evaluating and calibrating uncertainty prediction in regression tasks,
    arXiv:1905.11659.
    """
    s = _check_std(as_vector(std, "std"))
    return float(s.std() / s.mean()) if len(s) else math.nan


def coverage(mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, level: float = 0.95) -> float:
    """Compute the share of targets inside the centred interval of probability `level`.

    It is the mean of 1[|y−μ| ≤ Φ⁻¹((1+level)/2)·σ]; calibrated forecasts give `level`.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    level
        Probability of the interval.

    Returns
    -------
    float
        The share, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> f"{coverage([0.0, 0.0], [1.0, 1.0], [1.9, 2.1]):.4f}"
    '0.5000'
    """
    return float(interval_calibration(mean, std, targets, levels=_check_levels([level], "level"))[0])


def interval_width(mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, level: float = 0.95) -> float:
    """Compute the mean width 2·Φ⁻¹((1+level)/2)·σ of the centred interval of probability `level`.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    level
        Probability of the interval.

    Returns
    -------
    float
        The width; NaN without rows.

    Examples
    --------
    >>> f"{interval_width([0.0, 0.0], [1.0, 3.0], [1.9, 2.1]):.4f}"
    '7.8399'
    """
    _, s, _, _ = _standardise(mean, std, targets)
    half_width = float(ndtri((1 + _check_levels([level], "level")[0]) / 2))
    return 2 * half_width * _mean(s)


def interval_calibration(mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, levels: ArrayLike) -> np.ndarray:
    """Compute the share of targets inside the centred interval of each level.

    P̂(q) = mean of 1[|y−μ| ≤ Φ⁻¹((1+q)/2)·σ]; calibrated forecasts give P̂(q) = q.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    levels
        Probabilities of the intervals, shape (m,).

    Returns
    -------
    np.ndarray
        The shares, shape (m,).

    Examples
    --------
    >>> interval_calibration([0.0, 0.0], [1.0, 1.0], [0.5, -1.5], levels=[0.3, 0.5, 0.9])
    array([0. , 0.5, 1. ])

    References
    ----------
    Kuleshov, Fenner & Ermon (2018), Accurate uncertainties for deep learning using calibrated regression,
    arXiv:1807.00263.
    """
    z = _standardise(mean, std, targets)[3]
    return _share_below(np.abs(z), ndtri((1 + _check_levels(levels)) / 2))


def quantile_calibration(mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, levels: ArrayLike) -> np.ndarray:
    """Compute the share of targets below the forecast quantile of each level.

    P̂(q) = mean of 1[y ≤ μ + Φ⁻¹(q)·σ]; calibrated forecasts give P̂(q) = q.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    levels
        Levels of the quantiles, shape (m,).

    Returns
    -------
    np.ndarray
        The shares, shape (m,).

    Examples
    --------
    >>> quantile_calibration([0.0, 0.0], [1.0, 1.0], [0.5, -1.5], levels=[0.05, 0.5, 0.9])
    array([0. , 0.5, 1. ])

    References
    ----------
    Kuleshov, Fenner & Ermon (2018), Accurate uncertainties for deep learning using calibrated regression,
    arXiv:1807.00263.
    """
    z = _standardise(mean, std, targets)[3]
    return _share_below(z, ndtri(_check_levels(levels)))


def miscalibration_area(
    mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, shares: Shares = "intervals", points: int = 100
) -> float:
    """Compute the area between the curve of observed shares and the diagonal, ∫ |P̂(q) − q| dq.

    P̂ is linear between `points` levels spread evenly over [0, 1]. The area is exact also where P̂ crosses the
    diagonal.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    shares
        "intervals" for P̂ of `interval_calibration`, "quantiles" for that of `quantile_calibration`.
    points
        Number of levels.

    Returns
    -------
    float
        The area; NaN without rows.

    Examples
    --------
    >>> f"{miscalibration_area([0.0, 0.0], [1.0, 1.0], [0.5, -1.5]):.4f}"
    '0.1526'

    References
    ----------
    Chung, Char, Guo, Schneider & Neiswanger (2021), Uncertainty toolbox, arXiv:2109.10254.
    """
    levels, gap = _gaps(mean, std, targets, shares, points)
    left, right = np.abs(gap[:-1]), np.abs(gap[1:])
    total = left + right
    # Two triangles where the sign changes, a trapezium elsewhere.
    crossing = gap[:-1] * gap[1:] < 0
    height = np.where(crossing, (left**2 + right**2) / np.where(crossing, total, 1.0), total) / 2
    return float(np.diff(levels) @ height)


def mean_calibration_error(
    mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, shares: Shares = "intervals", points: int = 100
) -> float:
    """Compute the mean of |P̂(q) − q| over levels spread evenly over [0, 1].

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    shares
        "intervals" for P̂ of `interval_calibration`, "quantiles" for that of `quantile_calibration`.
    points
        Number of levels.

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> f"{mean_calibration_error([0.0, 0.0], [1.0, 1.0], [0.5, -1.5]):.4f}"
    '0.1529'

    References
    ----------
    Chung, Char, Guo, Schneider & Neiswanger (2021), Uncertainty toolbox, arXiv:2109.10254.
    """
    return _mean(np.abs(_gaps(mean, std, targets, shares, points)[1]))


def rms_calibration_error(
    mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, shares: Shares = "intervals", points: int = 100
) -> float:
    """Compute the root of the mean of (P̂(q) − q)² over levels spread evenly over [0, 1].

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    shares
        "intervals" for P̂ of `interval_calibration`, "quantiles" for that of `quantile_calibration`.
    points
        Number of levels.

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> f"{rms_calibration_error([0.0, 0.0], [1.0, 1.0], [0.5, -1.5]):.4f}"
    '0.1877'

    References
    ----------
    Chung, Char, Guo, Schneider & Neiswanger (2021), Uncertainty toolbox, arXiv:2109.10254.
    """
    return math.sqrt(_mean(_gaps(mean, std, targets, shares, points)[1] ** 2))


def ence(mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, bins: int = 10) -> float:
    """Compute the expected normalised calibration error, the mean over bins of |RMV_b − RMSE_b| / RMV_b.

    RMV_b = √mean σ² and RMSE_b = √mean (y−μ)² in bins of equal mass of σ; equal σ stay in one bin. Bins without any σ
    are left out with a warning.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    bins
        Number of bins.

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> f"{ence([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.0], [1.0, -1.0, 3.0, 1.0], bins=2):.4f}"
    '0.0590'

    References
    ----------
    Levi, Gispan, Giladi & Fetaya (2022), Evaluating and calibrating uncertainty prediction in regression tasks,
    arXiv:1905.11659.
    """
    m, s, y, _ = _standardise(mean, std, targets)
    index = equal_mass_index(s, bins)
    if len(s) == 0:
        return math.nan
    count = np.bincount(index)
    predicted, observed = (np.sqrt(np.bincount(index, weights=w) / count) for w in (s**2, (y - m) ** 2))
    positive = np.bincount(index, weights=s > STD_FLOOR) > 0
    if not positive.all():
        warnings.warn(f"{int((~positive).sum())} of {len(count)} bins have no std and were left out", stacklevel=2)
    return _mean(np.abs(predicted - observed)[positive] / predicted[positive])


def variance_error(
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike,
    *,
    bins: int = BINS,
    binning: Literal["width", "mass"] = "width",
) -> float:
    """Compute the uncertainty calibration error (UCE), Σ_b (n_b/n)·|mean_b (y−μ)² − mean_b σ²|.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,).
    std
        Standard deviations of the forecasts, shape (n,).
    targets
        Values that came true, shape (n,).
    bins
        Number of bins.
    binning
        "width" for bins of equal width of σ², "mass" for bins of equal mass.

    Returns
    -------
    float
        The error; NaN without rows.

    Examples
    --------
    >>> f"{variance_error([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.0], [1.0, -1.0, 3.0, 1.0], bins=2):.4f}"
    '0.5000'

    References
    ----------
    Laves, Ihler, Fast, Kahrs & Ortmaier (2020), Well-calibrated regression uncertainty in medical imaging with deep
    learning.
    """
    m, s, y, _ = _standardise(mean, std, targets)
    if binning == "width":
        index = equal_width_index(s**2, bins)
    elif binning == "mass":
        index = equal_mass_index(s, bins)
    else:
        raise ValueError(f'binning must be "width" or "mass", got {binning!r}')
    gap = np.bincount(index, weights=(y - m) ** 2 - s**2)
    return float(np.abs(gap).sum() / len(s)) if len(s) else math.nan


def _standardise(mean: Any, std: Any, targets: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return μ, σ, y and z = (y−μ)/σ."""
    m = as_vector(mean, "mean")
    s = _check_std(as_vector(std, "std", length=len(m)))
    y = as_vector(targets, "targets", length=len(m))
    return m, s, y, (y - m) / s


def _check_std(s: np.ndarray) -> np.ndarray:
    if len(s) and s.min() < 0:
        raise ValueError(f"std must not be negative, got {s.min():g} at [{int(s.argmin())}]")
    return np.maximum(s, STD_FLOOR)


def _check_levels(levels: Any, name: str = "levels") -> np.ndarray:
    q: np.ndarray = as_vector(levels, name)
    if len(q) and (q.min() < 0 or q.max() > 1):
        raise ValueError(f"{name} must lie in [0, 1], got {q.min():g}..{q.max():g}")
    return q


def _share_below(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    below = np.searchsorted(np.sort(values), bounds, side="right")
    return below / len(values) if len(values) else np.full(len(bounds), np.nan)


def _gaps(mean: Any, std: Any, targets: Any, shares: Shares, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return even levels q and P̂(q) − q at each."""
    if int(points) != points or points < 2:
        raise ValueError(f"points must be a whole number of at least 2, got {points!r}")
    levels = np.linspace(0.0, 1.0, int(points))
    if shares == "intervals":
        return levels, interval_calibration(mean, std, targets, levels=levels) - levels
    if shares == "quantiles":
        return levels, quantile_calibration(mean, std, targets, levels=levels) - levels
    raise ValueError(f'shares must be "intervals" or "quantiles", got {shares!r}')


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


_FUNCTIONS: tuple[Callable[..., float], ...] = (
    *(gaussian_nll, crps, rmse, sharpness, coverage, interval_width),
    *(miscalibration_area, mean_calibration_error, rms_calibration_error, ence, variance_error),
)

REGRESSION: Mapping[str, Callable[..., float]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "variation": lambda mean, std, targets: variation(_standardise(mean, std, targets)[1]),
}
"""Functions of (mean, std, targets) that return one number, by name."""
