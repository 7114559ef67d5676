"""The verbs of the page as a JSON API."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from trueup.decisions.label_shift import INDEPENDENT
from trueup.io.artifacts import save_calibrator
from trueup.io.formats import FORMATS
from trueup.io.predictions import Predictions, PredictionTable
from trueup.metrics.table import DEFAULT as TABLE
from trueup.metrics.table import evaluate as evaluate_table
from trueup.registry import METHODS, METRICS
from trueup.report.audit import DEFAULT, RAW, Audit, method_title
from trueup.serve import diagrams, models, uploads
from trueup.serve.example import example
from trueup.serve.jobs import AuditJob, Jobs, LabelShiftJob
from trueup.serve.session_store import Store
from trueup.serve.settings import Settings
from trueup.serve.temporary import temporary_prefix
from trueup.serve.uploads import UnlabelledData, Upload, UploadedData

READERS = 2
"""Files read at a time: each may take as much memory as the settings allow."""
ANSWERS = 4
"""Requests answered at a time that go over all rows, for the same reason."""

Bins = Annotated[int, Query(ge=1, le=models.MOST_BINS, description="number of equal-width bins")]
Temperature = Annotated[float, Query(ge=models.COLDEST, le=models.HOTTEST, description="divides the logits")]
Method = Annotated[str | None, Query(description="a fitted method, or raw; the chosen one by default")]

ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": models.Error, "description": "nothing is kept under that id, or no longer"},
    422: {"model": models.Error, "description": "what was wrong, in one sentence"},
}


def routes(store: Store, jobs: Jobs, settings: Settings, disk: uploads.DiskBudget) -> APIRouter:
    """All verbs, over one store and one queue."""
    api = APIRouter(prefix="/api", responses=ERRORS)
    arriving, reading = asyncio.Semaphore(settings.uploads), asyncio.Semaphore(READERS)
    answering = Semaphore(ANSWERS)

    def keep(data: Upload) -> models.DataInfo:
        return _data_info(store.put(data, data.size), data)

    def upload_of(id: str) -> Upload:
        return store.get(id, Upload)  # type: ignore[type-abstract]  # it is looked for, not made

    @api.get("/limits", tags=["about"])
    def limits() -> models.LimitsInfo:
        """What the server takes."""
        numbers = {name: getattr(settings, name) for name in ("upload_bytes", "rows", "classes", "numbers", "seconds")}
        return models.LimitsInfo(**numbers, suffixes=list(FORMATS))

    @api.get("/methods", tags=["about"])
    def methods() -> list[models.Listed]:
        """The methods that can be fitted."""
        return [_description(name, METHODS[name], name in DEFAULT) for name in METHODS]

    @api.get("/metrics", tags=["about"])
    def metrics() -> list[models.Listed]:
        """The metrics that can be asked for."""
        return [_description(name, METRICS[name], name in TABLE) for name in METRICS]

    @api.post("/upload", status_code=201, tags=["data"], responses={413: {"model": models.Error}})
    async def upload(
        request: Request,
        name: Annotated[str, Query(description="the file's name; its suffix tells the format", max_length=500)],
        probs: Annotated[bool, Query(description="the file has probabilities, not logits")] = False,
        logits: Annotated[str, Query(description="name of the array, or of columns with commas between")] = "logits",
        labels: Annotated[str, Query(description="name of the labels")] = "labels",
        group: Annotated[
            list[str] | None, Query(description="a column whose groups are judged; may be repeated")
        ] = None,
        clusters: Annotated[str | None, Query(description="the column that says which rows are correlated")] = None,
        labelled: Annotated[bool, Query(description="false: the logits alone are read, of a new population")] = True,
    ) -> models.DataInfo:
        """Leave a file, sent as the bare body; a `.npy` pair is sent as one array after the other."""
        shown_name = uploads.clean_name(name)
        suffix = uploads.require_suffix(shown_name)
        if int(request.headers.get("content-length") or 0) > settings.upload_bytes:
            raise HTTPException(413, uploads.too_large(settings))
        if arriving.locked():
            raise HTTPException(503, "too many files are arriving; please try again in a minute")
        columns = tuple(dict.fromkeys(name for name in group or () if name))
        if len(columns) > models.MOST_COLUMNS:
            raise ValueError(f"at most {models.MOST_COLUMNS} columns of groups are taken here, got {len(columns)}")
        options = uploads.Options(probs, logits, labels, columns, clusters or None)
        read = uploads.read if labelled else uploads.read_unlabelled
        async with arriving:
            with disk.share() as take, TemporaryDirectory(prefix=temporary_prefix("upload")) as folder:
                path = Path(folder, f"upload{suffix}")
                await uploads.receive(aiter(request.stream()), path, settings, take)
                async with reading:
                    data = await run_in_threadpool(read, path, shown_name, options, settings)
        return keep(data)

    @api.post("/example", status_code=201, tags=["data"])
    def built_in_example() -> models.DataInfo:
        """Take the built-in example: an overconfident network of ten classes."""
        val, test = (PredictionTable(*pair) for pair in example())
        return keep(UploadedData("the built-in example", val, test))

    @api.get("/data/{id}", tags=["data"])
    def about(id: str) -> models.DataInfo:
        """What a file holds."""
        return _data_info(id, upload_of(id))

    @api.delete("/data/{id}", status_code=204, tags=["data"])
    def forget(id: str) -> None:
        """Forget a file now."""
        upload_of(id)
        store.remove(id)

    @api.get("/data/{id}/evaluate", tags=["data"])
    def evaluate(
        id: str,
        metric: Annotated[list[str] | None, Query(description="names from /api/metrics")] = None,
        bins: Bins = 15,
    ) -> dict[str, Any]:
        """Score the network as it is, with intervals and a test of calibration."""
        table = store.get(id, UploadedData).test_or_val
        with answering:
            result = evaluate_table(*table, metrics=metric or TABLE, bins=bins, **table.options())
        return {"verdict": result.verdict(), **result.to_dict()}

    @api.get("/data/{id}/curve", tags=["data"])
    def data_curve(id: str, temperature: Temperature = 1.0, bins: Bins = 15) -> models.Curve:
        """The reliability diagram of the network, its logits divided by a temperature."""
        table = store.get(id, UploadedData).test_or_val
        with answering:
            clusters = table.options().get("clusters")
            return diagrams.curve(table.pair, temperature=temperature, bins=bins, clusters=clusters)

    @api.post("/data/{id}/fit", status_code=202, tags=["fit"], responses={503: {"model": models.Error}})
    def fit(id: str, wanted: models.FitRequest) -> models.JobInfo:
        """Begin to fit methods; ask /api/jobs/{id} how far it has come."""
        unknown = [name for name in wanted.methods or () if name not in METHODS]
        if unknown:
            raise ValueError(f"no method is called {unknown[0]!r}; there are: {', '.join(METHODS)}")
        data = store.get(id, UploadedData)
        test = store.get(wanted.test, UploadedData) if wanted.test else None
        if test is not None and test.classes != data.classes:
            raise ValueError(f"{test.name} must have the {data.classes} classes of {data.name}, got {test.classes}")
        job = AuditJob.of(data, test, wanted.methods, bins=wanted.bins, folds=wanted.folds, seed=wanted.seed)
        return _job_info(jobs.start(job), job)

    @api.get("/jobs/{id}", tags=["fit"])
    def status(id: str) -> models.JobInfo:
        """How far a fit has come, and its result."""
        return _job_info(id, store.get(id, AuditJob))

    @api.delete("/jobs/{id}", status_code=204, tags=["fit"])
    def stop(id: str) -> None:
        """Stop a fit after the method it is at, and forget it."""
        store.get(id, AuditJob).cancelled = True
        store.remove(id)

    @api.get("/jobs/{id}/curve", tags=["fit"])
    def job_curve(id: str, method: Method = None, temperature: Temperature = 1.0, bins: Bins = 15) -> models.Curve:
        """The reliability diagram of a fitted method on the test rows."""
        result = _result(store.get(id, AuditJob))
        name = method or result.chosen
        pair = _predictions_of(result.predictions, name)
        with answering:
            return diagrams.curve(pair, method=name, temperature=temperature, bins=bins, clusters=result.clusters)

    @api.get("/jobs/{id}/compare", tags=["fit"])
    def compare(id: str, first: str = RAW, second: Method = None, bins: Bins = 15) -> models.Difference:
        """Two methods side by side: their diagrams, metrics and paired changes."""
        result = _result(store.get(id, AuditJob))
        names = (first, second or result.chosen)
        if names[0] == names[1]:
            raise ValueError(f"two different methods are wanted, got {first!r} twice")
        pairs = {name: _predictions_of(result.predictions, name) for name in names}
        with answering:
            return diagrams.side_by_side(pairs, bins=bins, clusters=result.clusters)

    @api.get("/jobs/{id}/groups", tags=["fit"])
    def groups(id: str) -> models.GroupsInfo:
        """Where it is wrong: the groups that were asked for, before calibration and after."""
        result = _result(store.get(id, AuditJob))
        with answering:
            return diagrams.groups(result)

    @api.get("/jobs/{id}/promise", tags=["decide"])
    def promise(
        id: str,
        method: Method = None,
        certainty: Annotated[float, Query(gt=0, lt=1, description="certainty of each promise")] = 0.95,
    ) -> models.Promises:
        """From which confidence on to answer, for each allowed error rate."""
        result = _result(store.get(id, AuditJob))
        name = method or result.chosen
        pair = _predictions_of(result.predictions, name)
        with answering:
            return diagrams.promises(
                pair, method=name, certainty=certainty, cross_fitted=result.cross_fitted, clusters=result.clusters
            )

    @api.get("/jobs/{id}/sets", tags=["decide"])
    def prediction_sets(
        id: str,
        method: Method = None,
        score: Annotated[Literal["lac", "aps", "raps"], Query(description="how strange a class is for a row")] = "aps",
        alpha: Annotated[float, Query(gt=0, lt=1, description="how often a set may miss the truth")] = 0.1,
    ) -> models.SetsInfo:
        """Sets of classes that hold the truth with a stated probability."""
        result = _result(store.get(id, AuditJob))
        name = method or result.chosen
        pair = _predictions_of(result.predictions, name)
        with answering:
            return diagrams.sets(pair, method=name, score=score, alpha=alpha, clusters=result.clusters)

    @api.post("/data/{id}/label-shift", status_code=202, tags=["decide"], responses={503: {"model": models.Error}})
    def label_shift(id: str, wanted: models.LabelShiftRequest) -> models.LabelShiftInfo:
        """Begin to estimate the class frequencies of rows without labels; ask /api/label-shifts/{id} for them."""
        data, new = store.get(id, UploadedData), store.get(wanted.new, UnlabelledData)
        if new.classes != data.classes:
            raise ValueError(f"{new.name} must have the {data.classes} classes of {data.name}, got {new.classes}")
        job = LabelShiftJob(data, new, wanted.seed)
        return _label_shift_info(jobs.start(job), job)

    @api.get("/label-shifts/{id}", tags=["decide"])
    def label_shift_status(id: str) -> models.LabelShiftInfo:
        """The class frequencies of rows without labels, and what the network is expected to get right among them."""
        return _label_shift_info(id, store.get(id, LabelShiftJob))

    @api.delete("/label-shifts/{id}", status_code=204, tags=["decide"])
    def stop_label_shift(id: str) -> None:
        """Forget the estimates, or do not finish them."""
        store.get(id, LabelShiftJob).cancelled = True
        store.remove(id)

    @api.get(
        "/label-shifts/{id}/calibrator",
        tags=["take home"],
        response_class=Response,
        responses=_file_response("application/octet-stream"),
    )
    def label_shift_calibrator(id: str) -> Response:
        """A calibrator for the new class frequencies as a .safetensors file, for `trueup.load_calibrator`."""
        job = store.get(id, LabelShiftJob)
        if job.prior is None or job.state != "done":
            raise HTTPException(409, f"the class frequencies are not known; the estimate is {job.state}")
        return _safetensors(job.prior.calibrator, job.val.classes, {"made for": job.new.name}, "label-shift")

    @api.post("/jobs/{id}/apply", tags=["fit"])
    def apply(id: str, wanted: models.ApplyRequest) -> models.Applied:
        """Calibrate logits."""
        job = store.get(id, AuditJob)
        result = _result(job)
        name = wanted.method or result.chosen
        after = np.asarray(_calibrator(result, name)(_rows(wanted.logits, job.val.classes)))
        logits = [[None if number == -math.inf else number for number in row] for row in after.tolist()]
        return models.Applied(method=name, logits=logits, probs=diagrams.probabilities(after))

    @api.get("/jobs/{id}/report", tags=["take home"], response_class=Response, responses=_file_response("text/html"))
    def report(id: str) -> Response:
        """The whole report as one HTML file that works offline."""
        from trueup.report.page import report as write_report

        job = store.get(id, AuditJob)
        result = _result(job)
        with answering:
            origin = {"Calibration file": job.val.name} | ({} if job.test is None else {"Test file": job.test.name})
            page = write_report(result, title=job.name, origin=origin).html()
        return _attachment(page.encode(), "report.html", "text/html; charset=utf-8")

    @api.get(
        "/jobs/{id}/calibrator",
        tags=["take home"],
        response_class=Response,
        responses=_file_response("application/octet-stream"),
    )
    def calibrator(id: str, method: Method = None) -> Response:
        """A fitted calibrator as a .safetensors file, for `trueup.load_calibrator`."""
        job = store.get(id, AuditJob)
        result = _result(job)
        name = method or result.chosen
        return _safetensors(
            _calibrator(result, name), job.val.classes, {"method": name, "fitted to": job.val.name}, name
        )

    return api


def _data_info(id: str, data: Upload) -> models.DataInfo:
    rows, classes = data.shape
    labelled = data if isinstance(data, UploadedData) else None
    table = None if labelled is None else labelled.val
    return models.DataInfo(
        id=id,
        name=data.name,
        rows=rows,
        test_rows=len(labelled.test.labels) if labelled and labelled.test else None,
        classes=classes,
        labelled=labelled is not None,
        groups=[] if table is None else list(table.groups),
        clusters=None if table is None or table.clusters is None else table.cluster_name,
        notes=list(data.notes),
    )


def _job_info(id: str, job: AuditJob) -> models.JobInfo:
    result = job.result if job.state == "done" else None
    return models.JobInfo(
        id=id,
        state=job.state,
        methods=list(job.methods),
        titles={name: method_title(name) for name in (RAW, *job.methods)},
        fitting=job.fitting,
        done=job.done,
        error=job.error,
        result=result.to_dict() if result else None,
    )


def _label_shift_info(id: str, job: LabelShiftJob) -> models.LabelShiftInfo:
    prior, performance = (job.prior, job.performance) if job.state == "done" else (None, None)
    clustered = job.val.val.clusters is not None
    return models.LabelShiftInfo(
        id=id,
        state=job.state,
        new=_data_info("", job.new),
        error=job.error,
        text=[] if prior is None else [*prior.verdict().split("\n\n"), *([INDEPENDENT] if clustered else [])],
        prior=None if prior is None else prior.to_dict(),
        performance=None if performance is None else performance.to_dict(),
    )


def _description(name: str, thing: Any, default: bool) -> models.Listed:
    summary = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    return models.Listed(name=name, title=method_title(name), summary=summary, default=default)


def _result(job: AuditJob) -> Audit:
    if job.state == "failed":
        raise HTTPException(409, f"this fit failed: {job.error}")
    if job.result is None or job.state != "done":
        raise HTTPException(409, f"this fit is not finished; it is {job.state}")
    return job.result


def _predictions_of(predictions: Mapping[str, Predictions], name: str) -> Predictions:
    if name not in predictions:
        raise ValueError(f"{name!r} was not fitted; there are: {', '.join(predictions)}")
    return predictions[name]


def _calibrator(result: Audit, name: str) -> Any:
    if name == RAW:
        return METHODS["identity"](*result.predictions[RAW])
    if name not in result.calibrators:
        raise ValueError(f"{name!r} was not fitted; there are: {', '.join((RAW, *result.calibrators))}")
    return result.calibrators[name]


def _rows(logits: list[list[float | None]], classes: int) -> np.ndarray:
    widths = {len(row) for row in logits} or {0}
    if widths != {classes}:
        raise ValueError(f"logits must have {classes} numbers in each row, got {min(widths)}..{max(widths)}")
    return np.array(models.fill_options(logits), dtype=np.float64)


def _safetensors(calibrator: Any, classes: int, summary: dict[str, Any], name: str) -> Response:
    with TemporaryDirectory(prefix=temporary_prefix("calibrator")) as folder:
        path = Path(folder, "calibrator.safetensors")
        save_calibrator(calibrator, path, classes=classes, summary=summary)
        return _attachment(path.read_bytes(), f"{name}.safetensors", "application/octet-stream")


def _attachment(content: bytes, name: str, kind: str) -> Response:
    return Response(content, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _file_response(kind: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {kind: {"schema": {"type": "string", "format": "binary"}}}}}
