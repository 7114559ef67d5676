"""Run the unfinished cells of a study on any executor, and store each result as it arrives."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import closing, contextmanager, suppress
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from trueup._core import __version__
from trueup._core.executors import count_cores
from trueup._core.progress import track
from trueup_studies.grid import Cell, Options, Study
from trueup_studies.store import Origin, Outcome, Row, Store, validate_rows


class RunSummary(NamedTuple):
    """Summary of a run."""

    finished: int
    """Number of cells that finished in this run."""
    kept: int
    """Number of cells that were not run: already finished, or failed and not retried."""
    failed: Mapping[str, str]
    """Key → error of the cells that failed in this run."""
    seconds: float


class _CellResult(NamedTuple):
    """Result of a worker; a failure is a result too, since not every exception can be pickled."""

    rows: list[Row]
    error: str
    seconds: float
    origin: Origin = Origin()


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
    """Run the unfinished cells of a study and store each result; without an executor, one by one in this process.

    A cell that raises is stored as failed, and the others continue. An interruption loses only the cells that were
    running; the next run repeats them. If a worker dies, Dask runs its cells elsewhere. A pool of processes breaks
    instead, which ends the run. `on_cell` is called with each outcome after it is stored.

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
    with closing(results):  # cancels the cells that have not begun, whatever ends the loop
        for cell, result in track(results, total=len(pending), label=study.name, enabled=progress):
            if result.error:
                failed[cell.key] = result.error
                store.fail(cell, result.error, seconds=result.seconds, origin=result.origin)
            else:
                finished += 1
                store.finish(cell, result.rows, seconds=result.seconds, origin=result.origin)
            if on_cell is not None:
                on_cell(store.outcomes([cell])[0])
    return RunSummary(finished, len(cells) - finished - len(failed), failed, time.monotonic() - started)


def execute(work: str, cell: Cell) -> _CellResult:
    """Do the work of one cell, on as many threads as the cell may use.

    Without a named device, networks use a GPU if this process has one; it may run on another machine.
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
    return _CellResult(rows, failure, time.monotonic() - started, describe_origin(device))


def _default_device() -> str:
    torch = sys.modules.get("torch")  # the work has imported it, if it has networks
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def describe_origin(device: str | None = None) -> Origin:
    """Describe this machine, with its GPU if one was used, and the versions that a result depends on.

    >>> describe_origin().software.split()[0]
    'trueup'
    """
    cores = count_cores()
    machine = f"{cores} CPU {'core' if cores == 1 else 'cores'} ({_processor()})"
    torch = sys.modules.get("torch")
    if torch is not None and device is not None and device.startswith("cuda") and torch.cuda.is_initialized():
        with suppress(RuntimeError, AssertionError):  # the device is missing; the cell reports that
            machine += f", {torch.cuda.get_device_name(device)}"
    software = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
    return Origin(machine, f"trueup {__version__}, Python {platform.python_version()}, {software}")


@cache
def _processor() -> str:
    """Return the processor's name from Linux, else its architecture."""
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
            f"the workers were lost ({type(error).__name__}: {error}), perhaps for lack of memory; "
            "finished cells are kept: run the same command again to continue"
        ) from error
    finally:
        for future in futures:
            future.cancel()


def _result(future: Future[_CellResult]) -> _CellResult:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError):
        raise
    except Exception as error:  # an unsendable result, or a cell that killed several workers
        return _CellResult([], _format_error(error), 0.0)


def _format_error(error: BaseException) -> str:
    """Format the error and its traceback, innermost call at the end."""
    lines = [f"{type(error).__name__}: {error}"]
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"  {trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return "\n".join(lines)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads, if the work has imported it."""
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
