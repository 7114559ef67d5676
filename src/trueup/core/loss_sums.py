"""Losses with their derivatives: the focal loss of a row, and sums over the rows of what scaling minimises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import NEVER, find_absent, upcast_half
from trueup.core.native import as_float64, map_threads

_LEAST_REST = 1e-12
"""The least 1 − p that is raised to a power: of a power below 1 the slope has no bound at 0."""


def label_rest(log_p: Tensor) -> Tensor:
    """1 − p of log-probabilities without cancellation, never quite 0."""
    return (-torch.expm1(log_p)).clamp(min=_LEAST_REST)


def focal_loss(log_p: Tensor, gamma: float, *, detach_weight: bool = False) -> Tensor:
    """The focal loss −(1 − p)^γ ln p of the labels' log-probabilities; with γ = 0 the cross-entropy.

    With `detach_weight` no gradient flows through (1 − p)^γ.

    >>> f"{focal_loss(torch.tensor(0.5).log(), 1.0):.4f}"
    '0.3466'
    """
    weight = label_rest(log_p).pow(gamma)
    return -(weight.detach() if detach_weight else weight) * log_p


def focal_weight(log_p: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The factor w that the focal loss puts before cross-entropy's gradient, ∂L/∂s = w (p − e_y), and p dw/dp.

    w = (1 − p)^γ (1 + γ r) with r = −p ln p/(1 − p), which is 1 where p is 1 to the last digit.

    >>> print(*(f"{float(x):.4f}" for x in focal_weight(torch.tensor(0.5).log(), 1.0)))
    0.8466 -0.6534
    """
    p, rest, safe = log_p.exp(), -torch.expm1(log_p), label_rest(log_p)
    ratio = torch.where(rest > _LEAST_REST, -p * log_p / safe, torch.ones_like(p))
    weight = rest**gamma * (1 + gamma * ratio)
    turn = -gamma * safe ** (gamma - 1) * p * (2 + log_p + (gamma - 1) * ratio)
    return weight, turn if gamma else torch.zeros_like(p)


def temperature_sums(
    logits: Tensor, labels: Tensor, beta: float, weights: Tensor | None = None, *, quick: bool = False
) -> tuple[float, float, float]:
    """Σ_i w_i (ln Σ_k exp(β z_ik) − β z_iy), and its first two derivatives in β, in one pass; without weights w = 1.

    A quick pass works on float32 in float32: right to about 1e-6, which is enough to find where to look closely.
    """
    y = labels.contiguous()
    if not native.usable(logits):
        return _torch_temperature(logits, labels, beta, weights)

    def part(parts: Iterator[tuple[int, Tensor]]) -> list[tuple[float, float, float]]:
        return [
            native.temperature_pass(chunk, y[at:], beta, None if weights is None else weights[at:], quick=quick)
            for at, chunk in parts
        ]

    sums = chain.from_iterable(map_threads(logits, part))
    value, slope, curvature = (math.fsum(column) for column in zip(*sums, strict=True))
    return value, slope, curvature


def vector_sums(
    logits: Tensor,
    labels: Tensor,
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    scale: float = 1.0,
    shift: np.ndarray | None = None,
    weights: Tensor | None = None,
    quick: bool = False,
) -> np.ndarray:
    """Loss of softmax(w ⊙ u + b) with u = scale·z − shift, summed over the rows, and its gradient: (1 + 2K,).

    Of `weights` each row has one. A quick pass works on float32 in float32.
    """
    y = labels.contiguous()
    if not native.usable(logits):
        return _torch_vector(logits, labels, weight, bias, scale, shift, weights)

    def part(parts: Iterator[tuple[int, Tensor]]) -> np.ndarray:
        sums = np.zeros(1 + 2 * logits.shape[1])
        for at, chunk in parts:
            shifts = None if shift is None else shift[at:]
            rows = None if weights is None else weights[at:]
            native.vector_pass(chunk, y[at:], weight, bias, shifts, rows, sums, scale=scale, quick=quick)
        return sums

    total: np.ndarray = sum(map_threads(logits, part), start=np.zeros(1 + 2 * logits.shape[1]))
    return total


def _torch_vector(
    logits: Tensor,
    labels: Tensor,
    weight: np.ndarray,
    bias: np.ndarray,
    scale: float,
    shift: np.ndarray | None,
    weights: Tensor | None = None,
) -> np.ndarray:
    classes = logits.shape[1]
    total = np.zeros(1 + 2 * classes)
    w, b = (torch.from_numpy(v).to(upcast_half(logits[:0])) for v in (weight, bias))
    for rows in native.row_chunks(len(logits), classes, native.CACHE):
        u = scale * upcast_half(logits[rows])
        if shift is not None:
            u = u - torch.from_numpy(shift[rows]).to(u)[:, None]
        label = labels[rows, None]
        if (absent := find_absent(u)) is None:
            log_q = torch.log_softmax(u * w + b, dim=1)
        else:
            u = u.masked_fill(absent, 0.0)
            log_q = torch.log_softmax((u * w + b).masked_fill(absent, -torch.inf), dim=1)
        residual = torch.exp(log_q)
        residual.scatter_add_(1, label, -torch.ones_like(label, dtype=u.dtype))
        losses = log_q.gather(1, label)
        if weights is not None:
            losses, residual = (x * weights[rows, None].to(x) for x in (losses, residual))
        total[0] -= float(as_float64(losses).sum())
        total[1 : 1 + classes] += as_float64((residual * u).sum(dim=0))
        total[1 + classes :] += as_float64(residual.sum(dim=0))
    return total


def _torch_temperature(
    logits: Tensor, labels: Tensor, beta: float, weights: Tensor | None = None
) -> tuple[float, float, float]:
    sums = np.zeros(3)
    for rows in native.row_chunks(len(logits), logits.shape[1], native.CACHE):
        z = upcast_half(logits[rows])
        z = (z - z.max(dim=1, keepdim=True).values).clamp(min=NEVER)
        label = z.gather(1, labels[rows, None])[:, 0]
        log_p = beta * z
        log_sum = torch.logsumexp(log_p, dim=1, keepdim=True)
        p = torch.exp(log_p - log_sum)
        mean = (p * z).sum(dim=1)
        spread = (p * (z - mean[:, None]).square()).sum(dim=1)
        columns = as_float64(torch.stack([log_sum[:, 0] - beta * label, mean - label, spread]))
        sums += columns.sum(axis=1) if weights is None else columns @ as_float64(weights[rows])
    value, slope, curvature = sums.tolist()
    return value, slope, curvature
