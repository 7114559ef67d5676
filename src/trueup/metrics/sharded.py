"""The table of `trueup.evaluate` of files that together do not fit in memory."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.bins import BINS
from trueup._core.errors import InputError
from trueup._core.row_scores import event_name, scores_and_outcomes
from trueup._core.tally import TABLE_METRICS, Tally
from trueup.convert import as_event
from trueup.io.predictions import PredictionTable, take_rows
from trueup.io.shards import Shards, map_shards, warn_of_bad_shards
from trueup.metrics.events import EVENT_METRICS
from trueup.metrics.groups import GroupTally
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import intervals
from trueup.metrics.resampling import Resampling, ResamplingOptions
from trueup.metrics.table import Scores, default_metrics, has_interval


def evaluate_shards(
    shards: Shards,
    *,
    metrics: Iterable[str] | None = None,
    event: int | str | None = None,
    top_label: bool = False,
    bins: int = BINS,
    executor: Executor | None = None,
    skip_bad: bool = False,
    progress: bool = True,
    **resampling: Unpack[ResamplingOptions],
) -> Scores:
    """The table of `trueup.evaluate` for shards, in one pass and the memory of one chunk a worker.

    The adaptive error comes from a fine grid of confidences, whose own bound on its error is a few parts in a thousand.
    Columns that the shards name as weights or as groups are those of `trueup.evaluate`; `event` is a class, or one of
    the names that the shards have as `class_names`. The column of clusters makes intervals and tests those of clusters;
    the adaptive error and what is of an event alone then come without intervals, which need all rows at once.
    """
    simulation = Resampling(**resampling)
    wanted = () if metrics is None else tuple(metrics)
    unknown = [metric for metric in wanted if not has_interval(metric)]
    if unknown:
        known = ", ".join((*TABLE_METRICS, *EVENT_METRICS))
        raise ValueError(f"of shards, metrics must be among {known}, got {unknown[0]!r}")
    if shards.fields.groups and shards.fields.clusters is not None:
        hint = "load the files and evaluate(*table, **table.options())"
        raise InputError("groups", "be left out of shards with clusters", "both", hint)
    names = shards.fields.class_names
    task = functools.partial(_tally_rows, bins=bins, event=event, class_names=names, top_label=top_label)
    options: dict[str, Any] = {"executor": executor, "skip_bad": skip_bad, "progress": progress}
    sums, _, bad = map_shards(task, shards, label="evaluating shards", **options)
    warn_of_bad_shards(bad)
    tally = sums.tally
    if shards.fields.sample_weight is not None and not tally.n:
        raise InputError(shards.fields.sample_weight, "not all be zero", "zeros")
    worth = None if shards.fields.sample_weight is None else tally.effective_rows
    fields: dict[str, Any] = {"effective_rows": worth, "event_name": event_name(event, sums.classes, names)}
    if sums.groups is not None:
        fields["group_tables"] = {"network": sums.groups.table(level=simulation.level, seed=simulation.seed)}
    if tally.clusters is not None:
        fields |= {"clusters": len(sums.clusters), "cluster_name": shards.fields.clusters}
    return scores_of_tally(tally, wanted, simulation, **fields)


def scores_of_tally(tally: Tally, metrics: Iterable[str], resampling: Resampling, **fields: Any) -> Scores:
    """The table of `trueup.evaluate` from a tally alone; the other fields of `Scores` by name."""
    classes = len(tally.classes.count)
    wanted = tuple(metrics) or default_metrics(classes, tally.top_label)
    values = {"network": intervals(tally, wanted, resampling)}
    tests = {"network": CalibrationTests.of(tally, resampling)}
    means = {"network": (tally.predicted.value, tally.observed.value)}
    size = tally.n, classes, tally.grid.bins, resampling.level
    return Scores(*size, values, tests, changes={}, means=means, is_event=tally.is_event, **fields)


@dataclass(frozen=True)
class _Sums:
    """What adds up over the rows."""

    tally: Tally
    groups: GroupTally | None
    classes: int
    """Of the logits."""
    clusters: frozenset[Hashable] = frozenset()
    """Their names."""

    def __add__(self, other: _Sums) -> _Sums:
        groups = None if self.groups is None or other.groups is None else self.groups + other.groups
        return _Sums(self.tally + other.tally, groups, self.classes, self.clusters | other.clusters)


def _tally_rows(
    part: PredictionTable, *, bins: int, event: int | str | None, class_names: Sequence[str] | None, top_label: bool
) -> _Sums:
    if part.sample_weight is not None and not part.sample_weight.all():
        part = take_rows(part, part.sample_weight > 0)
    z, y = part
    if event is not None:
        z, y = as_event(z, y, event, class_names=class_names)
    tally = Tally.of(z, y, bins=bins, top_label=top_label, sample_weight=part.sample_weight, clusters=part.clusters)
    names = frozenset() if part.clusters is None else frozenset(np.unique(part.clusters).tolist())
    groups = None
    if part.groups:
        claims = scores_and_outcomes(*as_arrays(z, y), top_label=top_label)
        groups = GroupTally.of(*claims, part.groups, sample_weight=part.sample_weight)
    return _Sums(tally, groups, part.logits.shape[1], names)
