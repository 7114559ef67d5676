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

Bad input and failing machines must not break the library or lose a row. In particular:

* **Saving a file is atomic.** A full disk, a missing permission or a kill leaves the old file unchanged. An error
  names the file. A killed process leaves at most hidden temporary files (`.name.0123456789abcdef.tmp`, `.tmpAb12Cd`).
  Nothing reads them, and you may delete them. A `.npy` pair is two files, each of which is complete. A kill or another
  writer between the two renames can leave logits and labels of different versions. torch itself writes ONNX and
  `torch.export` files: write them under a new name.
* **A broken file is rejected with one sentence that names it.** No reader crashes, hangs or runs code from a file. None
  allocates memory that only the file's header declares.
* **Threads may share calibrators, monitors and files.** Many threads get the same numbers from a calibrator as one. A
  monitor counts every row of every batch once. If several threads save to one path, one of the complete files remains.
* **Results are reproducible.** The same seed gives the same bits. The number of threads changes a table by less than a
  relative 10⁻¹², and a calibrated probability by less than 10⁻⁸.

There is one known defect. If a worker of `--scheduler processes` is killed while it returns its result, Python's
process pool can wait for ever (observed with Python 3.11). No number is wrong, but you have to stop the command.
`--scheduler local`, which is Dask, repeats such work in another worker.

Each row below is a test in `tests/hard`, which runs with all other tests. The column "what happened" has its counts and
measurements. To write this page:

```sh
$ python docs/reliability.py --effort {effort}
```

The page is not written if a trial fails. `--effort` multiplies the number of examples: {effort} here. The test
suite uses 1 and a third of the broken files.
{machine}
"""

KINDS = {
    "files": ("Broken files", "Valid files of every kind are damaged in many ways and read."),
    "faults": ("Disks, permissions, kills, clocks", "The machine fails during writing, sending or waiting."),
    "threads": ("Threads", "Eight threads do the same work at the same time."),
    "numbers": ("Reproducible results", "Thread counts, seeds and the two implementations, compared."),
}


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


def page(trials: list[Trial], effort: int) -> str:
    """Format the page: the introduction, a table per kind of trial, and the skipped trials."""
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
    """Describe versions and machine."""
    import torch

    import trueup

    versions = f"trueup {trueup.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"This run: {versions}, {platform.system()} on {os.cpu_count()} cores."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def run(effort: int) -> list[Trial]:
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
