"""Input maps that look at a pixel's neighbours or its place: kernels, noise, uneven light, stripes."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trueup.clamping.input_map import (
    MOST_CHANNELS,
    VISIBLE,
    InputMap,
    Shape,
    gain_words,
    mixture_words,
    offset_words,
)

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

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Images of some extent."""
        return len(shape) == 3 and min(shape[1:]) >= 5

    @classmethod
    def size(cls, shape: Shape) -> int:
        """A gain and two shrinkages a scale."""
        return cls.levels * (1 + len(cls.thresholds))

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

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Images of some extent."""
        return len(shape) == 3 and min(shape[1:]) >= cls.side

    @classmethod
    def size(cls, shape: Shape) -> int:
        """A square."""
        return cls.side**2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Convolve."""
        kernel = (self.scale * theta).reshape(1, 1, self.side, self.side).expand(self._channels, 1, -1, -1)
        return x + F.conv2d(_pad(x, self.side // 2), kernel, groups=self._channels)

    def words(self) -> list[str]:
        """Whether it sharpens."""
        kernel = self.scale * self.theta.reshape(self.side, self.side)
        return _kernel_words(self.side, 1 + float(kernel[self.side // 2, self.side // 2]), float(kernel.sum()) + 1)


class Kernel(InputMap):
    """Convolve over space and channels: x + K ∗ x + b (scales 0.1), the border repeated."""

    name, title = "kernel", "3×3 kernel"
    cause, grey_cause = "sharpness and colours", "sharpness"
    side, scale, offset_scale = 3, 0.1, 0.1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Images of some extent and few channels."""
        return len(shape) == 3 and min(shape[1:]) >= cls.side and shape[0] <= MOST_CHANNELS // 2

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
        c = self._channels
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
        matrix = torch.eye(self._channels) + kernel.sum(dim=(2, 3)).cpu()
        centre = 1 + float(kernel[:, :, middle, middle].diagonal().mean())
        whole = float(matrix.diagonal().mean())
        return (
            _kernel_words(self.side, centre, whole)
            + gain_words(matrix.diagonal(), self.shape)
            + mixture_words(matrix, self.shape)
            + offset_words(offset, self.shape)
        )


class WideKernel(Kernel):
    """Convolve with 5×5 kernels over space and channels: x + K ∗ x + b (scales 0.1), the border repeated."""

    name, title = "kernel5", "5×5 kernel"
    cause, grey_cause = "sharpness and colours", "sharpness"
    side = 5


class RadialGain(InputMap):
    """A gain that depends on the distance from the centre: x·exp(v₁r² + v₂r⁴) (scale 0.5), r being 1 in the corners."""

    name, title = "radial_gain", "gain from centre to corners"
    cause = "vignetting"
    scale = 0.5

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Two."""
        return 2

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Multiply."""
        return x * torch.exp(self._exponent(theta, x))

    def words(self) -> list[str]:
        """The gain of the corners."""
        gain = math.exp(self.scale * float(self.theta.sum()))
        return [f"corner gain {gain:.2f}"] if abs(gain - 1) >= VISIBLE else []

    def _exponent(self, theta: Tensor, like: Tensor) -> Tensor:
        y, x = (2 * _positions(size, like) - 1 for size in self.shape[1:])
        square = (y[:, None] ** 2 + x[None, :] ** 2) / 2
        return self.scale * (theta[0] * square + theta[1] * square**2)


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
        weights = theta.reshape(self._channels, len(waves[0]), len(waves[1]))
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


class RowOffset(InputMap):
    """Add a constant to each row of pixels, the same for all channels (scale 0.08): what stripes are made of."""

    name, title = "row_offset", "an offset a row"
    cause = "horizontal stripes"
    axis, scale = 1, 0.08

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One a row."""
        return shape[cls.axis]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add."""
        return x + self.scale * (theta[:, None] if self.axis == 1 else theta[None, :])

    def words(self) -> list[str]:
        """The largest."""
        most = self.scale * float(self.theta.abs().max())
        return [f"{'row' if self.axis == 1 else 'column'} offsets up to {most:.2f}"] if most >= VISIBLE else []


class ColumnOffset(RowOffset):
    """Add a constant to each column of pixels, the same for all channels (scale 0.08)."""

    name, title = "column_offset", "an offset a column"
    cause = "vertical stripes"
    axis = 2


class PixelOffset(InputMap):
    """Add a constant to each pixel: x + δ (scale 0.05); with so many numbers the prior does most of the work."""

    name, title = "pixel_offset", "an offset a pixel"
    feature_title = "an offset a feature"
    cause = "a fixed pattern"
    scale = 0.05

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Any input."""
        return len(shape) >= 1

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One a pixel."""
        return math.prod(shape)

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add."""
        return x + self.scale * theta.reshape(self.shape)

    def words(self) -> list[str]:
        """The largest."""
        most = self.scale * float(self.theta.abs().max())
        what = "pixel" if len(self.shape) == 3 else "feature" if len(self.shape) == 1 else "position"
        return [f"{what} offsets up to {most:.2f}"] if most >= VISIBLE else []


def _pad(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (by, by, by, by), mode="replicate")


def _binomial(x: Tensor, apart: int) -> Tensor:
    """(1, 2, 1)/4 along both sides, its taps so many pixels apart, the border repeated."""
    x = F.pad(x, (apart, apart, apart, apart), mode="replicate")
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
