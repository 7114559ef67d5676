"""Requests and answers of the API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    model_validator,
)

from trueup._core.arrays import subtract_one
from trueup._core.errors import record_warnings
from trueup.convert import from_probs
from trueup.io.atomic import shorten

MAX_BINS = 100
MAX_COLUMNS = 10
"""Largest number of group columns per file."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


def to_array(rows: list[list[float | None]]) -> np.ndarray:
    """Convert rows to an array, with −∞ for null, the logit of an absent option.

    >>> to_array([[1.0, None]])
    array([[  1., -inf]])
    """
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"rows must have equally many numbers, got {min(widths)}..{max(widths)}")
    array = np.array(rows, dtype=np.float64)
    array[np.isnan(array)] = -math.inf
    return array


Row = Annotated[list[FiniteFloat | None], Field(min_length=2, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True), AfterValidator(to_array)]
"""One row per prediction; null means an absent option. Validation stops at the first error."""
Shares = Annotated[list[FiniteFloat], Field(min_length=1, fail_fast=True), AfterValidator(np.asarray)]
"""One probability per row."""
Label = Annotated[int, Field(ge=0, lt=2**31)]


def _kind_of_probs(value: Any) -> str:
    if not isinstance(value, list):
        return "flag"
    return "rows" if value and isinstance(value[0], list) else "shares"


Probs = Annotated[
    Annotated[bool, Tag("flag")] | Annotated[Rows, Tag("rows")] | Annotated[Shares, Tag("shares")],
    Discriminator(_kind_of_probs),
]
"""Probabilities: rows, or the probabilities of class 1; or a statement on the logits."""


def to_whole(value: Any) -> Any:
    """Read 3.0 as 3, which are the same integer in a JSON schema; also in a list.

    >>> to_whole([3.0, 2.5, True])
    [3, 2.5, True]
    """
    if isinstance(value, list) and not any(isinstance(each, list) for each in value[:1]):
        return [to_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Strict(BaseModel):
    """A request that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        """Stop at the first unknown field: a request may have a million of them."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                raise ValueError(f"there is no field {shorten(repr(name), 100)}")
        return {name: to_whole(value) for name, value in data.items()}


class Error(BaseModel):
    """An error message in one sentence."""

    error: str


class Health(BaseModel):
    """Sign of life."""

    status: Literal["ok"]


class DataInfo(BaseModel):
    """An uploaded file."""

    id: str = Field(description="the key to the data; whoever knows it can use the data")
    name: str
    rows: int = Field(description="calibration rows, or all rows of a file with one half")
    test_rows: int | None
    n_classes: int
    labelled: bool = Field(
        description="whether the rows have labels; without them only the label shift can be estimated"
    )
    groups: list[str] = Field(description="columns whose groups are evaluated separately")
    clusters: str | None = Field(description="column of the clusters of correlated rows")
    notes: list[str] = Field(description="changes that were needed to read the file")


class FitRequest(Strict):
    """Methods to fit, and options of the evaluation."""

    test: str | None = Field(None, description="id of the test data, if they are a separate file")
    methods: list[str] | None = Field(
        None, fail_fast=True, description="names from /api/methods; by default those listed as default"
    )
    bins: int = Field(15, ge=1, le=MAX_BINS)
    n_folds: int = Field(5, ge=2, le=20)
    seed: int = Field(0, ge=0, le=2**31 - 1)


class JobInfo(BaseModel):
    """Progress of a fit; `result` is present once the state is "done"."""

    id: str
    state: str = Field(description="waiting, running, done, failed or stopped")
    methods: list[str]
    titles: dict[str, str]
    fitting: str | None = Field(description="the method being fitted")
    done: int = Field(description="number of finished methods")
    error: str | None
    result: dict[str, Any] | None = Field(description="verdict, choice, scores with intervals, failures and warnings")


class GroupPanel(BaseModel):
    """The groups of one column, before or after calibration."""

    title: str
    summary: str = Field(description="the groups with a significant error, and the error that could go unnoticed")
    chart: dict[str, Any]
    head: list[str]
    rows: list[list[str]] = Field(description="one row per group, as text")


class GroupsInfo(BaseModel):
    """Calibration per group, on the rows on which the methods were scored."""

    text: str = Field(description="how to read the charts")
    panels: list[GroupPanel]


class LabelShiftRequest(Strict):
    """Rows of a new population whose class frequencies may differ."""

    new: str = Field(description="id of an upload with labelled=false")
    seed: int = Field(0, ge=0, le=2**31 - 1)


class LabelShiftInfo(BaseModel):
    """Progress of the estimates; they are present once the state is "done"."""

    id: str
    state: str = Field(description="waiting, running, done, failed or stopped")
    new: DataInfo
    error: str | None
    text: list[str] = Field(description="whether the class frequencies changed, and the assumptions")
    prior: dict[str, Any] | None = Field(description="class frequencies, before and now, with intervals")
    performance: dict[str, Any] | None = Field(description="expected accuracy on these rows, with an interval")


class Curve(BaseModel):
    """A reliability diagram: its numbers and its chart, marks on axes."""

    method: str
    temperature: float
    bins: int
    rows: int
    ece: float
    nll: float
    accuracy: float
    confidence: float
    event: bool = Field(
        description="two classes: accuracy is the frequency of class 1, confidence its mean probability"
    )
    chart: dict[str, Any]


class Difference(BaseModel):
    """Two methods side by side on the same rows."""

    first: Curve
    second: Curve
    scores: dict[str, Any] = Field(description="metrics of both, with the paired change and its interval")


class ClampRequest(Strict):
    """The network to clamp, and the options of the fit."""

    network: Literal["digits", "served"] = Field(
        "digits", description="a small network for digits, or the network that the server was started with"
    )
    camera: Literal["contrast", "brightness", "gaussian_blur"] | None = Field(
        None, description="change of the camera, of all images"
    )
    recipe: Literal["subspace", "paper", "code"] = Field("subspace", description="how δ and T are fitted")


class ClampResult(BaseModel):
    """A fitted δ and T, scored on test inputs."""

    temperature: float
    delta_norm: float
    verdict: str = Field(description="whether δ lowers the loss on held-out samples")
    warnings: list[str]
    delta: list[list[float]] | None = Field(description="δ as a picture, averaged over channels; null if it is none")
    image: list[list[float]] | None = Field(description="a test input in the same form")
    before: Curve
    after: Curve
    scores: dict[str, Any] = Field(description="metrics of the uncalibrated, scaled and clamped network, with changes")


class ClampInfo(BaseModel):
    """Progress of a fit; `result` is present once the state is "done"."""

    id: str
    state: str = Field(description="waiting, running, done, failed or stopped")
    progress: str = Field(description="what is being done")
    error: str | None
    result: ClampResult | None


class Promises(BaseModel):
    """Thresholds with a guaranteed error rate, from rows that did not fit the method."""

    method: str
    rows: int
    level: float
    allowed: list[float]
    threshold: list[float | None] = Field(
        description="answer at or above this confidence; null if there is no guarantee"
    )
    coverage: list[float] = Field(description="share of rows that are answered")
    observed: list[float | None] = Field(description="observed error rate of the answered rows")
    text: list[str] = Field(description="the guarantee in a sentence")
    note: str
    chart: dict[str, Any]


class SetsInfo(BaseModel):
    """Prediction sets: fitted on half of the rows, evaluated on the other half."""

    method: str
    score: str
    coverage: float
    rows: int
    text: str
    scores: dict[str, Any] = Field(description="coverage with interval, sizes, coverage by size and by class")
    note: str


class PredictionsRequest(Strict):
    """Predictions: `logits`, `probs` or `confidence`, with one entry per row."""

    logits: Rows | None = Field(
        None, description="one row per prediction, one number per class; log p is a logit, null an absent option"
    )
    probs: Probs | None = Field(
        None,
        description="probabilities, one row per prediction, or one number: the probability of class 1 of two. With "
        "logits, whether those are probabilities; by default, values that look like them are rejected",
    )
    confidence: Shares | None = Field(
        None, description="stated confidence of each answer; for two classes, wrong (0) and right (1)"
    )

    @model_validator(mode="after")
    def _require_one_kind(self) -> Self:
        if self._has_probs + (self.logits is not None) + (self.confidence is not None) != 1:
            raise ValueError("exactly one of logits, probs and confidence must have the predictions")
        return self

    @property
    def _has_probs(self) -> bool:
        return isinstance(self.probs, np.ndarray)

    def read(self, n_classes: int) -> tuple[np.ndarray, list[str]]:
        """Return the rows as logits, and notes on their conversion."""
        if self.confidence is not None and n_classes != 2:
            raise ValueError(f"confidence needs two classes, wrong and right, got {n_classes} classes")
        name = "confidence" if self.confidence is not None else "probs" if self._has_probs else "logits"
        values: Any = getattr(self, name)
        if name == "logits" and not self.probs:
            return (values if self.probs is None else subtract_one(values)), []
        with record_warnings() as notes:
            return from_probs(np.where(values == -math.inf, math.nan, values), name=name), notes


class ApplyRequest(PredictionsRequest):
    """Predictions to calibrate."""

    method: str | None = Field(None, description="one of the fitted methods; the chosen one by default")


class Applied(BaseModel):
    """Calibrated logits and their probabilities."""

    method: str
    logits: list[list[float | None]]
    probs: list[list[float]]
    notes: list[str] = Field(description="warnings about the rows that were sent")


class Listed(BaseModel):
    """A method or a metric."""

    name: str
    title: str
    summary: str = Field(description="its description in a sentence")
    default: bool = Field(description="whether it is used by default")


class LimitsInfo(BaseModel):
    """Limits of the server."""

    upload_bytes: int
    rows: int
    n_classes: int
    numbers: int
    seconds: float = Field(description="seconds after their last use at which data are deleted")
    suffixes: list[str]
    served_network: str | None = Field(description="name of the network that the server was started with")


def _strip_name(name: str) -> str:
    if not (stripped := name.strip()) or not stripped.isprintable():
        raise ValueError("the name must consist of printable characters")
    return stripped


MonitorName = Annotated[str, Field(max_length=100), AfterValidator(_strip_name)]


class PromiseRequest(Strict):
    """A promised error rate of the answered rows, which the monitor checks as labels arrive."""

    threshold: float = Field(ge=0, le=1, description="rows with at least this confidence are answered")
    max_risk: float = Field(gt=0, lt=1, description="promised bound on the share of wrong answers")
    level: float = Field(0.95, gt=0, lt=1)
    risk: Literal["error", "false_discovery_rate"] = Field(
        "error", description="false_discovery_rate for a monitor of an event"
    )


class MonitorRequest(Strict):
    """A new monitor; the defaults are those of `trueup.Monitor`."""

    name: MonitorName = Field(description="unique name, also in Prometheus")
    n_classes: int = Field(ge=2)
    level: float | None = Field(
        None, gt=0, lt=1, description="probability that a calibrated network never raises the alarm"
    )
    bins: int | None = Field(None, ge=1, le=MAX_BINS, description="bins of the calibration errors")
    window: int | None = Field(None, ge=100, le=10**9, description="number of rows in the recent metrics")
    half_life: float | None = Field(
        None, ge=1, le=1e12, description="age in rows at half weight, for the fading metrics"
    )
    block: int | None = Field(None, ge=10, le=10**6, description="number of rows after which the bettors start again")
    classwise: bool | None = Field(None, description="whether each class is tested; by default up to 100 classes")
    top_label: bool | None = Field(
        None, description="whether two classes are read by the predicted class, not as an event"
    )
    event: int | None = Field(None, ge=0, description="the only class whose probability is watched")
    promise: PromiseRequest | None = Field(None, description="a threshold and its promised error rate")


class UpdateRequest(PredictionsRequest):
    """Predictions with their labels, in the order in which they were made."""

    labels: Annotated[list[Label], Field(fail_fast=True)] | None = Field(
        None, description="true classes, 0 to n_classes - 1; with logits or probs"
    )
    correct: Annotated[list[bool | Literal[0, 1]], Field(fail_fast=True)] | None = Field(
        None, description="whether each answer was right; with confidence"
    )
    awaited: bool = Field(False, description="whether the rows were sent to /expect before")

    @model_validator(mode="after")
    def _require_truth(self) -> Self:
        if self.confidence is None and (self.labels is None or self.correct is not None):
            raise ValueError("send labels with logits or probs, and correct only with confidence")
        if self.confidence is not None and (self.correct is None or self.labels is not None):
            raise ValueError("send correct with confidence, not labels")
        return self

    @property
    def truth(self) -> np.ndarray:
        """The labels; with confidences, 1 for right and 0 for wrong."""
        return np.array(self.labels if self.confidence is None else self.correct, np.int64)


def describe_fields(errors: Sequence[Any], *, skip: int = 0) -> str:
    """Join pydantic's first errors, each with the name of its field; `skip` omits the first parts of that name."""
    reasons = [
        f"{'.'.join(map(str, error['loc'][skip:])) or 'the request'}: {error['msg'].removeprefix('Value error, ')}"
        for error in errors[:3]
    ]
    return shorten("; ".join(reasons)) + (f"; and {len(errors) - 3:,} more errors" if len(errors) > 3 else "")


class Progress(BaseModel):
    """Progress of a replayed log."""

    done: int
    total: int


class MonitorInfo(BaseModel):
    """Settings and status of a monitor."""

    id: str
    name: str
    settings: dict[str, Any]
    status: dict[str, Any] = Field(
        description="rows, metrics of all, recent and fading rows, evidence, p_value, alarm, promise, unlabelled"
    )
    updated: float | None = Field(
        description="time of the latest update in seconds since 1970; unknown after a restart"
    )
    replaying: Progress | None = Field(description="progress of the current replay; its rows are not yet in the status")
    saved_rows: int | None = Field(description="rows on disk, which survive a crash; null without a folder")
    problem: str | None = Field(description="why the monitor could not be written to its folder")
    refused: int = Field(description="number of malformed updates, replays and expected rows since the server started")
    notes: list[str] = Field(description="warnings about the rows that were sent")


class MonitorState(MonitorInfo):
    """A monitor with the points of its charts."""

    history: dict[str, list[float | None]] = Field(
        description="rows, evidence, and ece, accuracy and confidence of recent rows; evenly thinned; after a restart "
        "it begins with the latest state"
    )
