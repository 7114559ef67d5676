"""Matrix maps of fewer rows than classes: the same minimum as of all matrices, searched in the span of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.likelihood import (
    LEVEL,
    Blocks,
    Inverse,
    Likelihood,
    Problem,
    class_variances,
    mask_scores,
    weigh,
)
from trueup.core.arrays import fill_absent, find_absent
from trueup.core.optimize import Objective


@dataclass(frozen=True, kw_only=True)
class RowSpanProblem(Problem):
    """Penalised likelihood of softmax(W u + b), W = B Vᵀ off its diagonal, V an orthonormal basis of the rows of u.

    The gradient of the likelihood in W is a combination of rows, and its penalty off the diagonal the same in all
    directions, so that the best W is of this form: K·n numbers in place of K². A point is B, the diagonal and the bias.
    """

    u: Tensor
    basis: Tensor
    features: Tensor
    """The rows in the basis, u = (features) Vᵀ."""

    @classmethod
    def of(cls, problem: Problem) -> RowSpanProblem:
        """The same problem; its penalty off the diagonal must be positive."""
        u = problem.scale * problem.z.double()
        absent = find_absent(u)
        u = fill_absent(torch.log_softmax(u, dim=1) if problem.on == "log_probs" else u, absent)
        left, sizes, right = torch.linalg.svd(u, full_matrices=False)
        settings = {name: getattr(problem, name) for name in ("z", "y", "penalty", "on", "scale", "w")}
        return cls(**settings, u=u, basis=right.T.contiguous(), features=left * sizes)

    def rows(self, keep: Tensor) -> Self:
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

    def weight_and_bias(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        """W and b at a point."""
        weights, diagonal, bias = self._parts(x)
        matrix = weights @ self.basis.T
        matrix.diagonal().copy_(diagonal)
        full = Problem(self.z, self.y, self.penalty)
        return full.weight_and_bias(torch.cat([matrix.flatten(), bias]).cpu().numpy())

    def blocks(self, start: float | np.ndarray, *, careful: bool = False) -> Blocks:
        """The likelihood's curvature at a point, each number by itself."""
        share = None if self.w is None else (self.w / self.w.mean())[:, None]
        scores = mask_scores(self._scores(self._parts(self.start_point(start))), find_absent(self.z))
        each = weigh(class_variances(scores), share).T / len(self.u)
        squares = each @ self.features.square(), (each.T * self.u.square()).sum(dim=0), each.sum(dim=1)
        curvature = [part.cpu().numpy() for part in squares]
        level = LEVEL * np.mean([part.mean() for part in curvature]) + 1e-12

        def inverse(off: float, diagonal: float, offset: float) -> Inverse:
            parts = zip(curvature, (off, diagonal, offset), strict=True)
            scales = np.concatenate([1 / (part.ravel() + penalty + level) for part, penalty in parts])
            return lambda gradient: scales * gradient

        return inverse

    def likelihood(self, *, quick: bool = False) -> Likelihood:
        """The loss summed over the rows, followed by its gradient."""
        kind = torch.float32 if quick else torch.float64
        u, features, basis = (part.to(kind) for part in (self.u, self.features, self.basis))
        absent, label = find_absent(self.z), self.y[:, None]
        share = None if self.w is None else self.w[:, None].to(kind)

        def likelihood(x: np.ndarray) -> np.ndarray:
            weights, diagonal, bias = self._parts(x)
            own = diagonal - (weights * self.basis).sum(dim=1)
            scores = torch.addmm(bias.to(kind), features, weights.to(kind).T).addcmul_(u, own.to(kind))
            log_q = torch.log_softmax(mask_scores(scores, absent), dim=1)
            loss = -weigh(log_q.gather(1, label), share).double().sum()
            residual = log_q.exp_()
            residual = weigh(residual.scatter_add_(1, label, torch.full_like(label, -1, dtype=kind)), share)
            by_own = (residual * u).sum(dim=0)
            by_weights = residual.T @ features - by_own[:, None] * basis
            slopes = [loss[None], by_weights.flatten(), by_own, residual.sum(dim=0)]
            return torch.cat([part.double() for part in slopes]).cpu().numpy()

        return likelihood

    def penalise(self, likelihood: Likelihood, rows: float) -> Objective:
        """The mean of a likelihood's sums over so many rows (or weight), which need not be these, with the penalty."""
        p = self.penalty

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights, diagonal, bias = self._parts(x)
            inside = (weights * self.basis).sum(dim=1)  # what B Vᵀ has on the diagonal, which is not part of W
            off_centre = diagonal - p.centre
            penalties = (
                p.off * (weights.square().sum() - inside.square().sum()),
                p.diagonal * off_centre.square().sum(),
                p.bias * bias.square().sum(),
            )
            pull = p.off * (weights - inside[:, None] * self.basis).flatten(), p.diagonal * off_centre, p.bias * bias
            sums = likelihood(x) / rows
            return float(sums[0]) + float(sum(penalties)), sums[1:] + 2 * torch.cat(pull).cpu().numpy()

        return objective

    def _parts(self, x: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        classes, span = self.basis.shape
        whole = torch.from_numpy(x).to(self.basis.device)
        return whole[: -2 * classes].view(classes, span), whole[-2 * classes : -classes], whole[-classes:]

    def _scores(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weights, diagonal, bias = parts
        return self.features @ weights.T + self.u * (diagonal - (weights * self.basis).sum(dim=1)) + bias
