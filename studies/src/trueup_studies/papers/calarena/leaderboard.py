"""Methods beside each other over many experiments: win rate, mean rank, excess loss and harm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata


class Place(NamedTuple):
    """How a method does over experiments; the errors are standard errors, data sets taken as the units."""

    win_rate: float
    """The share of the other methods whose loss is greater, on average over experiments."""
    win_rate_error: float
    rank: float
    """Mean rank, 1 the least loss; equal losses share one."""
    excess: float
    """Mean loss above the least of all methods, experiment by experiment."""
    excess_error: float
    harm: float
    """The most by which its loss exceeds that without calibration."""


def leaderboard(
    losses: Mapping[str, Sequence[float]], *, data_sets: Sequence[str], raw: Sequence[float]
) -> dict[str, Place]:
    """Compare methods by their losses on the same experiments, the highest win rate first.

    `data_sets` says of which data set each experiment is and `raw` its loss without calibration. A win is a strictly
    lower loss, so that of two equal ones neither wins. Experiments of one data set are not independent: with sums S_c
    over the n_c experiments of data set c and the mean m of all N, the standard error is
    √(C/(C − 1) Σ_c (S_c − n_c m)²)/N.

    >>> places = leaderboard({"a": [0.1, 0.3], "b": [0.2, 0.2]}, data_sets=["x", "y"], raw=[0.3, 0.2])
    >>> places["a"].win_rate, places["a"].rank, f"{places['a'].excess:.2f} {places['a'].harm:.2f}"
    (0.5, 1.5, '0.05 0.10')
    """
    names = list(losses)
    table = np.array([list(losses[name]) for name in names], dtype=float).T
    table = np.where(np.isnan(table), math.inf, table)
    wins = (table[:, None, :] > table[:, :, None]).sum(axis=2) / max(len(names) - 1, 1)
    ranks = rankdata(np.nan_to_num(table, posinf=np.finfo(float).max), axis=1)
    excess = _above(table, table.min(axis=1))
    harm = _above(table, np.asarray(raw, dtype=float))
    clusters = np.unique(np.asarray(data_sets, dtype=str), return_inverse=True)[1]
    places = {
        name: Place(
            *_mean_and_error(wins[:, j], clusters),
            float(ranks[:, j].mean()),
            *_mean_and_error(excess[:, j], clusters),
            float(harm[:, j].max(initial=-math.inf)),
        )
        for j, name in enumerate(names)
    }
    return dict(sorted(places.items(), key=lambda item: -item[1].win_rate))


def _above(table: np.ndarray, least: np.ndarray) -> np.ndarray:
    """How much each loss exceeds that of its row; of two that are infinite, by nothing."""
    same = table == least[:, None]
    return np.subtract(table, least[:, None], where=~same, out=np.zeros_like(table))


def _mean_and_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    mean = float(values.mean())
    count = int(clusters.max()) + 1
    if count < 2 or not math.isfinite(mean):
        return mean, math.nan
    deviations = np.bincount(clusters, weights=values - mean, minlength=count)
    return mean, math.sqrt(count / (count - 1) * float((deviations**2).sum())) / len(values)
