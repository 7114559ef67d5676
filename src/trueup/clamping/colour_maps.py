"""Input maps that treat every pixel alike: offsets, gains, tone curves, mixtures of channels or features."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.input_map import (
    MOST_CHANNELS,
    VISIBLE,
    InputMap,
    Shape,
    channel_names,
    gain_words,
    mixture_words,
    offset_words,
    per_channel,
)

_DARK = 0.002  # below it the curve of gamma is a line, since its slope at zero may be infinite


class Offset(InputMap):
    """Add a constant to each channel: x_c + b_c (scale 0.1)."""

    name, title = "offset", "an offset a channel"
    feature_title = "an offset a feature"
    cause, grey_cause = "colour cast", "brightness"
    scale = 0.1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Any input."""
        return len(shape) >= 1

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One a channel."""
        return shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Add."""
        return x + per_channel(self.scale * theta, self.shape)

    def words(self) -> list[str]:
        """Each channel's offset."""
        return offset_words(self.scale * self.theta, self.shape)


class ChannelAffine(InputMap):
    """Scale each channel and add a constant: e^{a_c} x_c + b_c (scales 0.3 and 0.1)."""

    name, title = "affine", "gain and offset a channel"
    feature_title = "gain and offset a feature"
    cause, grey_cause = "white balance", "brightness and contrast"
    gain_scale, offset_scale = 0.3, 0.1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """Any input."""
        return len(shape) >= 1

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Two a channel."""
        return 2 * shape[0]

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Scale and add."""
        gain, offset = self._parts(theta)
        return x * per_channel(gain, self.shape) + per_channel(offset, self.shape)

    def words(self) -> list[str]:
        """Each channel's gain and offset."""
        gain, offset = self._parts(self.theta)
        return gain_words(gain, self.shape) + offset_words(offset, self.shape)

    def matrix(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Its colour matrix and offset."""
        gain, offset = self._parts(theta)
        return torch.diag(gain), offset

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(self.gain_scale * theta[: self._channels]), self.offset_scale * theta[self._channels :]


class Gamma(InputMap):
    """A tone curve, the same for all channels: x^{exp g} (scale 0.5), a line below 0.002."""

    name, title = "gamma", "gamma"
    cause = "gamma"
    scale = 0.5

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One."""
        return 1

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
    cause = "gamma"

    @classmethod
    def size(cls, shape: Shape) -> int:
        """One a channel."""
        return shape[0]


class Matrix(InputMap):
    """Mix the channels: x + C x + b (scales 0.2 and 0.1)."""

    name, title = "colour", "colour matrix"
    cause = "colours"
    scale, offset_scale = 0.2, 0.1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """A few channels or features."""
        return len(shape) >= 1 and 2 <= shape[0] <= MOST_CHANNELS

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
        return mixed + per_channel(offset, self.shape)

    def matrix(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """I + C, and b."""
        c = self._channels
        eye = torch.eye(c, dtype=theta.dtype, device=theta.device)
        return eye + self.scale * theta[: c * c].reshape(c, c), self.offset_scale * theta[c * c :]

    def theta_of(self, matrix: Tensor, offset: Tensor) -> Tensor:
        """The coordinates of a matrix and an offset."""
        eye = torch.eye(self._channels, dtype=matrix.dtype)
        return torch.cat([(matrix - eye).flatten() / self.scale, offset / self.offset_scale])

    def words(self) -> list[str]:
        """Gains, offsets and the largest mixture."""
        matrix, offset = self.matrix(self.theta)
        return (
            gain_words(matrix.diagonal(), self.shape)
            + mixture_words(matrix, self.shape)
            + offset_words(offset, self.shape)
        )


class LowRank(InputMap):
    """A linear map of low rank on top of the features: x + U(V₀ + V)ᵀx + b (scales 0.2, 0.2/√d and 0.1).

    V₀ are two orthonormal directions drawn once for d features, from which the search turns; the identity is at U = 0.
    """

    name, title = "low_rank", "linear map of low rank"
    cause = "mixed features"
    rank, scale, offset_scale = 2, 0.2, 0.1

    @classmethod
    def suits(cls, shape: Shape) -> bool:
        """More features than a full matrix is for."""
        return len(shape) == 1 and shape[0] > MOST_CHANNELS

    @classmethod
    def size(cls, shape: Shape) -> int:
        """Two thin matrices and a vector."""
        return shape[0] * (2 * cls.rank + 1)

    def apply_map(self, theta: Tensor, x: Tensor) -> Tensor:
        """Project, and add."""
        d = self._channels
        out, turned, offset = torch.split(theta, [self.rank * d, self.rank * d, d])
        start = _directions(d, self.rank).to(theta)
        directions = start + self.scale / math.sqrt(d) * turned.reshape(d, self.rank)
        return x + (x @ directions) @ (self.scale * out.reshape(self.rank, d)) + self.offset_scale * offset

    def words(self) -> list[str]:
        """How large it is, and the largest offsets."""
        out, _, offset = torch.split(self.theta, [self.rank * self._channels] * 2 + [self._channels])
        size = self.scale * float(out.norm())
        mixed = [f"linear map of rank {self.rank}, norm {size:.2f}"] if size >= VISIBLE else []
        return mixed + offset_words(self.offset_scale * offset, self.shape)


def _directions(d: int, rank: int) -> Tensor:
    """So many orthonormal directions (d, rank), the same each time."""
    return torch.from_numpy(np.linalg.qr(np.random.default_rng(d).normal(size=(d, rank)))[0])
