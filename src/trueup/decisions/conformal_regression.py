"""Intervals of regression that hold the truth with a stated probability (split conformal)."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from trueup._core.arrays import as_vector, check_share
from trueup._core.errors import InputError
from trueup._core.values import Value
from trueup.decisions.prediction_sets import conformal_quantile


class _Conformal(Value):
    """A rule that is one quantile of calibration scores, and the share of intervals that hold the truth."""

    quantile: float

    def __init__(self, quantile: Any, coverage: float) -> None:
        self.set_parameter("quantile", quantile)
        self.coverage = check_share(coverage, "coverage")


class ConformalResiduals(_Conformal):
    """Intervals μ ± q·σ, q the conformal quantile of |y − μ|/σ: wide where the forecast is unsure.

    Any forecast (μ, σ) will do, recalibrated ones too, as long as its fit has not seen the calibration rows.
    Lei et al., "Distribution-free predictive inference for regression" (2018).

    >>> rule = ConformalResiduals.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), coverage=0.8)
    >>> rule.interval([10.0], [0.5])
    (array([6.]), array([14.]))
    """

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any, *, coverage: float = 0.9) -> Self:
        """From calibration rows; infinite where they are fewer than 1/(1 − coverage) − 1."""
        m = as_vector(mean, "mean")
        s = as_vector(std, "std", length=len(m))
        y = as_vector(targets, "targets", length=len(m))
        if len(s) and s.min() <= 0:
            raise InputError("std", "be positive", f"{s.min():g}")
        return cls(conformal_quantile(np.abs(y - m) / s, check_share(coverage, "coverage")), coverage)

    def interval(self, mean: Any, std: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ends of each interval."""
        m = as_vector(mean, "mean")
        reach = self.quantile * as_vector(std, "std", length=len(m))
        return m - reach, m + reach


class ConformalQuantiles(_Conformal):
    """Intervals [low − q, high + q] around predicted quantiles, q the conformal quantile of max(low − y, y − high).

    Where the quantiles are too wide q is negative and narrows them; ends that would cross meet in the middle.
    Romano, Patterson and Candès, "Conformalized quantile regression" (2019).

    >>> rule = ConformalQuantiles.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), coverage=0.8)
    >>> rule.interval([10.0], [11.0])
    (array([3.]), array([18.]))
    """

    @classmethod
    def fit(cls, low: Any, high: Any, targets: Any, *, coverage: float = 0.9) -> Self:
        """From calibration rows, such as the quantiles (1 ∓ coverage)/2 of a recalibration that has not seen them."""
        a, b = _ends(low, high)
        y = as_vector(targets, "targets", length=len(a))
        return cls(conformal_quantile(np.maximum(a - y, y - b), check_share(coverage, "coverage")), coverage)

    def interval(self, low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ends of each interval."""
        a, b = _ends(low, high)
        q = self.quantile
        middle = (a + b) / 2
        if math.isinf(q):
            return np.full_like(a, -math.inf), np.full_like(b, math.inf)
        return np.minimum(a - q, middle), np.maximum(b + q, middle)


def _ends(low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
    a = as_vector(low, "low")
    b = as_vector(high, "high", length=len(a))
    if len(a) and (a > b).any():
        at = int(np.flatnonzero(a > b)[0])
        raise InputError("low", "not exceed high", f"{a[at]:g} > {b[at]:g} at [{at}]")
    return a, b
