"""Which samples go where: dealt by what they hold, so that neither their order nor the number of ranks matters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.inputs import Inputs
from trueup.clamping.network import Network
from trueup.clamping.objective import Loss
from trueup.distributed import everyone, rank

HELD_OUT = 5
"""One sample in so many is left out of a fit to judge it."""


def dealt(network: Network, loss: Loss) -> Tensor:
    """The samples of all ranks, sorted by their loss as the network is: dealing from it makes parts that are alike."""
    rows = loss.rows(network.plain(), network.labels, 1.0).numpy()
    return torch.from_numpy(np.lexsort((network.plain()[:, 0].numpy(), network.labels.numpy(), rows)))


def parted(network: Network, index: Tensor) -> Inputs:
    """This rank's share of samples that are numbered over all ranks."""
    first = sum(everyone(network.inputs.n)[: rank()])
    own = index[(index >= first) & (index < first + network.inputs.n)] - first
    return network.inputs.part(own)
