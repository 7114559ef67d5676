"""Multi-label predictions: metrics over all labels (micro), of each label, and their mean (macro)."""

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
"""Metrics of each label and of the mean over the labels."""
_MAX_BLOCKS = 100
"""Number of blocks of rows in the jackknife of the mean over labels."""


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Metrics of all labels at once, of each label, and their mean over the labels."""

    micro: Scores
    """Every label of every row has the same weight; intervals allow for the correlation within a row."""
    labels: Mapping[str, Mapping[str, Interval]]
    """By label, then by metric."""
    macro: Mapping[str, Interval]
    """Mean over the labels with equal weights; labels without both outcomes have no AUROC and are left out."""

    def table(self) -> list[Row]:
        """Return one row per label as text; the first row holds the heads."""
        names = list(self.macro)
        rows: list[Row] = [["label", *names]]
        for label, scores in self.labels.items():
            rows.append([label, *(format_number(scores[name].value) for name in names)])
        rows.append(["mean (macro)", *(format_number(i.value) for i in self.macro.values())])
        level = format_percent(self.micro.level)
        rows.append([f"{level} interval", *(format_interval(i.low, i.high) for i in self.macro.values())])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""

        def plain(scores: Mapping[str, Interval]) -> dict[str, Any]:
            ends = ("value", "low", "high")
            return {name: plain_record({end: getattr(i, end) for end in ends}) for name, i in scores.items()}

        labels = {label: plain(metrics) for label, metrics in self.labels.items()}
        return {"micro": self.micro.to_dict(), "macro": plain(self.macro), "labels": labels}

    def note(self) -> str:
        """Return a note below the table; usually empty."""
        if not any(i.value > i.high for i in self.macro.values()):
            return ""
        return "Noise increases binned errors, most of all with few rows. The interval is for the true mean error."

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
    """Score the log-odds of multiple labels against targets: micro, macro and by label.

    Parameters
    ----------
    logits
        Log-odds, shape (n, labels), or probabilities with `probs`.
    targets
        1, 0 or `ignore_index`, shape (n, labels).
    class_names
        Names of the labels.
    ignore_index
        Target of entries that do not count.
    probs
        Read `logits` as probabilities.
    clusters
        Cluster of each row, shape (n,), where rows are correlated; by default each row is one cluster of labels.
    bins
        Number of bins.
    **resampling
        `level`, `n_resamples` and `seed`: the level of the interval, the number of resamples, and the random seed.

    Returns
    -------
    LabelScores
        Tables; ``scores.micro["ece"]`` and ``scores.macro["ece"]`` are intervals.

    Examples
    --------
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
    """Score a table of `from_multilabel`, as `evaluate_labels` does."""
    simulation = Resampling(**resampling)
    if table.clusters is None or "label" not in table.groups:
        raise InputError("table", "come from from_multilabel", "one without labels and rows")
    micro = evaluate(table.logits, table.labels, **table.options(), bins=bins, **resampling)
    codes = table.groups["label"]
    parts: dict[str, ScoredRows] = {}
    labels: dict[str, dict[str, Interval]] = {}
    everyone = as_clusters(table.clusters, len(codes), min_clusters=2)
    assert everyone is not None
    blocks, block = min(_MAX_BLOCKS, everyone.count), []
    for name in dict.fromkeys(codes.tolist()):
        rows = np.flatnonzero(codes == name)
        block.append(everyone.code[rows] % blocks)
        part, of_row = take_rows(table, rows), everyone.take(rows)
        repeated = of_row.count < len(rows)  # if each cluster is a row, the rows of a label are independent
        scored = ScoredRows.of(
            *part, bins=bins, sample_weight=part.sample_weight, clusters=of_row if repeated else None
        )
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
    """Average over the labels; the error comes from the jackknife over blocks of rows that all labels share."""
    tail, size = tail_share(level), np.bincount(np.concatenate(block), minlength=blocks)
    t = t_quantile(tail, degrees_of_freedom(size[size > 0]))
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
        some = np.isfinite(without)  # a label may lack an outcome without a block
        means = np.where(some, without, 0.0).sum(axis=0) / np.maximum(some.sum(axis=0), 1)
        error = jackknife_error(mean, means) if some.any(axis=0).all() else math.nan
        low, high = max(mean - t * error, 0.0), mean + t * error
        result[name] = Interval(mean, low, high if name == "nll" else min(high, 1.0), level)
    return result


def _without(scored: ScoredRows, block: np.ndarray, blocks: int, name: str) -> np.ndarray:
    """Compute a label's metric without each block of rows, (blocks,)."""
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
    """Return the interval of the labels' mean ECE, computed as for the class-wise error, with the noise by block."""
    gaps = []
    for scored, each in zip(parts, block, strict=True):
        bins = scored.tally.grid.bins
        weights = np.ones(len(each)) if scored.sample_weight is None else scored.sample_weight
        cell = each * bins + bin_index(scored.rows.score, equal_width(bins), rounding=scored.rounding)
        gap = np.bincount(cell, weights * (scored.rows.outcome - scored.rows.score), blocks * bins)
        gaps.append(gap.reshape(blocks, bins) / weights.sum())
    by_block = np.stack(gaps, axis=1)  # (blocks, labels, bins)
    gap = by_block.sum(axis=0)
    deviation = (by_block - gap / blocks) * math.sqrt(blocks / max(blocks - 1, 1))
    influence = (deviation * np.sign(gap)).sum(axis=(1, 2)) / len(parts)
    sigma, size = np.sqrt((deviation**2).sum(axis=0)), float(len(parts))
    observed = float(np.abs(gap).sum() / size)
    return Classwise(gap, sigma, size, influence, math.inf, observed, df=float(blocks - 1)).interval(tail)
