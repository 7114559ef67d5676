"""Functions that combine methods: they take methods and return a method.

A method is a function `(logits, labels, **options)` that returns a fitted calibrator.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from trueup._core import arrays
from trueup._core.clusters import Clusters, as_clusters, block_sums, mean_error, weighted_clusters
from trueup._core.errors import silence_warnings
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import FitError
from trueup._core.registry import METHODS
from trueup._core.row_scores import event_class, score_rows
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, if_all_parts
from trueup.calibrators.folds import k_fold, merge_copies

Fit = Callable[..., Calibrator]
"""A method: a function `(logits, labels, **options)` that returns a fitted calibrator."""
FOLDS = 5
"""Number of folds in `refinement`."""


class Chain(Calibrator):
    """Several calibrators applied in order.

    Parameters
    ----------
    steps
        The calibrators, first to last.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> Chain([Temperature(2.0), Temperature(3.0)])([[6.0, 0.0]])
    array([[1., 0.]])
    """

    keeps_argmax = if_all_parts("keeps_argmax")
    sample_invariant = if_all_parts("sample_invariant")

    def __init__(self, steps: Sequence[Calibrator]) -> None:
        self.steps = tuple(steps)

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """Return the flag of the first step."""
        return bool(self.steps[0].shift_invariant)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the steps in order."""
        for step in self.steps:
            z = step.forward(xp, z)
        return z

    def formula(self, classes: int) -> e.Formula:
        """Return the steps of the parts, one after another."""
        return reduce(e.join, [part.formula(classes) for part in self.steps])


def fit(
    logits: ArrayLike,
    labels: ArrayLike,
    method: Fit | str = "auto",
    *,
    class_names: Sequence[str] | None = None,
    **options: Any,
) -> Calibrator:
    """Fit a calibrator by one of `METHODS`.

    Parameters
    ----------
    logits
        Network outputs on data that the network was not trained on, or log-probabilities, shape (n, classes). See
        `from_probs` for probabilities.
    labels
        True classes, numbered from 0, shape (n,).
    method
        A name in `METHODS`, or a function `(logits, labels, **options)` that returns a calibrator.
    class_names
        Names of the classes in the order of the columns; `labels` may then be names.
    **options
        Options of the method.

    Returns
    -------
    Calibrator
        The fitted calibrator; it maps logits to logits, of any array library.

    Examples
    --------
    >>> import numpy as np
    >>> z, y = np.repeat([[2.0, 0.0], [0.0, 2.0]], 50, axis=0), np.repeat([0, 1, 1, 0], [40, 10, 40, 10])
    >>> fit(z, y, "temperature")
    Temperature(temperature=1.4427)
    """
    if class_names is not None:
        from trueup.convert import number_labels  # most fits do not need it

        labels = number_labels(labels, class_names)
    return _resolve(method)(logits, labels, **options)


def chain(*fits: Fit | str) -> Fit:
    """Fit methods one after another, each to the output of the previous one.

    Parameters
    ----------
    *fits
        Methods or their names, first to last.

    Returns
    -------
    Fit
        A method that returns a `Chain`.

    Examples
    --------
    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> [type(step).__name__ for step in chain("temperature", "histogram")(z, y).steps]
    ['Temperature', 'Histogram']
    """
    methods = [_resolve(fit) for fit in fits]

    def fit(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Chain:
        z, y, w = arrays.as_weighted(logits, labels, sample_weight, min_rows=1)
        steps = []
        for method in methods:
            steps.append(method(z, y, **arrays.weight_kwargs(w)))
            z = steps[-1](z)
        return Chain(steps)

    return fit


class OneVsRest(Calibrator):
    """A binary calibrator for each class against the others, renormalised: q_k ∝ σ(calibrated log-odds of class k).

    Parameters
    ----------
    calibrators
        One calibrator of two classes for each class.
    """

    sample_invariant = if_all_parts("sample_invariant")
    differentiable = if_all_parts("differentiable")

    def __init__(self, calibrators: Sequence[Calibrator]) -> None:
        self.calibrators = tuple(calibrators)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Calibrate each class's log-odds and normalise the probabilities."""
        self._check_classes(z, len(self.calibrators))
        absent = xp.find_absent(z)
        odds = xp.fill_absent(_log_odds(xp, z), absent)
        binary = [
            xp.log_softmax(calibrator.forward(xp, _binary(xp, odds[:, k])))[:, 1]
            for k, calibrator in enumerate(self.calibrators)
        ]
        log_q = xp.stack(binary, axis=1)
        return xp.log_softmax(log_q if absent is None else xp.where(absent, arrays.MASKED_LOGIT, log_q))


def one_vs_rest(fit: Fit | str) -> Fit:
    """Fit a two-class method to each class against the others.

    Parameters
    ----------
    fit
        A method or its name.

    Returns
    -------
    Fit
        A method that returns a `OneVsRest`.

    Examples
    --------
    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> one_vs_rest("temperature")(z, y)(z).shape
    (200, 3)
    """
    method = _resolve(fit)

    def fitted(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> OneVsRest:
        z, y, w = arrays.as_weighted(logits, labels, sample_weight, min_rows=1)
        odds = _log_odds(NUMPY, NUMPY.upcast_half(z))

        def of_class(k: int) -> Calibrator:
            rows = np.flatnonzero(odds[:, k] > -np.inf)  # rows that offer the option
            x = odds[rows, k] if len(rows) else np.zeros_like(odds[:1, k])
            rows = rows if len(rows) else np.arange(1)
            share = None if w is None else w[rows]
            return method(_binary(NUMPY, x), (y[rows] == k).astype(np.int64), **arrays.weight_kwargs(share))

        return OneVsRest([of_class(k) for k in range(z.shape[1])])

    return fitted


class OneEvent(Calibrator):
    """A calibrator of the probability p of one class among several: (n, classes) → (ln(1 − p), ln p).

    It accepts the logits of all classes or, if there are more than two, the two columns that `event_logits` makes of
    them.

    Parameters
    ----------
    calibrator
        A calibrator of two classes.
    event
        Number of the class.
    n_classes
        Number of classes.
    """

    sample_invariant = if_all_parts("sample_invariant")
    differentiable = if_all_parts("differentiable")

    def __init__(self, calibrator: Calibrator, event: int, n_classes: int) -> None:
        self.calibrator, self.event, self.n_classes = calibrator, int(event), int(n_classes)

    def forward(self, xp: Namespace, z: Array, **extra: Any) -> Array:
        """Map the logits of all classes, or those of the event."""
        if z.ndim == 2 and z.shape[1] == 2 < self.n_classes:
            return self.calibrator.forward(xp, z, **extra)
        return xp.astype(self.map(xp, xp.upcast_half(z), **extra), z.dtype)

    def map(self, xp: Namespace, z: Array, **extra: Any) -> Array:
        """Return the calibrated log-probabilities of the event."""
        self._check_classes(z, self.n_classes)
        others = xp.stack([z[:, k] for k in range(self.n_classes) if k != self.event], axis=1)
        others_logit, event_logit = xp.logsumexp(others), z[:, self.event]
        if self.n_classes > 2:
            gap = event_logit - others_logit
            others_logit, event_logit = -xp.softplus(gap), -xp.softplus(-gap)
        return self.calibrator.forward(xp, xp.stack([others_logit, event_logit], axis=1), **extra)


def for_event(fit: Fit | str, event: int | str, *, class_names: Sequence[str] | None = None) -> Fit:
    """Fit a two-class method to the probability of one class; it maps all logits to (ln(1 − p), ln p).

    Parameters
    ----------
    fit
        A method of two classes, or its name.
    event
        Number of the class, or its name.
    class_names
        Names of the classes, if `event` is a name.

    Returns
    -------
    Fit
        A method that returns a `OneEvent`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrator = for_event("beta", 2)(3 * z, y)
    >>> calibrator(3 * z).shape
    (2000, 2)
    """
    method = _resolve(fit)

    def fit_event(logits: ArrayLike, labels: ArrayLike, **options: Any) -> Calibrator:
        from trueup.convert import as_event  # most fits do not need it

        z, y = arrays.as_arrays(logits, labels)
        number = event_class(event, z.shape[1], class_names)
        return OneEvent(method(*as_event(z, y, number), **options), number, z.shape[1])

    return fit_event


def _log_odds(xp: Namespace, z: Array) -> Array:
    from trueup.calibrators.logistic import log_probs_and_rests

    log_p, log_rest = log_probs_and_rests(xp, z)
    return log_p - log_rest


def _binary(xp: Namespace, odds: Array) -> Array:
    return xp.stack([xp.zeros_like(odds), odds], axis=1)


def cross_fit(fit: Fit | str, *, n_folds: int = 5) -> Callable[..., Any]:
    """Calibrate every row by a calibrator fitted without it.

    Folds are stratified by label and do not depend on the order of the rows.

    Parameters
    ----------
    fit
        A method or its name.
    n_folds
        Number of folds.

    Returns
    -------
    Callable
        A function `(logits, labels, *, sample_weight=None, clusters=None)` that returns calibrated logits of the same
        kind of array. Rows of weight zero do not enter the fits but are calibrated too. Rows of one cluster stay in one
        fold.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(200, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> cross_fit("temperature")(z, y).shape
    (200, 3)
    """
    method = _resolve(fit)

    def calibrated(
        logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, clusters: ArrayLike | None = None
    ) -> Any:
        z, y = arrays.as_arrays(logits, labels, min_rows=n_folds)
        blocks = as_clusters(clusters, len(z), min_clusters=2)
        w = arrays.as_weights(sample_weight, len(z))
        return arrays.match_kind(_cross_fitted(method, z, y, w, n_folds, blocks), logits)

    return calibrated


def grid(fit: Fit | str, *, n_folds: int = 5, score: str = "nll", **options: Sequence[Any]) -> Fit:
    """Fit with every combination of the options and keep the one with the lowest cross-validated score.

    Parameters
    ----------
    fit
        A method or its name.
    n_folds
        Number of folds.
    score
        Loss on held-out rows, "nll" or "brier".
    **options
        Values to try for each option of the method.

    Returns
    -------
    Fit
        A method; its calibrator carries the comparison as `choice`.

    Examples
    --------
    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> type(grid("matrix", penalty=[1e-3, 1.0])(z, y)).__name__
    'Matrix'
    """
    combinations = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    named = {str(chosen): partial(_resolve(fit), **chosen) for chosen in combinations}
    return choose(named, n_folds=n_folds, score=score, standard_errors=0.0)


class Choice(NamedTuple):
    """Cross-validated scores of several methods, and the chosen one."""

    chosen: str
    """Name of the chosen method."""
    scores: Mapping[str, float]
    """Mean score on held-out rows; infinite if a method could not be fitted."""
    reasons: Mapping[str, str]
    """Reason why a method could not be fitted or was dropped."""
    errors: Mapping[str, float] = {}
    """Standard error of each method's difference from the chosen one."""
    weights: Mapping[str, float] = {}
    """Weights of the methods in the chosen mixture."""
    loss: float = float("nan")
    """Mean score of the chosen method on held-out rows."""
    detectable: float = float("nan")
    """Smallest mean improvement that these rows detect with 80 % power."""


DETECTED = 1.645 + 0.842
"""Standard errors of a difference that a one-sided test at 5 % detects with 80 % power."""


def record_choice(
    losses: Mapping[str, np.ndarray],
    chosen: str,
    *,
    raw: str,
    reasons: Mapping[str, str] | None = None,
    sample_weight: np.ndarray | None = None,
    clusters: Clusters | None = None,
    mixture: tuple[np.ndarray, Mapping[str, float]] | None = None,
) -> Choice:
    """Record the choice of one method among several from the loss of every held-out row.

    `detectable` refers to the difference between the chosen method and `raw`, or between `raw` and the best other
    method if `raw` was chosen.

    Parameters
    ----------
    losses
        Loss of every held-out row under each method.
    chosen
        Name of the chosen method.
    raw
        Name of the method that leaves the logits unchanged; it need not be among the losses.
    reasons
        Reasons why other methods could not be fitted.
    sample_weight
        Weight of each row.
    clusters
        Clusters of correlated rows, by which standard errors are computed.
    mixture
        Loss of every row under the chosen mixture of methods, and the mixture's weights.

    Returns
    -------
    Choice
        The record.

    Examples
    --------
    >>> losses = {"identity": np.array([0.9, 0.4, 0.8, 0.3]), "temperature": np.array([0.8, 0.5, 0.6, 0.4])}
    >>> choice = record_choice(losses, "temperature", raw="identity", reasons={"svs": "too few rows"})
    >>> f"{choice.loss:.3f} {choice.errors['identity']:.3f} {choice.detectable:.3f} {choice.scores['svs']}"
    '0.575 0.065 0.162 inf'
    """
    reasons = reasons or {}
    loss, weights = mixture or (losses[chosen], {chosen: 1.0})
    others = {name: each for name, each in losses.items() if name != chosen}
    rival = raw if raw in others else chosen
    if others and rival == chosen:
        rival = simplest(others, standard_errors=0.0, sample_weight=sample_weight)
    return Choice(
        chosen,
        {name: weighted_mean(each, sample_weight) for name, each in losses.items()} | dict.fromkeys(reasons, math.inf),
        reasons,
        errors={name: standard_error(each - loss, sample_weight, clusters) for name, each in losses.items()},
        weights=weights,
        loss=weighted_mean(loss, sample_weight),
        detectable=DETECTED * standard_error(losses[rival] - loss, sample_weight, clusters),
    )


def weighted_mean(values: np.ndarray, sample_weight: np.ndarray | None = None) -> float:
    """Return the weighted mean of one number per row."""
    return float(np.average(values, weights=sample_weight))


def standard_error(
    values: np.ndarray, sample_weight: np.ndarray | None = None, clusters: Clusters | None = None
) -> float:
    """Return the standard error of a mean: the standard deviation over √n, with n = (Σw)²/Σw² for weights w.

    With clusters it is the standard error over clusters.
    """
    if clusters is not None:
        return mean_error(*block_sums(values, sample_weight, clusters))
    w = np.ones(len(values)) if sample_weight is None else sample_weight
    variance = np.average((values - np.average(values, weights=w)) ** 2, weights=w)
    return float(np.sqrt(variance * (w @ w)) / w.sum())


def choose(
    fits: Iterable[str] | Mapping[str, Fit], *, n_folds: int = 5, score: str = "nll", standard_errors: float = 1.0
) -> Fit:
    """Fit each method on folds and keep the `simplest` one within a standard error of the best.

    Parameters
    ----------
    fits
        Names of methods, or methods by name, simplest first.
    n_folds
        Number of folds.
    score
        Loss on held-out rows, "nll" or "brier".
    standard_errors
        Number of standard errors within which a simpler method is preferred.

    Returns
    -------
    Fit
        A method; it also accepts `clusters`, which stay in one fold. Its calibrator carries the comparison as `choice`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> choose(["identity", "temperature"])(3 * z, y).choice.chosen
    'temperature'
    """
    methods = dict(fits) if isinstance(fits, Mapping) else {name: METHODS[name] for name in fits}
    if score not in ("nll", "brier"):
        raise ValueError(f'score must be "nll" or "brier", got {score!r}')

    def fit(
        logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None, clusters: ArrayLike | None = None
    ) -> Calibrator:
        z, y, w = arrays.as_weighted(logits, labels, sample_weight, min_rows=2 * n_folds)
        blocks = weighted_clusters(clusters, sample_weight, len(arrays.to_array(labels, "labels")), min_clusters=2)
        if blocks is None:
            z, y, w = merge_copies(z, y, w)
        losses, reasons = {}, {}
        for name, method in methods.items():
            try:
                losses[name] = getattr(score_rows(_cross_fitted(method, z, y, w, n_folds, blocks), y), score)
            except (FitError, ValueError) as error:
                reasons[name] = str(error)
        if not losses:
            raise FitError(f"none of the methods could be fitted: {reasons}")
        name = simplest(losses, standard_errors=standard_errors, sample_weight=w, clusters=blocks)
        fitted: Calibrator = methods[name](z, y, **arrays.weight_kwargs(w))
        choice = record_choice(losses, name, raw="identity", reasons=reasons, sample_weight=w, clusters=blocks)
        return fitted.with_choice(choice)

    return fit


def simplest(
    losses: Mapping[str, np.ndarray],
    *,
    standard_errors: float = 1.0,
    sample_weight: np.ndarray | None = None,
    clusters: Clusters | None = None,
) -> str:
    """Return the first of the methods, simplest first, whose mean loss is within a standard error of the smallest.

    The standard error is that of the paired difference d from the best method: mean(d) ≤ s · std(d) / √n. With weights
    n is (Σw)²/Σw²; with clusters the standard error is taken over clusters.

    Parameters
    ----------
    losses
        Loss of every row under each method, simplest first.
    standard_errors
        The number s of standard errors.
    sample_weight
        Weight of each row.
    clusters
        Clusters of correlated rows.

    Returns
    -------
    str
        Name of the method.

    Examples
    --------
    >>> one, two = np.array([0.9, 0.4, 0.8, 0.3]), np.array([0.8, 0.5, 0.6, 0.4])
    >>> simplest({"identity": one, "temperature": two}), simplest({"identity": one + 0.1, "temperature": two})
    ('identity', 'temperature')
    """
    best = min(losses, key=lambda name: weighted_mean(losses[name], sample_weight))
    for name, loss in losses.items():
        behind = loss - losses[best]
        if weighted_mean(behind, sample_weight) <= standard_errors * standard_error(behind, sample_weight, clusters):
            return name
    return best


class Refinement(NamedTuple):
    """A proper score, split into the part that calibration can remove and the rest."""

    score: float
    """Mean score of the logits."""
    calibration: float
    """Reduction of the score by the calibrator."""
    refinement: float
    """Score after calibration."""


def refinement(
    logits: ArrayLike, labels: ArrayLike, *, method: Fit | str = "temperature", score: str = "nll"
) -> Refinement:
    """Split a proper score by a cross-fitted calibrator: score = calibration + refinement.

    A row's prediction is (1 − w) q + w/K, where q comes from a calibrator of the n rows of the other folds and
    w = 1/(n + 1).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    method
        A method or its name.
    score
        The score, "nll" or "brier".

    Returns
    -------
    Refinement
        The two parts and their sum.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> parts = refinement(3 * z, y)
    >>> parts.calibration > 0.1
    True
    """
    fit = _resolve(method)
    z, y = arrays.as_arrays(logits, labels, min_rows=FOLDS)
    mixed = np.empty(z.shape)
    with silence_warnings(message="temperature stopped at its bound"):  # its effect on the score is bounded
        for others, fold in k_fold(z, y, FOLDS):
            n = int(others.sum())
            calibrated = fit(*arrays.take_rows(z, y, others))(arrays.take_rows(z, y, fold)[0])
            log_q = NUMPY.log_softmax(calibrated.astype(np.float64))
            options = z[fold] > -np.inf
            uniform = np.where(options, -np.log(options.sum(axis=1, keepdims=True)), -np.inf)
            # If all n rows are correct, T tends to zero, and one held-out error would dominate the score.
            # But n rows cannot distinguish an error rate of 1/(n + 1) from 0: an error costs at most ln((n + 1) K).
            mixed[fold] = np.logaddexp(log_q + math.log(n / (n + 1)), uniform - math.log(n + 1))
    before, after = (float(getattr(score_rows(each, y), score).mean()) for each in (z, mixed))
    return Refinement(before, before - after, after)


def accepts_option(fit: Fit, option: str) -> bool:
    """Return whether a method accepts an option, such as `clusters`.

    >>> accepts_option(choose(["identity"]), "clusters"), accepts_option(METHODS["temperature"], "clusters")
    (True, False)
    """
    try:
        return option in inspect.signature(fit).parameters
    except (TypeError, ValueError):  # compiled functions have no signature
        return False


def _resolve(fit: Fit | str) -> Fit:
    return METHODS[fit] if isinstance(fit, str) else fit


def _cross_fitted(
    method: Fit, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, n_folds: int, clusters: Clusters | None
) -> np.ndarray:
    """Return the logits of every row, mapped by a calibrator that was fitted without it."""
    calibrated = np.empty_like(z)
    for train, test in k_fold(z, y, n_folds, clusters):
        *pair, share = arrays.take_weighted(z, y, w, train)
        calibrated[test] = method(*pair, **arrays.weight_kwargs(share))(arrays.take_rows(z, y, test)[0])
    return calibrated
