"""Observed and predicted rates in groups of rows, with intervals that hold for all groups at once.

A group's rate may rest on a handful of events, where a bootstrap of its rows fails: without an event it shows no noise.
So an interval holds every shift a of the group's log-odds, q = σ(α + β logit p + a), under which the observed count is
not extreme. α and β come from all rows, so the model has the right outcome variance for over- and underconfident
scores. A group's own residuals may only widen its interval. The number of events is taken as binomial with the mean and
variance of the model; tails are mid-p. Levels are Šidák's. For disjoint groups this agrees with a max-t procedure; for
several columns it is conservative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betainc, expit, logit, ndtri

from trueup._core.arrays import as_vector, as_weights, check_share
from trueup._core.clusters import ClustersLike, as_clusters, degrees_of_freedom, t_quantile
from trueup._core.errors import InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, html_table, text_table
from trueup._core.types import ArrayLike, WeightsLike
from trueup.metrics.intervals import Interval

_CELL_WIDTH, _MAX_LOG_ODDS = 0.1, 16.0
_CELLS = int(2 * _MAX_LOG_ODDS / _CELL_WIDTH)
"""Number of cells of log-odds in which scores are tallied."""
MISSING = "(missing)"
"""The group of rows whose group is NaN."""
_POWER = 0.8
_MAX_SHIFT = 60.0  # largest shift of the log-odds in the search
_N_DRAWS = 2000  # simulated tables in the heterogeneity test
_FIELDS = ("rows", "weight", "squared", "predicted", "observed", "residual")
Key = tuple[str, Hashable]


@dataclass(frozen=True)
class GroupRow:
    """Prediction and outcome in one group."""

    column: str
    group: Hashable
    rows: int
    predicted: float
    """The mean score."""
    observed: float
    """The share of rows with the event."""
    difference: Interval
    """Observed − predicted; the intervals of all groups hold at once at the level."""
    p_value: float
    """P-value of the group being right on average, adjusted for the number of groups."""
    detectable: float
    """Smallest difference that would be detected with 80 % power."""

    @property
    def stands_out(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0

    @property
    def name(self) -> str:
        """The group, with the name of its column if there is one."""
        return f"{self.column}={self.group}" if self.column else str(self.group)


@dataclass(frozen=True)
class GroupTable:
    """Groups of rows, ordered by the evidence that their predictions are wrong on average.

    >>> rng = np.random.default_rng(0)
    >>> p, ward = rng.uniform(0.1, 0.5, 3000), np.repeat(["A", "B", "C"], 1000)
    >>> y = rng.random(3000) < p + 0.1 * (ward == "B")
    >>> evaluate_groups(p, y, ward)
    group   rows  predicted  observed  difference       95 % interval  detectable
    B      1,000     0.2924    0.3940     +0.1016  [+0.0656, +0.1385]      0.0461
    C      1,000     0.2980    0.2840     -0.0140  [-0.0466, +0.0203]      0.0459
    A      1,000     0.3068    0.3120     +0.0052  [-0.0284, +0.0403]      0.0463
    <BLANKLINE>
    The worst group is B: 39.4 % happened where 29.2 % were predicted. The groups differ (p ≤ 0.001).
    """

    rows: tuple[GroupRow, ...]
    level: float
    heterogeneity: Mapping[str, float]
    """By column: the p-value of one recalibration (a line in the log-odds) fitting all of its groups."""

    def __getitem__(self, key: Any) -> GroupRow:
        for row in self.rows:
            if key in (row.group, (row.column, row.group), row.name):
                return row
        raise KeyError(f"no group is called {key!r}; there are: {', '.join(row.name for row in self.rows)}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def worst(self) -> GroupRow | None:
        """The group with the largest error among those whose interval excludes 0; None if all intervals contain 0."""
        shown = [row for row in self.rows if row.stands_out]
        return max(shown, key=lambda row: abs(row.difference.value), default=None)

    def verdict(self, *, event: bool = True) -> str:
        """Summarise the table in one or two sentences; without an event, outcomes are right predictions.

        Parameters
        ----------
        event
            Whether predictions are probabilities of an event rather than confidences.

        Returns
        -------
        str
            The sentences.
        """
        if not self.rows:
            return "There are no groups to score."
        if (worst := self.worst) is None:
            smallest, largest = (f(row.detectable for row in self.rows) for f in (min, max))
            range_ = " to ".join(format_percent(x, 1) for x in dict.fromkeys((smallest, largest)))
            text = f"No group is shown to be wrong on average; differences of {range_} would have been detected."
        else:
            happened, predicted = (format_percent(x, 1) for x in (worst.observed, worst.predicted))
            outcome = "happened" if event else "were right"
            text = f"The worst group is {worst.name}: {happened} {outcome} where {predicted} were predicted."
        for column, p in self.heterogeneity.items():
            of = f" of {column}" if column else ""
            p_value = f"p {'=' if p > 0.001 else '≤'} {max(p, 0.001):.3f}"
            if p > 0.05:  # all groups may be wrong in the same way
                text += f" There is no evidence that the groups{of} differ from each other ({p_value})."
            else:  # groups may differ although no single group is shown to be wrong
                start = "But as a whole, the" if worst is None else "The"
                text += f" {start} groups{of} differ ({p_value})."
        return text

    def table(self) -> list[Row]:
        """Return the cells of the table as text; the first row holds the heads."""
        heads = ["group", "rows", "predicted", "observed", "difference"]
        rows: list[Row] = [[*heads, f"{format_percent(self.level)} interval", "detectable"]]
        for row in self.rows:
            d = row.difference
            numbers = [format_number(row.predicted), format_number(row.observed), format_number(d.value, sign=True)]
            interval = format_interval(d.low, d.high, sign=True)
            rows.append([row.name, f"{row.rows:,}", *numbers, interval, format_number(row.detectable)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        rows = []
        for row in self.rows:
            d = row.difference
            record = {name: getattr(row, name) for name in ("column", "rows", "predicted", "observed")}
            record |= {"group": plain_group(row.group), "difference": d.value, "low": d.low, "high": d.high}
            rows.append(record | {"p_value": row.p_value, "detectable": row.detectable})
        return {"level": self.level, "groups": rows, "heterogeneity": dict(self.heterogeneity)}

    def __str__(self) -> str:
        return f"{text_table(self.table())}\n\n{self.verdict()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        return f"<div>{html_table(head, rows)}<p>{self.verdict()}</p></div>"


@dataclass(frozen=True, eq=False)
class GroupTally:
    """Mergeable sums from which `GroupTable` is computed.

    >>> one, two = (GroupTally.of([0.2, 0.7], [0, 1], groups) for groups in (["a", "b"], ["b", "c"]))
    >>> (one + two).table()["b"].rows
    2
    """

    sums: Mapping[Key, np.ndarray]
    """By column and group: `_FIELDS` in cells of the score's log-odds, (fields, cells)."""

    @classmethod
    def of(cls, scores: Any, outcomes: Any, groups: Any, *, sample_weight: Any = None) -> GroupTally:
        """Tally scores (n,) in [0, 1] and outcomes (n,), 0 or 1, by groups."""
        p, y, w = _check_rows(scores, outcomes, sample_weight)
        with np.errstate(divide="ignore"):
            cell = np.clip((logit(p) + _MAX_LOG_ODDS) / _CELL_WIDTH, 0, _CELLS - 1).astype(np.int64)
        columns = np.stack([w > 0, w, w * w, w * p, w * y, w * (y - p) ** 2])
        sums: dict[Key, np.ndarray] = {}
        for column, values in as_groups(groups, len(p)).items():
            codes, names = encode_groups(values)
            size = len(names) * _CELLS
            table = np.stack([np.bincount(codes * _CELLS + cell, x, size) for x in columns])
            for k, name in enumerate(names):
                sums[column, name] = table[:, k * _CELLS : (k + 1) * _CELLS]
        return cls(sums)

    def __add__(self, other: GroupTally) -> GroupTally:
        if not isinstance(other, GroupTally):
            return NotImplemented
        zero = np.zeros((len(_FIELDS), _CELLS))
        keys = dict.fromkeys([*self.sums, *other.sums])
        return GroupTally({key: self.sums.get(key, zero) + other.sums.get(key, zero) for key in keys})

    def pack(self) -> tuple[list[list[Any]], np.ndarray, np.ndarray]:
        """Return the sums for a file: columns and groups, index (group, cell) of each cell with rows, and its sums."""
        keys = [[column, plain_group(group)] for column, group in self.sums]
        if not keys:
            return [], np.zeros((0, 2), dtype=np.int64), np.zeros((0, len(_FIELDS)))
        table = np.stack(list(self.sums.values()))
        index = np.argwhere(table[:, 1] > 0)
        return keys, index, table[index[:, 0], :, index[:, 1]]

    @classmethod
    def unpack(cls, keys: Any, index: np.ndarray, sums: np.ndarray) -> GroupTally:
        """Restore the tally from `pack`; reject anything that `pack` cannot have written."""
        pairs = isinstance(keys, list) and all(isinstance(key, list) and len(key) == 2 for key in keys)
        kinds = (str, int, float, type(None))
        named = pairs and all(isinstance(column, str) and isinstance(group, kinds) for column, group in keys)
        cells = len(index)
        if not (named and index.shape == (cells, 2) and sums.shape == (cells, len(_FIELDS))):
            raise ValueError("the arrays of its groups do not match")
        within = (index >= 0).all() and (index < [len(keys), _CELLS]).all()
        slack = 1 + 1e-9
        if not (within and (sums >= 0).all() and (sums[:, 3:] <= slack * sums[:, 1:2]).all()):
            raise ValueError("its groups contradict each other")
        table = np.zeros((len(keys), len(_FIELDS), _CELLS))
        table[index[:, 0], :, index[:, 1]] = sums
        return cls({(column, group): each for (column, group), each in zip(keys, table, strict=True)})

    def table(self, *, level: float = 0.95, seed: int = 0) -> GroupTable:
        """Return the table of groups, the strongest evidence first."""
        check_share(level, "level")
        keys = [key for key, sums in self.sums.items() if sums[1].sum() > 0]
        if not keys:
            return GroupTable((), level, {})
        sums = np.stack([self.sums[key] for key in keys])
        by_column = {column: [i for i, key in enumerate(keys) if key[0] == column] for column, _ in keys}
        model = _Model(sums, sums[next(iter(by_column.values()))].sum(axis=0))
        alpha = -math.expm1(math.log(level) / len(keys))  # Šidák's correction
        p_values = -np.expm1(len(keys) * np.log1p(-model.p_values()))
        difference = model.observed - model.predicted
        columns = model.predicted, model.observed, difference, *model.interval(alpha / 2)
        numbers = np.stack([*columns, p_values, model.detectable(-ndtri(alpha / 2))], axis=1).tolist()
        rows = []
        for key, count, row in zip(keys, sums[:, 0], numbers, strict=True):
            predicted, observed, value, low, high, p, detectable = row
            shown = Interval(value, low, high, level)
            rows.append(GroupRow(*key, int(count.sum()), predicted, observed, shown, p, detectable))
        order = np.lexsort((-np.abs(difference), p_values))
        tests = {column: model.heterogeneity(at, seed) for column, at in by_column.items() if len(at) > 1}
        return GroupTable(tuple(rows[i] for i in order), level, tests)


def evaluate_groups(
    scores: ArrayLike,
    outcomes: ArrayLike,
    groups: ArrayLike | Mapping[str, ArrayLike],
    *,
    sample_weight: WeightsLike = None,
    clusters: ClustersLike = None,
    level: float = 0.95,
    seed: int = 0,
) -> GroupTable:
    """Compare predicted and observed rates in each group of rows.

    With clusters, a group counts the effective number of rows that the spread of its clusters leaves.

    Parameters
    ----------
    scores
        Predicted probabilities, shape (n,), in [0, 1].
    outcomes
        Outcomes, shape (n,), 0 or 1.
    groups
        Groups: one value per row, shape (n,), or a mapping from names of columns to such values.
    sample_weight
        Weight of each row, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated (pixels of an image, visits of a patient).
    level
        Level of the intervals, such as 0.95.
    seed
        Seed of the random numbers.

    Returns
    -------
    GroupTable
        The groups, with intervals that hold for all at once.

    Examples
    --------
    >>> table = evaluate_groups([0.2, 0.2, 0.3, 0.9], [0, 0, 1, 1], ["a", "a", "b", "b"])
    >>> table["a"].observed, table["b"].predicted, table.worst
    (0.0, 0.6, None)
    """
    tally = GroupTally.of(scores, outcomes, groups, sample_weight=sample_weight)
    if clusters is not None:
        tally = _by_cluster(tally, scores, outcomes, groups, sample_weight, clusters, level)
    return tally.table(level=level, seed=seed)


def _by_cluster(
    tally: GroupTally, scores: Any, outcomes: Any, groups: Any, sample_weight: Any, clusters: Any, level: float
) -> GroupTally:
    """Multiply Σw² of each group by its design effect: the factor by which clusters increase the variance.

    It is the variance of Σw(y − p) over the clusters of the group, divided by that of independent rows. The factor
    (t/z)² allows for a variance estimated from few clusters. At most, all rows of a cluster count as one.
    """
    p, y, w = _check_rows(scores, outcomes, sample_weight)
    of_row = as_clusters(clusters, len(p))
    assert of_row is not None
    sums, tail = dict(tally.sums), -math.expm1(math.log(level) / max(len(tally.sums), 1)) / 2
    for column, values in as_groups(groups, len(p)).items():
        codes, names = encode_groups(values)
        for k, name in enumerate(names):
            mine = np.flatnonzero((codes == k) & (w > 0))
            if not len(mine):
                continue
            code = np.unique(of_row.code[mine], return_inverse=True)[1]
            weight, gap = w[mine], w[mine] * (y - p)[mine]
            gap = gap - weight * gap.sum() / weight.sum()
            total, off = np.bincount(code, weight), np.bincount(code, gap)
            effect = max_effect = float(total @ total) / float(weight @ weight)
            if len(total) > 1:
                t_factor = (t_quantile(tail, degrees_of_freedom(total)) / -ndtri(tail)) ** 2
                if (independent := float(gap @ gap)) > 0:
                    effect = len(total) / (len(total) - 1) * float(off @ off) / independent * t_factor
                effect = min(max(effect, t_factor), max_effect * t_factor)
            sums[column, name] = sums[column, name] * np.where(np.array(_FIELDS) == "squared", effect, 1.0)[:, None]
    return GroupTally(sums)


def _check_rows(scores: Any, outcomes: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check scores in [0, 1], outcomes 0 or 1, and weights; weights default to 1."""
    p = as_vector(scores, "scores")
    y = as_vector(outcomes, "outcomes", length=len(p))
    if len(p) and (p.min() < 0 or p.max() > 1):
        raise InputError("scores", "lie in [0, 1]", f"{p.min():.6g}..{p.max():.6g}")
    if not np.isin(y, (0.0, 1.0)).all():
        raise InputError("outcomes", "be 0 or 1", f"{y[~np.isin(y, (0.0, 1.0))][0]:g}")
    w = as_weights(sample_weight, len(p))
    return p, y, np.ones(len(p)) if w is None else w


def as_groups(groups: Any, rows: int) -> dict[str, np.ndarray]:
    """Return columns of groups by name, each with one hashable value per row; a single column has no name.

    >>> as_groups(["a", "b", "c"], 2)
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: groups must have 2 entries, one for each row, got 3
    """
    is_table = isinstance(groups, Mapping) or hasattr(groups, "columns")  # a data frame
    named = {name: groups[name] for name in groups} if is_table else {"": groups}
    if not named:
        raise InputError("groups", "have at least one column", "none")
    columns = {}
    for name, values in named.items():
        argument = f"groups[{name!r}]" if name else "groups"
        if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
            raise InputError(argument, "have one value for each row", f"the single value {values!r}")
        plain = (value.item() if isinstance(value, np.generic) else value for value in values)
        listed = values.tolist() if hasattr(values, "tolist") else list(plain)
        column = np.asarray(listed, dtype=object)
        if column.ndim != 1:
            raise InputError(argument, "have one value for each row", f"shape {column.shape}")
        if len(column) != rows:
            raise InputError(argument, f"have {rows} entries, one for each row", f"{len(column)}")
        column[column != column] = MISSING  # NaN is not equal to itself, so each row would be a group
        columns[str(name)] = column
    return columns


def plain_group(group: Hashable) -> Hashable:
    """Return the group if JSON can hold it, else its text."""
    known = isinstance(group, (str, int, type(None))) or (isinstance(group, float) and math.isfinite(group))
    return group if known else str(group)


def encode_groups(values: np.ndarray) -> tuple[np.ndarray, list[Hashable]]:
    """Return the number of each row's group, and the groups in order of first appearance."""
    number: dict[Hashable, int] = {}
    try:
        codes = np.fromiter((number.setdefault(value, len(number)) for value in values), np.int64, len(values))
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise InputError("groups", "be numbers, text or other hashable values", kinds) from None
    return codes, list(number)


class _Model:
    """Groups (g,) with the log-odds of all rows plus one shift per group."""

    def __init__(self, sums: np.ndarray, whole: np.ndarray) -> None:
        used = whole[1] > 0
        sums, whole = sums[:, :, used], whole[:, used]
        middle = ((np.arange(_CELLS) + 0.5) * _CELL_WIDTH - _MAX_LOG_ODDS)[used]
        weight, filled = sums[:, 1], sums[:, 1] > 0
        score = np.where(filled, sums[:, 3] / np.where(filled, weight, 1.0), expit(middle))
        self.score = np.clip(score, 1e-7, 1 - 1e-7)
        slope, offset = _line(whole)
        self.odds, self.share = offset + slope * logit(self.score), weight / weight.sum(axis=1, keepdims=True)
        total = sums.sum(axis=2)
        self.rows = total[:, 1] ** 2 / total[:, 2]
        self.predicted, self.observed = total[:, 3] / total[:, 1], total[:, 4] / total[:, 1]
        self.spread = np.maximum(total[:, 5] / total[:, 1] - (self.observed - self.predicted) ** 2, 0.0)
        self.variance_share = self._variance_share()
        self.right = self._solve(lambda a: self.at(a)[0] - self.predicted)
        """Shifts under which the scores are right on average."""

    def at(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean rate, and number and rate of binomial trials with its variance, for shifted log-odds."""
        mean, trial_rate = self.mean_and_trial_rate(shift)
        return mean, self.variance_share * self.rows * mean / trial_rate, trial_rate

    def mean_and_trial_rate(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean rate and the rate of each binomial trial: trials · rate · (1 − rate) is the variance."""
        q = expit(self.odds + shift[:, None])
        mean = (self.share * q).sum(axis=1)
        return mean, (self.share * q * q).sum(axis=1) / mean

    def _variance_share(self) -> np.ndarray:
        """Return the share of the variance that the outcomes alone explain.

        The difference of truth and score varies from sample to sample too, and so do residuals beyond the model.
        """
        half = 0.5 / (self.rows + 1)
        rate = np.clip(self.observed, half, 1 - half)
        q = expit(self.odds + self._solve(lambda a: self.mean_and_trial_rate(a)[0] - rate)[:, None])
        inside = np.maximum((self.share * q * (1 - q)).sum(axis=1), 1e-300)
        gap = q - self.score
        gap_variance = (self.share * gap * gap).sum(axis=1) - (self.share * gap).sum(axis=1) ** 2
        return np.minimum(1.0, inside / np.maximum(inside + np.maximum(gap_variance, 0.0), self._floor(rate)))

    def _floor(self, mean: np.ndarray) -> np.ndarray:
        """Return the group's residual variance, capped at that of a binomial."""
        return np.minimum(self.spread, mean * (1 - mean) + 1e-300)

    def tails(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mid-p of at least, and of at most, as many events as observed."""
        mean, trials, trial_rate = self.at(shift)
        events = self.observed * trials * trial_rate / np.maximum(mean, 1e-300)
        non_events = np.maximum(trials - events, 1e-9)
        at_least = np.where(events > 0, betainc(np.maximum(events, 1e-12), non_events + 1, trial_rate), 1.0)
        high = (at_least + betainc(events + 1, non_events, trial_rate)) / 2
        return high, 1 - high

    def interval(self, tail: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the differences at the shifts under which the observation is just not extreme."""
        low = self._solve(lambda a: self.tails(a)[0] - tail)
        high = self._solve(lambda a: tail - self.tails(a)[1])
        lowest, highest = (self.at(a)[0] - self.predicted for a in (low, high))
        # Where the event never or always happens, the rate itself is the end.
        lowest = np.where(self.observed <= 0, -self.predicted, lowest)
        return lowest, np.where(self.observed >= 1, 1 - self.predicted, highest)

    def p_values(self) -> np.ndarray:
        """Return two-sided p-values of the group being right on average."""
        high, low = self.tails(self.right)
        return np.clip(2 * np.minimum(high, low), 0.0, 1 - 1e-16)

    def detectable(self, critical: float) -> np.ndarray:
        """Return the smallest difference, upwards or downwards, that would be detected with 80 % power."""
        mean, trials, trial_rate = self.at(self.right)
        error = mean * np.sqrt((1 - trial_rate) / np.maximum(trials * trial_rate, 1e-300))
        return np.minimum((critical + ndtri(_POWER)) * error, np.maximum(mean, 1 - mean))

    def heterogeneity(self, at: list[int], seed: int) -> float:
        """Return the p-value of these groups following one line: chi-square with a simulated null distribution."""
        mean, trial_rate = (x[at] for x in self.mean_and_trial_rate(np.zeros(len(self.rows))))
        rows = self.rows[at]
        inside = rows * mean * (1 - trial_rate) + 1e-12
        spread = np.maximum(self._floor(self.observed)[at] * rows, inside) / inside

        def statistic(off: np.ndarray) -> np.ndarray:
            scaled = inside * spread
            return (off * off / scaled).sum(axis=-1) - off.sum(axis=-1) ** 2 / scaled.sum()

        # The events of each group are drawn from a binomial with the same mean and variance.
        trials = np.maximum(np.rint(rows * mean / trial_rate), 1).astype(np.int64)
        drawn = np.random.default_rng(seed).binomial(trials, trial_rate, (_N_DRAWS, len(at))) - trials * trial_rate
        observed = statistic(rows * (self.observed[at] - mean))
        exceed = int((statistic(drawn * np.sqrt(spread)) >= observed - 1e-9).sum())
        return (1 + exceed) / (1 + _N_DRAWS)

    def _solve(self, rising: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Find the shift at which an increasing function is 0, by bisection."""
        low, high = np.full(len(self.rows), -_MAX_SHIFT), np.full(len(self.rows), _MAX_SHIFT)
        for _ in range(34):
            middle = (low + high) / 2
            below = rising(middle) < 0
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2


def _line(whole: np.ndarray) -> tuple[float, float]:
    """Fit slope and offset of the outcomes' log-odds on the scores', with a weak pull to the identity."""
    odds = logit(np.clip(whole[3] / whole[1], 1e-7, 1 - 1e-7))
    rows_per_weight = whole[1].sum() / whole[2].sum()
    weight, hits = whole[1] * rows_per_weight, whole[4] * rows_per_weight
    x, at = np.stack([odds, np.ones_like(odds)]), np.array([1.0, 0.0])
    for _ in range(50):
        q = expit(at @ x)
        slope = x @ (weight * q - hits) + np.array([at[0] - 1, at[1]])
        step = np.linalg.solve((x * (weight * q * (1 - q))) @ x.T + np.eye(2), slope)
        at = at - step * min(1.0, 2.0 / max(np.abs(step).max(), 1e-300))
        if np.abs(step).max() < 1e-9:
            break
    return float(at[0]), float(at[1])
