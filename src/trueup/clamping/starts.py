"""Where the input shift δ may start: at zero, at random, or at the entropy-raising corner of Theorem 3.2."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup import metrics
from trueup.clamping.network import Network
from trueup.core.distributed import all_gather_rows

SMALL = 1e-3
"""Standard deviation of a random start in the released demonstration; its class has 0.01 by default."""
_NUMBERS = 1 << 26  # read at a time where quantiles are asked for
_OUTSIDE = 1e-3  # what rounding may put outside the box, as a share of its width


def zero(network: Network) -> Tensor:
    """Start at δ = 0, where the network is the caller's own."""
    return torch.zeros(network.shape, dtype=network.dtype, device=network.device)


def random(network: Network, *, seed: int, scale: float = SMALL) -> Tensor:
    """Start at normal numbers of standard deviation `scale`, drawn on the CPU: a seed means the same on any device."""
    if not scale >= 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(network.shape, generator=generator, dtype=torch.float64) * scale
    return drawn.to(network.device, network.dtype)


def data_driven(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Tensor:
    """Start where Theorem 3.2 says that total entropy rises most, to first order, with every input kept in its box.

    With g = Σ_i ∇_x H(softmax(f(x_i)/T)): δ_j = −(min_i x_ij − low_j) where g_j < 0, and high_j − max_i x_ij where
    g_j > 0. Images that use their whole range leave no room, and δ is zero, which a warning says. `quantile` takes the
    q and 1 − q quantiles in place of minimum and maximum (what then leaves the box is clipped); `scale` multiplies δ.
    Costs a forward-backward pass, and one forward to see whether the entropy did rise.
    Tang et al., "Neural Clamping" (2024), Theorem 3.2.
    """
    found = theorem(network, temperature=temperature, quantile=quantile, scale=scale)
    if bool(found.delta.any()):
        warn_if_contradicted(network, found, network.logits(network.mapping(found.delta)), temperature)
    return found.delta


@dataclass(frozen=True)
class Theorem:
    """The closed form, with what it promises."""

    delta: Tensor
    gain: float
    """By how much the mean entropy should rise, to first order: δᵀg/n."""


def theorem(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Theorem:
    """Compute the closed form of Theorem 3.2 in one forward-backward pass."""
    if network.box is None:
        raise ValueError("box must be given for the data-driven start: it keeps every x + δ inside, got None")
    if not 0 <= quantile < 0.5:
        raise ValueError(f"quantile must lie in [0, 0.5), got {quantile}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    low, high = ends_of(network)
    smallest, largest = _extent(network, quantile)
    g = network.pull_plain(lambda z, y: entropy_slope(z, temperature)).cpu()
    corner = scale * corner_of(g, smallest, largest, (low, high))
    if not bool(corner.any()):
        warnings.warn(
            "Theorem 3.2 gives δ = 0: wherever entropy would rise, some input reaches the box's end already; "
            "a quantile above 0 leaves such inputs out",
            stacklevel=3,
        )
    gain = float((corner * g).sum()) / len(network.labels)
    return Theorem(corner.to(network.device, network.dtype), gain)


def check_box(network: Network) -> None:
    """Refuse a box that some input is not in: the network as it is would not be among the maps that are tried."""
    if network.box is None:
        return
    low, high = ends_of(network)
    smallest, largest = _extent(network, 0.0)
    slack = _OUTSIDE * (high - low)
    if bool(((smallest < low - slack) | (largest > high + slack)).any()):
        raise ValueError(
            f"box must hold every input, got inputs in {float(smallest.min()):.4g}..{float(largest.max()):.4g} "
            f"for a box of {float(low.min()):.4g}..{float(high.max()):.4g}; it is in the space of the network's input"
        )


def ends_of(network: Network) -> tuple[Tensor, Tensor]:
    """The two ends of the network's box, each of the shape of δ."""
    if not isinstance(network.box, tuple | list) or len(network.box) != 2:
        raise ValueError(f"box must be a pair (low, high), got {network.box!r}")
    ends = []
    for end in network.box:
        try:
            ends.append(torch.as_tensor(end, dtype=torch.float64).cpu().expand(network.shape))
        except (TypeError, ValueError, RuntimeError):
            fact = f"shape {tuple(end.shape)}" if hasattr(end, "shape") else repr(end)
            raise ValueError(
                f"box must have ends that are numbers or broadcast to one input {network.shape}, got {fact}"
            ) from None
    low, high = ends
    if not bool((low <= high).all()):  # which NaN is not
        raise ValueError(
            f"box must have its lower end below its upper one, got {float(low.max()):.4g} and {float(high.min()):.4g}"
        )
    return low, high


def corner_of(gradient: Tensor, smallest: Tensor, largest: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """The δ of most δᵀg among those that keep inputs between `smallest` and `largest` inside the box.

    >>> g, ones = torch.tensor([-1.0, 2.0, 0.0]), torch.ones(3)
    >>> corner_of(g, 0.2 * ones, 0.7 * ones, (0 * ones, ones))
    tensor([-0.2000,  0.3000,  0.0000])
    """
    low, high = box
    down, up = (smallest - low).clamp(min=0), (high - largest).clamp(min=0)
    return torch.where(gradient < 0, -down, torch.where(gradient > 0, up, torch.zeros_like(up)))


def entropy_slope(logits: Tensor, temperature: float) -> Tensor:
    """∂H(softmax(z/T))/∂z = −(1/T) p (ln p + H), row by row.

    >>> entropy_slope(torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[-0.1966,  0.1966]])
    """
    log_p = torch.log_softmax(logits / temperature, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=1, keepdim=True)
    return -p * (log_p + entropy) / temperature


def warn_if_contradicted(network: Network, found: Theorem, logits: Tensor, temperature: float) -> None:
    """Warn where entropy fell though the theorem's first order promised a rise: δ is outside the linear regime."""
    rise = metrics.entropy(logits / temperature) - metrics.entropy(network.plain() / temperature)
    if found.gain > 0 > rise:
        warnings.warn(
            f"Theorem 3.2 promised a mean entropy higher by {found.gain:.4g}, and it fell by {-rise:.4g}: "
            "its first order does not reach this far; try a smaller scale",
            stacklevel=3,
        )


def _extent(network: Network, quantile: float) -> tuple[Tensor, Tensor]:
    """The least and greatest value of each coordinate, or its quantiles, over all samples of all ranks."""
    size = math.prod(network.shape)
    # Quantiles need a coordinate's values all at once: a few coordinates at a time where they are many.
    step = max(1, _NUMBERS // len(network.labels)) if quantile else size
    ends = []
    for start in range(0, size, step):
        parts = [points.reshape(-1, size)[:, start : start + step].cpu() for points in network.points()]
        if not quantile:
            parts = [end for part in parts for end in (part.amin(dim=0)[None], part.amax(dim=0)[None])]
        columns = all_gather_rows(torch.cat(parts) if parts else torch.empty(0, min(step, size - start)))
        # The 0 and 1 quantiles are the least and the greatest.
        ends.append(np.quantile(columns.double().numpy(), [quantile, 1 - quantile], axis=0))
    least, most = (torch.from_numpy(end).reshape(network.shape) for end in np.concatenate(ends, axis=1))
    return least, most
