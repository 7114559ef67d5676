"""Running a study: the cells that are not finished yet, on any executor, each result kept as it comes."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import closing, contextmanager, suppress
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trueup._core import __version__
from trueup._core.executors import count_cores
from trueup._core.progress import format_time_left, track
from trueup_studies.grid import Cell, Options, Study, as_json
from trueup_studies.store import Outcome, Place, Row, Store, validate_rows

RUN = ("seed", "network_seed", "split", "draw")
"""Settings that tell runs of the same thing apart."""


class RunSummary(NamedTuple):
    """What a run did."""

    finished: int
    """Cells that were run now."""
    kept: int
    """Cells that were not run because they were finished, or failed and not to be tried again."""
    failed: Mapping[str, str]
    """Error by key, of the cells that failed now."""
    seconds: float


class _CellResult(NamedTuple):
    """What a worker sends back; a failure is a result too, since not every exception can be pickled."""

    rows: list[Row]
    error: str
    seconds: float
    place: Place = Place()


_Results = Generator[tuple[Cell, _CellResult], None, None]


def run(
    study: Study,
    store: Store,
    *,
    options: Options | None = None,
    executor: Executor | None = None,
    retry_failed: bool = True,
    progress: bool = True,
    on_cell: Callable[[Outcome], None] | None = None,
) -> RunSummary:
    """Run what is missing of a study and keep each result as it comes; without an executor here, one by one.

    A cell that raises is kept as failed, and the others go on. An interruption, of whatever kind, loses only what was
    running; the next run does it. If a worker dies, Dask tries its cells elsewhere, while a pool of
    processes breaks, which ends the run. `on_cell` is called with each outcome after it is in the store.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup_studies import STUDIES
    >>> study = STUDIES["post-hoc"]
    >>> options = Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    >>> with TemporaryDirectory() as folder:
    ...     store = Store(f"{folder}/results.sqlite")
    ...     summary = run(study, store, options=options)
    ...     rows = store.rows(study.cells(options))
    >>> summary.finished, [f"{row['method']} {row['ece']:.4f}" for row in rows]
    (2, ['identity 0.2497', 'temperature 0.0431'])
    """
    started = time.monotonic()
    cells = study.cells(options)
    statuses = store.statuses(cells)
    skip = ("finished",) if retry_failed else ("finished", "failed")
    pending = [cell for cell in cells if statuses.get(cell.key) not in skip]
    work = study.work
    results = _run_locally(work, pending, store) if executor is None else _run_on_executor(work, pending, executor)
    finished, failed = 0, {}
    workers = getattr(executor, "_max_workers", 1)  # the pools of Python have no better name for it
    pace = _Pace(cells, store.seconds(cells), pending, workers)
    with closing(results):  # what has not begun is cancelled at once, whatever ends the loop
        for cell, result in track(results, total=len(pending), label=study.name, enabled=progress, remaining=pace.left):
            pace.count(cell, result)
            if result.error:
                failed[cell.key] = result.error
                store.fail(cell, result.error, seconds=result.seconds, place=result.place)
            else:
                finished += 1
                store.finish(cell, result.rows, seconds=result.seconds, place=result.place)
            if on_cell is not None:
                on_cell(store.outcomes([cell])[0])
    return RunSummary(finished, len(cells) - finished - len(failed), failed, time.monotonic() - started)


class _Pace:
    """How long the cells that are left will take, by the seconds of those that differ from them in the run alone."""

    def __init__(
        self, cells: Sequence[Cell], seconds: Mapping[str, float], pending: Sequence[Cell], workers: int = 1
    ) -> None:
        self.started, self.workers = time.monotonic(), workers
        self.spent, self.new = 0.0, list[float]()
        self.waiting = Counter(map(_kind, pending))
        self.known: dict[str, list[float]] = {}
        for cell in cells:
            if cell.key in seconds:
                self.known.setdefault(_kind(cell), []).append(seconds[cell.key])

    def count(self, cell: Cell, result: _CellResult) -> None:
        """One more is done; how soon one failed tells nothing of others."""
        self.waiting[_kind(cell)] -= 1
        self.spent += result.seconds
        if not result.error:
            self.new.append(result.seconds)
            self.known.setdefault(_kind(cell), []).append(result.seconds)

    def left(self) -> str:
        """In words, with what is only supposed."""
        known = {kind: cells for kind, cells in self.waiting.items() if kind in self.known}
        seconds = sum(cells * fmean(self.known[kind]) for kind, cells in known.items())
        new = self.waiting.total() - sum(known.values())
        if new and not self.new:
            return ""
        seconds += new * fmean(self.new or [0.0])
        # Of a cluster the number of workers is not known, but how much was done in how long.
        at_once = max(1, self.spent / (time.monotonic() - self.started), min(self.workers, self.waiting.total()))
        return format_time_left(seconds / at_once) + (f" if {new} not like any before take no longer" if new else "")


def _kind(cell: Cell) -> str:
    """The settings without what tells runs of the same thing apart."""
    return as_json({name: value for name, value in cell.settings.items() if name not in RUN}, sort_keys=True)


def execute(work: str, cell: Cell) -> _CellResult:
    """Do the work of one cell wherever this is called, on as many threads as the cell may use.

    Where no device is named, networks are on a GPU if this process sees one: it may be on another machine.
    """
    started, device = time.monotonic(), cell.local.get("device")
    try:
        module, attribute = work.split(":")
        function: Any = reduce(getattr, attribute.split("."), import_module(module))
        device = device or _default_device()
        with _threads(int(cell.local.get("threads", 1))):
            returned = function({**cell.settings, **cell.local, "device": device})
        rows = validate_rows(cell, returned)
    except Exception as error:
        rows, failure = [], _format_error(error)
    else:
        failure = ""
    return _CellResult(rows, failure, time.monotonic() - started, describe_place(device))


def _default_device() -> str:
    torch = sys.modules.get("torch")  # the work has imported it, if it has networks
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def describe_place(device: str | None = None) -> Place:
    """This machine, with the GPU if the device is one and was used, and the versions that a result depends on.

    >>> describe_place().software.split()[0]
    'trueup'
    """
    cores = count_cores()
    machine = f"{cores} CPU {'core' if cores == 1 else 'cores'} ({_processor()})"
    torch = sys.modules.get("torch")
    if torch is not None and device is not None and device.startswith("cuda") and torch.cuda.is_initialized():
        with suppress(RuntimeError, AssertionError):  # a device that is not there: the cell says so
            machine += f", {torch.cuda.get_device_name(device)}"
    software = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
    return Place(machine, f"trueup {__version__}, Python {platform.python_version()}, {software}")


@cache
def _processor() -> str:
    """The processor by its own name where Linux tells it, else its kind."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine()


def _run_locally(work: str, pending: Sequence[Cell], store: Store) -> _Results:
    for cell in pending:
        # Another process may have finished it since the run began.
        if store.statuses([cell]).get(cell.key) != "finished":
            yield cell, execute(work, cell)


def _run_on_executor(work: str, pending: Sequence[Cell], executor: Executor) -> _Results:
    futures: dict[Future[_CellResult], Cell] = {}
    try:
        for cell in pending:
            futures[executor.submit(execute, work, cell)] = cell
        for future in as_completed(list(futures)):
            yield futures[future], _result(future)
            del futures[future]
    except (BrokenExecutor, CancelledError) as error:
        raise RuntimeError(
            f"the workers were lost ({type(error).__name__}: {error}), perhaps for want of memory; "
            "finished cells are kept: run again to go on with the others"
        ) from error
    finally:
        for future in futures:
            future.cancel()


def _result(future: Future[_CellResult]) -> _CellResult:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError):
        raise
    except Exception as error:  # of the executor: a result that cannot travel, a cell that killed worker upon worker
        return _CellResult([], _format_error(error), 0.0)


def _format_error(error: BaseException) -> str:
    """The error and where it was raised, innermost call last."""
    lines = [f"{type(error).__name__}: {error}"]
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"  {trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return "\n".join(lines)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, if the work has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
