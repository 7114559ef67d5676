"""Diagrams of the page: the report's records, and their charts as marks on axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup import metrics
from trueup._core.arrays import as_arrays, take_rows, upcast_half
from trueup._core.clusters import Clusters
from trueup.io.predictions import Predictions
from trueup.metrics.table import DEFAULT, compare
from trueup.reports.audit import Audit
from trueup.reports.figures import chart, numbers, summary
from trueup.reports.figures.reliability import reliability
from trueup.serve.models import Curve, Difference, GroupPanel, GroupsInfo, Promises, SetsInfo

RESAMPLES = 400
"""Number of resamples for the band; few, so that a slider responds at once."""


def curve(
    pair: Predictions, *, method: str = "raw", temperature: float = 1.0, bins: int = 15, clusters: Any = None
) -> Curve:
    """Compute the reliability diagram of logits divided by a temperature."""
    z, y = as_arrays(*pair)
    z = upcast_half(z) if temperature == 1 else upcast_half(z) / temperature
    record = reliability(z, y, bins=bins, clusters=clusters, n_resamples=RESAMPLES)
    full = record.count > 0
    means = {
        name: float(record.count[full] @ getattr(record, name)[full]) / max(record.rows, 1)
        for name in ("accuracy", "confidence")
    }
    figures: Any = {**vars(record), **means, "nll": metrics.nll(z, y), "chart": chart(record, legend=False).to_dict()}
    return Curve(method=method, temperature=temperature, bins=bins, **figures)


def side_by_side(pairs: dict[str, Predictions], *, bins: int = 15, clusters: Any = None) -> Difference:
    """Compute two diagrams and the metrics of both, with paired changes."""
    first, second = (curve(pair, method=name, bins=bins, clusters=clusters) for name, pair in pairs.items())
    scores = compare(pairs, metrics=DEFAULT, bins=bins, clusters=clusters, n_resamples=RESAMPLES).to_dict()
    return Difference(first=first, second=second, scores=scores)


def groups(result: Audit) -> GroupsInfo:
    """Compute the tables and charts of groups before and after calibration, as in the report."""
    from trueup.reports.figures.groups import section

    shown = section(result)
    if shown is None:
        raise ValueError("there are no groups: name their columns when you upload the file")
    panels = []
    for panel in shown.panels:
        head, rows = numbers(panel.record)
        texts: Any = {"title": panel.title, "summary": summary(panel.record), "head": head, "rows": rows}
        panels.append(GroupPanel(chart=chart(panel.record, **panel.options).to_dict(), **texts))
    return GroupsInfo(text=shown.text, panels=panels)


def independent_rows(pair: Predictions, clusters: Clusters | None) -> tuple[Predictions, str]:
    """Select one row per cluster, since a promise needs independent rows; return a note about it."""
    if clusters is None:
        return pair, ""
    kept = clusters.one_row_each(0)
    note = (
        f"One row per {clusters.name} is used ({clusters.count:,}), since rows of one {clusters.name} are correlated."
    )
    return Predictions(pair.logits[kept], pair.labels[kept]), note


def promises(
    pair: Predictions, *, method: str, level: float, cross_fitted: bool, clusters: Clusters | None = None
) -> Promises:
    """Compute the guarantee for each allowed error rate, for the page's slider."""
    from trueup.reports.figures.promise import promise, sentence

    pair, note = independent_rows(pair, clusters)
    record = promise(*pair, level=level)
    drawn = chart(record, legend=False).to_dict()
    del drawn["slider"]  # the page has its own
    if cross_fitted and method != "raw":
        approximate = "The rows were cross-fitted, so the guarantee is approximate; separate test rows make it exact."
        note = f"{note} {approximate}".strip()
    arrays: Any = {
        name: [float(x) if np.isfinite(x) else None for x in getattr(record, name)]
        for name in ("allowed", "threshold", "coverage", "observed")
    }
    text = [sentence(record, i) for i in range(len(record.allowed))]
    return Promises(method=method, rows=record.rows, level=record.level, **arrays, text=text, note=note, chart=drawn)


def sets(pair: Predictions, *, method: str, score: Any, coverage: float, clusters: Clusters | None = None) -> SetsInfo:
    """Fit prediction sets on one half of the rows and evaluate them on the other half."""
    from trueup._core.splits import stratified_folds
    from trueup.decisions.prediction_sets import PredictionSets, evaluate_sets

    pair, note = independent_rows(pair, clusters)
    z, y = as_arrays(*pair)
    if len(z) < 4:
        raise ValueError(f"prediction sets need at least 4 rows, half of them for evaluation; got {len(z)}")
    half = stratified_folds(z, y, 2)
    rule = PredictionSets.fit(*take_rows(z, y, half == 0), score=score, coverage=coverage)
    logits, labels = take_rows(z, y, half == 1)
    scores = evaluate_sets(rule(logits), labels)
    described: Any = {"rows": scores.coverage.rows, "text": str(scores), "scores": scores.to_dict()}
    return SetsInfo(method=method, score=score, coverage=coverage, note=note, **described)
