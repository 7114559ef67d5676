"""Natural-gradient search for an input map: every parameter's gradient comes from the one gradient of the input.

A forward and a backward pass of a mini-batch give G_i = ∂ℓ_i/∂(mapped input); the gradient of sample i by the map's
parameters is the vector-Jacobian product (∂M_θ(x_i)/∂θ)ᵀ G_i, which needs no pass through the network. The logarithm of
the temperature is one more coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.splits import random_order
from trueup.adaptation.composition import PixelSpace
from trueup.clamping.calibration_set import local_numbers, local_subset
from trueup.clamping.network import Network, gradients_of, to_cpu
from trueup.models._distributed import all_gather_rows, raise_on_all_ranks

MAX_FISHER_ROWS = 900
"""Per-sample gradients of which the Fisher matrix is made."""
DAMPING = 0.05
"""Of its mean diagonal, added to it."""
N_AVERAGED_ITERATES = 5
"""Iterates at the end of a search of which the mean is taken."""
_WIDE = 400  # from so many coordinates on, the system is solved among the samples
_LEAST_T, _MOST_T = 1e-3, 1e3


class SampleGradients(NamedTuple):
    """Logits of some samples through a map, and the gradients of each one's loss."""

    logits: Tensor
    """(m, classes), not divided by the temperature."""
    theta: np.ndarray
    """By the map's coordinates, (m, r)."""
    log_temperature: np.ndarray
    """By ln T, (m,)."""


class _Tap(nn.Module):
    """A map that keeps what came in and what went out, where gradients are asked for."""

    source: Tensor
    mapped: Tensor

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mapped = self.before(x)
        self.source, self.mapped = x.detach(), mapped.detach().requires_grad_()
        return self.mapped.clone()  # which a network may change in place, as no leaf


def logits_through(network: Network, before: nn.Module | None, index: Tensor | None = None) -> Tensor:
    """Logits of some samples, numbered over all ranks, in the order of their numbers."""
    inputs = None if index is None else local_subset(network.inputs, index)
    return network.logits(network.laid_out(before), inputs=inputs)


Residual = Callable[[Tensor, Tensor], Tensor]
"""From probabilities of some samples and their numbers to the slope of each one's loss by its logits."""


def sample_gradients(
    network: Network, before: PixelSpace, targets: Tensor, temperature: float, index: Tensor | None = None
) -> SampleGradients:
    """Run some samples forward and backward once.

    `targets` are labels (n,), or probabilities (n, classes), of all samples of all ranks.
    """
    return _gradients(network, before, temperature, index, [_by_targets(targets)])[0]


def fisher_gradients(
    network: Network, before: PixelSpace, targets: Tensor, temperature: float, index: Tensor | None = None, *, seed: int
) -> tuple[SampleGradients, SampleGradients]:
    """The same, and for each sample a random gradient whose outer product is on average its Fisher information.

    It is Jᵀ(diag √p − p√pᵀ)v with v normal and J the logits' derivatives: mean and covariance are those of the gradient
    where the label is drawn of the answer p itself, but it takes no rare label for it to be large. Few labels seldom
    hold the mistakes to which most of the variance is due; their own gradients then promise far more than there is. It
    costs a backward pass.
    Where `targets` are a teacher's probabilities, it is the gradient by labels drawn from these. Gradients by the
    probabilities vanish near the teacher; those by the network's own are small where it is sure and wrong.
    """
    if targets.ndim == 1:
        # Drawn for all samples, so that a sample's numbers do not depend on its batch or its rank.
        normal = np.random.default_rng(seed).standard_normal(network.plain_logits().shape)
        drawn = _by_fisher(torch.from_numpy(normal))
    else:
        drawn = _by_targets(draw_labels(targets, [seed, 0]))
    first, second = _gradients(network, before, temperature, index, [_by_targets(targets), drawn])
    return first, second


def _by_fisher(normal: Tensor) -> Residual:
    def residual(p: Tensor, rows: Tensor) -> Tensor:
        rooted = p.sqrt() * normal[rows]
        return rooted - p * rooted.sum(dim=1, keepdim=True)

    return residual


def _by_targets(targets: Tensor) -> Residual:
    return lambda p, rows: p - (F.one_hot(targets[rows], p.shape[1]) if targets.ndim == 1 else targets[rows])


def _gradients(
    network: Network, before: PixelSpace, temperature: float, index: Tensor | None, residuals: Sequence[Residual]
) -> list[SampleGradients]:
    """One forward pass over some samples, and a backward pass for each residual."""
    numbers = local_numbers(network.inputs, torch.arange(len(network.labels)) if index is None else index)
    inputs = network.inputs if index is None else local_subset(network.inputs, index)
    theta = before.inner.theta.float()
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in residuals]
    with raise_on_all_ranks(), torch.enable_grad():
        for batch in inputs:
            rows, numbers = numbers[: len(batch.labels)], numbers[len(batch.labels) :]
            tap = _Tap(network.laid_out(before))
            z = network.batch_logits(batch, tap)
            s = to_cpu(z).double() / temperature
            p = torch.softmax(s, dim=1)
            for number, of in enumerate(residuals, start=1):
                residual = of(p, rows)
                slope = (residual / temperature).to(z)
                (g,) = gradients_of(z, [tap.mapped], slope, retain_graph=number < len(residuals))
                network.count(backward=len(rows))
                by_theta = pull_back(before, theta.to(tap.source.device), tap.source, g)
                # d/d ln T of the cross-entropy of s = z/T is −Σ_k (p_k − q_k) s_k.
                by_t = -torch.where(torch.isinf(s), 0.0, residual * s).sum(dim=1)  # masked classes have no part in it
                parts[number - 1].append((to_cpu(z), by_theta.double().cpu(), by_t))
    gathered = []
    for batches in parts:
        none = (torch.empty(0, 0), torch.empty(0, len(theta), dtype=torch.float64), torch.empty(0).double())
        columns = zip(*(batches or [none]), strict=True)
        logits, by_theta, by_t = (all_gather_rows(torch.cat(column)) for column in columns)
        gathered.append(SampleGradients(logits, by_theta.numpy(), by_t.numpy()))
    return gathered


def pull_back(before: PixelSpace, theta: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """Each sample's gradient by θ, (m, r), from that by its mapped input.

    >>> from trueup.adaptation.input_maps import Offset
    >>> space = PixelSpace(Offset((2,)), torch.tensor(0.0), torch.tensor(1.0))
    >>> pull_back(space, torch.zeros(2), torch.rand(3, 2), torch.ones(3, 2))[0]
    tensor([0.1000, 0.1000])
    """

    def one(point: Tensor, g: Tensor) -> Tensor:
        return torch.func.vjp(lambda t: before.apply_map(t, point[None])[0], theta)[1](g)[0]

    return torch.func.vmap(one)(x.contiguous().to(theta.dtype), gradient.contiguous().to(theta.dtype))


def natural_gradient(
    network: Network,
    before: PixelSpace,
    targets: Tensor,
    index: Tensor,
    temperature: float,
    n_steps: int,
    batch_size: int,
    seed: int,
) -> tuple[Tensor, float]:
    """Minimise the mean cross-entropy of f(M_θ(x))/T plus |θ|²/(2N) over θ and T, from where the map is.

    Each step is −η (F + D)⁻¹ v: F the empirical Fisher matrix of the last per-sample gradients, v the prior's gradient
    plus a running mean of those of the mini-batches, D the prior's precision plus damping. η is halved for the last two
    fifths of the steps; the last iterates are averaged. A step over all samples follows: one step of scoring from an
    estimate that is right but for the noise of mini-batches is as good as the minimum. T has no prior.
    Where targets are probabilities, each step draws labels of them: gradients by the probabilities themselves vanish as
    the answers come near, and what they would say of the curvature is far too little. The last step's v is by the
    probabilities, without the noise of the draw.
    Amari, "Natural gradient works efficiently in learning" (1998).
    """
    n = len(index)
    theta = np.append(before.inner.theta.double().numpy(), np.log(temperature))
    r = len(theta)
    precision = np.append(np.full(r - 1, 1 / n), 0.0)
    limit = max(1.0, 0.3 * np.sqrt(r))

    def gradients_at(theta: np.ndarray, some: Tensor, answers: Tensor) -> np.ndarray:
        current = PixelSpace(before.inner.with_theta(torch.from_numpy(theta[:-1]).float()), before.low, before.high)
        gradients = sample_gradients(network, current, answers, float(np.exp(theta[-1])), some)
        return np.column_stack([gradients.theta, gradients.log_temperature])

    def step_from(theta: np.ndarray, rows: np.ndarray, mean: np.ndarray, size: float) -> np.ndarray:
        direction = solve_damped(rows, mean + precision * theta, precision)
        theta = theta - size * min(1.0, limit / max(float(np.linalg.norm(direction)), 1e-300)) * direction
        theta[-1] = np.clip(theta[-1], np.log(_LEAST_T), np.log(_MOST_T))
        return theta

    rows, mean, iterates = np.empty((0, r)), np.zeros(r), []
    for step, batch in zip(range(n_steps), _mini_batches(index, batch_size, seed), strict=False):
        gradients = gradients_at(theta, batch, draw_labels(targets, [seed, step]))
        mean = 0.5 * mean + 0.5 * gradients.mean(axis=0) if step else gradients.mean(axis=0)
        rows = np.concatenate([rows, gradients])[-MAX_FISHER_ROWS:]
        theta = step_from(theta, rows, mean, 1.0 if step < 0.6 * n_steps else 0.5)
        iterates.append(theta)
    theta = np.mean(iterates[-min(N_AVERAGED_ITERATES, max(1, n_steps // 2)) :], axis=0)
    gradients = gradients_at(theta, index, targets)
    theta = step_from(theta, gradients if targets.ndim == 1 else rows, gradients.mean(axis=0), 1.0)
    return torch.from_numpy(theta[:-1]).float(), float(np.exp(theta[-1]))


def draw_labels(targets: Tensor, seed: Sequence[int]) -> Tensor:
    """One label of each row of probabilities; labels as they are.

    >>> draw_labels(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [0])
    tensor([1, 0])
    """
    if targets.ndim == 1:
        return targets
    uniform = torch.from_numpy(np.random.default_rng(seed).random(len(targets)))
    return (targets.double().cumsum(dim=1) <= uniform[:, None]).sum(dim=1).clamp(max=targets.shape[1] - 1)


def solve_damped(gradients: np.ndarray, vector: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """(UᵀU + D)⁻¹v, U being the gradients over √m, D the precision plus a share of UᵀU's mean diagonal.

    >>> solve_damped(np.eye(2), np.ones(2), np.ones(2)).round(4)
    array([0.6557, 0.6557])
    """
    u = gradients / np.sqrt(len(gradients))
    diagonal = precision + DAMPING * float(np.einsum("ij,ij", u, u)) / u.shape[1] + 1e-12
    if u.shape[1] <= _WIDE:
        return np.linalg.solve(u.T @ u + np.diag(diagonal), vector)
    # Woodbury's identity: as many equations as samples.
    scaled, inner = u / diagonal, vector / diagonal
    return inner - scaled.T @ np.linalg.solve(np.eye(len(u)) + scaled @ u.T, u @ inner)


def _mini_batches(index: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Endless mini-batches, each sample once before any comes again."""
    rest, epoch = index[:0], 0
    while True:
        if len(rest) < size:
            order = random_order(len(index), [seed, epoch])
            rest, epoch = torch.cat([rest, index[torch.from_numpy(order)]]), epoch + 1
        # A sample may come twice where an epoch ends inside of a batch; passes take each once.
        yield torch.unique(rest[:size])
        rest = rest[size:]
