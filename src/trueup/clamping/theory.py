"""Lemma 3.1 and Theorem 3.2 of Neural Clamping, and starts for δ.

Lemma 3.1 tests a temperature: at the optimum the logits of the true classes and the expected logits have equal sums.
Theorem 3.2 is a closed form for the δ that raises the total entropy most.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup import metrics
from trueup._core import native
from trueup.clamping.network import Network, box_ends, extent
from trueup.losses._focal import focal_weight
from trueup.models._tensors import as_tensors, upcast_half


class Residual(NamedTuple):
    """Residual of the constraint of Lemma 3.1."""

    total: float
    """Σ_i w_i (z_iy − Σ_k q_ik z_ik); zero at the optimum."""
    relative: float
    """|total| / Σ_i w_i sqrt(Var_q z_i); below 1e-6 the temperature has converged."""


def lemma_residual(logits: Any, labels: Any, *, temperature: float = 1.0, gamma: float = 0.0) -> Residual:
    """Compute the residual of the constraint of Lemma 3.1 at a temperature.

    The residual is Σ_i w_i (z_iy − z_iᵀq_i) with q = softmax(z/T), and z the logits at the shifted inputs. Among all
    distributions with residual zero, softmax(z/T) has maximal entropy. Residual zero is also the optimality condition
    for T. Cross-entropy has w = 1. The focal loss has w = (1 − p)^γ − γ (1 − p)^(γ−1) p ln p at p = q_y.
    Tang et al. (2024), "Neural Clamping", Lemma 3.1, arXiv:2209.11604.

    >>> import numpy as np
    >>> from trueup import METHODS
    >>> z = np.random.default_rng(0).normal(size=(500, 4))
    >>> y = np.random.default_rng(1).integers(0, 4, 500)
    >>> y[:300] = z[:300].argmax(axis=1)
    >>> fitted = METHODS["temperature"](z, y)
    >>> print(f"{lemma_residual(z, y).relative:.4f}")
    0.1100
    >>> print(f"{lemma_residual(z, y, temperature=float(fitted.temperature)).relative:.4f}")
    0.0000
    """
    z, y = as_tensors(logits, labels)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if not gamma >= 0:
        raise ValueError(f"gamma must not be negative, got {gamma}")
    if not len(z):
        return Residual(float("nan"), float("nan"))
    total = spread = 0.0
    for rows in native.row_chunks(len(z), z.shape[1], native.DEFAULT_CHUNK):
        x, label = upcast_half(z[rows]).double(), y[rows]
        x = x - x.amax(dim=1, keepdim=True)
        log_q = torch.log_softmax(x / temperature, dim=1)
        q = log_q.exp()
        mean = (q * x).sum(dim=1)
        deviation = (q * (x - mean[:, None]) ** 2).sum(dim=1).sqrt()
        weight, _ = focal_weight(log_q.gather(1, label[:, None])[:, 0], gamma)
        total += float((weight * (x.gather(1, label[:, None])[:, 0] - mean)).sum())
        spread += float((weight * deviation).sum())
    return Residual(total, abs(total) / spread if spread else float(total != 0))


def entropy_gradient(network: Network, *, temperature: float = 1.0) -> Tensor:
    """Compute the gradient of the total entropy by the input, Σ_i ∇_x H(softmax(f(x_i)/T)), in one pass.

    Tang et al. (2024), "Neural Clamping", Theorem 3.2, arXiv:2209.11604.
    """
    return network.input_gradient(lambda z, y: entropy_slope(z, temperature)).cpu()


@dataclass(frozen=True)
class Theorem:
    """The closed form of Theorem 3.2."""

    delta: Tensor
    gain: float
    """First-order increase of the mean entropy, δᵀg/n."""


def theorem(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Theorem:
    """Compute the closed form of Theorem 3.2 in one forward-backward pass."""
    if network.box is None:
        raise ValueError("box must be given for the data-driven start: it keeps every x + δ inside, got None")
    if not 0 <= quantile < 0.5:
        raise ValueError(f"quantile must lie in [0, 0.5), got {quantile}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    low, high = box_ends(network)
    smallest, largest = extent(network, quantile)
    g = entropy_gradient(network, temperature=temperature)
    corner = scale * entropy_corner(g, smallest, largest, (low, high))
    if not bool(corner.any()):
        warnings.warn(
            "Theorem 3.2 gives δ = 0: in every direction of rising entropy some input is already at the end of the "
            "box; a quantile above 0 ignores such inputs",
            stacklevel=3,
        )
    gain = float((corner * g).sum()) / len(network.labels)
    return Theorem(corner.to(network.device, network.dtype), gain)


def entropy_corner(gradient: Tensor, smallest: Tensor, largest: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """Return the δ with the largest δᵀg that keeps inputs between `smallest` and `largest` inside the box.

    >>> g, ones = torch.tensor([-1.0, 2.0, 0.0]), torch.ones(3)
    >>> entropy_corner(g, 0.2 * ones, 0.7 * ones, (0 * ones, ones))
    tensor([-0.2000,  0.3000,  0.0000])
    """
    low, high = box
    down, up = (smallest - low).clamp(min=0), (high - largest).clamp(min=0)
    return torch.where(gradient < 0, -down, torch.where(gradient > 0, up, torch.zeros_like(up)))


def entropy_slope(logits: Tensor, temperature: float) -> Tensor:
    """Compute ∂H(softmax(z/T))/∂z = −(1/T) p (ln p + H) for each row.

    >>> entropy_slope(torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[-0.1966,  0.1966]])
    """
    log_p = torch.log_softmax(logits / temperature, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=1, keepdim=True)
    return -p * (log_p + entropy) / temperature


def warn_if_contradicted(network: Network, closed_form: Theorem, logits: Tensor, temperature: float) -> None:
    """Warn if the entropy fell against the first-order prediction: δ is outside the linear regime."""
    rise = metrics.entropy(logits / temperature) - metrics.entropy(network.plain_logits() / temperature)
    if closed_form.gain > 0 > rise:
        warnings.warn(
            f"Theorem 3.2 predicts a mean entropy higher by {closed_form.gain:.4g}, but it fell by {-rise:.4g}: "
            "δ is too large for the first-order prediction; try a smaller scale",
            stacklevel=3,
        )


START_SCALE = 1e-3
"""Standard deviation of a random start in the released demonstration; the default of its class is 0.01."""


def zero(network: Network) -> Tensor:
    """Start at δ = 0."""
    return torch.zeros(network.shape, dtype=network.dtype, device=network.device)


def random(network: Network, *, seed: int, scale: float = START_SCALE) -> Tensor:
    """Start at normal numbers with standard deviation `scale`, drawn on the CPU, so seeds agree across devices."""
    if not scale >= 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(network.shape, generator=generator, dtype=torch.float64) * scale
    return delta.to(network.device, network.dtype)


def data_driven(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Tensor:
    """Start at the δ of Theorem 3.2: the largest first-order increase of the total entropy within the box.

    With g = Σ_i ∇_x H(softmax(f(x_i)/T)): δ_j = −(min_i x_ij − low_j) if g_j < 0, and high_j − max_i x_ij if g_j > 0.
    Images that use their full range give δ = 0 with a warning. `quantile` replaces minimum and maximum by the q and
    1 − q quantiles; values outside the box are then clipped. `scale` multiplies δ. The cost is a forward-backward pass,
    and a forward pass that checks the entropy.
    Tang et al. (2024), "Neural Clamping", Theorem 3.2, arXiv:2209.11604.
    """
    closed_form = theorem(network, temperature=temperature, quantile=quantile, scale=scale)
    if bool(closed_form.delta.any()):
        warn_if_contradicted(network, closed_form, network.logits(network.mapping(closed_form.delta)), temperature)
    return closed_form.delta
