"""The cross-entropy with the maximum mean calibration error of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_batch, top_label
from trueup.losses.option_checks import at_least

MIN_BANDWIDTH = 0.01
"""exp(½/bandwidth) must be a number in single precision."""


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Each row's cross-entropy plus λ times the batch's maximum mean calibration error.

    MMCE² = 1/n² Σ_{i,j} (a_i − c_i)(a_j − c_j) exp(−|c_i − c_j|/bandwidth), with a the correctness and c the
    confidence, through which alone the gradient flows; in n log n steps. Not with small batches, where it is noise.

    >>> import torch
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.7038', '1.8024', '0.2983']

    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = sort_by_confidence(*top_label(log_probs, labels))
    residual = (correct.to(confidence.dtype) - confidence) / len(labels)
    error = safe_sqrt(laplacian_form(confidence, residual, bandwidth))
    return functional.nll_loss(log_probs, labels, reduction="none") + strength * error


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce_weighted(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Each row's cross-entropy plus λ times the batch's MMCE in which right and wrong rows weigh the same.

    MMCE_w² = Σ_{i,j} r_i r_j exp(−|c_i − c_j|/bandwidth), r = (1 − c)/m for the m right rows, −c/q for the q wrong
    ones; 0 if all are right or all wrong. It keeps confident right rows confident where most are right. Not for a
    measure of calibration: unlike MMCE it is not 0 for calibrated predictions.

    >>> import torch
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce_weighted(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['1.1708', '2.2694', '0.7653']

    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = sort_by_confidence(*top_label(log_probs, labels))
    right, wrong = correct.sum(), (~correct).sum()
    residual = torch.where(correct, (1 - confidence) / right.clamp(min=1), -confidence / wrong.clamp(min=1))
    error = safe_sqrt(laplacian_form(confidence, residual, bandwidth)) * (right * wrong > 0)
    return functional.nll_loss(log_probs, labels, reduction="none") + strength * error


class MMCE(Loss, function=mmce, neutral={"strength": 0.0}):
    """The cross-entropy with `mmce` as a Module."""


class MMCEWeighted(Loss, function=mmce_weighted, neutral={"strength": 0.0}):
    """The cross-entropy with `mmce_weighted` as a Module."""


def sort_by_confidence(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of rising confidence."""
    rising = confidence.sort()
    return rising.values, correct[rising.indices]


def laplacian_form(points: Tensor, values: Tensor, bandwidth: float) -> Tensor:
    """Σ_{i,j} v_i v_j exp(−|x_i − x_j|/bandwidth) for rising points in [0, 1], in n steps.

    There exp(−(x_i − x_j)/b) = exp(−x_i/b) exp(x_j/b) for j ≤ i, so one running sum serves all pairs.
    """
    height = (points - 0.5) / bandwidth
    up_to = (values * height.exp()).cumsum(dim=0)
    return 2 * (values * (-height).exp() * up_to).sum() - values.square().sum()


def safe_sqrt(square: Tensor) -> Tensor:
    """A square root with a bounded slope at 0, below which rounding may fall."""
    return (square.clamp(min=0) + 1e-10).sqrt()
