"""Labels by the dozen: metrics over all of them (micro), each of them, and their mean (macro)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from trueup._core.bins import BINS, bin_index, equal_width
from trueup._core.clusters import Clusters, ClustersLike, as_clusters, degrees_of_freedom, t_quantile
from trueup._core.errors import InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, html_table, text_table
from trueup._core.types import ArrayLike
from trueup.io.predictions import PredictionTable, from_multilabel, take_rows
from trueup.metrics.intervals import Interval, ScoredRows, intervals
from trueup.metrics.resampling import Classwise, Resampling, ResamplingOptions, jackknife_error, tail_share
from trueup.metrics.table import Scores, evaluate, plain_record

LABEL_METRICS = ("predicted", "observed", "nll", "event_brier", "ece", "auroc")
"""The metrics of each label, and of the mean over the labels."""
_BLOCKS = 100
"""Into how many blocks of rows the mean over labels is divided for its error."""


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Metrics of all labels together, of each, and their mean over the labels."""

    micro: Scores
    """Every label of every row counts alike; intervals know that those of one row are correlated."""
    labels: Mapping[str, Mapping[str, Interval]]
    """By label, then by metric."""
    macro: Mapping[str, Interval]
    """The mean over the labels, each counting alike; a label without both outcomes has no AUROC and is left out."""

    def table(self) -> list[Row]:
        """A row for each label, the first the heads."""
        names = list(self.macro)
        rows: list[Row] = [["label", *names]]
        for label, found in self.labels.items():
            rows.append([label, *(format_number(found[name].value) for name in names)])
        rows.append(["mean (macro)", *(format_number(i.value) for i in self.macro.values())])
        level = format_percent(self.micro.level)
        rows.append([f"{level} interval", *(format_interval(i.low, i.high) for i in self.macro.values())])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""

        def plain(found: Mapping[str, Interval]) -> dict[str, Any]:
            ends = ("value", "low", "high")
            return {name: plain_record({end: getattr(i, end) for end in ends}) for name, i in found.items()}

        labels = {label: plain(found) for label, found in self.labels.items()}
        return {"micro": self.micro.to_dict(), "macro": plain(self.macro), "labels": labels}

    def note(self) -> str:
        """A note below the table; empty as a rule."""
        if not any(i.value > i.high for i in self.macro.values()):
            return ""
        return "Noise makes binned errors of few rows larger than they are; the interval is of the true mean error."

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [str(self.micro), text_table(self.table()), self.note()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        return f"{self.micro._repr_html_()}{html_table(head, rows)}"


def evaluate_labels(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    ignore_index: int = -100,
    probs: bool = False,
    clusters: ClustersLike = None,
    bins: int = BINS,
    **resampling: Unpack[ResamplingOptions],
) -> LabelScores:
    """Score log-odds (n, labels) against targets (n, labels), 1, 0 or `ignore_index`: micro, macro and each label.

    With `probs` the numbers are probabilities. `clusters`, one value a row of the n, say which rows are correlated, as
    those of `evaluate`; without them each row is one.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2000, 3))
    >>> y = (rng.random(x.shape) < 1 / (1 + np.exp(-x))).astype(int)
    >>> scores = evaluate_labels(3 * x, y, class_names=["cat", "dog", "car"])
    >>> scores.micro["ece"].low > 0.1, scores.macro["ece"].low > 0.1, list(scores.labels)
    (True, True, ['cat', 'dog', 'car'])
    """
    table = from_multilabel(logits, targets, class_names=class_names, ignore_index=ignore_index, probs=probs)
    if clusters is not None:
        of_row = as_clusters(clusters, np.shape(logits)[0], min_clusters=2)
        assert of_row is not None
        assert table.clusters is not None
        table = replace(table, clusters=of_row.code[table.clusters], cluster_name=of_row.name)
    return scores_of_labels(table, bins=bins, **resampling)


def scores_of_labels(
    table: PredictionTable, *, bins: int = BINS, **resampling: Unpack[ResamplingOptions]
) -> LabelScores:
    """The same of a table of `from_multilabel`."""
    simulation = Resampling(**resampling)
    if table.clusters is None or "label" not in table.groups:
        raise InputError("table", "come from from_multilabel", "one without labels and rows")
    micro = evaluate(table.logits, table.labels, **table.options(), bins=bins, **resampling)
    codes = table.groups["label"]
    parts: dict[str, ScoredRows] = {}
    labels: dict[str, dict[str, Interval]] = {}
    everyone = as_clusters(table.clusters, len(codes), min_clusters=2)
    assert everyone is not None
    blocks, block = min(_BLOCKS, everyone.count), []
    for name in dict.fromkeys(codes.tolist()):
        mine = np.flatnonzero(codes == name)
        block.append(everyone.code[mine] % blocks)
        part, alone = take_rows(table, mine), everyone.take(mine)
        repeated = alone.count < len(mine)  # where a cluster is a row, each label has one of it
        scored = ScoredRows.of(*part, bins=bins, sample_weight=part.sample_weight, clusters=alone if repeated else None)
        parts[str(name)] = scored
        labels[str(name)] = intervals(scored.tally, scored.values(LABEL_METRICS), simulation, scored=scored)
    values = {name: np.array([label[name].value for label in labels.values()]) for name in LABEL_METRICS}
    return LabelScores(micro, labels, _macro(list(parts.values()), values, block, blocks, simulation.level))


def _macro(
    parts: Sequence[ScoredRows],
    values: Mapping[str, np.ndarray],
    block: Sequence[np.ndarray],
    blocks: int,
    level: float,
) -> dict[str, Interval]:
    """Means over the labels; their error by the jackknife over blocks of rows, which all labels share."""
    tail, size = tail_share(level), np.bincount(np.concatenate(block), minlength=blocks)
    reach = t_quantile(tail, degrees_of_freedom(size[size > 0]))
    result = {}
    for name, of_label in values.items():
        known = np.isfinite(of_label)
        if not known.any():
            result[name] = Interval(math.nan, math.nan, math.nan, level)
            continue
        mean = float(of_label[known].mean())
        if name == "ece":
            result[name] = Interval(mean, *_macro_ece(parts, block, blocks, tail), level)
            continue
        without = np.stack([_without(scored, each, blocks, name) for scored, each in zip(parts, block, strict=True)])
        some = np.isfinite(without)  # a label may lack an outcome, also without a block
        means = np.where(some, without, 0.0).sum(axis=0) / np.maximum(some.sum(axis=0), 1)
        error = jackknife_error(mean, means) if some.any(axis=0).all() else math.nan
        low, high = max(mean - reach * error, 0.0), mean + reach * error
        result[name] = Interval(mean, low, high if name == "nll" else min(high, 1.0), level)
    return result


def _without(scored: ScoredRows, block: np.ndarray, blocks: int, name: str) -> np.ndarray:
    """A label's metric without each block of rows, (blocks,)."""
    if name in ("event_brier", "auroc"):
        points = replace(scored, clusters=Clusters(block, list(range(blocks)))).clustered_points()
        without = np.full(blocks, scored.value(name))
        without[np.unique(block)] = points.without.values([name])[name]
        return without
    values = {"nll": scored.rows.nll, "predicted": scored.rows.score, "observed": scored.rows.outcome}[name]
    weights = np.ones(len(values)) if scored.sample_weight is None else scored.sample_weight
    sums, count = (np.bincount(block, x, blocks) for x in (weights * values, weights))
    return (sums.sum() - sums) / (count.sum() - count)


def _macro_ece(
    parts: Sequence[ScoredRows], block: Sequence[np.ndarray], blocks: int, tail: float
) -> tuple[float, float]:
    """The mean ECE of labels as the class-wise error has its interval: gaps in all cells, their noise by block."""
    gaps = []
    for scored, each in zip(parts, block, strict=True):
        bins = scored.tally.grid.bins
        weights = np.ones(len(each)) if scored.sample_weight is None else scored.sample_weight
        place = each * bins + bin_index(scored.rows.score, equal_width(bins), rounding=scored.rounding)
        gap = np.bincount(place, weights * (scored.rows.outcome - scored.rows.score), blocks * bins)
        gaps.append(gap.reshape(blocks, bins) / weights.sum())
    by_block = np.stack(gaps, axis=1)  # (blocks, labels, bins)
    gap = by_block.sum(axis=0)
    off = (by_block - gap / blocks) * math.sqrt(blocks / max(blocks - 1, 1))
    influence = (off * np.sign(gap)).sum(axis=(1, 2)) / len(parts)
    sigma, size = np.sqrt((off**2).sum(axis=0)), float(len(parts))
    observed = float(np.abs(gap).sum() / size)
    return Classwise(gap, sigma, size, influence, math.inf, observed, df=float(blocks - 1)).interval(tail)
