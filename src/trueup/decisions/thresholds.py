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
import torch
from scipy.special import bdtr, logsumexp, ndtri

from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import cross_fit
from trueup.core.arrays import as_logits, as_tensors, check_share, match_kind, take_rows
from trueup.core.bins import tie_ends
from trueup.core.clusters import as_clusters
from trueup.core.errors import InputError
from trueup.core.formatting import format_percent
from trueup.core.row_scores import score_and_class
from trueup.core.splits import stratified_folds
from trueup.metrics.intervals import binomial_bounds
from trueup.registry import METHODS

Risk = Literal["error", "false_discovery_rate", "false_positive_rate", "cost"]
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
    alpha: float
    """The chance that a bound is wrong; NaN for costs, whose bound is tested directly."""

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Clopper and Pearson's one-sided bounds of each risk, below and above; NaN for costs."""
        if math.isnan(self.alpha):
            nothing = np.full(len(self.risk), math.nan)
            return nothing, nothing
        return binomial_bounds(self.losses, self.trials, self.alpha)

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
        kept = {name: value[places] for name, value in vars(self).items() if name in _ARRAYS}
        return RiskCurve(**kept, alpha=self.alpha)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        names = ("threshold", "coverage", "risk", "low", "high")
        return {name: [_plain(x) for x in getattr(self, name).tolist()] for name in names}

    def thin(self, points: int = _POINTS) -> RiskCurve:
        """At most so many of its points, evenly spread."""
        n = len(self.threshold)
        at = np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(np.int64)) if n else np.zeros(0, np.int64)
        return self.at(at)


@dataclass(frozen=True, eq=False)
class Threshold:
    """The least score from which a risk is bounded with a stated certainty, or the news that there is none."""

    threshold: float
    """Rows that score at least this are answered; infinite where nothing can be promised."""
    at_most: float
    certainty: float
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
        return bool(len(low) and (low > self.at_most).all())

    def answers(self, logits: Any) -> Any:
        """Which rows score at least the threshold, (n,), booleans; the calibrator, if there is one, goes first."""
        z = as_logits(logits)
        if self.calibrator is not None:
            z = as_logits(self.calibrator(z))
        return match_kind(torch.from_numpy(score_and_class(z, self.event)[0] >= self.threshold), logits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        curve = self.curve.thin()
        return {
            "schema": 1,
            "promised": self.promised,
            "threshold": _plain(self.threshold),
            "risk": self.risk,
            "event": self.event,
            "at_most": self.at_most,
            "certainty": self.certainty,
            "rows": self.rows,
            "answered": self.answered,
            "coverage": _plain(self.coverage),
            "review": _plain(self.review),
            "observed": _plain(self.observed),
            "bound": _plain(self.bound),
            "labels_needed": self.labels_needed,
            "calibrator": None if self.calibrator is None else repr(self.calibrator),
            "note": self.note,
            "curve": curve.to_dict(),
        }

    def __str__(self) -> str:
        score = "confidence" if self.event is None else f"probability of {self.event_name or f'class {self.event}'}"
        limit = f"{self.at_most:g}" if self.risk == "cost" else format_percent(self.at_most)
        bound = (
            f"the mean cost of an answer is at most {limit}"
            if self.risk == "cost"
            else f"at most {limit} {RISKS[self.risk]}"
        )
        promise = f"{bound}, with {format_percent(self.certainty)} certainty"
        verb = "Answer" if self.event is None else "Flag"
        if not self.promised:
            lines = [f"Nothing can be promised from {self.rows:,} rows: they show of no threshold that {promise}."]
            if self.labels_needed is not None:
                lines.append(
                    f"About {self.labels_needed:,} labelled rows would do, if the risk stays what it looks like."
                )
            elif self.hopeless:
                lines.append("More labels are not likely to help: even the risk of the highest scores looks too large.")
            else:
                lines.append("They are too few to tell whether more would help.")
            return " ".join([*lines, self.note]).rstrip()
        done = "answered" if self.event is None else "flagged"
        lines = [
            f"{verb} when the {score} is at least {self.threshold:.4g}: {promise}.",
            f"{format_percent(self.coverage, 1)} of the rows are {done}; "
            f"of 1,000 rows {round(1000 * self.review)} {'go to review' if self.event is None else 'are not'}.",
        ]
        seen = f"{self.observed:.4g}" if self.risk == "cost" else format_percent(self.observed, 2)
        lines.append(f"The risk seen there is {seen} ({self.rows:,} labelled rows).")
        return " ".join([*lines, self.note]).rstrip()


@dataclass(frozen=True, eq=False)
class GroupThresholds(Mapping[Hashable, Threshold]):
    """A threshold for each group; all promises hold together with the stated certainty."""

    groups: Mapping[Hashable, Threshold]
    certainty: float

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
        mask = torch.zeros(len(z), dtype=torch.bool)
        for group, one in self.groups.items():
            rows = torch.from_numpy(np.flatnonzero(given == group))
            mask[rows] = torch.as_tensor(one.answers(z[rows])).cpu()
        return match_kind(mask, logits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = {str(group): one.to_dict() for group, one in self.groups.items()}
        return {"schema": 1, "certainty": self.certainty, "coverage": _plain(self.coverage), "groups": found}

    def __str__(self) -> str:
        head = f"All promises hold together with {format_percent(self.certainty)} certainty."
        promised = any(one.promised for one in self.groups.values())
        return "\n".join([*([head] if promised else []), *(f"{group}: {one}" for group, one in self.groups.items())])


def threshold(
    logits: Any,
    labels: Any,
    *,
    risk: Literal["error", "false_discovery_rate", "false_positive_rate"] = "error",
    costs: Any = None,
    at_most: float = 0.02,
    certainty: float = 0.95,
    event: int | str = 1,
    names: Sequence[str] | None = None,
    groups: Any = None,
    clusters: Any = None,
    method: str | Callable[..., Calibrator] | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> Any:
    """The least confidence from which a risk is at most so large, with a stated certainty.

    With probability `certainty` over the labelled rows, P(wrong | score ≥ threshold) ≤ `at_most`. Instead of errors,
    `risk` may be "false_discovery_rate", P(not the event | flagged), or "false_positive_rate", P(flagged | not the
    event), flagged being P(class `event`) ≥ threshold, a class by its number or one of `names`; `costs` (K, K) holds
    the cost of predicting class j where i is true, and bounds its mean over the answers. `groups` (n,) gives each group
    a threshold, and all promises hold together. `clusters` (n,) says which rows are correlated, such as the visits of a
    patient: one row of each, drawn by the `seed`, then carries the promise, which is about such a row of a new cluster.

    The rows must not have fitted or chosen the calibrator. With `method` this is done here: half of the rows fit it and
    the other half carry the promise; with `folds` as well, each row is calibrated by a fit to the other folds, which
    uses all rows but makes the promise approximate, for the calibrator to be used is fitted on all of them.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10)) * 4
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> result = threshold(z, y, at_most=0.05)
    >>> print(result)
    Answer when the confidence is at least 0.8931: at most 5 % of the answers are wrong, with 95 % certainty. 31.7 % of
    the rows are answered; of 1,000 rows 683 go to review. The risk seen there is 4.04 % (5,000 labelled rows).

    Bauer (1991), Wiens (2003) for the sequence; Angelopoulos et al., "Learn then test" (2021); Geifman and El-Yaniv,
    "Selective classification for deep neural networks" (2017).
    """
    z, y = as_tensors(logits, labels)
    name, cost = _check_risk(risk, costs, at_most, z.shape[1])
    check_share(certainty, "certainty")
    if folds is not None and method is None:
        raise ValueError("folds goes with method, the calibrator that is cross-fitted")
    of_event = name in ("false_discovery_rate", "false_positive_rate")
    number = called = None
    if of_event:
        from trueup.core.row_scores import event_class, event_name  # most promises are of the predicted class

        number, called = event_class(event, z.shape[1], names), event_name(event, z.shape[1], names)
    calibrator, note = None, ""
    given = None if groups is None else as_groups(groups, len(z), complete=True)
    together = as_clusters(clusters, len(z))
    if together is not None:
        kept = together.one_row_each(seed)
        given = given if given is None else given[kept]
        z, y = take_rows(z, y, torch.from_numpy(kept).to(z.device))
        note = f"One row of each of {together.count:,} {together.name}s was used, since rows of one are correlated. "
    if method is not None:
        z, y, rows, calibrator, words = _calibrate(z, y, method, folds)
        note += words
        given = given[rows] if given is not None else None
    score, predicted = score_and_class(z, number)
    true = y.cpu().numpy()
    if cost is not None:
        loss = cost[true, predicted]
    else:
        loss = (true != (predicted if number is None else number)).astype(np.float64)
    worst = 1.0 if cost is None else float(cost.max()) or 1.0
    # A binomial count needs losses of 0 and the largest only.
    problem = _Problem(name, at_most, number, worst, cost is None or set(np.unique(cost)) <= {0.0, worst})

    def solve(rows: Any, alpha: float) -> Threshold:
        found = problem.solve(score[rows], loss[rows], alpha)
        if found.labels_needed is not None and method is not None and folds is None:
            found = replace(found, labels_needed=2 * found.labels_needed)  # half of them fit the calibrator
        return replace(found, certainty=certainty, calibrator=calibrator, note=note.strip(), event_name=called)

    if given is None:
        return solve(slice(None), 1 - certainty)
    members = sorted(set(given.tolist()), key=str)
    each = {group: solve(given == group, (1 - certainty) / len(members)) for group in members}
    return GroupThresholds(each, certainty)


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
    at_most: float
    event: int | None
    largest: float = 1.0
    """The largest loss that there can be."""
    two_valued: bool = True

    @property
    def bound(self) -> float:
        """As a share of the largest loss."""
        return min(self.at_most / self.largest, 1.0)

    def solve(self, score: np.ndarray, loss: np.ndarray, alpha: float) -> Threshold:
        n = len(score)
        steps = self.sequence(score, loss)
        last = self.last(steps, n, alpha)
        risk = steps.losses / np.maximum(steps.trials, 1)
        wrong = math.nan if self.risk == "cost" else alpha
        curve = RiskCurve(steps.score, steps.kept / max(n, 1), risk, steps.losses, steps.trials, wrong)
        needed = None if last >= 0 else self.labels_needed(steps, n, alpha)
        at = (steps.score[last], int(steps.kept[last]), risk[last], curve.at([last]).high[0]) if last >= 0 else (
            math.inf, 0, math.nan, math.nan,
        )  # fmt: skip
        return Threshold(
            float(at[0]), self.at_most, 1 - alpha, self.risk, self.event, n, at[1], float(at[2]), float(at[3]),
            needed, curve,
        )  # fmt: skip

    def sequence(self, score: np.ndarray, loss: np.ndarray) -> _Sequence:
        order = np.argsort(-score, kind="stable")
        last = np.flatnonzero(tie_ends(-score[order])) if len(score) else np.zeros(0, np.int64)
        kept, losses = last + 1.0, np.cumsum(loss[order])[last]
        if self.risk == "false_positive_rate":
            negatives = np.full(len(last), loss.sum())
            p = bdtr(losses, negatives.astype(np.int64), self.at_most) if len(last) else losses
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
        most = 1.0 / (self.largest - self.at_most)
        log_wealth = np.cumsum(np.log1p(np.outer(_BETS * most, self.at_most - loss)), axis=1)
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
            if (
                before > least_rows(self.bound, alpha) + 1
                and steps.kept[place] > 1.2 * rows
                and before > rows**2 / steps.kept[place]
            ):
                place -= 1
            begun[place] = begun.get(place, 0.0) + share
        return sorted(begun.items())

    def labels_needed(self, steps: _Sequence, n: int, alpha: float) -> int | None:
        """The fewest rows with which some threshold would pass in four of five cases, were the risks those seen."""
        if self.risk == "false_positive_rate":
            return self.labels_needed_of_false_positives(steps, n, alpha)
        if not n:
            return None
        bound = self.bound
        # Of few rows an error rate of zero shows little: half an error is added.
        risk = (steps.losses / self.largest + 0.5) / (steps.trials + 1.0)
        risk = np.where(steps.losses == 0, np.minimum(risk, bound / 2), risk)
        hopeful = np.flatnonzero((steps.kept >= _enough(n)) & (risk < 0.9 * bound))
        if not len(hopeful):
            return None
        hopeful = hopeful[np.unique(np.linspace(0, len(hopeful) - 1, min(len(hopeful), 100)).astype(np.int64))]
        wanted = [rows_to_pass(float(risk[i]), bound, alpha / 2) * n / steps.kept[i] for i in hopeful]
        return _round_up(max(math.ceil(min(wanted)), n + 1))

    def labels_needed_of_false_positives(self, steps: _Sequence, n: int, alpha: float) -> int | None:
        """The same for a share of the rows without the event, which falls to 0 unless they tie at the highest score."""
        if not n:
            return None
        negatives, top = max(float(steps.trials[0]), 1.0), float(steps.losses[0])
        if top <= 1:  # none, or one that more rows would leave alone at the top
            return _round_up(max(math.ceil(least_rows(self.at_most, alpha) * n / negatives), n + 1))
        if top >= 0.9 * self.at_most * negatives:
            return None
        return _round_up(max(math.ceil(rows_to_pass(top / negatives, self.at_most, alpha) * n / negatives), n + 1))


def _enough(rows: int) -> float:
    """How many of so many rows are enough to judge a risk by."""
    return min(rows, max(20.0, 0.02 * rows))


def _round_up(rows: int) -> int:
    """To two digits."""
    unit: int = 10 ** max(len(str(rows)) - 2, 0)
    return math.ceil(rows / unit) * unit


def least_rows(at_most: float, alpha: float) -> float:
    """How many rows without a single error prove a risk of at most so much: ln α / ln(1 − r).

    >>> round(least_rows(0.02, 0.05), 1)
    148.3
    """
    return math.log(alpha) / math.log1p(-at_most) if at_most < 1 else 1.0


def rows_to_pass(risk: float, at_most: float, alpha: float, power: float = 0.8) -> int:
    """How many rows it takes to reject "the risk exceeds the bound" with this power, if the risk is this.

    >>> rows_to_pass(0.01, 0.02, 0.05)
    987
    """
    gap = at_most - risk
    noise = float(-ndtri(alpha)) * math.sqrt(at_most * (1 - at_most))
    noise += float(ndtri(power)) * math.sqrt(risk * (1 - risk))
    return math.ceil(max((noise / gap) ** 2, least_rows(at_most, alpha)))


def as_groups(groups: Any, length: int, *, complete: bool = False) -> np.ndarray:
    """Check groups (n,) of any values, numbers or words; `complete`, that none is NaN, which equals nothing."""
    values = np.asarray(groups.cpu() if isinstance(groups, torch.Tensor) else groups)
    if values.shape != (length,):
        raise InputError("groups", f"have shape ({length},), one entry a row", str(values.shape))
    if complete and values.dtype.kind in "fO" and (missing := np.flatnonzero(values != values)).size:
        got = f"NaN in row {missing[0]}" + (f" and {missing.size - 1:,} others" if missing.size > 1 else "")
        raise InputError("groups", "have a value in every row", got, "name what is missing, such as 'unknown'")
    return values


def _check_risk(risk: str, costs: Any, at_most: float, classes: int) -> tuple[str, np.ndarray | None]:
    if costs is None:
        if risk not in RISKS or risk == "cost":
            raise InputError("risk", "be error, false_discovery_rate or false_positive_rate", repr(risk))
        check_share(at_most, "at_most")
        return risk, None
    if risk != "error":
        raise InputError("risk", "be left out where costs are given", repr(risk))
    cost = np.asarray(costs, dtype=np.float64)
    if cost.shape != (classes, classes):
        raise InputError("costs", f"have shape ({classes}, {classes}), true class by predicted class", str(cost.shape))
    if not np.isfinite(cost).all() or cost.min() < 0:
        raise InputError("costs", "be finite and not negative", f"{cost.min():g}..{cost.max():g}")
    if not (isinstance(at_most, Real) and at_most > 0):
        raise InputError("at_most", "be positive", repr(at_most))
    return "cost", cost


def _calibrate(
    z: torch.Tensor, y: torch.Tensor, method: str | Callable[..., Calibrator], folds: int | None
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, Calibrator, str]:
    """Fit a method where it cannot spoil the promise: the rows that carry it, calibrated."""
    fit: Callable[..., Calibrator] = METHODS[method] if isinstance(method, str) else method
    if len(z) < 4:
        raise InputError("logits", "have at least 4 rows, to fit on some and promise on others", str(len(z)))
    if folds is None:
        half = torch.from_numpy(stratified_folds(z, y, 2)).to(z.device)
        calibrator = fit(*take_rows(z, y, half == 0))
        kept = half == 1
        note = f"Half of the rows fitted the calibrator; the other {int(kept.sum()):,} carry the promise."
        return as_logits(calibrator(z[kept])), y[kept], kept.cpu().numpy(), calibrator, note
    out = torch.from_numpy(cross_fit(fit, folds=folds)(z, y)).to(z.device)
    note = (
        f"Cross-fitted in {folds} folds: the promise is approximate, since the calibrator is then fitted on all rows."
    )
    return as_logits(out), y, np.ones(len(z), bool), fit(z, y), note


def _plain(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
