"""The page of benchmarks: one screen of words, and the tables beside it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

from measured import draw_dots, first_lines, made_from, table, write_csv
from rows import SAME_ECE, SAME_NLL, SAME_VALUE, Loss, Plan, Row, compared, grouped, losses, quality
from scaling import Scaling, lines
from tasks import CONVENTIONS, TASKS
from timing import OURS


class Circumstances(NamedTuple):
    """What the figures depend on."""

    versions: dict[str, str]
    """By library; in the place of a version, why there is none."""
    threads: int
    load: float
    minutes: float
    small: bool = False


class Tables(NamedTuple):
    """All tables, each with its headings first."""

    rows: list[list[str]]
    """Every library on every task."""
    fastest: list[list[str]]
    """Ours beside the fastest library with an answer as good."""
    defeats: list[list[str]]
    """What another library does better."""
    growth: list[list[str]]
    """Exponents of our times."""
    origin: str
    """Version and commit of ours."""
    machine: str


def tables(rows: Sequence[Row], scaling: Scaling, seen: Circumstances) -> Tables:
    """Return the tables of a run."""
    own = lines(scaling)
    return Tables(full(rows), glance(rows), defeats(losses(rows)), own, made_from(), machine(seen))


def write(out: Path, found: Tables, plan: Plan, *, small: bool = False) -> None:
    """Write the page, its figure and its tables into a folder."""
    write_csv(out / "benchmarks.csv", found.rows)
    write_csv(out / "benchmarks-fastest.csv", found.fastest)
    write_csv(out / "benchmarks-growth.csv", found.growth)
    times: dict[str, list[float]] = {}
    for title, *_, factor in found.fastest[1:]:
        times.setdefault(title, []).extend([float(factor)] if factor else [])
    label = "times as fast as the fastest library whose answer is as good (one dot per size)"
    known = {title: values for title, values in times.items() if values}
    draw_dots(out / "images/benchmarks-speed.svg", known, label=label, reference=1.0, log=True)
    (out / "benchmarks.md").write_text(page(found, plan, small=small), encoding="utf-8")


def page(found: Tables, plan: Plan, *, small: bool) -> str:
    """Return docs/benchmarks.md."""
    factors = [float(row[-1]) for row in found.fastest[1:] if row[-1]]
    alone = sum(row[3] in ("none as good", "no other") for row in found.fastest[1:])
    peers = [row for row in found.rows[1:] if row[2] != "trueup"]
    answered = sum(bool(row[3]) for row in peers)
    beaten = len({tuple(row[:3]) for row in found.defeats[1:]})
    speed = ""
    if factors:
        speed = (
            f"`trueup` is {median(factors):.1f} times as fast as the fastest library whose answer is as good (median "
            f"of {len(factors)} tasks and sizes; the least is {min(factors):.1f}). "
        )
    parts = [
        "# Benchmarks",
        "**A smoke run on tiny data: its figures mean nothing.**" if small else "",
        f"Made from {found.origin} by `make bench`; nothing is typed by hand.",
        f"{speed}On {alone} further tasks and sizes no other library answers as well. In {beaten} of {answered} rows "
        "of other libraries, one is faster, takes less memory or answers better.",
        "![How many times as fast as the fastest other library, by task](images/benchmarks-speed.svg)",
        "An answer is as good if it is within "
        f"{SAME_VALUE:g} of ours for a metric, and within {SAME_NLL:g} nat and {SAME_ECE:g} of ECE for a fit. "
        "[All rows](benchmarks.csv), [the fastest library of each task](benchmarks-fastest.csv).",
        "## Where we lose",
        table(first_lines(found.defeats)) if found.defeats[1:] else "Nowhere.",
        "## How the time grows",
        "[ECE against rows and classes](images/benchmarks-ece.svg), [evaluation and fits of ours]"
        "(images/benchmarks-ours.svg), [all exponents](benchmarks-growth.csv). Linear growth is 1.",
        "## How it was measured",
        "Each library runs in processes of its own, one at a time, with the same simulated data. They take turns, lap "
        "by lap, so that a slow period of the machine affects all. A lap goes from float32 logits to the number or the "
        f"fitted map; the best lap counts. A lap of more than {plan.limit:g} s is stopped. Labels are drawn from known "
        "probabilities, so the loss of a fit beyond the least possible one is known.",
        found.machine,
        "## What is missing",
        "Graphics processors, other processors, and libraries outside this list. Data sets are simulated; "
        "[The automatic choice](choice.md) uses real ones.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(seen: Circumstances) -> str:
    """Cores, memory and versions; nothing that says whose machine it was."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _field("/proc/meminfo", "MemTotal")
    size = f"{int(memory.split()[0]) / 2**20:.0f} GB of memory" if memory else "memory not known"
    model = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    under = ", ".join(f"{name} {_version(name)}" for name in ("torch", "numpy", "scipy"))
    versions = ", ".join(f"{name} {found}" for name, found in seen.versions.items() if name != OURS)
    return (
        f"{model}, {cores} cores, {size}, {seen.threads} threads; Python {platform.python_version()}, {under}, "
        f"{versions}. The load was {seen.load:.1f} when it began; all took {seen.minutes:.0f} minutes."
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


def defeats(found: Sequence[Loss]) -> list[list[str]]:
    """Return the table of every comparison that ours loses."""
    cells = [["task", "size", "library", "its best", "ours", "how it is better"]]
    for loss in found:
        ours = milliseconds(loss.ours.best) if loss.ours.laps else loss.ours.trouble
        where = [TASKS[loss.peer.task].title, shape(loss.peer), loss.peer.library]
        cells.append([*where, milliseconds(loss.peer.best), ours, loss.how])
    return cells


def glance(rows: Sequence[Row]) -> list[list[str]]:
    """Return ours beside the fastest library whose answer is as good, in milliseconds."""
    cells = [["task", "size", "ours_ms", "fastest_other", "its_ms", "times_as_fast"]]
    for together in grouped(rows):
        mine = next((row for row in together if row.library == OURS and row.answered), None)
        if mine is None:
            continue
        rivals = [row for row in together if row is not mine and row.answered and compared(mine, row) >= 0]
        best = min(rivals, key=lambda row: row.best, default=None)
        others = any(row is not mine and row.answered for row in together)
        against = ["none as good" if others else "no other", "", ""]
        if best is not None:
            against = [best.library, f"{1e3 * best.best:.2f}", f"{best.best / mine.best:.1f}"]
        cells.append([TASKS[mine.task].title, shape(mine), f"{1e3 * mine.best:.2f}", *against])
    return cells


def full(rows: Sequence[Row]) -> list[list[str]]:
    """Return every row: the fastest of a task first, what went wrong last."""
    cells = [["task", "size", "library", "best_ms", "median_ms", "worst_ms", "laps", "memory_mb", "answer", "note"]]
    for together in grouped(rows):
        for row in sorted(together, key=lambda row: (not row.answered, row.best if row.laps else 0.0)):
            times = [f"{1e3 * t:.2f}" for t in (row.best, row.middle, max(row.laps))] if row.laps else [""] * 3
            memory = "" if row.peak is None else f"{row.peak:.1f}"
            name = "trueup" if row.library == OURS else row.library
            answer, note = row.trouble or quality(row), CONVENTIONS.get((row.task, row.library), "")
            cells.append([TASKS[row.task].title, shape(row), name, *times, str(len(row.laps)), memory, answer, note])
    return cells


def milliseconds(seconds: float) -> str:
    thousand = 1e3 * seconds
    return f"{thousand:,.{2 if thousand < 10 else 1 if thousand < 100 else 0}f} ms"


def shape(row: Row) -> str:
    return f"{row.n:,}" if TASKS[row.task].kind == "regression" else f"{row.n:,} × {row.classes:,}"
