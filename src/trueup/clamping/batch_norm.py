"""Batch-norm statistics of new inputs: estimated anew in evaluation mode, and a test whether the inputs have moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.clamping.calibration_set import local_numbers, local_subset
from trueup.clamping.network import Network
from trueup.core.distributed import all_gather_object, all_reduce_sum
from trueup.core.splits import random_order

CHUNK = 512
"""Samples that go through the network at once; a layer's statistics are those of a chunk while it is estimated."""

Augment = Callable[[Tensor], Tensor]
"""A change of a batch of the network's inputs, such as those of the training."""


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of batch norm with statistics of their own, by name, each once."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and isinstance(module.running_mean, Tensor)
    }


def share_copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model that shares all of its tensors but those that are given, by the names of `state_dict`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> other = share_copy(model, {"1.running_mean": torch.ones(2)})
    >>> other[0].weight is model[0].weight, model[1].running_mean.tolist(), other[1].running_mean.tolist()
    (True, [0.0, 0.0], [1.0, 1.0])
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    renewed = deepcopy(model, shared)
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = renewed.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    return renewed


class Statistics(NamedTuple):
    """Mean and variance of what comes into a layer, for each channel, in float64."""

    mean: Tensor
    variance: Tensor


class Estimate(NamedTuple):
    """Statistics of new inputs."""

    tensors: dict[str, Tensor]
    """Mixed with the old ones, by the names of `state_dict`."""
    divergences: dict[str, float]
    """By how much the new statistics of each layer differ from the old ones; see `divergence`."""


def divergence(new: Statistics, old: Statistics, eps: float = 0.0) -> float:
    """Kullback and Leibler's divergence of one normal law a channel from another, the mean over channels, in nats.

    >>> one, two = (Statistics(torch.tensor([m]), torch.tensor([1.0])) for m in (0.0, 1.0))
    >>> divergence(one, two)
    0.5
    """
    variance = old.variance + eps
    ratio = (new.variance + eps) / variance
    return float(((ratio + (new.mean - old.mean).square() / variance - 1 - ratio.log()) / 2).mean())


def estimate(
    network: Network, before: nn.Module | None, weight: float, *, augment: Augment | None = None, seed: int = 0
) -> Estimate:
    """Batch-norm statistics of the samples behind a map, mixed with the old ones: (1 − α) old + α new.

    One pass in evaluation mode: each layer's statistics are renewed before it is applied, so that later layers see
    inputs as they will be.
    """
    model = share_copy(network.model, _copies(network.model))
    layers = batch_norms(model)
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    own = network.with_model(model)
    chunks = max(1, math.ceil(len(network.labels) / CHUNK))
    order = torch.from_numpy(random_order(len(network.labels), seed))
    for chunk in range(chunks):
        inputs = local_subset(network.inputs, order[chunk::chunks]).with_batch_size(CHUNK)  # one batch
        # Ranks add their statistics layer by layer, unless one would wait for a batch that another does not have.
        together = len(set(all_gather_object(sum(1 for _ in inputs)))) == 1
        if isinstance(augment, Crop):
            augment = Crop(augment.black, augment.seed, local_numbers(network.inputs, order[chunk::chunks]))
        with _renewed_on_the_way(layers, sums, weight, together=together):
            own.logits(_Then(before, augment), inputs=inputs)
    tensors, divergences = {}, {}
    for name, layer in layers.items():
        own_sums = sums[name]
        new = own_sums.statistics()
        tensors[f"{name}.running_mean"] = _mixed(own_sums.mean, new.mean, weight, layer.running_mean)
        tensors[f"{name}.running_var"] = _mixed(own_sums.variance, new.variance, weight, layer.running_var)
        divergences[name] = divergence(new, Statistics(own_sums.mean, own_sums.variance), layer.eps)
    return Estimate(tensors, divergences)


class _Sums:
    """Sums over samples and positions of what comes into a layer; and the statistics it had."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert isinstance(layer.running_mean, Tensor)
        assert isinstance(layer.running_var, Tensor)
        self.mean, self.variance = layer.running_mean.double().clone(), layer.running_var.double().clone()
        self.total = torch.zeros(2 * len(self.mean) + 1, dtype=torch.float64, device=self.mean.device)

    def add(self, x: Tensor, *, together: bool) -> Statistics:
        """Add a batch, and return its statistics: those of all ranks, or of this one."""
        flat = x.detach().movedim(1, 0).flatten(1)
        count = flat.new_tensor([flat.shape[1]], dtype=torch.float64)
        sums = torch.cat([flat.sum(dim=1).double(), (flat * flat).sum(dim=1).double(), count])
        self.total += sums
        return _statistics(all_reduce_sum(sums) if together else sums)

    def statistics(self) -> Statistics:
        """Of all batches of all ranks."""
        return _statistics(all_reduce_sum(self.total))


def _statistics(sums: Tensor) -> Statistics:
    mean, square = (sums[:-1] / sums[-1].clamp(min=1)).chunk(2)
    return Statistics(mean, (square - mean.square()).clamp(min=0))


@contextmanager
def _renewed_on_the_way(
    layers: Mapping[str, _BatchNorm], sums: Mapping[str, _Sums], weight: float, *, together: bool
) -> Iterator[None]:
    """Each layer's buffers are set to the mixture as its input comes."""

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        def renew(module: nn.Module, inputs: Any) -> None:
            own = sums[name]
            new = own.add(inputs[0], together=together)
            with torch.no_grad():
                module.running_mean.copy_((1 - weight) * own.mean + weight * new.mean)  # type: ignore[operator]
                module.running_var.copy_((1 - weight) * own.variance + weight * new.variance)  # type: ignore[operator]

        return renew

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mixed(old: Tensor, new: Tensor, weight: float, like: Any) -> Tensor:
    return ((1 - weight) * old + weight * new).to(like.dtype)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{which}": getattr(layer, which).detach().clone()
        for name, layer in batch_norms(model).items()
        for which in ("running_mean", "running_var")
    }


class _Then(nn.Module):
    """A map, and then the augmentation."""

    def __init__(self, before: nn.Module | None, augment: Augment | None) -> None:
        super().__init__()
        self.before = before
        self.augment = augment

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x)
        x = x if self.augment is None else self.augment(x)
        return x.clone(memory_format=torch.channels_last) if x.ndim == 4 else x


class Crop:
    """Random shifts of images by up to an eighth of their side, what comes in from outside being black.

    `black` is what a pixel of 0 is to the network. The shift of an image follows from the seed and its number, which
    counts from 0 unless `numbers` are given, for the images of all calls one after the other.
    """

    def __init__(self, black: Tensor, seed: int = 0, numbers: Tensor | None = None) -> None:
        self.black, self.seed = black, seed
        self.numbers = None if numbers is None else numbers.numpy()
        self.seen = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Shift a batch (n, C, H, W)."""
        n, _, height, width = x.shape
        by = max(1, min(height, width) // 8)
        fill = self.black.to(x).expand(x.shape[1:])[:, :1, :1]
        padded = nn.functional.pad(x - fill, (by, by, by, by)) + fill
        numbers = np.arange(n) if self.numbers is None else self.numbers[self.seen : self.seen + n]
        self.seen += n
        table = np.random.default_rng(self.seed).integers(0, 2 * by + 1, size=(int(numbers.max(initial=0)) + 1, 2))
        corners = table[numbers]
        return torch.stack(
            [padded[i, :, top : top + height, left : left + width] for i, (top, left) in enumerate(corners.tolist())]
        )
