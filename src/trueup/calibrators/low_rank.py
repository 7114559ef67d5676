"""Structured vector scaling plus a matrix of low rank, for more classes than a full matrix can serve."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trueup._core import native
from trueup._core.arrays import as_weighted, fill_absent, find_absent, take_weighted
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import Certificate, Stage, lbfgs
from trueup._core.splits import is_significant_gain
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator
from trueup.calibrators.folds import k_fold
from trueup.calibrators.likelihood import loss_and_residual, mask_scores
from trueup.calibrators.linear import Structured

PENALTIES = (4.0, 1.0, 0.25, 0.0625)
"""Multiples of K/n from which held-out rows choose the matrix's penalty, strongest first."""
_FEW_ROWS = 50  # with fewer rows the result is structured vector scaling.
_MAX_FEATURE = 20.0  # bound of centred log-probabilities; beyond it they carry no further information.
_START = 0.01  # initial size of the factors, since both gradients vanish at zero.
_PATH_FTOL, _FTOL = 1e-4, 1e-5  # precision of the mean loss on the path of penalties and in the final fit.
_FLOAT32_NOISE = 1e-8  # relative rounding of a mean over many rows in float32.


class LowRank(Calibrator):
    """Mix classes along a few directions: q = softmax(w ⊙ u + b + A Bᵀ c), u = ln softmax(z/T), A and B (K, rank).

    c is u minus its row's mean. The penalty is (K/n)(‖w − 1‖² + ‖b‖²) + λ(‖A‖² + ‖B‖²). The minimum of its second part
    over factors with the same product is 2λ times the nuclear norm of A Bᵀ. A held-out fifth of the rows chooses λ; if
    no λ gains more than a standard error there, the result is structured vector scaling. The map has 2 K (rank + 1)
    parameters where a matrix has K². Not for few classes, where `sms_cv` can fit a full matrix.

    Parameters
    ----------
    temperature
        The divisor T > 0.
    weight
        w, shape (classes,).
    bias
        b, shape (classes,).
    left
        A, shape (classes, rank).
    right
        B, shape (classes, rank).

    Examples
    --------
    >>> zero = np.zeros((3, 1))
    >>> LowRank(2.0, np.ones(3), np.zeros(3), zero, zero)(np.array([[2.0, 0.0, 0.0]])).round(4)
    array([[-0.5514, -1.5514, -1.5514]])
    """

    # `sample_invariant` stays False: which rows are held out depends on their order.

    temperature: float
    weight: np.ndarray
    bias: np.ndarray
    left: np.ndarray
    right: np.ndarray

    def __init__(
        self, temperature: float, weight: ArrayLike, bias: ArrayLike, left: ArrayLike, right: ArrayLike
    ) -> None:
        self.set_parameters(temperature=temperature, weight=weight, bias=bias, left=left, right=right)
        shapes = [np.shape(part) for part in (self.temperature, self.weight, self.bias, self.left, self.right)]
        classes, factors = shapes[2], shapes[3]
        if len(factors) != 2 or shapes != [(), classes, factors[:1], factors, factors]:
            shown = ", ".join(map(str, shapes))
            raise ValueError(f"weight and bias must be (K,), left and right (K, rank), got {shown}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the scaled log-probabilities plus the low-rank term."""
        self._check_classes(z, self.bias.shape[0])
        u = xp.fill_absent(xp.log_softmax(xp.double(z) / self.temperature), xp.find_absent(z))
        centred = xp.clip(u - xp.mean(u, axis=1, keepdims=True), -_MAX_FEATURE, _MAX_FEATURE)
        return xp.astype(u * self.weight + self.bias + centred @ self.right @ self.left.T, z.dtype)

    def formula(self, classes: int) -> e.Formula:
        """Return the map as steps: the log-probabilities, a centred and clipped copy of them, then a matrix on both."""
        one = np.eye(len(self.bias))
        both = np.block([[one, -np.ones((len(one), 1))], [one - 1 / len(one), np.zeros((len(one), 1))]])
        clip = e.clip(-_MAX_FEATURE, _MAX_FEATURE)["curves"]
        curves = [e.polynomial(0.0, 1.0)] * len(one) + clip * len(one)
        mixed = e.matrix(np.hstack([np.diag(self.weight), self.left @ self.right.T]), self.bias)
        steps = e.scale(1 / self.temperature), e.op("logsumexp"), e.matrix(both), e.piecewise(*curves), mixed
        return e.Formula("logits", steps, "logits")

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, rank: int = 8, sample_weight: WeightsLike = None
    ) -> Calibrator:
        """Fit the factors from structured vector scaling, with the penalty chosen by held-out likelihood.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        rank
            Rank of the matrix.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Calibrator
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        start = Structured.fit_vector(z, y, sample_weight=w)
        if len(z) < _FEW_ROWS:
            return start
        rank = min(rank, z.shape[1] - 1)
        train, held_out = (take_weighted(z, y, w, rows) for rows in k_fold(z, y, 5)[0])
        fold = Structured.fit_vector(*train[:2], sample_weight=train[2])
        problem, held_out_problem = _Problem(*train, fold), _Problem(*held_out, fold)
        x = problem.start_point(rank)
        vector = np.where(np.arange(len(x)) < 2 * z.shape[1], x, 0.0)  # without the factors
        best, least = None, held_out_problem.row_losses(vector)
        for multiple in PENALTIES:
            x, _ = problem.solve(x, multiple, _PATH_FTOL)
            gain = least - (losses := held_out_problem.row_losses(x))
            # With few held-out rows, one of the penalties gains by luck.
            if is_significant_gain(gain, held_out[2]):
                best, least = multiple, losses
            elif best is not None:
                break
        if best is None:
            return start
        whole = _Problem(z, y, w, start)
        x, certificate = whole.solve(whole.start_point(rank), best, _FTOL)
        return cls(start.temperature, *whole.parts(x)).with_certificate(certificate)


class _Chunk(NamedTuple):
    """Some rows as columns: features, centred features, mask of absent options, labels and weights."""

    u: np.ndarray
    c: np.ndarray
    absent: np.ndarray | None
    label: np.ndarray
    row_weight: np.ndarray | None


class _Problem:
    """Penalised likelihood in float32 around a structured vector scaling."""

    def __init__(self, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, about: Structured) -> None:
        self.classes, self.about = z.shape[1], about
        self.n = float(len(z) if w is None else w.sum())
        self.chunks = []
        for at in native.row_chunks(len(z), self.classes, native.PRODUCT_CHUNK):
            absent = find_absent(z[at])
            u = fill_absent(about.features(NUMPY, z[at].astype(np.float64)), absent).T.astype(np.float32, order="C")
            c = np.clip(u - u.mean(axis=0), -_MAX_FEATURE, _MAX_FEATURE)
            row_weight = None if w is None else w[at].astype(np.float32)
            self.chunks.append(_Chunk(u, c, None if absent is None else absent.T, y[at], row_weight))

    def parts(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split a point into weight, bias and the two factors."""
        k = self.classes
        left, right = x[2 * k :].reshape(2, k, -1)
        return x[:k], x[k : 2 * k], left, right

    def start_point(self, rank: int) -> np.ndarray:
        """Return the vector scaling with small factors along the directions of steepest descent."""
        vector = np.concatenate([self.about.weight, self.about.bias])
        slope = np.zeros((self.classes, self.classes), np.float32)
        parts = self.parts(np.concatenate([vector, np.zeros(2 * self.classes * rank)]).astype(np.float32))
        for chunk in self.chunks:
            slope -= loss_and_residual(_scores(chunk, *parts), *chunk[2:])[1] @ chunk.c.T
        left, _, right = np.linalg.svd(slope)
        return np.concatenate([vector, _START * left[:, :rank].ravel(), _START * right[:rank].T.ravel()])

    def solve(self, x: np.ndarray, multiple: float, ftol: float) -> tuple[np.ndarray, Certificate]:
        """Minimise with a penalty on the factors of this multiple of K/n."""
        vector = self.classes / self.n
        index = np.arange(len(x))
        weights = np.where(index < 2 * self.classes, vector, multiple * vector)
        centre = np.where(index < self.classes, 1.0, 0.0)

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self._sums(x)
            pull = weights * (x - centre)
            return value / self.n + float(pull @ (x - centre)), gradient / self.n + 2 * pull

        return lbfgs(Stage(objective, ftol, _FLOAT32_NOISE), x, max_iter=2000)

    def row_losses(self, x: np.ndarray) -> np.ndarray:
        """Return the unpenalised loss of each row."""
        parts, losses = self.parts(x.astype(np.float32)), []
        for chunk in self.chunks:
            scores = mask_scores(_scores(chunk, *parts), chunk.absent)
            of_label = scores[chunk.label, np.arange(len(chunk.label))]
            losses.append((NUMPY.logsumexp(scores, axis=0) - of_label).astype(np.float64))
        return np.concatenate(losses)

    def _sums(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        parts = self.parts(x.astype(np.float32))
        _, _, left, right = parts
        loss, slopes = 0.0, np.zeros(len(x))
        for chunk in self.chunks:
            value, residual = loss_and_residual(_scores(chunk, *parts), *chunk[2:])
            loss += value
            vector = (residual * chunk.u).sum(axis=1), residual.sum(axis=1)
            factors = residual @ (chunk.c.T @ right), chunk.c @ (residual.T @ left)
            slopes += np.concatenate([part.ravel() for part in (*vector, *factors)])
        return loss, slopes


def _scores(chunk: _Chunk, weight: np.ndarray, bias: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    scores = left @ (right.T @ chunk.c)
    scores += chunk.u * weight[:, None]
    scores += bias[:, None]
    return scores
