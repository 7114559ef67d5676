"""Temperature scaling, by likelihood, by Brier score, by focal loss, and by the ECE over a grid."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from trueup.arrays import as_tensors, computable
from trueup.calibrators.base import Calibrator
from trueup.optimise import Certificate, newton
from trueup.rows import temperature_sums

Loss = Callable[[float], tuple[float, float, float]]

_SUBSAMPLE = 2000
_FAR = 1e6
"""How far from the logits' own scale 1/T may go before the fit stops at a bound."""


class Temperature(Calibrator):
    """Divide the logits by one number: q = softmax(z/T).

    By likelihood, T minimises Σ_i ln Σ_k exp(z_ik/T) − z_iy/T, which is convex in 1/T. It keeps the ranking and is hard
    to overfit. Not for networks whose miscalibration differs between classes or regions of confidence.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Temperature.fit(2.5 * z, y)
    Temperature(temperature=2.47972)
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = True
    differentiable = True

    def __init__(self, temperature: Tensor | float) -> None:
        super().__init__()
        self.keep("temperature", temperature)
        if not (self.temperature.ndim == 0 and self.temperature > 0 and torch.isfinite(self.temperature)):
            raise ValueError(f"temperature must be one positive number, got {temperature}")

    temperature: Tensor

    def map(self, logits: Tensor) -> Tensor:
        """Divide by T."""
        return logits / self.temperature.to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Minimise the negative log-likelihood, by Newton steps in 1/T from a subsample's optimum."""
        z, y = as_tensors(logits, labels, at_least=1)
        beta, certificate = inverse_temperature(z, y)
        if certificate.status == "bound":
            sure = beta * _spread(z) > 1
            why = (
                "every label has its row's largest logit"
                if sure
                else "the logits tell labels apart no better than chance"
            )
            warnings.warn(f"temperature stopped at its bound, {1 / beta:.3g}: {why}", stacklevel=2)
        return cls._certified(1 / beta, certificate)

    @classmethod
    def _certified(cls, temperature: float, certificate: Certificate) -> Self:
        found = cls(temperature)
        found.certificate = certificate
        return found


def inverse_temperature(z: Tensor, y: Tensor) -> tuple[float, Certificate]:
    """1/T of most likelihood, in trusted tensors: Newton on a subsample, then on everything."""
    scale = _spread(z)
    if scale == 0:
        return 1.0, Certificate("converged", 0.0, 0, 0, math.log(z.shape[1]))  # constant rows: every T is as good
    low, high = 1 / (_FAR * scale), _FAR / scale
    start, loss = 1 / scale, _mean_loss(z, y)
    if len(z) > 4 * _SUBSAMPLE:
        some = slice(None, None, len(z) // _SUBSAMPLE)
        few = _mean_loss(z[some].contiguous(), y[some].contiguous())
        if _bound(few, low, high) is None:
            start, _ = newton(few, start, low=low, high=high, tolerance=1e-3)
            return newton(loss, start, low=low, high=high)
    bound = _bound(loss, low, high)
    if bound is not None:
        value, slope, _ = loss(bound)
        return bound, Certificate("bound", abs(slope), 0, 3, value)
    return newton(loss, start, low=low, high=high)


def _bound(loss: Loss, low: float, high: float) -> float | None:
    """The end of the range towards which a convex loss falls all the way, if it does."""
    if loss(high)[1] <= 0:
        return high
    return low if loss(low)[1] >= 0 else None


def _mean_loss(z: Tensor, y: Tensor) -> Loss:
    n = len(z)

    def derivatives(beta: float) -> tuple[float, float, float]:
        value, slope, curvature = temperature_sums(z, y, beta)
        return value / n, slope / n, curvature / n

    return derivatives


def _spread(z: Tensor) -> float:
    """The median standard deviation of a row's logits: their scale (of at most a few thousand rows)."""
    few = computable(z[:: max(1, len(z) // 4096)]).double()
    return float(few.std(dim=1, correction=0).median())
