"""Penalised likelihood of a linear map of logits: the objective, its curvature, and the choice of the penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from scipy.special import log_softmax, softmax
from torch import Tensor

from trueup.arrays import computable
from trueup.calibrators.inverse import inverse_temperature
from trueup.optimise import Certificate, lbfgs
from trueup.rows import hashed_groups, log_normaliser
from trueup.sums import vector_sums

_CHUNK = 1 << 17
_SMALL_PROBLEM = 1 << 23
_ROWS = 1 << 19  # numbers among which the curvature is taken
_DECREMENT = 1e-11  # by so much at most could a further step lower the mean loss
_BLOCKS = 128  # up to so many classes each has a curvature of its own: K (K + 1)² numbers
TINY = 1e-8
"""The L2 penalty of vector scaling: a constant added to the bias would change nothing without it."""
SMALL = 1e-6
"""That of matrix scaling where none is asked for: separable data have no finite optimum without it."""

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Seven coefficients from 1e-2 to 1e4, as the literature searches."""


@dataclass(frozen=True)
class Penalty:
    """Squares added to the mean loss: off·Σ_{j≠k} w_jk² + diagonal·Σ (w_kk − centre)² + bias·Σ b_k²."""

    off: float = 0.0
    diagonal: float = 0.0
    bias: float = 0.0
    centre: float = 0.0

    @classmethod
    def odir(cls, strength: float, classes: int, *, bias: float | None = None, normalise: bool = True) -> Penalty:
        """Off-diagonal and intercept regularisation; normalised, each is a mean over its entries.

        The diagonal has a trace of it too: on separable data it would grow for ever.
        """
        off = strength / (classes * (classes - 1)) if normalise else strength
        mu = strength if bias is None else bias
        return cls(off=off, diagonal=SMALL, bias=mu / classes if normalise else mu)

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
            weight = np.full(classes, start) if self.vector else start * np.eye(classes)
            start = np.concatenate([weight.ravel(), np.zeros(classes)])
        objective = self._vector_objective() if self.vector else self._matrix_objective()
        x, certificate = lbfgs(
            objective,
            start,
            tolerance=tolerance,
            decrement=max(_DECREMENT, self._noise),
            noise=self._noise,
            most=3000,
            precondition=self._curvature(self.settled(start)),
        )
        x = self.settled(x)
        found, bias = torch.from_numpy(x[:-classes].copy()), torch.from_numpy(x[-classes:].copy())
        return found if self.vector else found.reshape(classes, classes), bias, certificate

    def settled(self, x: np.ndarray) -> np.ndarray:
        """The same map with the least penalty.

        A row of numbers added to every row of W, or a number to every bias, changes no probability. Taking the best
        of these before each evaluation leaves the search no flat direction to go along.
        """
        classes = self.z.shape[1]
        bias = x[-classes:] - x[-classes:].mean()
        weights = self._weights()
        if self.vector or not weights.any():
            return np.concatenate([x[:-classes], bias])
        matrix = x[:-classes].reshape(classes, classes)
        excess = matrix - self.penalty.centre * np.eye(classes)
        matrix = matrix - (weights * excess).sum(axis=0) / weights.sum(axis=0)
        return np.concatenate([matrix.ravel(), bias])

    @property
    def _noise(self) -> float:
        """Relative rounding of the objective."""
        double = self.vector or self.z.numel() <= _SMALL_PROBLEM or self.z.dtype == torch.float64
        return 1e-15 if double else 1e-8

    def _weights(self) -> np.ndarray:
        identity = np.eye(self.z.shape[1])
        weights: np.ndarray = self.penalty.off * (1 - identity) + self.penalty.diagonal * identity
        return weights

    def _shift(self) -> np.ndarray | None:
        return log_normaliser(self.scale * self.z if self.scale != 1 else self.z) if self.on == "log_probs" else None

    def _curvature(self, x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """A rough inverse of the Hessian at x: each class by itself, Σ p_k(1 − p_k) ũũᵀ over some rows, ũ = (u, 1)."""
        n, classes = self.z.shape
        u = self.z[:: max(1, n // max(64, min(2048, _ROWS // classes)))].double().cpu().numpy()
        if self.on == "log_probs":
            u = log_softmax(self.scale * u, axis=1)
        weight, bias = x[:-classes], x[-classes:]
        p = softmax((u * weight if self.vector else u @ weight.reshape(classes, classes).T) + bias, axis=1)
        spread = p * (1 - p) / len(u)
        off, diagonal, offset = (2 * v for v in (self.penalty.off, self.penalty.diagonal, self.penalty.bias))
        if self.vector:
            mixed = (spread * u).sum(axis=0)
            blocks = np.stack([(spread * u * u).sum(axis=0), mixed, mixed, spread.sum(axis=0)], axis=1).reshape(
                -1, 2, 2
            )
            blocks += np.diag([diagonal, offset])
        else:
            u = np.concatenate([u, np.ones((len(u), 1))], axis=1)
            if classes <= _BLOCKS:
                blocks = np.stack([(u * spread[:, k : k + 1]).T @ u for k in range(classes)])
            else:  # one shape for all classes, each to its own scale
                blocks = (u.T @ u / len(u)) * spread.sum(axis=0)[:, None, None]
            ridge = np.full((classes, classes + 1), off)
            np.fill_diagonal(ridge, diagonal)
            ridge[:, -1] = offset
            blocks += ridge[:, :, None] * np.eye(classes + 1)
        level = np.diagonal(blocks, axis1=1, axis2=2).mean() * 1e-6 + 1e-12
        inverse = np.linalg.inv(blocks + level * np.eye(blocks.shape[1]))

        def apply(gradient: np.ndarray) -> np.ndarray:
            rows = np.concatenate([gradient[:-classes].reshape(classes, -1), gradient[-classes:, None]], axis=1)
            out = (inverse @ rows[:, :, None])[:, :, 0]
            return np.concatenate([out[:, :-1].ravel(), out[:, -1]])

        return apply

    def _vector_objective(self) -> Objective:
        n, classes = self.z.shape
        shift, p = self._shift(), self.penalty

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            x = self.settled(x)
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
        centre, weights = p.centre * np.eye(classes), self._weights()

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            x = self.settled(x)
            matrix, bias = x[:-classes].reshape(classes, classes), x[-classes:]
            sums = self._by_products(matrix, bias, shift) / n
            off_centre = matrix - centre
            value = float(sums[0] + (weights * off_centre**2).sum() + p.bias * bias @ bias)
            return value, sums[1:] + 2 * np.concatenate([(weights * off_centre).ravel(), p.bias * bias])

        return objective

    def _by_products(self, matrix: np.ndarray, bias: np.ndarray, shift: np.ndarray | None) -> np.ndarray:
        """Loss and gradient by matrix products, a chunk of rows at a time; small problems are worth double."""
        classes = self.z.shape[1]
        step = max(1, _CHUNK // classes)
        double = self.z.numel() <= _SMALL_PROBLEM
        loss = 0.0
        slopes = torch.zeros(classes, classes + 1, dtype=torch.float64)
        for i in range(0, len(self.z), step):
            part = self.z[i : i + step]
            u = self.scale * (part.double() if double else computable(part))
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


def regularised(
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
