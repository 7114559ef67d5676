"""Starts the server."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trueup.serve.connections import BACKLOG, limited_protocol, most_connections
from trueup.serve.settings import LOCAL, Settings, is_loopback

EVERYWHERE = ("0.0.0.0", "::")
"""Every address of this machine."""


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
    shown = socket.gethostname() if host in EVERYWHERE else _in_url(host)
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    address += "" if settings.token is None else f"?token={settings.token}"
    if on_listening is not None:
        on_listening(address)
    if open_browser:
        _open_when_ready(server, address)
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
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level=log_level,
            server_header=False,
            access_log=False,  # a line of it would hold the token
            timeout_keep_alive=30,
            backlog=BACKLOG,
            http=limited_protocol(most_connections(settings.connections), settings.idle_seconds),
        )
    )


def _names(host: str) -> tuple[str, ...]:
    """What a browser calls a server that listens there."""
    if host in EVERYWHERE:
        return (*LOCAL, socket.gethostname())
    return (*LOCAL, _in_url(host))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _open_when_ready(server: Any, address: str) -> None:
    import threading
    import time
    import webbrowser

    def wait() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.05)
        if server.started:
            webbrowser.open(address)

    threading.Thread(target=wait, daemon=True).start()
