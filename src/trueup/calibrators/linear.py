"""Linear maps of logits or log-probabilities by penalised likelihood: vector, matrix, Dirichlet, structured scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from trueup._core.arrays import as_weighted
from trueup._core.namespace import Namespace
from trueup._core.optimize import lbfgs
from trueup._core.splits import k_fold
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator, row_count
from trueup.calibrators.likelihood import MATRIX_PENALTY, VECTOR_PENALTY, Penalty, Problem, Solution, matrix_problem
from trueup.calibrators.temperature import finite_inverse_temperature, near_inverse_temperature

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Seven coefficients from 1e-2 to 1e4, as the literature searches."""
STRUCTURED_PENALTIES = tuple(10.0**power for power in range(-3, 3))
"""Multiples of the penalty on M of structured matrix scaling that cross-validation tries; 100 is SVS, nearly."""
_FAR_OFF = 100.0
"""So many standard deviations from zero, the mean of the logits is taken out before a fit."""


class Linear(Calibrator):
    """q = softmax(W u + b), with u the logits or something like them; of an absent option, the mean of the others."""

    shift_invariant = False
    sample_invariant = True

    weight: np.ndarray
    bias: np.ndarray

    def __init__(self, weight: Any, bias: Any) -> None:
        self.set_parameters(weight=weight, bias=bias)
        classes, shape = np.size(self.bias), np.shape(self.weight)
        if shape not in ((classes,), (classes, classes)):
            raise ValueError(f"weight must have shape ({classes},) or ({classes}, {classes}), got {shape}")

    def map(self, xp: Namespace, z: Any) -> Any:
        """Apply the weights, a vector or a matrix, and the bias."""
        self._check_classes(z, self.bias.shape[0])
        u = xp.fill_absent(self.features(xp, z), xp.find_absent(z))
        w, b = xp.astype(self.weight, u.dtype), xp.astype(self.bias, u.dtype)
        return (u * w if w.ndim == 1 else u @ w.T) + b

    def features(self, xp: Namespace, z: Any) -> Any:
        """What the map is linear in."""
        return z


class Vector(Linear):
    """Scale each class's logit and add a bias: q = softmax(w ⊙ z + b), by likelihood.

    The bias is centred, since a constant added to it changes nothing. Not for few rows and many classes.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Vector.fit(2 * z, y).weight.round(1)
    array([0.5, 0.5, 0.5])
    """

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Vector scaling: minimise the negative log-likelihood."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        z, offset = _split_offset(z)
        problem = Problem(z, y, Penalty(diagonal=VECTOR_PENALTY, bias=VECTOR_PENALTY), vector=True, w=w)
        weight, bias, certificate = problem.solve(near_inverse_temperature(z, y, w))
        return cls(weight, _shift_bias(weight, bias, offset)).with_certificate(certificate)

    @classmethod
    def fit_bias_corrected(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Bias-corrected temperature scaling: one temperature and a bias for each class, q = softmax(z/T + b).

        Alexandari, Kundaje & Shrikumar, "Maximum likelihood with bias-corrected calibration" (2020).
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        classes = z.shape[1]
        problem = Problem(z, y, Penalty(), vector=True, w=w)
        likelihood = problem.likelihood()

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            sums = likelihood(np.concatenate([np.full(classes, x[0]), x[1:]])) / problem.total
            # A constant added to the bias would change nothing without a trace of a penalty.
            pull = np.concatenate([[0.0], VECTOR_PENALTY * x[1:]])
            gradient = np.concatenate([[sums[1 : classes + 1].sum()], sums[classes + 1 :]])
            return float(sums[0] + pull @ x), gradient + 2 * pull

        x, certificate = lbfgs(objective, np.concatenate([[near_inverse_temperature(z, y, w)], np.zeros(classes)]))
        return cls(np.full(classes, x[0]), x[1:] - x[1:].mean()).with_certificate(certificate)


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
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, penalty: float = MATRIX_PENALTY, sample_weight: WeightsLike = None
    ) -> Self:
        """Matrix scaling: minimise the negative log-likelihood, with an L2 penalty on everything."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        _check_rows(z)
        z, offset = _split_offset(z)
        problem = Problem(z, y, Penalty(off=penalty, diagonal=penalty, bias=penalty), w=w)
        weight, bias, certificate = problem.solve(near_inverse_temperature(z, y, w))
        return cls(weight, _shift_bias(weight, bias, offset)).with_certificate(certificate)

    @classmethod
    def fit_odir(
        cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, **options: Any
    ) -> Self:
        """Matrix scaling, ODIR: penalise what is off the diagonal, and the bias (MS-ODIR)."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2)
        z, offset = _split_offset(z)
        weight, bias, certificate = _fit_penalised(Problem(z, y, Penalty(), w=w), **options)
        return cls(weight, _shift_bias(weight, bias, offset)).with_certificate(certificate)


class Dirichlet(Linear):
    """A linear map of the log-probabilities: q = softmax(W ln p + b).

    With ODIR the penalty λ Σ_{j≠k} w_jk²/(K(K−1)) + μ Σ_j b_j²/K leaves the diagonal free; with L2 it is on all of W.
    λ = μ is chosen from 1e-2 … 1e4 by five-fold cross-validated likelihood. Not for a few hundred rows of many classes.
    Kull et al., "Beyond temperature scaling" (2019).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Dirichlet.fit_odir(2 * z, y).weight.diagonal().round(1)
    array([0.5, 0.5, 0.5])
    """

    shift_invariant = True
    sample_invariant = False  # the penalty is chosen on folds, over which copies are spread

    def features(self, xp: Namespace, z: Any) -> Any:
        """Log-probabilities."""
        return xp.log_softmax(z)

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, **options: Any) -> Self:
        """Dirichlet calibration: L2 on the whole matrix; the bias is free."""
        return cls.fit_odir(logits, labels, sample_weight=sample_weight, l2=True, **options)

    @classmethod
    def fit_odir(
        cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, **options: Any
    ) -> Self:
        """Dirichlet calibration, ODIR: penalise what is off the diagonal, and the bias."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2)
        weight, bias, certificate = _fit_penalised(Problem(z, y, Penalty(), on="log_probs", w=w), **options)
        return cls(weight, bias).with_certificate(certificate)


class Structured(Linear):
    """Temperature scaling, and deviations from it that are penalised less the more rows there are.

    With u = ln softmax(z/T): SVS fits q = softmax((1 + v) ⊙ u + b) with penalty (K/n)(‖b‖² + ‖v‖²); SMS adds a matrix
    M, zero on its diagonal, with penalty (K(K−1)/n)‖M‖². As n falls both tend to temperature scaling, so they do not
    overfit. With `fit_matrix_cv` a multiple of the penalty on M, 1e-3 … 100, is chosen by five-fold cross-validated
    likelihood, from nearly SVS to nearly a free matrix. Not for maps that must keep the predicted class.
    Berta et al. (2026).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Structured.fit_vector(2 * z, y).weight.round(1)
    array([1.1, 1. , 0.9])
    """

    shift_invariant = True
    sample_invariant = False  # twice the samples, and half the penalty

    temperature: float

    def __init__(self, temperature: float, weight: Any, bias: Any) -> None:
        super().__init__(weight, bias)
        self.set_parameter("temperature", temperature)

    def features(self, xp: Namespace, z: Any) -> Any:
        """Log-probabilities after temperature scaling."""
        return xp.log_softmax(z / self.temperature)

    @classmethod
    def fit_vector(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Structured vector scaling: a vector of deviations (SVS)."""
        return cls._fit(logits, labels, sample_weight, vector=True)

    @classmethod
    def fit_matrix(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Structured matrix scaling: a matrix of deviations (SMS)."""
        return cls._fit(logits, labels, sample_weight, vector=False)

    @classmethod
    def fit_matrix_cv(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        penalties: Sequence[float] = STRUCTURED_PENALTIES,
        n_folds: int = 5,
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Structured matrix scaling, cross-validated: the penalty on the matrix by cross-validation (SMS-CV)."""
        return cls._fit(logits, labels, sample_weight, vector=False, penalties=penalties, n_folds=n_folds)

    @classmethod
    def _fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        w: Any,
        *,
        vector: bool,
        penalties: Sequence[float] = (1.0,),
        n_folds: int = 1,
    ) -> Self:
        z, y, w = as_weighted(logits, labels, w, min_rows=2 * n_folds if len(penalties) > 1 else 1)
        n, classes = row_count(z, w), z.shape[1]
        beta = finite_inverse_temperature(z, y, w)
        path = [
            Penalty(off=multiple * classes * (classes - 1) / n, diagonal=classes / n, bias=classes / n, centre=1.0)
            for multiple in sorted(penalties, reverse=True)
        ]
        made = partial(Problem, vector=True) if vector else matrix_problem
        problem = made(z, y, path[0], on="log_probs", scale=beta, w=w)
        start: float | np.ndarray = 1.0
        if len(path) > 1:
            _, penalty, start = _choose_penalty(path, problem, 1.0, n_folds)
            problem = replace(problem, penalty=penalty)
        weight, bias, certificate = problem.solve(start)
        return cls(1 / beta, weight, bias).with_certificate(certificate)


def _check_rows(z: np.ndarray) -> None:
    """Refuse to fit a whole matrix to fewer rows than classes, which it would repeat by heart in minutes."""
    n, classes = z.shape
    if n < classes:
        raise ValueError(
            f"a matrix of {classes} × {classes} weights needs at least {classes} rows, one a class, got {n}; "
            '"svs" and "sms" are shrunk towards temperature scaling and take fewer'
        )


def _split_offset(z: np.ndarray) -> tuple[np.ndarray, float]:
    """Logits without a common offset that dwarfs their differences, and that offset.

    With it the weights and the bias would be all but collinear: a search would crawl, and a penalty on the bias mean
    nothing. A moderate one stays, so that the penalty is the published one.
    """
    some = z[:: max(1, z.size >> 20)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # absent options: logits with an offset have none
        offset, spread = float(some.mean()), float(some.std())
    return (z.astype(np.float64) - offset, offset) if abs(offset) > _FAR_OFF * spread else (z, 0.0)


def _shift_bias(weight: np.ndarray, bias: np.ndarray, offset: float) -> np.ndarray:
    """The bias for logits with the offset, from that for those without."""
    shifted = bias - offset * (weight if weight.ndim == 1 else weight.sum(axis=1))
    return shifted - shifted.mean()


def _fit_penalised(
    problem: Problem,
    *,
    l2: bool = False,
    penalty: float | None = None,
    penalties: Sequence[float] = PENALTIES,
    bias_penalties: Sequence[float] | None = None,
    normalise: bool = True,
    n_folds: int = 5,
) -> Solution:
    """Fit with the penalty given, or that of least cross-validated loss; `bias_penalties` makes it a full grid."""
    _check_rows(problem.z)
    classes = problem.z.shape[1]
    start = near_inverse_temperature(problem.z, problem.y, problem.w)

    def made(strength: float, mu: float | None) -> Penalty:
        if l2:
            return Penalty.l2(strength, classes, normalise=normalise)
        return Penalty.odir(strength, classes, bias=mu, normalise=normalise)

    whole = replace(problem, penalty=made(penalty if penalty is not None else 1.0, None))
    if penalty is not None:
        return whole.solve(start)
    offsets: Sequence[float | None] = bias_penalties or [None]
    paths = [[made(strength, mu) for strength in sorted(penalties, reverse=True)] for mu in offsets]
    best, x = min((_choose_penalty(path, whole, start, n_folds) for path in paths), key=lambda found: found[0])[1:]
    return replace(whole, penalty=best).solve(x)


def _choose_penalty(
    path: Sequence[Penalty], whole: Problem, start: float, n_folds: int
) -> tuple[float, Penalty, float | np.ndarray]:
    """The penalty of least cross-validated loss, that loss, and about where its minimum is.

    Each penalty starts where the one before ended. The path is left once two penalties in a row did worse than the best
    in every fold: with less and less of a penalty the fit to few rows only gets wilder.
    """
    # Folds by content, so that the order of the rows does not matter.
    parts = [(whole.rows(train), whole.rows(test)) for train, test in k_fold(whole.z, whole.y, n_folds)]
    n = whole.total
    share = np.array([test.total for _, test in parts]) / n
    points = [whole.start_point(start)] * len(parts)
    best: tuple[float, Penalty, float | np.ndarray] = (np.inf, path[0], start)
    least, worse = np.full(len(parts), np.inf), 0
    # What is made of the rows is the same for every penalty.
    learnt, asked = ([half.likelihood(quick=True) for half in halves] for halves in zip(*parts, strict=True))
    blocks = whole.blocks(start)
    for penalty in path:
        points = [
            replace(train, penalty=penalty).solve_coarse(x, blocks, likelihood)
            for (train, _), x, likelihood in zip(parts, points, learnt, strict=True)
        ]
        sums = [likelihood(x)[0] for likelihood, x in zip(asked, points, strict=True)]
        losses = np.array(sums) / (share * n)
        if losses @ share < best[0]:
            best, least = (float(losses @ share), penalty, sum(points) / len(points)), losses
        worse = worse + 1 if (losses > least).all() else 0
        if worse == 2:
            break
    return best
