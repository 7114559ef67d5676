"""Who may ask, how much they may send, and what a browser may do with the answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trueup.serve.settings import Settings

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
"""Bytes per second that a body must have, after some patience: a trickle must not hold its connection for ever."""
UPLOADS = re.compile(r"/api/upload|/api/monitors/[^/]+/replay")
"""Paths that take a file, which may be larger than other bodies."""

_TOKEN_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>trueup</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<body style="font-family: system-ui, sans-serif; max-width: 32rem; margin: 4rem auto; padding: 0 1rem">
<h1>This server asks for its token</h1>
<p>It printed it when it started. Open the address that it printed, or write the token here.</p>
<form method="get"><label>Token <input type="password" name="token" autocomplete="off" autofocus></label>
<button>Open</button></form></body></html>
"""


class Guard:
    """Rejects foreign host names, requests from foreign pages and bodies that are too long; adds headers to answers.

    A page on the internet may point its host name to 127.0.0.1 and read what a local server answers (DNS rebinding);
    its requests carry that name as their host. A foreign page may also send without reading; its requests carry its
    origin. Starlette's TrustedHostMiddleware checks the host too, but its answer does not name it.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
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
        rejection = self._check_names(request) or self._check_token(request)
        if rejection is not None:
            await rejection(scope, receive, send_with_headers)
            return
        await self._app(scope, self._limit_body(receive, scope["path"]), send_with_headers)

    def _check_names(self, request: Request) -> JSONResponse | None:
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        name = re.sub(r"(?<=.):\d+$", "", host)  # an IPv6 address keeps its brackets
        if not {"*", name} & set(self._settings.hosts):
            return JSONResponse({"error": f"this server does not answer to the name {name!r}"}, 400)
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return JSONResponse({"error": "requests from other pages are refused"}, 403)
        return None

    def _check_token(self, request: Request) -> Response | None:
        """None if the request has the token; a link that has it is answered with a cookie and the page without it."""
        token = self._settings.token
        if token is None or _same(request.cookies.get(cookie_name(token), ""), token):
            return None
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(bearer.strip(), token):
            return None
        if request.method == "GET" and _same(request.query_params.get("token", ""), token):
            rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
            answer = RedirectResponse(f"/{request.scope['path'].lstrip('/')}{'?' if rest else ''}{rest}", 303)
            answer.set_cookie(cookie_name(token), token, httponly=True, samesite="strict", path="/")
            return answer
        ask = {"WWW-Authenticate": 'Bearer realm="trueup"'}
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(_TOKEN_PAGE, 401, headers=ask)
        return JSONResponse({"error": "this server asks for its token, which it printed when it started"}, 401, ask)

    def _limit_body(self, receive: Receive, path: str) -> Receive:
        settings, now = self._settings, asyncio.get_running_loop().time
        slow = f"came too slowly: {SLOWEST:,} bytes a second are the least"
        if UPLOADS.fullmatch(path):
            name, most, large = "upload", settings.upload_bytes, too_large(settings)
            still = f"stood still for {settings.patience:g} seconds"
        else:
            name, most, still = "request", settings.json_bytes, slow
            large = f"the request must have at most {most:,} bytes"
        received, complete, began = 0, False, now()

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # what comes now is the end of the connection, which may take its time
                return await receive()
            try:
                async with asyncio.timeout(settings.patience):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the {name} {still}") from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, large)
            if not complete and now() - began > settings.patience + received / SLOWEST:
                raise HTTPException(408, f"the {name} {slow}")
            return message

        return counted


def too_large(settings: Settings) -> str:
    """The answer to a file that has too many bytes."""
    return f"the file is too large: at most {settings.upload_bytes / 2**20:,.0f} MB are taken here"


def cookie_name(token: str) -> str:
    """A name that depends on the token: cookies are shared by all ports of a machine."""
    return f"trueup_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _same(shown: str, token: str) -> bool:
    return secrets.compare_digest(shown.encode(), token.encode())
