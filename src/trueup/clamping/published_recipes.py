"""The published recipes for δ and T, for replication, without improvements.

The paper (recipe `paper`) and the released demonstration (recipe `code`) differ:

- Data term: both use the focal loss or cross-entropy. The code clamps p_y of the focal loss to [1e-7, 1 − 1e-7].
- Penalty: λ‖δ‖² in the paper, λ‖δ‖ in the code.
- λ: a tenth of the initial loss in the paper (`penalty="R1"`), 0.01 in the code.
- Steps: SGD at rate 0.001 without momentum in the paper, at rate 0.01 with momentum 0.9 in the code.
- Batches: 512 in the paper, 1,000 in the code, shuffled. Both run 100 epochs.
- Start of δ: random in the paper, with unknown scale (0.001 here), and 0.001·N(0, 1) in the code.
- T: starts at 1 without a positivity constraint in both.
- γ: lowest ECE in a pool, else 1, in the paper; 1 in the code.
- Augmentation: not mentioned in the paper; random crop, flip and cutout in the code (`augment=True`).

The code's class has other defaults: λ = 1, rate 0.001 with momentum 0.9, start 0.01·N(0, 1), and no focal loss.

Known problems:

- Without momentum, 100 epochs at rate 0.001 stop before the optimal T.
- The clamp of the focal loss makes the gradient of rows outside the clamp exactly zero.
- The norm ‖δ‖ has no gradient at δ = 0; torch uses zero.
- Nothing keeps T positive; the recipe raises an error if it is not.
- `penalty="R2"` at a random start with few coordinates makes λ so large that steps overshoot. A warning reports it, or
  an error if numbers become infinite.

The paper writes its loss as a sum over the samples. `reduction="sum"` uses the sum over a batch, which is the step of
the mean times the batch size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from trueup._core.optimize import FitError
from trueup.clamping.calibration_set import graph_rows, local_subset
from trueup.clamping.input_parameters import channel_norms
from trueup.clamping.maps import Shift, detach_map, scale_shape
from trueup.clamping.network import Network, gradients_of
from trueup.clamping.problem import Problem, Solution, penalty_by_rule
from trueup.clamping.theory import random, theorem, warn_if_contradicted
from trueup.losses._focal import focal_loss
from trueup.models._distributed import all_reduce_sum, raise_on_all_ranks, rank, world_size
from trueup.models.batches import Batch

_CLAMP = 1e-7  # distance of p_y from 0 and 1 in the released code
SCALES = (0.25, 0.5, 0.75, 1.0)
"""Default grid of factors for the closed form's δ."""


@dataclass(frozen=True)
class _SGDOptions:
    """Options in which the two recipes differ."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    penalty: float | Literal["R1", "R2"]
    """λ, if the problem leaves it to the recipe."""
    reduction: Literal["mean", "sum"] = "mean"
    clamp: float = 0.0
    augment: bool = False
    cutout: int = 6

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(f"lr must be positive and momentum in [0, 1), got lr {self.lr}, momentum {self.momentum}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {self.reduction!r}')


def paper(
    problem: Problem,
    *,
    epochs: int = 100,
    batch_size: int = 512,
    lr: float = 1e-3,
    momentum: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Solution:
    """Fit δ and T by the paper's SGD; the same seed gives the same bits on the same machine.

    Tang et al., "Neural Clamping" (2024), section 4.1.
    """
    return _descend(problem, _SGDOptions(epochs, batch_size, lr, momentum, "R1", reduction))


def code(
    problem: Problem,
    *,
    epochs: int = 100,
    batch_size: int = 1000,
    lr: float = 1e-2,
    momentum: float = 0.9,
    augment: bool = False,
    cutout: int = 6,
) -> Solution:
    """Fit δ and T as the released demonstration does; the same seed gives the same bits on the same machine.

    With `augment=True` each image gets a random crop, flip and cutout in each epoch, in the network's input space. The
    crop pads four rows and columns of zeros. The cutout sets a square of side `cutout` to zero (6 for CIFAR-10, 4 for
    CIFAR-100).
    """
    options = _SGDOptions(epochs, batch_size, lr, momentum, 0.01, clamp=_CLAMP, augment=augment, cutout=cutout)
    return _descend(replace(problem, norm="l2"), options)


def closed_form(problem: Problem, *, quantile: float = 0.0, scale: float | Sequence[float] = 1.0) -> Solution:
    """Take δ from Theorem 3.2 at T = 1, and fit only T.

    The cost is one forward-backward pass, and one forward pass for each scale. Among several scales, the one with the
    lowest loss on the calibration set is kept (`SCALES` is a small grid). Start, λ and norm of the problem are not
    used. Images that use their full range make δ zero, which is temperature scaling; a quantile above 0 avoids that.
    Tang et al. (2024), "Neural Clamping", section 4.3; its details are not published.
    """
    scales = (scale,) if isinstance(scale, int | float) else tuple(scale)
    if not scales or not all(0 < s <= 1 for s in scales):
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    network, loss = problem.network, problem.loss
    optimum = theorem(network, quantile=quantile)
    is_nonzero = bool(optimum.delta.any())
    fits = []
    for s in scales if is_nonzero else scales[:1]:
        before = problem.mapping(s * optimum.delta)
        logits = network.logits(before) if is_nonzero else network.plain_logits()
        temperature = loss.temperature(logits, network.labels)
        fits.append((loss.mean(logits, network.labels, temperature), s, before, logits, temperature))
    _, s, before, logits, temperature = min(fits, key=lambda entry: entry[:2])
    warn_if_contradicted(network, optimum, logits, 1.0)
    return Solution(before, temperature, 0.0, logits, notes={"scale": s, "gain": s * optimum.gain})


def augment_images(images: Tensor, draws: Tensor, cutout: int, *, padding: int = 4) -> Tensor:
    """Crop padded images (n, C, H, W), flip them, and set a square to zero, as given by `draws`.

    `draws` are numbers in [0, 1), (n, 5): row and column of the crop, flip, row and column of the square's centre.

    >>> image = torch.arange(9.0).reshape(1, 1, 3, 3)
    >>> augment_images(image, torch.tensor([[0.5, 0.5, 0.9, 0.0, 0.0]]), 2, padding=1)[0, 0].tolist()
    [[0.0, 1.0, 0.0], [5.0, 4.0, 3.0], [8.0, 7.0, 6.0]]
    """
    n, _, height, width = images.shape
    draws = draws.to(images.device)
    down, right = (draws[:, :2] * (2 * padding + 1)).long().unbind(dim=1)
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(draws[:, 2, None] >= 0.5, columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    which = torch.arange(n, device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    inside = []
    for size, draw in ((height, draws[:, 3]), (width, draws[:, 4])):
        start = (draw * size).long()[:, None] - cutout // 2
        position = torch.arange(size, device=images.device)
        inside.append((position >= start) & (position < start + cutout))
    return cropped.masked_fill(inside[0][:, None, :, None] & inside[1][:, None, None, :], 0.0)


def _descend(problem: Problem, options: _SGDOptions) -> Solution:
    network = problem.network
    generator, augment_generator = (torch.Generator().manual_seed(problem.seed + k) for k in (0, 1 + rank()))
    # This raises an error for logits and labels that cannot be fitted.
    initial_loss = problem.loss.mean(network.plain_logits(), network.labels, 1.0)
    delta = problem.start_delta(partial(random, seed=problem.seed)).clone().requires_grad_()
    temperature = torch.ones((), dtype=delta.dtype, device=delta.device, requires_grad=True)
    # A channel's scale is exp(a/ρ), with ρ the channel's norm, so one rate and one penalty suit both δ and a.
    spread = channel_norms(network).to(delta) if problem.input_map == "affine" else delta.new_empty(0)
    a = torch.zeros_like(spread, requires_grad=True)
    parameters = [delta, temperature, a] if len(a) else [delta, temperature]

    def mapping() -> Shift:
        return network.mapping(delta, (a / spread).exp().reshape(scale_shape(network.shape)) if len(a) else None)

    def penalty_term(weight: float) -> Tensor:
        vector = torch.cat([delta.flatten(), a])
        return weight * (vector.square().sum() if problem.norm == "l2sq" else torch.linalg.vector_norm(vector))

    penalty = _penalty_weight(problem, options, delta.detach())
    first = penalty_term(penalty).item()
    optimiser = torch.optim.SGD(parameters, lr=options.lr, momentum=options.momentum)
    for epoch in range(1, options.epochs + 1):
        for shares, size in _mini_batches(network, options.batch_size, generator):
            value, gradients = 0.0, [torch.zeros_like(p) for p in parameters]
            with raise_on_all_ranks(), torch.enable_grad():
                for batch in shares:
                    batch = _augment_batch(batch, augment_generator, options.cutout) if options.augment else batch
                    tempered = network.batch_logits(batch, mapping()) / temperature
                    total = focal_losses(tempered, batch.labels, problem.loss.gamma, options.clamp).sum() / size
                    batch_gradients = gradients_of(total, parameters)
                    network.count(backward=len(tempered))
                    gradients = [g + f for g, f in zip(gradients, batch_gradients, strict=True)]
                    value += total.item()
            weight = size if options.reduction == "sum" else 1
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = all_reduce_sum(g) * weight
            for p, g in zip((delta, a), torch.autograd.grad(penalty_term(penalty * weight), (delta, a)), strict=True):
                p.grad = g if p.grad is None else p.grad + g
            optimiser.step()
            _check_finite(temperature.item(), delta.norm().item(), penalty, epoch)
        norm = delta.norm().item()
        problem.progress(
            f"epoch {epoch}/{options.epochs}  loss {value:.4f}  T {temperature.item():.3f}  ‖δ‖ {norm:.3f}"
        )
    before, final = detach_map(mapping()), penalty_term(penalty).item()
    if final > max(initial_loss, first):
        warnings.warn(
            f"the descent overshot: the penalty of δ went from {first:.4g} to {final:.4g}, above the loss of the "
            f"original network, {initial_loss:.4g}; steps of lr {options.lr:g} are too long for λ = {penalty:.4g}",
            stacklevel=2,
        )
    return Solution(before, temperature.item(), penalty, network.logits(before), norm=problem.norm, penalty_value=final)


def focal_losses(tempered: Tensor, labels: Tensor, gamma: float, clamp: float) -> Tensor:
    """Compute the focal loss of each row, with p_y clamped to [clamp, 1 − clamp] as in the released code."""
    log_p = torch.log_softmax(tempered, dim=1).gather(1, labels[:, None])[:, 0]
    if clamp and gamma:
        p = log_p.exp().clamp(clamp, 1 - clamp)
        return -((1 - p) ** gamma) * p.log()
    return focal_loss(log_p, gamma)


def _penalty_weight(problem: Problem, options: _SGDOptions, delta: Tensor) -> float:
    penalty = options.penalty if problem.penalty == "auto" else problem.penalty
    if not isinstance(penalty, str):
        if math.isinf(penalty):
            raise ValueError("penalty must be finite for this recipe; for temperature alone use trueup.calibrate")
        return float(penalty)
    network = problem.network
    loss = problem.loss.mean(network.logits(network.mapping(delta)), network.labels, 1.0)
    return penalty_by_rule(penalty, loss, delta)


def _mini_batches(network: Network, size: int, generator: torch.Generator) -> Iterator[tuple[Iterable[Batch], int]]:
    """Yield this rank's share of each mini-batch, split into parts for one graph each, and the full batch size.

    The order is drawn for the samples of all ranks, so several ranks make the same steps as one.
    """
    most = graph_rows(math.prod(network.shape))
    if world_size() == 1:
        for batch in network.inputs.shuffled_batches(size, generator):
            yield network.inputs.split(batch, most), len(batch.labels)
    else:
        for chosen in torch.split(torch.randperm(len(network.labels), generator=generator), size):
            local = local_subset(network.inputs, chosen)
            yield (part for batch in local for part in network.inputs.split(batch, most)), len(chosen)


def _augment_batch(batch: Batch, generator: torch.Generator, cutout: int) -> Batch:
    if not batch.args or not isinstance(batch.args[0], Tensor) or batch.args[0].ndim != 4:
        raise ValueError("augment=True needs images (n, C, H, W) as the model's first argument")
    draws = torch.rand(len(batch.labels), 5, generator=generator)
    return batch._replace(args=(augment_images(batch.args[0], draws, cutout), *batch.args[1:]))


def _check_finite(temperature: float, norm: float, penalty: float, epoch: int) -> None:
    if not (temperature > 0 and math.isfinite(temperature + norm)):
        problem = "T became negative" if temperature <= 0 else "the descent diverged"
        raise FitError(
            f"{problem} in epoch {epoch}: T = {temperature:.4g}, ‖δ‖ = {norm:.4g}; this recipe has no guard against "
            f"it: use a smaller lr, a λ below {penalty:.4g}, or the recipes varpro and subspace, which cannot diverge"
        )
