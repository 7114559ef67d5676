"""Losses of each row by itself: cross-entropy, Brier score, label smoothing, penalties on logits and entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses._base import Loss, at_least, between, per_sample
from trueup.models.dropout import entropy_of, moments


@per_sample()
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each row: −ln p_y.

    Proper: its minimum is the truth. Not by itself for a large network trained to the end: once every label is fitted,
    its confidence alone still grows.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in cross_entropy(logits, torch.tensor([0, 2]))]
    ['0.2395', '1.5514']

    Good (1952), Rational decisions.
    """
    return functional.cross_entropy(logits, labels, reduction="none")


class CrossEntropy(Loss, function=cross_entropy, neutral={}):
    """The `cross_entropy` as a Module."""


@per_sample()
def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared distance between the probabilities and the label: Σ_k (p_k − e_yk)², between 0 and 2.

    Proper, and bounded, so that mislabelled samples pull less. Not for training from scratch with many classes: where
    the network is sure and wrong its gradient vanishes.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in brier(logits, torch.tensor([0, 2]))]
    ['0.0681', '0.9979']

    Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    probs = torch.softmax(logits, dim=1)
    index = labels[:, None]
    return probs.scatter_add(1, index, probs.new_full(index.shape, -1.0)).square().sum(dim=1)


class Brier(Loss, function=brier):
    """The `brier` score as a Module."""


@per_sample(smoothing=between(0, 1))
def label_smoothing(logits: Tensor, labels: Tensor, *, smoothing: float = 0.05) -> Tensor:
    """The cross-entropy to a label mixed with the uniform distribution: −(1−ε) ln p_y − ε/K Σ_k ln p_k.

    Not where the network will be calibrated afterwards: it compresses the logits of easy and hard samples alike, which
    no later temperature can part again.

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


@per_sample(strength=at_least(0), order=at_least(1))
def norm(logits: Tensor, labels: Tensor, *, strength: float = 0.01, order: float = 1.0) -> Tensor:
    """The cross-entropy plus the norm of the row of logits: −ln p_y + α‖z‖_p.

    The norm is a sum over classes, so that a strength found for 10 classes is too much for 100. Not where the network
    will be calibrated afterwards: like label smoothing it compresses the logits of easy and hard samples alike.

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


@per_sample(strength=at_least(0))
def entropy_penalty(logits: Tensor, labels: Tensor, *, strength: float = 0.1) -> Tensor:
    """The cross-entropy less a share of the prediction's entropy: −ln p_y − κH(p), H(p) = −Σ_k p_k ln p_k.

    Also called the confidence penalty. It may be negative. Not for an underconfident network, nor with a strength found
    for another number of classes: the entropy grows with ln K.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in entropy_penalty(logits, torch.tensor([0, 2]), strength=0.5)]
    ['-0.0932', '1.0638']

    Pereyra et al. (2017), Regularizing neural networks by penalizing confident output distributions.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    return functional.nll_loss(log_probs, labels, reduction="none") - strength * entropy_of(log_probs)


class EntropyPenalty(Loss, function=entropy_penalty, neutral={"strength": 0.0}):
    """The cross-entropy with an `entropy_penalty` as a Module."""


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of numbers under a network's mean and variance: ½ ln(2πσ²) + (y − μ)²/(2σ²).

    Outputs are (n, 2·targets), first the means, then v of σ² = ln(1 + eᵛ) + 1e-6, as `uncertainty.moments` reads them;
    targets (n,) or (n, targets). Not for a start far from the targets: where σ² grows first, the means learn slowly.

    >>> outputs = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> f"{gaussian_nll(outputs, torch.tensor([1.0, 2.0])):.4f}"
    '1.0964'

    Nix & Weigend (1994), Estimating the mean and variance of the target probability distribution.
    """
    predictive = moments(outputs[None], variance_head=True)
    error = residuals(predictive.mean, targets, f"outputs {tuple(outputs.shape)}")
    return (math.log(2 * math.pi) + predictive.within.log() + error.square() / predictive.within).mean() / 2


def residuals(mean: Tensor, targets: Tensor, source: str, hint: str = "") -> Tensor:
    """Targets less their predicted means; targets may have one more dimension, of size 1."""
    wanted = tuple(mean.shape)
    if tuple(targets.shape) not in (wanted, (*wanted, 1)):
        raise ValueError(f"targets must have shape {wanted} for {source}, got {tuple(targets.shape)}{hint}")
    return targets.reshape(wanted).to(mean.dtype) - mean
