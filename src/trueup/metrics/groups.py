"""Where is it wrong? Observed against predicted rate in groups of rows, with intervals that hold for all at once.

The rate of a group may rest on a handful of events, where a bootstrap of its rows fails: without an event it shows no
noise at all. So an interval holds every shift a of the group's log-odds, q = σ(α + β logit p + a), under which as many
events as were seen are no outlier. α and β are those of all rows together, so that the spread of the outcomes about an
over- or underconfident score is right, and a group's own residuals may only widen it. The number of events is taken as
binomial with the mean and variance that the model gives; tails are mid-p. Levels are Šidák's, which for groups without
common rows is what a max-t procedure comes to, and for several columns errs on the safe side.
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

_STEP, _FAR = 0.1, 16.0
_CELLS = int(2 * _FAR / _STEP)
"""Scores are tallied in cells of their log-odds this wide, up to so far."""
MISSING = "(missing)"
"""The group of rows whose group is not a number."""
_POWER = 0.8
_WIDEST = 60.0  # shifts of the log-odds that are searched
_DRAWS = 2000  # of the heterogeneity test
_FIELDS = ("rows", "weight", "squared", "predicted", "observed", "residual")
Key = tuple[str, Hashable]


@dataclass(frozen=True)
class GroupRow:
    """What was predicted and what happened in one group."""

    column: str
    group: Hashable
    rows: int
    predicted: float
    """The mean score."""
    observed: float
    """How often it came true."""
    difference: Interval
    """Observed − predicted; all groups' intervals hold together at the level."""
    p_value: float
    """Of the group being right on average, adjusted for the number of groups."""
    detectable: float
    """The least difference that such a group would have shown with a probability of 80 %."""

    @property
    def stands_out(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0

    @property
    def name(self) -> str:
        """With its column, where that has a name."""
        return f"{self.column}={self.group}" if self.column else str(self.group)


@dataclass(frozen=True)
class GroupTable:
    """Groups of rows by the evidence that their predictions are wrong on average, the strongest first.

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
    """By column: the p-value of one recalibration, a line in the log-odds, being right for all of its groups."""

    def __getitem__(self, key: Any) -> GroupRow:
        for row in self.rows:
            if key in (row.group, (row.column, row.group), row.name):
                return row
        raise KeyError(f"no group is called {key!r}; there are: {', '.join(row.name for row in self.rows)}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def worst(self) -> GroupRow | None:
        """The group whose interval is farthest from 0; None where all hold it."""
        shown = [row for row in self.rows if row.stands_out]
        return max(shown, key=lambda row: max(row.difference.low, -row.difference.high), default=None)

    def verdict(self) -> str:
        """In a sentence or two."""
        if not self.rows:
            return "There are no groups to judge."
        if (worst := self.worst) is None:
            least, most = (f(row.detectable for row in self.rows) for f in (min, max))
            seen = " to ".join(format_percent(x, 1) for x in dict.fromkeys((least, most)))
            text = f"In no group is it shown to be wrong on average; differences of {seen} would have been seen."
        else:
            happened, predicted = (format_percent(x, 1) for x in (worst.observed, worst.predicted))
            text = f"The worst group is {worst.name}: {happened} happened where {predicted} were predicted."
        for column, p in self.heterogeneity.items():
            of = f" of {column}" if column else ""
            chance = f"p {'=' if p > 0.001 else '≤'} {max(p, 0.001):.3f}"
            if p > 0.05:  # all may be wrong alike
                text += f" That the groups{of} differ from each other is not shown ({chance})."
            else:  # without a worst group, all may show what none of them shows alone
                start = "Taken together, though, the" if worst is None else "The"
                text += f" {start} groups{of} differ ({chance})."
        return text

    def table(self) -> list[Row]:
        """Its cells as text, the first row the heads."""
        heads = ["group", "rows", "predicted", "observed", "difference"]
        rows: list[Row] = [[*heads, f"{format_percent(self.level)} interval", "detectable"]]
        for row in self.rows:
            d = row.difference
            numbers = [format_number(row.predicted), format_number(row.observed), format_number(d.value, sign=True)]
            interval = format_interval(d.low, d.high, sign=True)
            rows.append([row.name, f"{row.rows:,}", *numbers, interval, format_number(row.detectable)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
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
    """What `GroupTable` needs of rows, in sums: parts of a data set add up to the whole.

    >>> one, two = (GroupTally.of([0.2, 0.7], [0, 1], groups) for groups in (["a", "b"], ["b", "c"]))
    >>> (one + two).table()["b"].rows
    2
    """

    sums: Mapping[Key, np.ndarray]
    """By column and group: `_FIELDS` in cells of the score's log-odds, (fields, cells)."""

    @classmethod
    def of(cls, scores: Any, outcomes: Any, groups: Any, *, sample_weight: Any = None) -> GroupTally:
        """Tally scores (n,) in [0, 1] and outcomes (n,), 0 or 1, by groups: one value a row, or columns of them."""
        p, y, w = _check_rows(scores, outcomes, sample_weight)
        with np.errstate(divide="ignore"):
            cell = np.clip((logit(p) + _FAR) / _STEP, 0, _CELLS - 1).astype(np.int64)
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
        """Columns and groups, the place (group, cell) of each cell that holds rows, and its sums: for a file."""
        keys = [[column, plain_group(group)] for column, group in self.sums]
        if not keys:
            return [], np.zeros((0, 2), dtype=np.int64), np.zeros((0, len(_FIELDS)))
        table = np.stack(list(self.sums.values()))
        places = np.argwhere(table[:, 1] > 0)
        return keys, places, table[places[:, 0], :, places[:, 1]]

    @classmethod
    def unpack(cls, keys: Any, places: np.ndarray, sums: np.ndarray) -> GroupTally:
        """The tally that `pack` gave; what it cannot have given is refused."""
        pairs = isinstance(keys, list) and all(isinstance(key, list) and len(key) == 2 for key in keys)
        kinds = (str, int, float, type(None))
        named = pairs and all(isinstance(column, str) and isinstance(group, kinds) for column, group in keys)
        cells = len(places)
        if not (named and places.shape == (cells, 2) and sums.shape == (cells, len(_FIELDS))):
            raise ValueError("its groups do not fit each other")
        within = (places >= 0).all() and (places < [len(keys), _CELLS]).all()
        hair = 1 + 1e-9
        if not (within and (sums >= 0).all() and (sums[:, 3:] <= hair * sums[:, 1:2]).all()):
            raise ValueError("its groups contradict each other")
        table = np.zeros((len(keys), len(_FIELDS), _CELLS))
        table[places[:, 0], :, places[:, 1]] = sums
        return cls({(column, group): each for (column, group), each in zip(keys, table, strict=True)})

    def table(self, *, level: float = 0.95, seed: int = 0) -> GroupTable:
        """The groups, by the evidence against them."""
        check_share(level, "level")
        keys = [key for key, sums in self.sums.items() if sums[1].sum() > 0]
        if not keys:
            return GroupTable((), level, {})
        sums = np.stack([self.sums[key] for key in keys])
        by_column = {column: [i for i, key in enumerate(keys) if key[0] == column] for column, _ in keys}
        model = _Model(sums, sums[next(iter(by_column.values()))].sum(axis=0))
        each = -math.expm1(math.log(level) / len(keys))  # Šidák's
        p_values = -np.expm1(len(keys) * np.log1p(-model.p_values()))
        difference = model.observed - model.predicted
        columns = model.predicted, model.observed, difference, *model.interval(each / 2)
        numbers = np.stack([*columns, p_values, model.detectable(-ndtri(each / 2))], axis=1).tolist()
        rows = []
        for key, count, row in zip(keys, sums[:, 0], numbers, strict=True):
            predicted, observed, value, low, high, p, least = row
            shown = Interval(value, low, high, level)
            rows.append(GroupRow(*key, int(count.sum()), predicted, observed, shown, p, least))
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
    """Hold what was predicted against what happened in each group of rows.

    `groups` has one value a row, or is a mapping from names of columns to such values. `clusters`, one value a row, say
    which rows are correlated: a group then counts as many rows as the spread of its clusters leaves, and if all of them
    are of one cluster as a single row.

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
    """The tally with Σw² of each group multiplied by its design effect: how much clusters widen what it shows.

    The variance of Σw(y − p) over the clusters of the group, by that of independent rows; times (t/z)², since so few
    clusters know their own variance badly. At most all rows of a cluster are as one.
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
            effect = most = float(total @ total) / float(weight @ weight)
            if len(total) > 1:
                wider = (t_quantile(tail, degrees_of_freedom(total)) / -ndtri(tail)) ** 2
                if (alone := float(gap @ gap)) > 0:
                    effect = len(total) / (len(total) - 1) * float(off @ off) / alone * wider
                effect = min(max(effect, wider), most * wider)
            sums[column, name] = sums[column, name] * np.where(np.array(_FIELDS) == "squared", effect, 1.0)[:, None]
    return GroupTally(sums)


def _check_rows(scores: Any, outcomes: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores in [0, 1], outcomes 0 or 1, and weights, 1 where there are none."""
    p = as_vector(scores, "scores")
    y = as_vector(outcomes, "outcomes", length=len(p))
    if len(p) and (p.min() < 0 or p.max() > 1):
        raise InputError("scores", "lie in [0, 1]", f"{p.min():.6g}..{p.max():.6g}")
    if not np.isin(y, (0.0, 1.0)).all():
        raise InputError("outcomes", "be 0 or 1", f"{y[~np.isin(y, (0.0, 1.0))][0]:g}")
    w = as_weights(sample_weight, len(p))
    return p, y, np.ones(len(p)) if w is None else w


def as_groups(groups: Any, rows: int) -> dict[str, np.ndarray]:
    """Columns of groups by name, each with one hashable value a row; a single column has no name.

    >>> as_groups(["a", "b", "c"], 2)
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: groups must have 2 entries, one for each row, got 3
    """
    named = dict(groups) if isinstance(groups, Mapping) else {"": groups}
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
        column[column != column] = MISSING  # NaN equals nothing, and would be a group in every row
        columns[str(name)] = column
    return columns


def plain_group(group: Hashable) -> Hashable:
    """The group as JSON can hold it: itself, or its text."""
    known = isinstance(group, (str, int, type(None))) or (isinstance(group, float) and math.isfinite(group))
    return group if known else str(group)


def encode_groups(values: np.ndarray) -> tuple[np.ndarray, list[Hashable]]:
    """The number of each row's group, and the groups as they first appear."""
    number: dict[Hashable, int] = {}
    try:
        codes = np.fromiter((number.setdefault(value, len(number)) for value in values), np.int64, len(values))
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise InputError("groups", "be numbers, text or other hashable values", kinds) from None
    return codes, list(number)


class _Model:
    """Groups (g,) whose log-odds are those of all rows together, shifted by a number a group."""

    def __init__(self, sums: np.ndarray, whole: np.ndarray) -> None:
        """Of sums (groups, fields, cells) and those of all rows, to which the line in the log-odds is fitted."""
        used = whole[1] > 0
        sums, whole, middle = sums[:, :, used], whole[:, used], ((np.arange(_CELLS) + 0.5) * _STEP - _FAR)[used]
        weight, filled = sums[:, 1], sums[:, 1] > 0
        score = np.where(filled, sums[:, 3] / np.where(filled, weight, 1.0), expit(middle))
        self.score = np.clip(score, 1e-7, 1 - 1e-7)
        slope, offset = _line(whole)
        self.odds, self.share = offset + slope * logit(self.score), weight / weight.sum(axis=1, keepdims=True)
        total = sums.sum(axis=2)
        self.rows = total[:, 1] ** 2 / total[:, 2]
        self.predicted, self.observed = total[:, 3] / total[:, 1], total[:, 4] / total[:, 1]
        self.spread = np.maximum(total[:, 5] / total[:, 1] - (self.observed - self.predicted) ** 2, 0.0)
        self.worth = self._worth()
        self.right = self._solve(lambda a: self.at(a)[0] - self.predicted)
        """The shifts under which the scores are right on average."""

    def at(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean rate, binomial trials with its variance, and the rate of each trial, where the log-odds are shifted."""
        mean, chance = self.mean_and_chance(shift)
        return mean, self.worth * self.rows * mean / chance, chance

    def mean_and_chance(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean rate, and the rate of each binomial trial: trials · chance · (1 − chance) is the variance."""
        q = expit(self.odds + shift[:, None])
        mean = (self.share * q).sum(axis=1)
        return mean, (self.share * q * q).sum(axis=1) / mean

    def _worth(self) -> np.ndarray:
        """What a row is worth of one whose outcome alone is random.

        Differences of truth and score vary from sample to sample too; and residuals larger than the model's widen it.
        """
        half = 0.5 / (self.rows + 1)
        rate = np.clip(self.observed, half, 1 - half)
        q = expit(self.odds + self._solve(lambda a: self.mean_and_chance(a)[0] - rate)[:, None])
        inside = np.maximum((self.share * q * (1 - q)).sum(axis=1), 1e-300)
        gap = q - self.score
        wander = (self.share * gap * gap).sum(axis=1) - (self.share * gap).sum(axis=1) ** 2
        return np.minimum(1.0, inside / np.maximum(inside + np.maximum(wander, 0.0), self._floor(rate)))

    def _floor(self, mean: np.ndarray) -> np.ndarray:
        """The group's own residual variance, as far as a binomial one allows."""
        return np.minimum(self.spread, mean * (1 - mean) + 1e-300)

    def tails(self, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mid-p of as many events as were seen or more, and or fewer."""
        mean, trials, chance = self.at(shift)
        seen = self.observed * trials * chance / np.maximum(mean, 1e-300)
        no = np.maximum(trials - seen, 1e-9)
        more = np.where(seen > 0, betainc(np.maximum(seen, 1e-12), no + 1, chance), 1.0)
        high = (more + betainc(seen + 1, no, chance)) / 2
        return high, 1 - high

    def interval(self, tail: float) -> tuple[np.ndarray, np.ndarray]:
        """Differences at the shifts under which what was seen is just no outlier."""
        low = self._solve(lambda a: self.tails(a)[0] - tail)
        high = self._solve(lambda a: tail - self.tails(a)[1])
        lowest, highest = (self.at(a)[0] - self.predicted for a in (low, high))
        # Without a single event, or with nothing else, the rate itself is the end.
        lowest = np.where(self.observed <= 0, -self.predicted, lowest)
        return lowest, np.where(self.observed >= 1, 1 - self.predicted, highest)

    def p_values(self) -> np.ndarray:
        """Two-sided, of the group being right on average."""
        more, fewer = self.tails(self.right)
        return np.clip(2 * np.minimum(more, fewer), 0.0, 1 - 1e-16)

    def detectable(self, critical: float) -> np.ndarray:
        """The least difference, upwards or downwards, that is shown with a probability of 80 %."""
        mean, trials, chance = self.at(self.right)
        error = mean * np.sqrt((1 - chance) / np.maximum(trials * chance, 1e-300))
        return np.minimum((critical + ndtri(_POWER)) * error, np.maximum(mean, 1 - mean))

    def heterogeneity(self, at: list[int], seed: int) -> float:
        """The p-value of the groups at these places following one line: chi-square, its law by simulation."""
        mean, chance = (x[at] for x in self.mean_and_chance(np.zeros(len(self.rows))))
        rows = self.rows[at]
        inside = rows * mean * (1 - chance) + 1e-12
        spread = np.maximum(self._floor(self.observed)[at] * rows, inside) / inside

        def statistic(off: np.ndarray) -> np.ndarray:
            scaled = inside * spread
            return (off * off / scaled).sum(axis=-1) - off.sum(axis=-1) ** 2 / scaled.sum()

        # Events in each group as binomial draws of the same mean and variance.
        trials = np.maximum(np.rint(rows * mean / chance), 1).astype(np.int64)
        drawn = np.random.default_rng(seed).binomial(trials, chance, (_DRAWS, len(at))) - trials * chance
        seen = statistic(rows * (self.observed[at] - mean))
        exceed = int((statistic(drawn * np.sqrt(spread)) >= seen - 1e-9).sum())
        return (1 + exceed) / (1 + _DRAWS)

    def _solve(self, rising: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The shift at which a rising function vanishes, by halves."""
        low, high = np.full(len(self.rows), -_WIDEST), np.full(len(self.rows), _WIDEST)
        for _ in range(34):
            middle = (low + high) / 2
            below = rising(middle) < 0
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2


def _line(whole: np.ndarray) -> tuple[float, float]:
    """Slope and offset of the outcomes' log-odds in the scores', by likelihood with a weak pull to the identity."""
    odds = logit(np.clip(whole[3] / whole[1], 1e-7, 1 - 1e-7))
    worth = whole[1].sum() / whole[2].sum()  # of a unit of weight, in rows
    weight, hits = whole[1] * worth, whole[4] * worth
    x, at = np.stack([odds, np.ones_like(odds)]), np.array([1.0, 0.0])
    for _ in range(50):
        q = expit(at @ x)
        slope = x @ (weight * q - hits) + np.array([at[0] - 1, at[1]])
        step = np.linalg.solve((x * (weight * q * (1 - q))) @ x.T + np.eye(2), slope)
        at = at - step * min(1.0, 2.0 / max(np.abs(step).max(), 1e-300))
        if np.abs(step).max() < 1e-9:
            break
    return float(at[0]), float(at[1])
