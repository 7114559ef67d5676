"""Starts the server, and limits its connections: how many are open, and how long one may stay without a request.

A connection that says nothing, or half a header, holds a descriptor of the server, and when descriptors run out nobody
is served any more. So each has a time to send a request in, and where there are too many, the one that has been idle
longest is closed; those whose request is being answered stay. uvicorn's `limit_concurrency` would reject new requests
instead, and `timeout_keep_alive` holds only after a first request.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trueup.serve.settings import LOCAL, Settings, is_loopback

EVERYWHERE = ("0.0.0.0", "::")
"""Every address of this machine."""
RESERVED = 64
"""Descriptors that are kept for files, processes and connections that are being accepted."""
BACKLOG = 64
"""Connections accepted at a time, before any of them can be closed."""


def run(
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    hosts: tuple[str, ...] = (),
    settings: Settings | None = None,
    open_browser: bool = False,
    log_level: str = "warning",
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until interrupted; `on_listening` is called with its address.

    Only this machine can reach it, unless `host` says otherwise; then `hosts` are the names under which it answers, and
    requests must show a token: that of the settings, or a new one. The address that it is called with has it.
    """
    settings = settings or Settings()
    if settings.token is None and not is_loopback(host):
        settings = replace(settings, token=secrets.token_urlsafe(24))
    if not 0 <= port <= 65535:
        raise ValueError(f"port must lie in 0..65535, got {port}")
    server = make_server(host, port, hosts=hosts, settings=settings, log_level=log_level)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror}; choose another port") from None
    query = "" if settings.token is None else f"?token={settings.token}"
    address = f"http://{_names(host)[-1]}:{listening.getsockname()[1]}/{query}"
    if on_listening is not None:
        on_listening(address)
    if open_browser:  # what it asks waits until the server has started
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with listening, suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def make_server(
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    hosts: tuple[str, ...] = (),
    settings: Settings | None = None,
    log_level: str = "warning",
) -> Any:
    """The uvicorn server that `run` runs."""
    try:
        import uvicorn

        from trueup.serve.app import create_app
    except ImportError as error:
        raise ImportError(f"the web page needs {error.name}: pip install 'trueup[serve]'") from None

    settings = settings or Settings()
    names = dict.fromkeys((*settings.hosts, *_names(host), *hosts))
    app = create_app(replace(settings, hosts=tuple(name.lower() for name in names)))
    # A line of the access log would hold the token.
    quiet: Any = {"log_level": log_level, "server_header": False, "access_log": False}
    protocol = limited_protocol(most_connections(settings.connections), settings.idle_seconds)
    limits: Any = {"timeout_keep_alive": 30, "backlog": BACKLOG, "http": protocol}
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, **quiet, **limits))


def _names(host: str) -> tuple[str, ...]:
    """What a browser calls a server that listens there."""
    name = socket.gethostname() if host in EVERYWHERE else host
    return (*LOCAL, f"[{name}]" if ":" in name else name)


def most_connections(most: int) -> int:
    """This many, or fewer where this process may open few files.

    >>> most_connections(10)
    10
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(8, min(most, soft // 2 - RESERVED))


def limited_protocol(most: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """A class of uvicorn's HTTP connections with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection."""

        _timer: asyncio.TimerHandle
        _idle_since: float

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > most:
                idle = [other for other in self.connections if other is not self and other.is_idle]
                oldest = min(idle, key=lambda other: other._idle_since, default=self)
                self.connections.discard(oldest)  # it is not to be chosen again before its end is noticed
                oldest.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._timer.cancel()
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _start_timer(self) -> None:
            """Count the time without a request, from the end of the last one."""
            self._idle_since = self.loop.time()
            self._timer = self.loop.call_later(idle_seconds, self._abort_if_idle)

        def _abort_if_idle(self) -> None:
            if self.is_idle:
                self.transport.abort()

    return LimitedProtocol
