"""The page in words and tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rows import SAME_ECE, SAME_NLL, SAME_VALUE, Loss, Plan, Row, compared, grouped, losses, quality
from scaling import Scaling, lines
from tasks import CONVENTIONS, TASKS, Task
from timing import OURS

KINDS = {
    "metric": ("Metrics of classifiers", "`off by` is the distance from a slow loop over the definition, in double."),
    "regression": ("Metrics of forecasts", "`off by` is the distance from the definition, in double."),
    "fit": (
        "Calibrators",
        "Labels are drawn, so the truth is known: the answer is the expected loss of fresh rows beyond the least "
        "possible one, in nats, and their ECE. The time is that of the fit alone.",
    ),
}


class Circumstances(NamedTuple):
    """What the figures depend on."""

    versions: dict[str, str]
    """By library; in the place of a version, why there is none."""
    threads: int
    load: float
    minutes: float
    small: bool = False


def page(rows: Sequence[Row], scaling: Scaling, plan: Plan, seen: Circumstances) -> str:
    """The whole of docs/benchmarks.md."""
    parts = [
        "# Benchmarks",
        "**A smoke run on tiny data: its figures mean nothing.**" if seen.small else "",
        "`trueup` compared with libraries for the same tasks. `make bench` writes this page; nothing is typed by hand.",
        "Each library runs in separate processes, one at a time, with the same simulated data and the same "
        f"{seen.threads} threads. They take turns, lap by lap, so that a slow period of the machine affects all. A "
        "lap goes from float32 logits to the number or the fitted map. The tables show the best, median and worst "
        "lap, and the peak memory of a lap beyond its input (`–` if unknown). They also show how good the answer is. "
        f"A lap of more than {plan.limit:g} s is stopped, and its row says so.",
        "## The machine",
        machine(seen),
        "## Where we lose",
        defeats(losses(rows), rows),
        "## At a glance",
        "`trueup` compared with the fastest other library whose answer is as good: within "
        f"{SAME_VALUE:g} of ours for a metric; for a fit within {SAME_NLL:g} nat and {SAME_ECE:g} of ECE.",
        table(glance(rows)),
        "## How the time grows",
        growth(scaling),
    ]
    for kind, (title, words) in KINDS.items():
        parts += [f"## {title}", words]
        for task in TASKS.values():
            own = [row for row in rows if row.task == task.name]
            if task.kind == kind and own:
                parts += [f"### {task.title}", table(full(own)), *notes(task, own)]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(seen: Circumstances) -> str:
    """Cores, memory and versions; nothing that says whose machine it was."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _field("/proc/meminfo", "MemTotal")
    size = f"{int(memory.split()[0]) / 2**20:.0f} GB of memory" if memory else "memory not known"
    model = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    under = ", ".join(f"{name} {_version(name)}" for name in ("torch", "numpy", "scipy"))
    versions = [["library", "version"]]
    versions += [["trueup" if name == OURS else name, found] for name, found in seen.versions.items()]
    return (
        f"{model}, {cores} cores, {size}; Python {platform.python_version()}, {under}. The load was "
        f"{seen.load:.1f} when it began; all took {seen.minutes:.0f} minutes.\n\n{table(versions)}"
    )


def _field(file: str, name: str) -> str:
    path = Path(file)
    if not path.exists():
        return ""
    found = (line.split(":", 1)[1] for line in path.read_text().splitlines() if line.startswith(name))
    return next(found, "").strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def defeats(found: Sequence[Loss], rows: Sequence[Row]) -> str:
    """The sentence and the table of every comparison that ours loses."""
    peers = sum(row.answered and row.library != OURS for row in rows)
    if not found:
        return f"Nowhere among {peers} rows of other libraries is one faster, smaller or better."
    beaten = len({(loss.peer.group, loss.peer.library) for loss in found})
    cells = [["task", "size", "library", "its best", "ours", "how it is better"]]
    for loss in found:
        ours = milliseconds(loss.ours.best) if loss.ours.laps else loss.ours.trouble
        where = [TASKS[loss.peer.task].title, shape(loss.peer), loss.peer.library]
        cells.append([*where, milliseconds(loss.peer.best), ours, loss.how])
    return (
        f"In {beaten} of {peers} rows another library is faster, takes less memory, or answers better:\n\n"
        f"{table(cells)}"
    )


def glance(rows: Sequence[Row]) -> list[list[str]]:
    cells = [["task", "size", "ours", "fastest other", "", "times as fast"]]
    for together in grouped(rows):
        mine = next((row for row in together if row.library == OURS and row.answered), None)
        if mine is None:
            continue
        rivals = [row for row in together if row is not mine and row.answered and compared(mine, row) >= 0]
        best = min(rivals, key=lambda row: row.best, default=None)
        others = any(row is not mine and row.answered for row in together)
        against = ["none as good" if others else "no other", "", ""]
        if best is not None:
            against = [best.library, milliseconds(best.best), f"{best.best / mine.best:.1f}"]
        cells.append([TASKS[mine.task].title, shape(mine), milliseconds(mine.best), *against])
    return cells


def full(rows: Sequence[Row]) -> list[list[str]]:
    """Every row of a task, the fastest first; what went wrong stands last."""
    cells = [["size", "library", "best", "median", "worst", "laps", "memory", "answer"]]
    for together in grouped(rows):
        for row in sorted(together, key=lambda row: (not row.answered, row.best if row.laps else 0.0)):
            times = ["–"] * 3
            if row.laps:
                times = [milliseconds(t) for t in (row.best, row.middle, max(row.laps))]
            memory = "–" if row.peak is None else f"{row.peak:,.1f} MB"
            name = "**trueup**" if row.library == OURS else row.library
            cells.append([shape(row), name, *times, str(len(row.laps)), memory, row.trouble or quality(row)])
    return cells


def notes(task: Task, rows: Sequence[Row]) -> list[str]:
    """Where a library differs by definition."""
    present = {row.library for row in rows}
    said = [
        f"- {library}: {words}."
        for (name, library), words in CONVENTIONS.items()
        if name == task.name and library in present
    ]
    return ["\n".join(said)] if said else []


def growth(scaling: Scaling) -> str:
    return (
        "ECE against rows and classes, all by one thread. The grey line is the time to read the logits from memory "
        f"once, measured by a sum over them: {4e-9 * scaling.per_second:.1f} GB/s. Nothing that reads them all can be "
        "faster, unless they fit in a cache.\n\n"
        "![Time of ECE against rows and classes](images/benchmarks-ece.svg)\n\n"
        "Evaluation and fits of ours:\n\n"
        "![Time of evaluation and fits against rows and classes](images/benchmarks-ours.svg)\n\n"
        "The exponents, by least squares over the largest decade; linear growth is 1. The replicates behind the "
        "intervals of `evaluate` cost the same however large the data, so only its table is judged:\n\n"
        f"{table(lines(scaling))}"
    )


def table(cells: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its heads first."""
    rows = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
    return "\n".join([rows[0], f"|{'---|' * len(cells[0])}", *rows[1:]])


def milliseconds(seconds: float) -> str:
    thousand = 1e3 * seconds
    return f"{thousand:,.{2 if thousand < 10 else 1 if thousand < 100 else 0}f} ms"


def shape(row: Row) -> str:
    return f"{row.n:,}" if TASKS[row.task].kind == "regression" else f"{row.n:,} × {row.classes:,}"
