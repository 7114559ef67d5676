"""Batch norm on new inputs: new statistics, and a test for an input shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from trueup._core.splits import random_order
from trueup.adaptation.last_layer import watch_inputs
from trueup.clamping.calibration_set import local_numbers, local_subset
from trueup.clamping.network import Network
from trueup.models._distributed import all_gather_object, all_gather_rows, all_reduce_sum, raise_on_all_ranks
from trueup.models._tensors import upcast_half
from trueup.models.batches import Batch, tensors_in

CHUNK, MIN_CHUNK = 512, 64
"""Largest and smallest number of samples in one forward pass that estimates statistics."""
CHUNK_NUMBERS = 1 << 25
"""Largest number of input values in a chunk above the smallest size; it limits memory for large images."""

MAX_TESTED = 2000
"""Largest number of samples in the test for an input shift."""
STORED_BATCH_SIZE = 40
"""Effective batch size of the running statistics, for the test. It is below common batch sizes for two reasons: the
weights changed while the statistics were collected, and training images differ slightly from new ones."""
N_RESAMPLES = 1999
SHIFT_SIGNIFICANCE = 0.01
"""Level of the test for an input shift."""
MASKED_LOGIT = -1e4
"""Logits below it belong to masked classes."""

_STATISTICS = ("running_mean", "running_var")
Augment = Callable[[Tensor], Tensor]
"""Augmentation of a batch of the network's inputs."""


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers with running statistics by name, each once."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and isinstance(module.running_mean, Tensor)
    }


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch-norm layers with running statistics, or if there are none the other normalisation layers."""
    kinds = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    first: dict[str, nn.Module] = {**batch_norms(model)}
    return first or {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def share_copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy a model. The copy shares all tensors except the given ones, which have names of `state_dict`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> other = share_copy(model, {"1.running_mean": torch.ones(2)})
    >>> other[0].weight is model[0].weight, model[1].running_mean.tolist(), other[1].running_mean.tolist()
    (True, [0.0, 0.0], [1.0, 1.0])
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # tensors kept from the last call may have a graph, which cannot be copied
        kept = (tensor for _, tensor in tensors_in(vars(module)) if tensor.grad_fn is not None)
        shared |= {id(tensor): tensor.detach() for tensor in kept}
    renewed = deepcopy(model, shared)
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = renewed.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    return renewed


def no_batch_norm(network: Network) -> str:
    """Return the reason why batch norm cannot be repaired; empty if there is none."""
    if not batch_norms(network.model):
        return "batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics"
    reason = no_copy(network)
    return f"batch norm is left as it is: {reason}" if reason else ""


def no_copy(network: Network) -> str:
    """Return the reason why the network cannot be copied, the same on all ranks; empty if there is none."""
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            batch = network.inputs.rows(batch, torch.arange(min(8, len(batch.labels))))
            network.call(batch, None)  # the copy must also work after a call
        try:
            copied = share_copy(network.model, {})
        except Exception as error:
            reason = f"the network cannot be copied ({type(error).__name__})"
        else:
            same = batch is None or _computes_the_same(network, copied, batch)
            reason = "" if same else "its copy gives other logits"
    return next(filter(None, all_gather_object(reason)), "")


@torch.no_grad()
def _computes_the_same(network: Network, copied: nn.Module, batch: Batch) -> bool:
    """Check whether a copy gives the same logits; hooks of a copy may still write into the original network."""
    turned = network.inputs.rows(batch, torch.arange(len(batch.labels)).flip(0))
    try:
        other = network.with_model(copied).call(turned, None)
    except Exception:  # the network itself raises nothing here
        return False
    first, second = network.call(turned, None), network.call(turned, None)
    if not torch.equal(first, second):  # the outputs are random
        return True
    scale = float(torch.where(first > MASKED_LOGIT, first, 0.0).abs().max())
    return torch.allclose(other, first, rtol=1e-3, atol=1e-3 * scale)


def estimate(
    network: Network,
    before: nn.Module | None,
    weight: float,
    *,
    augment: Augment | None = None,
    seed: int = 0,
    numbers: np.ndarray | None = None,
) -> dict[str, Tensor]:
    """Estimate batch-norm statistics of the mapped samples, mixed with the stored ones: (1 − α) old + α new.

    Returns tensors by the names of `state_dict`. One pass in evaluation mode suffices: each layer's statistics are
    renewed before the layer is applied, so later layers get their final inputs. `numbers` are those of the samples to
    use, possibly repeated; None takes all.
    """
    stored = {f"{name}.{leaf}": layer for name, layer in batch_norms(network.model).items() for leaf in _STATISTICS}
    copies = {path: getattr(layer, path.rpartition(".")[2]).detach().clone() for path, layer in stored.items()}
    model = share_copy(network.model, copies)
    layers = batch_norms(model)
    sums = {name: _Sums(layer, weight) for name, layer in layers.items()}
    size = max(MIN_CHUNK, min(CHUNK, CHUNK_NUMBERS // math.prod(network.shape)))
    # Samples outside memory are read again for each chunk, and come in the loader's batches anyway.
    chunks = max(1, math.ceil(len(network.labels) / size)) if network.inputs.kept else 1
    order = torch.from_numpy(random_order(len(network.labels), seed))
    order = order if numbers is None else torch.from_numpy(numbers)[order]
    for chunk in range(chunks):
        index = order[chunk::chunks]
        inputs = local_subset(network.inputs, index).with_batch_size(size)
        # Ranks add their statistics layer by layer if they have equally many batches; else one rank would wait.
        equal_batches = len(set(all_gather_object(sum(1 for _ in inputs)))) == 1

        def renew(name: str, layer: nn.Module, x: Tensor, equal_batches: bool = equal_batches) -> None:
            """Set a layer's buffers to the mixture before the layer runs."""
            batch = sums[name].add(x)
            mixture = sums[name].mixture(all_reduce_sum(batch) if equal_batches else batch)
            for leaf, mixed in zip(_STATISTICS, mixture, strict=True):
                getattr(layer, leaf).copy_(mixed)

        with watch_inputs(layers, renew):
            network.with_model(model).logits(_laid_out(network, before, augment, index), inputs=inputs)
    tensors = {}
    for name, layer in layers.items():
        total = all_reduce_sum(sums[name].total)
        if total[-1]:  # a layer that was never called stays as it is
            for leaf, mixed in zip(_STATISTICS, sums[name].mixture(total), strict=True):
                tensors[f"{name}.{leaf}"] = mixed.to(getattr(layer, leaf).dtype)
    return tensors


def _laid_out(network: Network, before: nn.Module | None, augment: Augment | None, index: Tensor) -> nn.Module:
    """Return the map followed by the augmentation, for some samples; a crop depends on the sample numbers."""
    if isinstance(augment, Crop):
        augment = Crop(augment.black, augment.seed, local_numbers(network.inputs, index))
    return network.laid_out(before, augment)


class ShiftTest(NamedTuple):
    """Result of the two-sample test for an input shift."""

    p_value: float
    """p-value of the hypothesis that both samples have one distribution."""
    distance: float
    """Root mean square difference of the channel statistics, in standard deviations over samples."""
    samples: int
    n_reference: float
    """Number of reference samples, or effective number behind the stored statistics (mean over layers)."""


def shift_test(
    network: Network,
    before: nn.Module | None = None,
    *,
    augment: Augment | None = None,
    seed: int = 0,
    reference: Network | None = None,
    weights: np.ndarray | None = None,
) -> ShiftTest:
    """Test whether the inputs of the batch-norm layers differ from the reference, by channel means and mean squares.

    For every channel z = (m̄ − m₀)/(s√(1/n + 1/n₀)). Here m̄ and s are mean and standard deviation of the per-sample
    statistic. m₀ is its mean over the n₀ samples of `reference`. Without reference, m₀ is the stored running mean with
    momentum α over batches of b. It counts as n₀ = b(2 − α)/α samples. The test statistic is the mean of z² over all
    channels and layers. Under the hypothesis it has the law of Σ λ_j χ²₁, with λ the eigenvalues of the columns'
    correlation matrix; this law is simulated. `before` is a map of the tested samples. `weights` are those of the
    reference samples, such as undo a difference in class frequencies; n₀ is then (Σ w)²/Σ w².
    """
    rows, names = sample_statistics(network, before, augment=augment, seed=seed)
    n = len(rows)
    if not names or n < 2:
        return ShiftTest(1.0, 0.0, n, 0.0)
    spread = rows.std(axis=0, ddof=1)
    mean = rows.mean(axis=0)
    if reference is not None:
        others, _ = sample_statistics(reference, augment=augment, seed=seed)
        share = np.ones(len(others)) if weights is None else weights[_tested(reference, seed).numpy()]
        share = share / share.sum()
        home, n_effective = share @ others, 1 / float((share**2).sum())
        n_home = np.full(rows.shape[1], n_effective)
        variance = share @ (others - home) ** 2 * n_effective / max(n_effective - 1, 1e-9)
        spread = np.sqrt((spread**2 + variance) / 2)
    else:
        home, n_home = _stored_statistics(network.model, names)
    varies = spread > 1e-9 * np.maximum(np.abs(home), 1e-30)  # constant channels carry no information
    if not varies.any():
        return ShiftTest(1.0, 0.0, n, float(n_home.mean()))
    rows, spread, n_home = rows[:, varies], spread[varies], n_home[varies]
    difference = (mean - home)[varies] / spread
    observed = float((difference**2 / (1 / n + 1 / n_home)).mean())
    scaled = (rows - mean[varies]) / (spread * math.sqrt(n * rows.shape[1]))
    gram = scaled @ scaled.T if n < scaled.shape[1] else scaled.T @ scaled
    eigenvalues = np.linalg.eigvalsh(gram).clip(0)
    drawn = np.random.default_rng(seed).chisquare(1, size=(N_RESAMPLES, len(eigenvalues))) @ eigenvalues
    p_value = (1 + int((drawn >= observed).sum())) / (1 + N_RESAMPLES)
    return ShiftTest(p_value, float(np.sqrt((difference**2).mean())), n, float(n_home.mean()))


def input_shift_test(
    network: Network,
    before: nn.Module | None = None,
    *,
    augment: Augment | None = None,
    seed: int = 0,
    reference: Network | None = None,
    weights: np.ndarray | None = None,
) -> ShiftTest:
    """Run the test for an input shift with and without augmentation, and return the larger p-value.

    Stored statistics come from augmented training images, and that augmentation is only guessed. A wrong guess alone
    would look like a shift. Reference samples get the same augmentation, so one test suffices for them.
    """
    augmentations = [augment] if augment is None or reference is not None else [augment, None]
    options: dict[str, Any] = {"seed": seed, "reference": reference, "weights": weights}
    tests = [shift_test(network, before, augment=kind, **options) for kind in augmentations]
    return max(tests, key=lambda test: test.p_value)


def sample_statistics(
    network: Network, before: nn.Module | None = None, *, augment: Augment | None = None, seed: int = 0
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return mean and mean square over positions of every channel that enters batch norm, one row per sample.

    Without batch norm these are the channels that enter the other normalisation layers. At most `MAX_TESTED` random
    samples are used. Layers whose input is not one row per sample are left out. The names of the other layers are
    returned, too. One pass in evaluation mode changes no statistics.
    """
    model = share_copy(network.model, {})
    layers = norm_layers(model)
    index = _tested(network, seed)
    inputs = local_subset(network.inputs, index)
    collected: dict[str, list[Tensor]] = {name: [] for name in layers}

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            x = x.movedim(-1, 1)
        x = x.float().flatten(2) if x.ndim > 2 else x.float()[:, :, None]
        collected[name].append(torch.cat([x.mean(dim=2), (x * x).mean(dim=2)], dim=1).cpu())

    with watch_inputs(layers, collect):
        network.with_model(model).logits(_laid_out(network, before, augment, index), inputs=inputs)
    columns: dict[str, Tensor] = {}
    for name, rows in collected.items():
        table = torch.cat([torch.empty(0, 2 * _n_channels(layers[name])), *rows])
        if not inputs.n:
            columns[name] = table
        elif len(table) and not len(table) % inputs.n and bool(torch.isfinite(table).all()):
            # A sample with several rows gets their mean.
            columns[name] = table.reshape(inputs.n, -1, table.shape[1]).mean(dim=1)
    # A layer that one rank cannot use is left out on all ranks.
    common = set.intersection(*all_gather_object(set(columns)))
    names = tuple(name for name in layers if name in common)
    if not names:
        return np.empty((len(index), 0)), ()
    return all_gather_rows(torch.cat([columns[name] for name in names], dim=1)).double().numpy(), names


def _tested(network: Network, seed: int) -> Tensor:
    """Return the numbers of the samples in the test."""
    return torch.from_numpy(random_order(len(network.labels), seed)[:MAX_TESTED]).sort().values


def _n_channels(layer: Any) -> int:
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    return int(layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else layer.num_features)


def _stored_statistics(model: nn.Module, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return each column's stored statistic, and its effective number of samples."""
    layers = batch_norms(model)
    home, n_home = [], []
    for name in names:
        layer = layers[name]
        mean, variance = (getattr(layer, leaf).double().cpu() for leaf in _STATISTICS)
        home.append(torch.cat([mean, variance + mean.square()]))
        if layer.momentum is None:  # the mean over all batches
            batches = 1.0 if layer.num_batches_tracked is None else float(layer.num_batches_tracked)
        else:
            batches = (2 - layer.momentum) / layer.momentum if layer.momentum > 0 else 1.0
        n_home.append(torch.full((2 * len(mean),), STORED_BATCH_SIZE * max(1.0, batches), dtype=torch.float64))
    return torch.cat(home).numpy(), torch.cat(n_home).numpy()


class _Sums:
    """Sums of a layer's inputs over samples and positions, centred at the stored mean; and the stored statistics."""

    def __init__(self, layer: _BatchNorm, weight: float) -> None:
        self.mean, self.variance = (getattr(layer, leaf).double().clone() for leaf in _STATISTICS)
        self.weight = weight
        self.total = torch.zeros(2 * len(self.mean) + 1, dtype=torch.float64, device=self.mean.device)

    def add(self, x: Tensor) -> Tensor:
        """Add a batch, and return its sums."""
        flat = upcast_half(x).movedim(1, 0).flatten(1)
        flat = flat - self.mean.to(flat)[:, None]  # centring keeps the precision of the squares
        count = flat.new_tensor([flat.shape[1]], dtype=torch.float64)
        sums = torch.cat([flat.sum(dim=1).double(), flat.square_().sum(dim=1).double(), count])
        self.total += sums
        return sums

    def mixture(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each channel in float64: stored ones mixed with those of the sums."""
        mean, square = (sums[:-1] / sums[-1].clamp(min=1)).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        old, new = 1 - self.weight, self.weight
        return old * self.mean + new * (self.mean + mean), old * self.variance + new * variance


class Crop:
    """Random shifts of images by up to an eighth of their side, with black outside.

    `black` is the network's input for a pixel of 0. The seed and the number of an image determine its shift. Images of
    successive calls are numbered from 0 unless `numbers` are given.
    """

    def __init__(self, black: Tensor, seed: int = 0, numbers: Tensor | None = None) -> None:
        self.black, self.seed = black, seed
        self.numbers = None if numbers is None else numbers.numpy()
        self.n_images = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Shift a batch (n, C, H, W)."""
        n, _, height, width = x.shape
        by = max(1, min(height, width) // 8)
        fill = self.black.to(x).expand(x.shape[1:])[:, :1, :1]
        padded = nn.functional.pad(x - fill, (by, by, by, by)) + fill
        numbers = np.arange(n) if self.numbers is None else self.numbers[self.n_images : self.n_images + n]
        self.n_images += n
        table = np.random.default_rng(self.seed).integers(0, 2 * by + 1, size=(int(numbers.max(initial=0)) + 1, 2))
        corners = table[numbers]
        return torch.stack(
            [padded[i, :, top : top + height, left : left + width] for i, (top, left) in enumerate(corners.tolist())]
        )
