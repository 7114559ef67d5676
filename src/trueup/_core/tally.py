"""Tallies: small frozen sums that add up over chunks, files and machines and give the whole table at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
from scipy.special import logit

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import (
    BINNED_ERRORS,
    BINS,
    Bins,
    bin_index,
    cut_points,
    equal_mass_chunks,
    equal_width,
    rounding_error,
)
from trueup._core.clusters import MAX_BLOCKS, as_clusters
from trueup._core.formatting import format_number, html_summary
from trueup._core.row_scores import ClassCells, ClassTally, RowScores, score_rows_and_classes
from trueup._core.types import ArrayLike

T = TypeVar("T", bound=Any)

MEAN_METRICS = ("accuracy", "confidence", "predicted", "observed", "nll", "brier", "entropy")
"""Metrics that are means over the rows."""

TABLE_METRICS = (*MEAN_METRICS, *BINNED_ERRORS, "aece", "sce")
"""All metrics that a tally can compute."""

_GRID_CELLS = 4096
"""Approximate number of cells of the confidence grid; the exact number is a multiple of the bins."""


def _add_fields(one: T, other: T, kept: tuple[str, ...] = (), **changes: Any) -> T:
    """Add two records field by field, except for fields that are kept from the first or given in `changes`."""
    summed = (f.name for f in fields(one) if f.name not in (*kept, *changes))
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in summed}, **changes)


@dataclass(frozen=True)
class Mean:
    """A mergeable mean with its standard error.

    >>> Mean.of(np.array([1.0, 2.0])) + Mean.of(np.array([6.0]))
    Mean(count=3.0, total=9.0, squares=41.0, squared_weights=3.0)
    >>> (Mean.of(np.array([1.0, 2.0])) + Mean.of(np.array([6.0]))).value
    3.0
    """

    count: float
    """Number of rows, or their total weight Σw."""
    total: float
    """Σwv, the weighted sum of the values."""
    squares: float
    """Σwv²."""
    squared_weights: float
    """Σw²."""

    @classmethod
    def of(cls, values: np.ndarray, sample_weight: np.ndarray | None = None) -> Mean:
        """Tally one number per row.

        Parameters
        ----------
        values
            One number per row, shape (n,).
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Mean
            The tally.
        """
        if sample_weight is None:
            n = float(len(values))
            return cls(n, float(values.sum()), float(values @ values), n)
        weighted = sample_weight * values
        sums = sample_weight.sum(), weighted.sum(), weighted @ values, sample_weight @ sample_weight
        return cls(*map(float, sums))

    @classmethod
    def empty(cls) -> Mean:
        """Return the mean of no rows."""
        return cls(0.0, 0.0, 0.0, 0.0)

    def __add__(self, other: Mean) -> Mean:
        return _add_fields(self, other)

    @property
    def value(self) -> float:
        """The mean; NaN without rows."""
        return self.total / self.count if self.count else float("nan")

    @property
    def effective_rows(self) -> float:
        """The number of equally weighted rows with the same information, (Σw)²/Σw²."""
        return self.count**2 / self.squared_weights if self.squared_weights else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN with fewer than two rows."""
        n = self.effective_rows
        if n < 1 + 1e-9:
            return float("nan")
        variance = max(self.squares - self.total**2 / self.count, 0.0) / self.count * n / (n - 1)
        return math.sqrt(variance / n)


@dataclass(frozen=True, eq=False)
class Grid:
    """Counts and score sums in about 4,000 fixed cells, by outcome; resampling and equal-mass bins need no more.

    The grid divides each equal-width bin evenly, so coarser bins are exact. Cells become geometrically smaller towards
    0, where rare events are, and towards 1, where confidences of networks concentrate.
    """

    edges: np.ndarray
    bins: int
    """Number of equal-width bins that the grid divides."""
    count: np.ndarray
    """(2, cells): number of rows, or their weight, with outcome 0 and outcome 1."""
    confidence: np.ndarray
    """(2, cells): sums of the scores."""
    squared_weights: np.ndarray
    """(2, cells): Σw², which equals the count if all weights are 1."""

    @classmethod
    def of(
        cls,
        confidence: np.ndarray,
        correct: np.ndarray,
        *,
        bins: int = BINS,
        rounding: float = 0.0,
        sample_weight: np.ndarray | None = None,
    ) -> Grid:
        """Tally trusted scores and outcomes."""
        edges = cls.fine_edges(bins)
        size = len(edges) - 1
        index = bin_index(confidence, edges, rounding=rounding) + size * correct.astype(np.int64)
        w = sample_weight
        count = np.bincount(index, w, minlength=2 * size).astype(np.float64).reshape(2, size)
        total = np.bincount(index, confidence if w is None else w * confidence, minlength=2 * size).reshape(2, size)
        squared = count if w is None else np.bincount(index, w * w, minlength=2 * size).reshape(2, size)
        return cls(edges, bins, count, total, squared)

    @staticmethod
    @lru_cache(maxsize=4)
    def fine_edges(bins: int) -> np.ndarray:
        """Return the edges of about four thousand even cells, and of eight cells per octave towards 0 and 1."""
        even = equal_width(bins * math.ceil(_GRID_CELLS / bins))
        distance = (even[1] - even[0]) * 2.0 ** (-np.arange(1, 8 * 41) / 8)
        edges: np.ndarray = np.unique(np.concatenate([even, distance, 1.0 - distance]))
        edges.flags.writeable = False  # shared by all grids with this number of bins
        return edges

    def __add__(self, other: Grid) -> Grid:
        if self.bins != other.bins:
            raise ValueError(f"tallies must have the same number of bins to be added, got {self.bins} and {other.bins}")
        return _add_fields(self, other, kept=("edges", "bins"))

    @property
    def rows(self) -> np.ndarray:
        """Number of rows in each cell, or their weight."""
        return self.count.sum(axis=0)

    def bin_of_cell(self) -> np.ndarray:
        """Return the equal-width bin of each cell."""
        return bin_index(self.edges[1:], equal_width(self.bins))

    def equal_mass_of_cell(self) -> np.ndarray:
        """Return the equal-mass bin of each cell; a cut inside a cell moves to the cell's end."""
        return np.searchsorted(self._cells_with_bin_ends(), np.arange(len(self.edges) - 1), side="left")

    def binned(self, index: np.ndarray) -> Bins:
        """Gather the cells into bins; exact for equal-width ones."""
        size = int(index.max()) + 1 if len(index) else 1
        bin_ends = np.flatnonzero(np.diff(index, append=index[-1] + 1))
        edges = np.concatenate([[0.0], self.edges[bin_ends + 1]])
        sums = self.rows, self.confidence.sum(axis=0), self.count[1]
        count, confidence, hits = (np.bincount(index, weights=w, minlength=size).astype(np.float64) for w in sums)
        return Bins(edges, count, confidence, hits)

    def aece(self) -> float:
        """Return the adaptive ECE of the grid; `aece_error` bounds its distance from the exact one."""
        return self.binned(self.equal_mass_of_cell()).ece()

    def aece_error(self) -> float:
        """Return the largest possible distance between `aece` and the exact adaptive ECE of the same rows.

        Let a be the outcome of a row and c its score. Exact cuts may split a cell that the grid keeps whole. Moving a
        set of rows between bins changes Σ|Σ(a − c)| by at most twice |Σ(a − c)| over the set. That is at most Σ|a − c|
        over the cell.
        """
        n = self.count.sum()
        if not n:
            return float("nan")
        cut = self._cells_with_bin_ends()
        wrong, right = self.confidence[0, cut], self.count[1, cut] - self.confidence[1, cut]
        squared = self.squared_weights[:, cut].sum(axis=0)
        divisible = self.rows[cut] ** 2 > (1 + 1e-9) * squared  # a single row cannot be divided
        return float(2 * ((wrong + right) * divisible).sum() / n)

    def _cells_with_bin_ends(self) -> np.ndarray:
        """Return the cells in which an equal-mass bin ends, because the next cell starts another bin."""
        filled = np.flatnonzero(self.rows > 0)
        rows = self.rows[filled]
        total = float(rows.sum())
        below = np.concatenate([[0.0], np.cumsum(rows)[:-1]])
        chunk = equal_mass_chunks(below, total, self.bins) if total else np.zeros(0, np.int64)
        return filled[:-1][np.diff(chunk) > 0]


_ROW_COLUMNS = {"accuracy": "correct", "predicted": "score", "observed": "outcome"}
"""Columns of `RowScores` for metrics with another name."""


def row_values(rows: RowScores, metric: str) -> np.ndarray:
    """Return one number per row whose mean is a metric of `MEAN_METRICS`, or another of `ClusterSums.NAMES`."""
    if metric == "slope_gap":
        return (rows.outcome - rows.score) * logit(np.clip(rows.score, 1e-15, 1 - 1e-15))
    if metric == "calibration_gap":
        return (rows.outcome - rows.score) * (1 - 2 * rows.score)
    return getattr(rows, _ROW_COLUMNS.get(metric, metric))


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """Sums by block of clusters, for intervals where the rows of a cluster are correlated."""

    weight: np.ndarray
    """(blocks,): number of rows, or their weight."""
    means: np.ndarray
    """(blocks, names): sums, not yet divided by `weight`, of the quantities in `NAMES`."""
    count: np.ndarray
    """(blocks, bins)."""
    gap: np.ndarray
    """(blocks, bins): sums of outcome − score."""

    NAMES: ClassVar[tuple[str, ...]] = (*MEAN_METRICS, "calibration_gap", "slope_gap")

    @classmethod
    def of(
        cls,
        rows: RowScores,
        block: np.ndarray,
        blocks: int,
        bins: int,
        rounding: float,
        sample_weight: np.ndarray | None,
    ) -> ClusterSums:
        """Sum the scores of rows by the block of each row."""
        w = np.ones(len(block)) if sample_weight is None else sample_weight
        means = [np.bincount(block, w * row_values(rows, name), blocks) for name in cls.NAMES]
        cell = block * bins + bin_index(rows.score, equal_width(bins), rounding=rounding)
        count, gap = (
            np.bincount(cell, x, blocks * bins).reshape(blocks, bins) for x in (w, w * (rows.outcome - rows.score))
        )
        return cls(np.bincount(block, w, blocks), np.stack(means, axis=1), count, gap)

    def __add__(self, other: ClusterSums) -> ClusterSums:
        return _add_fields(self, other)

    def drop_empty(self) -> ClusterSums:
        """Drop blocks without rows."""
        has_rows = self.weight > 0
        return ClusterSums(*(getattr(self, f.name)[has_rows] for f in fields(self)))

    def mean(self, metric: str) -> np.ndarray:
        """Return the sums of one of `NAMES` by block, shape (blocks,), not yet divided by `weight`."""
        return self.means[:, self.NAMES.index(metric)]


@dataclass(frozen=True, eq=False)
class Tally:
    """All sums behind the table of `evaluate`, in memory that does not grow with the number of rows.

    >>> import trueup
    >>> first, second = np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.0]])
    >>> tally = trueup.metrics.Tally.of(first, [0, 1]) + trueup.metrics.Tally.of(second, [1])
    >>> tally.n, round(tally.accuracy.value, 4), round(tally.score_bins.ece(), 4)
    (3, 0.6667, 0.3369)
    """

    rows: float
    """Number of rows, as a float that adds up; `n` is the same number as an integer."""
    accuracy: Mean
    """Share of correct predictions."""
    confidence: Mean
    """Probability of the predicted class."""
    predicted: Mean
    """The score: P(class 1) with two classes; the confidence with more, or with `top_label`."""
    observed: Mean
    """The outcome: the label is class 1, or the prediction is correct."""
    nll: Mean
    """Negative log-likelihood."""
    brier: Mean
    """Brier score."""
    entropy: Mean
    """Entropy of the probabilities in nats."""
    calibration_gap: Mean
    """(a − c)(1 − 2c) with score c and outcome a: Spiegelhalter's numerator."""
    calibration_variance: Mean
    """(1 − 2c)² c (1 − c), the variance of `calibration_gap`, with squared weights."""
    score_variance: Mean
    """c (1 − c), the variance of Σ(a − c) under calibration, with squared weights."""
    grid: Grid
    """The score and the outcome in fine bins, for adaptive errors and the binned errors."""
    classes: Bins
    """Probability and frequency of each class in bins."""
    gap: np.ndarray
    """Class-wise sums of hits − probability, (groups, K, B), in 8 to 32 groups of rows.

    Their spread estimates the noise of the class-wise error.
    """
    weight_of_group: np.ndarray
    """Total weight of each group of rows."""
    top_label: bool
    """Whether two classes were tallied by the predicted class instead of class 1."""
    clusters: ClusterSums | None = None
    """Sums by block of clusters, if the rows have clusters."""

    def __repr__(self) -> str:
        return f"Tally({', '.join(f'{name} {value}' for name, value in self._figures().items())})"

    def _repr_html_(self) -> str:
        return html_summary("Tally", self._figures())

    def _figures(self) -> dict[str, str]:
        means = {"accuracy": self.accuracy.value, "confidence": self.confidence.value, "nll": self.nll.value}
        means["ece"] = self.score_bins.ece()
        return {"rows": f"{self.n:,}", **{name: format_number(value) for name, value in means.items()}}

    @classmethod
    def of(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        bins: int = BINS,
        top_label: bool = False,
        sample_weight: ArrayLike | None = None,
        clusters: Any = None,
    ) -> Tally:
        """Tally a pair of logits and labels in one pass.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        labels
            Class of each row, shape (n,).
        bins
            Number of equal-width bins.
        top_label
            With two classes, tally the confidence of the predicted class instead of P(class 1).
        sample_weight
            Weight of each row, shape (n,).
        clusters
            Cluster of each row, shape (n,), where rows are correlated. A cluster may continue in another tally.

        Returns
        -------
        Tally
            The tally; tallies add up with `+`.
        """
        z, y = as_arrays(logits, labels)
        w, unit = as_weights(sample_weight, len(z)), rounding_error(z)
        cells = replace(class_cells(z.shape[1], bins, unit), weights=w)
        of_row = as_clusters(clusters, len(z))
        if of_row is not None:  # all rows of a cluster go to one group
            cells = replace(cells, group=of_row.hash_blocks(cells.groups))
        scored, classes = score_rows_and_classes(z, y, cells, top_label=top_label)
        tally = cls.from_rows(scored, classes, bins, unit, top_label=top_label, sample_weight=w)
        if of_row is None:
            return tally
        return replace(tally, clusters=ClusterSums.of(scored, of_row.hash_blocks(), MAX_BLOCKS, bins, unit, w))

    @classmethod
    def from_rows(
        cls,
        rows: RowScores,
        classes: ClassTally,
        bins: int,
        rounding: float,
        *,
        top_label: bool = False,
        sample_weight: np.ndarray | None = None,
    ) -> Tally:
        """Tally the scores of rows.

        Parameters
        ----------
        rows
            Scores of the rows.
        classes
            Probability and frequency of each class in bins.
        bins
            Number of bins.
        rounding
            Distance from an edge within which a score counts as on the edge.
        top_label
            Whether two classes are tallied by the predicted class.
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Tally
            The tally.
        """
        w, squared = sample_weight, None if sample_weight is None else sample_weight**2
        score, variance = rows.score, rows.score * (1 - rows.score)
        same = {"predicted": "confidence", "observed": "accuracy"} if score is rows.confidence else {}
        names = [name for name in (*MEAN_METRICS, "calibration_gap") if name not in same]
        means: dict[str, Any] = {name: Mean.of(row_values(rows, name), w) for name in names}
        means |= {name: means[other] for name, other in same.items()}
        return cls(
            rows=float(len(score)),
            **means,
            calibration_variance=Mean.of((1 - 2 * score) ** 2 * variance, squared),
            score_variance=Mean.of(variance, squared),
            grid=Grid.of(score, rows.outcome, bins=bins, rounding=rounding, sample_weight=w),
            classes=Bins(equal_width(bins), classes.counts, classes.confidence, classes.hits),
            gap=classes.gap,
            weight_of_group=np.bincount(rows.group, w, minlength=len(classes.gap)).astype(np.float64),
            top_label=top_label,
        )

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        if self.gap.shape != other.gap.shape:
            shapes = f"{self.gap.shape[1:]} and {other.gap.shape[1:]}"
            raise ValueError(f"tallies must have the same classes and bins to be added, got {shapes}")
        if self.is_event != other.is_event:
            raise ValueError("tallies must both have top_label or neither, to be added")
        if (self.clusters is None) != (other.clusters is None) and self.rows and other.rows:
            raise ValueError("tallies must both have clusters or neither, to be added")
        both = [one.clusters for one in (self, other) if one.clusters is not None]
        clusters = both[0] + both[1] if len(both) == 2 else both[0] if both else None
        return _add_fields(self, other, kept=("top_label",), clusters=clusters)

    @property
    def n(self) -> int:
        """The number of rows, `rows` as an integer."""
        return int(self.rows)

    @property
    def is_event(self) -> bool:
        """Whether the score is the probability of class 1: two classes, without `top_label`."""
        return len(self.classes.count) == 2 and not self.top_label

    @property
    def effective_rows(self) -> float:
        """The number of equally weighted rows with the same information, (Σw)²/Σw²."""
        return self.accuracy.effective_rows

    def value(self, metric: str) -> float:
        """Return a number of the table, by its name in `TABLE_METRICS`.

        Parameters
        ----------
        metric
            Name of the metric.

        Returns
        -------
        float
            The number; NaN without rows.
        """
        if metric in MEAN_METRICS:
            mean: Mean = getattr(self, metric)
            return mean.value
        if metric in BINNED_ERRORS:
            return self.score_bins.error(metric)
        if metric in ("aece", "sce"):
            return self.grid.aece() if metric == "aece" else self.classes.ece()
        raise ValueError(f"metric must be one of {', '.join(TABLE_METRICS)}, got {metric!r}")

    @cached_property
    def score_bins(self) -> Bins:
        """Equal-width bins of the score: P(class 1) with two classes; the confidence with more, or with `top_label`."""
        return self.grid.binned(self.grid.bin_of_cell())


def class_cells(classes: int, bins: int, rounding: float) -> ClassCells:
    """Return the cells of class-wise tallies; with very many classes there are fewer groups, to limit memory."""
    inner = cut_points(equal_width(bins), rounding=rounding)
    groups = max(8, min(32, (1 << 21) // (classes * (len(inner) + 1))))
    return ClassCells(inner, groups)
