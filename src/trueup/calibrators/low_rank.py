"""Structured vector scaling with a matrix of low rank besides, for more classes than a whole matrix serves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.linear import Structured
from trueup.core import native
from trueup.core.arrays import as_weighted, fill_absent, find_absent, take_weighted, upcast_half
from trueup.core.native import one_thread
from trueup.core.optimize import Certificate, lbfgs
from trueup.core.splits import exceeds_error, k_fold

PENALTIES = (4.0, 1.0, 0.25, 0.0625)
"""Multiples of K/n that the held-out rows choose from for the matrix, the strongest first."""
_FEW_ROWS = 50
_MAX_FEATURE = 20.0
"""Log-probabilities further from their row's mean mean "never" or "always" just the same."""
_START = 0.01  # of the factors: at zero both gradients vanish
_PATH_FTOL, _FTOL = 1e-4, 1e-5  # mean loss to which a penalty of the path and the last fit are settled
_FLOAT32_NOISE = 1e-8


class LowRank(Calibrator):
    """Mix classes by few directions: q = softmax(w ⊙ u + b + A Bᵀ c), u = ln softmax(z/T), A and B (K, rank).

    c is u less its row's mean. The penalty is (K/n)(‖w − 1‖² + ‖b‖²) + λ(‖A‖² + ‖B‖²), the latter that of the nuclear
    norm of A Bᵀ. λ is chosen on a held-out fifth of the rows; where none gains more than a standard error there,
    structured vector scaling is left. It has 2 K (rank + 1) numbers where a matrix has K². Not for few classes, where
    `sms_cv` can have a whole matrix.

    >>> zero = torch.zeros(3, 1)
    >>> LowRank(2.0, torch.ones(3), torch.zeros(3), zero, zero)(torch.tensor([[2.0, 0.0, 0.0]]))
    tensor([[-0.5514, -1.5514, -1.5514]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # the penalty is chosen on held-out rows
    differentiable = True

    temperature: Tensor
    weight: Tensor
    bias: Tensor
    left: Tensor
    right: Tensor

    def __init__(self, temperature: Tensor | float, weight: Any, bias: Any, left: Any, right: Any) -> None:
        super().__init__()
        parts = {"temperature": temperature, "weight": weight, "bias": bias, "left": left, "right": right}
        for name, value in parts.items():
            self.keep(name, value)
        if not (
            self.bias.ndim == 1
            and self.weight.shape == self.bias.shape
            and self.left.ndim == 2
            and self.left.shape == self.right.shape
            and len(self.left) == len(self.bias)
        ):
            shapes = ", ".join(str(tuple(self.get_buffer(name).shape)) for name in parts)
            raise ValueError(f"weight and bias must be (K,), left and right (K, rank), got {shapes}")

    def map(self, logits: Tensor) -> Tensor:
        """The scaled log-probabilities and what the few directions add."""
        self._check_classes(logits, len(self.bias))
        u = fill_absent(torch.log_softmax(logits.double() / self.temperature, dim=1), find_absent(logits))
        return (u * self.weight + self.bias + _centre(u) @ self.right @ self.left.T).to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, rank: int = 8, weights: Any = None) -> Calibrator:
        """Low-rank structured scaling: from structured vector scaling, the penalty by held-out likelihood."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        start = Structured.fit_vector(z, y, weights=w)
        if len(z) < _FEW_ROWS:
            return start
        rank = min(rank, z.shape[1] - 1)
        train, held_out = (take_weighted(z, y, w, rows) for rows in k_fold(z, y, 5)[0])
        with one_thread(z.numel()):
            fold = Structured.fit_vector(*train[:2], weights=train[2])
            problem, asked = _Problem(*train, fold), _Problem(*held_out, fold)
            x = problem.start_point(rank)
            best, least = None, asked.row_losses(problem.without_factors(x))
            for multiple in PENALTIES:
                x, _ = problem.solve(x, multiple, _PATH_FTOL)
                gain = least - (losses := asked.row_losses(x))
                # By more than its standard error: with few rows held out, one of the penalties gains by luck.
                if exceeds_error(gain, held_out[2]):
                    best, least = multiple, losses
                elif best is not None:
                    break
            if best is None:
                return start
            whole = _Problem(z, y, w, start)
            x, certificate = whole.solve(whole.start_point(rank), best, _FTOL)
        return cls(start.temperature, *whole.parts(torch.from_numpy(x))).with_certificate(certificate)


def _centre(u: Tensor) -> Tensor:
    return (u - u.mean(dim=1, keepdim=True)).clamp(-_MAX_FEATURE, _MAX_FEATURE)


class _Rows(NamedTuple):
    """Some rows: the features, those less their mean, where options are absent, the labels and the weights."""

    u: Tensor
    c: Tensor
    absent: Tensor | None
    label: Tensor
    share: Tensor


class _Problem:
    """Penalised likelihood in single precision, about a structured vector scaling."""

    def __init__(self, z: Tensor, y: Tensor, w: Tensor | None, about: Structured) -> None:
        self.classes, self.about = z.shape[1], about
        self.n = float(len(z) if w is None else w.sum())
        share = torch.ones(len(z), dtype=torch.float64, device=z.device) if w is None else w
        self.rows = []
        for at in native.row_chunks(len(z), self.classes, native.PRODUCT):
            absent = find_absent(z[at])
            u = fill_absent(about.features(upcast_half(z[at]).double()), absent).float()
            self.rows.append(_Rows(u, _centre(u), absent, y[at], share[at, None].float()))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight, bias, and the two factors."""
        k = self.classes
        left, right = x[2 * k :].view(2, k, -1)
        return x[:k], x[k : 2 * k], left, right

    def start_point(self, rank: int) -> np.ndarray:
        """The vector scaling, with factors along the directions in which the loss falls fastest, hardly begun."""
        zero = torch.zeros(2 * self.classes * rank, dtype=torch.float64)
        x = torch.cat([self.about.weight, self.about.bias, zero])
        slope = torch.zeros(self.classes, self.classes)
        for rows in self.rows:
            slope -= _loss_and_residual(rows, *(part.float() for part in self.parts(x)))[1].T @ rows.c
        left, _, right = torch.linalg.svd(slope)
        factors = _START * torch.stack([left[:, :rank], right[:rank].T])
        return torch.cat([x[: 2 * self.classes], factors.double().ravel()]).numpy()

    def without_factors(self, x: np.ndarray) -> np.ndarray:
        """The vector scaling alone."""
        return np.concatenate([x[: 2 * self.classes], np.zeros(len(x) - 2 * self.classes)])

    def solve(self, x: np.ndarray, multiple: float, ftol: float) -> tuple[np.ndarray, Certificate]:
        """Minimise with a penalty on the factors of this multiple of K/n."""
        vector = self.classes / self.n
        weights = np.full(len(x), multiple * vector)
        weights[: 2 * self.classes] = vector
        centre = np.zeros(len(x))
        centre[: self.classes] = 1.0

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self._sums(x)
            pull = weights * (x - centre)
            return value / self.n + float(pull @ (x - centre)), gradient / self.n + 2 * pull

        return lbfgs(objective, x, ftol=ftol, f_noise=_FLOAT32_NOISE, max_iter=2000)

    def row_losses(self, x: np.ndarray) -> np.ndarray:
        """The loss of each row, without a penalty."""
        parts = self.parts(torch.from_numpy(x).float())
        log_q = [_log_probs(rows, *parts).gather(1, rows.label[:, None])[:, 0] for rows in self.rows]
        return -torch.cat(log_q).double().numpy()

    def _sums(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        weight, bias, left, right = self.parts(torch.from_numpy(x).float())
        loss, slopes = 0.0, np.zeros(len(x))
        for rows in self.rows:
            value, residual = _loss_and_residual(rows, weight, bias, left, right)
            loss += value
            vector = (residual * rows.u).sum(dim=0), residual.sum(dim=0)
            factors = ((rows.c @ right).T @ residual).T, ((residual @ left).T @ rows.c).T
            slopes += np.concatenate([part.double().numpy().ravel() for part in (*vector, *factors)])
        return loss, slopes


def _log_probs(rows: _Rows, weight: Tensor, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    scores = torch.addcmul(bias, rows.u, weight).addmm_(rows.c @ right, left.T)
    return torch.log_softmax(scores if rows.absent is None else scores.masked_fill_(rows.absent, -torch.inf), dim=1)


def _loss_and_residual(rows: _Rows, *parts: Tensor) -> tuple[float, Tensor]:
    """The summed loss of some rows, and q less the one-hot label, each row times its weight."""
    log_q = _log_probs(rows, *parts)
    loss = -float((rows.share * log_q.gather(1, rows.label[:, None])).double().sum())
    residual = log_q.exp_()
    residual[torch.arange(len(rows.label)), rows.label] -= 1
    return loss, residual.mul_(rows.share)
