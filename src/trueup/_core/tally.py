"""Tallies: small frozen sums that add up over chunks, files and machines, and give the whole table in the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np

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

T = TypeVar("T", bound=Any)

MEAN_METRICS = ("accuracy", "confidence", "predicted", "observed", "nll", "brier", "entropy")
"""What is a mean over the rows."""

TABLE_METRICS = (*MEAN_METRICS, *BINNED_ERRORS, "aece", "sce")
"""All that a tally can give."""

_GRID_CELLS = 4096
"""Cells of the confidence grid, about: a multiple of the number of bins."""


def _add_fields(one: T, other: T, kept: tuple[str, ...] = (), **changes: Any) -> T:
    """A record whose fields are the sums of two records' fields, but for those that stay as they are or are given."""
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
    """How many rows, or their weight Σw."""
    total: float
    squares: float
    squared_weights: float
    """Σw²."""

    @classmethod
    def of(cls, values: np.ndarray, sample_weight: np.ndarray | None = None) -> Mean:
        """Tally one number a row."""
        if sample_weight is None:
            n = float(len(values))
            return cls(n, float(values.sum()), float(values @ values), n)
        weighted = sample_weight * values
        sums = sample_weight.sum(), weighted.sum(), weighted @ values, sample_weight @ sample_weight
        return cls(*map(float, sums))

    @classmethod
    def empty(cls) -> Mean:
        """Of no rows."""
        return cls(0.0, 0.0, 0.0, 0.0)

    def __add__(self, other: Mean) -> Mean:
        return _add_fields(self, other)

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        return self.total / self.count if self.count else float("nan")

    @property
    def effective_rows(self) -> float:
        """(Σw)²/Σw²: how many rows of equal weight tell as much."""
        return self.count**2 / self.squared_weights if self.squared_weights else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for fewer than two rows."""
        n = self.effective_rows
        if n < 1 + 1e-9:
            return float("nan")
        variance = max(self.squares - self.total**2 / self.count, 0.0) / self.count * n / (n - 1)
        return math.sqrt(variance / n)


@dataclass(frozen=True, eq=False)
class Grid:
    """Scores on a fine fixed grid, outcomes 0 and 1 apart: all that resampling and equal mass need.

    The grid divides each equal-width bin evenly, so coarser bins come out exactly; next to 0, where rare events are,
    and next to 1, where networks crowd, its cells are divided further, geometrically.
    """

    edges: np.ndarray
    bins: int
    """How many equal-width bins the grid divides."""
    count: np.ndarray
    """(2, cells): how many rows, or their weight; outcome 0, outcome 1."""
    confidence: np.ndarray
    """(2, cells): sums."""
    squared_weights: np.ndarray
    """(2, cells): Σw², which is the count where all weights are 1."""

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
        """About four thousand even cells, and eight an octave next to 0 and 1, to the resolution of float64."""
        even = equal_width(bins * math.ceil(_GRID_CELLS / bins))
        distance = (even[1] - even[0]) * 2.0 ** (-np.arange(1, 8 * 41) / 8)
        edges: np.ndarray = np.unique(np.concatenate([even, distance, 1.0 - distance]))
        edges.flags.writeable = False  # all grids of so many bins share it
        return edges

    def __add__(self, other: Grid) -> Grid:
        if self.bins != other.bins:
            raise ValueError(f"tallies must have the same number of bins to be added, got {self.bins} and {other.bins}")
        return _add_fields(self, other, kept=("edges", "bins"))

    @property
    def rows(self) -> np.ndarray:
        """Rows in each cell, or their weight."""
        return self.count.sum(axis=0)

    def bin_of_cell(self) -> np.ndarray:
        """The equal-width bin that each cell lies in."""
        return bin_index(self.edges[1:], equal_width(self.bins))

    def equal_mass_of_cell(self) -> np.ndarray:
        """The equal-mass bin that each cell lies in: a cut inside a cell moves to the cell's end."""
        last = self._cells_cut()
        return np.searchsorted(last, np.arange(len(self.edges) - 1), side="left")

    def binned(self, index: np.ndarray) -> Bins:
        """Gather the cells into bins; exact for equal-width ones."""
        size = int(index.max()) + 1 if len(index) else 1
        last = np.flatnonzero(np.diff(index, append=index[-1] + 1))
        edges = np.concatenate([[0.0], self.edges[last + 1]])
        sums = self.rows, self.confidence.sum(axis=0), self.count[1]
        count, confidence, hits = (np.bincount(index, weights=w, minlength=size).astype(np.float64) for w in sums)
        return Bins(edges, count, confidence, hits)

    def aece(self) -> float:
        """Adaptive ECE from the grid; `aece_error` bounds how far it is from the exact one."""
        return self.binned(self.equal_mass_of_cell()).ece()

    def aece_error(self) -> float:
        """The most by which `aece` can differ from the exact adaptive ECE of the same rows.

        Exact cuts part the rows of a cell that the grid keeps together. Moving a set of rows from one bin to another
        changes Σ|Σ(a − c)| by at most twice |Σ(a − c)| over the set, which is at most the cell's Σ|a − c|.
        """
        n = self.count.sum()
        if not n:
            return float("nan")
        cut = self._cells_cut()
        wrong, right = self.confidence[0, cut], self.count[1, cut] - self.confidence[1, cut]
        squared = self.squared_weights[:, cut].sum(axis=0)
        parted = self.rows[cut] ** 2 > (1 + 1e-9) * squared  # a single row cannot be parted
        return float(2 * ((wrong + right) * parted).sum() / n)

    def _cells_cut(self) -> np.ndarray:
        """The cells after which an equal-mass bin ends: those in which the next one begins."""
        some = np.flatnonzero(self.rows > 0)
        rows = self.rows[some]
        total = float(rows.sum())
        below = np.concatenate([[0.0], np.cumsum(rows)[:-1]])
        chunk = equal_mass_chunks(below, total, self.bins) if total else np.zeros(0, np.int64)
        return some[:-1][np.diff(chunk) > 0]


_ROW_COLUMNS = {"accuracy": "correct", "predicted": "score", "observed": "outcome"}
"""Where what is scored per row has another name than its mean."""


def row_values(rows: RowScores, metric: str) -> np.ndarray:
    """One number a row, whose mean is a metric of `MEAN_METRICS`, or `calibration_gap`."""
    if metric == "calibration_gap":
        return (rows.outcome - rows.score) * (1 - 2 * rows.score)
    return getattr(rows, _ROW_COLUMNS.get(metric, metric))


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """Sums by block of clusters: what intervals need where rows of one cluster are correlated."""

    weight: np.ndarray
    """(blocks,): how many rows, or their weight."""
    means: np.ndarray
    """(blocks, names): sums of what `NAMES` are means of."""
    count: np.ndarray
    """(blocks, bins)."""
    gap: np.ndarray
    """(blocks, bins): sums of outcome − score."""

    NAMES: ClassVar[tuple[str, ...]] = (*MEAN_METRICS, "calibration_gap")

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
        """Sum what the pass gave, by the block of each row."""
        w = np.ones(len(block)) if sample_weight is None else sample_weight
        means = [np.bincount(block, w * row_values(rows, name), blocks) for name in cls.NAMES]
        place = block * bins + bin_index(rows.score, equal_width(bins), rounding=rounding)
        count, gap = (
            np.bincount(place, x, blocks * bins).reshape(blocks, bins) for x in (w, w * (rows.outcome - rows.score))
        )
        return cls(np.bincount(block, w, blocks), np.stack(means, axis=1), count, gap)

    def __add__(self, other: ClusterSums) -> ClusterSums:
        return _add_fields(self, other)

    def drop_empty(self) -> ClusterSums:
        """Without blocks that have no rows."""
        some = self.weight > 0
        return ClusterSums(*(getattr(self, f.name)[some] for f in fields(self)))

    def mean(self, metric: str) -> np.ndarray:
        """The sums of one of `NAMES`, (blocks,)."""
        return self.means[:, self.NAMES.index(metric)]


@dataclass(frozen=True, eq=False)
class Tally:
    """Everything that the table of `evaluate` needs, in memory that does not grow with the number of rows.

    >>> import trueup
    >>> first, second = np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.0]])
    >>> tally = trueup.metrics.Tally.of(first, [0, 1]) + trueup.metrics.Tally.of(second, [1])
    >>> tally.n, round(tally.accuracy.value, 4), round(tally.score_bins.ece(), 4)
    (3, 0.6667, 0.3369)
    """

    rows: float
    """How many rows."""
    accuracy: Mean
    confidence: Mean
    predicted: Mean
    """The score: P(class 1) of two classes, the confidence of more or of folded ones."""
    observed: Mean
    """What happened: the label is class 1, or the prediction is right."""
    nll: Mean
    brier: Mean
    entropy: Mean
    calibration_gap: Mean
    """(a − c)(1 − 2c) with score c and outcome a: Spiegelhalter's numerator."""
    calibration_variance: Mean
    """(1 − 2c)² c (1 − c), each row by the square of its weight: its variance."""
    score_variance: Mean
    """c (1 − c), each row by the square of its weight: the variance of Σ(a − c) under calibration."""
    grid: Grid
    classes: Bins
    gap: np.ndarray
    """Class-wise sums of hits − probability by group of rows, (groups, K, B): the spread of the class-wise error."""
    weight_of_group: np.ndarray
    top_label: bool
    """Whether two classes were tallied by the predicted one instead of by class 1."""
    clusters: ClusterSums | None = None
    """Sums by block of clusters, where rows have them."""

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
        logits: Any,
        labels: Any,
        *,
        bins: int = BINS,
        top_label: bool = False,
        sample_weight: Any = None,
        clusters: Any = None,
    ) -> Tally:
        """Tally a pair in one pass.

        Of two classes the bins are those of P(class 1); with `top_label` those of the predicted class's confidence.
        `clusters`, one hashable value a row, say which rows are correlated: a cluster may go on in another tally.
        """
        z, y = as_arrays(logits, labels)
        w, unit = as_weights(sample_weight, len(z)), rounding_error(z)
        cells = replace(class_cells(z.shape[1], bins, unit), weights=w)
        of_row = as_clusters(clusters, len(z))
        if of_row is not None:  # a cluster goes to one group as a whole
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
        """Tally what the pass gave."""
        w, squared = sample_weight, None if sample_weight is None else sample_weight**2
        score, variance = rows.score, rows.score * (1 - rows.score)
        same = {"predicted": "confidence", "observed": "accuracy"} if score is rows.confidence else {}
        names = [name for name in ClusterSums.NAMES if name not in same]
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
            raise ValueError("tallies must both be folded or neither, to be added")
        if (self.clusters is None) != (other.clusters is None) and self.rows and other.rows:
            raise ValueError("tallies must both have clusters or neither, to be added")
        both = [one.clusters for one in (self, other) if one.clusters is not None]
        clusters = both[0] + both[1] if len(both) == 2 else both[0] if both else None
        return _add_fields(self, other, kept=("top_label",), clusters=clusters)

    @property
    def n(self) -> int:
        """How many rows were tallied."""
        return int(self.rows)

    @property
    def is_event(self) -> bool:
        """Whether it is about the probability of class 1: of two classes, unless they are folded."""
        return len(self.classes.count) == 2 and not self.top_label

    @property
    def effective_rows(self) -> float:
        """(Σw)²/Σw²: how many rows of equal weight tell as much."""
        return self.accuracy.effective_rows

    def value(self, metric: str) -> float:
        """A number of the table, by its name in `TABLE_METRICS`."""
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
        """The equal-width bins of P(class 1) where there are two classes, of the confidence where more or folded."""
        return self.grid.binned(self.grid.bin_of_cell())


def class_cells(classes: int, bins: int, rounding: float) -> ClassCells:
    """What a tally counts class-wise; fewer groups where there are very many classes, to bound memory."""
    inner = cut_points(equal_width(bins), rounding=rounding)
    groups = max(8, min(32, (1 << 21) // (classes * (len(inner) + 1))))
    return ClassCells(inner, groups)
