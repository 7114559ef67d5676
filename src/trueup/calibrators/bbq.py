"""Bayesian binning into quantiles: the average of many histograms, each weighted by its evidence."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.special import gammaln
from torch import Tensor

from trueup.calibrators.base import PADDING, Calibrator, each_class, keep_curve, one_vs_rest, pad_curves, step
from trueup.core.arrays import as_weighted
from trueup.core.bins import tie_ends, weighted_places

_PRIOR = 2.0  # pseudo-counts N′, shared by a binning's bins
_EDGE = 1e-6  # how near to 0 and 1 a bin's prior mean may come
_NEGLIGIBLE = 1e-12  # weight below which a binning is left out


class BBQ(Calibrator):
    """Average equal-mass binnings of each class's probability, weighted by their evidence, then normalise the row.

    For every number of bins B from n^⅓/10 to 10·n^⅓, with m_b labels of the class among N_b, prior mean p_b the bin's
    midpoint, α_b = 2p_b/B and β_b = 2(1 − p_b)/B: θ_b = (m_b + α_b)/(N_b + 2/B), weighted by
    S_B = Π_b Beta(m_b + α_b, N_b − m_b + β_b)/Beta(α_b, β_b). Not for many classes with few samples each, nor where the
    predicted class must stay: it may change.
    Naeini, Cooper & Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning" (2015).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 2))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> averaged = BBQ.fit(3 * z, y)
    >>> p = np.array([[0.05, 0.95], [0.3, 0.7], [0.8, 0.2]])
    >>> np.exp(averaged(np.log(p))).round(3)
    array([[0.29 , 0.71 ],
           [0.427, 0.573],
           [0.538, 0.462]])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples are more evidence
    differentiable = False

    cuts: Tensor
    values: Tensor

    def __init__(self, cuts: Any, values: Any) -> None:
        super().__init__()
        keep_curve(self, "cuts", cuts, values, more=1)

    def map(self, logits: Tensor) -> Tensor:
        """The classes' averaged histograms, normalised."""
        self._check_classes(logits, len(self.values))
        return one_vs_rest(logits, lambda p: step(p, self.cuts, self.values))

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Bayesian binning into quantiles: weigh all binnings of each class at once, on sums."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        curves = [_average(*rows) for rows in each_class(z, y, w)]
        cuts, values = zip(*curves, strict=True)
        return cls(pad_curves(cuts, PADDING), pad_curves(values))


class _Binnings(NamedTuple):
    """Equal-mass binnings of n sorted places, one after the other; sizes in a binning differ by at most one."""

    last: np.ndarray
    """The last place of each bin."""
    share: np.ndarray
    """The part of all weight up to the end of each bin, where places have weights."""
    first_bin: np.ndarray
    """Where each binning's bins begin in `last`."""


@lru_cache(1)  # classes that every row has share theirs
def _binnings(n: int, rows: float) -> _Binnings:
    fewest, most = max(1, math.floor(rows ** (1 / 3) / 10)), min(n, math.ceil(10 * rows ** (1 / 3)))
    numbers = np.arange(fewest, most + 1)
    first_bin = np.cumsum(numbers) - numbers
    bins = np.repeat(numbers, numbers)
    place = np.arange(1, len(bins) + 1) - np.repeat(first_bin, numbers)  # of a bin in its binning, from 1
    # Rank r is in bin r·bins // n.
    return _Binnings((place * n + bins - 1) // bins - 1, place / bins, first_bin)


def _average(scores: np.ndarray, positive: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Cuts and values of the averaged histogram of one class."""
    n = len(scores)
    binnings = _binnings(n, float(n if weights is None else weights.sum()))
    if weights is None:
        ordered = np.sort(scores)
        hits = np.cumsum(np.bincount(np.searchsorted(ordered, scores[positive]), minlength=n))
        mass, wanted = np.arange(n + 1), binnings.last
    else:
        order = np.argsort(scores, kind="stable")
        ordered, came_true = scores[order], np.zeros(n)
        came_true[positive] = weights[positive]
        hits, mass = np.cumsum(came_true[order]), np.append(0, np.cumsum(weights[order]))
        wanted = weighted_places(mass[1:], binnings.share)
    hits = np.append(0, hits)
    runs = np.flatnonzero(tie_ends(ordered))
    last = runs[np.searchsorted(runs, wanted)]  # equal scores are never parted: a cut moves to their end
    before = np.roll(last, 1)
    before[binnings.first_bin] = -1
    middle = ordered[:-1] + np.diff(ordered) / 2
    edges = np.concatenate([[0.0], np.where(middle < ordered[1:], middle, ordered[:-1]), [1.0]])

    filled = last > before  # a cut moved onto the next one leaves nothing between them
    size = mass[last + 1] - mass[before + 1]
    hit = np.minimum(hits[last + 1] - hits[before + 1], size)
    lengths = np.diff(binnings.first_bin, append=len(last))
    prior = np.repeat(_PRIOR / np.add.reduceat(filled, binnings.first_bin, dtype=np.int64), lengths)
    alpha = prior * np.clip((edges[last + 1] + edges[before + 1]) / 2, _EDGE, 1 - _EDGE)
    beta = prior - alpha
    evidence = _rise(alpha, hit) + _rise(beta, size - hit) - _rise(prior, size)
    log_weight = np.add.reduceat(evidence, binnings.first_bin)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()

    used = filled & np.repeat(weight > _NEGLIGIBLE, lengths)
    share = (np.repeat(weight, lengths) * (hit + alpha) / (size + prior))[used]
    # Each bin adds its share from its first place to its last: sums of the changes give the average at every place.
    change = np.bincount(before[used] + 1, share, n + 1) - np.bincount(last[used] + 1, share, n + 1)
    at = np.unique(last[used])[:-1]  # the very last cut is the end
    values = np.cumsum(change)[np.append(0, at + 1)]
    return edges[at + 1], np.clip(values, _NEGLIGIBLE, 1.0)


def _rise(start: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """ln Γ(start + steps) − ln Γ(start); most bins hold no label of the class, and there it is zero."""
    out = np.zeros(len(start))
    some = np.flatnonzero(steps)
    out[some] = gammaln(start[some] + steps[some]) - gammaln(start[some])
    return out
