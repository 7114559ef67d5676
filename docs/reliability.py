"""Write docs/reliability.md, what was tried and what happened: `python docs/reliability.py [--effort 30]`."""

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
PAGE = ROOT / "docs" / "reliability.md"
TRIALS = "tests/hard"

HEAD = """# What was tried, and what happened

Nothing that is thrown at it may break it or lose a row. In particular:

* **A file that is saved is whole or as it was before.** A full disk, a missing permission or a kill leave the old file
  byte for byte, and an error names the file. What a killed process leaves behind are at most hidden drafts
  (`.name.0123456789abcdef.tmp`, `.tmpAb12Cd`), which nothing reads and anybody may delete. Only a `.npy` pair is two
  files: each is whole, but a kill or another writer between their two renames leaves logits beside labels of another
  version. Files that torch itself writes (ONNX, `torch.export`) are torch's: write them under a new name.
* **A broken file is refused in one sentence that names it.** No reader crashes, hangs, runs code from a file, or takes
  memory that the file only promises.
* **Threads may share calibrators, monitors and files.** A calibrator used from many threads gives the
  numbers of one; a monitor counts every row of every batch once; who saves last to a path wins, whole.
* **The same numbers come again.** The same seed gives the same bits, and the number of threads changes a table by less
  than 10⁻¹² of itself and a calibrated probability by less than 10⁻⁸.

One hole is known. A worker of `--scheduler processes` that is killed in the very moment of handing over its result can
make Python's own pool wait for ever (seen with Python 3.11): no number comes out wrong, but the command has to be
stopped. `--scheduler local`, which is Dask, does such work again elsewhere.

Each row below is a test of `tests/hard`, which runs with all others; what happened is what it counted and measured.
This page is written by

```sh
$ python docs/reliability.py --effort {effort}
```

and not written if a trial fails. `--effort` multiplies the number of examples: {effort} here. The test suite takes 1,
and a third of the broken files.
{machine}
"""

KINDS = {
    "files": ("Broken files", "Good files of every kind are damaged in many ways and read."),
    "faults": ("Disks, permissions, kills, clocks", "The machine fails while something is written, sent or awaited."),
    "threads": ("Threads", "Eight threads do the same thing at once."),
    "numbers": ("The same numbers", "Thread counts, seeds and the two ways to compute, compared."),
}


@dataclass
class Trial:
    """One test, and what it reported."""

    tried: str
    kind: str = ""
    happened: str = ""
    seconds: float = 0.0
    outcome: str = "passed"
    reasons: list[str] = field(default_factory=list)
    """Why it failed, or was skipped."""


class TrialRecorder:
    """A plugin of pytest that records the trials."""

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """A trial is a test function; its docstring says what is tried."""
        if isinstance(item, pytest.Function):
            description = " ".join((item.function.__doc__ or "").split("\n\n")[0].split())
            case = f" ({item.callspec.id})" if hasattr(item, "callspec") else ""
            self.trials[item.nodeid] = Trial(description + case)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setting up, the trial itself and cleaning up come one after the other."""
        trial = self.trials.get(report.nodeid)
        if trial is None:
            return
        properties: dict[str, Any] = dict(report.user_properties)
        # One that was run together with others, in the setting up of the first, reports its own seconds.
        trial.seconds = properties.get("seconds", trial.seconds + report.duration)
        trial.kind, trial.happened = properties.get("kind", trial.kind), properties.get("happened", trial.happened)
        if report.outcome != "passed":
            trial.outcome = "failed" if "failed" in (report.outcome, trial.outcome) else "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            trial.reasons.append(reason.removeprefix("Skipped: "))


def page(trials: list[Trial], effort: int) -> str:
    """The whole page: the promise, a table for each kind of trial, and what was skipped."""
    parts = [HEAD.format(effort=effort, machine=describe_machine())]
    for kind, (title, what) in KINDS.items():
        rows = [trial for trial in trials if trial.kind == kind and trial.outcome == "passed"]
        if rows:
            parts += [f"## {title}\n", f"{what}\n", "| what was tried | what happened | seconds |", "|:--|:--|--:|"]
            parts += [f"| {_cell(row.tried)} | {_cell(row.happened)} | {row.seconds:.1f} |" for row in rows]
            parts.append("")
    skipped = [trial for trial in trials if trial.outcome == "skipped"]
    if skipped:
        parts += ["## Skipped\n", "| what was not tried | why |", "|:--|:--|"]
        parts += [f"| {_cell(trial.tried)} | {_cell('; '.join(trial.reasons))} |" for trial in skipped]
        parts.append("")
    return "\n".join(parts)


def describe_machine() -> str:
    """What it was run on."""
    import torch

    import trueup

    versions = f"trueup {trueup.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"This run: {versions}, {platform.system()} on {os.cpu_count()} cores."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def run(effort: int) -> list[Trial]:
    """Run all trials; those that fail, or say nothing, end the program with their names."""
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
            f"{PAGE.name} is as it was: not all trials went well (pytest ended with {int(code)})"
            + "\n  ".join(["", *names])
        )
    return list(recorder.trials.values())


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=int, default=5, help="how many times the usual number of examples")
    effort = max(1, parser.parse_args().effort)
    trials = run(effort)
    PAGE.write_text(page(trials, effort), encoding="utf-8")
    print(f"{PAGE}: {len(trials)} trials")


if __name__ == "__main__":
    main()
