"""Access control: host names, origins, tokens, sizes of requests, and security headers."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from pathlib import Path
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trueup.serve.settings import MIN_BYTES_PER_SECOND, Settings

HEADERS = {
    # Charts have style attributes, so styles may be inline; scripts may not, and nothing comes from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

UPLOADS = re.compile(r"/api/upload|/api/monitors/[^/]+/replay")
"""Paths that receive a file, which may be larger than other bodies."""

HEALTH = "/healthz"
"""The only path that answers without a token and to any host name; its answer says only that the server runs."""

_TOKEN_PAGE = Path(__file__).parent / "static" / "token.html"


class Guard:
    """Middleware that rejects foreign host names and origins, missing tokens and long bodies, and adds headers.

    A website may point its host name to 127.0.0.1 and read the answers of a local server (DNS rebinding). Its requests
    carry that name as `Host`. A foreign page may also send requests without reading answers. They carry its `Origin`.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope)
        # A health check knows no token, and comes with the address of a container as its host name.
        is_health_check = scope["path"] == HEALTH and request.method in ("GET", "HEAD")
        rejection = None if is_health_check else self._check_names(request) or self._check_token(request)
        if rejection is not None:
            # Answers that wait for their client cannot pile up, since there is one per connection.
            rejection.headers["Connection"] = "close"
            await rejection(scope, receive, send_with_headers)
            return
        await self._app(scope, self._limit_body(receive, request), send_with_headers)

    def _check_names(self, request: Request) -> JSONResponse | None:
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        name = re.sub(r"(?<=.):\d+$", "", host)  # an IPv6 address keeps its brackets
        if not {"*", name} & set(self._settings.hosts):
            return JSONResponse({"error": "this server does not answer to that host name; --name adds one"}, 400)
        if origin is not None and origin.lower().partition("://")[2] != host:
            return JSONResponse({"error": "requests from pages of other origins are refused"}, 403)
        return None

    def _check_token(self, request: Request) -> Response | None:
        """Return None if the request has the token; a link with the token is redirected, with a cookie."""
        token = self._settings.token
        if token is None or _same(request.cookies.get(cookie_name(token), ""), token):
            return None
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(bearer.strip(), token):
            return None
        if request.method == "GET" and _same(request.query_params.get("token", ""), token):
            query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
            answer = RedirectResponse(f"/{request.scope['path'].lstrip('/')}{'?' if query else ''}{query}", 303)
            answer.set_cookie(cookie_name(token), token, httponly=True, samesite="strict", path="/")
            return answer
        challenge = {"WWW-Authenticate": 'Bearer realm="trueup"'}
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(_TOKEN_PAGE.read_bytes(), 401, headers=challenge)
        return JSONResponse(
            {"error": "this server requires its token, which it printed when it started"}, 401, challenge
        )

    def _limit_body(self, receive: Receive, request: Request) -> Receive:
        settings, now = self._settings, asyncio.get_running_loop().time
        limit = settings.upload_bytes if UPLOADS.fullmatch(request.scope["path"]) else settings.json_bytes
        declared = int(request.headers.get("content-length") or 0)
        received, complete, start = 0, False, now()

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # the next message is the end of the connection, which may come late
                return await receive()
            try:
                async with asyncio.timeout_at(min(now() + settings.patience, start + settings.body_seconds)):
                    message = await receive()
            except TimeoutError:
                late = now() >= start + settings.body_seconds
                reason = f"took longer than {settings.body_seconds:g}" if late else f"stalled for {settings.patience:g}"
                raise HTTPException(408, f"the body {reason} seconds") from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if max(received, declared) > limit:
                raise HTTPException(413, f"the body is too large: at most {limit:,} bytes are accepted")
            if not complete and now() - start > settings.patience + received / MIN_BYTES_PER_SECOND:
                least = f"at least {MIN_BYTES_PER_SECOND:,} bytes per second are required"
                raise HTTPException(408, f"the body is too slow: {least}")
            return message

        return counted


def cookie_name(token: str) -> str:
    """Derive the cookie's name from the token: all ports of a machine share their cookies."""
    return f"trueup_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _same(shown: str, token: str) -> bool:
    return secrets.compare_digest(shown.encode(), token.encode())
