"""Prediction sets: the classes that may be true, which hold the truth with a stated probability (split conformal).

A score says how strange a class would be for a row; the quantile of the scores of the true classes of n calibration
rows, taken at ⌈(n+1)·coverage⌉, is the limit. If new rows are exchangeable with those, the set of all classes within
the limit holds the truth with at least that probability, whatever the network. Temperature scaling tends to enlarge APS
sets: it keeps the order of the classes within a row but changes how rows compare with each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np

from trueup._core import native
from trueup._core.arrays import (
    as_arrays,
    as_logits,
    as_vector,
    as_weights,
    check_share,
    find_absent,
    is_tensor,
    match_kind,
    take_rows,
    to_array,
    upcast_half,
)
from trueup._core.clusters import as_clusters
from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.splits import row_uniform, stratified_folds
from trueup._core.values import Value
from trueup.decisions.thresholds import as_groups
from trueup.metrics.intervals import binomial_bounds
from trueup.metrics.table import plain_record

SCORES = ("lac", "aps", "raps")
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""Of RAPS, among which the smallest sets decide."""
_ROUNDING = 1e-12  # relative: sums of the same probabilities in another order
_FEW = 64  # the largest probabilities of a row, which nearly always hold its set


def conformal_quantile(scores: Any, coverage: float) -> float:
    """The ⌈(n+1)·coverage⌉-th smallest of n scores; infinite where n is too small for that.

    >>> conformal_quantile([0.3, 0.1, 0.2, 0.4], 0.6), conformal_quantile([0.3, 0.1], 0.9)
    (0.3, inf)
    """
    s = np.sort(as_vector(scores, "scores"))
    rank = math.ceil((len(s) + 1) * coverage - 1e-9)
    return float(s[rank - 1]) if rank <= len(s) else math.inf


@dataclass(frozen=True)
class Raps:
    """The score RAPS with its parameters; None is chosen on a fifth of the rows, which then do not calibrate."""

    penalty: float | None = None
    """λ, for each class beyond the rank."""
    rank: int | None = None


class PredictionSets(Value):
    """A rule from logits to sets of classes, (n, classes) of booleans: those whose score is within a limit.

    "lac": 1 − p_k, the smallest sets on average; "aps": the mass of all classes at least as probable as k, less U·p_k
    if there is a seed, sets that grow with the difficulty of a row; "raps": + λ·max(0, rank − k_reg), which trims long
    tails. Equally probable classes enter together. A set may be empty.
    Scores and limits are kept less 1, −p_k and minus the mass of the less probable classes, since near 1 they would
    lose the digits that tell a sure row from a very sure one. `quantile` is one limit, or one for each class or each of
    `groups`; with `sample_weight` it holds the sorted scores of the calibration rows.
    Sadinle et al. (2019); Romano et al. (2020); Angelopoulos et al. (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> rule = PredictionSets.fit(z[:2000], y[:2000], score="aps", coverage=0.9)
    >>> evaluate_sets(rule(z[2000:]), y[2000:]).coverage.value > 0.88
    True
    """

    quantile: Any
    sample_weight: np.ndarray | None = None

    def __init__(
        self,
        score: str,
        quantile: Any,
        coverage: float,
        penalty: float = 0.0,
        rank: int = 0,
        seed: int | None = None,
        groups: Sequence[Hashable] | None = None,
        sample_weight: Any = None,
    ) -> None:
        if score not in SCORES:
            raise InputError("score", "be lac, aps or raps", repr(score))
        self.score, self.coverage = score, check_share(coverage, "coverage")
        self.penalty, self.rank = float(penalty), int(rank)
        self.seed = None if seed is None else int(seed)
        self.groups = None if groups is None else tuple(groups)
        self.set_parameter("quantile", quantile)
        if sample_weight is not None:
            self.set_parameter("sample_weight", sample_weight)

    @staticmethod
    def upgrade(config: dict[str, Any]) -> dict[str, Any]:
        """Arguments in files of schema 1: the seed counted where `randomised`, and `scores` were apart."""
        config = dict(config)
        if not config.pop("randomised", True):
            config["seed"] = None
        scores = config.pop("scores", None)
        return config if scores is None else config | {"quantile": scores}

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        score: Literal["lac", "aps", "raps"] | Raps = "aps",
        coverage: float = 0.9,
        groups: Any = None,
        sample_weight: Any = None,
        clusters: Any = None,
        seed: int | None = 0,
    ) -> Self:
        """The limit from calibration rows that the network, and any calibrator before, has not seen.

        `groups` (n,) takes a limit for each group, so that each is covered; "class" one for each class. A class with
        fewer than 1/(1 − coverage) − 1 rows is in every set. `sample_weight` (n,), ratios of the new population's
        density to that of the rows, cover under a shift of the inputs; then the new rows need their weights too. Of
        `clusters` (n,), rows that are correlated such as the visits of a patient, one row each is used, drawn by the
        seed: the promise is about such a row of a new cluster. The U of a row follows from its logits and the seed, so
        that its set is the same wherever it stands; without it (`seed=None`) the sets of a sharp network are empty or
        large. For export say `seed=None`, or pass `uniform`.
        """
        z, y = as_arrays(logits, labels, min_rows=1)
        check_share(coverage, "coverage")
        if groups is not None and sample_weight is not None:
            raise ValueError("give one of groups and sample_weight")
        by_class = isinstance(groups, str) and groups == "class"
        group = None if groups is None or by_class else as_groups(groups, len(z), complete=True)
        weight = as_weights(sample_weight, len(z))
        independent = as_clusters(clusters, len(z))
        if independent is not None:
            kept = independent.one_row_each(seed or 0)
            (z, y), group, weight = take_rows(z, y, kept), *(x if x is None else x[kept] for x in (group, weight))
        options: dict[str, Any] = {"coverage": coverage, "seed": seed}
        if score == "raps" or isinstance(score, Raps):
            raps = score if isinstance(score, Raps) else Raps()
            if None in (raps.penalty, raps.rank):
                if len(z) < 10:
                    raise InputError("logits", "have at least 10 rows to choose the penalty of raps", str(len(z)))
                kept = stratified_folds(z, y, 5) != 0
                raps = _tune(*take_rows(z, y, ~kept), raps, options)
                (z, y), group, weight = take_rows(z, y, kept), *(x if x is None else x[kept] for x in (group, weight))
            score, options = "raps", options | {"penalty": raps.penalty, "rank": raps.rank}
        own = cls(score, math.inf, **options).label_scores(z, y)
        if by_class:
            return cls(score, [conformal_quantile(own[y == k], coverage) for k in range(z.shape[1])], **options)
        if group is not None:
            members = sorted(set(group.tolist()), key=str)
            limits = [conformal_quantile(own[group == member], coverage) for member in members]
            return cls(score, limits, **options, groups=members)
        if weight is not None:
            order = np.argsort(own, kind="stable")
            return cls(score, own[order], **options, sample_weight=weight[order])
        return cls(score, conformal_quantile(own, coverage), **options)

    def __call__(self, logits: Any, *, groups: Any = None, sample_weight: Any = None, uniform: Any = None) -> Any:
        """The sets of rows (n, classes), of any kind of array, as booleans of its shape.

        No set has an option that its row does not have, a logit of −∞. `uniform` (n,) replaces the numbers that follow
        from each row.
        """
        z = upcast_half(as_logits(logits))
        self._check_classes(z)
        limit = self._limits(len(z), groups, sample_weight)
        u = self._uniform(NUMPY, z, uniform)
        sets = np.empty(z.shape, bool)
        for at in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
            p = NUMPY.softmax(z[at])
            if self._has_class_limits:
                sets[at] = self._scores(NUMPY, p, u[at]) <= _widen(limit)
            elif self.score == "lac":
                sets[at] = p >= (-limit[at, None]).astype(p.dtype)
            else:
                sets[at] = p > self._first_excluded(p, u[at], _widen(limit[at]))[:, None]
        absent = find_absent(z)
        return match_kind(sets if absent is None else sets & ~absent, logits)

    def forward(
        self, xp: Namespace, z: Any, *, groups: Any = None, sample_weight: Any = None, uniform: Any = None
    ) -> Any:
        """The sets of logits of the namespace, for modules and exports."""
        p = xp.softmax(xp.upcast_half(z))
        scores = self._scores(xp, p, self._uniform(xp, z, uniform))
        self._check_classes(z)
        limit = self.quantile
        if self.groups is not None or self.sample_weight is not None:
            limit = xp.constant(self._limits(z.shape[0], groups, sample_weight), z)[:, None]
        return (scores <= _widen(limit)) & (z > -math.inf)

    def label_scores(self, logits: Any, labels: Any, *, uniform: Any = None) -> np.ndarray:
        """The score of each row's own label, less 1, (n,), in float64."""
        z, y = as_arrays(logits, labels)
        z = upcast_half(z)
        u, scores = self._uniform(NUMPY, z, uniform), np.empty(len(z))
        for at in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
            p = NUMPY.softmax(z[at])
            own = np.take_along_axis(p, y[at, None], axis=1)
            if self.score == "lac":
                scores[at] = -own[:, 0]
                continue
            below = p < own
            scores[at] = -(p * below).sum(axis=1, dtype=np.float64) - u[at] * own[:, 0]
            if self.penalty:
                scores[at] += self.penalty * np.maximum(p.shape[1] - below.sum(axis=1) - self.rank, 0)
        return scores

    def all_scores(self, logits: Any, *, uniform: Any = None) -> np.ndarray:
        """The score of every class, less 1, (n, classes), in float64."""
        z = upcast_half(as_logits(logits))
        scores: np.ndarray = self._scores(NUMPY, NUMPY.softmax(z), self._uniform(NUMPY, z, uniform))
        return scores

    def _scores(self, xp: Namespace, p: Any, u: Any) -> Any:
        wide = xp.double(p)
        if self.score == "lac":
            return -wide
        ordered = xp.sort(p, axis=1)  # sums run from the small end
        smaller = _count_smaller(p) if xp.is_numpy else xp.searchsorted(ordered, p)
        total = xp.cumulative_sum(xp.double(ordered), axis=1)
        below = xp.take_along_axis(xp.concat([xp.zeros_like(total[:, :1]), total], axis=1), smaller, axis=1)
        scores = -below - u[:, None] * wide
        if self.penalty:
            scores = scores + self.penalty * xp.astype(xp.clip(p.shape[1] - smaller - self.rank, min=0), wide.dtype)
        return scores

    def _first_excluded(self, p: np.ndarray, u: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """The largest probability of each row that is not in its set: scores grow as probabilities fall.

        Only the largest few are sorted, and more where they all are in the set. Sums run from the small end.
        """
        classes = p.shape[1]
        out = np.full(len(p), -1.0, p.dtype)
        rows = np.arange(len(p))
        width = min(_FEW, classes)
        while len(rows):
            part = p if len(rows) == len(p) else p[rows]
            low, top = np.zeros((len(rows), 1)), part
            if width < classes:
                part = np.partition(part, classes - width, axis=1)
                low = part[:, : classes - width].sum(axis=1, dtype=np.float64, keepdims=True)
                top = part[:, classes - width :]
            top = np.sort(top, axis=1)
            mass = np.concatenate([low, top[:, :-1]], axis=1, dtype=np.float64).cumsum(axis=1)
            score = -(mass + u[rows, None] * top)
            if self.penalty:
                score += self.penalty * np.maximum(np.arange(width, 0, -1) - self.rank, 0)
            outside = (score > limit[rows, None]).sum(axis=1)
            some = np.flatnonzero(outside)
            out[rows[some]] = top[some, outside[some] - 1]
            rows = rows[outside == 0] if width < classes else rows[:0]
            width = min(8 * width, classes)
        return out

    def _uniform(self, xp: Namespace, z: Any, uniform: Any) -> Any:
        if uniform is not None:
            return xp.constant(uniform, z)
        if self.seed is None or self.score == "lac":
            return xp.zeros_like(xp.double(z[:, 0]))
        if xp.is_traced(z):
            raise ValueError("randomised sets need uniform to be exported; fit with seed=None, or pass uniform")
        return xp.constant(row_uniform(to_array(z, "logits"), self.seed), z)

    @property
    def _has_class_limits(self) -> bool:
        return self.groups is None and self.sample_weight is None and np.ndim(self.quantile) == 1

    def _check_classes(self, z: Any) -> None:
        if self._has_class_limits and z.shape[1] != len(self.quantile):
            raise InputError("logits", f"have the {len(self.quantile)} classes of the rule", str(z.shape[1]))

    def _limits(self, n: int, groups: Any, sample_weight: Any) -> np.ndarray:
        """The limit of each row, or of each class."""
        limits = to_array(self.quantile, "quantile")
        if self.groups is not None:
            if groups is None:
                raise ValueError("groups must be given: each group has a limit of its own")
            number = {group: k for k, group in enumerate(self.groups)}  # a group that was never seen has all classes
            rows = [number.get(group, -1) for group in as_groups(groups, n).tolist()]
            return np.append(limits, math.inf)[rows]
        if self.sample_weight is not None:
            if sample_weight is None:
                raise ValueError("sample_weight must be given: the limit of a row depends on its own")
            own = as_vector(sample_weight, "sample_weight", length=n)
            if n and own.min() < 0:
                raise InputError("sample_weight", "be non-negative", f"{own.min():g}")
            mass = np.cumsum(to_array(self.sample_weight, "sample_weight"))
            at = np.searchsorted(mass, self.coverage * (mass[-1] + own) * (1 - 1e-12), side="left")
            return np.append(limits, math.inf)[at]
        return np.broadcast_to(limits, (n,)) if limits.ndim == 0 else limits


def _count_smaller(p: np.ndarray) -> np.ndarray:
    """How many entries of its row are smaller than each."""
    order = np.argsort(p, axis=1)
    ordered = np.take_along_axis(p, order, axis=1)
    new = np.diff(ordered, axis=1, prepend=ordered[:, :1] - 1) != 0
    first = np.maximum.accumulate(np.where(new, np.arange(p.shape[1]), 0), axis=1)
    smaller = np.empty_like(order)
    np.put_along_axis(smaller, order, first, axis=1)
    return smaller


def _widen(limit: Any) -> Any:
    """A limit that rounding cannot turn round."""
    return limit + _ROUNDING * abs(limit)


def _tune(z: np.ndarray, y: np.ndarray, score: Raps, options: dict[str, Any]) -> Raps:
    """The rank that covers, and of the penalties that of the smallest sets."""
    rank = score.rank
    if rank is None:
        p = NUMPY.softmax(upcast_half(z))
        ranks = (p >= np.take_along_axis(p, y[:, None], axis=1)).sum(axis=1)
        rank = int(min(conformal_quantile(ranks.astype(np.float64), options["coverage"]), z.shape[1]))
    if score.penalty is not None:
        return Raps(score.penalty, rank)

    def size(penalty: float) -> float:
        extra = options | {"penalty": penalty, "rank": rank}
        scores = PredictionSets("raps", math.inf, **extra).label_scores(z, y)
        limit = conformal_quantile(scores, options["coverage"])
        return float(PredictionSets("raps", limit, **extra)(z).sum(axis=1).mean())

    return Raps(min(PENALTIES, key=size), rank)


@dataclass(frozen=True)
class Coverage:
    """How often sets hold the truth, with an exact interval."""

    value: float
    low: float
    high: float
    rows: int


@dataclass(frozen=True, eq=False)
class SetScores:
    """How prediction sets do on labelled rows."""

    coverage: Coverage
    size: float
    """The mean number of classes in a set."""
    empty: float
    """The share of empty sets."""
    by_size: dict[str, Coverage]
    """Coverage of the sets of each size: a rule that adapts covers alike in all."""
    by_class: tuple[Coverage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        numbers = {"coverage": plain_record(vars(self.coverage)), "size": self.size, "empty": self.empty}
        by_size = {name: plain_record(vars(one)) for name, one in self.by_size.items()}
        by_class = [plain_record(vars(one)) for one in self.by_class]
        return {"schema": 1, **plain_record(numbers), "by_size": by_size, "by_class": by_class}

    def __str__(self) -> str:
        c = self.coverage
        table = [["set size", "rows", "coverage", "95 % interval"]]
        for name, one in self.by_size.items():
            table.append([name, f"{one.rows:,}", format_number(one.value), format_interval(one.low, one.high)])
        held, low, high, empty = (format_percent(share, 1) for share in (c.value, c.low, c.high, self.empty))
        head = f"The sets hold the truth in {held} of {c.rows:,} rows (95 % interval {low} to {high}) "
        head += f"and have {self.size:.2f} classes on average; {empty} are empty."
        lines = [head, "", text_table(table)]
        if seen := [(one.value, k) for k, one in enumerate(self.by_class) if one.rows]:
            least, worst = min(seen)
            lines += ["", f"The class covered least is {worst}: {format_percent(least, 1)}."]
        return "\n".join(lines)


def evaluate_sets(sets: Any, labels: Any) -> SetScores:
    """Coverage, size and coverage by size and class of prediction sets (n, classes) of booleans.

    >>> print(evaluate_sets([[True, False], [True, True], [False, True]], [0, 1, 0]))
    The sets hold the truth in 66.7 % of 3 rows (95 % interval 9.4 % to 99.2 %) and have 1.33 classes on average; 0.0 %
    are empty.
    <BLANKLINE>
    set size  rows  coverage     95 % interval
    1            2    0.5000  [0.0126, 0.9874]
    2            1    1.0000  [0.0250, 1.0000]
    <BLANKLINE>
    The class covered least is 0: 50.0 %.
    """
    chosen = np.asarray(sets.cpu() if is_tensor(sets) else sets)
    if chosen.ndim != 2 or chosen.dtype != bool:
        raise InputError("sets", "be booleans of shape (n, classes)", f"{chosen.dtype} of shape {chosen.shape}")
    true = as_arrays(np.zeros(chosen.shape), labels, min_rows=1)[1]
    held = chosen[np.arange(len(true)), true]
    size = chosen.sum(axis=1)
    bands = _size_bands(chosen.shape[1])
    by_size = {name: _coverage(held[(size >= low) & (size <= high)]) for name, low, high in bands}
    by_size = {name: one for name, one in by_size.items() if one.rows}
    by_class = tuple(_coverage(held[true == k]) for k in range(chosen.shape[1]))
    return SetScores(_coverage(held), float(size.mean()), float((size == 0).mean()), by_size, by_class)


def _coverage(held: np.ndarray) -> Coverage:
    n, hits = len(held), float(held.sum())
    if not n:
        return Coverage(math.nan, math.nan, math.nan, 0)
    low, high = binomial_bounds(np.array(hits), np.array(float(n)), 0.025)
    return Coverage(hits / n, float(low), float(high), n)


def _size_bands(classes: int) -> list[tuple[str, int, int]]:
    ends = [*(end for end in (0, 1, 2, 3, 5, 10, 30, 100, 300, 1000) if end < classes), classes]
    bands = [(f"{high}" if high == low + 1 else f"{low + 1}–{high}", low + 1, high) for low, high in pairwise(ends)]
    return [("0", 0, 0), *bands]
