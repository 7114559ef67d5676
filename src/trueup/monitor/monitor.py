"""A monitor of calibration in a service: running metrics, and an alarm with a guaranteed false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from threading import RLock
from typing import Any

import numpy as np
import torch
from scipy.special import expit

from trueup.core.arrays import as_logits, as_tensors, as_weights
from trueup.core.bins import BINS
from trueup.core.clusters import Clusters, as_clusters
from trueup.core.conversion import as_event
from trueup.core.errors import InputError
from trueup.core.formatting import format_evidence, format_number, html_summary
from trueup.core.row_scores import event_class, score_rows
from trueup.metrics.groups import GroupTable, GroupTally, as_groups, plain_group
from trueup.monitor.betting import (
    CLASS_BETS,
    GLOBAL_BETS,
    LOCAL_BETS,
    LOCAL_BINS,
    Evidence,
    log_odds,
    log_payoffs_of_classes,
    log_payoffs_of_clusters,
    log_payoffs_of_rows,
)
from trueup.monitor.promise import PromiseCheck, Unlabelled, promise_scores
from trueup.monitor.windows import WeightedTally, Window

MOST_CLASSES = 100
"""Up to so many classes, each is tested on its own by default."""
MOST_GROUPS = 1000
"""A monitor keeps the sums of so many groups, all columns together."""


@dataclass(frozen=True)
class Alarm:
    """When calibration was rejected at level α, and how predictions deviate."""

    row: int
    """How many rows had been seen."""
    evidence: float
    """Wealth, 1/α or more."""
    reason: str


@dataclass(frozen=True)
class Status:
    """The metrics and the evidence so far; what has no rows yet is NaN.

    Of an event, and of two classes unless they are folded, `confidence` is the mean probability of the event (class 1)
    and `accuracy` how often it happened: `event` says so.
    """

    rows: int
    accuracy: float
    confidence: float
    nll: float
    ece: float
    recent_rows: int
    recent_accuracy: float
    recent_confidence: float
    recent_nll: float
    recent_ece: float
    fading_accuracy: float
    fading_confidence: float
    fading_nll: float
    fading_ece: float
    evidence: float
    """Wealth of those who bet against calibration: 1 at the start, 1/α is proof at level α."""
    p_value: float
    """1 / the most that it ever was: valid whenever it is looked at."""
    alarm: Alarm | None
    event: bool = False
    promise: dict[str, Any] | None = None
    """What became of the promise: answers, wrong ones, bounds of the risk that are valid whenever one looks."""
    unlabelled: dict[str, Any] | None = None
    """Rows that wait for labels: the accuracy (of an event, the frequency) expected of them as long as calibration
    holds, and the error among those that would be answered. What was realised stands beside: `accuracy`, `promise`."""

    def __repr__(self) -> str:
        return f"Status({', '.join(f'{name} {value}' for name, value in self._figures().items())}; {self._alarm()})"

    def _repr_html_(self) -> str:
        return html_summary("Status", self._figures(), self._alarm())

    def _figures(self) -> dict[str, str]:
        shown = {
            "accuracy": self.accuracy,
            "confidence": self.confidence,
            "ece": self.ece,
            "recent ece": self.recent_ece,
        }
        if self.event:
            shown = {"observed": self.accuracy, "predicted": self.confidence, "ece": self.ece}
        figures = {name: format_number(value) for name, value in shown.items()}
        return {"rows": f"{self.rows:,}", **figures, "evidence": format_evidence(self.evidence)}

    def _alarm(self) -> str:
        return "no alarm" if self.alarm is None else f"ALARM at row {self.alarm.row:,}: {self.alarm.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


class Monitor:
    """Monitor a network's calibration as predictions and their labels arrive.

    `alpha` is the chance that a calibrated network *ever* raises the alarm, however long it runs and however often one
    looks: see `trueup.monitor.betting`. It looks itself each `block` rows. Calibrated means that what happens with
    probability p, given all that came before, is predicted with confidence p; of class 1 where there are two, of the
    predicted class where there are more, or with `fold`, and with `classwise` of every class. `event`, a class or with
    `names` one of them, asks for the probability of that class alone. Threads may share one: each batch goes in whole,
    one after the other. `promise`, a `decisions.Threshold` or a mapping of its `threshold` and `at_most`, is checked
    again as labels arrive, by bounds that are valid whenever one looks; `expect` takes in rows before they do.

    >>> rng = np.random.default_rng(0)
    >>> def score_rows(n, temperature):
    ...     z = 2 * rng.normal(size=(n, 5))
    ...     return z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> monitor = Monitor(5, alpha=0.01)
    >>> monitor.update(*score_rows(20_000, 1.0)).alarm is None
    True
    >>> print(monitor.update(*score_rows(2_000, 1.5)).alarm.reason)
    It is too sure: with its log-odds times 0.70 and moved by -0.2 it would fit what was seen.
    """

    def __init__(
        self,
        classes: int,
        *,
        alpha: float = 0.01,
        bins: int = BINS,
        window: int = 10_000,
        half_life: float = 10_000.0,
        block: int = 100,
        classwise: bool | None = None,
        fold: bool = False,
        event: int | str | None = None,
        names: Sequence[str] | None = None,
        promise: Any = None,
    ) -> None:
        for name, value, least in (
            ("classes", classes, 2),
            ("bins", bins, 1),
            ("window", window, 1),
            ("block", block, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie in (0, 1), got {alpha!r}")
        if not half_life > 0:
            raise ValueError(f"half_life must be positive, got {half_life!r}")
        self.classes, self.bins = int(classes), int(bins)
        self.alpha, self.half_life = float(alpha), float(half_life)
        self.event = None if event is None else event_class(event, self.classes, names)
        self.classwise = self.judged_classes <= MOST_CLASSES if classwise is None else bool(classwise)
        self.fold = bool(fold)
        self.promise = None if promise is None else PromiseCheck.of(promise)
        if self.promise is not None and self.promise.risk != "error":
            if not self.is_event:
                raise InputError("promise", "bound the error, unless an event is watched", repr(self.promise.risk))
            watched, promised = 1 if self.event is None else self.event, getattr(promise, "event", None)
            if promised not in (None, watched):
                raise InputError("promise", f"be about the event that is watched, class {watched}", f"class {promised}")
        self.unlabelled = Unlabelled()
        self.evidence = Evidence.initial(len(self.shares), int(block))
        self.total = WeightedTally.empty(self.bins)
        self.recent = Window(int(window), ())
        self.fading = WeightedTally.empty(self.bins)
        self.groups: GroupTally | None = None
        """Of the rows that came with groups."""
        self.peak = 0.0
        """The logarithm of the most that wealth ever was."""
        self.alarm: Alarm | None = None
        self._last_clusters: frozenset[Any] = frozenset()
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """All between two batches, for a copy: its parts are never changed, only exchanged."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = RLock()

    @property
    def rows(self) -> int:
        """How many rows it has seen."""
        return self.evidence.rows

    @property
    def shares(self) -> np.ndarray:
        """How the money is divided among the bettors: half of it for classes if `classwise`, else none."""
        of_rows = np.concatenate(
            [
                np.full(len(GLOBAL_BETS), 0.5 / len(GLOBAL_BETS)),
                np.full(LOCAL_BINS * len(LOCAL_BETS), 0.5 / (LOCAL_BINS * len(LOCAL_BETS))),
            ]
        )
        if not self.classwise:
            return of_rows
        bettors = self.judged_classes * len(CLASS_BETS)
        return np.concatenate([0.5 * of_rows, np.full(bettors, 0.5 / bettors)])

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, for another monitor like this one.

        >>> Monitor(**Monitor(3, alpha=0.05).settings()).alpha
        0.05
        """
        return {
            "classes": self.classes,
            "alpha": self.alpha,
            "bins": self.bins,
            "window": self.recent.size,
            "half_life": self.half_life,
            "block": self.evidence.block,
            "classwise": self.classwise,
            "fold": self.fold,
            "event": self.event,
            "promise": None if self.promise is None else self.promise.settings(),
        }

    @property
    def judged_classes(self) -> int:
        """The number of classes; two of an event, which happens or does not."""
        return self.classes if self.event is None else 2

    @property
    def is_event(self) -> bool:
        """Whether it is about the probability of one class: of an event, and of two classes, unless they are folded."""
        return self.judged_classes == 2 and not self.fold

    def expect(self, logits: Any) -> Status:
        """Take in predictions whose labels have not arrived: `status().unlabelled` says what to expect of them.

        The expected accuracy is the mean confidence, which is right as long as calibration is: the alarm says when it
        is not, from labelled rows alone. When their labels arrive, `update(…, awaited=True)` takes them out again.

        >>> monitor = Monitor(2, fold=True)
        >>> round(monitor.expect([[0.0, 2.0], [1.0, 0.0]]).unlabelled["accuracy"]["value"], 3)
        0.806
        >>> monitor.update([[0.0, 2.0]], [1], awaited=True).unlabelled["rows"]
        1
        """
        z = as_logits(logits)
        if z.shape[1] != self.classes:
            raise ValueError(f"logits must have {self.classes} classes, got {z.shape[1]}")
        waiting = self._count_unlabelled(z)
        with self._lock:
            self.unlabelled = self.unlabelled + waiting
            return self._status()

    def _count_unlabelled(self, z: torch.Tensor) -> Unlabelled:
        nobody = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        watched = z if self.event is None else as_event(z, nobody, self.event)[0]
        score = score_rows(watched, nobody, fold=self.fold).score
        if self.promise is None:
            return Unlabelled.of(score, None, math.inf)
        promised = promise_scores(self.promise.risk, z, nobody.numpy(force=True), self.event)[0]
        return Unlabelled.of(score, promised, self.promise.threshold)

    def update(
        self,
        logits: Any,
        labels: Any,
        *,
        weights: Any = None,
        groups: Any = None,
        clusters: Any = None,
        awaited: bool = False,
    ) -> Status:
        """Take in predictions with their labels, in the order in which they were made.

        `weights`, one number a row, on one scale in all batches, weigh the metrics. The evidence counts each row once,
        whatever it weighs, and none that weighs nothing: a calibrated network is calibrated in every row, and only so
        is the chance of a false alarm kept. `groups`, one value a row or a mapping of columns of them, are what
        `by_group` tells apart. `clusters`, one value a row, say which rows are correlated, such as tokens of one text:
        the evidence then counts a cluster as one bet, the mean of what its rows would pay, since rows that err together
        would raise false alarms. All rows of a cluster must come in one batch. `awaited` says that `expect` has seen
        these rows before. What is wrong raises a `ValueError` and changes nothing.
        """
        z, y = as_tensors(logits, labels)
        if z.shape[1] != self.classes:
            raise ValueError(f"logits must have {self.classes} classes, got {z.shape[1]}")
        waited = self._count_unlabelled(z) if awaited else Unlabelled()
        w = as_weights(weights, len(z))
        columns = None if groups is None else _plain_columns(groups, len(z))
        together = as_clusters(clusters, len(z))
        if together is not None and columns is not None:
            raise InputError("groups", "be left out with clusters", "both", "by_group counts independent rows")
        if together is not None and self.promise is not None:
            raise InputError("clusters", "be left out where a promise is checked", "both", "it counts independent rows")
        if w is not None and together is not None:
            together = together.take(w > 0)
        if w is not None and not w.all():
            some = torch.from_numpy(w > 0).to(z.device)
            columns = columns and {name: values[w > 0] for name, values in columns.items()}
            z, y, w = z[some], y[some], w[w > 0]
        whole, true = z, y
        if self.event is not None:
            z, y = as_event(z, y, self.event)
        if together is not None:
            return self._update_clusters(z, y, w, together, waited)
        rows = score_rows(z, y, fold=self.fold)
        at, n = 0, len(y)
        found = None if columns is None else GroupTally.of(rows.score, rows.outcome, columns, weights=w)
        promised = None
        if self.promise is not None:
            promised = promise_scores(self.promise.risk, whole, true.cpu().numpy(), self.event)
        with self._lock:
            waiting = self.unlabelled - waited
            if found is not None:
                self.groups = _add_groups(self.groups, found)
            self.unlabelled = waiting
            if self.promise is not None and promised is not None:
                self.promise = self.promise.update(*promised)
            while at < n:
                step = min(n - at, self.evidence.rows_left_in_block(), self.recent.free_rows())
                part = slice(at, at + step)
                claims = rows.score[part], rows.outcome[part], rows.nll[part]
                self._update(*claims, z[part], y[part], None if w is None else w[part])
                at += step
            return self._status()

    def _update_clusters(
        self, z: torch.Tensor, y: torch.Tensor, w: np.ndarray | None, together: Clusters, waited: Unlabelled
    ) -> Status:
        """Take in whole clusters, in the order in which they begin."""
        first = np.full(together.count, len(y))
        np.minimum.at(first, together.code, np.arange(len(y)))
        order = np.argsort(first[together.code], kind="stable")
        start = np.flatnonzero(np.diff(first[together.code][order], prepend=-1))
        taken = torch.from_numpy(order).to(z.device)
        z, y, w = z[taken], y[taken], None if w is None else w[order]
        rows = score_rows(z, y, fold=self.fold)
        ends, done = np.append(start[1:], len(y)), 0
        names = frozenset(together.names)
        with self._lock:
            if again := sorted(map(str, names & self._last_clusters)):
                raise InputError("clusters", "come whole in one batch", f"{again[0]} in this one and the one before")
            self.unlabelled = self.unlabelled - waited
            self._last_clusters = names
            while done < len(start):
                room = min(self.evidence.rows_left_in_block(), self.recent.free_rows())
                at = start[done]
                last = max(int(np.searchsorted(ends, at + room, side="right")), done + 1)
                part = slice(at, ends[last - 1])
                claims = rows.score[part], rows.outcome[part], rows.nll[part]
                weights = None if w is None else w[part]
                self._update(*claims, z[part], y[part], weights, start[done:last] - at)
                done = last
            return self._status()

    def by_group(self, *, level: float = 0.95) -> GroupTable | None:
        """Where it is wrong: what was predicted and what happened in each group so far; None without groups.

        Unlike the alarm its intervals are made for one look: who looks often will find a group now and then.

        >>> monitor = Monitor(2)
        >>> _ = monitor.update([[1.0, 0.0], [0.0, 0.0]], [0, 1], groups=["a", "b"])
        >>> monitor.by_group()["b"].observed
        1.0
        """
        groups = self.groups
        return None if groups is None else groups.table(level=level)

    def __repr__(self) -> str:
        return f"Monitor({self.classes} classes, alpha {self.alpha:g}; {self.status()!r})"

    def _repr_html_(self) -> str:
        return f"<p>Monitor of {self.classes} classes, alpha {self.alpha:g}</p>{self.status()._repr_html_()}"

    def status(self) -> Status:
        """The metrics and the evidence so far, between two batches."""
        return copy(self)._status()

    def _status(self) -> Status:
        recent = self.recent.total(self.bins)
        summaries = [_summary(tally) for tally in (self.total, recent, self.fading)]
        log_wealth = self.evidence.log_wealth(self.shares)
        return Status(
            self.rows,
            *summaries[0],
            int(recent.seen),
            *summaries[1],
            *summaries[2],
            evidence=_exp(log_wealth),
            p_value=math.exp(-max(self.peak, 0.0)),
            alarm=self.alarm,
            event=self.is_event,
            promise=None if self.promise is None else self.promise.to_dict(),
            unlabelled=self.unlabelled.to_dict() if self.unlabelled.rows else None,
        )

    def __add__(self, other: Monitor) -> Monitor:
        """Two services' monitors as one: tallies add, wealth is averaged; windows and alarms stay with their services.

        The chance of a false alarm of the sum is at most `alpha` too.
        """
        if not isinstance(other, Monitor):
            return NotImplemented
        mine, theirs = ((m.classes, m.bins, m.alpha, m.classwise, m.half_life, m.fold, m.event) for m in (self, other))
        promises = [None if m.promise is None else m.promise.settings() for m in (self, other)]
        if mine != theirs or promises[0] != promises[1]:
            raise ValueError("monitors must have the same classes and settings to be added")
        one, two = copy(self), copy(other)  # which no thread changes meanwhile
        merged = Monitor(**self.settings())
        merged.evidence = one.evidence + two.evidence
        merged.total = one.total + two.total
        merged.recent = replace(one.recent, pieces=())
        merged.fading = one.fading + two.fading
        merged.groups = one.groups if two.groups is None else _add_groups(one.groups, two.groups)
        merged.unlabelled = one.unlabelled + two.unlabelled
        if one.promise is not None and two.promise is not None:
            merged.promise = one.promise + two.promise
        merged._check_alarm()
        return merged

    def _update(
        self,
        confidence: np.ndarray,
        correct: np.ndarray,
        nll: np.ndarray,
        z: torch.Tensor,
        y: torch.Tensor,
        weights: np.ndarray | None,
        starts: np.ndarray | None = None,
    ) -> None:
        n = len(nll)
        probs = torch.softmax(z.double(), dim=1).cpu().numpy() if self.classwise else None
        if starts is not None:
            payoffs = log_payoffs_of_clusters(confidence, correct, starts, probs, y.cpu().numpy())
        else:
            payoffs = log_payoffs_of_rows(confidence, correct)
            if probs is not None:
                payoffs = np.concatenate([payoffs, log_payoffs_of_classes(probs, y.cpu().numpy())])
        piece = WeightedTally.of(confidence, correct, nll, self.bins, weights)
        self.total = self.total + piece
        self.recent = self.recent.append(piece)
        self.fading = self.fading * 0.5 ** (n / self.half_life) + WeightedTally.with_half_life(
            confidence, correct, nll, self.bins, self.half_life, weights
        )
        self.evidence = self.evidence.update(payoffs, n)
        self._check_alarm()

    def _check_alarm(self) -> None:
        log_wealth = self.evidence.log_wealth(self.shares)
        self.peak = max(self.peak, log_wealth)
        if self.alarm is None and log_wealth >= -math.log(self.alpha):
            recent = self.recent.total(self.bins)
            mean = recent.mean(recent.bins.confidence.sum())
            reason = _reason(self.evidence.strongest(self.shares), mean, event=self.is_event)
            self.alarm = Alarm(self.rows, _exp(log_wealth), reason)


def _plain_columns(groups: Any, rows: int) -> dict[str, np.ndarray]:
    """Groups as a checkpoint holds them, so that they are the same after a restart."""
    return {
        name: np.array([plain_group(group) for group in values], dtype=object)
        for name, values in as_groups(groups, rows).items()
    }


def _add_groups(one: GroupTally | None, two: GroupTally) -> GroupTally:
    total = two if one is None else one + two
    if len(total.sums) > MOST_GROUPS:
        raise InputError("groups", f"be at most {MOST_GROUPS:,} in all batches and columns", f"{len(total.sums):,}")
    return total


def _summary(tally: WeightedTally) -> tuple[float, float, float, float]:
    """Accuracy, confidence, NLL and ECE."""
    b = tally.bins
    return tally.mean(b.hits.sum()), tally.mean(b.confidence.sum()), tally.mean(tally.nll), b.ece()


def _exp(log: float) -> float:
    return math.exp(min(log, 700.0))


_NO_CHANGE = 0.01
"""By less than this, what is believed at the mean says nothing of a direction."""


def _reason(bettor: int, mean: float, *, event: bool) -> str:
    """What the bettor who won most believes, in words; its direction is that at the mean of what is predicted."""
    if bettor < len(GLOBAL_BETS):
        slope, shift = GLOBAL_BETS[bettor]
        change = float(expit(slope * log_odds(np.array([mean]))[0] + shift)) - mean
        if abs(change) < _NO_CHANGE and slope != 1:
            how = "is too extreme" if slope < 1 else "is not extreme enough"
        elif event:
            how = "predicts too much" if change < 0 else "predicts too little"
        else:
            how = "is too sure" if change < 0 else "is not sure enough"
        moved = f" and moved by {shift:+.1f}" if shift else ""
        return f"It {how}: with its log-odds times {slope:.2f}{moved} it would fit what was seen."
    bettor -= len(GLOBAL_BETS)
    if bettor < LOCAL_BINS * len(LOCAL_BETS):
        part, belief = divmod(bettor, len(LOCAL_BETS))
        how = "less" if LOCAL_BETS[belief][1] < 0 else "more"
        between = f"{part / LOCAL_BINS:.0%} to {(part + 1) / LOCAL_BINS:.0%}"
        if event:
            return f"Where it predicts {between}, the event happens {how} often."
        return f"Where it says {between}, it is right {how} often."
    number, belief = divmod(bettor - LOCAL_BINS * len(LOCAL_BETS), len(CLASS_BETS))
    slope, shift = CLASS_BETS[belief]
    if shift == 0:
        how = "too extreme" if slope < 1 else "not extreme enough"
        return f"What it says of {'the event' if event else f'class {number}'} is {how}."
    if event:  # class 0 is that it does not happen
        return f"The event happens {'less' if (shift < 0) == (number == 1) else 'more'} often than it says."
    return f"Class {number} comes {'less' if shift < 0 else 'more'} often than it says."
