"""Dual focal loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.core.loss_sums import label_rest
from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import at_least


@per_sample(gamma=at_least(0))
def dual_focal(logits: Tensor, labels: Tensor, *, gamma: float = 5.0) -> Tensor:
    """Focal loss that also widens the gap to the next class: −(1−p_y+p_j)^γ ln p_y.

    p_j is the largest probability strictly below p_y, 0 if there is none. Between focal loss and cross-entropy in how
    far it keeps confidence down. Not for two classes, where it has little left to add: p_j is 1−p_y or 0.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in dual_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.0765', '1.2226']

    Tao, Dong & Xu (2023), Dual focal loss for calibration.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    of_label = log_probs.gather(1, labels[:, None])
    below = log_probs.masked_fill(log_probs >= of_label, -math.inf).max(dim=1).values.exp()
    log_p = of_label.squeeze(1)
    return -(label_rest(log_p) + below).pow(gamma) * log_p


class DualFocal(Loss, function=dual_focal, neutral={"gamma": 0.0}):
    """The `dual_focal` loss as a Module."""
