"""Who may ask, how much they may send, and what a browser may do with the answer."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Plotly sets style attributes, so styles may be inline; scripts may not, and nothing comes from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Refuses requests by foreign names or from foreign pages and bodies that are too long, and seals each answer.

    A page on the internet may point a name of its own to 127.0.0.1 and read what a local server answers (DNS
    rebinding); its requests carry that name as their host. A foreign page may also send without reading; its requests
    carry its origin.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], json_bytes: int, uploads: str) -> None:
        self._app, self._hosts, self._json_bytes, self._uploads = app, hosts, json_bytes, re.compile(uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, sealed)
            return
        measured = receive if self._uploads.fullmatch(scope["path"]) else self._measured(receive)
        await self._app(scope, measured, sealed)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if "*" not in self._hosts and _name(host) not in self._hosts:
            return JSONResponse({"error": f"this server does not answer to the name {_name(host)!r}"}, 400)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return JSONResponse({"error": "requests from other pages are refused"}, 403)
        return None

    def _measured(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._json_bytes:
                raise HTTPException(413, f"the request must have at most {self._json_bytes:,} bytes")
            return message

        return counted


def _name(host: str) -> str:
    """The host without its port; an IPv6 address keeps its brackets."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
