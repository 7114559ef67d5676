"""A pool of calibrators: a mixture of what they say, weighted by how well they predict rows that they have not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator


class Mixture(Calibrator):
    """Mix what several calibrators say: q ∝ (Σ_m w_m p_m)^(1/T), with w > 0 and Σw = 1.

    The mean of calibrated forecasts is less sure than it should be, which the temperature T puts right. Not for
    reading: no single curve shows what it does.

    >>> from trueup.calibrators.temperature import Temperature
    >>> Mixture([Temperature(1.0), Temperature(4.0)], weights=[0.5, 0.5])([[2.0, 0.0]]).round(4)
    array([[-0.2855, -1.3928]])
    """

    differentiable = True
    sample_invariant = False  # copies of a row are spread over the folds that choose the weights

    weights: Tensor
    temperature: Tensor

    def __init__(self, calibrators: Sequence[Calibrator], weights: Any, temperature: Tensor | float = 1.0) -> None:
        super().__init__()
        self.calibrators = torch.nn.ModuleList(calibrators)
        self.keep("weights", weights)
        self.keep("temperature", temperature)
        w = self.weights
        if w.shape != (len(self.calibrators),) or not bool((w > 0).all()) or abs(float(w.sum()) - 1) > 1e-6:
            raise ValueError(f"weights must be {len(self.calibrators)} positive numbers of sum 1, got {weights}")
        if not (self.temperature.ndim == 0 and self.temperature > 0 and torch.isfinite(self.temperature)):
            raise ValueError(f"temperature must be one positive number, got {temperature}")

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """As long as every part does."""
        return all(part.keeps_argmax for part in self.calibrators)

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """As long as every part is."""
        return all(part.shift_invariant for part in self.calibrators)

    def map(self, logits: Tensor) -> Tensor:
        """The logarithm of the mixture, over T."""
        parts = [
            torch.log_softmax(part(logits).double(), dim=1) + torch.log(w)
            for part, w in zip(self.calibrators, self.weights, strict=True)
        ]
        return (torch.logsumexp(torch.stack(parts), dim=0) / self.temperature).to(logits.dtype)

    def config(self) -> dict[str, Any]:
        """The calibrators, their weights and the temperature."""
        return {"calibrators": list(self.calibrators), "weights": self.weights, "temperature": self.temperature}


def likelihood_weights(label_probs: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Weights of most likelihood for a mixture, given the label's probability under each part, (n, parts).

    EM on Σ_i ln Σ_m w_m p_im + Σ_m (α_m − 1) ln w_m, which is concave for α ≥ 1; a larger α favours a part.

    >>> p = np.array([[0.9, 0.5], [0.8, 0.5], [0.7, 0.5]])
    >>> likelihood_weights(p, np.ones(2)).round(3)
    array([1., 0.])
    """
    weights = prior / prior.sum()
    total = len(label_probs) + (prior - 1).sum()
    for _ in range(1000):
        # α − 1 are counts of rows that the part explains alone.
        mean = label_probs.T @ (1 / (label_probs @ weights))
        following = (weights * mean + prior - 1) / total
        if np.abs(following - weights).max() < 1e-6:
            return following
        weights = following
    return weights


def brier_weights(probs: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Weights of least Brier score for a mixture of probabilities (parts, n, classes).

    The score is a quadratic form on the simplex, minimised by multiplicative steps; α − 1 count rows as above.

    >>> p = np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.5, 0.5], [0.5, 0.5]]])
    >>> brier_weights(p, np.array([0, 0]), np.ones(2)).round(3)
    array([1., 0.])
    """
    n = probs.shape[1]
    square = np.einsum("ink,jnk->ij", probs, probs, optimize=True) / n
    hit = probs[:, np.arange(n), labels].mean(axis=1)
    weights = prior / prior.sum()
    # A part's regret against the mixture, over what a row can lose at most, makes steps that cannot overshoot.
    for _ in range(5000):
        slope = 2 * (square @ weights - hit) - (prior - 1) / (n * weights.clip(1e-9))
        following = weights * np.exp(-(slope - slope @ weights).clip(-20, 20) / 2)
        following /= following.sum()
        if np.abs(following - weights).max() < 1e-6:
            return following
        weights = following
    return weights
