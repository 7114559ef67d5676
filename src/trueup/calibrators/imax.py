"""I-Max binning: the bins of the log-odds that keep the most information about the label."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch
from scipy.special import expit, xlogy
from torch import Tensor

from trueup.calibrators.base import (
    Calibrator,
    TopLabel,
    check_margin,
    clip_frequencies,
    keep_curve,
    one_vs_rest,
    row_count,
    row_weights,
    set_confidence,
    step,
)
from trueup.calibrators.logistic import log_probs_and_rests
from trueup.core import native
from trueup.core.arrays import as_logits, as_weighted, find_absent, match_kind, upcast_half
from trueup.core.bins import BINS, equal_width
from trueup.core.row_scores import scores_and_outcomes

_FAR = 700.0  # log-odds beyond this count as this: exp(−700) is still a number
_SEEDING = 2048  # evenly ranked log-odds among which the first representatives are drawn
_MOST = 200  # rounds of the alternation


class IMax(TopLabel):
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
    >>> binned.values.numpy().round(4)
    array([0.2273, 0.3197, 0.4707])
    """

    sample_invariant = False  # twice the samples, and rows come closer to 0 and 1; the bins are invariant
    differentiable = False

    cuts: Tensor
    values: Tensor

    def __init__(self, cuts: Any, values: Any, margin: float = 0.0, event: bool = False) -> None:
        super().__init__()
        keep_curve(self, "cuts", cuts, values, more=1)
        self.margin, self.event = check_margin(margin), event

    def confidence(self, logits: Any) -> Any:
        """The calibrated confidence itself, (n,); of an event its probability."""
        z = upcast_half(as_logits(logits))
        return match_kind(self._of_odds(self._odds(z)).to(z.dtype), logits)

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """Map confidences to the accuracies of their bins."""
        return self._of_odds(torch.logit(confidence.double()).clamp(-_FAR, _FAR))

    def map(self, logits: Tensor) -> Tensor:
        """Give the predicted class its bin's accuracy and share the rest; log-odds come from the logits themselves."""
        mapped = self._of_odds(self._odds(logits)).clamp(self.margin, 1 - self.margin)
        return set_confidence(logits, mapped, event=self.event)

    def _odds(self, logits: Tensor) -> Tensor:
        if self.event:
            self._check_classes(logits, 2)
        return _top_odds(logits, event=self.event)

    def _of_odds(self, odds: Tensor) -> Tensor:
        return step(odds, self.cuts, self.values, right=True)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, bins: int = BINS, seed: int = 0, weights: Any = None) -> Self:
        """I-Max binning: alternate from representatives drawn at random, then count hits in the bins."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        event = z.shape[1] == 2
        odds = _top_odds(upcast_half(z), event=event).cpu().numpy()
        hit = scores_and_outcomes(z, y)[1] > 0
        return cls(*_fit_bins(odds, hit, row_weights(w), bins, seed), 1 / (row_count(z, w) + 2), event)


class IMaxShared(Calibrator):
    """Replace each class's probability by the frequency of its bin, one set of bins for all classes, then normalise.

    The bins are those of `IMax`, of all n·K log-odds λ_ik = ln p_ik/(1 − p_ik) and labels 1[y_i = k] together;
    frequencies are kept in [1/(nK+2), 1 − 1/(nK+2)]. Not for maps that must keep the predicted class:
    classes of one bin come level.
    Patel et al., "Multi-class uncertainty calibration via mutual information maximization-based binning" (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> binned = IMaxShared.fit(2.5 * z, y, bins=3)
    >>> binned.values.numpy().round(4)
    array([0.0514, 0.1616, 0.3343])
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and frequencies come closer to 0 and 1
    differentiable = False

    cuts: Tensor
    values: Tensor

    def __init__(self, cuts: Any, values: Any) -> None:
        super().__init__()
        keep_curve(self, "cuts", cuts, values, more=1)

    def map(self, logits: Tensor) -> Tensor:
        """The frequency of every class's bin, normalised."""
        return one_vs_rest(logits, lambda odds: step(odds, self.cuts, self.values, right=True), score=_odds)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, bins: int = BINS, seed: int = 0, weights: Any = None) -> Self:
        """I-Max binning, classes shared: alternate from random representatives, then count labels in the bins."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        rows, classes = z.shape
        blocks = native.row_chunks(rows, classes, native.BLOCK)
        odds = torch.cat([_odds(upcast_half(z[at]).double()) for at in blocks]).ravel().cpu().numpy()
        positive = np.arange(rows) * classes + y.cpu().numpy()
        weights = None if w is None else np.repeat(w.cpu().numpy(), classes)
        if (absent := find_absent(z)) is not None:
            here = ~absent.ravel().cpu().numpy()
            odds, positive = odds[here], np.cumsum(here)[positive] - 1
            weights = None if weights is None else weights[here]
        cuts, values = _fit_bins(odds, positive, weights, bins, seed)
        return cls(cuts, clip_frequencies(values, len(odds) if weights is None else weights.sum()))


def _odds(z: Tensor) -> Tensor:
    """ln p/(1 − p) of every class."""
    log_p, log_rest = log_probs_and_rests(z)
    return (log_p - log_rest).clamp(-_FAR, _FAR)


def _top_odds(z: Tensor, *, event: bool) -> Tensor:
    """ln p/(1 − p) of the largest class, its logit less the others' log-sum; of an event, that of class 1."""
    z = z.double()
    if event:
        return (z[:, 1] - z[:, 0]).clamp(-_FAR, _FAR)
    best = z.argmax(dim=1, keepdim=True)
    others = torch.logsumexp(z.scatter(1, best, -torch.inf), dim=1)
    return (z.gather(1, best)[:, 0] - others).clamp(-_FAR, _FAR)


def _fit_bins(
    odds: np.ndarray, positive: np.ndarray, weights: np.ndarray | None, bins: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts of all log-odds, and how many of each bin are among those that came true."""
    equal_width(bins)  # the same demand on the number of bins
    if weights is None:
        ordered, w = np.sort(odds), np.ones(len(odds))
        came_true = w[positive]
    else:
        order = np.argsort(odds, kind="stable")
        ordered, w, came_true = odds[order], weights[order], weights[positive]
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
        sums = (
            np.where(filled, yes[ends[1:]] - yes[ends[:-1]], 1.0),
            np.where(filled, no[ends[:-1]] - no[ends[1:]], 1.0),
        )
        following = np.sort(np.where(filled, np.log(sums[0]) - np.log(sums[1]), overall))
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
