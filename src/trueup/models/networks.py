"""The small networks of the calibration literature.

Each has a `trunk`, which draws nothing at random, and a `head`, with forward(x) = head(trunk(x)): Monte-Carlo dropout
computes the trunk once and repeats only the head. Dropout layers are there also at probability 0, so that the names of
the weights do not depend on it. Initial weights come from `seed`; the global generator is not used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.registry import NETWORKS

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of each colour over ImageNet, by which the common CIFAR weights too expect their inputs centred."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of each colour over ImageNet."""

Network = TypeVar("Network", bound=nn.Module)


class Normalise(nn.Module):
    """Centre and scale each channel of images (…, C, H, W): (x − mean)/std.

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
            raise ValueError(f"std must hold {len(self.mean)} positive numbers, one a mean, got {tuple(std)}")

    def forward(self, images: Tensor) -> Tensor:
        """Normalise a batch."""
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)


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
        _initialise(self, seed)

    def trunk(self, images: Tensor) -> Tensor:
        """Images to features (n, 64)."""
        x = F.relu(self.bn1(self.conv1(images)))
        return self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3))

    def head(self, features: Tensor) -> Tensor:
        """Features to logits."""
        return self.linear(self.dropout(features))

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
        return self.head(self.trunk(images))


class _Block(nn.Module):
    """Two convolutions beside a shortcut; where the width grows, every second pixel is kept and channels padded."""

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
        blocks, last = _blocks(depth, 4), 64 * width
        widths = (16, 16 * width, 32 * width, last)
        with torch.device("meta"):
            self.trunk = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
            stages = [
                _WideBlock(before if i == 0 else after, after, stride if i == 0 else 1, dropout)
                for (before, after), stride in zip(pairwise(widths), (1, 2, 2), strict=True)
                for i in range(blocks)
            ]
            pooled = (nn.BatchNorm2d(last), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(*stages, *pooled, nn.Linear(last, classes))
        _initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
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


class _MaxPool2d(nn.MaxPool2d):
    """The maximum of squares of two by two; without gradients by whole slices, which on a CPU is ten times as fast.

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
    """A small convolutional network for images of any size: three convolutions, their mean over space, two layers.

    Without `batch_norm` the loss of a batch is the mean over its samples, whatever batch they came in.

    >>> CNN(10, channels=1, dropout=0.3).eval()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: int = 3,
        width: int = 32,
        dropout: float = 0.0,
        batch_norm: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        last = 4 * width
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for before, after in pairwise((channels, width, 2 * width, last)):
                layers += [nn.Conv2d(before, after, 3, padding=1, bias=not batch_norm)]
                layers += [nn.BatchNorm2d(after)] if batch_norm else []
                layers += [nn.ReLU()]
                layers += [_MaxPool2d(2, ceil_mode=True)] if after != last else []
            self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(
                nn.Dropout(dropout), nn.Linear(last, last), nn.ReLU(), nn.Dropout(dropout), nn.Linear(last, classes)
            )
        _initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
        return self.head(self.trunk(images))


class MLP(nn.Module):
    """A multilayer perceptron on flattened inputs, with dropout after every hidden layer.

    >>> MLP(1, inputs=13, hidden=(50, 50), dropout=0.1).eval()(torch.zeros(4, 13)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        outputs: int = 10,
        *,
        inputs: int,
        hidden: Sequence[int] = (128, 128),
        dropout: float = 0.0,
        seed: int = 0,
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
        _initialise(self, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (n, …) to outputs (n, outputs)."""
        return self.head(self.trunk(inputs))


resnet8, resnet20, resnet32, resnet110 = (partial(ResNet, depth) for depth in (8, 20, 32, 110))
wrn16x4, wrn28x10, wrn40x10 = (partial(WideResNet, depth, width) for depth, width in ((16, 4), (28, 10), (40, 10)))


class DataDescription(Protocol):
    """What a network depends on in a data set; `training.data` has such data sets."""

    @property
    def name(self) -> str:
        """The data set's name, for messages."""

    @property
    def kind(self) -> str:
        """Which of "image", "text", "characters" and "tabular" its inputs are."""

    @property
    def train(self) -> Any:
        """Pairs (input, label)."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes; none for a regression."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """The words that whole numbers stand for."""


def network_options(
    network: str | Callable[..., nn.Module], data: DataDescription, *, outputs: int | None = None, **options: Any
) -> dict[str, Any]:
    """Compute the keywords of a network for a data set: its number of outputs, and the sizes of the inputs it takes.

    Of channels, inputs, vocabulary and context those are given that the network asks for; `options` add to them and
    override them. `outputs` is the number of classes by default. The result is plain data, for `build_network`.

    >>> from types import SimpleNamespace
    >>> pairs = [(torch.zeros(1, 8, 8), 3)]
    >>> digits = SimpleNamespace(name="digits", kind="image", train=pairs, classes="0123456789", vocabulary=())
    >>> network_options("cnn", digits, width=8, seed=1), network_options("mlp", digits)
    ({'classes': 10, 'channels': 1, 'width': 8, 'seed': 1}, {'outputs': 10, 'inputs': 64})
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
    """Make a network of `NETWORKS`, or of a class of one's own, behind the normalisation of its images if one is given.

    >>> build_network("mlp", {"outputs": 2, "inputs": 3, "hidden": [4]}).eval()(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    built: nn.Module = (NETWORKS[network] if isinstance(network, str) else network)(**options)
    return built if normalisation is None else nn.Sequential(Normalise(*normalisation), built)


def load_weights(network: Network, path: str | Path | IO[bytes]) -> Network:
    """Put the weights of a file into a network, in place, and return it.

    The file holds a state dict, or a mapping with one under `state_dict`; the prefix `module.` that data-parallel
    training leaves is stripped. It is read without unpickling code. Every weight must be there and fit.

    >>> from io import BytesIO
    >>> torch.save({"state_dict": MLP(2, inputs=3, seed=7).state_dict()}, file := BytesIO())
    >>> _ = file.seek(0)
    >>> load_weights(MLP(2, inputs=3), file)(torch.ones(1, 3)).equal(MLP(2, inputs=3, seed=7)(torch.ones(1, 3)))
    True
    """
    file = torch.load(path, weights_only=True, map_location="cpu")
    state = file.get("state_dict", file) if isinstance(file, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(w, Tensor) for w in state.values()):
        raise ValueError(f"{path} must hold a state dict of tensors, got {_content(file)}")
    weights = {str(name).removeprefix("module."): weight for name, weight in state.items()}
    # Files older than the counter of batches lack it. It plays no part in what the network computes.
    wanted = {k: v for k, v in network.state_dict().items() if k in weights or not k.endswith("num_batches_tracked")}
    wrong = [f"no {name}" for name in wanted if name not in weights]
    wrong += [f"{name}, which the network has not" for name in weights if name not in wanted]
    wrong += [
        f"{name} of shape {tuple(weights[name].shape)} where the network has {tuple(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more differences" if len(wrong) > 3 else ""
        raise ValueError(f"{path} must fit a {type(network).__name__}, got {'; '.join(wrong[:3])}{more}")
    network.load_state_dict(weights, strict=False)
    return network


def _content(file: Any) -> str:
    return f"a mapping of {', '.join(map(str, file))}" if isinstance(file, Mapping) else type(file).__name__


def _blocks(depth: int, rest: int) -> int:
    blocks, left = divmod(depth - rest, 6)
    if left or blocks < 1:
        raise ValueError(f"depth must be 6n + {rest} with n ≥ 1, got {depth}")
    return blocks


def _initialise(network: nn.Module, seed: int) -> None:
    """Give a network made on the meta device memory and weights: N(0, 2/fan-in) each, biases 0.

    He et al., "Delving deep into rectifiers" (2015). Drawn on the CPU, so that a seed means the same on any device.
    """
    generator = torch.Generator().manual_seed(seed)
    network.to_empty(device=torch.get_default_device())
    if torch.get_default_device().type == "meta":  # only its shapes are asked for
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
