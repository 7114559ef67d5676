"""The tables of `evaluate` and `compare`: metrics with confidence intervals, tests, and paired differences."""

from __future__ import annotations

import html
import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.bins import BINS
from trueup._core.clusters import ClustersLike
from trueup._core.errors import InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, html_table, text_table
from trueup._core.registry import METRICS, unknown_name_message
from trueup._core.row_scores import event_name
from trueup._core.tally import TABLE_METRICS
from trueup._core.types import ArrayLike, WeightsLike
from trueup.convert import as_event, number_labels
from trueup.metrics.events import EVENT_METRICS
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import Interval, ScoredRows, count_rows, differences, intervals
from trueup.metrics.resampling import Resampling

if TYPE_CHECKING:
    from trueup.metrics.groups import GroupTable

DEFAULT = ("accuracy", "confidence", "nll", "brier", "entropy", "ece", "mce", "rmsce", "aece", "sce")
"""Default rows of the table."""
EVENT_DEFAULT = (
    *("predicted", "observed", "nll", "event_brier", "miscalibration", "discrimination", "uncertainty"),
    *("ece", "aece", "auroc", "calibration_intercept", "calibration_slope", "ici"),
)
"""Default rows of the table of an event's probability."""


class Findings(NamedTuple):
    """The parts of a verdict, in words."""

    summary: str
    """The mean prediction next to the outcome, as a sentence; may be empty."""
    reference: str
    """Words before the expected error: "network would show an ECE"."""
    test: str
    """Name of the test, before the p-value."""
    too_few: str
    """Number of rows with a verb, if they are too few; else empty."""
    detectable: str
    """Number of rows that would suffice, and the error they would detect."""
    problem: str
    """Kind of miscalibration."""


_TESTED = {
    "ece": "the ECE",
    "aece": "the ECE of equal-mass bins",
    "mean": "the mean",
    "regression": "intercept and slope",
    "intercept": "the intercept",
    "slope": "the slope",
    "classes": "each class",
}
"""By test of calibration: what it tests, in words."""


class ScoreTable:
    """A table of `values` by method and metric, and of `changes` from the first method."""

    rows: int
    level: float
    values: Mapping[str, Mapping[str, Interval]]
    tests: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Interval]]
    effective_rows: float | None
    clusters: int | None
    cluster_name: str

    def _subject(self) -> tuple[dict[str, Any], str]:
        """Describe the scored data, as plain data and in words."""
        raise NotImplementedError

    def _findings(self, name: str) -> Findings:
        """Return the parts of the verdict on a method."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        raise NotImplementedError

    def _by_cluster(self) -> str:
        return "" if self.clusters is None else f" by {self.cluster_name}"

    def verdict(self, method: str | None = None) -> str:
        """Say in one or two sentences whether a method is calibrated.

        Parameters
        ----------
        method
            Name of the method; by default the first.

        Returns
        -------
        str
            The verdict.
        """
        name = method or self.methods[0]
        test = self.tests[name]
        if math.isnan(test.p_value):
            return "There are no rows to score."
        summary, reference, test_name, too_few, detectable, problem = self._findings(name)
        p_value = f"{test_name} p {'=' if test.p_value > 0.001 else '≤'} {max(test.p_value, 0.001):.3f}"
        if test.n_resamples < 19:
            return f"{summary}A test at 5 % needs at least 19 resamples, got {test.n_resamples}."
        if test.p_value > 0.05 and too_few:
            return (
                f"{summary}{too_few} too few to tell whether it is calibrated ({p_value}); "
                f"with about {detectable} would be detected with 80 % probability."
            )
        verdict, single = "No evidence of miscalibration" if test.p_value > 0.05 else problem, ""
        rejected = {k: p for k, p in getattr(test, "components", {}).items() if p <= 0.05}
        if test.p_value > 0.05 and rejected:  # an interval of the table may exclude its calibrated value
            verdict, name = "No clear evidence of miscalibration", min(rejected, key=rejected.__getitem__)
            single = f"; the test of {_TESTED[name]} alone p = {rejected[name]:.3f}"
        return f"{summary}{verdict} (a calibrated {reference} of {test.expected:.4f}; {p_value}{single})."

    def __getitem__(self, key: str | tuple[str, str]) -> Interval:
        method, metric = key if isinstance(key, tuple) else (self.methods[0], key)
        if isinstance(key, str) and len(self.methods) > 1:
            raise KeyError(
                f"there are several methods: ask for (method, {key!r}), method one of {', '.join(self.methods)}"
            )
        if method not in self.values:
            raise KeyError(unknown_name_message("method", method, self.methods))
        if metric not in self.values[method]:
            raise KeyError(unknown_name_message("metric of this table", metric, self.values[method]))
        return self.values[method][metric]

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in order."""
        return tuple(self.values)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        return tuple(self.values[self.methods[0]])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; undefined numbers are None."""
        record = {"schema": 1, "rows": self.rows, **self._subject()[0], "effective_rows": self.effective_rows}
        if self.clusters is not None:
            record |= {"clusters": self.clusters, "cluster_name": self.cluster_name}
        return record | {"level": self.level, "methods": {name: self.record(name) for name in self.methods}}

    def record(self, method: str) -> dict[str, Any]:
        """Return one method's numbers, test and paired changes as plain data."""
        values, changes = self.values[method], self.changes.get(method, {})
        return {
            "metrics": {metric: plain_record(asdict(i)) for metric, i in values.items()},
            "test": plain_record(asdict(self.tests[method])),
            "change": {metric: plain_record(asdict(i)) for metric, i in changes.items()},
        }

    def to_json(self, **options: Any) -> str:
        """Return `to_dict` as JSON text.

        Parameters
        ----------
        **options
            Options of `json.dumps`.

        Returns
        -------
        str
            The text.
        """
        return json.dumps(self.to_dict(), **options)

    def to_pandas(self) -> Any:
        """Return a data frame with one row per method and metric (needs pandas)."""
        import pandas as pd

        columns = ["method", "metric", "value", "low", "high", "change", "change_low", "change_high"]
        nothing = Interval(math.nan, math.nan, math.nan)
        records = []
        for name, scores in self.values.items():
            for metric, i in scores.items():
                change = self.changes.get(name, {}).get(metric, nothing)
                records.append([name, metric, i.value, i.low, i.high, change.value, change.low, change.high])
        return pd.DataFrame(records, columns=columns)

    def __str__(self) -> str:
        return "\n\n".join([self.caption(), text_table(self.table()), *self.notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        notes = "".join(_html_note(note) for note in self.notes())
        style = "<style scoped>.trueup td { text-align: right } .trueup tbody th { text-align: left }</style>"
        caption = html.escape(self.caption())
        return f'<div class="trueup">{style}<p>{caption}</p>{html_table(head, rows)}{notes}</div>'

    def caption(self) -> str:
        """Return the number of rows, the subject, and the clusters."""
        weighted = "" if self.effective_rows is None else f" (weighted; effectively {self.effective_rows:,.0f})"
        caption = f"{count_rows(self.rows)}{weighted}, {self._subject()[1]}"
        if self.clusters is None:
            return caption
        named = "" if self.cluster_name == "cluster" else f" ({self.cluster_name})"
        return f"{caption}, {self.clusters:,} clusters{named}: intervals by {self.cluster_name}"

    def verdicts(self) -> list[str]:
        """Return the verdicts of several methods, after the meaning of the table's marks."""
        verdicts = "\n".join(f"{name}: {self.verdict(name)}" for name in self.methods)
        if len(self.methods) < 3:
            return [verdicts]
        marks = f"* differs from {self.methods[0]}: the paired {format_percent(self.level)} interval excludes 0."
        return [marks, verdicts]

    def digits(self, metric: str) -> int:
        """Return the number of decimals of a metric."""
        return 4

    def table(self) -> list[Row]:
        """Return the cells of the table as text; the first row holds the heads."""

        def number(metric: str, x: float, *, sign: bool = False) -> str:
            return format_number(x, sign=sign, digits=self.digits(metric))

        def interval(metric: str, i: Interval, *, sign: bool = False) -> str:
            return format_interval(i.low, i.high, sign=sign, digits=self.digits(metric))

        level = format_percent(self.level)
        if len(self.methods) == 1:
            only = self.values[self.methods[0]]
            rows = [[metric, number(metric, i.value), interval(metric, i)] for metric, i in only.items()]
            return [["metric", "value", f"{level} interval"], *rows]
        if len(self.methods) == 2:
            rows = [["metric", *self.methods, "change", f"{level} interval"]]
            for metric, change in self.changes[self.methods[1]].items():
                values = [number(metric, self.values[name][metric].value) for name in self.methods]
                moved = number(metric, change.value, sign=True)
                rows.append([metric, *values, moved, interval(metric, change, sign=True)])
            return rows
        rows = [["method", *self.metrics]]
        for name, scores in self.values.items():
            changes = self.changes.get(name, {})
            marks = {metric: "*" if i.low > 0 or i.high < 0 else " " for metric, i in changes.items()}
            rows.append([name, *(number(metric, i.value) + marks.get(metric, " ") for metric, i in scores.items())])
        return rows


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data that JSON can hold; numbers that are not finite become None."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Scores(ScoreTable):
    """Metrics of one or several methods on the same rows, with intervals, tests and paired differences.

    `scores["ece"]` is the Interval of the only method, `scores["temperature", "ece"]` that of one of several.
    """

    rows: int
    """Number of rows."""
    n_classes: int
    """Number of classes."""
    bins: int
    """Number of bins of the calibration errors."""
    level: float
    """Confidence level of the intervals."""
    values: Mapping[str, Mapping[str, Interval]]
    """By method, then by metric."""
    tests: Mapping[str, CalibrationTests]
    """By method: the tests of calibration."""
    changes: Mapping[str, Mapping[str, Interval]]
    """By method (without the first): paired difference of each metric from the first method."""
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By method: the mean score and the frequency of the outcome."""
    is_event: bool = False
    """Whether the score is the probability of class 1: with two classes, unless `top_label` was set."""
    effective_rows: float | None = None
    """(Σw)²/Σw², where the rows have weights."""
    group_tables: Mapping[str, GroupTable] = field(default_factory=dict)
    """By method: observed and predicted rate in groups of rows, if groups were passed."""
    event_name: str = "class 1"
    """Name of the event."""
    clusters: int | None = None
    """Number of clusters, if clusters were passed; intervals and tests are then by cluster."""
    cluster_name: str = "cluster"
    """Name of a cluster, such as image."""

    @property
    def groups(self) -> GroupTable | None:
        """The groups of the first method; None if no groups were passed."""
        return self.group_tables.get(self.methods[0])

    def _findings(self, name: str) -> Findings:
        """Compare the mean prediction with the outcome, check for too few rows, and name the kind of miscalibration."""
        test = self.tests[name]
        predicted, right = (format_percent(mean, 1) for mean in self.means[name])
        if self.is_event:
            end = ". " if test.p_value > 0.05 or test.n_resamples < 19 else ": "
            summary = f"It predicts {predicted} on average and the event happens {right} of the time{end}"
            quantity, problem = "predicted rate", f"{event_direction(test)}. It is miscalibrated"
        else:
            summary, quantity = f"It says {predicted} on average and is right {right} of the time. ", "confidence"
            problem = f"It is miscalibrated{confidence_direction(test)}"
        reference = f"{'forecast' if self.is_event else 'network'} would show an ECE"
        test_name = f"{len(test.components)} tests{self._by_cluster()}, corrected"
        enough, error = _enough_rows(self.means[name][0], self.is_event)
        detectable = f"{enough:,} rows, a mean {quantity} that is 10 points off"
        if error < 0.1:
            mean = self.means[name][0]
            detectable = f"{enough:,} rows, a true rate of {format_percent(mean + math.copysign(error, 0.5 - mean), 1)}"
        return Findings(summary, reference, test_name, self.too_few_rows(name), detectable, problem)

    def too_few_rows(self, method: str | None = None) -> str:
        """Return the number of rows with a verb if a large error of the mean could go unnoticed; else an empty text.

        Large are 10 points, or twice the predicted rate of a rarer event.

        Parameters
        ----------
        method
            Name of the method; by default the first.

        Returns
        -------
        str
            Words such as "40 rows are", or nothing.
        """
        name = method or self.methods[0]
        independent = self.tests[name].independent_rows
        if independent >= _enough_rows(self.means[name][0], self.is_event)[0]:
            return ""
        if self.clusters is None and self.effective_rows is None:
            return f"{count_rows(self.rows)} {'is' if self.rows == 1 else 'are'}"
        grouped = f" in {self.clusters:,} clusters ({self.cluster_name})" if self.clusters is not None else ""
        weighted = "" if self.effective_rows is None else " of unequal weight"
        number = max(round(independent), 1)
        same = f"{number:,} independent {'row, which is' if number == 1 else 'rows, which are'}"
        return f"{count_rows(self.rows)}{weighted}{grouped} carry as much information as about {same}"

    def _subject(self) -> tuple[dict[str, Any], str]:
        """Return the classes, the bins and the event."""
        event = {"event": self.is_event, "event_name": self.event_name if self.is_event else None}
        what = f"the event is {self.event_name}" if self.is_event else f"{self.n_classes} classes"
        return {"n_classes": self.n_classes, "bins": self.bins, **event}, f"{what}, {self.bins} bins"

    def record(self, method: str) -> dict[str, Any]:
        """Return one method's numbers, test, paired changes and groups as plain data."""
        groups = {"groups": self.group_tables[method].to_dict()} if method in self.group_tables else {}
        return super().record(method) | groups

    def plot(self, metric: str = "ece", ax: Any = None, *, title: str | None = None) -> Any:
        """Draw one metric of each method with its interval.

        Parameters
        ----------
        metric
            Name of the metric.
        ax
            Matplotlib Axes to draw on; by default new ones.
        title
            Title of the picture.

        Returns
        -------
        Axes
            The Axes.

        Examples
        --------
        >>> scores = evaluate([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], [0, 1, 0])
        >>> scores.plot("nll").get_xlabel()
        'NLL (nats), 95 % interval'
        """
        reports = import_module("trueup.reports")  # drawing is a higher layer
        return reports.draw(reports.comparison(self, metric), ax, title=title)

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        if len(self.methods) == 1:
            notes = [self.verdict()]
            if any(i.value > i.high for i in self.values[self.methods[0]].values()):
                notes.append(
                    "Noise increases binned errors. Their intervals are for the true error and may lie below the value."
                )
            return [*notes, *map(str, self.group_tables.values())]
        return [*self.verdicts(), *(f"{name}, by group\n\n{table}" for name, table in self.group_tables.items())]


def _html_note(note: str) -> str:
    """Format a note as a paragraph that keeps its lines; a text table stays preformatted."""
    text = html.escape(note)
    return f"<pre>{text}</pre>" if "\n\n" in note else f"<p>{text}</p>".replace("\n", "<br>")


def evaluate(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    metrics: Iterable[str] | None = None,
    event: int | str | None = None,
    class_names: Sequence[str] | None = None,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    groups: ArrayLike | Mapping[str, ArrayLike] | None = None,
    clusters: ClustersLike = None,
    bins: int = BINS,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Scores:
    """Score predictions against labels, with confidence intervals and a test of calibration.

    Two classes are read as the probability of an event, class 1. Metrics outside the default table have no interval.
    With weights, intervals and tests count (Σw)²/Σw² rows. With clusters, intervals and tests count clusters instead of
    rows; they may be ten times wider, which is correct.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    metrics
        Names in `METRICS`, in the order of the table; by default the usual ones.
    event
        Class to score as an event, by number or by one of `class_names`.
    class_names
        Names of the classes, in the order of the columns.
    top_label
        With two classes, score the predicted class, as for more classes.
    sample_weight
        Weight of each row, shape (n,).
    groups
        Groups to report on in `.groups`: one value per row, shape (n,), or a mapping from names to such columns.
    clusters
        Cluster of each row, shape (n,), or a mapping {"image": values}, where rows are correlated (pixels of an image,
        tokens of a text, visits of a patient).
    bins
        Number of bins.
    level
        Level of the intervals, such as 0.95.
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.

    Returns
    -------
    Scores
        A table; ``scores["ece"]`` is an interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> evaluate(3 * z, y, metrics=("accuracy", "confidence", "ece"))
    5,000 rows, 3 classes, 15 bins
    <BLANKLINE>
    metric       value     95 % interval
    accuracy    0.5944  [0.5807, 0.6079]
    confidence  0.8207  [0.8161, 0.8253]
    ece         0.2263  [0.2129, 0.2398]
    <BLANKLINE>
    It says 82.1 % on average and is right 59.4 % of the time. It is miscalibrated and overconfident ...
    """
    rows: dict[str, Any] = {"event": event, "class_names": class_names, "top_label": top_label, "groups": groups}
    noise: dict[str, Any] = {"clusters": clusters, "level": level, "n_resamples": n_resamples, "seed": seed}
    pair = {"network": (logits, labels)}
    return compare(pair, metrics=metrics, bins=bins, sample_weight=sample_weight, **rows, **noise)


def compare(
    pairs: Mapping[str, tuple[Any, Any]] | None = None,
    /,
    *,
    metrics: Iterable[str] | None = None,
    event: int | str | None = None,
    class_names: Sequence[str] | None = None,
    top_label: bool = False,
    sample_weight: WeightsLike = None,
    groups: ArrayLike | Mapping[str, ArrayLike] | None = None,
    clusters: ClustersLike = None,
    bins: int = BINS,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    **methods: tuple[Any, Any],
) -> Scores:
    """Score several methods on the same rows, with paired differences from the first.

    Parameters
    ----------
    pairs
        Pairs (logits, labels) by name; the labels must be the same.
    metrics
        Names in `METRICS`, in the order of the table; by default the usual ones.
    event
        Class to score as an event, by number or by one of `class_names`.
    class_names
        Names of the classes, in the order of the columns.
    top_label
        With two classes, score the predicted class, as for more classes.
    sample_weight
        Weight of each row, shape (n,).
    groups
        Groups to report on: one value per row, shape (n,), or a mapping from names to such columns.
    clusters
        Cluster of each row, shape (n,), or a mapping {"image": values}, where rows are correlated.
    bins
        Number of bins.
    level
        Level of the intervals, such as 0.95.
    n_resamples
        Number of resamples.
    seed
        Seed of the random numbers.
    **methods
        Further pairs by keyword: ``compare(raw=test, temperature=after)``.

    Returns
    -------
    Scores
        A table; ``scores.changes["temperature"]["nll"]`` is the paired difference from the first method.

    Examples
    --------
    >>> z = np.random.default_rng(0).normal(size=(500, 3))
    >>> y = z.argmax(axis=1)
    >>> compare(raw=(z, y), sharper=(4 * z, y)).changes["sharper"]["nll"].high < 0
    True
    """
    named = {**(pairs or {}), **methods}
    if not named:
        raise ValueError("compare needs at least one method: compare(raw=(logits, labels), …)")
    if isinstance(metrics, str):
        raise ValueError(f"metrics must be a sequence of names, such as ({metrics!r},), got {metrics!r}")
    names = () if metrics is None else tuple(metrics)
    for metric in names:
        if metric not in TABLE_METRICS and metric not in METRICS:
            raise ValueError(f"metrics must be names of METRICS, got {metric!r}; there are: {', '.join(METRICS)}")
    resampling = Resampling(level, n_resamples, seed)
    first: ScoredRows | None = None
    first_name, title = next(iter(named)), ""
    values: dict[str, dict[str, Interval]] = {}
    tests, changes, means, group_tables = {}, {}, {}, {}
    for name, pair in named.items():
        z, y = _pair(name, pair, class_names)
        if event is not None or z.shape[1] == 2:
            title = title or event_name(event, z.shape[1], class_names)
        if event is not None:
            z, y = as_event(z, y, event, class_names=class_names)
        names = names or default_metrics(z.shape[1], top_label)
        tabled = [metric for metric in names if has_interval(metric)]
        if first is None:
            labels, classes = y, z.shape[1]
        _check_same(first_name, labels, name, y)
        if z.shape[1] != classes:
            raise ValueError(f"{name} must have the {classes} classes that {first_name} has, got {z.shape[1]}")
        scored = ScoredRows.of(
            z, y, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters, paired_with=first
        )
        scores = intervals(scored.tally, scored.values(tabled), resampling, scored=scored)
        for metric in names:
            if metric not in scores:
                value = _value(metric, z, y, top_label, scored.sample_weight)
                scores[metric] = Interval(value, math.nan, math.nan, level)
        values[name] = {metric: scores[metric] for metric in names}
        if groups is not None:
            from trueup.metrics.groups import evaluate_groups

            claims = scored.rows.score, scored.rows.outcome, groups
            group_tables[name] = evaluate_groups(
                *claims, sample_weight=sample_weight, clusters=scored.clusters, level=level, seed=seed
            )
        means[name] = scored.tally.predicted.value, scored.tally.observed.value
        tests[name] = CalibrationTests.of(scored.tally, resampling, scored)
        if first is None:
            first = scored
            continue
        change = differences(first, scored, tabled, resampling)
        for metric in names:
            if metric not in change:
                by = values[name][metric].value - values[first_name][metric].value
                change[metric] = Interval(by, math.nan, math.nan, level)
        changes[name] = {metric: change[metric] for metric in names}
    assert first is not None
    return Scores(
        first.tally.n,
        classes,
        bins,
        level,
        values,
        tests,
        changes,
        means,
        is_event=first.tally.is_event,
        effective_rows=None if first.sample_weight is None else first.tally.effective_rows,
        group_tables=group_tables,
        event_name=title or Scores.event_name,
        clusters=None if first.clusters is None else first.clusters.count,
        cluster_name=Scores.cluster_name if first.clusters is None else first.clusters.name,
    )


def _enough_rows(mean: float, is_event: bool) -> tuple[int, float]:
    """Return the number of rows with which a test at 5 % detects an error of the mean with 80 % power, and that error.

    The error is 10 points, or as large as the predicted rate of a rarer event or non-event.

    >>> _enough_rows(0.7, True), _enough_rows(0.99, False), _enough_rows(0.01, True)
    ((190, 0.1), (80, 0.1), (1540, 0.01))
    """
    error = min(0.1, mean or 0.1, 1 - mean or 0.1) if is_event else 0.1
    rates = [rate for rate in (mean - error, mean, mean + error) if 0 <= rate <= 1]
    rows = ((1.96 + 0.84) / error) ** 2 * max(rate * (1 - rate) for rate in rates)
    return math.ceil(rows / 10) * 10, error


def has_interval(metric: str) -> bool:
    """Return whether a metric comes from a tally, with an interval."""
    return metric in TABLE_METRICS or metric in EVENT_METRICS


def default_metrics(classes: int, top_label: bool) -> tuple[str, ...]:
    """Return the default rows of the table."""
    return EVENT_DEFAULT if classes == 2 and not top_label else DEFAULT


def event_direction(test: CalibrationTests) -> str:
    """Describe how the probability of an event is wrong, by its mean and its calibration slope."""
    slope = _slope_direction(test)
    if abs(test.overconfidence_z) > 1.96:
        words = f"it {'over' if test.overconfidence_z > 0 else 'under'}estimates the probability"
        return f"{words} (calibration slope {test.slope:.2f}: {slope})" if slope else words
    if slope:
        return f"right on average, but its predictions are {slope} (calibration slope {test.slope:.2f})"
    return "right on average, but too high in some places and too low in others"


def confidence_direction(test: CalibrationTests) -> str:
    """Describe how confidences are wrong; may be empty."""
    if abs(test.overconfidence_z) > 1.96:  # the sign of Spiegelhalter's z would change where confidences are below ½
        return f" and {'over' if test.overconfidence_z > 0 else 'under'}confident"
    slope = _slope_direction(test)
    return f": right on average, but its confidences are {slope}" if slope else ""


def _slope_direction(test: CalibrationTests) -> str:
    if not abs(test.slope - 1) > 1.96 * test.slope_error:  # also for NaN
        return ""
    if test.slope + 1.96 * test.slope_error < 0:
        return "in the wrong order"
    return "too extreme" if test.slope < 1 else "not extreme enough"


def _value(metric: str, z: Any, y: Any, top_label: bool, sample_weight: Any) -> float:
    """Compute a metric of METRICS with the options that it has."""
    function = METRICS[metric]
    options = {"top_label": top_label, "sample_weight": sample_weight}
    return float(function(z, y, **{k: v for k, v in options.items() if k in inspect.signature(function).parameters}))


def _pair(name: str, pair: Any, class_names: Sequence[str] | None) -> tuple[Any, Any]:
    try:
        logits, labels = pair
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair (logits, labels), got {type(pair).__name__}") from None
    try:
        return as_arrays(logits, labels if class_names is None else number_labels(labels, class_names))
    except InputError as error:
        raise error.replace(argument=f"{name}: {error.argument}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_same(first: str, expected: np.ndarray, name: str, labels: np.ndarray) -> None:
    if len(expected) != len(labels):
        raise ValueError(f"{name} must have the {len(expected)} rows that {first} has, got {len(labels)}")
    differ = np.flatnonzero(expected != labels)
    if len(differ):
        row = int(differ[0])
        raise ValueError(
            f"{name} must have the labels of {first}, to be compared row by row: "
            f"row {row} has {labels[row]} where {first} has {expected[row]} ({len(differ)} rows differ)"
        )
