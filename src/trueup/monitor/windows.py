"""Recent metrics: a sliding window of the last rows, and exponentially weighted sums over all rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trueup._core.bins import Bins, equal_width

PIECES = 10
"""Into how many pieces a window is divided; one goes when the next is full, so a window is a tenth longer at most."""


@dataclass(frozen=True, eq=False)
class WeightedTally:
    """Rows, hits, confidence and NLL: with bins, so that a calibration error comes out."""

    bins: Bins
    nll: float
    """Summed over the rows."""
    seen: float
    """How many rows there were, whatever they weigh."""

    @classmethod
    def of(
        cls,
        confidence: np.ndarray,
        correct: np.ndarray,
        nll: np.ndarray,
        bins: int,
        sample_weight: np.ndarray | None = None,
    ) -> WeightedTally:
        """Tally trusted arrays, one number a row."""
        total = nll.sum() if sample_weight is None else sample_weight @ nll
        tally = Bins.from_scores(confidence, correct, equal_width(bins), sample_weight=sample_weight)
        return cls(tally, float(total), float(len(nll)))

    @classmethod
    def empty(cls, bins: int) -> WeightedTally:
        """No rows."""
        none = np.zeros(0)
        return cls.of(none, none, none, bins)

    def __add__(self, other: WeightedTally) -> WeightedTally:
        return WeightedTally(self.bins + other.bins, self.nll + other.nll, self.seen + other.seen)

    def __mul__(self, weight: float) -> WeightedTally:
        b = self.bins
        faded = Bins(b.edges, weight * b.count, weight * b.confidence, weight * b.hits)
        return WeightedTally(faded, weight * self.nll, self.seen)

    def mean(self, total: float) -> float:
        """A sum over the rows as a mean; NaN of nothing."""
        weight = float(self.bins.count.sum())
        return float(total / weight) if weight else float("nan")


@dataclass(frozen=True, eq=False)
class Window:
    """The last rows, between `size` and a tenth more, in pieces."""

    size: int
    pieces: tuple[WeightedTally, ...]

    def append(self, piece: WeightedTally) -> Window:
        """The window with one piece more, of at most `free_rows` rows; pieces that are too old are dropped."""
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.seen + piece.seen <= self.piece_size:
            return replace(self, pieces=(*self.pieces[:-1], last + piece))
        return replace(self, pieces=(*self.pieces, piece)[-(PIECES + 1) :])

    @property
    def piece_size(self) -> int:
        """How many rows a piece holds."""
        return max(1, self.size // PIECES)

    def free_rows(self) -> int:
        """How many rows fit into the piece that is being filled."""
        last = int(self.pieces[-1].seen) if self.pieces else 0
        return self.piece_size - last if last < self.piece_size else self.piece_size

    def total(self, bins: int) -> WeightedTally:
        """The tally of the whole window."""
        return sum(self.pieces, start=WeightedTally.empty(bins))
