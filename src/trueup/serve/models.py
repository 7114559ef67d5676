"""The shapes of what the API takes and gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST_BINS = 100
MOST_COLUMNS = 10
"""Columns of groups of one file."""
COLDEST, HOTTEST = 0.05, 20.0


def fill_options(logits: list[list[float | None]]) -> list[list[float]]:
    """−∞ in place of null.

    >>> fill_options([[1.0, None]])
    [[1.0, -inf]]
    """
    return [[-math.inf if number is None else number for number in row] for row in logits]


Rows = Annotated[list[list[float | None]], AfterValidator(fill_options)]
"""One row a prediction; null, which becomes −∞, is an option that is not there."""


class Strict(BaseModel):
    """A request in which an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")


class Error(BaseModel):
    """What was wrong, in one sentence."""

    error: str


class DataInfo(BaseModel):
    """A file that the server has read."""

    id: str = Field(description="the only key to the data: whoever holds it may use it")
    name: str
    rows: int = Field(description="calibration rows, or all rows of a file with one half")
    test_rows: int | None
    n_classes: int
    labelled: bool = Field(description="whether labels came with the rows; without them there is only the label shift")
    groups: list[str] = Field(description="the columns whose groups are judged one by one")
    clusters: str | None = Field(description="the column that says which rows are correlated")
    notes: list[str] = Field(description="what had to be changed to read it")


class FitRequest(Strict):
    """Which methods to fit, and how they are judged."""

    test: str | None = Field(None, description="id of the data to test on, if it came in a file of its own")
    methods: list[str] | None = Field(None, description="names from /api/methods; the quick and good ones by default")
    bins: int = Field(15, ge=1, le=MOST_BINS)
    n_folds: int = Field(5, ge=2, le=20)
    seed: int = Field(0, ge=0, le=2**31 - 1)


class JobInfo(BaseModel):
    """How far a fit has come; `result` is there once its state is "done"."""

    id: str
    state: str = Field(description="waiting, running, done, failed or stopped")
    methods: list[str]
    titles: dict[str, str]
    fitting: str | None = Field(description="the method that is being fitted")
    done: int = Field(description="how many methods are finished")
    error: str | None
    result: dict[str, Any] | None = Field(description="verdict, choice, scores with intervals, failures and warnings")


class GroupPanel(BaseModel):
    """The groups of one column, before calibration or after."""

    title: str
    summary: str = Field(description="the groups that are shown to be wrong, and what could have been missed")
    chart: dict[str, Any]
    head: list[str]
    rows: list[list[str]] = Field(description="a row for each group, as text")


class GroupsInfo(BaseModel):
    """Where the probabilities are wrong: the groups of rows on which the methods were scored."""

    text: str = Field(description="how to read the charts")
    panels: list[GroupPanel]


class LabelShiftRequest(Strict):
    """Rows of a new population whose classes may have other frequencies."""

    new: str = Field(description="id of an upload with labelled=false")
    seed: int = Field(0, ge=0, le=2**31 - 1)


class LabelShiftInfo(BaseModel):
    """How far the estimates have come; they are there once the state is "done"."""

    id: str
    state: str = Field(description="waiting, running, done, failed or stopped")
    new: DataInfo
    error: str | None
    text: list[str] = Field(description="whether the class frequencies moved, and what is assumed")
    prior: dict[str, Any] | None = Field(description="frequencies by class, before and now, with intervals")
    performance: dict[str, Any] | None = Field(description="the accuracy that labels would show, with its interval")


class Curve(BaseModel):
    """A reliability diagram: its numbers, and a chart for plotly."""

    method: str
    temperature: float
    bins: int
    rows: int
    ece: float
    nll: float
    accuracy: float
    confidence: float
    event: bool = Field(
        description="of two classes: accuracy and confidence are how often class 1 happens and its mean probability"
    )
    chart: dict[str, Any]


class Difference(BaseModel):
    """Two methods side by side on the same rows."""

    first: Curve
    second: Curve
    scores: dict[str, Any] = Field(description="metrics of both, with the paired change and its interval")


class Promises(BaseModel):
    """What can be promised at each allowed error rate, on rows that did not fit the method."""

    method: str
    rows: int
    level: float
    allowed: list[float]
    threshold: list[float | None] = Field(
        description="answer from this confidence on; null where nothing can be promised"
    )
    coverage: list[float] = Field(description="the share of rows that are answered")
    observed: list[float | None] = Field(description="the error rate seen among them")
    text: list[str] = Field(description="the promise, in a sentence")
    note: str
    chart: dict[str, Any]


class SetsInfo(BaseModel):
    """Prediction sets: half of the rows set the limit, on the other half they are judged."""

    method: str
    score: str
    coverage: float
    rows: int
    text: str
    scores: dict[str, Any] = Field(description="coverage with interval, sizes, coverage by size and by class")
    note: str


class ApplyRequest(Strict):
    """Logits to be calibrated."""

    logits: Rows = Field(description="one row a sample, one number a class; null: no such option")
    method: str | None = Field(None, description="one of the fitted methods; the chosen one by default")


class Applied(BaseModel):
    """Calibrated logits and the probabilities they stand for."""

    method: str
    logits: list[list[float | None]]
    probs: list[list[float]]


class Listed(BaseModel):
    """A method or a metric."""

    name: str
    title: str
    summary: str = Field(description="what it is, in a sentence")
    default: bool = Field(description="whether it is used by default")


class LimitsInfo(BaseModel):
    """What the server takes."""

    upload_bytes: int
    rows: int
    n_classes: int
    numbers: int
    seconds: float = Field(description="how long data is kept after it was last used")
    suffixes: list[str]


def _show(name: str) -> str:
    if not (bare := name.strip()) or not bare.isprintable():
        raise ValueError("a name of printable characters is wanted")
    return bare


MonitorName = Annotated[str, Field(max_length=100), AfterValidator(_show)]


class PromiseRequest(Strict):
    """A promise on what is answered, which the monitor checks again as labels arrive."""

    threshold: float = Field(ge=0, le=1, description="rows whose confidence is at least this are answered")
    max_risk: float = Field(gt=0, lt=1, description="the largest share of wrong answers")
    level: float = Field(0.95, gt=0, lt=1)
    risk: Literal["error", "false_discovery_rate"] = Field("error", description="the latter for a monitor of an event")


class MonitorRequest(Strict):
    """A monitor to be made; what is left out is as in `trueup.Monitor`."""

    name: MonitorName = Field(description="what people and Prometheus call it; no two have the same")
    n_classes: int = Field(ge=2)
    level: float | None = Field(None, gt=0, lt=1, description="chance that a calibrated network never raises the alarm")
    bins: int | None = Field(None, ge=1, le=MOST_BINS, description="bins of the calibration errors")
    window: int | None = Field(None, ge=100, le=10**9, description="rows that count as recent")
    half_life: float | None = Field(None, ge=1, le=1e12, description="after how many rows one counts half, if fading")
    block: int | None = Field(None, ge=10, le=10**6, description="after how many rows it looks for an alarm")
    classwise: bool | None = Field(None, description="whether each class is watched; up to 100 classes by default")
    top_label: bool | None = Field(
        None, description="whether two classes are read by the predicted one, not as an event"
    )
    event: int | None = Field(None, ge=0, description="the class whose probability is watched, alone")
    promise: PromiseRequest | None = Field(None, description="a threshold and the errors it allows")


class ExpectRequest(Strict):
    """Predictions whose labels have not arrived."""

    logits: Rows = Field(
        description="one row a prediction, one number a class; log p is a logit, null an option that is not there"
    )


class UpdateRequest(ExpectRequest):
    """Predictions with their labels, in the order in which they were made."""

    labels: list[int] = Field(description="what was true, 0 to classes - 1")
    awaited: bool = Field(False, description="whether these rows were sent to /expect before")


def describe_fields(errors: Sequence[Any], *, skip: int = 0) -> str:
    """What pydantic found wrong, each reason with the field that it is about; `skip` leaves out where that was."""
    reasons = (f"{'.'.join(map(str, error['loc'][skip:])) or 'the request'}: {error['msg']}" for error in errors)
    return "; ".join(reasons)


class Progress(BaseModel):
    """How far a log has been replayed."""

    done: int
    total: int


class MonitorInfo(BaseModel):
    """How things stand with a monitor."""

    id: str
    name: str
    settings: dict[str, Any]
    status: dict[str, Any] = Field(
        description="rows, figures of all, recent and fading rows, evidence, p_value, alarm, promise, unlabelled"
    )
    updated: float | None = Field(description="when rows last came, in seconds since 1970; unknown after a restart")
    replaying: Progress | None = Field(description="the rows that are being taken in now, not yet in the status")
    saved_rows: int | None = Field(description="rows that would survive a crash; null if monitors live in memory")
    problem: str | None = Field(description="why the monitor cannot be written to its folder, if so")
    notes: list[str] = Field(description="of a log that was replayed: what was odd about it")


class MonitorState(MonitorInfo):
    """A monitor with the points of its charts."""

    history: dict[str, list[float | None]] = Field(
        description="rows, evidence, and of recent rows ece, accuracy, confidence; evenly thinned; after a restart it "
        "begins with the last state"
    )
