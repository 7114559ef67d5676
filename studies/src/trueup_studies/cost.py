"""What a study costs: the floating-point operations of its networks, and the hours these take."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup_studies.grid import Options, Study
from trueup_studies.networks import build_network, network_options

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


def _read_csv(name: str) -> list[list[str]]:
    """The lines of a file of the package, without the names of its columns."""
    return list(csv.reader(files("trueup_studies").joinpath(name).read_text(encoding="utf-8").splitlines()))[1:]


SIZES: Mapping[str, DataSize] = {
    name: DataSize(int(train), int(val), int(test), tuple(map(int, shape.split())), int(classes), kind)
    for name, train, val, test, shape, classes, kind in _read_csv("data_sets.csv")
}
"""Texts are filled up to the longest; the longest posts are cut."""


TIMM_FLOPS = {(network, data): float(flops) for network, data, flops in _read_csv("timm_flops.csv")}
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
