"""Losses that scaling minimises, summed over the rows, with their derivatives."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np

from trueup._core import native
from trueup._core.arrays import MASKED_LOGIT, find_absent, to_array, upcast_half
from trueup._core.native import Chunks, address, map_threads, pair_arguments, sum_chunks


def temperature_sums(
    logits: Any, labels: Any, beta: float, sample_weight: Any = None, *, quick: bool = False
) -> tuple[float, float, float]:
    """Sum w_i (ln Σ_k exp(β z_ik) − β z_iy) over rows i, with its first two derivatives in β, in one pass.

    Without weights w = 1. A quick pass computes float32 logits in float32, with a relative error of about 1e-6. That is
    enough to find the region of the minimum.
    """
    z, y, w = _as_contiguous(logits, labels, sample_weight)
    if native.compiled is None:
        return _numpy_temperature(z, y, beta, w)

    def part(chunks: Chunks) -> list[tuple[float, float, float]]:
        run = native.compiled.run_temperature
        return [run(*pair_arguments(rows, y, first), beta, address(w, first), quick) for first, rows in chunks]

    sums = chain.from_iterable(map_threads(z, part))
    value, slope, curvature = (math.fsum(column) for column in zip(*sums, strict=True))
    return value, slope, curvature


def vector_sums(
    logits: Any,
    labels: Any,
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    scale: float = 1.0,
    shift: np.ndarray | None = None,
    sample_weight: Any = None,
    quick: bool = False,
) -> np.ndarray:
    """Sum the loss of softmax(w ⊙ u + b) with u = scale·z − shift over the rows, with its gradient: (1 + 2K,).

    `sample_weight` has one weight per row. A quick pass computes float32 logits in float32.
    """
    z, y, w = _as_contiguous(logits, labels, sample_weight)
    if native.compiled is None:
        return _numpy_vector(z, y, (weight, bias), scale, shift, w)

    def add(first: int, rows: np.ndarray, sums: np.ndarray) -> None:
        map_arguments = address(weight), address(bias), scale, address(shift, first)
        pair = pair_arguments(rows, y, first)
        native.compiled.run_vector(*pair, *map_arguments, address(w, first), address(sums), quick)

    return sum_chunks(z, 1 + 2 * z.shape[1], add)


def _as_contiguous(logits: Any, labels: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    y = np.ascontiguousarray(to_array(labels, "labels"), np.int64)
    w = None if sample_weight is None else np.ascontiguousarray(to_array(sample_weight, "sample_weight"), np.float64)
    return to_array(logits, "logits"), y, w


def _numpy_vector(
    logits: np.ndarray,
    labels: np.ndarray,
    parameters: tuple[np.ndarray, np.ndarray],
    scale: float,
    shift: np.ndarray | None,
    sample_weight: np.ndarray | None = None,
) -> np.ndarray:
    classes = logits.shape[1]
    total = np.zeros(1 + 2 * classes)
    kind = upcast_half(logits[:0]).dtype
    w, b = (v.astype(kind) for v in parameters)
    for rows in native.row_chunks(len(logits), classes, native.CACHE_CHUNK):
        u = logits[rows].astype(kind) * kind.type(scale)
        if shift is not None:
            u -= shift[rows].astype(kind)[:, None]
        label = np.arange(len(u)), labels[rows]
        if (absent := find_absent(u)) is not None:
            u[absent] = 0.0
        s = u * w + b
        if absent is not None:
            s[absent] = -np.inf
        s -= s.max(axis=1, keepdims=True)
        residual = np.exp(s)
        normaliser = residual.sum(axis=1)
        losses = np.log(normaliser) - s[label]
        residual /= normaliser[:, None]
        residual[label] -= 1
        if sample_weight is not None:
            losses = losses * sample_weight[rows]
            residual *= sample_weight[rows].astype(kind)[:, None]
        total[0] += losses.sum(dtype=np.float64)
        total[1 : 1 + classes] += np.multiply(residual, u, out=u).sum(axis=0, dtype=np.float64)
        total[1 + classes :] += residual.sum(axis=0, dtype=np.float64)
    return total


def _numpy_temperature(
    logits: np.ndarray, labels: np.ndarray, beta: float, sample_weight: np.ndarray | None = None
) -> tuple[float, float, float]:
    sums = np.zeros(3)
    for rows in native.row_chunks(len(logits), logits.shape[1], native.CACHE_CHUNK):
        z = upcast_half(logits[rows])
        z = np.maximum(z - z.max(axis=1, keepdims=True), z.dtype.type(MASKED_LOGIT))
        label = z[np.arange(len(z)), labels[rows]].astype(np.float64)
        p = np.exp(z * z.dtype.type(beta))
        normaliser = p.sum(axis=1)
        p /= normaliser[:, None]
        mean = np.einsum("ij,ij->i", p, z)
        z -= mean[:, None]
        z *= z
        spread = np.einsum("ij,ij->i", p, z)
        columns = np.stack([np.log(normaliser) - beta * label, mean - label, spread])
        sums += columns.sum(axis=1) if sample_weight is None else columns @ sample_weight[rows]
    value, slope, curvature = sums.tolist()
    return value, slope, curvature
