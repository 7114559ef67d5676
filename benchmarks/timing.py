"""Time runs against each other on a machine that others use too."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

Run = Callable[[], object]

OURS = "ours"


class Timing(NamedTuple):
    """Seconds of the best round and of the median one."""

    best: float
    middle: float

    def __str__(self) -> str:
        return f"{1e3 * self.best:,.1f} ms +{100 * (self.middle / self.best - 1):.0f}%"


def race(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, Timing]:
    """Time the runs turn by turn, so that a slow spell of the machine falls on all of them.

    Short runs get more rounds, until the seconds have passed. After three rounds only the peers within three times the
    best of them go on.
    """
    took: dict[str, list[float]] = {name: [] for name in runs}
    still = dict(runs)
    begin = perf_counter()
    for turn in range(100 * rounds):
        if turn >= rounds and perf_counter() - begin > seconds:
            break
        for name, run in still.items():
            took[name].append(stopwatch(run))
        if turn == 2:
            still = contenders(runs, {name: min(s) for name, s in took.items()})
    return {name: Timing(min(s), median(s)) for name, s in took.items()}


def stopwatch(run: Run) -> float:
    """Give the seconds that a run takes."""
    start = perf_counter()
    run()
    return perf_counter() - start


def contenders(runs: dict[str, Run], seconds: dict[str, float]) -> dict[str, Run]:
    """Keep ours and the peers that took at most three times as long as the best of them."""
    best = min((s for name, s in seconds.items() if name != OURS), default=0.0)
    return {name: run for name, run in runs.items() if name == OURS or seconds[name] <= 3 * best}


def fastest(timings: dict[str, Timing]) -> str | None:
    """Name the quickest peer, if there is any."""
    return min((name for name in timings if name != OURS), key=lambda name: timings[name].best, default=None)
