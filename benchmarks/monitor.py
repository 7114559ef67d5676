"""The monitor's promise and its speed: false alarms on calibrated streams, and the delay until a drift is found.

    python benchmarks/monitor.py           2,000 streams of 10,000 predictions, some minutes on two cores
    python benchmarks/monitor.py --small   a smoke run of seconds; its figures mean little

Beside it, the usual way: the ECE of a window, with a threshold. Its threshold is set on calibrated streams of the same
kind and length so that as many of them pass it as the monitor's `alpha` allows; in practice nobody has such streams.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

import numpy as np

WINDOWS = (500, 1000, 2000)
CLASSES, STEP = 5, 100


class Stream(NamedTuple):
    """What happened on one stream."""

    evidence: np.ndarray
    """The monitor's wealth at each look."""
    errors: np.ndarray
    """The ECE of each window, looked at each `STEP` rows: (windows, looks)."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="False alarms and delays of the monitor.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    small = parser.parse_args().small
    streams, drifting, rows = (40, 20, 2000) if small else (2000, 300, 10_000)
    began = perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    watch = partial(run_stream, rows=rows)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        calm = list(pool.map(partial(watch, drift=rows), range(streams), chunksize=10))
        drifted = list(pool.map(partial(watch, drift=rows // 2), range(10**6, 10**6 + drifting), chunksize=10))
    for alpha in (0.05, 0.01):
        false = sum(bool((s.evidence >= 1 / alpha).any()) for s in calm)
        print(f"\nalpha {alpha}: {streams:,} calibrated streams of {rows:,} predictions, {CLASSES} classes")
        print(f"  monitor: {false} false alarms, {false / streams:.4f} of the streams, allowed {alpha}")
        print(f"  {drifting} streams that drift from T = 1 to T = 1.5 at row {rows // 2:,}: rows until it is seen")
        print_delays("monitor", np.array([first(s.evidence >= 1 / alpha) for s in drifted]), rows)
        for number, size in enumerate(WINDOWS):
            highest = np.sort([s.errors[number].max() for s in calm])
            threshold = highest[min(int(np.ceil((1 - alpha) * streams)), streams - 1)]
            alarms = [first(s.errors[number] > threshold) for s in drifted]
            print_delays(f"ECE of the last {size:,} > {threshold:.4f}", np.array(alarms), rows)
    print(f"\n{(perf_counter() - began) / 60:.1f} minutes")


def run_stream(seed: int, *, rows: int, drift: int) -> Stream:
    """One stream, its temperature 1 up to row `drift` and 1.5 after it."""
    import torch

    from trueup._core.bins import Bins, equal_width
    from trueup._core.row_scores import score_rows
    from trueup.monitor import Monitor, MonitorSizes

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(rows, CLASSES))
    temperature = np.where(np.arange(rows) < drift, 1.0, 1.5)[:, None]
    y = (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)
    monitor = Monitor(CLASSES, classwise=False, sizes=MonitorSizes(block=STEP))
    evidence = [monitor.update(z[at : at + STEP], y[at : at + STEP]).evidence for at in range(0, rows, STEP)]
    seen = score_rows(torch.tensor(z), torch.tensor(y))
    errors = np.zeros((len(WINDOWS), rows // STEP))
    for number, size in enumerate(WINDOWS):
        for look in range(size // STEP, rows // STEP + 1):
            part = slice(look * STEP - size, look * STEP)
            errors[number, look - 1] = Bins.from_scores(
                seen.confidence[part], seen.correct[part], equal_width(15)
            ).ece()
    return Stream(np.array(evidence), errors)


def first(above: np.ndarray) -> float:
    """The row of the first look that is above the threshold."""
    return (np.argmax(above) + 1) * STEP if above.any() else np.inf


def print_delays(what: str, alarms: np.ndarray, rows: int) -> None:
    delay = alarms - rows // 2
    early, found = delay <= 0, np.isfinite(delay) & (delay > 0)
    middle = np.quantile(np.where(early, np.nan, delay)[~early], [0.5, 0.9])
    print(
        f"    {what:<34} median {middle[0]:6.0f}   90 % {middle[1]:6.0f}   "
        f"found {found.sum():3d} of {(~early).sum():3d}   alarmed before the drift {early.sum()}",
        flush=True,
    )


if __name__ == "__main__":
    main()
