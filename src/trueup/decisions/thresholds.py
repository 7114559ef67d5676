"""Thresholds with a guarantee: the lowest confidence above which a risk is bounded, with a stated certainty.

The candidates are the distinct scores, tested from the highest to the lowest. At each, the hypothesis "the risk of the
rows at or above it exceeds the bound" has an exact binomial p-value; a matrix of costs is tested by betting. The
sequence ends at the first hypothesis that cannot be rejected. No correction for the number of thresholds is needed,
since a threshold is tested only if all before it passed. A test on a small number of rows can fail by bad luck. So the
search has several starts, which share the error budget. A chain that reaches the next start hands its budget on to it
(the fallback procedure).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from scipy.special import bdtr, logsumexp, ndtri

from trueup._core.arrays import as_arrays, as_logits, check_share, is_tensor, match_kind, take_rows
from trueup._core.bins import tie_ends
from trueup._core.clusters import as_clusters
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent, round_up
from trueup._core.registry import METHODS
from trueup._core.row_scores import event_class, event_name, score_and_class
from trueup._core.splits import stratified_folds
from trueup._core.types import ArrayLike, ArrayT
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
"""Risk → the end of a sentence "At most 2 % …"."""

START_RATIO = 8
"""Starts of the search are at 1/8, 1/64, 1/512 … of the rows; the first has half of the error budget."""
_CURVE_POINTS = 200  # Largest number of points of a stored curve
# Bets on a mean cost, as fractions of the largest bet allowed; each has an equal part of the initial wealth
_BET_FRACTIONS = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
_ARRAYS = ("threshold", "coverage", "risk", "losses", "trials")


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """The risk of the rows at or above each threshold, highest first, with pointwise intervals."""

    threshold: np.ndarray
    """Thresholds, highest first."""
    coverage: np.ndarray
    """Share of all rows at or above the threshold."""
    risk: np.ndarray
    """Risk of those rows: the mean loss."""
    losses: np.ndarray
    """Sum of their losses."""
    trials: np.ndarray
    """Number of rows in the mean."""
    level: float
    """Level of each one-sided bound; NaN for costs, whose bound is tested directly."""

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Clopper–Pearson one-sided lower and upper bounds of each risk; NaN for costs."""
        if math.isnan(self.level):
            return (np.full(len(self.risk), math.nan),) * 2
        return binomial_bounds(self.losses, self.trials, 1 - self.level)

    @property
    def low(self) -> np.ndarray:
        """Lower bounds."""
        return self.bounds[0]

    @property
    def high(self) -> np.ndarray:
        """Upper bounds."""
        return self.bounds[1]

    def at(self, index: ArrayLike) -> RiskCurve:
        """Return the points with these indices."""
        return replace(self, **{name: getattr(self, name)[index] for name in _ARRAYS})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        columns = {name: getattr(self, name) for name in ("threshold", "coverage", "risk", "low", "high")}
        return {name: [x if math.isfinite(x) else None for x in column.tolist()] for name, column in columns.items()}

    def thin(self, points: int = _CURVE_POINTS) -> RiskCurve:
        """Return at most this number of points, evenly spread."""
        n = len(self.threshold)
        return self.at(np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(np.int64)))


@dataclass(frozen=True, eq=False)
class Threshold:
    """The lowest score above which a risk is bounded with a stated certainty, if there is one."""

    threshold: float
    """Rows with at least this score are answered; infinite if nothing can be promised."""
    max_risk: float
    """Bound of the risk."""
    level: float
    """Certainty of the guarantee."""
    risk: str
    """Name of the risk, one of `RISKS`."""
    event: int | None
    """Class of the event; None for errors and costs."""
    rows: int
    """Number of labelled rows on which the guarantee rests."""
    answered: int
    """Number of those at or above the threshold."""
    observed: float
    """Observed risk of the answered rows; NaN without any."""
    bound: float
    """Upper end of the one-sided interval of the risk at this threshold; NaN for costs."""
    labels_needed: int | None
    """Estimated number of labelled rows that allow a guarantee; None if there is one, or more rows would not help."""
    curve: RiskCurve = field(repr=False)
    """Risk at all candidate thresholds."""
    calibrator: Calibrator | None = None
    """Calibrator fitted to other rows by `calibrated_threshold`; `answers` applies it first."""
    note: str = ""
    """Remark on the rows that were used."""
    event_name: str | None = None
    """Name of the event, if its class has one."""

    @property
    def promised(self) -> bool:
        """Whether there is a threshold."""
        return math.isfinite(self.threshold)

    @property
    def coverage(self) -> float:
        """Share of rows that are answered."""
        return self.answered / self.rows if self.rows else math.nan

    @property
    def review(self) -> float:
        """Share of rows that are not answered and go to review."""
        return 1 - self.coverage

    @property
    def hopeless(self) -> bool:
        """Whether the risk is shown to be too large at every threshold with enough rows."""
        kept = self.curve.coverage * self.rows
        low = np.where(np.isnan(self.curve.low), self.curve.risk, self.curve.low)[
            kept >= _min_rows_to_assess(self.rows)
        ]
        return bool(len(low) and (low > self.max_risk).all())

    def answers(self, logits: ArrayT) -> ArrayT:
        """Return which rows have at least the threshold's score; the calibrator, if there is one, is applied first.

        Parameters
        ----------
        logits
            Logits, shape (n, classes).

        Returns
        -------
        ArrayT
            Booleans, shape (n,), in the input's kind of array.
        """
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
            observed = f"{self.observed:.4g}" if self.risk == "cost" else format_percent(self.observed, 2)
            lines = [f"{verb} when the {score} is at least {format_score(self.threshold)}: {promise}."]
            lines.append(f"{format_percent(self.coverage, 1)} of the rows are {done};")
            lines.append(f"of 1,000 rows {round(1000 * self.review)} {rest}.")
            lines.append(f"The observed risk is {observed} ({self.rows:,} labelled rows).")
        else:
            head = (
                f"Nothing can be promised from {self.rows:,} rows: no threshold is shown to guarantee that {promise}."
            )
            advice = "There are too few rows to say whether more would help."
            if self.labels_needed is not None:
                advice = f"About {self.labels_needed:,} labelled rows would be enough at the observed risk."
            elif self.hopeless:
                advice = "More labels are not likely to help: even the highest scores have too large a risk."
            lines = [head, advice]
        return " ".join([*lines, self.note]).rstrip()


@dataclass(frozen=True, eq=False)
class GroupThresholds(Mapping[Hashable, Threshold]):
    """One threshold per group; all guarantees hold at once with the stated certainty."""

    groups: Mapping[Hashable, Threshold]
    """Threshold of each group."""
    level: float
    """Certainty that all guarantees hold."""

    def __getitem__(self, group: Hashable) -> Threshold:
        return self.groups[group]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def coverage(self) -> float:
        """Share of all rows that are answered."""
        rows = sum(one.rows for one in self.groups.values())
        return sum(one.answered for one in self.groups.values()) / rows if rows else math.nan

    def answers(self, logits: ArrayT, groups: ArrayLike) -> ArrayT:
        """Return which rows have at least the score of their group's threshold; unknown groups get no answers.

        Parameters
        ----------
        logits
            Logits, shape (n, classes).
        groups
            Group of each row, shape (n,).

        Returns
        -------
        ArrayT
            Booleans, shape (n,), in the input's kind of array.
        """
        z = as_logits(logits)
        group_of_row = as_groups(groups, len(z))
        mask = np.zeros(len(z), bool)
        for group, one in self.groups.items():
            rows = np.flatnonzero(group_of_row == group)
            mask[rows] = one.answers(z[rows])
        return match_kind(mask, logits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        groups = {str(group): one.to_dict() for group, one in self.groups.items()}
        return {"schema": 1, **plain_record({"level": self.level, "coverage": self.coverage}), "groups": groups}

    def __str__(self) -> str:
        head = f"All promises hold at once with {format_percent(self.level)} certainty."
        promised = any(one.promised for one in self.groups.values())
        return "\n".join([*([head] if promised else []), *(f"{group}: {one}" for group, one in self.groups.items())])


@dataclass(frozen=True)
class EventRisk:
    """A risk of flagging the rows whose P(event) is at least the threshold.

    Parameters
    ----------
    risk
        False discovery rate, P(not the event | flagged), or false positive rate, P(flagged | not the event).
    event
        Class of the event: its number, or its name among `class_names`.
    class_names
        Names of the classes.
    """

    risk: Literal["false_discovery_rate", "false_positive_rate"] = "false_discovery_rate"
    event: int | str = 1
    class_names: Sequence[str] | None = None


def threshold(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    risk: Literal["error", "false_discovery_rate", "false_positive_rate"] | EventRisk | ArrayLike = "error",
    max_risk: float = 0.02,
    level: float = 0.95,
    groups: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    seed: int = 0,
) -> Any:
    """Find the lowest confidence above which a risk is at most `max_risk`, with a stated certainty.

    With probability `level` over the labelled rows, P(wrong | score ≥ threshold) ≤ `max_risk`. The calibrator must not
    have been fitted to these rows or chosen by them; see `calibrated_threshold`.

    Parameters
    ----------
    logits
        Calibrated logits, shape (n, classes).
    labels
        Classes, shape (n,).
    risk
        Error rate of the answers, or a rate of class 1, or an `EventRisk` of any class. An array of shape
        (classes, classes) holds the costs of predicting class j where i is true; the mean cost is then bounded.
    max_risk
        Bound of the risk.
    level
        Certainty of the guarantee.
    groups
        Group of each row, shape (n,). Each group gets its own threshold, and all guarantees hold at once.
    clusters
        Cluster of each row, shape (n,), where rows are correlated (visits of a patient). One random row per cluster
        is used, and the guarantee holds for such a row of a new cluster.
    seed
        Seed that draws those rows.

    Returns
    -------
    Threshold | GroupThresholds
        The threshold, with `answers(logits)`; one per group with `groups`. Prints as sentences.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10)) * 4
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> result = threshold(z, y, max_risk=0.05)
    >>> print(result)
    Answer when the confidence is at least 0.8931: at most 5 % of the answers are wrong, with 95 % certainty. 31.7 % of
    the rows are answered; of 1,000 rows 683 go to review. The observed risk is 4.04 % (5,000 labelled rows).

    References
    ----------
    Bauer (1991), doi:10.1002/sim.4780100609, and Wiens (2003), doi:10.1002/pst.64, for the sequence of tests.
    Angelopoulos et al., "Learn then test" (2021), arXiv:2110.01052. Geifman and El-Yaniv, "Selective classification
    for deep neural networks" (2017), arXiv:1705.08500.
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
    logits: ArrayLike,
    labels: ArrayLike,
    method: str | Callable[..., Calibrator] = "temperature",
    *,
    n_folds: int | None = None,
    groups: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    seed: int = 0,
    **promise: Any,
) -> Any:
    """Fit a calibrator to half of the rows and find a `threshold` on the other half.

    Parameters
    ----------
    logits
        Logits, shape (n, classes).
    labels
        Classes, shape (n,).
    method
        Calibration method, by name or as a function.
    n_folds
        Number of folds for cross-fitting: each row is calibrated by a fit to the other folds. This uses all rows, but
        the guarantee is approximate, because the final calibrator is fitted to all of them.
    groups
        Group of each row, shape (n,); see `threshold`.
    clusters
        Cluster of each row, shape (n,); see `threshold`.
    seed
        Seed that draws one row per cluster.
    **promise
        The `risk`, `max_risk` and `level` of `threshold`.

    Returns
    -------
    Threshold | GroupThresholds
        The threshold, which applies the fitted calibrator first.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10)) * 4
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrated_threshold(3 * z, y, max_risk=0.05).rows
    2500
    """
    z, y, group, note = _independent_rows(*as_arrays(logits, labels), groups, clusters, seed)
    fit: Callable[..., Calibrator] = METHODS[method] if isinstance(method, str) else method
    if len(z) < 4:
        raise InputError("logits", "have at least 4 rows: some to fit, others to guarantee", str(len(z)))
    if n_folds is None:
        kept = stratified_folds(z, y, 2) == 1
        calibrator, share = fit(*take_rows(z, y, ~kept)), 2
        out, words = calibrator(z[kept]), "Half of the rows fitted the calibrator; the promise rests on the other {:,}."
    else:
        kept, share, calibrator = np.ones(len(z), bool), 1, fit(z, y)
        out = cross_fit(fit, n_folds=n_folds)(z, y)
        words = f"Cross-fitted in {n_folds} folds: the promise is approximate, since all rows fitted the calibrator."
    note = f"{note} {words.format(kept.sum())}".strip()

    def with_calibrator(one: Threshold) -> Threshold:
        needed = None if one.labels_needed is None else share * one.labels_needed  # half of them fit the calibrator
        return replace(one, labels_needed=needed, calibrator=calibrator, note=note)

    result = threshold(out, y[kept], groups=None if group is None else group[kept], **promise)
    if isinstance(result, Threshold):
        return with_calibrator(result)
    return replace(result, groups={name: with_calibrator(one) for name, one in result.items()})


def _independent_rows(
    z: np.ndarray, y: np.ndarray, groups: ArrayLike | None, clusters: ArrayLike | None, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
    """Return one row per cluster with its label and group, and a note."""
    group = None if groups is None else as_groups(groups, len(z), complete=True)
    clustered = as_clusters(clusters, len(z))
    if clustered is None:
        return z, y, group, ""
    kept = clustered.one_row_each(seed)
    name = clustered.name
    note = f"One row of each of {clustered.count:,} {name}s was used: rows of one {name} are correlated."
    return *take_rows(z, y, kept), None if group is None else group[kept], note


class _Sequence(NamedTuple):
    """Tests at the distinct scores, highest first."""

    score: np.ndarray
    """Distinct scores: the candidate thresholds."""
    kept: np.ndarray
    """Number of rows at or above each."""
    trials: np.ndarray
    """Number of rows in the mean that is the risk."""
    losses: np.ndarray
    """Sum of their losses."""
    p_value: np.ndarray
    """P-value of "the risk exceeds the bound"."""
    start: np.ndarray
    """P-value if the sequence begins here: without the row whose score is the threshold."""


class _Problem(NamedTuple):
    """A risk and its bound."""

    risk: str
    max_risk: float
    event: int | None
    largest: float = 1.0
    """Largest possible loss."""
    two_valued: bool = True
    """Whether all losses are 0 or the largest, so that a binomial test applies."""

    @classmethod
    def of(cls, risk: Any, max_risk: float, classes: int) -> tuple[_Problem, np.ndarray | None, str | None]:
        """Check a risk; return the problem, the matrix of costs or None, and the event's name or None."""
        if not isinstance(risk, (str, EventRisk)):
            costs = _check_costs(risk, classes)
            if not (isinstance(max_risk, Real) and max_risk > 0):
                raise InputError("max_risk", "be positive", repr(max_risk))
            largest = float(costs.max()) or 1.0
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
        """Bound of the risk, as a share of the largest loss."""
        return min(self.max_risk / self.largest, 1.0)

    def solve(self, score: np.ndarray, loss: np.ndarray, alpha: float) -> Threshold:
        n = len(score)
        steps = self.sequence(score, loss)
        lowest = self.lowest_passing(steps, n, alpha)
        risk = steps.losses / np.maximum(steps.trials, 1)
        level = math.nan if self.risk == "cost" else 1 - alpha
        curve = RiskCurve(steps.score, steps.kept / max(n, 1), risk, steps.losses, steps.trials, level)
        promise = self.max_risk, 1 - alpha, self.risk, self.event, n
        if lowest < 0:
            needed = self.labels_needed(steps, n, alpha)
            return Threshold(math.inf, *promise, 0, math.nan, math.nan, needed, curve)
        answered, observed, bound = int(steps.kept[lowest]), float(risk[lowest]), float(curve.at([lowest]).high[0])
        return Threshold(float(steps.score[lowest]), *promise, answered, observed, bound, None, curve)

    def sequence(self, score: np.ndarray, loss: np.ndarray) -> _Sequence:
        order = np.argsort(-score, kind="stable")
        ends = np.flatnonzero(tie_ends(-score[order])) if len(score) else np.zeros(0, np.int64)
        kept, losses = ends + 1.0, np.cumsum(loss[order])[ends]
        if self.risk == "false_positive_rate":
            negatives = np.full(len(ends), loss.sum())
            p = bdtr(losses, negatives.astype(np.int64), self.max_risk) if len(ends) else losses
            return _Sequence(score[order][ends], kept, negatives, losses, p, p)
        if not self.two_valued:
            p = self.betting(loss[order])
            return _Sequence(score[order][ends], kept, kept, losses, p[ends], p[np.maximum(ends - 1, 0)])
        bound, count = self.bound, np.round(losses / self.largest)
        p = bdtr(count, kept.astype(np.int64), bound) if bound < 1 else np.zeros_like(kept)
        start = bdtr(count, np.maximum(kept.astype(np.int64) - 1, 0), bound) if bound < 1 else p
        start = np.where(kept - 1 < count, 1.0, start)
        return _Sequence(score[order][ends], kept, kept, losses, p, start)

    def betting(self, loss: np.ndarray) -> np.ndarray:
        """Return 1/wealth of bets that the mean cost is below the bound, after each row: a mixture of fixed bets."""
        if self.bound >= 1:
            return np.zeros(len(loss))
        max_bet = 1.0 / (self.largest - self.max_risk)
        log_wealth = np.cumsum(np.log1p(np.outer(_BET_FRACTIONS * max_bet, self.max_risk - loss)), axis=1)
        p: np.ndarray = np.minimum(np.exp(-(logsumexp(log_wealth, axis=0) - math.log(len(_BET_FRACTIONS)))), 1.0)
        return p

    def lowest_passing(self, steps: _Sequence, n: int, alpha: float) -> int:
        """Return the index of the lowest threshold that passes; −1 if none does."""
        lowest, budget = -1, 0.0
        starts = self.starts(steps, n, alpha)
        ends = [start for start, _ in starts[1:]] + [len(steps.score)]
        for (start, share), end in zip(starts, ends, strict=False):
            is_new_chain = budget == 0
            budget += share
            p = steps.p_value[start:end].copy()
            if len(p) and is_new_chain:
                p[0] = steps.start[start]
            failed = np.flatnonzero(p > budget)
            passed = len(p) if not len(failed) else int(failed[0])
            lowest = start + passed - 1 if passed else lowest
            budget = budget if not len(failed) else 0.0
        return lowest

    def starts(self, steps: _Sequence, n: int, alpha: float) -> list[tuple[int, float]]:
        """Return the index of each start, highest score first, with its part of the error budget α."""
        if not len(steps.score):
            return []
        if self.risk == "false_positive_rate":  # falls with every threshold: one chain, from the top
            return [(0, alpha)]
        shares: list[tuple[float, float]] = []
        count, rest = n / START_RATIO, alpha
        while count / START_RATIO > least_rows(self.bound, rest / 2) and len(shares) < 8:
            shares.append((count, rest / 2))
            rest /= 2
            count /= START_RATIO
        # The highest start gets the rest of the budget. Below `least_rows` even a test without errors cannot pass.
        shares.append((max(count, least_rows(self.bound, rest) + 1), rest))
        budgets: dict[int, float] = {}
        for rows, share in reversed(shares):
            index = min(int(np.searchsorted(steps.kept, rows)), len(steps.score) - 1)
            # With few distinct scores, take the score above if it is nearer and a test can pass there.
            above = float(steps.kept[index - 1]) if index else 0.0
            passable = above > least_rows(self.bound, alpha) + 1
            if passable and steps.kept[index] > 1.2 * rows and above > rows**2 / steps.kept[index]:
                index -= 1
            budgets[index] = budgets.get(index, 0.0) + share
        return sorted(budgets.items())

    def labels_needed(self, steps: _Sequence, n: int, alpha: float) -> int | None:
        """Return the smallest number of rows with which some threshold passes with power 0.8 at the observed risks."""
        if not n:
            return None
        if self.risk == "false_positive_rate":  # falls to 0 unless rows without the event tie at the highest score
            negatives, top = max(float(steps.trials[0]), 1.0), float(steps.losses[0])
            if top > 1 and top >= 0.9 * self.max_risk * negatives:
                return None
            # A single negative at the highest score becomes negligible with more rows.
            single = top <= 1
            needed = least_rows(self.max_risk, alpha) if single else rows_to_pass(top / negatives, self.max_risk, alpha)
            return round_up(max(math.ceil(needed * n / negatives), n + 1))
        bound = self.bound
        # With a small number of rows, an error rate of zero shows little: add half an error.
        risk = (steps.losses / self.largest + 0.5) / (steps.trials + 1.0)
        risk = np.where(steps.losses == 0, np.minimum(risk, bound / 2), risk)
        hopeful = np.flatnonzero((steps.kept >= _min_rows_to_assess(n)) & (risk < 0.9 * bound))
        if not len(hopeful):
            return None
        hopeful = hopeful[np.unique(np.linspace(0, len(hopeful) - 1, min(len(hopeful), 100)).astype(np.int64))]
        needed_rows = [rows_to_pass(float(risk[i]), bound, alpha / 2) * n / steps.kept[i] for i in hopeful]
        return round_up(max(math.ceil(min(needed_rows)), n + 1))


def _min_rows_to_assess(rows: int) -> float:
    """Return the smallest number of rows above a threshold at which its risk counts."""
    return min(rows, max(20.0, 0.02 * rows))


def format_score(score: float) -> str:
    """Format a score with four digits, or more where it would round to 1.

    >>> format_score(0.89312), format_score(0.9999962)
    ('0.8931', '0.9999962')
    """
    digits = 1 - math.floor(math.log10(1 - score)) if score < 1 else 4
    return f"{score:.{max(digits, 4)}g}"


def least_rows(max_risk: float, alpha: float) -> float:
    """Return the number of rows without any error that proves a risk of at most r: ln α / ln(1 − r).

    >>> round(least_rows(0.02, 0.05), 1)
    148.3
    """
    return math.log(alpha) / math.log1p(-max_risk) if max_risk < 1 else 1.0


def rows_to_pass(risk: float, max_risk: float, alpha: float, power: float = 0.8) -> int:
    """Return the number of rows that reject "the risk exceeds the bound" with this power, at this true risk.

    >>> rows_to_pass(0.01, 0.02, 0.05)
    987
    """
    gap = max_risk - risk
    noise = float(-ndtri(alpha)) * math.sqrt(max_risk * (1 - max_risk))
    noise += float(ndtri(power)) * math.sqrt(risk * (1 - risk))
    return math.ceil(max((noise / gap) ** 2, least_rows(max_risk, alpha)))


def as_groups(groups: ArrayLike, length: int, *, complete: bool = False) -> np.ndarray:
    """Check groups (n,) of numbers or strings; with `complete`, reject NaN, which does not equal itself."""
    values = np.asarray(cast("Any", groups).cpu() if is_tensor(groups) else groups)
    if values.shape != (length,):
        raise InputError("groups", f"have shape ({length},), one entry per row", str(values.shape))
    if complete and values.dtype.kind in "fO" and (missing := np.flatnonzero(values != values)).size:
        got = f"NaN in row {missing[0]}" + (f" and {missing.size - 1:,} others" if missing.size > 1 else "")
        raise InputError(
            "groups", "have a value in every row", got, "replace missing values, for instance by 'unknown'"
        )
    return values


def _check_costs(costs: Any, classes: int) -> np.ndarray:
    cost = np.asarray(costs, dtype=np.float64)
    if cost.shape != (classes, classes):
        valid = f"be a name, an EventRisk or costs of shape ({classes}, {classes}), true class by predicted class"
        raise InputError("risk", valid, f"shape {cost.shape}")
    if not np.isfinite(cost).all() or cost.min() < 0:
        raise InputError("risk", "be costs that are finite and not negative", f"{cost.min():g}..{cost.max():g}")
    return cost
