"""Performance without labels: estimate accuracy, F1 and ROC-AUC of unlabelled rows from calibrated probabilities.

If predictions are calibrated, one with probability p is right with probability p. Expected numbers of right and wrong
predictions then follow from the probabilities alone. Concept drift, a change in what the classes look like, cannot be
detected without labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from scipy.special import expit, logit, stdtrit

from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.row_scores import event_class
from trueup._core.types import ArrayLike
from trueup.calibrators.base import Calibrator
from trueup.decisions.label_shift import CALIBRATION, Weights, em_prior, shift_prior, softmax
from trueup.decisions.refits import Refits, Resample, check_rows
from trueup.metrics.intervals import Interval
from trueup.metrics.table import plain_record

ESTIMATES = ("accuracy", "error_above", "f1", "roc_auc")
"""Names of the metrics."""
ASSUMPTION = "This assumes that calibration still holds. Only labels can show a change in what the classes look like."
"""Note on every estimate."""


@dataclass(frozen=True, eq=False)
class PerformanceEstimate:
    """Estimated performance of a network on unlabelled rows, with prediction intervals for the observed performance."""

    values: Mapping[str, Interval]
    """Estimate of each metric for the network's own predictions, as deployed."""
    rows: int
    """Number of unlabelled rows."""
    level: float
    """Level of the intervals."""
    calibration_rows: int
    """Number of labelled rows used for calibration; 0 if the probabilities were taken as calibrated."""
    corrected: Mapping[str, Interval] | None = None
    """Estimate of each metric for predictions corrected for new class frequencies; None without `shift`."""

    def __getitem__(self, metric: str) -> Interval:
        return self.values[metric]

    @property
    def shifted(self) -> bool:
        """Whether new class frequencies were estimated."""
        return self.corrected is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; undefined values are None."""
        names = ("rows", "level", "calibration_rows", "shifted")
        parts = {
            part: None if values is None else {name: plain_record(asdict(one)) for name, one in values.items()}
            for part, values in (("metrics", self.values), ("corrected", self.corrected))
        }
        return {"schema": 1, **{name: getattr(self, name) for name in names}, **parts}

    def __str__(self) -> str:
        head = f"Estimated without labels on {self.rows:,} rows"
        labelled = f"calibrated on {self.calibration_rows:,} labelled rows"
        source = labelled if self.calibration_rows else "assuming calibrated probabilities"
        shifted = ", with new class frequencies" if self.shifted else ""
        table = [["metric", "estimate", f"{format_percent(self.level)} interval"]]
        parts = [(self.values, "")]
        if self.corrected is not None:
            parts = [(self.values, ", as deployed"), (self.corrected, ", corrected")]
        for values, kind in parts:
            for name, one in values.items():
                table.append([name + kind, format_number(one.value), format_interval(one.low, one.high)])
        return "\n\n".join([f"{head}, {source}{shifted}", text_table(table), ASSUMPTION])


@dataclass(frozen=True)
class PerformanceMetrics:
    """The metrics that `estimate_performance` estimates.

    "accuracy" is the mean confidence. "error_above" is 1 − the mean confidence of the rows with a confidence of at
    least `threshold`. "f1" and "roc_auc" are for class `event` against the others; for example, the expected number of
    true positives is the sum of P(event) over the rows predicted as the event.

    Parameters
    ----------
    names
        Names of the metrics.
    threshold
        Confidence threshold of "error_above".
    event
        Class of the event: its number, or its name among `class_names`.
    class_names
        Names of the classes.
    """

    names: Iterable[str] = ("accuracy",)
    threshold: float = 0.5
    event: int | str = 1
    class_names: Sequence[str] | None = None

    def checked_names(self) -> tuple[str, ...]:
        """Check the options and return the names of the metrics."""
        if not 0 <= self.threshold <= 1:
            raise InputError("threshold", "lie between 0 and 1", repr(self.threshold))
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        for name in names:
            if name not in ESTIMATES:
                raise InputError("metrics", f"be of {', '.join(ESTIMATES)}", repr(name))
        return names


def estimate_performance(
    logits: ArrayLike,
    *,
    val: tuple[ArrayLike, ArrayLike] | None = None,
    metrics: Iterable[str] | PerformanceMetrics = ("accuracy",),
    calibrate: str | Callable[..., Calibrator] | None = None,
    shift: bool = False,
    level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
) -> PerformanceEstimate:
    """Estimate the accuracy, error above a confidence, F1 or ROC-AUC of unlabelled rows.

    With labelled rows, a calibrator is fitted first, and the log-odds of the confidences are shifted so that their mean
    is the accuracy on `val`. The intervals come from fits to resamples of `val` and labels drawn from their
    probabilities, so they predict what labels would show.

    The estimates are for the predictions of `logits`. With `shift=True`, `corrected` has those for the predictions
    corrected for the new class frequencies by the calibrator of `estimate_prior`.

    Parameters
    ----------
    logits
        Network outputs of unlabelled rows, shape (n, classes).
    val
        Logits and labels of rows from the old population. Without them, `logits` must be calibrated.
    metrics
        Names of metrics; `PerformanceMetrics` sets another event than class 1 or another threshold than 0.5.
    calibrate
        Method fitted to `val`, by name or as a function; temperature scaling by default.
    shift
        Whether to estimate new class frequencies and correct for them; this needs `val`.
    level
        Level of the intervals.
    n_resamples
        Number of resamples.
    seed
        Seed of the resamples.

    Returns
    -------
    PerformanceEstimate
        The estimates; prints as a table.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(estimate_performance(3 * z[2000:], val=(3 * z[:2000], y[:2000]), n_resamples=100))
    Estimated without labels on 2,000 rows, calibrated on 2,000 labelled rows
    <BLANKLINE>
    metric    estimate     95 % interval
    accuracy    0.5819  [0.5529, 0.6110]
    <BLANKLINE>
    This assumes that calibration still holds. Only labels can show a change in what the classes look like.
    >>> f"{(z[2000:].argmax(axis=1) == y[2000:]).mean():.4f}"
    '0.5930'

    References
    ----------
    Garg et al., "Leveraging unlabeled data to predict out-of-distribution performance" (2022), arXiv:2201.04234.
    """
    options = metrics if isinstance(metrics, PerformanceMetrics) else PerformanceMetrics(metrics)
    names = options.checked_names()
    z, pair = check_rows(logits, val, level, n_resamples)
    number = event_class(options.event, z.shape[1], options.class_names)
    if shift and pair is None:
        raise ValueError("shift=True needs val, labelled rows of the old population")
    rng = np.random.default_rng(seed)
    labelled = 0 if pair is None else len(pair[0])
    if pair is None:
        result = _Calibrated(softmax(z), softmax(z), None, 1.0)
        draws: Iterable[np.ndarray] = repeat(result.probs, n_resamples)
    else:
        refits = Refits(calibrate or (CALIBRATION if shift else "temperature"), *pair)
        fit = partial(_calibrate, refits, z, shift)
        result = fit(Resample(refits.calibrator, np.arange(labelled)))
        draws = (fit(refits.draw(rng), result.prior, rng).probs for _ in range(n_resamples))
    scored = [_Predictions(result.deployed, z.argmax(axis=1), options.threshold, number)]
    if shift:
        scored.append(_Predictions(result.probs, result.probs.argmax(axis=1), options.threshold, number))
    means, noise = (np.zeros((n_resamples, len(scored), len(names))) for _ in range(2))
    for k, probs in enumerate(draws):
        labels = np.eye(z.shape[1])[_draw_labels(probs, rng)]
        for i, j in np.ndindex(means.shape[1:]):
            means[k, i, j] = scored[i].score(names[j], probs)
            noise[k, i, j] = scored[i].score(names[j], labels) - means[k, i, j]
    # The interval uses the standard deviation of the draws: percentiles of some hundred draws are too close together.
    # Student's quantile accounts for the number of draws.
    t_quantile = float(stdtrit(max(n_resamples - 1, 1), 0.5 + level / 2))

    def interval(i: int, j: int) -> Interval:
        value, error = scored[i].score(names[j], result.probs), math.nan
        if not (math.isnan(value) or np.isnan(noise[:, i, j]).all()):
            variance = np.nanvar(means[:, i, j]) + result.dispersion * np.nanvar(noise[:, i, j])
            error = t_quantile * math.sqrt(variance * n_resamples / max(n_resamples - 1, 1))
        return Interval(value, max(value - error, 0.0), min(value + error, 1.0), level)

    values = [{name: interval(i, j) for j, name in enumerate(names)} for i in range(len(scored))]
    return PerformanceEstimate(values[0], len(z), level, labelled, values[1] if shift else None)


class _Predictions(NamedTuple):
    """Predictions that are scored by the probabilities of the classes."""

    claimed: np.ndarray
    """Predicted probabilities of the classes."""
    predicted: np.ndarray
    """Predicted class of each row."""
    threshold: float
    event: int

    def score(self, metric: str, probs: np.ndarray) -> float:
        """Compute the expected metric under these probabilities of the classes, or under labels, one-hot."""
        rows = np.arange(len(probs))
        right, happens = probs[rows, self.predicted], probs[:, self.event]
        if metric == "accuracy":
            return float(right.mean())
        if metric == "error_above":
            kept = self.claimed[rows, self.predicted] >= self.threshold
            return float(1 - right[kept].mean()) if kept.any() else math.nan
        if metric == "f1":
            positive = self.predicted == self.event
            either = float(positive.sum()) + float(happens.sum())
            return 2 * float(happens[positive].sum()) / either if either > 0 else math.nan
        return soft_roc_auc(self.claimed[:, self.event], happens)


def soft_roc_auc(scores: np.ndarray, probs: np.ndarray) -> float:
    """Compute the area under the ROC curve if row i is positive with probability `probs[i]`; ties are one step.

    >>> f"{soft_roc_auc(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 0.0])):.2f}"
    '1.00'
    """
    order = np.argsort(-scores, kind="stable")
    is_end = np.append(np.diff(scores[order]) != 0, True)
    true = np.append(0.0, np.cumsum(probs[order])[is_end])
    false = np.append(0.0, np.cumsum(1 - probs[order])[is_end])
    if true[-1] <= 0 or false[-1] <= 0:
        return math.nan
    return float(np.diff(false) @ (true[1:] + true[:-1]) / (2 * true[-1] * false[-1]))


class _Calibrated(NamedTuple):
    """Calibrated probabilities of the unlabelled rows."""

    probs: np.ndarray
    """Probabilities of the classes; with a shift, corrected for the new class frequencies."""
    deployed: np.ndarray
    """Probabilities before that correction."""
    prior: np.ndarray | None
    """New class frequencies."""
    dispersion: float
    """Overdispersion of the labels, Σ(right − c)² / Σc(1 − c) on labelled rows, at least 1.

    A temperature calibrates on average and not everywhere, so labels vary more than the probabilities imply.
    """


def _calibrate(
    refits: Refits, z: np.ndarray, shift: bool, fitted: Resample, start: Weights = None, rng: Generator | None = None
) -> _Calibrated:
    """Calibrate; with a generator, resample the rows from which new class frequencies are estimated."""
    val_z, val_y = refits.pair
    labelled, predicted = softmax(fitted.calibrator(val_z))[fitted.rows], val_z.argmax(axis=1)[fitted.rows]
    right, rows = predicted == val_y[fitted.rows], np.arange(len(predicted))
    # Temperature scaling can leave the mean confidence off by some tenths of a percent, which would bias the estimate.
    accuracy = float((right.sum() + 0.5) / (len(right) + 1))
    intercept = match_mean(logit(np.clip(labelled[rows, predicted], 1e-15, 1 - 1e-15)), accuracy)
    labelled = _shift_confidence(labelled, predicted, intercept)
    confidence = labelled[rows, predicted]
    variance = max(float((confidence * (1 - confidence)).sum()), 1e-12)
    dispersion = max(float(((right - confidence) ** 2).sum()) / variance, 1.0)
    p = _shift_confidence(softmax(fitted.calibrator(z)), z.argmax(axis=1), intercept)
    if not shift:
        return _Calibrated(p, p, None, dispersion)
    old = labelled.mean(axis=0)
    weights = None if rng is None else rng.multinomial(len(z), np.full(len(z), 1 / len(z))).astype(np.float64)
    prior = em_prior(p, old, sample_weight=weights, start=start)
    return _Calibrated(softmax(shift_prior(prior, old)(np.log(np.maximum(p, 1e-300)))), p, prior, dispersion)


def match_mean(odds: np.ndarray, mean: float) -> float:
    """Return the shift a for which σ(log-odds + a) has this mean, by Newton's method.

    >>> round(match_mean(np.zeros(3), 0.75), 4)
    1.0986
    """
    a = 0.0
    for _ in range(50):
        p = expit(odds + a)
        step = (mean - float(p.mean())) / max(float((p * (1 - p)).mean()), 1e-6)
        a += min(max(step, -1.0), 1.0)
        if abs(step) < 1e-9:
            break
    return a


def _shift_confidence(p: np.ndarray, predicted: np.ndarray, intercept: float) -> np.ndarray:
    """Shift the log-odds of the predicted class; the other probabilities keep their ratios."""
    rows = np.arange(len(p))
    moved = expit(logit(np.clip(p[rows, predicted], 1e-15, 1 - 1e-15)) + intercept)
    # The small constant matters where the confidence is 1: the other classes then share alike.
    others = np.maximum(p, 1e-300)
    others[rows, predicted] = 0
    out: np.ndarray = others * ((1 - moved) / others.sum(axis=1))[:, None]
    out[rows, predicted] = moved
    return out


def _draw_labels(p: np.ndarray, rng: Generator) -> np.ndarray:
    edges = np.cumsum(p, axis=1)
    labels: np.ndarray = (rng.random((len(p), 1)) * edges[:, -1:] > edges).sum(axis=1)
    return np.minimum(labels, p.shape[1] - 1)
