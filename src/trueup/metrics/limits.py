"""Limits on metrics: whether they are shown to be kept, or to be broken.

A limit is kept if the whole interval lies on its good side, and broken if the whole interval lies on its bad side. Each
decision rests on one end of a two-sided interval, so at 95 % it is wrong in 2.5 % of cases. All limits must be kept to
pass, which needs no correction. One broken limit is enough to fail, so the ends that can fail are Bonferroni's.
A binned error or an AUROC passes with half the nominal tail, because its intervals are too short in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from numbers import Real
from typing import Any, Literal, TypedDict, Unpack
from xml.etree import ElementTree

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_arrays
from trueup._core.bins import BINS
from trueup._core.clusters import ClustersLike
from trueup._core.errors import Hint, InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, round_up, text_table
from trueup._core.registry import unknown_name_message
from trueup._core.tally import TABLE_METRICS
from trueup._core.types import ArrayLike, WeightsLike
from trueup.convert import as_event, number_labels
from trueup.metrics.events import EVENT_METRICS
from trueup.metrics.groups import evaluate_groups
from trueup.metrics.intervals import Interval, ScoredRows, count_rows, intervals
from trueup.metrics.resampling import Resampling
from trueup.metrics.table import compare, plain_record

GROUPS = "groups"
"""Name of the limit on the largest error of a group's mean prediction."""
LARGER_IS_BETTER = frozenset(("accuracy", "discrimination", "auroc"))
UNDIRECTED = frozenset(("confidence", "predicted", "observed", "entropy", "uncertainty", "observed_expected")) | {
    *("calibration_intercept", "calibration_slope", "calibration_in_the_large")
}
"""Metrics that may have both kinds of limits."""
CHECKED = (*(name for name in dict.fromkeys((*TABLE_METRICS, *EVENT_METRICS)) if name != "kuiper"), GROUPS)
"""Metrics that may have a limit: those with an interval."""
_NOT_SHARES = frozenset(("nll", "brier", "entropy", "observed_expected")) | {
    *("calibration_intercept", "calibration_slope", "calibration_in_the_large")
}
"""Metrics that may lie outside [0, 1]."""
_POINT_LEVEL = 0.02
"""Level of an interval whose low end estimates a metric without bias: noise increases the binned errors' values."""
_CAUTIOUS = frozenset(("ece", "mce", "rmsce", "average_ce", "aece", "sce", "auroc"))
"""Metrics whose intervals wrongly keep a limit in more than the nominal share of data sets, in simulation."""
_MIN_EVENTS_FOR_AUROC = 20
"""Smallest number of events, and of non-events, for which an AUROC can pass."""
_AT_LEAST_MEAN_ERROR = frozenset(("ece", "mce", "rmsce", "aece", "ici"))
"""Metrics that are never below the error of the mean prediction."""
_FEW_EVENTS = 50
"""With fewer events or non-events, a resampled interval may be too short."""
_POWER = 0.8
_MAX_GROWTH = 1000.0
"""Largest number of rows that is estimated, as a multiple of the rows at hand."""
_FEWEST_ROWS = 100
"""Smallest number of rows that is recommended: with fewer, the estimated growth is noise."""
_MODEL, _BASELINE = "model", "baseline"
Outcome = Literal["passed", "failed", "undecided"]


class ScoreOptions(TypedDict, total=False):
    """Options of `evaluate` that `check` passes on."""

    event: int | str | None
    class_names: Sequence[str] | None
    top_label: bool
    sample_weight: WeightsLike
    clusters: ClustersLike
    bins: int
    n_resamples: int
    seed: int


@dataclass(frozen=True)
class CheckedLimit:
    """One limit with its outcome."""

    metric: str
    kind: Literal["max", "min", "baseline"]
    """A largest value, a smallest value, or no significant loss against the baseline."""
    limit: float
    value: float
    """The metric, or its change from the baseline."""
    low: float
    high: float
    outcome: Outcome
    rows_needed: int | None = None
    """If undecided: about how many rows decide with 80 % probability; None if the value is too near the limit."""
    group: str | None = None
    """For a limit on groups: the one furthest beyond the limit if it is broken, else the one that may be furthest."""

    @property
    def name(self) -> str:
        """The limit in symbols."""
        if self.kind == "baseline":
            return f"{self.metric} against the baseline"
        return f"{self.metric} {'≤' if self.kind == 'max' else '≥'} {self.limit:g}"

    def finding(self) -> str:
        """Say what the interval shows."""
        interval = format_interval(self.low, self.high, sign=self.kind == "baseline")
        group = f", worst in {self.group}" if self.group else ""
        if math.isnan(self.low):
            return f"{self.name} cannot be tested with these rows"
        if self.kind == "baseline":
            shown = "a significant loss" if self.outcome == "failed" else "no significant loss"
            return f"{self.metric} shows {shown} against the baseline (change {self.value:+.4f}, interval {interval})"
        subject = "the largest error of a group" if self.metric == GROUPS else self.metric
        if self.outcome != "undecided":
            side = "below" if (self.kind == "max") == (self.outcome == "passed") else "above"
            return f"{subject} is {side} {self.limit:g} (interval {interval}{group})"
        text = f"{subject} may be below or above {self.limit:g} (interval {interval}{group})"
        if self.rows_needed is None:
            return f"{text}, too near to say how many rows would tell"
        return f"{text}; about {round_up(self.rows_needed):,} rows are needed"


@dataclass(frozen=True)
class Check:
    """Limits with their outcomes; prints as a table and a verdict."""

    limits: tuple[CheckedLimit, ...]
    """The limits, in order, then the comparisons with the baseline."""
    rows: int
    """Number of rows."""
    level: float
    """Level of the intervals behind passes; those behind failures are corrected for the number of limits."""
    clusters: int | None = None
    """Number of clusters, if clusters were passed."""

    @property
    def outcome(self) -> Outcome:
        """Failed if a limit is broken, else undecided if one is not decided, else passed."""
        outcomes = {limit.outcome for limit in self.limits}
        return "failed" if "failed" in outcomes else "undecided" if "undecided" in outcomes else "passed"

    @property
    def passed(self) -> bool:
        """Whether all limits are shown to be kept, and no loss against the baseline is significant."""
        return self.outcome == "passed"

    def verdict(self) -> str:
        """Say what is shown, and what is not."""
        starts = {"passed": "Passed", "failed": "Failed", "undecided": "Too few rows to tell"}
        decisive = [limit.finding() for limit in self.limits if limit.outcome == self.outcome]
        return f"{starts[self.outcome]}: {'; '.join(decisive)}."

    def table(self) -> list[Row]:
        """Return the cells of the table as text; the first row holds the heads."""
        rows = [["limit", "value", "interval", "outcome"]]
        for each in self.limits:
            sign = each.kind == "baseline"
            interval = format_interval(each.low, each.high, sign=sign)
            rows.append([each.name, format_number(each.value, sign=sign), interval, each.outcome])
        return rows

    def caption(self) -> str:
        """Return the number of rows, and the level."""
        clusters = "" if self.clusters is None else f" in {self.clusters:,} clusters"
        tail = format_percent((1 - self.level) / 2)
        corrected = f", failures corrected for {len(self.limits)} limits" if len(self.limits) > 1 else ""
        return f"{count_rows(self.rows)}{clusters}; wrong passes and wrong failures: {tail} each{corrected}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        limits = [{"name": each.name, **plain_record(asdict(each))} for each in self.limits]
        record = {"schema": 1, "outcome": self.outcome, "rows": self.rows, "clusters": self.clusters}
        return record | {"level": self.level, "limits": limits}

    def to_junit(self, *, strict: bool = False) -> str:
        """Return the outcomes as JUnit XML, one test per limit.

        Parameters
        ----------
        strict
            Report an undecided limit as a failure instead of a skipped test.

        Returns
        -------
        str
            The XML text.
        """
        outcomes = [each.outcome for each in self.limits]
        failures = outcomes.count("failed") + strict * outcomes.count("undecided")
        skipped = 0 if strict else outcomes.count("undecided")
        counts = {"tests": str(len(outcomes)), "failures": str(failures), "skipped": str(skipped)}
        suite = ElementTree.Element("testsuite", {"name": "trueup check", **counts})
        for each in self.limits:
            case = ElementTree.SubElement(suite, "testcase", classname="trueup.check", name=each.name)
            if each.outcome != "passed":
                tag = "skipped" if each.outcome == "undecided" and not strict else "failure"
                message = "".join(mark if mark.isprintable() else "�" for mark in each.finding())
                ElementTree.SubElement(case, tag, message=message)
        ElementTree.indent(suite)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suite, encoding="unicode")}\n'

    def __str__(self) -> str:
        return "\n\n".join([self.caption(), text_table(self.table()), self.verdict()])

    __repr__ = __str__


def check(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    maximum: Mapping[str, float] | None = None,
    minimum: Mapping[str, float] | None = None,
    baseline: tuple[ArrayLike, ArrayLike] | None = None,
    groups: ArrayLike | Mapping[str, ArrayLike] | None = None,
    level: float = 0.95,
    **options: Unpack[ScoreOptions],
) -> Check:
    """Check whether metrics are shown to keep their limits, or to break them.

    The limits are for the true metrics, of which these rows are a sample. A binned error is that of its bins.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    maximum
        Largest values by metric, such as ``{"ece": 0.02}``. The metric "groups" is the largest difference of observed
        and predicted rate in a group.
    minimum
        Smallest values by metric, such as ``{"accuracy": 0.9}``.
    baseline
        Logits and labels of another model on the same rows. A significant loss in the NLL, or in a metric with a limit,
        is a failure. Without one, smaller losses remain possible.
    groups
        Groups of the rows, for the limit on "groups": shape (n,), or a mapping from names to such columns.
    level
        Level of the intervals. A decision is wrong with probability (1 − level) / 2.
    **options
        Options of `evaluate`: `event`, `class_names`, `top_label`, `sample_weight`, `clusters`, `bins`, `n_resamples`
        and `seed`.

    Returns
    -------
    Check
        The outcome of each limit; prints as a table and a verdict.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(check(z, y, maximum={"ece": 0.04}, minimum={"accuracy": 0.59}))
    5,000 rows; wrong passes and wrong failures: 2.5 % each, failures corrected for 2 limits
    <BLANKLINE>
    limit             value          interval    outcome
    ece ≤ 0.04       0.0103  [0.0000, 0.0181]     passed
    accuracy ≥ 0.59  0.5944  [0.5787, 0.6099]  undecided
    <BLANKLINE>
    Too few rows to tell: accuracy may be below or above 0.59 (interval ...); about 110,000 rows are needed.
    """
    limits = _check_limits(maximum, minimum, groups is not None)
    metrics = [metric for metric, _, _ in limits if metric != GROUPS]
    compared = [] if baseline is None else [name for name in dict.fromkeys(("nll", *metrics)) if name not in UNDIRECTED]
    if not limits and not compared:
        raise InputError("maximum", "hold a limit if there is neither a minimum nor a baseline", "none")
    n_decisions = len(limits) + len(compared)
    strict_level = 1 - (1 - level) / n_decisions
    n_resamples, seed = options.get("n_resamples", Resampling.n_resamples), options.get("seed", Resampling.seed)
    strict_resamples = n_resamples * min(n_decisions, 10)  # smaller tails need more resamples
    scored = _score(logits, labels, options)
    values = scored.values(metrics)

    def ends(level: float, n_resamples: int = n_resamples) -> Mapping[str, Interval]:
        by_metric = intervals(scored.tally, values, Resampling(level, n_resamples, seed), scored=scored)
        return by_metric if values.keys().isdisjoint(_AT_LEAST_MEAN_ERROR) else _widened(by_metric, scored, level)

    loose = ends(level)
    strict = loose if n_decisions == 1 else ends(strict_level, strict_resamples)
    if some := _CAUTIOUS & values.keys():
        cautious = ends(1 - (1 - level) / 2, 2 * n_resamples)
        loose = {**loose, **{metric: cautious[metric] for metric in some}}
        if "auroc" in some and _rarer_outcomes(scored) < _MIN_EVENTS_FOR_AUROC:
            loose["auroc"] = replace(loose["auroc"], low=math.nan, high=math.nan)
    points = cache(partial(ends, _POINT_LEVEL))
    checked = []
    for metric, kind, limit in limits:
        if metric == GROUPS:
            assert groups is not None
            checked.append(_check_groups(scored, groups, limit, level, strict_level))
            continue
        outcome = _decide(kind, limit, loose[metric], strict[metric])
        shown, rows_needed = loose[metric] if outcome == "passed" else strict[metric], None
        if outcome == "undecided":
            shown = _union(loose[metric], strict[metric])
            growth = _growth(kind, limit, points()[metric].low, loose[metric], strict[metric])
            rows_needed = _rows(scored, growth)
        checked.append(CheckedLimit(metric, kind, limit, shown.value, shown.low, shown.high, outcome, rows_needed))
    if baseline is not None:
        options["n_resamples"] = strict_resamples
        pairs = {_BASELINE: baseline, _MODEL: (logits, labels)}
        changes = compare(pairs, metrics=compared, level=strict_level, **options).changes[_MODEL]
        checked += [_check_change(metric, changes[metric]) for metric in compared]
    return Check(tuple(checked), scored.tally.n, level, None if scored.clusters is None else scored.clusters.count)


def _check_limits(
    maximum: Mapping[str, float] | None, minimum: Mapping[str, float] | None, has_groups: bool
) -> list[tuple[str, Literal["max", "min"], float]]:
    """Return the metric, kind and value of each limit."""
    limits: list[tuple[str, Literal["max", "min"], float]] = []
    for kind, argument, by_metric in (("max", "maximum", maximum), ("min", "minimum", minimum)):
        for metric, limit in (by_metric or {}).items():
            if metric not in CHECKED:
                raise ValueError(unknown_name_message("metric with an interval", metric, CHECKED))
            if metric not in UNDIRECTED and (metric in LARGER_IS_BETTER) != (kind == "min"):
                better, other = ("larger", "minimum") if kind == "max" else ("smaller", "maximum")
                raise InputError(argument, f"hold metrics that are worse when {better}", metric, f"give it a {other}")
            if isinstance(limit, bool) or not isinstance(limit, Real) or not math.isfinite(limit):
                raise InputError(argument, "hold finite numbers", f"{metric}={limit!r}")
            if metric not in _NOT_SHARES and not 0 <= limit <= 1:
                hint = Hint.PER_CENT if 1 < limit <= 100 else None
                raise InputError(argument, f"lie in [0, 1] for {metric}", f"{limit:g}", hint)
            limits.append((metric, kind, float(limit)))
    if any(metric == GROUPS for metric, _, _ in limits) != has_groups:
        if has_groups:
            raise InputError("groups", "come with a maximum of groups", "groups without it")
        raise InputError("groups", "be given for the maximum of groups", "none")
    return limits


def _score(logits: ArrayLike, labels: ArrayLike, options: ScoreOptions) -> ScoredRows:
    names, event = options.get("class_names"), options.get("event")
    z, y = as_arrays(logits, labels if names is None else number_labels(labels, names))
    if event is not None:
        z, y = as_event(z, y, event, class_names=names)
    return ScoredRows.of(
        z,
        y,
        bins=options.get("bins", BINS),
        top_label=options.get("top_label", False),
        sample_weight=options.get("sample_weight"),
        clusters=options.get("clusters"),
    )


def _decide(kind: str, limit: float, loose: Interval, strict: Interval) -> Outcome:
    """Pass if the looser interval keeps the limit, fail if the stricter one breaks it; NaN decides nothing."""
    passed, failed = loose.high <= limit, strict.low > limit
    if kind == "min":
        passed, failed = loose.low >= limit, strict.high < limit
    return "passed" if passed else "failed" if failed else "undecided"


def _union(one: Interval, other: Interval) -> Interval:
    return Interval(one.value, min(one.low, other.low), max(one.high, other.high), other.level)


def _growth(kind: str, limit: float, point: float, loose: Interval, strict: Interval) -> float:
    """Return the factor by which rows must grow for a decision with 80 % power; widths fall as 1/√rows."""
    passes = point <= limit if kind == "max" else point >= limit
    used = loose if passes else strict
    end = used.high if passes == (kind == "max") else used.low
    gap, z = abs(limit - point), -float(ndtri((1 - used.level) / 2))
    return (abs(end - point) / gap * (1 + float(ndtri(_POWER)) / z)) ** 2 if gap else math.inf


def _rows(scored: ScoredRows, growth: float) -> int | None:
    """Return the number of rows after growth; None if the growth is undefined or too large to be estimated."""
    least = max(scored.tally.n + 1, _FEWEST_ROWS)
    return max(math.ceil(scored.tally.n * growth), least) if growth <= _MAX_GROWTH else None


def _rarer_outcomes(scored: ScoredRows) -> float:
    """Return the number of events or of non-events, whichever is smaller."""
    outcome = scored.rows.outcome
    return min(float(outcome.sum()), float((1 - outcome).sum()))


def _widened(by_metric: Mapping[str, Interval], scored: ScoredRows, level: float) -> Mapping[str, Interval]:
    """With few events, extend intervals to the upper end of the error of the mean prediction."""
    if _rarer_outcomes(scored) >= _FEW_EVENTS:
        return by_metric
    score, outcome = scored.rows.score, scored.rows.outcome
    one_group = np.zeros(len(score), np.int64)
    table = evaluate_groups(
        score, outcome, one_group, level=level, sample_weight=scored.sample_weight, clusters=scored.clusters
    )
    high = max((_absolute(row.difference).high for row in table.rows), default=math.nan)
    return {
        name: replace(each, high=max(each.high, high)) if name in _AT_LEAST_MEAN_ERROR else each
        for name, each in by_metric.items()
    }


def _check_groups(scored: ScoredRows, groups: Any, limit: float, level: float, strict_level: float) -> CheckedLimit:
    """Check the largest |observed − predicted| of the groups.

    One group above the limit is enough to break it, so the intervals behind failures hold for all groups at once. Each
    group must keep the limit, so those behind passes hold for one group.
    """
    claims = scored.rows.score, scored.rows.outcome, groups
    options: dict[str, Any] = {"sample_weight": scored.sample_weight, "clusters": scored.clusters}
    strict = evaluate_groups(*claims, level=strict_level, **options)
    if not strict.rows:
        return CheckedLimit(GROUPS, "max", limit, math.nan, math.nan, math.nan, "undecided")
    n_groups = len(strict)
    loose = evaluate_groups(*claims, level=max(level**n_groups, 1e-300), **options)
    absolute = {row.name: _absolute(row.difference) for row in strict.rows}
    single = {row.name: replace(_absolute(row.difference), level=level) for row in loose.rows}
    value = max(each.value for each in absolute.values())
    low, high = max(each.low for each in absolute.values()), max(each.high for each in single.values())
    outcome = _decide("max", limit, Interval(value, low, high), Interval(value, low, high))
    if outcome == "failed":
        worst = max(absolute, key=lambda name: absolute[name].low)
    else:
        worst = max(single, key=lambda name: single[name].high)
    rows_needed = None
    if outcome == "undecided":
        of_one = strict_level ** (1 / n_groups)
        growths = {
            name: _growth("max", limit, each.value, single[name], replace(each, level=of_one))
            for name, each in absolute.items()
        }
        above = [growths[name] for name, each in absolute.items() if each.value > limit]
        rows_needed = _rows(scored, min(above) if above else max(growths.values()))
    return CheckedLimit(GROUPS, "max", limit, value, low, high, outcome, rows_needed, worst)


def _absolute(difference: Interval) -> Interval:
    low, high = sorted((abs(difference.low), abs(difference.high)))
    low = 0.0 if difference.low <= 0 <= difference.high else low
    return replace(difference, value=abs(difference.value), low=low, high=high)


def _check_change(metric: str, change: Interval) -> CheckedLimit:
    """Check for a significant loss against the baseline."""
    worse = change.high < 0 if metric in LARGER_IS_BETTER else change.low > 0
    outcome: Outcome = "undecided" if math.isnan(change.low) else "failed" if worse else "passed"
    return CheckedLimit(metric, "baseline", 0.0, change.value, change.low, change.high, outcome)
