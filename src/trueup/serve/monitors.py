"""The server's monitors: atomic updates, a history, and checkpoints in a folder if there is one."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from trueup._core.arrays import as_arrays, take_rows
from trueup.io.artifacts import load_artifact
from trueup.io.atomic import atomic_write
from trueup.io.load_save import save
from trueup.monitor import Monitor, Status
from trueup.serve.models import MonitorName
from trueup.serve.settings import Settings
from trueup.serve.uploads import clean_name

log = logging.getLogger("trueup.serve")

MAX_POINTS_PER_LOG = 200
"""Largest number of history points from one replayed log."""
COUNTERS = {
    "updates": "Updates and logs that were added to monitors",
    "refused_updates": "Malformed updates, logs and expected rows, which were rejected",
    "acknowledged_alarms": "Alarms that were acknowledged",
    "failed_checkpoints": "Checkpoints that could not be written",
    "damaged_monitors": "Checkpoints that were damaged at the start, and renamed",
}
"""Prometheus counters of the server."""
_MIN_MONITOR_BYTES = 64 << 10
"""Disk space reserved for a new monitor."""
NAME: TypeAdapter[str] = TypeAdapter(MonitorName)
"""The check of a monitor's name, the same for files as for requests."""


class History:
    """A limited number of points, evenly spaced over the rows; the final point is always the newest.

    >>> history = History(4)
    >>> for rows in range(1, 10):
    ...     history.add(rows, {"ece": rows / 100})
    >>> history.columns()
    {'rows': [1, 5, 9], 'ece': [0.01, 0.05, 0.09]}
    """

    def __init__(self, max_points: int) -> None:
        self._max_points, self._gap = max_points, 0.0
        self._points: list[dict[str, Any]] = []

    def add(self, rows: int, figures: dict[str, Any]) -> None:
        """Append a point; it replaces the newest one if that is too close to the point before."""
        if len(self._points) > 1 and self._points[-1]["rows"] - self._points[-2]["rows"] < self._gap:
            self._points.pop()
        self._points.append({"rows": rows, **figures})
        if len(self._points) > self._max_points:
            self._points = self._points[-1::-2][::-1]
            self._gap = 2 * (rows - self._points[0]["rows"]) / self._max_points

    def columns(self) -> dict[str, list[Any]]:
        """Return one list per figure."""
        points = list(self._points)
        names = points[-1] if points else ("rows",)
        return {name: [point[name] for point in points] for name in names}


class Successor(NamedTuple):
    """A monitor after an update, and the new points of its history."""

    monitor: Monitor
    points: Sequence[Status] = ()


@dataclass(eq=False)
class MonitorSession:
    """A monitor with its name and history.

    Updates replace `monitor` and never change it, so readers need no lock.
    """

    id: str
    name: str
    monitor: Monitor
    history: History
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the running update; waiting updates occupy no thread."""
    waiting: int = 0
    refused: int = 0
    """Number of malformed updates, logs and expected rows since the server started."""
    updated: float | None = None
    replaying: dict[str, int] | None = None
    """Progress of the current replay: `done` of `total` rows."""
    file: Path | None = None
    """The checkpoint, if there is a folder; the monitor's name is in a .json file with the same stem."""
    saved: Monitor | None = None
    """The state of the monitor in the file."""
    problem: str | None = None
    """Why the latest checkpoint could not be written."""
    write_lock: Lock = field(default_factory=Lock)

    def expect(self, logits: Any) -> Successor:
        """Return the monitor after rows whose labels have not arrived."""
        draft = copy.copy(self.monitor)
        draft.expect(logits)
        return Successor(draft)

    def acknowledge(self) -> Successor:
        """Return the monitor after its alarm was acknowledged."""
        draft = copy.copy(self.monitor)
        draft.acknowledge()
        return Successor(draft)

    def update(self, logits: Any, labels: Any, *, awaited: bool = False) -> Successor:
        """Return the monitor after these rows, with points of its history."""
        z, y = as_arrays(logits, labels)
        draft = copy.copy(self.monitor)  # its attributes are immutable
        total, block = len(y), draft.evidence.block
        # The monitor checks for an alarm at the end of each block, so pieces of whole blocks give the same result.
        piece = max(1, -(-total // (MAX_POINTS_PER_LOG * block))) * block
        ends = [*range(piece - draft.rows % block, total, piece), total]
        points: list[Status] = []
        try:
            for start, end in pairwise([0, *ends]):
                self.replaying = {"done": start, "total": total}
                points.append(draft.update(*take_rows(z, y, np.arange(start, end)), awaited=awaited))
        finally:
            self.replaying = None
        return Successor(draft, points if total else ())


class MonitorStore:
    """All monitors of a server, by random id."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._folder = settings, settings.monitors_folder
        self._sessions: dict[str, MonitorSession] = {}
        self._lock = Lock()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock_handle = _lock_folder(self._folder) if self._folder else None
        try:
            if self._folder:
                for draft in self._folder.glob(".*.tmp*"):  # left by a server that was killed while writing
                    draft.unlink(missing_ok=True)
                for file in sorted(self._folder.glob("*.safetensors")):
                    self._load_or_set_aside(file)
        except Exception:
            self.close()
            raise

    def add(self, name: str, monitor: Monitor) -> MonitorSession:
        """Add a monitor; its checkpoint is on disk when this returns."""
        session = self._new_session(secrets.token_hex(8), name, monitor)
        with self._lock:
            if any(other.name == name for other in self._sessions.values()):
                raise HTTPException(409, f"there is already a monitor {name!r}; choose another name")
            if (count := len(self._sessions)) >= self._settings.monitors:
                raise HTTPException(409, f"there are already {count} monitors, the largest number allowed; delete one")
            self._sessions[session.id] = session
        try:
            self._write(session, monitor)
        except ValueError as error:
            self.remove(session.id)
            raise HTTPException(507, f"the monitor was not made, since it cannot be written: {error}") from None
        return session

    def commit(self, session: MonitorSession, successor: Successor) -> None:
        """Replace a monitor by its successor; with a checkpoint per update, only if that could be written."""
        if self._settings.checkpoint_seconds <= 0:
            try:
                self._write(session, successor.monitor)
            except ValueError as error:
                raise HTTPException(507, f"the update was not counted, since it cannot be written: {error}") from None
        session.monitor, session.updated = successor.monitor, time.time()
        for status in successor.points:
            session.history.add(status.rows, _figures(status))

    def get(self, id: str) -> MonitorSession:
        """Return the monitor of that id."""
        session = self._sessions.get(id)
        if session is None:
            raise HTTPException(404, "there is no monitor under that id")
        return session

    def count_refused(self, id: str) -> None:
        """Count a malformed request to change that monitor."""
        self.counts["refused_updates"] += 1
        if (session := self._sessions.get(id)) is not None:
            session.refused += 1

    def all(self) -> list[MonitorSession]:
        """Return all monitors, sorted by name."""
        return sorted(self._sessions.copy().values(), key=lambda session: session.name.casefold())

    def remove(self, id: str) -> None:
        """Delete a monitor and its checkpoint."""
        session = self.get(id)
        with session.write_lock:  # a checkpoint being written would reappear
            if session.file:
                session.file.unlink(missing_ok=True)
                session.file.with_suffix(".json").unlink(missing_ok=True)
            with self._lock:
                self._sessions.pop(id, None)

    def save(self) -> None:
        """Write the monitors that changed since their latest checkpoint."""
        for session in self.all():
            with suppress(ValueError):
                self._write(session, session.monitor)

    def close(self) -> None:
        """Write all unsaved monitors, and unlock the folder."""
        self.save()
        if self._lock_handle is not None:
            os.close(self._lock_handle)

    def collect(self) -> Iterable[Metric]:
        """Yield the server's counters for Prometheus."""
        yield GaugeMetricFamily("trueup_monitors", "Monitors kept", value=len(self._sessions))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"trueup_{name}", text, value=self.counts[name])
        refused = CounterMetricFamily("trueup_monitor_refused", "Malformed requests per monitor", labels=["monitor"])
        for session in self.all():
            refused.add_metric([session.name], session.refused)
        yield refused

    def _new_session(self, id: str, name: str, monitor: Monitor) -> MonitorSession:
        session = MonitorSession(id, name, monitor, History(self._settings.history))
        session.file = self._folder / f"{id}.safetensors" if self._folder else None
        if monitor.rows:
            session.history.add(monitor.rows, _figures(monitor.status()))
        return session

    def _load_or_set_aside(self, file: Path) -> None:
        """Load a checkpoint; rename a damaged one and log a warning."""
        try:
            self._load(file)
            return
        except PermissionError as error:
            problem = f"it cannot be read ({error.strerror})"
        except Exception as error:
            aside = file.replace(file.with_name(f"{file.name}.damaged"))
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"it is damaged and was renamed to {aside.name}: {reason}"
        self.counts["damaged_monitors"] += 1
        log.warning("the monitor %s was not loaded: %s", file, problem)

    def _load(self, file: Path) -> None:
        """Load a checkpoint; without a .json file, the monitor is named after its file."""
        monitor, about = load_artifact(file, "monitor"), file.with_suffix(".json")
        fallback = clean_name(file.stem)
        try:
            stored = json.loads(about.read_text(encoding="utf-8"))["name"] if about.exists() else fallback
            name = NAME.validate_python(stored, strict=True)
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s is damaged: the monitor is now named %r", about, fallback)
            name = fallback
        for path in (file, about):
            if path.exists():
                path.chmod(0o600)
        while any(session.name == name for session in self._sessions.values()):
            name += "′"
        session = self._new_session(file.stem, name, monitor)
        session.saved = monitor
        self._sessions[session.id] = session

    def _write(self, session: MonitorSession, monitor: Monitor) -> None:
        """Write a monitor's checkpoint, unless it is up to date; a failure is logged and raised as ValueError."""
        with session.write_lock:
            if session.file is None or session.id not in self._sessions or session.saved is monitor:
                return
            try:
                if session.saved is None:  # the size hardly changes later
                    used = sum(file.stat().st_size for file in session.file.parent.glob("*.safetensors"))
                    if used + _MIN_MONITOR_BYTES > self._settings.monitors_bytes:
                        limit = f"{self._settings.monitors_bytes / 2**20:,.0f} MB"
                        raise ValueError(f"the monitors use all of their {limit} on disk; delete one")
                    with atomic_write(session.file.with_suffix(".json")) as (draft,):
                        draft.write_text(json.dumps({"name": session.name}), encoding="utf-8")
                save(monitor, session.file)
            except Exception as error:  # a full disk raises various errors; the next checkpoint tries again
                session.problem = getattr(error, "strerror", None) or " ".join(str(error).split())
                with self._lock:
                    self.counts["failed_checkpoints"] += 1
                log.warning("the monitor %r cannot be written: %s", session.name, session.problem)
                raise ValueError(session.problem) from None
            session.saved, session.problem = monitor, None


def _figures(status: Status) -> dict[str, Any]:
    now = status.to_dict()
    return {"evidence": now["evidence"]} | {name: now[f"recent_{name}"] for name in ("ece", "accuracy", "confidence")}


def _lock_folder(folder: Path) -> int:
    """Lock a folder for this server, since two servers would overwrite each other's files; return the lock's handle."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
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
        log.warning("%s cannot be locked: make sure that no other server uses it", folder)
    return handle
