"""Logistic curves of each class's log-odds: Platt scaling, quadratic scaling and beta calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from scipy.special import expit, logit

from trueup._core import native
from trueup._core.arrays import MASKED_LOGIT, as_weighted, fill_absent, find_absent
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import Certificate, FitError
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator

C = TypeVar("C", bound=Calibrator)
Targets: TypeAlias = Literal["platt", "plain"]
"""Labels of a fit: smoothed as by Platt, or plain."""

Curve = tuple[np.ndarray, Certificate]
"""Parameters (k, classes) of a block of curves, and the certificate of their search."""
CurveFit = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], Curve]

_TOLERANCE = 1e-10
"""Relative gain in a class's mean loss, predicted by Newton's model, below which the next step is the last."""


class Platt(Calibrator):
    """Fit a logistic curve to each class's log-odds: q_k ∝ σ(A_k s_k + B_k), s_k = z_k − ln Σ_{j≠k} exp z_j.

    With two classes the curves complement each other and q_1 = σ(A s_1 + B). Labels are smoothed to (N₊+1)/(N₊+2) and
    1/(N₋+2), so that separable and missing classes have finite curves. If every prediction is correct and the curves
    fit worse than the unchanged logits, the logits stay. Not for many classes with few samples each: each class has a
    curve of its own, and smoothed labels flatten it.

    Parameters
    ----------
    slope
        A, shape (classes,).
    offset
        B, shape (classes,).

    Examples
    --------
    >>> platt = Platt.fit([[0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [0.0, -3.0]], [1, 0, 1, 0])
    >>> f"{platt.slope[1]:.4f} {platt.offset[1]:.4f}"
    '0.2057 0.0000'

    References
    ----------
    Platt, "Probabilistic outputs for support vector machines and comparisons to regularized likelihood methods" (1999),
    in Advances in Large Margin Classifiers.
    """

    # Not sample-invariant: twice the samples, and the labels are drawn in half as far.

    slope: np.ndarray
    offset: np.ndarray

    def __init__(self, slope: ArrayLike, offset: ArrayLike) -> None:
        keep_class_vectors(self, slope=slope, offset=offset)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves to each class's log-odds and normalise."""
        self._check_classes(z, self.slope.shape[0])
        return log_normalise(xp, self.slope * log_odds(xp, z) + self.offset, z)

    def formula(self, classes: int) -> e.Formula:
        """Return the curves of the log-odds as steps."""
        return odds_formula(e.piecewise(*map(e.polynomial, self.offset, self.slope)))

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, targets: Targets = "platt", sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise each class's cross-entropy with smoothed labels.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        targets
            "platt" for smoothed labels, or "plain" for labels as they are, with which separable classes have no finite
            curve.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """

        def curve(log_p: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
            slope, offset, certificate = fit_logistic([log_p - log_rest], targets, w)
            return np.stack([slope[0], offset]), certificate

        return fit_classes(cls, logits, labels, sample_weight, curve, (1.0, 0.0), targets)


class Quadratic(Calibrator):
    """Fit a quadratic logistic curve: q_k ∝ σ(a_k s_k + c_k s_k² + b_k) with the log-odds s_k = ln p_k − ln(1 − p_k).

    With two classes the curves complement each other. The square bends the curve if a network is overconfident on one
    side only. A parabola may turn beyond the log-odds of the fit, so log-odds are clipped to that range. Labels are
    smoothed as in Platt scaling. Not for many classes with few samples each.

    Parameters
    ----------
    slope
        a, shape (classes,).
    square
        c, shape (classes,).
    offset
        b, shape (classes,).
    low
        Smallest log-odds of the fit, shape (classes,).
    high
        Largest log-odds of the fit, shape (classes,).

    Examples
    --------
    >>> curve = Quadratic.fit([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0], [0.0, -1.0], [0.0, -3.0]], [1, 0, 0, 1, 0])
    >>> f"{curve.slope[1]:.3f} {curve.square[1]:.3f} {curve.offset[1]:.3f}"
    '0.229 0.053 -0.545'
    """

    # Not sample-invariant: twice the samples, and the labels are drawn in half as far.

    slope: np.ndarray
    square: np.ndarray
    offset: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __init__(self, slope: ArrayLike, square: ArrayLike, offset: ArrayLike, low: ArrayLike, high: ArrayLike) -> None:
        keep_class_vectors(self, slope=slope, square=square, offset=offset, low=low, high=high)
        if not (self.low <= self.high).all():
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves to each class's log-odds and normalise."""
        self._check_classes(z, self.slope.shape[0])
        odds = xp.minimum(xp.maximum(log_odds(xp, z), self.low), self.high)
        return log_normalise(xp, self.slope * odds + self.square * odds * odds + self.offset, z)

    def formula(self, classes: int) -> e.Formula:
        """Return the parabolas, constant outside the log-odds of the fit, as steps."""
        curves = []
        for low, high, b, a, c in zip(self.low, self.high, self.offset, self.slope, self.square, strict=True):
            left, right = (b + a * x + c * x * x for x in (low, high))
            curves.append(e.curve([low, high], [[left], [left, a + 2 * c * low, c], [right]]))
        return odds_formula(e.piecewise(*curves))

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Minimise each class's cross-entropy with smoothed labels.

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

        def curve(log_p: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
            odds = log_p - log_rest
            coefficients, offset, certificate = fit_logistic([odds, odds**2], targets, w)
            return np.stack([*coefficients, offset, odds.min(axis=0), odds.max(axis=0)]), certificate

        return fit_classes(cls, logits, labels, sample_weight, curve, (1.0, 0.0, 0.0))


class Beta(Calibrator):
    """Fit an increasing beta-calibration curve to each class: q_k ∝ σ(a ln p_k − b ln(1 − p_k) + c), with a, b ≥ 0.

    It is the likelihood ratio of two beta distributions. a = b = 1, c = 0 is the identity, and a = b is Platt's curve.
    Labels are smoothed as in Platt scaling, so that separable and missing classes have finite curves.
    Not for many classes with few samples each, where three parameters per class are too many.

    Parameters
    ----------
    a
        Shape (classes,), not negative.
    b
        Shape (classes,), not negative.
    c
        Shape (classes,).

    Examples
    --------
    >>> p = np.linspace(0.05, 0.95, 1000)
    >>> z = np.stack([np.log1p(-p), np.log(p)], axis=1)
    >>> beta = Beta.fit(z, (np.arange(1000) * 37 % 100 < 100 * p).astype(int))  # nearly calibrated
    >>> f"{beta.a[1]:.2f} {beta.b[1]:.2f} {beta.c[1]:.2f}"
    '0.93 1.08 -0.10'

    References
    ----------
    Kull, Silva Filho & Flach, "Beyond sigmoids: how to obtain well-calibrated probabilities from binary classifiers
    with beta calibration" (2017), doi:10.1214/17-EJS1338SI.
    """

    # Not sample-invariant: twice the samples, and the labels are drawn in half as far.

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def __init__(self, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> None:
        keep_class_vectors(self, a=a, b=b, c=c)
        if (self.a < 0).any() or (self.b < 0).any():
            raise ValueError(f"a and b must not be negative, got a = {self.a} and b = {self.b}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves to each class's probability and normalise."""
        self._check_classes(z, self.a.shape[0])
        log_p, log_rest = log_probs_and_rests(xp, xp.double(z))
        log_p = xp.fill_absent(log_p, xp.find_absent(z))
        return log_normalise(xp, self.a * log_p - self.b * log_rest + self.c, z)

    def formula(self, classes: int) -> e.Formula:
        """Return the curves as steps: ln p and ln(1 − p) are logarithms of σ(s) and σ(−s)."""
        one = np.eye(len(self.a))
        weight = np.hstack([np.diag(self.a), np.diag(-self.b)])
        return odds_formula(e.matrix(np.vstack([one, -one])), e.op("log_sigmoid"), e.matrix(weight, self.c))

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, targets: Targets = "platt", sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise each class's cross-entropy; a negative coefficient is set to zero and the rest refitted.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        targets
            "platt" for smoothed labels, or "plain" for labels as they are, with which separable classes have no finite
            curve.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return fit_classes(cls, logits, labels, sample_weight, _fit_increasing, (1.0, 1.0, 0.0), targets)


def fit_classes(
    cls: type[C],
    logits: ArrayLike,
    labels: ArrayLike,
    w: Any,
    curve: CurveFit,
    identity: Sequence[float],
    targets: str = "platt",
) -> C:
    """Fit one curve per class: `curve` fits a block, given ln p, ln(1 − p), targets and weights (n, classes).

    If every prediction is correct, smoothed targets would only lower the confidence. Then the `identity`, given by the
    first parameters, is used if it fits these rows better.
    """
    z, y, w = as_weighted(logits, labels, w, min_rows=1)
    curves = [
        curve(log_p, log_rest, class_targets(y, classes, row_weights, targets), row_weights)
        for classes, log_p, log_rest, row_weights in class_blocks(z, w)
    ]
    blocks, certificates = zip(*curves, strict=True)
    parameters, certificate = np.concatenate(blocks, axis=1), join_certificates(list(certificates))
    fitted = cls(*parameters).with_certificate(certificate)
    if not (z.argmax(axis=1) == y).all():
        return fitted

    def loss(logits: np.ndarray) -> float:
        log_p = NUMPY.log_softmax(logits.astype(np.float64))
        return -float(np.average(log_p[np.arange(len(y)), y], weights=w))

    parameters[: len(identity)] = np.reshape(identity, (-1, 1))
    return fitted if loss(fitted(z)) <= loss(z) else cls(*parameters).with_certificate(certificate)


def odds_formula(*steps: e.Step) -> e.Formula:
    """Return steps on the log-odds of each class, followed by q_k ∝ σ of their results."""
    return e.Formula("logits", (e.op("log_odds"), *steps, e.op("sigmoid"), e.op("normalise")), "probs")


def log_odds(xp: Namespace, z: Array) -> Array:
    """Return the log-odds ln p_k − ln(1 − p_k) in float64; absent options get the mean of the row's others."""
    log_p, log_rest = log_probs_and_rests(xp, xp.double(z))
    return xp.fill_absent(log_p - log_rest, xp.find_absent(z))


def log_probs_and_rests(xp: Namespace, z: Array) -> tuple[Array, Array]:
    """Return ln p_k and ln(1 − p_k) of each entry, without cancellation."""
    total, best, rest_of_best = _row_sums(xp, z)
    return _columns(xp, z, xp.arange_like(z.shape[1], best), total, best, rest_of_best)


def _row_sums(xp: Namespace, z: Array) -> tuple[Array, Array, Array]:
    """Return for each row ln Σ_k exp z_k, the largest class, and ln(1 − p) of that class."""
    best = xp.argmax(z, axis=1, keepdims=True)
    others = xp.logsumexp(xp.put_along_axis(z, best, -math.inf), keepdims=True)
    return xp.logsumexp(z, keepdims=True), best, -xp.softplus(xp.take_along_axis(z, best) - others)


def _columns(
    xp: Namespace, z: Array, classes: Array, total: Array, best: Array, rest_of_best: Array
) -> tuple[Array, Array]:
    log_p = z - total
    # All classes but the best have p ≤ ½. The best's p is clipped, or its unused gradient would be NaN.
    rest = xp.log1p(-xp.clip(xp.exp(log_p), max=0.75))
    return log_p, xp.where(best == classes, rest_of_best, rest)


def log_normalise(xp: Namespace, odds: Array, z: Array) -> Array:
    """Return ln of σ(odds_k) / Σ_j σ(odds_j) in the dtype of the logits z."""
    log_q, absent = -xp.softplus(-odds), xp.find_absent(z)
    return xp.astype(xp.log_softmax(log_q if absent is None else xp.where(absent, MASKED_LOGIT, log_q)), z.dtype)


def class_blocks(
    z: np.ndarray, w: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield blocks of classes with their columns of ln p and ln(1 − p) in float64, and the rows' weights for a fit.

    Absent options get their column's mean and weight 0; the weights then have shape (n, classes). A class that no row
    offers keeps all rows, with constant columns.
    """
    n, classes = z.shape
    absent = find_absent(z)
    rows = [_row_sums(NUMPY, z[at].astype(np.float64)) for at in native.row_chunks(n, classes, native.FIT_CHUNK)]
    sums = [np.concatenate(column) for column in zip(*rows, strict=True)]
    numbers = np.arange(classes)
    for at in native.row_chunks(classes, n, native.FIT_CHUNK):
        columns = _columns(NUMPY, z[:, at].astype(np.float64), numbers[at], *sums)
        if absent is None:
            yield numbers[at], *columns, w
            continue
        block = absent[:, at]
        missing = block & ~block.all(axis=0)
        log_p, log_rest = (fill_absent(np.where(block & ~missing, 0.0, column).T, missing.T).T for column in columns)
        yield numbers[at], log_p, log_rest, (np.ones(n) if w is None else w)[:, None] * ~missing


def class_targets(y: np.ndarray, classes: np.ndarray, w: np.ndarray | None, targets: str = "platt") -> np.ndarray:
    """Return the targets of each class, (n, classes): smoothed, or with "plain" 1 for its rows and 0 for others.

    Smoothed targets are (N₊+1)/(N₊+2) for its rows and 1/(N₋+2) for others.
    """
    if targets not in ("platt", "plain"):
        raise ValueError(f'targets must be "platt" or "plain", got {targets!r}')
    one_hot = y[:, None] == classes
    if targets == "plain":
        return one_hot.astype(np.float64)
    row_weights = None if w is None else w if w.ndim == 2 else w[:, None]
    positive = (one_hot if row_weights is None else one_hot * row_weights).sum(axis=0, dtype=np.float64)
    total = len(y) if row_weights is None else row_weights.sum(axis=0)
    return np.where(one_hot, (positive + 1) / (positive + 2), 1 / (total - positive + 2))


def fit_logistic(
    features: list[np.ndarray], targets: np.ndarray, w: np.ndarray | None = None, max_iter: int = 100
) -> tuple[np.ndarray, np.ndarray, Certificate]:
    """Fit σ(Σ_f w_f x_f + offset) to each column; return weights (features, columns) and offsets (columns,).

    The rows' weights `w` have shape (n,) or (n, columns). Each column takes Newton steps of its own, halved until its
    loss falls. (L-BFGS over all columns jointly reaches the same point in 7 to 30 times as many passes, since it treats
    many small problems as one ill-conditioned problem.)
    """
    columns = targets.shape[1]
    share = _shares(w, len(targets))
    # Standardise the features, so that the Hessian is well conditioned. A constant feature gets no weight.
    middle, width = (np.array([part(x, axis=0) for x in features]).reshape(-1, columns) for part in (np.mean, np.std))
    width = np.where(width > 1e-12 * (1 + np.abs(middle)), width, np.inf)
    x = np.stack([*((f - m) / s for f, m, s in zip(features, middle, width, strict=True)), np.ones_like(targets)])
    at = np.zeros((len(x), columns))
    at[-1] = logit(np.clip((share * targets).sum(axis=0), 1e-12, 1 - 1e-12))
    value = _loss(x, targets, at, share)
    iterations, passes = 0, 1
    for iterations in range(1, max_iter + 1):  # noqa: B007 (the certificate stores it)
        probs = expit((x * at[:, None]).sum(axis=0))
        slope = (x * (share * (probs - targets))).sum(axis=1)
        curved = x * (share * (probs * (1 - probs)))
        bend = np.stack([[np.einsum("nc,nc->c", a, b) for b in x] for a in curved]).transpose(2, 0, 1)
        # Nearly collinear features leave a flat direction: a tiny ridge bounds the step.
        ridge = 1e-12 * np.trace(bend, axis1=1, axis2=2)[:, None, None] / len(x) + 1e-300
        step = -np.linalg.solve(bend + ridge * np.eye(len(x)), slope.T[..., None])[..., 0].T
        gain = -(step * slope).sum(axis=0)
        passes += 1
        if not np.isfinite(gain).all():
            raise FitError("the features leave no finite step: are they on one scale?")
        active = gain > 2 * _TOLERANCE * np.minimum(value, 1.0)
        # The final step is taken too: its error is about its square.
        length = np.ones_like(value)
        for _ in range(40):
            following = _loss(x, targets, at + length * step, share)
            passes += 1
            worse = ~(following <= value - 1e-4 * length * gain + 1e-13 * value)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        at, value = at + np.where(worse, 0.0, length) * step, np.where(worse, value, following)
        if not (active & ~worse).any():
            break
    else:
        raise FitError(f"no minimum after {max_iter} steps: the loss can still fall by {gain.max() / 2:g}")
    weights = at[:-1] / width
    offset = at[-1] - (weights * middle).sum(axis=0)
    residual = share * (expit((x * at[:, None]).sum(axis=0)) - targets)
    slopes = float(np.linalg.norm((x * residual).sum(axis=1)))
    return weights, offset, Certificate("converged", slopes, iterations, passes + 1, float(value.sum()))


def _shares(w: np.ndarray | None, n: int) -> Any:
    """Return the rows' shares of the total weight: one number, or (n, 1), or (n, columns)."""
    return 1 / n if w is None else w / w.sum(axis=0) if w.ndim == 2 else (w / w.sum())[:, None]


def join_certificates(certificates: list[Certificate]) -> Certificate:
    """Combine the certificates of blocks of columns: total gradient and loss, largest number of steps."""
    gradient = sum(c.gradient**2 for c in certificates) ** 0.5
    iterations, passes = max(c.iterations for c in certificates), max(c.passes for c in certificates)
    return Certificate("converged", gradient, iterations, passes, sum(c.loss for c in certificates))


def keep_class_vectors(calibrator: Calibrator, **vectors: Any) -> None:
    """Store vectors with one number per class, after checking that they are finite and of equal length."""
    shapes = {}
    calibrator.set_parameters(**vectors)
    for name, value in vectors.items():
        kept = np.asarray(getattr(calibrator, name))
        if kept.ndim != 1 or len(kept) < 2 or not np.isfinite(kept).all():
            raise ValueError(f"{name} must be finite, one number for each of at least 2 classes, got {value}")
        shapes[name] = len(kept)
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{' and '.join(shapes)} must have the same classes, got {shapes}")


def cross_entropy(odds: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the cross-entropy of each target and σ(odds)."""
    return np.asarray(NUMPY.softplus(odds) - targets * odds)


def _loss(x: np.ndarray, targets: np.ndarray, at: np.ndarray, share: Any) -> np.ndarray:
    return np.asarray((share * cross_entropy((x * at[:, None]).sum(axis=0), targets)).sum(axis=0))


def _fit_increasing(first: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
    """Return the best a, b ≥ 0 and c of each column, (3, columns).

    The loss is convex. If the free minimum has a negative coefficient, the constrained minimum has a zero one: the
    better of the two curves with one coefficient, or the constant if that coefficient is negative too.
    """
    second = -log_rest
    weights, offset, certificate = fit_logistic([first, second], targets, w)
    parameters = np.concatenate([weights, offset[None]])
    decreasing = np.flatnonzero((weights < 0).any(axis=0))
    if not len(decreasing):
        return parameters, certificate
    t = targets[:, decreasing]
    x = np.stack([first[:, decreasing], second[:, decreasing], np.ones_like(t)])
    column_weights = w if w is None or w.ndim == 1 else w[:, decreasing]
    share = _shares(column_weights, len(t))
    level = logit((share * t).sum(axis=0))
    least = np.full(len(decreasing), np.inf)
    ends = [certificate]
    for only in (0, 1):
        weight, offset, end = fit_logistic([x[only]], t, column_weights)
        increasing = weight[0] > 0
        candidate = np.zeros((3, len(decreasing)))
        candidate[only] = np.where(increasing, weight[0], 0.0)
        candidate[2] = np.where(increasing, offset, level)
        loss = _loss(x, t, candidate, share)
        parameters[:, decreasing[loss < least]] = candidate[:, loss < least]
        least = np.minimum(loss, least)
        ends.append(end)
    gradient, iterations = max(end.gradient for end in ends), max(end.iterations for end in ends)
    features = np.stack([first, second, np.ones_like(targets)])
    loss = _loss(features, targets, parameters, _shares(w, len(targets))).sum()
    return parameters, Certificate("converged", gradient, iterations, sum(end.passes for end in ends), float(loss))
