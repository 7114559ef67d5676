"""Map over the shards, sum what comes back: on this thread, or on any `concurrent.futures.Executor`."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch

from trueup.core.bins import BINS
from trueup.core.progress import track
from trueup.core.tally import TABLE_METRICS, Tally
from trueup.io.predictions import Predictions
from trueup.io.shards import Shards
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import intervals
from trueup.metrics.table import DEFAULT, Scores

Task = Callable[[Predictions], Any]
"""What is made of some rows; the results must add up with `+`. It is sent to workers, so it must be importable."""


class BadShard(ValueError):
    """A shard that cannot be read, or does not belong with the others."""


class NoRows(BadShard):
    """Shards that have no rows at all."""


@dataclass(frozen=True)
class Part:
    """What came of one shard."""

    path: str
    rows: int
    classes: int
    value: Any
    """The sum over its rows; None if it has none."""
    error: str | None


def map_shards(
    task: Task,
    shards: Shards,
    *,
    combine: Callable[[Any, Any], Any] = operator.add,
    executor: Executor | None = None,
    skip_bad: bool = False,
    progress: bool = True,
    label: str = "shards",
) -> tuple[Any, int, tuple[str, ...]]:
    """Sum a task over all rows of all shards: the sum, how many rows, and which shards were bad and left out.

    Within a shard results are summed by `+`, then the shards' sums are combined.
    Shards are summed in their order, however they come back, so the result does not depend on the executor. A bad shard
    raises `BadShard` with its name, unless `skip_bad`; shards of different numbers of classes are always refused.
    """
    total, rows, bad, first = None, 0, [], None
    for part in track(_parts(task, shards, executor), total=len(shards), label=label, enabled=progress):
        if part.error is not None:
            if not skip_bad:
                raise BadShard(part.error)
            bad.append(part.path)
        elif part.rows:
            first = first or (part.path, part.classes)
            if part.classes != first[1]:
                raise BadShard(
                    f"shards must have the same classes: {first[0]} has {first[1]}, {part.path} {part.classes}"
                )
            total = part.value if total is None else combine(total, part.value)
            rows += part.rows
    if total is None:
        raise NoRows(f"no rows in {len(shards)} shards" + (f", {len(bad)} of which are bad" if bad else ""))
    return total, rows, tuple(bad)


def evaluate_shards(
    shards: Shards,
    *,
    metrics: Iterable[str] = DEFAULT,
    bins: int = BINS,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    skip_bad: bool = False,
    progress: bool = True,
) -> Scores:
    """The table of `trueup.evaluate` for shards, in one pass and the memory of one chunk a worker.

    The adaptive error comes from a fine grid of confidences, whose own bound on its error is a few parts in a thousand.
    """
    wanted = tuple(metrics)
    unknown = [metric for metric in wanted if metric not in TABLE_METRICS]
    if unknown:
        raise ValueError(f"of shards, metrics must be among {', '.join(TABLE_METRICS)}, got {unknown[0]!r}")
    tally, _, bad = map_shards(
        functools.partial(_tallied, bins=bins),
        shards,
        executor=executor,
        skip_bad=skip_bad,
        progress=progress,
        label="evaluating shards",
    )
    warn_bad_shards(bad)
    found = intervals(tally, wanted, level=level, replicates=replicates, seed=seed)
    test = CalibrationTests.of(tally, resamples=replicates, seed=seed)
    return Scores(tally.n, len(tally.classes.count), bins, level, {"network": found}, {"network": test}, {})


def _tallied(part: Predictions, *, bins: int) -> Tally:
    return Tally.of(*part, bins=bins)


def warn_bad_shards(bad: tuple[str, ...]) -> None:
    """Warn of shards that were left out."""
    if bad:
        warnings.warn(
            f"{len(bad)} bad shards were left out: {', '.join(bad[:5])}{' …' if bad[5:] else ''}", stacklevel=3
        )


def _parts(task: Task, shards: Shards, executor: Executor | None) -> Iterator[Part]:
    # Not with all paths: each task is sent by itself.
    run = functools.partial(_summed, task, replace(shards, paths=()), executor is not None)
    if executor is None:
        yield from map(run, shards.paths)
        return
    futures = [executor.submit(run, path) for path in shards.paths]
    try:
        while futures:
            yield futures.pop(0).result()
    finally:
        for future in futures:
            future.cancel()


def _summed(task: Task, shards: Shards, alone: bool, path: str) -> Part:
    """Sum a task over one shard; whatever is wrong with it is told, not raised, so that the others go on.

    A worker beside others keeps to one thread.
    """
    before = torch.get_num_threads()
    if alone:
        torch.set_num_threads(1)
    total, rows, classes = None, 0, 0
    try:
        for part in shards.read(path):
            classes = part.logits.shape[1]
            if len(part.labels):
                value = task(part)
                total = value if total is None else total + value
                rows += len(part.labels)
    except (ValueError, OSError) as error:
        reason = str(error)
        return Part(path, 0, 0, None, reason if path in reason else f"{path}: {reason}")
    finally:
        if alone:
            torch.set_num_threads(before)
    return Part(path, rows, classes, total, None)
