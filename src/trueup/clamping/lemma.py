"""Lemma 3.1 as a diagnostic: at the best temperature the true classes' logits equal the expected ones in sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trueup.core import chunks
from trueup.core.arrays import as_tensors, upcast_half
from trueup.core.loss_sums import focal_weight


class Residual(NamedTuple):
    """How far a temperature is from satisfying the constraint of Lemma 3.1."""

    total: float
    """Σ_i w_i (z_iy − Σ_k q_ik z_ik); zero at the optimum."""
    relative: float
    """|total| beside Σ_i w_i sqrt(Var_q z_i), what the rows' own spread would allow: below 1e-6 is converged."""


def lemma_residual(logits: Any, labels: Any, *, temperature: float = 1.0, gamma: float = 0.0) -> Residual:
    """Measure by how much a temperature misses the constraint of Lemma 3.1.

    The residual is Σ_i w_i (z_iy − z_iᵀq_i) with q = softmax(z/T), z the logits at the shifted inputs. Of all
    distributions that satisfy it at zero, softmax(z/T) has the most entropy; it is also the condition for T to be best,
    for cross-entropy with w = 1 and for the focal loss with w = (1 − p)^γ − γ (1 − p)^(γ−1) p ln p at p = q_y.
    Tang et al., "Neural Clamping" (2024), Lemma 3.1.

    >>> import numpy as np
    >>> from trueup import METHODS
    >>> z = np.random.default_rng(0).normal(size=(500, 4))
    >>> y = np.random.default_rng(1).integers(0, 4, 500)
    >>> y[:300] = z[:300].argmax(axis=1)
    >>> fitted = METHODS["temperature"](z, y)
    >>> print(f"{lemma_residual(z, y).relative:.4f}")
    0.1100
    >>> print(f"{lemma_residual(z, y, temperature=float(fitted.temperature)).relative:.4f}")
    0.0000
    """
    z, y = as_tensors(logits, labels)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if not gamma >= 0:
        raise ValueError(f"gamma must not be negative, got {gamma}")
    if not len(z):
        return Residual(float("nan"), float("nan"))
    total = spread = 0.0
    for rows in chunks.row_chunks(len(z), z.shape[1], chunks.STEP):
        x, label = upcast_half(z[rows]).double(), y[rows]
        x = x - x.amax(dim=1, keepdim=True)
        log_q = torch.log_softmax(x / temperature, dim=1)
        q = log_q.exp()
        mean = (q * x).sum(dim=1)
        deviation = (q * (x - mean[:, None]) ** 2).sum(dim=1).sqrt()
        weight, _ = focal_weight(log_q.gather(1, label[:, None])[:, 0], gamma)
        total += float((weight * (x.gather(1, label[:, None])[:, 0] - mean)).sum())
        spread += float((weight * deviation).sum())
    return Residual(total, abs(total) / spread if spread else float(total != 0))
