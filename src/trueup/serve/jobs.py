"""Background fits with a queue, progress and error messages; a failed fit does not affect others."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trueup._core.errors import error_message
from trueup._core.values import parameters
from trueup.reports.audit import Audit, methods_for
from trueup.reports.page import report
from trueup.serve.session_store import Store
from trueup.serve.settings import Settings
from trueup.serve.uploads import HINTS, UnlabelledData, Upload, UploadedData

if TYPE_CHECKING:
    from trueup.decisions import PerformanceEstimate, PriorEstimate

log = logging.getLogger("trueup.serve")

MAX_RESAMPLES, MIN_RESAMPLES = 200, 40
"""Number of resamples for the intervals of a label shift: the library's default, or fewer for large files."""
RESAMPLED_NUMBERS = 200_000_000
"""Budget of rows × classes × resamples, about 15 seconds."""


class Busy(RuntimeError):
    """Too many fits or updates are waiting."""


class Cancelled(Exception):
    """Nobody waits for the job's result any more, or it takes too long."""


@dataclass(eq=False, kw_only=True)
class Job(ABC):
    """A computation in the background."""

    state: Literal["waiting", "running", "done", "failed", "stopped"] = "waiting"
    error: str | None = None
    result: Any = None
    check: Callable[[], None] = lambda: None
    """Raises `Cancelled` if the job must stop; called between its steps."""

    def run(self) -> None:
        """Compute the result; record any outcome in `state`."""
        try:
            self.check()
            self.state = "running"
            self.result = self.compute()
            self.state = "done"
        except Cancelled as error:
            self.error, self.state = str(error) or None, "stopped"
        except (ValueError, ImportError) as error:
            self.error, self.state = error_message(error, HINTS), "failed"
        except Exception as error:
            log.exception("a fit failed")
            self.error, self.state = f"{type(error).__name__}: {error}", "failed"

    @abstractmethod
    def compute(self) -> Any:
        """Return the result."""

    @property
    def size(self) -> int:
        """Bytes in memory, including the uploads, which the job keeps alive."""
        return sum(value.size for value in vars(self).values() if isinstance(value, Upload))


@dataclass(eq=False)
class AuditJob(Job):
    """An audit with these methods; without any, with the default methods for data of this shape."""

    val: UploadedData
    test: UploadedData | None
    methods: Sequence[str]
    options: dict[str, Any]
    fitting: str | None = None
    done: int = 0

    def __post_init__(self) -> None:
        self.methods = self.methods or methods_for(*self.val.shape)

    def compute(self) -> Audit:
        """Fit and score every method."""
        val = self.val.val
        test = self.val.test if self.test is None else self.test.test_or_val
        test_pair, test_clusters = (test.pair, test.options().get("clusters")) if test else (None, None)
        clusters = {"clusters": val.options().get("clusters"), "test_clusters": test_clusters}
        options: Any = {**self.options, **clusters, "groups": (test or val).options().get("groups")}
        page = report(val.pair, test_pair, methods=self.methods, on_step=self._step, progress=False, **options)
        self.fitting, self.done = None, len(self.methods)
        return page.audit

    def _step(self, name: str, done: int, total: int) -> None:
        self.check()
        self.fitting, self.done = name, done

    @property
    def size(self) -> int:
        """Bytes in memory, including the calibrated rows and the calibrators."""
        arrays: list[Any] = []
        if self.result is not None:
            arrays += [logits for logits, _ in self.result.pairs.values()]
            arrays += [array for c in self.result.calibrators.values() for array in parameters(c).values()]
        return super().size + sum(np.asarray(array).nbytes for array in arrays)


@dataclass(eq=False)
class LabelShiftJob(Job):
    """Estimates of the class frequencies and the accuracy on rows without labels."""

    val: UploadedData
    new: UnlabelledData
    seed: int

    def compute(self) -> tuple[PriorEstimate, PerformanceEstimate]:
        """Estimate the class frequencies, then the accuracy under them if they changed."""
        from trueup.decisions import estimate_performance, estimate_prior

        numbers = max(math.prod(data.shape) for data in (self.val, self.new))
        n_resamples = min(MAX_RESAMPLES, max(MIN_RESAMPLES, RESAMPLED_NUMBERS // max(numbers, 1)))
        options: dict[str, Any] = {"val": self.val.val.pair, "n_resamples": n_resamples, "seed": self.seed}
        prior = estimate_prior(self.new.val.logits, **options)
        self.check()
        return prior, estimate_performance(self.new.val.logits, **options, shift=prior.moved)


class Jobs:
    """A queue with limits on the running and the waiting jobs."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="trueup-fit")
        self._lock = Lock()
        self._open: set[Job] = set()

    def start(self, job: Job) -> str:
        """Add a job to the queue; return its id."""
        with self._lock:
            # A waiting job keeps its data in memory even after the store has deleted it.
            bytes_in_queue = sum(other.size for other in self._open) + job.size
            full = len(self._open) >= self._settings.workers + self._settings.waiting
            if full or (self._open and bytes_in_queue > self._settings.memory_bytes):
                raise Busy("too many fits are waiting; please try again in a minute")
            self._open.add(job)
        name = self._store.put(job, job.size)
        self._pool.submit(self._work, name, job)
        return name

    def _work(self, name: str, job: Job) -> None:
        seconds, start = self._settings.fit_seconds, monotonic()

        def check() -> None:
            if name not in self._store:  # it was stopped, or has expired
                raise Cancelled
            if monotonic() - start > seconds:
                raise Cancelled(f"the fit was stopped, since it took longer than {seconds:g} seconds")

        job.check = check
        try:
            job.run()
            self._store.resize(name, job.size)
        finally:
            with self._lock:
                self._open.remove(job)

    def close(self) -> None:
        """Accept no more jobs, and stop running ones after their current method."""
        self._store.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
