"""Families of input maps: small changes of a network's input, the identity at θ = 0, that say what they do.

Coordinates are scaled so that each has a standard normal prior: a family states its scales, the change that is one
standard deviation. Image maps act on pixels in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.errors import InputError

Shape = tuple[int, ...]
"""Of one input: (C, H, W) for images, (d,) for features and embeddings."""
COLOURS = ("red", "green", "blue")
MAX_CHANNELS = 16
"""Channels, or features, of which a full matrix is still a small family."""
VISIBLE = 0.01
"""Changes below it are not put into words."""
MAX_WORDS = 6
"""Gains or offsets that are named one by one."""


class InputMap(nn.Module):
    """A family of maps with parameters θ (r,), the identity at zero.

    >>> ChannelAffine((3, 8, 8), torch.tensor([-0.66, 0, 0, 0, 0, 0.5])).words()
    ['red gain 0.82', 'blue offset +0.05']
    """

    name: ClassVar[str]
    title: ClassVar[str]
    cause: ClassVar[str]
    """What is wrong with inputs that the family repairs."""
    grey_cause: ClassVar[str] = ""
    """The same of images without colours, where it is called otherwise."""
    feature_title: ClassVar[str] = ""
    """What the family is called where inputs are no images, if otherwise."""
    any_input: ClassVar[bool] = False
    """Whether the family is for inputs of any shape, not for images alone."""
    min_side: ClassVar[int] = 1
    n_channels: ClassVar[tuple[float, float]] = (1, math.inf)
    """Fewest and most channels."""
    per_map: ClassVar[int] = 0
    per_channel: ClassVar[int] = 0
    """Coordinates of the whole map, and of each channel."""
    theta: Tensor

    def __init__(self, shape: Sequence[int], theta: Tensor | None = None) -> None:
        super().__init__()
        self.shape: Shape = tuple(shape)
        if not self.suits(self.shape):
            raise InputError("shape", f"be one that {self.title} suits", f"{self.shape}")
        r = self.size(self.shape)
        theta = torch.zeros(r) if theta is None else theta.detach()
        if theta.shape != (r,):
            raise InputError("theta", f"have shape ({r},) for inputs {self.shape}", f"{tuple(theta.shape)}")
        self.register_buffer("theta", theta)

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Whether inputs of a shape can be mapped so."""
        least, most = cls.n_channels
        kind = len(shape) == 3 or (cls.any_input and len(shape) >= 1)
        return kind and least <= shape[0] <= most and min(shape[1:], default=1) >= cls.min_side

    @classmethod
    def size(cls, shape: Shape) -> int:
        """How many coordinates there are."""
        return cls.per_map + cls.per_channel * shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Map inputs (n, …) by coordinates that gradients may flow to."""
        raise NotImplementedError

    def words(self) -> list[str]:
        """What the map does, in short phrases; nothing where nobody could see it."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        return self.apply_map(self.theta.to(x.dtype), x)

    def with_theta(self, theta: Tensor) -> InputMap:
        """The same family at other coordinates."""
        return type(self)(self.shape, theta)

    def extra_repr(self) -> str:
        """In words."""
        return ", ".join(self.words())

    def diagnosis(self) -> str:
        """What is wrong with inputs that the map repairs; of what is no image, what it does."""
        if len(self.shape) != 3:
            return self.label()
        return self.grey_cause or self.cause if self.shape[0] == 1 else self.cause

    def label(self) -> str:
        """The family's title, in the words that go with its inputs."""
        return self.feature_title or self.title if len(self.shape) == 1 else self.title


def broadcast_channels(values: Tensor, shape: Shape) -> Tensor:
    """Values of the channels, to go with one input."""
    return values.reshape(-1, *(1 for _ in shape[1:]))


def channel_names(shape: Shape) -> list[str]:
    """What the channels, or features, are called."""
    if len(shape) == 1:
        return [f"feature {i}" for i in range(shape[0])]
    if shape[0] == 1:
        return [""]
    return list(COLOURS) if shape[0] == 3 and len(shape) == 3 else [f"channel {i}" for i in range(shape[0])]


def channel_words(kind: str, values: Tensor, shape: Shape, neutral: float = 0.0) -> list[str]:
    """Phrases of the gains or offsets of channels that can be seen, of many the largest.

    >>> channel_words("offset", torch.tensor([0.02, 0, 0.3, -0.2, 0.1, 0.1, 0.05, 0.2, 0.4]), (9,))[-2:]
    ['feature 8 offset +0.40', '2 smaller offsets']
    """
    sizes, sign = (values - neutral).abs(), "" if neutral else "+"
    by_size = sizes.argsort(descending=True, stable=True)
    visible = [i for i in by_size.tolist() if float(sizes[i]) >= VISIBLE]
    names, rest = channel_names(shape), len(visible) - MAX_WORDS
    more = [f"{rest} smaller {kind}{'s' if rest > 1 else ''}"] if rest > 0 else []
    return [f"{names[i]} {kind} {float(values[i]):{sign}.2f}".strip() for i in sorted(visible[:MAX_WORDS])] + more


def matrix_words(matrix: Tensor, offset: Tensor, shape: Shape) -> list[str]:
    """Phrases of gains, of the largest share of one channel that goes into another, and of offsets."""
    mixed = matrix.detach().clone().fill_diagonal_(0)
    to, of = divmod(int(mixed.abs().argmax()), len(mixed))
    share, names = float(mixed[to, of]), channel_names(shape)
    mixture = [f"{share:+.2f} of {names[of]} into {names[to]}"] if abs(share) >= VISIBLE else []
    gains = channel_words("gain", matrix.diagonal(), shape, 1.0)
    return gains + mixture + channel_words("offset", offset, shape)


_DARK = 0.002  # below it the curve of gamma is a line, since its slope at zero may be infinite


class _Constants(InputMap):
    """Add a constant to each channel, row, column or pixel."""

    scale: ClassVar[float]
    axes: ClassVar[slice]
    """Axes of an input along which the constants differ."""

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One for each position on the axes."""
        return math.prod(shape[cls.axes])

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add."""
        sizes = [1] * len(self.shape)
        sizes[self.axes] = self.shape[self.axes]
        return x + self.scale * theta.reshape(sizes)

    def words(self) -> list[str]:
        """The largest."""
        largest, unit = self.scale * float(self.theta.abs().max()), self.name.removesuffix("_offset")
        if len(self.shape) != 3:
            unit = "feature" if len(self.shape) == 1 else "position"
        return [f"{unit} offsets up to {largest:.2f}"] if largest >= VISIBLE else []


class Offset(_Constants):
    """Add a constant to each channel: x_c + b_c (scale 0.1)."""

    name, title = "offset", "an offset a channel"
    feature_title = "an offset a feature"
    cause, grey_cause = "colour cast", "brightness"
    scale, axes, any_input = 0.1, slice(1), True

    def words(self) -> list[str]:
        """Each channel's offset."""
        return channel_words("offset", self.scale * self.theta, self.shape)


class ChannelAffine(InputMap):
    """Scale each channel and add a constant: e^{a_c} x_c + b_c (scales 0.3 and 0.1)."""

    name, title = "affine", "gain and offset a channel"
    feature_title = "gain and offset a feature"
    cause, grey_cause = "white balance", "brightness and contrast"
    gain_scale, offset_scale = 0.3, 0.1
    any_input, per_channel = True, 2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Scale and add."""
        gain, offset = self._parts(theta)
        return x * broadcast_channels(gain, self.shape) + broadcast_channels(offset, self.shape)

    def words(self) -> list[str]:
        """Each channel's gain and offset."""
        gain, offset = self._parts(self.theta)
        return channel_words("gain", gain, self.shape, 1.0) + channel_words("offset", offset, self.shape)

    def matrix(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Its colour matrix and offset."""
        gain, offset = self._parts(theta)
        return torch.diag(gain), offset

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(self.gain_scale * theta[: self.shape[0]]), self.offset_scale * theta[self.shape[0] :]


class Gamma(InputMap):
    """A tone curve, the same for all channels: x^{exp g} (scale 0.5), a line below 0.002."""

    name, title = "gamma", "gamma"
    cause = "gamma"
    scale = 0.5
    per_map = 1

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Raise to a power."""
        power = torch.exp(self.scale * theta).reshape(-1, 1, 1)
        return x.clamp(min=_DARK) ** power + (x - _DARK).clamp(max=0)

    def words(self) -> list[str]:
        """The exponents."""
        powers = torch.exp(self.scale * self.theta).tolist()
        names = [""] if len(powers) == 1 else channel_names(self.shape)
        return [
            f"{name} gamma {power:.2f}".strip()
            for name, power in zip(names, powers, strict=True)
            if abs(power - 1) >= VISIBLE
        ]


class ChannelGamma(Gamma):
    """A tone curve for each channel: x_c^{exp g_c} (scale 0.5), a line below 0.002."""

    name, title = "channel_gamma", "gamma a channel"
    per_map, per_channel = 0, 1


class Matrix(InputMap):
    """Mix the channels: x + C x + b (scales 0.2 and 0.1)."""

    name, title = "colour", "colour matrix"
    cause = "colours"
    scale, offset_scale = 0.2, 0.1
    any_input, n_channels = True, (2, MAX_CHANNELS)

    @classmethod
    def size(cls, shape: Shape) -> int:
        """A square and a vector."""
        return shape[0] * (shape[0] + 1)

    def label(self) -> str:
        """Colours are of images alone."""
        if len(self.shape) == 3:
            return self.title
        return f"linear map of the {'features' if len(self.shape) == 1 else 'channels'}"

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Mix."""
        matrix, offset = self.matrix(theta)
        axis = x.ndim - len(self.shape)
        mixed = torch.movedim(torch.movedim(x, axis, -1) @ matrix.T, -1, axis)
        return mixed + broadcast_channels(offset, self.shape)

    def matrix(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """I + C, and b."""
        c = self.shape[0]
        eye = torch.eye(c, dtype=theta.dtype, device=theta.device)
        return eye + self.scale * theta[: c * c].reshape(c, c), self.offset_scale * theta[c * c :]

    def theta_of(self, matrix: Tensor, offset: Tensor) -> Tensor:
        """The coordinates of a matrix and an offset."""
        eye = torch.eye(self.shape[0], dtype=matrix.dtype)
        return torch.cat([(matrix - eye).flatten() / self.scale, offset / self.offset_scale])

    def words(self) -> list[str]:
        """Gains, offsets and the largest mixture."""
        return matrix_words(*self.matrix(self.theta), self.shape)


class LowRank(InputMap):
    """A linear map of low rank on top of the features: x + U(V₀ + V)ᵀx + b (scales 0.2, 0.2/√d and 0.1).

    V₀ are two orthonormal directions drawn once for d features, from which the search turns; the identity is at U = 0.
    """

    name, title = "low_rank", "linear map of low rank"
    cause = "mixed features"
    rank, scale, offset_scale = 2, 0.2, 0.1
    per_channel = 2 * rank + 1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """More features than a full matrix is for."""
        return len(shape) == 1 and shape[0] > MAX_CHANNELS

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Project, and add."""
        d = self.shape[0]
        out, turned, offset = torch.split(theta, [self.rank * d, self.rank * d, d])
        start = torch.from_numpy(np.linalg.qr(np.random.default_rng(d).normal(size=(d, self.rank)))[0]).to(theta)
        directions = start + self.scale / math.sqrt(d) * turned.reshape(d, self.rank)
        return x + (x @ directions) @ (self.scale * out.reshape(self.rank, d)) + self.offset_scale * offset

    def words(self) -> list[str]:
        """How large it is, and the largest offsets."""
        out, _, offset = torch.split(self.theta, [self.rank * self.shape[0]] * 2 + [self.shape[0]])
        size = self.scale * float(out.norm())
        mixed = [f"linear map of rank {self.rank}, norm {size:.2f}"] if size >= VISIBLE else []
        return mixed + channel_words("offset", self.offset_scale * offset, self.shape)


FREQUENCIES = 3
"""Cosines along each side of a smooth field."""


class Shrinkage(InputMap):
    """Change detail by its size: x + Σ_l d_l·(a_l + Σ_j c_lj τ_j²/(d_l² + τ_j²)) (scale 0.5), d_l detail of one scale.

    d₁ is what a 3×3 binomial filter takes away, d₂ what one of twice the width takes away of the rest. Detail smaller
    than τ (0.02, 0.06) is mostly noise and can be shrunk while what is larger stays: no linear filter does that.
    Starck, Fadili, Murtagh, "The undecimated wavelet decomposition and its reconstruction" (2007).
    """

    name, title = "shrinkage", "shrinkage of fine detail"
    cause = "noise"
    scale = 0.5
    levels = 2
    thresholds = (0.02, 0.06)
    min_side, per_map = 5, levels * (1 + len(thresholds))

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Change each scale's detail."""
        weights = (self.scale * theta).reshape(self.levels, -1)
        rest = changed = x
        for level in range(self.levels):
            smooth = _binomial(rest, 2**level)
            detail = rest - smooth
            square = detail * detail
            factor = weights[level, 0]
            for j, threshold in enumerate(self.thresholds):
                factor = factor + weights[level, 1 + j] * threshold**2 / (square + threshold**2)
            changed, rest = changed + detail * factor, smooth
        return changed

    def words(self) -> list[str]:
        """What becomes of small and of large detail of the finest scale."""
        small, large = self._factors()
        if max(abs(small - 1), abs(large - 1)) < VISIBLE:
            return []
        return [f"fine detail times {small:.2f} where small, {large:.2f} where large"]

    def diagnosis(self) -> str:
        """Noise where small detail goes and larger detail less so; else it is sharpness that was lost or added."""
        small, large = self._factors()
        return self.cause if small < min(1.0, large) else GreyKernel.cause

    def _factors(self) -> tuple[float, float]:
        """What the finest scale's detail is multiplied by where it is very small, and where it is large."""
        weights = (self.scale * self.theta).reshape(self.levels, -1)[0]
        return 1 + float(weights.sum()), 1 + float(weights[0])


class GreyKernel(InputMap):
    """Convolve each channel with one kernel: x + k ∗ x (scale 0.15), the border repeated."""

    name, title = "grey_kernel", "3×3 kernel for all channels alike"
    cause = "sharpness"
    side, scale = 3, 0.15
    min_side, per_map = side, side**2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Convolve."""
        kernel = (self.scale * theta).reshape(1, 1, self.side, self.side).expand(self.shape[0], 1, -1, -1)
        return x + F.conv2d(_pad(x, self.side // 2), kernel, groups=self.shape[0])

    def words(self) -> list[str]:
        """Whether it sharpens."""
        kernel = self.scale * self.theta.reshape(self.side, self.side)
        return _kernel_words(self.side, 1 + float(kernel[self.side // 2, self.side // 2]), float(kernel.sum()) + 1)


class Kernel(InputMap):
    """Convolve over space and channels: x + K ∗ x + b (scales 0.1), the border repeated."""

    name, title = "kernel", "3×3 kernel"
    cause, grey_cause = "sharpness and colours", "sharpness"
    side, scale, offset_scale = 3, 0.1, 0.1
    min_side, n_channels = side, (1, MAX_CHANNELS // 2)

    @classmethod
    def size(cls, shape: Shape) -> int:
        """A kernel for each pair of channels, and offsets."""
        return shape[0] ** 2 * cls.side**2 + shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Convolve."""
        kernel, offset = self.kernel(theta)
        return x + F.conv2d(_pad(x, self.side // 2), kernel, offset)

    def kernel(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """K (C, C, k, k), and b."""
        c = self.shape[0]
        return (
            self.scale * theta[: -c or None].reshape(c, c, self.side, self.side),
            self.offset_scale * theta[len(theta) - c :],
        )

    def theta_of(self, kernel: Tensor, offset: Tensor) -> Tensor:
        """The coordinates of a kernel and an offset."""
        return torch.cat([kernel.flatten() / self.scale, offset / self.offset_scale])

    def words(self) -> list[str]:
        """Whether it sharpens, and what it does to the colours."""
        kernel, offset = self.kernel(self.theta)
        middle = self.side // 2
        matrix = torch.eye(self.shape[0]) + kernel.sum(dim=(2, 3)).cpu()
        centre = 1 + float(kernel[:, :, middle, middle].diagonal().mean())
        sharpness = _kernel_words(self.side, centre, float(matrix.diagonal().mean()))
        return sharpness + matrix_words(matrix, offset, self.shape)


class WideKernel(Kernel):
    """Convolve with 5×5 kernels over space and channels: x + K ∗ x + b (scales 0.1), the border repeated."""

    name, title = "kernel5", "5×5 kernel"
    side = min_side = 5


class RadialGain(InputMap):
    """A gain that depends on the distance from the centre: x·exp(v₁r² + v₂r⁴) (scale 0.5), r being 1 in the corners."""

    name, title = "radial_gain", "gain from centre to corners"
    cause = "vignetting"
    scale = 0.5
    per_map = 2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Multiply."""
        row, column = (2 * _positions(size, x) - 1 for size in self.shape[1:])
        square = (row[:, None] ** 2 + column[None, :] ** 2) / 2
        return x * torch.exp(self.scale * (theta[0] * square + theta[1] * square**2))

    def words(self) -> list[str]:
        """The gain of the corners."""
        gain = math.exp(self.scale * float(self.theta.sum()))
        return [f"corner gain {gain:.2f}"] if abs(gain - 1) >= VISIBLE else []


class SmoothGain(InputMap):
    """A gain of low spatial frequency a channel: x·exp(Σ_f g_cf B_f) (scale 0.2), B products of cosines."""

    name, title = "smooth_gain", "smooth gain"
    cause = "uneven light"
    scale: ClassVar[float] = 0.2

    @classmethod
    def size(cls, shape: Shape) -> int:
        """A few cosines a channel."""
        return shape[0] * math.prod(min(FREQUENCIES, side) for side in shape[1:])

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Multiply."""
        return x * torch.exp(self._field(theta, x))

    def words(self) -> list[str]:
        """The range of the gain."""
        return _range("gain", torch.exp(self._field(self.theta, self.theta)), 1.0)

    def _field(self, theta: Tensor, like: Tensor) -> Tensor:
        """(C, H, W)."""
        waves = []
        for side in self.shape[1:]:
            positions = _positions(side, like)
            waves.append(torch.stack([torch.cos(math.pi * k * positions) for k in range(min(FREQUENCIES, side))]))
        weights = theta.reshape(self.shape[0], len(waves[0]), len(waves[1]))
        return self.scale * torch.einsum("cab,ah,bw->chw", weights, waves[0], waves[1])


class SmoothOffset(SmoothGain):
    """An offset of low spatial frequency a channel: x + Σ_f o_cf B_f (scale 0.1), B products of cosines."""

    name, title = "smooth_offset", "smooth offset"
    cause = "uneven haze or stray light"
    scale = 0.1

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add."""
        return x + self._field(theta, x)

    def words(self) -> list[str]:
        """The range of the offset."""
        return _range("offset", self._field(self.theta, self.theta), 0.0)


class RowOffset(_Constants):
    """Add a constant to each row of pixels, the same for all channels (scale 0.08): what stripes are made of."""

    name, title = "row_offset", "an offset a row"
    cause = "horizontal stripes"
    scale, axes = 0.08, slice(1, 2)


class ColumnOffset(_Constants):
    """Add a constant to each column of pixels, the same for all channels (scale 0.08)."""

    name, title = "column_offset", "an offset a column"
    cause = "vertical stripes"
    scale, axes = 0.08, slice(2, 3)


class PixelOffset(_Constants):
    """Add a constant to each pixel: x + δ (scale 0.05); with so many numbers the prior does most of the work."""

    name, title = "pixel_offset", "an offset a pixel"
    feature_title = "an offset a feature"
    cause = "a fixed pattern"
    scale, axes, any_input = 0.05, slice(None), True


def _pad(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (by, by, by, by), mode="replicate")


def _binomial(x: Tensor, apart: int) -> Tensor:
    """(1, 2, 1)/4 along both sides, its taps so many pixels apart, the border repeated."""
    x = _pad(x, apart)
    x = (x[..., : -2 * apart, :] + 2 * x[..., apart:-apart, :] + x[..., 2 * apart :, :]) / 4
    return (x[..., : -2 * apart] + 2 * x[..., apart:-apart] + x[..., 2 * apart :]) / 4


def _positions(size: int, like: Tensor) -> Tensor:
    """The middles of so many cells of [0, 1]."""
    return (torch.arange(size, dtype=like.dtype, device=like.device) + 0.5) / size


def _kernel_words(side: int, centre: float, whole: float) -> list[str]:
    if abs(centre - whole) < VISIBLE:
        return []
    kind = "sharpening" if centre > whole else "smoothing"
    return [f"{kind} {side}×{side} kernel (centre {centre:.2f}, sum {whole:.2f})"]


def _range(what: str, values: Tensor, neutral: float) -> list[str]:
    low, high = float(values.min()), float(values.max())
    sign = "+" if neutral == 0 else ""
    seen = max(abs(low - neutral), abs(high - neutral)) >= VISIBLE
    return [f"{what} from {low:{sign}.2f} to {high:{sign}.2f} across the image"] if seen else []


_POINTWISE = (Gamma, ChannelGamma, Offset, ChannelAffine, Matrix, LowRank)
_SPATIAL = (GreyKernel, Kernel, WideKernel, RadialGain, SmoothGain, SmoothOffset, RowOffset, ColumnOffset, PixelOffset)
FAMILIES: Mapping[str, type[InputMap]] = {family.name: family for family in (Shrinkage, *_POINTWISE, *_SPATIAL)}
"""Every family by name, in the order in which a composition applies them."""

NEEDS_PIXELS = ("gamma", "channel_gamma")
"""Families that make sense only where the range of the pixels is known."""
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
