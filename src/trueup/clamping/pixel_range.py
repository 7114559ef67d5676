"""What pixels of 0 and 1 are to a network, by the rule that normalises its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trueup.clamping.input_map import Shape
from trueup.clamping.network import Network, extent
from trueup.core.errors import InputError

Normalise: TypeAlias = Callable[[Tensor], Tensor] | tuple[Sequence[float], Sequence[float]]
"""From pixels in [0, 1] to the network's inputs: a function, or (mean, std) of each channel."""
OUTSIDE = 0.25
"""How far pixels may lie outside of [0, 1] before that is remarked on."""
NARROW = 0.02
"""From the least pixel to the greatest; less is remarked on too."""


def pixel_range(network: Network, normalise: Any) -> tuple[Tensor, Tensor]:
    """What pixels of 0 and 1 are to the network; without a rule, the extremes of each channel or feature."""
    shape = network.shape
    if normalise is None:
        low, high = extent(network, 0.0)
        if len(shape) > 1:
            low, high = (
                end.reshape(shape[0], -1).amin(dim=1) if end is low else end.reshape(shape[0], -1).amax(dim=1)
                for end in (low, high)
            )
            low, high = (end.reshape(-1, *(1 for _ in shape[1:])) for end in (low, high))
        high = torch.where(high > low, high, low + 1)
    elif callable(normalise):
        low, high = _ends_of(normalise, network)
    else:
        mean, std = _mean_and_std(normalise, shape)
        low, high = -mean / std, (1 - mean) / std
    return low.to(network.device, network.dtype), high.to(network.device, network.dtype)


def outside_remark(network: Network, low: Tensor, high: Tensor) -> list[str]:
    """A remark on inputs that can hardly be pixels in [0, 1]."""
    ends = [(end.to(low) - low) / (high - low) for end in extent(network, 0.0)]
    least, most = float(torch.minimum(*ends).min()), float(torch.maximum(*ends).max())
    if least >= -OUTSIDE and most <= 1 + OUTSIDE and most - least > NARROW:
        return []
    return [
        f"by normalise, which says what pixels of 0 and 1 are, the pixels go from {least:.2g} to {most:.2g}, which is "
        "seldom so"
    ]


def _ends_of(normalise: Callable[[Tensor], Tensor], network: Network) -> tuple[Tensor, Tensor]:
    """What a function makes of pixels of 0 and of 1, if it is a line between them for each pixel."""
    shape, got = network.shape, f"{normalise!r}"
    try:
        pixels = torch.tensor([0.0, 1.0, 0.5], dtype=network.dtype, device=network.device)
        with torch.no_grad():
            ends = normalise(pixels.reshape(-1, *(1 for _ in shape)).expand(-1, *shape).clone())
        low, high, middle = ends  # which a tensor of another length is not
    except Exception as error:
        raise InputError("normalise", f"take pixels of shape (n, {', '.join(map(str, shape))})", f"{error}") from error
    straight = low.shape == shape and torch.allclose(middle, (low + high) / 2, rtol=1e-3, atol=1e-4)
    if not straight or not bool((torch.isfinite(high - low) & (high != low)).all()):
        raise InputError("normalise", "scale and shift each pixel by itself", got)
    return low, high


def _mean_and_std(normalise: Any, shape: Shape) -> tuple[Tensor, Tensor]:
    """A number for each channel of both, from numbers, sequences or arrays of any shape."""
    try:
        mean, std = (torch.as_tensor(values).float().reshape(-1, *(1 for _ in shape[1:])) for values in normalise)
    except (TypeError, ValueError, RuntimeError):
        got = f"{type(normalise).__name__} {normalise!r}"
        raise InputError("normalise", "be a function or (mean, std)", got) from None
    sizes = {len(mean), len(std)}
    if not sizes <= {1, shape[0]} or not bool(torch.isfinite(mean).all() & torch.isfinite(std).all() & (std > 0).all()):
        raise InputError("normalise", f"have a mean and a positive std for {shape[0]} channels", repr(normalise))
    return mean, std
