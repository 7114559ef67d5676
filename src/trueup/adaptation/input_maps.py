"""Families of input maps: small changes of a network's input with few parameters θ; θ = 0 is the identity.

Every coordinate has a standard normal prior. A family's scales are the changes at one standard deviation. Image maps
act on pixels in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.errors import InputError

Shape = tuple[int, ...]
"""Shape of one input: (C, H, W) for images, (d,) for features and embeddings."""
COLOURS = ("red", "green", "blue")
MAX_CHANNELS = 16
"""Largest number of channels or features for a full matrix."""
VISIBLE = 0.01
"""Smallest change that is described."""
MIN_IMAGE_SIDE = 3
"""Smallest side of an image; smaller inputs (C, H, W) are features."""
MAX_WORDS = 6
"""Largest number of gains or offsets that are listed one by one."""


class InputMap(nn.Module):
    """A family of maps with parameters θ (r,), the identity at zero.

    >>> ChannelAffine((3, 8, 8), torch.tensor([-0.66, 0, 0, 0, 0, 0.5])).words()
    ['red gain 0.82', 'blue offset +0.05']
    """

    name: ClassVar[str]
    title: ClassVar[str]
    cause: ClassVar[str]
    """The fault of the inputs that the family corrects."""
    grey_cause: ClassVar[str] = ""
    """Name of the fault for images without colours, if different."""
    feature_title: ClassVar[str] = ""
    """Title for inputs that are no images, if different."""
    any_input: ClassVar[bool] = False
    """Whether the family applies to inputs of any shape, not only to images."""
    min_side: ClassVar[int] = 1
    n_channels: ClassVar[tuple[float, float]] = (1, math.inf)
    """Smallest and largest number of channels."""
    per_map: ClassVar[int] = 0
    """Number of coordinates of the map, besides those of each channel."""
    per_channel: ClassVar[int] = 0
    """Number of coordinates of each channel."""
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
        """Check whether the family applies to inputs of a shape."""
        least, most = cls.n_channels
        has_positions = len(shape) == 3 and math.prod(shape[1:]) > 1
        if not has_positions and not (cls.any_input and len(shape) >= 1):
            return False
        return least <= shape[0] <= most and min(shape[1:], default=1) >= cls.min_side

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Return the number of coordinates."""
        return cls.per_map + cls.per_channel * shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Map inputs (n, …) at coordinates through which gradients may flow."""
        raise NotImplementedError

    def words(self) -> list[str]:
        """Describe the visible changes of the map in short phrases."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        return self.apply_map(self.theta.to(x.dtype), x)

    def with_theta(self, theta: Tensor) -> InputMap:
        """Return the same family at other coordinates."""
        return type(self)(self.shape, theta)

    @property
    def stored(self) -> Tensor:
        """Numbers of the map in a file."""
        return self.theta

    def extra_repr(self) -> str:
        """Describe the map."""
        return ", ".join(self.words())

    def diagnosis(self) -> str:
        """Name the fault that the map corrects; for inputs that are no images, name the map."""
        if not is_image(self.shape):
            return self.label()
        return self.grey_cause or self.cause if self.shape[0] == 1 else self.cause

    def label(self) -> str:
        """Return the family's title for its kind of inputs."""
        return self.feature_title or self.title if len(self.shape) == 1 else self.title


def is_image(shape: Shape) -> bool:
    """Check whether inputs of a shape are images; features may also come as (C, 1, 1)."""
    return len(shape) == 3 and min(shape[1:]) >= MIN_IMAGE_SIDE


def broadcast_channels(values: Tensor, shape: Shape) -> Tensor:
    """Reshape values of the channels so that they broadcast to one input."""
    return values.reshape(-1, *(1 for _ in shape[1:]))


def channel_names(shape: Shape) -> list[str]:
    """Name the channels or features."""
    if len(shape) == 1:
        return [f"feature {i}" for i in range(shape[0])]
    if shape[0] == 1:
        return [""]
    return list(COLOURS) if shape[0] == 3 and len(shape) == 3 else [f"channel {i}" for i in range(shape[0])]


def channel_words(kind: str, values: Tensor, shape: Shape, neutral: float = 0.0) -> list[str]:
    """Describe the visible gains or offsets of channels, at most `MAX_WORDS` one by one.

    >>> channel_words("offset", torch.tensor([0.02, 0, 0.3, -0.2, 0.1, 0.1, 0.05, 0.2, 0.4]), (9,))[-2:]
    ['feature 8 offset +0.40', '2 smaller offsets']
    """
    sizes, sign = (values - neutral).abs(), "" if neutral else "+"
    by_size = sizes.argsort(descending=True, stable=True)
    visible = [i for i in by_size.tolist() if float(sizes[i]) >= VISIBLE]
    names, n_smaller = channel_names(shape), len(visible) - MAX_WORDS
    phrases = [f"{names[i]} {kind} {float(values[i]):{sign}.2f}".strip() for i in sorted(visible[:MAX_WORDS])]
    return phrases + ([f"{n_smaller} smaller {kind}{'s' if n_smaller > 1 else ''}"] if n_smaller > 0 else [])


def matrix_words(matrix: Tensor, offset: Tensor, shape: Shape) -> list[str]:
    """Describe gains, the largest mixture of two channels, and offsets."""
    mixed = matrix.detach().clone().fill_diagonal_(0)
    to, of = divmod(int(mixed.abs().argmax()), len(mixed))
    share, names = float(mixed[to, of]), channel_names(shape)
    mixture = [f"{share:+.2f} of {names[of]} into {names[to]}"] if abs(share) >= VISIBLE else []
    gains = channel_words("gain", matrix.diagonal(), shape, 1.0)
    return gains + mixture + channel_words("offset", offset, shape)


MIN_GEOMETRY_SIDE = 16
"""Smallest side of an image whose positions are changed; smaller images have too few pixels to interpolate."""
_DARK = 0.002  # below it the gamma curve is a line, since its slope at zero may be infinite


class _Constants(InputMap):
    """Add a constant to each channel, row, column or pixel."""

    scale: ClassVar[float]
    axes: ClassVar[slice]
    """Axes of an input along which the constants differ."""

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Return the number of positions on the axes."""
        return math.prod(shape[cls.axes])

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add the constants."""
        sizes = [1] * len(self.shape)
        sizes[self.axes] = self.shape[self.axes]
        return x + self.scale * theta.reshape(sizes)

    def words(self) -> list[str]:
        """Describe the largest constant."""
        largest, unit = self.scale * float(self.theta.abs().max()), self.name.removesuffix("_offset")
        if len(self.shape) != 3:
            unit = "feature" if len(self.shape) == 1 else "position"
        return [f"{unit} offsets up to {largest:.2f}"] if largest >= VISIBLE else []


class Offset(_Constants):
    """Add a constant to each channel: x_c + b_c (scale 0.1)."""

    name, title = "offset", "offset per channel"
    feature_title = "offset per feature"
    cause, grey_cause = "colour cast", "brightness"
    scale, axes, any_input = 0.1, slice(1), True

    def words(self) -> list[str]:
        """Describe each channel's offset."""
        return channel_words("offset", self.scale * self.theta, self.shape)


class ChannelAffine(InputMap):
    """Scale each channel and add a constant: e^{a_c} x_c + b_c (scales 0.3 and 0.1)."""

    name, title = "affine", "gain and offset per channel"
    feature_title = "gain and offset per feature"
    cause, grey_cause = "white balance", "brightness and contrast"
    gain_scale, offset_scale = 0.3, 0.1
    any_input, per_channel = True, 2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Scale and add."""
        gain, offset = self._parts(theta)
        return x * broadcast_channels(gain, self.shape) + broadcast_channels(offset, self.shape)

    def words(self) -> list[str]:
        """Describe each channel's gain and offset."""
        gain, offset = self._parts(self.theta)
        return channel_words("gain", gain, self.shape, 1.0) + channel_words("offset", offset, self.shape)

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
        """Describe the exponents."""
        powers = torch.exp(self.scale * self.theta).tolist()
        names = [""] if len(powers) == 1 else channel_names(self.shape)
        return [
            f"{name} gamma {power:.2f}".strip()
            for name, power in zip(names, powers, strict=True)
            if abs(power - 1) >= VISIBLE
        ]


class ChannelGamma(Gamma):
    """A tone curve for each channel: x_c^{exp g_c} (scale 0.5), a line below 0.002."""

    name, title = "channel_gamma", "gamma per channel"
    per_map, per_channel = 0, 1


class Matrix(InputMap):
    """Mix the channels: x + C x + b (scales 0.2 and 0.1)."""

    name, title = "colour", "colour matrix"
    cause = "colours"
    scale, offset_scale = 0.2, 0.1
    any_input, n_channels = True, (2, MAX_CHANNELS)

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Return the number of coordinates: a square matrix and a vector."""
        return shape[0] * (shape[0] + 1)

    def label(self) -> str:
        """Return the title; only images have colours."""
        if len(self.shape) == 3:
            return self.title
        return f"linear map of the {'features' if len(self.shape) == 1 else 'channels'}"

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Mix the channels."""
        matrix, offset = self.matrix(theta)
        axis = x.ndim - len(self.shape)
        mixed = torch.movedim(torch.movedim(x, axis, -1) @ matrix.T, -1, axis)
        return mixed + broadcast_channels(offset, self.shape)

    def matrix(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return I + C, and b."""
        c = self.shape[0]
        eye = torch.eye(c, dtype=theta.dtype, device=theta.device)
        return eye + self.scale * theta[: c * c].reshape(c, c), self.offset_scale * theta[c * c :]

    def words(self) -> list[str]:
        """Describe gains, offsets and the largest mixture."""
        return matrix_words(*self.matrix(self.theta), self.shape)


class LowRank(InputMap):
    """Add a linear map of low rank to the features: x + U(V₀ + V)ᵀx + b (scales 0.2, 0.2/√d and 0.1).

    V₀ are two fixed random orthonormal directions, where the search starts. U = 0 is the identity.
    """

    name, title = "low_rank", "linear map of low rank"
    cause = "mixed features"
    rank, scale, offset_scale = 2, 0.2, 0.1
    per_channel = 2 * rank + 1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Check for more features than a full matrix allows."""
        return len(shape) == 1 and shape[0] > MAX_CHANNELS

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Project and add."""
        d = self.shape[0]
        out, turned, offset = torch.split(theta, [self.rank * d, self.rank * d, d])
        start = torch.from_numpy(np.linalg.qr(np.random.default_rng(d).normal(size=(d, self.rank)))[0]).to(theta)
        directions = start + self.scale / math.sqrt(d) * turned.reshape(d, self.rank)
        return x + (x @ directions) @ (self.scale * out.reshape(self.rank, d)) + self.offset_scale * offset

    def words(self) -> list[str]:
        """Describe the norm and the largest offsets."""
        out, _, offset = torch.split(self.theta, [self.rank * self.shape[0]] * 2 + [self.shape[0]])
        size = self.scale * float(out.norm())
        mixed = [f"linear map of rank {self.rank}, norm {size:.2f}"] if size >= VISIBLE else []
        return mixed + channel_words("offset", self.offset_scale * offset, self.shape)


FREQUENCIES = 3
"""Number of cosines along each side of a smooth field."""


class Shrinkage(InputMap):
    """Scale detail by its size: x + Σ_l d_l·(a_l + Σ_j c_lj τ_j²/(d_l² + τ_j²)) (scale 0.5), d_l detail of level l.

    d₁ is the detail that a 3×3 binomial filter removes. d₂ is the further detail that a filter of twice the width
    removes. Detail below τ (0.02, 0.06) is mostly noise. It can shrink while larger detail stays, unlike with a linear
    filter.
    Starck, Fadili, Murtagh (2007), "The undecimated wavelet decomposition and its reconstruction",
    doi:10.1109/TIP.2006.887733.
    """

    name, title = "shrinkage", "shrinkage of fine detail"
    cause = "noise"
    scale = 0.5
    levels = 2
    thresholds = (0.02, 0.06)
    min_side, per_map = 5, levels * (1 + len(thresholds))

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Scale the detail of each level."""
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
        """Describe the change of small and large detail at the finest level."""
        small, large = self._factors()
        if max(abs(small - 1), abs(large - 1)) < VISIBLE:
            return []
        return [f"fine detail times {small:.2f} where small, {large:.2f} where large"]

    def diagnosis(self) -> str:
        """Name noise if mostly small detail shrinks, or large detail alone, as in salt and pepper; else sharpness."""
        small, large = self._factors()
        return self.cause if small < min(1.0, large) or large < 1 <= small else GreyKernel.cause

    def _factors(self) -> tuple[float, float]:
        """Return the factors of very small and of large detail at the finest level."""
        weights = (self.scale * self.theta).reshape(self.levels, -1)[0]
        return 1 + float(weights.sum()), 1 + float(weights[0])


class GreyKernel(InputMap):
    """Convolve each channel with the same kernel: x + k ∗ x (scale 0.15), with replicate padding."""

    name, title = "grey_kernel", "3×3 kernel, the same for all channels"
    cause = "sharpness"
    side, scale = 3, 0.15
    min_side, per_map = side, side**2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Convolve each channel."""
        kernel = (self.scale * theta).reshape(1, 1, self.side, self.side).expand(self.shape[0], 1, -1, -1)
        return x + F.conv2d(_pad(x, self.side // 2), kernel, groups=self.shape[0])

    def words(self) -> list[str]:
        """Describe whether the kernel sharpens or smooths."""
        kernel = self.scale * self.theta.reshape(self.side, self.side)
        return _kernel_words(self.side, 1 + float(kernel[self.side // 2, self.side // 2]), float(kernel.sum()) + 1)


class Kernel(InputMap):
    """Convolve over space and channels: x + K ∗ x + b (scales 0.1), with replicate padding."""

    name, title = "kernel", "3×3 kernel"
    cause, grey_cause = "sharpness and colours", "sharpness"
    side, scale, offset_scale = 3, 0.1, 0.1
    min_side, n_channels = side, (1, MAX_CHANNELS // 2)

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Return the number of coordinates: a kernel for each pair of channels, and offsets."""
        return shape[0] ** 2 * cls.side**2 + shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Convolve."""
        kernel, offset = self.kernel(theta)
        return x + F.conv2d(_pad(x, self.side // 2), kernel, offset)

    def kernel(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return K (C, C, k, k), and b."""
        c = self.shape[0]
        return (
            self.scale * theta[: -c or None].reshape(c, c, self.side, self.side),
            self.offset_scale * theta[len(theta) - c :],
        )

    def words(self) -> list[str]:
        """Describe the change of sharpness and of colours."""
        kernel, offset = self.kernel(self.theta)
        middle = self.side // 2
        matrix = torch.eye(self.shape[0]) + kernel.sum(dim=(2, 3)).cpu()
        centre = 1 + float(kernel[:, :, middle, middle].diagonal().mean())
        sharpness = _kernel_words(self.side, centre, float(matrix.diagonal().mean()))
        return sharpness + matrix_words(matrix, offset, self.shape)


class WideKernel(Kernel):
    """Convolve with 5×5 kernels over space and channels: x + K ∗ x + b (scales 0.1), with replicate padding."""

    name, title = "kernel5", "5×5 kernel"
    side = min_side = 5


class RadialGain(InputMap):
    """A gain that depends on the distance r from the centre: x·exp(v₁r² + v₂r⁴) (scale 0.5), with r = 1 in corners."""

    name, title = "radial_gain", "gain from centre to corners"
    cause = "vignetting"
    scale = 0.5
    per_map = 2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Multiply by the gain."""
        row, column = (2 * _positions(size, x) - 1 for size in self.shape[1:])
        square = (row[:, None] ** 2 + column[None, :] ** 2) / 2
        return x * torch.exp(self.scale * (theta[0] * square + theta[1] * square**2))

    def words(self) -> list[str]:
        """Describe the gain in the corners."""
        gain = math.exp(self.scale * float(self.theta.sum()))
        return [f"corner gain {gain:.2f}"] if abs(gain - 1) >= VISIBLE else []


class SmoothGain(InputMap):
    """A smooth gain for each channel: x·exp(Σ_f g_cf B_f) (scale 0.2), with B products of cosines."""

    name, title = "smooth_gain", "smooth gain"
    cause = "uneven light"
    scale: ClassVar[float] = 0.2

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Return the number of coordinates: products of cosines for each channel."""
        return shape[0] * math.prod(min(FREQUENCIES, side) for side in shape[1:])

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Multiply by the gain."""
        return x * torch.exp(self._field(theta, x))

    def words(self) -> list[str]:
        """Describe the range of the gain."""
        return _range("gain", torch.exp(self._field(self.theta, self.theta)), 1.0)

    def _field(self, theta: Tensor, like: Tensor) -> Tensor:
        """Return the field (C, H, W)."""
        waves = []
        for side in self.shape[1:]:
            positions = _positions(side, like)
            waves.append(torch.stack([torch.cos(math.pi * k * positions) for k in range(min(FREQUENCIES, side))]))
        weights = theta.reshape(self.shape[0], len(waves[0]), len(waves[1]))
        return self.scale * torch.einsum("cab,ah,bw->chw", weights, waves[0], waves[1])


class SmoothOffset(SmoothGain):
    """A smooth offset for each channel: x + Σ_f o_cf B_f (scale 0.1), with B products of cosines."""

    name, title = "smooth_offset", "smooth offset"
    cause = "uneven haze or stray light"
    scale = 0.1

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add the offset."""
        return x + self._field(theta, x)

    def words(self) -> list[str]:
        """Describe the range of the offset."""
        return _range("offset", self._field(self.theta, self.theta), 0.0)


class RowOffset(_Constants):
    """Add a constant to each row of pixels, the same for all channels (scale 0.08); it removes stripes."""

    name, title = "row_offset", "offset per row"
    cause = "horizontal stripes"
    scale, axes = 0.08, slice(1, 2)


class ColumnOffset(_Constants):
    """Add a constant to each column of pixels, the same for all channels (scale 0.08)."""

    name, title = "column_offset", "offset per column"
    cause = "vertical stripes"
    scale, axes = 0.08, slice(2, 3)


class PixelOffset(_Constants):
    """Add a constant to each pixel: x + δ (scale 0.05); the prior regularises these many parameters."""

    name, title = "pixel_offset", "offset per pixel"
    feature_title = "offset per feature"
    cause = "a fixed pattern"
    scale, axes, any_input = 0.05, slice(None), True


def sample_at(x: Tensor, matrix: Tensor) -> Tensor:
    """Sample images (n, C, H, W) at positions mapped by a matrix (2, 3), in units of half a side; black outside."""
    rows, columns = (2 * _positions(size, x) - 1 for size in x.shape[2:])
    shape = len(rows), len(columns)
    ones = torch.ones(shape, dtype=x.dtype, device=x.device)
    points = torch.stack([columns.expand(shape), rows[:, None].expand(shape), ones], dim=-1)
    grid = (points @ matrix.to(x).T).expand(len(x), *shape, 2)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def _position_words(matrix: Tensor, shape: Shape) -> list[str]:
    """Describe the rotation, zoom, shear and shift of an image that is sampled at a matrix (2, 3)."""
    a, b, c, d = matrix[:, :2].reshape(-1).tolist()
    b, c = b * shape[2] / shape[1], c * shape[1] / shape[2]  # from sides to pixels
    angle, zoom = math.degrees(math.atan2(c - b, a + d)), 1 / math.sqrt(max(abs(a * d - b * c), 1e-6))
    shear, shift = math.hypot(a - d, b + c), float(matrix[:, 2].norm()) / 2
    phrases = [f"rotation by {abs(angle):.0f}°"] if abs(angle) >= 1 else []
    phrases += [f"zoom {zoom:.2f}"] if abs(zoom - 1) >= VISIBLE else []
    phrases += [f"shear {shear:.2f}"] if shear >= VISIBLE else []
    return phrases + ([f"shift by {100 * shift:.0f} % of the side"] if shift >= VISIBLE else [])


class Geometry(InputMap):
    """Shift, rotate, zoom and shear: x sampled at positions (I + Θ)(u, v, 1) (scale 0.1), black outside."""

    name, title = "geometry", "shift, rotation, zoom and shear"
    cause = "geometry"
    scale, per_map, min_side = 0.1, 6, MIN_GEOMETRY_SIDE

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Sample at other positions."""
        return sample_at(x, self._matrix(theta))

    def words(self) -> list[str]:
        """Describe rotation, zoom, shear and shift."""
        return _position_words(self._matrix(self.theta.cpu()), self.shape)

    def _matrix(self, theta: Tensor) -> Tensor:
        return torch.eye(2, 3, dtype=theta.dtype, device=theta.device) + self.scale * theta.reshape(2, 3)


class Orientation(InputMap):
    """A fixed change of images without fitted parameters: positions, order of channels, or inverted brightness.

    The settings (7 + C,) are the matrix (2, 3) of `sample_at`, 1 for inverted brightness, and the order of channels.
    """

    name, title, cause = "orientation", "orientation", "another orientation"
    min_side = MIN_GEOMETRY_SIDE
    settings: Tensor

    def __init__(self, shape: Sequence[int], settings: Tensor | None = None) -> None:
        super().__init__(shape)
        identity = torch.cat([torch.eye(2, 3).flatten(), torch.zeros(1), torch.arange(float(shape[0]))])
        settings = identity if settings is None else settings.detach()
        if settings.shape != identity.shape:
            raise InputError("settings", f"have shape {tuple(identity.shape)}", f"{tuple(settings.shape)}")
        self.register_buffer("settings", settings)

    @property
    def stored(self) -> Tensor:
        """Numbers of the map in a file."""
        return self.settings

    @property
    def is_exact(self) -> bool:
        """Whether no pixel is interpolated or lost."""
        turned = self.settings[:6].reshape(2, 3)
        return bool((turned[:, 2] == 0).all() and (turned[:, :2].abs().sum(dim=1) == 1).all())

    def with_theta(self, theta: Tensor) -> InputMap:
        """Return the map itself, which has no coordinates."""
        return self

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Change the images."""
        channels, inverted = self.settings[7:].long().tolist(), bool(self.settings[6])
        x = sample_at(x[:, channels], self.settings[:6].reshape(2, 3))
        return 1 - x if inverted else x

    def words(self) -> list[str]:
        """Describe the change."""
        matrix = self.settings[:6].reshape(2, 3)
        turned = tuple(round(v) for v in matrix[:, :2].reshape(-1).tolist())
        phrases = [TURNS[turned]] if self.is_exact and turned in TURNS else []
        phrases += [] if self.is_exact else _position_words(matrix, self.shape)
        channels, names = self.settings[7:].long().tolist(), channel_names(self.shape)
        if channels != sorted(channels):
            phrases.append(f"channels in the order {', '.join(names[c] for c in channels)}")
        return phrases + (["inverted brightness"] if self.settings[6] else [])

    def diagnosis(self) -> str:
        """Name the fault: orientation, order of channels or brightness."""
        if self.settings[6]:
            return "inverted brightness"
        channels = self.settings[7:].tolist()
        return self.cause if channels == sorted(channels) else "another order of channels"


TURNS: Mapping[tuple[int, ...], str] = {
    (-1, 0, 0, 1): "mirroring left to right",
    (1, 0, 0, -1): "flip upside down",
    (-1, 0, 0, -1): "half turn",
    (0, 1, 1, 0): "transposition",
    (0, -1, -1, 0): "transposition along the other diagonal",
    (0, 1, -1, 0): "quarter turn",
    (0, -1, 1, 0): "quarter turn the other way",
}
"""Exact changes of positions, by the first two columns of the matrix; the last four need square images."""
ANGLES, ZOOMS, SHIFTS = (-30, -20, -10, 10, 20, 30), (0.7, 0.85, 1.2, 1.4), (-0.2, 0.2)
"""Angles in degrees, scales of the sampled positions, and shifts in sides that are tried."""


def orientations(shape: Shape) -> list[Orientation]:
    """Return the fixed changes that are tried: turns, orders of three channels, inversion, angles, zooms, shifts."""
    channels, height, width = shape
    identity = torch.eye(2, 3)
    turns = list(TURNS)[: 7 if height == width else 3]
    matrices = [torch.cat([torch.tensor(turn).float().reshape(2, 2), torch.zeros(2, 1)], dim=1) for turn in turns]
    for angle in map(math.radians, ANGLES):
        sine, cosine = math.sin(angle), math.cos(angle)
        matrices.append(torch.tensor([[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]]))
    matrices += [identity * zoom for zoom in ZOOMS]
    for shift in SHIFTS:
        for offsets in ([[0, 0, 2 * shift], [0, 0, 0]], [[0, 0, 0], [0, 0, 2 * shift]]):
            matrices.append(identity + torch.tensor(offsets))
    settings: list[tuple[Tensor, int, Sequence[int]]] = [(matrix, 0, range(channels)) for matrix in matrices]
    settings += [(identity, 1, range(channels))]
    settings += [(identity, 0, order) for order in list(permutations(range(3)))[1:] if channels == 3]
    return [
        Orientation(shape, torch.cat([matrix.flatten(), torch.tensor([float(inverted), *order])]))
        for matrix, inverted, order in settings
    ]


def _pad(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (by, by, by, by), mode="replicate")


def _binomial(x: Tensor, spacing: int) -> Tensor:
    """Filter with (1, 2, 1)/4 along both sides; `spacing` is the distance of the taps in pixels."""
    x = _pad(x, spacing)
    x = (x[..., : -2 * spacing, :] + 2 * x[..., spacing:-spacing, :] + x[..., 2 * spacing :, :]) / 4
    return (x[..., : -2 * spacing] + 2 * x[..., spacing:-spacing] + x[..., 2 * spacing :]) / 4


def _positions(size: int, like: Tensor) -> Tensor:
    """Return the midpoints of `size` cells of [0, 1]."""
    return (torch.arange(size, dtype=like.dtype, device=like.device) + 0.5) / size


def _kernel_words(side: int, centre: float, total: float) -> list[str]:
    if abs(centre - total) < VISIBLE:
        return []
    kind = "sharpening" if centre > total else "smoothing"
    return [f"{kind} {side}×{side} kernel (centre {centre:.2f}, sum {total:.2f})"]


def _range(kind: str, values: Tensor, neutral: float) -> list[str]:
    low, high = float(values.min()), float(values.max())
    sign = "+" if neutral == 0 else ""
    visible = max(abs(low - neutral), abs(high - neutral)) >= VISIBLE
    return [f"{kind} from {low:{sign}.2f} to {high:{sign}.2f} across the image"] if visible else []


_POINTWISE = (Gamma, ChannelGamma, Offset, ChannelAffine, Matrix, LowRank)
_SPATIAL = (GreyKernel, Kernel, WideKernel, RadialGain, SmoothGain, SmoothOffset, RowOffset, ColumnOffset, PixelOffset)
FAMILIES: Mapping[str, type[InputMap]] = {
    family.name: family for family in (Geometry, Shrinkage, *_POINTWISE, *_SPATIAL)
}
"""All families with fitted parameters by name, in the order in which a composition applies them."""
MAP_TYPES: Mapping[str, type[InputMap]] = {Orientation.name: Orientation, **FAMILIES}
"""All kinds of maps by name, in the same order."""

NEEDS_PIXELS = ("gamma", "channel_gamma")
"""Families that need a known range of the pixels."""
CONTAINS: Mapping[str, tuple[str, ...]] = {
    "channel_gamma": ("gamma",),
    "affine": ("offset",),
    "colour": ("offset", "affine"),
    "low_rank": ("offset",),
    "kernel": ("offset", "affine", "colour", "grey_kernel"),
    "kernel5": ("offset", "affine", "colour", "grey_kernel", "kernel"),
    "smooth_offset": ("offset",),
}
"""Families, and the smaller families that each one contains."""
