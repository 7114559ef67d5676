"""What a study costs: the floating-point operations of its networks, and the hours these take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.models.networks import build_network, network_options
from trueup.study.grid import Options, Study
from trueup.training.data.text import LONGEST

GPU_RATE = 10e12
"""Operations a second of the GPU that hours are stated for: 10 TFLOP/s sustained."""
BACKWARD, INPUT_BACKWARD = 2.0, 1.0
"""Forward passes that a backward one to the weights and the input costs, and one to the input alone."""
SLOWEST = 1e9
"""Operations a second of the slowest machine that is thought of: what takes it less than a day is not asked about."""
DAY = 24.0
"""Hours from which on a run is asked about."""
_SAMPLE_SECONDS = 0.3


class DataSize(NamedTuple):
    """The sizes of a data set, known without its files."""

    train: int
    val: int
    test: int
    shape: tuple[int, ...]
    classes: int
    """Outputs of a network: of a regression one."""
    kind: str = "image"


SIZES: Mapping[str, DataSize] = {
    "digits": DataSize(1078, 360, 359, (1, 8, 8), 10),
    "fashion_mnist": DataSize(55_000, 5_000, 10_000, (1, 28, 28), 10),
    "cifar10": DataSize(45_000, 5_000, 10_000, (3, 32, 32), 10),
    "cifar100": DataSize(45_000, 5_000, 10_000, (3, 32, 32), 100),
    "svhn": DataSize(65_931, 7_326, 26_032, (3, 32, 32), 10),
    "bloodmnist": DataSize(11_959, 1_712, 3_421, (3, 28, 28), 8),
    "imagenet": DataSize(0, 25_000, 25_000, (3, 224, 224), 1000),
    "trec": DataSize(4_907, 545, 500, (37,), 6, "text"),
    "sst5": DataSize(8_544, 1_101, 2_210, (52,), 5, "text"),
    "newsgroups20": DataSize(10_183, 1_131, 7_532, (LONGEST,), 20, "text"),
    "descriptions": DataSize(138, 46, 46, (64,), 85, "characters"),
    "tinyshakespeare": DataSize(7_842, 435, 435, (128,), 65, "characters"),
    "diabetes": DataSize(266, 88, 88, (10,), 1, "tabular"),
    "uci_boston": DataSize(364, 91, 51, (13,), 1, "tabular"),
    "uci_concrete": DataSize(742, 185, 103, (8,), 1, "tabular"),
    "uci_energy": DataSize(553, 138, 77, (8,), 1, "tabular"),
    "uci_wine": DataSize(1_151, 288, 160, (11,), 1, "tabular"),
    "uci_yacht": DataSize(222, 55, 31, (6,), 1, "tabular"),
}
"""Texts are filled up to the longest; the longest posts are cut."""


TIMM_FLOPS: Mapping[tuple[str, str], float] = {
    ("timm:resnet50", "bloodmnist"): 158_352_896,
    ("timm:resnet101.tv_in1k", "imagenet"): 15_602_810_880,
    ("timm:vit_small_patch16_224.augreg_in21k_ft_in1k", "imagenet"): 9_197_764_608,
    ("timm:mixer_b16_224.goog_in21k_ft_in1k", "imagenet"): 25_203_535_872,
}
"""Network and data → operations of a pass as `forward_flops` counts them where timm is, so that they are known also
where it is not."""


class Unknown(Exception):
    """A network whose operations cannot be counted here; the message says which and why."""


class Estimate(NamedTuple):
    """What some cells cost."""

    cells: int
    flops: float
    unknown: tuple[str, ...]
    """What of it is not counted, and why."""

    def hours(self, rate: float) -> float:
        """At so many operations a second."""
        return self.flops / rate / 3600


def estimate(study: Study, options: Options, *, done: frozenset[str] = frozenset()) -> Estimate | None:
    """Count the operations of a study's cells, without those whose key is `done`; None where it does not count them."""
    if study.flops is None:
        return None
    settings = [cell.settings for cell in study.cells(options) if cell.key not in done]
    flops, unknown = study.flops(settings)
    return Estimate(len(settings), flops, tuple(dict.fromkeys(unknown)))


@cache
def forward_flops(network: str, data: str, options: str = "{}") -> float:
    """Operations of one sample's pass, as torch counts them (two a multiplication and addition of a matrix product).

    `options` are the network's, as JSON.

    >>> f"{forward_flops('resnet20', 'cifar10') / 1e6:.1f} million"
    '81.1 million'
    """
    if data not in SIZES:
        raise Unknown(f"{network} on {data}: the sizes of its parts are not known")
    if (network, data) in TIMM_FLOPS:
        return TIMM_FLOPS[network, data]
    return _count(network, data, options)


@cache
def head_flops(network: str, data: str, options: str = "{}") -> float:
    """Those of the head, which Monte-Carlo passes repeat, of one of our networks."""
    model, sample = _build(network, data, options)
    return _operations(model.head, model.trunk(sample))  # type: ignore[operator, arg-type]


def _count(network: str, data: str, options: str) -> float:
    return _operations(*_build(network, data, options))


def _build(network: str, data: str, options: str) -> tuple[nn.Module, Tensor]:
    """The network and one sample, neither with any content."""
    size = SIZES[data]
    with torch.device("meta"):
        sample = torch.zeros(size.shape, dtype=torch.int64 if size.kind in ("text", "characters") else None)
        described = SimpleNamespace(
            name=data, kind=size.kind, train=[(sample, 0)], classes=range(size.classes), vocabulary=range(2)
        )
        own = {name: value for name, value in json.loads(options).items() if name != "pretrained"}
        try:
            model = build_network(network, network_options(network, described, **own)).eval()
        except ImportError as error:
            raise Unknown(f"{network} on {data}: {error}") from None
    return model, sample[None]


def _operations(module: Callable[[Tensor], Any], batch: Tensor) -> float:
    counter: Any = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    with torch.device("meta"), counter, torch.no_grad():
        module(batch)
    return float(counter.get_total_flops())


def training_flops(forward: float, sizes: Sequence[int], epochs: int) -> float:
    """Operations of a training run, which looks at all three parts after every epoch."""
    train, val, test = sizes
    return epochs * forward * ((1 + BACKWARD) * train + train + val + test)


def part_sizes(data: str, sizes: Sequence[int | None] | None) -> list[int]:
    """Samples to train, to validate and to test: those named, else the data set's own."""
    whole = SIZES[data][:3]
    return [own if size is None else size for own, size in zip(whole, sizes or (None,) * 3, strict=True)]


def measure_rate(device: str | None = None) -> float:
    """Operations a second of a device, or of one core, by the convolutions of a small residual network."""
    x = torch.randn(64, 16, 32, 32, device=device, requires_grad=True)
    layer = nn.Conv2d(16, 16, 3, padding=1).to(device or "cpu")
    clock = time.perf_counter if x.is_cuda else time.process_time  # whoever else uses the core is not counted
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps, started = -1, clock()  # the first pass is not counted
        while steps < 1 or clock() - started < _SAMPLE_SECONDS:
            F.relu(layer(x)).sum().backward()  # type: ignore[no-untyped-call]
            if x.is_cuda:
                torch.cuda.synchronize()
            steps += 1
            if not steps:
                started = clock()
        seconds = clock() - started
    finally:
        torch.set_num_threads(threads)
    return steps * (1 + BACKWARD) * 2 * 64 * 32 * 32 * 16 * 16 * 9 / seconds
