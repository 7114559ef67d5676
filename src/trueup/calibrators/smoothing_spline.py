"""A smoothing spline of the log-odds, for two classes and one against the rest."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from scipy.interpolate import BSpline
from torch import Tensor
from torch.nn.functional import softplus

from trueup.calibrators.base import Calibrator, interpolate, pad_curves
from trueup.calibrators.logistic import class_blocks, log_normalise, log_probs_and_rests, platt_targets
from trueup.core.arrays import as_weighted, fill_absent, find_absent
from trueup.core.errors import InputError
from trueup.core.native import one_thread
from trueup.core.splits import k_fold

PENALTIES = tuple(10.0**power for power in range(2, -5, -1))
"""Weights of the curve's roughness that cross-validation tries, the stiffest first."""
_INNER_KNOTS = 12
_LEAST_GAP = 1e-3  # between knots, as a share of their range
_GRID = 128
"""Points at which a fitted spline is kept; between them the curve is straight."""


class SmoothingSpline(Calibrator):
    """Fit q_k ∝ σ(f_k(s_k)) to each class's log-odds s_k, f_k a cubic spline: log-loss + λ ∫ f″².

    λ is chosen by cross-validation; a large one gives a straight line, which is Platt scaling. Beyond the log-odds of
    the fit the curve is constant. With two classes the curves complement each other. Not for many classes: each has a
    curve of its own.
    Lucena, "Spline-based probability calibration" (2018).

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=2000) * 2
    >>> z, y = np.stack([0 * x, x], axis=1), (rng.random(2000) < 1 / (1 + np.exp(-np.minimum(x, 1.0)))).astype(int)
    >>> np.exp(SmoothingSpline.fit(z, y)(np.array([[0.0, 1.0], [0.0, 3.0]]))).round(1)
    array([[0.3, 0.7],
           [0.3, 0.7]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # the penalty is chosen on folds
    differentiable = True

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Any, values: Any) -> None:
        super().__init__()
        self.keep("knots", knots)
        self.keep("values", values)
        fits = self.knots.ndim == 2 and self.knots.shape == self.values.shape
        if not fits or not bool((self.knots.diff(dim=1) >= 0).all()) or not bool(torch.isfinite(self.values).all()):
            shapes = f"{tuple(self.knots.shape)} and {tuple(self.values.shape)}"
            raise ValueError(f"knots must rise, (classes, points), with as many finite values, got {shapes}")

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.knots))
        log_p, log_rest = log_probs_and_rests(logits.double())
        odds = fill_absent(log_p - log_rest, find_absent(logits))
        return log_normalise(interpolate(odds.T.contiguous(), self.knots, self.values).T, logits).to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, folds: int = 5, weights: Any = None) -> Self:
        """Smoothing spline: minimise each class's penalised log-loss, the penalty by cross-validation."""
        z, y, w = as_weighted(logits, labels, weights, at_least=2 * folds)
        each = np.ones(len(z)) if w is None else w.cpu().numpy()
        fold = np.zeros(len(z), np.int64)
        for number, (_, held_out) in enumerate(k_fold(z, y, folds)):
            fold[held_out.cpu().numpy()] = number
        curves: list[tuple[np.ndarray, ...]] = []
        for classes, log_p, log_rest, share in class_blocks(z, w):
            targets = platt_targets(y, classes, share).cpu().numpy()
            odds = (log_p - log_rest).cpu().numpy()
            for k in range(len(classes)):
                if z.shape[1] == 2 and curves:  # the mirror image of the first
                    curves.append(tuple(-part[::-1] for part in curves[0]))
                    continue
                # The rows that have the option: all of them, if the weights are one for all classes.
                here = slice(None) if share is None or share.ndim == 1 else (share[:, k] > 0).cpu().numpy()
                curves.append(_curve(odds[here, k], targets[here, k], fold[here], each[here]))
        return cls(*(pad_curves([curve[part] for curve in curves]) for part in (0, 1)))


def _curve(odds: np.ndarray, targets: np.ndarray, fold: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of the spline of least cross-validated loss."""
    mean = w @ targets / w.sum()
    with np.errstate(over="ignore", invalid="ignore"):
        middle = w @ odds / w.sum()
        width = np.sqrt(w @ (odds - middle) ** 2 / w.sum())
    if not np.isfinite(width):
        raise InputError("logits", "have a finite spread", f"log-odds up to {np.abs(odds).max():.3g} from 0")
    distinct = np.unique(odds)
    level = np.log(mean / (1 - mean))
    if len(distinct) < 4 or width <= 1e-9 * (1 + abs(middle)):
        # Too few places for a curve: the frequency at each, drawn in.
        where = np.searchsorted(distinct, odds)
        share = np.bincount(where, weights=w * targets) / np.bincount(where, weights=w)
        return distinct, np.log(share / (1 - share))
    x = (odds - middle) / width
    knots, rough = _basis((distinct - middle) / width)
    basis = BSpline.design_matrix(x, knots, 3).toarray()
    design, wanted, each = (torch.from_numpy(a) for a in (basis, targets, w))
    penalties = [penalty * torch.from_numpy(rough) for penalty in PENALTIES]
    start = torch.full((design.shape[1],), float(level), dtype=torch.float64)
    losses = np.zeros(len(PENALTIES))
    with one_thread(design.numel()):
        for number in np.unique(fold):
            train, held_out = (torch.from_numpy(np.flatnonzero(rows)) for rows in (fold != number, fold == number))
            weights = start
            for i, penalty in enumerate(penalties):
                weights = _solve(design[train], wanted[train], each[train], penalty, weights, tolerance=1e-6)
                losses[i] += float(_loss(design[held_out] @ weights, wanted[held_out]) @ each[held_out])
        weights = _solve(design, wanted, each, penalties[int(losses.argmin())], start, tolerance=1e-10)
    ends = np.linspace(x.min(), x.max(), _GRID // 2)
    grid = np.unique(np.concatenate([np.quantile(x, np.linspace(0, 1, _GRID // 2)), ends]))
    return middle + width * grid, BSpline(knots, weights.numpy(), 3)(grid)


def _basis(distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots of a cubic spline at quantiles of distinct places, and the matrix of ∫ f″²."""
    # Places that nearly touch count once: log-odds of naive Bayes pile up at the ends, and knots among those would bend
    # the curve without end.
    apart = distinct[np.unique((distinct - distinct[0]) // (_LEAST_GAP * np.ptp(distinct)), return_index=True)[1]]
    apart[-1] = distinct[-1]
    number = min(_INNER_KNOTS, len(apart) - 2)
    inner = np.unique(np.quantile(apart, np.linspace(0, 1, number + 2)))
    knots = np.concatenate([[inner[0]] * 3, inner, [inner[-1]] * 3])
    size = len(knots) - 4
    # Products of second derivatives are parabolas between knots, which two points of Gauss integrate exactly.
    half, centre = np.diff(inner) / 2, (inner[1:] + inner[:-1]) / 2
    points = np.concatenate([centre - half / np.sqrt(3), centre + half / np.sqrt(3)])
    bend = BSpline(knots, np.eye(size), 3).derivative(2)(points)
    return knots, bend.T @ (bend * np.concatenate([half, half])[:, None])


def _solve(design: Tensor, targets: Tensor, each: Tensor, rough: Tensor, start: Tensor, *, tolerance: float) -> Tensor:
    """Newton's steps on the mean log-loss + wᵀ(rough)w, halved until it falls, to a gain of less than the tolerance."""
    ridge = rough + 1e-9 * torch.eye(len(start), dtype=start.dtype)
    share = each / each.sum()

    def value(weights: Tensor) -> float:
        return float(_loss(design @ weights, targets) @ share + weights @ ridge @ weights)

    weights, now = start, value(start)
    for _ in range(50):
        probs = torch.sigmoid(design @ weights)
        slope = design.T @ (share * (probs - targets)) + 2 * ridge @ weights
        bend = design.T @ (design * (share * probs * (1 - probs))[:, None]) + 2 * ridge
        step, failed = torch.linalg.solve_ex(bend, slope)
        if failed or not bool(torch.isfinite(step).all()):  # knots next to each other bend without end
            step = torch.linalg.pinv(bend, hermitian=True) @ slope
        length = 1.0
        while (following := value(weights - length * step)) > now and length > 1e-6:
            length /= 2
        if following > now:
            break
        weights, gain, now = weights - length * step, now - following, following
        if gain < tolerance:
            break
    return weights


def _loss(odds: Tensor, targets: Tensor) -> Tensor:
    return softplus(odds) - targets * odds
