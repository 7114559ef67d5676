"""The web application: pages, scripts and the API, nothing of which comes from elsewhere."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from trueup.core import __version__
from trueup.core.errors import LooksLikeProbabilities, message_of
from trueup.report.style import DARK
from trueup.serve import monitor_routes
from trueup.serve.api import routes
from trueup.serve.guard import HEADERS, Guard
from trueup.serve.jobs import Busy, Jobs
from trueup.serve.monitors import MonitorStore
from trueup.serve.session_store import Missing, Store
from trueup.serve.settings import Settings
from trueup.serve.temporary import sweep_temporary
from trueup.serve.uploads import HINTS, DiskBudget

STATIC = Path(str(files("trueup.serve"))) / "static"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
SWEEP = 30.0
"""Seconds between two looks for what has expired."""
UPLOADS = r"/api/upload|/api/monitors/[^/]+/replay"
"""Paths that take a file, which they measure themselves."""

SILENT: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Make the application, with a store and a queue of its own.

    >>> create_app(Settings(rows=1000)).title
    'trueup'
    """
    settings = settings or Settings()
    store = Store(seconds=settings.seconds, most_bytes=settings.memory_bytes, clock=settings.clock)
    jobs = Jobs(store, settings)
    sweep_temporary()
    monitors = MonitorStore(settings)
    disk = DiskBudget(settings.disk_bytes)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_every(SWEEP, store.sweep))]
        if settings.checkpoint_seconds > 0:
            tasks.append(asyncio.create_task(_every(settings.checkpoint_seconds, monitors.save)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            jobs.close()
            monitors.close()

    # FastAPI's own documentation pages load scripts from elsewhere; ours is in static. Newer versions can report each
    # request to wherever the environment says; nothing leaves from here.
    # The pages doubt whether logits are probabilities in their own words.
    warnings.filterwarnings("ignore", category=LooksLikeProbabilities)
    app = FastAPI(
        title="trueup",
        version=__version__,
        summary="Measure and repair the calibration of neural networks.",
        docs_url=None,
        redoc_url=None,
        telemetry=SILENT,
        lifespan=lifespan,
    )
    app.state.store, app.state.monitors = store, monitors
    app.add_middleware(
        Guard,
        hosts=settings.hosts,
        json_bytes=settings.json_bytes,
        uploads=UPLOADS,
        patience=settings.patience,
        token=settings.token,
    )
    app.include_router(routes(store, jobs, settings, disk))
    app.include_router(monitor_routes.routes(monitors, settings, disk))
    _pages(app)
    _explain_errors(app)
    return app


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await run_in_threadpool(work)


def _pages(app: FastAPI) -> None:
    def index() -> Response:
        return FileResponse(STATIC / "index.html")

    def docs() -> Response:
        return FileResponse(STATIC / "docs.html")

    def monitor() -> Response:
        return FileResponse(STATIC / "monitor.html")

    def script() -> Response:
        return FileResponse(PLOTLY, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def dark() -> Response:
        return JSONResponse(DARK)

    pages = {"/": index, "/docs": docs, "/monitor": monitor, "/static/plotly.js": script, "/static/dark.json": dark}
    for path, page in pages.items():
        app.add_api_route(path, page, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))


def _explain_errors(app: FastAPI) -> None:
    """Whatever goes wrong is answered with {"error": one sentence}."""

    def answer(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": message}, status, headers)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        details = error.errors()
        reasons = (f"{'.'.join(map(str, detail['loc'][1:])) or 'the request'}: {detail['msg']}" for detail in details)
        return answer(422, "; ".join(reasons))

    @app.exception_handler(Missing)
    def missing(request: Request, error: Missing) -> JSONResponse:
        return answer(
            404, "nothing of that kind is kept here under that id, or no longer: data is forgotten after a while"
        )

    @app.exception_handler(Busy)
    def busy(request: Request, error: Busy) -> JSONResponse:
        return answer(503, str(error), {"Retry-After": "60"})

    @app.exception_handler(ValueError)
    def wrong(request: Request, error: ValueError) -> JSONResponse:
        return answer(422, message_of(error, HINTS))

    @app.exception_handler(ClientDisconnect)
    def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return answer(400, "the upload was interrupted")

    @app.exception_handler(Exception)
    def broken(request: Request, error: Exception) -> JSONResponse:
        # The connection is not used again after an error, and a client should know.
        headers = {**HEADERS, "Connection": "close"}
        return answer(500, "something went wrong here; the server goes on, and its log says what it was", headers)
