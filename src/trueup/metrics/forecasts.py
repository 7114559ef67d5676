"""The table of `evaluate_forecasts` and `compare_forecasts`: how good and how honest forecasts of a number are.

A forecast is a Gaussian N(μ, σ²), given as `mean, std, targets`, or a list of quantiles, given as `quantiles, levels,
targets`. Every number of the table is a mean over the rows, the root of one, or an error of shares; the noise of the
errors is simulated from sums over at most a thousand groups of rows, so that a million rows cost one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from trueup.core.arrays import as_matrix, as_vector, as_weights, effective_rows
from trueup.core.clusters import Clusters, mean_error, weighted_clusters
from trueup.core.errors import InputError
from trueup.core.formatting import format_percent
from trueup.core.tally import Mean
from trueup.metrics.intervals import Interval, _mean_interval
from trueup.metrics.resampling import BootstrapBins, check_resamples, paired_interval, tail_share
from trueup.metrics.table import ScoreTable, plain_record

__all__ = [
    "COVERAGE",
    "LEVELS",
    "ForecastScores",
    "ForecastTest",
    "central_coverage",
    "compare_forecasts",
    "evaluate_forecasts",
    "pit",
]

COVERAGE = (0.5, 0.8, 0.95)
"""The levels of the central intervals in the table, unless said otherwise."""
LEVELS = np.linspace(0.01, 0.99, 99)
"""The levels over which the pinball loss of a Gaussian forecast is averaged."""
ENOUGH_ROWS = 150
"""With so many rows the test of calibration finds a median that 60 % of the targets lie below in four of five cases."""
_GRID = np.linspace(0.0, 1.0, 100)
"""The levels over which calibration errors of Gaussian forecasts are averaged, as `mean_calibration_error` has it."""
_GROUPS = 1000
_ERRORS = ("interval_error", "pit_error")
_CERTAIN = 1e8
"""Beyond so many standard deviations a forecast counts as a point: the formulas' digits are gone by then."""


@dataclass(frozen=True)
class ForecastTest:
    """The test of calibration: were targets drawn from the forecasts, what PIT error would they show?"""

    p_value: float
    """The chance that calibrated forecasts show as large an error."""
    expected: float
    """What calibrated forecasts show on average."""
    mean_pit: float
    bias_z: float
    """How many standard errors the mean of the PIT lies above ½: the targets lie above the forecasts."""
    spread_z: float
    """How many standard errors the spread of the PIT lies above a uniform one's: the intervals are too narrow."""
    n_resamples: int


@dataclass(frozen=True, eq=False, repr=False)
class ForecastScores(ScoreTable):
    """Metrics of one or several forecasts of the same targets, with intervals, tests and paired differences.

    `scores["crps"]` is the Interval of the only forecast, `scores["scaled", "crps"]` of one of several.
    """

    rows: int
    level: float
    values: Mapping[str, Mapping[str, Interval]]
    """By method, then by metric."""
    tests: Mapping[str, ForecastTest]
    changes: Mapping[str, Mapping[str, Interval]]
    """By method but the first: how much each metric differs from the first method's, paired."""
    levels: tuple[float, ...] | None = None
    """The levels of the quantiles; None of Gaussian forecasts."""
    effective_rows: float | None = None
    """(Σw)²/Σw², where the rows have weights."""
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By method: what a reader should know of the rows."""
    clusters: int | None = None
    """How many clusters the rows are of, where these were given; intervals and tests are then by cluster."""
    cluster_name: str = "cluster"
    """What a cluster is, such as a patient."""

    def verdict(self, method: str | None = None) -> str:
        """One or two sentences on whether a forecast is calibrated."""
        name = method or self.methods[0]
        test, says = self.tests[name], self._coverage_words(name)
        chance = f"p {'=' if test.p_value > 0.001 else '≤'} {test.p_value:.3f}"
        by = "" if self.clusters is None else f" by {self.cluster_name}"
        shown = f"a calibrated forecast would show a PIT error of {test.expected:.4f}; consistency test{by} {chance}"
        if test.n_resamples < 19:
            return f"{says}{test.n_resamples} resamples are too few for a test at 5 %: it takes 19."
        if test.p_value > 0.05 and (self.effective_rows or self.rows) < ENOUGH_ROWS:
            told = f"{self.rows:,} row is" if self.rows == 1 else f"{self.rows:,} rows are"
            return (
                f"{says}{told} too few to tell whether it is calibrated (consistency test{by} {chance}): with about "
                f"{ENOUGH_ROWS} a median that 60 % of the targets lie below would be found in four of five cases."
            )
        if test.p_value > 0.05:
            return f"{says}Nothing speaks against calibration ({shown})."
        return f"{says}It is miscalibrated: {self._direction(name)} ({shown})."

    def _gaps(self, name: str) -> dict[float, float]:
        """Level of a central interval in per cent → by how many standard errors its coverage lies above it."""
        found = {}
        for metric, covered in self.values[name].items():
            if metric.startswith("coverage_"):
                level = _percent_of(metric) / 100
                rows, far = self.effective_rows or self.rows, covered.value - level
                alone = far / math.sqrt(level * (1 - level) / rows)
                # By cluster only what its interval excludes is off.
                held = self.clusters is not None and covered.low <= level <= covered.high
                found[100 * level] = 0.0 if held else alone
        return found

    def _coverage_words(self, name: str) -> str:
        """The coverage of the interval that is furthest off or, where none is, of the widest."""
        gaps = self._gaps(name)
        if not gaps:
            return ""
        worst = max(gaps, key=lambda level: abs(gaps[level]))
        level = worst if abs(gaps[worst]) > 1.96 else max(gaps)
        share = self.values[name][f"coverage_{level:g}"].value
        return f"Its {level:g} % intervals hold {format_percent(share, 1)} of the targets. "

    def _direction(self, name: str) -> str:
        """In which way it is wrong, in words."""
        test, words = self.tests[name], []
        if abs(test.bias_z) > 1.96:
            words.append(f"its forecasts are too {'low' if test.bias_z > 0 else 'high'}")
        off = {level: gap for level, gap in self._gaps(name).items() if abs(gap) > 1.96}
        wide, narrow = ([f"{level:g} %" for level, gap in off.items() if side * gap > 0] for side in (1, -1))
        if wide and narrow:
            words.append(f"its intervals of {', '.join(wide)} are too wide and those of {', '.join(narrow)} too narrow")
        elif wide or narrow or abs(test.spread_z) > 1.96:
            is_narrow = bool(narrow) if wide or narrow else test.spread_z > 0
            words.append(f"its intervals are too {'narrow' if is_narrow else 'wide'}")
        return " and ".join(words) or "right in the mean and in the spread, but its distributions have the wrong shape"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        return {
            "schema": 1,
            "rows": self.rows,
            "levels": None if self.levels is None else list(self.levels),
            "effective_rows": self.effective_rows,
            **({} if self.clusters is None else {"clusters": self.clusters, "cluster_name": self.cluster_name}),
            "level": self.level,
            "methods": {
                name: {
                    "metrics": {metric: plain_record(asdict(i)) for metric, i in self.values[name].items()},
                    "test": plain_record(asdict(self.tests[name])),
                    "change": {metric: plain_record(asdict(i)) for metric, i in self.changes.get(name, {}).items()},
                    "remarks": list(self.remarks.get(name, ())),
                }
                for name in self.methods
            },
        }

    def caption(self) -> str:
        """How much was scored."""
        worth = "" if self.effective_rows is None else f" (weighted, worth {self.effective_rows:,.0f})"
        caption = f"{_rows(self.rows)}{worth}, {_kind_words(self.levels)}"
        if self.clusters is None:
            return caption
        named = "" if self.cluster_name == "cluster" else f" ({self.cluster_name})"
        return f"{caption}, {self.clusters:,} clusters{named}: intervals by {self.cluster_name}"

    def digits(self, metric: str) -> int:
        """As many as show four figures of what has the units of the targets."""
        if metric in _ERRORS or metric.startswith("coverage_"):
            return 4
        sizes = [abs(x) for name in self.methods for i in [self.values[name][metric]] for x in (i.value, i.high)]
        largest = max((x for x in sizes if math.isfinite(x)), default=0.0)
        return 4 if not largest else min(max(3 - math.floor(math.log10(largest)), 0), 12)

    def notes(self) -> list[str]:
        """What is said below the table."""
        coarse = [] if self.levels is None else [f"crps is an integral over {len(self.levels)} levels, no finer."]
        if len(self.methods) == 1:
            return [self.verdict(), *self.remarks.get(self.methods[0], ()), *coarse]
        notes = ["\n".join(f"{name}: {self.verdict(name)}" for name in self.methods)]
        if len(self.methods) > 2:
            notes.insert(
                0, f"* differs from {self.methods[0]}: the paired {format_percent(self.level)} interval excludes 0."
            )
        return [*notes, *(f"{name}: {words}" for name, each in self.remarks.items() for words in each), *coarse]


def evaluate_forecasts(
    mean: Any = None,
    std: Any = None,
    targets: Any = None,
    *,
    quantiles: Any = None,
    levels: Any = None,
    coverage: Sequence[float] | None = None,
    weights: Any = None,
    clusters: Any = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> ForecastScores:
    """Score forecasts of numbers against targets (n,), with intervals and a test of calibration.

    Gaussian forecasts are `evaluate_forecasts(mean, std, targets)`, three vectors (n,). Quantiles (n, m) with their m
    levels are `evaluate_forecasts(quantiles, levels, targets)`, or by keyword. `coverage` are the levels of the central
    intervals in the table; those of quantiles must be there as a pair of levels. `weights` has one number a row;
    intervals and tests then count (Σw)²/Σw² rows. `clusters`, one value a row or a mapping {"patient": values}, say
    which rows are correlated; intervals and tests are then by cluster.

    crps is ∫ (F(t) − 1[t ≥ y])² dt; of quantiles 2·∫ pinball loss over the levels that are there. pinball is the mean
    over the levels (of Gaussians 0.01 … 0.99) of max(τ·(y − q), (τ − 1)·(y − q)). coverage_80 is the share of targets
    in the central 80 % interval, width_95 a mean width, sharpness √mean σ². pit_error is the mean of |P̂(y ≤ q_τ) − τ|
    over the levels, interval_error the same of central intervals.

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

    Gneiting and Raftery (2007); Gneiting, Balabdaoui and Raftery (2007), on the PIT.
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
    return compare_forecasts(
        {"forecast": (mean, std, targets)},
        coverage=coverage,
        weights=weights,
        clusters=clusters,
        level=level,
        n_resamples=n_resamples,
        seed=seed,
    )


def compare_forecasts(
    forecasts: Mapping[str, tuple[Any, Any, Any]] | None = None,
    /,
    *,
    coverage: Sequence[float] | None = None,
    weights: Any = None,
    clusters: Any = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    **methods: tuple[Any, Any, Any],
) -> ForecastScores:
    """Score several forecasts of the same targets, with paired differences from the first.

    Each is a triple, (mean, std, targets) or (quantiles, levels, targets), given by keyword or in one mapping. Where
    one of them is of quantiles, the Gaussian ones are scored by their quantiles of the same levels, so that all are
    judged alike. The other options are those of `evaluate_forecasts`.

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
    tail = tail_share(level)
    check_resamples(n_resamples)
    checked = {name: _check(name if len(named) > 1 else "", triple) for name, triple in named.items()}
    common = _common_levels(checked)
    first_name, first = next(iter(checked.items()))
    for name, other in checked.items():
        _check_same_targets(first_name, first.targets, name, other.targets)
    w = as_weights(weights, len(first.targets))
    together = weighted_clusters(clusters, w, len(first.targets), at_least=2)
    if w is not None and (w == 0).any():
        kept = w > 0
        checked, w = {name: each.take(kept) for name, each in checked.items()}, w[kept]
        first = checked[first_name]
    groups = _Groups.of(len(first.targets), w, seed, together)
    values: dict[str, dict[str, Interval]] = {}
    tests, changes, remarks = {}, {}, {}
    scored_first: _Scored | None = None
    for name, forecast in checked.items():
        if common is not None and isinstance(forecast, GaussianForecast):
            forecast = forecast.to_quantiles(common)
        scored = _Scored.of(forecast, coverage, groups, n_resamples, seed)
        values[name] = {metric: Interval(*scored.interval(metric, tail), level) for metric in scored.metrics}
        tests[name] = _test(scored, n_resamples, seed)
        if scored.remarks:
            remarks[name] = scored.remarks
        if scored_first is None:
            scored_first = scored
            continue
        changes[name] = {
            metric: Interval(*_difference(scored_first, scored, metric, tail), level)
            for metric in scored.metrics
            if metric in scored_first.metrics
        }
    worth = None if w is None else effective_rows(w, len(w))
    held = None if common is None else tuple(float(q) for q in common)
    of_clusters = () if together is None else (together.count, together.name)
    return ForecastScores(len(first.targets), level, values, tests, changes, held, worth, remarks, *of_clusters)


def pit(mean: Any, std: Any, targets: Any) -> np.ndarray:
    """The probability integral transform F(y) of each row, uniform on [0, 1] if the forecasts are calibrated.

    It takes what `evaluate_forecasts` takes. Of quantiles it is the middle of the two levels between which the target
    lies.

    >>> pit([0.0, 0.0], [1.0, 1.0], [0.0, 2.0]).round(4)
    array([0.5   , 0.9772])

    Dawid (1984); Gneiting, Balabdaoui and Raftery (2007).
    """
    forecast = check_forecast(mean, std, targets)
    if isinstance(forecast, QuantileForecast):
        cells = np.concatenate([[0.0], forecast.levels, [1.0]])
        below: np.ndarray = (forecast.targets[:, None] > forecast.quantiles).sum(axis=1)
        return ((cells[1:] + cells[:-1]) / 2)[below]
    error = forecast.targets - forecast.mean
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values: np.ndarray = ndtr(np.where(error == 0, 0.0, error / forecast.std))
    return values


def central_coverage(mean: Any, std: Any, targets: Any, *, weights: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The levels of central intervals, and the share of targets in each; of quantiles those that are pairs of levels.

    >>> levels, share = central_coverage(np.zeros(2), np.ones(2), [0.5, 3.0])
    >>> levels[[0, 9, 18]], share[[0, 9, 18]]
    (array([0.05, 0.5 , 0.95]), array([0. , 0.5, 0.5]))
    """
    forecast = check_forecast(mean, std, targets)
    w, y = as_weights(weights, len(forecast.targets)), forecast.targets
    if isinstance(forecast, GaussianForecast):
        levels = np.arange(1, 20) / 20
        error = np.abs(y - forecast.mean)
        inside = [error <= float(ndtri((1 + level) / 2)) * forecast.std for level in levels]
    else:
        pairs, q = _central_pairs(forecast.levels), forecast.quantiles
        levels = np.array(list(pairs))
        inside = [(q[:, low] <= y) & (y <= q[:, high]) for low, high in pairs.values()]
    return levels, np.array([float(np.average(each, weights=w)) for each in inside])


@dataclass(frozen=True, eq=False)
class GaussianForecast:
    """Means, standard deviations and targets, checked."""

    mean: np.ndarray
    std: np.ndarray
    targets: np.ndarray

    def take(self, rows: np.ndarray) -> GaussianForecast:
        """Some rows."""
        return GaussianForecast(self.mean[rows], self.std[rows], self.targets[rows])

    def to_quantiles(self, levels: np.ndarray) -> QuantileForecast:
        """Its quantiles of these levels."""
        return QuantileForecast(self.mean[:, None] + self.std[:, None] * ndtri(levels), levels, self.targets)


@dataclass(frozen=True, eq=False)
class QuantileForecast:
    """Quantiles (n, m) with their levels in rising order, and targets, checked."""

    quantiles: np.ndarray
    levels: np.ndarray
    targets: np.ndarray

    def take(self, rows: np.ndarray) -> QuantileForecast:
        """Some rows."""
        return QuantileForecast(self.quantiles[rows], self.levels, self.targets[rows])


def check_forecast(mean: Any, std: Any, targets: Any) -> GaussianForecast | QuantileForecast:
    """Check a forecast: vectors (mean, std, targets), or a matrix of quantiles with its levels and targets."""
    if np.ndim(mean) == 2 and np.ndim(std) == 1:
        return _check_quantiles(mean, std, targets)
    m = as_vector(mean, "mean").numpy()
    if not len(m):
        raise InputError("mean", "have at least one row", "none")
    s = as_vector(std, "std", length=len(m)).numpy()
    if s.min() < 0:
        at = int(s.argmin())
        raise InputError("std", "not be negative", f"{s[at]:g} in row {at}")
    return GaussianForecast(m, s, as_vector(targets, "targets", length=len(m)).numpy())


def _check_quantiles(quantiles: Any, levels: Any, targets: Any) -> QuantileForecast:
    tau = as_vector(levels, "levels").numpy()
    y = as_vector(targets, "targets").numpy()
    q = as_matrix(quantiles, "quantiles", rows=len(y)).double().cpu().numpy()
    if not len(y):
        raise InputError("targets", "have at least one row", "none")
    if q.shape[1] != len(tau):
        raise InputError("levels", f"be {q.shape[1]}, one for each column of quantiles", str(len(tau)))
    if not len(tau) or tau.min() <= 0 or tau.max() >= 1:
        got = f"{tau.min():g}..{tau.max():g}" if len(tau) else "none"
        raise InputError("levels", "lie between 0 and 1", got, "divide per cent by 100" if got != "none" else None)
    order = np.argsort(tau)
    tau = tau[order]
    if (np.diff(tau) <= 0).any():
        raise InputError("levels", "differ from each other", f"{tau[int(np.argmin(np.diff(tau)))]:g} twice")
    return QuantileForecast(q[:, order], tau, y)


def _check(name: str, triple: Any) -> GaussianForecast | QuantileForecast:
    try:
        mean, std, targets = triple
    except (TypeError, ValueError):
        wanted = "be a triple (mean, std, targets) or (quantiles, levels, targets)"
        raise InputError(name or "the forecast", wanted, type(triple).__name__) from None
    try:
        return check_forecast(mean, std, targets)
    except InputError as error:
        raise (error.replace(where=name) if name else error) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _common_levels(checked: Mapping[str, GaussianForecast | QuantileForecast]) -> np.ndarray | None:
    found: tuple[str, np.ndarray] | None = None
    for name, forecast in checked.items():
        if isinstance(forecast, GaussianForecast):
            continue
        if found is not None and not np.array_equal(found[1], forecast.levels):
            raise InputError(
                f"the levels of {name}", f"be those of {found[0]}, {_list(found[1])}", _list(forecast.levels)
            )
        found = found or (name, forecast.levels)
    return None if found is None else found[1]


def _check_same_targets(first: str, expected: np.ndarray, name: str, targets: np.ndarray) -> None:
    if len(expected) != len(targets):
        raise InputError(name, f"have the {len(expected)} rows that {first} has", str(len(targets)))
    differ = np.flatnonzero(expected != targets)
    if len(differ):
        row = int(differ[0])
        raise InputError(
            name,
            f"have the targets of {first}, to be compared row by row",
            f"{targets[row]:g} in row {row} where {first} has {expected[row]:g} ({len(differ)} rows differ)",
        )


@dataclass(frozen=True, eq=False)
class _Groups:
    """Rows gathered by cluster, or at random into at most a thousand groups; their sums show how sums vary."""

    index: np.ndarray
    count: int
    weights: np.ndarray | None
    rows: np.ndarray
    """The weight of each group."""
    clustered: bool = False

    @classmethod
    def of(cls, n: int, weights: np.ndarray | None, seed: int, clusters: Clusters | None = None) -> _Groups:
        if clusters is not None:
            index = clusters.block
        else:
            index = np.arange(n) if n <= _GROUPS else np.random.default_rng(seed).permutation(n) % _GROUPS
        count = int(index.max()) + 1
        rows = np.bincount(index, weights, minlength=count).astype(np.float64)
        return cls(index, count, weights, rows, clusters is not None)

    def of_block(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Σ w·value and Σ w of each cluster; None where rows are independent."""
        return (self.sums(values), self.rows) if self.clustered else None

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Σ w·value of each group."""
        weighted = values if self.weights is None else self.weights * values
        return np.bincount(self.index, weighted, minlength=self.count)

    def cell_sums(self, cell: np.ndarray, cells: int) -> np.ndarray:
        """Σ w of each group in each cell, (groups, cells)."""
        flat = np.bincount(self.index * cells + cell, self.weights, minlength=self.count * cells)
        return flat.reshape(self.count, cells).astype(np.float64)


class _Shares(NamedTuple):
    """At each level: the share of targets below the quantile, or inside the interval; and how it varies."""

    levels: np.ndarray
    share: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, levels: np.ndarray, sums: np.ndarray, groups: _Groups, n_resamples: int, seed: int) -> _Shares:
        """From the sums of each group, (groups, levels)."""
        total = groups.rows.sum()
        share = sums.sum(axis=0) / total
        apart = (sums - groups.rows[:, None] * share) / total * math.sqrt(groups.count / max(groups.count - 1, 1))
        drawn = np.random.default_rng(seed).standard_normal((n_resamples, groups.count))
        return cls(levels, share, drawn @ apart)

    @property
    def bins(self) -> BootstrapBins:
        """In the form whose expected error is the mean of |share − level|, and which knows what noise adds to it."""
        ones = np.ones(len(self.levels))
        return BootstrapBins(ones, 0 * ones, self.share - self.levels, self.noise)


@dataclass(frozen=True, eq=False)
class _Scored:
    """A forecast after its one pass: what each row adds to each number of the table."""

    metrics: tuple[str, ...]
    means: Mapping[str, np.ndarray]
    """Of metrics that are means over the rows."""
    squares: Mapping[str, np.ndarray]
    """Of metrics that are roots of means."""
    shares: Mapping[str, _Shares]
    """Of metrics that are errors of shares."""
    pit: np.ndarray
    cells: np.ndarray
    """The levels between which the PIT is known, with 0 and 1."""
    groups: _Groups
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls,
        forecast: GaussianForecast | QuantileForecast,
        coverage: Sequence[float] | None,
        groups: _Groups,
        n_resamples: int,
        seed: int,
    ) -> _Scored:
        if isinstance(forecast, GaussianForecast):
            return _score_gaussian(forecast, _coverage_levels(coverage), groups, n_resamples, seed)
        return _score_quantiles(forecast, coverage, groups, n_resamples, seed)

    def interval(self, metric: str, tail: float) -> tuple[float, float, float]:
        """A metric's value and the ends of its interval."""
        w = self.groups.weights
        if metric in self.shares:
            bins = self.shares[metric].bins
            value = bins.observed("ece")
            return (value, *(bins.interval("ece", tail) if len(self.pit) > 1 else (math.nan, math.nan)))
        if metric in self.squares:
            mean = Mean.of(self.squares[metric], w)
            ends = _mean_interval(metric, mean, tail, self.groups.of_block(self.squares[metric]))
            low, high = (end if math.isnan(end) else math.sqrt(max(end, 0.0)) for end in ends)
            return math.sqrt(mean.value), low, high
        mean = Mean.of(self.means[metric], w)
        kind = "observed" if metric.startswith("coverage_") else metric
        low, high = _mean_interval(kind, mean, tail, self.groups.of_block(self.means[metric]))
        return mean.value, low if metric == "nll" else max(low, 0.0), high  # NaN stays: max(NaN, 0) is NaN


def _difference(first: _Scored, second: _Scored, metric: str, tail: float) -> tuple[float, float, float]:
    """How much a metric differs between two forecasts of the same rows, and the ends of the paired interval."""
    w = first.groups.weights
    value = second.interval(metric, tail)[0] - first.interval(metric, tail)[0]
    if metric in first.shares:
        if len(first.pit) < 2:
            return value, math.nan, math.nan
        return (value, *paired_interval(first.shares[metric].bins, second.shares[metric].bins, "ece", tail))
    rows = []
    for one in (first, second):
        if metric in one.squares:  # the root's derivative, so that the paired rows add up
            root = math.sqrt(Mean.of(one.squares[metric], w).value)
            rows.append(one.squares[metric] / (2 * root) if root else one.squares[metric])
        else:
            rows.append(one.means[metric])
    change = rows[1] - rows[0]
    low, high = _mean_interval("difference", Mean.of(change, w), tail, first.groups.of_block(change))
    return value, value - (high - low) / 2, value + (high - low) / 2


def _test(scored: _Scored, n_resamples: int, seed: int) -> ForecastTest:
    """Draw PITs as calibrated forecasts would have them: how large is the mean error at the same levels?"""
    shares, w = scored.shares["pit_error"], scored.groups.weights
    n = effective_rows(w, len(scored.pit))
    inner = shares.levels[(shares.levels > 0) & (shares.levels < 1)]
    chances = np.diff(np.concatenate([[0.0], inner, [1.0]]))
    drawn = np.random.default_rng([seed, 1]).multinomial(max(round(n), 1), chances, size=n_resamples)
    below = np.cumsum(drawn[:, :-1], axis=1) / max(round(n), 1)
    # Over all levels, also those of 0 and 1, whose gap is none.
    errors = np.abs(below - inner).sum(axis=1) / len(shares.levels)
    observed = shares.bins.observed("ece")
    drawn_errors = [errors]
    if scored.groups.clustered:  # correlated rows show more, and never less than independent ones
        drawn_errors.append(np.abs(shares.noise).mean(axis=1))
    p_value = max((1 + int((each >= observed * (1 - 1e-12)).sum())) / (n_resamples + 1) for each in drawn_errors)
    shown = max(float(each.mean()) for each in drawn_errors)
    # The moments of a calibrated forecast's PIT: uniform, or at the middles of the cells between the levels.
    middle, mass = (scored.cells[1:] + scored.cells[:-1]) / 2 - 0.5, np.diff(scored.cells)
    second, fourth = (float(mass @ middle**power) for power in (2, 4))
    u = scored.pit - 0.5
    known = [(u, 0.0, second), (u**2, second, fourth - second**2)]
    z = []
    for x, expected, variance in known:
        blocks = scored.groups.of_block(x)
        noise = max(math.sqrt(variance / n), 0.0 if blocks is None else mean_error(*blocks))
        z.append((float(np.average(x, weights=w)) - expected) / noise if variance > 1e-12 else 0.0)
    mean_pit = float(np.average(scored.pit, weights=w))
    return ForecastTest(p_value, shown, mean_pit, z[0], z[1], n_resamples)


def _coverage_levels(coverage: Sequence[float] | None) -> tuple[float, ...]:
    levels = COVERAGE if coverage is None else tuple(as_vector(coverage, "coverage").tolist())
    if any(not 0 < level < 1 for level in levels):
        got = ", ".join(f"{level:g}" for level in levels)
        raise InputError("coverage", "lie between 0 and 1", got, "divide per cent by 100")
    return tuple(sorted(set(levels)))


def _score_gaussian(
    forecast: GaussianForecast, coverage: tuple[float, ...], groups: _Groups, n_resamples: int, seed: int
) -> _Scored:
    m, s, y = forecast.mean, forecast.std, forecast.targets
    error = y - m
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        z = np.where(error == 0, 0.0, error / s)  # a certain forecast is right, or infinitely far off
    sure = ~(np.abs(z) < _CERTAIN)
    near = np.where(sure, 0.0, z)
    pit = ndtr(z)
    density = np.exp(-0.5 * near**2) / math.sqrt(2 * math.pi)
    crps = s * (near * (2 * ndtr(near) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    means = {"crps": np.where(sure, np.abs(error) - s / math.sqrt(math.pi), crps)}
    remarks: list[str] = []
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        nll = 0.5 * math.log(2 * math.pi) + np.log(s) + 0.5 * z**2
    if np.isfinite(nll).all():
        means["nll"] = nll
    else:
        zero, several = int((s == 0).sum()), int((~np.isfinite(nll)).sum())
        what = f"std is 0 in {_rows(zero)}" if zero else f"std is too small beside the error in {_rows(several)}"
        remarks.append(f"nll is not defined: {what}, where a density has no finite value. The other numbers hold.")
        means["nll"] = np.full(len(y), math.nan)
    means["mae"], means["pinball"] = np.abs(error), scaled_pinball(error, s, LEVELS, ndtri(LEVELS))
    names = []
    for level in coverage:
        half = float(ndtri((1 + level) / 2))
        names.append(f"coverage_{100 * level:g}")
        means[names[-1]] = (np.abs(z) <= half).astype(np.float64)
    if coverage:
        names.append(f"width_{100 * coverage[-1]:g}")
        means[names[-1]] = 2 * float(ndtri((1 + coverage[-1]) / 2)) * s
    bounds = {"interval_error": (np.abs(z), ndtri((1 + _GRID) / 2)), "pit_error": (z, ndtri(_GRID))}
    shares = {}
    for name, (values, bound) in bounds.items():
        cell = np.minimum(np.searchsorted(bound, values, side="left"), len(_GRID) - 1)
        sums = np.cumsum(groups.cell_sums(cell, len(_GRID)), axis=1)
        shares[name] = _Shares.of(_GRID, sums, groups, n_resamples, seed)
    metrics = ("crps", "nll", "rmse", "mae", "pinball", *names, "sharpness", *_ERRORS)
    squares = {"rmse": error**2, "sharpness": s**2}
    return _Scored(metrics, means, squares, shares, pit, np.linspace(0, 1, 10_001), groups, tuple(remarks))


def scaled_pinball(error: np.ndarray, std: np.ndarray, levels: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The mean over levels of the pinball loss of the quantiles μ + σ·bound, from y − μ and σ, one a row.

    It is straight in z = (y − μ)/σ between the bounds, so that sums of those above z are enough.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        z = np.where(error == 0, 0.0, error / std)
    sure, mean_level = ~(np.abs(z) < _CERTAIN), float(levels.mean())
    z = np.where(sure, 0.0, z)
    above = len(bounds) - np.searchsorted(bounds, z, side="right")
    totals = np.concatenate([[0.0], np.cumsum(bounds[::-1])])
    scaled = z * levels.sum() - float(levels @ bounds) - (above * z - totals[above])
    point = np.where(error > 0, mean_level * error, (mean_level - 1) * error)
    return np.where(sure | (std == 0), point, std * scaled / len(bounds))


def _score_quantiles(
    forecast: QuantileForecast, coverage: Sequence[float] | None, groups: _Groups, n_resamples: int, seed: int
) -> _Scored:
    q, tau, y = forecast.quantiles, forecast.levels, forecast.targets
    ends = np.concatenate([[0.0], (tau[1:] + tau[:-1]) / 2, [1.0]])
    cell_width = np.diff(ends)
    pinball, crps = np.zeros(len(y)), np.zeros(len(y))
    below = np.empty((groups.count, len(tau)))
    rank = np.zeros(len(y), np.int64)
    for k, level in enumerate(tau):
        error = y - q[:, k]
        loss = np.maximum(level * error, (level - 1) * error)
        pinball += loss / len(tau)
        crps += 2 * cell_width[k] * loss
        below[:, k] = groups.sums((error <= 0).astype(np.float64))
        rank += error > 0
    means = {"crps": crps, "pinball": pinball}
    median = np.flatnonzero(np.isclose(tau, 0.5, rtol=0, atol=1e-9))
    if len(median):
        means["mae"] = np.abs(y - q[:, median[0]])
    pairs = _central_pairs(tau)
    chosen = _chosen_pairs(pairs, coverage)
    inside = np.empty((groups.count, len(pairs)))
    for column, (level, (low, high)) in enumerate(pairs.items()):
        covered = ((q[:, low] <= y) & (y <= q[:, high])).astype(np.float64)
        inside[:, column] = groups.sums(covered)
        if level in chosen:
            means[f"coverage_{100 * level:g}"] = covered
    if chosen:
        low, high = pairs[chosen[-1]]
        means[f"width_{100 * chosen[-1]:g}"] = np.abs(q[:, high] - q[:, low])
    shares = {}
    if pairs:
        shares["interval_error"] = _Shares.of(np.array(list(pairs)), inside, groups, n_resamples, seed)
    shares["pit_error"] = _Shares.of(tau, below, groups, n_resamples, seed)
    cells = np.concatenate([[0.0], tau, [1.0]])
    pit = ((cells[1:] + cells[:-1]) / 2)[rank]
    remarks = []
    crossing = int((np.diff(q, axis=1) < 0).any(axis=1).sum())
    if crossing:
        remarks.append(
            f"Quantiles cross in {crossing:,} of {len(y):,} rows. They are scored as they are; sorting each row, "
            "np.sort(quantiles, axis=1), never makes the pinball loss larger."
        )
    return _Scored((*means, *shares), means, {}, shares, pit, cells, groups, tuple(remarks))


def _central_pairs(tau: np.ndarray) -> dict[float, tuple[int, int]]:
    """Level → the columns of the two ends of the central interval, of those that are there; the narrowest first."""
    pairs = {}
    for low in range(len(tau) - 1, -1, -1):
        high = np.flatnonzero(np.isclose(tau, 1 - tau[low], rtol=0, atol=1e-9))
        if tau[low] < 0.5 - 1e-9 and len(high):
            pairs[round(float(tau[high[0]] - tau[low]), 9)] = (low, int(high[0]))
    return pairs


def _chosen_pairs(pairs: Mapping[float, tuple[int, int]], coverage: Sequence[float] | None) -> list[float]:
    """The levels of the intervals in the table: those asked for, else all of a few, else the usual and the widest."""
    there = list(pairs)
    if coverage is None:
        return there if len(there) <= 4 else [level for level in there if level in COVERAGE or level == there[-1]]
    wanted = [round(level, 9) for level in _coverage_levels(coverage)]
    missing = [level for level in wanted if level not in pairs]
    if missing:
        got = f"{missing[0]:g}, whose ends would be the levels {(1 - missing[0]) / 2:g} and {(1 + missing[0]) / 2:g}"
        raise InputError("coverage", f"be among {_list(there) or 'none'}, as the levels have them", got)
    return wanted


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _percent_of(metric: str) -> float:
    return float(metric.partition("_")[2])


def _kind_words(levels: Iterable[float] | None) -> str:
    if levels is None:
        return "Gaussian forecasts"
    return f"quantiles of the levels {_list(levels)}"


def _list(levels: Iterable[float], most: int = 9) -> str:
    words = [f"{level:g}" for level in levels]
    return ", ".join(words) if len(words) <= most else ", ".join([*words[:3], "…", *words[-2:]])
