"""Confidence intervals of metrics, and of paired differences between methods.

Everything is resampled from tallies (counts in some hundred cells of confidence), never from the logits: a thousand
replicates cost the same at a thousand rows as at a billion. Inside a cell all rows take its mean confidence, which
changes a variance of about 0.1 by less than 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from trueup.core.arrays import as_tensors, as_weights
from trueup.core.bins import BINS, Bins, bin_index, equal_mass, equal_width, rounding_error
from trueup.core.row_scores import RowScores, score_rows_and_classes
from trueup.core.splits import random_groups
from trueup.core.tally import MEAN_METRICS, TABLE_METRICS, Mean, Tally, class_cells
from trueup.metrics.resampling import (
    BootstrapBins,
    Classwise,
    check_resamples,
    paired_classwise,
    paired_interval,
    resample_cells,
    tail_share,
)

_SHARES = ("accuracy", "observed")
"""What is 0 or 1 in each row: it has Wilson's interval."""
_JOINT_PARTS = 4  # cells a bin and method when two methods are resampled together


@dataclass(frozen=True)
class Interval:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float
    level: float = 0.95


class Scored(NamedTuple):
    """A data set after its one pass."""

    rows: RowScores
    tally: Tally
    rounding: float
    weights: np.ndarray | None

    @classmethod
    def of(
        cls,
        logits: Any,
        labels: Any,
        *,
        bins: int = BINS,
        fold: bool = False,
        weights: Any = None,
        beside: Scored | None = None,
    ) -> Scored:
        """Pass over a pair; rows fall into the same groups as those of another method, if it is to stand beside one."""
        z, y = as_tensors(logits, labels)
        w = as_weights(weights, len(z))
        if beside is not None and (shape := (beside.tally.n, *beside.tally.classes.count.shape)) != (*z.shape, bins):
            raise ValueError(
                f"paired methods must have the same (rows, classes, bins), got {shape} and {(*z.shape, bins)}"
            )
        unit = rounding_error(z)
        cells = class_cells(z.shape[1], bins, unit)
        group = random_groups(z, y, cells.groups) if beside is None else beside.rows.group
        rows, classes = score_rows_and_classes(z, y, replace(cells, group=group, weights=w), fold=fold)
        return cls(rows, Tally.from_rows(rows, classes, bins, unit, fold=fold, weights=w), unit, w)

    def value(self, metric: str) -> float:
        """A number of the table; unlike the tally's, the adaptive error is exact."""
        if metric != "aece":
            return self.tally.value(metric)
        index, edges = self.bin_of_row(adaptive=True)
        return Bins.from_indices(index, self.rows.score, self.rows.outcome, edges, weights=self.weights).ece()

    def bin_of_row(self, *, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
        """The bin of each row, of equal width or (adaptive) equal mass, and the edges."""
        c, bins = self.rows.score, self.tally.grid.bins
        edges = equal_mass(c, bins, self.weights) if adaptive else equal_width(bins)
        return bin_index(c, edges, rounding=0.0 if adaptive else self.rounding), edges


def bootstrap(
    logits: Any,
    labels: Any,
    *,
    metric: str = "ece",
    bins: int = BINS,
    fold: bool = False,
    weights: Any = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Confidence interval of a metric of the table by resampling the rows.

    Means have the normal interval that their bootstrap tends to, accuracy Wilson's. Calibration errors, which noise
    makes larger, have the interval of the true errors under which the value seen is no outlier: it is aware of the
    bias, starts at 0 where calibration cannot be excluded, and may lie below the value itself.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrated, overconfident = bootstrap(z, y), bootstrap(2 * z, y)
    >>> calibrated.low, overconfident.low > 0.1
    (0.0, True)
    """
    scored = Scored.of(logits, labels, bins=bins, fold=fold, weights=weights)
    values = {metric: scored.value(metric)}
    return intervals(scored.tally, values, level=level, n_resamples=n_resamples, seed=seed)[metric]


def intervals(
    tally: Tally,
    values: Mapping[str, float] | Iterable[str] = TABLE_METRICS,
    *,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Intervals of several metrics from one tally; `values` may hold better values than the tally's own."""
    tail = tail_share(level)
    check_resamples(n_resamples)
    known = dict(values) if isinstance(values, Mapping) else {name: tally.value(name) for name in values}
    noisy: dict[bool, BootstrapBins] = {}
    found = {}
    for name, value in known.items():
        if tally.n < 2 and name not in _SHARES:  # one row shows no spread
            low, high = float("nan"), float("nan")
        elif name in MEAN_METRICS:
            low, high = _mean_interval(name, getattr(tally, name), tail)
        elif name == "sce":
            low, high = Classwise.of(tally).interval(tail)
        else:
            adaptive = name == "aece"
            if adaptive not in noisy:
                noisy[adaptive] = BootstrapBins.of_grid(tally.grid, adaptive, n_resamples, seed)
            low, high = noisy[adaptive].interval("ece" if adaptive else name, tail)
            # True errors keep the order ECE ≤ RMSCE ≤ MCE, and noise blurs the first the least.
            smaller = {"rmsce": ("ece",), "mce": ("ece", "rmsce")}.get(name, ())
            low = max([low, *(noisy[adaptive].interval(other, tail)[0] for other in smaller)])
            high = max(high, low) if high > 0 else value
        # Nothing in the table is negative, though the normal interval of few rows may reach below 0.
        high = high if name in ("nll", "entropy", "brier") else min(high, 1.0)
        found[name] = Interval(value, max(low, 0.0), high, level)
    return found


def paired_bootstrap(
    first: tuple[Any, Any],
    second: tuple[Any, Any],
    *,
    metric: str = "ece",
    bins: int = BINS,
    fold: bool = False,
    weights: Any = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Interval of how much a metric changes from the first pair to the second, on the same rows.

    Both are resampled together, so what is hard in the data cancels.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3)); y = z.argmax(axis=1)
    >>> paired_bootstrap((z, y), (2 * z, y), metric="nll").high < 0
    True
    """
    one = Scored.of(*first, bins=bins, fold=fold, weights=weights)
    two = Scored.of(*second, bins=bins, fold=fold, weights=weights, beside=one)
    return differences(one, two, (metric,), level=level, n_resamples=n_resamples, seed=seed)[metric]


def differences(
    first: Scored,
    second: Scored,
    metrics: Iterable[str],
    *,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Paired intervals of second − first for several metrics; both must have the same groups of rows."""
    tail = tail_share(level)
    check_resamples(n_resamples)
    joint: dict[bool, tuple[BootstrapBins, BootstrapBins]] = {}
    found = {}
    for name in metrics:
        value = second.value(name) - first.value(name)
        if not first.tally.n:
            low, high = float("nan"), float("nan")
        elif name in MEAN_METRICS:
            column = {"accuracy": "correct", "predicted": "score", "observed": "outcome"}.get(name, name)
            mean = Mean.of(getattr(second.rows, column) - getattr(first.rows, column), first.weights)
            low, high = _mean_interval("difference", mean, tail)
        elif name == "sce":
            low, high = paired_classwise(Classwise.of(first.tally), Classwise.of(second.tally), tail)
        else:
            adaptive = name == "aece"
            if adaptive not in joint:
                joint[adaptive] = _resample_jointly(first, second, adaptive, n_resamples, seed)
            low, high = paired_interval(*joint[adaptive], "ece" if adaptive else name, tail)
            most = _most(first, second, name)
            low, high = max(low, -most), min(high, most)
        found[name] = Interval(value, low, high, level)
    return found


def _mean_interval(name: str, mean: Mean, tail: float) -> tuple[float, float]:
    z = float(-ndtri(tail))
    if name not in _SHARES:
        return mean.value - z * mean.error, mean.value + z * mean.error
    n, p = mean.effective_rows, mean.value
    if not n:
        return float("nan"), float("nan")
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _most(first: Scored, second: Scored, metric: str) -> float:
    """The most by which two methods' errors can differ: not at all where no row differs.

    An expected error is a sum of absolute sums over bins: a row that stays in its bin changes it by no more than its
    own change, a row that moves by no more than what it was and is.
    """
    adaptive = metric == "aece"
    gaps = [one.rows.outcome - one.rows.score for one in (first, second)]
    moved = first.bin_of_row(adaptive=adaptive)[0] != second.bin_of_row(adaptive=adaptive)[0]
    change = np.where(moved, np.abs(gaps[0]) + np.abs(gaps[1]), np.abs(gaps[1] - gaps[0]))
    bounded = metric in ("ece", "aece", "overconfidence", "underconfidence")
    return float(np.average(change, weights=first.weights)) if bounded or not change.any() else 1.0


def _resample_jointly(
    first: Scored, second: Scored, adaptive: bool, n_resamples: int, seed: int
) -> tuple[BootstrapBins, BootstrapBins]:
    """Resample two methods' rows together, by cells of one method's confidence and outcome times the other's."""
    bins, keys = [], []
    for one in (first, second):
        index, edges = one.bin_of_row(adaptive=adaptive)
        low, high = edges[index], edges[index + 1]
        part = np.clip((one.rows.score - low) / (high - low) * _JOINT_PARTS, 0, _JOINT_PARTS - 1).astype(np.int64)
        keys.append((index * _JOINT_PARTS + part) * 2 + one.rows.outcome.astype(np.int64))
        bins.append(index)
    joint = keys[0] * (int(keys[1].max()) + 1) + keys[1]
    some = np.ones(len(joint), bool) if first.weights is None else first.weights > 0
    weights = np.ones(int(some.sum())) if first.weights is None else first.weights[some]
    _, cell = np.unique(joint[some], return_inverse=True)
    count, squared = np.bincount(cell, weights), np.bincount(cell, weights**2)
    drawn = resample_cells(count, squared, n_resamples, seed)
    result = []
    for index, one in zip(bins, (first, second), strict=True):
        bin_of_cell = np.zeros(len(count), np.int64)
        bin_of_cell[cell] = index[some]
        confidence, hits = (np.bincount(cell, weights * x[some]) for x in (one.rows.score, one.rows.outcome))
        result.append(BootstrapBins.of_cells(bin_of_cell, count, confidence, hits, drawn))
    return result[0], result[1]
