"""Losses of temperature and vector scaling, summed over the rows with their derivatives, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import upcast_half
from trueup.core.native import CHUNK, address, double, in_threads


def temperature_sums(logits: Tensor, labels: Tensor, beta: float, *, quick: bool = False) -> tuple[float, float, float]:
    """Σ_i ln Σ_k exp(β z_ik) − β z_iy, and its first two derivatives in β, in one pass.

    A quick pass works on float32 in float32: right to about 1e-6, which is enough to find where to look closely.
    """
    y = labels.contiguous()
    if not native.usable(logits):
        return _torch_temperature(logits, labels, beta)

    def part(chunks: Iterator[tuple[int, Tensor]]) -> list[tuple[float, float, float]]:
        return [
            native.compiled.run_temperature(
                chunk.data_ptr(), chunk.dtype == torch.float64, y.data_ptr() + 8 * at, *chunk.shape, beta, quick
            )
            for at, chunk in chunks
        ]

    sums = chain.from_iterable(in_threads(logits, part))
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
    quick: bool = False,
) -> np.ndarray:
    """Loss of softmax(w ⊙ u + b) with u = scale·z − shift, summed over the rows, and its gradient: (1 + 2K,).

    A quick pass works on float32 in float32.
    """
    y = labels.contiguous()
    if not native.usable(logits):
        return _torch_vector(logits, labels, weight, bias, scale, shift)

    def part(chunks: Iterator[tuple[int, Tensor]]) -> np.ndarray:
        mine = np.zeros(1 + 2 * logits.shape[1])
        for at, chunk in chunks:
            native.compiled.run_vector(
                chunk.data_ptr(),
                chunk.dtype == torch.float64,
                y.data_ptr() + 8 * at,
                *chunk.shape,
                address(weight),
                address(bias),
                scale,
                0 if shift is None else address(shift, at),
                address(mine),
                quick,
            )
        return mine

    total: np.ndarray = sum(in_threads(logits, part), start=np.zeros(1 + 2 * logits.shape[1]))
    return total


def _torch_vector(
    logits: Tensor, labels: Tensor, weight: np.ndarray, bias: np.ndarray, scale: float, shift: np.ndarray | None
) -> np.ndarray:
    classes = logits.shape[1]
    total = np.zeros(1 + 2 * classes)
    step = max(1, CHUNK // classes)
    w, b = (torch.from_numpy(v).to(upcast_half(logits[:0])) for v in (weight, bias))
    for start in range(0, len(logits), step):
        u = scale * upcast_half(logits[start : start + step])
        if shift is not None:
            u = u - torch.from_numpy(shift[start : start + step]).to(u)[:, None]
        label = labels[start : start + step, None]
        log_q = torch.log_softmax(u * w + b, dim=1)
        residual = torch.exp(log_q)
        residual.scatter_add_(1, label, -torch.ones_like(label, dtype=u.dtype))
        total[0] -= float(double(log_q.gather(1, label)).sum())
        total[1 : 1 + classes] += double((residual * u).sum(dim=0))
        total[1 + classes :] += double(residual.sum(dim=0))
    return total


def _torch_temperature(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float, float]:
    value = slope = curvature = 0.0
    step = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(logits), step):
        z = upcast_half(logits[start : start + step])
        z = z - z.max(dim=1, keepdim=True).values
        label = z.gather(1, labels[start : start + step, None])[:, 0]
        log_p = beta * z
        log_sum = torch.logsumexp(log_p, dim=1, keepdim=True)
        p = torch.exp(log_p - log_sum)
        mean = (p * z).sum(dim=1)
        value += float(double(log_sum[:, 0] - beta * label).sum())
        slope += float(double(mean - label).sum())
        curvature += float(double((p * (z - mean[:, None]).square()).sum(dim=1)).sum())
    return value, slope, curvature
