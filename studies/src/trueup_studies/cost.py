"""Cost of a study: the floating-point operations of its networks, and their hours."""

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
"""Operations per second of the reference GPU: 10 TFLOP/s sustained."""
BACKWARD, INPUT_BACKWARD = 2.0, 1.0
"""Cost of a backward pass in forward passes: to weights and input, and to the input only."""
SLOWEST = 1e9
"""Operations per second of a very slow machine; runs shorter than a day on it need no confirmation."""
DAY = 24.0
"""Hours from which a run needs confirmation."""
_SAMPLE_SECONDS = 0.3


class DataSize(NamedTuple):
    """Sizes of a data set, known without its files."""

    train: int
    val: int
    test: int
    shape: tuple[int, ...]
    classes: int
    """Number of network outputs; 1 for a regression."""
    kind: str = "image"


def _read_csv(name: str) -> list[list[str]]:
    """Read the lines of a CSV file of the package, without its header."""
    return list(csv.reader(files("trueup_studies").joinpath(name).read_text(encoding="utf-8").splitlines()))[1:]


SIZES: Mapping[str, DataSize] = {
    name: DataSize(int(train), int(val), int(test), tuple(map(int, shape.split())), int(classes), kind)
    for name, train, val, test, shape, classes, kind in _read_csv("data_sets.csv")
}
"""Data set → sizes. Texts are padded to the longest; the longest posts are cut."""


TIMM_FLOPS = {(network, data): float(flops) for network, data, flops in _read_csv("timm_flops.csv")}
"""(Network, data set) → operations of a pass, as `forward_flops` counts them with timm, for machines without timm."""


class Unknown(Exception):
    """Raised for a network whose operations cannot be counted; the message names it and the reason."""


class Estimate(NamedTuple):
    """Cost of some cells."""

    cells: int
    flops: float
    unknown: tuple[str, ...]
    """Networks that are not counted, with the reason."""

    def hours(self, rate: float) -> float:
        """Return the hours at this number of operations per second."""
        return self.flops / rate / 3600


def estimate(study: Study, options: Options, *, done: frozenset[str] = frozenset()) -> Estimate | None:
    """Count the operations of a study's cells except those in `done`; None if the study does not count."""
    if study.flops is None:
        return None
    settings = [cell.settings for cell in study.cells(options) if cell.key not in done]
    flops, unknown = study.flops(settings)
    return Estimate(len(settings), flops, tuple(dict.fromkeys(unknown)))


@cache
def forward_flops(network: str, data: str, options: str = "{}") -> float:
    """Count the operations of one sample's pass with torch, two per multiply-add of a matrix product.

    `options` are the network's options as JSON.

    >>> f"{forward_flops('resnet20', 'cifar10') / 1e6:.1f} million"
    '81.1 million'
    """
    if data not in SIZES:
        raise Unknown(f"{network} on {data}: the sizes of its parts are not known")
    if (network, data) in TIMM_FLOPS:
        return TIMM_FLOPS[network, data]
    return _operations(*_build(network, data, options))


@cache
def head_flops(network: str, data: str, options: str = "{}") -> float:
    """Count the operations of a network's head, which Monte-Carlo passes repeat."""
    model, sample = _build(network, data, options)
    return _operations(model.head, model.trunk(sample))  # type: ignore[operator, arg-type]


def _build(network: str, data: str, options: str) -> tuple[nn.Module, Tensor]:
    """Build the network and one sample on the meta device, without content."""
    size = SIZES[data]
    with torch.device("meta"):
        sample = torch.zeros(size.shape, dtype=torch.int64 if size.kind in ("text", "characters") else None)
        described = SimpleNamespace(
            name=data, kind=size.kind, train=[(sample, 0)], classes=range(size.classes), vocabulary=range(2)
        )
        known = {name: value for name, value in json.loads(options).items() if name != "pretrained"}
        try:
            model = build_network(network, network_options(network, described, **known)).eval()
        except ImportError as error:
            raise Unknown(f"{network} on {data}: {error}") from None
    return model, sample[None]


def _operations(module: Callable[[Tensor], Any], batch: Tensor) -> float:
    counter: Any = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    with torch.device("meta"), counter, torch.no_grad():
        module(batch)
    return float(counter.get_total_flops())


def training_flops(forward: float, sizes: Sequence[int], epochs: int) -> float:
    """Count the operations of a training run, which evaluates all three parts after every epoch."""
    train, val, test = sizes
    return epochs * forward * ((1 + BACKWARD) * train + train + val + test)


def part_sizes(data: str, sizes: Sequence[int | None] | None) -> list[int]:
    """Return the numbers of training, validation and test samples: the named ones, else the data set's."""
    whole = SIZES[data][:3]
    return [default if size is None else size for default, size in zip(whole, sizes or (None,) * 3, strict=True)]


def measure_rate(device: str | None = None) -> float:
    """Measure the operations per second of a device, or of one core, with convolutions of a small ResNet."""
    x = torch.randn(64, 16, 32, 32, device=device, requires_grad=True)
    layer = nn.Conv2d(16, 16, 3, padding=1).to(device or "cpu")
    clock = time.perf_counter if x.is_cuda else time.process_time  # process time excludes other users of the core
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
