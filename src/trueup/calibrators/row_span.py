"""Matrix maps of fewer rows than classes: the same minimum as of all matrices, searched in the span of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from trueup._core.arrays import fill_absent, find_absent
from trueup._core.namespace import NUMPY
from trueup._core.optimize import Objective
from trueup.calibrators.likelihood import LEVEL, Blocks, Inverse, Likelihood, Problem, loss_and_residual, variances


@dataclass(frozen=True, kw_only=True)
class RowSpanProblem(Problem):
    """Penalised likelihood of softmax(W u + b), W = B Vᵀ off its diagonal, V an orthonormal basis of the rows of u.

    The gradient of the likelihood in W is a combination of rows, and its penalty off the diagonal the same in all
    directions, so that the best W is of this form: K·n numbers in place of K². A point is B, the diagonal and the bias.
    """

    u: np.ndarray
    basis: np.ndarray
    features: np.ndarray
    """The rows in the basis, u = (features) Vᵀ."""

    @classmethod
    def of(cls, problem: Problem) -> RowSpanProblem:
        """The same problem; its penalty off the diagonal must be positive."""
        u = problem.scale * problem.z.astype(np.float64)
        absent = find_absent(u)
        u = fill_absent(NUMPY.log_softmax(u) if problem.on == "log_probs" else u, absent)
        left, sizes, right = np.linalg.svd(u, full_matrices=False)
        settings = {name: getattr(problem, name) for name in ("z", "y", "penalty", "on", "scale", "w")}
        return cls(**settings, u=u, basis=np.ascontiguousarray(right.T), features=left * sizes)

    def rows(self, keep: np.ndarray) -> Self:
        """The same problem on the rows of a mask, in the same basis."""
        return replace(super().rows(keep), u=self.u[keep], features=self.features[keep])

    def start_point(self, start: float | np.ndarray) -> np.ndarray:
        """Weights in the basis, diagonal and bias: those given, or a multiple of the identity."""
        if isinstance(start, np.ndarray):
            return start
        classes, span = self.basis.shape
        return np.concatenate([np.zeros(classes * span), np.full(classes, start), np.zeros(classes)])

    def canonical(self, x: np.ndarray) -> np.ndarray:
        """The same map with the least penalty on the bias."""
        classes = len(self.basis)
        return np.concatenate([x[:-classes], x[-classes:] - x[-classes:].mean()])

    def weight_and_bias(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """W and b at a point."""
        weights, diagonal, bias = self._parts(x)
        matrix = weights @ self.basis.T
        np.fill_diagonal(matrix, diagonal)
        full = Problem(self.z, self.y, self.penalty)
        return full.weight_and_bias(np.concatenate([matrix.ravel(), bias]))

    def blocks(self, start: float | np.ndarray, *, careful: bool = False) -> Blocks:
        """The likelihood's curvature at a point, each number by itself."""
        share = None if self.w is None else (self.w / self.w.mean())[:, None]
        weights, diagonal, bias = self._parts(self.start_point(start))
        scores = self.features @ weights.T + self.u * (diagonal - (weights * self.basis).sum(axis=1)) + bias
        scores[self.z == -np.inf] = -np.inf
        each = variances(scores, share).T / len(self.u)
        curvature = each @ self.features**2, (each.T * self.u**2).sum(axis=0), each.sum(axis=1)
        level = LEVEL * np.mean([part.mean() for part in curvature]) + 1e-12

        def inverse(off: float, diagonal: float, offset: float) -> Inverse:
            parts = zip(curvature, (off, diagonal, offset), strict=True)
            scales = np.concatenate([1 / (part.ravel() + penalty + level) for part, penalty in parts])
            return lambda gradient: scales * gradient

        return inverse

    def likelihood(self, *, quick: bool = False) -> Likelihood:
        """The loss summed over the rows, followed by its gradient."""
        kind: Any = np.float32 if quick else np.float64
        u, features, basis = (part.astype(kind, copy=False) for part in (self.u, self.features, self.basis))
        absent, share = find_absent(self.z), None if self.w is None else self.w.astype(kind)
        gone, columns, turned = None if absent is None else absent.T, np.ascontiguousarray(u.T), features.T.copy()

        def likelihood(x: np.ndarray) -> np.ndarray:
            weights, diagonal, bias = self._parts(x.astype(kind, copy=False))
            alone = diagonal - (weights * basis).sum(axis=1)
            scores = weights @ turned + bias[:, None] + columns * alone[:, None]
            loss, residual = loss_and_residual(scores, gone, self.y, share)
            by_diagonal = (residual * columns).sum(axis=1)
            by_weights = residual @ features - by_diagonal[:, None] * basis
            return np.concatenate([[loss], by_weights.ravel(), by_diagonal, residual.sum(axis=1)]).astype(np.float64)

        return likelihood

    def penalise(self, likelihood: Likelihood, rows: float) -> Objective:
        """The mean of a likelihood's sums over so many rows (or weight), which need not be these, with the penalty."""
        p = self.penalty

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights, diagonal, bias = self._parts(x)
            inside = (weights * self.basis).sum(axis=1)  # what B Vᵀ has on the diagonal, which is not part of W
            off_centre = diagonal - p.centre
            penalties = (
                p.off * ((weights**2).sum() - inside @ inside),
                p.diagonal * off_centre @ off_centre,
                p.bias * bias @ bias,
            )
            pull = p.off * (weights - inside[:, None] * self.basis).ravel(), p.diagonal * off_centre, p.bias * bias
            sums = likelihood(x) / rows
            return float(sums[0]) + float(sum(penalties)), sums[1:] + 2 * np.concatenate(pull)

        return objective

    def _parts(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        classes, span = self.basis.shape
        return x[: -2 * classes].reshape(classes, span), x[-2 * classes : -classes], x[-classes:]
