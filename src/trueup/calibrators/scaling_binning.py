"""Scaling-binning: a parametric scaler whose outputs are made discrete."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from torch import Tensor

from trueup.calibrators.base import TopLabel, keep_curve, step
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import as_logits, as_weighted, match_kind, upcast_half
from trueup.core.bins import Bins, equal_mass
from trueup.core.row_scores import scores_and_outcomes
from trueup.core.splits import random_order


class ScalingBinning(TopLabel):
    """Scale by a temperature, then replace the confidence by the mean scaled confidence of its bin.

    c′ = Σ_{i∈b} g(z_i) / n_b with g(z) = max_k softmax(z/T)_k, of two classes P(class 1), and bins of equal mass in g:
    discrete, so that its calibration error can be verified, yet with the scaler's small variance. Not for networks that
    a temperature cannot calibrate: the labels enter through T alone.
    Kumar, Liang & Ma, "Verified uncertainty calibration" (2019).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(3000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> discrete = ScalingBinning.fit(2.5 * z, y, bins=3)
    >>> f"{discrete.temperature:.4f}", discrete.values.numpy().round(4)
    ('2.5186', array([0.2195, 0.2951, 0.436 ]))
    """

    sample_invariant = False  # bins of equal mass of doubled samples may be cut elsewhere
    differentiable = False

    temperature: Tensor
    edges: Tensor
    values: Tensor

    def __init__(self, temperature: Tensor | float, edges: Any, values: Any, event: bool = False) -> None:
        super().__init__()
        self.event = event
        self.keep("temperature", Temperature(temperature).temperature)
        keep_curve(self, "edges", edges, values, more=-1)

    def confidence(self, logits: Any) -> Any:
        """The calibrated confidence itself, (n,); of an event its probability."""
        z = upcast_half(as_logits(logits))
        return match_kind(super().confidence(z / self.temperature.to(z.dtype)), logits)

    def map_confidence(self, confidence: Tensor) -> Tensor:
        """Map scaled confidences to the means of their bins."""
        return step(confidence.double(), self.edges[1:-1], self.values)

    def map(self, logits: Tensor) -> Tensor:
        """Scale, give the predicted class the mean of its bin, and share the rest as the scaler does."""
        return super().map(logits / self.temperature.to(logits.dtype))

    @classmethod
    def fit(
        cls, logits: Any, labels: Any, *, bins: int = 10, splits: int = 1, seed: int = 0, weights: Any = None
    ) -> Self:
        """Scaling-binning: fit T, the bins and their means to the same rows, or with `splits=3` to three parts drawn at
        random.
        """
        z, y, w = as_weighted(logits, labels, weights, at_least=3 if splits == 3 else 1)
        if splits not in (1, 3):
            raise ValueError(f"splits must be 1 or 3, got {splits!r}")
        parts: list[Any] = [slice(None)] * 3
        if splits == 3:
            parts = np.array_split(random_order(len(z), np.random.default_rng(seed)), 3)
        scaler = Temperature.fit(z[parts[0]], y[parts[0]], weights=None if w is None else w[parts[0]])
        scaled, _ = scores_and_outcomes(scaler(upcast_half(z)), y)
        cut, count = ((scaled[at], None if w is None else w[at].cpu().numpy()) for at in parts[1:])
        edges = equal_mass(cut[0], bins, cut[1])
        tally = Bins.from_scores(count[0], np.zeros_like(count[0]), edges, weights=count[1])
        filled = tally.count > 0
        values = np.where(filled, tally.confidence / np.where(filled, tally.count, 1.0), (edges[1:] + edges[:-1]) / 2)
        return cls(scaler.temperature, edges, values, z.shape[1] == 2).with_certificate(scaler.certificate)
