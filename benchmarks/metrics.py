"""Ours beside the peers: the same data, the same process, turn by turn.

    python benchmarks/metrics.py            the whole run, some minutes
    python benchmarks/metrics.py --small    a smoke run of seconds; its ratios mean nothing and are not judged

Times are wall-clock, from float32 logits to the number, so the softmax is counted on both sides. Each is the best of
several rounds; the percentage beside it says how far the median round lay above the best.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import peers
import trueup
from timing import OURS, Run, Timing, contenders, fastest, race, stopwatch
from trueup import metrics
from trueup.metrics import hypothesis_tests, intervals

Pair = tuple[Tensor, Tensor]

TABLE = ("accuracy", "nll", "brier", "entropy", "ece", "mce", "rmsce", "aece", "sce")


class Sizes(NamedTuple):
    """How much of everything a run does."""

    large: tuple[int, int] = (50_000, 1000)
    middle: tuple[int, int] = (10_000, 100)
    little: tuple[int, int] = (10_000, 10)
    vocabulary: tuple[int, int] = (4_000, 50_257)
    replicates: int = 1000
    stream: tuple[int, int] = (10_000_000, 10)
    chunk: int = 100_000
    rounds: int = 5
    seconds: float = 4.0
    judged: bool = True


WHOLE = Sizes()
SMALL = Sizes((400, 50), (300, 20), (300, 10), (30, 500), 20, (20_000, 10), 5_000, rounds=1, seconds=0.0, judged=False)


def main() -> None:
    """Print the table of ratios."""
    parser = argparse.ArgumentParser(description="Time our metrics beside the peers'.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--growth", choices=sorted(GROWTHS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else WHOLE
    # The peers' warnings (division by empty bins, deprecations) are theirs.
    warnings.simplefilter("ignore")
    if options.growth:
        print(GROWTHS[options.growth](sizes))
        return
    print_versions()
    print_row("what", "ours", "beside", "theirs", "ratio", "bar", "")
    large = pair(*sizes.large)
    judge_table(sizes, large)
    judge_against_peers_together(sizes, large)
    for size in (sizes.large, sizes.middle, sizes.little):
        judge_ece(sizes, large if size == sizes.large else pair(*size))
    judge_resampling(sizes, large)
    judge_stream(sizes)
    judge_vocabulary(sizes)
    show_others(sizes, pair(*sizes.middle))


def pair(n: int, classes: int, generator: torch.Generator | None = None) -> Pair:
    """Make float32 logits of a classifier that is mostly right and too sure of it, with their labels."""
    generator = generator or torch.Generator().manual_seed(2024)
    logits = torch.empty(n, classes).normal_(generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    logits.scatter_add_(1, labels[:, None], torch.full((n, 1), 3.0))
    return logits.mul_(1.7), labels


def whole_table(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Give the nine numbers of the table, all exact, from one pass."""
    scored = intervals.ScoredRows.of(logits, labels)
    return {name: scored.value(name) for name in TABLE}


def against(
    metric: str, ours: Callable[[Tensor, Tensor], object], data: Pair, rounds: int, seconds: float
) -> dict[str, Timing]:
    """Race our metric and the peers that offer it, each warmed up on a tenth of the rows.

    A peer that takes seconds for that tenth, and over three times as long as the best, does not run on the whole.
    """
    functions = {OURS: ours, **peers.offering(metric)}
    tenth = (data[0][: len(data[0]) // 10], data[1][: len(data[1]) // 10])
    for function in functions.values():
        function(*tenth)

    def bound(on: Pair) -> dict[str, Run]:
        return {name: partial(function, *on) for name, function in functions.items()}

    if tenth[0].numel() > 1_000_000:
        heats = {name: stopwatch(run) for name, run in bound(tenth).items()}
        kept = contenders(bound(data), {name: max(s, 1.0) for name, s in heats.items()})
        return race(kept, rounds, seconds)
    return race(bound(data), rounds, seconds)


def judge_table(sizes: Sizes, data: Pair) -> None:
    """Judge the whole table against one log-softmax over the same logits, in time and in memory."""
    whole_table(*data)
    runs: dict[str, Run] = {
        OURS: lambda: whole_table(*data),
        "torch.log_softmax": lambda: torch.log_softmax(data[0], 1),
        "trueup.evaluate": lambda: trueup.evaluate(*data),
    }
    timings = race(runs, 3 * sizes.rounds, sizes.seconds)
    ours, softmax, evaluated = timings.values()
    what = f"whole table, {shape(data)}"
    at_most(sizes, what, str(ours), "torch.log_softmax", str(softmax), ours.best / softmax.best, 3.5)
    print_row("  with intervals and tests", str(evaluated), "", "", f"{evaluated.best / softmax.best:.2f}", "", "")
    memory_at_most(sizes, f"whole table, {shape(data)}: memory", "table", 64)


def judge_against_peers_together(sizes: Sizes, data: Pair) -> None:
    """Judge the whole table against ECE, AECE and SCE together, each from its fastest peer, then the slow SCE alone."""
    what = f"whole table, {shape(data)}"
    rounds = min(3, sizes.rounds)
    timings = {metric: against(metric, whole_table, data, rounds, 0.0) for metric in ("ece", "aece", "sce")}
    ours = min((t[OURS] for t in timings.values()), key=lambda t: t.best)
    best = {metric: fastest(t) for metric, t in timings.items()}
    if None in best.values():
        print_row(what, str(ours), "ece + aece + sce", "no peer", "", "≥ 12", "absent")
    else:
        theirs = {f"{metric} {name}": timings[metric][name] for metric, name in best.items() if name is not None}
        total = Timing(sum(t.best for t in theirs.values()), sum(t.middle for t in theirs.values()))
        at_least(sizes, what, ours, "ece + aece + sce", total, 12)
        for name, timing in theirs.items():
            print_row("", "", name, str(timing), "", "", "")
    slow = peers.offering("sce").get("uncertainty-calibration")
    if slow is None:
        print_row(what, str(ours), "sce uncertainty-calibration", "no peer", "", "≥ 100", "absent")
    else:
        once = stopwatch(partial(slow, *data))
        at_least(sizes, what, ours, "sce uncertainty-calibration", Timing(once, once), 100)


def judge_ece(sizes: Sizes, data: Pair) -> None:
    """Judge ECE alone against the best peer; the others follow unjudged."""
    timings = against("ece", metrics.ece, data, sizes.rounds, sizes.seconds)
    ours, what = timings.pop(OURS), f"ece, {shape(data)}"
    if not timings:
        print_row(what, str(ours), "", "no peer", "", "≥ 2", "absent")
    for place, name in enumerate(sorted(timings, key=lambda name: timings[name].best)):
        at_least(sizes, what if place == 0 else "", ours, f"ece {name}", timings[name], 2 if place == 0 else None)


def judge_resampling(sizes: Sizes, data: Pair) -> None:
    """Judge the bootstrap interval of ECE and the consistency test, each against a second."""
    runs: dict[str, Run] = {
        "ece interval": lambda: intervals.bootstrap(*data, n_resamples=sizes.replicates),
        "ece consistency": lambda: hypothesis_tests.consistency(*data, n_resamples=sizes.replicates),
    }
    for name, run in runs.items():
        ours = race({OURS: run}, min(3, sizes.rounds), 0.0)[OURS]
        what = f"{name}, {sizes.replicates} replicates, {shape(data)}"
        at_most(sizes, what, str(ours), "limit", "1,000.0 ms", ours.best / 1.0, 1)


def judge_stream(sizes: Sizes) -> None:
    """Judge the memory that a long stream through the tally takes."""
    rows, classes = sizes.stream
    memory_at_most(sizes, f"stream of {rows:,} × {classes}: memory", "stream", 50)
    if peers.absence("torchmetrics") is None:
        theirs = growth("stream torchmetrics", sizes)
        print_row("", "", "ece torchmetrics", f"{theirs:.1f} MB", "", "", "")


def judge_vocabulary(sizes: Sizes) -> None:
    """Judge the table and a temperature of a whole vocabulary against one log-softmax, in time and in memory."""
    data = pair(*sizes.vocabulary)
    for run in VOCABULARY_RUNS.values():
        run(data[0][:100], data[1][:100])
    runs: dict[str, Run] = {name: partial(run, *data) for name, run in VOCABULARY_RUNS.items()}
    runs["softmax"] = partial(torch.log_softmax, data[0], 1)
    timings = race(runs, min(3, sizes.rounds), 0.0)
    softmax = timings.pop("softmax")
    del data, runs  # for the processes that measure memory
    for name, bar in (("evaluate", 2.0), ("temperature", 6.0)):
        ours, what = timings[name], f"{name}, {sizes.vocabulary[0]:,} × {sizes.vocabulary[1]}"
        at_most(sizes, what, str(ours), "torch.log_softmax", str(softmax), ours.best / softmax.best, bar)
        half = 2 * sizes.vocabulary[0] * sizes.vocabulary[1] / 2**20  # of the float32 input
        memory_at_most(sizes, f"{what}: memory", f"vocabulary {name}", half)


def growth_of_vocabulary(name: str, sizes: Sizes) -> float:
    run, data = VOCABULARY_RUNS[name], pair(*sizes.vocabulary)
    run(data[0][:100], data[1][:100])
    return peak_growth(partial(run, *data))


VOCABULARY_RUNS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "evaluate": trueup.evaluate,
    "temperature": trueup.METHODS["temperature"],
}


def show_others(sizes: Sizes, data: Pair) -> None:
    """Show, unjudged, what has no bar."""
    for metric in ("nll", "brier", "smooth_ece"):
        timings = against(metric, getattr(metrics, metric), data, sizes.rounds, 0.0)
        ours, name = timings[OURS], fastest(timings)
        if name is not None:
            at_least(sizes, f"{metric}, {shape(data)}", ours, f"{metric} {name}", timings[name], None)


def growth(task: str, sizes: Sizes) -> float:
    """Measure in a fresh process by how many MB a task's peak of resident memory exceeds what was there before it."""
    if not sizes.judged:
        return GROWTHS[task](sizes)  # a new process would take longer than all the rest
    command = [sys.executable, __file__, "--growth", task]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def growth_of_table(sizes: Sizes) -> float:
    n, classes = sizes.large
    whole_table(*pair(200, classes))
    data = pair(n, classes)
    return peak_growth(lambda: whole_table(*data))


def growth_of_stream(sizes: Sizes) -> float:
    def through_the_tally() -> None:
        generator = torch.Generator().manual_seed(2024)
        rows, classes = sizes.stream
        tally = trueup.metrics.Tally.of(*pair(sizes.chunk, classes, generator))
        for _ in range(1, rows // sizes.chunk):
            tally += trueup.metrics.Tally.of(*pair(sizes.chunk, classes, generator))
        for name in TABLE:
            tally.value(name)

    whole_table(*pair(200, sizes.stream[1]))
    return peak_growth(through_the_tally)


def growth_of_torchmetrics(sizes: Sizes) -> float:
    peers.module("torchmetrics")
    from torchmetrics.classification import MulticlassCalibrationError

    def through_the_metric() -> None:
        generator = torch.Generator().manual_seed(2024)
        rows, classes = sizes.stream
        metric = MulticlassCalibrationError(classes, validate_args=False)
        for _ in range(rows // sizes.chunk):
            metric.update(*pair(sizes.chunk, classes, generator))
        metric.compute()

    return peak_growth(through_the_metric)


GROWTHS = {
    "table": growth_of_table,
    "stream": growth_of_stream,
    "vocabulary evaluate": partial(growth_of_vocabulary, "evaluate"),
    "vocabulary temperature": partial(growth_of_vocabulary, "temperature"),
    "stream torchmetrics": growth_of_torchmetrics,
}


def peak_growth(run: Run) -> float:
    """Give the growth of resident memory in MB while `run` runs: its peak less what was there before; NaN off Linux."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        run()
        return float("nan")

    def megabytes(field: str) -> float:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) / 1024

    reset.write_text("5")  # lets the peak start anew from here
    before = megabytes("VmRSS:")
    run()
    return megabytes("VmHWM:") - before


def memory_at_most(sizes: Sizes, what: str, task: str, limit: float) -> None:
    ours = growth(task, sizes)
    at_most(sizes, what, f"{ours:.1f} MB", "limit", f"{limit:.0f} MB", ours / limit, 1)


def at_most(sizes: Sizes, what: str, ours: str, beside: str, theirs: str, ratio: float, bar: float) -> None:
    """Print ours / theirs, which should be no more than the bar."""
    verdict = ("PASS" if ratio <= bar else "MISS") if sizes.judged and ratio == ratio else "-"  # NaN: not measured
    print_row(what, ours, beside, theirs, f"{ratio:.2f}", f"≤ {bar:g}", verdict)


def at_least(sizes: Sizes, what: str, ours: Timing, beside: str, theirs: Timing, bar: float | None) -> None:
    """Print theirs / ours, which should be no less than the bar."""
    ratio = theirs.best / ours.best
    verdict = "" if bar is None else ("PASS" if ratio >= bar else "MISS") if sizes.judged else "-"
    print_row(
        what,
        str(ours),
        beside,
        str(theirs),
        f"{ratio:.{1 if ratio >= 10 else 2}f}",
        "" if bar is None else f"≥ {bar:g}",
        verdict,
    )


def shape(data: Pair) -> str:
    return f"{len(data[0]):,} × {data[0].shape[1]}"


def print_versions() -> None:
    threads = torch.get_num_threads()
    print(f"trueup {trueup.__version__}, torch {torch.__version__} on {threads} threads, load {load():.1f}")
    for package in peers.PACKAGES:
        reason = peers.absence(package)
        print(f"  {package} {peers.version(package) if reason is None else f'absent ({reason})'}")
    print("ratio: ours / theirs where the bar is ≤, theirs / ours where it is ≥\n", flush=True)


def load() -> float:
    """How many others want the processors: with any, times are not to be trusted, least those of many threads."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def print_row(what: str, ours: str, beside: str, theirs: str, ratio: str, bar: str, verdict: str) -> None:
    print(f"{what:<47} {ours:>17}  {beside:<28} {theirs:>17} {ratio:>7} {bar:>6}  {verdict}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
