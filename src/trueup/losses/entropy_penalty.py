"""The cross-entropy with a reward for entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import at_least
from trueup.models.dropout import entropy_of


@per_sample(strength=at_least(0))
def entropy_penalty(logits: Tensor, labels: Tensor, *, strength: float = 0.1) -> Tensor:
    """The cross-entropy less a share of the prediction's entropy: −ln p_y − κH(p), H(p) = −Σ_k p_k ln p_k.

    Also called the confidence penalty. It may be negative. Not for an underconfident network, nor with a strength found
    for another number of classes: the entropy grows with ln K.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in entropy_penalty(logits, torch.tensor([0, 2]), strength=0.5)]
    ['-0.0932', '1.0638']

    Pereyra et al. (2017), Regularizing neural networks by penalizing confident output distributions.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    return functional.nll_loss(log_probs, labels, reduction="none") - strength * entropy_of(log_probs)


class EntropyPenalty(Loss, function=entropy_penalty, neutral={"strength": 0.0}):
    """The cross-entropy with an `entropy_penalty` as a Module."""
