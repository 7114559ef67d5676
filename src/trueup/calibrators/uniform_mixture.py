"""A share of the uniform distribution, so that no probability vanishes."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature_search import inverse_temperature
from trueup.core.arrays import NEVER, as_weighted, count_options, take_weighted, upcast_half
from trueup.core.splits import stratified_folds

SHARES = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Shares that `fit` tries."""
_LEAST_GAIN = 1e-4  # in the mean log-loss, or one over the rows: a share that gains less is not taken
_NUMBERS = 1 << 21  # as many as choose a share


class UniformMixture(Calibrator):
    """Mix with the uniform distribution: q = (1 − ε) softmax(z) + ε/K.

    Sure errors of naive Bayes, boosted trees or an over-trained network rule the likelihood of every map of logits; a
    share ε of the uniform bounds what they cost. `fit` takes the ε of least log-loss, each with a temperature of its
    own, and ε = 0 where none gains: a step before another method. Not for calibration by itself.

    >>> UniformMixture(0.1)([[0.0, -1000.0]]).round(4)
    array([[-0.0513, -2.9957]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = False  # of very many rows, some choose the share
    differentiable = True

    share: Tensor

    def __init__(self, share: Tensor | float) -> None:
        super().__init__()
        self.keep("share", share)
        if not (self.share.ndim == 0 and 0 <= float(self.share) < 1):
            raise ValueError(f"share must be one number in [0, 1), got {share}")

    def map(self, logits: Tensor) -> Tensor:
        """The logarithm of the mixture."""
        log_p = torch.log_softmax(logits, dim=1).clamp(min=NEVER)
        share = self.share.to(logits.dtype)
        uniform = torch.log(share) - torch.as_tensor(count_options(logits), dtype=logits.dtype).log()
        return torch.logaddexp(log_p + torch.log1p(-share), uniform)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Uniform mixture: take the share of least log-loss, each with a temperature of its own."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        most = max(1, _NUMBERS // z.shape[1])
        if len(z) > most:
            place = torch.from_numpy(stratified_folds(z, y, len(z))).to(z.device)
            z, y, w = take_weighted(z, y, w, place < most)
        z = upcast_half(z)
        losses = [inverse_temperature(cls(share)(z) if share else z, y, w)[1].loss for share in SHARES]
        best = min(range(len(SHARES)), key=losses.__getitem__)
        n = len(z) if w is None else float(w.sum())
        return cls(SHARES[best] if losses[best] < losses[0] - max(_LEAST_GAIN, 1 / n) else 0.0)
