"""The Brier score as a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.losses.base import Loss, per_sample


@per_sample()
def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared distance between the probabilities and the label: Σ_k (p_k − e_yk)², between 0 and 2.

    Proper, and bounded, so that mislabelled samples pull less. Not for training from scratch with many classes: where
    the network is sure and wrong its gradient vanishes.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in brier(logits, torch.tensor([0, 2]))]
    ['0.0681', '0.9979']

    Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    probs = torch.softmax(logits, dim=1)
    index = labels[:, None]
    return probs.scatter_add(1, index, probs.new_full(index.shape, -1.0)).square().sum(dim=1)


class Brier(Loss, function=brier):
    """The `brier` score as a Module."""
