"""Fits in the background, a few at a time, each with its progress; one that fails says why and harms no other."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
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

MOST_RESAMPLES, LEAST_RESAMPLES = 200, 40
"""Of the intervals of a label shift: the library's own number, fewer where rows × classes are many."""
RESAMPLED_NUMBERS = 200_000_000
"""So many numbers are gone over by all resamples together, some 15 seconds."""


class Busy(RuntimeError):
    """Too many fits are waiting."""


class Cancelled(Exception):
    """The user does not want the result any more."""


@dataclass(eq=False, kw_only=True)
class Job(ABC):
    """Work in the background, from the moment it is asked for."""

    state: Literal["waiting", "running", "done", "failed", "stopped"] = "waiting"
    error: str | None = None
    cancelled: bool = False
    result: Any = None

    def run(self) -> None:
        """Do it and record how it ended, whatever happens."""
        try:
            self.check_wanted()
            self.state = "running"
            self.result = self.compute()
            self.state = "done"
        except Cancelled:
            self.state = "stopped"
        except (ValueError, ImportError) as error:
            self.error, self.state = error_message(error, HINTS), "failed"
        except Exception as error:
            log.exception("a fit failed")
            self.error, self.state = f"{type(error).__name__}: {error}", "failed"

    def check_wanted(self) -> None:
        """Stop here if nobody wants the result any more."""
        if self.cancelled:
            raise Cancelled

    @abstractmethod
    def compute(self) -> Any:
        """The result."""

    @property
    def size(self) -> int:
        """Bytes in memory: those of the uploads, since the job keeps them alive."""
        return sum(value.size for value in vars(self).values() if isinstance(value, Upload))


@dataclass(eq=False)
class AuditJob(Job):
    """One audit by these methods; without any, by those that suit the data."""

    val: UploadedData
    test: UploadedData | None
    methods: Sequence[str]
    options: dict[str, Any]
    fitting: str | None = None
    done: int = 0

    def __post_init__(self) -> None:
        self.methods = self.methods or methods_for(*self.val.shape)

    def compute(self) -> Audit:
        """Fit every method."""
        val = self.val.val
        test = self.val.test if self.test is None else self.test.test_or_val
        test_pair, test_clusters = (test.pair, test.options().get("clusters")) if test else (None, None)
        clusters = {"clusters": val.options().get("clusters"), "test_clusters": test_clusters}
        options: Any = {**self.options, **clusters, "groups": (test or val).options().get("groups")}
        page = report(val.pair, test_pair, methods=self.methods, on_step=self._step, progress=False, **options)
        self.fitting, self.done = None, len(self.methods)
        return page.audit

    def _step(self, name: str, done: int, total: int) -> None:
        self.check_wanted()
        self.fitting, self.done = name, done

    @property
    def size(self) -> int:
        """With the calibrated rows and the calibrators."""
        arrays: list[Any] = []
        if self.result is not None:
            arrays += [logits for logits, _ in self.result.pairs.values()]
            arrays += [array for c in self.result.calibrators.values() for array in parameters(c).values()]
        return super().size + sum(np.asarray(array).nbytes for array in arrays)


@dataclass(eq=False)
class LabelShiftJob(Job):
    """The class frequencies of rows without labels, and what the network is expected to get right among them."""

    val: UploadedData
    new: UnlabelledData
    seed: int

    def compute(self) -> tuple[PriorEstimate, PerformanceEstimate]:
        """Both estimates, the second with the frequencies of the first where these moved."""
        from trueup.decisions import estimate_performance, estimate_prior

        numbers = max(math.prod(data.shape) for data in (self.val, self.new))
        n_resamples = min(MOST_RESAMPLES, max(LEAST_RESAMPLES, RESAMPLED_NUMBERS // max(numbers, 1)))
        options: dict[str, Any] = {"val": self.val.val.pair, "n_resamples": n_resamples, "seed": self.seed}
        prior = estimate_prior(self.new.val.logits, **options)
        self.check_wanted()
        return prior, estimate_performance(self.new.val.logits, **options, shift=prior.moved)


class Jobs:
    """The queue: at most so many at a time, at most so many waiting."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="trueup-fit")
        self._lock = Lock()
        self._open: set[Job] = set()

    def start(self, job: Job) -> str:
        """Let a job wait for its turn, and return its name."""
        with self._lock:
            # What waits keeps its data in memory, also when the store has let go of it.
            held = sum(other.size for other in self._open) + job.size
            full = len(self._open) >= self._settings.workers + self._settings.waiting
            if full or (self._open and held > self._settings.memory_bytes):
                raise Busy("too many fits are waiting; please try again in a minute")
            self._open.add(job)
        name = self._store.put(job, job.size)
        self._pool.submit(self._work, name, job)
        return name

    def _work(self, name: str, job: Job) -> None:
        try:
            job.cancelled = job.cancelled or name not in self._store  # nobody can ask for the result any more
            job.run()
            self._store.resize(name, job.size)
        finally:
            with self._lock:
                self._open.remove(job)

    def close(self) -> None:
        """Take no more, and stop those that run after the method they are at."""
        with self._lock:
            for job in self._open:
                job.cancelled = True
        self._pool.shutdown(wait=False, cancel_futures=True)
