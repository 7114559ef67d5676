"""Lower the entropy of a network's answers by batch norm's scales and offsets, and stop where answers collapse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup.clamping.batch_norm import batch_norms, share_copy
from trueup.clamping.calibration_set import local_subset
from trueup.clamping.network import Network, gradients_of
from trueup.core.distributed import all_reduce_sum
from trueup.core.splits import random_order

LEARNING_RATE = 1e-3
BATCH = 100
COLLAPSE = 0.05
"""Nats by which the mean answer may move away from what it was; more is taken for a collapse onto a few classes."""


class LowerEntropy(NamedTuple):
    """Scales and offsets of batch norm, or nothing where that would not do."""

    tensors: dict[str, Tensor]
    """By the names of `state_dict`; empty where they were refused."""
    refused: str
    """Why."""


def lower_entropy(
    network: Network, before: nn.Module | None, changed: dict[str, Tensor], *, temperature: float, seed: int
) -> LowerEntropy:
    """One epoch of Adam on the mean entropy of softmax(z/T) over the scales and offsets of batch norm.

    Sure answers that are wrong draw others after them, until every input is given one class. So the mean answer over
    all samples is compared before and after: if Kullback and Leibler's divergence exceeds `COLLAPSE` nats, nothing is
    changed.
    Wang et al., "Tent: fully test-time adaptation by entropy minimization" (2021).
    """
    own = {
        f"{name}.{leaf}": getattr(layer, leaf).detach().clone()
        for name, layer in batch_norms(network.model).items()
        for leaf in ("weight", "bias")
        if isinstance(getattr(layer, leaf), Tensor)
    }
    if not own:
        return LowerEntropy({}, "batch norm has no scales and offsets")
    model = share_copy(network.model, {**changed, **own})
    samples = network.with_model(model)
    trained = [model.get_parameter(name).requires_grad_() for name in own]
    optimiser = torch.optim.Adam(trained, lr=LEARNING_RATE)
    first = _mean_answer(samples.logits(before), temperature)
    order = torch.from_numpy(random_order(len(network.labels), seed))
    for index in torch.split(order, BATCH):
        sums = [torch.zeros_like(tensor) for tensor in trained]
        with torch.enable_grad():
            for batch in local_subset(network.inputs, index):
                z = samples.batch_logits(batch, before)
                log_p = torch.log_softmax(z.float() / temperature, dim=1)
                there = log_p.masked_fill(torch.isinf(log_p), 0.0)  # masked classes have no part in it
                gradients = gradients_of(-(log_p.exp() * there).sum() / len(index), trained)
                samples.count(backward=len(batch.labels))
                sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        for tensor, total in zip(trained, sums, strict=True):
            tensor.grad = all_reduce_sum(total)
        optimiser.step()
    last = _mean_answer(samples.logits(before), temperature)
    moved = float((last * np.log(np.maximum(last, 1e-12) / np.maximum(first, 1e-12))).sum())
    if not moved <= COLLAPSE:
        return LowerEntropy({}, f"answers would collapse: the mean answer would move by {moved:.2f} nats")
    return LowerEntropy({name: model.get_parameter(name).detach().clone() for name in own}, "")


def _mean_answer(logits: Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(logits.double() / temperature, dim=1).mean(dim=0).numpy()
