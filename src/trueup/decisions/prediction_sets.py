"""Prediction sets: sets of classes that contain the true class with a stated probability (split conformal).

A nonconformity score measures how badly a class fits a row. The limit is the ⌈(n+1)·coverage⌉-th smallest score of the
true classes of n calibration rows. A set holds all classes whose score is within the limit. If new rows are
exchangeable with the calibration rows, it contains the true class with at least that probability, for any network.
Temperature scaling tends to enlarge APS sets: it keeps the order of the classes within a row but not between rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self, cast

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
from trueup._core.types import ArrayLike, ArrayT
from trueup._core.values import Value
from trueup.decisions.thresholds import as_groups
from trueup.metrics.intervals import binomial_bounds
from trueup.metrics.table import plain_record

SCORES = ("lac", "aps", "raps")
"""Names of the nonconformity scores."""
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""Candidate penalties of RAPS; the one with the smallest sets is chosen."""
_ROUNDING = 1e-12  # Relative rounding error of a sum of probabilities in another order
_SORTED_CLASSES = 64  # Number of largest probabilities that are sorted first; they nearly always include the whole set


def conformal_quantile(scores: ArrayLike, coverage: float) -> float:
    """Return the ⌈(n+1)·coverage⌉-th smallest of n scores; infinite if n is too small.

    Parameters
    ----------
    scores
        Calibration scores, shape (n,).
    coverage
        Probability with which a new score shall lie within the quantile.

    Returns
    -------
    float
        The quantile.

    Examples
    --------
    >>> conformal_quantile([0.3, 0.1, 0.2, 0.4], 0.6), conformal_quantile([0.3, 0.1], 0.9)
    (0.3, inf)
    """
    s = np.sort(as_vector(scores, "scores"))
    rank = math.ceil((len(s) + 1) * coverage - 1e-9)
    return float(s[rank - 1]) if rank <= len(s) else math.inf


@dataclass(frozen=True)
class Raps:
    """The score RAPS with its parameters; a fifth of the rows chooses those that are None.

    Parameters
    ----------
    penalty
        Penalty λ for each class beyond the rank.
    rank
        Rank k_reg up to which classes have no penalty.
    """

    penalty: float | None = None
    rank: int | None = None


class PredictionSets(Value):
    """A rule that maps logits to sets of classes: booleans of shape (n, classes).

    Scores: "lac" is 1 − p_k and has the smallest sets on average. "aps" is the mass of all classes at least as probable
    as k, minus U·p_k if there is a seed; its sets grow with the difficulty of a row. "raps" adds
    λ·max(0, rank − k_reg), which shortens long tails. Equally probable classes enter together. A set may be empty.
    Scores and limits are stored minus 1, because floating-point numbers near 1 cannot resolve tiny tail probabilities.

    Parameters
    ----------
    score
        "lac", "aps" or "raps".
    quantile
        One limit, or one per class or per group. With `sample_weight`, the sorted scores of the calibration rows.
    coverage
        Probability with which a set contains the true class.
    penalty
        Penalty λ of RAPS.
    rank
        Rank k_reg of RAPS.
    seed
        Seed of the random numbers U; None gives deterministic sets.
    groups
        Names of the groups whose limits `quantile` holds.
    sample_weight
        Weights of the calibration rows, in the order of their scores.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> rule = PredictionSets.fit(z[:2000], y[:2000], score="aps", coverage=0.9)
    >>> evaluate_sets(rule(z[2000:]), y[2000:]).coverage.value > 0.88
    True

    References
    ----------
    Sadinle, Lei and Wasserman (2019), arXiv:1609.00451. Romano, Sesia and Candès (2020), arXiv:2006.02544.
    Angelopoulos et al. (2021), arXiv:2009.14193. Tibshirani et al. (2019), arXiv:1904.06019, for weights.
    """

    quantile: Any
    sample_weight: np.ndarray | None = None

    def __init__(
        self,
        score: str,
        quantile: ArrayLike,
        coverage: float,
        penalty: float = 0.0,
        rank: int = 0,
        seed: int | None = None,
        groups: Sequence[Hashable] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        if score not in SCORES:
            raise InputError("score", "be lac, aps or raps", repr(score))
        self.score, self.coverage = score, check_share(coverage, "coverage")
        self.penalty, self.rank = float(penalty), int(rank)
        self.seed = None if seed is None else int(seed)
        self.groups = None if groups is None else tuple(groups)
        self.set_parameters(quantile=quantile)
        if sample_weight is not None:
            self.set_parameters(sample_weight=sample_weight)

    @staticmethod
    def upgrade(config: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments in files of schema 1, which had `randomised` and `scores`."""
        config = dict(config)
        if not config.pop("randomised", True):
            config["seed"] = None
        scores = config.pop("scores", None)
        return config if scores is None else config | {"quantile": scores}

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        score: Literal["lac", "aps", "raps"] | Raps = "aps",
        coverage: float = 0.9,
        groups: ArrayLike | Literal["class"] | None = None,
        sample_weight: ArrayLike | None = None,
        clusters: ArrayLike | None = None,
        seed: int | None = 0,
    ) -> Self:
        """Estimate the limit from calibration rows to which neither the network nor its calibrator was fitted.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        labels
            Classes, shape (n,).
        score
            Nonconformity score.
        coverage
            Probability with which a set contains the true class.
        groups
            Groups, shape (n,), each of which gets its own limit and coverage; "class" gives each class its own limit.
            A class with fewer than 1/(1 − coverage) − 1 rows is in every set.
        sample_weight
            Ratios of the new population's density to that of the rows, shape (n,), for a shift of the inputs. New rows
            then need their ratios too.
        clusters
            Cluster of each row, shape (n,), where rows are correlated (visits of a patient). One random row per cluster
            is used, and the coverage holds for such a row of a new cluster.
        seed
            Seed of the random numbers U. The U of a row depends only on its logits and the seed. With None the sets
            are deterministic, but those of a confident network are empty or large. Exports need None, or `uniform`.

        Returns
        -------
        PredictionSets
            The rule.
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
        scores = cls(score, math.inf, **options).label_scores(z, y)
        if by_class or group is not None:
            of_row: np.ndarray = y if group is None else group
            members = range(z.shape[1]) if by_class else sorted(set(of_row.tolist()), key=str)
            limits = [conformal_quantile(scores[of_row == member], coverage) for member in members]
            if small := [str(member) for member, limit in zip(members, limits, strict=True) if math.isinf(limit)]:
                names = ", ".join(small[:5]) + (" …" if len(small) > 5 else "")
                rows = f"fewer than {math.ceil(coverage / (1 - coverage) - 1e-9)} rows: "
                effect = f"class {names} has {rows}it is in every set" if by_class else ""
                warnings.warn(effect or f"group {names} has {rows}its sets hold every class", stacklevel=2)
            return cls(score, limits, **options, groups=None if by_class else members)
        if weight is not None:
            order = np.argsort(scores, kind="stable")
            return cls(score, scores[order], **options, sample_weight=weight[order])
        return cls(score, conformal_quantile(scores, coverage), **options)

    def __call__(
        self,
        logits: ArrayT,
        *,
        groups: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        uniform: ArrayLike | None = None,
    ) -> ArrayT:
        """Return the sets as booleans, in the input's kind of array.

        An option with a logit of −∞ is in no set.

        Parameters
        ----------
        logits
            Logits, shape (n, classes).
        groups
            Group of each row, shape (n,), if each group has its own limit.
        sample_weight
            Density ratio of each row, shape (n,), if the rule was fitted with weights.
        uniform
            Random numbers U in [0, 1], shape (n,); by default they follow from each row and the seed.

        Returns
        -------
        ArrayT
            Booleans, shape (n, classes).
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
        """Return the sets of logits in the array library `xp`, for modules and exports."""
        p = xp.softmax(xp.upcast_half(z))
        scores = self._scores(xp, p, self._uniform(xp, z, uniform))
        self._check_classes(z)
        limit = self.quantile
        if self.groups is not None or self.sample_weight is not None:
            limit = xp.constant(self._limits(z.shape[0], groups, sample_weight), z)[:, None]
        return (scores <= _widen(limit)) & (z > -math.inf)

    def label_scores(self, logits: ArrayLike, labels: ArrayLike, *, uniform: ArrayLike | None = None) -> np.ndarray:
        """Return the score of each row's label, minus 1, in float64, shape (n,).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        labels
            True classes, shape (n,).
        uniform
            Uniform numbers in [0, 1] that randomize the scores, shape (n,); by default from the seed.

        Returns
        -------
        ndarray
            The scores, shape (n,).
        """
        z, y = as_arrays(logits, labels)
        z = upcast_half(z)
        u, scores = self._uniform(NUMPY, z, uniform), np.empty(len(z))
        for at in native.row_chunks(len(z), z.shape[1], native.CACHE_CHUNK):
            p = NUMPY.softmax(z[at])
            label_prob = np.take_along_axis(p, y[at, None], axis=1)
            if self.score == "lac":
                scores[at] = -label_prob[:, 0]
                continue
            below = p < label_prob
            scores[at] = -(p * below).sum(axis=1, dtype=np.float64) - u[at] * label_prob[:, 0]
            if self.penalty:
                scores[at] += self.penalty * np.maximum(p.shape[1] - below.sum(axis=1) - self.rank, 0)
        return scores

    def all_scores(self, logits: ArrayLike, *, uniform: ArrayLike | None = None) -> np.ndarray:
        """Return the score of every class, minus 1, in float64, shape (n, classes).

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        uniform
            Uniform numbers in [0, 1] that randomize the scores, shape (n,); by default from the seed.

        Returns
        -------
        ndarray
            The scores, shape (n, classes).
        """
        z = upcast_half(as_logits(logits))
        scores: np.ndarray = self._scores(NUMPY, NUMPY.softmax(z), self._uniform(NUMPY, z, uniform))
        return scores

    def _scores(self, xp: Namespace, p: Any, u: Any) -> Any:
        wide = xp.double(p)
        if self.score == "lac":
            return -wide
        ordered = xp.sort(p, axis=1)  # sums start at the smallest probability, for precision
        smaller = _count_smaller(p) if xp.is_numpy else xp.searchsorted(ordered, p)
        total = xp.cumulative_sum(xp.double(ordered), axis=1)
        below = xp.take_along_axis(xp.concat([xp.zeros_like(total[:, :1]), total], axis=1), smaller, axis=1)
        scores = -below - u[:, None] * wide
        if self.penalty:
            scores = scores + self.penalty * xp.astype(xp.clip(p.shape[1] - smaller - self.rank, min=0), wide.dtype)
        return scores

    def _first_excluded(self, p: np.ndarray, u: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Return the largest probability of each row that is outside its set; scores grow as probabilities fall.

        Only the largest probabilities are sorted, and more of them if all are in the set.
        """
        classes = p.shape[1]
        out = np.full(len(p), -1.0, p.dtype)
        rows = np.arange(len(p))
        width = min(_SORTED_CLASSES, classes)
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
        """Return the limit of each row, or of each class."""
        limits = to_array(self.quantile, "quantile")
        if self.groups is not None:
            if groups is None:
                raise ValueError("groups must be given: the rule has one limit per group")
            number = {group: k for k, group in enumerate(self.groups)}  # the sets of an unknown group hold all classes
            rows = [number.get(group, -1) for group in as_groups(groups, n).tolist()]
            return np.append(limits, math.inf)[rows]
        if self.sample_weight is not None:
            if sample_weight is None:
                raise ValueError("sample_weight must be given: the limit of a row depends on its weight")
            weight = as_vector(sample_weight, "sample_weight", length=n)
            if n and weight.min() < 0:
                raise InputError("sample_weight", "be non-negative", f"{weight.min():g}")
            mass = np.cumsum(to_array(self.sample_weight, "sample_weight"))
            at = np.searchsorted(mass, self.coverage * (mass[-1] + weight) * (1 - 1e-12), side="left")
            return np.append(limits, math.inf)[at]
        return np.broadcast_to(limits, (n,)) if limits.ndim == 0 else limits


def _count_smaller(p: np.ndarray) -> np.ndarray:
    """Count, for each entry, the smaller entries of its row."""
    order = np.argsort(p, axis=1)
    ordered = np.take_along_axis(p, order, axis=1)
    new = np.diff(ordered, axis=1, prepend=ordered[:, :1] - 1) != 0
    first = np.maximum.accumulate(np.where(new, np.arange(p.shape[1]), 0), axis=1)
    smaller = np.empty_like(order)
    np.put_along_axis(smaller, order, first, axis=1)
    return smaller


def _widen(limit: Any) -> Any:
    """Raise a limit by the rounding error, so that equal scores are within it."""
    return limit + _ROUNDING * abs(limit)


def _tune(z: np.ndarray, y: np.ndarray, score: Raps, options: dict[str, Any]) -> Raps:
    """Choose the rank that covers the labels, and the penalty with the smallest sets."""
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
    """Share of sets that contain the true class, with an exact 95 % interval."""

    value: float
    """The share; NaN without rows."""
    low: float
    """Lower end of its interval."""
    high: float
    """Upper end of its interval."""
    rows: int
    """Number of rows."""


@dataclass(frozen=True, eq=False)
class SetScores:
    """Coverage and size of prediction sets on labelled rows."""

    coverage: Coverage
    """Coverage over all rows."""
    size: float
    """Mean number of classes in a set."""
    empty: float
    """Share of empty sets."""
    by_size: dict[str, Coverage]
    """Coverage by size of the set; an adaptive rule has similar coverage at all sizes."""
    by_class: tuple[Coverage, ...]
    """Coverage by true class."""

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
        covered, low, high, empty = (format_percent(share, 1) for share in (c.value, c.low, c.high, self.empty))
        head = f"The sets contain the true class in {covered} of {c.rows:,} rows (95 % interval {low} to {high}) "
        head += f"with {self.size:.2f} classes on average; {empty} are empty."
        lines = [head, "", text_table(table)]
        if shares := [(one.value, k) for k, one in enumerate(self.by_class) if one.rows]:
            lowest, worst = min(shares)
            lines += ["", f"Class {worst} has the lowest coverage: {format_percent(lowest, 1)}."]
        return "\n".join(lines)


def evaluate_sets(sets: ArrayLike, labels: ArrayLike) -> SetScores:
    """Measure the coverage and size of prediction sets, also by size and by class.

    Parameters
    ----------
    sets
        Booleans, shape (n, classes): whether a class is in the set of a row.
    labels
        Classes, shape (n,).

    Returns
    -------
    SetScores
        The results; prints as a table.

    Examples
    --------
    >>> print(evaluate_sets([[True, False], [True, True], [False, True]], [0, 1, 0]))
    The sets contain the true class in 66.7 % of 3 rows (95 % interval 9.4 % to 99.2 %) with 1.33 classes on average;
    ...
    <BLANKLINE>
    set size  rows  coverage     95 % interval
    1            2    0.5000  [0.0126, 0.9874]
    2            1    1.0000  [0.0250, 1.0000]
    <BLANKLINE>
    Class 0 has the lowest coverage: 50.0 %.
    """
    chosen = np.asarray(cast("Any", sets).cpu() if is_tensor(sets) else sets)
    if chosen.ndim != 2 or chosen.dtype != bool:
        raise InputError("sets", "be booleans of shape (n, classes)", f"{chosen.dtype} of shape {chosen.shape}")
    true = as_arrays(np.zeros(chosen.shape), labels, min_rows=1)[1]
    covered = chosen[np.arange(len(true)), true]
    size = chosen.sum(axis=1)
    bands = _size_bands(chosen.shape[1])
    by_size = {name: _coverage(covered[(size >= low) & (size <= high)]) for name, low, high in bands}
    by_size = {name: one for name, one in by_size.items() if one.rows}
    by_class = tuple(_coverage(covered[true == k]) for k in range(chosen.shape[1]))
    return SetScores(_coverage(covered), float(size.mean()), float((size == 0).mean()), by_size, by_class)


def _coverage(covered: np.ndarray) -> Coverage:
    n, hits = len(covered), float(covered.sum())
    if not n:
        return Coverage(math.nan, math.nan, math.nan, 0)
    low, high = binomial_bounds(np.array(hits), np.array(float(n)), 0.025)
    return Coverage(hits / n, float(low), float(high), n)


def _size_bands(classes: int) -> list[tuple[str, int, int]]:
    ends = [*(end for end in (0, 1, 2, 3, 5, 10, 30, 100, 300, 1000) if end < classes), classes]
    bands = [(f"{high}" if high == low + 1 else f"{low + 1}–{high}", low + 1, high) for low, high in pairwise(ends)]
    return [("0", 0, 0), *bands]
