"""An event's probability held against what happened, as risk scores and forecasts are validated.

Of two classes the event is class 1; of more, or with `fold`, it is that the prediction is right. A class of several
becomes an event by `trueup.as_event`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from trueup.core.arrays import as_tensors, as_weights
from trueup.core.bins import tie_ends
from trueup.core.native import as_float64
from trueup.core.row_scores import event_log_odds, is_event, scores_and_outcomes
from trueup.core.tally import Grid, Mean

_EXTREME = 36.0
"""Log-odds of a confidence that rounds to 1; those of two classes are a difference of logits and need no bound."""


class Points(NamedTuple):
    """Distinct scores in ascending order, with the rows that have them: all that is computed here needs no more."""

    score: np.ndarray
    odds: np.ndarray
    """Log-odds of the score."""
    count: np.ndarray
    """How many rows, or their weight."""
    hits: np.ndarray
    """Of those, where it happened."""
    effective_rows: float
    """(Σw)²/Σw²: how many rows of equal weight tell as much."""

    @classmethod
    def of(cls, logits: Any, labels: Any, *, fold: bool = False, weights: Any = None) -> Points:
        """The points of a pair."""
        z, y = as_tensors(logits, labels)
        w = as_weights(weights, len(z))
        score, outcome = scores_and_outcomes(z, y, fold=fold)
        odds = as_float64(event_log_odds(z)) if is_event(z, fold) else _log_odds(score)
        return cls.from_rows(score, odds, outcome, w)

    @classmethod
    def from_rows(cls, score: np.ndarray, odds: np.ndarray, outcome: np.ndarray, weights: np.ndarray | None) -> Points:
        """The points of trusted arrays."""
        w = np.ones(len(score)) if weights is None else weights
        if weights is not None:
            some = w > 0  # a row without weight is not there
            score, odds, outcome, w = score[some], odds[some], outcome[some], w[some]
        order = np.argsort(odds, kind="stable")
        score, odds, outcome, w = score[order], odds[order], outcome[order], w[order]
        first = np.flatnonzero(np.concatenate([[True], tie_ends(score)[:-1]])) if len(score) else np.zeros(0, np.int64)
        count = np.add.reduceat(w, first) if len(first) else np.zeros(0)
        sums = [np.add.reduceat(w * x, first) if len(first) else np.zeros(0) for x in (score, odds, outcome)]
        rows = float(w.sum() ** 2 / (w @ w)) if len(w) else 0.0
        return cls(sums[0] / count, sums[1] / count, count, sums[2], rows)

    @classmethod
    def of_grid(cls, grid: Grid) -> Points:
        """The points of a tally, each cell at its mean score: off by no more than the width of a cell."""
        some = grid.rows > 0
        count = grid.rows[some]
        score = np.clip(grid.confidence.sum(axis=0)[some] / count, 0.0, 1.0)
        squared = float(grid.squared_weights.sum())
        rows = float(count.sum() ** 2 / squared) if squared else 0.0
        return cls(score, _log_odds(score), count, grid.count[1][some], rows)


def predicted(logits: Any, labels: Any, *, fold: bool = False, weights: Any = None) -> float:
    """The mean predicted probability.

    >>> round(predicted(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1]), 4)
    0.2
    """
    return _mean_of(0, logits, labels, fold, weights)


def observed(logits: Any, labels: Any, *, fold: bool = False, weights: Any = None) -> float:
    """How often it happens.

    >>> observed(np.log([[0.9, 0.1], [0.7, 0.3]]), [0, 1])
    0.5
    """
    return _mean_of(1, logits, labels, fold, weights)


def _mean_of(which: int, logits: Any, labels: Any, fold: bool, weights: Any) -> float:
    z, y = as_tensors(logits, labels)
    return Mean.of(scores_and_outcomes(z, y, fold=fold)[which], as_weights(weights, len(z))).value


def _log_odds(score: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        odds: np.ndarray = np.clip(logit(score), -_EXTREME, _EXTREME)
    return odds


class Recalibration(NamedTuple):
    """The logistic regression of what happened on the log-odds of what was predicted, with standard errors."""

    intercept: float
    """0 if calibrated."""
    slope: float
    """1 if calibrated; below 1 the predictions are too extreme, above not extreme enough."""
    intercept_error: float
    slope_error: float


_NO_FIT = Recalibration(math.nan, math.nan, math.nan, math.nan)


def fit_recalibration(points: Points, *, max_iter: int = 100) -> Recalibration:
    """Fit intercept and slope by Newton's steps, halved until the likelihood rises; NaN where it has no maximum.

    It has none where it always or never happens, where all scores are equal, and where one score separates what
    happened from what did not.
    """
    x, hits = points.odds, points.hits
    total = points.count.sum()
    if len(x) < 2 or not 0 < hits.sum() < total or _separated(points):
        return _NO_FIT
    weight, target = points.count / total, hits / total
    centre = float(weight @ x)
    width = math.sqrt(float(weight @ (x - centre) ** 2))
    u = (x - centre) / width
    at = np.array([float(logit(target.sum())), 0.0])
    value = _logistic_loss(at, u, weight, target)
    for _ in range(max_iter):
        p = expit(at[0] + at[1] * u)
        residual, bend = weight * p - target, weight * p * (1 - p)
        slope = np.array([residual.sum(), residual @ u])
        hessian = np.array([[bend.sum(), bend @ u], [bend @ u, bend @ u**2]])
        if not np.linalg.det(hessian) > 0:
            return _NO_FIT
        step, length = -np.linalg.solve(hessian, slope), 1.0
        gain = float(-step @ slope)
        while length > 1e-6:
            following = _logistic_loss(at + length * step, u, weight, target)
            if following <= value - 1e-4 * length * gain + 1e-15:
                break
            length /= 2
        at, value = at + length * step, following
        if gain < 1e-18:
            break
    else:
        return _NO_FIT
    turn = np.array([[1.0, -centre / width], [0.0, 1 / width]])  # from (a, b) of u to those of x
    covariance = turn @ np.linalg.inv(hessian) @ turn.T / points.effective_rows
    intercept, slope_of_x = turn @ at
    errors = np.sqrt(np.diag(covariance))
    return Recalibration(float(intercept), float(slope_of_x), float(errors[0]), float(errors[1]))


def _logistic_loss(at: np.ndarray, u: np.ndarray, weight: np.ndarray, target: np.ndarray) -> float:
    odds = at[0] + at[1] * u
    return float(weight @ np.logaddexp(0.0, odds) - target @ odds)


def _separated(points: Points) -> bool:
    """Whether all scores where it happened lie on one side of those where it did not."""
    yes, no = np.flatnonzero(points.hits > 0), np.flatnonzero(points.hits < points.count)
    return bool(yes[0] >= no[-1] or yes[-1] <= no[0])
