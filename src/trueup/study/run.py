"""Running a study: the cells that are not finished yet, on any executor, each result kept as it comes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trueup.core.progress import track
from trueup.study.cell import Cell
from trueup.study.grid import Options, Study
from trueup.study.store import Outcome, Row, Store, checked_rows

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Ran(NamedTuple):
    """What a run did."""

    finished: int
    """Cells that were run now."""
    kept: int
    """Cells that were not run because they were finished, or failed and not to be tried again."""
    failed: Mapping[str, str]
    """Error by key, of the cells that failed now."""
    seconds: float


class _Done(NamedTuple):
    """What a worker sends back; a failure is a result too, since not every exception survives a journey."""

    rows: list[Row]
    error: str
    seconds: float


def run(
    study: Study,
    store: Store,
    *,
    options: Options | None = None,
    executor: Executor | None = None,
    retry_failed: bool = True,
    progress: bool = True,
    on_cell: Callable[[Outcome], None] | None = None,
) -> Ran:
    """Run what is missing of a study and keep each result as it comes; without an executor here, one by one.

    A cell that raises is kept as failed, and the others go on. An interruption, of whatever kind, loses only what was
    running: the next run takes it up. A worker that dies is the executor's matter: Dask tries its cells elsewhere, a
    pool of processes breaks, which ends the run. `on_cell` is told of each cell after it is in the store.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.study import STUDIES
    >>> study = STUDIES["post-hoc"]
    >>> options = Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    >>> with TemporaryDirectory() as folder:
    ...     store = Store(f"{folder}/results.sqlite")
    ...     ran = run(study, store, options=options)
    ...     rows = store.rows(study.cells(options))
    >>> ran.finished, [f"{row['method']} {row['ece']:.4f}" for row in rows]
    (2, ['identity 0.2497', 'temperature 0.0431'])
    """
    started = time.monotonic()
    cells = study.cells(options)
    statuses = store.statuses(cells)
    skip = ("finished",) if retry_failed else ("finished", "failed")
    pending = [cell for cell in cells if statuses.get(cell.key) not in skip]
    results = _here(study.work, pending, store) if executor is None else _there(study.work, pending, executor)
    finished, failed = 0, {}
    with closing(results):  # what has not begun is cancelled at once, whatever ends the loop
        for cell, done in track(results, total=len(pending), label=study.name, enabled=progress):
            if done.error:
                failed[cell.key] = done.error
                store.fail(cell, done.error, seconds=done.seconds)
            else:
                finished += 1
                store.finish(cell, done.rows, seconds=done.seconds)
            if on_cell is not None:
                on_cell(store.outcomes([cell])[0])
    return Ran(finished, len(cells) - finished - len(failed), failed, time.monotonic() - started)


def execute(work: str, cell: Cell) -> _Done:
    """Do the work of one cell wherever this is called, on as many threads as the cell may use."""
    started = time.monotonic()
    try:
        module, attribute = work.split(":")
        function: Any = reduce(getattr, attribute.split("."), import_module(module))
        with _threads(int(cell.local.get("threads", 1))):
            found = function({**cell.settings, **cell.local})
        rows = checked_rows(cell, found)
    except Exception as error:
        return _Done([], _told(error), time.monotonic() - started)
    return _Done(rows, "", time.monotonic() - started)


@contextmanager
def executor_for(name: str) -> Iterator[Executor | None]:
    """An executor by its name, closed at the end of the block.

    "none" is this process, "processes" or "processes:4" a pool on this machine, "local" or "local:4" a Dask cluster of
    its own on this machine, "tcp://host:port" or "tls://host:port" a Dask cluster that is there already.

    >>> with executor_for("none") as executor:
    ...     print(executor)
    None
    """
    kind, _, count = name.partition(":")
    if kind in ("tcp", "tls"):
        with _dask(name) as executor:
            yield executor
        return
    numbered = count.isdecimal() and int(count) > 0 and kind != "none"
    if kind not in ("none", "processes", "local") or not (numbered or name == kind):
        raise ValueError(
            'executor must be "none", "processes[:n]", "local[:n]" or the address of a Dask scheduler '
            f'("tcp://host:port"), got {name!r}'
        )
    workers = int(count) if count else _cores()
    if kind == "none":
        yield None
    elif kind == "processes":
        import multiprocessing

        # Not by fork, which copies locks that threads of this process hold.
        context = multiprocessing.get_context("spawn")
        end, lifeline = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(end,))
        try:
            yield pool
        except BaseException:
            lifeline.close()  # what still runs has nobody to bring its result to
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            lifeline.close()
            end.close()
    else:
        with _dask(None, workers) as executor:
            yield executor


def _here(work: str, pending: Sequence[Cell], store: Store) -> Generator[tuple[Cell, _Done], None, None]:
    for cell in pending:
        # Another process may have finished it since the run began.
        if store.statuses([cell]).get(cell.key) != "finished":
            yield cell, execute(work, cell)


def _there(work: str, pending: Sequence[Cell], executor: Executor) -> Generator[tuple[Cell, _Done], None, None]:
    futures: dict[Future[_Done], Cell] = {}
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


def _result(future: Future[_Done]) -> _Done:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError):
        raise
    except Exception as error:  # of the executor: a result that cannot travel, a cell that killed worker upon worker
        return _Done([], _told(error), 0.0)


def _told(error: BaseException) -> str:
    """What was wrong, and where, innermost call last."""
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


def _start_worker(lifeline: Connection) -> None:
    """Prepare a process of the pool: Ctrl-C is its parent's to answer, and with the parent gone it goes too."""
    import signal
    import threading

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read when NumPy is imported
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        lifeline.poll(None)  # nothing is ever sent: what comes is the end, also of a parent that was killed
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _dask(address: str | None, workers: int = 1) -> Iterator[Executor]:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ImportError("a Dask cluster needs distributed: pip install 'trueup[cluster]'") from None
    with ExitStack() as stack:
        if address is None:
            options = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            cluster = stack.enter_context(LocalCluster(**options))  # type: ignore[no-untyped-call]
            client = stack.enter_context(Client(cluster))  # type: ignore[no-untyped-call]
        else:
            client = stack.enter_context(Client(address))  # type: ignore[no-untyped-call]
        yield client.get_executor()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
