"""The shapes of what the API takes and gives."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MOST_BINS = 100
COLDEST, HOTTEST = 0.05, 20.0


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
    classes: int
    notes: list[str] = Field(description="what had to be changed to read it")


class FitRequest(Strict):
    """Which methods to fit, and how they are judged."""

    test: str | None = Field(None, description="id of the data to test on, if it came in a file of its own")
    methods: list[str] | None = Field(None, description="names from /api/methods; the quick and good ones by default")
    bins: int = Field(15, ge=1, le=MOST_BINS)
    folds: int = Field(5, ge=2, le=20)
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
    chart: dict[str, Any]


class Difference(BaseModel):
    """Two methods side by side on the same rows."""

    first: Curve
    second: Curve
    scores: dict[str, Any] = Field(description="metrics of both, with the paired change and its interval")


class ApplyRequest(Strict):
    """Logits to be calibrated."""

    logits: list[list[float]] = Field(description="one row a sample, one number a class")
    method: str | None = Field(None, description="one of the fitted methods; the chosen one by default")


class Applied(BaseModel):
    """Calibrated logits and the probabilities they stand for."""

    method: str
    logits: list[list[float]]
    probs: list[list[float]]


class Listed(BaseModel):
    """A method or a metric."""

    name: str
    title: str
    summary: str = Field(description="what it is, in a sentence")
    default: bool = Field(description="whether it is used unless told otherwise")


class LimitsInfo(BaseModel):
    """What the server takes."""

    upload_bytes: int
    rows: int
    classes: int
    numbers: int
    seconds: float = Field(description="how long data is kept after it was last used")
    suffixes: list[str]
