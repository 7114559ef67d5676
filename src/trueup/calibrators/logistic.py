"""Logistic curves of each class's log-odds: Platt scaling, quadratic scaling and beta calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np
from scipy.special import expit, logit

from trueup._core import native
from trueup._core.arrays import MASKED_LOGIT, as_weighted, fill_absent, find_absent
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import Certificate, FitError
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator

C = TypeVar("C", bound=Calibrator)

Curve = tuple[np.ndarray, Certificate]
"""The parameters (k, classes) of a block of curves, and how their search ended."""
CurveFit = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], Curve]

_TOLERANCE = 1e-10
"""By how much of itself a class's mean loss may still fall, as Newton's model says, before the last step is taken."""


class Platt(Calibrator):
    """Fit a logistic curve to each class's log-odds: q_k ∝ σ(A_k s_k + B_k), s_k = z_k − ln Σ_{j≠k} exp z_j.

    With two classes the curves complement each other and q_1 = σ(A s_1 + B). Labels are drawn in to (N₊+1)/(N₊+2) and
    1/(N₋+2), so that separable and missing classes have finite curves. Where every label is right and the curves would
    fit these rows worse than the logits as they are, those stay. Not for many classes with few samples each: the curves
    are fitted apart, and drawn-in labels then flatten them.
    Platt, "Probabilistic outputs for support vector machines" (1999).

    >>> platt = Platt.fit([[0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [0.0, -3.0]], [1, 0, 1, 0])
    >>> f"{platt.slope[1]:.4f} {platt.offset[1]:.4f}"
    '0.2057 0.0000'
    """

    # Not sample-invariant: twice the samples, and the labels are drawn in half as far.

    slope: np.ndarray
    offset: np.ndarray

    def __init__(self, slope: Any, offset: Any) -> None:
        keep_class_vectors(self, slope=slope, offset=offset)

    def map(self, xp: Namespace, z: Any) -> Any:
        """The classes' curves, normalised."""
        self._check_classes(z, self.slope.shape[0])
        return log_normalise(xp, self.slope * log_odds(xp, z) + self.offset, z)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        targets: Literal["platt", "plain"] = "platt",
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Platt scaling: minimise each class's cross-entropy against the drawn-in labels. `targets="plain"` takes the
        labels as they are, which separable classes have no finite curve for.
        """

        def curve(log_p: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
            slope, offset, certificate = fit_logistic([log_p - log_rest], targets, w)
            return np.stack([slope[0], offset]), certificate

        return fit_classes(cls, logits, labels, sample_weight, curve, (1.0, 0.0), targets)


class Quadratic(Calibrator):
    """Fit q_k ∝ σ(a_k s_k + c_k s_k² + b_k) to each class's log-odds s_k = ln p_k − ln(1 − p_k).

    With two classes the curves complement each other. The square bends the curve where a network is too sure on one
    side only. Beyond the log-odds of the fit a parabola may turn, so they are kept within the range seen. Labels are
    drawn in as Platt's are. Not for many classes with few samples each.

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

    def __init__(self, slope: Any, square: Any, offset: Any, low: Any, high: Any) -> None:
        keep_class_vectors(self, slope=slope, square=square, offset=offset, low=low, high=high)
        if not (self.low <= self.high).all():
            raise ValueError(f"low must be at most high, got {low} and {high}")

    def map(self, xp: Namespace, z: Any) -> Any:
        """The classes' curves, normalised."""
        self._check_classes(z, self.slope.shape[0])
        odds = xp.minimum(xp.maximum(log_odds(xp, z), self.low), self.high)
        return log_normalise(xp, self.slope * odds + self.square * odds * odds + self.offset, z)

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Quadratic scaling: minimise each class's cross-entropy against the drawn-in labels."""

        def curve(log_p: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
            odds = log_p - log_rest
            coefficients, offset, certificate = fit_logistic([odds, odds**2], targets, w)
            return np.stack([*coefficients, offset, odds.min(axis=0), odds.max(axis=0)]), certificate

        return fit_classes(cls, logits, labels, sample_weight, curve, (1.0, 0.0, 0.0))


class Beta(Calibrator):
    """Fit to each class q_k ∝ σ(a ln p_k − b ln(1 − p_k) + c), a and b not negative, which rises with p_k.

    It is the likelihood ratio of two beta distributions; a = b = 1, c = 0 is the identity, and a = b is Platt's curve.
    Labels are drawn in as Platt's, so that separable and missing classes have finite curves. Not for many classes with
    few samples each, where three numbers a class are too many.
    Kull et al., "Beta calibration" (2017).

    >>> p = np.linspace(0.05, 0.95, 1000)
    >>> z = np.stack([np.log1p(-p), np.log(p)], axis=1)
    >>> beta = Beta.fit(z, (np.arange(1000) * 37 % 100 < 100 * p).astype(int))  # nearly calibrated
    >>> f"{beta.a[1]:.2f} {beta.b[1]:.2f} {beta.c[1]:.2f}"
    '0.93 1.08 -0.10'
    """

    # Not sample-invariant: twice the samples, and the labels are drawn in half as far.

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def __init__(self, a: Any, b: Any, c: Any) -> None:
        keep_class_vectors(self, a=a, b=b, c=c)
        if (self.a < 0).any() or (self.b < 0).any():
            raise ValueError(f"a and b must not be negative, got a = {a} and b = {b}")

    def map(self, xp: Namespace, z: Any) -> Any:
        """The classes' curves, normalised."""
        self._check_classes(z, self.a.shape[0])
        log_p, log_rest = log_probs_and_rests(xp, xp.double(z))
        log_p = xp.fill_absent(log_p, xp.find_absent(z))
        return log_normalise(xp, self.a * log_p - self.b * log_rest + self.c, z)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        targets: Literal["platt", "plain"] = "platt",
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Beta calibration: minimise each class's cross-entropy; a coefficient that comes out negative is dropped, the
        rest refitted. `targets="plain"` takes the labels as they are, which separable classes have no finite curve for.
        """
        return fit_classes(cls, logits, labels, sample_weight, _fit_rising, (1.0, 1.0, 0.0), targets)


def fit_classes(
    cls: type[C],
    logits: ArrayLike,
    labels: ArrayLike,
    w: Any,
    curve: CurveFit,
    identity: Sequence[float],
    targets: str = "platt",
) -> C:
    """One curve a class: `curve` fits those of a block, given ln p, ln(1 − p), targets and weights (n, classes).

    Where every label is right, smoothed targets would only lower the confidence. There the `identity`, with these
    numbers as the first parameters, is taken if it fits these rows better.
    """
    z, y, w = as_weighted(logits, labels, w, min_rows=1)
    curves = [
        curve(log_p, log_rest, class_targets(y, classes, each, targets), each)
        for classes, log_p, log_rest, each in class_blocks(z, w)
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


def log_odds(xp: Namespace, z: Any) -> Any:
    """The log-odds ln p_k − ln(1 − p_k) of each entry in double; of absent options the mean of the row's others."""
    log_p, log_rest = log_probs_and_rests(xp, xp.double(z))
    return xp.fill_absent(log_p - log_rest, xp.find_absent(z))


def log_probs_and_rests(xp: Namespace, z: Any) -> tuple[Any, Any]:
    """ln p_k and ln(1 − p_k) of each entry, without cancellation."""
    total, best, rest_of_best = _row_sums(xp, z)
    return _columns(xp, z, xp.arange_like(z.shape[1], best), total, best, rest_of_best)


def _row_sums(xp: Namespace, z: Any) -> tuple[Any, Any, Any]:
    """Of each row: ln Σ_k exp z_k, the largest class, and ln(1 − p) of that class, which is the others' sum."""
    best = xp.argmax(z, axis=1, keepdims=True)
    others = xp.logsumexp(xp.put_along_axis(z, best, -math.inf), keepdims=True)
    return xp.logsumexp(z, keepdims=True), best, -xp.softplus(xp.take_along_axis(z, best) - others)


def _columns(xp: Namespace, z: Any, classes: Any, total: Any, best: Any, rest_of_best: Any) -> tuple[Any, Any]:
    log_p = z - total
    # Any class but the best has p of at most a half. The best's is held off one, or its unused gradient would be NaN.
    rest = xp.log1p(-xp.clip(xp.exp(log_p), max=0.75))
    return log_p, xp.where(best == classes, rest_of_best, rest)


def log_normalise(xp: Namespace, odds: Any, z: Any) -> Any:
    """ln of σ(odds_k) / Σ_j σ(odds_j), from the log-odds of the classes one by one, in the type of the logits z."""
    log_q, absent = -xp.softplus(-odds), xp.find_absent(z)
    return xp.astype(xp.log_softmax(log_q if absent is None else xp.where(absent, MASKED_LOGIT, log_q)), z.dtype)


def class_blocks(
    z: np.ndarray, w: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Blocks of classes, with their columns of ln p and ln(1 − p) in double, and the rows' weights for a fit.

    Where an option is absent the columns have their means, and the weights, then (n, classes), zeros. A class that no
    row has keeps all rows, with constant columns.
    """
    n, classes = z.shape
    absent = find_absent(z)
    rows = [_row_sums(NUMPY, z[at].astype(np.float64)) for at in native.row_chunks(n, classes, native.FIT_CHUNK)]
    sums = [np.concatenate(column) for column in zip(*rows, strict=True)]
    every = np.arange(classes)
    for at in native.row_chunks(classes, n, native.FIT_CHUNK):
        columns = _columns(NUMPY, z[:, at].astype(np.float64), every[at], *sums)
        if absent is None:
            yield every[at], *columns, w
            continue
        gone = absent[:, at]
        missing = gone & ~gone.all(axis=0)
        log_p, log_rest = (fill_absent(np.where(gone & ~missing, 0.0, column).T, missing.T).T for column in columns)
        yield every[at], log_p, log_rest, (np.ones(n) if w is None else w)[:, None] * ~missing


def class_targets(y: np.ndarray, classes: np.ndarray, w: np.ndarray | None, targets: str = "platt") -> np.ndarray:
    """The targets of each class, (n, classes): Platt's, or with "plain" 1 for its samples and 0 for the others.

    Platt's are (N₊+1)/(N₊+2) for its samples and 1/(N₋+2) for the others.
    """
    if targets not in ("platt", "plain"):
        raise ValueError(f'targets must be "platt" or "plain", got {targets!r}')
    mine = y[:, None] == classes
    if targets == "plain":
        return mine.astype(np.float64)
    each = None if w is None else w if w.ndim == 2 else w[:, None]
    positive = (mine if each is None else mine * each).sum(axis=0, dtype=np.float64)
    total = len(y) if each is None else each.sum(axis=0)
    return np.where(mine, (positive + 1) / (positive + 2), 1 / (total - positive + 2))


def fit_logistic(
    features: list[np.ndarray], targets: np.ndarray, w: np.ndarray | None = None, max_iter: int = 100
) -> tuple[np.ndarray, np.ndarray, Certificate]:
    """Fit σ(Σ_f w_f x_f + offset) to the targets of each column: weights (features, columns), offsets (columns,).

    The rows' weights `w` are (n,), or (n, columns).

    Newton's steps, separate for each column, halved until its loss falls. (L-BFGS over all columns at once ends at the
    same point, but sees one ill-conditioned problem in place of many tiny ones, and takes 7 to 30 times the passes.)
    """
    columns = targets.shape[1]
    share = _shares(w, len(targets))
    # Features on one scale: the Hessian at the start is then well conditioned. A constant one gets no weight.
    middle, width = (np.array([part(x, axis=0) for x in features]).reshape(-1, columns) for part in (np.mean, np.std))
    width = np.where(width > 1e-12 * (1 + np.abs(middle)), width, np.inf)
    x = np.stack([*((f - m) / s for f, m, s in zip(features, middle, width, strict=True)), np.ones_like(targets)])
    at = np.zeros((len(x), columns))
    at[-1] = logit(np.clip((share * targets).sum(axis=0), 1e-12, 1 - 1e-12))
    value = _loss(x, targets, at, share)
    iterations, passes = 0, 1
    for iterations in range(1, max_iter + 1):  # noqa: B007 (the certificate has their number)
        probs = expit((x * at[:, None]).sum(axis=0))
        slope = (x * (share * (probs - targets))).sum(axis=1)
        curved = x * (share * (probs * (1 - probs)))
        bend = np.stack([[np.einsum("nc,nc->c", a, b) for b in x] for a in curved]).transpose(2, 0, 1)
        # Nearly collinear features leave a direction without curvature: a trace of ridge stops it.
        ridge = 1e-12 * np.trace(bend, axis1=1, axis2=2)[:, None, None] / len(x) + 1e-300
        step = -np.linalg.solve(bend + ridge * np.eye(len(x)), slope.T[..., None])[..., 0].T
        gain = -(step * slope).sum(axis=0)
        passes += 1
        if not np.isfinite(gain).all():
            raise FitError("the features leave no finite step: are they of one scale?")
        going = gain > 2 * _TOLERANCE * np.minimum(value, 1.0)
        # The final step is taken too: it leaves an error of about its square.
        length = np.ones_like(value)
        for _ in range(40):
            following = _loss(x, targets, at + length * step, share)
            passes += 1
            worse = ~(following <= value - 1e-4 * length * gain + 1e-13 * value)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        at, value = at + np.where(worse, 0.0, length) * step, np.where(worse, value, following)
        if not (going & ~worse).any():
            break
    else:
        raise FitError(f"no minimum was found in {max_iter} steps: the loss can still fall by {gain.max() / 2:g}")
    weights = at[:-1] / width
    offset = at[-1] - (weights * middle).sum(axis=0)
    residual = share * (expit((x * at[:, None]).sum(axis=0)) - targets)
    slopes = float(np.linalg.norm((x * residual).sum(axis=1)))
    return weights, offset, Certificate("converged", slopes, iterations, passes + 1, float(value.sum()))


def _shares(w: np.ndarray | None, n: int) -> Any:
    """The rows' shares of all weight: one number, or (n, 1), or (n, columns)."""
    return 1 / n if w is None else w / w.sum(axis=0) if w.ndim == 2 else (w / w.sum())[:, None]


def join_certificates(certificates: list[Certificate]) -> Certificate:
    """One certificate for blocks of columns: gradients and losses together, the most steps any took."""
    gradient = sum(c.gradient**2 for c in certificates) ** 0.5
    iterations, passes = max(c.iterations for c in certificates), max(c.passes for c in certificates)
    return Certificate("converged", gradient, iterations, passes, sum(c.loss for c in certificates))


def keep_class_vectors(calibrator: Calibrator, **vectors: Any) -> None:
    """Keep vectors of one number a class, checked to be finite and of one length."""
    shapes = {}
    for name, value in vectors.items():
        calibrator.set_parameter(name, value)
        kept = np.asarray(getattr(calibrator, name))
        if kept.ndim != 1 or len(kept) < 2 or not np.isfinite(kept).all():
            raise ValueError(f"{name} must be finite, one number for each of at least 2 classes, got {value}")
        shapes[name] = len(kept)
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{' and '.join(shapes)} must have the same classes, got {shapes}")


def cross_entropy(odds: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of each target and σ(odds)."""
    return np.asarray(NUMPY.softplus(odds) - targets * odds)


def _loss(x: np.ndarray, targets: np.ndarray, at: np.ndarray, share: Any) -> np.ndarray:
    return np.asarray((share * cross_entropy((x * at[:, None]).sum(axis=0), targets)).sum(axis=0))


def _fit_rising(first: np.ndarray, log_rest: np.ndarray, targets: np.ndarray, w: np.ndarray | None) -> Curve:
    """The best a, b ≥ 0 and c of each column, (3, columns).

    The loss is convex: where the free minimum has a negative coefficient, the constrained one has a zero. So there it
    is the better of the two curves with one coefficient; of one that is negative too, the constant.
    """
    second = -log_rest
    weights, offset, certificate = fit_logistic([first, second], targets, w)
    parameters = np.concatenate([weights, offset[None]])
    falling = np.flatnonzero((weights < 0).any(axis=0))
    if not len(falling):
        return parameters, certificate
    x, t = np.stack([first[:, falling], second[:, falling], np.ones((len(targets), len(falling)))]), targets[:, falling]
    few = w if w is None or w.ndim == 1 else w[:, falling]
    share = _shares(few, len(t))
    level = logit((share * t).sum(axis=0))
    least = np.full(len(falling), np.inf)
    ends = [certificate]
    for only in (0, 1):
        weight, offset, end = fit_logistic([x[only]], t, few)
        rises = weight[0] > 0
        candidate = np.zeros((3, len(falling)))
        candidate[only] = np.where(rises, weight[0], 0.0)
        candidate[2] = np.where(rises, offset, level)
        loss = _loss(x, t, candidate, share)
        parameters[:, falling[loss < least]] = candidate[:, loss < least]
        least = np.minimum(loss, least)
        ends.append(end)
    gradient, iterations = max(end.gradient for end in ends), max(end.iterations for end in ends)
    every = np.stack([first, second, np.ones_like(targets)])
    loss = _loss(every, targets, parameters, _shares(w, len(targets))).sum()
    return parameters, Certificate("converged", gradient, iterations, sum(end.passes for end in ends), float(loss))
