"""Start the server, and limit the number of its connections and their time without a request.

A connection without a complete request holds a file descriptor. Without free descriptors the server accepts nobody. So
each connection must send a request within some time. If there are too many, the one that is idle longest is closed;
connections whose request is being answered stay. uvicorn's `limit_concurrency` would reject new requests instead, and
its `timeout_keep_alive` starts only after a first request.
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
"""Addresses that mean every network interface of this machine."""
RESERVED = 64
"""Number of descriptors reserved for files, processes and connections that are being accepted."""
BACKLOG = 64
"""Number of connections accepted at a time, before one of them can be closed."""


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
    """Serve the page until interrupted.

    With the default `host`, only this machine can connect. With another one, requests must show a token: that of the
    settings, or a new one.

    Parameters
    ----------
    host
        Address to listen on.
    port
        Port to listen on; 0 chooses a free one.
    hosts
        Additional host names under which the server answers.
    settings
        Limits of the server.
    open_browser
        Whether to open the page in a browser.
    log_level
        Log level of uvicorn.
    on_listening
        Called with the page's address, which includes the token.
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
    address = f"http://{_host_names(host)[-1]}:{listening.getsockname()[1]}/{query}"
    if on_listening is not None:
        on_listening(address)
    if open_browser:  # its request waits until the server has started
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
    """Make the uvicorn server for `run`.

    Parameters
    ----------
    host
        Address to listen on.
    port
        Port to listen on.
    hosts
        Additional host names under which the server answers.
    settings
        Limits of the server.
    log_level
        Log level of uvicorn.

    Returns
    -------
    uvicorn.Server
        A server that is not running yet.
    """
    try:
        import uvicorn

        from trueup.serve.app import create_app
    except ImportError as error:
        raise ImportError(f"the web page needs {error.name}: pip install 'trueup[serve]'") from None

    settings = settings or Settings()
    names = dict.fromkeys((*settings.hosts, *_host_names(host), *hosts))
    app = create_app(replace(settings, hosts=tuple(name.lower() for name in names)))
    # A line of the access log would hold the token.
    quiet: Any = {"log_level": log_level, "server_header": False, "access_log": False}
    protocol = limited_protocol(max_connections(settings.connections), settings.idle_seconds)
    limits: Any = {"timeout_keep_alive": 30, "backlog": BACKLOG, "http": protocol}
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, **quiet, **limits))


def _host_names(host: str) -> tuple[str, ...]:
    """Host names that a browser uses for a server at that address."""
    name = socket.gethostname() if host in EVERYWHERE else host
    return (*LOCAL, f"[{name}]" if ":" in name else name)


def max_connections(wish: int) -> int:
    """Limit a number of connections by the number of files that this process may open.

    >>> max_connections(10)
    10
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wish
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wish if soft == resource.RLIM_INFINITY else max(8, min(wish, soft // 2 - RESERVED))


def limited_protocol(connections: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """Make a subclass of uvicorn's HTTP connection with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection."""

        _timer: asyncio.TimerHandle
        _idle_since: float

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > connections:
                idle = [other for other in self.connections if other is not self and other.is_idle]
                oldest = min(idle, key=lambda other: other._idle_since, default=self)
                self.connections.discard(oldest)  # it must not be chosen again before the event loop notices its end
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
            """Measure the time without a request from now on."""
            self._idle_since = self.loop.time()
            self._timer = self.loop.call_later(idle_seconds, self._abort_if_idle)

        def _abort_if_idle(self) -> None:
            if self.is_idle:
                self.transport.abort()

    return LimitedProtocol
