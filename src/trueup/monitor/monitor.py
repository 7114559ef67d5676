"""Monitor calibration in a service: running metrics, and an alarm with a guaranteed false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
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
from trueup._core.types import ArrayLike
from trueup.convert import as_event
from trueup.metrics.groups import GroupTable, GroupTally, as_groups, plain_group
from trueup.monitor.betting import (
    Evidence,
    bettor_shares,
    describe_bettor,
    log_payoffs_of_clusters,
    log_payoffs_of_rows,
)
from trueup.monitor.promise import PromiseCheck, Unlabelled, promise_scores
from trueup.monitor.windows import WeightedTally, Window

MAX_CLASSES_WATCHED = 100
"""Largest number of classes for which each class is tested separately by default."""
MAX_GROUPS = 1000
"""Largest number of groups, over all columns."""
MAX_ALARMS = 100
"""Number of acknowledged alarms that are kept, the newest."""


@dataclass(frozen=True)
class Alarm:
    """The moment at which calibration was rejected, and how the predictions deviate."""

    row: int
    """Number of rows before the alarm."""
    evidence: float
    """Wealth of the bettors: 1/(1 − `level`) or more."""
    reason: str
    """The deviation in words."""


@dataclass(frozen=True)
class Status:
    """The metrics and the evidence so far; metrics without rows are NaN.

    If `event` is true, `confidence` is the mean probability of the event and `accuracy` its observed frequency.
    """

    rows: int
    """Number of rows so far."""
    accuracy: float
    """Share of correct predictions of all rows."""
    confidence: float
    """Mean confidence of all rows."""
    nll: float
    """Mean negative log-likelihood of all rows."""
    ece: float
    """Expected calibration error of all rows."""
    recent_rows: int
    """Number of rows in the window."""
    recent_accuracy: float
    """Share of correct predictions of the recent rows."""
    recent_confidence: float
    """Mean confidence of the recent rows."""
    recent_nll: float
    """Mean negative log-likelihood of the recent rows."""
    recent_ece: float
    """Expected calibration error of the recent rows."""
    fading_accuracy: float
    """Share of correct predictions with weights that fade with age."""
    fading_confidence: float
    """Mean confidence with weights that fade with age."""
    fading_nll: float
    """Mean negative log-likelihood with weights that fade with age."""
    fading_ece: float
    """Expected calibration error with weights that fade with age."""
    evidence: float
    """Wealth of the bettors against calibration: 1 at the start; 1/α rejects calibration at level α."""
    p_value: float
    """1 / the largest wealth so far: an anytime-valid p-value of calibration."""
    alarm: Alarm | None
    """The alarm, once raised; it stays until it is acknowledged."""
    event: bool = False
    """Whether the monitor watches the probability of an event: class 1 of two, or the class `event`."""
    promise: dict[str, Any] | None = None
    """The promise: its settings, the number of answers and errors, and anytime-valid bounds of the risk."""
    unlabelled: dict[str, Any] | None = None
    """Estimates for rows without labels, assuming calibration: the accuracy (for an event, its frequency) and the error
    rate of the rows that would be answered."""
    acknowledged: list[Alarm] = field(default_factory=list)
    """The alarms that were acknowledged; the evidence began anew after each."""

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
        """Convert to plain data for JSON; undefined values are None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class MonitorSizes:
    """Sizes of a monitor's bins, windows and blocks."""

    bins: int = BINS
    """Number of bins of the calibration errors."""
    window: int = 10_000
    """Number of rows in the recent metrics."""
    half_life: float = 10_000.0
    """Age in rows at which a row has half its weight in the fading metrics."""
    block: int = 100
    """Number of rows after which the bettors start again."""

    def __post_init__(self) -> None:
        for name in ("bins", "window", "block"):
            _check_whole(name, getattr(self, name), 1)
        if not self.half_life > 0:
            raise ValueError(f"half_life must be positive, got {self.half_life!r}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


class Monitor:
    """A monitor of a model's calibration, updated as predictions and their labels arrive.

    The alarm is a sequential test by betting: a calibrated model *never* raises it with probability `level` or more,
    however long the monitor runs and however often it is read. It is evaluated at least every `sizes.block` rows.
    Calibrated means: an event predicted with probability p happens with probability p, given everything before.
    Threads may share a monitor: batches are added one after the other, each as a whole.

    Parameters
    ----------
    n_classes
        Number of classes of the logits.
    level
        Probability that a calibrated model never raises the alarm.
    classwise
        Whether the probability of every class is tested. By default with up to 100 classes.
    top_label
        Whether two classes are read by the predicted class. By default they are an event: class 1 happens or not.
    event
        A class whose probability alone is watched: its number, or one of `class_names`.
    class_names
        Names of the classes, to look up `event`.
    promise
        A promised error rate to check as labels arrive: a `decisions.Threshold`, or a mapping with ``threshold`` and
        ``max_risk`` (optionally ``level`` and ``risk``). Its bounds are anytime-valid.
    sizes
        Bins, windows and blocks.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> def score_rows(n, temperature):
    ...     z = 2 * rng.normal(size=(n, 5))
    ...     return z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> monitor = Monitor(5, level=0.99)
    >>> monitor.update(*score_rows(20_000, 1.0)).alarm is None
    True
    >>> print(monitor.update(*score_rows(2_000, 1.5)).alarm.reason)
    Overconfident: multiplying the log-odds by 0.70 and adding -0.2 would fit the data.

    References
    ----------
    Arnold, Henzi and Ziegel (2023), "Sequentially valid tests for forecast calibration", arXiv:2109.11761.
    Shafer (2021), "Testing by betting", doi:10.1111/rssa.12647.
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
        self.classwise = self.watched_classes <= MAX_CLASSES_WATCHED if classwise is None else bool(classwise)
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
        """Sums per group, of the rows that came with groups."""
        self.peak = 0.0
        """Largest log wealth so far."""
        self.alarm: Alarm | None = None
        self.acknowledged: tuple[Alarm, ...] = ()
        self._previous_clusters: frozenset[Any] = frozenset()
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes between two batches; they are immutable, so a shallow copy is independent."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = RLock()

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return self.evidence.rows

    @property
    def shares(self) -> np.ndarray:
        """Share of the initial wealth per bettor."""
        return bettor_shares(self.watched_classes if self.classwise else 0)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain data, with the sizes as single entries.

        Returns
        -------
        dict
            Input of `from_settings`.

        Examples
        --------
        >>> Monitor.from_settings(Monitor(3, level=0.95).settings()).level
        0.95
        """
        settings = {"n_classes": self.n_classes, "level": self.level, **asdict(self.sizes)}
        settings |= {"classwise": self.classwise, "top_label": self.top_label, "event": self.event}
        return settings | {"promise": None if self.promise is None else self.promise.settings()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Monitor:
        """Make an empty monitor with the settings of another.

        Parameters
        ----------
        settings
            Output of `settings`.

        Returns
        -------
        Monitor
            A monitor without rows.
        """
        names = {field.name for field in fields(MonitorSizes)}
        sizes = MonitorSizes(**{name: value for name, value in settings.items() if name in names})
        return cls(**{name: value for name, value in settings.items() if name not in names}, sizes=sizes)

    @property
    def bins(self) -> int:
        """Number of bins of the calibration errors."""
        return int(self.sizes.bins)

    @property
    def watched_classes(self) -> int:
        """The number of classes; 2 for an event, which happens or does not."""
        return self.n_classes if self.event is None else 2

    @property
    def is_event(self) -> bool:
        """Whether the probability of one class is watched: of `event`, or of class 1 of two without `top_label`."""
        return self.watched_classes == 2 and not self.top_label

    def expect(self, logits: ArrayLike) -> Status:
        """Add predictions whose labels have not arrived; `status().unlabelled` estimates their accuracy.

        The estimate is the mean confidence, so it assumes that the model is still calibrated. Only labelled rows can
        raise the alarm. When the labels arrive, `update(..., awaited=True)` removes the rows from the estimate.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, n_classes).

        Returns
        -------
        Status
            The metrics and the evidence so far.

        Examples
        --------
        >>> monitor = Monitor(2, top_label=True)
        >>> round(monitor.expect([[0.0, 2.0], [1.0, 0.0]]).unlabelled["accuracy"]["value"], 3)
        0.806
        >>> monitor.update([[0.0, 2.0]], [1], awaited=True).unlabelled["rows"]
        1
        """
        z = as_logits(logits)
        self._check_classes(z)
        new_rows = self._count_unlabelled(z)
        with self._lock:
            self.unlabelled = self.unlabelled + new_rows
            return self._status()

    def _check_classes(self, z: np.ndarray) -> None:
        if z.shape[1] != self.n_classes:
            raise ValueError(f"logits must have {self.n_classes} classes, got {z.shape[1]}")

    def _count_unlabelled(self, z: np.ndarray) -> Unlabelled:
        any_label = np.zeros(len(z), np.int64)
        watched = z if self.event is None else as_event(z, any_label, self.event)[0]
        score = score_rows(watched, any_label, top_label=self.top_label).score
        if self.promise is None:
            return Unlabelled.of(score, None, math.inf)
        promised = promise_scores(self.promise.risk, z, any_label, self.event)[0]
        return Unlabelled.of(score, promised, self.promise.threshold)

    def update(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | Sequence[Hashable] | Mapping[str, Any] | None = None,
        clusters: ArrayLike | Sequence[Hashable] | Mapping[str, Any] | None = None,
        awaited: bool = False,
    ) -> Status:
        """Add predictions with their labels, in the order in which the predictions were made.

        Invalid input raises a `ValueError` and changes nothing.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, n_classes).
        labels
            True classes 0..n_classes-1, shape (n,).
        sample_weight
            Weight of each row in the metrics, shape (n,), on the same scale in all batches. The evidence counts every
            row with positive weight once, which keeps the false-alarm rate.
        groups
            Group of each row for `by_group`, shape (n,), or a mapping from column names to such arrays.
        clusters
            Cluster of each row, shape (n,), where rows are correlated (tokens of one text). The evidence then counts a
            cluster as one bet. All rows of a cluster must come in one batch.
        awaited
            Whether these rows were passed to `expect` before.

        Returns
        -------
        Status
            The metrics and the evidence so far.
        """
        z, y = as_arrays(logits, labels)
        self._check_classes(z)
        no_longer_awaited = self._count_unlabelled(z) if awaited else Unlabelled()
        w = as_weights(sample_weight, len(z))
        columns = None if groups is None else _plain_columns(groups, len(z))
        blocks = as_clusters(clusters, len(z))
        if blocks is not None and columns is not None:
            raise InputError("groups", "be left out with clusters", "both", "by_group assumes independent rows")
        if blocks is not None and self.promise is not None:
            raise InputError(
                "clusters", "be left out if a promise is checked", "both", "its bounds assume independent rows"
            )
        if w is not None and not w.all():
            positive = w > 0
            blocks = None if blocks is None else blocks.take(positive)
            columns = columns and {name: values[positive] for name, values in columns.items()}
            z, y, w = z[positive], y[positive], w[positive]
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
            if divided := sorted(map(str, names & self._previous_clusters)):
                raise InputError(
                    "clusters", "be complete within one batch", f"{divided[0]} in this batch and the previous"
                )
            unlabelled = self.unlabelled - no_longer_awaited
            self.groups = self.groups if new_groups is None else _add_groups(self.groups, new_groups)
            self.unlabelled = unlabelled
            self._previous_clusters = names or self._previous_clusters
            if self.promise is not None and promised is not None:
                self.promise = self.promise.update(*promised)
            self._add_rows(rows, z, y, w, starts)
            return self._status()

    def _add_rows(
        self, rows: RowScores, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, starts: np.ndarray | None
    ) -> None:
        """Add rows, or complete clusters, in pieces that end at the end of a block or earlier."""
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
            fading = 0.5 ** (np.arange(n)[::-1] / self.sizes.half_life)
            fading = fading if weights is None else fading * weights
            newest = WeightedTally.of(*scores, rows.nll[part], self.bins, fading)
            self.fading = self.fading * 0.5 ** (n / self.sizes.half_life) + newest
            self.evidence = self.evidence.update(payoffs, n)
            self._check_alarm()
            at, done = part.stop, after

    def acknowledge(self) -> Status:
        """Acknowledge the alarm and watch anew, for example after the model was calibrated again.

        The evidence and the counts of the promise begin anew, so the new watch has the same guarantee. The metrics
        continue, and the alarm is kept in `acknowledged`.

        Returns
        -------
        Status
            The metrics and the evidence so far.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> monitor = Monitor(2, level=0.95)
        >>> _ = monitor.update(9 * rng.normal(size=(500, 2)), rng.integers(2, size=500))
        >>> status = monitor.acknowledge()
        >>> status.alarm, status.rows, len(status.acknowledged)
        (None, 500, 1)
        """
        with self._lock:
            if self.alarm is None:
                raise ValueError("there is no alarm to acknowledge")
            self.acknowledged = (*self.acknowledged, self.alarm)[-MAX_ALARMS:]
            self.alarm, self.peak = None, 0.0
            self.evidence = replace(Evidence.initial(len(self.shares), self.evidence.block), rows=self.rows)
            if self.promise is not None:
                self.promise = PromiseCheck.of(self.promise.settings())
            return self._status()

    def by_group(self, *, level: float = 0.95) -> GroupTable | None:
        """Compare predicted and observed rates per group.

        Unlike the alarm, its intervals are valid for one look: with many looks, a calibrated group is flagged at times.

        Parameters
        ----------
        level
            Simultaneous confidence level of the intervals.

        Returns
        -------
        GroupTable or None
            A table with one row per group; None if no rows came with groups.

        Examples
        --------
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
        """Return the metrics and the evidence so far, between two batches."""
        return copy(self)._status()

    def _status(self) -> Status:
        window = self.recent.total(self.bins)
        total, recent, fading = (_summary(tally) for tally in (self.total, window, self.fading))
        metrics = (self.rows, *total, int(window.seen), *recent, *fading)
        evidence = math.exp(min(self.evidence.log_wealth(self.shares), 700.0))
        p_value = math.exp(-max(self.peak, 0.0))
        promise = None if self.promise is None else self.promise.to_dict()
        unlabelled = self.unlabelled.to_dict() if self.unlabelled.rows else None
        acknowledged = list(self.acknowledged)
        return Status(*metrics, evidence, p_value, self.alarm, self.is_event, promise, unlabelled, acknowledged)

    def __add__(self, other: Monitor) -> Monitor:
        """Merge the monitors of two services: tallies add up and wealth is averaged; windows and alarms are not merged.

        The false-alarm rate of the merged monitor is at most 1 − `level` as well.
        """
        if not isinstance(other, Monitor):
            return NotImplemented
        settings = [{**monitor.settings(), "window": None} for monitor in (self, other)]
        if settings[0] != settings[1]:
            raise ValueError("monitors must have the same classes and settings to be added")
        one, two = copy(self), copy(other)  # other threads cannot change the copies
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
    """Return the order that groups rows by cluster, in order of first appearance, and the start of each cluster."""
    n = len(clusters.code)
    first = np.full(clusters.count, n)
    np.minimum.at(first, clusters.code, np.arange(n))
    order = np.argsort(first[clusters.code], kind="stable")
    return order, np.flatnonzero(np.diff(first[clusters.code][order], prepend=-1))


def _plain_columns(groups: Any, rows: int) -> dict[str, np.ndarray]:
    """Convert groups to the plain values of a checkpoint, so that they are equal after a restart."""
    columns = as_groups(groups, rows).items()
    return {name: np.array([plain_group(group) for group in values], dtype=object) for name, values in columns}


def _add_groups(one: GroupTally | None, two: GroupTally) -> GroupTally:
    total = two if one is None else one + two
    if len(total.sums) > MAX_GROUPS:
        raise InputError("groups", f"be at most {MAX_GROUPS:,} over all batches and columns", f"{len(total.sums):,}")
    return total


def _summary(tally: WeightedTally) -> tuple[float, float, float, float]:
    """Accuracy, confidence, NLL and ECE."""
    b = tally.bins
    return tally.mean(b.hits.sum()), tally.mean(b.confidence.sum()), tally.mean(tally.nll), b.ece()
