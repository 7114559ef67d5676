"""Binning: replace confidences, or class probabilities, by the frequencies in bins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

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
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import TopLabel, check_margin, clip_frequencies, row_count, set_confidence
from trueup.calibrators.curves import (
    ORDER_WEIGHT,
    PADDING,
    ClassCurves,
    Cuts,
    Edges,
    each_class,
    one_vs_rest,
    pad_curves,
)
from trueup.calibrators.logistic import log_probs_and_rests
from trueup.calibrators.temperature import Temperature


class Histogram(Edges, TopLabel):
    """Replace the confidence by the accuracy of its bin: c′ = Σ_{i∈b} a_i / n_b, with the same bins for all classes.

    With two classes the confidence is P(class 1), and a_i = 1 if the label is 1. Bins are right-closed, of equal width
    or equal mass. In the row of log-probabilities c′ is clipped to [1/(n+2), 1 − 1/(n+2)]; `confidence` returns it
    unclipped. Not for ranking: all confidences in a bin become equal.

    Parameters
    ----------
    edges
        Edges of the bins, from 0 to 1, shape (bins + 1,).
    values
        Calibrated confidence of each bin, shape (bins,).
    margin
        Smallest distance of a confidence from 0 and 1 in the log-probabilities.
    event
        Map P(class 1) of two classes instead of the confidence.

    Examples
    --------
    >>> logits = np.log([[0.1, 0.9], [0.2, 0.8], [0.4, 0.6], [0.7, 0.3]])
    >>> binned = Histogram.fit(logits, [1, 0, 1, 0], bins=4)
    >>> binned.confidence(logits).round(4)
    array([0.5, 0.5, 1. , 0. ])

    References
    ----------
    Zadrozny & Elkan, "Obtaining calibrated probability estimates from decision trees and naive Bayesian classifiers"
    (2001), ICML.
    """

    def __init__(self, edges: ArrayLike, values: ArrayLike, margin: float = 0.0, event: bool = False) -> None:
        super().__init__(edges, values)
        self.margin, self.event = check_margin(margin), event

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> Self:
        """Count the correct predictions in bins of equal width; an empty bin gets its midpoint.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        edges = slack_edges(bins, z)
        if w is None and z.shape[1] > 2:
            return cls.from_tally(Bins(edges, *top_label_tally(z, y, edges[1:-1].copy())))
        scores, outcomes = scores_and_outcomes(z, y, quick=True)
        return cls.from_tally(Bins.from_scores(scores, outcomes, edges, sample_weight=w), event=z.shape[1] == 2)

    @classmethod
    def from_tally(cls, tally: Bins, *, event: bool = False) -> Self:
        """Build the calibrator from the rows and the correct predictions in each bin.

        Parameters
        ----------
        tally
            The bins.
        event
            Map P(class 1) of two classes instead of the confidence.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls(tally.edges, _frequency(tally, tally.edges), 1 / (tally.count.sum() + 2), event)

    @classmethod
    def fit_mass(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None
    ) -> Self:
        """Count the correct predictions in bins of equal mass, none of which is empty.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        scores, outcomes = scores_and_outcomes(z, y, quick=True)
        tally = Bins.from_scores(scores, outcomes, equal_mass(scores, bins, w), sample_weight=w)
        return cls.from_tally(tally, event=z.shape[1] == 2)


class HistogramOvR(Edges, ClassCurves):
    """Replace each class's probability by the frequency of that class in its bin, then normalise the row.

    q_k ∝ Σ_{i: p_ik∈b} 1[y_i = k] / n_kb, with bins of equal width, clipped to [1/(n+2), 1 − 1/(n+2)].
    Not for many classes with few samples each, nor where the predicted class must stay: it may change.

    Parameters
    ----------
    edges
        Edges of the bins, from 0 to 1, shape (bins + 1,).
    values
        Frequency of each class in each bin, shape (classes, bins).

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]])
    >>> binned = HistogramOvR.fit(logits, [0, 1, 0, 1], bins=2)
    >>> np.exp(binned(logits)).round(4)
    array([[0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.6667, 0.3333],
           [0.1667, 0.8333]])

    References
    ----------
    Guo et al., "On calibration of modern neural networks" (2017), arXiv:1706.04599.
    """

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> Self:
        """Count each class's labels in the bins of its probability; an empty bin gets its midpoint.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins of equal width.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls.from_tally(tally_options(z, y, bins=bins, sample_weight=w), slack_edges(bins, z))

    @classmethod
    def from_tally(cls, tally: Bins, edges: np.ndarray) -> Self:
        """Build the calibrator from a class-wise tally.

        Parameters
        ----------
        tally
            Rows and labels of each class in each bin.
        edges
            Edges of the bins, shape (bins + 1,).

        Returns
        -------
        Self
            The fitted calibrator.
        """
        return cls(edges, clip_frequencies(_frequency(tally, edges), tally.n))


def tally_options(z: np.ndarray, y: np.ndarray, *, bins: int = BINS, sample_weight: np.ndarray | None = None) -> Bins:
    """Return a class-wise tally without absent options, which would otherwise count in the bin of probability 0."""
    tally = Bins.of(z, y, bins=bins, classwise=True, sample_weight=sample_weight)
    if (absent := find_absent(z)) is None:
        return tally
    count, absent_count = tally.count.copy(), absent.sum(axis=0) if sample_weight is None else sample_weight @ absent
    count[:, 0] = np.maximum(count[:, 0] - absent_count, 0.0)
    return replace(tally, count=np.where(count > 1e-9, count, 0.0))


def slack_edges(bins: int, z: np.ndarray) -> np.ndarray:
    """Return edges of equal width, shifted by the logits' rounding error so that scores on an edge stay below it."""
    return np.concatenate([[0.0], cut_points(equal_width(bins), rounding=rounding_error(z)), [1.0]])


def _frequency(tally: Bins, edges: np.ndarray) -> np.ndarray:
    """Return the fraction of hits in each bin; its midpoint if the bin is empty."""
    return np.where(
        tally.count > 0, tally.hits / np.where(tally.count > 0, tally.count, 1.0), (edges[1:] + edges[:-1]) / 2
    )


STRENGTHS = np.geomspace(0.1, 1e6, 57)
"""Pseudo-counts among which the likelihood chooses."""


class ShrunkenHistogram(Cuts, ClassCurves):
    """Mix each class's probability with its frequency in a bin: q_k ∝ (h_b + m p_k)/(n_b + m).

    The bin of p_k holds n_b rows of the fit, h_b of them with label k; bins have equal mass. The likelihood of a
    class's m pseudo-counts is beta-binomial: ∏_b B(h_b + m p̄_b, n_b − h_b + m(1 − p̄_b)) / B(m p̄_b, m(1 − p̄_b)).
    Here p̄_b is the mean probability in the bin. A calibrated network is left unchanged, and a poor one is binned. With
    two classes the curves complement each other. Not for many classes, whose small probabilities fill nearly all bins.

    Parameters
    ----------
    cuts
        Cuts between the bins, ascending, shape (classes, bins − 1).
    values
        Frequency of the class in each bin, shape (classes, bins).
    weights
        Weight m/(n_b + m) of the network's own probability, shape (classes, bins).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> p = rng.random(2000)
    >>> z, y = np.log(np.stack([1 - p, p], axis=1)), (rng.random(2000) < 0.2 + 0.6 * (p > 0.5)).astype(int)
    >>> np.exp(ShrunkenHistogram.fit(z, y)(np.log([[0.7, 0.3], [0.3, 0.7]]))).round(1)
    array([[0.8, 0.2],
           [0.2, 0.8]])
    """

    weights: np.ndarray

    def __init__(self, cuts: ArrayLike, values: ArrayLike, weights: ArrayLike) -> None:
        super().__init__(cuts, values)
        self.set_parameters(weights=weights)
        if self.cuts.ndim != 2 or self.weights.shape != self.values.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (self.cuts, self.values, self.weights))
            raise ValueError(f"cuts must be (classes, bins − 1), values and weights (classes, bins), got {shapes}")
        if not ((self.weights >= 0) & (self.weights <= 1)).all():
            raise ValueError(f"weights must lie in [0, 1], got {self.weights.min():.6g}..{self.weights.max():.6g}")

    def curve(self, xp: Namespace, p: Array) -> Array:
        """Return the mixtures of probability and frequency."""
        index = xp.searchsorted(self.cuts, p)
        weight = xp.take(self.weights, index)
        return (1 - weight) * xp.take(self.values, index) + weight * p

    def curve_steps(self, order_weight: float = 0.0) -> list[e.Step]:
        """Return the mixtures, which are lines in each bin."""
        rows = zip(self.cuts, (1 - self.weights) * self.values, self.weights + order_weight, strict=True)
        return [e.stairs(x, y, weight) for x, y, weight in rows]

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, sample_weight: WeightsLike = None) -> Self:
        """Count each class's labels in bins, and choose the pseudo-counts by likelihood.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins of equal mass.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        curves = [_curve_of(*rows, bins) for rows in each_class(z, y, w)]
        if z.shape[1] == 2:
            cuts, values, weights = curves[1]
            curves[0] = 1 - cuts[::-1], 1 - values[::-1], weights[::-1]
        # A final cut above every probability, so that a single bin also has a cut.
        padded = pad_curves([np.append(cuts, PADDING) for cuts, _, _ in curves], PADDING)
        values, weights = (pad_curves([np.append(curve[part], curve[part][-1]) for curve in curves]) for part in (1, 2))
        return cls(padded, clip_frequencies(values, row_count(z, w)), weights)


def _curve_of(
    p: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cuts, each bin's frequency, and the weight m/(n_b + m) of the network's probability there."""
    edges, outcomes = equal_mass(p, bins, sample_weight), np.zeros(len(p))
    outcomes[positive] = 1.0
    tally = Bins.from_scores(p, outcomes, edges, sample_weight=sample_weight)
    count, hits = tally.count, tally.hits
    strength = choose_strength(count, hits, tally.mean_confidence)
    return cut_points(edges), hits / count, strength / (count + strength)


def choose_strength(count: np.ndarray, hits: np.ndarray, mean: np.ndarray) -> float:
    """Return the pseudo-counts of `STRENGTHS` with the largest beta-binomial likelihood around the mean prediction.

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

    c′ = Σ_{i∈b} g(z_i) / n_b with g(z) = max_k softmax(z/T)_k, or P(class 1) of two classes, in bins of equal mass in
    g. The output is discrete, so its calibration error can be verified, but it has the scaler's small variance. Not for
    networks that a temperature cannot calibrate: the labels enter through T alone.

    Parameters
    ----------
    temperature
        The divisor T > 0.
    edges
        Edges of the bins of the scaled confidence, from 0 to 1, shape (bins + 1,).
    values
        Mean scaled confidence of each bin, shape (bins,).
    event
        Map P(class 1) of two classes instead of the confidence.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(3000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> discrete = ScalingBinning.fit(2.5 * z, y, bins=3)
    >>> f"{discrete.temperature:.4f}", discrete.values.round(4)
    ('2.5186', array([0.2195, 0.2951, 0.436 ]))

    References
    ----------
    Kumar, Liang & Ma, "Verified uncertainty calibration" (2019), arXiv:1909.10155.
    """

    temperature: float

    def __init__(self, temperature: float, edges: ArrayLike, values: ArrayLike, event: bool = False) -> None:
        self.event = event
        self.set_parameters(temperature=Temperature(temperature).temperature)
        super().__init__(edges, values)

    def score(self, xp: Namespace, z: Array) -> Array:
        """Return the scaled confidence."""
        return super().score(xp, z / self.temperature)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Scale, set the predicted class to its bin's mean, and share the rest in the scaled proportions."""
        mapped = self.map_confidence(xp, self.score(xp, z))
        return set_confidence(xp, z / self.temperature, mapped, event=self.event)

    def formula(self, classes: int) -> e.Formula:
        """Return the scaling and the bins as steps."""
        return e.join(e.Formula("logits", (e.scale(1 / self.temperature),), "logits"), super().formula(classes))

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
        """Fit T, the bins and their means to the same rows, or to three random parts.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins of equal mass.
        splits
            1 to use all rows in each step, or 3 to use a separate part for each, as in the paper.
        seed
            Seed of the random parts.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
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


_PSEUDO_COUNTS = 2.0  # N′ in the paper, divided among the bins of a binning.
_MIN_PRIOR_MEAN = 1e-6  # smallest distance of a bin's prior mean from 0 and 1.
_NEGLIGIBLE = 1e-12  # binnings with less weight are dropped.


class BBQ(Cuts, ClassCurves):
    """Average equal-mass binnings of each class's probability, weighted by their evidence, then normalise the row.

    The number of bins B ranges from n^⅓/10 to 10·n^⅓. A bin has N_b rows, m_b of them with the class's label, and the
    prior mean p_b, its midpoint. With α_b = 2p_b/B and β_b = 2(1 − p_b)/B its value is θ_b = (m_b + α_b)/(N_b + 2/B). A
    binning has the weight S_B = Π_b Beta(m_b + α_b, N_b − m_b + β_b)/Beta(α_b, β_b). Not for many classes with few
    samples each, nor where the predicted class must stay: it may change.

    Parameters
    ----------
    cuts
        Cuts between intervals of constant value, ascending, shape (classes, cuts).
    values
        Averaged value of each interval, shape (classes, cuts + 1).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 2))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> averaged = BBQ.fit(3 * z, y)
    >>> p = np.array([[0.05, 0.95], [0.3, 0.7], [0.8, 0.2]])
    >>> np.exp(averaged(np.log(p))).round(3)
    array([[0.29 , 0.71 ],
           [0.427, 0.573],
           [0.538, 0.462]])

    References
    ----------
    Naeini, Cooper & Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning" (2015), AAAI.
    """

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Average the binnings of each class.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        curves = [_average(*rows) for rows in each_class(z, y, w)]
        cuts, values = zip(*curves, strict=True)
        return cls(pad_curves(cuts, PADDING), pad_curves(values))


class _Binnings(NamedTuple):
    """Equal-mass binnings of n sorted scores, concatenated; bin sizes in a binning differ by at most one."""

    last_index: np.ndarray
    """Index of the highest score in each bin."""
    share: np.ndarray
    """Cumulative share of the weight at the end of each bin, for weighted rows."""
    first_bin: np.ndarray
    """Index of each binning's first bin."""


@lru_cache(1)  # all classes that every row offers share their binnings
def _binnings(n: int, rows: float) -> _Binnings:
    fewest, most = max(1, math.floor(rows ** (1 / 3) / 10)), min(n, math.ceil(10 * rows ** (1 / 3)))
    numbers = np.arange(fewest, most + 1)
    first_bin = np.cumsum(numbers) - numbers
    bins = np.repeat(numbers, numbers)
    number = np.arange(1, len(bins) + 1) - np.repeat(first_bin, numbers)  # number of a bin in its binning, from 1
    # The score of rank r is in bin r·bins // n.
    return _Binnings((number * n + bins - 1) // bins - 1, number / bins, first_bin)


def _average(
    scores: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cuts and values of one class's averaged histogram."""
    n = len(scores)
    binnings = _binnings(n, float(n if sample_weight is None else sample_weight.sum()))
    if sample_weight is None:
        ordered = np.sort(scores)
        hits = np.cumsum(np.bincount(np.searchsorted(ordered, scores[positive]), minlength=n))
        mass, bin_ends = np.arange(n + 1), binnings.last_index
    else:
        order = np.argsort(scores, kind="stable")
        ordered, outcomes = scores[order], np.zeros(n)
        outcomes[positive] = sample_weight[positive]
        hits, mass = np.cumsum(outcomes[order]), np.append(0, np.cumsum(sample_weight[order]))
        bin_ends = weighted_quantile_index(mass[1:], binnings.share)
    hits = np.append(0, hits)
    runs = np.flatnonzero(tie_ends(ordered))
    last_index = runs[np.searchsorted(runs, bin_ends)]  # a cut moves to the end of a run of equal scores
    before = np.roll(last_index, 1)
    before[binnings.first_bin] = -1
    middle = ordered[:-1] + np.diff(ordered) / 2
    edges = np.concatenate([[0.0], np.where(middle < ordered[1:], middle, ordered[:-1]), [1.0]])

    filled = last_index > before  # a cut that moved onto the next one leaves an empty bin
    size = mass[last_index + 1] - mass[before + 1]
    hit = np.minimum(hits[last_index + 1] - hits[before + 1], size)
    lengths = np.diff(binnings.first_bin, append=len(last_index))
    prior = np.repeat(_PSEUDO_COUNTS / np.add.reduceat(filled, binnings.first_bin, dtype=np.int64), lengths)
    alpha = prior * np.clip((edges[last_index + 1] + edges[before + 1]) / 2, _MIN_PRIOR_MEAN, 1 - _MIN_PRIOR_MEAN)
    beta = prior - alpha
    evidence = _rise(alpha, hit) + _rise(beta, size - hit) - _rise(prior, size)
    log_weight = np.add.reduceat(evidence, binnings.first_bin)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()

    used = filled & np.repeat(weight > _NEGLIGIBLE, lengths)
    share = (np.repeat(weight, lengths) * (hit + alpha) / (size + prior))[used]
    # Each bin adds its share from its first score to its last: cumulative sums of the changes give the average.
    change = np.bincount(before[used] + 1, share, n + 1) - np.bincount(last_index[used] + 1, share, n + 1)
    cut_index = np.unique(last_index[used])[:-1]  # the final cut is the upper end
    values = np.cumsum(change)[np.append(0, cut_index + 1)]
    return edges[cut_index + 1], np.clip(values, _NEGLIGIBLE, 1.0)


def _rise(start: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return ln Γ(start + steps) − ln Γ(start); most bins hold no label of the class, where it is zero."""
    out = np.zeros(len(start))
    positive = np.flatnonzero(steps)
    out[positive] = gammaln(start[positive] + steps[positive]) - gammaln(start[positive])
    return out


_MAX_ODDS = 700.0  # log-odds are clipped here: exp(−700) is still positive.
_SEEDING = 2048  # number of evenly ranked log-odds from which the first representatives are drawn.
_MAX_ROUNDS = 200  # rounds of the alternation.


class IMax(Cuts, TopLabel):
    """Replace the confidence c by the accuracy of its bin; bins of λ = ln c/(1 − c) maximise mutual information.

    With two classes c is P(class 1). Representatives φ_m = logit(mean of σ(λ) in bin m) alternate with cuts g_m = ln
    [(ln(1+e^φ_{m+1}) − ln(1+e^φ_m)) / (ln(1+e^−φ_m) − ln(1+e^−φ_{m+1}))]. Each round raises the information of the bin
    about a label drawn from σ(λ). Bins are left-closed. In the row of log-probabilities the accuracy is clipped to
    [1/(n+2), 1 − 1/(n+2)]; `confidence` returns it unclipped. Not for ranking: all confidences in a bin become equal.

    Parameters
    ----------
    cuts
        Cuts between the bins in log-odds, ascending, shape (bins − 1,).
    values
        Accuracy of each bin, shape (bins,).
    margin
        Smallest distance of a confidence from 0 and 1 in the log-probabilities.
    event
        Map P(class 1) of two classes instead of the confidence.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> binned = IMax.fit(2.5 * z, y, bins=3)
    >>> binned.values.round(4)
    array([0.2273, 0.3197, 0.4707])

    References
    ----------
    Patel et al., "Multi-class uncertainty calibration via mutual information maximization-based binning" (2021),
    arXiv:2006.13092.
    """

    left_closed = True

    def __init__(self, cuts: ArrayLike, values: ArrayLike, margin: float = 0.0, event: bool = False) -> None:
        super().__init__(cuts, values)
        self.margin, self.event = check_margin(margin), event

    def score(self, xp: Namespace, z: Array) -> Array:
        """Return the log-odds of the confidence, computed from the logits."""
        if self.event:
            self._check_classes(z, 2)
        return _top_odds(xp, z, event=self.event)

    def formula(self, classes: int) -> e.Formula:
        """Return the bins of the log-odds as steps."""
        return self.curve_formula(*self.curve_steps(), odds=True)

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, seed: int = 0, sample_weight: WeightsLike = None
    ) -> Self:
        """Alternate representatives and cuts from random starting points, then count hits in the bins.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins.
        seed
            Seed of the starting points.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        event = z.shape[1] == 2
        odds = _top_odds(NUMPY, upcast_half(z), event=event)
        hit = scores_and_outcomes(z, y)[1] > 0
        return cls(*_fit_bins(odds, hit, w, bins, seed), 1 / (row_count(z, w) + 2), event)


class IMaxShared(Cuts, ClassCurves):
    """Replace each class's probability by the frequency of its bin, with the same bins for all classes, then normalise.

    The bins are those of `IMax` for the pooled n·K log-odds λ_ik = ln p_ik/(1 − p_ik) with labels 1[y_i = k].
    Frequencies are clipped to [1/(nK+2), 1 − 1/(nK+2)]. Not for maps that must keep the predicted class: classes in one
    bin become equal.

    Parameters
    ----------
    cuts
        Cuts between the bins in log-odds, ascending, shape (bins − 1,).
    values
        Frequency in each bin, shape (bins,).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> binned = IMaxShared.fit(2.5 * z, y, bins=3)
    >>> binned.values.round(4)
    array([0.0514, 0.1616, 0.3343])

    References
    ----------
    Patel et al., "Multi-class uncertainty calibration via mutual information maximization-based binning" (2021),
    arXiv:2006.13092.
    """

    left_closed = True

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the normalised frequencies."""
        return one_vs_rest(xp, z, lambda odds: self.curve(xp, odds), score=lambda part: _odds(xp, part))

    def formula(self, classes: int) -> e.Formula:
        """Return the bins of the log-odds as steps, mixed with the probabilities, which keep the order."""
        bins = e.op("log_odds"), e.piecewise(*self.curve_steps())
        parts = (bins, (e.op("softmax"),))
        return e.Formula("logits", (e.mix((1.0, ORDER_WEIGHT), parts), e.op("normalise")), "probs")

    @classmethod
    def fit(
        cls, logits: ArrayLike, labels: ArrayLike, *, bins: int = BINS, seed: int = 0, sample_weight: WeightsLike = None
    ) -> Self:
        """Alternate representatives and cuts from random starting points, then count labels in the bins.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        bins
            Number of bins.
        seed
            Seed of the starting points.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        rows, classes = z.shape
        blocks = native.row_chunks(rows, classes, native.LARGE_CHUNK)
        odds = np.concatenate([_odds(NUMPY, z[at].astype(np.float64)).ravel() for at in blocks])
        positive = np.arange(rows) * classes + y
        sample_weight = None if w is None else np.repeat(w, classes)
        if (absent := find_absent(z)) is not None:
            offered = ~absent.ravel()
            odds, positive = odds[offered], np.cumsum(offered)[positive] - 1
            sample_weight = None if sample_weight is None else sample_weight[offered]
        cuts, values = _fit_bins(odds, positive, sample_weight, bins, seed)
        return cls(cuts, clip_frequencies(values, len(odds) if sample_weight is None else sample_weight.sum()))


def _odds(xp: Namespace, z: Array) -> Array:
    """Return ln p/(1 − p) of every class."""
    log_p, log_rest = log_probs_and_rests(xp, z)
    return xp.clip(log_p - log_rest, -_MAX_ODDS, _MAX_ODDS)


def _top_odds(xp: Namespace, z: Array, *, event: bool) -> Array:
    """Return ln p/(1 − p) of the largest class or, with `event`, of class 1."""
    z = xp.double(z)
    if event:
        return xp.clip(z[:, 1] - z[:, 0], -_MAX_ODDS, _MAX_ODDS)
    best = xp.argmax(z, axis=1, keepdims=True)
    others = xp.logsumexp(xp.put_along_axis(z, best, -math.inf))
    return xp.clip(xp.max(z, axis=1) - others, -_MAX_ODDS, _MAX_ODDS)


def _fit_bins(
    odds: np.ndarray, positive: np.ndarray, sample_weight: np.ndarray | None, bins: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cuts of all log-odds and each bin's fraction of positives."""
    equal_width(bins)  # checks the number of bins
    if sample_weight is None:
        ordered, w = np.sort(odds), np.ones(len(odds))
        outcomes = w[positive]
    else:
        order = np.argsort(odds, kind="stable")
        ordered, w, outcomes = odds[order], sample_weight[order], sample_weight[positive]
    mass = np.append(0.0, np.cumsum(w))
    cuts = _boundaries(_representatives(ordered, w, _seeds(ordered, mass, int(bins), seed)))
    count = np.diff(mass[np.concatenate([[0], np.searchsorted(ordered, cuts), [len(ordered)]])])
    hits = np.bincount(np.searchsorted(cuts, odds[positive], side="right"), outcomes, minlength=len(count))
    ends = np.concatenate([cuts[:1], cuts, cuts[-1:]]) if len(cuts) else np.zeros(2)
    share = np.minimum(hits / np.where(count > 0, count, 1.0), 1.0)  # the two sums may differ by rounding
    return cuts, np.where(count > 0, share, expit((ends[1:] + ends[:-1]) / 2))


def _representatives(ordered: np.ndarray, w: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """Alternate cuts and representatives until they stop changing."""
    # Sums of σ from below and of 1 − σ from above: small terms come first, so differences of the sums stay exact.
    n = len(ordered)
    yes = np.append(0.0, np.cumsum(w * expit(ordered)))
    no = np.append(np.cumsum((w * expit(-ordered))[::-1])[::-1], 0.0)
    overall = np.log(yes[-1]) - np.log(no[0])
    for _ in range(_MAX_ROUNDS):
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
    """Return the cuts at which two neighbouring representatives lose the same amount of information."""
    low, high = phi[:-1], phi[1:]
    rise, fall = np.logaddexp(0, high) - np.logaddexp(0, low), np.logaddexp(0, -low) - np.logaddexp(0, -high)
    apart = (rise > 0) & (fall > 0)
    between = np.log(np.where(apart, rise, 1.0)) - np.log(np.where(apart, fall, 1.0))
    return np.clip(np.where(apart, between, low), low, high)


def _seeds(ordered: np.ndarray, mass: np.ndarray, bins: int, seed: int) -> np.ndarray:
    """Draw well-separated log-odds: each with probability proportional to its divergence from the nearest one drawn.

    The divergence is Jensen–Shannon's. Among several candidates the one that leaves the smallest total divergence is
    taken (Arthur & Vassilvitskii, "k-means++", 2007).
    """
    rng = np.random.default_rng(seed)
    # Evenly ranked points, so that the draw depends on the distribution and not on the number of samples.
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
        remaining = np.minimum(nearest, divergence(drawn))
        best = int(remaining.sum(axis=1).argmin())
        chosen.append(int(drawn[best]))
        nearest = remaining[best]
    return np.sort(points[chosen])


def _entropy(yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    return -xlogy(yes, yes) - xlogy(no, no)
