"""What the server takes, keeps and allows, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from time import monotonic

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""The names by which a browser on this machine reaches the server."""


@dataclass(frozen=True)
class ReaderLimits:
    """What reading one upload may take, and how much a file may hold."""

    reader_bytes: int = 2 << 30
    """Memory."""
    reader_seconds: float = 60.0
    rows: int = 1_000_000
    n_classes: int = 20_000
    numbers: int = 60_000_000
    """The most rows × classes."""


@dataclass(frozen=True)
class Settings(ReaderLimits):
    """The limits of a server; the defaults suit one machine and a few users.

    >>> Settings(rows=1000).n_classes
    20000
    """

    upload_bytes: int = 256 << 20
    """The largest file."""
    json_bytes: int = 8 << 20
    """The largest body of a request that is no upload."""
    uploads: int = 64
    """How many uploads may arrive at once."""
    patience: float = 30.0
    """Seconds an upload may stand still."""
    seconds: float = 3600.0
    """How long data and results are kept after they were last asked for."""
    memory_bytes: int = 2 << 30
    """How much of them is kept at most; the longest unused go first."""
    workers: int = 1
    """Fits at a time: one fit uses the cores of a small machine well."""
    waiting: int = 64
    """How many fits may wait for their turn."""
    monitors: int = 100
    """How many monitors are kept. They do not expire: a service may send nothing for weeks."""
    monitors_folder: Path | None = None
    """Where monitors are kept over a restart; without it they live in memory."""
    checkpoint_seconds: float = 0.0
    """How often monitors that saw rows are written there; at 0 before each answer, so that nothing answered is lost."""
    history: int = 500
    """Points of a monitor's charts."""
    connections: int = 512
    """How many connections may be open; fewer where the system allows few descriptors."""
    idle_seconds: float = 30.0
    """How long a connection may stay open without a request."""
    disk_bytes: int = 4 << 30
    """How much uploads that are arriving or being read may take on disk, all together."""
    monitors_bytes: int = 1 << 30
    """How much monitors may take in their folder, all together."""
    token: str | None = None
    """What a request must show, as a cookie, as `Authorization: Bearer …` or once as `?token=…`; None asks for none."""
    hosts: tuple[str, ...] = LOCAL
    """Names under which the server answers; "*" for any. A page elsewhere cannot reach it by a name of its own."""
    clock: Callable[[], float] = monotonic


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.1.2.3")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
