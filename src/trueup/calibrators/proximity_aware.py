"""Calibration that depends on the proximity of an input to those of the fit: density ratio and bin-mean-shift."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Self

import array_api_compat
import numpy as np

from trueup._core import native
from trueup._core.arrays import as_logits, as_matrix, as_weighted, as_weights, match_kind, upcast_half
from trueup._core.bins import BINS, EDGE_TOLERANCE, bin_index, equal_mass, equal_width, rounding_error
from trueup._core.namespace import NUMPY, Namespace, namespace_of
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.types import Array, ArrayLike, ArrayT, WeightsLike
from trueup.calibrators.base import ScoreCalibrator, check_margin, row_count, set_confidence
from trueup.calibrators.diagonal import centre_rows
from trueup.metrics.proximity import NEIGHBOURS, Rule, check_neighbours, closeness

_MIN_DENSITY = 1e-10  # density of samples below which a confidence stays unchanged.
_MIN_BANDWIDTH = 1e-3  # smallest bandwidth; that of samples with equal values would be zero.
_FULL_CELL = 30  # samples from which a cell's gap is used in full; with fewer it is shrunk by n/(n + 30).


class ProximityInformed(ScoreCalibrator):
    """A calibrator of the predicted class's confidence that uses the proximity of the input to those of the fit.

    With `event`, as in every fit to two classes, it maps P(class 1). Proximity is measured between `features`, a
    keyword of the fit and of the call; without them, between logits.

    Parameters
    ----------
    features
        Features of the samples of the fit, shape (n, width).
    of_logits
        The features are centred logits.
    neighbours
        Number of nearest neighbours.
    rule
        "distance" or "similarity".
    event
        Map P(class 1) of two classes instead of the confidence.
    """

    # Not sample-invariant: the copy of a row is its nearest neighbour.

    features: np.ndarray

    def __init__(
        self,
        features: ArrayLike,
        of_logits: bool = False,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        event: bool = False,
    ) -> None:
        self.set_parameters(features=features)
        if np.ndim(self.features) != 2:
            raise ValueError(f"features must have shape (n, width), got {np.shape(self.features)}")
        check_neighbours(neighbours, len(self.features))
        if rule not in ("distance", "similarity"):
            raise ValueError(f'rule must be "distance" or "similarity", got {rule!r}')
        self.of_logits, self.neighbours, self.rule, self.event = of_logits, neighbours, rule, event

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        shared = ("of_logits", "neighbours", "rule", "event")
        return super().config() | {name: getattr(self, name) for name in shared}

    @abstractmethod
    def map_confidence(self, xp: Namespace, confidence: Array, proximity: Array, eps: float) -> Array:
        """Map confidences and proximities (n,) in float64; `eps` is the rounding of the logits."""

    def confidence(self, logits: ArrayT, *, features: ArrayLike | None = None) -> ArrayT:
        """Return the calibrated confidence of each row, before it is raised or clipped for `map`.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).
        features
            Features of the rows, shape (n, width), if the fit had them.

        Returns
        -------
        array
            Confidence of the predicted class, shape (n,); for two classes, the probability of class 1.
        """
        z = upcast_half(as_logits(logits))
        return match_kind(self._confidence(NUMPY, z, features).astype(z.dtype), logits)

    def map(self, xp: Namespace, z: Array, *, features: ArrayLike | None = None) -> Array:
        """Set the predicted class to its calibrated confidence and share the rest."""
        confidence = self._confidence(xp, z, features)
        return xp.astype(set_confidence(xp, xp.double(z), confidence, event=self.event), z.dtype)

    def _confidence(self, xp: Namespace, z: Array, features: Array) -> Array:
        if self.of_logits != (features is None):
            demand = "be left out, as they were left out of the fit" if self.of_logits else "be given, as to the fit"
            raise ValueError(f"features must {demand}")
        if features is None:
            x = centre_rows(xp, xp.double(z))
        elif xp.is_numpy or namespace_of(features) is not xp:
            x = xp.constant(as_matrix(features, "features", rows=z.shape[0]), z)
        else:
            x = array_api_compat.to_device(features, array_api_compat.device(z))
        shape = z.shape[0], self.features.shape[1]
        if tuple(x.shape) != shape:
            raise ValueError(f"features must have shape {shape}, as in the fit, got {tuple(x.shape)}")
        near = closeness(xp, x, self.features, neighbours=self.neighbours, rule=self.rule)
        return self.map_confidence(xp, self.score(xp, z), near, float(xp.finfo(z.dtype).eps))


class DensityRatio(ProximityInformed):
    """Apply Bayes' rule to P(correct | c, D) for confidence c and proximity D: c′ = f₁(c, D)/(f₁(c, D) + ρ f₀(c, D)).

    f₁ and f₀ are Gaussian kernel density estimates from the correct and the wrong samples, with bandwidth 1.06 σ
    n^(−1/6) in each direction. ρ is the ratio of wrong to correct samples. If no sample is near, c stays. With fewer
    than two correct or wrong samples c′ is the accuracy. c′ is clipped to [1/(n+2), 1 − 1/(n+2)]. Not for networks that
    are hardly ever wrong: f₀ then rests on a few samples.

    Parameters
    ----------
    features
        Features of the samples of the fit, shape (n, width).
    correct
        Confidence and proximity of the correct samples, shape (n, 2), or (n, 3) with weights.
    wrong
        The same for the wrong samples.
    mirrored
        Reflect the kernels at confidences 0 and 1.
    **shared
        Parameters of the base class: `of_logits`, `neighbours`, `rule` and `event`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> dense = rng.random(2000) < 0.7
    >>> features = rng.normal(size=(2000, 3)) * np.where(dense, 0.02, 1)[:, None] + np.where(dense, 1, 0)[:, None]
    >>> logits = np.stack([np.zeros(2000), rng.normal(2, 0.5, 2000)], axis=1)  # confident of class 1 everywhere …
    >>> labels = np.where(rng.random(2000) < np.where(dense, 0.95, 0.7), 1, 0)  # … but less accurate far out
    >>> ratio = DensityRatio.fit(logits, labels, features=features)
    >>> ratio.confidence([[0.0, 2.0], [0.0, 2.0]], features=[[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]]).round(2)
    array([0.97, 0.73])

    References
    ----------
    Xiong et al., "Proximity-informed calibration for deep neural networks" (2023), arXiv:2306.04590.
    """

    correct: np.ndarray
    wrong: np.ndarray

    def __init__(
        self, features: ArrayLike, correct: ArrayLike, wrong: ArrayLike, mirrored: bool = False, **shared: Any
    ) -> None:
        super().__init__(features, **shared)
        self.set_parameters(correct=correct, wrong=wrong)
        for name in ("correct", "wrong"):
            shape = np.shape(getattr(self, name))
            if len(shape) != 2 or shape[1] not in (2, 3):
                columns = "(n, 2), confidence and proximity, or (n, 3) with weights"
                raise ValueError(f"{name} must have shape {columns}, got {shape}")
        if not len(self.correct) + len(self.wrong):
            raise ValueError("correct and wrong must have a row between them, got none")
        self.mirrored = mirrored

    def map_confidence(self, xp: Namespace, confidence: Array, proximity: Array, eps: float) -> Array:
        """Apply Bayes' rule."""
        right, wrong = (xp.sum(_weights(xp, points)) for points in (self.correct, self.wrong))
        n = right + wrong
        least = 1 / (n + 2)
        if min(self.correct.shape[0], self.wrong.shape[0]) < 2:
            return xp.clip(xp.zeros_like(confidence) + right / n, least, 1 - least)
        query = xp.stack([confidence, proximity], axis=1)
        # Each density is multiplied by its share of the samples, so that ρ cancels.
        log_right, log_wrong = (
            _log_density(xp, query, points, self.mirrored) + xp.log(share / n)
            for points, share in ((self.correct, right), (self.wrong, wrong))
        )
        ratio = xp.clip(xp.sigmoid(log_right - log_wrong), least, 1 - least)
        return xp.where(xp.logaddexp(log_right, log_wrong) < math.log(_MIN_DENSITY), confidence, ratio)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        features: ArrayLike | None = None,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        mirrored: bool = False,
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Store the confidence and proximity of the samples.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        features
            Features between which proximity is measured, shape (n, width); centred logits by default.
        neighbours
            Number of nearest neighbours.
        rule
            "distance" or "similarity".
        mirrored
            Reflect the kernels at confidences 0 and 1.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w, x = _check(logits, labels, features, sample_weight, neighbours)
        shared = {"of_logits": features is None, "neighbours": neighbours, "rule": rule, "event": z.shape[1] == 2}
        score, outcome = scores_and_outcomes(z, y)
        near = closeness(NUMPY, x, x, neighbours=neighbours, rule=rule, exclude_self=True)
        points = np.stack([score, near] if w is None else [score, near, w], axis=1)
        return cls(x, points[outcome > 0], points[outcome == 0], mirrored, **shared)


class BinMeanShift(ProximityInformed):
    """Add to each confidence the gap of its cell: c′ = c + λ (accuracy − mean confidence).

    Cells are bins of proximity (equal mass) by confidence (equal width). λ is 1, or m/(m + 30) for a cell of m < 30
    samples. No shift leaves [1/(n+2), 1 − 1/(n+2)]. Not for small samples: most cells are then empty.

    Parameters
    ----------
    features
        Features of the samples of the fit, shape (n, width).
    shift
        Shift of each cell, shape (proximity bins, confidence bins).
    edges
        Edges of the confidence bins.
    proximity_edges
        Edges of the proximity bins.
    margin
        Smallest distance of a confidence from 0 and 1; 1/(n+2) by default.
    **shared
        Parameters of the base class: `of_logits`, `neighbours`, `rule` and `event`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> dense = rng.random(2000) < 0.7
    >>> features = rng.normal(size=(2000, 3)) * np.where(dense, 0.02, 1)[:, None] + np.where(dense, 1, 0)[:, None]
    >>> logits = np.stack([np.zeros(2000), rng.normal(2, 0.5, 2000)], axis=1)  # confident of class 1 everywhere …
    >>> labels = np.where(rng.random(2000) < np.where(dense, 0.95, 0.7), 1, 0)  # … but less accurate far out
    >>> shift = BinMeanShift.fit(logits, labels, features=features)
    >>> shift.confidence([[0.0, 2.0], [0.0, 2.0]], features=[[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]]).round(2)
    array([0.93, 0.65])

    References
    ----------
    Xiong et al., "Proximity-informed calibration for deep neural networks" (2023), arXiv:2306.04590.
    """

    shift: np.ndarray
    edges: np.ndarray
    proximity_edges: np.ndarray

    def __init__(
        self,
        features: ArrayLike,
        shift: ArrayLike,
        edges: ArrayLike,
        proximity_edges: ArrayLike,
        margin: float | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(features, **shared)
        self.margin = 1 / (len(self.features) + 2) if margin is None else check_margin(margin)
        self.set_parameters(shift=shift, edges=edges, proximity_edges=proximity_edges)
        shape = len(self.proximity_edges) - 1, len(self.edges) - 1
        if np.shape(self.shift) != shape:
            raise ValueError(f"shift must have shape {shape}, proximity by confidence, got {np.shape(self.shift)}")

    def map_confidence(self, xp: Namespace, confidence: Array, proximity: Array, eps: float) -> Array:
        """Add the cell's shift."""
        row = xp.searchsorted(self.proximity_edges[1:-1], proximity)
        column = xp.searchsorted(self.edges[1:-1] * (1 + EDGE_TOLERANCE * eps), confidence)
        shift = xp.take(xp.reshape(self.shift, (-1,)), row * self.shift.shape[1] + column)
        least = xp.full_like(confidence, self.margin)
        shifted = xp.maximum(confidence + shift, xp.minimum(confidence, least))
        return xp.minimum(shifted, xp.maximum(confidence, 1 - least))

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        features: ArrayLike | None = None,
        bins: int = BINS,
        proximity_bins: int = 5,
        neighbours: int = NEIGHBOURS,
        rule: Rule = "distance",
        sample_weight: WeightsLike = None,
    ) -> Self:
        """Compute the mean gap of each cell.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        features
            Features between which proximity is measured, shape (n, width); centred logits by default.
        bins
            Number of confidence bins.
        proximity_bins
            Number of proximity bins.
        neighbours
            Number of nearest neighbours.
        rule
            "distance" or "similarity".
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w, x = _check(logits, labels, features, sample_weight, neighbours)
        shared = {"of_logits": features is None, "neighbours": neighbours, "rule": rule, "event": z.shape[1] == 2}
        score, outcome = scores_and_outcomes(z, y)
        near = closeness(NUMPY, x, x, neighbours=neighbours, rule=rule, exclude_self=True)
        edges, proximity_edges = equal_width(bins), equal_mass(near, proximity_bins, w)
        shape = len(proximity_edges) - 1, len(edges) - 1
        cell = bin_index(near, proximity_edges) * shape[1] + bin_index(score, edges, rounding=rounding_error(z))
        weight = np.ones_like(score) if w is None else w
        count, gap = (np.bincount(cell, part, shape[0] * shape[1]) for part in (weight, weight * (outcome - score)))
        shrunk = np.where(count < _FULL_CELL, count / (count + _FULL_CELL), 1.0)
        shift = shrunk * gap / np.where(count > 0, count, 1.0)
        return cls(x, shift.reshape(shape), edges, proximity_edges, 1 / (row_count(z, w) + 2), **shared)


def _check(
    logits: ArrayLike, labels: ArrayLike, features: Any, sample_weight: WeightsLike, neighbours: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Return the checked pair, its weights, and the features between which proximity is measured."""
    z, y, w = as_weighted(logits, labels, sample_weight, min_rows=neighbours + 1)
    check_neighbours(neighbours, len(z) - 1)
    if features is None:
        return z, y, w, centre_rows(NUMPY, z.astype(np.float64))
    rows = len(as_logits(logits))
    row_weights = as_weights(sample_weight, rows)
    x = as_matrix(features, "features", rows=rows)
    return z, y, w, x if row_weights is None else x[row_weights > 0]


def _weights(xp: Namespace, points: Array) -> Array:
    """Return the weights of points, a third column; ones without it."""
    return points[:, 2] if points.shape[1] == 3 else xp.ones_like(points[:, 0])


def _log_density(xp: Namespace, query: Array, points: Array, mirrored: bool) -> Array:
    """Return ln of the kernel density estimate from points (m, 2), or (m, 3) with weights, at queries (n, 2)."""
    weight = _weights(xp, points)
    share, points = weight / xp.sum(weight), points[:, :2]
    squares = xp.sum(share * share)
    variance = share @ (points - share @ points) ** 2 / (1 - squares)
    width = xp.clip(1.06 * xp.sqrt(variance) * (1 / squares) ** (-1 / 6), min=_MIN_BANDWIDTH)
    log_share, x, y = xp.log(share), points[:, 0], points[:, 1]
    if mirrored:
        x, y, log_share = xp.concat([x, -x, 2 - x]), xp.concat([y, y, y]), xp.concat([log_share] * 3)
    x, y, scaled = x / width[0], y / width[1], query / width

    def log_sums(q: Any) -> Any:
        return xp.logsumexp(log_share - ((q[:, :1] - x) ** 2 + (q[:, 1:] - y) ** 2) / 2)

    if xp.is_traced(query):
        sums = log_sums(scaled)
    else:
        rows = native.row_chunks(query.shape[0], x.shape[0], native.CACHE_CHUNK)
        sums = xp.concat([log_sums(scaled[at, :]) for at in rows])
    return sums - xp.log(2 * math.pi * width[0] * width[1])
