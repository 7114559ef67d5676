"""An event's probability held against what happened, as risk scores and forecasts are validated.

Of two classes the event is class 1; of more, or with `top_label`, it is that the prediction is right. A class of
several becomes an event by `convert.as_event`. Everything is computed from the distinct scores and the rows that have
them (`Points`): exactly from rows, and from a tally's fine grid to within the width of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import equal_mass_chunks, tie_ends
from trueup._core.row_scores import event_log_odds, is_event, scores_and_outcomes
from trueup._core.tally import Grid
from trueup._core.types import ArrayLike, WeightsLike

_EXTREME = 36.0
"""Log-odds of a confidence that rounds to 1; those of two classes are a difference of logits and need no bound."""


class Recalibration(NamedTuple):
    """The logistic regression of what happened on the log-odds of what was predicted, with standard errors."""

    intercept: float
    """0 if calibrated."""
    slope: float
    """1 if calibrated; below 1 the predictions are too extreme, above not extreme enough."""
    intercept_error: float
    slope_error: float


_NO_FIT = Recalibration(math.nan, math.nan, math.nan, math.nan)


class Points:
    """Distinct scores in ascending order, with the rows that have them.

    Sums are over the last axis and other axes stay, so that one formula serves a data set and a thousand samples of it.
    """

    def __init__(self, score: np.ndarray, odds: np.ndarray, rows: np.ndarray, squared: np.ndarray) -> None:
        self.score, self.odds = score, odds
        self.rows, self.squared = rows, squared
        """(…, 2, points): how many rows (or their weight), and Σw²; where it did not happen, and where it did."""

    @classmethod
    def of(cls, logits: Any, labels: Any, *, top_label: bool = False, sample_weight: Any = None) -> Points:
        """The points of a pair."""
        z, y = as_arrays(logits, labels)
        score, outcome = scores_and_outcomes(z, y, top_label=top_label)
        odds = event_log_odds(z) if is_event(z, top_label) else None
        return cls.from_rows(score, outcome, odds, as_weights(sample_weight, len(z)))

    @classmethod
    def from_rows(
        cls, score: np.ndarray, outcome: np.ndarray, odds: np.ndarray | None, sample_weight: np.ndarray | None
    ) -> Points:
        """The points of trusted arrays; log-odds that are known better than the scores may be given."""
        x = log_odds(score) if odds is None else odds
        w = np.ones(len(score)) if sample_weight is None else sample_weight
        if sample_weight is not None:
            some = w > 0  # a row without weight is not there
            score, outcome, x, w = score[some], outcome[some], x[some], w[some]
        order = np.argsort(x, kind="stable")
        point = np.cumsum(np.concatenate([[0], tie_ends(score[order])[:-1]])) if len(order) else order
        of_row = np.empty(len(order), np.int64)
        of_row[order] = point
        return cls.from_cells(of_row, score, x, outcome, w)

    @classmethod
    def from_cells(
        cls, index: np.ndarray, score: np.ndarray, odds: np.ndarray, outcome: np.ndarray, sample_weight: np.ndarray
    ) -> Points:
        """Gather rows whose place is known, each place at its mean score."""
        size = int(index.max()) + 1 if len(index) else 0
        place = index + size * outcome.astype(np.int64)
        rows, squared = (
            np.bincount(place, w, minlength=2 * size).reshape(2, -1) for w in (sample_weight, sample_weight**2)
        )
        count = rows.sum(axis=0)
        mean_score, mean_odds = (np.bincount(index, sample_weight * x, minlength=size) / count for x in (score, odds))
        return cls(mean_score, mean_odds, rows, squared)

    @classmethod
    def of_grid(cls, grid: Grid) -> Points:
        """The points of a tally, each cell at its mean score: off by no more than the width of a cell."""
        some = grid.rows > 0
        score = np.clip(grid.confidence.sum(axis=0)[some] / grid.rows[some], 0.0, 1.0)
        return cls(score, log_odds(score), grid.count[:, some], grid.squared_weights[:, some])

    def chunk_starts(self, size: int) -> np.ndarray:
        """The first point of each chunk, at most so many chunks, of about equal weight."""
        return np.flatnonzero(np.diff(equal_mass_chunks(self.below, self.total, size), prepend=-1))

    def merge(self, size: int) -> Points:
        """At most so many points, of about equal weight."""
        if len(self.score) <= size:
            return self
        first = self.chunk_starts(size)
        rows, squared = (np.add.reduceat(x, first, axis=1) for x in (self.rows, self.squared))
        score, odds = (np.add.reduceat(self.count * x, first) / rows.sum(axis=0) for x in (self.score, self.odds))
        return Points(score, odds, rows, squared)

    @cached_property
    def count(self) -> np.ndarray:
        """How many rows, or their weight."""
        return self.rows.sum(axis=-2)

    @cached_property
    def below(self) -> np.ndarray:
        """How many rows have a lower score, or their weight."""
        return np.cumsum(self.count) - self.count

    @property
    def hits(self) -> np.ndarray:
        """Those where it happened."""
        return self.rows[..., 1, :]

    @cached_property
    def total(self) -> Any:
        """How many rows in all, or their weight."""
        return self.count.sum(axis=-1)

    @cached_property
    def rate(self) -> Any:
        """How often it happens; NaN of nothing."""
        return _divide(self.hits.sum(axis=-1), self.total)

    @property
    def has_both(self) -> bool:
        """Whether it sometimes happens and sometimes not."""
        return bool(0 < self.hits.sum() < self.total)

    @cached_property
    def effective_rows(self) -> float:
        """(Σw)²/Σw²: how many rows of equal weight tell as much."""
        squared = float(self.squared.sum())
        return self.total**2 / squared if squared else 0.0

    @cached_property
    def recalibrated(self) -> np.ndarray:
        """The isotonic regression of what happened on the score, by pooling adjacent violators."""
        return fit_isotonic(self.hits / self.count, self.count)

    @cached_property
    def recalibration(self) -> Recalibration:
        """Fit intercept and slope by Newton's steps, halved until the likelihood rises; NaN where it has no maximum.

        It has none where it always or never happens, where all scores are equal, and where one score separates what
        happened from what did not.
        """
        x = self.odds
        if len(x) < 2 or not self.has_both or self.is_separated():
            return _NO_FIT
        weight, target = self.count / self.total, self.hits / self.total
        centre = float(weight @ x)
        width = math.sqrt(float(weight @ (x - centre) ** 2))
        if width <= 1e-12 * (1 + abs(centre)):
            return _NO_FIT
        u = (x - centre) / width

        def loss(line: np.ndarray) -> float:
            odds = line[0] + line[1] * u
            return float(weight @ np.logaddexp(0.0, odds) - target @ odds)

        at = np.array([float(logit(target.sum())), 0.0])
        value = loss(at)
        for _ in range(100):
            p = expit(at[0] + at[1] * u)
            residual, bend = weight * p - target, weight * p * (1 - p)
            slope = np.array([residual.sum(), residual @ u])
            a, b, c = bend.sum(), bend @ u, bend @ u**2
            if not a * c - b * b > 0:
                return _NO_FIT
            step = np.array([b * slope[1] - c * slope[0], b * slope[0] - a * slope[1]]) / (a * c - b * b)
            gain, length = float(-step @ slope), 1.0
            while (following := loss(at + length * step)) > value - 1e-4 * length * gain + 1e-15 and length >= 1e-6:
                length /= 2
            at, value = at + length * step, following
            if gain < 1e-18:  # the last step is taken too: it leaves an error of about its square
                break
        else:
            return _NO_FIT
        turn = np.array([[1.0, -centre / width], [0.0, 1 / width]])  # from the intercept and slope of u to those of x
        covariance = turn @ np.linalg.inv([[a, b], [b, c]]) @ turn.T / self.effective_rows
        return Recalibration(*(turn @ at).tolist(), *np.sqrt(np.diag(covariance)).tolist())

    @cached_property
    def in_the_large(self) -> tuple[float, float]:
        """The shift of the log-odds after which the mean is right, and its standard error."""
        if not self.has_both:
            return math.nan, math.nan
        from scipy.optimize import brentq  # slow to import, as above

        x, weight, rate = self.odds, self.count / self.total, float(self.rate)
        least, most = float(logit(rate) - x.max()), float(logit(rate) - x.min())  # all at the largest, all at the least
        shift = brentq(lambda a: float(weight @ expit(x + a)) - rate, least - 1, most + 1, xtol=1e-13)
        p = expit(x + shift)
        bend = float(weight @ (p * (1 - p)))
        return shift, 1 / math.sqrt(self.effective_rows * bend) if bend > 0 else math.nan

    def is_separated(self) -> bool:
        """Whether all scores where it happened lie on one side of those where it did not."""
        no, yes = (np.flatnonzero(rows > 0) for rows in self.rows)
        return bool(yes[0] >= no[-1] or yes[-1] <= no[0])

    @property
    def error(self) -> np.ndarray:
        """|p − p̂|, p̂ the isotonic regression."""
        return np.abs(self.score - self.recalibrated)

    def mean(self, values: np.ndarray) -> Any:
        """The mean over the rows of a number for each point; NaN of nothing."""
        return _divide((self.count * values).sum(axis=-1), self.total)

    def brier(self, probability: np.ndarray) -> Any:
        """Σ(p − y)²/n of other probabilities at these points."""
        squares = self.rows[..., 0, :] * probability**2 + self.hits * (1 - probability) ** 2
        return _divide(squares.sum(axis=-1), self.total)


def fit_isotonic(rates: np.ndarray, sample_weight: np.ndarray) -> np.ndarray:
    """The rising values nearest to rates in weighted squares, by pooling adjacent violators."""
    from scipy.optimize import isotonic_regression  # slow to import, and most tables need none

    return isotonic_regression(rates, weights=sample_weight).x if len(rates) else np.zeros(0)


def log_odds(score: np.ndarray) -> np.ndarray:
    """ln p/(1 − p), kept within ±36, where a probability rounds to 0 or 1."""
    with np.errstate(divide="ignore"):
        return np.clip(logit(score), -_EXTREME, _EXTREME)


def predicted(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The mean predicted probability.

    >>> round(predicted(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    0.2
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    return float(points.mean(points.score))


def observed(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """How often it happens.

    >>> observed(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1])
    0.5
    """
    return float(Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight).rate)


def observed_expected(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The ratio O:E of how often it happens and how often it is predicted, Σy/Σp; below 1 it is predicted too often.

    >>> round(observed_expected(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    2.5
    """
    return _value("observed_expected", logits, labels, top_label, sample_weight)


def event_brier(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The Brier score of the event, Σ(p − y)²/n, between 0 and 1: half of the sum over two classes.

    >>> round(event_brier(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    0.25

    Brier (1950).
    """
    return _value("event_brier", logits, labels, top_label, sample_weight)


class Corp(NamedTuple):
    """The parts of a Brier score: score = miscalibration − discrimination + uncertainty."""

    score: float
    miscalibration: float
    """S(p) − S(p̂): what the best rising map of the predictions would gain; MCB ≥ 0."""
    discrimination: float
    """S(ȳ) − S(p̂): what the predictions so mapped gain over the mean; DSC ≥ 0."""
    uncertainty: float
    """S(ȳ) = ȳ(1 − ȳ)."""


def corp(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> Corp:
    """Split the event's Brier score by isotonic regression: no bins to choose, and the parts are never negative.

    p̂ is the isotonic regression of what happened on what was predicted, by pooling adjacent violators.

    >>> parts = corp(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1])
    >>> print(*(f"{part:.4f}" for part in parts))
    0.2200 0.2200 0.2222 0.2222

    Dimitriadis, Gneiting & Jordan (2021), Stable reliability diagrams for probabilistic classifiers.
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    return Corp(*event_values(points, ("event_brier", "miscalibration", "discrimination", "uncertainty")).values())


def miscalibration(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The part of the event's Brier score that the best rising map of the predictions would gain (MCB); see `corp`.

    >>> round(miscalibration(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.22

    Dimitriadis, Gneiting & Jordan (2021).
    """
    return _value("miscalibration", logits, labels, top_label, sample_weight)


def discrimination(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """What the predictions, recalibrated, gain over the mean in the event's Brier score (DSC); see `corp`.

    >>> round(discrimination(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.2222

    Dimitriadis, Gneiting & Jordan (2021).
    """
    return _value("discrimination", logits, labels, top_label, sample_weight)


def uncertainty(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The event's own variance ȳ(1 − ȳ), the Brier score of always predicting its mean (UNC); see `corp`.

    >>> round(uncertainty(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.2222

    Dimitriadis, Gneiting & Jordan (2021).
    """
    return _value("uncertainty", logits, labels, top_label, sample_weight)


def auroc(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """The chance that the score is higher where it happens than where it does not; NaN unless there are both.

    (`misclassification_auroc` is about telling right from wrong predictions.)

    >>> auroc(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 0])
    0.5

    Mann and Whitney (1947); Hanley and McNeil (1982).
    """
    return _value("auroc", logits, labels, top_label, sample_weight)


def calibration_slope(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The slope of the logistic regression of what happened on the log-odds of what was predicted: 1 if calibrated.

    Below 1 the predictions are too extreme, above 1 not extreme enough. NaN where the regression has no maximum.

    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_slope(z, [0, 1, 0, 1]), 4)
    0.7235

    Cox (1958), Two further applications of a model for binary regression; Steyerberg (2009).
    """
    return _value("calibration_slope", logits, labels, top_label, sample_weight)


def calibration_intercept(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The intercept of the logistic regression of `calibration_slope`: 0 if calibrated.

    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_intercept(z, [0, 1, 0, 1]), 4)
    0.2153

    Cox (1958); Steyerberg (2009), Clinical prediction models.
    """
    return _value("calibration_intercept", logits, labels, top_label, sample_weight)


def calibration_in_the_large(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """The shift of all log-odds after which it happens as often as predicted: below 0 it is predicted too often.

    The intercept a of the logistic regression with slope 1, Σ σ(logit p + a) = Σ y; NaN where it never or always
    happens.

    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_in_the_large(z, [0, 1, 0, 1]), 4)
    0.2856

    Cox (1958); Steyerberg (2009), Clinical prediction models.
    """
    return _value("calibration_in_the_large", logits, labels, top_label, sample_weight)


def ici(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """The integrated calibration index: the mean |p − p̂|, p̂ the isotonic regression of what happened on p.

    Isotonic regression follows noise, so that few rows make it too large; its interval in `evaluate` allows for that.

    >>> round(ici(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.4

    Austin & Steyerberg (2019), who smooth by loess.
    """
    return _value("ici", logits, labels, top_label, sample_weight)


def e50(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """The median of |p − p̂|, whose mean is `ici`.

    >>> round(e50(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.4

    Austin & Steyerberg (2019).
    """
    return _value("e50", logits, labels, top_label, sample_weight)


def e90(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """The 90th percentile of |p − p̂|, whose mean is `ici`.

    >>> round(e90(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.7

    Austin & Steyerberg (2019).
    """
    return _value("e90", logits, labels, top_label, sample_weight)


def kuiper(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Kuiper's calibration error (ECCE-R): the most by which what happens differs from what is predicted over any
    range of scores.

    The range of the cumulated gap, max_t G(t) − min_t G(t) with G(t) = 1/n Σ_{i: p_i ≤ t} (y_i − p_i) and G = 0 at the
    start. `kuiper_test` has its p-value; `ks` is max |G|.

    >>> round(kuiper(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.3667

    Arrieta-Ibarra, Gujral, Tannen, Tygert & Xu (2022), Metrics of calibration for probabilistic predictions.
    """
    return _value("kuiper", logits, labels, top_label, sample_weight)


def _value(metric: str, logits: Any, labels: Any, top_label: bool, sample_weight: Any) -> float:
    return float(EVENT_METRICS[metric](Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)))


def _divide(sums: Any, by: Any) -> Any:
    """The quotient, NaN where there is nothing to divide by."""
    return np.divide(sums, by, out=np.full(np.shape(by), math.nan), where=np.not_equal(by, 0))


def _event_auroc(points: Points) -> Any:
    no, yes = points.rows[..., 0, :], points.hits
    wins = (yes * (np.cumsum(no, axis=-1) - no / 2)).sum(axis=-1)
    return _divide(wins, yes.sum(axis=-1) * no.sum(axis=-1))


def _quantile_of_errors(points: Points, share: float) -> Any:
    """The least error that at least this share of the rows does not exceed."""
    if not points.count.size:
        return math.nan
    order = np.argsort(points.error, axis=-1, kind="stable")
    below = np.cumsum(np.take_along_axis(points.count, order, axis=-1), axis=-1)
    first = (below < share * points.total[..., None] * (1 - 1e-12)).sum(axis=-1, keepdims=True)
    return np.take_along_axis(np.take_along_axis(points.error, order, axis=-1), first, axis=-1)[..., 0]


def kuiper_of(points: Points) -> float:
    """The range of `kuiper` from points."""
    gap = np.concatenate([[0.0], np.cumsum(points.hits - points.count * points.score)])
    return float(_divide(gap.max() - gap.min(), points.total))


EVENT_METRICS: Mapping[str, Callable[[Points], Any]] = {
    "observed_expected": lambda points: _divide(points.hits.sum(axis=-1), (points.count * points.score).sum(axis=-1)),
    "event_brier": lambda points: points.brier(points.score),
    "miscalibration": lambda points: points.brier(points.score) - points.brier(points.recalibrated),
    "discrimination": lambda points: points.rate * (1 - points.rate) - points.brier(points.recalibrated),
    "uncertainty": lambda points: points.rate * (1 - points.rate),
    "auroc": _event_auroc,
    "calibration_intercept": lambda points: points.recalibration.intercept,
    "calibration_slope": lambda points: points.recalibration.slope,
    "calibration_in_the_large": lambda points: points.in_the_large[0],
    "ici": lambda points: points.mean(points.error),
    "e50": lambda points: _quantile_of_errors(points, 0.5),
    "e90": lambda points: _quantile_of_errors(points, 0.9),
    "kuiper": kuiper_of,
}
"""What is computed from points."""


def event_values(points: Points, names: Iterable[str]) -> dict[str, float]:
    """Several of `EVENT_METRICS`."""
    return {name: float(EVENT_METRICS[name](points)) for name in names}
