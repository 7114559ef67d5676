"""The definition of a bin, for the whole library.

Equal-width bins are right-closed, (lo, hi], as in Guo et al. (2017), and 0 is in the first; left-closed bins are an
option. Equal-mass bins are chunks of the sorted confidences whose sizes differ by at most one, but equal confidences
stay in one bin. With weights, the mass of a chunk is its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr

from trueup._core.arrays import as_arrays, as_vector, as_weights
from trueup._core.native import count_below
from trueup._core.row_scores import ClassCells, is_event, score_rows_and_classes, scores_and_outcomes, top_label_tally
from trueup._core.types import ArrayLike

Closed = Literal["right", "left"]

BINS = 15
"""The default number of bins, as in the literature."""

EDGE_TOLERANCE = 4
"""Tolerance at the edges, in multiples of the floating-point epsilon, for confidences computed from logits. The
probability 0.6, given as log 0.6, comes back as 0.6000000000000001 and must fall into the bin of 0.6."""


def equal_width(bins: int = BINS) -> np.ndarray:
    """Return the edges b/B for b = 0..B, each the double nearest to the fraction.

    >>> equal_width(4)
    array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    """
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ValueError(f"bins must be a whole number of at least 1, got {bins!r}")
    return np.arange(int(bins) + 1) / int(bins)


def equal_mass(confidence: np.ndarray, bins: int = BINS, sample_weight: np.ndarray | None = None) -> np.ndarray:
    """Return edges midway between chunks of the sorted confidences; equal confidences share a bin.

    With weights, a chunk ends where its share of the total weight is reached.

    >>> equal_mass(np.array([0.1, 0.2, 0.3, 0.3, 0.3, 0.9]), 3)
    array([0. , 0.25, 0.6 , 1. ])
    """
    equal_width(bins)  # checks the number of bins
    if sample_weight is None:
        c, below = np.sort(confidence), None
    else:
        has_weight = sample_weight > 0
        order = np.argsort(confidence[has_weight], kind="stable")
        c, below = confidence[has_weight][order], np.concatenate([[0.0], np.cumsum(sample_weight[has_weight][order])])
    if len(c) == 0:
        return equal_width(1)
    starts = equal_mass_starts(c, bins, below)[1:]
    low, high = c[starts - 1], c[starts]
    middle = low + (high - low) / 2
    return np.concatenate([[0.0], np.where(middle < high, middle, low), [1.0]])


def equal_mass_starts(ordered: np.ndarray, bins: int, below: np.ndarray | None = None) -> np.ndarray:
    """Return the indices in ascending values at which bins of equal mass start; equal values share a bin.

    `below` is the weight below each index, with the total weight at its end. Without it each value counts one.

    >>> equal_mass_starts(np.array([0.1, 0.2, 0.3, 0.3, 0.3, 0.9]), 3)
    array([0, 2, 5])
    """
    runs = np.concatenate([[0], np.flatnonzero(tie_ends(ordered))[:-1] + 1])  # of equal values
    mass, total = (runs, len(ordered)) if below is None else (below[runs], below[-1])
    chunk = equal_mass_chunks(mass, total, bins)
    return runs[np.concatenate([[True], np.diff(chunk) > 0])]


def weighted_quantile_index(cumulative: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the first index at which cumulative weights reach each share of their total, up to rounding.

    >>> weighted_quantile_index(np.array([1.0, 1.5, 4.0]), np.array([0.25, 0.3, 1.0]))
    array([0, 1, 2])
    """
    return np.searchsorted(cumulative, shares * (cumulative[-1] * (1 - 1e-12)))


def equal_mass_chunks(below: np.ndarray, total: float, bins: int) -> np.ndarray:
    """Return the chunk ⌊B·below/total⌋ of rows with this weight below them; sizes differ by at most one row.

    Scaling all weights changes nothing; a row of weight 2 counts as two copies of it.

    >>> equal_mass_chunks(np.arange(5.0), 5.0, 2)
    array([0, 0, 0, 1, 1])
    """
    chunk: np.ndarray = np.floor(below * (bins / total) + 1e-9).astype(np.int64)  # sums of weights round
    return np.minimum(chunk, bins - 1)


def tie_ends(ordered: np.ndarray) -> np.ndarray:
    """Mark the end of each run of equal values (up to rounding) in an ascending array."""
    ends = np.ones(len(ordered), dtype=bool)
    ends[:-1] = np.diff(ordered) > EDGE_TOLERANCE * np.finfo(np.float64).eps * np.abs(ordered[1:])
    return ends


def rounding_error(logits: Any) -> float:
    """Return the floating-point epsilon of these logits; half precision is computed in float32."""
    return float(np.finfo(np.float64 if logits.dtype.itemsize == 8 else np.float32).eps)


def cut_points(edges: np.ndarray, *, closed: Closed = "right", rounding: float = 0.0) -> np.ndarray:
    """Return the inner edges, shifted so that a value lies in bin #{cuts < value} for both values of `closed`."""
    inner = edges[1:-1]
    if closed == "right":
        return np.ascontiguousarray(inner * (1 + EDGE_TOLERANCE * rounding))
    if closed == "left":
        return np.nextafter(inner * (1 - EDGE_TOLERANCE * rounding), -np.inf)
    raise ValueError(f'closed must be "right" or "left", got {closed!r}')


def bin_index(values: np.ndarray, edges: np.ndarray, *, closed: Closed = "right", rounding: float = 0.0) -> np.ndarray:
    """Return the bin of each value, 0..B−1; exact at the edges."""
    return count_below(cut_points(edges, closed=closed, rounding=rounding), values)


def equal_mass_index(values: np.ndarray, bins: int) -> np.ndarray:
    """Return the equal-mass bin of each positive value, of any range; equal values share a bin.

    >>> equal_mass_index(np.array([3.0, 1.0, 8.0, 2.0]), 2)
    array([1, 0, 1, 0])
    """
    scaled = values / values.max(initial=np.finfo(np.float64).tiny)  # in [0, 1], the range of bins
    return bin_index(scaled, equal_mass(scaled, bins))


def equal_width_index(values: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each value among equal-width bins between the smallest and the largest.

    >>> equal_width_index(np.array([3.0, 1.0, 9.0, 2.0]), 2)
    array([0, 0, 1, 0])
    """
    edges = equal_width(bins)
    eps, low, high = np.finfo(np.float64).eps, values.min(initial=np.inf), values.max(initial=0.0)
    if high - low <= EDGE_TOLERANCE * eps * high:  # constant up to rounding: one bin
        return np.zeros(len(values), dtype=np.int64)
    return bin_index((values - low) / (high - low), edges, rounding=eps)


@dataclass(frozen=True, eq=False)
class Bins:
    """A mergeable tally of confidences and hits in bins: of an event or a prediction (B,), or class-wise (K, B).

    `+` is associative and commutative, and the parts of a data set add up to the whole.

    >>> half = Bins.of_scores([0.9, 0.7], [1, 0], bins=2)
    >>> whole = half + Bins.of_scores([0.2, 0.6], [0, 1], bins=2)
    >>> whole.count, round(whole.ece(), 4)
    (array([1., 3.]), 0.1)
    """

    edges: np.ndarray
    """Edges of the bins, shape (B + 1,)."""
    count: np.ndarray
    """Number of rows in each bin, or their total weight."""
    confidence: np.ndarray
    """Sum of the confidences in each bin."""
    hits: np.ndarray
    """Number of times the event occurred in each bin."""
    closed: Closed = "right"
    """Side on which the bins are closed."""

    @classmethod
    def of(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        bins: int | np.ndarray = BINS,
        closed: Closed = "right",
        classwise: bool = False,
        top_label: bool = False,
        sample_weight: ArrayLike | None = None,
    ) -> Bins:
        """Tally a pair of logits and labels in bins.

        With two classes the score is the probability of class 1, and a hit is a label of class 1. With more classes, or
        `top_label=True`, the score is the confidence of the predicted class, and a hit is a correct prediction.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        labels
            Class of each row, shape (n,).
        bins
            Number of equal-width bins, or the edges.
        closed
            Side on which a bin includes its edge.
        classwise
            Tally the probability of each class separately, shape (classes, bins).
        top_label
            Tally the predicted class also with two classes.
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Bins
            The tally.
        """
        z, y = as_arrays(logits, labels)
        w = as_weights(sample_weight, len(z))
        edges, unit = _edges(bins), rounding_error(z)
        inner = cut_points(edges, closed=closed, rounding=unit)
        if classwise:
            tally = score_rows_and_classes(z, y, ClassCells(inner, weights=w))[1]
            return cls(edges, tally.counts, tally.confidence, tally.hits, closed)
        if w is None and not is_event(z, top_label):
            count, confidence, hits = top_label_tally(z, y, inner)
            return cls(edges, count, confidence, hits, closed)
        score, outcome = scores_and_outcomes(z, y, top_label=top_label, quick=True)
        return cls.from_indices(count_below(inner, score), score, outcome, edges, closed, w)

    @classmethod
    def of_scores(
        cls,
        scores: ArrayLike,
        hits: ArrayLike,
        *,
        bins: int | np.ndarray = BINS,
        closed: Closed = "right",
        sample_weight: ArrayLike | None = None,
    ) -> Bins:
        """Tally confidences in [0, 1] with their outcomes.

        Parameters
        ----------
        scores
            Confidence of each row, shape (n,).
        hits
            Outcome of each row, 1 or 0, shape (n,).
        bins
            Number of equal-width bins, or the edges.
        closed
            Side on which a bin includes its edge.
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Bins
            The tally.
        """
        c = as_vector(scores, "scores")
        a = as_vector(hits, "hits", length=len(c))
        if len(c) and (c.min() < -1e-6 or c.max() > 1 + 1e-6):
            raise ValueError(f"scores must lie in [0, 1], got {c.min():.6g}..{c.max():.6g}")
        if not np.isin(a, (0.0, 1.0)).all():
            raise ValueError("hits must be 0 or 1")
        w = as_weights(sample_weight, len(c))
        return cls.from_scores(np.clip(c, 0.0, 1.0), a, _edges(bins), closed, sample_weight=w)

    @classmethod
    def from_scores(
        cls,
        confidence: np.ndarray,
        hits: np.ndarray,
        edges: np.ndarray,
        closed: Closed = "right",
        rounding: float = 0.0,
        sample_weight: np.ndarray | None = None,
    ) -> Bins:
        """Tally trusted arrays.

        Parameters
        ----------
        confidence
            Scores in [0, 1], shape (n,).
        hits
            Whether the event occurred, shape (n,).
        edges
            Edges of the bins.
        closed
            Side on which the bins are closed.
        rounding
            Distance from an edge within which a score counts as on the edge.
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Bins
            The tally.
        """
        index = bin_index(confidence, edges, closed=closed, rounding=rounding)
        return cls.from_indices(index, confidence, hits, edges, closed, sample_weight)

    @classmethod
    def from_indices(
        cls,
        index: np.ndarray,
        confidence: np.ndarray,
        hits: np.ndarray,
        edges: np.ndarray,
        closed: Closed = "right",
        sample_weight: np.ndarray | None = None,
    ) -> Bins:
        """Tally trusted arrays whose bins are known.

        Parameters
        ----------
        index
            Bin of each row, shape (n,).
        confidence
            Scores in [0, 1], shape (n,).
        hits
            Whether the event occurred, shape (n,).
        edges
            Edges of the bins.
        closed
            Side on which the bins are closed.
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Bins
            The tally.
        """
        size = len(edges) - 1
        count = np.bincount(index, sample_weight, minlength=size).astype(np.float64)
        if sample_weight is not None:
            confidence, hits = sample_weight * confidence, sample_weight * hits
        confidence, hits = (np.bincount(index, weights=w, minlength=size) for w in (confidence, hits))
        return cls(edges, count, confidence, hits, closed)

    def __add__(self, other: Bins) -> Bins:
        if not isinstance(other, Bins):
            return NotImplemented
        same_bins = self.closed == other.closed and np.array_equal(self.edges, other.edges)
        if not same_bins or self.count.shape != other.count.shape:
            raise ValueError(
                f"tallies must have the same bins to be added, got {self.count.shape} {self.closed}-closed "
                f"and {other.count.shape} {other.closed}-closed, or edges that differ"
            )
        sums = self.count + other.count, self.confidence + other.confidence, self.hits + other.hits
        return Bins(self.edges, *sums, self.closed)

    @property
    def n(self) -> float:
        """The number of rows, or their total weight."""
        return float(self.count.sum(axis=-1).max())

    @property
    def accuracy(self) -> np.ndarray:
        """Share of hits in each bin; NaN in empty bins."""
        return self.hits / self._filled

    @property
    def mean_confidence(self) -> np.ndarray:
        """Mean confidence in each bin; NaN in empty bins."""
        return self.confidence / self._filled

    @property
    def gap(self) -> np.ndarray:
        """Accuracy − mean confidence in each bin; NaN in empty bins."""
        return (self.hits - self.confidence) / self._filled

    @property
    def _filled(self) -> np.ndarray:
        return np.where(self.count > 0, self.count, np.nan)

    def error(self, name: str) -> float:
        """Return one of `BINNED_ERRORS`, averaged over the classes if class-wise; NaN without rows.

        Parameters
        ----------
        name
            Name of the error.

        Returns
        -------
        float
            The error.
        """
        if not self.n:
            return float("nan")
        return float(np.mean(BINNED_ERRORS[name](self.count, self.confidence, self.hits)))

    def ece(self) -> float:
        """Return the expected calibration error."""
        return self.error("ece")


def _ece(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute Σ_b (n_b/n) |acc_b − conf_b|."""
    return _per_row(np.abs(hits - confidence), count)


def _overconfidence(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute Σ_b (n_b/n) max(conf_b − acc_b, 0)."""
    return _per_row(np.maximum(confidence - hits, 0.0), count)


def _underconfidence(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute Σ_b (n_b/n) max(acc_b − conf_b, 0)."""
    return _per_row(np.maximum(hits - confidence, 0.0), count)


def _rmsce(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute the root of Σ_b (n_b/n) (acc_b − conf_b)²."""
    return np.sqrt(_per_row((hits - confidence) ** 2 / _divisor(count), count))


def _mce(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute the largest |acc_b − conf_b| over the bins that are not empty."""
    return (np.abs(hits - confidence) / _divisor(count)).max(axis=-1)


def _average_ce(count: np.ndarray, confidence: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Compute the mean |acc_b − conf_b| over the bins that are not empty."""
    return (np.abs(hits - confidence) / _divisor(count)).sum(axis=-1) / (count > 0).sum(axis=-1)


def _divisor(count: np.ndarray) -> np.ndarray:
    """Replace empty bins by 1, since weights may have any size."""
    return np.where(count > 0, count, 1.0)


def _per_row(sums: np.ndarray, count: np.ndarray) -> np.ndarray:
    return sums.sum(axis=-1) / count.sum(axis=-1)


BINNED_ERRORS: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    error.__name__.removeprefix("_"): error
    for error in (_ece, _mce, _rmsce, _average_ce, _overconfidence, _underconfidence)
}
"""Errors computed from sums (count, confidence, hits) over the bins on the last axis. Other axes are kept, so one
formula serves a data set, its classes and a thousand resamples of it."""


def folded_mean(mean: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return E|N(mean, sigma²)|, the expectation of an absolute gap under added noise."""
    t = np.clip(np.divide(mean, sigma, out=np.zeros_like(mean), where=sigma > 0), -40.0, 40.0)  # exp(−800) is 0
    noisy = sigma * np.sqrt(2 / np.pi) * np.exp(-(t**2) / 2) + mean * (1 - 2 * ndtr(-t))
    return np.where(sigma > 0, noisy, np.abs(mean))


def _edges(bins: int | np.ndarray) -> np.ndarray:
    if isinstance(bins, (int, np.integer)):
        return equal_width(bins)
    edges = np.asarray(bins, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not (np.diff(edges) > 0).all():
        raise ValueError(f"bins must be a whole number, or edges that rise from 0 to 1, got {bins!r}")
    return edges
