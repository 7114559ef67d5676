"""Natural-gradient search for an input map. All parameter gradients follow from the gradient by the mapped input.

A forward and a backward pass of a mini-batch give G_i = ∂ℓ_i/∂(mapped input). The gradient of sample i by the map's
parameters is the vector-Jacobian product (∂M_θ(x_i)/∂θ)ᵀ G_i. It needs no pass through the network. The logarithm of
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
"""Number of recent per-sample gradients in the Fisher matrix."""
DAMPING = 0.05
"""Share of the Fisher matrix's mean diagonal that is added to its diagonal."""
N_AVERAGED_ITERATES = 5
"""Number of final iterates that are averaged."""
_WIDE = 400  # with more coordinates, Woodbury's identity gives a system with one equation per sample
_LEAST_T, _MOST_T = 1e-3, 1e3


class SampleGradients(NamedTuple):
    """Logits of some samples through a map, and the gradients of each one's loss."""

    logits: Tensor
    """(m, classes), not divided by the temperature."""
    theta: np.ndarray
    """Gradients by the map's coordinates, (m, r)."""
    log_temperature: np.ndarray
    """Gradients by ln T, (m,)."""


class _Tap(nn.Module):
    """A map that keeps its input and its output, through which gradients are taken."""

    source: Tensor
    mapped: Tensor

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mapped = self.before(x)
        self.source, self.mapped = x.detach(), mapped.detach().requires_grad_()
        return self.mapped.clone()  # a network may change its input in place, and a leaf forbids that


def logits_through(network: Network, before: nn.Module | None, index: Tensor | None = None) -> Tensor:
    """Compute logits of some samples, numbered over all ranks, in the order of their numbers."""
    inputs = None if index is None else local_subset(network.inputs, index)
    return network.logits(network.laid_out(before), inputs=inputs)


Residual = Callable[[Tensor, Tensor], Tensor]
"""Function from probabilities of samples and their numbers to the gradient of each loss by its logits."""


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
    """Return `sample_gradients`, and random gradients whose mean outer product is the Fisher information.

    The random gradient is Jᵀ(diag √p − p√pᵀ)v, with v normal and J the derivatives of the logits. Its mean and
    covariance are those of the gradient with a label drawn from p. But its size does not depend on a rare label. Few
    samples seldom contain the rare mistakes that cause most of the variance. The observed gradients then look far more
    significant than they are. The random gradients cost one backward pass.
    If `targets` are a teacher's probabilities, labels are drawn from them instead. Gradients by the probabilities
    themselves vanish near the teacher. Gradients by the network's own p are small for confident mistakes.
    """
    if targets.ndim == 1:
        # All samples are drawn at once, so a sample's numbers do not depend on its batch or rank.
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
            for number, residual_of in enumerate(residuals, start=1):
                residual = residual_of(p, rows)
                slope = (residual / temperature).to(z)
                (g,) = gradients_of(z, [tap.mapped], slope, retain_graph=number < len(residuals))
                network.count(backward=len(rows))
                by_theta = pull_back(before, theta.to(tap.source.device), tap.source, g)
                # d/d ln T of the cross-entropy of s = z/T is −Σ_k (p_k − q_k) s_k.
                by_t = -torch.where(torch.isinf(s), 0.0, residual * s).sum(dim=1)  # masked classes do not count
                parts[number - 1].append((to_cpu(z), by_theta.double().cpu(), by_t))
    gathered = []
    for batches in parts:
        none = (torch.empty(0, 0), torch.empty(0, len(theta), dtype=torch.float64), torch.empty(0).double())
        columns = zip(*(batches or [none]), strict=True)
        logits, by_theta, by_t = (all_gather_rows(torch.cat(column)) for column in columns)
        gathered.append(SampleGradients(logits, by_theta.numpy(), by_t.numpy()))
    return gathered


def pull_back(before: PixelSpace, theta: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """Compute each sample's gradient by θ, (m, r), from its gradient by the mapped input.

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
    """Minimise the mean cross-entropy of f(M_θ(x))/T plus |θ|²/(2N) over θ and T, from the given map.

    Each step is −η (F + D)⁻¹ v. F is the empirical Fisher matrix of recent per-sample gradients. v is the prior's
    gradient plus a running mean of mini-batch gradients. D is the prior's precision plus damping. T has no prior. η is
    halved for the last two fifths of the steps, and the final iterates are averaged. One scoring step over all samples
    follows; from such an estimate it is as good as the minimum.
    If targets are probabilities, each step draws labels from them. Gradients by the probabilities themselves vanish
    near the target, and would underestimate the curvature. The final step uses the probabilities, without the noise of
    the draw.
    Amari (1998), "Natural gradient works efficiently in learning".
    """
    n = len(index)
    theta = np.append(before.inner.theta.double().numpy(), np.log(temperature))
    r = len(theta)
    precision = np.append(np.full(r - 1, 1 / n), 0.0)
    limit = max(1.0, 0.3 * np.sqrt(r))

    def gradients_at(theta: np.ndarray, batch: Tensor, targets: Tensor) -> np.ndarray:
        current = PixelSpace(before.inner.with_theta(torch.from_numpy(theta[:-1]).float()), before.low, before.high)
        gradients = sample_gradients(network, current, targets, float(np.exp(theta[-1])), batch)
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
    """Draw one label from each row of probabilities; return labels unchanged.

    >>> draw_labels(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [0])
    tensor([1, 0])
    """
    if targets.ndim == 1:
        return targets
    uniform = torch.from_numpy(np.random.default_rng(seed).random(len(targets)))
    return (targets.double().cumsum(dim=1) <= uniform[:, None]).sum(dim=1).clamp(max=targets.shape[1] - 1)


def solve_damped(gradients: np.ndarray, vector: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Compute (UᵀU + D)⁻¹v, with U the gradients over √m, and D the precision plus damping.

    >>> solve_damped(np.eye(2), np.ones(2), np.ones(2)).round(4)
    array([0.6557, 0.6557])
    """
    u = gradients / np.sqrt(len(gradients))
    diagonal = precision + DAMPING * float(np.einsum("ij,ij", u, u)) / u.shape[1] + 1e-12
    if u.shape[1] <= _WIDE:
        return np.linalg.solve(u.T @ u + np.diag(diagonal), vector)
    # Woodbury's identity gives one equation per sample.
    scaled, inner = u / diagonal, vector / diagonal
    return inner - scaled.T @ np.linalg.solve(np.eye(len(u)) + scaled @ u.T, u @ inner)


def _mini_batches(index: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield mini-batches without end; each epoch has every sample once."""
    rest, epoch = index[:0], 0
    while True:
        if len(rest) < size:
            order = random_order(len(index), [seed, epoch])
            rest, epoch = torch.cat([rest, index[torch.from_numpy(order)]]), epoch + 1
        # A batch across two epochs may hold a sample twice; it is used once.
        yield torch.unique(rest[:size])
        rest = rest[size:]
