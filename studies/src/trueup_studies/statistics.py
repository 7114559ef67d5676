"""Significance of differences: t-tests over seeds, and mean ranks over data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import chdtrc, stdtr, stdtrit

LEVEL = 0.05
"""p-value below which a difference is called statistically significant."""
ROUNDING = 1e-9
"""Relative tolerance for equality."""


def t_test(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the two-sided p-value of the t-test with pooled variance; NaN if a sample has fewer than two values.

    t = (m₁ − m₂) / (s√(1/n₁ + 1/n₂)) on n₁ + n₂ − 2 degrees of freedom, s² the pooled variance. For two constant
    samples the result is 1 if they are equal, else NaN: repeating a deterministic method is no test.

    >>> f"{t_test(np.array([0.02, 0.03]), np.array([0.05, 0.06])):.4f}"
    '0.0513'
    """
    freedom = len(a) + len(b) - 2
    if min(len(a), len(b)) < 2:
        return math.nan
    difference = float(a.mean() - b.mean())
    pooled = (a.var() * len(a) + b.var() * len(b)) / freedom
    if is_constant(a) and is_constant(b):
        return 1.0 if difference == 0 else math.nan
    return float(2 * stdtr(freedom, -abs(difference) / math.sqrt(pooled * (1 / len(a) + 1 / len(b)))))


def paired_t_test(differences: np.ndarray, *, resplit_ratio: float = 0.0) -> float:
    """Compute the two-sided p-value of the paired t-test; NaN for fewer than two differences.

    t = m / `standard_error` on n − 1 degrees of freedom, for n differences with mean m. For equal differences the
    result is 1 if they are zero, else NaN, as in `t_test`.

    >>> f"{paired_t_test(np.array([0.01, 0.02, 0.03])):.4f}"
    '0.0742'
    """
    n = len(differences)
    if n < 2:
        return math.nan
    mean, error = float(differences.mean()), standard_error(differences, resplit_ratio=resplit_ratio)
    if is_constant(differences):
        return 1.0 if mean == 0 else math.nan
    return float(2 * stdtr(n - 1, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, so that the probability of any false rejection stays below the level.

    >>> [f"{p:.2f}" for p in holm([0.01, 0.04, 0.03])]
    ['0.03', '0.06', '0.06']

    Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    p = np.array(p_values, dtype=float)
    order = p.argsort()
    raised = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return [float(value) for value in np.minimum(raised, 1)[order.argsort()]]


def paired_interval(differences: np.ndarray, *, resplit_ratio: float = 0.0) -> tuple[float, float]:
    """Compute the interval of the mean of paired differences that matches `paired_t_test`; NaN for fewer than two.

    >>> [f"{end:.4f}" for end in paired_interval(np.array([0.01, 0.02, 0.03]))]
    ['-0.0048', '0.0448']
    """
    if len(differences) < 2:
        return math.nan, math.nan
    quantile = float(stdtrit(len(differences) - 1, 1 - LEVEL / 2))
    half = quantile * standard_error(differences, resplit_ratio=resplit_ratio)
    return float(differences.mean()) - half, float(differences.mean()) + half


def standard_error(differences: np.ndarray, *, resplit_ratio: float = 0.0) -> float:
    """Compute the standard error s √(1/n + q) of the mean of n differences with standard deviation s.

    q = `resplit_ratio` is for runs that each split the same samples anew: the number of test samples divided by the
    number of the others. Such splits share samples, so their differences vary less than those of new samples. q is 0
    for runs that share no samples, or that all have the same test samples.

    >>> [f"{standard_error(np.array([0.01, 0.02, 0.03]), resplit_ratio=q):.4f}" for q in (0, 1)]
    ['0.0058', '0.0115']

    Nadeau & Bengio (2003), Inference for the generalization error.
    """
    return float(differences.std(ddof=1)) * math.sqrt(1 / len(differences) + resplit_ratio)


def is_constant(values: np.ndarray) -> bool:
    """Return whether values differ by no more than rounding.

    >>> is_constant(np.array([0.3, 0.1 + 0.2])), is_constant(np.array([0.3, 0.30001]))
    (True, False)
    """
    return bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


class Ranking(NamedTuple):
    """Methods by their mean rank over data sets."""

    ranks: Mapping[str, float]
    """Method → mean rank; the best comes first."""
    data_sets: int
    statistic: float
    """Friedman's χ², with the correction for ties."""
    p_value: float
    """Probability of at least this statistic if all methods were equally good."""
    critical: float
    """Mean ranks that differ by more than this differ significantly."""

    def worse_than_best(self) -> list[str]:
        """Return the methods whose mean rank is significantly worse than the best."""
        best = next(iter(self.ranks.values()))
        return [name for name, value in self.ranks.items() if value - best > self.critical]


def ranking(scores: Mapping[str, Sequence[float]], *, level: float = LEVEL) -> Ranking:
    """Rank methods by scores, one score per data set and lower better, with Friedman's and Nemenyi's tests.

    χ² = (k − 1) Σⱼ (Rⱼ − N(k + 1)/2)² / (Σᵢⱼ rᵢⱼ² − Nk(k + 1)²/4) for N data sets, k methods and rank sums Rⱼ; the
    critical difference is q √(k(k + 1)/(6N)), q the quantile of the studentised range of k over √2.

    >>> result = ranking({"a": [0.1, 0.2, 0.1, 0.3], "b": [0.2, 0.3, 0.2, 0.4], "c": [0.3, 0.1, 0.4, 0.5]})
    >>> result.ranks
    {'a': 1.25, 'b': 2.25, 'c': 2.5}
    >>> f"{result.statistic:.2f} {result.p_value:.4f} {result.critical:.4f}"
    '3.50 0.1738 1.6572'

    Demšar (2006), Statistical comparisons of classifiers over multiple data sets.
    """
    from scipy.stats import rankdata, studentized_range

    names = list(scores)
    table = np.array([list(scores[name]) for name in names], dtype=float).T
    data_sets, k = table.shape if table.ndim == 2 else (0, 0)
    if k < 2 or data_sets < 1 or not np.isfinite(table).all():
        raise ValueError(
            f"scores must be finite, for two or more methods on the same data sets, got {k} methods on {data_sets}"
        )
    ranks = rankdata(table, axis=1)
    spread = float((ranks**2).sum() - data_sets * k * (k + 1) ** 2 / 4)
    between = float(((ranks.sum(0) - data_sets * (k + 1) / 2) ** 2).sum())
    statistic = (k - 1) * between / spread if spread else 0.0
    means = dict(sorted(zip(names, ranks.mean(0).tolist(), strict=True), key=lambda item: item[1]))
    quantile = float(studentized_range.ppf(1 - level, k, math.inf))
    critical = quantile / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * data_sets))
    return Ranking(means, data_sets, statistic, float(chdtrc(k - 1, statistic)), critical)
