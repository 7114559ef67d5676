"""Executors by name: this process, a pool of processes, or a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from multiprocessing.connection import Connection


def executor_for(name: str, *, gpus: int = 0) -> AbstractContextManager[Executor | None]:
    """Open an executor by name; it is closed at the end of the block.

    - "none": this process.
    - "processes" or "processes:4": a pool of processes on this machine.
    - "local" or "local:4": a new Dask cluster on this machine.
    - "tcp://host:port" or "tls://host:port": a running Dask cluster.

    With `gpus`, each process on this machine sees one GPU; the GPUs are assigned in turn.

    >>> with executor_for("none") as executor:
    ...     print(executor)
    None
    """
    kind, _, count = name.partition(":")
    if kind in ("tcp", "tls"):
        return _dask(name)
    numbered = count.isdecimal() and int(count) > 0 and kind != "none"
    if kind not in ("none", "processes", "local") or not (numbered or name == kind):
        raise ValueError(
            'executor must be "none", "processes[:n]", "local[:n]" or the address of a Dask scheduler '
            f'("tcp://host:port"), got {name!r}'
        )
    if kind == "none":
        return nullcontext()
    workers = int(count) if count else count_cores()
    return _processes(workers, gpus) if kind == "processes" else _dask(None, workers, gpus)


@contextmanager
def _processes(workers: int, gpus: int) -> Iterator[Executor]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # Fork would copy locks that threads of this process hold.
    context = multiprocessing.get_context("spawn")
    end, lifeline = context.Pipe(duplex=False)
    arguments = (end, context.Value("i", 0), gpus)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=arguments)
    try:
        yield pool
    except BaseException:
        lifeline.close()  # ends the workers: nobody waits for their results
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        lifeline.close()
        end.close()


def _start_worker(lifeline: Connection, started: Any, gpus: int) -> None:
    """Prepare a process of the pool: it ignores Ctrl-C and ends when its parent has ended."""
    import signal
    import threading

    if gpus:
        with started.get_lock():
            number, started.value = started.value, started.value + 1
        _select_gpu(number, gpus)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read when NumPy is imported
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        lifeline.poll(None)  # returns when the pipe closes, also because the parent was killed
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _select_gpu(number: int, gpus: int) -> None:
    """Let this process see only one of `gpus` GPUs, chosen by the number of the process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    names = visible.split(",")[:gpus]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]  # read when torch first asks for a GPU


@contextmanager
def _dask(address: str | None, workers: int = 1, gpus: int = 0) -> Iterator[Executor]:
    try:
        from distributed import Client, LocalCluster, WorkerPlugin
    except ImportError:
        raise ImportError("a Dask cluster needs distributed: pip install 'trueup[cluster]'") from None
    with ExitStack() as stack:
        if address is None:
            options = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            cluster = stack.enter_context(LocalCluster(**options))  # type: ignore[no-untyped-call]
            client = stack.enter_context(Client(cluster))  # type: ignore[no-untyped-call]
            if gpus:

                class SelectGPU(WorkerPlugin):  # also runs in workers that replace lost ones
                    def setup(self, worker: Any) -> None:
                        _select_gpu(int(worker.name), gpus)

                client.register_plugin(SelectGPU())
        else:
            try:
                client = stack.enter_context(Client(address))  # type: ignore[no-untyped-call]
            except OSError as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(f"no Dask scheduler answers at {address}: {reason}") from error
        yield client.get_executor()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
