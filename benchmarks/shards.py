"""Predictions in many files beside the same rows in memory: speed, peak memory, and what a second worker brings.

    python benchmarks/shards.py                    200 files of 50,000 × 100, 4 GB in a temporary folder, some minutes
    python benchmarks/shards.py --small            a smoke run of seconds; its ratios mean nothing and are not judged
    python benchmarks/shards.py --suffix parquet   another format; decoding it may cost more than all arithmetic

Every number is of processes with one thread each. A worker's peak is that of its whole process, with Python and torch.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np

LIMIT_MB, SPEED, SPEED_UP = 600, 0.6, 1.6
TEMPERATURE = 1.7
PAUSE = 0.5  # of a worker that has its answer, so that the other one takes the other call


class Size(NamedTuple):
    """Size of the data."""

    shards: int
    rows: int
    classes: int
    rounds: int
    judged: bool


WHOLE, SMALL = Size(200, 50_000, 100, 3, judged=True), Size(4, 500, 10, 1, judged=False)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time shards beside the same rows in memory.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--suffix", default="npy", choices=("npy", "npz", "parquet", "safetensors"))
    parser.add_argument("--folder", help="where the files are, or are to be written; a temporary one by default")
    options = parser.parse_args()
    size = SMALL if options.small else WHOLE
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which are started afresh
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary, f"{size.shards}x{size.rows}x{size.classes}-{options.suffix}")
        folder.mkdir(parents=True, exist_ok=True)
        began = perf_counter()
        written = partial(write, str(folder), size, options.suffix)
        if size.judged:
            with workers(2) as pool:
                list(pool.map(written, range(size.shards)))
        else:  # to start the workers would take longer
            list(map(written, range(size.shards)))
        print(f"{size.shards} files of {size.rows:,} × {size.classes} ({options.suffix}), {gigabytes(folder):.1f} GB")
        print(f"written in {perf_counter() - began:.0f} s", flush=True)
        judge(size, str(folder))


def workers(number: int) -> ProcessPoolExecutor:
    """Processes of one thread each."""
    return ProcessPoolExecutor(number, get_context("spawn"))


def write(folder: str, size: Size, suffix: str, number: int) -> None:
    """Write one file of an overconfident network, unless it exists."""
    import trueup

    path = Path(folder, f"{number:04d}.{suffix}")
    if not path.exists():
        trueup.save(drawn(size, number), path)


def drawn(size: Size, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one file: float32 logits, and labels drawn at the true temperature."""
    rng = np.random.default_rng(number)
    z = rng.standard_normal((size.rows, size.classes), dtype=np.float32) * 3
    noise = -np.log(np.maximum(rng.standard_exponential(z.shape, dtype=np.float32), 1e-30))
    return z, (z / TEMPERATURE + noise).argmax(axis=1)


def judge(size: Size, folder: str) -> None:
    """Time one worker, two, and all rows in memory, turn by turn, since the load of the machine varies."""
    verbs = ("evaluate", "temperature")
    took: dict[tuple[str, str], float] = {}
    answers: dict[tuple[str, str], float] = {}
    with workers(1) as memory, workers(1) as one, workers(2) as two:
        print(f"in memory: {memory.submit(hold, folder).result() / 1e9:.1f} GB of logits", flush=True)
        for pool, number in ((one, 1), (two, 2)):
            list(pool.map(ready, range(number)))
        ready(0)
        runs = {"memory": partial(elsewhere, memory), "one": partial(sharded, folder, one)}
        runs["two"] = partial(sharded, folder, two)
        for _, verb, name in product(range(size.rounds), verbs, runs):
            start = perf_counter()
            answers[verb, name] = runs[name](verb)
            seconds = perf_counter() - start
            took[verb, name] = min(seconds, took.get((verb, name), seconds))
        peak = max(*one.map(peak_mb, range(1)), *two.map(peak_mb, range(2)))
    for verb in verbs:
        memory_, one_, two_ = (took[verb, name] for name in runs)
        far = max(abs(answers[verb, name] - answers[verb, "memory"]) for name in runs)
        print(
            f"\n{verb}: in memory {memory_:.2f} s, one worker {one_:.2f} s, two {two_:.2f} s; answers {far:.1e} apart"
        )
        tell(size, "speed of one worker against memory", memory_ / one_, f"≥ {SPEED}", memory_ / one_ >= SPEED)
        tell(size, "speed of two workers against one", one_ / two_, f"≥ {SPEED_UP}", one_ / two_ >= SPEED_UP)
    tell(size, "peak of a worker, MB", peak, f"< {LIMIT_MB}", peak < LIMIT_MB)


def tell(size: Size, what: str, value: float, bar: str, passed: bool) -> None:
    verdict = ("PASS" if passed else "MISS") if size.judged else "not judged"
    print(f"  {what:<40} {value:8.2f}   bar {bar:<8} {verdict}", flush=True)


def elsewhere(memory: Executor, verb: str) -> float:
    """The result of a verb over the rows that another process holds."""
    return memory.submit(in_memory, verb).result()


def sharded(folder: str, executor: Executor, verb: str) -> float:
    """The result of a verb over the files, as one number."""
    from trueup.calibrators.sharded import fit
    from trueup.io.shards import Shards
    from trueup.metrics.sharded import evaluate_shards

    shards = Shards.of(folder)
    if verb == "evaluate":
        return evaluate_shards(shards, executor=executor, progress=False)["ece"].value
    return float(fit(verb, shards, executor=executor, progress=False).temperature)


_HELD: list[tuple[np.ndarray, np.ndarray]] = []


def hold(folder: str) -> int:
    """Read all files into the memory of this process."""
    from trueup.io.shards import Shards

    shards = Shards.of(folder)
    parts = [part for path in shards.paths for part in shards.read(path)]
    _HELD.append((np.concatenate([p.logits for p in parts]), np.concatenate([p.labels for p in parts])))
    return _HELD[0][0].nbytes


def in_memory(verb: str) -> float:
    """The result of a verb over the rows in memory."""
    import trueup

    pair = _HELD[0]
    if verb == "evaluate":
        return trueup.evaluate(*pair)["ece"].value
    return float(trueup.METHODS[verb](*pair).temperature)


def ready(_: int) -> None:
    """Import all that a worker needs."""
    import trueup.calibrators.sharded
    import trueup.metrics.sharded  # noqa: F401

    sleep(PAUSE)


def peak_mb(_: int) -> float:
    """Peak memory of this process, in MB."""
    sleep(PAUSE)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1024 * 1024 if sys.platform == "darwin" else 1024)


def gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e9


if __name__ == "__main__":
    main()
