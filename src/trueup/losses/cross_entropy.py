"""The cross-entropy, which the other losses start from."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_sample


@per_sample()
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each row: −ln p_y.

    Proper: its minimum is the truth. Not by itself for a large network trained to the end: once every label is fitted,
    its confidence alone still grows.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in cross_entropy(logits, torch.tensor([0, 2]))]
    ['0.2395', '1.5514']

    Good (1952), Rational decisions.
    """
    return functional.cross_entropy(logits, labels, reduction="none")


class CrossEntropy(Loss, function=cross_entropy, neutral={}):
    """The `cross_entropy` as a Module."""
