"""Binning: confidences, or the probabilities of classes, become what bins of them were worth."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from scipy.special import betaln, expit, gammaln, xlogy

from trueup._core import native
from trueup._core.arrays import as_weighted, find_absent, upcast_half
from trueup._core.bins import (
    BINS,
    Bins,
    cut_points,
    equal_mass,
    equal_width,
    rounding_error,
    tie_ends,
    weighted_quantile_index,
)
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.row_scores import scores_and_outcomes, top_label_tally
from trueup._core.splits import random_order
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import TopLabel, check_margin, clip_frequencies, row_count, set_confidence
from trueup.calibrators.curves import PADDING, ClassCurves, Cuts, Edges, each_class, one_vs_rest, pad_curves
from trueup.calibrators.logistic import log_probs_and_rests
from trueup.calibrators.temperature import Temperature

Empty = Literal["midpoint", "zero", "mean"]


class Histogram(Edges, TopLabel):
    """Replace the confidence by the accuracy of its bin: c′ = Σ_{i∈b} a_i / n_b, one set of bins for all classes.

    Of two classes the confidence is P(class 1), and a whether it was. Bins are right-closed, of equal width or of equal
    mass. In the row of log-probabilities c′ is kept in [1/(n+2), 1 − 1/(n+2)]; `confidence` gives it as it is. Not for
    ranking: confidences of one bin become equal.
    Zadrozny & Elkan, "Obtaining calibrated probability estimates" (2001).

    >>> logits = np.log([[0.1, 0.9], [0.2, 0.8], [0.4, 0.6], [0.7, 0.3]])
    >>> binned = Histogram.fit(logits, [1, 0, 1, 0], bins=4)
    >>> binned.confidence(logits).round(4)
    array([0.5, 0.5, 1. , 0. ])
    """

    def __init__(self, edges: Any, values: Any, margin: float = 0.0, event: bool = False) -> None:
        super().__init__(edges, values)
        self.margin, self.event = check_margin(margin), event

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        bins: int = BINS,
        edges: Literal["width", "mass"] = "width",
        empty: Empty = "midpoint",
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Histogram binning: count hits in the bins; an empty one gets its midpoint, zero, or the mean accuracy."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        if edges not in ("width", "mass"):
            raise ValueError(f'edges must be "width" or "mass", got {edges!r}')
        event = z.shape[1] == 2
        if edges == "width" and w is None and not event:
            places = slack_edges(bins, z)
            count, _, hits = top_label_tally(z, y, places[1:-1].copy())
        else:
            scores, outcomes = scores_and_outcomes(z, y, quick=True)
            places = equal_mass(scores, bins, w) if edges == "mass" else slack_edges(bins, z)
            tally = Bins.from_scores(scores, outcomes, places, sample_weight=w)
            count, hits = tally.count, tally.hits
        return cls.from_counts(count, hits, places, empty, event=event)

    @classmethod
    def from_counts(
        cls, count: np.ndarray, hits: np.ndarray, edges: np.ndarray, empty: Empty = "midpoint", *, event: bool = False
    ) -> Self:
        """From trusted counts of rows and hits in bins."""
        return cls(edges, _frequency(count, hits, edges, empty), 1 / (count.sum() + 2), event)

    @classmethod
    def fit_mass(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None
    ) -> Self:
        """Histogram binning, equal mass: fit with bins of equal mass, none of which is empty."""
        return cls.fit(logits, labels, bins=bins, edges="mass", sample_weight=sample_weight)


class HistogramOvR(Edges, ClassCurves):
    """Replace each class's probability by the frequency of that class in its bin, then normalise the row.

    q_k ∝ Σ_{i: p_ik∈b} 1[y_i = k] / n_kb, with bins of equal width, kept in [1/(n+2), 1 − 1/(n+2)]. Not for many
    classes with few samples each, nor where the predicted class must stay: it may change.
    Guo et al., "On calibration of modern neural networks" (2017).

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]])
    >>> binned = HistogramOvR.fit(logits, [0, 1, 0, 1], bins=2)
    >>> np.exp(binned(logits)).round(4)
    array([[0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.1667, 0.8333]])
    """

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        bins: int = BINS,
        empty: Empty = "midpoint",
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Histogram binning, one against the rest: count each class's labels in the bins of its probability; an empty
        one gets midpoint, zero or mean.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls.from_counts(tally_options(z, y, bins=bins, sample_weight=w), slack_edges(bins, z), empty)

    @classmethod
    def from_counts(cls, tally: Bins, edges: np.ndarray, empty: Empty = "midpoint") -> Self:
        """From a class-wise tally."""
        return cls(edges, clip_frequencies(_frequency(tally.count, tally.hits, edges, empty), tally.n))


def tally_options(z: np.ndarray, y: np.ndarray, *, bins: int = BINS, sample_weight: np.ndarray | None = None) -> Bins:
    """A class-wise tally of the options that rows have: an absent one is in no bin, not even that of 0."""
    tally = Bins.of(z, y, bins=bins, classwise=True, sample_weight=sample_weight)
    if (absent := find_absent(z)) is None:
        return tally
    count, gone = tally.count.copy(), absent.sum(axis=0) if sample_weight is None else sample_weight @ absent
    count[:, 0] = np.maximum(count[:, 0] - gone, 0.0)
    return replace(tally, count=np.where(count > 1e-9, count, 0.0))


def slack_edges(bins: int, z: np.ndarray) -> np.ndarray:
    """Edges of equal width, each moved by the rounding of the logits, so that what lies on one stays below it."""
    return np.concatenate([[0.0], cut_points(equal_width(bins), rounding=rounding_error(z)), [1.0]])


def _frequency(count: np.ndarray, hits: np.ndarray, edges: np.ndarray, empty: Empty) -> np.ndarray:
    """Hits per count in each bin, on the last axis."""
    fallbacks = {
        "midpoint": (edges[1:] + edges[:-1]) / 2,
        "zero": np.zeros(1),
        "mean": hits.sum(axis=-1, keepdims=True) / np.maximum(count.sum(axis=-1, keepdims=True), 1e-300),
    }
    if empty not in fallbacks:
        raise ValueError(f'empty must be "midpoint", "zero" or "mean", got {empty!r}')
    return np.where(count > 0, hits / np.where(count > 0, count, 1.0), fallbacks[empty])


STRENGTHS = np.geomspace(0.1, 1e6, 57)
"""Pseudo-counts among which the likelihood chooses."""


class ShrunkenHistogram(Cuts, ClassCurves):
    """Mix each class's probability with its frequency in a bin: q_k ∝ (h_b + m p_k)/(n_b + m).

    n_b rows of the fit lie in the bin of p_k, h_b of them of class k, in bins of equal mass. The m pseudo-counts of
    each class have the largest beta-binomial likelihood: ∏_b B(h_b + m p̄_b, n_b − h_b + m(1 − p̄_b)) / B(m p̄_b,
    m(1 − p̄_b)), p̄_b the bin's mean probability. So a calibrated network is left as it is, and a bad one binned. With
    two classes the curves complement each other. Not for many classes, whose small probabilities fill nearly all bins.

    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(2000)
    >>> z, y = np.log(np.stack([1 - p, p], axis=1)), (rng.random(2000) < 0.2 + 0.6 * (p > 0.5)).astype(int)
    >>> np.exp(ShrunkenHistogram.fit(z, y)(np.log([[0.7, 0.3], [0.3, 0.7]]))).round(1)
    array([[0.8, 0.2],
           [0.2, 0.8]])
    """

    weights: np.ndarray

    def __init__(self, cuts: Any, values: Any, weights: Any) -> None:
        super().__init__(cuts, values)
        self.set_parameter("weights", weights)
        if self.cuts.ndim != 2 or self.weights.shape != self.values.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.cuts, self.values, self.weights))
            raise ValueError(f"cuts must be (classes, bins − 1), values and weights (classes, bins), got {shapes}")
        if not ((self.weights >= 0) & (self.weights <= 1)).all():
            raise ValueError(f"weights must lie in [0, 1], got {self.weights.min():.6g}..{self.weights.max():.6g}")

    def curve(self, xp: Namespace, p: Any) -> Any:
        """The classes' mixtures."""
        index = xp.searchsorted(self.cuts, p)
        weight = xp.take(self.weights, index)
        return (1 - weight) * xp.take(self.values, index) + weight * p

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> Self:
        """Histogram binning, shrunken: count each class's labels in bins, and choose pseudo-counts by likelihood."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        curves = [_curve_of(*rows, bins) for rows in each_class(z, y, w)]
        if z.shape[1] == 2:
            cuts, values, own = curves[1]
            curves[0] = 1 - cuts[::-1], 1 - values[::-1], own[::-1]
        # A last cut that no probability reaches, so that one bin has a cut too.
        places = pad_curves([np.append(cuts, PADDING) for cuts, _, _ in curves], PADDING)
        values, own = (pad_curves([np.append(curve[part], curve[part][-1]) for curve in curves]) for part in (1, 2))
        return cls(places, clip_frequencies(values, row_count(z, w)), own)


def _curve_of(
    p: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts, the frequency in each bin, and the weight m/(n_b + m) of the network's own probability there."""
    edges, came_true = equal_mass(p, bins, sample_weight), np.zeros(len(p))
    came_true[positive] = 1.0
    tally = Bins.from_scores(p, came_true, edges, sample_weight=sample_weight)
    count, hits = tally.count, tally.hits
    strength = choose_strength(count, hits, tally.mean_confidence)
    return cut_points(edges), hits / count, strength / (count + strength)


def choose_strength(count: np.ndarray, hits: np.ndarray, mean: np.ndarray) -> float:
    """The pseudo-counts of `STRENGTHS` under which the hits are likeliest, beta-binomial about the mean predictions.

    >>> count, mean = np.array([100, 100]), np.array([0.3, 0.7])
    >>> [round(choose_strength(count, np.array(hits), mean), 1) for hits in ([30, 70], [20, 80], [5, 95])]
    [1000000.0, 23.7, 1.8]
    """
    mean = np.clip(mean, 1e-12, 1 - 1e-12)
    a, b = STRENGTHS[:, None] * mean, STRENGTHS[:, None] * (1 - mean)
    likelihood = (betaln(hits + a, count - hits + b) - betaln(a, b)).sum(axis=1)
    return float(STRENGTHS[likelihood.argmax()])


class ScalingBinning(Edges, TopLabel):
    """Scale by a temperature, then replace the confidence by the mean scaled confidence of its bin.

    c′ = Σ_{i∈b} g(z_i) / n_b with g(z) = max_k softmax(z/T)_k, of two classes P(class 1), and bins of equal mass in g:
    discrete, so that its calibration error can be verified, yet with the scaler's small variance. Not for networks that
    a temperature cannot calibrate: the labels enter through T alone.
    Kumar, Liang & Ma, "Verified uncertainty calibration" (2019).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(3000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> discrete = ScalingBinning.fit(2.5 * z, y, bins=3)
    >>> f"{discrete.temperature:.4f}", discrete.values.round(4)
    ('2.5186', array([0.2195, 0.2951, 0.436 ]))
    """

    temperature: float

    def __init__(self, temperature: float, edges: Any, values: Any, event: bool = False) -> None:
        self.event = event
        self.set_parameter("temperature", Temperature(temperature).temperature)
        super().__init__(edges, values)

    def score(self, xp: Namespace, z: Any) -> Any:
        """The scaled confidence."""
        return super().score(xp, z / self.temperature)

    def map(self, xp: Namespace, z: Any) -> Any:
        """Scale, give the predicted class the mean of its bin, and share the rest as the scaler does."""
        mapped = self.map_confidence(xp, self.score(xp, z))
        return set_confidence(xp, z / self.temperature, mapped, event=self.event)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        bins: int = 10,
        splits: int = 1,
        seed: int = 0,
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Scaling-binning: fit T, the bins and their means to the same rows, or with `splits=3` to three parts drawn at
        random.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=3 if splits == 3 else 1)
        if splits not in (1, 3):
            raise ValueError(f"splits must be 1 or 3, got {splits!r}")
        parts: list[Any] = [slice(None)] * 3
        if splits == 3:
            parts = np.array_split(random_order(len(z), np.random.default_rng(seed)), 3)
        scaler = Temperature.fit(z[parts[0]], y[parts[0]], sample_weight=None if w is None else w[parts[0]])
        scaled, _ = scores_and_outcomes(scaler(upcast_half(z)), y)
        cut, count = ((scaled[at], None if w is None else w[at]) for at in parts[1:])
        edges = equal_mass(cut[0], bins, cut[1])
        tally = Bins.from_scores(count[0], np.zeros_like(count[0]), edges, sample_weight=count[1])
        filled = tally.count > 0
        values = np.where(filled, tally.confidence / np.where(filled, tally.count, 1.0), (edges[1:] + edges[:-1]) / 2)
        return cls(scaler.temperature, edges, values, z.shape[1] == 2).with_certificate(scaler.certificate)


_PRIOR = 2.0  # pseudo-counts N′, shared by a binning's bins
_EDGE = 1e-6  # how near to 0 and 1 a bin's prior mean may come
_NEGLIGIBLE = 1e-12  # weight below which a binning is left out


class BBQ(Cuts, ClassCurves):
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

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Bayesian binning into quantiles: weigh all binnings of each class at once, on sums."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
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


def _average(
    scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts and values of the averaged histogram of one class."""
    n = len(scores)
    binnings = _binnings(n, float(n if sample_weight is None else sample_weight.sum()))
    if sample_weight is None:
        ordered = np.sort(scores)
        hits = np.cumsum(np.bincount(np.searchsorted(ordered, scores[positive]), minlength=n))
        mass, wanted = np.arange(n + 1), binnings.last
    else:
        order = np.argsort(scores, kind="stable")
        ordered, came_true = scores[order], np.zeros(n)
        came_true[positive] = sample_weight[positive]
        hits, mass = np.cumsum(came_true[order]), np.append(0, np.cumsum(sample_weight[order]))
        wanted = weighted_quantile_index(mass[1:], binnings.share)
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


_FAR = 700.0  # log-odds beyond this count as this: exp(−700) is still a number
_SEEDING = 2048  # evenly ranked log-odds among which the first representatives are drawn
_MOST = 200  # rounds of the alternation


class IMax(Cuts, TopLabel):
    """Replace the confidence by the accuracy of its bin, the bins of λ = ln c/(1 − c) being chosen for information.

    Of two classes c is P(class 1). Representatives φ_m = logit(mean of σ(λ) in bin m) and cuts g_m = ln
    [(ln(1+e^φ_{m+1}) − ln(1+e^φ_m)) / (ln(1+e^−φ_m) − ln(1+e^−φ_{m+1}))] are alternated, which raises the information
    that the bin carries about a label drawn from σ(λ). Bins are left-closed. In the row of log-probabilities the
    accuracy is kept in [1/(n+2), 1 − 1/(n+2)]; `confidence` gives it as it is. Not for ranking: confidences of one bin
    become equal.
    Patel et al., "Multi-class uncertainty calibration via mutual information maximization-based binning" (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> binned = IMax.fit(2.5 * z, y, bins=3)
    >>> binned.values.round(4)
    array([0.2273, 0.3197, 0.4707])
    """

    left_closed = True

    def __init__(self, cuts: Any, values: Any, margin: float = 0.0, event: bool = False) -> None:
        super().__init__(cuts, values)
        self.margin, self.event = check_margin(margin), event

    def score(self, xp: Namespace, z: Any) -> Any:
        """The log-odds of the confidence, from the logits themselves."""
        if self.event:
            self._check_classes(z, 2)
        return _top_odds(xp, z, event=self.event)

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, seed: int = 0, sample_weight: WeightsLike = None
    ) -> Self:
        """I-Max binning: alternate from representatives drawn at random, then count hits in the bins."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        event = z.shape[1] == 2
        odds = _top_odds(NUMPY, upcast_half(z), event=event)
        hit = scores_and_outcomes(z, y)[1] > 0
        return cls(*_fit_bins(odds, hit, w, bins, seed), 1 / (row_count(z, w) + 2), event)


class IMaxShared(Cuts, ClassCurves):
    """Replace each class's probability by the frequency of its bin, one set of bins for all classes, then normalise.

    The bins are those of `IMax`, of all n·K log-odds λ_ik = ln p_ik/(1 − p_ik) and labels 1[y_i = k] together;
    frequencies are kept in [1/(nK+2), 1 − 1/(nK+2)]. Not for maps that must keep the predicted class:
    classes of one bin come level.
    Patel et al., "Multi-class uncertainty calibration via mutual information maximization-based binning" (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> binned = IMaxShared.fit(2.5 * z, y, bins=3)
    >>> binned.values.round(4)
    array([0.0514, 0.1616, 0.3343])
    """

    left_closed = True

    def map(self, xp: Namespace, z: Any) -> Any:
        """The frequencies, normalised."""
        return one_vs_rest(xp, z, lambda odds: self.curve(xp, odds), score=lambda part: _odds(xp, part))

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, seed: int = 0, sample_weight: WeightsLike = None
    ) -> Self:
        """I-Max binning, classes shared: alternate from random representatives, then count labels in the bins."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        rows, classes = z.shape
        blocks = native.row_chunks(rows, classes, native.LARGE_CHUNK)
        odds = np.concatenate([_odds(NUMPY, z[at].astype(np.float64)).ravel() for at in blocks])
        positive = np.arange(rows) * classes + y
        sample_weight = None if w is None else np.repeat(w, classes)
        if (absent := find_absent(z)) is not None:
            here = ~absent.ravel()
            odds, positive = odds[here], np.cumsum(here)[positive] - 1
            sample_weight = None if sample_weight is None else sample_weight[here]
        cuts, values = _fit_bins(odds, positive, sample_weight, bins, seed)
        return cls(cuts, clip_frequencies(values, len(odds) if sample_weight is None else sample_weight.sum()))


def _odds(xp: Namespace, z: Any) -> Any:
    """ln p/(1 − p) of every class."""
    log_p, log_rest = log_probs_and_rests(xp, z)
    return xp.clip(log_p - log_rest, -_FAR, _FAR)


def _top_odds(xp: Namespace, z: Any, *, event: bool) -> Any:
    """ln p/(1 − p) of the largest class, its logit less the others' log-sum; of an event, that of class 1."""
    z = xp.double(z)
    if event:
        return xp.clip(z[:, 1] - z[:, 0], -_FAR, _FAR)
    best = xp.argmax(z, axis=1, keepdims=True)
    others = xp.logsumexp(xp.put_along_axis(z, best, -math.inf))
    return xp.clip(xp.max(z, axis=1) - others, -_FAR, _FAR)


def _fit_bins(
    odds: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None, bins: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts of all log-odds, and how many of each bin are among those that came true."""
    equal_width(bins)  # the same demand on the number of bins
    if sample_weight is None:
        ordered, w = np.sort(odds), np.ones(len(odds))
        came_true = w[positive]
    else:
        order = np.argsort(odds, kind="stable")
        ordered, w, came_true = odds[order], sample_weight[order], sample_weight[positive]
    mass = np.append(0.0, np.cumsum(w))
    cuts = _boundaries(_representatives(ordered, w, _seeds(ordered, mass, int(bins), seed)))
    count = np.diff(mass[np.concatenate([[0], np.searchsorted(ordered, cuts), [len(ordered)]])])
    hits = np.bincount(np.searchsorted(cuts, odds[positive], side="right"), came_true, minlength=len(count))
    ends = np.concatenate([cuts[:1], cuts, cuts[-1:]]) if len(cuts) else np.zeros(2)
    share = np.minimum(hits / np.where(count > 0, count, 1.0), 1.0)  # sums in two orders differ by rounding
    return cuts, np.where(count > 0, share, expit((ends[1:] + ends[:-1]) / 2))


def _representatives(ordered: np.ndarray, w: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """Alternate cuts and representatives until neither moves."""
    # Sums of σ from below and of 1 − σ from above: each grows with its terms, so differences of the sums stay exact.
    n = len(ordered)
    yes = np.append(0.0, np.cumsum(w * expit(ordered)))
    no = np.append(np.cumsum((w * expit(-ordered))[::-1])[::-1], 0.0)
    overall = np.log(yes[-1]) - np.log(no[0])
    for _ in range(_MOST):
        ends = np.concatenate([[0], np.searchsorted(ordered, _boundaries(phi)), [n]])
        filled = ends[1:] > ends[:-1]
        yes_inside = np.where(filled, yes[ends[1:]] - yes[ends[:-1]], 1.0)
        no_inside = np.where(filled, no[ends[:-1]] - no[ends[1:]], 1.0)
        following = np.sort(np.where(filled, np.log(yes_inside) - np.log(no_inside), overall))
        if np.array_equal(following, phi):
            break
        phi = following
    return phi


def _boundaries(phi: np.ndarray) -> np.ndarray:
    """Where the two neighbours' representatives lose equally much information; it lies between them."""
    low, high = phi[:-1], phi[1:]
    rise, fall = np.logaddexp(0, high) - np.logaddexp(0, low), np.logaddexp(0, -low) - np.logaddexp(0, -high)
    apart = (rise > 0) & (fall > 0)
    between = np.log(np.where(apart, rise, 1.0)) - np.log(np.where(apart, fall, 1.0))
    return np.clip(np.where(apart, between, low), low, high)


def _seeds(ordered: np.ndarray, mass: np.ndarray, bins: int, seed: int) -> np.ndarray:
    """Draw log-odds far from each other: each in proportion to its Jensen–Shannon divergence from the nearest drawn.

    Of a few candidates the one that leaves the least divergence is taken. Arthur & Vassilvitskii, "k-means++" (2007).
    """
    rng = np.random.default_rng(seed)
    # Evenly ranked points, so that the draw depends on the distribution and not on how many samples show it.
    ranks = (np.arange(_SEEDING) + 0.5) * (mass[-1] / _SEEDING)
    points = ordered[np.minimum(np.searchsorted(mass[1:], ranks, side="right"), len(ordered) - 1)]
    yes, no = expit(points), expit(-points)
    entropy = _entropy(yes, no)

    def divergence(drawn: np.ndarray) -> np.ndarray:
        mixed = _entropy((yes[drawn, None] + yes) / 2, (no[drawn, None] + no) / 2)
        return np.maximum(mixed - (entropy[drawn, None] + entropy) / 2, 0.0)

    chosen = [int(rng.integers(_SEEDING))]
    nearest = divergence(np.array(chosen))[0]
    for _ in range(bins - 1):
        total = np.cumsum(nearest)
        drawn = np.searchsorted(total[:-1], rng.random(2 + int(math.log(bins))) * total[-1], side="right")
        left = np.minimum(nearest, divergence(drawn))
        best = int(left.sum(axis=1).argmin())
        chosen.append(int(drawn[best]))
        nearest = left[best]
    return np.sort(points[chosen])


def _entropy(yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    return -xlogy(yes, yes) - xlogy(no, no)
