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
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, row_count
from trueup.calibrators.folds import k_fold, merge_copies
from trueup.calibrators.likelihood import MATRIX_PENALTY, VECTOR_PENALTY, Penalty, Problem, Solution, matrix_problem
from trueup.calibrators.temperature import finite_inverse_temperature, near_inverse_temperature

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Seven coefficients from 1e-2 to 1e4, as searched in the literature."""
STRUCTURED_PENALTIES = tuple(10.0**power for power in range(-3, 3))
"""Multiples of the penalty on M of structured matrix scaling that cross-validation tries; 100 is nearly SVS."""
_MAX_OFFSET = 100.0  # standard deviations of the logits beyond which their mean is subtracted before a fit.


class Linear(Calibrator):
    """A linear map q = softmax(W u + b) of features u of the logits; absent options get the others' mean.

    Parameters
    ----------
    weight
        W, shape (classes,) for a diagonal or (classes, classes).
    bias
        b, shape (classes,).
    """

    shift_invariant = False
    sample_invariant = True

    weight: np.ndarray
    bias: np.ndarray

    def __init__(self, weight: ArrayLike, bias: ArrayLike) -> None:
        self.set_parameters(weight=weight, bias=bias)
        classes, shape = np.size(self.bias), np.shape(self.weight)
        if shape not in ((classes,), (classes, classes)):
            raise ValueError(f"weight must have shape ({classes},) or ({classes}, {classes}), got {shape}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the weights, a vector or a matrix, and the bias."""
        self._check_classes(z, self.bias.shape[0])
        u = xp.fill_absent(self.features(xp, z), xp.find_absent(z))
        w, b = xp.astype(self.weight, u.dtype), xp.astype(self.bias, u.dtype)
        return (u * w if w.ndim == 1 else u @ w.T) + b

    def features(self, xp: Namespace, z: Array) -> Array:
        """Return the features u."""
        return z

    def formula(self, classes: int) -> e.Formula:
        """Return the linear map as steps; the weights of log-probabilities include that of their logarithm of a sum."""
        steps = self.feature_steps()
        if self.weight.ndim == 1 and not steps:
            return e.Formula("logits", (e.piecewise(*map(e.polynomial, self.bias, self.weight)),), "logits")
        weight = np.diag(self.weight) if self.weight.ndim == 1 else self.weight
        if steps:
            weight = np.column_stack([weight, -weight.sum(axis=1)])
        return e.Formula("logits", (*steps, e.matrix(weight, self.bias)), "logits")

    def feature_steps(self) -> tuple[e.Step, ...]:
        """Return the steps to the features, which are logits followed by the logarithm of their summed exponentials."""
        return ()


class Vector(Linear):
    """Scale each class's logit and add a bias: q = softmax(w ⊙ z + b), by likelihood.

    The bias is centred, since adding a constant to it changes nothing.
    Not for few rows and many classes.

    Parameters
    ----------
    weight
        w, shape (classes,).
    bias
        b, shape (classes,).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Vector.fit(2 * z, y).weight.round(1)
    array([0.5, 0.5, 0.5])

    References
    ----------
    Guo et al., "On calibration of modern neural networks" (2017), arXiv:1706.04599. Alexandari, Kundaje & Shrikumar,
    "Maximum likelihood with bias-corrected calibration is hard-to-beat at label shift adaptation" (2020),
    arXiv:1901.06852.
    """

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Minimise the negative log-likelihood.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        z, offset = _split_offset(z)
        problem = Problem(z, y, Penalty(diagonal=VECTOR_PENALTY, bias=VECTOR_PENALTY), vector=True, w=w)
        weight, bias, certificate = problem.solve(near_inverse_temperature(z, y, w))
        return cls(weight, _shift_bias(weight, bias, offset)).with_certificate(certificate)

    @classmethod
    def fit_bias_corrected(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Fit one temperature and a bias for each class, q = softmax(z/T + b).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.

        References
        ----------
        Alexandari, Kundaje & Shrikumar, "Maximum likelihood with bias-corrected calibration is hard-to-beat at label
        shift adaptation" (2020), arXiv:1901.06852.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        classes = z.shape[1]
        problem = Problem(z, y, Penalty(), vector=True, w=w)
        likelihood = problem.likelihood()

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            sums = likelihood(np.concatenate([np.full(classes, x[0]), x[1:]])) / problem.total
            # Without a tiny penalty, adding a constant to the bias would change nothing.
            pull = np.concatenate([[0.0], VECTOR_PENALTY * x[1:]])
            gradient = np.concatenate([[sums[1 : classes + 1].sum()], sums[classes + 1 :]])
            return float(sums[0] + pull @ x), gradient + 2 * pull

        x, certificate = lbfgs(objective, np.concatenate([[near_inverse_temperature(z, y, w)], np.zeros(classes)]))
        return cls(np.full(classes, x[0]), x[1:] - x[1:].mean()).with_certificate(certificate)


class Matrix(Linear):
    """Mix the logits of all classes: q = softmax(W z + b), by likelihood.

    A tiny L2 penalty (1e-6) keeps the optimum finite on separable data.
    Not for many classes: it has K² + K parameters and overfits without a larger penalty (`ms_odir` has one).

    Parameters
    ----------
    weight
        W, shape (classes, classes).
    bias
        b, shape (classes,).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> bool((Matrix.fit(2 * z, y).weight.diagonal() > 0.2).all())
    True

    References
    ----------
    Guo et al., "On calibration of modern neural networks" (2017), arXiv:1706.04599.
    """

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, penalty: float = MATRIX_PENALTY, sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise the negative log-likelihood with an L2 penalty on all weights and biases.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        penalty
            Coefficient of the L2 penalty.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
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
        """Penalise the entries off the diagonal and the bias (MS-ODIR).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.
        **options
            `penalty` for a fixed coefficient, `penalties` and `bias_penalties` to search, `normalise`, and `n_folds`.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2)
        z, offset = _split_offset(z)
        weight, bias, certificate = _fit_penalised(Problem(z, y, Penalty(), w=w), **options)
        return cls(weight, _shift_bias(weight, bias, offset)).with_certificate(certificate)


class Dirichlet(Linear):
    """Map the log-probabilities linearly: q = softmax(W ln p + b).

    With ODIR the penalty λ Σ_{j≠k} w_jk²/(K(K−1)) + μ Σ_j b_j²/K leaves the diagonal free; with L2 it covers all of W.
    Five-fold cross-validated likelihood chooses λ = μ from 1e-2 … 1e4.
    Not for a few hundred rows with many classes.

    Parameters
    ----------
    weight
        W, shape (classes, classes).
    bias
        b, shape (classes,).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Dirichlet.fit_odir(2 * z, y).weight.diagonal().round(1)
    array([0.5, 0.5, 0.5])

    References
    ----------
    Kull et al., "Beyond temperature scaling: obtaining well-calibrated multiclass probabilities with Dirichlet
    calibration" (2019), arXiv:1910.12656.
    """

    shift_invariant = True
    sample_invariant = False  # the penalty is chosen on folds

    def features(self, xp: Namespace, z: Array) -> Array:
        """Return log-probabilities."""
        return xp.log_softmax(z)

    def feature_steps(self) -> tuple[e.Step, ...]:
        """Return the steps to log-probabilities."""
        return (e.op("logsumexp"),)

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, **options: Any) -> Self:
        """Penalise all of W by L2; the bias is free.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.
        **options
            `penalty` for a fixed coefficient, `penalties` to search, `normalise`, and `n_folds`.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls.fit_odir(logits, labels, sample_weight=sample_weight, l2=True, **options)

    @classmethod
    def fit_odir(
        cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, **options: Any
    ) -> Self:
        """Penalise the entries off the diagonal and the bias.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.
        **options
            `penalty` for a fixed coefficient, `penalties` and `bias_penalties` to search, `normalise`, and `n_folds`.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2)
        weight, bias, certificate = _fit_penalised(Problem(z, y, Penalty(), on="log_probs", w=w), **options)
        return cls(weight, bias).with_certificate(certificate)


class Structured(Linear):
    """Scale by a temperature, then add deviations with a penalty that shrinks as the number of rows grows.

    With u = ln softmax(z/T), SVS fits q = softmax((1 + v) ⊙ u + b) with penalty (K/n)(‖b‖² + ‖v‖²). SMS adds a matrix M
    with zero diagonal and penalty (K(K−1)/n)‖M‖². For small n both approach temperature scaling, so they hardly
    overfit. `fit_matrix_cv` chooses a multiple of the penalty on M, 1e-3 … 100, by five-fold cross-validated
    likelihood. Not for maps that must keep the predicted class.

    Parameters
    ----------
    temperature
        The divisor T > 0.
    weight
        1 + v, shape (classes,), or 1 + v on the diagonal of M, shape (classes, classes).
    bias
        b, shape (classes,).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Structured.fit_vector(2 * z, y).weight.round(1)
    array([1.1, 1. , 0.9])

    References
    ----------
    Berta et al., "Structured matrix scaling for multi-class calibration" (2026), arXiv:2511.03685.
    """

    shift_invariant = True
    sample_invariant = False  # the penalty depends on the number of rows

    temperature: float

    def __init__(self, temperature: float, weight: ArrayLike, bias: ArrayLike) -> None:
        super().__init__(weight, bias)
        self.set_parameters(temperature=temperature)

    def features(self, xp: Namespace, z: Array) -> Array:
        """Return log-probabilities after temperature scaling."""
        return xp.log_softmax(z / self.temperature)

    def feature_steps(self) -> tuple[e.Step, ...]:
        """Return the steps to scaled log-probabilities."""
        return e.scale(1 / self.temperature), e.op("logsumexp")

    @classmethod
    def fit_vector(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Fit a vector of deviations (SVS).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls._fit(logits, labels, sample_weight, vector=True)

    @classmethod
    def fit_matrix(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Fit a matrix of deviations (SMS).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
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
        """Fit a matrix of deviations with a cross-validated penalty (SMS-CV).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        penalties
            Multiples of the penalty on the matrix.
        n_folds
            Number of folds.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
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
        if len(penalties) > 1:
            z, y, w = merge_copies(z, y, w)
        n, classes = row_count(z, w), z.shape[1]
        beta = finite_inverse_temperature(z, y, w)
        path = [
            Penalty(off=multiple * classes * (classes - 1) / n, diagonal=classes / n, bias=classes / n, centre=1.0)
            for multiple in sorted(penalties, reverse=True)
        ]
        make_problem = partial(Problem, vector=True) if vector else matrix_problem
        problem = make_problem(z, y, path[0], on="log_probs", scale=beta, w=w)
        start: float | np.ndarray = 1.0
        if len(path) > 1:
            _, penalty, start = _choose_penalty(path, problem, 1.0, n_folds)
            problem = replace(problem, penalty=penalty)
        weight, bias, certificate = problem.solve(start)
        return cls(1 / beta, weight, bias).with_certificate(certificate)


def _check_rows(z: np.ndarray) -> None:
    """Refuse to fit a full matrix to fewer rows than classes, which would overfit slowly."""
    n, classes = z.shape
    if n < classes:
        raise ValueError(
            f"a matrix of {classes} × {classes} weights needs at least {classes} rows, one per class, got {n}; "
            '"svs" and "sms" are shrunk towards temperature scaling and need fewer'
        )


def _split_offset(z: np.ndarray) -> tuple[np.ndarray, float]:
    """Separate a common offset from logits if it is far larger than their differences.

    With such an offset the weights and the bias are nearly collinear: a search is slow, and a penalty on the bias has
    no meaning. A moderate offset stays, so that the penalty is the published one.
    """
    sample = z[:: max(1, z.size >> 20)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # with absent options the offset is not finite and stays
        offset, spread = float(sample.mean()), float(sample.std())
    return (z.astype(np.float64) - offset, offset) if abs(offset) > _MAX_OFFSET * spread else (z, 0.0)


def _shift_bias(weight: np.ndarray, bias: np.ndarray, offset: float) -> np.ndarray:
    """Return the bias for logits with the offset, given that for logits without it."""
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
    """Fit with the given penalty or the one with the smallest cross-validated loss."""
    _check_rows(problem.z)
    classes = problem.z.shape[1]
    start = near_inverse_temperature(problem.z, problem.y, problem.w)

    def make_penalty(strength: float, mu: float | None) -> Penalty:
        if l2:
            return Penalty.l2(strength, classes, normalise=normalise)
        return Penalty.odir(strength, classes, bias=mu, normalise=normalise)

    full = replace(problem, penalty=make_penalty(penalty if penalty is not None else 1.0, None))
    if penalty is not None:
        return full.solve(start)
    offsets: Sequence[float | None] = bias_penalties or [None]
    paths = [[make_penalty(strength, mu) for strength in sorted(penalties, reverse=True)] for mu in offsets]
    best, x = min((_choose_penalty(path, full, start, n_folds) for path in paths), key=lambda choice: choice[0])[1:]
    return replace(full, penalty=best).solve(x)


def _choose_penalty(
    path: Sequence[Penalty], full: Problem, start: float, n_folds: int
) -> tuple[float, Penalty, float | np.ndarray]:
    """Return the smallest cross-validated loss, its penalty, and an approximate minimum there.

    Each penalty's search starts at the previous solution. The path stops once two penalties in a row are worse than the
    best in every fold: smaller penalties would only overfit more.
    """
    # Folds depend on the content of the rows, not on their order.
    parts = [(full.rows(train), full.rows(test)) for train, test in k_fold(full.z, full.y, n_folds)]
    n = full.total
    share = np.array([test.total for _, test in parts]) / n
    points = [full.start_point(start)] * len(parts)
    best: tuple[float, Penalty, float | np.ndarray] = (np.inf, path[0], start)
    least, worse = np.full(len(parts), np.inf), 0
    # The likelihoods are the same for every penalty.
    training, held_out = ([half.likelihood(quick=True) for half in halves] for halves in zip(*parts, strict=True))
    blocks = full.blocks(start)
    for penalty in path:
        points = [
            replace(train, penalty=penalty).solve_coarse(x, blocks, likelihood)
            for (train, _), x, likelihood in zip(parts, points, training, strict=True)
        ]
        sums = [likelihood(x)[0] for likelihood, x in zip(held_out, points, strict=True)]
        losses = np.array(sums) / (share * n)
        if losses @ share < best[0]:
            best, least = (float(losses @ share), penalty, sum(points) / len(points)), losses
        worse = worse + 1 if (losses > least).all() else 0
        if worse == 2:
            break
    return best
