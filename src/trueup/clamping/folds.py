"""Which samples go where: dealt by what they hold, so that neither their order nor the number of ranks matters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.calibration_set import Inputs
from trueup.clamping.network import Network
from trueup.clamping.objective import Loss
from trueup.core.distributed import all_gather_object, rank

HELD_OUT = 5
"""One sample in so many is left out of a fit to judge it."""


def dealt(network: Network, loss: Loss) -> Tensor:
    """The samples of all ranks, sorted by their loss as the network is: dealing from it makes parts that are alike."""
    rows = loss.rows(network.plain(), network.labels, 1.0).numpy()
    return torch.from_numpy(np.lexsort((network.plain()[:, 0].numpy(), network.labels.numpy(), rows)))


def left_out(order: Tensor, fold: int, folds: int) -> Tensor:
    """A mask of the samples of one fold, dealt from an order.

    >>> left_out(torch.tensor([3, 0, 2, 1]), 1, 2)
    tensor([ True,  True, False, False])
    """
    out = torch.zeros(len(order), dtype=torch.bool)
    out[order[fold::folds]] = True
    return out


def parted(network: Network, which: Tensor) -> Inputs:
    """This rank's share of samples that are numbered, or masked, over all ranks."""
    index = which.nonzero()[:, 0] if which.dtype == torch.bool else which
    first = sum(all_gather_object(network.inputs.n)[: rank()])
    own = index[(index >= first) & (index < first + network.inputs.n)] - first
    return network.inputs.part(own)
