"""Where the input shift δ may start: at zero, at random, or at the entropy-raising corner of Theorem 3.2."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.clamping.network import Network
from trueup.clamping.theory import theorem, warn_if_contradicted

SMALL = 1e-3
"""Standard deviation of a random start in the released demonstration; its class has 0.01 by default."""


def zero(network: Network) -> Tensor:
    """Start at δ = 0, where the network is the caller's own."""
    return torch.zeros(network.shape, dtype=network.dtype, device=network.device)


def random(network: Network, *, seed: int, scale: float = SMALL) -> Tensor:
    """Start at normal numbers of standard deviation `scale`, drawn on the CPU: a seed means the same on any device."""
    if not scale >= 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(network.shape, generator=generator, dtype=torch.float64) * scale
    return delta.to(network.device, network.dtype)


def data_driven(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Tensor:
    """Start where Theorem 3.2 says that total entropy rises most, to first order, with every input kept in its box.

    With g = Σ_i ∇_x H(softmax(f(x_i)/T)): δ_j = −(min_i x_ij − low_j) where g_j < 0, and high_j − max_i x_ij where
    g_j > 0. Images that use their whole range leave no room, and δ is zero, which a warning says. `quantile` takes the
    q and 1 − q quantiles in place of minimum and maximum (what then leaves the box is clipped); `scale` multiplies δ.
    Costs a forward-backward pass, and one forward to see whether the entropy did rise.
    Tang et al., "Neural Clamping" (2024), Theorem 3.2.
    """
    closed_form = theorem(network, temperature=temperature, quantile=quantile, scale=scale)
    if bool(closed_form.delta.any()):
        warn_if_contradicted(network, closed_form, network.logits(network.mapping(closed_form.delta)), temperature)
    return closed_form.delta
