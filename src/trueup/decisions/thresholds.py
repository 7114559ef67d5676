"""Thresholds with a promise: from which confidence on a risk is bounded, with a stated certainty.

Candidate thresholds are the distinct scores, tested from the highest to the lowest: at each the hypothesis "the risk of
what lies at or above it exceeds the bound" has an exact binomial p-value (for a matrix of costs one by betting), and
the first that cannot be rejected ends the sequence. No correction for many thresholds is needed, since a threshold is
only tested when all before it passed. A test of few rows can fail by bad luck even where nearly everything is right,
which would end the sequence at its first step; so there are several starts, which share the error budget, and the
budget of a chain that arrives at the next start is added to it (the fallback procedure).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import bdtr, logsumexp, ndtri

from trueup._core.arrays import as_arrays, as_logits, check_share, is_tensor, match_kind, take_rows
from trueup._core.bins import tie_ends
from trueup._core.clusters import as_clusters
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent
from trueup._core.registry import METHODS
from trueup._core.row_scores import event_class, event_name, score_and_class
from trueup._core.splits import stratified_folds
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import cross_fit
from trueup.metrics.intervals import binomial_bounds
from trueup.metrics.table import plain_record

RISKS: Mapping[str, str] = {
    "error": "of the answers are wrong",
    "false_discovery_rate": "of the rows flagged as the event are not the event",
    "false_positive_rate": "of the rows without the event are flagged",
    "cost": "of the largest cost",
}
"""Risk → how a sentence on it goes on after the number."""

FIRST_START = 8
"""The first start, and the best paid one, is at an eighth of the rows; the others at a 64th, a 512th …"""
_POINTS = 200
_BETS = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
"""Shares of the largest bet that betting on a mean cost may place, each with the same part of the money."""


_ARRAYS = ("threshold", "coverage", "risk", "losses", "trials")


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """The risk of the rows at or above each threshold, highest first, with pointwise intervals."""

    threshold: np.ndarray
    coverage: np.ndarray
    """The share of all rows at or above the threshold."""
    risk: np.ndarray
    losses: np.ndarray
    """Their sum, of `trials` rows that the risk is a mean over."""
    trials: np.ndarray
    level: float
    """Of each one-sided bound; NaN for costs, whose bound is tested directly."""

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Clopper and Pearson's one-sided bounds of each risk, below and above; NaN for costs."""
        if math.isnan(self.level):
            return (np.full(len(self.risk), math.nan),) * 2
        return binomial_bounds(self.losses, self.trials, 1 - self.level)

    @property
    def low(self) -> np.ndarray:
        """The bounds below."""
        return self.bounds[0]

    @property
    def high(self) -> np.ndarray:
        """The bounds above."""
        return self.bounds[1]

    def at(self, places: Any) -> RiskCurve:
        """Some of its points."""
        return replace(self, **{name: getattr(self, name)[places] for name in _ARRAYS})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        columns = {name: getattr(self, name) for name in ("threshold", "coverage", "risk", "low", "high")}
        return {name: [x if math.isfinite(x) else None for x in column.tolist()] for name, column in columns.items()}

    def thin(self, points: int = _POINTS) -> RiskCurve:
        """At most so many of its points, evenly spread."""
        n = len(self.threshold)
        return self.at(np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(np.int64)))


@dataclass(frozen=True, eq=False)
class Threshold:
    """The least score from which a risk is bounded with a stated certainty, or the news that there is none."""

    threshold: float
    """Rows that score at least this are answered; infinite where nothing can be promised."""
    max_risk: float
    level: float
    risk: str
    event: int | None
    rows: int
    """That carry the promise."""
    answered: int
    observed: float
    """The risk seen among the answered rows; NaN without any."""
    bound: float
    """The upper end of the one-sided interval of the risk at this threshold; NaN for costs."""
    labels_needed: int | None
    """About how many labelled rows would do where nothing can be promised; None where more rows would not help."""
    curve: RiskCurve = field(repr=False)
    calibrator: Calibrator | None = None
    """What was fitted here on other rows, if a method was given: apply it before the threshold."""
    note: str = ""
    event_name: str | None = None
    """How the event is called, where its class has a name."""

    @property
    def promised(self) -> bool:
        """Whether there is a threshold."""
        return math.isfinite(self.threshold)

    @property
    def coverage(self) -> float:
        """The share of rows that are answered."""
        return self.answered / self.rows if self.rows else math.nan

    @property
    def review(self) -> float:
        """The share of rows that are not, and go to somebody else."""
        return 1 - self.coverage

    @property
    def hopeless(self) -> bool:
        """Whether the rows show that the risk is too large wherever there are enough of them to judge."""
        kept = self.curve.coverage * self.rows
        low = np.where(np.isnan(self.curve.low), self.curve.risk, self.curve.low)[kept >= _enough(self.rows)]
        return bool(len(low) and (low > self.max_risk).all())

    def answers(self, logits: Any) -> Any:
        """Which rows score at least the threshold, (n,), booleans; the calibrator, if there is one, goes first."""
        z = as_logits(logits)
        if self.calibrator is not None:
            z = as_logits(self.calibrator(z))
        return match_kind(score_and_class(z, self.event)[0] >= self.threshold, logits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        numbers = ("threshold", "max_risk", "level", "rows", "answered", "coverage", "review", "observed", "bound")
        names = ("promised", "risk", "event", *numbers, "labels_needed", "note")
        calibrator = None if self.calibrator is None else repr(self.calibrator)
        record = plain_record({name: getattr(self, name) for name in names})
        return {"schema": 1, **record, "calibrator": calibrator, "curve": self.curve.thin().to_dict()}

    def __str__(self) -> str:
        score = "confidence" if self.event is None else f"probability of {self.event_name or f'class {self.event}'}"
        limit = f"{self.max_risk:g}" if self.risk == "cost" else format_percent(self.max_risk)
        cost = f"the mean cost of an answer is at most {limit}"
        bound = cost if self.risk == "cost" else f"at most {limit} {RISKS[self.risk]}"
        promise = f"{bound}, with {format_percent(self.level)} certainty"
        if self.promised:
            verb, done, rest = (
                ("Flag", "flagged", "are not") if self.event is not None else ("Answer", "answered", "go to review")
            )
            seen = f"{self.observed:.4g}" if self.risk == "cost" else format_percent(self.observed, 2)
            lines = [f"{verb} when the {score} is at least {self.threshold:.4g}: {promise}."]
            lines.append(f"{format_percent(self.coverage, 1)} of the rows are {done};")
            lines.append(f"of 1,000 rows {round(1000 * self.review)} {rest}.")
            lines.append(f"The risk seen there is {seen} ({self.rows:,} labelled rows).")
        else:
            lines = [f"Nothing can be promised from {self.rows:,} rows: they show of no threshold that {promise}."]
            advice = "They are too few to tell whether more would help."
            if self.labels_needed is not None:
                advice = f"About {self.labels_needed:,} labelled rows would do, if the risk stays what it looks like."
            elif self.hopeless:
                advice = "More labels are not likely to help: even the risk of the highest scores looks too large."
            lines.append(advice)
        return " ".join([*lines, self.note]).rstrip()


@dataclass(frozen=True, eq=False)
class GroupThresholds(Mapping[Hashable, Threshold]):
    """A threshold for each group; all promises hold together with the stated certainty."""

    groups: Mapping[Hashable, Threshold]
    level: float

    def __getitem__(self, group: Hashable) -> Threshold:
        return self.groups[group]

    def __iter__(self) -> Any:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def coverage(self) -> float:
        """The share of all rows that are answered."""
        rows = sum(one.rows for one in self.groups.values())
        return sum(one.answered for one in self.groups.values()) / rows if rows else math.nan

    def answers(self, logits: Any, groups: Any) -> Any:
        """Which rows score at least the threshold of their group; rows of a group without one are not answered."""
        z = as_logits(logits)
        given = as_groups(groups, len(z))
        mask = np.zeros(len(z), bool)
        for group, one in self.groups.items():
            rows = np.flatnonzero(given == group)
            mask[rows] = one.answers(z[rows])
        return match_kind(mask, logits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        groups = {str(group): one.to_dict() for group, one in self.groups.items()}
        return {"schema": 1, **plain_record({"level": self.level, "coverage": self.coverage}), "groups": groups}

    def __str__(self) -> str:
        head = f"All promises hold together with {format_percent(self.level)} certainty."
        promised = any(one.promised for one in self.groups.values())
        return "\n".join([*([head] if promised else []), *(f"{group}: {one}" for group, one in self.groups.items())])


@dataclass(frozen=True)
class EventRisk:
    """A risk of flagging the rows whose P(event) is at least the threshold."""

    risk: Literal["false_discovery_rate", "false_positive_rate"] = "false_discovery_rate"
    """P(not the event | flagged), or P(flagged | not the event)."""
    event: int | str = 1
    """A class by its number, or one of `class_names`."""
    class_names: Sequence[str] | None = None


def threshold(
    logits: Any,
    labels: Any,
    *,
    risk: Literal["error", "false_discovery_rate", "false_positive_rate"] | EventRisk | Any = "error",
    max_risk: float = 0.02,
    level: float = 0.95,
    groups: Any = None,
    clusters: Any = None,
    seed: int = 0,
) -> Any:
    """The least confidence from which a risk is at most so large, with a stated certainty.

    With probability `level` over the labelled rows, P(wrong | score ≥ threshold) ≤ `max_risk`. Instead of errors,
    `risk` may be "false_discovery_rate" or "false_positive_rate" of class 1, an `EventRisk` of any class, or a matrix
    (K, K) of the costs of predicting class j where i is true, whose mean over the answers is then bounded. `groups`
    (n,) gives each group a threshold, and all promises hold together. `clusters` (n,) says which rows are correlated,
    such as the visits of a patient: one row of each, drawn by the `seed`, then carries the promise, which is about such
    a row of a new cluster. The rows must not have fitted or chosen the calibrator: see `calibrated_threshold`.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10)) * 4
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> result = threshold(z, y, max_risk=0.05)
    >>> print(result)
    Answer when the confidence is at least 0.8931: at most 5 % of the answers are wrong, with 95 % certainty. 31.7 % of
    the rows are answered; of 1,000 rows 683 go to review. The risk seen there is 4.04 % (5,000 labelled rows).

    Bauer (1991), Wiens (2003) for the sequence; Angelopoulos et al., "Learn then test" (2021); Geifman and El-Yaniv,
    "Selective classification for deep neural networks" (2017).
    """
    z, y = as_arrays(logits, labels)
    problem, costs, name = _Problem.of(risk, max_risk, z.shape[1])
    check_share(level, "level")
    z, y, group, note = _independent_rows(z, y, groups, clusters, seed)
    score, predicted = score_and_class(z, problem.event)
    if costs is not None:
        loss = costs[y, predicted]
    else:
        loss = (y != (predicted if problem.event is None else problem.event)).astype(np.float64)

    def solve(rows: Any, alpha: float) -> Threshold:
        return replace(problem.solve(score[rows], loss[rows], alpha), level=level, note=note, event_name=name)

    if group is None:
        return solve(slice(None), 1 - level)
    members = sorted(set(group.tolist()), key=str)
    return GroupThresholds({one: solve(group == one, (1 - level) / len(members)) for one in members}, level)


def calibrated_threshold(
    logits: Any,
    labels: Any,
    method: str | Callable[..., Calibrator] = "temperature",
    *,
    n_folds: int | None = None,
    groups: Any = None,
    clusters: Any = None,
    seed: int = 0,
    **promise: Any,
) -> Any:
    """Calibrate, then take a `threshold` on rows that did not fit the calibrator; it holds the calibrator.

    Half of the rows fit the method and the other half carry the promise. With `n_folds` each row is calibrated by a fit
    to the other folds, which uses all rows but makes the promise approximate, for the calibrator to be used is fitted
    to all of them. `promise` holds the `risk`, `max_risk` and `level` of `threshold`.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10)) * 4
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrated_threshold(3 * z, y, max_risk=0.05).rows
    2500
    """
    z, y, group, note = _independent_rows(*as_arrays(logits, labels), groups, clusters, seed)
    fit: Callable[..., Calibrator] = METHODS[method] if isinstance(method, str) else method
    if len(z) < 4:
        raise InputError("logits", "have at least 4 rows, to fit on some and promise on others", str(len(z)))
    if n_folds is None:
        kept = stratified_folds(z, y, 2) == 1
        calibrator, share = fit(*take_rows(z, y, ~kept)), 2
        out, words = calibrator(z[kept]), "Half of the rows fitted the calibrator; the other {:,} carry the promise."
    else:
        kept, share, calibrator = np.ones(len(z), bool), 1, fit(z, y)
        out = cross_fit(fit, n_folds=n_folds)(z, y)
        words = f"Cross-fitted in {n_folds} folds: the promise is approximate, since all rows fit the calibrator."
    note = f"{note} {words.format(kept.sum())}".strip()

    def with_calibrator(one: Threshold) -> Threshold:
        needed = None if one.labels_needed is None else share * one.labels_needed  # a part of them fits the calibrator
        return replace(one, labels_needed=needed, calibrator=calibrator, note=note)

    found = threshold(out, y[kept], groups=None if group is None else group[kept], **promise)
    if isinstance(found, Threshold):
        return with_calibrator(found)
    return replace(found, groups={name: with_calibrator(one) for name, one in found.items()})


def _independent_rows(
    z: np.ndarray, y: np.ndarray, groups: Any, clusters: Any, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
    """One row of each cluster, their groups, and a note on it."""
    group = None if groups is None else as_groups(groups, len(z), complete=True)
    clustered = as_clusters(clusters, len(z))
    if clustered is None:
        return z, y, group, ""
    kept = clustered.one_row_each(seed)
    note = f"One row of each of {clustered.count:,} {clustered.name}s was used, since rows of one are correlated."
    return *take_rows(z, y, kept), None if group is None else group[kept], note


class _Sequence(NamedTuple):
    """Down the distinct scores: the scores, and of the rows at or above each how many there are and their losses."""

    score: np.ndarray
    kept: np.ndarray
    """Rows at or above."""
    trials: np.ndarray
    """Rows that the risk is a mean over."""
    losses: np.ndarray
    """Their sum of losses."""
    p_value: np.ndarray
    start: np.ndarray
    """The p-value if the sequence begins here: without the row whose score is the threshold."""


class _Problem(NamedTuple):
    """A risk and its bound."""

    risk: str
    max_risk: float
    event: int | None
    largest: float = 1.0
    """The largest loss that there can be."""
    two_valued: bool = True

    @classmethod
    def of(cls, risk: Any, max_risk: float, classes: int) -> tuple[_Problem, np.ndarray | None, str | None]:
        """Check a risk: the problem, the matrix of costs if it is one, and the name of its event if it has one."""
        if not isinstance(risk, (str, EventRisk)):
            costs = _check_costs(risk, classes)
            if not (isinstance(max_risk, Real) and max_risk > 0):
                raise InputError("max_risk", "be positive", repr(max_risk))
            largest = float(costs.max()) or 1.0
            # A binomial count needs losses of 0 and the largest only.
            return cls("cost", max_risk, None, largest, set(np.unique(costs)) <= {0.0, largest}), costs, None
        kind = risk if isinstance(risk, str) else risk.risk
        if kind not in RISKS or kind == "cost" or (kind == "error" and risk != kind):
            raise InputError("risk", "be error, false_discovery_rate or false_positive_rate", repr(kind))
        check_share(max_risk, "max_risk")
        if kind == "error":
            return cls(kind, max_risk, None), None, None
        about = EventRisk() if isinstance(risk, str) else risk
        number = event_class(about.event, classes, about.class_names)
        return cls(kind, max_risk, number), None, event_name(about.event, classes, about.class_names)

    @property
    def bound(self) -> float:
        """As a share of the largest loss."""
        return min(self.max_risk / self.largest, 1.0)

    def solve(self, score: np.ndarray, loss: np.ndarray, alpha: float) -> Threshold:
        n = len(score)
        steps = self.sequence(score, loss)
        last = self.last(steps, n, alpha)
        risk = steps.losses / np.maximum(steps.trials, 1)
        level = math.nan if self.risk == "cost" else 1 - alpha
        curve = RiskCurve(steps.score, steps.kept / max(n, 1), risk, steps.losses, steps.trials, level)
        promise = self.max_risk, 1 - alpha, self.risk, self.event, n
        if last < 0:
            needed = self.labels_needed(steps, n, alpha)
            return Threshold(math.inf, *promise, 0, math.nan, math.nan, needed, curve)
        answered, observed, bound = int(steps.kept[last]), float(risk[last]), float(curve.at([last]).high[0])
        return Threshold(float(steps.score[last]), *promise, answered, observed, bound, None, curve)

    def sequence(self, score: np.ndarray, loss: np.ndarray) -> _Sequence:
        order = np.argsort(-score, kind="stable")
        last = np.flatnonzero(tie_ends(-score[order])) if len(score) else np.zeros(0, np.int64)
        kept, losses = last + 1.0, np.cumsum(loss[order])[last]
        if self.risk == "false_positive_rate":
            negatives = np.full(len(last), loss.sum())
            p = bdtr(losses, negatives.astype(np.int64), self.max_risk) if len(last) else losses
            return _Sequence(score[order][last], kept, negatives, losses, p, p)
        if not self.two_valued:
            p = self.betting(loss[order])
            return _Sequence(score[order][last], kept, kept, losses, p[last], p[np.maximum(last - 1, 0)])
        bound, count = self.bound, np.round(losses / self.largest)
        p = bdtr(count, kept.astype(np.int64), bound) if bound < 1 else np.zeros_like(kept)
        start = bdtr(count, np.maximum(kept.astype(np.int64) - 1, 0), bound) if bound < 1 else p
        start = np.where(kept - 1 < count, 1.0, start)
        return _Sequence(score[order][last], kept, kept, losses, p, start)

    def betting(self, loss: np.ndarray) -> np.ndarray:
        """1/wealth of bets that the mean cost is below the bound, after each row: a mixture of fixed bets."""
        if self.bound >= 1:
            return np.zeros(len(loss))
        most = 1.0 / (self.largest - self.max_risk)
        log_wealth = np.cumsum(np.log1p(np.outer(_BETS * most, self.max_risk - loss)), axis=1)
        p: np.ndarray = np.minimum(np.exp(-(logsumexp(log_wealth, axis=0) - math.log(len(_BETS)))), 1.0)
        return p

    def last(self, steps: _Sequence, n: int, alpha: float) -> int:
        """The place of the lowest threshold that passes; −1 where none does."""
        best, budget = -1, 0.0
        places = self.starts(steps, n, alpha)
        ends = [place for place, _ in places[1:]] + [len(steps.score)]
        for (place, share), end in zip(places, ends, strict=False):
            fresh = budget == 0
            budget += share
            p = steps.p_value[place:end].copy()
            if len(p) and fresh:
                p[0] = steps.start[place]
            failed = np.flatnonzero(p > budget)
            passed = len(p) if not len(failed) else int(failed[0])
            best = place + passed - 1 if passed else best
            budget = budget if not len(failed) else 0.0
        return best

    def starts(self, steps: _Sequence, n: int, alpha: float) -> list[tuple[int, float]]:
        """Where chains begin, highest score first, and with what part of α each."""
        if not len(steps.score):
            return []
        if self.risk == "false_positive_rate":  # falls with every threshold: one chain, from the top
            return [(0, alpha)]
        shares: list[tuple[float, float]] = []
        count, left = n / FIRST_START, alpha
        while count / FIRST_START > least_rows(self.bound, left / 2) and len(shares) < 8:
            shares.append((count, left / 2))
            left /= 2
            count /= FIRST_START
        # The last one takes what is left, and cannot begin before a test of perfect rows could pass.
        shares.append((max(count, least_rows(self.bound, left) + 1), left))
        begun: dict[int, float] = {}
        for rows, share in reversed(shares):
            place = min(int(np.searchsorted(steps.kept, rows)), len(steps.score) - 1)
            # Among few distinct scores the nearer one, if a test can pass there: the next may be far below.
            before = float(steps.kept[place - 1]) if place else 0.0
            passable = before > least_rows(self.bound, alpha) + 1
            if passable and steps.kept[place] > 1.2 * rows and before > rows**2 / steps.kept[place]:
                place -= 1
            begun[place] = begun.get(place, 0.0) + share
        return sorted(begun.items())

    def labels_needed(self, steps: _Sequence, n: int, alpha: float) -> int | None:
        """The fewest rows with which some threshold would pass in four of five cases, were the risks those seen."""
        if not n:
            return None
        if self.risk == "false_positive_rate":  # falls to 0 unless rows without the event tie at the highest score
            negatives, top = max(float(steps.trials[0]), 1.0), float(steps.losses[0])
            if top > 1 and top >= 0.9 * self.max_risk * negatives:
                return None
            # One such row at the top is left alone there by more rows.
            few = top <= 1
            needed = least_rows(self.max_risk, alpha) if few else rows_to_pass(top / negatives, self.max_risk, alpha)
            return round_up(max(math.ceil(needed * n / negatives), n + 1))
        bound = self.bound
        # Of few rows an error rate of zero shows little: half an error is added.
        risk = (steps.losses / self.largest + 0.5) / (steps.trials + 1.0)
        risk = np.where(steps.losses == 0, np.minimum(risk, bound / 2), risk)
        hopeful = np.flatnonzero((steps.kept >= _enough(n)) & (risk < 0.9 * bound))
        if not len(hopeful):
            return None
        hopeful = hopeful[np.unique(np.linspace(0, len(hopeful) - 1, min(len(hopeful), 100)).astype(np.int64))]
        wanted = [rows_to_pass(float(risk[i]), bound, alpha / 2) * n / steps.kept[i] for i in hopeful]
        return round_up(max(math.ceil(min(wanted)), n + 1))


def _enough(rows: int) -> float:
    """How many of so many rows are enough to judge a risk by."""
    return min(rows, max(20.0, 0.02 * rows))


def round_up(rows: int) -> int:
    """To two digits.

    >>> round_up(1234)
    1300
    """
    unit: int = 10 ** max(len(str(rows)) - 2, 0)
    return math.ceil(rows / unit) * unit


def least_rows(max_risk: float, alpha: float) -> float:
    """How many rows without a single error prove a risk of at most so much: ln α / ln(1 − r).

    >>> round(least_rows(0.02, 0.05), 1)
    148.3
    """
    return math.log(alpha) / math.log1p(-max_risk) if max_risk < 1 else 1.0


def rows_to_pass(risk: float, max_risk: float, alpha: float, power: float = 0.8) -> int:
    """How many rows it takes to reject "the risk exceeds the bound" with this power, if the risk is this.

    >>> rows_to_pass(0.01, 0.02, 0.05)
    987
    """
    gap = max_risk - risk
    noise = float(-ndtri(alpha)) * math.sqrt(max_risk * (1 - max_risk))
    noise += float(ndtri(power)) * math.sqrt(risk * (1 - risk))
    return math.ceil(max((noise / gap) ** 2, least_rows(max_risk, alpha)))


def as_groups(groups: Any, length: int, *, complete: bool = False) -> np.ndarray:
    """Check groups (n,) of any values, numbers or words; `complete`, that none is NaN, which equals nothing."""
    values = np.asarray(groups.cpu() if is_tensor(groups) else groups)
    if values.shape != (length,):
        raise InputError("groups", f"have shape ({length},), one entry a row", str(values.shape))
    if complete and values.dtype.kind in "fO" and (missing := np.flatnonzero(values != values)).size:
        got = f"NaN in row {missing[0]}" + (f" and {missing.size - 1:,} others" if missing.size > 1 else "")
        raise InputError("groups", "have a value in every row", got, "name what is missing, such as 'unknown'")
    return values


def _check_costs(costs: Any, classes: int) -> np.ndarray:
    cost = np.asarray(costs, dtype=np.float64)
    if cost.shape != (classes, classes):
        wanted = f"be a name, an EventRisk or costs of shape ({classes}, {classes}), true class by predicted class"
        raise InputError("risk", wanted, f"shape {cost.shape}")
    if not np.isfinite(cost).all() or cost.min() < 0:
        raise InputError("risk", "be costs that are finite and not negative", f"{cost.min():g}..{cost.max():g}")
    return cost
