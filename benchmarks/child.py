"""One library in a process of its own: `python benchmarks/child.py LIBRARY` answers requests, a line of JSON each.

It first says {"version", "offers"}, or {"absent", "offers"}. Then
  {"do": "prepare", "task", "n", "classes", "seed"}  draws the data and warms up on a tenth of the rows: {"ready"};
  {"do": "lap"}                                      does the task once: {"seconds", "cpu_seconds", "peak_mb"};
  {"do": "judge"}                                    says how good the last lap's answer is: {"value"} of a metric, or
                                                     {"excess", "ece", "passes"} of a fit, on fresh rows.
In the place of any of these it says {"absent": reason} or {"failed": reason}. The parent's clock ends what takes long.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import truths
from runs import NotOffered, Run, offers, release, run_of
from tasks import PASSES, TASKS, Pairs, draw

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FRESH = 10_000
"""Rows at most on which a fit is judged."""


class Worker:
    """A task under way."""

    def __init__(self, library: str, task: str, n: int, classes: int, seed: int) -> None:
        self.kind = {**TASKS, **PASSES}[task].kind
        self.size, self.seed = (n, classes), seed
        self.answer: Any = None
        run: Run = run_of(library, task)
        data = draw(self.kind, n, classes, seed)
        tenth = type(data)(*(part[: max(n // 10, 100)] for part in data))
        run(tenth)
        give_back()
        self.run: Callable[[], Any] = lambda: run(data)

    def lap(self) -> dict[str, Any]:
        """Do it once, with the clock and the peak of memory around it."""
        self.answer = None
        before = restart_peak()
        start, cpu = perf_counter(), process_time()
        self.answer = self.run()
        seconds, cpu = perf_counter() - start, process_time() - cpu
        peak = megabytes("VmHWM:") - before if before is not None else None
        return {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak}

    def judge(self) -> dict[str, Any]:
        """How good the last answer is."""
        if self.kind == "pass":
            return {}
        if self.kind != "fit":
            return {"value": float(self.answer)}
        n, classes = self.size
        fresh = draw("fit", min(n, FRESH), classes, self.seed + 1)
        assert isinstance(fresh, Pairs)
        nll, ece = truths.excess(fresh, lambda z: self.answer.predict(torch.from_numpy(z)).detach().numpy())
        return {"excess": nll, "ece": ece, "passes": getattr(self.answer, "passes", None)}


def give_back() -> None:
    """Return freed memory to the system, lest the first lap find it and seem to need none."""
    with suppress(OSError, AttributeError, TypeError):  # not on every system
        ctypes.CDLL(None).malloc_trim(0)


def restart_peak() -> float | None:
    """Let the peak of resident memory start anew from what is there now, in MB; None where that cannot be done."""
    try:
        RESET.write_text("5")
        return megabytes("VmRSS:")
    except OSError:
        return None


def megabytes(field: str) -> float:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field)) / 1024


def main(library: str) -> None:
    """Answer on what was the output when it began; whatever a library prints later is no answer."""
    warnings.simplefilter("ignore")  # the libraries' own are not ours to mend
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(library, sys.stdin, lambda answer: print(json.dumps(answer), file=answers, flush=True))


def serve(library: str, requests: Iterable[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Answer until there are no more requests."""
    asked = offers(library)
    try:
        say({"version": release(library), "offers": asked})
    except ImportError as error:
        say({"absent": str(error), "offers": asked})
    worker: Worker | None = None
    for line in requests:
        request = json.loads(line)
        verb = request.pop("do")
        try:
            if verb == "prepare":
                worker = None
                worker = Worker(library, **request)
                say({"ready": True})
            else:
                assert worker is not None, "nothing is prepared"
                say(worker.lap() if verb == "lap" else worker.judge())
        except (ImportError, NotOffered) as error:
            say({"absent": one_line(error)})
        except Exception as error:
            say({"failed": f"{type(error).__name__}: {one_line(error)}"})


def one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:120]


if __name__ == "__main__":
    main(sys.argv[1])
