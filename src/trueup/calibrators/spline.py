"""Spline calibration: the slope of a smooth curve through the cumulative errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from trueup.calibrators.base import TopLabel
from trueup.calibrators.per_class import checked_margin, interpolate, keep_curve, on_top
from trueup.core.arrays import as_logits, as_tensors, as_vector, match_kind, upcast_half
from trueup.core.bins import tie_ends
from trueup.core.row_scores import confidences_and_hits
from trueup.metrics.smooth import check_place, ranked

KNOTS = 6
"""Knots of the spline, as in the paper's released experiments; so many rows a fit needs."""


class Spline(TopLabel):
    """Add to the confidence the slope of a natural cubic spline through the cumulative errors: c′ = c + h′(u).

    Confidences are sorted, u_i = (i−1)/(n−1); h is fitted by least squares to h_i = 1/n Σ_{j≤i} (a_j − c_j), with six
    equally spaced knots. Between the confidences of the fit c′ goes straight, outside it is constant. In the row of
    log-probabilities it is kept in [1/(n+2), 1 − 1/(n+2)]. Not for sharp steps, which six knots smooth over.
    Gupta et al., "Calibration of neural networks using splines" (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> spline = Spline.fit(3 * z, y)
    >>> z_new = np.log([[0.95, 0.03, 0.02], [0.7, 0.2, 0.1]])
    >>> spline.confidence(z_new).round(4)
    array([0.6291, 0.4862])
    """

    sample_invariant = False  # u_i depends on how many there are
    differentiable = False  # between neighbouring confidences the slope is mostly noise

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any, margin: float = 0.0) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)
        self.margin = checked_margin(margin)

    def map(self, logits: Tensor) -> Tensor:
        """Give the predicted class the curve's value and share the rest."""
        return on_top(logits, self.calibrated, self.margin)

    def calibrated(self, confidence: Tensor) -> Tensor:
        """The curve."""
        return interpolate(confidence.double(), self.knots, self.values)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, monotone: bool = False) -> Self:
        """Spline calibration: solve for the six knots; with `monotone`, pool what falls."""
        z, y = as_tensors(logits, labels, at_least=KNOTS)
        curve = _recalibration(*confidences_and_hits(z, y), monotone)
        return cls(curve.knots, curve.values, 1 / (len(z) + 2))


@dataclass(frozen=True, eq=False)
class SplineMap:
    """A recalibration of scores in [0, 1]: straight between its knots, constant outside."""

    knots: np.ndarray
    values: np.ndarray

    def __call__(self, scores: Any) -> Any:
        """Map scores (n,)."""
        return match_kind(
            torch.from_numpy(np.interp(as_vector(scores, "scores").numpy(), self.knots, self.values)), scores
        )


def spline_rank(logits: Any, labels: Any, *, rank: int = 1, monotone: bool = False) -> SplineMap:
    """Fit the spline of the rank-th largest probability against the label being that class.

    g(s) = s + h′(u(s)), as `Spline` has it for rank 1.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> second = spline_rank(3 * z, y, rank=2)
    >>> second([0.1, 0.3]).round(4)
    array([0.2939, 0.3438])

    Gupta et al., "Calibration of neural networks using splines" (2021).
    """
    z, y = as_tensors(logits, labels, at_least=KNOTS)
    check_place(rank, "rank", z)
    scores, place = ranked(z, y, int(rank))
    return _recalibration(scores[:, -1], (place == rank).astype(np.float64), monotone)


def spline_within(logits: Any, labels: Any, *, top: int = 2, monotone: bool = False) -> SplineMap:
    """Fit the spline of the sum of the `top` largest probabilities against the label being among them.

    g(s) = s + h′(u(s)), as `Spline` has it for top 1.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> both = spline_within(3 * z, y, top=2)
    >>> both([0.8, 0.99]).round(4)
    array([0.642 , 0.8824])

    Gupta et al., "Calibration of neural networks using splines" (2021).
    """
    z, y = as_tensors(logits, labels, at_least=KNOTS)
    check_place(top, "top", z)
    scores, place = ranked(z, y, int(top))
    return _recalibration(scores.sum(axis=1), (place <= top).astype(np.float64), monotone)


def rank_score(logits: Any, *, rank: int = 1) -> Any:
    """The rank-th largest probability of each row, which the map of `spline_rank` takes.

    >>> rank_score(np.log([[0.5, 0.2, 0.3]]), rank=2).round(4)
    array([0.3])
    """
    return match_kind(_largest(logits, rank, "rank")[:, -1], logits)


def within_score(logits: Any, *, top: int = 2) -> Any:
    """The sum of the `top` largest probabilities of each row, which the map of `spline_within` takes.

    >>> within_score(np.log([[0.5, 0.2, 0.3]]), top=2).round(4)
    array([0.8])
    """
    return match_kind(_largest(logits, top, "top").sum(dim=1), logits)


def _largest(logits: Any, count: int, name: str) -> Tensor:
    z = as_logits(logits)
    check_place(count, name, z)
    return torch.softmax(upcast_half(z).double(), dim=1).topk(count, dim=1).values


def _recalibration(scores: np.ndarray, hits: np.ndarray, monotone: bool) -> SplineMap:
    n = len(scores)
    order = np.argsort(scores, kind="stable")
    ends = np.flatnonzero(tie_ends(scores[order]))
    starts = np.append(0, ends[:-1] + 1)
    counts = np.diff(starts, append=n)
    # Equal scores share their hits evenly, so that the order of rows does not matter.
    score, hit = (np.add.reduceat(column[order], starts) / counts for column in (scores, hits))
    drift = np.cumsum(np.repeat(hit - score, counts)) / n
    u = np.linspace(0.0, 1.0, n)
    second = _second_derivatives(KNOTS)
    at_knots = np.linalg.lstsq(_weights(u, second, slope=False), drift, rcond=None)[0]
    slope = _weights(u, second, slope=True) @ at_knots
    values = score + np.add.reduceat(slope, starts) / counts
    if monotone:
        values = isotonic_regression(values, weights=counts).x
    return SplineMap(score, np.clip(values, 0.0, 1.0))


def _second_derivatives(knots: int) -> np.ndarray:
    """The matrix that turns a natural spline's values at equally spaced knots into its second derivatives there."""
    width = 1 / (knots - 1)
    inner = knots - 2
    bands = 4 * np.eye(inner) + np.eye(inner, k=1) + np.eye(inner, k=-1)
    differences = np.eye(inner, knots) - 2 * np.eye(inner, knots, k=1) + np.eye(inner, knots, k=2)
    curvature = np.zeros((knots, knots))
    curvature[1:-1] = np.linalg.solve(bands, 6 / width**2 * differences)
    return curvature


def _weights(u: np.ndarray, second: np.ndarray, *, slope: bool) -> np.ndarray:
    """The rows that give the spline's values at u, or its slopes, from its values at the knots."""
    segments = len(second) - 1
    width = 1 / segments
    j = np.minimum((u * segments).astype(np.int64), segments - 1)
    x = u - j * width
    if slope:
        of_curvature = -(x**2) / (2 * width) + x - width / 3, x**2 / (2 * width) - width / 6
        of_value = np.full_like(x, -1 / width), np.full_like(x, 1 / width)
    else:
        of_curvature = -(x**3) / (6 * width) + x**2 / 2 - width * x / 3, x**3 / (6 * width) - width * x / 6
        of_value = 1 - x / width, x / width
    rows = of_curvature[0][:, None] * second[j] + of_curvature[1][:, None] * second[j + 1]
    at = np.arange(len(u))
    rows[at, j] += of_value[0]
    rows[at, j + 1] += of_value[1]
    return rows
