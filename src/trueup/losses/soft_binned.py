"""The cross-entropy with a soft-binned calibration error of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_batch, top_label
from trueup.losses.option_checks import above, at_least, whole

MIN_COUNT = 1e-12
"""A bin with a soft count below this counts for nothing."""


@per_batch(strength=at_least(0), bins=whole(1), temperature=above(0), order=at_least(1))
def soft_binned_ece(
    logits: Tensor,
    labels: Tensor,
    *,
    strength: float = 1.0,
    bins: int = 15,
    temperature: float = 0.01,
    order: float = 2.0,
) -> Tensor:
    """Each row's cross-entropy plus κ times a calibration error whose bins a row belongs to by degrees.

    Row i belongs to bin b with the share softmax_b(−(c_i − m_b)²/τ), m_b the middle of the bin; the error is
    [Σ_b (n_b/n)|acc_b − conf_b|^p]^(1/p) of the shared counts, p = `order`. It tends to the ECE (p = 1) or its root
    mean square (p = 2) as τ → 0. The gradient flows through c alone. Not with small batches, where bins hold noise.

    >>> import torch
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in soft_binned_ece(logits, torch.tensor([0, 1, 1]), strength=1.0, bins=5)]
    ['0.7557', '1.8543', '0.3502']

    Karandikar et al. (2021), Soft calibration objectives for neural networks.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = top_label(log_probs, labels)
    error = soft_binned_error(confidence, correct, bins, temperature, order)
    return functional.nll_loss(log_probs, labels, reduction="none") + strength * error


class SoftBinnedECE(Loss, function=soft_binned_ece, neutral={"strength": 0.0}):
    """The cross-entropy with `soft_binned_ece` as a Module."""


def soft_binned_error(confidence: Tensor, correct: Tensor, bins: int, temperature: float, order: float) -> Tensor:
    """The calibration error of degree `order` over softly counted bins."""
    middles = (torch.arange(bins, device=confidence.device, dtype=confidence.dtype) + 0.5) / bins
    share = torch.softmax((confidence[:, None] - middles).square() * (-1 / temperature), dim=1)
    count = share.sum(dim=0)
    surplus = (share * (correct.to(confidence.dtype) - confidence)[:, None]).sum(dim=0)
    gap = (surplus / count.clamp(min=MIN_COUNT)).abs()
    power = (count * gap.pow(order)).sum() / len(confidence)
    # At 0 a root has no slope; anywhere above this one of a sum of powers has a bounded one.
    return power.clamp(min=torch.finfo(power.dtype).tiny).pow(1 / order)
