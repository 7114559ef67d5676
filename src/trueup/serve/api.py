"""The functions of the page as a JSON API."""

from __future__ import annotations

import inspect
from asyncio import Semaphore
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
from fastapi import APIRouter, Query, Request
from scipy.special import softmax
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from trueup._core.registry import METHODS, METRICS
from trueup.decisions.label_shift import INDEPENDENT
from trueup.io.formats import FORMATS
from trueup.io.load_save import save
from trueup.io.predictions import Predictions, PredictionTable
from trueup.metrics import table as metric_table
from trueup.reports.audit import DEFAULT, RAW, Audit, method_title
from trueup.serve import diagrams, models, upload_reader, uploads
from trueup.serve.clamp_jobs import ClampJob
from trueup.serve.example import example
from trueup.serve.jobs import AuditJob, Jobs, LabelShiftJob
from trueup.serve.session_store import Store
from trueup.serve.settings import Settings
from trueup.serve.temporary import temporary_prefix
from trueup.serve.uploads import UnlabelledData, Upload, UploadedData

P = ParamSpec("P")
T = TypeVar("T")
Responses = dict[int | str, dict[str, Any]]

CONCURRENT_ANSWERS = 4
"""Number of requests over all rows that are answered at the same time; each may need much memory."""

Bins = Annotated[int, Query(ge=1, le=models.MAX_BINS, description="number of equal-width bins")]
Temperature = Annotated[
    float, Query(ge=models.MIN_TEMPERATURE, le=models.MAX_TEMPERATURE, description="divides the logits")
]
Method = Annotated[str | None, Query(description="a fitted method, or raw; by default the chosen method")]
FileName = Annotated[str, Query(description="the file's name; its suffix determines the format", max_length=500)]
LogitsName = Annotated[str, Query(description="name of the array, or names of columns separated by commas")]
LabelsName = Annotated[str, Query(description="name of the labels")]
Probs = Annotated[bool, Query(description="the file has probabilities, not logits")]
Groups = Annotated[
    list[str] | None, Query(description="a column whose groups are evaluated separately; may be repeated")
]
Clusters = Annotated[str | None, Query(description="column of the clusters of correlated rows")]
Labelled = Annotated[bool, Query(description="false reads only the logits, of a new population")]
Metrics = Annotated[list[str] | None, Query(description="names from /api/metrics")]
Level = Annotated[float, Query(gt=0, lt=1, description="confidence level of each guarantee")]
Score = Annotated[Literal["lac", "aps", "raps"], Query(description="nonconformity score")]
Coverage = Annotated[float, Query(gt=0, lt=1, description="share of sets that contain the true class")]

STATUSES = {
    400: "the request is not HTTP or not JSON, or its host name is unknown",
    401: "the token is missing",
    403: "the request comes from a page of another origin",
    404: "there is nothing under that id, or it has expired",
    405: "the path has other methods, listed in the header Allow",
    408: "the body arrives too slowly",
    409: "the content does not fit: a damaged file, other classes, a fit that is not finished, a name in use",
    413: "the body or the file is too large",
    422: "the request does not fit the schema",
    500: "an internal error",
    503: "too many requests are waiting",
    507: "the disk is full; nothing was changed",
}
ERRORS: Responses = {code: {"model": models.Error, "description": text} for code, text in STATUSES.items()}


def file_route(kind: str) -> dict[str, Any]:
    """Describe a route that answers with a file of this media type."""
    return {"response_class": Response, "responses": {200: {"content": {kind: BINARY}}}}


BINARY = {"schema": {"type": "string", "format": "binary"}}
SAFETENSORS = file_route("application/octet-stream")
FILE_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": BINARY}}}


def attachment(content: bytes, name: str, kind: str = "application/octet-stream") -> Response:
    """Answer with a file to download."""
    return Response(content, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def safetensors(stem: str, value: Any, **options: Any) -> Response:
    """Answer with a fitted object as a file to download."""
    with TemporaryDirectory(prefix=temporary_prefix("file")) as folder:
        path = Path(folder, "value.safetensors")
        save(value, path, **options)
        return attachment(path.read_bytes(), f"{stem}.safetensors")


class FittedMethod(NamedTuple):
    """A finished fit and one of its methods."""

    job: AuditJob
    result: Audit
    name: str

    @property
    def predictions(self) -> Predictions:
        """Predictions of the method on the test rows."""
        return self._select(self.result.predictions)

    @property
    def calibrator(self) -> Any:
        """The method's calibrator; the identity for the raw network."""
        identity = METHODS["identity"](*self.result.predictions[RAW]) if self.name == RAW else None
        return self._select({RAW: identity, **self.result.calibrators})

    def _select(self, entries: Mapping[str, Any]) -> Any:
        if self.name not in entries:
            raise ValueError(f"{self.name!r} was not fitted; choose from: {', '.join(entries)}")
        return entries[self.name]


def routes(store: Store, jobs: Jobs, settings: Settings, disk: uploads.DiskBudget) -> APIRouter:
    """Make all routes, for one store and one queue."""
    api = APIRouter(prefix="/api", responses=ERRORS)
    receiver, answering = uploads.Receiver(settings, disk), Semaphore(CONCURRENT_ANSWERS)

    def in_turn(route: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Run a route over all rows in a thread; only a few run at the same time, and others occupy no thread."""

        @wraps(route)
        async def run(*args: P.args, **arguments: P.kwargs) -> T:
            async with answering:
                return await run_in_threadpool(route, *args, **arguments)

        return run

    def keep(data: Upload) -> models.DataInfo:
        return models.DataInfo(id=store.put(data, data.size), **data.info())

    def fitted(id: str, method: str | None = None) -> FittedMethod:
        """Return a method of a finished fit, by default the chosen one."""
        job = store.get(id, AuditJob)
        if job.state == "failed":
            raise HTTPException(409, f"this fit failed: {job.error}")
        if job.state != "done":
            raise HTTPException(409, f"this fit is not finished; its state is {job.state}")
        return FittedMethod(job, job.result, method or job.result.chosen)

    @api.get("/limits", tags=["about"])
    def limits() -> models.LimitsInfo:
        """Return the limits of the server."""
        served = settings.network.name if settings.network else None
        return models.LimitsInfo(**vars(settings), suffixes=list(FORMATS), served_network=served)

    @api.get("/methods", tags=["about"])
    def methods() -> list[models.Listed]:
        """List the methods that can be fitted."""
        return [_description(name, METHODS[name], name in DEFAULT) for name in METHODS]

    @api.get("/metrics", tags=["about"])
    def metrics() -> list[models.Listed]:
        """List the available metrics."""
        return [_description(name, METRICS[name], name in metric_table.DEFAULT) for name in METRICS]

    @api.post("/upload", status_code=201, tags=["data"], openapi_extra=FILE_BODY)
    async def upload(
        request: Request,
        name: FileName,
        probs: Probs = False,
        logits: LogitsName = "logits",
        labels: LabelsName = "labels",
        group: Groups = None,
        clusters: Clusters = None,
        labelled: Labelled = True,
    ) -> models.DataInfo:
        """Upload a file as the request body; send a `.npy` pair as one array after the other."""
        columns = tuple(dict.fromkeys(name for name in group or () if name))
        if len(columns) > models.MAX_COLUMNS:
            raise ValueError(f"at most {models.MAX_COLUMNS} columns of groups are accepted, got {len(columns)}")
        more = (labels, columns, clusters or None) if labelled else (None,)
        options = upload_reader.Options(probs or None, logits, *more)
        async with receiver.receive(request, name) as (path, shown_name):
            return keep(await run_in_threadpool(uploads.read, path, shown_name, options, settings))

    @api.post("/example", status_code=201, tags=["data"])
    def built_in_example() -> models.DataInfo:
        """Load the built-in example: an overconfident network with ten classes."""
        val, test = (PredictionTable(*pair) for pair in example())
        return keep(UploadedData("the built-in example", val, test))

    @api.get("/data/{id}", tags=["data"])
    def about(id: str) -> models.DataInfo:
        """Describe an uploaded file."""
        return models.DataInfo(id=id, **store.get(id, Upload).info())

    @api.delete("/data/{id}", status_code=204, tags=["data"])
    def forget(id: str) -> None:
        """Delete a file now."""
        store.remove(id, Upload)

    @api.get("/data/{id}/evaluate", tags=["data"])
    @in_turn
    def evaluate(id: str, metric: Metrics = None, bins: Bins = 15) -> dict[str, Any]:
        """Score the uncalibrated network, with intervals and a test of calibration."""
        table = store.get(id, UploadedData).test_or_val
        result = metric_table.evaluate(*table, metrics=metric or metric_table.DEFAULT, bins=bins, **table.options())
        return {"verdict": result.verdict(), **result.to_dict()}

    @api.get("/data/{id}/curve", tags=["data"])
    @in_turn
    def data_curve(id: str, temperature: Temperature = 1.0, bins: Bins = 15) -> models.Curve:
        """Compute the reliability diagram of the network with its logits divided by a temperature."""
        table = store.get(id, UploadedData).test_or_val
        clusters = table.options().get("clusters")
        return diagrams.curve(table.pair, temperature=temperature, bins=bins, clusters=clusters)

    @api.post("/data/{id}/fit", status_code=202, tags=["fit"])
    def fit(id: str, body: models.FitRequest) -> models.JobInfo:
        """Start to fit methods; /api/jobs/{id} shows the progress."""
        unknown = [name for name in body.methods or () if name not in METHODS]
        if unknown:
            raise ValueError(f"no method is called {unknown[0]!r}; there are: {', '.join(METHODS)}")
        data = store.get(id, UploadedData)
        test = store.get(body.test, UploadedData) if body.test else None
        _require_same_classes(data, test)
        job = AuditJob(data, test, body.methods or (), body.model_dump(exclude={"test", "methods"}))
        return _job_info(jobs.start(job), job)

    @api.get("/jobs/{id}", tags=["fit"])
    def status(id: str) -> models.JobInfo:
        """Return the progress of a fit, and its result."""
        return _job_info(id, store.get(id, AuditJob))

    @api.delete("/jobs/{id}", status_code=204, tags=["fit"])
    def stop(id: str) -> None:
        """Stop a fit after its current method, and delete it."""
        store.remove(id, AuditJob)

    @api.get("/jobs/{id}/curve", tags=["fit"])
    @in_turn
    def job_curve(id: str, method: Method = None, temperature: Temperature = 1.0, bins: Bins = 15) -> models.Curve:
        """Compute the reliability diagram of a fitted method on the test rows."""
        of = fitted(id, method)
        options: Any = {"temperature": temperature, "bins": bins, "clusters": of.result.clusters}
        return diagrams.curve(of.predictions, method=of.name, **options)

    @api.get("/jobs/{id}/compare", tags=["fit"])
    @in_turn
    def compare(id: str, first: str = RAW, second: Method = None, bins: Bins = 15) -> models.Difference:
        """Compare two methods on the same rows: diagrams, metrics and paired changes."""
        both = [fitted(id, first), fitted(id, second)]
        if both[0].name == both[1].name:
            raise ValueError(f"first and second must be different methods, got {first!r} twice")
        pairs = {of.name: of.predictions for of in both}
        return diagrams.side_by_side(pairs, bins=bins, clusters=both[0].result.clusters)

    @api.get("/jobs/{id}/groups", tags=["fit"])
    @in_turn
    def groups(id: str) -> models.GroupsInfo:
        """Compare predicted and observed rates per group, before and after calibration."""
        return diagrams.groups(fitted(id).result)

    @api.get("/jobs/{id}/promise", tags=["decide"])
    @in_turn
    def promise(id: str, method: Method = None, level: Level = 0.95) -> models.Promises:
        """Find the confidence threshold for each allowed error rate."""
        of = fitted(id, method)
        options: Any = {"cross_fitted": of.result.cross_fitted, "clusters": of.result.clusters}
        return diagrams.promises(of.predictions, method=of.name, level=level, **options)

    @api.get("/jobs/{id}/sets", tags=["decide"])
    @in_turn
    def prediction_sets(
        id: str, method: Method = None, score: Score = "aps", coverage: Coverage = 0.9
    ) -> models.SetsInfo:
        """Fit prediction sets that contain the true class with a given probability."""
        of = fitted(id, method)
        options: Any = {"score": score, "coverage": coverage, "clusters": of.result.clusters}
        return diagrams.sets(of.predictions, method=of.name, **options)

    @api.post("/data/{id}/label-shift", status_code=202, tags=["decide"])
    def label_shift(id: str, body: models.LabelShiftRequest) -> models.LabelShiftInfo:
        """Start to estimate the class frequencies of rows without labels; /api/label-shifts/{id} shows them."""
        data, new = store.get(id, UploadedData), store.get(body.new, UnlabelledData)
        _require_same_classes(data, new)
        job = LabelShiftJob(data, new, body.seed)
        return _label_shift_info(jobs.start(job), job)

    @api.get("/label-shifts/{id}", tags=["decide"])
    def label_shift_status(id: str) -> models.LabelShiftInfo:
        """Return the estimated class frequencies of rows without labels, and the expected accuracy."""
        return _label_shift_info(id, store.get(id, LabelShiftJob))

    @api.delete("/label-shifts/{id}", status_code=204, tags=["decide"])
    def stop_label_shift(id: str) -> None:
        """Delete the estimates, or cancel them."""
        store.remove(id, LabelShiftJob)

    @api.get("/label-shifts/{id}/calibrator", tags=["take home"], **SAFETENSORS)
    def label_shift_calibrator(id: str) -> Response:
        """Download a calibrator for the new class frequencies, as a .safetensors file for `trueup.load`."""
        job = store.get(id, LabelShiftJob)
        if job.state != "done":
            raise HTTPException(409, f"the class frequencies are not estimated yet; the state is {job.state}")
        calibrator, summary = job.result[0].calibrator, {"made for": job.new.name}
        return safetensors("label-shift", calibrator, n_classes=job.val.n_classes, summary=summary)

    @api.post("/clamps", status_code=202, tags=["clamp"])
    def clamp(body: models.ClampRequest) -> models.ClampInfo:
        """Start to clamp a network on this machine; /api/clamps/{id} shows the progress."""
        if body.network == "served" and settings.network is None:
            raise ValueError("this server was started without a network; `trueup serve --network` gives it one")
        job = ClampJob(settings.network if body.network == "served" else None, body.recipe, body.camera)
        return models.ClampInfo(**vars(job) | {"id": jobs.start(job)})

    @api.get("/clamps/{id}", tags=["clamp"])
    def clamp_status(id: str) -> models.ClampInfo:
        """Return the progress of clamping a network, and its result."""
        return models.ClampInfo(**vars(store.get(id, ClampJob)) | {"id": id})

    @api.delete("/clamps/{id}", status_code=204, tags=["clamp"])
    def stop_clamp(id: str) -> None:
        """Stop clamping a network, and delete the result."""
        store.remove(id, ClampJob)

    @api.post("/jobs/{id}/apply", tags=["fit"], response_model=models.Applied)
    @in_turn
    def apply(id: str, body: models.ApplyRequest) -> Response:
        """Calibrate logits, probabilities or stated confidences."""
        of = fitted(id, body.method)
        classes = of.job.val.n_classes
        logits, notes = body.read(classes)
        if logits.shape[1] != classes:
            raise ValueError(f"logits must have {classes} numbers per row, got shape {logits.shape}")
        after = np.asarray(of.calibrator(logits))
        absent: Any = None
        rows = np.where(np.isneginf(after), absent, after).tolist()
        probs = softmax(after.astype(np.float64), axis=1).tolist()
        answer = models.Applied(method=of.name, logits=rows, probs=probs, notes=notes)
        return Response(answer.model_dump_json(), media_type="application/json")

    @api.get("/jobs/{id}/report", tags=["take home"], **file_route("text/html"))
    @in_turn
    def report(id: str) -> Response:
        """Download the report as one HTML file that works offline."""
        from trueup.reports.page import Report

        of = fitted(id)
        files = {"Calibration file": of.job.val, "Test file": of.job.test}
        origin = {role: file.name for role, file in files.items() if file is not None}
        page = Report(of.result, ", ".join(origin.values()), origin=origin).html()
        return attachment(page.encode(), "report.html", "text/html; charset=utf-8")

    @api.get("/jobs/{id}/calibrator", tags=["take home"], **SAFETENSORS)
    def calibrator(id: str, method: Method = None) -> Response:
        """Download a fitted calibrator, as a .safetensors file for `trueup.load`."""
        of = fitted(id, method)
        data, summary = of.job.val, {"method": of.name, "fitted to": of.job.val.name}
        return safetensors(of.name, of.calibrator, n_classes=data.n_classes, summary=summary)

    return api


def _require_same_classes(data: Upload, other: Upload | None) -> None:
    if other is not None and other.n_classes != data.n_classes:
        raise ValueError(f"{other.name} must have the {data.n_classes} classes of {data.name}, got {other.n_classes}")


def _job_info(id: str, job: AuditJob) -> models.JobInfo:
    result = job.result.to_dict() if job.state == "done" else None
    titles = {name: method_title(name) for name in (RAW, *job.methods)}
    return models.JobInfo(**vars(job) | {"id": id, "titles": titles, "result": result})


def _label_shift_info(id: str, job: LabelShiftJob) -> models.LabelShiftInfo:
    figures: dict[str, Any] = {"text": [], "prior": None, "performance": None}
    if job.state == "done":
        prior, performance = job.result
        independent = [] if job.val.val.clusters is None else [INDEPENDENT]
        figures["text"] = [*prior.verdict().split("\n\n"), *independent]
        figures |= {"prior": prior.to_dict(), "performance": performance.to_dict()}
    new = models.DataInfo(id="", **job.new.info())
    return models.LabelShiftInfo(id=id, state=job.state, new=new, error=job.error, **figures)


def _description(name: str, function: Any, default: bool) -> models.Listed:
    summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return models.Listed(name=name, title=method_title(name), summary=summary, default=default)
