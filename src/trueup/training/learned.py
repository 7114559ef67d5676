"""Which training samples a network learned when, and how it tells them apart afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.core.arrays import as_logits, as_vector
from trueup.metrics import ranking


@dataclass(frozen=True)
class Band:
    """The greatest logits of the training samples that were learned in epochs first ≤ e ≤ last."""

    first: float
    last: float
    """Both infinite for the samples that were never learned."""
    count: np.ndarray
    """How many fall between each two edges."""


@dataclass(frozen=True)
class MaxLogits:
    """Greatest logits by learned epoch: wide and apart where a network tells easy from hard samples."""

    edges: np.ndarray
    bands: tuple[Band, ...]
    range: float
    """95th percentile − 5th of the greatest logit, over all samples."""
    auc: float
    """The chance that a sample of the first band has a greater one than a sample of the last that was learned."""


def max_logits(logits: Any, learned: Any, *, bounds: Sequence[float] | None = None, bins: int = 30) -> MaxLogits:
    """Histograms of max_k z_k of the training samples, by the band of epochs in which each was learned.

    `learned` comes from `History.learned_epochs`. A band ends with each of `bounds`, and one with the last epoch; by
    default they are thirds of the samples that were learned. Those that never were have a band of their own, at the
    end. Logits are taken as they are: they must come from one network, in evaluation mode.

    >>> logits = [[9.0, 0.0], [8.0, 0.0], [5.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    >>> found = max_logits(logits, [1, 1, 2, 7, np.inf], bounds=[1], bins=2)
    >>> [(band.first, band.last, band.count.tolist()) for band in found.bands]
    [(1.0, 1.0, [0, 2]), (2.0, 7.0, [1, 1]), (inf, inf, [1, 0])]
    >>> f"{found.range:.4f} {found.auc:.4f}"
    '7.6000 1.0000'

    Wang, Feng & Zhang (2021), figure 5; the two numbers are ours.
    """
    z = as_logits(logits).double().amax(dim=1).cpu().numpy()
    epochs = np.asarray(learned, dtype=np.float64)
    known = np.isfinite(epochs)
    as_vector(np.where(epochs == np.inf, 0.0, epochs), "learned", length=len(z))
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    seen = epochs[known]
    if bounds is None:
        bounds = np.quantile(seen, (1 / 3, 2 / 3), method="inverted_cdf").tolist() if len(seen) else []
    last = float(seen.max()) if len(seen) else 0.0
    ends = [*sorted({float(bound) for bound in bounds if bound < last}), last]
    edges = np.histogram_bin_edges(z, bins)
    groups = [z[known & (np.searchsorted(ends, epochs) == place)] for place in range(len(ends))]
    starts = [1.0, *(math.floor(end) + 1.0 for end in ends[:-1])]
    spans = [*zip(starts, ends, groups, strict=True), (math.inf, math.inf, z[~known])]
    bands = tuple(Band(a, b, np.histogram(group, edges)[0]) for a, b, group in spans if len(group))
    auc = math.nan
    apart = [group for group in groups if len(group)]
    if len(apart) > 1:
        first, final = apart[0], apart[-1]
        auc = ranking.roc_area(np.concatenate([first, final]), np.arange(len(first) + len(final)) < len(first))
    spread = float(np.subtract(*np.percentile(z, (95, 5)))) if len(z) else math.nan
    return MaxLogits(edges, bands, spread, auc)
