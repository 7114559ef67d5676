"""How the time of evaluation and fits grows with rows and classes, beside the time to read the logits once.

    python benchmarks/scaling.py            the whole run, some minutes
    python benchmarks/scaling.py --small    a smoke run of seconds; its exponents mean nothing

An exponent is the slope of a straight line, by least squares, through ln seconds against ln size over the largest
decade. Cost that does not grow at all, such as the replicates of an interval, makes it smaller than one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from children import Child, Library, started
from rows import Plan, Row, measure
from tasks import PASSES, TASKS
from timing import OURS

LOW, HIGH = 0.9, 1.1
SHOWN = ("table", "evaluate", "temperature", "vector")
UNJUDGED = ("evaluate",)
"""Its replicates cost the same at every size."""
BESIDE = ("netcal", "torch-uncertainty", "probmetrics", "torchmetrics", "uncertainty-calibration", "mapie")
"""Whose ECE is drawn beside ours."""

Axis = Literal["n", "classes"]


class Sweep(NamedTuple):
    """Sizes along one axis, the other fixed."""

    axis: Axis
    fixed: int
    sizes: tuple[int, ...]

    def at(self, size: int) -> tuple[int, int]:
        return (size, self.fixed) if self.axis == "n" else (self.fixed, size)

    @property
    def words(self) -> str:
        other = f"{self.fixed:,} classes" if self.axis == "n" else f"{self.fixed:,} rows"
        return f"{'rows' if self.axis == 'n' else 'classes'}, {other}"


class Sweeps(NamedTuple):
    """What a run measures.

    Rows cost something too, so that classes show only where there are many of them; and the judged decades begin where
    the milliseconds that every call takes do not count.
    """

    ece: tuple[Sweep, ...] = (
        Sweep("n", 100, (1000, 3000, 10_000, 30_000, 100_000, 300_000)),
        Sweep("classes", 10_000, (10, 30, 100, 300, 1000, 3000)),
    )
    many: tuple[Sweep, ...] = (
        Sweep("n", 100, (10_000, 30_000, 100_000, 215_000, 464_000, 1_000_000)),
        Sweep("classes", 30_000, (100, 300, 1000, 2150, 4640, 10_000)),
    )
    vector: tuple[Sweep, ...] = (
        Sweep("n", 100, (10_000, 30_000, 100_000, 215_000, 464_000, 1_000_000)),
        Sweep("classes", 100_000, (10, 30, 100, 215, 464, 1000)),
    )
    """A row for each ten classes at least: with fewer, what is fitted is noise, and the more of it the longer."""
    read: tuple[int, int] = (100_000, 1000)

    def of(self, task: str) -> tuple[Sweep, ...]:
        return self.ece if task == "ece" else self.vector if task == "vector" else self.many


SMALL = Sweeps(
    *(((Sweep("n", 4, (100, 1000)), Sweep("classes", 200, (3, 30))),) * 3),
    read=(1000, 100),
)


@dataclass(frozen=True)
class Curve:
    """Seconds of one library along a sweep."""

    task: str
    library: str
    sweep: Sweep
    rows: tuple[Row, ...]
    """Those that answered, in order of size."""

    @property
    def sizes(self) -> np.ndarray:
        return np.array([row.n if self.sweep.axis == "n" else row.classes for row in self.rows], dtype=float)

    @property
    def seconds(self) -> np.ndarray:
        return np.array([row.best for row in self.rows])

    def upper(self) -> Curve:
        """The largest decade of it."""
        least = max(self.sweep.sizes) / 10 * (1 - 1e-9)
        kept = tuple(row for row, size in zip(self.rows, self.sizes, strict=True) if size >= least)
        return replace(self, rows=kept)

    def exponent(self) -> float:
        """The slope over the largest decade; NaN if a size of it is missing."""
        part = self.upper()
        wanted = sum(size >= max(self.sweep.sizes) / 10 for size in self.sweep.sizes)
        if len(part.rows) < max(wanted, 2):
            return float("nan")
        return float(np.polyfit(np.log(part.sizes), np.log(part.seconds), 1)[0])

    def fixed(self) -> float:
        """Seconds that do not grow: `a` of a + b·size through the largest decade, by relative least squares."""
        part = self.upper()
        columns = np.stack([1 / part.seconds, part.sizes / part.seconds], axis=1)
        return float(np.linalg.lstsq(columns, np.ones(len(part.rows)), rcond=None)[0][0])

    def verdict(self) -> str:
        """PASS or MISS, and of a miss why."""
        exponent = self.exponent()
        if np.isnan(exponent):
            return "MISS: not every size was measured"
        if LOW <= exponent <= HIGH:
            return "PASS"
        first, last = self.upper().rows[0], self.upper().rows[-1]
        word = "not judged" if self.task in UNJUDGED else "MISS"
        if exponent < LOW:
            still = min(max(self.fixed(), 0.0), first.best)
            return f"{word}: of the first {first.best:.4f} s, {still:.4f} do not grow"
        if first.passes and last.passes and last.passes > first.passes:
            return f"{word}: it reads the data {last.passes} times where {first.passes} did"
        return word


class Scaling(NamedTuple):
    """All that a run measured."""

    curves: tuple[Curve, ...]
    per_second: float
    """Numbers of float32 that a sum reads in a second: the bandwidth of memory."""

    def ours(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.task in SHOWN]


def run(children: Sequence[Child], sweeps: Sweeps, plan: Plan) -> Scaling:
    """Measure every curve; a library that was late is not asked for more."""
    ours = [child for child in children if child.name == OURS]
    reading = measure("read", *sweeps.read, ours, plan)
    curves: list[Curve] = []
    for task in (*SHOWN, "ece"):
        for sweep in sweeps.of(task):
            asked = [c for c in children if c.name in BESIDE and not c.absent] if task == "ece" else []
            curves += along(task, sweep, [*ours, *asked], plan)
    per_second = reading[0].n * reading[0].classes / reading[0].best if reading and reading[0].answered else np.nan
    return Scaling(tuple(curves), float(per_second))


def along(task: str, sweep: Sweep, children: Sequence[Child], plan: Plan) -> list[Curve]:
    found: dict[str, list[Row]] = {child.name: [] for child in children}
    still = list(children)
    for size in sorted(sweep.sizes):
        for row in measure(task, *sweep.at(size), still, plan):
            if row.answered:
                found[row.library].append(row)
            else:
                still = [child for child in still if child.name != row.library]
    return [Curve(task, name, sweep, tuple(rows)) for name, rows in found.items() if rows]


def lines(scaling: Scaling) -> list[list[str]]:
    """The table of exponents, its heads first."""
    cells = [["what", "against", "from", "to", "seconds", "exponent", f"{LOW}–{HIGH}"]]
    for curve in scaling.ours():
        part = curve.upper()
        if not part.rows:
            continue
        first, last = part.sizes[0], part.sizes[-1]
        seconds = f"{part.seconds[0]:.4f} → {part.seconds[-1]:.4f}"
        title = {**TASKS, **PASSES}[curve.task].title
        cells.append(
            [
                title,
                curve.sweep.words,
                f"{first:,.0f}",
                f"{last:,.0f}",
                seconds,
                f"{curve.exponent():.2f}",
                curve.verdict(),
            ]
        )
    return cells


def main() -> None:
    """Print the exponents."""
    parser = argparse.ArgumentParser(description="How our time grows with rows and classes.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--threads", type=int, default=1, help="what a second one brings differs with size")
    options = parser.parse_args()
    sweeps, plan = (SMALL, Plan(enough=1, short=0.0)) if options.small else (Sweeps(), Plan())
    with started([Library.own(OURS)], threads=options.threads) as children:
        found = run(children, sweeps, plan)
    for cells in lines(found):
        print(f"{cells[0]:<52} {cells[1]:<22} {cells[2]:>8} {cells[3]:>8} {cells[4]:>18} {cells[5]:>8}  {cells[6]}")
    print(f"\nmemory: {4e-9 * found.per_second:.1f} GB/s, read once")


if __name__ == "__main__":
    main()
