"""Matrix maps fitted to fewer rows than classes: the exact minimum, searched in the span of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from trueup._core.arrays import fill_absent, find_absent
from trueup._core.namespace import NUMPY
from trueup._core.optimize import Objective
from trueup.calibrators.likelihood import (
    LEVEL,
    CurvatureModel,
    Inverse,
    Likelihood,
    Problem,
    loss_and_residual,
    variances,
)


@dataclass(frozen=True, kw_only=True)
class RowSpanProblem(Problem):
    """Penalised likelihood of softmax(W u + b) with W = B Vᵀ off its diagonal; V is an orthonormal basis of the rows.

    The likelihood's gradient in W is a combination of rows, and the off-diagonal penalty is the same in all directions.
    So the best W has this form, with K·n numbers instead of K². A point consists of B, the diagonal and the bias.
    """

    u: np.ndarray
    basis: np.ndarray
    features: np.ndarray
    """The rows in the basis, u = (features) Vᵀ."""

    @classmethod
    def of(cls, problem: Problem) -> RowSpanProblem:
        """Return the equivalent problem; its penalty off the diagonal must be positive."""
        u = problem.scale * problem.z.astype(np.float64)
        absent = find_absent(u)
        u = fill_absent(NUMPY.log_softmax(u) if problem.on == "log_probs" else u, absent)
        left, singular_values, right = np.linalg.svd(u, full_matrices=False)
        settings = {name: getattr(problem, name) for name in ("z", "y", "penalty", "on", "scale", "w")}
        return cls(**settings, u=u, basis=np.ascontiguousarray(right.T), features=left * singular_values)

    def rows(self, keep: np.ndarray) -> Self:
        """Return the same problem on the rows of a mask, in the same basis."""
        return replace(super().rows(keep), u=self.u[keep], features=self.features[keep])

    def start_point(self, start: float | np.ndarray) -> np.ndarray:
        """Return the weights in the basis, the diagonal and the bias at which a search starts."""
        if isinstance(start, np.ndarray):
            return start
        classes, span = self.basis.shape
        return np.concatenate([np.zeros(classes * span), np.full(classes, start), np.zeros(classes)])

    def canonical(self, x: np.ndarray) -> np.ndarray:
        """Return the same map with the smallest penalty on the bias."""
        classes = len(self.basis)
        return np.concatenate([x[:-classes], x[-classes:] - x[-classes:].mean()])

    def weight_and_bias(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return W and b of a point."""
        weights, diagonal, bias = self._parts(x)
        matrix = weights @ self.basis.T
        np.fill_diagonal(matrix, diagonal)
        full = Problem(self.z, self.y, self.penalty)
        return full.weight_and_bias(np.concatenate([matrix.ravel(), bias]))

    def blocks(self, start: float | np.ndarray, *, careful: bool = False) -> CurvatureModel:
        """Return the diagonal of the likelihood's curvature at a point."""
        row_weight = None if self.w is None else (self.w / self.w.mean())[:, None]
        weights, diagonal, bias = self._parts(self.start_point(start))
        scores = self.features @ weights.T + self.u * (diagonal - (weights * self.basis).sum(axis=1)) + bias
        scores[self.z == -np.inf] = -np.inf
        class_variance = variances(scores, row_weight).T / len(self.u)
        curvature = (
            class_variance @ self.features**2,
            (class_variance.T * self.u**2).sum(axis=0),
            class_variance.sum(axis=1),
        )
        level = LEVEL * np.mean([part.mean() for part in curvature]) + 1e-12

        def inverse(off_diagonal: float, diagonal: float, offset: float) -> Inverse:
            parts = zip(curvature, (off_diagonal, diagonal, offset), strict=True)
            scales = np.concatenate([1 / (part.ravel() + penalty + level) for part, penalty in parts])
            return lambda gradient: scales * gradient

        return inverse

    def likelihood(self, *, quick: bool = False) -> Likelihood:
        """Return the function that computes the summed loss followed by its gradient."""
        kind: Any = np.float32 if quick else np.float64
        u, features, basis = (part.astype(kind, copy=False) for part in (self.u, self.features, self.basis))
        absent, row_weight = find_absent(self.z), None if self.w is None else self.w.astype(kind)
        absent_columns, columns, turned = (
            None if absent is None else absent.T,
            np.ascontiguousarray(u.T),
            features.T.copy(),
        )

        def likelihood(x: np.ndarray) -> np.ndarray:
            weights, diagonal, bias = self._parts(x.astype(kind, copy=False))
            diagonal_excess = diagonal - (weights * basis).sum(axis=1)
            scores = weights @ turned + bias[:, None] + columns * diagonal_excess[:, None]
            loss, residual = loss_and_residual(scores, absent_columns, self.y, row_weight)
            by_diagonal = (residual * columns).sum(axis=1)
            by_weights = residual @ features - by_diagonal[:, None] * basis
            return np.concatenate([[loss], by_weights.ravel(), by_diagonal, residual.sum(axis=1)]).astype(np.float64)

        return likelihood

    def penalise(self, likelihood: Likelihood, rows: float) -> Objective:
        """Return the mean of a likelihood's sums over rows of this total weight, plus the penalty."""
        p = self.penalty

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights, diagonal, bias = self._parts(x)
            inside = (weights * self.basis).sum(axis=1)  # the diagonal of B Vᵀ, which is not part of W
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
