"""A few directions in which δ may go, none of which has seen a label."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.network import Network
from trueup.core.distributed import all_reduce_sum

MOST = 16
"""Directions beside the entropy gradient: each costs a forward pass over the subsample that is differentiated."""
_ROUNDS = 12


def cosines(shape: tuple[int, ...], frequencies: int) -> Tensor:
    """The lowest spatial frequencies of each channel: products of cosines, orthonormal, (C·f², C, H, W) in float64.

    >>> cosines((1, 4, 4), 2).shape
    torch.Size([4, 1, 4, 4])
    >>> print(f"{float(cosines((1, 4, 4), 2)[0].sum()):.4f}")
    4.0000
    """
    channels, *sizes = shape
    waves = []
    for size in sizes:
        position = (torch.arange(size, dtype=torch.float64) + 0.5) / size
        table = torch.stack([torch.cos(math.pi * k * position) for k in range(min(frequencies, size))])
        waves.append(table / table.norm(dim=1, keepdim=True))
    blocks = [
        torch.einsum("h,w->hw", waves[0][a], waves[1][b]) for a, b in product(*(range(len(wave)) for wave in waves))
    ]
    basis = torch.zeros(len(blocks), channels, channels, *sizes, dtype=torch.float64)
    for number, block in enumerate(blocks):
        for channel in range(channels):
            basis[number, channel, channel] = block
    return basis.reshape(-1, *shape)


def directions(network: Network, gradient: Tensor, *, frequencies: int = 2, seed: int = 0) -> Tensor:
    """An orthonormal basis (r, *shape) in float64.

    For images (C, H, W) the lowest frequencies of each channel, as many as `MOST` allows; for few coordinates all of
    them; for other inputs the mean input and the principal directions. The entropy gradient comes last.
    """
    shape, size = network.shape, int(np.prod(network.shape))
    if len(shape) == 3 and shape[0] <= MOST < size:
        per_channel = max(f for f in range(1, frequencies + 1) if shape[0] * f * f <= max(MOST, shape[0]))
        basis = cosines(shape, per_channel)
    elif size <= MOST:
        basis = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    else:
        basis = principal(network, MOST // 2, seed=seed)
    return _orthonormal(torch.cat([basis, gradient.double()[None]]))


def principal(network: Network, number: int, *, seed: int = 0) -> Tensor:
    """The mean input and the `number` directions of most variance, (number + 1, *shape), by subspace iteration.

    Halko, Martinsson & Tropp, "Finding structure with randomness" (2011).
    """
    size = int(np.prod(network.shape))
    total, count = torch.zeros(size, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for points in network.points():
        flat = points.detach().double().cpu().reshape(-1, size)
        total += flat.sum(dim=0)
        count += len(flat)
    count = all_reduce_sum(count)
    mean = all_reduce_sum(total) / count
    number = min(number, size)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, number, dtype=torch.float64, generator=generator))[0]
    for _ in range(_ROUNDS):
        image = torch.zeros(size, number, dtype=torch.float64)
        for points in network.points():
            centred = points.detach().double().cpu().reshape(-1, size) - mean
            image += centred.T @ (centred @ basis)
        basis = torch.linalg.qr(all_reduce_sum(image))[0]
    return torch.cat([mean[None], basis.T]).reshape(-1, *network.shape)


def _orthonormal(vectors: Tensor) -> Tensor:
    """Gram and Schmidt's, twice for rounding's sake; what the earlier ones span already is left out."""
    kept: list[Tensor] = []
    for vector in vectors.reshape(len(vectors), -1):
        size = float(vector.norm())
        rest = vector / size if size else vector
        for _ in range(2):
            for other in kept:
                rest = rest - (rest @ other) * other
        if float(rest.norm()) > 1e-6:
            kept.append(rest / rest.norm())
    return torch.stack(kept).reshape(-1, *vectors.shape[1:])
