"""This version beside the last one, in one run: whether anything became slower.

    python benchmarks/versions.py --out docs              the last version: a tag, or what the present one replaced
    python benchmarks/versions.py --base REF --out docs   any other state
    python benchmarks/versions.py --out x --small         a smoke run of seconds; its figures mean nothing

The other state is checked out and compiled in a temporary folder. Both run the same tasks in processes of their own,
by one thread, lap by lap in turn, and the CPU time of their best laps is compared. It ends with code 1 if a task takes
more than 1.15 times as long as it did.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from children import Library, started
from measured import draw_dots, first_lines, table, write_csv
from rows import Plan, Row, measure
from tasks import PASSES, TASKS, TINY
from timing import OURS

ROOT = Path(__file__).parent.parent
VERSION_FILES = ("src/trueup/_core/__init__.py", "src/trueup/core/__init__.py")
"""Where the version number is, and where it was."""
SLOWER = 1.15
"""What takes more than so many times as long counts as slower."""
EXTRA = {"table": ((10_000, 100), (50_000, 1000)), "evaluate": ((10_000, 100), (50_000, 1000))}
"""Sizes of what is asked of ours alone."""


def main() -> None:
    """Measure both, and write the page."""
    parser = argparse.ArgumentParser(description="Put this version beside the last one.")
    parser.add_argument("--base", help="a tag or commit; else the last version")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets versions.md")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--only", action="append", help="a task; may be repeated")
    options = parser.parse_args()
    base = options.base or last_version()
    plan = Plan(limit=60.0, enough=1, short=0.0) if options.small else Plan(limit=60.0, enough=5)
    with checked_out(base) as tree, started([child("before", tree), child(OURS, ROOT)], threads=1) as children:
        rows = [
            row
            for task, sizes in ({task.name: task.sizes for task in TASKS.values()} | EXTRA).items()
            if not options.only or task in options.only
            for n, classes in ((TINY,) if options.small else sizes)
            for row in measure(task, n, classes, children, plan)
        ]
        if absent := [f"{each.name}: {each.absent}" for each in children if each.absent]:
            sys.exit("; ".join(absent))
        versions = [version_of(tree), version_of(ROOT)]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    options.out.mkdir(parents=True, exist_ok=True)
    names = [describe(base), describe("HEAD")]
    write(options.out, compared(pairs), names, versions, small=options.small)
    slower = [f"{now.task} {now.n:,} × {now.classes}" for before, now in pairs if (ratio(before, now) or 0) > SLOWER]
    print(f"{len(pairs)} tasks, slower than before: {', '.join(slower) or 'none'}")
    sys.exit(bool(slower) and not options.small)


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def last_version() -> str:
    """The latest tag, or the state that the present version number replaced."""
    if tags := git("tag", "--sort=-creatordate").split():
        return tags[0]
    import trueup

    (since,) = git("log", "-n1", "--format=%H", f'-S"{trueup.__version__}"', "--", *VERSION_FILES).split()
    return f"{since}^"


def version_of(tree: Path) -> str:
    """The version that a tree's own file says; what is installed says that of one of them."""
    text = next(tree / name for name in VERSION_FILES if (tree / name).exists()).read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return version


def describe(ref: str) -> str:
    """A commit with its day."""
    return git("log", "-n1", "--format=%h of %cs", ref)


@contextmanager
def checked_out(ref: str) -> Iterator[Path]:
    """The sources of a state, compiled."""
    with TemporaryDirectory(prefix="trueup-before-") as name:
        tree = Path(name, "tree")
        git("worktree", "add", "--detach", str(tree), ref)
        try:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def child(name: str, tree: Path) -> Library:
    """This folder's child with the package of a tree."""
    script = str(Path(__file__).with_name("child.py"))
    return Library(name, ("env", f"PYTHONPATH={tree / 'src'}", sys.executable, script, OURS))


def ratio(before: Row, now: Row) -> float | None:
    """How many times as long it takes now; None where one of them has no time."""
    return min(now.cpu) / min(before.cpu) if before.cpu and now.cpu else None


def compared(pairs: Sequence[tuple[Row, Row]]) -> list[list[str]]:
    """Return the table of all tasks, its headings first."""
    titles = {name: task.title for name, task in {**TASKS, **PASSES}.items()}
    cells = [["task", "size", "before_ms", "now_ms", "ratio"]]
    for before, now in pairs:
        times = [f"{1000 * min(row.cpu):.3f}" if row.cpu else row.trouble for row in (before, now)]
        found = ratio(before, now)
        shown = "" if found is None else f"{found:.2f}"
        cells.append([titles[now.task], f"{now.n:,} × {now.classes:,}", *times, shown])
    return cells


def write(out: Path, cells: list[list[str]], names: Sequence[str], versions: Sequence[str], *, small: bool) -> None:
    """Write the page, its figure and its table into a folder."""
    write_csv(out / "versions.csv", cells)
    ratios: dict[str, list[float]] = {}
    for title, *_, shown in cells[1:]:
        if shown:
            ratios.setdefault(title, []).append(float(shown))
    draw_dots(
        out / "images/versions.svg", ratios, label="CPU time now, divided by before (one dot per size)", reference=1
    )
    (out / "versions.md").write_text(page(cells, names, versions, small=small), encoding="utf-8")


def page(cells: list[list[str]], names: Sequence[str], versions: Sequence[str], *, small: bool) -> str:
    """Return docs/versions.md."""
    timed = sorted((row for row in cells[1:] if row[-1]), key=lambda row: -float(row[-1]))
    slower = sum(float(row[-1]) > SLOWER for row in timed)
    parts = [
        "# This version and the last one",
        "**A smoke run on tiny data: its figures mean nothing.**" if small else "",
        f"Made from trueup {versions[1]}, commit {names[1]}, by `make bench-versions`; nothing is typed by hand. "
        f"*Before* is {versions[0]} ({names[0]}).",
        f"Of {len(cells) - 1} tasks {slower} take more than {SLOWER} times as long as before; the median ratio is "
        f"{median(float(row[-1]) for row in timed):.2f}." if timed else "No task has two times.",
        "![CPU time now, divided by that before, for each task](images/versions.svg)",
        "The ten largest ratios; the [whole table](versions.csv) has all tasks. Times are in milliseconds.",
        table(first_lines([cells[0], *timed])),
        "Both versions ran the same tasks on the same data in processes of their own, by one thread, lap by lap in "
        "turn. The time is the CPU time of the best of five laps or more.",
        "**What is missing:** tasks that the earlier version did not have, several threads, and graphics processors.",
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
