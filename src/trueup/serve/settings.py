"""All limits of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Host names by which a browser on this machine reaches the server."""


MIN_BYTES_PER_SECOND = 1024
"""Minimum speed of a request body and of reading an answer: a slow client cannot hold its connection for ever."""


@dataclass(frozen=True)
class ServedNetwork:
    """A network that the page can clamp, with its data."""

    name: str
    load: Callable[[], tuple[Any, tuple[Any, Any]]]
    """Returns the network, and its calibration and test batches."""


@dataclass(frozen=True)
class ReaderLimits:
    """Limits for reading one upload."""

    reader_bytes: int = 2 << 30
    """Memory of the process that reads it."""
    reader_seconds: float = 60.0
    """Run time of that process."""
    rows: int = 1_000_000
    """Largest number of rows."""
    n_classes: int = 20_000
    """Largest number of classes."""
    numbers: int = 60_000_000
    """Largest number of rows × classes."""


@dataclass(frozen=True)
class Settings(ReaderLimits):
    """The limits of a server; the defaults suit one machine and a few users.

    >>> Settings(rows=1000).n_classes
    20000
    """

    upload_bytes: int = 256 << 20
    """Size of the largest file."""
    json_bytes: int = 8 << 20
    """Size of the largest request body that is not an upload."""
    uploads: int = 64
    """Number of uploads that may arrive at the same time."""
    patience: float = 30.0
    """Seconds without data after which an upload is aborted."""
    body_seconds: float = 600.0
    """Seconds in which a request must arrive as a whole."""
    seconds: float = 3600.0
    """Seconds after their last use at which data and results are deleted."""
    memory_bytes: int = 2 << 30
    """Memory for data and results; the least recently used are deleted first."""
    workers: int = 1
    """Number of fits that run at the same time; one fit uses several cores."""
    fit_seconds: float = 3600.0
    """Run time after which a fit stops at its next step."""
    waiting: int = 64
    """Number of fits that may wait, and of updates that may wait per monitor."""
    monitors: int = 100
    """Largest number of monitors. They do not expire: a service may send nothing for weeks."""
    monitors_folder: Path | None = None
    """Folder that keeps monitors across restarts; without it they exist in memory only."""
    checkpoint_seconds: float = 0.0
    """Seconds between checkpoints of the monitors; 0 writes one before each answer, so no acknowledged row is lost."""
    history: int = 500
    """Number of points in a monitor's charts."""
    connections: int = 512
    """Largest number of open connections; fewer if the system allows few file descriptors."""
    idle_seconds: float = 30.0
    """Seconds that a connection may stay open without a request, or without reading its answer."""
    disk_bytes: int = 4 << 30
    """Disk space for all uploads that are arriving or being read."""
    monitors_bytes: int = 1 << 30
    """Disk space for all monitors in their folder."""
    token: str | None = None
    """Token that a request must show: as a cookie, as `Authorization: Bearer …`, or once as `?token=…`. None requires
    no token; `trueup.serve.server.run` then makes one."""
    hosts: tuple[str, ...] = LOCAL
    """Host names under which the server answers; "*" for any. This list prevents DNS rebinding."""
    network: ServedNetwork | None = None
    """A network that the page can clamp besides that of the digits."""
    clock: Callable[[], float] = monotonic
    """Clock for the expiry of data, in seconds."""


def is_loopback(host: str) -> bool:
    """Check whether only this machine can reach that address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.1.2.3")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
