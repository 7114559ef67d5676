"""Losses of single rows: cross-entropy, Brier score, label smoothing, penalties on logits and entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, at_least, between, label_total, over_labels, per_sample
from trueup.models.dropout import entropy_of, moments


@per_sample()
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of each row: −ln p_y.

    It is a proper score: the true probabilities minimise it. Do not use it alone for a large network trained to the
    end: confidence keeps growing once every label is fitted, so the network becomes overconfident.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in cross_entropy(logits, torch.tensor([0, 2]))]
    ['0.2395', '1.5514']

    References
    ----------
    Good (1952), Rational decisions, doi:10.1111/j.2517-6161.1952.tb00104.x.
    """
    return functional.cross_entropy(logits, labels, reduction="none")


class CrossEntropy(Loss, function=cross_entropy, neutral={}):
    """Module of `cross_entropy`; see `Loss` for its parameters."""


@per_sample()
def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the squared distance of probabilities and label: Σ_k (p_k − e_yk)², between 0 and 2.

    It is a proper score. It is bounded, so mislabelled samples have less influence. Do not use it from
    scratch with many classes: the gradient vanishes for confident wrong predictions.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in brier(logits, torch.tensor([0, 2]))]
    ['0.0681', '0.9979']

    References
    ----------
    Brier (1950), Verification of forecasts expressed in terms of probability,
    doi:10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2.
    """
    probs = torch.softmax(logits, dim=1)
    square = probs.square().sum(dim=1)
    return (square + 1) * label_total(labels) - 2 * over_labels(probs, labels, lambda p: p)


class Brier(Loss, function=brier):
    """Module of `brier`; see `Loss` for its parameters."""


@per_sample(smoothing=between(0, 1))
def label_smoothing(logits: Tensor, labels: Tensor, *, smoothing: float = 0.05) -> Tensor:
    """Compute the cross-entropy with a smoothed label: −(1−ε) ln p_y − ε/K Σ_k ln p_k.

    Do not use it before post-hoc calibration: it compresses the logits of easy and hard samples alike, and no
    temperature can separate them again.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    smoothing
        ε, the share of the uniform distribution in the label, in 0..1.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in label_smoothing(logits, torch.tensor([0, 2]), smoothing=0.3)]
    ['0.6395', '1.4514']

    References
    ----------
    Szegedy et al. (2016), Rethinking the inception architecture, arXiv:1512.00567; Müller et al. (2019), When does
    label smoothing help?, arXiv:1906.02629.
    """
    return functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")


class LabelSmoothing(Loss, function=label_smoothing, neutral={"smoothing": 0.0}):
    """Module of `label_smoothing(smoothing=0.05)`; see `Loss` for the other parameters.

    As in torch, each class's share of the smoothed label has the weight of that class.
    """

    smoothing: float

    def weighted(self, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Compute Σ_k w_k ỹ_k (−ln p_k) of each row."""
        return functional.cross_entropy(logits, labels, weight=weight, label_smoothing=self.smoothing, reduction="none")


@per_sample(strength=at_least(0), order=at_least(1))
def norm(logits: Tensor, labels: Tensor, *, strength: float = 0.01, order: float = 1.0) -> Tensor:
    """Compute the cross-entropy plus the norm of the logits: −ln p_y + α‖z‖_p.

    Do not use it before post-hoc calibration: like label smoothing, it compresses the logits of easy and hard samples.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        α. The norm is a sum over classes, so a value tuned for 10 classes is too large for 100.
    order
        p, at least 1.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, -1.0]])
    >>> [f"{v:.4f}" for v in norm(logits, torch.tensor([0, 1]), strength=0.1)]
    ['0.4395', '0.6076']

    References
    ----------
    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    return functional.cross_entropy(logits, labels, reduction="none") + strength * _size(logits, order) * label_total(
        labels
    )


class Norm(Loss, function=norm, neutral={"strength": 0.0}):
    """Module of `norm(strength=0.01, order=1.0)`; see `Loss` for the other parameters."""


def _size(logits: Tensor, order: float) -> Tensor:
    if order <= 2:
        return torch.linalg.vector_norm(logits, ord=order, dim=1)
    # High powers overflow; the norm is homogeneous, so scale the logits first.
    scale = logits.detach().abs().amax(dim=1, keepdim=True).clamp(min=1)
    return torch.linalg.vector_norm(logits / scale, ord=order, dim=1) * scale.squeeze(1)


@per_sample(strength=at_least(0))
def entropy_penalty(logits: Tensor, labels: Tensor, *, strength: float = 0.1) -> Tensor:
    """Compute the cross-entropy minus the prediction's entropy: −ln p_y − κH(p), H(p) = −Σ_k p_k ln p_k.

    It is also called the confidence penalty, and may be negative. Do not use it for an underconfident network.

    Parameters
    ----------
    logits
        Network outputs, shape (n, classes).
    labels
        Class of each row, shape (n,).
    strength
        κ. The entropy grows with ln K, so κ depends on the number of classes.

    Returns
    -------
    Tensor
        Loss of each row, shape (n,).

    Examples
    --------
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in entropy_penalty(logits, torch.tensor([0, 2]), strength=0.5)]
    ['-0.0932', '1.0638']

    References
    ----------
    Pereyra et al. (2017), Regularizing neural networks by penalizing confident output distributions, arXiv:1701.06548.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    nll = functional.cross_entropy(logits, labels, reduction="none")
    return nll - strength * entropy_of(log_probs) * label_total(labels)


class EntropyPenalty(Loss, function=entropy_penalty, neutral={"strength": 0.0}):
    """Module of `entropy_penalty(strength=0.1)`; see `Loss` for the other parameters."""


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean Gaussian negative log-likelihood: ½ ln(2πσ²) + (y − μ)²/(2σ²).

    Standardise the targets: if they are far from the initial means, σ² grows first and the means learn slowly.

    Parameters
    ----------
    outputs
        Network outputs, shape (n, 2·targets): the means, then v with σ² = ln(1 + eᵛ) + 1e-6, as in `models.moments`.
    targets
        True numbers, shape (n,) or (n, targets).

    Returns
    -------
    Tensor
        The mean over rows and targets.

    Examples
    --------
    >>> outputs = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> f"{gaussian_nll(outputs, torch.tensor([1.0, 2.0])):.4f}"
    '1.0964'

    References
    ----------
    Nix & Weigend (1994), Estimating the mean and variance of the target probability distribution,
    doi:10.1109/ICNN.1994.374138.
    """
    predictive = moments(outputs[None], variance_head=True)
    error = residuals(predictive.mean, targets, f"outputs {tuple(outputs.shape)}")
    return (math.log(2 * math.pi) + predictive.within.log() + error.square() / predictive.within).mean() / 2


def residuals(mean: Tensor, targets: Tensor, source: str, hint: str = "") -> Tensor:
    """Subtract the predicted means from the targets, which may have an additional dimension of size 1."""
    shape = tuple(mean.shape)
    if tuple(targets.shape) not in (shape, (*shape, 1)):
        raise ValueError(f"targets must have shape {shape} for {source}, got {tuple(targets.shape)}{hint}")
    return targets.reshape(shape).to(mean.dtype) - mean
