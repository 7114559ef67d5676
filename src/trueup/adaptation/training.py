"""Gradient descent on a network's own parameters: all weights by labels, or scales and offsets by lower entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.splits import random_order
from trueup.adaptation.batch_norm import Augment, Crop, norm_layers, share_copy
from trueup.clamping.calibration_set import local_numbers, local_subset
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss
from trueup.models._distributed import all_reduce_sum

RATES = (1e-4, 3e-4, 1e-3)
"""Learning rates of Adam that are tried on the first fold."""
FINE_TUNING_BATCH = 64
MAX_EPOCHS, MAX_EPOCHS_MANY, MANY_SAMPLES = 20, 10, 500
"""Largest number of epochs, and the smaller number from this many samples on."""
PATIENCE = 3
"""Number of epochs without a lower held-out loss that ends the training."""
ENTROPY_RATE = 1e-3
ENTROPY_BATCH = 100
ENTROPY_EPOCHS = 3
"""Number of epochs; one with new batch-norm statistics, which already undo most of a shift."""
MEAN_MEMORY = 0.8
"""Weight of earlier batches in the running mean prediction."""
MAX_ENTROPY = 0.4
"""Samples with a higher entropy, as a share of ln K, are unreliable and do not take part."""
MAX_DRIFT = 0.05
"""Largest growth in nats of the divergence of mean predictions; above it, predictions collapse to few classes."""
MAX_RATIO = 3.0
"""Largest factor between temperatures with the same mean entropy."""
MIN_SHARE = 1e-6
"""Smallest mean prediction of a class in a logarithm."""

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of each row from logits, labels and sample numbers."""


class Start(NamedTuple):
    """Network at the beginning of a training."""

    before: nn.Module | None
    """Input map before the network."""
    changed: dict[str, Tensor]
    """Tensors that differ from the network's, such as new batch-norm statistics."""


class CrossFit(NamedTuple):
    """Learning rate and number of epochs with the lowest held-out loss."""

    rate: float
    epochs: int
    logits: np.ndarray
    """Calibrated held-out logits, (n, classes)."""


class LowerEntropy(NamedTuple):
    """New scales and offsets, or the reason why there are none."""

    tensors: dict[str, Tensor]
    """Scales and offsets by the names of `state_dict`; empty if refused."""
    temperature: float
    """Temperature at which the mean entropy is as before."""
    refused: str
    """Reason of a refusal."""


def affine_names(model: nn.Module) -> list[str]:
    """Return the names of the scales and offsets of batch norm, or without it of the other normalisation layers.

    >>> affine_names(nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4)))
    ['1.weight', '1.bias']
    """
    return [
        f"{name}.{leaf}"
        for name, module in norm_layers(model).items()
        for leaf in ("weight", "bias")
        if isinstance(getattr(module, leaf, None), Tensor)
    ]


@dataclass(frozen=True)
class FineTuning:
    """Fine-tuning of all weights by Adam; batch norm keeps its statistics."""

    network: Network
    augment: Augment | None
    weights: np.ndarray | None
    seed: int

    def cross_fit(self, folds: Sequence[tuple[Tensor, Start]]) -> CrossFit:
        """Train without each fold in turn, and choose the learning rate and the number of epochs.

        The first fold chooses the rate, all folds the number of epochs. A fold is (held-out mask, start).
        """
        labels = self.network.labels
        share = np.ones(len(labels)) if self.weights is None else self.weights
        limit = MAX_EPOCHS if len(labels) <= MANY_SAMPLES else MAX_EPOCHS_MANY

        def held_out(out: Tensor, start: Start, rate: float) -> tuple[float, list[Tensor]]:
            """Return the lowest held-out loss, and the held-out logits after each epoch."""
            rows, inputs = out.nonzero()[:, 0], local_subset(self.network.inputs, out)
            losses, path = list[float](), list[Tensor]()
            for model in self._epochs(start, (~out).nonzero()[:, 0], rate, limit):
                z = self.network.with_model(model).logits(self.network.laid_out(start.before), inputs=inputs)
                path.append(z)
                temperature = Loss().temperature(z, labels[rows])
                losses.append(float((share[rows] * Loss().rows(z, labels[rows], temperature).numpy()).mean()))
                if len(losses) - int(np.argmin(losses)) > PATIENCE:
                    break
            return min(losses), path

        tried = {rate: held_out(*folds[0], rate) for rate in RATES}
        rate = min(tried, key=lambda rate: tried[rate][0])
        paths = [tried[rate][1], *(held_out(*fold, rate)[1] for fold in folds[1:])]
        masks = [out for out, _ in folds]
        epochs = range(min(map(len, paths)))
        candidates = [_calibrated(masks, [path[epoch] for path in paths], labels) for epoch in epochs]
        losses = [float((share * Loss().rows(torch.from_numpy(z), labels, 1.0).numpy()).mean()) for z in candidates]
        best = int(np.argmin(losses))
        return CrossFit(rate, best + 1, candidates[best])

    def fit(self, start: Start, rate: float, epochs: int) -> dict[str, Tensor]:
        """Train on all samples; return the weights by the names of `state_dict`."""
        *_, model = self._epochs(start, torch.arange(len(self.network.labels)), rate, epochs)
        return {name: model.get_parameter(name).detach().clone() for name in _weight_names(self.network.model)}

    def _epochs(self, start: Start, index: Tensor, rate: float, epochs: int) -> Iterator[nn.Module]:
        """Yield the model after each epoch."""
        samples, trained = _trainable(self.network, start, _weight_names(self.network.model))
        optimiser = torch.optim.Adam(trained, lr=rate)
        share = None if self.weights is None else torch.from_numpy(self.weights).float()

        def loss(z: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
            losses = F.cross_entropy(z, labels, reduction="none")
            return losses if share is None else share[rows].to(losses) * losses

        for epoch in range(epochs):
            order = index[torch.from_numpy(random_order(len(index), [self.seed, epoch]))]
            crop = self.augment
            crop = Crop(crop.black, 1000 * self.seed + epoch) if isinstance(crop, Crop) else crop
            before = self.network.laid_out(start.before, crop)
            _run_epoch(samples, before, trained, optimiser, torch.split(order, FINE_TUNING_BATCH), loss)
            yield samples.model


def lower_entropy(
    network: Network, start: Start, *, temperature: float, home: np.ndarray | None, seed: int
) -> LowerEntropy:
    """Lower the entropy of softmax(z/T) by Adam, over the scales and offsets of normalisation.

    Samples with a high entropy are left out, since their predictions are unreliable. Confident wrong predictions can
    make all predictions collapse to few classes. So the Kullback–Leibler divergence of the mean prediction from `home`
    is lowered, too. This is the mean prediction before the shift; None takes that of the samples themselves. Nothing
    changes if the divergence grows by more than `MAX_DRIFT` nats. A lower entropy alone is no evidence that more
    predictions are right. So the temperature restores the mean entropy.
    Wang et al. (2021), "Tent: fully test-time adaptation by entropy minimization", arXiv:2006.10726. Niu et al. (2023),
    "Towards stable test-time adaptation in dynamic wild world", arXiv:2302.12400. Liang, Hu, Feng (2020), "Do we really
    need to access the source data?", arXiv:2002.08546.
    """
    names = affine_names(network.model)
    if not names:
        return LowerEntropy({}, temperature, "no normalisation layer has scales and offsets")
    samples, trained = _trainable(network, start, names)
    before = samples.logits(start.before)
    first = mean_prediction(before, temperature)
    home = first if home is None else home
    log_home, mean = torch.from_numpy(np.log(np.maximum(home, MIN_SHARE))), torch.from_numpy(first)
    sums = torch.zeros_like(mean)

    def loss(z: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        log_p = torch.log_softmax(z / temperature, dim=1)
        p = log_p.exp()
        entropies = -(p * log_p.masked_fill(torch.isinf(log_p), 0.0)).sum(dim=1)  # masked classes do not count
        sums.add_(p.detach().sum(dim=0).to(sums))
        # The slope of Σ_k m_k ln(m_k/h_k) by m, with m a running mean of the predictions in earlier steps.
        slope = (mean.clamp(min=MIN_SHARE).log() - log_home).to(p)
        return torch.where(entropies.detach() < MAX_ENTROPY * np.log(z.shape[1]), entropies, 0.0) + p @ slope

    optimiser = torch.optim.Adam(trained, lr=ENTROPY_RATE)
    for epoch in range(1 if start.changed else ENTROPY_EPOCHS):
        order = torch.from_numpy(random_order(len(network.labels), [seed, epoch]))
        for part in torch.split(order, ENTROPY_BATCH):
            sums.zero_()
            _run_epoch(samples, start.before, trained, optimiser, [part], loss)
            mean.mul_(MEAN_MEMORY).add_(all_reduce_sum(sums), alpha=(1 - MEAN_MEMORY) / len(part))  # of all ranks
    after = samples.logits(start.before)
    growth = _divergence(mean_prediction(after, temperature), home) - _divergence(first, home)
    if not growth <= MAX_DRIFT:
        reason = f"predictions would collapse: the divergence of the mean prediction would grow by {growth:.2f} nats"
        return LowerEntropy({}, temperature, reason)
    tensors = {name: samples.model.get_parameter(name).detach().clone() for name in names}
    return LowerEntropy(tensors, _same_entropy(before, temperature, after), "")


def _weight_names(model: nn.Module) -> list[str]:
    """Return the names of all real parameters, also several names of one."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()]


def _trainable(network: Network, start: Start, names: Sequence[str]) -> tuple[Network, list[nn.Parameter]]:
    """Return a network with own copies of some parameters, which can be trained."""
    copies: dict[int, Tensor] = {}
    tensors = dict(start.changed)
    for name in names:
        old = network.model.get_parameter(name)
        tensors[name] = copies.setdefault(id(old), old.detach().clone())
    model = share_copy(network.model, tensors)
    trained = [model.get_parameter(name) for name in names]
    for parameter in trained:
        parameter.requires_grad_()
    return network.with_model(model), trained


def _run_epoch(
    samples: Network,
    before: nn.Module | None,
    trained: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    parts: Iterable[Tensor],
    loss: RowLoss,
) -> None:
    """Make one step of the optimiser for each set of sample numbers; ranks add their gradients."""
    for index in parts:
        sums = [torch.zeros_like(tensor) for tensor in trained]
        numbers = local_numbers(samples.inputs, index)
        with torch.enable_grad():
            for batch in local_subset(samples.inputs, index):
                rows, numbers = numbers[: len(batch.labels)], numbers[len(batch.labels) :]
                z = samples.batch_logits(batch, before)
                total = loss(z.float(), batch.labels, rows).sum() / len(index)
                gradients = torch.autograd.grad(total, trained, allow_unused=True)
                samples.count(backward=len(batch.labels))
                sums = [a if b is None else a + b for a, b in zip(sums, gradients, strict=True)]
        for tensor, gradient in zip(trained, sums, strict=True):
            tensor.grad = all_reduce_sum(gradient)
        optimiser.step()


def _calibrated(masks: Sequence[Tensor], parts: Sequence[Tensor], labels: Tensor) -> np.ndarray:
    """Join the held-out logits of the folds; each fold is divided by the temperature of the others."""
    joined = torch.empty(len(labels), parts[0].shape[1], dtype=parts[0].dtype)
    for out, z in zip(masks, parts, strict=True):
        joined[out] = z
    logits = joined.double().clone()
    for out in masks:
        logits[out] /= Loss().temperature(joined[~out], labels[~out])
    return logits.numpy()


def mean_prediction(logits: Tensor, temperature: float) -> np.ndarray:
    """Return the mean of softmax(z/T) over the rows."""
    return torch.softmax(logits.double() / temperature, dim=1).mean(dim=0).numpy()


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Compute the Kullback–Leibler divergence of p from q."""
    return float((p * np.log(np.maximum(p, 1e-12) / np.maximum(q, 1e-12))).sum())


def _same_entropy(before: Tensor, temperature: float, after: Tensor) -> float:
    """Return the temperature at which new logits have the mean entropy of the earlier ones at their temperature."""

    def entropy(logits: Tensor, t: float) -> float:
        return float(torch.special.entr(torch.softmax(logits.double() / t, dim=1)).sum(dim=1).mean())

    target, low, high = entropy(before, temperature), temperature / MAX_RATIO, temperature * MAX_RATIO
    if not entropy(after, low) < target < entropy(after, high):
        return temperature
    return float(brentq(lambda t: entropy(after, t) - target, low, high))
