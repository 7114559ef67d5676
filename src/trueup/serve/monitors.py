"""Monitors that the server keeps: each updated whole or not at all, with a history, in a folder if there is one."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException

from trueup._core.arrays import as_arrays, take_rows
from trueup.io.artifacts import load_artifact
from trueup.io.atomic import atomic_write
from trueup.io.load_save import save
from trueup.monitor import Monitor, Status
from trueup.serve.settings import Settings

log = logging.getLogger("trueup.serve")

POINTS = 200
"""How many points of a history one replayed log gives at most."""
SERVER = {
    "updates": "Updates and logs that monitors took in",
    "refused_updates": "Updates and logs that did not fit their monitor, and changed nothing",
    "failed_checkpoints": "Checkpoints that could not be written",
    "damaged_monitors": "Checkpoints that were damaged at the start, and set aside",
}
"""What the server counts."""
_GROWTH = 64 << 10
"""Bytes that a new monitor takes at least."""


class History:
    """Points along the rows: at most so many, evenly spaced, of which the last is always the newest.

    >>> history = History(4)
    >>> for rows in range(1, 10):
    ...     history.add(rows, {"ece": rows / 100})
    >>> history.columns()
    {'rows': [1, 5, 9], 'ece': [0.01, 0.05, 0.09]}
    """

    def __init__(self, most: int) -> None:
        self._most, self._gap = most, 0.0
        self._points: list[dict[str, Any]] = []

    def add(self, rows: int, figures: dict[str, Any]) -> None:
        """Append a point, or put it in place of the last if that is too near to the one before."""
        if len(self._points) > 1 and self._points[-1]["rows"] - self._points[-2]["rows"] < self._gap:
            self._points.pop()
        self._points.append({"rows": rows, **figures})
        if len(self._points) > self._most:
            self._points = self._points[-1::-2][::-1]
            self._gap = 2 * (rows - self._points[0]["rows"]) / self._most

    def columns(self) -> dict[str, list[Any]]:
        """One list a figure."""
        points = list(self._points)
        names = points[-1] if points else ("rows",)
        return {name: [point[name] for point in points] for name in names}


@dataclass(eq=False)
class MonitorSession:
    """A monitor with its name and history.

    `monitor` is never changed but replaced by its successor, so readers need no lock.
    """

    id: str
    name: str
    monitor: Monitor
    history: History
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one update that runs; the next in line takes no thread while it waits."""
    waiting: int = 0
    updated: float | None = None
    replaying: dict[str, int] | None = None
    """Rows taken in of the log that is being replayed, and all its rows."""
    file: Path | None = None
    """The checkpoint, if monitors are kept in a folder; its name is in a .json file of the same stem."""
    saved: Monitor | None = None
    """What is in the file."""
    problem: str | None = None
    write_lock: Lock = field(default_factory=Lock)

    def expect(self, logits: Any) -> None:
        """Take in rows whose labels have not arrived."""
        draft = copy.copy(self.monitor)
        draft.expect(logits)
        self.monitor, self.updated = draft, time.time()

    def update(self, logits: Any, labels: Any, *, awaited: bool = False) -> None:
        """Take in rows: all of them, or none if something is wrong."""
        z, y = as_arrays(logits, labels, doubt=False)
        draft = copy.copy(self.monitor)  # its parts are frozen
        total, block = len(y), draft.evidence.block
        # A look at the end of a block is one that the monitor takes itself, so pieces give the same as the whole.
        piece = max(1, -(-total // (POINTS * block))) * block
        ends = [*range(piece - draft.rows % block, total, piece), total]
        points = []
        try:
            for start, end in pairwise([0, *ends]):
                self.replaying = {"done": start, "total": total}
                points.append(draft.update(*take_rows(z, y, np.arange(start, end)), awaited=awaited))
        finally:
            self.replaying = None
        self.monitor, self.updated = draft, time.time()
        for status in points if total else ():
            self.history.add(status.rows, _figures(status))


class MonitorStore:
    """All monitors of a server, by random ids."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._folder = settings, settings.monitors_folder
        self._sessions: dict[str, MonitorSession] = {}
        self._lock = Lock()
        self.counts: Counter[str] = Counter(dict.fromkeys(SERVER, 0))
        self._lock_handle = _lock_folder(self._folder) if self._folder else None
        try:
            if self._folder:
                for draft in self._folder.glob(".*.tmp*"):  # of a server that was killed while it wrote
                    draft.unlink(missing_ok=True)
                for file in sorted(self._folder.glob("*.safetensors")):
                    self._load_or_set_aside(file)
        except Exception:
            self.close()
            raise

    def add(self, name: str, monitor: Monitor) -> MonitorSession:
        """Keep a monitor; it is on disk when this returns."""
        session = self._new_session(secrets.token_hex(8), name, monitor)
        with self._lock:
            if any(other.name == name for other in self._sessions.values()):
                raise HTTPException(409, f"a monitor is called {name!r} already; choose another name")
            if (count := len(self._sessions)) >= self._settings.monitors:
                raise HTTPException(409, f"there are {count} monitors already, as many as are kept; delete one")
            self._sessions[session.id] = session
        self.write(session)
        if session.problem:
            self.remove(session.id)
            raise HTTPException(507, f"the monitor was not made, since it cannot be kept: {session.problem}")
        return session

    def get(self, id: str) -> MonitorSession:
        """The monitor of that id."""
        session = self._sessions.get(id)
        if session is None:
            raise HTTPException(404, "no monitor is kept here under that id")
        return session

    def all(self) -> list[MonitorSession]:
        """All of them, by name."""
        return sorted(self._sessions.copy().values(), key=lambda session: session.name.casefold())

    def remove(self, id: str) -> None:
        """Forget a monitor, on disk too."""
        session = self.get(id)
        with session.write_lock:  # a checkpoint that is being written would come back
            if session.file:
                session.file.unlink(missing_ok=True)
                session.file.with_suffix(".json").unlink(missing_ok=True)
            with self._lock:
                self._sessions.pop(id, None)

    def save(self) -> None:
        """Write the monitors that have seen rows since they were last written."""
        for session in self.all():
            self.write(session)

    def close(self) -> None:
        """Write what is not written, and let others use the folder."""
        self.save()
        if self._lock_handle is not None:
            os.close(self._lock_handle)

    def collect(self) -> Iterable[Metric]:
        """What the server counts, for Prometheus."""
        yield GaugeMetricFamily("trueup_monitors", "Monitors kept", value=len(self._sessions))
        for name, text in SERVER.items():
            yield CounterMetricFamily(f"trueup_{name}", text, value=self.counts[name])

    def _new_session(self, id: str, name: str, monitor: Monitor) -> MonitorSession:
        session = MonitorSession(id, name, monitor, History(self._settings.history))
        session.file = self._folder / f"{id}.safetensors" if self._folder else None
        if monitor.rows:
            session.history.add(monitor.rows, _figures(monitor.status()))
        return session

    def _load_or_set_aside(self, file: Path) -> None:
        """Load a checkpoint; a damaged one is renamed and named in a warning, and the others go on."""
        try:
            self._load(file)
            return
        except PermissionError as error:
            problem = f"it cannot be read ({error.strerror}) and was left out"
        except Exception as error:
            aside = file.replace(file.with_name(f"{file.name}.damaged"))
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"it is damaged and was renamed to {aside.name}: {reason}"
        self.counts["damaged_monitors"] += 1
        log.warning("the monitor %s was not loaded: %s", file, problem)

    def _load(self, file: Path) -> None:
        """A checkpoint that someone put there by hand has no name beside it: its file's is taken."""
        monitor, about = load_artifact(file, "monitor"), file.with_suffix(".json")
        try:
            name = str(json.loads(about.read_text(encoding="utf-8"))["name"]) if about.exists() else file.stem
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s is damaged: the monitor is called %r now", about, file.stem)
            name = file.stem
        while any(session.name == name for session in self._sessions.values()):
            name += "′"
        session = self._new_session(file.stem, name, monitor)
        session.saved = monitor
        self._sessions[session.id] = session

    def write(self, session: MonitorSession) -> None:
        """Write a monitor, unless it is written."""
        with session.write_lock:
            monitor = session.monitor
            if session.file is None or session.id not in self._sessions or session.saved is monitor:
                return
            try:
                if session.saved is None:  # a monitor keeps its size
                    taken = sum(file.stat().st_size for file in session.file.parent.glob("*.safetensors"))
                    if taken + _GROWTH > self._settings.monitors_bytes:
                        most = f"{self._settings.monitors_bytes / 2**20:,.0f} MB"
                        raise ValueError(f"the monitors take the {most} that they may have on disk; delete one")
                    with atomic_write(session.file.with_suffix(".json")) as (draft,):
                        draft.write_text(json.dumps({"name": session.name}), encoding="utf-8")
                save(monitor, session.file)
            except Exception as error:  # a full disk shows itself in many ways; the next checkpoint tries again
                session.problem = getattr(error, "strerror", None) or " ".join(str(error).split())
                with self._lock:
                    self.counts["failed_checkpoints"] += 1
                log.warning("the monitor %r cannot be written: %s", session.name, session.problem)
            else:
                session.saved, session.problem = monitor, None


def _figures(status: Status) -> dict[str, Any]:
    now = status.to_dict()
    return {"evidence": now["evidence"]} | {name: now[f"recent_{name}"] for name in ("ece", "accuracy", "confidence")}


def _lock_folder(folder: Path) -> int:
    """Lock a folder for this server, as two would overwrite each other's monitors; closing the handle unlocks it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"{folder}: monitors cannot be kept there: {error.strerror}") from None
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # pragma: no cover - Windows has no such locks
        pass
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{folder}: another server keeps its monitors there") from None
    except OSError:  # a file system without locks
        log.warning("%s cannot be locked: no other server must use it", folder)
    return handle
