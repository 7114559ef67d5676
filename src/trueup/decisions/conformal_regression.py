"""Intervals of regression that hold the truth with a stated probability (split conformal)."""

from __future__ import annotations

import math
import os
from typing import Any, Self

import numpy as np
from torch import Tensor

from trueup.core.arrays import as_vector, check_share
from trueup.core.errors import InputError
from trueup.core.module import ParametricModule
from trueup.decisions.prediction_sets import conformal_quantile
from trueup.io.artifacts import open_artifact, pack, require_safetensors_suffix, unpack, versions, write_artifact


class _Conformal(ParametricModule):
    """A rule that is one quantile of calibration scores, and how often it may miss."""

    quantile: Tensor

    def __init__(self, quantile: Any, alpha: float) -> None:
        super().__init__()
        self.keep("quantile", quantile)
        self.alpha = check_share(alpha, "alpha")


class ConformalResiduals(_Conformal):
    """Intervals μ ± q·σ, q the conformal quantile of |y − μ|/σ: wide where the forecast is unsure.

    Any forecast (μ, σ) will do, recalibrated ones too, as long as its fit has not seen the calibration rows.
    Lei et al., "Distribution-free predictive inference for regression" (2018).

    >>> rule = ConformalResiduals.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), alpha=0.2)
    >>> rule.interval([10.0], [0.5])
    (array([6.]), array([14.]))
    """

    @classmethod
    def fit(cls, mean: Any, std: Any, targets: Any, *, alpha: float = 0.1) -> Self:
        """From calibration rows; infinite where they are fewer than 1/α − 1."""
        m = as_vector(mean, "mean").numpy()
        s = as_vector(std, "std", length=len(m)).numpy()
        y = as_vector(targets, "targets", length=len(m)).numpy()
        if len(s) and s.min() <= 0:
            raise InputError("std", "be positive", f"{s.min():g}")
        return cls(conformal_quantile(np.abs(y - m) / s, check_share(alpha, "alpha")), alpha)

    def interval(self, mean: Any, std: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ends of each interval."""
        m = as_vector(mean, "mean").numpy()
        reach = float(self.quantile) * as_vector(std, "std", length=len(m)).numpy()
        return m - reach, m + reach


class ConformalQuantiles(_Conformal):
    """Intervals [low − q, high + q] around predicted quantiles, q the conformal quantile of max(low − y, y − high).

    Where the quantiles are too wide q is negative and narrows them; ends that would cross meet in the middle.
    Romano, Patterson and Candès, "Conformalized quantile regression" (2019).

    >>> rule = ConformalQuantiles.fit(np.zeros(9), np.ones(9), np.arange(1.0, 10.0), alpha=0.2)
    >>> rule.interval([10.0], [11.0])
    (array([3.]), array([18.]))
    """

    @classmethod
    def fit(cls, low: Any, high: Any, targets: Any, *, alpha: float = 0.1) -> Self:
        """From calibration rows, such as the quantiles α/2 and 1 − α/2 of a recalibration that has not seen them."""
        a, b = _ends(low, high)
        y = as_vector(targets, "targets", length=len(a)).numpy()
        return cls(conformal_quantile(np.maximum(a - y, y - b), check_share(alpha, "alpha")), alpha)

    def interval(self, low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ends of each interval."""
        a, b = _ends(low, high)
        q = float(self.quantile)
        middle = (a + b) / 2
        if math.isinf(q):
            return np.full_like(a, -math.inf), np.full_like(b, math.inf)
        return np.minimum(a - q, middle), np.maximum(b + q, middle)


def _ends(low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
    a = as_vector(low, "low").numpy()
    b = as_vector(high, "high", length=len(a)).numpy()
    if len(a) and (a > b).any():
        at = int(np.flatnonzero(a > b)[0])
        raise InputError("low", "not exceed high", f"{a[at]:g} > {b[at]:g} at [{at}]")
    return a, b


def save_conformal(rule: _Conformal, path: str | os.PathLike[str], *, summary: Any = None) -> None:
    """Write a rule to a `.safetensors` file that is either complete or not there; `summary` is a note, plain data.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_conformal(ConformalQuantiles(0.5, 0.1), f"{folder}/rule.safetensors")
    ...     load_conformal(f"{folder}/rule.safetensors").interval([1.0], [2.0])
    (array([0.5]), array([2.5]))
    """
    require_safetensors_suffix(path)
    if type(rule) not in _RULES.values():
        raise InputError("rule", "be a ConformalResiduals or a ConformalQuantiles", type(rule).__name__)
    tensors: dict[str, Tensor] = {}
    content = {
        "conformal_regression": pack(rule.config(), "rule", tensors),
        "rule": type(rule).__name__,
        "versions": versions(),
        "summary": summary,
    }
    write_artifact(path, "conformal_regression", content, tensors)


def load_conformal(path: str | os.PathLike[str]) -> ConformalResiduals | ConformalQuantiles:
    """Read a rule that `save_conformal` wrote; of anything else one sentence says what is wrong."""
    with open_artifact(
        path, "conformal_regression", {"conformal_regression", "rule", "versions", "summary"}
    ) as artifact:
        kind = artifact.content["rule"]
        if kind not in _RULES:
            raise ValueError(f"the rule must be one of {', '.join(_RULES)}, got {kind!r}")
        try:
            return _RULES[kind](**unpack(artifact.content["conformal_regression"], artifact.tensors()))
        except TypeError as error:
            raise ValueError(f"{kind} does not take the parameters of the file: {error}") from None


_RULES: dict[str, type[Any]] = {"ConformalResiduals": ConformalResiduals, "ConformalQuantiles": ConformalQuantiles}
