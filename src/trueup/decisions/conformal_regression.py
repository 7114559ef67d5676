"""Prediction intervals for regression that hold the target with a stated probability (split conformal)."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from trueup._core.arrays import as_vector, check_share
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup._core.values import Value
from trueup.decisions.prediction_sets import conformal_quantile


class _Conformal(Value):
    """A rule with one parameter, a quantile of calibration scores."""

    quantile: float

    def __init__(self, quantile: ArrayLike, coverage: float) -> None:
        self.set_parameters(quantile=quantile)
        self.coverage = check_share(coverage, "coverage")


class ConformalResiduals(_Conformal):
    """Intervals μ ± q·σ, where q is the conformal quantile of |y − μ|/σ.

    The intervals are wide where σ is large. Any forecast (μ, σ) will do, also a recalibrated one, if it was not
    fitted to the calibration rows.

    Parameters
    ----------
    quantile
        The quantile q. `fit` estimates it.
    coverage
        Share of targets that the intervals should hold, between 0 and 1.

    Examples
    --------
    >>> rule = ConformalResiduals.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), coverage=0.8)
    >>> rule.interval([10.0], [0.5])
    (array([6.]), array([14.]))

    References
    ----------
    Lei et al., "Distribution-free predictive inference for regression" (2018), arXiv:1604.04173.
    """

    @classmethod
    def fit(cls, mean: ArrayLike, std: ArrayLike, targets: ArrayLike, *, coverage: float = 0.9) -> Self:
        """Estimate the quantile from calibration rows.

        Parameters
        ----------
        mean
            Predicted means, shape (n,).
        std
            Predicted standard deviations, positive, shape (n,).
        targets
            Observed targets, shape (n,).
        coverage
            Share of targets that the intervals should hold.

        Returns
        -------
        ConformalResiduals
            The rule. Its intervals are infinite if there are fewer than 1/(1 − coverage) − 1 rows.
        """
        m = as_vector(mean, "mean")
        s = as_vector(std, "std", length=len(m))
        y = as_vector(targets, "targets", length=len(m))
        if len(s) and s.min() <= 0:
            raise InputError("std", "be positive", f"{s.min():g}")
        return cls(conformal_quantile(np.abs(y - m) / s, check_share(coverage, "coverage")), coverage)

    def interval(self, mean: ArrayLike, std: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends of the intervals.

        Parameters
        ----------
        mean
            Predicted means, shape (n,).
        std
            Predicted standard deviations, shape (n,).

        Returns
        -------
        tuple[np.ndarray, np.ndarray]
            Lower ends and upper ends, each of shape (n,).
        """
        m = as_vector(mean, "mean")
        half_width = self.quantile * as_vector(std, "std", length=len(m))
        return m - half_width, m + half_width


class ConformalQuantiles(_Conformal):
    """Intervals [low − q, high + q], where q is the conformal quantile of max(low − y, y − high).

    If the predicted quantiles are too wide, q is negative and narrows them. Ends that would cross meet in the middle.

    Parameters
    ----------
    quantile
        The quantile q. `fit` estimates it.
    coverage
        Share of targets that the intervals should hold, between 0 and 1.

    Examples
    --------
    >>> rule = ConformalQuantiles.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), coverage=0.8)
    >>> rule.interval([10.0], [11.0])
    (array([3.]), array([18.]))

    References
    ----------
    Romano, Patterson and Candès, "Conformalized quantile regression" (2019), arXiv:1905.03222.
    """

    @classmethod
    def fit(cls, low: ArrayLike, high: ArrayLike, targets: ArrayLike, *, coverage: float = 0.9) -> Self:
        """Estimate the quantile from calibration rows.

        Parameters
        ----------
        low
            Predicted quantiles of level (1 − coverage)/2, shape (n,), from a model not fitted to these rows.
        high
            Predicted quantiles of level (1 + coverage)/2, shape (n,).
        targets
            Observed targets, shape (n,).
        coverage
            Share of targets that the intervals should hold.

        Returns
        -------
        ConformalQuantiles
            The rule. Its intervals are infinite if there are fewer than 1/(1 − coverage) − 1 rows.
        """
        a, b = _check_ends(low, high)
        y = as_vector(targets, "targets", length=len(a))
        return cls(conformal_quantile(np.maximum(a - y, y - b), check_share(coverage, "coverage")), coverage)

    def interval(self, low: ArrayLike, high: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends of the intervals.

        Parameters
        ----------
        low
            Predicted lower quantiles, shape (n,).
        high
            Predicted upper quantiles, shape (n,).

        Returns
        -------
        tuple[np.ndarray, np.ndarray]
            Lower ends and upper ends, each of shape (n,).
        """
        a, b = _check_ends(low, high)
        q = self.quantile
        middle = (a + b) / 2
        if math.isinf(q):
            return np.full_like(a, -math.inf), np.full_like(b, math.inf)
        return np.minimum(a - q, middle), np.maximum(b + q, middle)


def _check_ends(low: ArrayLike, high: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a = as_vector(low, "low")
    b = as_vector(high, "high", length=len(a))
    if len(a) and (a > b).any():
        at = int(np.flatnonzero(a > b)[0])
        raise InputError("low", "not exceed high", f"{a[at]:g} > {b[at]:g} at [{at}]")
    return a, b
