"""Linear maps of logits or log-probabilities by penalised likelihood: vector, matrix, Dirichlet, structured scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from trueup.arrays import as_tensors, computable
from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import inverse_temperature
from trueup.optimise import Certificate, lbfgs
from trueup.rows import hashed_groups, log_normaliser, matrix_sums, vector_sums

_CHUNK = 1 << 19
_BLOCKS = 128  # up to so many classes each has a curvature of its own: K (K + 1)² numbers
TINY = 1e-8
"""The L2 penalty of vector scaling: a constant added to the bias would change nothing without it."""
SMALL = 1e-6
"""That of matrix scaling where none is asked for: separable data have no finite optimum without it."""

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
L = TypeVar("L", bound="Linear")

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Seven coefficients from 1e-2 to 1e4, as the literature searches."""


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

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Vector.fit(2 * z, y).weight.numpy().round(1)
    array([0.5, 0.5, 0.5])
    """

    @classmethod
    def fit(cls, logits: Any, labels: Any) -> Self:
        """Minimise the negative log-likelihood."""
        z, y = as_tensors(logits, labels, at_least=1)
        start, _ = inverse_temperature(z, y)
        weight, bias, certificate = Problem(z, y, Penalty(diagonal=TINY, bias=TINY), vector=True).solve(start)
        return _certified(cls(weight, bias), certificate)


class Matrix(Linear):
    """Mix the logits of all classes: q = softmax(W z + b), by likelihood.

    A trace of L2 (1e-6) makes it finite where the data are separable. Not for many classes: it has K² + K numbers and
    overfits badly without a penalty (`ms_odir` has one).
    Guo et al. (2017).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> bool((Matrix.fit(2 * z, y).weight.diagonal() > 0.2).all())
    True
    """

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, penalty: float = SMALL) -> Self:
        """Minimise the negative log-likelihood, with an L2 penalty on everything."""
        z, y = as_tensors(logits, labels, at_least=1)
        start, _ = inverse_temperature(z, y)
        weight, bias, certificate = Problem(z, y, Penalty(off=penalty, diagonal=penalty, bias=penalty)).solve(start)
        return _certified(cls(weight, bias), certificate)

    @classmethod
    def fit_odir(cls, logits: Any, labels: Any, **options: Any) -> Self:
        """MS-ODIR: penalise what is off the diagonal, and the bias."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = _regularised(z, y, **options)
        return _certified(cls(weight, bias), certificate)


class Dirichlet(Linear):
    """A linear map of the log-probabilities: q = softmax(W ln p + b).

    With ODIR the penalty λ Σ_{j≠k} w_jk²/(K(K−1)) + μ Σ_j b_j²/K leaves the diagonal free; with L2 it is on all of W.
    λ = μ is chosen from 1e-2 … 1e4 by five-fold cross-validated likelihood. Not for a few hundred rows of many classes.
    Kull et al., "Beyond temperature scaling" (2019).

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
        """L2 on the whole matrix; the bias is free."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = _regularised(z, y, on="log_probs", l2=True, **options)
        return _certified(cls(weight, bias), certificate)

    @classmethod
    def fit_odir(cls, logits: Any, labels: Any, **options: Any) -> Self:
        """Penalise what is off the diagonal, and the bias."""
        z, y = as_tensors(logits, labels, at_least=2)
        weight, bias, certificate = _regularised(z, y, on="log_probs", **options)
        return _certified(cls(weight, bias), certificate)


class Structured(Linear):
    """Temperature scaling, and deviations from it that are penalised less the more rows there are.

    With u = ln softmax(z/T): SVS fits q = softmax((1 + v) ⊙ u + b) with penalty (K/n)(‖b‖² + ‖v‖²); SMS adds a matrix
    M, zero on its diagonal, with penalty (K(K−1)/n)‖M‖². As n falls both tend to temperature scaling, so they do not
    overfit. Not for maps that must keep the predicted class. Berta et al. (2026).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Structured.fit_vector(2 * z, y).weight.numpy().round(1)
    array([0.5, 0.5, 0.5])
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
        """SVS: a vector of deviations."""
        return cls._fit(logits, labels, diagonal=True)

    @classmethod
    def fit_matrix(cls, logits: Any, labels: Any) -> Self:
        """SMS: a matrix of deviations."""
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


@dataclass(frozen=True)
class Penalty:
    """Squares added to the mean loss: off·Σ_{j≠k} w_jk² + diagonal·Σ (w_kk − centre)² + bias·Σ b_k²."""

    off: float = 0.0
    diagonal: float = 0.0
    bias: float = 0.0
    centre: float = 0.0

    @classmethod
    def odir(cls, strength: float, classes: int, *, bias: float | None = None, normalise: bool = True) -> Penalty:
        """Off-diagonal and intercept regularisation; normalised, each is a mean over its entries."""
        off = strength / (classes * (classes - 1)) if normalise else strength
        mu = strength if bias is None else bias
        return cls(off=off, bias=mu / classes if normalise else mu)

    @classmethod
    def l2(cls, strength: float, classes: int, *, normalise: bool = True) -> Penalty:
        """The same weight on every entry of the matrix, none on the bias but a trace."""
        each = strength / classes**2 if normalise else strength
        return cls(off=each, diagonal=each, bias=TINY)


@dataclass(frozen=True)
class Problem:
    """Penalised likelihood of softmax(W u + b) on trusted tensors; u = z, or ln softmax(scale·z)."""

    z: Tensor
    y: Tensor
    penalty: Penalty
    on: Literal["logits", "log_probs"] = "logits"
    scale: float = 1.0
    vector: bool = False

    def solve(self, start: float | np.ndarray, *, tolerance: float = 1e-7) -> tuple[Tensor, Tensor, Certificate]:
        """Minimise from a multiple of the identity, or from another problem's solution."""
        classes = self.z.shape[1]
        if not isinstance(start, np.ndarray):
            weight = np.full(classes, start) if self.vector else start * (np.eye(classes) - self._even / classes)
            start = np.concatenate([weight.ravel(), np.zeros(classes)])
        objective = self._vector_objective() if self.vector else self._matrix_objective()
        x, certificate = lbfgs(objective, start, tolerance=tolerance, most=3000, precondition=self._curvature(start))
        found, bias = torch.from_numpy(x[:-classes].copy()), torch.from_numpy(x[-classes:].copy())
        # A constant added to the bias changes nothing: take the one with mean 0.
        return found if self.vector else found.reshape(classes, classes), bias - bias.mean(), certificate

    @property
    def _even(self) -> bool:
        """Whether all entries of the matrix are penalised alike.

        A row of numbers added to every row of W changes no probability; the even penalty's optimum then has columns of mean
        0, and a search that starts and stays there has no flat direction to go along.
        """
        return not self.vector and self.penalty.centre == 0 and self.penalty.off == self.penalty.diagonal > 0

    def _shift(self) -> np.ndarray | None:
        return log_normaliser(self.scale * self.z if self.scale != 1 else self.z) if self.on == "log_probs" else None

    def _curvature(self, x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """A rough inverse of the Hessian at x: each class by itself, Σ p_k(1 − p_k) ũũᵀ over some rows, ũ = (u, 1)."""
        n, classes = self.z.shape
        some = slice(None, None, max(1, n // 4096))
        u = self.z[some].double().cpu()
        if self.on == "log_probs":
            u = torch.log_softmax(self.scale * u, dim=1)
        weight, bias = torch.from_numpy(x[:-classes]), torch.from_numpy(x[-classes:])
        p = torch.softmax((u * weight if self.vector else u @ weight.reshape(classes, classes).T) + bias, dim=1)
        spread = (p * (1 - p)) / len(u)
        off, diagonal, offset = (2 * v for v in (self.penalty.off, self.penalty.diagonal, self.penalty.bias))
        if self.vector:
            blocks = torch.stack(
                [(spread * u * u).sum(0), (spread * u).sum(0), (spread * u).sum(0), spread.sum(0)], dim=1
            )
            blocks = blocks.reshape(classes, 2, 2) + torch.diag(torch.tensor([diagonal, offset], dtype=u.dtype))
        else:
            u = torch.cat([u, torch.ones(len(u), 1, dtype=u.dtype)], dim=1)
            if classes <= _BLOCKS:
                blocks = torch.stack([(u * spread[:, k : k + 1]).T @ u for k in range(classes)])
            else:  # one shape for all classes, each to its own scale
                blocks = (u.T @ u / len(u)) * spread.sum(0)[:, None, None]
            ridge = torch.full((classes, classes + 1), off, dtype=u.dtype)
            ridge[:, :-1].fill_diagonal_(diagonal)
            ridge[:, -1] = offset
            blocks = blocks + torch.diag_embed(ridge)
        level = blocks.diagonal(dim1=1, dim2=2).mean() * 1e-6 + 1e-12
        inverse = torch.linalg.inv(blocks + level * torch.eye(blocks.shape[1], dtype=u.dtype))

        def apply(gradient: np.ndarray) -> np.ndarray:
            g = torch.from_numpy(gradient)
            rows = torch.cat([g[:-classes].reshape(classes, -1), g[-classes:, None]], dim=1)
            rows = rows - rows.mean(dim=0) if self._even else rows
            out = torch.bmm(inverse, rows[:, :, None])[:, :, 0]
            out = out - out.mean(dim=0) if self._even else out
            return torch.cat([out[:, :-1].reshape(-1), out[:, -1]]).numpy()

        return apply

    def _vector_objective(self) -> Objective:
        n, classes = self.z.shape
        shift, p = self._shift(), self.penalty

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            weight, bias = np.ascontiguousarray(x[:classes]), np.ascontiguousarray(x[classes:])
            sums = vector_sums(self.z, self.y, weight, bias, scale=self.scale, shift=shift) / n
            off_centre = weight - p.centre
            value = sums[0] + p.diagonal * off_centre @ off_centre + p.bias * bias @ bias
            gradient = sums[1:] + 2 * np.concatenate([p.diagonal * off_centre, p.bias * bias])
            return float(value), gradient

        return objective

    def _matrix_objective(self) -> Objective:
        n, classes = self.z.shape
        shift, p = self._shift(), self.penalty
        identity = np.eye(classes)
        weights = p.off * (1 - identity) + p.diagonal * identity

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            matrix, bias = x[:-classes].reshape(classes, classes), x[-classes:]
            sums = matrix_sums(self.z, self.y, matrix, bias, scale=self.scale, shift=shift)
            sums = (self._by_products(matrix, bias, shift) if sums is None else sums) / n
            off_centre = matrix - p.centre * identity
            value = float(sums[0] + (weights * off_centre**2).sum() + p.bias * bias @ bias)
            return value, sums[1:] + 2 * np.concatenate([(weights * off_centre).ravel(), p.bias * bias])

        return objective

    def _by_products(self, matrix: np.ndarray, bias: np.ndarray, shift: np.ndarray | None) -> np.ndarray:
        """Loss and gradient by matrix products, a chunk of rows at a time, in the logits' own precision."""
        classes = self.z.shape[1]
        step = max(1, _CHUNK // classes)
        loss = 0.0
        slopes = torch.zeros(classes, classes + 1, dtype=torch.float64)
        for i in range(0, len(self.z), step):
            u = self.scale * computable(self.z[i : i + step])
            if shift is not None:
                u = u - torch.from_numpy(shift[i : i + step]).to(u)[:, None]
            label = self.y[i : i + step, None]
            log_q = torch.log_softmax(
                torch.addmm(torch.from_numpy(bias).to(u), u, torch.from_numpy(matrix).to(u).T), dim=1
            )
            loss -= float(log_q.gather(1, label).double().sum())
            residual = log_q.exp_()
            residual.scatter_add_(1, label, torch.full_like(label, -1, dtype=u.dtype))
            slopes[:, :-1] += (residual.T @ u).double().cpu()
            slopes[:, -1] += residual.sum(dim=0).double().cpu()
        return np.concatenate([[loss], slopes[:, :-1].numpy().ravel(), slopes[:, -1].numpy()])

    def rows(self, keep: np.ndarray) -> Problem:
        """The same problem on some of the rows."""
        kept = torch.from_numpy(np.flatnonzero(keep))
        return replace(self, z=self.z[kept], y=self.y[kept])

    def held_out_loss(self, weight: Tensor, bias: Tensor) -> float:
        """Mean loss without the penalty."""
        problem = replace(self, penalty=Penalty())
        objective = problem._vector_objective() if self.vector else problem._matrix_objective()
        return objective(np.concatenate([weight.numpy().ravel(), bias.numpy()]))[0]


def _regularised(
    z: Tensor,
    y: Tensor,
    *,
    on: Literal["logits", "log_probs"] = "logits",
    l2: bool = False,
    penalty: float | None = None,
    penalties: Sequence[float] = PENALTIES,
    bias_penalties: Sequence[float] | None = None,
    normalise: bool = True,
    folds: int = 5,
) -> tuple[Tensor, Tensor, Certificate]:
    """Fit with the penalty given, or that of least cross-validated loss; `bias_penalties` makes it a full grid."""
    classes = z.shape[1]
    start, _ = inverse_temperature(z, y)

    def made(strength: float, mu: float | None) -> Penalty:
        if l2:
            return Penalty.l2(strength, classes, normalise=normalise)
        return Penalty.odir(strength, classes, bias=mu, normalise=normalise)

    whole = Problem(z, y, made(penalty if penalty is not None else 1.0, None), on=on)
    if penalty is not None:
        return whole.solve(start)
    strengths = sorted(penalties, reverse=True)
    offsets: Sequence[float | None] = bias_penalties or [None]
    grid = [(strength, mu) for mu in offsets for strength in strengths]
    # Folds by content, so that the order of the rows does not matter.
    fold = hashed_groups(z, y, folds)
    losses = np.zeros(len(grid))
    for k in range(folds):
        if not (fold == k).any() or (fold == k).all():
            continue
        train, test = whole.rows(fold != k), whole.rows(fold == k)
        x: float | np.ndarray = start
        for number, (strength, mu) in enumerate(grid):
            weight, bias, _ = replace(train, penalty=made(strength, mu)).solve(x, tolerance=1e-5)
            x = np.concatenate([weight.numpy().ravel(), bias.numpy()])  # the next penalty starts where this one ended
            losses[number] += test.held_out_loss(weight, bias) * len(test.z) / len(z)
    strength, mu = grid[int(losses.argmin())]
    return replace(whole, penalty=made(strength, mu)).solve(start)


def _certified(found: L, certificate: Certificate) -> L:
    found.certificate = certificate
    return found
