"""Compare methods over many experiments: win rate, mean rank, excess loss and harm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata


class Standing(NamedTuple):
    """Scores of a method over experiments; the errors are standard errors with data sets as units."""

    win_rate: float
    """Share of the other methods with a higher loss, averaged over experiments."""
    win_rate_error: float
    rank: float
    """Mean rank, 1 for the lowest loss; equal losses share a rank."""
    excess: float
    """Mean excess over the lowest loss of each experiment."""
    excess_error: float
    harm: float
    """Largest excess over the loss without calibration."""


def leaderboard(
    losses: Mapping[str, Sequence[float]], *, data_sets: Sequence[str], raw: Sequence[float]
) -> dict[str, Standing]:
    """Compare methods by their losses on the same experiments; the highest win rate comes first.

    `data_sets` names the data set of each experiment and `raw` is its loss without calibration. A win is a strictly
    lower loss; of two equal losses neither wins. Experiments of one data set are not independent:
    the standard error is √(C/(C − 1) Σ_c (S_c − n_c m)²)/N. S_c is the sum over the n_c experiments of data set c, and
    m the mean of all N.

    >>> standings = leaderboard({"a": [0.1, 0.3], "b": [0.2, 0.2]}, data_sets=["x", "y"], raw=[0.3, 0.2])
    >>> a = standings["a"]
    >>> a.win_rate, a.rank, f"{a.excess:.2f} {a.harm:.2f}"
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
    standings = {
        name: Standing(
            *_mean_and_error(wins[:, j], clusters),
            float(ranks[:, j].mean()),
            *_mean_and_error(excess[:, j], clusters),
            float(harm[:, j].max(initial=-math.inf)),
        )
        for j, name in enumerate(names)
    }
    return dict(sorted(standings.items(), key=lambda item: -item[1].win_rate))


def _above(table: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """Subtract each row's lowest loss; infinite minus infinite is 0."""
    same = table == lowest[:, None]
    return np.subtract(table, lowest[:, None], where=~same, out=np.zeros_like(table))


def _mean_and_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    mean = float(values.mean())
    count = int(clusters.max()) + 1
    if count < 2 or not math.isfinite(mean):
        return mean, math.nan
    deviations = np.bincount(clusters, weights=values - mean, minlength=count)
    return mean, math.sqrt(count / (count - 1) * float((deviations**2).sum())) / len(values)
