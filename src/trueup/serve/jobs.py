"""Fits in the background, a few at a time, each with its progress; one that fails says why and harms no other."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trueup._core.errors import message_of
from trueup._core.values import parameters
from trueup.reports.audit import Audit, methods_for
from trueup.reports.page import report
from trueup.serve.session_store import Store
from trueup.serve.settings import Settings
from trueup.serve.uploads import HINTS, UnlabelledData, UploadedData

if TYPE_CHECKING:
    from trueup.decisions import PerformanceEstimate, PriorEstimate

log = logging.getLogger("trueup.serve")

MOST_RESAMPLES, LEAST_RESAMPLES = 200, 40
"""Of the intervals of a label shift: the library's own number, fewer where rows × classes are many."""
RESAMPLED_NUMBERS = 200_000_000
"""So many numbers are gone over by all resamples together, some 15 seconds."""

State = Literal["waiting", "running", "done", "failed", "stopped"]


class Busy(RuntimeError):
    """Too many fits are waiting."""


class Cancelled(Exception):
    """The user does not want the result any more."""


@dataclass(eq=False, kw_only=True)
class Job(ABC):
    """Work in the background, from the moment it is asked for."""

    state: State = "waiting"
    error: str | None = None
    cancelled: bool = field(default=False, repr=False)

    def run(self) -> None:
        """Do it and record how it ended, whatever happens."""
        try:
            self.check_wanted()
            self.state = "running"
            self.compute()
            self.state = "done"
        except Cancelled:
            self.state = "stopped"
        except (ValueError, ImportError) as error:
            self.error, self.state = message_of(error, HINTS), "failed"
        except Exception as error:
            log.exception("a fit failed")
            self.error, self.state = f"{type(error).__name__}: {error}", "failed"

    def check_wanted(self) -> None:
        """Stop here if nobody wants the result any more."""
        if self.cancelled:
            raise Cancelled

    @abstractmethod
    def compute(self) -> None:
        """The work itself."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes in memory, those of the data with them, since the job keeps it alive."""


@dataclass(eq=False)
class AuditJob(Job):
    """One audit."""

    val: UploadedData
    test: UploadedData | None
    methods: tuple[str, ...]
    options: dict[str, Any]
    fitting: str | None = None
    done: int = 0
    result: Audit | None = None

    @classmethod
    def of(
        cls, val: UploadedData, test: UploadedData | None, methods: Sequence[str] | None, **options: Any
    ) -> AuditJob:
        """An audit by these methods, or by those that suit the data."""
        return cls(val, test, tuple(methods or methods_for(*val.shape)), options)

    @property
    def name(self) -> str:
        """What a reader calls the data."""
        return self.val.name if self.test is None else f"{self.val.name}, {self.test.name}"

    def compute(self) -> None:
        """Fit every method."""
        test = self.val.test if self.test is None else self.test.test_or_val
        scored, given = test or self.val.val, dict(self.options)
        if scored.groups:
            given["groups"] = dict(scored.groups)
        if self.val.val.clusters is not None or scored.clusters is not None:  # of one file alone, they are refused
            given["clusters"] = self.val.val.options().get("clusters")
            given["test_clusters"] = None if test is None else test.options().get("clusters")
        page = report(
            self.val.val.pair,
            None if test is None else test.pair,
            methods=self.methods,
            on_step=self._step,
            progress=False,
            **given,
        )
        self.result = page.audit
        self.done, self.fitting = len(self.methods), None

    def _step(self, name: str, done: int, total: int) -> None:
        self.check_wanted()
        self.fitting, self.done = name, done

    @property
    def size(self) -> int:
        """With the calibrated rows and the calibrators."""
        total = self.val.size + (self.test.size if self.test else 0)
        if self.result is not None:
            total += sum(logits.nbytes for logits, _ in self.result.pairs.values())
            known = (x for c in self.result.calibrators.values() for x in parameters(c).values())
            total += sum(np.asarray(parameter).nbytes for parameter in known)
        return total


@dataclass(eq=False)
class LabelShiftJob(Job):
    """The class frequencies of rows without labels, and what the network is expected to get right among them."""

    val: UploadedData
    new: UnlabelledData
    seed: int = 0
    prior: PriorEstimate | None = None
    performance: PerformanceEstimate | None = None

    def compute(self) -> None:
        """Both estimates, the second with the frequencies of the first where these moved."""
        from trueup.decisions import estimate_performance, estimate_prior

        numbers = max(math.prod(data.shape) for data in (self.val, self.new))
        n_resamples = min(MOST_RESAMPLES, max(LEAST_RESAMPLES, RESAMPLED_NUMBERS // max(numbers, 1)))
        options: dict[str, Any] = {"val": self.val.val.pair, "n_resamples": n_resamples, "seed": self.seed}
        prior = estimate_prior(self.new.logits, **options)
        self.check_wanted()
        performance = estimate_performance(self.new.logits, **options, shift=prior.moved)
        self.prior, self.performance = prior, performance

    @property
    def size(self) -> int:
        """That of both files."""
        return self.val.size + self.new.size


class Jobs:
    """The queue: at most so many at a time, at most so many waiting."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._most = store, settings.workers + settings.waiting
        self._most_bytes = settings.memory_bytes
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="trueup-fit")
        self._lock = Lock()
        self._open: set[Job] = set()

    def start(self, job: Job) -> str:
        """Let a job wait for its turn, and return its name."""
        with self._lock:
            # What waits keeps its data in memory, also when the store has let go of it.
            held = sum(other.size for other in self._open) + job.size
            if len(self._open) >= self._most or (self._open and held > self._most_bytes):
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
