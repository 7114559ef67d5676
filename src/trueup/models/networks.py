"""A small network, the normalisation of images, and reading a file of weights.

A network has a deterministic `trunk` and a `head` with forward(x) = head(trunk(x)): Monte-Carlo dropout computes the
trunk once and repeats only the head. Dropout layers exist also at probability 0, so that the names of the weights do
not depend on it. Initial weights come from `seed`; the global generator is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, TypeVar

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of each colour over ImageNet; the common CIFAR weights use it too."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of each colour over ImageNet."""

Network = TypeVar("Network", bound=nn.Module)


class Normalise(nn.Module):
    """Centres and scales each channel of images (…, C, H, W): (x − mean)/std.

    Parameters
    ----------
    mean
        Mean of each channel.
    std
        Standard deviation of each channel.

    Examples
    --------
    >>> Normalise((0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(tuple(values)).reshape(-1, 1, 1))
        if len(self.mean) != len(self.std) or not bool((self.std > 0).all()):
            raise ValueError(f"std must have {len(self.mean)} positive numbers, one per mean, got {tuple(std)}")

    def forward(self, images: Tensor) -> Tensor:
        """Normalise a batch."""
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)


class _MaxPool2d(nn.MaxPool2d):
    """Max pooling of 2 × 2 squares; without gradients by slices, which is ten times as fast on a CPU.

    >>> images = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> _MaxPool2d(2)(images).tolist()
    [[[[5.0, 7.0], [13.0, 15.0]]]]
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad or input.shape[-1] % 2 or input.shape[-2] % 2:
            return super().forward(input)
        rows = torch.maximum(input[..., 0::2, :], input[..., 1::2, :])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class CNN(nn.Module):
    """A small convolutional network for images of any size: three convolutions, mean pooling, two linear layers.

    Without `batch_norm` the loss of a sample does not depend on the batch.

    >>> CNN(10, channels=1, dropout=0.3).eval()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        n_classes: int = 10,
        *,
        channels: int = 3,
        width: int = 32,
        dropout: float = 0.0,
        batch_norm: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        widest = 4 * width
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for before, after in pairwise((channels, width, 2 * width, widest)):
                layers += [nn.Conv2d(before, after, 3, padding=1, bias=not batch_norm)]
                layers += [nn.BatchNorm2d(after)] if batch_norm else []
                layers += [nn.ReLU()]
                layers += [_MaxPool2d(2, ceil_mode=True)] if after != widest else []
            self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(
                nn.Dropout(dropout),
                nn.Linear(widest, widest),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(widest, n_classes),
            )
        initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        return self.head(self.trunk(images))


def load_weights(network: Network, path: str | Path | IO[bytes]) -> Network:
    """Load the weights of a file into a network, in place, and return the network.

    The file is read without unpickling code. Every weight must be present and fit.

    Parameters
    ----------
    network
        The network.
    path
        File with a state dict, or with a mapping that has one under `state_dict`; a prefix `module.` is removed.

    Returns
    -------
    Module
        The same network.

    Examples
    --------
    >>> from io import BytesIO
    >>> network = nn.Linear(3, 2)
    >>> torch.save({"state_dict": network.state_dict()}, file := BytesIO())
    >>> _ = file.seek(0)
    >>> load_weights(nn.Linear(3, 2), file).weight.equal(network.weight)
    True
    """
    file = torch.load(path, weights_only=True, map_location="cpu")
    state = file.get("state_dict", file) if isinstance(file, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(w, Tensor) for w in state.values()):
        got = f"a mapping of {', '.join(map(str, file))}" if isinstance(file, Mapping) else type(file).__name__
        raise ValueError(f"{path} must hold a state dict of tensors, got {got}")
    weights = {str(name).removeprefix("module."): weight for name, weight in state.items()}
    # Old files lack the counter of batches, which does not change the outputs.
    expected = {k: v for k, v in network.state_dict().items() if k in weights or not k.endswith("num_batches_tracked")}
    wrong = [f"no {name}" for name in expected if name not in weights]
    wrong += [f"{name}, which the network does not have" for name in weights if name not in expected]
    wrong += [
        f"{name} of shape {tuple(weights[name].shape)} where the network has {tuple(parameter.shape)}"
        for name, parameter in expected.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more differences" if len(wrong) > 3 else ""
        raise ValueError(f"{path} must fit a {type(network).__name__}, got {'; '.join(wrong[:3])}{more}")
    network.load_state_dict(weights, strict=False)
    return network


def initialise(network: nn.Module, seed: int) -> None:
    """Allocate and draw the weights of a network made on the meta device: N(0, 2/fan-in), biases 0.

    They are drawn on the CPU, so that a seed gives the same weights on any device. He et al., "Delving deep into
    rectifiers" (2015).
    """
    generator = torch.Generator().manual_seed(seed)
    network.to_empty(device=torch.get_default_device())
    if torch.get_default_device().type == "meta":  # only shapes are needed
        return
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                scale = math.sqrt(2 / module.weight[0].numel())
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator, device="cpu") * scale)
                if module.bias is not None:
                    module.bias.zero_()
