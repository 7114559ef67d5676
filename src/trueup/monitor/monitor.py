"""A monitor of calibration in a service: running metrics, and an alarm with a guaranteed false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from threading import RLock
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays, as_logits, as_weights
from trueup._core.bins import BINS
from trueup._core.clusters import Clusters, as_clusters
from trueup._core.errors import InputError
from trueup._core.formatting import format_evidence, format_number, html_summary
from trueup._core.namespace import NUMPY
from trueup._core.row_scores import RowScores, event_class, score_rows
from trueup.convert import as_event
from trueup.metrics.groups import GroupTable, GroupTally, as_groups, plain_group
from trueup.monitor.betting import Evidence, describe_bettor, log_payoffs_of_clusters, log_payoffs_of_rows, shares_of
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
        names = ("observed", "predicted", "ece") if self.event else ("accuracy", "confidence", "ece", "recent ece")
        values = map(format_number, (self.accuracy, self.confidence, self.ece, self.recent_ece))
        figures = dict(zip(names, values, strict=False))
        return {"rows": f"{self.rows:,}", **figures, "evidence": format_evidence(self.evidence)}

    def _alarm(self) -> str:
        return "no alarm" if self.alarm is None else f"ALARM at row {self.alarm.row:,}: {self.alarm.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class MonitorSizes:
    """How many bins and rows a monitor counts by."""

    bins: int = BINS
    """Of the calibration errors."""
    window: int = 10_000
    """Recent rows."""
    half_life: float = 10_000.0
    """After how many rows one counts half in the fading metrics."""
    block: int = 100
    """After how many rows it looks for an alarm."""

    def __post_init__(self) -> None:
        for name in ("bins", "window", "block"):
            _check_whole(name, getattr(self, name), 1)
        if not self.half_life > 0:
            raise ValueError(f"half_life must be positive, got {self.half_life!r}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


class Monitor:
    """Monitor a network's calibration as predictions and their labels arrive.

    `level` is the chance that a calibrated network *never* raises the alarm, however long it runs and however often one
    looks: see `trueup.monitor.betting`. It looks itself each `sizes.block` rows. Calibrated means that what happens
    with probability p, given all that came before, is predicted with confidence p; of class 1 where there are two, of
    the predicted class where there are more, or with `top_label`, and with `classwise` of every class. `event`, a class
    or with `class_names` one of them, asks for the probability of that class alone. Threads may share one: each batch
    goes in whole, one after the other. `promise`, a `decisions.Threshold` or a mapping of its `threshold` and
    `max_risk`, is checked again as labels arrive, by bounds that are valid whenever one looks; `expect` takes in rows
    before they do.

    >>> rng = np.random.default_rng(0)
    >>> def score_rows(n, temperature):
    ...     z = 2 * rng.normal(size=(n, 5))
    ...     return z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> monitor = Monitor(5, level=0.99)
    >>> monitor.update(*score_rows(20_000, 1.0)).alarm is None
    True
    >>> print(monitor.update(*score_rows(2_000, 1.5)).alarm.reason)
    It is too sure: with its log-odds times 0.70 and moved by -0.2 it would fit what was seen.
    """

    def __init__(
        self,
        n_classes: int,
        *,
        level: float = 0.99,
        classwise: bool | None = None,
        top_label: bool = False,
        event: int | str | None = None,
        class_names: Sequence[str] | None = None,
        promise: Any = None,
        sizes: MonitorSizes = MonitorSizes(),  # noqa: B008, it is frozen
    ) -> None:
        _check_whole("n_classes", n_classes, 2)
        if not 0 < level < 1:
            raise ValueError(f"level must lie in (0, 1), got {level!r}")
        self.n_classes, self.level, self.sizes = int(n_classes), float(level), sizes
        self.event = None if event is None else event_class(event, self.n_classes, class_names)
        self.classwise = self.judged_classes <= MOST_CLASSES if classwise is None else bool(classwise)
        self.top_label = bool(top_label)
        self.promise = None if promise is None else PromiseCheck.of(promise)
        if self.promise is not None and self.promise.risk != "error":
            if not self.is_event:
                raise InputError("promise", "bound the error, unless an event is watched", repr(self.promise.risk))
            watched, promised = 1 if self.event is None else self.event, getattr(promise, "event", None)
            if promised not in (None, watched):
                raise InputError("promise", f"be about the event that is watched, class {watched}", f"class {promised}")
        self.unlabelled = Unlabelled()
        self.evidence = Evidence.initial(len(self.shares), int(sizes.block))
        self.total = WeightedTally.empty(self.bins)
        self.recent = Window(int(sizes.window), ())
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
        return shares_of(self.judged_classes if self.classwise else 0)

    def settings(self) -> dict[str, Any]:
        """Plain data for another monitor like this one: the constructor's arguments, and the sizes one by one.

        >>> Monitor.from_settings(Monitor(3, level=0.95).settings()).level
        0.95
        """
        settings = {"n_classes": self.n_classes, "level": self.level, **asdict(self.sizes)}
        settings |= {"classwise": self.classwise, "top_label": self.top_label, "event": self.event}
        return settings | {"promise": None if self.promise is None else self.promise.settings()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Monitor:
        """A monitor with the settings of another."""
        names = {field.name for field in fields(MonitorSizes)}
        sizes = MonitorSizes(**{name: value for name, value in settings.items() if name in names})
        return cls(**{name: value for name, value in settings.items() if name not in names}, sizes=sizes)

    @property
    def bins(self) -> int:
        """Of the calibration errors."""
        return int(self.sizes.bins)

    @property
    def judged_classes(self) -> int:
        """The number of classes; two of an event, which happens or does not."""
        return self.n_classes if self.event is None else 2

    @property
    def is_event(self) -> bool:
        """Whether it is about the probability of one class: of an event, and of two classes, unless they are folded."""
        return self.judged_classes == 2 and not self.top_label

    def expect(self, logits: Any) -> Status:
        """Take in predictions whose labels have not arrived: `status().unlabelled` says what to expect of them.

        The expected accuracy is the mean confidence, which is right as long as calibration is: the alarm says when it
        is not, from labelled rows alone. When their labels arrive, `update(…, awaited=True)` takes them out again.

        >>> monitor = Monitor(2, top_label=True)
        >>> round(monitor.expect([[0.0, 2.0], [1.0, 0.0]]).unlabelled["accuracy"]["value"], 3)
        0.806
        >>> monitor.update([[0.0, 2.0]], [1], awaited=True).unlabelled["rows"]
        1
        """
        z = as_logits(logits)
        self._check_classes(z)
        waiting = self._count_unlabelled(z)
        with self._lock:
            self.unlabelled = self.unlabelled + waiting
            return self._status()

    def _check_classes(self, z: np.ndarray) -> None:
        if z.shape[1] != self.n_classes:
            raise ValueError(f"logits must have {self.n_classes} classes, got {z.shape[1]}")

    def _count_unlabelled(self, z: np.ndarray) -> Unlabelled:
        nobody = np.zeros(len(z), np.int64)
        watched = z if self.event is None else as_event(z, nobody, self.event)[0]
        score = score_rows(watched, nobody, top_label=self.top_label).score
        if self.promise is None:
            return Unlabelled.of(score, None, math.inf)
        promised = promise_scores(self.promise.risk, z, nobody, self.event)[0]
        return Unlabelled.of(score, promised, self.promise.threshold)

    def update(
        self,
        logits: Any,
        labels: Any,
        *,
        sample_weight: Any = None,
        groups: Any = None,
        clusters: Any = None,
        awaited: bool = False,
    ) -> Status:
        """Take in predictions with their labels, in the order in which they were made.

        `sample_weight`, one number a row, on one scale in all batches, weigh the metrics. The evidence counts each row
        once, whatever it weighs, and none that weighs nothing: a calibrated network is calibrated in every row, and
        only so is the chance of a false alarm kept. `groups`, one value a row or a mapping of columns of them, are what
        `by_group` tells apart. `clusters`, one value a row, say which rows are correlated, such as tokens of one text:
        the evidence then counts a cluster as one bet, the mean of what its rows would pay, since rows that err together
        would raise false alarms. All rows of a cluster must come in one batch. `awaited` says that `expect` has seen
        these rows before. What is wrong raises a `ValueError` and changes nothing.
        """
        z, y = as_arrays(logits, labels)
        self._check_classes(z)
        waited = self._count_unlabelled(z) if awaited else Unlabelled()
        w = as_weights(sample_weight, len(z))
        columns = None if groups is None else _plain_columns(groups, len(z))
        blocks = as_clusters(clusters, len(z))
        if blocks is not None and columns is not None:
            raise InputError("groups", "be left out with clusters", "both", "by_group counts independent rows")
        if blocks is not None and self.promise is not None:
            raise InputError("clusters", "be left out where a promise is checked", "both", "it counts independent rows")
        if w is not None and not w.all():
            some = w > 0
            blocks = None if blocks is None else blocks.take(some)
            columns = columns and {name: values[some] for name, values in columns.items()}
            z, y, w = z[some], y[some], w[some]
        starts = None
        if blocks is not None:
            order, starts = _whole_clusters(blocks)
            z, y, w = z[order], y[order], None if w is None else w[order]
        promised = None if self.promise is None else promise_scores(self.promise.risk, z, y, self.event)
        if self.event is not None:
            z, y = as_event(z, y, self.event)
        rows = score_rows(z, y, top_label=self.top_label)
        new_groups = None if columns is None else GroupTally.of(rows.score, rows.outcome, columns, sample_weight=w)
        names = frozenset(() if blocks is None else blocks.names)
        with self._lock:
            if again := sorted(map(str, names & self._last_clusters)):
                raise InputError("clusters", "come whole in one batch", f"{again[0]} in this one and the one before")
            waiting = self.unlabelled - waited
            self.groups = self.groups if new_groups is None else _add_groups(self.groups, new_groups)
            self.unlabelled = waiting
            self._last_clusters = names or self._last_clusters
            if self.promise is not None and promised is not None:
                self.promise = self.promise.update(*promised)
            self._add_rows(rows, z, y, w, starts)
            return self._status()

    def _add_rows(
        self, rows: RowScores, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, starts: np.ndarray | None
    ) -> None:
        """Take in rows, or whole clusters of them, piece by piece: each at most to the end of a block."""
        ends = np.arange(1, len(y) + 1) if starts is None else np.append(starts[1:], len(y))
        at = done = 0
        while at < len(y):
            room = min(self.evidence.rows_left_in_block(), self.recent.free_rows())
            after = max(int(np.searchsorted(ends, at + room, side="right")), done + 1)
            part = slice(at, int(ends[after - 1]))
            scores = rows.score[part], rows.outcome[part]
            classes = (NUMPY.softmax(z[part].astype(np.float64)), y[part]) if self.classwise else None
            weights = None if w is None else w[part]
            if starts is not None:
                payoffs = log_payoffs_of_clusters(*scores, starts[done:after] - at, classes)
            else:
                payoffs = log_payoffs_of_rows(*scores, classes)
            n = part.stop - at
            piece = WeightedTally.of(*scores, rows.nll[part], self.bins, weights)
            self.total = self.total + piece
            self.recent = self.recent.append(piece)
            fading = 0.5 ** (np.arange(n)[::-1] / self.sizes.half_life)  # half for what is a half-life older
            fading = fading if weights is None else fading * weights
            newest = WeightedTally.of(*scores, rows.nll[part], self.bins, fading)
            self.fading = self.fading * 0.5 ** (n / self.sizes.half_life) + newest
            self.evidence = self.evidence.update(payoffs, n)
            self._check_alarm()
            at, done = part.stop, after

    def by_group(self, *, level: float = 0.95) -> GroupTable | None:
        """Where it is wrong: what was predicted and what happened in each group so far; None without groups.

        Unlike the alarm its intervals are made for one look: who looks often will find a group now and then.

        >>> monitor = Monitor(2)
        >>> _ = monitor.update([[1.0, 0.0], [0.0, 0.0]], [0, 1], groups=["a", "b"])
        >>> monitor.by_group()["b"].observed
        1.0
        """
        return None if (groups := self.groups) is None else groups.table(level=level)

    def __repr__(self) -> str:
        return f"Monitor({self.n_classes} classes, level {self.level:g}; {self.status()!r})"

    def _repr_html_(self) -> str:
        return f"<p>Monitor of {self.n_classes} classes, level {self.level:g}</p>{self.status()._repr_html_()}"

    def status(self) -> Status:
        """The metrics and the evidence so far, between two batches."""
        return copy(self)._status()

    def _status(self) -> Status:
        window = self.recent.total(self.bins)
        total, recent, fading = (_summary(tally) for tally in (self.total, window, self.fading))
        metrics = (self.rows, *total, int(window.seen), *recent, *fading)
        evidence = math.exp(min(self.evidence.log_wealth(self.shares), 700.0))
        p_value = math.exp(-max(self.peak, 0.0))
        promise = None if self.promise is None else self.promise.to_dict()
        waiting = self.unlabelled.to_dict() if self.unlabelled.rows else None
        return Status(*metrics, evidence, p_value, self.alarm, self.is_event, promise, waiting)

    def __add__(self, other: Monitor) -> Monitor:
        """Two services' monitors as one: tallies add, wealth is averaged; windows and alarms stay with their services.

        The chance of a false alarm of the sum is at most 1 − `level` too.
        """
        if not isinstance(other, Monitor):
            return NotImplemented
        mine, theirs = ({**monitor.settings(), "window": None} for monitor in (self, other))
        if mine != theirs:
            raise ValueError("monitors must have the same classes and settings to be added")
        one, two = copy(self), copy(other)  # which no thread changes meanwhile
        merged = Monitor.from_settings(self.settings())
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

    def _check_alarm(self) -> None:
        log_wealth = self.evidence.log_wealth(self.shares)
        self.peak = max(self.peak, log_wealth)
        if self.alarm is None and log_wealth >= -math.log1p(-self.level):
            _, mean, _, _ = _summary(self.recent.total(self.bins))
            reason = describe_bettor(self.evidence.strongest(self.shares), mean, event=self.is_event)
            self.alarm = Alarm(self.rows, math.exp(min(log_wealth, 700.0)), reason)


def _whole_clusters(clusters: Clusters) -> tuple[np.ndarray, np.ndarray]:
    """The order that brings the rows of a cluster together, clusters as they begin, and where each then begins."""
    n = len(clusters.code)
    first = np.full(clusters.count, n)
    np.minimum.at(first, clusters.code, np.arange(n))
    order = np.argsort(first[clusters.code], kind="stable")
    return order, np.flatnonzero(np.diff(first[clusters.code][order], prepend=-1))


def _plain_columns(groups: Any, rows: int) -> dict[str, np.ndarray]:
    """Groups as a checkpoint holds them, so that they are the same after a restart."""
    columns = as_groups(groups, rows).items()
    return {name: np.array([plain_group(group) for group in values], dtype=object) for name, values in columns}


def _add_groups(one: GroupTally | None, two: GroupTally) -> GroupTally:
    total = two if one is None else one + two
    if len(total.sums) > MOST_GROUPS:
        raise InputError("groups", f"be at most {MOST_GROUPS:,} in all batches and columns", f"{len(total.sums):,}")
    return total


def _summary(tally: WeightedTally) -> tuple[float, float, float, float]:
    """Accuracy, confidence, NLL and ECE."""
    b = tally.bins
    return tally.mean(b.hits.sum()), tally.mean(b.confidence.sum()), tally.mean(tally.nll), b.ece()
