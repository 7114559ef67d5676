"""An input map: a small family of changes of a network's input, the identity at θ = 0, that says what it does.

Coordinates are scaled so that each has a standard normal prior: a family states its scales, the change that is one
standard deviation. Image maps act on pixels in [0, 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trueup.core.errors import InputError

Shape = tuple[int, ...]
"""Of one input: (C, H, W) for images, (d,) for features and embeddings."""
COLOURS = ("red", "green", "blue")
MOST_CHANNELS = 16
"""Channels, or features, of which a full matrix is still a small family."""
VISIBLE = 0.01
"""Changes below it are not put into words."""
MOST_WORDS = 6
"""Gains or offsets that are named one by one."""


class InputMap(nn.Module):
    """A family of maps with parameters θ (r,), the identity at zero.

    >>> from trueup.clamping.colour_maps import ChannelAffine
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
        return len(shape) == 3

    @classmethod
    def size(cls, shape: Shape) -> int:
        """How many coordinates there are."""
        raise NotImplementedError

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

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"shape": self.shape, "theta": self.theta}

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

    @property
    def _channels(self) -> int:
        return self.shape[0]


def per_channel(values: Tensor, shape: Shape) -> Tensor:
    """Values of the channels, to go with one input."""
    return values.reshape(-1, *(1 for _ in shape[1:]))


def channel_names(shape: Shape) -> list[str]:
    """What the channels, or features, are called."""
    if len(shape) == 1:
        return [f"feature {i}" for i in range(shape[0])]
    if shape[0] == 1:
        return [""]
    return list(COLOURS) if shape[0] == 3 and len(shape) == 3 else [f"channel {i}" for i in range(shape[0])]


def gain_words(gains: Tensor, shape: Shape) -> list[str]:
    """The gains that can be seen, of many the largest."""
    return _largest([f"{name} gain {gain:.2f}" for name, gain in _named(gains, shape)], gains - 1, "gain")


def offset_words(offsets: Tensor, shape: Shape) -> list[str]:
    """The offsets that can be seen, of many the largest.

    >>> offset_words(torch.tensor([0.02, 0, 0.3, -0.2, 0.1, 0.1, 0.05, 0.2, 0.4]), (9,))[-2:]
    ['feature 8 offset +0.40', '2 smaller offsets']
    """
    return _largest([f"{name} offset {b:+.2f}" for name, b in _named(offsets, shape)], offsets, "offset")


def _named(values: Tensor, shape: Shape) -> Iterator[tuple[str, float]]:
    return zip(channel_names(shape), values.tolist(), strict=True)


def _largest(phrases: Sequence[str], sizes: Tensor, kind: str) -> list[str]:
    """Phrases of the largest changes, in their order, and how many others can be seen."""
    by_size = sizes.abs().argsort(descending=True, stable=True)
    visible = [i for i in by_size.tolist() if abs(float(sizes[i])) >= VISIBLE]
    rest = len(visible) - MOST_WORDS
    more = [f"{rest} smaller {kind}{'s' if rest > 1 else ''}"] if rest > 0 else []
    return [phrases[i].strip() for i in sorted(visible[:MOST_WORDS])] + more


def mixture_words(matrix: Tensor, shape: Shape) -> list[str]:
    """The largest share of one channel that goes into another."""
    mixed = matrix.detach().clone().fill_diagonal_(0)
    at = int(mixed.abs().argmax())
    to, of = divmod(at, len(mixed))
    share, names = float(mixed[to, of]), channel_names(shape)
    return [f"{share:+.2f} of {names[of]} into {names[to]}"] if abs(share) >= VISIBLE else []
