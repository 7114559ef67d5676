"""The cross-entropy with a penalty on the size of the logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import at_least


@per_sample(strength=at_least(0), order=at_least(1))
def norm(logits: Tensor, labels: Tensor, *, strength: float = 0.01, order: float = 1.0) -> Tensor:
    """The cross-entropy plus the norm of the row of logits: −ln p_y + α‖z‖_p.

    The norm is a sum over classes, so that a strength found for 10 classes is too much for 100. Not where the network
    will be calibrated afterwards: like label smoothing it compresses the logits of easy and hard samples alike.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, -1.0]])
    >>> [f"{v:.4f}" for v in norm(logits, torch.tensor([0, 1]), strength=0.1)]
    ['0.4395', '0.6076']

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    return functional.cross_entropy(logits, labels, reduction="none") + strength * _size(logits, order)


class Norm(Loss, function=norm, neutral={"strength": 0.0}):
    """The cross-entropy with a `norm` of logits as a Module."""


def _size(logits: Tensor, order: float) -> Tensor:
    if order <= 2:
        return torch.linalg.vector_norm(logits, ord=order, dim=1)
    # High powers overflow; the norm is homogeneous, so a constant may be taken out of it.
    scale = logits.detach().abs().amax(dim=1, keepdim=True).clamp(min=1)
    return torch.linalg.vector_norm(logits / scale, ord=order, dim=1) * scale.squeeze(1)
