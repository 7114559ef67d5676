"""Compositions of input maps, and the pixel range of a network's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup.adaptation.input_maps import (
    CONTAINS,
    FAMILIES,
    MAP_TYPES,
    ChannelAffine,
    ChannelGamma,
    InputMap,
    LowRank,
    Offset,
    Shape,
)
from trueup.clamping.network import Network, extent

Normalise: TypeAlias = Callable[[Tensor], Tensor] | tuple[Sequence[float], Sequence[float]]
"""Maps pixels in [0, 1] to the network's inputs: a function, or (mean, std) of each channel."""
MAX_OUTSIDE = 0.25
"""Largest distance of pixels from [0, 1] without a note."""
MIN_RANGE = 0.02
"""Smallest range of the pixels without a note."""
PROBE_SIDE = 7
"""Largest side of the random images that translate coordinates; it exceeds all kernels."""


class Composition(InputMap):
    """Several maps applied in turn; their coordinates are concatenated.

    >>> from trueup.adaptation.input_maps import Gamma
    >>> both = Composition([Gamma((3, 4, 4), torch.ones(1)), Offset((3, 4, 4))])
    >>> both.name, len(both.theta), both.words()
    ('gamma + offset', 4, ['gamma 1.65'])
    """

    def __init__(self, maps: Sequence[InputMap]) -> None:
        nn.Module.__init__(self)
        names = list(MAP_TYPES)
        ordered: list[InputMap] = sorted(maps, key=lambda part: names.index(type(part).name))
        self.maps = nn.ModuleList(ordered)
        self.shape = maps[0].shape if maps else ()

    @property
    def parts(self) -> list[InputMap]:
        """The maps in order of application."""
        return list(self.maps)  # type: ignore[arg-type]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Names of the maps."""
        return " + ".join(part.name for part in self.parts) or "identity"

    @property
    def title(self) -> str:  # type: ignore[override]
        """Titles of the maps."""
        return " + ".join(part.label() for part in self.parts) or "temperature alone"

    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """All coordinates, (r,)."""
        return torch.cat([part.theta for part in self.parts]) if len(self.maps) else torch.zeros(0)

    @property
    def sizes(self) -> list[int]:
        """Coordinates of each map."""
        return [len(part.theta) for part in self.parts]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Apply all maps at the given coordinates."""
        for part, piece in zip(self.parts, torch.split(theta, self.sizes), strict=True):
            x = part.apply_map(piece, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        for part in self.parts:
            x = part(x)
        return x

    def with_theta(self, theta: Tensor) -> Composition:
        """Return the same maps at other coordinates."""
        pieces = torch.split(theta, self.sizes)
        return Composition([part.with_theta(piece) for part, piece in zip(self.parts, pieces, strict=True)])

    def extend(self, family: str, shape: Shape) -> Composition:
        """Add one family at the identity, and replace the maps that it contains.

        A colour matrix contains affine maps, and a kernel contains both. The richer map starts at the poorer one.

        >>> start = Composition([ChannelAffine((3, 4, 4), torch.tensor([1.0, 0, 0, 0, 0, 0]))])
        >>> start.extend("colour", (3, 4, 4)).words()
        ['red gain 1.35']
        """
        new, names = FAMILIES[family](shape), list(MAP_TYPES)
        inside: list[InputMap] = []
        for part in reversed([part for part in self.parts if names.index(part.name) < names.index(family)]):
            if part.name not in CONTAINS.get(family, ()):
                break  # earlier maps do not commute with this one
            inside.insert(0, part)
        kept = [part for part in self.parts if part not in inside]
        if inside:
            new = new.with_theta(_absorb(new, inside))
        return Composition([*kept, new])

    def words(self) -> list[str]:
        """Describe all maps."""
        return [phrase for part in self.parts for phrase in part.words()]


class PixelSpace(nn.Module):
    """A map of pixels for a network with another input range: low + w·M((x − low)/w), w = high − low.

    `low` and `high` are the network's inputs for pixels of 0 and 1; they broadcast to one input.

    >>> PixelSpace(Offset((1, 1, 1), torch.ones(1)), torch.tensor(-1.0), torch.tensor(1.0))(torch.zeros(1, 1, 1, 1))
    tensor([[[[0.2000]]]])
    """

    low: Tensor
    high: Tensor

    def __init__(self, inner: InputMap, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …) of the network."""
        x = x if x.is_floating_point() else x.to(self.low.dtype)
        mapped = self._around(x, self.inner)
        # A colour matrix gives channels-last tensors, and networks that call `view` need contiguous ones.
        return mapped.contiguous() if x.is_contiguous() else mapped

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Map inputs at coordinates through which gradients may flow."""
        return self._around(x, lambda pixels: self.inner.apply_map(theta, pixels))

    def _around(self, x: Tensor, change: Any) -> Tensor:
        low, width = self.low.to(x.dtype), (self.high - self.low).to(x.dtype)
        return change((x - low) / width) * width + low


def _absorb(new: InputMap, inside: Sequence[InputMap]) -> Tensor:
    """Return the coordinates at which a richer family equals these maps in turn."""
    if isinstance(new, ChannelGamma):
        return inside[0].theta.expand(len(new.theta)).clone()
    channels, theta = new.shape[0], new.theta.clone()
    if isinstance(new, LowRank | ChannelAffine):  # they contain only offsets, and may have many coordinates
        theta[-channels:] = inside[0].theta * (Offset.scale / new.offset_scale)
        return theta
    # The other families are linear in their coordinates, so outputs for small random inputs determine them.
    shape = channels, *(min(side, PROBE_SIDE) for side in new.shape[1:])
    x = torch.rand(channels + 1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = Composition([type(part)(shape, part.theta.double()) for part in inside])(x) - x
    units = torch.eye(len(theta), dtype=x.dtype)
    slopes = torch.vmap(lambda t: type(new)(shape).apply_map(t, x) - x)(units).reshape(len(theta), -1).T
    return torch.linalg.lstsq(slopes, target.reshape(-1, 1)).solution[:, 0].to(theta)


def pixel_range(network: Network, normalise: Any) -> tuple[Tensor, Tensor]:
    """Return the network's inputs for pixels of 0 and 1; without `normalise`, the extremes of each channel."""
    shape = network.shape
    if normalise is None and network.has_bytes:
        low, high = torch.zeros(1), torch.full((1,), 255.0)
    elif normalise is None:
        low, high = extent(network, 0.0)
        if len(shape) > 1:
            axes = tuple(range(1, len(shape)))
            low, high = low.amin(dim=axes, keepdim=True), high.amax(dim=axes, keepdim=True)
        high = torch.where(high > low, high, low + 1)
    elif callable(normalise):
        low, high = _ends_of(normalise, network)
    else:
        mean, std = _mean_and_std(normalise, shape)
        low, high = -mean / std, (1 - mean) / std
    return low.to(network.device, network.dtype), high.to(network.device, network.dtype)


def pixel_range_notes(network: Network, low: Tensor, high: Tensor) -> list[str]:
    """Return a note on inputs that are hardly pixels in [0, 1]."""
    ends = [(end.to(low) - low) / (high - low) for end in extent(network, 0.0)]
    least, most = float(torch.minimum(*ends).min()), float(torch.maximum(*ends).max())
    if least >= -MAX_OUTSIDE and most <= 1 + MAX_OUTSIDE and most - least > MIN_RANGE:
        return []
    return [
        f"with this normalise the pixels range from {least:.2g} to {most:.2g}, which is unusual: pixels should lie in "
        "[0, 1]"
    ]


def _ends_of(normalise: Callable[[Tensor], Tensor], network: Network) -> tuple[Tensor, Tensor]:
    """Return a function's values at pixels of 0 and 1; it must be linear in between for each pixel."""
    shape, got = network.shape, f"{normalise!r}"
    try:
        pixels = torch.tensor([0.0, 1.0, 0.5], dtype=network.dtype, device=network.device)
        with torch.no_grad():
            ends = normalise(pixels.reshape(-1, *(1 for _ in shape)).expand(-1, *shape).clone())
        low, high, middle = ends  # a tensor of another length raises
    except Exception as error:
        raise InputError("normalise", f"take pixels of shape (n, {', '.join(map(str, shape))})", f"{error}") from error
    straight = low.shape == shape and torch.allclose(middle, (low + high) / 2, rtol=1e-3, atol=1e-4)
    if not straight or not bool((torch.isfinite(high - low) & (high != low)).all()):
        raise InputError("normalise", "scale and shift each pixel by itself", got)
    return low, high


def _mean_and_std(normalise: Any, shape: Shape) -> tuple[Tensor, Tensor]:
    """Parse mean and std per channel, from numbers, sequences or arrays of any shape."""
    try:
        mean, std = (torch.as_tensor(values).float().reshape(-1, *(1 for _ in shape[1:])) for values in normalise)
    except (TypeError, ValueError, RuntimeError):
        got = f"{type(normalise).__name__} {normalise!r}"
        raise InputError("normalise", "be a function or (mean, std)", got) from None
    sizes = {len(mean), len(std)}
    if not sizes <= {1, shape[0]} or not bool(torch.isfinite(mean).all() & torch.isfinite(std).all() & (std > 0).all()):
        raise InputError("normalise", f"have a mean and a positive std for {shape[0]} channels", repr(normalise))
    return mean, std
