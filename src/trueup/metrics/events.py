"""Metrics of an event's probability, as risk scores and weather forecasts are validated.

With two classes the event is class 1. With more classes, or with `top_label`, it is that the prediction is right.
`convert.as_event` turns one class of several into an event. Everything is computed from the distinct scores and their
rows (`Points`). It is exact from rows. From a tally's fine grid it is accurate to the width of a cell.
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

_MAX_LOG_ODDS = 36.0
"""Log-odds at which a confidence rounds to 1; with two classes they are a difference of logits and need no bound."""


EVENT_CELLS = 128
"""Number of cells of equal mass in which the scores of an event are smoothed and resampled."""
_LOESS_SPAN = 0.75


class Recalibration(NamedTuple):
    """The logistic regression of the outcome on the log-odds of the prediction, with standard errors."""

    intercept: float
    """0 if calibrated."""
    slope: float
    """1 if calibrated; below 1 the predictions are too extreme, above 1 not extreme enough."""
    intercept_error: float
    slope_error: float


_NO_FIT = Recalibration(math.nan, math.nan, math.nan, math.nan)


class Points:
    """Distinct scores in ascending order, with their rows.

    Sums run over the last axis and other axes stay, so one formula serves a data set and a thousand samples of it.
    """

    def __init__(self, score: np.ndarray, odds: np.ndarray, rows: np.ndarray, squared: np.ndarray) -> None:
        self.score, self.odds = score, odds
        self.rows, self.squared = rows, squared
        """(…, 2, points): number of rows (or their weight), and Σw², without and with the event."""

    @classmethod
    def of(cls, logits: Any, labels: Any, *, top_label: bool = False, sample_weight: Any = None) -> Points:
        """Return the points of a pair."""
        z, y = as_arrays(logits, labels)
        score, outcome = scores_and_outcomes(z, y, top_label=top_label)
        odds = event_log_odds(z) if is_event(z, top_label) else None
        return cls.from_rows(score, outcome, odds, as_weights(sample_weight, len(z)))

    @classmethod
    def from_rows(
        cls, score: np.ndarray, outcome: np.ndarray, odds: np.ndarray | None, sample_weight: np.ndarray | None
    ) -> Points:
        """Return the points of trusted arrays; exact log-odds may be passed in."""
        x = log_odds(score) if odds is None else odds
        w = np.ones(len(score)) if sample_weight is None else sample_weight
        if sample_weight is not None:
            some = w > 0  # rows without weight do not count
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
        """Gather rows into their cells; each cell takes the mean score of its rows."""
        size = int(index.max()) + 1 if len(index) else 0
        cell = index + size * outcome.astype(np.int64)
        rows, squared = (
            np.bincount(cell, w, minlength=2 * size).reshape(2, -1) for w in (sample_weight, sample_weight**2)
        )
        count = rows.sum(axis=0)
        mean_score, mean_odds = (np.bincount(index, sample_weight * x, minlength=size) / count for x in (score, odds))
        return cls(mean_score, mean_odds, rows, squared)

    @classmethod
    def of_grid(cls, grid: Grid) -> Points:
        """Return the points of a tally, with each cell at its mean score."""
        some = grid.rows > 0
        score = np.clip(grid.confidence.sum(axis=0)[some] / grid.rows[some], 0.0, 1.0)
        return cls(score, log_odds(score), grid.count[:, some], grid.squared_weights[:, some])

    def chunk_starts(self, size: int) -> np.ndarray:
        """Return the first point of each of at most `size` chunks of about equal weight."""
        return np.flatnonzero(np.diff(equal_mass_chunks(self.below, self.total, size), prepend=-1))

    def merge(self, size: int) -> Points:
        """Merge points into at most `size` points of about equal weight."""
        if len(self.score) <= size:
            return self
        first = self.chunk_starts(size)
        rows, squared = (np.add.reduceat(x, first, axis=1) for x in (self.rows, self.squared))
        score, odds = (np.add.reduceat(self.count * x, first) / rows.sum(axis=0) for x in (self.score, self.odds))
        return Points(score, odds, rows, squared)

    @cached_property
    def count(self) -> np.ndarray:
        """Number of rows of each point, or their weight."""
        return self.rows.sum(axis=-2)

    @cached_property
    def below(self) -> np.ndarray:
        """Number of rows with a lower score, or their weight."""
        return np.cumsum(self.count) - self.count

    @property
    def hits(self) -> np.ndarray:
        """Number of rows with the event, or their weight."""
        return self.rows[..., 1, :]

    @cached_property
    def total(self) -> Any:
        """Number of all rows, or their weight."""
        return self.count.sum(axis=-1)

    @cached_property
    def rate(self) -> Any:
        """Frequency of the event; NaN without rows."""
        return _divide(self.hits.sum(axis=-1), self.total)

    @property
    def has_both(self) -> bool:
        """Whether the event sometimes happens and sometimes does not."""
        return bool(0 < self.hits.sum() < self.total)

    @cached_property
    def effective_rows(self) -> float:
        """(Σw)²/Σw²: number of rows of equal weight with the same information."""
        squared = float(self.squared.sum())
        return self.total**2 / squared if squared else 0.0

    @cached_property
    def recalibrated(self) -> np.ndarray:
        """Isotonic regression of the outcome on the score, by pooling adjacent violators."""
        return fit_isotonic(self.hits / self.count, self.count)

    @cached_property
    def recalibration(self) -> Recalibration:
        """Intercept and slope by Newton's method with step halving; NaN where the likelihood has no maximum.

        It has none where the event always or never happens, where all scores are equal, or where a score separates the
        outcomes.
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
            residual, curvature = weight * p - target, weight * p * (1 - p)
            slope = np.array([residual.sum(), residual @ u])
            a, b, c = curvature.sum(), curvature @ u, curvature @ u**2
            if not a * c - b * b > 0:
                return _NO_FIT
            step = np.array([b * slope[1] - c * slope[0], b * slope[0] - a * slope[1]]) / (a * c - b * b)
            gain, length = float(-step @ slope), 1.0
            while (next_value := loss(at + length * step)) > value - 1e-4 * length * gain + 1e-15 and length >= 1e-6:
                length /= 2
            at, value = at + length * step, next_value
            if gain < 1e-18:  # the step was still taken: the error is about its square
                break
        else:
            return _NO_FIT
        unscale = np.array([[1.0, -centre / width], [0.0, 1 / width]])  # from the coefficients of u to those of x
        covariance = unscale @ np.linalg.inv([[a, b], [b, c]]) @ unscale.T / self.effective_rows
        return Recalibration(*(unscale @ at).tolist(), *np.sqrt(np.diag(covariance)).tolist())

    @cached_property
    def in_the_large(self) -> tuple[float, float]:
        """The shift of the log-odds that makes the mean right, and its standard error."""
        if not self.has_both:
            return math.nan, math.nan
        from scipy.optimize import brentq  # slow to import

        x, weight, rate = self.odds, self.count / self.total, float(self.rate)
        low, high = float(logit(rate) - x.max()), float(logit(rate) - x.min())  # the root lies between these
        shift = brentq(lambda a: float(weight @ expit(x + a)) - rate, low - 1, high + 1, xtol=1e-13)
        p = expit(x + shift)
        curvature = float(weight @ (p * (1 - p)))
        return shift, 1 / math.sqrt(self.effective_rows * curvature) if curvature > 0 else math.nan

    def is_separated(self) -> bool:
        """Return whether one threshold on the score separates the outcomes."""
        no, yes = (np.flatnonzero(rows > 0) for rows in self.rows)
        return bool(yes[0] >= no[-1] or yes[-1] <= no[0])

    @cached_property
    def smoothed(self) -> np.ndarray:
        """Smooth curve of the outcome over the score: loess on at most `EVENT_CELLS` cells, linear between them."""
        cells = self.merge(EVENT_CELLS)
        return (
            np.interp(self.score, cells.score, cells.loess.fit(cells.hits, cells.count))
            if self.score.size
            else self.score
        )

    @cached_property
    def loess(self) -> Loess:
        """Smoother at these scores."""
        return Loess(self.score, self.count)

    @property
    def error(self) -> np.ndarray:
        """|p − p̂|, with p̂ the smooth curve."""
        return np.abs(self.score - self.smoothed)

    def mean(self, values: np.ndarray) -> Any:
        """Average a number per point over the rows; NaN without rows."""
        return _divide((self.count * values).sum(axis=-1), self.total)

    def brier(self, probability: np.ndarray) -> Any:
        """Compute Σ(p − y)²/n for other probabilities at these points."""
        squares = self.rows[..., 0, :] * probability**2 + self.hits * (1 - probability) ** 2
        return _divide(squares.sum(axis=-1), self.total)


class Loess:
    """Local quadratic regression with tricube weights over the nearest 75 % of the rows (Cleveland 1979).

    Where too few distinct scores have weight, the regression is linear, or a mean.
    """

    def __init__(self, score: np.ndarray, count: np.ndarray) -> None:
        distance = np.abs(score[:, None] - score)
        order = np.argsort(distance, axis=1, kind="stable")
        below = np.cumsum(count[order], axis=1) < _LOESS_SPAN * count.sum() * (1 - 1e-12)
        nearest = np.take_along_axis(order, np.minimum(below.sum(axis=1, keepdims=True), len(score) - 1), axis=1)
        width = np.maximum(np.take_along_axis(distance, nearest, axis=1), 1e-12)
        u = (score - score[:, None]) / width
        kernel = np.maximum(1 - np.abs(u) ** 3, 0.0) ** 3
        self.powers = [(kernel * u**k).T for k in range(5)]

    def fit(self, hits: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return the smooth rate at each score from sums of outcomes and rows (…, scores)."""
        s0, s1, s2, s3, s4 = (count @ power for power in self.powers)
        t0, t1, t2 = (hits @ power for power in self.powers[:3])
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(s0 > 0, t0 / s0, np.nan)
            spread = s0 * s2 - s1**2
            line = np.where(spread > 1e-6 * s0**2, (s2 * t0 - s1 * t1) / spread, mean)
            c0, c1, c2 = s2 * s4 - s3**2, s2 * s3 - s1 * s4, s1 * s3 - s2**2
            volume = s0 * c0 + s1 * c1 + s2 * c2
            curve = np.where(volume > 1e-6 * s0**3, (c0 * t0 + c1 * t1 + c2 * t2) / volume, line)
        return np.clip(curve, 0.0, 1.0)


def fit_isotonic(rates: np.ndarray, sample_weight: np.ndarray) -> np.ndarray:
    """Return the increasing values nearest to the rates in weighted squares, by pooling adjacent violators."""
    from scipy.optimize import isotonic_regression  # slow to import; most tables do not need it

    return isotonic_regression(rates, weights=sample_weight).x if len(rates) else np.zeros(0)


def log_odds(score: np.ndarray) -> np.ndarray:
    """Return ln p/(1 − p), clipped to ±36, where a probability rounds to 0 or 1."""
    with np.errstate(divide="ignore"):
        return np.clip(logit(score), -_MAX_LOG_ODDS, _MAX_LOG_ODDS)


def predicted(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the mean predicted probability.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The mean; NaN without rows.

    Examples
    --------
    >>> round(predicted(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    0.2
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    return float(points.mean(points.score))


def observed(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute how often the event happens.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The share of rows with the event; NaN without rows.

    Examples
    --------
    >>> observed(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1])
    0.5
    """
    return float(Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight).rate)


def observed_expected(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the ratio O:E of observed to expected events, Σy/Σp.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The ratio; below 1 the event is predicted too often.

    Examples
    --------
    >>> round(observed_expected(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    2.5
    """
    return _value("observed_expected", logits, labels, top_label, sample_weight)


def event_brier(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the Brier score of the event, Σ(p − y)²/n: half of the sum over two classes.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The score, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(event_brier(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    0.25

    References
    ----------
    Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    return _value("event_brier", logits, labels, top_label, sample_weight)


class Corp(NamedTuple):
    """The parts of a Brier score: score = miscalibration − discrimination + uncertainty."""

    score: float
    miscalibration: float
    """S(p) − S(p̂) ≥ 0: the gain of the best increasing map of the predictions (MCB)."""
    discrimination: float
    """S(ȳ) − S(p̂) ≥ 0: the gain of the mapped predictions over the constant mean (DSC)."""
    uncertainty: float
    """S(ȳ) = ȳ(1 − ȳ), the score of the constant mean (UNC)."""


def corp(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> Corp:
    """Split the event's Brier score by isotonic regression, which needs no bins.

    p̂ is the isotonic regression of the outcome on the prediction, by pooling adjacent violators. No part is negative.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    Corp
        The score and its three parts.

    Examples
    --------
    >>> parts = corp(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1])
    >>> print(*(f"{part:.4f}" for part in parts))
    0.2200 0.2200 0.2222 0.2222

    References
    ----------
    Dimitriadis, Gneiting & Jordan (2021), Stable reliability diagrams for probabilistic classifiers, arXiv:2008.03033.
    """
    points = Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)
    return Corp(*event_values(points, ("event_brier", "miscalibration", "discrimination", "uncertainty")).values())


def miscalibration(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the part of the event's Brier score that the best increasing map would remove (MCB); see `corp`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The part; 0 if no increasing map improves the score.

    Examples
    --------
    >>> round(miscalibration(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.22

    References
    ----------
    Dimitriadis, Gneiting & Jordan (2021), arXiv:2008.03033.
    """
    return _value("miscalibration", logits, labels, top_label, sample_weight)


def discrimination(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute how much recalibrated predictions improve the Brier score over the constant mean (DSC); see `corp`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The improvement; 0 if the predictions carry no information.

    Examples
    --------
    >>> round(discrimination(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.2222

    References
    ----------
    Dimitriadis, Gneiting & Jordan (2021), arXiv:2008.03033.
    """
    return _value("discrimination", logits, labels, top_label, sample_weight)


def uncertainty(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the event's variance ȳ(1 − ȳ), the Brier score of always predicting its mean (UNC); see `corp`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The variance, between 0 and ¼.

    Examples
    --------
    >>> round(uncertainty(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.2222

    References
    ----------
    Dimitriadis, Gneiting & Jordan (2021), arXiv:2008.03033.
    """
    return _value("uncertainty", logits, labels, top_label, sample_weight)


def auroc(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """Compute the probability that a row with the event has a higher score than a row without it.

    `misclassification_auroc` measures how well the confidence separates right from wrong predictions instead.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The area under the ROC curve; NaN unless both outcomes occur.

    Examples
    --------
    >>> auroc(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 0])
    0.5

    References
    ----------
    Hanley & McNeil (1982), The meaning and use of the area under a receiver operating characteristic curve.
    """
    return _value("auroc", logits, labels, top_label, sample_weight)


def calibration_slope(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the slope of the logistic regression of the outcome on the log-odds of the prediction.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        1 if calibrated; below 1 the predictions are too extreme. NaN where the likelihood has no maximum.

    Examples
    --------
    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_slope(z, [0, 1, 0, 1]), 4)
    0.7235

    References
    ----------
    Cox (1958), Two further applications of a model for binary regression.
    Steyerberg (2009), Clinical prediction models.
    """
    return _value("calibration_slope", logits, labels, top_label, sample_weight)


def calibration_intercept(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the intercept of the logistic regression of `calibration_slope`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        0 if calibrated; NaN where the likelihood has no maximum.

    Examples
    --------
    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_intercept(z, [0, 1, 0, 1]), 4)
    0.2153

    References
    ----------
    Cox (1958), Two further applications of a model for binary regression.
    Steyerberg (2009), Clinical prediction models.
    """
    return _value("calibration_intercept", logits, labels, top_label, sample_weight)


def calibration_in_the_large(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute the shift of all log-odds that makes the mean prediction right.

    It is the intercept a of the logistic regression with slope 1: Σ σ(logit p + a) = Σ y.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        0 if right on average; below 0 the event is predicted too often. NaN where the event never or always happens.

    Examples
    --------
    >>> z = np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    >>> round(calibration_in_the_large(z, [0, 1, 0, 1]), 4)
    0.2856

    References
    ----------
    Cox (1958), Two further applications of a model for binary regression.
    Steyerberg (2009), Clinical prediction models.
    """
    return _value("calibration_in_the_large", logits, labels, top_label, sample_weight)


def ici(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """Compute the integrated calibration index: the mean |p − p̂|, with p̂ a smooth curve of the outcome over p.

    The curve is loess, as in the paper: local quadratic regression with tricube weights over the nearest 75 % of the
    rows. It may rise and fall, so a reversed order of the predictions counts as an error. It is fitted at 128 cells of
    equal mass. The curve follows noise to some degree; the interval in `evaluate` allows for that.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The index, between 0 and 1.

    Examples
    --------
    >>> round(ici(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.4

    References
    ----------
    Austin & Steyerberg (2019), The Integrated Calibration Index (ICI) and related metrics.
    """
    return _value("ici", logits, labels, top_label, sample_weight)


def e50(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """Compute the median of |p − p̂|, whose mean is `ici`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The median, between 0 and 1.

    Examples
    --------
    >>> round(e50(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.4

    References
    ----------
    Austin & Steyerberg (2019), The Integrated Calibration Index (ICI) and related metrics.
    """
    return _value("e50", logits, labels, top_label, sample_weight)


def e90(logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None) -> float:
    """Compute the 90th percentile of |p − p̂|, whose mean is `ici`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The percentile, between 0 and 1.

    Examples
    --------
    >>> round(e90(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.7

    References
    ----------
    Austin & Steyerberg (2019), The Integrated Calibration Index (ICI) and related metrics.
    """
    return _value("e90", logits, labels, top_label, sample_weight)


def kuiper(
    logits: ArrayLike, labels: ArrayLike, *, top_label: bool = False, sample_weight: WeightsLike = None
) -> float:
    """Compute Kuiper's calibration error (ECCE-R): the largest gap of outcomes and scores over a range of scores.

    It is max_t G(t) − min_t G(t) with G(t) = 1/n Σ_{i: p_i ≤ t} (y_i − p_i) and G = 0 at the start. `kuiper_test` gives
    its p-value; `ks` is max |G|.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    top_label
        With two classes, score the predicted class instead of class 1.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The error, between 0 and 1.

    Examples
    --------
    >>> round(kuiper(np.log([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]), [0, 1, 1]), 4)
    0.3667

    References
    ----------
    Arrieta-Ibarra, Gujral, Tannen, Tygert & Xu (2022), Metrics of calibration for probabilistic predictions,
    arXiv:2205.09680.
    """
    return _value("kuiper", logits, labels, top_label, sample_weight)


def _value(metric: str, logits: Any, labels: Any, top_label: bool, sample_weight: Any) -> float:
    return float(EVENT_METRICS[metric](Points.of(logits, labels, top_label=top_label, sample_weight=sample_weight)))


def _divide(sums: Any, by: Any) -> Any:
    """Quotient; NaN where the divisor is 0."""
    return np.divide(sums, by, out=np.full(np.shape(by), math.nan), where=np.not_equal(by, 0))


def _event_auroc(points: Points) -> Any:
    no, yes = points.rows[..., 0, :], points.hits
    wins = (yes * (np.cumsum(no, axis=-1) - no / 2)).sum(axis=-1)
    return _divide(wins, yes.sum(axis=-1) * no.sum(axis=-1))


def _quantile_of_errors(points: Points, share: float) -> Any:
    """Smallest error that at least this share of the rows does not exceed."""
    if not points.count.size:
        return math.nan
    order = np.argsort(points.error, axis=-1, kind="stable")
    below = np.cumsum(np.take_along_axis(points.count, order, axis=-1), axis=-1)
    first = (below < share * points.total[..., None] * (1 - 1e-12)).sum(axis=-1, keepdims=True)
    return np.take_along_axis(np.take_along_axis(points.error, order, axis=-1), first, axis=-1)[..., 0]


def kuiper_of(points: Points) -> float:
    """Compute the range of `kuiper` from points."""
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
"""Functions of `Points`, by the name of the metric."""


def event_values(points: Points, names: Iterable[str]) -> dict[str, float]:
    """Compute several of `EVENT_METRICS`."""
    return {name: float(EVENT_METRICS[name](points)) for name in names}
