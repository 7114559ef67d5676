"""Temperature scaling by likelihood, Brier score, focal loss, or a grid search for the smallest ECE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from trueup._core import native
from trueup._core.arrays import (
    MASKED_LOGIT,
    as_weighted,
    count_options,
    fill_absent,
    find_absent,
    to_array,
    upcast_half,
)
from trueup._core.bins import BINS, Bins, equal_width, rounding_error
from trueup._core.loss_sums import temperature_sums
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import Certificate, halley, newton, warn_at_bound
from trueup._core.row_scores import confidences, confidences_and_hits
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, check_positive, row_count

FINE_GRID = tuple(i / 1000 for i in range(1, 5001))
"""Temperatures 0.001 … 5.000, the grid of Neural Clamping's baseline."""
WIDE_GRID = tuple(i / 100 for i in range(1, 1001))
"""Temperatures 0.01 … 10.00, the grid of Rethinking Calibration."""
Loss = Callable[[float], tuple[float, float, float]]
"""A function of 1/T that returns its value and its first two derivatives."""
Optimum = tuple[float, Certificate]
"""The best 1/T and the certificate of its search."""

MAX_SCALE_RATIO = 1e6
"""Bounds of 1/T in the likelihood's fit, as a multiple of the logits' own scale and its inverse."""
MIN_BRIER_RATIO, MAX_BRIER_RATIO = 1e-3, 1e2
"""Range of T in the Brier score's search, as multiples of the logits' own scale."""
_MAX_DEPTH = 1e3  # logits are clipped this many median gaps (between the two largest of a row) below the largest
_MIN_SUBSAMPLE, _MIN_SUBSAMPLE_WIDE, _WIDE = 500, 100, 4096  # rows of the first search; the second from 4096 classes on
_SUBSAMPLE = 2000  # rows of the first search in float64, and of the Brier score
_COARSE_STEP, _FINE_STEP = 5e-2, 1e-4  # relative Newton steps at which a search stops: the error is about the square
_COARSE_CUBIC_STEP, _FINE_CUBIC_STEP = 0.1, 2e-4  # the same for Halley's steps: the error is about the cube


class Temperature(Calibrator):
    """Divide the logits by one number: q = softmax(z/T).

    By likelihood, T minimises Σ_i ln Σ_k exp(z_ik/T) − z_iy/T, which is convex in 1/T. The predicted class stays, and
    one parameter hardly overfits. Not for networks whose miscalibration differs between classes or regions of
    confidence.

    Parameters
    ----------
    temperature
        The divisor T > 0; above 1 it lowers confidence.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Temperature.fit(2.5 * z, y)
    Temperature(temperature=2.51869)

    References
    ----------
    Guo et al., "On calibration of modern neural networks" (2017), arXiv:1706.04599.
    """

    keeps_argmax = True
    sample_invariant = True

    temperature: float

    def __init__(self, temperature: float) -> None:
        self.set_parameters(temperature=temperature)
        check_positive(self.temperature, "temperature")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Divide by T."""
        return z / self.temperature

    def formula(self, classes: int) -> e.Formula:
        """Return the division as a step."""
        return e.Formula("logits", (e.scale(1 / self.temperature),), "logits")

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, smooth: float = 0.0, sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise the negative log-likelihood by Newton's method, started at a subsample's optimum.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        smooth
            Number of pseudo-rows whose label is uniform over the classes. It keeps T finite where every prediction is
            correct.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        if not 0 <= smooth < math.inf:
            raise ValueError(f"smooth must be a number from 0 on, got {smooth}")
        beta, certificate = inverse_temperature(z, y, w, smooth=smooth)
        return cls.from_search(beta, certificate, partial(scale_of, z))

    @classmethod
    def from_search(cls, beta: float, certificate: Certificate, scale: Callable[[], float] | None = None) -> Self:
        """Build the calibrator from a search for 1/T, and warn if the search stopped at a bound.

        Parameters
        ----------
        beta
            The best 1/T.
        certificate
            How the search ended.
        scale
            Function that returns the logits' own scale; a warning then explains why the likelihood has no optimum.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        if certificate.status == "bound":
            reason = "" if scale is None else bound_reason(beta, scale())
            warn_at_bound("temperature", 1 / beta, reason, stacklevel=3)
        return cls(1 / beta).with_certificate(certificate)

    @classmethod
    def fit_ece(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        temperatures: Sequence[float] | None = None,
        bins: int = BINS,
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Take the temperature of a grid with the smallest ECE; ties go to the one closest to 1 on a log scale.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        temperatures
            The grid; by default `FINE_GRID`, 0.001 … 5.000. `WIDE_GRID` is 0.01 … 10.00.
        bins
            Number of equal-width bins of the ECE.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        grid = np.asarray(FINE_GRID if temperatures is None else temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not (grid > 0).all():
            raise ValueError("temperatures must be a list of positive numbers")
        errors = grid_errors(z, y, grid, bins, w)
        best = np.flatnonzero(errors <= errors.min() + 1e-12)
        return cls(float(grid[best[np.abs(np.log(grid[best])).argmin()]]))

    @classmethod
    def fit_ece_wide(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Take the temperature of 0.01 … 10.00 with the smallest ECE.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls.fit_ece(logits, labels, temperatures=WIDE_GRID, sample_weight=sample_weight)

    @classmethod
    def fit_focal(
        cls, logits: ArrayLike, labels: ArrayLike, *, gamma: float = 1.0, sample_weight: WeightsLike = None
    ) -> Self:
        """Minimise the focal loss −(1 − p_y)^γ ln p_y; it is not convex, so a grid brackets the minimum first.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        gamma
            The exponent γ ≥ 0; 0 is the likelihood.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        if not gamma >= 0 or math.isinf(gamma):
            raise ValueError(f"gamma must be a number from 0 on, got {gamma}")
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls.from_search(*focal_inverse_temperature(z, y, gamma, w=w))

    @classmethod
    def fit_brier(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Minimise the mean squared distance between the probabilities and the one-hot label.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls.from_search(*brier_inverse_temperature(*as_weighted(logits, labels, sample_weight, min_rows=1)))


def grid_errors(
    z: np.ndarray, y: np.ndarray, temperatures: np.ndarray, bins: int, w: np.ndarray | None = None
) -> np.ndarray:
    """Return the ECE at each temperature that could have the smallest one, and infinity at the others.

    The ECE is at least |mean confidence − accuracy|, and the mean confidence falls as T rises. The search starts where
    the two cross and walks outwards until that lower bound exceeds the smallest ECE so far.
    """
    correct = confidences_and_hits(z, y)[1]
    accuracy, edges, unit = np.average(correct, weights=w), equal_width(bins), rounding_error(z)
    order = np.argsort(temperatures, kind="stable")
    errors = np.full(len(order), np.inf)

    def gap(index: int) -> float:
        """Return mean confidence − accuracy at an index of the sorted grid, and store the ECE there."""
        confidence, _ = confidences(z, beta=1 / float(temperatures[order[index]]))
        tally = Bins.from_scores(confidence, correct, edges, rounding=unit, sample_weight=w)
        errors[order[index]] = tally.ece()
        return float(np.average(confidence, weights=w) - accuracy)

    low, high = 0, len(order) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if gap(middle) > 0 else (low, middle)
    for walk in (range(low, len(order)), range(low - 1, -1, -1)):
        for index in walk:
            if abs(gap(index)) > errors.min() + 1e-9:
                break
    return errors


def inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None, *, smooth: float = 0.0) -> Optimum:
    """Return the 1/T of maximum likelihood for checked arrays.

    Newton's method runs on a subsample, then on all rows with fast arithmetic, then exactly. With `smooth` the labels
    are smoothed by ε = smooth/(n + smooth), which makes the best 1/T finite even where every prediction is correct.
    """
    z, y, w = _as_arrays(z, y, w)
    scale = scale_of(z)
    if scale == 0:  # constant rows: every T has the same loss
        return 1.0, Certificate("converged", 0.0, 0, 0, float(np.mean(np.log(count_options(z)))))
    rise = _rise(z, y, w, smooth)
    quick = None if z.dtype == np.float64 else _mean_loss(z, y, w, rise, quick=True)
    return search_beta(_mean_loss(z, y, w, rise), quick, _estimate_from_subsample(z, y, w, scale), scale)


def smoothed_loss(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, smooth: float) -> Loss:
    """Return the mean loss with labels smoothed as in `inverse_temperature`, as a function of 1/T."""
    return _mean_loss(z, y, w, _rise(z, y, w, smooth))


def _rise(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, smooth: float) -> float:
    """Return the slope that smoothed labels add to the mean loss."""
    if not smooth:
        return 0.0
    above_mean = np.empty(len(z))  # the label's logit less the mean of its row
    for rows in native.row_chunks(len(z), z.shape[1]):
        part = z[rows].astype(np.float64)
        label = np.take_along_axis(part, y[rows, None], axis=1)[:, 0]
        above_mean[rows] = label - fill_absent(part, find_absent(part)).mean(axis=1)
    return smooth / (row_count(z, w) + smooth) * float(np.average(above_mean, weights=w))


def finite_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> float:
    """Return the 1/T of maximum likelihood, with smoothed labels if every prediction is correct."""
    beta, certificate = inverse_temperature(z, y, w)
    if certificate.status == "bound" and beta * scale_of(z) > 1:
        beta, _ = inverse_temperature(z, y, w, smooth=1.0)
    return beta


def search_beta(loss: Loss, quick: Loss | None, estimate: Estimate | None, scale: float) -> Optimum:
    """Return the best 1/T: start at a subsample's estimate, refine with the fast loss if any, finish exactly.

    Without an estimate the optimum may lie at a bound, which is checked first.
    """
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if estimate is None:
        bound = _bound(loss, low, high)
        if bound is None:
            return newton(loss, 1 / scale, low=low, high=high, tolerance=_FINE_STEP)
        value, slope, _ = loss(bound)
        return bound, Certificate("bound", abs(slope), 0, 3, value)
    near, passes = estimate.near, 0
    if quick is not None:
        near, (before, curvature_before), passes = _refine(quick, estimate, low, high)
        value, slope, curvature = loss(near)
        third = (curvature - curvature_before) / (near - before) if near != before else 0.0
        step = halley(slope, curvature, third)
        if abs(step) <= _FINE_CUBIC_STEP * near:
            return near + step, Certificate("converged", abs(slope), 1, passes + 1, value)
        near, passes = min(max(near + step, near / 2), 2 * near), passes + 1
    beta, certificate = newton(loss, near, low=low, high=high, tolerance=_FINE_STEP)
    return beta, replace(certificate, passes=certificate.passes + passes)


def bound_reason(beta: float, scale: float) -> str:
    """Explain why the likelihood has no optimum and the search stopped at this bound."""
    if beta * scale > 1:
        return "every label has its row's largest logit"
    return "the logits predict the labels no better than chance"


def _refine(loss: Loss, estimate: Estimate, low: float, high: float) -> tuple[float, tuple[float, float], int]:
    """Refine 1/T; also return the last 1/T and curvature that were evaluated, and the number of evaluations."""
    recorded, evaluated = _record(loss)
    _, slope, curvature = recorded(estimate.near)
    near = estimate.near + halley(slope, curvature, estimate.third * curvature)
    if abs(near - estimate.near) > _COARSE_CUBIC_STEP * estimate.near:
        start = min(max(near, estimate.near / 2), 2 * estimate.near)
        near, _ = newton(recorded, start, low=low, high=high, tolerance=_COARSE_STEP)
    return near, evaluated[-1], len(evaluated)


def _record(loss: Loss) -> tuple[Loss, list[tuple[float, float]]]:
    """Return the loss and a list to which each call appends its 1/T and curvature."""
    evaluated: list[tuple[float, float]] = []

    def recorded(beta: float) -> tuple[float, float, float]:
        derivatives = loss(beta)
        evaluated.append((beta, derivatives[2]))
        return derivatives

    return recorded, evaluated


def near_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> float:
    """Return 1/T to a few percent, as the start of searches with further parameters."""
    scale = scale_of(z)
    if scale == 0:
        return 1.0
    estimate = _estimate_from_subsample(z, y, w, scale)
    return finite_inverse_temperature(z, y, w) if estimate is None else estimate.near


class Estimate(NamedTuple):
    """A subsample's estimate of the optimum."""

    near: float
    """The subsample's best 1/T."""
    third: float
    """Ratio of the loss's third to its second derivative there, approximately."""


def _estimate_from_subsample(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, scale: float) -> Estimate | None:
    """Return a subsample's estimate; None if all rows cost hardly more, or if the optimum is at a bound."""
    # One percent of the rows costs little and saves a pass over all of them.
    minimum = _MIN_SUBSAMPLE if z.shape[1] < _WIDE else _MIN_SUBSAMPLE_WIDE
    size = _SUBSAMPLE if z.dtype == np.float64 else max(minimum, min(len(z) // 100, 2 * _SUBSAMPLE))
    if len(z) <= 4 * size:
        return None
    rows = slice(None, None, len(z) // size)
    return subsample_estimate(z[rows].copy(), y[rows].copy(), scale, None if w is None else w[rows].copy())


def subsample_estimate(z: np.ndarray, y: np.ndarray, scale: float, w: np.ndarray | None = None) -> Estimate | None:
    """Return the estimate from these rows; None if their optimum is at a bound."""
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if _bound(_mean_loss(z, y, w), low, high) is not None:
        return None
    loss, evaluated = _record(_mean_loss(z, y, w))
    near, certificate = newton(loss, 1 / scale, low=low, high=high, tolerance=1e-2)
    if certificate.status != "converged":
        return None
    (before, first), (after, second) = evaluated[-2:] if len(evaluated) > 1 else (evaluated[0], evaluated[0])
    third = (second - first) / (after - before) / second if after != before and second > 0 else 0.0
    return Estimate(near, third)


def brier_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> Optimum:
    """Return the 1/T that minimises the Brier score, for checked arrays.

    The score may have several local minima. A grid over a subsample finds the deepest, and Newton's method refines it
    on all rows.
    """
    z, y, w = _as_arrays(z, y, w)
    every = max(1, len(z) // _SUBSAMPLE)
    subsample = z[::every], y[::every]
    subsample_weight = None if w is None else w[::every]
    scale = scale_of(z)
    if scale == 0:
        level = 1 - float(np.mean(1 / count_options(z)))
        return 1.0, Certificate("converged", 0.0, 0, 0, level)  # constant rows: every T has the same loss
    grid = np.geomspace(1 / MAX_BRIER_RATIO, 1 / MIN_BRIER_RATIO, 26) / scale
    deepest = int(np.argmin([_brier(*subsample, float(beta), subsample_weight)[0] for beta in grid]))
    low, high = max(deepest - 1, 0), min(deepest + 1, len(grid) - 1)
    while low > 0 and _brier(z, y, float(grid[low]), w)[1] > 0:
        low -= 1
    while high < len(grid) - 1 and _brier(z, y, float(grid[high]), w)[1] < 0:
        high += 1
    return newton(lambda b: _brier(z, y, b, w), float(grid[deepest]), low=float(grid[low]), high=float(grid[high]))


def focal_inverse_temperature(
    z: np.ndarray, y: np.ndarray, gamma: float, *, near: float | None = None, w: np.ndarray | None = None
) -> Optimum:
    """Return the 1/T that minimises the focal loss −(1 − p_y)^γ ln p_y, for checked arrays.

    The loss need not be convex in 1/T. A coarse grid around the likelihood's optimum, or around `near`, brackets the
    minimum, and Newton's method refines it.
    """
    z, y, w = _as_arrays(z, y, w)
    beta, certificate = inverse_temperature(z, y, w)
    if certificate.status == "bound" or not scale_of(z):
        return beta, certificate
    grid = beta * np.geomspace(0.02, 20.0, 41) if near is None else near * np.geomspace(1 / 1.5, 1.5, 9)
    values = [_focal(z, y, b, gamma, w)[0] for b in grid.tolist()]
    at = int(np.argmin(values))
    if at in (0, len(grid) - 1):
        if near is not None:
            return focal_inverse_temperature(z, y, gamma, w=w)
        slope = _focal(z, y, float(grid[at]), gamma, w)[1]
        return float(grid[at]), Certificate("bound", abs(slope), 0, 42, values[at])
    low, high = float(grid[at - 1]), float(grid[at + 1])
    return newton(lambda b: _focal(z, y, b, gamma, w), float(grid[at]), low=low, high=high)


_LEAST_REST = 1e-12  # smallest 1 − p that is raised to a power; below it the slope of a power less than 1 is unbounded.


def _focal(z: np.ndarray, y: np.ndarray, beta: float, gamma: float, w: np.ndarray | None) -> tuple[float, float, float]:
    """Return the mean focal loss of softmax(βz) and its first two derivatives in β."""
    sums = np.zeros(3)
    for part, labels, share in shifted_chunks(z, y, w):
        log_p = NUMPY.log_softmax(beta * part)
        p = np.exp(log_p)
        mean = (p * part).sum(axis=1, keepdims=True)
        off = mean - np.take_along_axis(part, labels, axis=1)
        variance = (p * (part - mean) ** 2).sum(axis=1, keepdims=True)
        log_y, p_y = (np.take_along_axis(x, labels, axis=1) for x in (log_p, p))
        # The gradient is w (p − e_y) with w = (1 − p)^γ (1 + γ r) and r = −p ln p/(1 − p), which is 1 at p = 1.
        rest = -np.expm1(log_y)
        safe = np.maximum(rest, _LEAST_REST)
        ratio = np.where(rest > _LEAST_REST, -p_y * log_y / safe, 1.0)
        weight = rest**gamma * (1 + gamma * ratio)
        turn = -gamma * safe ** (gamma - 1) * p_y * (2 + log_y + (gamma - 1) * ratio) if gamma else 0.0
        terms = -(safe**gamma) * log_y, weight * off, weight * variance - turn * off**2
        sums += [float((share * term).sum()) for term in terms]
    value, slope, curvature = sums.tolist()
    return value, slope, curvature


def _bound(loss: Loss, low: float, high: float) -> float | None:
    """Return the end of the range towards which a convex loss decreases throughout, if there is one."""
    if loss(high)[1] <= 0:
        return high
    return low if loss(low)[1] >= 0 else None


def _mean_loss(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, rise: float = 0.0, *, quick: bool = False) -> Loss:
    """Return the function β ↦ mean loss of softmax(βz) plus rise·β, with its first two derivatives."""
    n = row_count(z, w)

    def derivatives(beta: float) -> tuple[float, float, float]:
        value, slope, curvature = temperature_sums(z, y, beta, w, quick=quick)
        return value / n + rise * beta, slope / n + rise, curvature / n

    return derivatives


def _brier(z: np.ndarray, y: np.ndarray, beta: float, w: np.ndarray | None = None) -> tuple[float, float, float]:
    """Return the mean Brier score of softmax(βz) and its first two derivatives in β."""
    sums = np.zeros(3)
    for part, labels, share in shifted_chunks(z, y, w):
        p = NUMPY.softmax(beta * part)
        off = part - (p * part).sum(axis=1, keepdims=True)
        rise = p * off
        bend = rise * off - p * (rise * off).sum(axis=1, keepdims=True)
        p_y, rise_y, bend_y = (np.take_along_axis(x, labels, axis=1)[:, 0] for x in (p, rise, bend))
        rows = share[:, 0]
        sums[0] += ((p * p).sum(axis=1) - 2 * p_y + 1) @ rows
        sums[1] += 2 * ((p * rise).sum(axis=1) - rise_y) @ rows
        sums[2] += 2 * ((rise * rise + p * bend).sum(axis=1) - bend_y) @ rows
    value, slope, curvature = sums.tolist()
    return value, slope, curvature


def scale_of(z: np.ndarray) -> float:
    """Return the median standard deviation of a row's logits, over some hundred rows and without absent options.

    Logits far below the largest are clipped at 1000 times the median gap between a row's two largest logits. Padding
    values then do not determine the scale.
    """
    sample = to_array(z, "logits")[:: max(1, len(z) // 256)]
    chunks = native.row_chunks(len(sample), z.shape[1], native.DEFAULT_CHUNK)  # for large vocabularies
    parts = [_below_largest(upcast_half(sample[rows])) for rows in chunks]
    max_depth = -_MAX_DEPTH * np.median(np.concatenate([second for _, second in parts]))
    spread = []
    for below, _ in parts:
        offered = None if np.isfinite(below.min()) else np.isfinite(below)
        if max_depth > 0:
            np.maximum(below, -max_depth, out=below)
        spread.append(below.std(axis=1) if offered is None else below.std(axis=1, where=offered))
    return float(np.median(np.concatenate(spread)))


def _below_largest(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits minus the largest of their row, in float64, and the second largest of these."""
    largest = z.argmax(axis=1)[:, None]
    below = z.astype(np.float64)
    below -= np.take_along_axis(below, largest, axis=1)
    np.put_along_axis(below, largest, -np.inf, axis=1)
    second = below.max(axis=1)
    np.put_along_axis(below, largest, 0.0, axis=1)
    return below, second


def shifted_chunks(
    z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rows in float64 minus their largest logit, with labels and shares of the total weight as columns."""
    share = np.full(len(z), 1 / len(z)) if w is None else w / w.sum()
    for rows in native.row_chunks(len(z), z.shape[1], native.DEFAULT_CHUNK):
        double = z[rows].astype(np.float64)
        shifted = np.maximum(double - double.max(axis=1, keepdims=True), MASKED_LOGIT)
        yield shifted, y[rows, None], share[rows, None]


def _as_arrays(z: Any, y: Any, w: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return checked arrays as NumPy arrays; networks are fitted on tensors."""
    return to_array(z, "logits"), to_array(y, "labels"), None if w is None else to_array(w, "sample_weight")
