"""Differences between two methods that ran with the same seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from scipy.special import stdtr

from trueup.study.grid import Rows
from trueup.study.tables import Column, Entry

LEVEL = 0.05
"""A paired t-test tells a difference from none below this p-value."""


def paired(rows: Rows, ours: str, theirs: str, columns: Iterable[Column]) -> dict[str, Entry]:
    """The difference of two methods in each figure, seed by seed, marked where a paired t-test tells it from none.

    >>> rows = [{"method": m, "seed": s, "nll": 0.1 * s + (m == "a")} for m in "ab" for s in range(3)]
    >>> paired(rows, "a", "b", [Column("nll")])["nll"].mark
    'higher'
    """
    found = {}
    for column in columns:
        by_seed = [{row["seed"]: row[column.name] for row in rows if row["method"] == name} for name in (ours, theirs)]
        seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
        gaps = column.scale * np.array([by_seed[0][seed] - by_seed[1][seed] for seed in seeds])
        if len(gaps):
            std = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan
            found[column.name] = Entry(
                float(gaps.mean()), std, len(gaps), mark=_mark(float(gaps.mean()), std, len(gaps))
            )
    return found


def _mark(mean: float, std: float, count: int) -> Literal["higher", "lower", ""]:
    if not std >= 0 or mean == 0:
        return ""
    p = 0.0 if std == 0 else 2 * stdtr(count - 1, -abs(mean) / (std / math.sqrt(count)))
    return "" if not p < LEVEL else "higher" if mean > 0 else "lower"
