"""The parent's side of child.py: one process tree for each library, asked one at a time and ended when late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any, NamedTuple

START = 120.0
"""Seconds within which a child has to say what it offers."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "LOKY_MAX_CPU_COUNT")


class Library(NamedTuple):
    """A library, and the command that starts its child."""

    name: str
    command: tuple[str, ...]

    @classmethod
    def own(cls, name: str) -> Library:
        """One that child.py knows."""
        return cls(name, (sys.executable, str(Path(__file__).with_name("child.py")), name))


@contextmanager
def started(libraries: Iterable[Library], *, threads: int) -> Iterator[list[Child]]:
    """The children of these libraries, all ended at the end."""
    children: list[Child] = []
    try:
        for library in libraries:
            children.append(Child(library, threads=threads))
        for child in children:
            child.greet()
        yield children
    finally:
        for child in children:
            child.end()


class Child:
    """A library's process; after its end it starts again when it is next asked."""

    def __init__(self, library: Library, *, threads: int) -> None:
        self.name = library.name
        self._command = library.command
        self._environment = {**os.environ, **dict.fromkeys(THREADS, str(threads))}
        self._process: subprocess.Popen[str] | None = None
        self._answers: Queue[str | None] = Queue()
        self._errors: IO[bytes] | None = None
        self.version, self.offers, self.absent = "", frozenset[str](), ""
        self._start()

    def greet(self) -> None:
        """Wait until it has said what it offers; several may be started first and get ready together."""
        hello = self._answer(START)
        self.version, self.offers = str(hello.get("version", "")), frozenset(hello.get("offers", ()))
        reason = hello.get("absent") or hello.get("failed")
        self.absent = str(reason or ("does not answer" if "late" in hello else ""))

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Its answer; {"late": limit} after so many seconds, {"failed": …} if it ended; in both cases it is gone."""
        if self._process is None:
            self._start()
            self.greet()
        if self._process is None or self._process.stdin is None:
            return {"failed": self.absent}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            return self._ended()
        return self._answer(limit)

    def _start(self) -> None:
        self._answers = Queue()
        self._errors = TemporaryFile()  # noqa: SIM115 — it lives as long as the process
        # Its own session: what it starts ends with it.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        Thread(target=_listen, args=(self._process.stdout, self._answers), daemon=True).start()

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit)
        except Empty:
            self.end()
            return {"late": limit}
        if line is None:
            return self._ended()
        try:
            answer = json.loads(line)
        except ValueError:
            self.end()
            return {"failed": "an answer that is no JSON"}
        return answer if isinstance(answer, dict) else {"failed": "an answer that is no record"}

    def _ended(self) -> dict[str, Any]:
        """Say how it ended, with the last line of what it complained of."""
        process, errors = self._process, self._errors
        assert process is not None
        assert errors is not None
        code = process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self.end()
        how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
        return {"failed": how + "".join(f": {line[:100]}" for line in last)}

    def end(self) -> None:
        """End it and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (OSError, AttributeError):  # gone already, or a system without groups
            process.kill()
        process.wait()
        for pipe in (process.stdin, self._errors):
            if pipe is not None:
                with suppress(OSError):  # what it was last asked may not have been read
                    pipe.close()


def _listen(lines: IO[str], answers: Queue[str | None]) -> None:
    with lines:
        for line in lines:
            answers.put(line)
    answers.put(None)
