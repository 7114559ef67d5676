"""No change: the baseline that every method must beat."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.core.arrays import as_weighted


class Identity(Calibrator):
    """Return the logits as they are, q = softmax(z).

    Not for miscalibrated networks.

    >>> Identity.fit([[1.0, 2.0]], [1])([[1.0, 2.0]])
    array([[1., 2.]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = True
    differentiable = True

    def map(self, logits: Tensor) -> Tensor:
        """Return them."""
        return logits

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """No calibration: check the pair, as every method does."""
        as_weighted(logits, labels, weights, at_least=1)
        return cls()
