"""The table of `trueup.evaluate` of files that together do not fit in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import Executor

from trueup.core.bins import BINS
from trueup.core.tally import TABLE_METRICS, Tally
from trueup.io.predictions import Predictions
from trueup.io.shards import Shards, map_shards, warn_of_bad_shards
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import intervals
from trueup.metrics.table import DEFAULT, Scores


def evaluate_shards(
    shards: Shards,
    *,
    metrics: Iterable[str] = DEFAULT,
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
    """
    wanted = tuple(metrics)
    unknown = [metric for metric in wanted if metric not in TABLE_METRICS]
    if unknown:
        raise ValueError(f"of shards, metrics must be among {', '.join(TABLE_METRICS)}, got {unknown[0]!r}")
    tally, _, bad = map_shards(
        functools.partial(_tally_rows, bins=bins),
        shards,
        executor=executor,
        skip_bad=skip_bad,
        progress=progress,
        label="evaluating shards",
    )
    warn_of_bad_shards(bad)
    found = intervals(tally, wanted, level=level, n_resamples=n_resamples, seed=seed)
    test = CalibrationTests.of(tally, n_resamples=n_resamples, seed=seed)
    return Scores(tally.n, len(tally.classes.count), bins, level, {"network": found}, {"network": test}, {})


def _tally_rows(part: Predictions, *, bins: int) -> Tally:
    return Tally.of(*part, bins=bins)
