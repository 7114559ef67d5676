"""The table of `trueup.evaluate` of files that together do not fit in memory."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.core.arrays import as_tensors
from trueup.core.bins import BINS
from trueup.core.conversion import as_event
from trueup.core.errors import InputError
from trueup.core.row_scores import event_name, score_rows
from trueup.core.tally import TABLE_METRICS, Tally
from trueup.io.predictions import PredictionTable, take_rows
from trueup.io.shards import Shards, map_shards, warn_of_bad_shards
from trueup.metrics.events import EVENT_METRICS
from trueup.metrics.groups import GroupTally
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import intervals
from trueup.metrics.table import Scores, default_metrics, has_interval


def evaluate_shards(
    shards: Shards,
    *,
    metrics: Iterable[str] | None = None,
    event: int | str | None = None,
    fold: bool = False,
    bins: int = BINS,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    skip_bad: bool = False,
    progress: bool = True,
) -> Scores:
    """The table of `trueup.evaluate` for shards, in one pass and the memory of one chunk a worker.

    The adaptive error comes from a fine grid of confidences, whose own bound on its error is a few parts in a thousand.
    Columns that the shards name as weights or as groups are those of `trueup.evaluate`; `event` is a class, or one of
    the names that the shards have as `classes`. The column of clusters makes intervals and tests those of clusters; the
    adaptive error and what is of an event alone then come without intervals, which need all rows at once.
    """
    wanted = () if metrics is None else tuple(metrics)
    unknown = [metric for metric in wanted if not has_interval(metric)]
    if unknown:
        known = ", ".join((*TABLE_METRICS, *EVENT_METRICS))
        raise ValueError(f"of shards, metrics must be among {known}, got {unknown[0]!r}")
    if shards.groups and shards.clusters is not None:
        hint = "load the files and evaluate(*table, **table.options())"
        raise InputError("groups", "be left out of shards with clusters", "both", hint)
    sums, _, bad = map_shards(
        functools.partial(_tally_rows, bins=bins, event=event, names=shards.classes, fold=fold),
        shards,
        executor=executor,
        skip_bad=skip_bad,
        progress=progress,
        label="evaluating shards",
    )
    warn_of_bad_shards(bad)
    tally = sums.tally
    if shards.weights is not None and not tally.n:
        raise InputError(shards.weights, "not all be zero", "zeros")
    return scores_of_tally(
        tally,
        wanted,
        level=level,
        n_resamples=n_resamples,
        seed=seed,
        effective_rows=None if shards.weights is None else tally.effective_rows,
        group_tables={} if sums.groups is None else {"network": sums.groups.table(level=level, seed=seed)},
        event_name=event_name(event, sums.classes, shards.classes),
        clusters=None if tally.clusters is None else len(sums.clusters),
        cluster_name=shards.clusters or "cluster",
    )


def scores_of_tally(
    tally: Tally, metrics: Iterable[str] = (), *, level: float, n_resamples: int, seed: int, **fields: Any
) -> Scores:
    """The table of `trueup.evaluate` from a tally alone; the other fields of `Scores` by name."""
    wanted = tuple(metrics) or default_metrics(len(tally.classes.count), tally.fold)
    return Scores(
        rows=tally.n,
        classes=len(tally.classes.count),
        bins=tally.grid.bins,
        level=level,
        values={"network": intervals(tally, wanted, level=level, n_resamples=n_resamples, seed=seed)},
        tests={"network": CalibrationTests.of(tally, n_resamples=n_resamples, seed=seed)},
        changes={},
        means={"network": (tally.predicted.value, tally.observed.value)},
        is_event=tally.is_event,
        **fields,
    )


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
    part: PredictionTable, *, bins: int, event: int | str | None, names: tuple[str, ...] | None, fold: bool
) -> _Sums:
    if part.weights is not None and not part.weights.all():
        part = take_rows(part, part.weights > 0)
    z, y = part
    if event is not None:
        z, y = as_event(z, y, event, names=names)
    tally = Tally.of(z, y, bins=bins, fold=fold, weights=part.weights, clusters=part.clusters)
    names_of = frozenset() if part.clusters is None else frozenset(np.unique(part.clusters).tolist())
    if not part.groups:
        return _Sums(tally, None, part.logits.shape[1], names_of)
    rows = score_rows(*as_tensors(z, y), fold=fold)
    groups = GroupTally.of(rows.score, rows.outcome, part.groups, weights=part.weights)
    return _Sums(tally, groups, part.logits.shape[1])
