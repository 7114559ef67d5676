"""The small networks of the calibration literature, by name in `NETWORKS`.

Each has a deterministic `trunk` and a `head` with forward(x) = head(trunk(x)): Monte-Carlo dropout computes the trunk
once and repeats only the head. Dropout layers exist also at probability 0, so that the names of the weights do not
depend on it. Initial weights come from `seed`; the global generator is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.models.networks import CNN, Normalise, initialise, load_weights  # noqa: F401
from trueup_studies.registry import NETWORKS


class MLP(nn.Module):
    """A multilayer perceptron on flattened inputs, with dropout after every hidden layer.

    >>> MLP(1, inputs=13, hidden=(50, 50), dropout=0.1).eval()(torch.zeros(4, 13)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self, outputs: int = 10, *, inputs: int, hidden: Sequence[int] = (128, 128), dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("hidden must name at least one layer's width, got none")
        with torch.device("meta"):
            self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden[0]), nn.ReLU())
            layers: list[nn.Module] = [nn.Dropout(dropout)]
            for before, after in pairwise(hidden):
                layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
            self.head = nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))
        initialise(self, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (n, …) to outputs (n, outputs)."""
        return self.head(self.trunk(inputs))


class ResNet(nn.Module):
    """The residual network for 32×32 images: 6n + 2 layers, widths 16-32-64, shortcuts without parameters.

    >>> net = ResNet(20).eval()
    >>> net(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([2, 10]), 269722)

    He et al., "Deep residual learning for image recognition" (2016), section 4.2.
    """

    def __init__(
        self, depth: int, classes: int = 10, *, channels: int = 3, dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        blocks = _blocks(depth, 2)
        with torch.device("meta"):
            self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(16)
            self.layer1, self.layer2, self.layer3 = (
                nn.Sequential(*(_Block(before if i == 0 else after, after) for i in range(blocks)))
                for before, after in pairwise((16, 16, 32, 64))
            )
            self.dropout = nn.Dropout(dropout)
            self.linear = nn.Linear(64, classes)
        initialise(self, seed)

    def trunk(self, images: Tensor) -> Tensor:
        """Map images to features (n, 64)."""
        x = F.relu(self.bn1(self.conv1(images)))
        return self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3))

    def head(self, features: Tensor) -> Tensor:
        """Map features to logits."""
        return self.linear(self.dropout(features))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        return self.head(self.trunk(images))


class _Block(nn.Module):
    """Two convolutions and a shortcut; where the width grows, it keeps every second pixel and pads channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.padding = ((after - before) // 2, (after - before + 1) // 2)
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.padding))
        return F.relu(residual + x)


class WideResNet(nn.Module):
    """The wide residual network WRN-d-k: 6n + 4 layers, widths 16k-32k-64k, dropout inside its blocks.

    Its first dropout comes early, so its trunk is the first convolution alone.

    >>> sum(p.numel() for p in WideResNet(16, 4).parameters())
    2748890

    Zagoruyko and Komodakis, "Wide residual networks" (2016).
    """

    def __init__(
        self, depth: int, width: int, classes: int = 10, *, channels: int = 3, dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        blocks, final = _blocks(depth, 4), 64 * width
        widths = (16, 16 * width, 32 * width, final)
        with torch.device("meta"):
            self.trunk = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
            stages = [
                _WideBlock(before if i == 0 else after, after, stride if i == 0 else 1, dropout)
                for (before, after), stride in zip(pairwise(widths), (1, 2, 2), strict=True)
                for i in range(blocks)
            ]
            pooled = (nn.BatchNorm2d(final), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(*stages, *pooled, nn.Linear(final, classes))
        initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        return self.head(self.trunk(images))


class _WideBlock(nn.Module):
    """Normalisation and activation before each of two convolutions; a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        same = before == after and stride == 1
        self.shortcut = None if same else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        residual = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(active)))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


resnet8, resnet20, resnet32, resnet110 = (partial(ResNet, depth) for depth in (8, 20, 32, 110))
wrn16x4, wrn28x10, wrn40x10 = (partial(WideResNet, depth, width) for depth, width in ((16, 4), (28, 10), (40, 10)))


def network_options(
    network: str | Callable[..., nn.Module], data: Any, *, outputs: int | None = None, **options: Any
) -> dict[str, Any]:
    """Compute the keywords of a network for a data set: its number of outputs, and the sizes of its inputs.

    The sizes are those of channels, inputs, vocabulary and context that the network accepts; `options` add to them and
    override them. `outputs` is the number of classes by default. `data` is a result of `load_data`, or has the same
    attributes. The result is plain data, for `build_network`.

    >>> from types import SimpleNamespace
    >>> pairs = [(torch.zeros(1, 8, 8), 3)]
    >>> digits = SimpleNamespace(name="digits", kind="image", train=pairs, classes="0123456789", vocabulary=())
    >>> network_options("cnn", digits, width=8, seed=1), network_options("mlp", digits)
    ({'n_classes': 10, 'channels': 1, 'width': 8, 'seed': 1}, {'outputs': 10, 'inputs': 64})
    """
    accepted = inspect.signature(NETWORKS[network] if isinstance(network, str) else network).parameters
    sample = data.train[0][0]
    sizes: dict[str, dict[str, int]] = {
        "image": {"channels": len(sample), "inputs": sample.numel()},
        "text": {"vocabulary": len(data.vocabulary)},
        "characters": {"context": len(sample)},
        "tabular": {"inputs": sample.numel()},
    }
    first = next(iter(accepted))
    chosen = {first: len(data.classes) if outputs is None else outputs}
    chosen |= {key: size for key, size in sizes[data.kind].items() if key in accepted and size}
    missing = {"channels", "inputs", "vocabulary", "context"} & set(accepted) - set(chosen) - set(options)
    if missing:
        name = network if isinstance(network, str) else getattr(network, "__name__", repr(network))
        plural = {"characters": "characters", "tabular": "tables"}.get(data.kind, f"{data.kind}s")
        raise ValueError(f"{name} is not for {plural} such as {data.name}: `trueup networks` lists others")
    return {**chosen, **options}


def build_network(
    network: str | Callable[..., nn.Module],
    options: Mapping[str, Any],
    *,
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None,
) -> nn.Module:
    """Build a network of `NETWORKS`, or of another class, after an optional normalisation of its images.

    >>> build_network("mlp", {"outputs": 2, "inputs": 3, "hidden": [4]}).eval()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    built: nn.Module = (NETWORKS[network] if isinstance(network, str) else network)(**options)
    return built if normalisation is None else nn.Sequential(Normalise(*normalisation), built)


def _blocks(depth: int, extra: int) -> int:
    blocks, remainder = divmod(depth - extra, 6)
    if remainder or blocks < 1:
        raise ValueError(f"depth must be 6n + {extra} with n ≥ 1, got {depth}")
    return blocks
