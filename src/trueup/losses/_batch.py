"""Losses of a batch: the cross-entropy plus a differentiable calibration error of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, above, at_least, per_batch, top_label, whole
from trueup.models._tensors import as_tensors, upcast_half
from trueup.models.dropout import entropy_of

MIN_BANDWIDTH = 0.01
"""Smallest bandwidth for which exp(½/bandwidth) is finite in single precision."""
MIN_COUNT = 1e-12
"""Smallest soft count of a bin; avoids division by zero."""
_EPS = 1e-10  # keeps quotients and logarithms finite, as in the authors' code


def _score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's cross-entropy, confidence with its gradient, correctness and log-probabilities."""
    log_probs = torch.log_softmax(logits, dim=1)
    return functional.nll_loss(log_probs, labels, reduction="none"), *top_label(log_probs, labels), log_probs


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Compute each row's cross-entropy plus λ times the batch's maximum mean calibration error.

    MMCE² = 1/n² Σ_{i,j} (a_i − c_i)(a_j − c_j) exp(−|c_i − c_j|/bandwidth), with correctness a and confidence c. The
    gradient flows through c only. The time is O(n log n). Do not use it with small batches: the error is
    noisy.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        λ, the weight of the calibration error.
    bandwidth
        Width of the kernel, at least 0.01.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.7038', '1.8024', '0.2983']

    References
    ----------
    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """
    nll, confidence, correct, _ = _score(logits, labels)
    residual = (correct.to(confidence.dtype) - confidence) / len(labels)
    return nll + strength * _kernel_error(confidence, residual, bandwidth)


@per_batch(strength=at_least(0), bandwidth=at_least(MIN_BANDWIDTH))
def mmce_weighted(logits: Tensor, labels: Tensor, *, strength: float = 1.0, bandwidth: float = 0.4) -> Tensor:
    """Compute each row's cross-entropy plus λ times the batch's MMCE with equal weight for correct and wrong rows.

    MMCE_w² = Σ_{i,j} r_i r_j exp(−|c_i − c_j|/bandwidth) with r = (1 − c)/m for the m correct rows and −c/q for the q
    wrong rows; 0 if all rows are correct or all are wrong. It keeps correct rows confident if most are correct. Do not
    use it as a measure of calibration: unlike MMCE, it is not 0 for calibrated predictions.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        λ, the weight of the calibration error.
    bandwidth
        Width of the kernel, at least 0.01.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in mmce_weighted(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['1.1708', '2.2694', '0.7653']

    References
    ----------
    Kumar, Sarawagi & Jain (2018), Trainable calibration measures for neural networks from kernel mean embeddings.
    """
    nll, confidence, correct, _ = _score(logits, labels)
    right, wrong = correct.sum(), (~correct).sum()
    residual = torch.where(correct, (1 - confidence) / right.clamp(min=1), -confidence / wrong.clamp(min=1))
    return nll + strength * (_kernel_error(confidence, residual, bandwidth) * (right * wrong > 0))


class MMCE(Loss, function=mmce, neutral={"strength": 0.0}):
    """Module of `mmce(strength=1.0, bandwidth=0.4)`; see `Loss` for the other parameters."""


class MMCEWeighted(Loss, function=mmce_weighted, neutral={"strength": 0.0}):
    """Module of `mmce_weighted(strength=1.0, bandwidth=0.4)`; see `Loss` for the other parameters."""


def laplacian_form(points: Tensor, values: Tensor, bandwidth: float) -> Tensor:
    """Compute Σ_{i,j} v_i v_j exp(−|x_i − x_j|/bandwidth) for sorted points in [0, 1] in O(n).

    exp(−(x_i − x_j)/b) = exp(−x_i/b) exp(x_j/b) for j ≤ i, so a cumulative sum covers all pairs.
    """
    height = (points - 0.5) / bandwidth
    up_to = (values * height.exp()).cumsum(dim=0)
    return 2 * (values * (-height).exp() * up_to).sum() - values.square().sum()


def _kernel_error(confidence: Tensor, residual: Tensor, bandwidth: float) -> Tensor:
    """Compute √(rᵀKr + 1e-10) with the Laplacian kernel, which has a bounded slope at 0."""
    rising = confidence.sort()
    square = laplacian_form(rising.values, residual[rising.indices], bandwidth)
    return (square.clamp(min=0) + 1e-10).sqrt()


@per_batch(strength=at_least(0), threshold=at_least(0))
def avuc(logits: Tensor, labels: Tensor, *, strength: float = 3.0, threshold: float = 1.0) -> Tensor:
    """Compute each row's cross-entropy plus β times the accuracy-versus-uncertainty loss of the batch.

    The second term is −ln[Σ_good s / Σ s], with s = (c if correct, else 1−c)·(1−tanh u if certain, else tanh u) and u
    the entropy in nats. A row is certain if u ≤ threshold. Good rows are correct and certain, or wrong and uncertain.
    Do not use the default threshold for few classes: it must be well below ln K. `entropy_threshold` finds one.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        β, the weight of the second term.
    threshold
        Largest entropy of a certain row, in nats; well below ln K. See `entropy_threshold`.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in avuc(logits, torch.tensor([0, 1, 1]), strength=1.0, threshold=0.6)]
    ['1.0674', '2.1660', '0.6619']

    References
    ----------
    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization,
    arXiv:2012.07923.
    """
    nll, confidence, correct, log_probs = _score(logits, labels)
    uncertainty = entropy_of(log_probs)
    certain, squashed = uncertainty <= threshold, torch.tanh(uncertainty)
    soft = torch.where(correct, confidence, 1 - confidence) * torch.where(certain, 1 - squashed, squashed)
    good = torch.where(correct == certain, soft, 0.0).sum()
    return nll - strength * torch.log(good / (soft.sum() + _EPS) + _EPS)


class AvUC(Loss, function=avuc, neutral={"strength": 0.0}):
    """Module of `avuc(strength=3.0, threshold=1.0)`; see `Loss` for the other parameters."""


def entropy_threshold(logits: Tensor, labels: Tensor) -> float:
    """Compute the authors' threshold for `avuc`: the midpoint of the mean entropies of correct and wrong predictions.

    Compute it after a few epochs of training with cross-entropy.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).

    Returns
    -------
    float
        The threshold in nats; NaN if all predictions are correct, or all wrong.

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> f"{entropy_threshold(logits, torch.tensor([0, 1, 1])):.4f}"
    '0.4997'

    References
    ----------
    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization,
    arXiv:2012.07923.
    """
    z, y = as_tensors(logits, labels)
    log_probs = torch.log_softmax(upcast_half(z), dim=1)
    entropy = entropy_of(log_probs).cpu().double()
    correct = (log_probs.argmax(dim=1) == y).cpu()
    return float((entropy[correct].mean() + entropy[~correct].mean()) / 2)


@per_batch(strength=at_least(0))
def dca(logits: Tensor, labels: Tensor, *, strength: float = 10.0) -> Tensor:
    """Compute each row's cross-entropy plus β times the gap between the batch's accuracy and mean confidence.

    The loss is −ln p_y + β|mean a − mean c|, and the gradient flows through c only. Do not use it with small
    batches, whose accuracy is noisy. Errors of opposite sign cancel in the averages.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        β, the weight of the gap.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in dca(logits, torch.tensor([0, 1, 1]), strength=1.0)]
    ['0.6108', '1.7094', '0.2054']

    References
    ----------
    Liang et al. (2020), Improved trainable calibration method for neural networks on medical imaging classification,
    arXiv:2009.04057.
    """
    nll, confidence, correct, _ = _score(logits, labels)
    return nll + strength * (correct.to(confidence.dtype) - confidence).mean().abs()


class DCA(Loss, function=dca, neutral={"strength": 0.0}):
    """Module of `dca(strength=10.0)`; see `Loss` for the other parameters."""


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
    """Compute each row's cross-entropy plus κ times the calibration error over soft bins.

    Row i belongs to bin b with membership softmax_b(−(c_i − m_b)²/τ), where m_b is the centre of the bin. The error is
    [Σ_b (n_b/n)|acc_b − conf_b|^p]^(1/p) of the soft counts. As τ → 0 it tends to the ECE (p = 1) or its root mean
    square (p = 2). The gradient flows through c only. Do not use it with small batches: the bins are noisy.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        κ, the weight of the error.
    bins
        Number of bins.
    temperature
        τ, the softness of the membership.
    order
        p, the power of the error.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in soft_binned_ece(logits, torch.tensor([0, 1, 1]), strength=1.0, bins=5)]
    ['0.7557', '1.8543', '0.3502']

    References
    ----------
    Karandikar et al. (2021), Soft calibration objectives for neural networks, arXiv:2108.00106.
    """
    nll, confidence, correct, _ = _score(logits, labels)
    return nll + strength * soft_binned_error(confidence, correct, bins, temperature, order)


class SoftBinnedECE(Loss, function=soft_binned_ece, neutral={"strength": 0.0}):
    """Module of `soft_binned_ece(strength=1.0, bins=15, temperature=0.01, order=2.0)`; see `Loss` for the others."""


def soft_binned_error(confidence: Tensor, correct: Tensor, bins: int, temperature: float, order: float) -> Tensor:
    """Compute the calibration error of degree `order` over soft bins."""
    middles = (torch.arange(bins, device=confidence.device, dtype=confidence.dtype) + 0.5) / bins
    share = torch.softmax((confidence[:, None] - middles).square() * (-1 / temperature), dim=1)
    count = share.sum(dim=0)
    surplus = (share * (correct.to(confidence.dtype) - confidence)[:, None]).sum(dim=0)
    gap = (surplus / count.clamp(min=MIN_COUNT)).abs()
    power = (count * gap.pow(order)).sum() / len(confidence)
    # The root has an infinite slope at 0; above `tiny` the slope is bounded.
    return power.clamp(min=torch.finfo(power.dtype).tiny).pow(1 / order)
