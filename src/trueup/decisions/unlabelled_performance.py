"""Performance without labels: what calibrated probabilities say of accuracy, F1 and ranking before labels arrive.

If calibration holds, a prediction of probability p is right with probability p, so that expected counts of right and
wrong predictions follow from the probabilities alone. It cannot see concept drift: where what the classes look like has
changed, only labels tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, stdtrit

from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.row_scores import event_class
from trueup.calibrators.base import Calibrator
from trueup.decisions.label_shift import CALIBRATION, em_prior, shift_prior, softmax
from trueup.decisions.refits import Refits, Resample, check_rows
from trueup.metrics.intervals import Interval
from trueup.metrics.table import plain_record

ESTIMATES = ("accuracy", "error_above", "f1", "roc_auc")
ASSUMPTION = "This holds as long as calibration does; a change in what the classes look like shows only with labels."


@dataclass(frozen=True, eq=False)
class PerformanceEstimate:
    """What a network's performance on unlabelled rows is expected to be, with intervals of what labels would show."""

    values: Mapping[str, Interval]
    rows: int
    level: float
    calibration_rows: int
    """That the intervals carry the uncertainty of; 0 where the probabilities were taken as they are."""
    shifted: bool
    """Whether the class frequencies were estimated anew."""

    def __getitem__(self, metric: str) -> Interval:
        return self.values[metric]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        names = ("rows", "level", "calibration_rows", "shifted")
        values = {name: plain_record(asdict(one)) for name, one in self.values.items()}
        return {"schema": 1, **{name: getattr(self, name) for name in names}, "metrics": values}

    def __str__(self) -> str:
        head = f"Estimated without labels on {self.rows:,} rows"
        labelled = f"calibrated on {self.calibration_rows:,} labelled rows"
        source = labelled if self.calibration_rows else "the probabilities taken as calibrated"
        shifted = ", class frequencies estimated anew" if self.shifted else ""
        table = [["metric", "estimate", f"{format_percent(self.level)} interval"]]
        table += [[k, format_number(i.value), format_interval(i.low, i.high)] for k, i in self.values.items()]
        return "\n\n".join([f"{head}, {source}{shifted}", text_table(table), ASSUMPTION])


@dataclass(frozen=True)
class PerformanceMetrics:
    """What is estimated.

    accuracy: the mean confidence. error_above: 1 − the mean confidence of the rows whose confidence is at least
    `threshold`. f1 and roc_auc are of class `event` against the others: TP is the sum of P(event) over the rows
    predicted as the event, and so on.
    """

    names: Iterable[str] = ("accuracy",)
    threshold: float = 0.5
    event: int | str = 1
    class_names: Sequence[str] | None = None

    def checked_names(self) -> tuple[str, ...]:
        """The names of the metrics, each of which must be known."""
        if not 0 <= self.threshold <= 1:
            raise InputError("threshold", "lie between 0 and 1", repr(self.threshold))
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        for name in names:
            if name not in ESTIMATES:
                raise InputError("metrics", f"be of {', '.join(ESTIMATES)}", repr(name))
        return names


def estimate_performance(
    logits: Any,
    *,
    val: tuple[Any, Any] | None = None,
    metrics: Iterable[str] | PerformanceMetrics = ("accuracy",),
    calibrate: str | Callable[..., Calibrator] | None = None,
    shift: bool = False,
    level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
) -> PerformanceEstimate:
    """Expected accuracy, error above a confidence, F1 and ROC-AUC of unlabelled rows.

    `metrics` are names, or `PerformanceMetrics` where they are about another event or threshold than class 1 and 0.5.
    With labelled rows `val`, `calibrate` (temperature scaling unless named) is fitted to them, with a shift of the
    confidences' log-odds so that their mean is the accuracy there; the intervals come from fits to resamples of `val`
    and labels drawn from what each says, so that they are intervals of what labels would show.
    `shift=True` first estimates the new class frequencies and corrects for them.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(estimate_performance(3 * z[2000:], val=(3 * z[:2000], y[:2000]), n_resamples=100))
    Estimated without labels on 2,000 rows, calibrated on 2,000 labelled rows
    <BLANKLINE>
    metric    estimate     95 % interval
    accuracy    0.5819  [0.5529, 0.6110]
    <BLANKLINE>
    This holds as long as calibration does; a change in what the classes look like shows only with labels.
    >>> f"{(z[2000:].argmax(axis=1) == y[2000:]).mean():.4f}"
    '0.5930'

    Guerra et al. call it confidence-based performance estimation (CBPE); Garg et al. (2022) for its limits.
    """
    asked = metrics if isinstance(metrics, PerformanceMetrics) else PerformanceMetrics(metrics)
    wanted = asked.checked_names()
    z, pair = check_rows(logits, val, level, n_resamples)
    number = event_class(asked.event, z.shape[1], asked.class_names)
    if shift and pair is None:
        raise ValueError("shift=True needs val, labelled rows of the old population")
    rng = np.random.default_rng(seed)
    dispersion, labelled = 1.0, 0
    if pair is None:
        p = softmax(z)
        predicted = p.argmax(axis=1)
        draws: Iterable[np.ndarray] = repeat(p, n_resamples)
    else:
        labelled = len(pair[0])
        refits = Refits(calibrate or (CALIBRATION if shift else "temperature"), *pair)
        fitted = partial(_calibrate, refits, z, shift)
        p, predicted, prior, dispersion = fitted(Resample(refits.calibrator, np.arange(labelled)))
        draws = (fitted(refits.draw(rng), prior, rng).probs for _ in range(n_resamples))
    rows = np.arange(len(p))
    reader = _Reader(p[rows, predicted] >= asked.threshold, predicted == number, p[:, number])
    values = {name: reader.read(name, p[rows, predicted], p[:, number]) for name in wanted}
    means: dict[str, list[float]] = {name: [] for name in wanted}
    noise: dict[str, list[float]] = {name: [] for name in wanted}
    for drawn in draws:
        labels = _draw(drawn, rng)
        right, happens = (labels == predicted).astype(np.float64), (labels == number).astype(np.float64)
        for name in wanted:
            means[name].append(reader.read(name, drawn[rows, predicted], drawn[:, number]))
            noise[name].append(reader.read(name, right, happens) - means[name][-1])
    # Student's quantile, since so many draws know the spread only so well; and the spread, not the percentiles, which
    # some hundred draws leave too near to each other.
    reach = float(stdtrit(max(n_resamples - 1, 1), 0.5 + level / 2))
    intervals = {}
    for name, value in values.items():
        error = math.nan
        if not (math.isnan(value) or np.isnan(noise[name]).all()):
            variance = np.nanvar(means[name]) + dispersion * np.nanvar(noise[name])
            error = reach * math.sqrt(variance * n_resamples / max(n_resamples - 1, 1))
        intervals[name] = Interval(value, max(value - error, 0.0), min(value + error, 1.0), level)
    return PerformanceEstimate(intervals, len(z), level, labelled, shift)


class _Reader(NamedTuple):
    """What was predicted: which rows are at or above the threshold, which are predicted as the event, its score."""

    kept: np.ndarray
    positive: np.ndarray
    score: np.ndarray

    def read(self, metric: str, right: np.ndarray, happens: np.ndarray) -> float:
        """A metric, from how far each row is right and is the event: probabilities, or 0 and 1 by its label."""
        if metric == "accuracy":
            return float(right.mean())
        if metric == "error_above":
            return float(1 - right[self.kept].mean()) if self.kept.any() else math.nan
        if metric == "f1":
            both = float(happens[self.positive].sum())
            either = float(self.positive.sum()) + float(happens.sum())
            return 2 * both / either if either > 0 else math.nan
        return soft_roc_auc(self.score, happens)


def soft_roc_auc(scores: np.ndarray, chance: np.ndarray) -> float:
    """The area under the ROC curve where row i is positive with probability `chance`[i]; ties are one step.

    >>> f"{soft_roc_auc(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 0.0])):.2f}"
    '1.00'
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    true = np.append(0.0, np.cumsum(chance[order])[last])
    false = np.append(0.0, np.cumsum(1 - chance[order])[last])
    if true[-1] <= 0 or false[-1] <= 0:
        return math.nan
    return float(np.diff(false) @ (true[1:] + true[:-1]) / (2 * true[-1] * false[-1]))


class _Calibrated(NamedTuple):
    """Calibrated probabilities of the unlabelled rows."""

    probs: np.ndarray
    predicted: np.ndarray
    """The class of each row: a confidence that turns out to be low does not change what the network says."""
    prior: np.ndarray | None
    """The class frequencies that they were corrected for."""
    dispersion: float
    """By how much labels vary more than the probabilities say: Σ(right − c)² / Σc(1 − c) on labelled rows, at least 1.

    A map with few parameters, such as a temperature, calibrates on the whole and not everywhere.
    """


def _calibrate(
    refits: Refits,
    z: np.ndarray,
    shift: bool,
    fitted: Resample,
    start: np.ndarray | None = None,
    rng: np.random.Generator | None = None,
) -> _Calibrated:
    """Calibrate; with a generator the rows are drawn anew where their class frequencies are estimated."""
    val_z, val_y = refits.pair
    labelled = softmax(fitted.calibrator(val_z))[fitted.rows]
    predicted = labelled.argmax(axis=1)
    right = predicted == val_y[fitted.rows]
    # Temperature scaling may leave the mean confidence some tenths of a per cent off: that is all that counts here.
    intercept = match_mean(_log_odds(labelled.max(axis=1)), float((right.sum() + 0.5) / (len(right) + 1)))
    labelled = _shift_confidence(labelled, intercept)
    top = labelled[np.arange(len(predicted)), predicted]
    dispersion = max(float(((right - top) ** 2).sum()) / max(float((top * (1 - top)).sum()), 1e-12), 1.0)
    fresh = softmax(fitted.calibrator(z))
    p = _shift_confidence(fresh, intercept)
    if not shift:
        return _Calibrated(p, fresh.argmax(axis=1), None, dispersion)
    old = labelled.mean(axis=0)
    weights = None if rng is None else rng.multinomial(len(z), np.full(len(z), 1 / len(z))).astype(np.float64)
    prior = em_prior(p, old, sample_weight=weights, start=start)
    p = softmax(shift_prior(prior, old)(np.log(np.maximum(p, 1e-300))))
    return _Calibrated(p, p.argmax(axis=1), prior, dispersion)


def match_mean(odds: np.ndarray, wanted: float) -> float:
    """The a with which σ(log-odds + a) has the wanted mean, by Newton's method.

    >>> round(match_mean(np.zeros(3), 0.75), 4)
    1.0986
    """
    a = 0.0
    for _ in range(50):
        p = expit(odds + a)
        step = (wanted - float(p.mean())) / max(float((p * (1 - p)).mean()), 1e-6)
        a += min(max(step, -1.0), 1.0)
        if abs(step) < 1e-9:
            break
    return a


def _log_odds(confidence: np.ndarray) -> np.ndarray:
    c = np.clip(confidence, 1e-15, 1 - 1e-15)
    odds: np.ndarray = np.log(c) - np.log1p(-c)
    return odds


def _shift_confidence(p: np.ndarray, intercept: float) -> np.ndarray:
    """Add to the log-odds of the predicted class; the others share the rest as before."""
    rows, best = np.arange(len(p)), p.argmax(axis=1)
    confidence = p[rows, best]
    moved = expit(_log_odds(confidence) + intercept)
    others = p.copy()
    others[rows, best] = 0
    total = others.sum(axis=1, keepdims=True)
    if not total.all():  # of a very sure row nothing is left to the others: they share alike
        others = np.where(total > 0, others, 1.0)
        others[rows, best] = 0
        total = others.sum(axis=1, keepdims=True)
    out: np.ndarray = others * ((1 - moved)[:, None] / total)
    out[rows, best] = moved
    return out


def _draw(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A label of each row."""
    edges = np.cumsum(p, axis=1)
    labels: np.ndarray = (rng.random((len(p), 1)) * edges[:, -1:] > edges).sum(axis=1)
    return np.minimum(labels, p.shape[1] - 1)
