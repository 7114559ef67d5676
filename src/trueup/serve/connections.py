"""Limits on connections: how many are open, and how long one may stay without a request.

A connection that says nothing, or half a header, holds a descriptor of the server for as long as it likes, and when
descriptors run out nobody is served any more. So each has a time to send a request in, and where there are too many,
the one that has been idle longest is closed to make room; those whose request is being answered stay.
"""

from __future__ import annotations

import asyncio
from typing import Any

RESERVED = 64
"""Descriptors that are kept for files, processes and connections that are being accepted."""
BACKLOG = 64
"""Connections accepted at a time, before any of them can be closed."""


def most_connections(wanted: int) -> int:
    """So many as are wanted, or fewer where this process may open few files.

    >>> most_connections(10)
    10
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(8, min(wanted, soft // 2 - RESERVED))


def limited_protocol(most: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """A class of uvicorn's HTTP connections with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _idle_since = 0.0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()
            if len(self.connections) > most:
                self._make_room()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            """Begin to count while there is no request, from the end of the last one; stop when there is one."""
            if not self.is_idle:
                self._stop_timer()
            elif self._timer is None:
                self._idle_since = self.loop.time()
                self._timer = self.loop.call_later(idle_seconds, self._give_up)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if self.is_idle:
                self.transport.abort()

        def _make_room(self) -> None:
            idle = [other for other in self.connections if other is not self and other.is_idle]
            oldest = min(idle, key=lambda other: other._idle_since, default=self)
            self.connections.discard(oldest)  # it is not to be chosen again before its end is noticed
            oldest.transport.abort()

    return LimitedProtocol
