"""Calibration that knows how far an input lies from those of the fit: density ratio and bin-mean-shift."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator, check_margin, row_count, row_weights, set_confidence
from trueup.calibrators.diagonal import centre_rows
from trueup.core import native
from trueup.core.arrays import as_logits, as_matrix, as_weighted, as_weights, match_kind, upcast_half
from trueup.core.bins import BINS, equal_mass, equal_width, rounding_error, tensor_bin_index
from trueup.core.row_scores import event_probs
from trueup.metrics.proximity import NEIGHBOURS, Rule, check_neighbours, closeness

_NOWHERE = 1e-10
"""Below this density of samples nothing is known of an input, and its confidence stays."""
_NARROWEST = 1e-3
"""The least bandwidth: that of samples with one and the same value would be zero."""
_FULL = 30
"""From so many samples on a bin's gap is believed; that of n < 30 is shrunk by n/(n + 30)."""


class ProximityInformed(Calibrator):
    """A calibrator of the predicted class's confidence by the proximity of the input to those of the fit.

    With `event`, as every fit to two classes is, it maps P(class 1) instead.
    Proximity is measured between `features`, a keyword of the fit and of the call; without them, between logits.
    """

    shift_invariant = True
    sample_invariant = False  # a row's copy is its nearest neighbour
    differentiable = True

    features: Tensor
    of_logits: bool
    neighbours: int
    rule: Rule
    event: bool

    def __init__(self, features: Any, of_logits: bool, neighbours: int, rule: Rule, event: bool) -> None:
        super().__init__()
        self.keep("features", features)
        if self.features.ndim != 2:
            raise ValueError(f"features must have shape (n, width), got {tuple(self.features.shape)}")
        check_neighbours(neighbours, len(self.features))
        if rule not in ("distance", "similarity"):
            raise ValueError(f'rule must be "distance" or "similarity", got {rule!r}')
        self.of_logits, self.neighbours, self.rule, self.event = of_logits, neighbours, rule, event

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """Unless it maps P(class 1), which may come out on the other side of a half."""
        return not self.event

    @abstractmethod
    def map_confidence(self, confidence: Tensor, proximity: Tensor, eps: float) -> Tensor:
        """Map confidences and proximities (n,) in double; `eps` is the rounding of the logits they came from."""

    def confidence(self, logits: Any, *, features: Any = None) -> Any:
        """The calibrated confidence itself, (n,), as the method gives it; of an event its probability."""
        z = upcast_half(as_logits(logits))
        return match_kind(self._confidence(z, features).to(z.dtype), logits)

    def map(self, logits: Tensor, *, features: Any = None) -> Tensor:
        """Give the predicted class its calibrated confidence and share the rest."""
        return set_confidence(logits.double(), self._confidence(logits, features), event=self.event).to(logits.dtype)

    def _confidence(self, logits: Tensor, features: Any) -> Tensor:
        if self.of_logits != (features is None):
            problem = (
                "must be left out, as they were left out of the fit"
                if self.of_logits
                else "must be given, as to the fit"
            )
            raise ValueError(f"features {problem}")
        x = centre_rows(logits.double()) if features is None else features
        if not isinstance(x, Tensor):
            x = as_matrix(x, "features", rows=logits.shape[0])
        wanted = logits.shape[0], self.features.shape[1]  # not len, which an export would take for a constant
        if tuple(x.shape) != wanted:
            raise ValueError(f"features must have shape {wanted}, as in the fit, got {tuple(x.shape)}")
        near = closeness(x.to(logits.device), self.features, neighbours=self.neighbours, rule=self.rule)
        if self.event:
            self._check_classes(logits, 2)
        return self.map_confidence(_claim(logits, event=self.event), near, rounding_error(logits))


class DensityRatio(ProximityInformed):
    """Bayes' rule for P(correct | c, D) of confidence c and proximity D: c′ = f₁(c, D)/(f₁(c, D) + ρ f₀(c, D)).

    f₁ and f₀ are Gaussian kernel density estimates from the correct and the wrong samples, bandwidth 1.06 σ n^(−1/6) in
    each direction; ρ is the ratio of wrong to correct samples. Where no sample is near, c stays; with fewer than two
    correct or wrong ones c′ is the accuracy. c′ stays within [1/(n+2), 1 − 1/(n+2)]: n samples vouch for no more.
    Not for networks hardly ever wrong: f₀ then rests on a few samples.
    Xiong et al., "Proximity-informed calibration for deep neural networks" (2023).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> dense = rng.random(2000) < 0.7
    >>> features = rng.normal(size=(2000, 3)) * np.where(dense, 0.02, 1)[:, None] + np.where(dense, 1, 0)[:, None]
    >>> logits = np.stack([np.zeros(2000), rng.normal(2, 0.5, 2000)], axis=1)  # confident of class 1 everywhere …
    >>> labels = np.where(rng.random(2000) < np.where(dense, 0.95, 0.7), 1, 0)  # … but right less often far out
    >>> ratio = DensityRatio.fit(logits, labels, features=features)
    >>> ratio.confidence([[0.0, 2.0], [0.0, 2.0]], features=[[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]]).round(2)
    array([0.97, 0.73])
    """

    def __init__(
        self,
        features: Any,
        correct: Any,
        wrong: Any,
        of_logits: bool = False,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        mirrored: bool = False,
        event: bool = False,
    ) -> None:
        super().__init__(features, of_logits, neighbours, rule, event)
        for name, points in (("correct", correct), ("wrong", wrong)):
            self.keep(name, points)
            if self.get_buffer(name).ndim != 2 or self.get_buffer(name).shape[1] not in (2, 3):
                wanted = "(n, 2), confidence and proximity, or (n, 3) with weights"
                raise ValueError(f"{name} must have shape {wanted}, got {tuple(points.shape)}")
        if not len(self.correct) + len(self.wrong):
            raise ValueError("correct and wrong must have a row between them, got none")
        self.mirrored = mirrored

    correct: Tensor
    wrong: Tensor

    def map_confidence(self, confidence: Tensor, proximity: Tensor, eps: float) -> Tensor:
        """Bayes' rule."""
        right, wrong = (_weights(points).sum() for points in (self.correct, self.wrong))
        n = right + wrong
        least = 1 / (n + 2)
        if min(len(self.correct), len(self.wrong)) < 2:
            return (torch.zeros_like(confidence) + right / n).clamp(min=least, max=1 - least)
        query = torch.stack([confidence, proximity], dim=1)
        # Each already times its share of the samples, so that ρ cancels.
        log_right, log_wrong = (
            _log_density(query, points, self.mirrored) + torch.log(share / n)
            for points, share in ((self.correct, right), (self.wrong, wrong))
        )
        ratio = torch.sigmoid(log_right - log_wrong).clamp(min=least, max=1 - least)
        return torch.where(torch.logaddexp(log_right, log_wrong) < math.log(_NOWHERE), confidence, ratio)

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        features: Any = None,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        mirrored: bool = False,
        weights: Any = None,
    ) -> Self:
        """Density-ratio calibration: keep the samples; `mirrored` reflects their kernels at confidences 0 and 1."""
        z, y, w, x = _check(logits, labels, features, weights, neighbours)
        top, near, hit = _score(z, y, x, neighbours, rule)
        points = torch.stack([top, near] if w is None else [top, near, w], dim=1)
        return cls(x, points[hit], points[~hit], features is None, neighbours, rule, mirrored, z.shape[1] == 2)


class BinMeanShift(ProximityInformed):
    """Add to each confidence the gap of its cell: c′ = c + λ (accuracy − mean confidence).

    Cells are proximity (equal mass) by confidence (equal width); λ is 1, or m/(m + 30) for a cell of m < 30 samples.
    Of n samples no shift leads out of [1/(n+2), 1 − 1/(n+2)]. Not for small samples: most cells are then empty.
    Xiong et al., "Proximity-informed calibration for deep neural networks" (2023).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> dense = rng.random(2000) < 0.7
    >>> features = rng.normal(size=(2000, 3)) * np.where(dense, 0.02, 1)[:, None] + np.where(dense, 1, 0)[:, None]
    >>> logits = np.stack([np.zeros(2000), rng.normal(2, 0.5, 2000)], axis=1)  # confident of class 1 everywhere …
    >>> labels = np.where(rng.random(2000) < np.where(dense, 0.95, 0.7), 1, 0)  # … but right less often far out
    >>> shift = BinMeanShift.fit(logits, labels, features=features)
    >>> shift.confidence([[0.0, 2.0], [0.0, 2.0]], features=[[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]]).round(2)
    array([0.93, 0.65])
    """

    shift: Tensor
    edges: Tensor
    proximity_edges: Tensor

    def __init__(
        self,
        features: Any,
        shift: Any,
        edges: Any,
        proximity_edges: Any,
        of_logits: bool = False,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        event: bool = False,
        margin: float | None = None,
    ) -> None:
        super().__init__(features, of_logits, neighbours, rule, event)
        self.margin = 1 / (len(self.features) + 2) if margin is None else check_margin(margin)
        self.keep("shift", shift)
        self.keep("edges", edges)
        self.keep("proximity_edges", proximity_edges)
        wanted = len(self.proximity_edges) - 1, len(self.edges) - 1
        if tuple(self.shift.shape) != wanted:
            raise ValueError(f"shift must have shape {wanted}, proximity by confidence, got {tuple(self.shift.shape)}")

    def map_confidence(self, confidence: Tensor, proximity: Tensor, eps: float) -> Tensor:
        """Add the cell's shift."""
        row, column = _cell(confidence, proximity, self.edges, self.proximity_edges, eps)
        least = torch.full_like(confidence, self.margin)
        shifted = torch.maximum(confidence + self.shift[row, column], torch.minimum(confidence, least))
        return torch.minimum(shifted, torch.maximum(confidence, 1 - least))

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        features: Any = None,
        bins: int = BINS,
        proximity_bins: int = 5,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        weights: Any = None,
    ) -> Self:
        """Bin-mean shift: take the mean gap in each cell."""
        z, y, w, x = _check(logits, labels, features, weights, neighbours)
        top, near, hit = _score(z, y, x, neighbours, rule)
        edges = torch.from_numpy(equal_width(bins)).to(top.device)
        places = equal_mass(near.cpu().numpy(), proximity_bins, row_weights(w))
        proximity_edges = torch.from_numpy(places).to(top.device)
        row, column = _cell(top, near, edges, proximity_edges, rounding_error(z))
        shape = len(proximity_edges) - 1, len(edges) - 1
        cell = row * shape[1] + column
        each = torch.ones_like(top) if w is None else w
        count = torch.bincount(cell, weights=each, minlength=shape[0] * shape[1])
        gap = torch.bincount(cell, weights=each * (hit.double() - top), minlength=len(count))
        gap = gap / torch.where(count > 0, count, 1.0)
        shrunk = torch.where(count < _FULL, count / (count + _FULL), 1.0)
        shift = (shrunk * gap).reshape(shape)
        event, margin = z.shape[1] == 2, 1 / (row_count(z, w) + 2)
        return cls(x, shift, edges, proximity_edges, features is None, neighbours, rule, event, margin)


def _check(
    logits: Any, labels: Any, features: Any, weights: Any, neighbours: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A pair, its weights, and the features by which its rows are near to each other."""
    z, y, w = as_weighted(logits, labels, weights, at_least=neighbours + 1)
    check_neighbours(neighbours, len(z) - 1)
    if features is None:
        return z, y, w, centre_rows(upcast_half(z).double())
    rows = len(as_logits(logits))
    each = as_weights(weights, rows)
    x = as_matrix(features, "features", rows=rows).to(z.device)
    return z, y, w, x if each is None else x[torch.from_numpy(each > 0).to(z.device)]


def _score(z: Tensor, y: Tensor, x: Tensor, neighbours: int, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, proximity to the other rows, and whether the prediction was right; of two classes, of class 1."""
    z, event = upcast_half(z), z.shape[1] == 2
    near = closeness(x, x, neighbours=neighbours, rule=rule, exclude_self=True)
    return _claim(z, event=event), near, y == 1 if event else z.argmax(dim=1) == y


def _claim(z: Tensor, *, event: bool) -> Tensor:
    return event_probs(z) if event else torch.softmax(z.double(), dim=1).amax(dim=1)


def _weights(points: Tensor) -> Tensor:
    """The weights of points, a third column; one each without it."""
    return points[:, 2] if points.shape[1] == 3 else torch.ones_like(points[:, 0])


def _cell(
    confidence: Tensor, proximity: Tensor, edges: Tensor, proximity_edges: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return tensor_bin_index(proximity, proximity_edges), tensor_bin_index(confidence, edges, rounding=eps)


def _log_density(query: Tensor, points: Tensor, mirrored: bool) -> Tensor:
    """ln of the kernel density estimate from points (m, 2), or (m, 3) with weights, at queries (n, 2)."""
    weight = _weights(points)
    share, points = weight / weight.sum(), points[:, :2]
    middle = share @ points
    variance = share @ (points - middle).square() / (1 - share.square().sum())
    width = (1.06 * variance.sqrt() * (1 / share.square().sum()) ** (-1 / 6)).clamp(min=_NARROWEST)
    log_share = torch.log(share)
    if mirrored:
        flip = points.new_tensor([-1.0, 1.0])
        points = torch.cat([points, points * flip, points * flip + points.new_tensor([2.0, 0.0])])
        log_share = log_share.repeat(3)
    scaled, at = query / width, points / width
    whole = torch.compiler.is_compiling()
    blocks = [scaled] if whole else [scaled[at] for at in native.row_chunks(len(query), len(points), native.BLOCK)]
    sums = [
        torch.logsumexp(log_share - ((q[:, :1] - at[:, 0]).square() + (q[:, 1:] - at[:, 1]).square()) / 2, dim=1)
        for q in blocks
    ]
    return torch.cat(sums) - torch.log(2 * math.pi * width.prod())
