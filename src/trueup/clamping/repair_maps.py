"""Every family of input maps by name, their compositions, and pixels before a network that takes another range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trueup.clamping.colour_maps import ChannelAffine, ChannelGamma, Gamma, LowRank, Matrix, Offset
from trueup.clamping.input_map import InputMap, Shape
from trueup.clamping.spatial_maps import (
    ColumnOffset,
    GreyKernel,
    Kernel,
    PixelOffset,
    RadialGain,
    RowOffset,
    Shrinkage,
    SmoothGain,
    SmoothOffset,
    WideKernel,
)

FAMILIES: Mapping[str, type[InputMap]] = {
    family.name: family
    for family in (
        Shrinkage,
        Gamma,
        ChannelGamma,
        Offset,
        ChannelAffine,
        Matrix,
        LowRank,
        GreyKernel,
        Kernel,
        WideKernel,
        RadialGain,
        SmoothGain,
        SmoothOffset,
        RowOffset,
        ColumnOffset,
        PixelOffset,
    )
}
"""Every family by name, in the order in which a composition applies them."""

NEEDS_PIXELS = ("gamma", "channel_gamma")
"""Families that make sense only where the range of the pixels is known."""


class Composition(InputMap):
    """Several maps one after the other, their coordinates side by side.

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

        >>> start = Composition([ChannelAffine((3, 4, 4), torch.tensor([1.0, 0, 0, 0, 0, 0]))])
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

    def config(self) -> dict[str, Any]:
        """Each map's constructor's arguments, by name."""
        return {part.name: part.config() for part in self.parts}


CONTAINS: Mapping[str, tuple[str, ...]] = {
    "channel_gamma": ("gamma",),
    "affine": ("offset",),
    "colour": ("offset", "affine"),
    "low_rank": ("offset",),
    "kernel": ("offset", "affine", "colour", "grey_kernel"),
    "kernel5": ("offset", "affine", "colour", "grey_kernel", "kernel"),
    "smooth_offset": ("offset",),
}
"""Families of which another one is a special case."""


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

    def words(self) -> list[str]:
        """What the map does to pixels."""
        return self.inner.words()

    def _around(self, x: Tensor, change: Any) -> Tensor:
        low, width = self.low.to(x.dtype), (self.high - self.low).to(x.dtype)
        return change((x - low) / width) * width + low


def _absorb(new: InputMap, inside: Sequence[InputMap]) -> Tensor:
    """Where a richer family equals these maps one after the other."""
    if isinstance(new, ChannelGamma):
        return inside[0].theta.expand(len(new.theta)).clone()
    if isinstance(new, SmoothOffset):
        theta = torch.zeros_like(new.theta).reshape(new.shape[0], -1)
        theta[:, 0] = inside[0].theta * (Offset.scale / new.scale)
        return theta.flatten()
    if isinstance(new, LowRank):
        kept = new.theta.clone()
        kept[-new.shape[0] :] = inside[0].theta * (Offset.scale / new.offset_scale)
        return kept
    channels = new.shape[0]
    matrix, offset = torch.eye(channels), torch.zeros(channels)
    side = new.side if isinstance(new, Kernel) else 1
    whole = torch.zeros(channels, channels, side, side)
    whole[:, :, side // 2, side // 2] = matrix
    for part in inside:
        if isinstance(part, Offset):
            offset = offset + part.scale * part.theta
        elif isinstance(part, ChannelAffine | Matrix):
            own, own_offset = part.matrix(part.theta)
            whole = torch.einsum("ij,jkab->ikab", own, whole)
            offset = own @ offset + own_offset
        elif isinstance(part, GreyKernel):
            grey = part.scale * part.theta.reshape(part.side, part.side)
            centre = whole[:, :, side // 2, side // 2].clone()
            edge = (side - part.side) // 2
            whole[:, :, edge : edge + part.side, edge : edge + part.side] += centre[:, :, None, None] * grey
            offset = offset * (1 + grey.sum())
        elif isinstance(part, Kernel):
            kernel, own_offset = part.kernel(part.theta)
            edge = (side - part.side) // 2
            whole[:, :, edge : edge + part.side, edge : edge + part.side] += kernel
            offset = offset + own_offset
    if isinstance(new, ChannelAffine):
        return torch.cat([torch.zeros(channels), offset / new.offset_scale])
    if isinstance(new, Matrix):
        return new.theta_of(whole[:, :, 0, 0], offset)
    assert isinstance(new, Kernel)
    whole[:, :, side // 2, side // 2] -= matrix
    return new.theta_of(whole, offset)
