"""One pass over the logits: everything that is scored per row, and the class-wise tally, while a row is in the cache.

The compiled pass (`_native.c`) and the torch pass give the same numbers; the torch one runs on accelerators, and where
nothing was compiled. Results are float64 NumPy arrays: n numbers each, small beside the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from trueup.arrays import computable

_native: Any
try:
    _native = import_module("trueup._native")
except ImportError:  # no C compiler at installation
    _native = None

_CHUNK = 1 << 18  # numbers a chunk where a copy is needed: small enough for the second-level cache
_SUMS = 1 << 22  # numbers in the class-wise sums of all threads together
_MATRIX = 128  # classes up to which a matrix and its gradient stay in the cache beside a row
_ONE_THREAD = 1 << 19  # below this many numbers, starting threads costs more than it saves


class Rows(NamedTuple):
    """What the pass says of each row."""

    confidence: np.ndarray
    """The largest probability."""
    predicted: np.ndarray
    """Its class; of equal ones the lowest."""
    correct: np.ndarray
    """1.0 where predicted equals the label, else 0.0."""
    nll: np.ndarray
    brier: np.ndarray
    entropy: np.ndarray
    label_prob: np.ndarray
    """The probability of the label."""
    group: np.ndarray
    """The group that the row was dealt to, where class-wise tallies were asked for."""

    @classmethod
    def empty(cls, n: int) -> Rows:
        """Room for n rows."""
        whole = np.empty(n, np.int64), np.zeros(n, np.int64)
        return cls(np.empty(n), whole[0], np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n), whole[1])


@dataclass(frozen=True)
class Cells:
    """What a class-wise tally is to count: p lies in bin #{cuts < p}; rows are dealt to groups, or come with theirs."""

    cuts: np.ndarray
    groups: int = 1
    group: np.ndarray | None = None


class _How(NamedTuple):
    """Options of the confidence pass."""

    beta: float = 1.0
    quick: bool = False
    threads: int | None = None


class ClassTally(NamedTuple):
    """Sums over the rows for each class and bin of its probability, arrays (classes, bins)."""

    counts: np.ndarray
    confidence: np.ndarray
    hits: np.ndarray
    gap: np.ndarray
    """Sum of hits − probability, apart for each group of rows: (groups, classes, bins)."""


class _Sums(NamedTuple):
    """Class-wise sums as the passes add them up: bins before classes, so that bin 0 is one run of memory."""

    counts: np.ndarray
    hits: np.ndarray
    gap: np.ndarray

    @classmethod
    def zero(cls, classes: int, cells: Cells | None) -> _Sums:
        bins, groups = (0, 0) if cells is None else (len(cells.cuts) + 1, cells.groups)
        return cls(np.zeros((bins, classes)), np.zeros((bins, classes)), np.zeros((groups, bins, classes)))

    def add(self, other: _Sums) -> None:
        for mine, theirs in zip(self, other, strict=True):
            mine += theirs


def rows(logits: Tensor, labels: Tensor) -> Rows:
    """Score each row of a trusted pair."""
    return _run(logits, labels, None)[0]


def confidences(
    logits: Tensor, *, beta: float = 1.0, quick: bool = False, threads: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and predicted class of each row of softmax(β z); quick is right to 4e-7 for float32 logits."""
    scored = _run(logits, None, None, _How(beta, quick, threads))[0]
    return scored.confidence, scored.predicted


def confidences_and_hits(logits: Tensor, labels: Tensor, *, quick: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Confidence of each row, and 1.0 where its class is the label's, else 0.0."""
    confidence, predicted = confidences(logits, quick=quick)
    return confidence, (predicted == labels.cpu().numpy()).astype(np.float64)


def rows_and_classes(logits: Tensor, labels: Tensor, cells: Cells) -> tuple[Rows, ClassTally]:
    """Score each row and tally every class."""
    scored, (count, hits, gap) = _run(logits, labels, cells)
    # The passes leave bin 0, where nearly everything lies, to be had by subtraction.
    count[0] = len(logits) - count[1:].sum(axis=0)
    confidence = np.maximum(hits - gap.sum(axis=0), 0.0)
    return scored, ClassTally(count.T, confidence.T, hits.T, gap.transpose(0, 2, 1))


def log_normaliser(logits: Tensor) -> np.ndarray:
    """ln Σ_k exp z_k of each row, so that a class's log-probability is its logit less this."""
    confidence, predicted = confidences(logits)
    top = logits.gather(1, torch.from_numpy(predicted).to(logits.device)[:, None])[:, 0]
    return _double(top) - np.log(confidence)


def hashed_groups(logits: Tensor, labels: Tensor, groups: int) -> np.ndarray:
    """Deal the rows to groups by a hash of what they hold, so that neither their order nor their chunks matter."""
    mixed = labels.cpu().numpy().astype(np.uint64) * np.uint64(0x165667B19E3779F9)
    columns = (torch.zeros_like(labels), labels, torch.full_like(labels, logits.shape[1] - 1))
    for column, factor in zip(columns, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5), strict=True):
        value = computable(logits.gather(1, column[:, None])[:, 0]).contiguous()
        bits = value.view(torch.int64 if value.dtype == torch.float64 else torch.int32).cpu().numpy()
        mixed = (mixed + bits.astype(np.int64).view(np.uint64)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(groups)).astype(np.int64)


def _run(logits: Tensor, labels: Tensor | None, cells: Cells | None, how: _How | None = None) -> tuple[Rows, _Sums]:
    scored, sums = Rows.empty(len(logits)), _Sums.zero(logits.shape[1], cells)
    if cells is not None and cells.group is not None:
        scored.group[:] = cells.group
    one_pass = _native_pass if _native is not None and logits.device.type == "cpu" else _torch_pass
    one_pass(logits, labels, cells, how or _How(), scored, sums)
    if labels is not None:
        np.equal(scored.predicted, labels.cpu().numpy(), out=scored.correct)
    return scored, sums


def _native_pass(
    logits: Tensor, labels: Tensor | None, cells: Cells | None, how: _How, scored: Rows, sums: _Sums
) -> None:
    classes = logits.shape[1]
    y = None if labels is None else labels.contiguous()

    def part(chunks: Iterator[tuple[int, Tensor]]) -> _Sums:
        mine = _Sums.zero(classes, cells)  # once a thread: with many classes the sums are larger than a chunk
        for at, chunk in chunks:
            _native.run_pass(
                chunk.data_ptr(),
                chunk.dtype == torch.float64,
                len(chunk),
                classes,
                mine.counts.shape[0],
                mine.gap.shape[0],
                cells is not None and cells.group is None,
                how.quick,
                how.beta,
                0 if y is None else y.data_ptr() + 8 * at,
                _address(scored.confidence, at),
                _address(scored.predicted, at),
                _address(scored.nll, at),
                _address(scored.brier, at),
                _address(scored.entropy, at),
                _address(scored.label_prob, at),
                0 if cells is None else _address(cells.cuts),
                _address(scored.group, at),
                *(0 if cells is None else _address(array) for array in mine),
            )
        return mine

    # Each thread has sums of its own: with many classes let few threads hold them.
    most = how.threads or max(2, _SUMS // max(sums.gap.size, 1))
    for mine in _in_threads(logits, part, most=most):
        sums.add(mine)


def temperature_sums(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float, float]:
    """Σ_i ln Σ_k exp(β z_ik) − β z_iy, and its first two derivatives in β, in one pass."""
    y = labels.contiguous()
    if _native is None or logits.device.type != "cpu":
        return _torch_temperature(logits, labels, beta)

    def part(chunks: Iterator[tuple[int, Tensor]]) -> list[tuple[float, float, float]]:
        return [
            _native.run_temperature(
                chunk.data_ptr(), chunk.dtype == torch.float64, y.data_ptr() + 8 * at, *chunk.shape, beta
            )
            for at, chunk in chunks
        ]

    sums = chain.from_iterable(_in_threads(logits, part))
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
) -> np.ndarray:
    """Loss of softmax(w ⊙ u + b) with u = scale·z − shift, summed over the rows, and its gradient: (1 + 2K,)."""
    y = labels.contiguous()
    if _native is None or logits.device.type != "cpu":
        return _torch_vector(logits, labels, weight, bias, scale, shift)

    def part(chunks: Iterator[tuple[int, Tensor]]) -> np.ndarray:
        mine = np.zeros(1 + 2 * logits.shape[1])
        for at, chunk in chunks:
            _native.run_vector(
                chunk.data_ptr(),
                chunk.dtype == torch.float64,
                y.data_ptr() + 8 * at,
                *chunk.shape,
                _address(weight),
                _address(bias),
                scale,
                0 if shift is None else _address(shift, at),
                _address(mine),
            )
        return mine

    total: np.ndarray = sum(_in_threads(logits, part), start=np.zeros(1 + 2 * logits.shape[1]))
    return total


def matrix_sums(
    logits: Tensor,
    labels: Tensor,
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    scale: float = 1.0,
    shift: np.ndarray | None = None,
) -> np.ndarray | None:
    """Loss of softmax(W u + b), u = scale·z − shift, summed over the rows, with its gradient: (1 + K² + K,).

    None where the compiled pass cannot or should not do it: it is made for the sizes that stay in the cache.
    """
    classes = logits.shape[1]
    if _native is None or logits.device.type != "cpu" or classes > _MATRIX:
        return None
    y = labels.contiguous()
    padded = -(-classes // 8) * 8
    columns, offsets = np.zeros((classes, padded)), np.full(padded, -1e300)
    columns[:, :classes], offsets[:classes] = weight.T, bias

    def part(chunks: Iterator[tuple[int, Tensor]]) -> np.ndarray:
        mine = np.zeros(1 + padded + classes * padded)
        for at, chunk in chunks:
            _native.run_matrix(
                chunk.data_ptr(),
                chunk.dtype == torch.float64,
                y.data_ptr() + 8 * at,
                *chunk.shape,
                padded,
                _address(columns),
                _address(offsets),
                scale,
                0 if shift is None else _address(shift, at),
                _address(mine),
            )
        return mine

    total: np.ndarray = sum(_in_threads(logits, part), start=np.zeros(1 + padded + classes * padded))
    slopes = total[1 + padded :].reshape(classes, padded)[:, :classes].T
    return np.concatenate([total[:1], slopes.ravel(), total[1 : 1 + classes]])


def _torch_vector(
    logits: Tensor, labels: Tensor, weight: np.ndarray, bias: np.ndarray, scale: float, shift: np.ndarray | None
) -> np.ndarray:
    classes = logits.shape[1]
    total = np.zeros(1 + 2 * classes)
    step = max(1, _CHUNK // classes)
    w, b = (torch.from_numpy(v).to(computable(logits[:0])) for v in (weight, bias))
    for start in range(0, len(logits), step):
        u = scale * computable(logits[start : start + step])
        if shift is not None:
            u = u - torch.from_numpy(shift[start : start + step]).to(u)[:, None]
        label = labels[start : start + step, None]
        log_q = torch.log_softmax(u * w + b, dim=1)
        residual = torch.exp(log_q)
        residual.scatter_add_(1, label, -torch.ones_like(label, dtype=u.dtype))
        total[0] -= float(_double(log_q.gather(1, label)).sum())
        total[1 : 1 + classes] += _double((residual * u).sum(dim=0))
        total[1 + classes :] += _double(residual.sum(dim=0))
    return total


def _torch_temperature(logits: Tensor, labels: Tensor, beta: float) -> tuple[float, float, float]:
    value = slope = curvature = 0.0
    step = max(1, _CHUNK // logits.shape[1])
    for start in range(0, len(logits), step):
        z = computable(logits[start : start + step])
        z = z - z.max(dim=1, keepdim=True).values
        label = z.gather(1, labels[start : start + step, None])[:, 0]
        log_p = beta * z
        log_sum = torch.logsumexp(log_p, dim=1, keepdim=True)
        p = torch.exp(log_p - log_sum)
        mean = (p * z).sum(dim=1)
        value += float(_double(log_sum[:, 0] - beta * label).sum())
        slope += float(_double(mean - label).sum())
        curvature += float(_double((p * (z - mean[:, None]).square()).sum(dim=1)).sum())
    return value, slope, curvature


T = TypeVar("T")


def _in_threads(
    logits: Tensor, part: Callable[[Iterator[tuple[int, Tensor]]], T], *, most: int | None = None
) -> Iterator[T]:
    """Call `part` with the chunks of a share of the rows, on as many threads as torch uses, or at most so many."""
    workers = 1 if logits.numel() < _ONE_THREAD else max(1, torch.get_num_threads())
    workers = workers if most is None else min(workers, most)
    bounds = [len(logits) * i // workers for i in range(workers + 1)]
    shares = [_contiguous_chunks(logits, start, stop) for start, stop in pairwise(bounds)]
    if workers == 1:
        yield part(shares[0])
        return
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(part, share) for share in shares[1:]]
        yield part(shares[0])
        yield from (other.result() for other in others)


def count_below(cuts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many of the sorted cuts lie below each value."""
    if _native is None or not (values.flags.c_contiguous and values.dtype == np.float64):
        return np.searchsorted(cuts, values, side="left")
    found = np.empty(len(values), np.int64)
    _native.run_locate(_address(values), len(values), _address(cuts), len(cuts), _address(found))
    return found


def _address(array: np.ndarray, row: int = 0) -> int:
    return int(array.ctypes.data) + 8 * row


def _contiguous_chunks(logits: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Rows start..stop as contiguous float32 or float64, each chunk with the number of its first row.

    They come whole if they are that already, else copied a chunk at a time.
    """
    if logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64):
        yield start, logits[start:stop]
        return
    step = max(1, _CHUNK // logits.shape[1])
    for at in range(start, max(stop, start + 1), step):
        yield at, computable(logits[at : min(at + step, stop)]).contiguous()


def _torch_pass(
    logits: Tensor, labels: Tensor | None, cells: Cells | None, how: _How, scored: Rows, sums: _Sums
) -> None:
    step = max(1, _CHUNK // logits.shape[1])
    for start in range(0, len(logits), step):
        z = how.beta * computable(logits[start : start + step])
        at = slice(start, start + len(z))
        top, predicted = z.max(dim=1)
        shifted = z - top[:, None]
        e = torch.exp(shifted)
        total = _double(e.sum(dim=1))
        scored.confidence[at] = 1 / total
        scored.predicted[at] = predicted.cpu().numpy()
        if labels is None:
            continue
        y = labels[at]
        label_shift = _double(shifted.gather(1, y[:, None])[:, 0])
        scored.nll[at] = np.log(total) - label_shift
        scored.label_prob[at] = np.exp(label_shift) / total
        scored.brier[at] = _double(e.square().sum(dim=1)) / total**2 - 2 * scored.label_prob[at] + 1
        scored.entropy[at] = np.log(total) - _double((e * shifted).sum(dim=1)) / total
        if cells is not None:
            if cells.group is None:
                scored.group[at] = hashed_groups(z, y, cells.groups)
            probs = e / torch.from_numpy(total).to(e)[:, None]
            _torch_classes(probs, y.cpu().numpy(), scored.group[at], cells.cuts, sums)


def _torch_classes(probs: Tensor, y: np.ndarray, group: np.ndarray, cuts: np.ndarray, sums: _Sums) -> None:
    count, hits, gap = sums
    members = torch.from_numpy(np.arange(len(gap))[:, None] == group).to(probs)
    gap[:, 0] -= _double(members @ probs)
    if len(cuts):
        # Few probabilities of a row can exceed the first cut: everything else stays in bin 0. (The comparison rounds
        # the cut to the type of the probabilities, so ask a little less of it; the search decides in float64.)
        row, k = (i.cpu().numpy() for i in (probs > float(cuts[0]) * (1 - 1e-6)).nonzero(as_tuple=True))
        p = _double(probs[row, k])
        b = np.searchsorted(cuts, p, side="left")
        np.add.at(count, (b, k), 1.0)
        np.add.at(gap, (group[row], b, k), -p)
        np.add.at(gap[:, 0], (group[row], k), p)
    label_bin = np.searchsorted(cuts, _double(probs[torch.arange(len(y)), y]), side="left")
    np.add.at(hits, (label_bin, y), 1.0)
    np.add.at(gap, (group, label_bin, y), 1.0)


def _double(x: Tensor) -> np.ndarray:
    result: np.ndarray = x.to("cpu", torch.float64).numpy()
    return result
