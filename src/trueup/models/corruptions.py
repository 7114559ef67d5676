"""Shifts of images in pixel space, like those of a camera, a codec or the weather.

Images are torch tensors (n, C, H, W) or (C, H, W) with pixels in [0, 1], before any normalisation. Results have the
same shape, dtype and device, and are clipped. `corrupt` and `CORRUPTIONS` use severities 1–5, which are our own and not
those of CIFAR-10-C; the functions take the amount itself. Hendrycks and Dietterich, "Benchmarking neural network
robustness to common corruptions and perturbations" (2019).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trueup._core.arrays import ROUNDING
from trueup.models._tensors import upcast_half

Options = ParamSpec("Options")
Change: TypeAlias = Callable[Concatenate[Tensor, Options], Tensor]

CAST = (0.2, -0.1, -0.15)
"""The colour cast of severity 3: warm light."""
FIELD = 4
"""The field of haze is drawn on FIELD × FIELD points and interpolated."""


def _on_images(change: Change[Options]) -> Change[Options]:
    """Extend a function of float batches to checked images of either shape and any precision, and clip its result."""

    @functools.wraps(change)
    def changed(images: Tensor, /, *args: Options.args, **options: Options.kwargs) -> Tensor:
        x = _as_images(images)
        batch = upcast_half(x if x.ndim == 4 else x[None])
        result = change(batch, *args, **options).clamp(0, 1) if batch.numel() else batch
        return result.to(x.dtype).to(x.device).reshape(x.shape)

    return changed


def _as_images(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a torch tensor (n, C, H, W) or (C, H, W), got {type(images).__name__}")
    if images.ndim not in (3, 4):
        raise ValueError(f"images must have shape (n, C, H, W) or (C, H, W), got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point in [0, 1], got {images.dtype}; bytes are divided by 255")
    if images.numel():
        low, high = (float(v) for v in torch.aminmax(images.detach()))
        if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # so put that NaN is refused too
            raise ValueError(f"images must lie in [0, 1], before normalisation, got {low:.4g}..{high:.4g}")
    return images.detach()


@_on_images
def brightness(images: Tensor, amount: float) -> Tensor:
    """Add the same amount to every pixel: x + a.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    amount
        a in −1..1; a negative amount darkens.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> brightness(torch.full((1, 1, 1), 0.8), 0.3).item()
    1.0
    """
    return images + _within("amount", amount, -1, 1)


@_on_images
def colour_cast(images: Tensor, vector: Sequence[float] = CAST) -> Tensor:
    """Add one amount per channel: x_c + v_c.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    vector
        v, one number in −1..1 per channel; the default needs three channels.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> [f"{v:.2f}" for v in colour_cast(torch.full((3, 1, 1), 0.5)).flatten()]
    ['0.70', '0.40', '0.35']
    """
    if len(vector) != images.shape[1]:
        raise ValueError(f"vector must have one entry per channel, {images.shape[1]} in all, got {len(vector)}")
    return images + images.new_tensor([_within("vector", v, -1, 1) for v in vector]).reshape(-1, 1, 1)


@_on_images
def contrast(images: Tensor, factor: float) -> Tensor:
    """Move every pixel towards mid-grey: (x − ½)·f + ½.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    factor
        f, at least 0.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> f"{contrast(torch.ones(1, 1, 1), 0.4).item():.2f}"
    '0.70'
    """
    return (images - 0.5) * _within("factor", factor, 0) + 0.5


@_on_images
def gaussian_noise(images: Tensor, sigma: float, *, seed: int = 0, first: int = 0) -> Tensor:
    """Add independent normal noise to every pixel: x + σ·N(0, 1).

    The noise of an image depends on `seed` and on its number in the data set. So batches get the same noise as the
    whole set, and no two images share their noise.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    sigma
        σ, at least 0.
    seed
        Seed of the noise.
    first
        Number of the first image in the data set, on which the noise depends.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> x = torch.full((2, 1, 1, 1), 0.5)
    >>> torch.equal(gaussian_noise(x, 0.1)[1:], gaussian_noise(x[1:], 0.1, first=1))
    True
    """
    noise = _draw_noise(np.random.Generator.standard_normal, images, images.shape[1:], seed, first)
    return images + _within("sigma", sigma, 0) * noise


@_on_images
def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Average over a Gaussian window, cut off at 4σ; the border is repeated outwards.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    sigma
        σ in pixels, at least 0.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> x = torch.zeros(1, 5, 5)
    >>> x[0, 2, 2] = 1
    >>> [f"{v:.3f}" for v in gaussian_blur(x, 0.5)[0, 2]]
    ['0.000', '0.084', '0.619', '0.084', '0.000']
    """
    radius = int(4 * _within("sigma", sigma, 0) + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    kernel = torch.softmax(-0.5 * (offsets.double() / (sigma or 1)) ** 2, dim=0)

    def weights(size: int) -> Tensor:
        sources = (torch.arange(size)[:, None] + offsets).clamp(0, size - 1)
        return torch.zeros(size, size, dtype=kernel.dtype).scatter_add_(1, sources, kernel.expand(size, -1))

    return _combine(images, weights)


@_on_images
def pixelate(images: Tensor, share: float) -> Tensor:
    """Shrink height and width by averaging areas, and enlarge by repeating the nearest pixel.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    share
        Share of height and width that remains, in 0..1.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> pixelate(torch.tensor([[[0.0, 0.5, 0.5, 1.0]]]), 0.5)
    tensor([[[0.2500, 0.2500, 0.7500, 0.7500]]])
    """

    # torch's area interpolation counts a pixel at the edge of two windows fully in both, which blurs.
    def parts(size: int) -> Tensor:
        small = max(1, round(_within("share", share, 0, 1) * size))
        start, at = torch.arange(small).double()[:, None] * (size / small), torch.arange(size)
        overlap = torch.minimum(start + size / small, at + 1) - torch.maximum(start, at)
        return overlap.clamp(min=0) * (small / size)

    return F.interpolate(_combine(images, parts), images.shape[2:], mode="nearest-exact")


def _combine(images: Tensor, matrix: Callable[[int], Tensor]) -> Tensor:
    """Combine rows and columns linearly, with the weights `matrix(number of rows or columns)`."""
    rows, columns = (matrix(size).to(images.dtype).to(images.device) for size in images.shape[2:])
    return torch.einsum("ri,ncij,sj->ncrs", rows, images, columns)


@_on_images
def haze(images: Tensor, density: float, *, seed: int = 0, first: int = 0) -> Tensor:
    """Mix every image with a bright, slowly varying field: x·(1 − h) + h·field.

    The field is grey, between ½ and 1: uniform numbers on a coarse grid with bicubic interpolation. Its randomness is
    that of `gaussian_noise`.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    density
        h in 0..1.
    seed
        Seed of the noise.
    first
        Number of the first image in the data set, on which the noise depends.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> f"{haze(torch.zeros(1, 1, 1), 0.5).item():.4f}"
    '0.2529'
    """
    h = _within("density", density, 0, 1)
    points = 0.5 + 0.5 * _draw_noise(np.random.Generator.random, images, (1, FIELD, FIELD), seed, first)
    field = F.interpolate(points, images.shape[2:], mode="bicubic", align_corners=True).clamp(0.5, 1)
    return images * (1 - h) + h * field


@_on_images
def jpeg(images: Tensor, quality: int) -> Tensor:
    """Round to bytes and apply the losses of a baseline JPEG file.

    Colours become YCbCr with both chroma planes halved each way. Cosine coefficients of 8 × 8 blocks are rounded to
    multiples of the standard tables, scaled to the quality. A single channel is luma.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    quality
        Quality in 1..100.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> (jpeg(torch.full((3, 8, 8), 77 / 255), 20) * 255).unique()
    tensor([78.])

    References
    ----------
    ITU-T recommendation T.81 (1992), annexes A and K; the JPEG File Interchange Format (JFIF).
    """
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels to be a JPEG, got {channels}")
    # Double precision, so that rounding does not depend on the batch or the device. Apple's devices have none.
    x = images.to("cpu" if images.device.type == "mps" else images.device).double()
    x = F.pad(_whole(x * 255), (0, -width % 16, 0, -height % 16), mode="replicate")
    if channels == 1:
        return _encode_jpeg(x, _LUMA, quality)[:, :, :height, :width] / 255
    mix, middle = torch.tensor(_YCBCR, dtype=x.dtype).to(x), torch.tensor([0, 128, 128]).to(x).reshape(3, 1, 1)
    planes = _whole(torch.einsum("dc,nchw->ndhw", mix, x) + middle).clamp(0, 255)
    luma = _encode_jpeg(planes[:, :1], _LUMA, quality)[:, :, :height, :width]
    chroma = _encode_jpeg(torch.round(F.avg_pool2d(planes[:, 1:], 2)), _CHROMA, quality)
    chroma = chroma[:, :, : (height + 1) // 2, : (width + 1) // 2]
    # Decoders give the nearer sample weight ¾ and the farther ¼ in each direction: bilinear doubling.
    chroma = torch.round(F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False))
    planes = torch.cat([luma, chroma[:, :, :height, :width]], dim=1) - middle
    return _whole(torch.einsum("cd,ndhw->nchw", torch.linalg.inv(mix), planes)) / 255


_YCBCR = ((0.299, 0.587, 0.114), (-0.299 / 1.772, -0.587 / 1.772, 0.5), (0.5, -0.587 / 1.402, -0.114 / 1.402))
# fmt: off
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61), (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56), (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77), (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101), (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99), (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99), (47, 66, 99, 99, 99, 99, 99, 99), *((99,) * 8,) * 4,
)
# fmt: on


def _encode_jpeg(planes: Tensor, table: Sequence[Sequence[int]], quality: int) -> Tensor:
    """Quantise the cosine coefficients of each 8 × 8 block, and transform back to integers in 0..255."""
    scale = 5000 // quality if _within("quality", quality, 1, 100) < 50 else 200 - 2 * quality
    steps = ((torch.tensor(table) * scale + 50) // 100).clamp(1, 255).to(planes)[:, None, :]
    k = torch.arange(8, dtype=planes.dtype, device=planes.device)
    basis = torch.cos((2 * k + 1) * k[:, None] * math.pi / 16) / 2
    basis[0] /= math.sqrt(2)
    n, channels, height, width = planes.shape
    blocks = (planes - 128).reshape(n, channels, height // 8, 8, width // 8, 8)
    wave = torch.einsum("ui,ncaibj,vj->ncaubv", basis, blocks, basis) / steps
    kept = wave.sign() * _whole(wave.abs()) * steps
    decoded = torch.einsum("ui,ncaubv,vj->ncaibj", basis, kept, basis)
    return _whole(decoded + 128).clamp(0, 255).reshape(planes.shape)


def _whole(x: Tensor) -> Tensor:
    """Round to integers, halves up, with a tolerance for rounding errors just below a half."""
    return torch.floor(x + (0.5 + 1e-9))


def _draw_noise(draw: Callable[..., Any], images: Tensor, shape: Sequence[int], seed: int, first: int) -> Tensor:
    """Draw an array for each image from its own stream, on the CPU, independent of device and batch."""
    key = [int(_within("seed", seed, 0)), int(_within("first", first, 0))]
    streams = (np.random.Generator(np.random.Philox(key=[key[0], key[1] + i])) for i in range(len(images)))
    return torch.from_numpy(np.stack([draw(s, tuple(shape)) for s in streams])).to(images.dtype).to(images.device)


def _within(name: str, value: float, low: float, high: float = math.inf) -> float:
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value}")
    return value


@dataclass(frozen=True)
class Corruption:
    """A shift with its setting at each of five severities; severity 0 changes nothing."""

    change: Callable[..., Tensor]
    settings: tuple[Any, ...]
    random: bool = False
    channels: tuple[int, ...] | None = None  # allowed numbers of channels; None for any

    def __call__(self, images: Tensor, severity: int, *, seed: int = 0, first: int = 0) -> Tensor:
        """Shift the images; `seed` and `first` are for random shifts, as in `gaussian_noise`."""
        if isinstance(severity, bool) or severity not in range(len(self.settings) + 1):
            raise ValueError(f"severity must be a whole number in 0..{len(self.settings)}, got {severity!r}")
        if severity == 0:
            return _as_images(images).clone()
        options = {"seed": seed, "first": first} if self.random else {}
        return self.change(images, self.settings[int(severity) - 1], **options)


CORRUPTIONS: Mapping[str, Corruption] = {
    "brightness": Corruption(brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "darkness": Corruption(brightness, (-0.1, -0.2, -0.3, -0.4, -0.5)),
    "colour_cast": Corruption(
        colour_cast, tuple(tuple(s * v for v in CAST) for s in (0.5, 0.75, 1, 1.25, 1.5)), channels=(3,)
    ),
    "contrast": Corruption(contrast, (0.75, 0.6, 0.5, 0.4, 0.3)),
    "gaussian_noise": Corruption(gaussian_noise, (0.02, 0.04, 0.06, 0.08, 0.1), random=True),
    "gaussian_blur": Corruption(gaussian_blur, (0.4, 0.6, 0.8, 1.0, 1.3)),
    "pixelate": Corruption(pixelate, (0.9, 0.8, 0.7, 0.6, 0.5)),
    "jpeg": Corruption(jpeg, (80, 65, 50, 35, 20), channels=(1, 3)),
    "haze": Corruption(haze, (0.1, 0.2, 0.3, 0.4, 0.5), random=True),
}


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, first: int = 0) -> Tensor:
    """Shift images by a corruption at a severity.

    Parameters
    ----------
    images
        Images (n, C, H, W) or (C, H, W) with pixels in [0, 1].
    name
        Name in `CORRUPTIONS`.
    severity
        Severity in 0..5; 0 changes nothing.
    seed
        Seed of the noise.
    first
        Number of the first image in the data set, on which the noise depends.

    Returns
    -------
    Tensor
        The shifted images, clipped to [0, 1].

    Examples
    --------
    >>> x = torch.full((1, 3, 4, 4), 0.5)
    >>> [f"{corrupt(x, 'darkness', severity).mean().item():.1f}" for severity in range(6)]
    ['0.5', '0.4', '0.3', '0.2', '0.1', '0.0']
    """
    if name not in CORRUPTIONS:
        raise ValueError(f"name must be one of {', '.join(CORRUPTIONS)}, got {name!r}")
    return CORRUPTIONS[name](images, severity, seed=seed, first=first)


def corruptions_for(channels: int) -> tuple[str, ...]:
    """List the corruptions for a number of channels.

    >>> "colour_cast" in corruptions_for(3), "colour_cast" in corruptions_for(1)
    (True, False)
    """
    return tuple(name for name, c in CORRUPTIONS.items() if c.channels is None or channels in c.channels)
