"""The page of benchmarks: ours beside the peers, each in processes of its own, and how our time grows.

    python benchmarks/page.py --out docs           the whole run, some twelve minutes on two idle cores
    python benchmarks/page.py --out x --small      a smoke run of seconds; its figures mean nothing

`--also 'name=command'` puts any other library beside them: a command that answers as child.py does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import growth_drawings
import scaling
import words
from children import Child, Library, started
from rows import Plan, Row, measure
from tasks import TASKS, TINY
from timing import OURS

PEERS = (
    "netcal",
    "probmetrics",
    "torch-uncertainty",
    "scikit-learn",
    "torchmetrics",
    "uncertainty-calibration",
    "relplot",
    "mapie",
    "uncertainty-toolbox",
)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Write the page of benchmarks.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that gets benchmarks.md, its tables and images/"
    )
    parser.add_argument("--threads", type=int, default=2, help="of every library")
    parser.add_argument("--libraries", default=",".join((OURS, *PEERS)), help="which, with commas")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND", help="another one's child")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of a lap")
    options = parser.parse_args()
    plan = Plan(options.limit, enough=1, short=0.0) if options.small else Plan(options.limit)
    libraries = [Library.own(name) for name in options.libraries.split(",")]
    libraries += [other(text) for text in options.also]
    began, load = perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    with started(libraries, threads=options.threads) as children:
        rows = all_rows(children, plan, small=options.small)
    versions = {child.name: child.version or f"absent: {child.absent}" for child in children}
    # By one thread: what a second one brings differs with size.
    grown = [library for library in libraries if library.name in (OURS, *scaling.BESIDE)]
    with started(grown, threads=1) as children:
        found = scaling.run(children, scaling.SMALL if options.small else scaling.Sweeps(), plan)
    seen = words.Circumstances(versions, options.threads, load, (perf_counter() - began) / 60, options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    growth_drawings.write(found, options.out / "images")
    words.write(options.out, words.tables(rows, found, seen), plan, small=options.small)


def other(text: str) -> Library:
    """A library named on the command line."""
    name, equals, command = text.partition("=")
    if not equals or not name or not command:
        sys.exit(f"--also must be NAME=COMMAND, got {text!r}")
    return Library(name, tuple(shlex.split(command)))


def all_rows(children: Sequence[Child], plan: Plan, *, small: bool) -> list[Row]:
    """Every task at every size, with a line of progress each."""
    rows: list[Row] = []
    for task in TASKS.values():
        for n, classes in (TINY,) if small else task.sizes:
            start = perf_counter()
            rows += measure(task.name, n, classes, children, plan)
            print(f"{perf_counter() - start:6.1f} s  {task.name} {n:,} × {classes}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
