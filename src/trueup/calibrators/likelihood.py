"""Penalised likelihood of a linear map of logits: the objective, and approximate inverses of its curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from trueup._core import native
from trueup._core.arrays import fill_absent, find_absent, upcast_half
from trueup._core.loss_sums import vector_sums
from trueup._core.namespace import NUMPY
from trueup._core.optimize import Certificate, Objective, Stage, lbfgs
from trueup._core.row_scores import log_sum_exp

_SMALL_PROBLEM = 1 << 23  # number of logits up to which the fit is computed in float64 and kept in memory.
_CURVATURE_NUMBERS = 1 << 19  # number of logits from which the curvature is computed.
_FTOL, _MATRIX_FTOL = 1e-10, 1e-12  # predicted gain in mean loss at which a search stops.
_COARSE_FTOL = 1e-9  # the same for the search in float32 before the search in float64.
_FOLD_FTOL = 1e-6  # the same in a fold, which only ranks penalties.
_FLOAT32_NOISE = 1e-8  # relative rounding of a mean over many rows in float32.
VECTOR_PENALTY = 1e-8
"""The L2 penalty of vector scaling; without it, adding a constant to the bias would change nothing."""
MATRIX_PENALTY = 1e-6
"""The default L2 penalty of matrix scaling; without it, separable data have no finite optimum."""

Likelihood = Callable[[np.ndarray], np.ndarray]
"""Maps the parameters (weights, then bias) to one array: the summed loss, then its gradient."""

Solution = tuple[np.ndarray, np.ndarray, Certificate]
"""Weight, bias, and the certificate of their search."""

Inverse = Callable[[np.ndarray], np.ndarray]
CurvatureModel = Callable[[float, float, float], Inverse]
"""Takes three penalty curvatures (off-diagonal, diagonal, bias).

It adds them to the likelihood's, and returns the inverse.
"""

LEVEL = 1e-6
"""Fraction of the mean curvature that is added where the data may have none."""
_ROUNDING_LEVEL = 1e-10  # the same for exact curvature in float64.
_PSEUDO_ROWS = 5.0  # pseudo-rows by which a class's moments are shrunk towards those of all classes.
_FEW_CLASSES, _MANY_CLASSES = 32, 128  # limits for a separate curvature per class: K (K + 1)² numbers.


@dataclass(frozen=True)
class Penalty:
    """Squares added to the mean loss: off·Σ_{j≠k} w_jk² + diagonal·Σ (w_kk − centre)² + bias·Σ b_k²."""

    off: float = 0.0
    diagonal: float = 0.0
    bias: float = 0.0
    centre: float = 0.0

    @classmethod
    def odir(cls, strength: float, classes: int, *, bias: float | None = None, normalise: bool = True) -> Penalty:
        """Return off-diagonal and intercept regularisation; normalised, each is a mean over its entries.

        The diagonal has a tiny penalty too, since it would diverge on separable data.
        """
        off = strength / (classes * (classes - 1)) if normalise else strength
        mu = strength if bias is None else bias
        return cls(off=off, diagonal=MATRIX_PENALTY, bias=mu / classes if normalise else mu)

    @classmethod
    def l2(cls, strength: float, classes: int, *, normalise: bool = True) -> Penalty:
        """Return the same penalty on every entry of the matrix, and a tiny one on the bias."""
        each = strength / classes**2 if normalise else strength
        return cls(off=each, diagonal=each, bias=VECTOR_PENALTY)


@dataclass(frozen=True)
class Problem:
    """Penalised likelihood of softmax(W u + b) on checked arrays, with u = z or u = ln softmax(scale·z).

    A class whose logit is −∞ in a row (an absent option) is left out of that row's softmax. Its u is the mean over the
    row's other options.
    """

    z: np.ndarray
    y: np.ndarray
    penalty: Penalty
    on: Literal["logits", "log_probs"] = "logits"
    """The features u: the scaled logits, or their log-softmax."""
    scale: float = 1.0
    vector: bool = False
    w: np.ndarray | None = None
    """Weights of the rows, if any."""

    @cached_property
    def total(self) -> float:
        """Return the sum of the weights, or the number of rows."""
        return float(len(self.z) if self.w is None else self.w.sum())

    def solve(self, start: float | np.ndarray, *, tolerance: float = 1e-7) -> Solution:
        """Minimise, starting from a multiple of the identity or from another problem's solution."""
        x = self.start_point(start)
        if self.vector and not isinstance(start, np.ndarray):
            x = self._with_frequencies(x)
        stage = Stage(self._objective(), max(_FTOL if self.vector else _MATRIX_FTOL, self._noise), self._noise)
        coarse = None
        if self._noise < _FLOAT32_NOISE:
            coarse = Stage(self._objective(quick=True), _COARSE_FTOL, _FLOAT32_NOISE)
        x, certificate = self.search(stage, x, self.blocks(x), tolerance=tolerance, max_iter=3000, coarse=coarse)
        return *self.weight_and_bias(x), certificate

    def search(
        self, stage: Stage, start: np.ndarray, blocks: CurvatureModel, **options: Any
    ) -> tuple[np.ndarray, Certificate]:
        """Minimise an objective of these weights, preconditioned by the curvature at the start."""

        def refresh(x: np.ndarray) -> Inverse:
            return self.inverse(self.blocks(x, careful=True))

        return lbfgs(stage, start, precondition=self.inverse(blocks), refresh=refresh, **options)

    def weight_and_bias(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return W and b of a point, with the smallest penalty among equivalent ones."""
        classes = self.z.shape[1]
        x = self.canonical(x)
        weight, bias = x[:-classes], x[-classes:]
        return weight if self.vector else weight.reshape(classes, classes), bias

    def solve_coarse(self, start: np.ndarray, blocks: CurvatureModel, likelihood: Likelihood) -> np.ndarray:
        """Minimise in float32 with the curvature of a similar problem: accurate enough to compare penalties."""
        stage = Stage(self.penalise(likelihood, self.total), _FOLD_FTOL, _FLOAT32_NOISE)
        return self.canonical(self.search(stage, start, blocks, max_iter=3000)[0])

    def start_point(self, start: float | np.ndarray) -> np.ndarray:
        """Return the weights and bias at which a search starts."""
        if isinstance(start, np.ndarray):
            return start
        classes = self.z.shape[1]
        weight = np.full(classes, start) if self.vector else start * np.eye(classes)
        return np.concatenate([weight.ravel(), np.zeros(classes)])

    def _with_frequencies(self, x: np.ndarray) -> np.ndarray:
        """Return the point with a bias that approximately matches the class frequencies, for rare classes."""
        n, classes = self.total, self.z.shape[1]
        u, absent, row_weight = self._subsample(2048)
        probs = NUMPY.softmax(mask_scores(u * float(x[0]), absent))
        mean_probs = weigh(probs, row_weight).mean(axis=0, dtype=np.float64)
        return np.concatenate([x[:-classes], np.log((self._counts + 0.5) / (n * mean_probs + 0.5))])

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.bincount(self.y, self.w, minlength=self.z.shape[1])

    def _subsample(self, rows: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return every k-th row of u, the mask of absent options, and the rows' weights with mean one."""
        n, classes = self.z.shape
        kept = slice(None, None, max(1, n // max(64, min(rows, _CURVATURE_NUMBERS // classes))))
        u = self.scale * self.z[kept].astype(np.float32)
        row_weight = None if self.w is None else (self.w[kept] / self.w[kept].mean()).astype(np.float32)[:, None]
        absent = find_absent(u)
        return fill_absent(NUMPY.log_softmax(u) if self.on == "log_probs" else u, absent), absent, row_weight

    def canonical(self, x: np.ndarray) -> np.ndarray:
        """Return the same map with the smallest penalty.

        Adding one row vector to every row of W, or one number to every bias, changes no probability. Choosing the best
        of these before each evaluation leaves the search no flat direction.
        """
        classes = self.z.shape[1]
        bias = x[-classes:] - x[-classes:].mean()
        if self.vector or not (weights := self._weights()).any():
            return np.concatenate([x[:-classes], bias])
        matrix = x[:-classes].reshape(classes, classes)
        excess = matrix - self.penalty.centre * np.eye(classes)
        matrix = matrix - (weights * excess).sum(axis=0) / weights.sum(axis=0)
        return np.concatenate([matrix.ravel(), bias])

    @property
    def _noise(self) -> float:
        """Return the relative rounding of the objective."""
        return 1e-15 if self.vector or self._small or self.z.dtype == np.float64 else _FLOAT32_NOISE

    @property
    def _small(self) -> bool:
        return self.z.size <= _SMALL_PROBLEM

    def _weights(self) -> np.ndarray:
        identity = np.eye(self.z.shape[1])
        return np.asarray(self.penalty.off * (1 - identity) + self.penalty.diagonal * identity)

    @cached_property
    def _shift(self) -> np.ndarray | None:
        return log_sum_exp(self.scale * self.z if self.scale != 1 else self.z) if self.on == "log_probs" else None

    def blocks(self, start: float | np.ndarray, *, careful: bool = False) -> CurvatureModel:
        """Return the likelihood's curvature at a point, from a subsample."""
        classes = self.z.shape[1]
        u, absent, row_weight = self._subsample(2048 if self.vector else 4096)
        x = self.canonical(self.start_point(start))
        weight, bias = (part.astype(u.dtype) for part in (x[:-classes], x[-classes:]))
        scores = (u * weight if self.vector else u @ weight.reshape(classes, classes).T) + bias
        scores = mask_scores(scores, absent)
        if careful and not self.vector and classes <= _FEW_CLASSES:
            return _full_curvature(u.astype(np.float64), NUMPY.softmax(scores.astype(np.float64)), row_weight)
        class_variance = variances(scores, row_weight)
        if self.vector:
            return _vector_blocks(u, class_variance, self._counts)
        few = classes <= (_MANY_CLASSES if careful else _FEW_CLASSES)
        return _class_blocks(u, class_variance) if few else _pooled_blocks(u, class_variance)

    def inverse(self, blocks: CurvatureModel) -> Inverse:
        """Return the inverse of the penalised loss's curvature."""
        return blocks(2 * self.penalty.off, 2 * self.penalty.diagonal, 2 * self.penalty.bias)

    def _objective(self, *, quick: bool = False) -> Objective:
        """Return the penalised loss and its gradient; `quick` computes in float32."""
        return self.penalise(self.likelihood(quick=quick), self.total)

    def likelihood(self, *, quick: bool = False) -> Likelihood:
        """Return the function that computes the summed loss followed by its gradient."""
        if not self.vector:
            return self._by_products(quick)
        options: dict[str, Any] = {"scale": self.scale, "shift": self._shift, "sample_weight": self.w, "quick": quick}
        return lambda x: vector_sums(self.z, self.y, *np.split(np.ascontiguousarray(x), 2), **options)

    def penalise(self, likelihood: Likelihood, rows: float) -> Objective:
        """Return the mean of a likelihood's sums over rows of this total weight, plus the penalty."""
        classes = self.z.shape[1]
        p = self.penalty
        centre = p.centre if self.vector else p.centre * np.eye(classes).ravel()
        weights = p.diagonal if self.vector else self._weights().ravel()

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            x = self.canonical(x)
            bias = x[-classes:]
            sums = likelihood(x) / rows
            off_centre = x[:-classes] - centre
            pull = weights * off_centre
            value = float(sums[0] + pull @ off_centre + p.bias * bias @ bias)
            return value, sums[1:] + 2 * np.concatenate([pull, p.bias * bias])

        return objective

    def _by_products(self, quick: bool) -> Likelihood:
        """Compute loss and gradient by matrix products, in chunks of rows; small problems are computed in float64."""
        classes, shift = self.z.shape[1], self._shift
        kind = np.dtype(np.float32 if quick else np.float64 if self._small else upcast_half(self.z[:0]).dtype)

        def chunk(rows: slice) -> _Chunk:
            part = self.z[rows]
            absent = find_absent(part)
            if shift is None:
                u = part.astype(kind) * kind.type(self.scale)
            else:  # in float64, since the two may be large and nearly equal
                u = self.scale * part.astype(np.float64) - shift[rows, None]
            u = fill_absent(u, absent).astype(kind, copy=False)
            row_weight = None if self.w is None else self.w[rows].astype(kind)
            return _Chunk(np.ascontiguousarray(u.T), None if absent is None else absent.T, self.y[rows], row_weight)

        parts = list(native.row_chunks(len(self.z), classes, native.PRODUCT_CHUNK))
        kept: list[_Chunk] = []

        def likelihood(x: np.ndarray) -> np.ndarray:
            sums = np.zeros(1 + classes * (classes + 1))
            slopes, offsets = sums[1:-classes].reshape(classes, classes), sums[-classes:]
            weight, bias = x[:-classes].reshape(classes, classes).astype(kind), x[-classes:].astype(kind)
            if self._small and not kept:
                kept.extend(map(chunk, parts))
            for rows in kept or map(chunk, parts):
                loss, residual = loss_and_residual(weight @ rows.u + bias[:, None], *rows[1:])
                sums[0] += loss
                slopes += residual @ rows.u.T
                offsets += residual.sum(axis=1)
            return sums

        return likelihood

    def rows(self, keep: np.ndarray) -> Self:
        """Return the same problem on the rows of a mask."""
        return replace(self, z=self.z[keep], y=self.y[keep], w=None if self.w is None else self.w[keep])


class _Chunk(NamedTuple):
    """Some rows as columns: features (classes, rows), mask of absent options, labels and weights."""

    u: np.ndarray
    absent: np.ndarray | None
    label: np.ndarray
    row_weight: np.ndarray | None


def loss_and_residual(
    scores: np.ndarray, absent: np.ndarray | None, label: np.ndarray, row_weight: np.ndarray | None
) -> tuple[float, np.ndarray]:
    """Return the summed loss of scores (classes, rows), which are overwritten, and softmax − one-hot, weighted."""
    mask_scores(scores, absent)
    at = label, np.arange(len(label))
    scores -= scores.max(axis=0)
    losses = -scores[at].astype(np.float64)
    np.exp(scores, out=scores)
    total = scores.sum(axis=0)
    losses += np.log(total)
    scores /= total
    scores[at] -= 1
    if row_weight is None:
        return float(losses.sum()), scores
    scores *= row_weight
    return float(losses @ row_weight), scores


def matrix_problem(z: np.ndarray, y: np.ndarray, penalty: Penalty, **settings: Any) -> Problem:
    """Return the problem of a full matrix; it is smaller if there are far fewer rows than classes."""
    full = Problem(z, y, penalty, **settings)
    if 2 * len(z) > z.shape[1] or penalty.off <= 0:
        return full
    return RowSpanProblem.of(full)


def _vector_blocks(u: np.ndarray, class_variance: np.ndarray, counts: np.ndarray) -> CurvatureModel:
    """Return 2 × 2 blocks in (w_k, b_k) for softmax(w ⊙ u + b), each class separately.

    `class_variance` is p_k(1 − p_k). With many classes, few rows are informative about each. So a class's curvature is
    shrunk towards a value proportional to its number of labels, and its moments towards those of all classes.
    """
    scaled = class_variance * u
    a, m, d = (x.sum(axis=0, dtype=np.float64) for x in (scaled * u, scaled, class_variance))
    total = d.sum() + 1e-30
    expected = (counts + 1) / (counts + 1).sum() * total
    # Both are means, so that centre² ≤ squares.
    squares, centre = ((x + _PSEUDO_ROWS * x.sum() / total) / (d + _PSEUDO_ROWS) for x in (a, m))
    d = expected * (d + _PSEUDO_ROWS) / (expected + _PSEUDO_ROWS) / len(u)
    a, m = squares * d, centre * d
    level = LEVEL * (a.mean() + d.mean()) / 2 + 1e-12

    def inverse(_: float, diagonal: float, offset: float) -> Inverse:
        weight, bias = a + diagonal + level, d + offset + level
        determinant = weight * bias - m * m

        def apply(gradient: np.ndarray) -> np.ndarray:
            g, h = np.split(gradient, 2)
            return np.concatenate([bias * g - m * h, weight * h - m * g]) / np.tile(determinant, 2)

        return apply

    return inverse


def _class_blocks(u: np.ndarray, class_variance: np.ndarray) -> CurvatureModel:
    """Return one block per class for softmax(W u + b): Σ p_k(1 − p_k) ũũᵀ with ũ = (u, 1)."""
    n, classes = u.shape
    extended = np.concatenate([u, np.ones((n, 1), u.dtype)], axis=1)
    blocks = np.stack([(extended * class_variance[:, k, None]).T @ extended / n for k in range(classes)]).astype(
        np.float64
    )
    level = LEVEL * np.diagonal(blocks, axis1=1, axis2=2).mean() + 1e-12

    def inverse(off_diagonal: float, diagonal: float, offset: float) -> Inverse:
        ridge = _ridge(classes, off_diagonal + level, diagonal + level, offset + level)
        inverted = np.linalg.inv(blocks + ridge[:, :, None] * np.eye(classes + 1))
        return _by_class(classes, lambda rows: (inverted @ rows[:, :, None])[:, :, 0])

    return inverse


def _full_curvature(u: np.ndarray, probs: np.ndarray, row_weight: np.ndarray | None) -> CurvatureModel:
    """Return the curvature of softmax(W u + b) for all classes jointly: blocks Σ p_j(δ_jk − p_k) ũũᵀ with ũ = (u, 1).

    Logits may lie nearly in a plane, for example if the rows of the last layer sum to zero. Separate blocks then miss
    the curvature across that plane, and the search would be slow.
    """
    n, classes = u.shape
    extended = np.concatenate([u, np.ones_like(u[:, :1])], axis=1)
    curvature = np.empty((classes, classes + 1, classes, classes + 1))
    for j in range(classes):
        for k in range(j + 1):
            covariance = weigh((probs[:, j] * (float(j == k) - probs[:, k]))[:, None], row_weight)
            curvature[j, :, k] = curvature[k, :, j] = (extended * covariance).T @ extended / n
    numbers = classes * (classes + 1)
    matrix = curvature.reshape(numbers, numbers)
    level = _ROUNDING_LEVEL * matrix.diagonal().mean() + 1e-15

    def inverse(off_diagonal: float, diagonal: float, offset: float) -> Inverse:
        ridge = _ridge(classes, off_diagonal + level, diagonal + level, offset + level)
        from scipy.linalg import cho_factor, cho_solve  # slow to import

        factor = cho_factor(matrix + np.diag(ridge.ravel()))
        return _by_class(classes, lambda rows: cho_solve(factor, rows.ravel()).reshape(rows.shape))

    return inverse


def _ridge(classes: int, off_diagonal: float, diagonal: float, offset: float) -> np.ndarray:
    """Return a penalty's curvature, (classes, classes + 1): its weights, then its bias."""
    ridge = np.full((classes, classes + 1), off_diagonal)
    np.fill_diagonal(ridge, diagonal)
    ridge[:, -1] = offset
    return ridge


def _by_class(classes: int, solve: Inverse) -> Inverse:
    """Apply a function of rows, one per class, to weights followed by biases."""

    def apply(gradient: np.ndarray) -> np.ndarray:
        rows = np.concatenate([gradient[:-classes].reshape(classes, -1), gradient[-classes:, None]], axis=1)
        out = solve(rows)
        return np.concatenate([out[:, :-1].ravel(), out[:, -1]])

    return apply


def _pooled_blocks(u: np.ndarray, class_variance: np.ndarray) -> CurvatureModel:
    """Return the blocks d_k [C + m_k m_kᵀ, m_k; m_kᵀ, 1].

    d_k is the sum of the weights p_k(1 − p_k), and m_k the mean of u under them. All classes share one covariance C,
    with one eigendecomposition, since few rows carry weight in a class; only u_k itself has a variance of its own in
    class k. In the coordinates w_k and b_k + m_kᵀw_k the curvature is block-diagonal; the two penalties are then
    rank-one corrections.
    """
    n, classes = u.shape
    d = class_variance.sum(axis=0, dtype=np.float64) / n + 1e-12
    mean = (class_variance.T @ u / n).astype(np.float64) / d[:, None]
    gram = ((u * class_variance.sum(axis=1, keepdims=True)).T @ u / n).astype(np.float64)
    pooled = (gram - (mean.T * d) @ mean) / d.sum()
    variance = (class_variance * u * u).sum(axis=0, dtype=np.float64) / n / d - mean.diagonal() ** 2
    values, vectors = np.linalg.eigh(pooled)
    values = np.maximum(values, LEVEL * values.mean()) + 1e-12
    turned = mean @ vectors  # in the basis of eigenvectors, as everything below

    def inverse(off_diagonal: float, diagonal: float, offset: float) -> Inverse:
        scales = 1 / (d[:, None] * values + off_diagonal)  # of class k along each eigenvector
        # The k-th entry of class k has its own variance and the diagonal's penalty instead of the pooled ones.
        corner = ((vectors * scales) * vectors).sum(axis=1)
        excess = (
            diagonal - off_diagonal + d * np.maximum(variance - pooled.diagonal(), 0)
        )  # clipped, to stay positive definite
        entry = scales * vectors
        entry_share = excess / (1 + excess * corner)

        def without_bias(g: np.ndarray) -> np.ndarray:
            return scales * g - entry * (entry_share * (entry * g).sum(axis=1))[:, None]

        centre = without_bias(turned)
        coupling = offset * d / (d + offset)
        centre_share = coupling / (1 + coupling * (centre * turned).sum(axis=1))

        def apply(gradient: np.ndarray) -> np.ndarray:
            g, h = gradient[:-classes].reshape(classes, classes), gradient[-classes:]
            # The gradient along m_k at a fixed b_k + m_kᵀw_k, with the correction for the bias's penalty.
            g = g @ vectors + turned * (h * (offset / (d + offset) - 1))[:, None]
            w = without_bias(g) - centre * (centre_share * (centre * g).sum(axis=1))[:, None]
            b = (h - d * (w * turned).sum(axis=1)) / (d + offset)
            return np.concatenate([(w @ vectors.T).ravel(), b])

        return apply

    return inverse


def mask_scores(scores: np.ndarray, absent: np.ndarray | None) -> np.ndarray:
    """Set scores of absent options to −∞, in place."""
    if absent is not None:
        scores[absent] = -np.inf
    return scores


def weigh(rows: np.ndarray, row_weight: np.ndarray | None) -> np.ndarray:
    """Multiply rows by their weights, if any."""
    return rows if row_weight is None else rows * row_weight


def variances(scores: np.ndarray, row_weight: np.ndarray | None) -> np.ndarray:
    """Return the variance p(1 − p) of each class's indicator, times the weight of its row."""
    p = NUMPY.softmax(scores)
    return weigh(p * (1 - p), row_weight)


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
