"""The table of `trueup.evaluate` for files that do not fit in memory."""

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
    """Compute the table of `trueup.evaluate` for shards, in one pass and with one chunk per worker in memory.

    The adaptive error comes from a fine grid of confidences, with an error bound of a few parts in a thousand. Columns
    that the shards name as weights or groups are used as in `trueup.evaluate`. With a column of clusters, intervals and
    tests count clusters. The adaptive error and event metrics then have no interval, since that needs all rows at once.

    Parameters
    ----------
    shards
        Files to evaluate.
    metrics
        Names of metrics of the table; by default the usual ones.
    event
        Class to score as an event, by number or by a name in the shards' `class_names`.
    top_label
        With two classes, score the predicted class instead of class 1.
    bins
        Number of bins.
    executor
        Runs chunks in parallel; by default the shards are read one after another.
    skip_bad
        Skip unreadable shards with a warning.
    progress
        Show a progress bar.
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    Scores
        A table, as from `trueup.evaluate`.
    """
    simulation = Resampling(**resampling)
    chosen = () if metrics is None else tuple(metrics)
    unknown = [metric for metric in chosen if not has_interval(metric)]
    if unknown:
        known = ", ".join((*TABLE_METRICS, *EVENT_METRICS))
        raise ValueError(f"metrics must be among {known} for shards, got {unknown[0]!r}")
    if shards.fields.groups and shards.fields.clusters is not None:
        hint = "load the files and evaluate(*table, **table.options())"
        raise InputError("groups", "not be combined with clusters in shards", "both", hint)
    class_names = shards.fields.class_names
    task = functools.partial(_tally_rows, bins=bins, event=event, class_names=class_names, top_label=top_label)
    options: dict[str, Any] = {"executor": executor, "skip_bad": skip_bad, "progress": progress}
    sums, _, bad = map_shards(task, shards, label="evaluating shards", **options)
    warn_of_bad_shards(bad)
    tally = sums.tally
    if shards.fields.sample_weight is not None and not tally.n:
        raise InputError(shards.fields.sample_weight, "not all be zero", "zeros")
    effective = None if shards.fields.sample_weight is None else tally.effective_rows
    fields: dict[str, Any] = {"effective_rows": effective, "event_name": event_name(event, sums.classes, class_names)}
    if sums.groups is not None:
        fields["group_tables"] = {"network": sums.groups.table(level=simulation.level, seed=simulation.seed)}
    if tally.clusters is not None:
        fields |= {"clusters": len(sums.clusters), "cluster_name": shards.fields.clusters}
    return scores_of_tally(tally, chosen, simulation, **fields)


def scores_of_tally(tally: Tally, metrics: Iterable[str], resampling: Resampling, **fields: Any) -> Scores:
    """Build the table of `trueup.evaluate` from a tally; further fields of `Scores` are passed by name."""
    classes = len(tally.classes.count)
    names = tuple(metrics) or default_metrics(classes, tally.top_label)
    values = {"network": intervals(tally, names, resampling)}
    tests = {"network": CalibrationTests.of(tally, resampling)}
    means = {"network": (tally.predicted.value, tally.observed.value)}
    size = tally.n, classes, tally.grid.bins, resampling.level
    return Scores(*size, values, tests, changes={}, means=means, is_event=tally.is_event, **fields)


@dataclass(frozen=True)
class _Sums:
    """Mergeable sums over the rows."""

    tally: Tally
    groups: GroupTally | None
    classes: int
    """Number of classes of the logits."""
    clusters: frozenset[Hashable] = frozenset()
    """Names of the clusters."""

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
