"""Batch norm on new inputs: new statistics, a test whether inputs have moved, and scales that lower the entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup._core.splits import random_order
from trueup.adaptation.last_layer import watch_inputs
from trueup.clamping.calibration_set import local_numbers, local_subset
from trueup.clamping.network import Network, gradients_of
from trueup.models._distributed import all_gather_object, all_gather_rows, all_reduce_sum, raise_on_all_ranks
from trueup.models._tensors import upcast_half
from trueup.models.batches import Batch, tensors_in

CHUNK, MIN_CHUNK = 512, 64
"""Samples that go through the network at once; a layer's statistics are those of a chunk while it is estimated."""
CHUNK_NUMBERS = 1 << 25
"""In the inputs of a chunk, unless it is the least: large images would not go into memory."""

MAX_TESTED = 2000
"""Samples at most whose statistics are compared with those of home."""
STORED_BATCH_SIZE = 40
"""Images in each batch of the running statistics, for the test whether inputs have moved. Fewer than trainings commonly
have: the weights moved while the statistics were taken, and images that were trained on are not quite like others."""
N_RESAMPLES = 1999
MOVED_SIGNIFICANCE = 0.01
"""Inputs are taken to have moved if the test has a smaller p-value."""
ENTROPY_LEARNING_RATE = 1e-3
ENTROPY_BATCH = 100
MASKED_LOGIT = -1e4
"""Logits below it are those of masked classes."""
MAX_DRIFT = 0.05
"""Nats by which the mean prediction may move; more is taken for a collapse onto a few classes."""

_STATISTICS = ("running_mean", "running_var")
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
    for module in model.modules():  # what a module keeps of its last call may have a graph, which cannot be copied
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
    """Why batch norm cannot be repaired, or nothing."""
    if not batch_norms(network.model):
        return "batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics"
    reason = no_copy(network)
    return f"batch norm is left as it is: {reason}" if reason else ""


def no_copy(network: Network) -> str:
    """Why the network cannot be copied, or nothing; the same on all ranks."""
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            batch = network.inputs.rows(batch, torch.arange(min(8, len(batch.labels))))
            network.call(batch, None)  # of which something may be left in the copy
        try:
            copied = share_copy(network.model, {})
        except Exception as error:
            reason = f"the network cannot be copied ({type(error).__name__})"
        else:
            same = batch is None or _computes_the_same(network, copied, batch)
            reason = "" if same else "its copy computes something else"
    return next(filter(None, all_gather_object(reason)), "")


@torch.no_grad()
def _computes_the_same(network: Network, copied: nn.Module, batch: Batch) -> bool:
    """Whether a copy gives the same logits, unlike one whose hooks write into the network that it is a copy of."""
    turned = network.inputs.rows(batch, torch.arange(len(batch.labels)).flip(0))
    try:
        other = network.with_model(copied).call(turned, None)
    except Exception:  # which the network itself does not raise
        return False
    first, second = network.call(turned, None), network.call(turned, None)
    if not torch.equal(first, second):  # outputs are drawn at random
        return True
    scale = float(torch.where(first > MASKED_LOGIT, first, 0.0).abs().max())
    return torch.allclose(other, first, rtol=1e-3, atol=1e-3 * scale)


def estimate(
    network: Network, before: nn.Module | None, weight: float, *, augment: Augment | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Batch-norm statistics of the samples behind a map, mixed with the old ones: (1 − α) old + α new.

    They are named as in `state_dict`.

    One pass in evaluation mode: each layer's statistics are renewed before it is applied, so that later layers see
    inputs as they will be.
    """
    model = share_copy(network.model, _clone_tensors(network.model, _STATISTICS))
    layers = batch_norms(model)
    sums = {name: _Sums(layer, weight) for name, layer in layers.items()}
    size = max(MIN_CHUNK, min(CHUNK, CHUNK_NUMBERS // math.prod(network.shape)))
    # Samples that are not kept are read anew for each chunk, and come in batches of the loader's anyway.
    chunks = max(1, math.ceil(len(network.labels) / size)) if network.inputs.kept else 1
    order = torch.from_numpy(random_order(len(network.labels), seed))
    for chunk in range(chunks):
        index = order[chunk::chunks]
        inputs = local_subset(network.inputs, index).with_batch_size(size)
        # Ranks add their statistics layer by layer, unless one would wait for a batch that another does not have.
        equal_batches = len(set(all_gather_object(sum(1 for _ in inputs)))) == 1

        def renew(name: str, layer: nn.Module, x: Tensor, equal_batches: bool = equal_batches) -> None:
            """Set a layer's buffers to the mixture as its input comes."""
            batch = sums[name].add(x)
            mixture = sums[name].mixture(all_reduce_sum(batch) if equal_batches else batch)
            for leaf, mixed in zip(_STATISTICS, mixture, strict=True):
                getattr(layer, leaf).copy_(mixed)

        with watch_inputs(layers, renew):
            network.with_model(model).logits(_laid_out(network, before, augment, index), inputs=inputs)
    tensors = {}
    for name, layer in layers.items():
        total = all_reduce_sum(sums[name].total)
        if total[-1]:  # else the layer was never called, and stays as it is
            for leaf, mixed in zip(_STATISTICS, sums[name].mixture(total), strict=True):
                tensors[f"{name}.{leaf}"] = mixed.to(getattr(layer, leaf).dtype)
    return tensors


def _laid_out(network: Network, before: nn.Module | None, augment: Augment | None, index: Tensor) -> nn.Module:
    """A map and an augmentation of some samples; a crop depends on the numbers of the samples."""
    if isinstance(augment, Crop):
        augment = Crop(augment.black, augment.seed, local_numbers(network.inputs, index))
    return network.laid_out(before, augment)


class MovedTest(NamedTuple):
    """Whether inputs have moved away from home."""

    p_value: float
    """Of the hypothesis that they come from where the others did."""
    distance: float
    """Root mean square of the difference of a layer's statistics, in standard deviations of one sample's."""
    samples: int
    against: float
    """Samples of home, or how many the stored statistics are taken to be worth (the layers' mean)."""


def moved_test(
    network: Network,
    before: nn.Module | None = None,
    *,
    augment: Augment | None = None,
    seed: int = 0,
    reference: Network | None = None,
) -> MovedTest:
    """A two-sample test of what comes into the layers of batch norm: each channel's mean and mean square.

    For every channel z = (m̄ − m₀)/(s√(1/n + 1/n₀)), m̄ and s being mean and standard deviation over samples of the
    sample's own statistic. m₀ is that of `reference`, n₀ samples of home; without one it is what the layer has stored,
    a running mean with momentum α over batches of b, which is worth n₀ = b(2 − α)/α samples. The statistic is the mean
    of z² over all channels and layers; its law under the hypothesis is that of Σ λ_j χ²₁, λ being the eigenvalues of
    the correlation of the columns, from which it is drawn. `before` is a map of the samples that are tested.
    """
    rows, names = sample_statistics(network, before, augment=augment, seed=seed)
    n = len(rows)
    if not names or n < 2:
        return MovedTest(1.0, 0.0, n, 0.0)
    spread = rows.std(axis=0, ddof=1)
    mean = rows.mean(axis=0)
    if reference is not None:
        others, _ = sample_statistics(reference, augment=augment, seed=seed)
        home, worth = others.mean(axis=0), np.full(rows.shape[1], float(len(others)))
        spread = np.sqrt((spread**2 + others.var(axis=0, ddof=1)) / 2)
    else:
        home, worth = _stored(network.model, names)
    alive = spread > 1e-9 * np.maximum(np.abs(home), 1e-30)  # a channel that is always the same tells nothing
    if not alive.any():
        return MovedTest(1.0, 0.0, n, float(worth.mean()))
    rows, spread, worth = rows[:, alive], spread[alive], worth[alive]
    difference = (mean - home)[alive] / spread
    observed = float((difference**2 / (1 / n + 1 / worth)).mean())
    scaled = (rows - mean[alive]) / (spread * math.sqrt(n * rows.shape[1]))
    gram = scaled @ scaled.T if n < scaled.shape[1] else scaled.T @ scaled
    eigenvalues = np.linalg.eigvalsh(gram).clip(0)
    drawn = np.random.default_rng(seed).chisquare(1, size=(N_RESAMPLES, len(eigenvalues))) @ eigenvalues
    p_value = (1 + int((drawn >= observed).sum())) / (1 + N_RESAMPLES)
    return MovedTest(p_value, float(np.sqrt((difference**2).mean())), n, float(worth.mean()))


def input_shift_test(
    network: Network,
    before: nn.Module | None = None,
    *,
    augment: Augment | None = None,
    seed: int = 0,
    reference: Network | None = None,
) -> MovedTest:
    """The test whether inputs have moved, with and without the augmentation: the one that sees less.

    How inputs were shifted about in training is not known for certain, and stored statistics are of those; a wrong
    guess alone would look as if they had moved. Samples of home are shifted about like the others, so that one test
    will do.
    """
    kinds = [augment] if augment is None or reference is not None else [augment, None]
    tests = [moved_test(network, before, augment=kind, seed=seed, reference=reference) for kind in kinds]
    return max(tests, key=lambda test: test.p_value)


def sample_statistics(
    network: Network, before: nn.Module | None = None, *, augment: Augment | None = None, seed: int = 0
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Mean and mean square, over positions, of what comes into each channel of each layer behind a map, a row a sample.

    At most `MAX_TESTED` samples, drawn at random. Layers that do not see the samples one by one are left out; the names
    of the others are returned too. One pass in evaluation mode, in which nothing is renewed.
    """
    model = share_copy(network.model, {})
    layers = batch_norms(model)
    index = torch.from_numpy(random_order(len(network.labels), seed)[:MAX_TESTED]).sort().values
    inputs = local_subset(network.inputs, index)
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def note(name: str, _: nn.Module, x: Tensor) -> None:
        x = x.float().flatten(2) if x.ndim > 2 else x.float()[:, :, None]
        seen[name].append(torch.cat([x.mean(dim=2), (x * x).mean(dim=2)], dim=1).cpu())

    with watch_inputs(layers, note):
        network.with_model(model).logits(_laid_out(network, before, augment, index), inputs=inputs)
    columns: dict[str, Tensor] = {}
    for name, rows in seen.items():
        whole = torch.cat([torch.empty(0, 2 * layers[name].num_features), *rows])
        if not inputs.n:
            columns[name] = whole
        elif len(whole) and not len(whole) % inputs.n and bool(torch.isfinite(whole).all()):
            # One row a sample: the mean where a sample has several.
            columns[name] = whole.reshape(inputs.n, -1, whole.shape[1]).mean(dim=1)
    # What one rank could not use is left out on all of them.
    common = set.intersection(*all_gather_object(set(columns)))
    names = tuple(name for name in layers if name in common)
    if not names:
        return np.empty((len(index), 0)), ()
    return all_gather_rows(torch.cat([columns[name] for name in names], dim=1)).double().numpy(), names


def _stored(model: nn.Module, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Each column's stored statistic, and how many samples it is worth."""
    layers = batch_norms(model)
    home, worth = [], []
    for name in names:
        layer = layers[name]
        mean, variance = (getattr(layer, leaf).double().cpu() for leaf in _STATISTICS)
        home.append(torch.cat([mean, variance + mean.square()]))
        if layer.momentum is None:  # the mean over all batches
            batches = 1.0 if layer.num_batches_tracked is None else float(layer.num_batches_tracked)
        else:
            batches = (2 - layer.momentum) / layer.momentum if layer.momentum > 0 else 1.0
        worth.append(torch.full((2 * len(mean),), STORED_BATCH_SIZE * max(1.0, batches), dtype=torch.float64))
    return torch.cat(home).numpy(), torch.cat(worth).numpy()


class _Sums:
    """Sums over samples and positions of what comes into a layer, less the mean it had; and the statistics it had."""

    def __init__(self, layer: _BatchNorm, weight: float) -> None:
        self.mean, self.variance = (getattr(layer, leaf).double().clone() for leaf in _STATISTICS)
        self.weight = weight
        self.total = torch.zeros(2 * len(self.mean) + 1, dtype=torch.float64, device=self.mean.device)

    def add(self, x: Tensor) -> Tensor:
        """Add a batch, and return its sums."""
        flat = upcast_half(x).movedim(1, 0).flatten(1)
        flat = flat - self.mean.to(flat)[:, None]  # squares of numbers far from 0 would not hold their spread
        count = flat.new_tensor([flat.shape[1]], dtype=torch.float64)
        sums = torch.cat([flat.sum(dim=1).double(), flat.square_().sum(dim=1).double(), count])
        self.total += sums
        return sums

    def mixture(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of each channel in float64, the old ones mixed with those of the sums."""
        mean, square = (sums[:-1] / sums[-1].clamp(min=1)).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        old, new = 1 - self.weight, self.weight
        return old * self.mean + new * (self.mean + mean), old * self.variance + new * variance


def _clone_tensors(model: nn.Module, leaves: Sequence[str]) -> dict[str, Tensor]:
    """Copies of some tensors of the layers of batch norm, by the names of `state_dict`."""
    return {
        f"{name}.{leaf}": getattr(layer, leaf).detach().clone()
        for name, layer in batch_norms(model).items()
        for leaf in leaves
        if isinstance(getattr(layer, leaf), Tensor)
    }


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


class LowerEntropy(NamedTuple):
    """Scales and offsets of batch norm, or nothing where that would not do."""

    tensors: dict[str, Tensor]
    """By the names of `state_dict`; empty where they were refused."""
    refused: str
    """Why."""


def lower_entropy(
    network: Network, before: nn.Module | None, changed: dict[str, Tensor], *, temperature: float, seed: int
) -> LowerEntropy:
    """One epoch of Adam on the mean entropy of softmax(z/T) over the scales and offsets of batch norm.

    Sure answers that are wrong draw others after them, until every input is given one class. So the mean answer over
    all samples is compared before and after: if Kullback and Leibler's divergence exceeds `MAX_DRIFT` nats, nothing is
    changed.
    Wang et al., "Tent: fully test-time adaptation by entropy minimization" (2021).
    """
    scales = _clone_tensors(network.model, ("weight", "bias"))
    if not scales:
        return LowerEntropy({}, "batch norm has no scales and offsets")
    model = share_copy(network.model, {**changed, **scales})
    samples = network.with_model(model)
    trained = [model.get_parameter(name).requires_grad_() for name in scales]
    optimiser = torch.optim.Adam(trained, lr=ENTROPY_LEARNING_RATE)
    first = _mean_prediction(samples.logits(before), temperature)
    order = torch.from_numpy(random_order(len(network.labels), seed))
    for index in torch.split(order, ENTROPY_BATCH):
        sums = [torch.zeros_like(tensor) for tensor in trained]
        with torch.enable_grad():
            for batch in local_subset(network.inputs, index):
                z = samples.batch_logits(batch, before)
                log_p = torch.log_softmax(z.float() / temperature, dim=1)
                there = log_p.masked_fill(torch.isinf(log_p), 0.0)  # masked classes have no part in it
                gradients = gradients_of(-(log_p.exp() * there).sum() / len(index), trained)
                samples.count(backward=len(batch.labels))
                sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        for tensor, total in zip(trained, sums, strict=True):
            tensor.grad = all_reduce_sum(total)
        optimiser.step()
    last = _mean_prediction(samples.logits(before), temperature)
    moved = float((last * np.log(np.maximum(last, 1e-12) / np.maximum(first, 1e-12))).sum())
    if not moved <= MAX_DRIFT:
        return LowerEntropy({}, f"answers would collapse: the mean answer would move by {moved:.2f} nats")
    return LowerEntropy({name: model.get_parameter(name).detach().clone() for name in scales}, "")


def _mean_prediction(logits: Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(logits.double() / temperature, dim=1).mean(dim=0).numpy()
