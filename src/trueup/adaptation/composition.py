"""Input maps one after the other, and the range of pixels before a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup.adaptation import input_maps
from trueup.adaptation.input_maps import CONTAINS, FAMILIES, InputMap, Kernel, Matrix, Offset, Shape
from trueup.clamping.network import Network, extent

Normalise: TypeAlias = Callable[[Tensor], Tensor] | tuple[Sequence[float], Sequence[float]]
"""From pixels in [0, 1] to the network's inputs: a function, or (mean, std) of each channel."""
MAX_OUTSIDE = 0.25
"""How far pixels may lie outside of [0, 1] before that is remarked on."""
MIN_RANGE = 0.02
"""From the least pixel to the greatest; less is remarked on too."""


class Composition(InputMap):
    """Several maps one after the other, their coordinates side by side.

    >>> from trueup.adaptation.input_maps import Gamma
    >>> both = Composition([Gamma((3, 4, 4), torch.ones(1)), Offset((3, 4, 4))])
    >>> both.name, len(both.theta), both.words()
    ('gamma + offset', 4, ['gamma 1.65'])
    """

    def __init__(self, maps: Sequence[InputMap]) -> None:
        nn.Module.__init__(self)
        names = list(FAMILIES)
        ordered: list[InputMap] = sorted(maps, key=lambda part: names.index(type(part).name))
        self.maps = nn.ModuleList(ordered)
        self.shape = maps[0].shape if maps else ()

    @property
    def parts(self) -> list[InputMap]:
        """The maps, in their order."""
        return list(self.maps)  # type: ignore[arg-type]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of all of them."""
        return " + ".join(part.name for part in self.parts) or "identity"

    @property
    def title(self) -> str:  # type: ignore[override]
        """Of all of them, in words."""
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
        """Map by the coordinates of all."""
        for part, own in zip(self.parts, torch.split(theta, self.sizes), strict=True):
            x = part.apply_map(own, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        for part in self.parts:
            x = part(x)
        return x

    def with_theta(self, theta: Tensor) -> Composition:
        """The same maps at other coordinates."""
        pieces = torch.split(theta, self.sizes)
        return Composition([part.with_theta(own) for part, own in zip(self.parts, pieces, strict=True)])

    def extend(self, family: str, shape: Shape) -> Composition:
        """This composition with one more family at the identity; families that it contains go over into it.

        An affine map is a colour matrix, and both are kernels: the richer map starts where the poorer one was.

        >>> start = Composition([input_maps.ChannelAffine((3, 4, 4), torch.tensor([1.0, 0, 0, 0, 0, 0]))])
        >>> start.extend("colour", (3, 4, 4)).words()
        ['red gain 1.35']
        """
        new, names = FAMILIES[family](shape), list(FAMILIES)
        inside: list[InputMap] = []
        for part in reversed([part for part in self.parts if names.index(part.name) < names.index(family)]):
            if part.name not in CONTAINS.get(family, ()):
                break  # what lies before it cannot be moved past it
            inside.insert(0, part)
        kept = [part for part in self.parts if part not in inside]
        if inside:
            new = new.with_theta(_absorb(new, inside))
        return Composition([*kept, new])

    def words(self) -> list[str]:
        """What all of them do."""
        return [phrase for part in self.parts for phrase in part.words()]


class PixelSpace(nn.Module):
    """A map of pixels before a network that takes them in another range: low + w·M((x − low)/w), w = high − low.

    `low` and `high` are what 0 and 1 become on the way into the network, and broadcast to one input.

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
        mapped = self._around(x, self.inner)
        # A colour matrix leaves its output channels last, which networks that call `view` do not take.
        return mapped.contiguous() if x.is_contiguous() else mapped

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """The same by coordinates that gradients may flow to."""
        return self._around(x, lambda pixels: self.inner.apply_map(theta, pixels))

    def _around(self, x: Tensor, change: Any) -> Tensor:
        low, width = self.low.to(x.dtype), (self.high - self.low).to(x.dtype)
        return change((x - low) / width) * width + low


def _absorb(new: InputMap, inside: Sequence[InputMap]) -> Tensor:
    """Where a richer family equals these maps one after the other."""
    if isinstance(new, input_maps.ChannelGamma):
        return inside[0].theta.expand(len(new.theta)).clone()
    channels, theta = new.shape[0], new.theta.clone()
    if isinstance(new, input_maps.SmoothOffset):
        theta.view(channels, -1)[:, 0] = inside[0].theta * (Offset.scale / new.scale)
        return theta
    if isinstance(new, input_maps.LowRank):
        theta[-channels:] = inside[0].theta * (Offset.scale / new.offset_scale)
        return theta
    offset, side = torch.zeros(channels), new.side if isinstance(new, Kernel) else 1
    identity = torch.zeros(channels, channels, side, side)
    identity[:, :, side // 2, side // 2] = torch.eye(channels)
    whole = identity.clone()
    for part in inside:
        edge = (side - getattr(part, "side", side)) // 2
        window = whole[:, :, edge : side - edge, edge : side - edge]
        if isinstance(part, Offset):
            offset = offset + part.scale * part.theta
        elif isinstance(part, input_maps.ChannelAffine | Matrix):
            matrix, part_offset = part.matrix(part.theta)
            whole = torch.einsum("ij,jkab->ikab", matrix, whole)
            offset = matrix @ offset + part_offset
        elif isinstance(part, input_maps.GreyKernel):
            grey = part.scale * part.theta.reshape(part.side, part.side)
            window += whole[:, :, side // 2, side // 2, None, None].clone() * grey
            offset = offset * (1 + grey.sum())
        elif isinstance(part, Kernel):
            kernel, part_offset = part.kernel(part.theta)
            window += kernel
            offset = offset + part_offset
    if isinstance(new, Kernel):
        return new.theta_of(whole - identity, offset)
    if isinstance(new, Matrix):
        return new.theta_of(whole[:, :, 0, 0], offset)
    return torch.cat([torch.zeros(channels), offset / input_maps.ChannelAffine.offset_scale])


def pixel_range(network: Network, normalise: Any) -> tuple[Tensor, Tensor]:
    """What pixels of 0 and 1 are to the network; without a rule, the extremes of each channel or feature."""
    shape = network.shape
    if normalise is None:
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


def outside_remark(network: Network, low: Tensor, high: Tensor) -> list[str]:
    """A remark on inputs that can hardly be pixels in [0, 1]."""
    ends = [(end.to(low) - low) / (high - low) for end in extent(network, 0.0)]
    least, most = float(torch.minimum(*ends).min()), float(torch.maximum(*ends).max())
    if least >= -MAX_OUTSIDE and most <= 1 + MAX_OUTSIDE and most - least > MIN_RANGE:
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
