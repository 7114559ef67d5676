"""Monitors as a JSON API, and their figures for Prometheus."""

from __future__ import annotations

import asyncio
import copy
import math
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from safetensors import safe_open
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from trueup.integrations.prometheus import prometheus_text
from trueup.io.atomic import errors_name_file
from trueup.io.headers import header_content
from trueup.io.sanity import looks_like_probabilities
from trueup.monitor import Monitor, load_monitor, save_monitor
from trueup.monitor.checkpoint import settings_in
from trueup.serve import models, uploads
from trueup.serve.example import DRIFT_CLASSES, drifting
from trueup.serve.jobs import Busy
from trueup.serve.monitors import Watch, Watches
from trueup.serve.settings import Settings

REPLAYS = 2
"""Logs read and replayed at a time: each takes memory."""

ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": models.Error, "description": "there is no such monitor"},
    422: {"model": models.Error, "description": "what was wrong, in one sentence"},
}
TAKEN: dict[int | str, dict[str, Any]] = {
    409: {"model": models.Error, "description": "the name is taken, or there are too many monitors"},
}


def routes(watches: Watches, settings: Settings) -> APIRouter:
    """All verbs of monitors, over those the server keeps."""
    router = APIRouter(responses=ERRORS, tags=["monitors"])
    arriving, replaying = asyncio.Semaphore(settings.uploads), asyncio.Semaphore(REPLAYS)

    async def update(watch: Watch, logits: Any, labels: Any, notes: tuple[str, ...] = ()) -> models.MonitorInfo:
        if watch.waiting >= settings.waiting:
            raise Busy("too many updates of this monitor are waiting; please try again in a minute")
        watch.waiting += 1
        try:
            async with watch.turn:
                watches.get(watch.id)  # it may have been deleted meanwhile
                await run_in_threadpool(watch.update, logits, labels)
                if settings.checkpoint_seconds <= 0:
                    await run_in_threadpool(watches.write, watch)
        except ValueError:
            watches.counts["refused_updates"] += 1
            raise
        finally:
            watch.waiting -= 1
        watches.counts["updates"] += 1
        return about(watch, notes)

    @router.get("/api/monitors")
    def listed() -> list[models.MonitorInfo]:
        """All monitors of this server, by name."""
        return [about(watch) for watch in watches.listed()]

    @router.post("/api/monitors", status_code=201, responses=TAKEN)
    def make(wanted: models.MonitorRequest) -> models.MonitorInfo:
        """Make a monitor, which has seen nothing yet."""
        _judge(wanted, settings)
        return about(watches.add(wanted.name, Monitor(**wanted.settings())))

    @router.post("/api/monitors/example", status_code=201, responses=TAKEN)
    async def example() -> models.MonitorInfo:
        """Make a monitor and replay a built-in stream: calibrated at first, too sure from halfway on."""
        taken = {watch.name for watch in watches.listed()}
        name = next(name for n in range(len(taken) + 1) if (name := f"example {n + 1}") not in taken)
        watch = await run_in_threadpool(watches.add, name, Monitor(DRIFT_CLASSES, window=2000, half_life=2000.0))
        return await update(watch, *await run_in_threadpool(drifting))

    @router.post("/api/monitors/restore", status_code=201, responses=TAKEN)
    async def restore(
        request: Request,
        name: Annotated[models.MonitorName, Query(description="what the monitor is called from now on")],
    ) -> models.MonitorInfo:
        """Take in a checkpoint, sent as the bare body, as a new monitor that goes on from there."""
        content = await request.body()

        def restored() -> Watch:
            return watches.add(name, _loaded(content, name, settings))

        return about(await run_in_threadpool(restored))

    @router.get("/api/monitors/{id}")
    def state(id: str) -> models.MonitorState:
        """How things stand with a monitor, and the points of its charts."""
        watch = watches.get(id)
        return models.MonitorState(**about(watch).model_dump(), history=watch.history.columns())

    @router.delete("/api/monitors/{id}", status_code=204)
    def forget(id: str) -> None:
        """Forget a monitor and its checkpoint."""
        watches.remove(id)

    @router.post("/api/monitors/{id}/update", responses={503: {"model": models.Error}})
    async def sent(id: str, rows: models.UpdateRequest) -> models.MonitorInfo:
        """Take in predictions with their labels; if anything is wrong with them, none is taken in."""
        return await update(watches.get(id), rows.logits, rows.labels)

    @router.post("/api/monitors/{id}/replay", responses={code: {"model": models.Error} for code in (413, 503)})
    async def replay(
        id: str,
        request: Request,
        name: Annotated[str, Query(description="the file's name; its suffix tells the format", max_length=500)],
        probs: Annotated[
            bool | None, Query(description="whether it has probabilities; if not told, what looks like them is refused")
        ] = None,
        logits: Annotated[str, Query(description="name of the array, or of columns with commas between")] = "logits",
        labels: Annotated[str, Query(description="name of the labels")] = "labels",
    ) -> models.MonitorInfo:
        """Take in a log, sent as the bare body in any format of uploads, oldest row first: all of it or none."""
        watch, shown = watches.get(id), uploads.clean(name)
        suffix, options = uploads.suffix(shown), uploads.Options(bool(probs), logits, labels)
        if int(request.headers.get("content-length") or 0) > settings.upload_bytes:
            raise HTTPException(413, uploads.too_long(settings))
        if arriving.locked():
            raise HTTPException(503, "too many files are arriving; please try again in a minute")
        async with arriving:
            with TemporaryDirectory(prefix="trueup-replay-") as folder:
                path = Path(folder, f"upload{suffix}")
                await uploads.receive(aiter(request.stream()), path, settings)
                async with replaying:
                    data = await run_in_threadpool(uploads.read, path, shown, options, settings, uploads.WORDS_OF_LOGS)
                    if data.test is not None:
                        raise ValueError(f"{shown}: a log has one list of rows, got val and test")
                    if probs is None and (told := looks_like_probabilities(data.val.logits)):
                        # Rows cannot be taken out of a monitor again.
                        raise ValueError(
                            f"{shown}: {told}; choose which they are under “What is in the file?”, "
                            "or say probs=true or probs=false"
                        )
                    return await update(watch, *data.val, data.notes)

    @router.get(
        "/api/monitors/{id}/file",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    def checkpoint(id: str) -> Response:
        """A monitor's checkpoint as a .safetensors file, for `load_monitor`, `trueup monitor --state` and restore."""
        watch = watches.get(id)
        with TemporaryDirectory(prefix="trueup-monitor-") as folder:
            path = Path(folder, "monitor.safetensors")
            save_monitor(watch.monitor, path)
            content = path.read_bytes()
        bare = re.sub(r"[^A-Za-z0-9_-]+", "-", watch.name).strip("-") or "monitor"
        headers = {"Content-Disposition": f'attachment; filename="{bare}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def metrics() -> Response:
        """The figures of all monitors in the text format of Prometheus."""
        text = prometheus_text({watch.name: watch.monitor for watch in watches.listed()}, watches)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def about(watch: Watch, notes: Sequence[str] = ()) -> models.MonitorInfo:
    """How things stand with a monitor."""
    monitor, saved, replaying = watch.monitor, watch.saved, watch.replaying
    return models.MonitorInfo(
        id=watch.id,
        name=watch.name,
        settings=monitor.settings(),
        status=monitor.status().to_dict(),
        updated=watch.updated,
        replaying=models.Progress(done=replaying[0], total=replaying[1]) if replaying else None,
        saved_rows=saved.rows if saved else None,
        problem=watch.problem,
        notes=list(notes),
    )


def _judge(wanted: models.MonitorRequest, settings: Settings) -> None:
    if wanted.classes > settings.classes:
        raise ValueError(f"classes must be at most {settings.classes:,} here, got {wanted.classes:,}")


def _loaded(content: bytes, name: str, settings: Settings) -> Monitor:
    """A monitor from a checkpoint that nobody has vouched for: its header is judged before anything is made of it."""
    with TemporaryDirectory(prefix="trueup-restore-") as folder:
        path = Path(folder, "checkpoint.safetensors")
        path.write_bytes(content)
        try:
            with errors_name_file(path), safe_open(path, "np") as file:
                found = settings_in(header_content(file, "monitor"))
            _judge(models.MonitorRequest(**found | {"name": name}), settings)
            monitor = load_monitor(path)
            with errors_name_file(path):
                _try(monitor)
        except ValidationError as error:
            told = (f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors())
            raise ValueError(f"the checkpoint is refused: {'; '.join(told)}") from None
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), "the checkpoint")) from None
    return monitor


def _try(monitor: Monitor) -> None:
    """Whether a monitor can go on: a header may hold anything."""
    after = copy.copy(monitor).update(np.zeros((1, monitor.classes)), np.zeros(1, np.int64))
    if after.rows != monitor.rows + 1 or not math.isfinite(after.evidence):
        raise ValueError("is no whole monitor")
