"""Diagrams for the page: the report's own records and charts, as data for plotly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from trueup import metrics
from trueup.core.arrays import as_tensors, upcast_half
from trueup.io.predictions import Predictions
from trueup.metrics.table import DEFAULT, compare
from trueup.report.figures import chart
from trueup.report.figures.reliability import reliability
from trueup.serve.models import Curve, Difference

RESAMPLES = 400
"""For the band: a slider has to answer at once."""


def curve(pair: Predictions, *, method: str = "raw", temperature: float = 1.0, bins: int = 15) -> Curve:
    """The reliability diagram of a pair whose logits are divided by a temperature."""
    z, y = as_tensors(*pair, doubt=False)
    z = upcast_half(z) if temperature == 1 else upcast_half(z) / temperature
    record = reliability(z, y, bins=bins, n_resamples=RESAMPLES)
    full = record.count > 0
    count, n = record.count[full], max(record.rows, 1)
    return Curve(
        method=method,
        temperature=temperature,
        bins=bins,
        rows=record.rows,
        ece=record.ece,
        nll=metrics.nll(z, y),
        accuracy=float(count @ record.accuracy[full]) / n,
        confidence=float(count @ record.confidence[full]) / n,
        chart=as_json(record),
    )


def side_by_side(pairs: dict[str, Predictions], *, bins: int = 15) -> Difference:
    """Two diagrams and the metrics of both, with paired changes."""
    first, second = (curve(pair, method=name, bins=bins) for name, pair in pairs.items())
    scores = compare(pairs, metrics=DEFAULT, bins=bins, n_resamples=RESAMPLES).to_dict()
    return Difference(first=first, second=second, scores=scores)


def as_json(record: Any) -> dict[str, Any]:
    """A record's chart as plain data: traces and layout."""
    drawn: dict[str, Any] = json.loads(chart(record).to_json())
    return drawn


def probabilities(logits: np.ndarray) -> list[list[float]]:
    """Softmax of each row, as plain lists."""
    rows: list[list[float]] = torch.softmax(torch.from_numpy(logits).double(), dim=1).tolist()
    return rows
