"""Coordinates of input maps: a vector θ of few or many numbers for a shift, or for a shift and scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.maps import Shift, scale_shape
from trueup.clamping.network import Network
from trueup.core.distributed import all_reduce_sum


@dataclass(frozen=True)
class InputParameters:
    """The map of θ = (c, a): δ = Σ_j c_j b_j, or every coordinate of δ its own; and the scales exp(a/ρ), if any.

    ρ is the root mean square norm of a channel over the samples, so that a step in `a` moves inputs about as far as one
    in c does: one penalty λ‖θ‖² suits both.
    """

    network: Network
    basis: Tensor | None
    """Orthonormal directions (r, *shape) in float64, or None for all of the space."""
    channel_norms: Tensor
    """ρ of each channel, (C,) in float64."""
    has_scale: bool = False

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return self._shift_size + (len(self.channel_norms) if self.has_scale else 0)

    @property
    def input_norm(self) -> float:
        """The root mean square norm of an input."""
        return float(self.channel_norms.square().sum().sqrt())

    @property
    def _shift_size(self) -> int:
        return int(np.prod(self.network.shape)) if self.basis is None else len(self.basis)

    def map(self, theta: np.ndarray) -> tuple[Shift, list[Tensor]]:
        """The input map at θ, and the tensors in it that gradients are wanted of."""
        network = self.network
        c, a = torch.from_numpy(theta[: self._shift_size]), torch.from_numpy(theta[self._shift_size :])
        delta = c.reshape(network.shape) if self.basis is None else torch.tensordot(c, self.basis, dims=1)
        leaves = [delta.to(network.device, network.dtype).requires_grad_()]
        if not self.has_scale:
            return network.mapping(*leaves), leaves
        scale = torch.exp(a / self.channel_norms).reshape(scale_shape(network.shape))
        leaves.append(scale.to(network.device, network.dtype).requires_grad_())
        return network.mapping(*leaves), leaves

    def gradient(self, theta: np.ndarray, gradients: list[Tensor]) -> np.ndarray:
        """The gradient by θ, of those by the shift and the scales."""
        by_delta = gradients[0].cpu().reshape(-1)
        parts = [by_delta if self.basis is None else self.basis.reshape(len(self.basis), -1) @ by_delta]
        if self.has_scale:
            a = torch.from_numpy(theta[self._shift_size :])
            parts.append(gradients[1].cpu().reshape(-1) * torch.exp(a / self.channel_norms) / self.channel_norms)
        return torch.cat(parts).numpy()

    def theta_of(self, delta: Tensor) -> np.ndarray:
        """The coordinates of the shift nearest to δ, without scaling."""
        flat = delta.detach().double().cpu().reshape(-1)
        c = flat if self.basis is None else self.basis.reshape(len(self.basis), -1) @ flat
        return np.concatenate([c.numpy(), np.zeros(self.size - self._shift_size)])


def channel_norms(network: Network) -> Tensor:
    """The root mean square norm of each channel, the first axis of an input, over all samples."""
    channels = network.shape[0]
    squares, count = torch.zeros(channels, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for points in network.points():
        # Between the samples and the channels there may be positions, as of tokens.
        flat = points.double().reshape(-1, channels, int(np.prod(network.shape[1:])))
        squares += flat.square().sum(dim=(0, 2)).cpu()
        count += len(flat)
    return (all_reduce_sum(squares) / all_reduce_sum(count)).sqrt().clamp(min=1e-12)
