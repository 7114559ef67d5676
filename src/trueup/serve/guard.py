"""Who may ask, how much they may send, and what a browser may do with the answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
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

SLOWEST = 1024
"""Bytes a second that a body must make, after some patience: a trickle must not hold its place for ever."""

_TOKEN_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>trueup</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<body style="font-family: system-ui, sans-serif; max-width: 32rem; margin: 4rem auto; padding: 0 1rem">
<h1>This server asks for its token</h1>
<p>It printed it when it started. Open the address that it printed, or write the token here.</p>
<form method="get"><label>Token <input type="password" name="token" autocomplete="off" autofocus></label>
<button>Open</button></form></body></html>
"""


class Guard:
    """Refuses requests by foreign names or from foreign pages and bodies that are too long, and seals each answer.

    A page on the internet may point a name of its own to 127.0.0.1 and read what a local server answers (DNS
    rebinding); its requests carry that name as their host. A foreign page may also send without reading; its requests
    carry its origin.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        json_bytes: int,
        uploads: str,
        patience: float,
        token: str | None = None,
    ) -> None:
        self._app, self._hosts, self._json_bytes, self._uploads = app, hosts, json_bytes, re.compile(uploads)
        self._patience, self._token = patience, token

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

        headers = Headers(scope=scope)
        refusal = self._refusal(headers) or self._ask_for_token(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, sealed)
            return
        limited = receive if self._uploads.fullmatch(scope["path"]) else self._limit_body(receive)
        await self._app(scope, limited, sealed)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if "*" not in self._hosts and _name(host) not in self._hosts:
            return JSONResponse({"error": f"this server does not answer to the name {_name(host)!r}"}, 400)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return JSONResponse({"error": "requests from other pages are refused"}, 403)
        return None

    def _ask_for_token(self, scope: Scope, headers: Headers) -> Response | None:
        """None where the token was shown; the answer to a link that has it is a cookie and the page without it."""
        if self._token is None:
            return None
        if _same(_cookie(headers, cookie_name(self._token)), self._token):
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(bearer.strip(), self._token):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["method"] == "GET" and _same(dict(query).get("token", ""), self._token):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(f"/{scope['path'].lstrip('/')}{'?' if rest else ''}{rest}", 303)
            answer.set_cookie(cookie_name(self._token), self._token, httponly=True, samesite="strict", path="/")
            return answer
        ask = {"WWW-Authenticate": 'Bearer realm="trueup"'}
        if "text/html" in headers.get("accept", ""):
            return HTMLResponse(_TOKEN_PAGE, 401, headers=ask)
        return JSONResponse({"error": "this server asks for its token, which it printed when it started"}, 401, ask)

    def _limit_body(self, receive: Receive) -> Receive:
        received, complete = 0, False
        began = asyncio.get_running_loop().time()

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # what comes now is the end of the connection, which may take its time
                return await receive()
            left = began + self._patience + received / SLOWEST - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(0.0, min(left, self._patience))):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the request came too slowly: {SLOWEST:,} bytes a second are the least"
                ) from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._json_bytes:
                raise HTTPException(413, f"the request must have at most {self._json_bytes:,} bytes")
            return message

        return counted


def cookie_name(token: str) -> str:
    """A name of its own for each token: cookies are shared by all ports of a machine."""
    return f"trueup_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _cookie(headers: Headers, name: str) -> str:
    try:
        return SimpleCookie(headers.get("cookie", ""))[name].value
    except (CookieError, KeyError):
        return ""


def _same(shown: str, token: str) -> bool:
    return secrets.compare_digest(shown.encode(), token.encode())


def _name(host: str) -> str:
    """The host without its port; an IPv6 address keeps its brackets."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
