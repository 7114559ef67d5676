"""The tables of `evaluate_forecasts` and `compare_forecasts`: scores and calibration of forecasts of a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from trueup._core.arrays import as_weights, effective_rows
from trueup._core.clusters import ClustersLike, mean_error, weighted_clusters
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.forecasts import SHARE_ERRORS, Forecast, RowGroups, ScoredForecast, check_forecast, list_levels
from trueup.metrics.intervals import Interval, count_rows
from trueup.metrics.resampling import Resampling, ResamplingOptions
from trueup.metrics.table import Findings, ScoreTable

ENOUGH_ROWS = 150
"""Number of rows with which the test detects a median that lies above 60 % of the targets, with 80 % power."""


@dataclass(frozen=True)
class ForecastTest:
    """The test of calibration: the PIT error compared with that of targets drawn from the forecasts."""

    p_value: float
    """Probability of an error at least this large under calibration."""
    expected: float
    """Mean error under calibration."""
    mean_pit: float
    bias_z: float
    """Standard errors by which the mean PIT exceeds ½: positive where the targets lie above the forecasts."""
    spread_z: float
    """Standard errors by which the spread of the PIT exceeds a uniform one: positive where intervals are too narrow."""
    n_resamples: int


@dataclass(frozen=True, eq=False, repr=False)
class ForecastScores(ScoreTable):
    """Metrics of one or several forecasts of the same targets, with intervals, tests and paired differences.

    `scores["crps"]` is the Interval of the only forecast, `scores["scaled", "crps"]` that of one of several.
    """

    rows: int
    """Number of rows."""
    level: float
    """Confidence level of the intervals."""
    values: Mapping[str, Mapping[str, Interval]]
    """By method, then by metric."""
    tests: Mapping[str, ForecastTest]
    """By method: the test of calibration."""
    changes: Mapping[str, Mapping[str, Interval]]
    """By method (without the first): paired difference of each metric from the first method."""
    levels: tuple[float, ...] | None = None
    """Levels of the quantiles; None for Gaussian forecasts."""
    effective_rows: float | None = None
    """(Σw)²/Σw², where the rows have weights."""
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By method: remarks about the rows."""
    clusters: int | None = None
    """Number of clusters, if clusters were passed; intervals and tests are then by cluster."""
    cluster_name: str = "cluster"
    """Name of a cluster, such as patient."""

    def _findings(self, name: str) -> Findings:
        """Name the coverage that is furthest off (or that of the widest interval), and how the forecasts are wrong."""
        test, gaps, summary, words = self.tests[name], self._gaps(name), "", []
        off = {level: gap for level, gap in gaps.items() if abs(gap) > 1.96}
        if gaps:
            level = max(off, key=lambda level: abs(off[level])) if off else max(gaps)
            share = format_percent(self.values[name][f"coverage_{level:g}"].value, 1)
            summary = f"Its {level:g} % intervals hold {share} of the targets. "
        if abs(test.bias_z) > 1.96:
            words.append(f"its forecasts are too {'low' if test.bias_z > 0 else 'high'}")
        wide, narrow = ([f"{level:g} %" for level, gap in off.items() if side * gap > 0] for side in (1, -1))
        if wide and narrow:
            words.append(f"its intervals of {', '.join(wide)} are too wide and those of {', '.join(narrow)} too narrow")
        elif wide or narrow or abs(test.spread_z) > 1.96:
            is_narrow = bool(narrow) if off else test.spread_z > 0
            words.append(f"its intervals are too {'narrow' if is_narrow else 'wide'}")
        shape = "right in the mean and in the spread, but its distributions have the wrong shape"
        is_few = (self.effective_rows or self.rows) < ENOUGH_ROWS
        too_few = f"{count_rows(self.rows)} {'is' if self.rows == 1 else 'are'}" if is_few else ""
        detectable = f"{ENOUGH_ROWS} rows, a median that lies above 60 % of the targets"
        problem = f"It is miscalibrated: {' and '.join(words) or shape}"
        return Findings(
            summary,
            "forecast would show a PIT error",
            f"consistency test{self._by_cluster()}",
            too_few,
            detectable,
            problem,
        )

    def _gaps(self, name: str) -> dict[float, float]:
        """Level of a central interval in per cent → how many standard errors its coverage lies above it."""
        gaps = {}
        for metric, covered in self.values[name].items():
            if metric.startswith("coverage_"):
                level = float(metric.partition("_")[2]) / 100
                rows, gap = self.effective_rows or self.rows, covered.value - level
                z = gap / math.sqrt(level * (1 - level) / rows)
                # With clusters the interval decides: z ignores their correlation.
                is_covered = self.clusters is not None and covered.low <= level <= covered.high
                gaps[100 * level] = 0.0 if is_covered else z
        return gaps

    def _subject(self) -> tuple[dict[str, Any], str]:
        """Return the levels of the quantiles."""
        if self.levels is None:
            return {"levels": None}, "Gaussian forecasts"
        return {"levels": list(self.levels)}, f"quantiles of the levels {list_levels(self.levels)}"

    def record(self, method: str) -> dict[str, Any]:
        """Return one forecast's numbers, test, paired changes and remarks as plain data."""
        return super().record(method) | {"remarks": list(self.remarks.get(method, ()))}

    def digits(self, metric: str) -> int:
        """Return the number of decimals that shows four figures of a number in the units of the targets."""
        if metric in SHARE_ERRORS or metric.startswith("coverage_"):
            return 4
        sizes = [abs(x) for name in self.methods for i in [self.values[name][metric]] for x in (i.value, i.high)]
        largest = max((x for x in sizes if math.isfinite(x)), default=0.0)
        return 4 if not largest else min(max(3 - math.floor(math.log10(largest)), 0), 12)

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        coarse = [] if self.levels is None else [f"crps is an integral over only {len(self.levels)} levels."]
        if len(self.methods) == 1:
            return [self.verdict(), *self.remarks.get(self.methods[0], ()), *coarse]
        remarks = [f"{name}: {words}" for name, each in self.remarks.items() for words in each]
        return [*self.verdicts(), *remarks, *coarse]


def evaluate_forecasts(
    mean: ArrayLike | None = None,
    std: ArrayLike | None = None,
    targets: ArrayLike | None = None,
    *,
    quantiles: ArrayLike | None = None,
    levels: ArrayLike | None = None,
    coverage: Sequence[float] | None = None,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    **resampling: Unpack[ResamplingOptions],
) -> ForecastScores:
    """Score forecasts of a number against targets, with intervals and a test of calibration.

    Gaussian forecasts are `evaluate_forecasts(mean, std, targets)`. Quantile forecasts are
    `evaluate_forecasts(quantiles, levels, targets)`, by position or by keyword.

    - crps: ∫ (F(t) − 1[t ≥ y])² dt; for quantiles, twice the integral of the pinball loss over their levels.
    - pinball: the mean over the levels (for Gaussians 0.01 … 0.99) of max(τ·(y − q), (τ − 1)·(y − q)).
    - coverage_80: the share of targets in the central 80 % interval.
    - width_95: the mean width of the central 95 % interval.
    - sharpness: √mean σ².
    - pit_error: the mean of |P̂(y ≤ q_τ) − τ| over the levels.
    - interval_error: the same for central intervals.

    Parameters
    ----------
    mean
        Means of the forecasts, shape (n,), or quantiles, shape (n, m).
    std
        Standard deviations, shape (n,), or the m levels of the quantiles.
    targets
        Values that came true, shape (n,).
    quantiles
        Quantiles of the forecasts, shape (n, m), in place of `mean`.
    levels
        Levels of the quantiles, shape (m,), in place of `std`.
    coverage
        Levels of the central intervals in the table; with quantiles both of their ends must be among the levels.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    ForecastScores
        A table; ``scores["crps"]`` is an interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> mean, std = rng.normal(size=2000), np.ones(2000)
    >>> targets = mean + 1.5 * rng.normal(size=2000)
    >>> evaluate_forecasts(mean, std, targets)
    2,000 rows, Gaussian forecasts
    <BLANKLINE>
    metric           value     95 % interval
    crps            0.8761  [0.8453, 0.9069]
    nll              2.036    [1.970, 2.101]
    rmse             1.494    [1.450, 1.538]
    mae              1.206    [1.167, 1.244]
    pinball         0.4423  [0.4267, 0.4578]
    coverage_50     0.3285  [0.3083, 0.3494]
    coverage_80     0.6040  [0.5824, 0.6252]
    coverage_95     0.8120  [0.7943, 0.8285]
    width_95         3.920    [3.920, 3.920]
    sharpness        1.000    [1.000, 1.000]
    interval_error  0.1320  [0.1191, 0.1448]
    pit_error       0.0661  [0.0593, 0.0722]
    <BLANKLINE>
    Its 95 % intervals hold 81.2 % of the targets. It is miscalibrated: its intervals are too narrow ...

    References
    ----------
    Gneiting & Raftery (2007), Strictly proper scoring rules, prediction, and estimation.
    Gneiting, Balabdaoui & Raftery (2007), Probabilistic forecasts, calibration and sharpness.
    """
    if quantiles is not None or levels is not None:
        if mean is not None or std is not None:
            raise InputError("forecasts", "be mean and std, or quantiles and levels", "both")
        mean, std = quantiles, levels
        if mean is None or std is None:
            missing = "quantiles" if mean is None else "levels"
            raise InputError(missing, "come with " + ("levels" if mean is None else "quantiles"), "none")
    if mean is None or std is None or targets is None:
        names = [name for name, x in (("mean", mean), ("std", std), ("targets", targets)) if x is None]
        raise InputError(" and ".join(names), "be given", "none")
    forecast = {"forecast": (mean, std, targets)}
    return compare_forecasts(forecast, coverage=coverage, sample_weight=sample_weight, clusters=clusters, **resampling)


def compare_forecasts(
    forecasts: Mapping[str, tuple[Any, Any, Any]] | None = None,
    /,
    *,
    coverage: Sequence[float] | None = None,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    **methods: tuple[Any, Any, Any],
) -> ForecastScores:
    """Score several forecasts of the same targets, with paired differences from the first.

    If one forecast consists of quantiles, the Gaussian ones are scored by their quantiles at the same levels.

    Parameters
    ----------
    forecasts
        Forecasts by name, each a triple (mean, std, targets) or (quantiles, levels, targets).
    coverage
        Levels of the central intervals in the table; with quantiles both of their ends must be among the levels.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).
    level
        Level of the intervals, such as 0.95.
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.
    **methods
        Further forecasts by keyword.

    Returns
    -------
    ForecastScores
        A table; ``scores.changes["scaled"]["crps"]`` is the paired difference from the first forecast.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> mean, y = np.zeros(1000), 2 * rng.normal(size=1000)
    >>> scores = compare_forecasts(raw=(mean, np.ones(1000), y), wider=(mean, np.full(1000, 2.0), y))
    >>> change = scores.changes["wider"]["crps"]
    >>> print(f"{change.value:.3f}, {change.low:.3f} to {change.high:.3f}")
    -0.083, -0.098 to -0.067
    """
    named = {**(forecasts or {}), **methods}
    if not named:
        raise ValueError("compare_forecasts needs at least one: compare_forecasts(raw=(mean, std, targets), …)")
    resampling = Resampling(level, n_resamples, seed)
    tail = resampling.tail
    checked = {name: _check(name if len(named) > 1 else "", triple) for name, triple in named.items()}
    common = _common_levels(checked)
    first_name, first = next(iter(checked.items()))
    for name, other in checked.items():
        _check_same_targets(first_name, first.targets, name, other.targets)
    w = as_weights(sample_weight, len(first.targets))
    of_row = weighted_clusters(clusters, w, len(first.targets), min_clusters=2)
    if w is not None and (w == 0).any():
        kept = w > 0
        checked, w = {name: each.take(kept) for name, each in checked.items()}, w[kept]
        first = checked[first_name]
    groups = RowGroups.of(len(first.targets), w, seed, of_row)
    values: dict[str, dict[str, Interval]] = {}
    tests, changes, remarks = {}, {}, {}
    scored_first: ScoredForecast | None = None
    for name, forecast in checked.items():
        if common is not None:
            forecast = forecast.to_quantiles(common)
        scored = ScoredForecast.of(forecast, coverage, groups, resampling)
        values[name] = {metric: Interval(*scored.interval(metric, tail), level) for metric in scored.metrics}
        tests[name] = _test(scored, resampling)
        if scored.remarks:
            remarks[name] = scored.remarks
        if scored_first is None:
            scored_first = scored
            continue
        shared = [metric for metric in scored.metrics if metric in scored_first.metrics]
        changes[name] = {metric: Interval(*scored.change(scored_first, metric, tail), level) for metric in shared}
    return ForecastScores(
        len(first.targets),
        level,
        values,
        tests,
        changes,
        levels=None if common is None else tuple(float(q) for q in common),
        effective_rows=None if w is None else effective_rows(w, len(w)),
        remarks=remarks,
        clusters=None if of_row is None else of_row.count,
        cluster_name=ForecastScores.cluster_name if of_row is None else of_row.name,
    )


def _check(name: str, triple: Any) -> Forecast:
    try:
        mean, std, targets = triple
    except (TypeError, ValueError):
        expected = "be a triple (mean, std, targets) or (quantiles, levels, targets)"
        raise InputError(name or "the forecast", expected, type(triple).__name__) from None
    try:
        return check_forecast(mean, std, targets)
    except InputError as error:
        raise (error.replace(where=name) if name else error) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _common_levels(checked: Mapping[str, Forecast]) -> np.ndarray | None:
    shared: tuple[str, np.ndarray] | None = None
    for name, forecast in checked.items():
        if forecast.levels is None:
            continue
        if shared is not None and not np.array_equal(shared[1], forecast.levels):
            expected = f"be those of {shared[0]}, {list_levels(shared[1])}"
            raise InputError(f"the levels of {name}", expected, list_levels(forecast.levels))
        shared = shared or (name, forecast.levels)
    return None if shared is None else shared[1]


def _check_same_targets(first: str, expected: np.ndarray, name: str, targets: np.ndarray) -> None:
    if len(expected) != len(targets):
        raise InputError(name, f"have the {len(expected)} rows that {first} has", str(len(targets)))
    differ = np.flatnonzero(expected != targets)
    if len(differ):
        row = int(differ[0])
        got = f"{targets[row]:g} in row {row} where {first} has {expected[row]:g} ({len(differ)} rows differ)"
        raise InputError(name, f"have the targets of {first}, to be compared row by row", got)


def _test(scored: ScoredForecast, resampling: Resampling) -> ForecastTest:
    """Test calibration: compare the PIT error with those of PITs drawn under calibration."""
    shares, w, n_resamples = scored.shares["pit_error"], scored.groups.sample_weight, resampling.n_resamples
    n = effective_rows(w, len(scored.pit))
    inner = shares.levels[(shares.levels > 0) & (shares.levels < 1)]
    cell_probs = np.diff(np.concatenate([[0.0], inner, [1.0]]))
    drawn = np.random.default_rng([resampling.seed, 1]).multinomial(max(round(n), 1), cell_probs, size=n_resamples)
    below = np.cumsum(drawn[:, :-1], axis=1) / max(round(n), 1)
    # The mean runs over all levels; the gap at 0 and 1 is 0.
    errors = np.abs(below - inner).sum(axis=1) / len(shares.levels)
    observed = shares.bins.observed("ece")
    drawn_errors = [errors]
    if scored.groups.clustered:  # correlated rows show at least as much as independent ones
        drawn_errors.append(np.abs(shares.noise).mean(axis=1))
    p_value = max((1 + int((each >= observed * (1 - 1e-12)).sum())) / (n_resamples + 1) for each in drawn_errors)
    expected = max(float(each.mean()) for each in drawn_errors)
    # Moments of the PIT under calibration: uniform, or at the middles of the cells between the levels.
    middle, mass = (scored.cells[1:] + scored.cells[:-1]) / 2 - 0.5, np.diff(scored.cells)
    second, fourth = (float(mass @ middle**power) for power in (2, 4))
    u = scored.pit - 0.5
    moments = [(u, 0.0, second), (u**2, second, fourth - second**2)]
    z = []
    for x, true_mean, variance in moments:
        blocks = scored.groups.of_block(x)
        noise = max(math.sqrt(variance / n), 0.0 if blocks is None else mean_error(*blocks))
        z.append((float(np.average(x, weights=w)) - true_mean) / noise if variance > 1e-12 else 0.0)
    mean_pit = float(np.average(scored.pit, weights=w))
    return ForecastTest(p_value, expected, mean_pit, z[0], z[1], n_resamples)
