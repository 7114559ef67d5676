"""Coordinates θ of input maps, and label-free directions for δ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.maps import Shift, scale_shape
from trueup.clamping.network import Network
from trueup.models._distributed import all_reduce_sum

MAX_DIRECTIONS = 16
"""Largest number of directions besides the entropy gradient; each costs a forward pass over the subsample."""
_ROUNDS = 12  # rounds of subspace iteration for the principal directions


@dataclass(frozen=True)
class InputParameters:
    """The input map at θ = (c, a): δ = Σ_j c_j b_j, or δ = c without a basis; and channel scales exp(a/ρ), if any.

    ρ is the root mean square norm of a channel over the samples. Equal steps in `a` and c then change inputs equally,
    so one penalty λ‖θ‖² suits both.
    """

    network: Network
    basis: Tensor | None
    """Orthonormal directions (r, *shape) in float64; None for the full space."""
    channel_norms: Tensor
    """ρ of each channel, (C,) in float64."""
    has_scale: bool = False

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self._shift_size + (len(self.channel_norms) if self.has_scale else 0)

    @property
    def input_norm(self) -> float:
        """Root mean square norm of an input."""
        return float(self.channel_norms.square().sum().sqrt())

    @property
    def _shift_size(self) -> int:
        return int(np.prod(self.network.shape)) if self.basis is None else len(self.basis)

    def map(self, theta: np.ndarray) -> tuple[Shift, list[Tensor]]:
        """Return the input map at θ, and its tensors that require gradients."""
        network = self.network
        c, a = torch.from_numpy(theta[: self._shift_size]), torch.from_numpy(theta[self._shift_size :])
        values = [c.reshape(network.shape) if self.basis is None else torch.tensordot(c, self.basis, dims=1)]
        if self.has_scale:
            values.append(torch.exp(a / self.channel_norms).reshape(scale_shape(network.shape)))
        leaves = [value.to(network.device, network.dtype).requires_grad_() for value in values]
        return network.mapping(*leaves), leaves

    def gradient(self, theta: np.ndarray, gradients: list[Tensor]) -> np.ndarray:
        """Convert gradients by the shift and the scales to the gradient by θ."""
        parts = [self._along_basis(gradients[0].cpu())]
        if self.has_scale:
            a = torch.from_numpy(theta[self._shift_size :])
            parts.append(gradients[1].cpu().reshape(-1) * torch.exp(a / self.channel_norms) / self.channel_norms)
        return torch.cat(parts).numpy()

    def theta_of(self, delta: Tensor) -> np.ndarray:
        """Return the coordinates of the shift closest to δ, without scaling."""
        c = self._along_basis(delta.detach().double().cpu())
        return np.concatenate([c.numpy(), np.zeros(self.size - self._shift_size)])

    def _along_basis(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        return flat if self.basis is None else self.basis.reshape(len(self.basis), -1) @ flat


def channel_norms(network: Network) -> Tensor:
    """Compute the root mean square norm of each channel (first axis of an input) over all samples."""
    channels = network.shape[0]
    squares, count = torch.zeros(channels, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for points in network.points():
        # Token embeddings have positions between the samples and the channels.
        flat = points.double().reshape(-1, channels, int(np.prod(network.shape[1:])))
        squares += flat.square().sum(dim=(0, 2)).cpu()
        count += len(flat)
    return (all_reduce_sum(squares) / all_reduce_sum(count)).sqrt().clamp(min=1e-12)


def cosines(shape: tuple[int, ...], frequencies: int) -> Tensor:
    """Return the lowest spatial frequencies of each channel: orthonormal products of cosines, (C·f², C, H, W).

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
    blocks = torch.einsum("ah,bw->abhw", *waves).reshape(-1, *sizes)
    # Each basis vector has one frequency, in one channel.
    return torch.einsum("fhw,cd->fcdhw", blocks, torch.eye(channels, dtype=torch.float64)).reshape(-1, *shape)


def directions(network: Network, gradient: Tensor, *, frequencies: int = 2, seed: int = 0) -> Tensor:
    """Return an orthonormal basis (r, *shape) in float64.

    For images (C, H, W) it holds the lowest frequencies of each channel, at most `MAX_DIRECTIONS`. For inputs with few
    coordinates it holds all of them. For other inputs it holds the mean input and principal directions. The entropy
    gradient is added at the end.
    """
    shape, size = network.shape, int(np.prod(network.shape))
    if len(shape) == 3 and shape[0] <= MAX_DIRECTIONS < size:
        per_channel = max(f for f in range(1, frequencies + 1) if shape[0] * f * f <= max(MAX_DIRECTIONS, shape[0]))
        basis = cosines(shape, per_channel)
    elif size <= MAX_DIRECTIONS:
        basis = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    else:
        basis = principal(network, MAX_DIRECTIONS // 2, seed=seed)
    return _orthonormal(torch.cat([basis, gradient.double()[None]]))


def principal(network: Network, number: int, *, seed: int = 0) -> Tensor:
    """Return the mean input and the `number` directions of largest variance, (number + 1, *shape).

    Subspace iteration as in Halko, Martinsson & Tropp (2011), "Finding structure with randomness", arXiv:0909.4061.
    """
    size = int(np.prod(network.shape))

    def rows() -> Iterator[Tensor]:
        return (points.double().cpu().reshape(-1, size) for points in network.points())

    total, count = torch.zeros(size, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for flat in rows():
        total += flat.sum(dim=0)
        count += len(flat)
    mean, number = all_reduce_sum(total) / all_reduce_sum(count), min(number, size)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, number, dtype=torch.float64, generator=generator))[0]
    for _ in range(_ROUNDS):
        image = torch.zeros(size, number, dtype=torch.float64)
        for centred in (flat - mean for flat in rows()):
            image += centred.T @ (centred @ basis)
        basis = torch.linalg.qr(all_reduce_sum(image))[0]
    return torch.cat([mean[None], basis.T]).reshape(-1, *network.shape)


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormalise by Gram–Schmidt, twice against rounding; linearly dependent vectors are dropped."""
    kept: list[Tensor] = []
    for vector in vectors.reshape(len(vectors), -1):
        size = float(vector.norm())
        residual = vector / size if size else vector
        for _ in range(2):
            for other in kept:
                residual = residual - (residual @ other) * other
        if float(residual.norm()) > 1e-6:
            kept.append(residual / residual.norm())
    return torch.stack(kept).reshape(-1, *vectors.shape[1:])
