"""A network that keeps the order of the logits and treats all classes alike."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trueup.calibrators.base import Calibrator
from trueup.calibrators.diagonal import centre_rows
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import as_weighted, find_absent, upcast_half
from trueup.core.module import softplus
from trueup.core.splits import random_order

_LEAST = 1e-3
"""The least slope, as a part of 1/T: rounding then never makes equal what was in order."""
_NEUTRAL = math.log(math.expm1(1 - _LEAST))
"""Where a slope is 1/T: _LEAST + softplus(_NEUTRAL) = 1."""
_PATIENCE = 5
"""Epochs without a gain on the held-out rows before training stops."""


class OrderInvariant(Calibrator):
    """Stretch the gaps between sorted logits y₁ ≥ … ≥ y_K by a network: o_j − o_{j+1} = v_j (y_j − y_{j+1}), v > 0.

    v = softplus(m(y))/T, m a network with two hidden layers that sees the sorted logits less their mean, so that
    classes are treated alike. It starts at temperature scaling, v = 1/T, and trains for as many epochs as served best
    a fifth of the rows, held out. Not for small samples: a network overfits, and its seed matters.
    Rahimi et al., "Intra order-preserving functions for calibration of multi-class neural networks" (2020).

    >>> untrained = torch.zeros(5, 4), torch.zeros(5, 6), torch.zeros(2, 6)
    >>> OrderInvariant(2.0, *untrained)(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([[ 0.0000, -1.0000, -0.5000]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = False  # trained in shuffled batches
    differentiable = True

    temperature: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    def __init__(self, temperature: Tensor | float, first: Any, second: Any, third: Any) -> None:
        super().__init__()
        for name, value in (("temperature", temperature), ("first", first), ("second", second), ("third", third)):
            self.keep(name, value)
        layers = self.first, self.second, self.third
        if not (self.temperature.ndim == 0 and self.temperature > 0 and torch.isfinite(self.temperature)):
            raise ValueError(f"temperature must be one positive number, got {temperature}")
        if any(layer.ndim != 2 for layer in layers) or not (
            len(self.first) + 1 == self.second.shape[1]
            and len(self.second) + 1 == self.third.shape[1]
            and len(self.third) + 2 == self.first.shape[1]
        ):
            shapes = ", ".join(str(tuple(layer.shape)) for layer in layers)
            raise ValueError(f"layers must be (h, K + 1), (g, h + 1) and (K − 1, g + 1), got {shapes}")

    def map(self, logits: Tensor) -> Tensor:
        """Stretch the gaps; the largest logit becomes 0."""
        self._check_classes(logits, self.first.shape[1] - 1)
        z = logits.double()
        ordered, order = z.sort(dim=1, descending=True)
        stretched = _stretch_gaps(ordered, (self.first, self.second, self.third)) / self.temperature
        return torch.zeros_like(z).scatter(1, order, stretched).to(logits.dtype)

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        hidden: int = 100,
        epochs: int = 40,
        batch: int = 256,
        seed: int = 0,
        weights: Any = None,
    ) -> Self:
        """Order-invariant network: train the network by Adam on the likelihood, from temperature scaling."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        temperature = Temperature.fit(z, y, weights=w).temperature
        ordered, order = upcast_half(z).double().sort(dim=1, descending=True)
        rank = (order == y[:, None]).int().argmax(dim=1)
        settings = {"temperature": float(temperature), "hidden": hidden, "batch": batch}
        share = None if w is None else w / w.mean()
        layers = _train(ordered, rank, share, epochs=epochs, seed=seed, **settings)
        return cls(temperature, *layers)


def _stretch_gaps(ordered: Tensor, layers: tuple[Tensor, ...]) -> Tensor:
    """Sorted logits with stretched gaps, from 0 down, at temperature 1."""
    x = centre_rows(ordered)
    for layer in layers[:-1]:
        x = torch.relu(x @ layer[:, :-1].T + layer[:, -1])
    slopes = _LEAST + softplus(x @ layers[-1][:, :-1].T + layers[-1][:, -1] + _NEUTRAL)
    # From the top down: near the predicted class, where it matters, nothing is lost by cancellation.
    gaps = ordered[:, :-1] - ordered[:, 1:]
    if (absent := find_absent(ordered)) is not None:
        gaps = gaps.masked_fill(absent[:, 1:], 0.0)
    return torch.cat([torch.zeros_like(ordered[:, :1]), -(slopes * gaps).cumsum(dim=1)], dim=1)


class _Trainer:
    """A network in training on z-scored sorted logits; its loss is that of the labels' ranks."""

    def __init__(
        self,
        ordered: Tensor,
        rank: Tensor,
        share: Tensor | None,
        *,
        temperature: float,
        hidden: int,
        batch: int,
        seed: int,
    ) -> None:
        self.ordered, self.rank, self.temperature, self.batch = ordered, rank, temperature, batch
        self.share = share
        self.generator = torch.Generator().manual_seed(seed)
        x = centre_rows(ordered)
        self.middle, width = x.mean(dim=0), x.std(dim=0, correction=0)
        self.width = torch.where(width > 0, width, 1.0)
        classes = ordered.shape[1]
        # The last layer starts at zero, which is temperature scaling.
        last = ordered.new_zeros(classes - 1, hidden + 1)
        self.raw = [self._uniform(hidden, classes), self._uniform(hidden, hidden), last]
        for layer in self.raw:
            layer.requires_grad_()
        self.adam = torch.optim.Adam(self.raw, lr=1e-3, weight_decay=5e-4)

    def _uniform(self, outputs: int, inputs: int) -> Tensor:
        draw = torch.rand(outputs, inputs + 1, generator=self.generator, dtype=torch.float64)
        return ((2 * draw - 1) / math.sqrt(inputs)).to(self.ordered.device)

    def layers(self) -> tuple[Tensor, ...]:
        """The network, with the z-scores folded into its first layer."""
        first = self.raw[0][:, :-1] / self.width
        bias = self.raw[0][:, -1] - first @ self.middle
        return torch.cat([first, bias[:, None]], dim=1), self.raw[1], self.raw[2]

    def loss(self, rows: Tensor) -> Tensor:
        """Mean negative log-likelihood of some rows."""
        stretched = _stretch_gaps(self.ordered[rows], self.layers()) / self.temperature
        stretched = stretched.masked_fill(self.ordered[rows] == -torch.inf, -torch.inf)
        if self.share is None:
            return cross_entropy(stretched, self.rank[rows])
        return (self.share[rows] * cross_entropy(stretched, self.rank[rows], reduction="none")).mean()

    @torch.enable_grad()
    def epoch(self, rows: Tensor) -> None:
        """Train once on each of the rows, in batches."""
        shuffled = rows[torch.randperm(len(rows), generator=self.generator).to(rows.device)]
        for some in torch.split(shuffled, self.batch):
            self.adam.zero_grad()
            self.loss(some).backward()  # type: ignore[no-untyped-call]
            self.adam.step()


@torch.no_grad()
def _train(
    ordered: Tensor, rank: Tensor, share: Tensor | None, *, epochs: int, seed: int, **settings: Any
) -> tuple[Tensor, ...]:
    """Layers trained on every row, for as many epochs as served best a fifth that was held out."""
    n = len(ordered)
    everything = torch.from_numpy(random_order(n, torch.Generator().manual_seed(seed))).to(ordered.device)
    held, rest = everything[: n // 5], everything[n // 5 :]
    enough = 0
    if len(held):
        trial = _Trainer(ordered, rank, share, seed=seed, **settings)
        best = float(trial.loss(held))
        for epoch in range(1, epochs + 1):
            trial.epoch(rest)
            now = float(trial.loss(held))
            if now < best:
                best, enough = now, epoch
            elif epoch >= enough + _PATIENCE:
                break
    final = _Trainer(ordered, rank, share, seed=seed, **settings)
    start, untrained = float(final.loss(everything)), tuple(layer.clone() for layer in final.layers())
    for _ in range(enough):
        final.epoch(everything)
    return final.layers() if float(final.loss(everything)) < start else untrained
