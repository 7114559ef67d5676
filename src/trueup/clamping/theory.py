"""What the paper proves: Lemma 3.1, a test of the temperature; Theorem 3.2, a closed form for δ; and where δ starts.

At the best temperature the true classes' logits equal the expected ones in sum; the closed form raises total entropy.
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
    """How far a temperature is from satisfying the constraint of Lemma 3.1."""

    total: float
    """Σ_i w_i (z_iy − Σ_k q_ik z_ik); zero at the optimum."""
    relative: float
    """|total| beside Σ_i w_i sqrt(Var_q z_i), what the rows' own spread would allow: below 1e-6 is converged."""


def lemma_residual(logits: Any, labels: Any, *, temperature: float = 1.0, gamma: float = 0.0) -> Residual:
    """Measure by how much a temperature misses the constraint of Lemma 3.1.

    The residual is Σ_i w_i (z_iy − z_iᵀq_i) with q = softmax(z/T), z the logits at the shifted inputs. Of all
    distributions that satisfy it at zero, softmax(z/T) has the most entropy; it is also the condition for T to be best,
    for cross-entropy with w = 1 and for the focal loss with w = (1 − p)^γ − γ (1 − p)^(γ−1) p ln p at p = q_y.
    Tang et al., "Neural Clamping" (2024), Lemma 3.1.

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
    """The gradient of the total entropy by the input, Σ_i ∇_x H(softmax(f(x_i)/T)), by one forward-backward pass.

    Tang et al., "Neural Clamping" (2024), Theorem 3.2.
    """
    return network.input_gradient(lambda z, y: entropy_slope(z, temperature)).cpu()


@dataclass(frozen=True)
class Theorem:
    """The closed form, with what it promises."""

    delta: Tensor
    gain: float
    """By how much the mean entropy should rise, to first order: δᵀg/n."""


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
    g = network.input_gradient(lambda z, y: entropy_slope(z, temperature)).cpu()
    corner = scale * entropy_corner(g, smallest, largest, (low, high))
    if not bool(corner.any()):
        warnings.warn(
            "Theorem 3.2 gives δ = 0: wherever entropy would rise, some input reaches the box's end already; "
            "a quantile above 0 leaves such inputs out",
            stacklevel=3,
        )
    gain = float((corner * g).sum()) / len(network.labels)
    return Theorem(corner.to(network.device, network.dtype), gain)


def entropy_corner(gradient: Tensor, smallest: Tensor, largest: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """The δ of most δᵀg among those that keep inputs between `smallest` and `largest` inside the box.

    >>> g, ones = torch.tensor([-1.0, 2.0, 0.0]), torch.ones(3)
    >>> entropy_corner(g, 0.2 * ones, 0.7 * ones, (0 * ones, ones))
    tensor([-0.2000,  0.3000,  0.0000])
    """
    low, high = box
    down, up = (smallest - low).clamp(min=0), (high - largest).clamp(min=0)
    return torch.where(gradient < 0, -down, torch.where(gradient > 0, up, torch.zeros_like(up)))


def entropy_slope(logits: Tensor, temperature: float) -> Tensor:
    """∂H(softmax(z/T))/∂z = −(1/T) p (ln p + H), row by row.

    >>> entropy_slope(torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[-0.1966,  0.1966]])
    """
    log_p = torch.log_softmax(logits / temperature, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(dim=1, keepdim=True)
    return -p * (log_p + entropy) / temperature


def warn_if_contradicted(network: Network, closed_form: Theorem, logits: Tensor, temperature: float) -> None:
    """Warn where entropy fell though the theorem's first order promised a rise: δ is outside the linear regime."""
    rise = metrics.entropy(logits / temperature) - metrics.entropy(network.plain_logits() / temperature)
    if closed_form.gain > 0 > rise:
        warnings.warn(
            f"Theorem 3.2 promised a mean entropy higher by {closed_form.gain:.4g}, and it fell by {-rise:.4g}: "
            "its first order does not reach this far; try a smaller scale",
            stacklevel=3,
        )


START_SCALE = 1e-3
"""Standard deviation of a random start in the released demonstration; its class has 0.01 by default."""


def zero(network: Network) -> Tensor:
    """Start at δ = 0, where the network is the caller's own."""
    return torch.zeros(network.shape, dtype=network.dtype, device=network.device)


def random(network: Network, *, seed: int, scale: float = START_SCALE) -> Tensor:
    """Start at normal numbers of standard deviation `scale`, drawn on the CPU: a seed means the same on any device."""
    if not scale >= 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(network.shape, generator=generator, dtype=torch.float64) * scale
    return delta.to(network.device, network.dtype)


def data_driven(network: Network, *, temperature: float = 1.0, quantile: float = 0.0, scale: float = 1.0) -> Tensor:
    """Start where Theorem 3.2 says that total entropy rises most, to first order, with every input kept in its box.

    With g = Σ_i ∇_x H(softmax(f(x_i)/T)): δ_j = −(min_i x_ij − low_j) where g_j < 0, and high_j − max_i x_ij where
    g_j > 0. Images that use their whole range leave no room, and δ is zero, which a warning says. `quantile` takes the
    q and 1 − q quantiles in place of minimum and maximum (what then leaves the box is clipped); `scale` multiplies δ.
    Costs a forward-backward pass, and one forward to see whether the entropy did rise.
    Tang et al., "Neural Clamping" (2024), Theorem 3.2.
    """
    closed_form = theorem(network, temperature=temperature, quantile=quantile, scale=scale)
    if bool(closed_form.delta.any()):
        warn_if_contradicted(network, closed_form, network.logits(network.mapping(closed_form.delta)), temperature)
    return closed_form.delta
