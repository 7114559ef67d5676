"""Quadratic scaling: a logistic curve with a square of the log-odds, for two classes and one against the rest."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.platt import (
    class_blocks,
    fit_logistic,
    identity_if_all_right,
    join_certificates,
    keep_class_vectors,
    log_normalise,
    log_probs_and_rests,
    platt_targets,
)
from trueup.core.arrays import as_weighted, fill_absent, find_absent


class Quadratic(Calibrator):
    """Fit q_k ∝ σ(a_k s_k + c_k s_k² + b_k) to each class's log-odds s_k = ln p_k − ln(1 − p_k).

    With two classes the curves complement each other. The square bends the curve where a network is too sure on one
    side only. Beyond the log-odds of the fit a parabola may turn, so they are kept within the range seen. Labels are
    drawn in as Platt's are. Not for many classes with few samples each.

    >>> z = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0], [0.0, -1.0], [0.0, -3.0]])
    >>> curve = Quadratic.fit(z, torch.tensor([1, 0, 0, 1, 0]))
    >>> f"{curve.slope[1]:.3f} {curve.square[1]:.3f} {curve.offset[1]:.3f}"
    '0.229 0.053 -0.545'
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the labels are drawn in half as far
    differentiable = True

    slope: Tensor
    square: Tensor
    offset: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, slope: Any, square: Any, offset: Any, low: Any, high: Any) -> None:
        super().__init__()
        keep_class_vectors(self, slope=slope, square=square, offset=offset, low=low, high=high)
        if not bool((self.low <= self.high).all()):
            raise ValueError(f"low must be at most high, got {low} and {high}")

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.slope))
        log_p, log_rest = log_probs_and_rests(logits.double())
        odds = fill_absent(log_p - log_rest, find_absent(logits))
        odds = torch.minimum(torch.maximum(odds, self.low), self.high)
        return log_normalise(self.slope * odds + self.square * odds.square() + self.offset, logits).to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Quadratic scaling: minimise each class's cross-entropy against the drawn-in labels."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        columns, certificates = [], []
        for classes, log_p, log_rest, each in class_blocks(z, w):
            odds = log_p - log_rest
            found, offset, certificate = fit_logistic([odds, odds.square()], platt_targets(y, classes, each), each)
            columns.append(torch.stack([*found, offset, odds.amin(dim=0), odds.amax(dim=0)]))
            certificates.append(certificate)
        fitted = cls(*torch.cat(columns, dim=1)).with_certificate(join_certificates(certificates))
        ones = torch.ones_like(fitted.slope)
        return identity_if_all_right(fitted, cls(ones, 0 * ones, 0 * ones, fitted.low, fitted.high), z, y, w)
