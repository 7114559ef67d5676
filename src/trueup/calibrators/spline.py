"""Spline calibration of the cumulative errors, and smoothing splines of the log-odds."""

from __future__ import annotations

from typing import Self

import numpy as np
from scipy.interpolate import BSpline, CubicSpline
from scipy.optimize import isotonic_regression
from scipy.special import expit

from trueup._core.arrays import as_weighted
from trueup._core.bins import tie_ends
from trueup._core.errors import InputError
from trueup._core.namespace import Namespace
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, TopLabel, check_margin
from trueup.calibrators.curves import Knots, interpolate, pad_curves
from trueup.calibrators.folds import k_fold
from trueup.calibrators.logistic import (
    class_blocks,
    class_targets,
    cross_entropy,
    log_normalise,
    log_odds,
    odds_formula,
)

KNOTS = 6
"""Knots of the spline, as in the paper's released experiments; also the smallest number of rows of a fit."""


class Spline(Knots, TopLabel):
    """Add to the confidence the slope of a natural cubic spline through the cumulative errors: c′ = c + h′(u).

    With two classes c is P(class 1). Confidences are sorted, with u_i = (i−1)/(n−1). h is fitted by least squares to
    h_i = 1/n Σ_{j≤i} (a_j − c_j), with six equally spaced knots. c′ is linear between the confidences of the fit and
    constant outside. In the row of log-probabilities it is clipped to [1/(n+2), 1 − 1/(n+2)].
    Not for sharp steps, which six knots smooth over.

    Parameters
    ----------
    knots
        Ascending confidences, shape (knots,).
    values
        Calibrated confidence at each knot, shape (knots,).
    margin
        Smallest distance of a confidence from 0 and 1 in the log-probabilities.
    event
        Map P(class 1) of two classes instead of the confidence.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> spline = Spline.fit(3 * z, y)
    >>> z_new = np.log([[0.95, 0.03, 0.02], [0.7, 0.2, 0.1]])
    >>> spline.confidence(z_new).round(4)
    array([0.6291, 0.4862])

    References
    ----------
    Gupta et al., "Calibration of neural networks using splines" (2021), arXiv:2006.12800.
    """

    def __init__(self, knots: ArrayLike, values: ArrayLike, margin: float = 0.0, event: bool = False) -> None:
        super().__init__(knots, values)
        self.margin, self.event = check_margin(margin), event

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, monotone: bool = False, sample_weight: WeightsLike = None
    ) -> Self:
        """Solve the least-squares problem for the spline's values at six knots.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        monotone
            Make the curve non-decreasing by isotonic regression.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=KNOTS)
        each = np.ones(len(z)) if w is None else w
        knots, values = _recalibration(*scores_and_outcomes(z, y), each, monotone)
        return cls(knots, values, 1 / (each.sum() + 2), z.shape[1] == 2)


def _recalibration(
    scores: np.ndarray, hits: np.ndarray, sample_weight: np.ndarray, monotone: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct scores and their calibrated values."""
    order = np.argsort(scores, kind="stable")
    ends = np.flatnonzero(tie_ends(scores[order]))
    starts = np.append(0, ends[:-1] + 1)
    run, w = np.diff(starts, append=len(scores)), sample_weight[order]
    counts = np.add.reduceat(w, starts)
    # Ties share their hits evenly, so that the order of rows does not matter.
    score, hit = (np.add.reduceat(w * column[order], starts) / counts for column in (scores, hits))
    drift = np.cumsum(w * np.repeat(hit - score, run)) / w.sum()
    middle = np.cumsum(w) - w / 2
    u = (middle - middle[0]) / (middle[-1] - middle[0])  # from 0 to 1; with equal weights (i − 1)/(n − 1)
    # The spline is linear in its values at the knots: column k is 1 at knot k and 0 at the others.
    basis = CubicSpline(np.linspace(0.0, 1.0, KNOTS), np.eye(KNOTS), bc_type="natural")
    root = np.sqrt(w)
    at_knots = np.linalg.lstsq(basis(u) * root[:, None], drift * root, rcond=None)[0]
    slope = basis(u, 1) @ at_knots
    values = score + np.add.reduceat(w * slope, starts) / counts
    if monotone:
        values = isotonic_regression(values, weights=counts).x
    return score, np.clip(values, 0.0, 1.0)


PENALTIES = tuple(10.0**power for power in range(2, -5, -1))
"""Weights of the curve's roughness that cross-validation tries, largest first."""
_INNER_KNOTS = 12  # largest number of knots between the two ends.
_MIN_GAP = 1e-3  # smallest distance between knots, as a fraction of their range.
_GRID = 128  # number of points at which a fitted spline is stored; the curve is linear between them.


class SmoothingSpline(Calibrator):
    """Fit q_k ∝ σ(f_k(s_k)) to each class's log-odds s_k, where f_k is a cubic spline: log-loss + λ ∫ f″².

    Cross-validation chooses λ; a large λ gives a straight line, which is Platt scaling. The curve is constant beyond
    the log-odds of the fit. With two classes the curves complement each other. Not for many classes: each has a curve
    of its own.

    Parameters
    ----------
    knots
        Ascending log-odds, shape (classes, points).
    values
        Calibrated log-odds at each point, shape (classes, points).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=2000) * 2
    >>> z, y = np.stack([0 * x, x], axis=1), (rng.random(2000) < 1 / (1 + np.exp(-np.minimum(x, 1.0)))).astype(int)
    >>> np.exp(SmoothingSpline.fit(z, y)(np.array([[0.0, 1.0], [0.0, 3.0]]))).round(1)
    array([[0.3, 0.7],
           [0.3, 0.7]])

    References
    ----------
    Lucena, "Spline-based probability calibration" (2018), arXiv:1809.07751.
    """

    # Not sample-invariant: the penalty is chosen on folds.

    knots: np.ndarray
    values: np.ndarray

    def __init__(self, knots: ArrayLike, values: ArrayLike) -> None:
        self.set_parameters(knots=knots, values=values)
        fits = self.knots.ndim == 2 and self.knots.shape == self.values.shape
        if not fits or not (np.diff(self.knots, axis=1) >= 0).all() or not np.isfinite(self.values).all():
            shapes = f"{tuple(self.knots.shape)} and {tuple(self.values.shape)}"
            raise ValueError(f"knots must rise, (classes, points), with as many finite values, got {shapes}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Apply the curves to each class's log-odds and normalise."""
        self._check_classes(z, self.knots.shape[0])
        odds = xp.transpose(log_odds(xp, z))
        return log_normalise(xp, interpolate(xp, odds, self.knots, self.values).T, z)

    def formula(self, classes: int) -> e.Formula:
        """Return the curves of the log-odds as steps."""
        return odds_formula(e.piecewise(*map(e.lines, self.knots, self.values)))

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, sample_weight: WeightsLike = None) -> Self:
        """Minimise each class's penalised log-loss, with the penalty chosen by cross-validation.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        n_folds
            Number of folds.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2 * n_folds)
        row_weights = np.ones(len(z)) if w is None else w
        fold = np.zeros(len(z), np.int64)
        for number, (_, held_out) in enumerate(k_fold(z, y, n_folds)):
            fold[held_out] = number
        curves: list[tuple[np.ndarray, ...]] = []
        for classes, log_p, log_rest, share in class_blocks(z, w):
            targets, odds = class_targets(y, classes, share), log_p - log_rest
            for k in range(len(classes)):
                if z.shape[1] == 2 and curves:  # the mirror image of the first
                    curves.append(tuple(-part[::-1] for part in curves[0]))
                    continue
                # Rows that offer the option: all rows, unless the weights differ between classes.
                rows = slice(None) if share is None or share.ndim == 1 else share[:, k] > 0
                curves.append(_curve(odds[rows, k], targets[rows, k], fold[rows], row_weights[rows]))
        return cls(*(pad_curves([curve[part] for curve in curves]) for part in (0, 1)))


def _curve(odds: np.ndarray, targets: np.ndarray, fold: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return points of the spline with the smallest cross-validated loss."""
    mean = w @ targets / w.sum()
    with np.errstate(over="ignore", invalid="ignore"):
        middle = w @ odds / w.sum()
        width = np.sqrt(w @ (odds - middle) ** 2 / w.sum())
    if not np.isfinite(width):
        raise InputError("logits", "have a finite spread", f"log-odds up to {np.abs(odds).max():.3g} from 0")
    distinct = np.unique(odds)
    if len(distinct) < 4 or width <= 1e-9 * (1 + abs(middle)):
        # Too few distinct values for a curve: use the smoothed frequency at each.
        index = np.searchsorted(distinct, odds)
        share = np.bincount(index, weights=w * targets) / np.bincount(index, weights=w)
        return distinct, np.log(share / (1 - share))
    x = (odds - middle) / width
    knots, rough = _basis((distinct - middle) / width)
    design = BSpline.design_matrix(x, knots, 3).toarray()
    start = np.full(design.shape[1], np.log(mean / (1 - mean)))
    losses = np.zeros(len(PENALTIES))
    for number in np.unique(fold):
        train, held_out, weights = fold != number, fold == number, start
        rows = design[train], targets[train], w[train]
        for i, penalty in enumerate(PENALTIES):
            weights = _solve(*rows, penalty * rough, weights, tolerance=1e-6)
            losses[i] += cross_entropy(design[held_out] @ weights, targets[held_out]) @ w[held_out]
    weights = _solve(design, targets, w, PENALTIES[int(losses.argmin())] * rough, start, tolerance=1e-10)
    ends = np.linspace(x.min(), x.max(), _GRID // 2)
    grid = np.unique(np.concatenate([np.quantile(x, np.linspace(0, 1, _GRID // 2)), ends]))
    return middle + width * grid, BSpline(knots, weights, 3)(grid)


def _basis(distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return knots of a cubic spline at quantiles of the distinct values, and the matrix of ∫ f″²."""
    # Values that nearly coincide count once. Log-odds of naive Bayes pile up at the ends, and knots among those would
    # bend the curve without limit.
    apart = distinct[np.unique((distinct - distinct[0]) // (_MIN_GAP * np.ptp(distinct)), return_index=True)[1]]
    apart[-1] = distinct[-1]
    number = min(_INNER_KNOTS, len(apart) - 2)
    inner = np.unique(np.quantile(apart, np.linspace(0, 1, number + 2)))
    knots = np.concatenate([[inner[0]] * 3, inner, [inner[-1]] * 3])
    size = len(knots) - 4
    # Products of second derivatives are parabolas between knots; two-point Gauss quadrature is exact.
    half, centre = np.diff(inner) / 2, (inner[1:] + inner[:-1]) / 2
    points = np.concatenate([centre - half / np.sqrt(3), centre + half / np.sqrt(3)])
    bend = BSpline(knots, np.eye(size), 3).derivative(2)(points)
    return knots, bend.T @ (bend * np.concatenate([half, half])[:, None])


def _solve(
    design: np.ndarray, targets: np.ndarray, w: np.ndarray, rough: np.ndarray, start: np.ndarray, *, tolerance: float
) -> np.ndarray:
    """Minimise the mean log-loss + θᵀ(rough)θ by damped Newton steps, until the gain is below the tolerance."""
    ridge = rough + 1e-9 * np.eye(len(start))
    share = w / w.sum()

    def value(theta: np.ndarray) -> float:
        return float(cross_entropy(design @ theta, targets) @ share + theta @ ridge @ theta)

    theta, current = start, value(start)
    for _ in range(50):
        probs = expit(design @ theta)
        slope = design.T @ (share * (probs - targets)) + 2 * ridge @ theta
        bend = design.T @ (design * (share * probs * (1 - probs))[:, None]) + 2 * ridge
        try:
            step = np.linalg.solve(bend, slope)
        except np.linalg.LinAlgError:
            step = np.full_like(slope, np.nan)
        if not np.isfinite(step).all():  # neighbouring knots may have a singular curvature
            step = np.linalg.pinv(bend, hermitian=True) @ slope
        length = 1.0
        while (following := value(theta - length * step)) > current and length > 1e-6:
            length /= 2
        if following > current:
            break
        theta, gain, current = theta - length * step, current - following, following
        if gain < tolerance:
            break
    return theta
