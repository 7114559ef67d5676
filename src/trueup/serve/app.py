"""The web application: pages, scripts and the API, all served from this machine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from trueup._core import __version__
from trueup._core.errors import error_message
from trueup.serve import monitor_routes
from trueup.serve.api import ERRORS as ERROR_ANSWERS
from trueup.serve.api import routes
from trueup.serve.guard import HEADERS, HEALTH, Guard
from trueup.serve.jobs import Busy, Jobs
from trueup.serve.models import Health, describe_fields
from trueup.serve.monitors import MonitorStore
from trueup.serve.session_store import Missing, Store
from trueup.serve.settings import Settings
from trueup.serve.temporary import sweep_temporary
from trueup.serve.uploads import HINTS, DiskBudget

STATIC = Path(__file__).parent / "static"
CHARTS = Path(__file__).parents[1] / "reports"
SWEEP = 30.0
"""Seconds between two sweeps of expired data."""

PAGES: dict[str, Callable[[], Response]] = {
    "/": lambda: FileResponse(STATIC / "index.html"),
    "/docs": lambda: FileResponse(STATIC / "docs.html"),
    "/monitor": lambda: FileResponse(STATIC / "monitor.html"),
    "/static/chart.js": lambda: FileResponse(CHARTS / "chart.js", media_type="text/javascript"),
    "/static/chart.css": lambda: FileResponse(CHARTS / "chart.css", media_type="text/css"),
}
BROKEN = "internal error; the server continues, and its log has the details"
MISSING = "there is no such data under that id; data is deleted some time after its last use"
ERRORS: dict[type[Exception], Callable[[Any], tuple[Any, ...]]] = {
    HTTPException: lambda error: (error.status_code, str(error.detail), error.headers or {}),
    RequestValidationError: lambda error: (_status_of(error), describe_fields(error.errors(), skip=1)),
    Missing: lambda error: (404, MISSING),
    Busy: lambda error: (503, str(error), {"Retry-After": "60"}),
    ValueError: lambda error: (409, error_message(error, HINTS)),
    ClientDisconnect: lambda error: (400, "the upload was interrupted"),
    # The connection is closed after an error; the header tells the client.
    Exception: lambda error: (500, BROKEN, {**HEADERS, "Connection": "close"}),
}
"""Exceptions and their answers {"error": one sentence}: status, sentence and optional headers."""
ROWS = re.compile(r"/api/monitors/([^/]+)/(update|expect|replay)")
"""Paths that add rows to a monitor, which counts the malformed requests."""
MALFORMED = (RequestValidationError, ValueError, HTTPException)
TELEMETRY = ("tracing", "metrics", "logs", "operation_spans", "auto_configure")
OFFLINE: Any = {"docs_url": None, "redoc_url": None, "telemetry": dict.fromkeys(TELEMETRY, False)}
"""FastAPI's documentation pages load scripts from elsewhere, so we have our own. Its newer versions can send telemetry
about each request to an address in the environment; this is off."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application, with its own store and queue.

    >>> create_app(Settings(rows=1000)).title
    'trueup'
    """
    settings = settings or Settings()
    store = Store(seconds=settings.seconds, max_bytes=settings.memory_bytes, clock=settings.clock)
    jobs, monitors, disk = Jobs(store, settings), MonitorStore(settings), DiskBudget(settings.disk_bytes)
    sweep_temporary()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        regular = ((SWEEP, store.sweep), (settings.checkpoint_seconds, monitors.save))
        tasks = [asyncio.create_task(_every(seconds, work)) for seconds, work in regular if seconds > 0]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            jobs.close()
            monitors.close()

    summary = "Measure and repair the calibration of neural networks."
    app = FastAPI(title="trueup", version=__version__, summary=summary, lifespan=lifespan, **OFFLINE)
    app.state.store, app.state.monitors = store, monitors
    app.add_middleware(Guard, settings=settings)
    routers = routes(store, jobs, settings, disk), monitor_routes.routes(monitors, settings, disk)
    app.state.routes = [route for router in routers for route in router.routes]
    for router in routers:
        app.include_router(router)
    app.add_api_route(HEALTH, health, responses=ERROR_ANSWERS, tags=["about"])
    app.add_api_route(HEALTH, health, methods=["HEAD"], include_in_schema=False)
    for path, page in PAGES.items():
        app.add_api_route(path, page, response_class=Response, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    for kind, answer in ERRORS.items():
        app.add_exception_handler(kind, partial(_respond, answer))
    return app


async def health() -> Health:
    """Answer while the server runs, without a token and to any host name."""
    return Health(status="ok")


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await run_in_threadpool(work)


def _status_of(error: RequestValidationError) -> int:
    """Return 409 if only rules of ours reject a request, which the schema cannot express; else 422."""
    return 409 if {each["type"] for each in error.errors()} == {"value_error"} else 422


def _respond(answer: Callable[[Any], tuple[Any, ...]], request: Request, error: Exception) -> JSONResponse:
    status, message, *headers = answer(error)
    adds_rows = ROWS.fullmatch(request.scope["path"])
    # A status of its own means a body that was cut off, too slow or too large, or no fault of the request.
    if adds_rows and isinstance(error, MALFORMED) and getattr(error, "status_code", 400) in (400, 408, 413):
        request.app.state.monitors.count_refused(adds_rows[1])
    routes = request.app.state.routes if status == 405 else ()  # a route knows only its own methods
    if matching := [route for route in routes if route.path_regex.match(request.scope["path"])]:
        same_path = [route for route in matching if route.path == matching[0].path]
        headers = [{"Allow": ", ".join(sorted({method for route in same_path for method in route.methods}))}]
    return JSONResponse({"error": message}, status, *headers)
