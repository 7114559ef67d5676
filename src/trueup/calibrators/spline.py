"""Spline calibration: the slope of a smooth curve through the cumulative errors."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.optimize import isotonic_regression
from torch import Tensor

from trueup.calibrators.base import TopLabel, check_margin, interpolate, keep_curve
from trueup.core.arrays import as_weighted
from trueup.core.bins import tie_ends
from trueup.core.row_scores import scores_and_outcomes

KNOTS = 6
"""Knots of the spline, as in the paper's released experiments; so many rows a fit needs."""


class Spline(TopLabel):
    """Add to the confidence the slope of a natural cubic spline through the cumulative errors: c′ = c + h′(u).

    Of two classes c is P(class 1). Confidences are sorted, u_i = (i−1)/(n−1); h is fitted by least squares to h_i = 1/n
    Σ_{j≤i} (a_j − c_j), with six equally spaced knots. Between the confidences of the fit c′ goes straight, outside it
    is constant. In the row of log-probabilities it is kept in [1/(n+2), 1 − 1/(n+2)]. Not for sharp steps, which six
    knots smooth over.
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

    def __init__(self, knots: Any, values: Any, margin: float = 0.0, event: bool = False) -> None:
        super().__init__()
        keep_curve(self, "knots", knots, values)
        self.margin, self.event = check_margin(margin), event

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """The curve."""
        return interpolate(confidence.double(), self.knots, self.values)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, monotone: bool = False, weights: Any = None) -> Self:
        """Spline calibration: solve for the six knots; with `monotone`, pool what falls."""
        z, y, w = as_weighted(logits, labels, weights, at_least=KNOTS)
        each = np.ones(len(z)) if w is None else w.cpu().numpy()
        knots, values = _recalibration(*scores_and_outcomes(z, y), each, monotone)
        return cls(knots, values, 1 / (each.sum() + 2), z.shape[1] == 2)


def _recalibration(
    scores: np.ndarray, hits: np.ndarray, weights: np.ndarray, monotone: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct scores and what each becomes."""
    order = np.argsort(scores, kind="stable")
    ends = np.flatnonzero(tie_ends(scores[order]))
    starts = np.append(0, ends[:-1] + 1)
    run, w = np.diff(starts, append=len(scores)), weights[order]
    counts = np.add.reduceat(w, starts)
    # Equal scores share their hits evenly, so that the order of rows does not matter.
    score, hit = (np.add.reduceat(w * column[order], starts) / counts for column in (scores, hits))
    drift = np.cumsum(w * np.repeat(hit - score, run)) / w.sum()
    middle = np.cumsum(w) - w / 2
    u = (middle - middle[0]) / (middle[-1] - middle[0])  # from 0 to 1; of equal weights (i − 1)/(n − 1)
    # Linear in its values at the knots: column k is the spline that is 1 at knot k and 0 at the others.
    basis = CubicSpline(np.linspace(0.0, 1.0, KNOTS), np.eye(KNOTS), bc_type="natural")
    root = np.sqrt(w)
    at_knots = np.linalg.lstsq(basis(u) * root[:, None], drift * root, rcond=None)[0]
    slope = basis(u, 1) @ at_knots
    values = score + np.add.reduceat(w * slope, starts) / counts
    if monotone:
        values = isotonic_regression(values, weights=counts).x
    return score, np.clip(values, 0.0, 1.0)
