"""Recent metrics: a sliding window of the last rows, and exponentially weighted sums over all rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trueup._core.bins import Bins, equal_width

PIECES = 10
"""Number of pieces of a window. The oldest is dropped when a new one begins: at most a tenth too many rows."""


@dataclass(frozen=True, eq=False)
class WeightedTally:
    """Sums of rows, hits, confidence and NLL, the first three per bin, for the metrics of a window."""

    bins: Bins
    nll: float
    """Summed over the rows."""
    seen: float
    """Number of rows, regardless of their weights."""

    @classmethod
    def of(
        cls,
        confidence: np.ndarray,
        correct: np.ndarray,
        nll: np.ndarray,
        bins: int,
        sample_weight: np.ndarray | None = None,
    ) -> WeightedTally:
        """Sum over validated arrays of shape (n,)."""
        total = nll.sum() if sample_weight is None else sample_weight @ nll
        tally = Bins.from_scores(confidence, correct, equal_width(bins), sample_weight=sample_weight)
        return cls(tally, float(total), float(len(nll)))

    @classmethod
    def empty(cls, bins: int) -> WeightedTally:
        """Make the tally of zero rows."""
        no_rows = np.zeros(0)
        return cls.of(no_rows, no_rows, no_rows, bins)

    def __add__(self, other: WeightedTally) -> WeightedTally:
        return WeightedTally(self.bins + other.bins, self.nll + other.nll, self.seen + other.seen)

    def __mul__(self, weight: float) -> WeightedTally:
        b = self.bins
        faded = Bins(b.edges, weight * b.count, weight * b.confidence, weight * b.hits)
        return WeightedTally(faded, weight * self.nll, self.seen)

    def mean(self, total: float) -> float:
        """Divide a sum over rows by the total weight; NaN without rows."""
        weight = float(self.bins.count.sum())
        return float(total / weight) if weight else float("nan")


@dataclass(frozen=True, eq=False)
class Window:
    """The most recent rows, between `size` and a tenth more, in pieces."""

    size: int
    pieces: tuple[WeightedTally, ...]

    def append(self, piece: WeightedTally) -> Window:
        """Add a piece with at most `free_rows` rows and drop pieces that are too old."""
        newest = self.pieces[-1] if self.pieces else None
        if newest is not None and newest.seen + piece.seen <= self.piece_size:
            return replace(self, pieces=(*self.pieces[:-1], newest + piece))
        return replace(self, pieces=(*self.pieces, piece)[-(PIECES + 1) :])

    @property
    def piece_size(self) -> int:
        """Number of rows per piece."""
        return max(1, self.size // PIECES)

    def free_rows(self) -> int:
        """Count the rows that still fit into the newest piece."""
        filled = int(self.pieces[-1].seen) if self.pieces else 0
        return self.piece_size - filled if filled < self.piece_size else self.piece_size

    def total(self, bins: int) -> WeightedTally:
        """Add up the pieces."""
        return sum(self.pieces, start=WeightedTally.empty(bins))
