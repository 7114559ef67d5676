"""The cross-entropy with the difference between confidence and accuracy of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_batch, top_label
from trueup.losses.option_checks import at_least


@per_batch(strength=at_least(0))
def dca(logits: Tensor, labels: Tensor, *, strength: float = 10.0) -> Tensor:
    """Each row's cross-entropy plus β times the gap between the batch's accuracy and mean confidence.

    −ln p_y + β|mean a − mean c|; the gradient flows through c alone. Not with small batches, whose accuracy is noise;
    nor for errors that cancel, since it sees averages alone.

    >>> import torch
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in dca(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.6108', '1.7094', '0.2054']

    Liang et al. (2020), Improved trainable calibration method for neural networks on medical imaging classification.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = top_label(log_probs, labels)
    gap = (correct.to(confidence.dtype) - confidence).mean().abs()
    return functional.nll_loss(log_probs, labels, reduction="none") + strength * gap


class DCA(Loss, function=dca, neutral={"strength": 0.0}):
    """The cross-entropy with `dca` as a Module."""
