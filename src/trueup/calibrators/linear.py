"""Linear maps of logits or log-probabilities by penalised likelihood: vector, matrix, Dirichlet, structured scaling."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.likelihood import SMALL, TINY, Penalty, Problem
from trueup.calibrators.penalties import regularised
from trueup.calibrators.temperature_search import inverse_temperature, near_inverse_temperature
from trueup.core.arrays import as_tensors
from trueup.core.optimize import Certificate

L = TypeVar("L", bound="Linear")


class Linear(Calibrator):
    """q = softmax(W u + b), with u the logits or something like them."""

    keeps_argmax = False
    shift_invariant = False
    sample_invariant = True
    differentiable = True

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.keep("weight", weight)
        self.keep("bias", bias)
        classes = len(self.bias)
        if tuple(self.weight.shape) not in ((classes,), (classes, classes)):
            wish = f"({classes},) or ({classes}, {classes})"
            raise ValueError(f"weight must have shape {wish}, got {tuple(self.weight.shape)}")

    weight: Tensor
    bias: Tensor

    def map(self, logits: Tensor) -> Tensor:
        """Apply the weights, a vector or a matrix, and the bias."""
        self._check_classes(logits, len(self.bias))
        u = self.features(logits)
        w, b = self.weight.to(u.dtype), self.bias.to(u.dtype)
        return (u * w if w.ndim == 1 else u @ w.T) + b

    def features(self, logits: Tensor) -> Tensor:
        """What the map is linear in."""
        return logits


class Vector(Linear):
    """Scale each class's logit and add a bias: q = softmax(w ⊙ z + b), by likelihood.

    The bias is centred, since a constant added to it changes nothing. Not for few rows and many classes.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Vector.fit(2 * z, y).weight.numpy().round(1)
    array([0.5, 0.5, 0.5])
    """

    @classmethod
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Vector scaling: minimise the negative log-likelihood."""
        z, y = as_tensors(logits, labels, at_least=1)
        problem = Problem(z, y, Penalty(diagonal=TINY, bias=TINY), vector=True)
        weight, bias, certificate = problem.solve(near_inverse_temperature(z, y))
        return _certified(cls(weight, bias), certificate)


class Matrix(Linear):
    """Mix the logits of all classes: q = softmax(W z + b), by likelihood.

    A trace of L2 (1e-6) makes it finite where the data are separable. Not for many classes: it has K² + K numbers and
    overfits badly without a penalty (`ms_odir` has one).
    Guo et al. (2017).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> bool((Matrix.fit(2 * z, y).weight.diagonal() > 0.2).all())
    True
    """

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, penalty: float = SMALL) -> Self:
        """Matrix scaling: minimise the negative log-likelihood, with an L2 penalty on everything."""
        z, y = as_tensors(logits, labels, at_least=1)
        problem = Problem(z, y, Penalty(off=penalty, diagonal=penalty, bias=penalty))
        weight, bias, certificate = problem.solve(near_inverse_temperature(z, y))
        return _certified(cls(weight, bias), certificate)

    @classmethod
    def fit_odir(cls, logits: Any, labels: Any, **options: Any) -> Self:
        """Matrix scaling, ODIR: penalise what is off the diagonal, and the bias (MS-ODIR)."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = regularised(z, y, **options)
        return _certified(cls(weight, bias), certificate)


class Dirichlet(Linear):
    """A linear map of the log-probabilities: q = softmax(W ln p + b).

    With ODIR the penalty λ Σ_{j≠k} w_jk²/(K(K−1)) + μ Σ_j b_j²/K leaves the diagonal free; with L2 it is on all of W.
    λ = μ is chosen from 1e-2 … 1e4 by five-fold cross-validated likelihood. Not for a few hundred rows of many classes.
    Kull et al., "Beyond temperature scaling" (2019).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Dirichlet.fit_odir(2 * z, y).weight.diagonal().numpy().round(1)
    array([0.5, 0.5, 0.5])
    """

    shift_invariant = True

    def features(self, logits: Tensor) -> Tensor:
        """Log-probabilities."""
        return torch.log_softmax(logits, dim=1)

    @classmethod
    def fit(cls, logits: Any, labels: Any, **options: Any) -> Self:
        """Dirichlet calibration: L2 on the whole matrix; the bias is free."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = regularised(z, y, on="log_probs", l2=True, **options)
        return _certified(cls(weight, bias), certificate)

    @classmethod
    def fit_odir(cls, logits: Any, labels: Any, **options: Any) -> Self:
        """Dirichlet calibration, ODIR: penalise what is off the diagonal, and the bias."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = regularised(z, y, on="log_probs", **options)
        return _certified(cls(weight, bias), certificate)


class Structured(Linear):
    """Temperature scaling, and deviations from it that are penalised less the more rows there are.

    With u = ln softmax(z/T): SVS fits q = softmax((1 + v) ⊙ u + b) with penalty (K/n)(‖b‖² + ‖v‖²); SMS adds a matrix
    M, zero on its diagonal, with penalty (K(K−1)/n)‖M‖². As n falls both tend to temperature scaling, so they do not
    overfit. Not for maps that must keep the predicted class.
    Berta et al. (2026).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Structured.fit_vector(2 * z, y).weight.numpy().round(1)
    array([1.1, 1. , 0.9])
    """

    shift_invariant = True

    def __init__(self, temperature: Tensor | float, weight: Tensor, bias: Tensor) -> None:
        super().__init__(weight, bias)
        self.keep("temperature", temperature)

    temperature: Tensor

    def features(self, logits: Tensor) -> Tensor:
        """Log-probabilities after temperature scaling."""
        return torch.log_softmax(logits / self.temperature.to(logits.dtype), dim=1)

    @classmethod
    def fit_vector(cls, logits: Any, labels: Any) -> Self:
        """Structured vector scaling: a vector of deviations (SVS)."""
        return cls._fit(logits, labels, diagonal=True)

    @classmethod
    def fit_matrix(cls, logits: Any, labels: Any) -> Self:
        """Structured matrix scaling: a matrix of deviations (SMS)."""
        return cls._fit(logits, labels, diagonal=False)

    @classmethod
    def _fit(cls, logits: Any, labels: Any, *, diagonal: bool) -> Self:
        z, y = as_tensors(logits, labels, at_least=1)
        n, classes = z.shape
        beta, _ = inverse_temperature(z, y)
        penalty = Penalty(off=classes * (classes - 1) / n, diagonal=classes / n, bias=classes / n, centre=1.0)
        problem = Problem(z, y, penalty, on="log_probs", scale=beta, vector=diagonal)
        weight, bias, certificate = problem.solve(start=1.0)
        return _certified(cls(1 / beta, weight, bias), certificate)


def _certified(found: L, certificate: Certificate) -> L:
    found.certificate = certificate
    return found
