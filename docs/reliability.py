"""Write docs/reliability.md and .csv, what was tried and what happened: `python docs/reliability.py [--effort 30]`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from measured import made_from, table, write_csv  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
TRIALS = "tests/hard"

HEAD = """# What was tried, and what happened

Bad input and failing machines must not break the library or lose a row:

* **Saving a file is atomic.** A full disk, a missing permission or a kill leaves the old file unchanged. An error
  names the file. A killed process leaves at most hidden temporary files (`.name.0123456789abcdef.tmp`, `.tmpAb12Cd`),
  which nothing reads. A `.npy` pair is two files: a kill between the two renames can leave different versions. torch
  itself writes ONNX and `torch.export` files: write them under a new name.
* **A broken file is rejected with one sentence that names it.** No reader crashes, hangs or runs code from a file. None
  allocates memory that only the file's header declares.
* **Threads may share calibrators, monitors and files.** Many threads get the same numbers from a calibrator as one. A
  monitor counts every row of every batch once. If several threads save to one path, one of the complete files remains.
* **Results are reproducible.** The same seed gives the same bits. The number of threads changes a table by less than a
  relative 10⁻¹², and a calibrated probability by less than 10⁻⁸.

There is one known defect. If a worker of `--scheduler processes` is killed while it returns its result, Python's
process pool can wait for ever (observed with Python 3.11). No number is wrong, but you have to stop the command.
`--scheduler local`, which is Dask, repeats such work in another worker.

## The trials

Each trial is a test in `tests/hard`, which runs with all other tests. The page is not written if a trial fails.

{summary}

A [CSV file](reliability.csv) has each trial, what happened and its seconds. These are some of them:

{highlights}

{skipped}`python docs/reliability.py --effort {effort}` wrote this page. `--effort` multiplies the number of examples;
the test suite uses 1. {machine}
"""

KINDS = {
    "files": ("Broken files", "Valid files of every kind are damaged in many ways and read."),
    "faults": ("Disks, permissions, kills, clocks", "The machine fails during writing, sending or waiting."),
    "threads": ("Threads", "Eight threads do the same work at the same time."),
    "numbers": ("Reproducible results", "Thread counts, seeds and the two implementations, compared."),
}
HIGHLIGHTS = (
    "test_broken_files_of_predictions",
    "test_broken_files_of_calibrators",
    "test_files_that_stand_for_gigabytes",
    "test_full_disk",
    "test_kill_during_save",
    "test_full_disks_and_kills",
    "test_clients_that_do_not_read",
    "test_generated_requests",
    "test_saves_in_threads_and_processes",
    "test_same_seed",
)
"""Trials on the page."""


@dataclass
class Trial:
    """One test and its report."""

    tried: str
    kind: str = ""
    happened: str = ""
    seconds: float = 0.0
    outcome: str = "passed"
    reasons: list[str] = field(default_factory=list)
    """Reasons for a failure or a skip."""


class TrialRecorder:
    """A pytest plugin that records the trials."""

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Register a test function as a trial, described by its docstring."""
        if isinstance(item, pytest.Function):
            description = " ".join((item.function.__doc__ or "").split("\n\n")[0].split())
            case = f" ({item.callspec.id})" if hasattr(item, "callspec") else ""
            self.trials[item.nodeid] = Trial(description + case)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Combine the reports of setup, call and teardown."""
        trial = self.trials.get(report.nodeid)
        if trial is None:
            return
        properties: dict[str, Any] = dict(report.user_properties)
        # Trials that ran together in one setup report their own seconds.
        trial.seconds = properties.get("seconds", trial.seconds + report.duration)
        trial.kind, trial.happened = properties.get("kind", trial.kind), properties.get("happened", trial.happened)
        if report.outcome != "passed":
            trial.outcome = "failed" if "failed" in (report.outcome, trial.outcome) else "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            trial.reasons.append(reason.removeprefix("Skipped: "))


def cells(trials: list[Trial]) -> list[list[str]]:
    """Return the long table, a row per trial, its headings first."""
    rows = [["kind", "what was tried", "outcome", "what happened", "seconds"]]
    for trial in trials:
        happened = trial.happened if trial.outcome == "passed" else "; ".join(trial.reasons)
        title = KINDS[trial.kind][0] if trial.kind else ""
        rows.append([title, trial.tried, trial.outcome, " ".join(happened.split()), f"{trial.seconds:.1f}"])
    return rows


def page(trials: dict[str, Trial], effort: int) -> str:
    """Format the page: the introduction, a count per kind of trial, and some trials."""
    passed = {name: trial for name, trial in trials.items() if trial.outcome == "passed"}
    summary = [["kind", "what was tried", "trials, all passed", "seconds"]]
    for kind, (title, what) in KINDS.items():
        seconds = [trial.seconds for trial in passed.values() if trial.kind == kind]
        if seconds:
            summary.append([title, what, str(len(seconds)), f"{sum(seconds):.0f}"])
    highlights = [["what was tried", "what happened"]]
    for name in HIGHLIGHTS:
        highlights += [
            [trial.tried, " ".join(trial.happened.split())]
            for key, trial in passed.items()
            if key.rpartition("::")[2].partition("[")[0] == name
        ]
    reasons = [f"{t.tried} ({'; '.join(t.reasons)})" for t in trials.values() if t.outcome == "skipped"]
    skipped = f"Skipped in this run: {' '.join(reasons)}\n\n" if reasons else ""
    tables = {"summary": table(summary), "highlights": table(highlights)}
    return HEAD.format(**tables, skipped=skipped, effort=effort, machine=describe_machine())


def describe_machine() -> str:
    """Describe versions and machine."""
    import torch

    versions = f"{made_from()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"Made from {versions}, {platform.system()} on {os.cpu_count()} cores."


def run(effort: int) -> dict[str, Trial]:
    """Run all trials; exit with their names if some fail or report nothing."""
    os.environ["TRUEUP_EFFORT"] = str(effort)
    os.chdir(ROOT)
    recorder = TrialRecorder()
    code = pytest.main([TRIALS, "-p", "no:cacheprovider", "-q", "--durations=0"], plugins=[recorder])
    failed = {name: trial for name, trial in recorder.trials.items() if trial.outcome == "failed"}
    silent = [
        name
        for name, trial in recorder.trials.items()
        if trial.outcome == "passed" and not (trial.tried and trial.happened and trial.kind in KINDS)
    ]
    if code or failed or silent or not recorder.trials:
        names = [f"failed: {name}" for name in failed] + [f"reported nothing: {name}" for name in silent]
        sys.exit(
            f"{PAGE.name} is unchanged: not all trials passed (pytest exited with {int(code)})"
            + "\n  ".join(["", *names])
        )
    return recorder.trials


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=int, default=5, help="how many times the usual number of examples")
    effort = max(1, parser.parse_args().effort)
    trials = run(effort)
    PAGE.write_text(page(trials, effort), encoding="utf-8")
    write_csv(PAGE.with_suffix(".csv"), cells(list(trials.values())))
    print(f"{PAGE}: {len(trials)} trials")


if __name__ == "__main__":
    main()
