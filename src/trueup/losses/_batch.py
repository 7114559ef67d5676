"""Losses of the batch: the cross-entropy plus a differentiable calibration error of all its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, above, at_least, per_batch, top_label, whole
from trueup.models._tensors import as_tensors, upcast_half
from trueup.models.dropout import entropy_of

MIN_BANDWIDTH = 0.01
"""exp(½/bandwidth) must be a number in single precision."""
MIN_COUNT = 1e-12
"""A bin with a soft count below this counts for nothing."""
_EPS = 1e-10


def _penalised(
    logits: Tensor, labels: Tensor, strength: float, penalty: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Each row's cross-entropy plus a penalty on the confidences, their correctness and the log-probabilities."""
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = top_label(log_probs, labels)
    nll = functional.nll_loss(log_probs, labels, reduction="none")
    return nll + strength * penalty(confidence, correct, log_probs)


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Each row's cross-entropy plus λ times the batch's maximum mean calibration error.

    MMCE² = 1/n² Σ_{i,j} (a_i − c_i)(a_j − c_j) exp(−|c_i − c_j|/bandwidth), with a the correctness and c the
    confidence, through which alone the gradient flows; in n log n steps. Not with small batches, where it is noise.

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.7038', '1.8024', '0.2983']

    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """

    def penalty(confidence: Tensor, correct: Tensor, _: Tensor) -> Tensor:
        residual = (correct.to(confidence.dtype) - confidence) / len(labels)
        return _kernel_error(confidence, residual, bandwidth)

    return _penalised(logits, labels, strength, penalty)


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce_weighted(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Each row's cross-entropy plus λ times the batch's MMCE in which right and wrong rows weigh the same.

    MMCE_w² = Σ_{i,j} r_i r_j exp(−|c_i − c_j|/bandwidth), r = (1 − c)/m for the m right rows, −c/q for the q wrong
    ones; 0 if all are right or all wrong. It keeps confident right rows confident where most are right. Not for a
    measure of calibration: unlike MMCE it is not 0 for calibrated predictions.

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce_weighted(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['1.1708', '2.2694', '0.7653']

    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """

    def penalty(confidence: Tensor, correct: Tensor, _: Tensor) -> Tensor:
        right, wrong = correct.sum(), (~correct).sum()
        residual = torch.where(correct, (1 - confidence) / right.clamp(min=1), -confidence / wrong.clamp(min=1))
        return _kernel_error(confidence, residual, bandwidth) * (right * wrong > 0)

    return _penalised(logits, labels, strength, penalty)


class MMCE(Loss, function=mmce, neutral={"strength": 0.0}):
    """The cross-entropy with `mmce` as a Module."""


class MMCEWeighted(Loss, function=mmce_weighted, neutral={"strength": 0.0}):
    """The cross-entropy with `mmce_weighted` as a Module."""


def laplacian_form(points: Tensor, values: Tensor, bandwidth: float) -> Tensor:
    """Σ_{i,j} v_i v_j exp(−|x_i − x_j|/bandwidth) for rising points in [0, 1], in n steps.

    There exp(−(x_i − x_j)/b) = exp(−x_i/b) exp(x_j/b) for j ≤ i, so one running sum serves all pairs.
    """
    height = (points - 0.5) / bandwidth
    up_to = (values * height.exp()).cumsum(dim=0)
    return 2 * (values * (-height).exp() * up_to).sum() - values.square().sum()


def _kernel_error(confidence: Tensor, residual: Tensor, bandwidth: float) -> Tensor:
    """√(rᵀKr) with the Laplacian kernel; its slope is bounded at 0, below which rounding may fall."""
    rising = confidence.sort()
    square = laplacian_form(rising.values, residual[rising.indices], bandwidth)
    return (square.clamp(min=0) + 1e-10).sqrt()


@per_batch(strength=at_least(0), threshold=at_least(0))
def avuc(logits: Tensor, labels: Tensor, *, strength: float = 3.0, threshold: float = 1.0) -> Tensor:
    """Each row's cross-entropy plus β times how seldom the batch is certain when right and uncertain when wrong.

    −ln[Σ_good s / Σ s], s = (c if right, else 1−c)·(1−tanh u if certain, else tanh u), u the entropy in nats, certain
    if u ≤ threshold, good the rows both right and certain or both wrong and uncertain. Not with the default threshold
    for few classes: it must lie well below ln K; `entropy_threshold` finds one after a few epochs.

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in avuc(logits, torch.tensor([0, 1, 1]), strength=1.0, threshold=0.6)]
    ['1.0674', '2.1660', '0.6619']

    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization.
    """

    def penalty(confidence: Tensor, correct: Tensor, log_probs: Tensor) -> Tensor:
        uncertainty = entropy_of(log_probs)
        certain, squashed = uncertainty <= threshold, torch.tanh(uncertainty)
        soft = torch.where(correct, confidence, 1 - confidence) * torch.where(certain, 1 - squashed, squashed)
        good = torch.where(correct == certain, soft, 0.0).sum()
        return -torch.log(good / (soft.sum() + _EPS) + _EPS)

    return _penalised(logits, labels, strength, penalty)


class AvUC(Loss, function=avuc, neutral={"strength": 0.0}):
    """The cross-entropy with `avuc` as a Module."""


def entropy_threshold(logits: Tensor, labels: Tensor) -> float:
    """The authors' threshold for `avuc`: halfway between the mean entropies of right and of wrong predictions.

    NaN where all are right or all wrong.

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> f"{entropy_threshold(logits, torch.tensor([0, 1, 1])):.4f}"
    '0.4997'

    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization.
    """
    z, y = as_tensors(logits, labels)
    log_probs = torch.log_softmax(upcast_half(z), dim=1)
    entropy = entropy_of(log_probs).cpu().double()
    correct = (log_probs.argmax(dim=1) == y).cpu()
    return float((entropy[correct].mean() + entropy[~correct].mean()) / 2)


@per_batch(strength=at_least(0))
def dca(logits: Tensor, labels: Tensor, *, strength: float = 10.0) -> Tensor:
    """Each row's cross-entropy plus β times the gap between the batch's accuracy and mean confidence.

    −ln p_y + β|mean a − mean c|; the gradient flows through c alone. Not with small batches, whose accuracy is noise;
    nor for errors that cancel, since it sees averages alone.

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in dca(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.6108', '1.7094', '0.2054']

    Liang et al. (2020), Improved trainable calibration method for neural networks on medical imaging classification.
    """

    def penalty(confidence: Tensor, correct: Tensor, _: Tensor) -> Tensor:
        return (correct.to(confidence.dtype) - confidence).mean().abs()

    return _penalised(logits, labels, strength, penalty)


class DCA(Loss, function=dca, neutral={"strength": 0.0}):
    """The cross-entropy with `dca` as a Module."""


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

    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in soft_binned_ece(logits, torch.tensor([0, 1, 1]), strength=1.0, bins=5)]
    ['0.7557', '1.8543', '0.3502']

    Karandikar et al. (2021), Soft calibration objectives for neural networks.
    """

    def penalty(confidence: Tensor, correct: Tensor, _: Tensor) -> Tensor:
        return soft_binned_error(confidence, correct, bins, temperature, order)

    return _penalised(logits, labels, strength, penalty)


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
