"""The cross-entropy with accuracy versus uncertainty of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.core.arrays import as_tensors, upcast_half
from trueup.losses.base import Loss, per_batch, top_label
from trueup.losses.option_checks import at_least
from trueup.models.dropout import entropy_of

EPS = 1e-10


@per_batch(strength=at_least(0), threshold=at_least(0))
def avuc(logits: Tensor, labels: Tensor, *, strength: float = 3.0, threshold: float = 1.0) -> Tensor:
    """Each row's cross-entropy plus β times how seldom the batch is certain when right and uncertain when wrong.

    −ln[Σ_good s / Σ s], s = (c if right, else 1−c)·(1−tanh u if certain, else tanh u), u the entropy in nats, certain
    if u ≤ threshold, good the rows both right and certain or both wrong and uncertain. Not with the default threshold
    for few classes: it must lie well below ln K; `entropy_threshold` finds one after a few epochs.

    >>> import torch
    >>> logits = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> [f"{v:.4f}" for v in avuc(logits, torch.tensor([0, 1, 1]), strength=1.0, threshold=0.6)]
    ['1.0674', '2.1660', '0.6619']

    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization.
    """
    log_probs = torch.log_softmax(logits, dim=1)
    confidence, correct = top_label(log_probs, labels)
    penalty = avu_penalty(confidence, correct, entropy_of(log_probs), threshold)
    return functional.nll_loss(log_probs, labels, reduction="none") + strength * penalty


class AvUC(Loss, function=avuc, neutral={"strength": 0.0}):
    """The cross-entropy with `avuc` as a Module."""


def avu_penalty(confidence: Tensor, correct: Tensor, uncertainty: Tensor, threshold: float) -> Tensor:
    """−ln of the soft share of rows that are right and certain, or wrong and uncertain."""
    certain = uncertainty <= threshold
    squashed = torch.tanh(uncertainty)
    soft = torch.where(correct, confidence, 1 - confidence) * torch.where(certain, 1 - squashed, squashed)
    good = torch.where(correct == certain, soft, 0.0).sum()
    return -torch.log(good / (soft.sum() + EPS) + EPS)


def entropy_threshold(logits: Tensor, labels: Tensor) -> float:
    """The authors' threshold for `avuc`: halfway between the mean entropies of right and of wrong predictions.

    NaN where all are right or all wrong.

    >>> import torch
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
