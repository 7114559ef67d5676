"""Tallies: small frozen sums that add up over chunks, files and machines, and give the whole table in the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trueup.core.arrays import as_tensors
from trueup.core.bins import (
    BINNED_ERRORS,
    BINS,
    Bins,
    bin_index,
    cut_points,
    equal_mass_slices,
    equal_width,
    rounding_error,
)
from trueup.core.row_scores import ClassCells, ClassTally, RowScores, score_rows_and_classes

MEAN_METRICS = ("accuracy", "confidence", "nll", "brier", "entropy")
"""What is a mean over the rows."""

TABLE_METRICS = (*MEAN_METRICS, *BINNED_ERRORS, "aece", "sce")
"""All that a tally can give."""

_GRID_CELLS = 4096
"""Cells of the confidence grid, about: a multiple of the number of bins."""


@dataclass(frozen=True)
class Mean:
    """A mergeable mean with its standard error.

    >>> Mean.of(np.array([1.0, 2.0])) + Mean.of(np.array([6.0]))
    Mean(count=3.0, total=9.0, squares=41.0)
    >>> (Mean.of(np.array([1.0, 2.0])) + Mean.of(np.array([6.0]))).value
    3.0
    """

    count: float
    total: float
    squares: float

    @classmethod
    def of(cls, values: np.ndarray) -> Mean:
        """Tally one number a row."""
        return cls(float(len(values)), float(values.sum()), float(values @ values))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        return self.total / self.count if self.count else float("nan")

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for fewer than two rows."""
        if self.count < 2:
            return float("nan")
        variance = max(self.squares - self.total**2 / self.count, 0.0) / (self.count - 1)
        return math.sqrt(variance / self.count)


@dataclass(frozen=True, eq=False)
class Grid:
    """Confidences on a fine fixed grid, right and wrong predictions apart: all that resampling and equal mass need.

    The grid divides each equal-width bin evenly, so coarser bins come out exactly; next to 1, where networks crowd, its
    last cell is divided further, geometrically.
    """

    edges: np.ndarray
    bins: int
    """How many equal-width bins the grid divides."""
    count: np.ndarray
    """(2, cells): wrong, right."""
    confidence: np.ndarray
    """(2, cells): sums."""

    @classmethod
    def of(cls, confidence: np.ndarray, correct: np.ndarray, *, bins: int = BINS, rounding: float = 0.0) -> Grid:
        """Tally trusted confidences and correctness."""
        edges = cls.fine_edges(bins)
        size = len(edges) - 1
        index = bin_index(confidence, edges, rounding=rounding) + size * correct.astype(np.int64)
        count = np.bincount(index, minlength=2 * size).astype(np.float64)
        total = np.bincount(index, weights=confidence, minlength=2 * size)
        return cls(edges, bins, count.reshape(2, size), total.reshape(2, size))

    @staticmethod
    def fine_edges(bins: int) -> np.ndarray:
        """About four thousand even cells, and eight an octave down to the resolution of float64 next to 1."""
        even = equal_width(bins * math.ceil(_GRID_CELLS / bins))
        near_one = 1.0 - (even[-1] - even[-2]) * 2.0 ** (-np.arange(1, 8 * 41) / 8)
        edges: np.ndarray = np.unique(np.concatenate([even, near_one]))
        return edges

    def __add__(self, other: Grid) -> Grid:
        if self.bins != other.bins:
            raise ValueError(f"tallies must have the same number of bins to be added, got {self.bins} and {other.bins}")
        return Grid(self.edges, self.bins, self.count + other.count, self.confidence + other.confidence)

    @property
    def rows(self) -> np.ndarray:
        """Rows in each cell."""
        total: np.ndarray = self.count.sum(axis=0)
        return total

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
        parted = self.rows[cut] > 1  # a single row cannot be parted
        return float(2 * ((wrong + right) * parted).sum() / n)

    def _cells_cut(self) -> np.ndarray:
        below = np.cumsum(self.rows)
        starts = np.array([start for start, _ in equal_mass_slices(int(below[-1]), self.bins)][1:])
        last = np.unique(np.searchsorted(below, starts, side="left"))
        # A cut behind the last row parts nothing.
        kept: np.ndarray = last[below[last] < below[-1]]
        return kept


@dataclass(frozen=True, eq=False)
class Tally:
    """Everything that the table of `evaluate` needs, in memory that does not grow with the number of rows.

    >>> import trueup
    >>> first, second = np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.0]])
    >>> tally = trueup.Tally.of(first, [0, 1]) + trueup.Tally.of(second, [1])
    >>> tally.n, round(tally.accuracy.value, 4), round(tally.top.ece(), 4)
    (3, 0.6667, 0.3369)
    """

    accuracy: Mean
    confidence: Mean
    nll: Mean
    brier: Mean
    entropy: Mean
    calibration_gap: Mean
    """(a − c)(1 − 2c): Spiegelhalter's numerator."""
    calibration_variance: Mean
    """(1 − 2c)² c (1 − c): its variance."""
    grid: Grid
    classes: Bins
    gap: np.ndarray
    """Class-wise sums of hits − probability by group of rows, (groups, K, B): the spread of the class-wise error."""
    rows_of_group: np.ndarray

    @classmethod
    def of(cls, logits: Any, labels: Any, *, bins: int = BINS) -> Tally:
        """Tally a pair in one pass."""
        z, y = as_tensors(logits, labels)
        return cls.from_rows(
            *score_rows_and_classes(z, y, class_cells(z.shape[1], bins, rounding_error(z))), bins, rounding_error(z)
        )

    @classmethod
    def from_rows(cls, rows: RowScores, classes: ClassTally, bins: int, rounding: float) -> Tally:
        """Tally what the pass gave."""
        c, a = rows.confidence, rows.correct
        slope = 1 - 2 * c
        return cls(
            accuracy=Mean.of(a),
            confidence=Mean.of(c),
            nll=Mean.of(rows.nll),
            brier=Mean.of(rows.brier),
            entropy=Mean.of(rows.entropy),
            calibration_gap=Mean.of((a - c) * slope),
            calibration_variance=Mean.of(slope**2 * c * (1 - c)),
            grid=Grid.of(c, a, bins=bins, rounding=rounding),
            classes=Bins(equal_width(bins), classes.counts, classes.confidence, classes.hits),
            gap=classes.gap,
            rows_of_group=np.bincount(rows.group, minlength=len(classes.gap)).astype(np.float64),
        )

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        if self.gap.shape != other.gap.shape:
            shapes = f"{self.gap.shape[1:]} and {other.gap.shape[1:]}"
            raise ValueError(f"tallies must have the same classes and bins to be added, got {shapes}")
        return Tally(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def n(self) -> int:
        """How many rows were tallied."""
        return int(self.accuracy.count)

    def value(self, metric: str) -> float:
        """A number of the table, by its name in `TABLE_METRICS`."""
        if metric in MEAN_METRICS:
            mean: Mean = getattr(self, metric)
            return mean.value
        if metric in BINNED_ERRORS:
            return self.top.error(metric)
        if metric in ("aece", "sce"):
            return self.grid.aece() if metric == "aece" else self.classes.ece()
        raise ValueError(f"metric must be one of {', '.join(TABLE_METRICS)}, got {metric!r}")

    @property
    def top(self) -> Bins:
        """The equal-width bins of the predicted class's confidence."""
        return self.grid.binned(self.grid.bin_of_cell())


def class_cells(classes: int, bins: int, rounding: float) -> ClassCells:
    """What a tally counts class-wise; fewer groups where there are very many classes, to bound memory."""
    inner = cut_points(equal_width(bins), rounding=rounding)
    groups = max(8, min(32, (1 << 21) // (classes * (len(inner) + 1))))
    return ClassCells(inner, groups)
