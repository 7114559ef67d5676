"""Temperature scaling, by likelihood, by Brier score, by focal loss, and by the ECE over a grid."""

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
from trueup.calibrators.base import Calibrator, check_positive, row_count

FINE_GRID = tuple(i / 1000 for i in range(1, 5001))
"""0.001 … 5.000, the grid of Neural Clamping's baseline."""
WIDE_GRID = tuple(i / 100 for i in range(1, 1001))
"""0.01 … 10.00, the grid of Rethinking Calibration."""
Loss = Callable[[float], tuple[float, float, float]]
"""A function of 1/T: its value and its first two derivatives."""
Optimum = tuple[float, Certificate]
"""The best 1/T, and how its search ended."""

MAX_SCALE_RATIO = 1e6
"""How far from the logits' own scale 1/T may go before the likelihood's fit stops at a bound."""
MIN_BRIER_RATIO, MAX_BRIER_RATIO = 1e-3, 1e2
"""Where the Brier score's T is searched, as multiples of the logits' own scale."""
_FARTHEST = 1e3  # times the median distance of a row's two largest logits: what is further counts as this far
_FEW, _FEW_WIDE, _WIDE = 500, 100, 4096  # rows that a search begins with; fewer where there are so many classes
_SUBSAMPLE = 2000
_NEAR, _LAST = 5e-2, 1e-4  # a Newton step of this size leaves an error of about its square
_THIRD_NEAR, _THIRD = 0.1, 2e-4  # and one of third order of its cube


class Temperature(Calibrator):
    """Divide the logits by one number: q = softmax(z/T).

    By likelihood, T minimises Σ_i ln Σ_k exp(z_ik/T) − z_iy/T, which is convex in 1/T. It keeps the ranking and is hard
    to overfit. Not for networks whose miscalibration differs between classes or regions of confidence.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> Temperature.fit(2.5 * z, y)
    Temperature(temperature=2.51869)
    """

    keeps_argmax = True
    sample_invariant = True

    temperature: float

    def __init__(self, temperature: float) -> None:
        self.set_parameter("temperature", temperature)
        check_positive(self.temperature, "temperature")

    def map(self, xp: Namespace, z: Any) -> Any:
        """Divide by T."""
        return z / self.temperature

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, smooth: float = 0.0, sample_weight: Any = None) -> Self:
        """Temperature scaling: minimise the negative log-likelihood, by Newton steps from a subsample's optimum.

        `smooth` rows more are taken to have all classes alike, as in Platt's targets, so that rows whose labels are all
        right do not make it infinitely sure.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        if not 0 <= smooth < math.inf:
            raise ValueError(f"smooth must be a number from 0 on, got {smooth}")
        beta, certificate = inverse_temperature(z, y, w, smooth=smooth)
        return cls.from_search(beta, certificate, partial(scale_of, z))

    @classmethod
    def from_search(cls, beta: float, certificate: Certificate, scale: Callable[[], float] | None = None) -> Self:
        """Return the end of a search for 1/T; at a bound it warns, with the reason for logits of this scale."""
        if certificate.status == "bound":
            reason = "" if scale is None else bound_reason(beta, scale())
            warn_at_bound("temperature", 1 / beta, reason, stacklevel=3)
        return cls(1 / beta).with_certificate(certificate)

    @classmethod
    def fit_ece(
        cls,
        logits: Any,
        labels: Any,
        *,
        temperatures: Sequence[float] | None = None,
        bins: int = BINS,
        sample_weight: Any = None,
    ) -> Self:
        """Temperature scaling (least ECE): take the temperature of a grid with the least ECE; of equal ones the one
        nearest to 1 (in its logarithm).

        The default grid is `FINE_GRID`, 0.001 … 5.000; `WIDE_GRID` is 0.01 … 10.00.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        grid = np.asarray(FINE_GRID if temperatures is None else temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not (grid > 0).all():
            raise ValueError("temperatures must be a list of positive numbers")
        errors = grid_errors(z, y, grid, bins, w)
        best = np.flatnonzero(errors <= errors.min() + 1e-12)
        return cls(float(grid[best[np.abs(np.log(grid[best])).argmin()]]))

    @classmethod
    def fit_ece_wide(cls, logits: Any, labels: Any, *, sample_weight: Any = None) -> Self:
        """Temperature scaling (least ECE, wide search): take the temperature of 0.01 … 10.00 with the least ECE."""
        return cls.fit_ece(logits, labels, temperatures=WIDE_GRID, sample_weight=sample_weight)

    @classmethod
    def fit_focal(cls, logits: Any, labels: Any, *, gamma: float = 1.0, sample_weight: Any = None) -> Self:
        """Temperature scaling (focal loss): minimise the focal loss −(1 − p_y)^γ ln p_y: a grid finds the valley, since
        it is not convex.
        """
        if not gamma >= 0 or math.isinf(gamma):
            raise ValueError(f"gamma must be a number from 0 on, got {gamma}")
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls.from_search(*focal_inverse_temperature(z, y, gamma, w=w))

    @classmethod
    def fit_brier(cls, logits: Any, labels: Any, *, sample_weight: Any = None) -> Self:
        """Temperature scaling (Brier score): minimise the mean squared distance from the one-hot label."""
        return cls.from_search(*brier_inverse_temperature(*as_weighted(logits, labels, sample_weight, min_rows=1)))


def grid_errors(
    z: np.ndarray, y: np.ndarray, temperatures: np.ndarray, bins: int, w: np.ndarray | None = None
) -> np.ndarray:
    """The ECE at each temperature that could have the least, and infinity at those that could not.

    ECE is at least |mean confidence − accuracy|, and the mean confidence falls as T rises: from where it crosses the
    accuracy, walk outwards until that gap alone exceeds the least ECE found.
    """
    correct = confidences_and_hits(z, y)[1]
    accuracy, edges, unit = np.average(correct, weights=w), equal_width(bins), rounding_error(z)
    order = np.argsort(temperatures, kind="stable")
    errors = np.full(len(order), np.inf)

    def gap(place: int) -> float:
        """Mean confidence − accuracy at a place of the sorted grid, where the ECE is noted."""
        confidence, _ = confidences(z, beta=1 / float(temperatures[order[place]]))
        tally = Bins.from_scores(confidence, correct, edges, rounding=unit, sample_weight=w)
        errors[order[place]] = tally.ece()
        return float(np.average(confidence, weights=w) - accuracy)

    low, high = 0, len(order) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if gap(middle) > 0 else (low, middle)
    for places in (range(low, len(order)), range(low - 1, -1, -1)):
        for place in places:
            if abs(gap(place)) > errors.min() + 1e-9:
                break
    return errors


def inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None, *, smooth: float = 0.0) -> Optimum:
    """1/T of most likelihood, in trusted arrays: Newton on some rows, on all of them quickly, then exactly.

    With `smooth` the labels are smoothed as if so many rows had all classes alike, ε = smooth/(n + smooth): the best
    1/T is then finite where every label has its row's largest logit.
    """
    z, y, w = _as_arrays(z, y, w)
    scale = scale_of(z)
    if scale == 0:  # constant rows: every T is as good
        return 1.0, Certificate("converged", 0.0, 0, 0, float(np.mean(np.log(count_options(z)))))
    rise = _rise(z, y, w, smooth)
    quick = None if z.dtype == np.float64 else _mean_loss(z, y, w, rise, quick=True)
    return search_beta(_mean_loss(z, y, w, rise), quick, _estimate_from_few(z, y, w, scale), scale)


def smoothed_loss(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, smooth: float) -> Loss:
    """The mean loss of labels smoothed as in `inverse_temperature`, as a function of 1/T, with two derivatives."""
    return _mean_loss(z, y, w, _rise(z, y, w, smooth))


def _rise(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, smooth: float) -> float:
    """The slope that smoothed labels add to the mean loss."""
    if not smooth:
        return 0.0
    above_mean = np.empty(len(z))  # the label's logit less the mean of its row
    for rows in native.row_chunks(len(z), z.shape[1]):
        part = z[rows].astype(np.float64)
        label = np.take_along_axis(part, y[rows, None], axis=1)[:, 0]
        above_mean[rows] = label - fill_absent(part, find_absent(part)).mean(axis=1)
    return smooth / (row_count(z, w) + smooth) * float(np.average(above_mean, weights=w))


def finite_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> float:
    """1/T of most likelihood, or of smoothed labels where every label has its row's largest logit."""
    beta, certificate = inverse_temperature(z, y, w)
    if certificate.status == "bound" and beta * scale_of(z) > 1:
        beta, _ = inverse_temperature(z, y, w, smooth=1.0)
    return beta


def search_beta(loss: Loss, quick: Loss | None, few: Estimate | None, scale: float) -> Optimum:
    """The best 1/T by what some rows say, then a quick loss of all rows if there is one, then the exact one.

    Where some rows say nothing it may be at a bound.
    """
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if few is None:
        bound = _bound(loss, low, high)
        if bound is None:
            return newton(loss, 1 / scale, low=low, high=high, tolerance=_LAST)
        value, slope, _ = loss(bound)
        return bound, Certificate("bound", abs(slope), 0, 3, value)
    near, passes = few.near, 0
    if quick is not None:
        near, (before, curvature_before), passes = _refine(quick, few, low, high)
        value, slope, curvature = loss(near)
        third = (curvature - curvature_before) / (near - before) if near != before else 0.0
        step = halley(slope, curvature, third)
        if abs(step) <= _THIRD * near:
            return near + step, Certificate("converged", abs(slope), 1, passes + 1, value)
        near, passes = min(max(near + step, near / 2), 2 * near), passes + 1
    beta, certificate = newton(loss, near, low=low, high=high, tolerance=_LAST)
    return beta, replace(certificate, passes=certificate.passes + passes)


def bound_reason(beta: float, scale: float) -> str:
    """Why a likelihood has no best 1/T: it rises up to the bound that was reached, of logits of this scale."""
    if beta * scale > 1:
        return "every label has its row's largest logit"
    return "the logits tell labels apart no better than chance"


def _refine(loss: Loss, few: Estimate, low: float, high: float) -> tuple[float, tuple[float, float], int]:
    """A better 1/T, where the loss was last asked with its curvature there, and how often it was asked."""
    recorded, seen = _record(loss)
    _, slope, curvature = recorded(few.near)
    near = few.near + halley(slope, curvature, few.third * curvature)
    if abs(near - few.near) > _THIRD_NEAR * few.near:
        start = min(max(near, few.near / 2), 2 * few.near)
        near, _ = newton(recorded, start, low=low, high=high, tolerance=_NEAR)
    return near, seen[-1], len(seen)


def _record(loss: Loss) -> tuple[Loss, list[tuple[float, float]]]:
    """A loss that notes where it was asked and the curvature there."""
    seen: list[tuple[float, float]] = []

    def recorded(beta: float) -> tuple[float, float, float]:
        found = loss(beta)
        seen.append((beta, found[2]))
        return found

    return recorded, seen


def near_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> float:
    """1/T to a few percent, where a search of more than a temperature may begin."""
    scale = scale_of(z)
    if scale == 0:
        return 1.0
    few = _estimate_from_few(z, y, w, scale)
    return finite_inverse_temperature(z, y, w) if few is None else few.near


class Estimate(NamedTuple):
    """What some rows say."""

    near: float
    """Where their best 1/T is."""
    third: float
    """The loss's third derivative over its second there, about."""


def _estimate_from_few(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, scale: float) -> Estimate | None:
    """1/T of some rows; none if there are hardly more, or it is at a bound, where that of all rows need not be."""
    # As many as save a pass over all: a hundredth of them costs little, and brings the search near enough.
    least = _FEW if z.shape[1] < _WIDE else _FEW_WIDE
    few = _SUBSAMPLE if z.dtype == np.float64 else max(least, min(len(z) // 100, 2 * _SUBSAMPLE))
    if len(z) <= 4 * few:
        return None
    some = slice(None, None, len(z) // few)
    return subsample_estimate(z[some].copy(), y[some].copy(), scale, None if w is None else w[some].copy())


def subsample_estimate(z: np.ndarray, y: np.ndarray, scale: float, w: np.ndarray | None = None) -> Estimate | None:
    """What some rows say; none if their best is at a bound."""
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if _bound(_mean_loss(z, y, w), low, high) is not None:
        return None
    loss, seen = _record(_mean_loss(z, y, w))
    near, found = newton(loss, 1 / scale, low=low, high=high, tolerance=1e-2)
    if found.status != "converged":
        return None
    (before, first), (last, second) = seen[-2:] if len(seen) > 1 else (seen[0], seen[0])
    third = (second - first) / (last - before) / second if last != before and second > 0 else 0.0
    return Estimate(near, third)


def brier_inverse_temperature(z: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> Optimum:
    """1/T of least Brier score, in trusted arrays.

    The score may have more than one valley: a grid over some rows finds the deepest, Newton its bottom over all rows.
    """
    z, y, w = _as_arrays(z, y, w)
    every = max(1, len(z) // _SUBSAMPLE)
    some, labels, few = z[::every], y[::every], None if w is None else w[::every]
    scale = scale_of(z)
    if scale == 0:
        level = 1 - float(np.mean(1 / count_options(z)))
        return 1.0, Certificate("converged", 0.0, 0, 0, level)  # constant rows: every T is as good
    grid = np.geomspace(1 / MAX_BRIER_RATIO, 1 / MIN_BRIER_RATIO, 26) / scale
    deepest = int(np.argmin([_brier(some, labels, float(beta), few)[0] for beta in grid]))
    low, high = max(deepest - 1, 0), min(deepest + 1, len(grid) - 1)
    while low > 0 and _brier(z, y, float(grid[low]), w)[1] > 0:
        low -= 1
    while high < len(grid) - 1 and _brier(z, y, float(grid[high]), w)[1] < 0:
        high += 1
    return newton(lambda b: _brier(z, y, b, w), float(grid[deepest]), low=float(grid[low]), high=float(grid[high]))


def focal_inverse_temperature(
    z: np.ndarray, y: np.ndarray, gamma: float, *, near: float | None = None, w: np.ndarray | None = None
) -> Optimum:
    """1/T of least focal loss −(1 − p_y)^γ ln p_y, in trusted arrays; `near` is where it is searched first.

    The loss need not be convex in 1/T: a coarse walk about the likelihood's optimum finds the valley, Newton its
    bottom.
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


_LEAST_REST = 1e-12
"""The least 1 − p that is raised to a power: the slope of a power below 1 has no bound at 0."""


def _focal(z: np.ndarray, y: np.ndarray, beta: float, gamma: float, w: np.ndarray | None) -> tuple[float, float, float]:
    """The mean focal loss of softmax(βz), and its first two derivatives in β."""
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
    """The end of the range towards which a convex loss falls all the way, if it does."""
    if loss(high)[1] <= 0:
        return high
    return low if loss(low)[1] >= 0 else None


def _mean_loss(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, rise: float = 0.0, *, quick: bool = False) -> Loss:
    """The mean loss of softmax(βz) plus a straight line, and its first two derivatives in β."""
    n = row_count(z, w)

    def derivatives(beta: float) -> tuple[float, float, float]:
        value, slope, curvature = temperature_sums(z, y, beta, w, quick=quick)
        return value / n + rise * beta, slope / n + rise, curvature / n

    return derivatives


def _brier(z: np.ndarray, y: np.ndarray, beta: float, w: np.ndarray | None = None) -> tuple[float, float, float]:
    """The mean Brier score of softmax(βz), and its first two derivatives in β."""
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
    """The median standard deviation of a row's logits, of some hundred rows; absent options are left out.

    A logit counts as no further below the largest than a thousand times the median distance of the second, so that
    numbers that only fill up rows cannot make the scale.
    """
    few = to_array(z, "logits")[:: max(1, len(z) // 256)]
    chunks = native.row_chunks(len(few), z.shape[1], native.DEFAULT_CHUNK)  # a vocabulary is large
    parts = [_below_largest(upcast_half(few[rows])) for rows in chunks]
    farthest = -_FARTHEST * np.median(np.concatenate([second for _, second in parts]))
    spread = []
    for below, _ in parts:
        here = None if np.isfinite(below.min()) else np.isfinite(below)
        if farthest > 0:
            np.maximum(below, -farthest, out=below)
        spread.append(below.std(axis=1) if here is None else below.std(axis=1, where=here))
    return float(np.median(np.concatenate(spread)))


def _below_largest(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits less the largest of their row, in double, and those of the second largest."""
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
    """Rows in double, less their largest logit, with their labels and their shares of all weight as columns."""
    share = np.full(len(z), 1 / len(z)) if w is None else w / w.sum()
    for rows in native.row_chunks(len(z), z.shape[1], native.DEFAULT_CHUNK):
        double = z[rows].astype(np.float64)
        shifted = np.maximum(double - double.max(axis=1, keepdims=True), MASKED_LOGIT)
        yield shifted, y[rows, None], share[rows, None]


def _as_arrays(z: Any, y: Any, w: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A trusted pair and its weights in NumPy: networks are fitted on tensors."""
    return to_array(z, "logits"), to_array(y, "labels"), None if w is None else to_array(w, "sample_weight")
