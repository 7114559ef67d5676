"""Label smoothing."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import between


@per_sample(smoothing=between(0, 1))
def label_smoothing(logits: Tensor, labels: Tensor, *, smoothing: float = 0.05) -> Tensor:
    """The cross-entropy to a label mixed with the uniform distribution: −(1−ε) ln p_y − ε/K Σ_k ln p_k.

    Not where the network will be calibrated afterwards: it compresses the logits of easy and hard samples alike, which
    no later temperature can part again.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in label_smoothing(logits, torch.tensor([0, 2]), smoothing=0.3)]
    ['0.6395', '1.4514']

    Szegedy et al. (2016), Rethinking the inception architecture; Müller et al. (2019), When does label smoothing help?
    """
    return functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")


class LabelSmoothing(Loss, function=label_smoothing, neutral={"smoothing": 0.0}):
    """The `label_smoothing` as a Module.

    As in torch, each class's part of the smoothed label has the weight of that class, not of the label.
    """

    smoothing: float

    def weighted(self, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Σ_k w_k ỹ_k (−ln p_k) of each row."""
        return functional.cross_entropy(logits, labels, weight=weight, label_smoothing=self.smoothing, reduction="none")
