"""Monitors as a JSON API, and their metrics for Prometheus."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from trueup._core.errors import error_message
from trueup.integrations.prometheus import prometheus_text
from trueup.io.artifacts import load_artifact, open_artifact
from trueup.io.atomic import errors_name_file
from trueup.monitor import Monitor, MonitorSizes
from trueup.monitor.checkpoint import settings_in
from trueup.serve import api, models, upload_reader, uploads
from trueup.serve.example import DRIFT_CLASSES, drifting
from trueup.serve.jobs import Busy
from trueup.serve.monitors import MonitorSession, MonitorStore, Successor
from trueup.serve.settings import Settings
from trueup.serve.temporary import temporary_prefix

NewName = Annotated[models.MonitorName, Query(description="name of the new monitor")]
DeclaredProbs = Annotated[
    bool | None,
    Query(description="whether the file has probabilities; by default, values that look like them are rejected"),
]


def routes(monitors: MonitorStore, settings: Settings, disk: uploads.DiskBudget) -> APIRouter:
    """Make all routes of monitors."""
    router = APIRouter(responses=api.ERRORS, tags=["monitors"])
    receiver = uploads.Receiver(settings, disk)

    async def change(
        session: MonitorSession, work: Callable[[], Successor], notes: Sequence[str] = (), counter: str = "updates"
    ) -> models.MonitorInfo:
        """Update a monitor, one update after the other."""
        if session.waiting >= settings.waiting:
            raise Busy("too many updates of this monitor are waiting; please try again in a minute")
        session.waiting += 1
        try:
            async with session.update_lock:
                monitors.get(session.id)  # it may have been deleted while this waited
                successor = await run_in_threadpool(work)
                await run_in_threadpool(monitors.commit, session, successor)
        finally:
            session.waiting -= 1
        monitors.counts[counter] += 1
        return monitor_info(session, notes)

    @router.get("/api/monitors")
    def list_monitors() -> list[models.MonitorInfo]:
        """List all monitors, sorted by name."""
        return [monitor_info(session) for session in monitors.all()]

    @router.post("/api/monitors", status_code=201)
    def create(body: models.MonitorRequest) -> models.MonitorInfo:
        """Make a monitor."""
        _require_classes(body, settings)
        monitor = Monitor.from_settings(body.model_dump(exclude={"name"}, exclude_none=True))
        return monitor_info(monitors.add(body.name, monitor))

    @router.post("/api/monitors/example", status_code=201)
    async def example() -> models.MonitorInfo:
        """Make a monitor and replay a built-in stream: calibrated at first, overconfident in its second half."""
        names = {session.name for session in monitors.all()}
        name = next(name for n in range(len(names) + 1) if (name := f"example {n + 1}") not in names)
        monitor = Monitor(DRIFT_CLASSES, sizes=MonitorSizes(window=2000, half_life=2000.0))
        session = await run_in_threadpool(monitors.add, name, monitor)
        rows = await run_in_threadpool(drifting)
        return await change(session, partial(session.update, *rows))

    @router.post("/api/monitors/restore", status_code=201, openapi_extra=api.FILE_BODY)
    async def restore(request: Request, name: NewName) -> models.MonitorInfo:
        """Make a monitor that continues from a checkpoint, sent as the request body."""
        monitor = await run_in_threadpool(_restore, await request.body(), name, settings)
        return monitor_info(await run_in_threadpool(monitors.add, name, monitor))

    @router.get("/api/monitors/{id}")
    def state(id: str) -> models.MonitorState:
        """Return the status of a monitor, with the points of its charts."""
        session = monitors.get(id)
        return models.MonitorState(**monitor_info(session).model_dump(), history=session.history.columns())

    @router.delete("/api/monitors/{id}", status_code=204)
    def forget(id: str) -> None:
        """Delete a monitor and its checkpoint."""
        monitors.remove(id)

    @router.post("/api/monitors/{id}/update")
    async def receive_update(id: str, rows: models.UpdateRequest) -> models.MonitorInfo:
        """Add predictions with their labels: all of them, or none if they are invalid."""
        session = monitors.get(id)
        logits, notes = rows.read(session.monitor.n_classes)
        return await change(session, partial(session.update, logits, rows.truth, awaited=rows.awaited), notes)

    @router.post("/api/monitors/{id}/expect")
    async def receive_expected(id: str, rows: models.PredictionsRequest) -> models.MonitorInfo:
        """Add predictions whose labels have not arrived; `status.unlabelled` has the estimates for them."""
        session = monitors.get(id)
        logits, notes = rows.read(session.monitor.n_classes)
        return await change(session, partial(session.expect, logits), notes)

    @router.post("/api/monitors/{id}/replay", openapi_extra=api.FILE_BODY)
    async def replay(
        id: str,
        request: Request,
        name: api.FileName,
        probs: DeclaredProbs = None,
        logits: api.LogitsName = "logits",
        labels: api.LabelsName = "labels",
    ) -> models.MonitorInfo:
        """Add a log, sent as the request body in any format of uploads, oldest row first: all rows or none."""
        session, options = monitors.get(id), upload_reader.Options(probs, logits, labels)
        async with receiver.receive(request, name) as (path, shown_name):
            data = await run_in_threadpool(uploads.read, path, shown_name, options, settings, uploads.MONITOR_HINTS)
            if data.test is not None:
                raise ValueError(f"{shown_name}: a log must have one split, got val and test")
            return await change(session, partial(session.update, *data.val.pair), data.notes)

    @router.post("/api/monitors/{id}/acknowledge")
    async def acknowledge(id: str) -> models.MonitorInfo:
        """Acknowledge the alarm and watch anew; the alarm stays in `status.acknowledged`, and the history goes on."""
        session = monitors.get(id)
        return await change(session, session.acknowledge, counter="acknowledged_alarms")

    @router.get("/api/monitors/{id}/file", **api.SAFETENSORS)
    def checkpoint(id: str) -> Response:
        """Download a checkpoint, a .safetensors file for `trueup.load`, `trueup monitor --state` and restore."""
        session = monitors.get(id)
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", session.name).strip("-") or "monitor"
        return api.safetensors(stem, session.monitor)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def metrics() -> Response:
        """Return the metrics of all monitors in the text format of Prometheus."""
        text = prometheus_text({session.name: session.monitor for session in monitors.all()}, monitors)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def monitor_info(session: MonitorSession, notes: Sequence[str] = ()) -> models.MonitorInfo:
    """Describe a monitor and its status."""
    monitor, saved = session.monitor, session.saved
    figures: Any = {"settings": monitor.settings(), "status": monitor.status().to_dict()}
    return models.MonitorInfo(**vars(session), **figures, saved_rows=saved.rows if saved else None, notes=list(notes))


def _require_classes(request: models.MonitorRequest, settings: Settings) -> None:
    if request.n_classes > settings.n_classes:
        raise ValueError(f"n_classes must be at most {settings.n_classes:,}, got {request.n_classes:,}")


def _restore(content: bytes, name: str, settings: Settings) -> Monitor:
    """Load a monitor from a checkpoint that may be hostile: its header is checked first."""
    with TemporaryDirectory(prefix=temporary_prefix("restore")) as folder:
        path = Path(folder, "checkpoint.safetensors")
        path.write_bytes(content)
        try:
            with open_artifact(path, "monitor") as (header, _):
                stored = settings_in(header.content)
            _require_classes(models.MonitorRequest(**stored | {"name": name}), settings)
            monitor = load_artifact(path, "monitor")
            with errors_name_file(path):  # a header may contain anything: test an update
                after = copy.copy(monitor).update(np.zeros((1, monitor.n_classes)), np.zeros(1, np.int64))
                if after.rows != monitor.rows + 1 or not math.isfinite(after.evidence):
                    raise ValueError("is not a complete monitor")
        except ValidationError as error:
            raise ValueError(f"the checkpoint is invalid: {models.describe_fields(error.errors())}") from None
        except ValueError as error:
            raise ValueError(error_message(error, uploads.MONITOR_HINTS).replace(str(path), "the checkpoint")) from None
    return monitor
