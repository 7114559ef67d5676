"""Start the server, and limit the number of its connections, their time without a request and their slow reading.

A connection holds a file descriptor, and without free descriptors the server accepts nobody. So each connection must
send a request within some time, and must read the answer at a minimum speed. If there are too many connections, the one
that waits longest for its client is closed. uvicorn has no limit for clients that do not read; its `limit_concurrency`
would reject new requests instead, and its `timeout_keep_alive` starts only after a first request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trueup.serve.settings import LOCAL, MIN_BYTES_PER_SECOND, Settings, is_loopback
from trueup.serve.temporary import temporary_prefix

EVERYWHERE = ("0.0.0.0", "::")
"""Addresses that mean every network interface of this machine."""
RESERVED = 64
"""Number of descriptors reserved for files, processes and connections that are being accepted."""
BACKLOG = 64
"""Number of connections accepted at a time, before one of them can be closed."""
MAX_HEADER_BYTES = 16 << 10
"""Size of the headers of a request."""


def run(
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    hosts: tuple[str, ...] = (),
    settings: Settings | None = None,
    require_token: bool = True,
    open_browser: bool = False,
    log_level: str = "warning",
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until interrupted.

    With the default `host`, only this machine can connect. Requests must show the token of the settings, or a new one.
    Files that the server writes are readable by their owner only.

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
    require_token
        Whether to make a token if the settings have none. Other machines can never connect without one.
    open_browser
        Whether to open the page in a browser.
    log_level
        Log level of uvicorn.
    on_listening
        Called with the page's address, which includes the token.
    """
    settings = settings or Settings()
    if settings.token is None and (require_token or not is_loopback(host)):
        settings = replace(settings, token=secrets.token_urlsafe(24))
    os.umask(0o077)
    gc.set_threshold(50_000, 50, 100)  # collections took most of the time to parse a body of millions of lists
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
    with listening, TemporaryDirectory(prefix=temporary_prefix("open")) as folder, suppress(KeyboardInterrupt):
        if open_browser:  # its request waits until the server has started
            link = redirect_file(Path(folder), address)
            threading.Thread(target=webbrowser.open, args=(link.as_uri(),), daemon=True).start()
        server.run(sockets=[listening])


def redirect_file(folder: Path, address: str) -> Path:
    """Write a page that leads to an address: a browser's arguments, which all accounts can read, then have no token."""
    link = folder / "trueup.html"
    link.touch(0o600)
    link.write_text(f'<meta http-equiv="refresh" content="0; url={escape(address)}">', encoding="utf-8")
    return link


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
    if settings.token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]+", settings.token):
        raise ValueError("the token (TRUEUP_TOKEN) may have only the characters A-Z a-z 0-9 - . _ ~")
    names = dict.fromkeys((*settings.hosts, *_host_names(host), *hosts))
    app = create_app(replace(settings, hosts=tuple(name.lower() for name in names)))
    # A line of the access log would hold the token.
    quiet: Any = {"log_level": log_level, "server_header": False, "access_log": False}
    protocol = limited_protocol(max_connections(settings.connections), settings.idle_seconds)
    limits: Any = {"backlog": BACKLOG, "http": protocol, "h11_max_incomplete_event_size": MAX_HEADER_BYTES}
    limits |= {"timeout_keep_alive": 30, "ws": "none"}
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

        _timer: asyncio.TimerHandle | None = None
        _waiting_since: float
        _unread: int

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > connections:
                waiting = [other for other in self.connections if other is not self and other.waits_for_client]
                oldest = min(waiting, key=lambda other: other._waiting_since, default=self)
                self.connections.discard(oldest)  # it must not be chosen again before the event loop notices its end
                oldest.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._start_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        @property
        def waits_for_client(self) -> bool:
            return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

        def _start_timer(self) -> None:
            """Measure the time without a request, or without reading of an answer, from now on."""
            if self._timer is not None:
                self._timer.cancel()
            self._waiting_since, self._unread = self.loop.time(), self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(idle_seconds, self._abort_if_waiting)

        def _abort_if_waiting(self) -> None:
            read = self._unread - self.transport.get_write_buffer_size()
            if self._unread and read >= idle_seconds * MIN_BYTES_PER_SECOND:
                self._start_timer()  # a slow client, but it reads
            elif self.waits_for_client:
                self.transport.abort()

    return LimitedProtocol
