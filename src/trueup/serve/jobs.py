"""Fits in the background, a few at a time, each with its progress; one that fails says why and harms no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

from trueup.core.errors import message_of
from trueup.report.audit import Audit, audit, methods_for
from trueup.serve.session_store import Store
from trueup.serve.settings import Settings
from trueup.serve.uploads import HINTS, UploadedData

log = logging.getLogger("trueup.serve")

State = Literal["waiting", "running", "done", "failed", "stopped"]


class Busy(RuntimeError):
    """Too many fits are waiting."""


class Cancelled(Exception):
    """The user does not want the result any more."""


@dataclass(eq=False)
class Job:
    """One audit, from the moment it is asked for."""

    val: UploadedData
    test: UploadedData | None
    methods: tuple[str, ...]
    options: dict[str, Any]
    state: State = "waiting"
    fitting: str | None = None
    done: int = 0
    error: str | None = None
    result: Audit | None = None
    cancelled: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """What a reader calls the data."""
        return self.val.name if self.test is None else f"{self.val.name}, {self.test.name}"

    def run(self) -> None:
        """Fit every method and record how it ended, whatever happens."""
        try:
            self._step("", 0, 0)
            self.state = "running"
            test_rows = self.val.test if self.test is None else self.test.test_or_val
            self.result = audit(
                self.val.val, test_rows, methods=self.methods, on_step=self._step, progress=False, **self.options
            )
            self.done, self.fitting, self.state = len(self.methods), None, "done"
        except Cancelled:
            self.state = "stopped"
        except (ValueError, ImportError) as error:
            self.error, self.state = message_of(error, HINTS), "failed"
        except Exception as error:
            log.exception("a fit failed")
            self.error, self.state = f"{type(error).__name__}: {error}", "failed"

    def _step(self, name: str, done: int, total: int) -> None:
        if self.cancelled:
            raise Cancelled
        self.fitting, self.done = name or None, done

    @property
    def size(self) -> int:
        """Bytes in memory, those of the data with them, since the job keeps it alive."""
        total = self.val.size + (self.test.size if self.test else 0)
        if self.result is not None:
            total += sum(logits.nbytes for logits, _ in self.result.pairs.values())
            buffers = (buffer for calibrator in self.result.calibrators.values() for buffer in calibrator.buffers())
            total += sum(buffer.nbytes for buffer in buffers)
        return total


class Jobs:
    """The queue: at most so many at a time, at most so many waiting."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._most = store, settings.workers + settings.waiting
        self._most_bytes = settings.memory_bytes
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="trueup-fit")
        self._lock = Lock()
        self._open: set[Job] = set()

    def start(
        self, val: UploadedData, test: UploadedData | None, methods: Sequence[str] | None, **options: Any
    ) -> tuple[str, Job]:
        """Begin an audit and return its name and itself."""
        chosen = tuple(methods) if methods else methods_for(len(val.val.labels), val.classes)
        job = Job(val, test, chosen, options)
        with self._lock:
            # What waits keeps its data in memory, also when the store has let go of it.
            held = sum(other.size for other in self._open) + job.size
            if len(self._open) >= self._most or (self._open and held > self._most_bytes):
                raise Busy("too many fits are waiting; please try again in a minute")
            self._open.add(job)
        name = self._store.put(job, job.size)
        self._pool.submit(self._work, name, job)
        return name, job

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
