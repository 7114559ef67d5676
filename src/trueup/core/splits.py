"""Train, test and fold splits: the only rules by which rows are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.core.arrays import upcast_half


def hash_folds(logits: Tensor, labels: Tensor, folds: int) -> np.ndarray:
    """The fold of each row, by a hash of what it holds: neither the order of the rows nor their chunks matter.

    Copies of a row share a fold. The compiled pass has the same hash.

    >>> z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 1, 0])
    >>> hash_folds(z, y, 5)
    array([2, 4, 2])
    """
    mixed = labels.cpu().numpy().astype(np.uint64) * np.uint64(0x165667B19E3779F9)
    columns = (torch.zeros_like(labels), labels, torch.full_like(labels, logits.shape[1] - 1))
    for column, factor in zip(columns, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5), strict=True):
        value = upcast_half(logits.gather(1, column[:, None])[:, 0]).contiguous()
        bits = value.view(torch.int64 if value.dtype == torch.float64 else torch.int32).cpu().numpy()
        mixed = (mixed + bits.astype(np.int64).view(np.uint64)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(folds)).astype(np.int64)


def k_fold(logits: Tensor, labels: Tensor, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Masks of the training and the held-out rows of each fold of `hash_folds`, without folds that leave one empty.

    >>> z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 1, 0])
    >>> k_fold(z, y, 5)[0]
    (tensor([False,  True, False]), tensor([ True, False,  True]))
    """
    fold = torch.from_numpy(hash_folds(logits, labels, folds)).to(logits.device)
    masks = [(fold != k, fold == k) for k in range(folds)]
    return [(train, held_out) for train, held_out in masks if train.any() and held_out.any()]


def stratified_order(values: Any, labels: Any, ties: Any) -> Tensor:
    """The rows sorted by a value, equal ones by their label, then by `ties`: folds taken from it in turn are alike.

    >>> stratified_order([0.3, 0.1, 0.1], [0, 1, 0], [0.0, 0.0, 0.0])
    tensor([2, 1, 0])
    """
    return torch.from_numpy(np.lexsort((np.asarray(ties), np.asarray(labels), np.asarray(values))))


def fold_mask(order: Tensor, fold: int, folds: int) -> Tensor:
    """A mask of the rows of one fold, which takes every `folds`-th place of an order.

    >>> fold_mask(torch.tensor([3, 0, 2, 1]), 1, 2)
    tensor([ True,  True, False, False])
    """
    mask = torch.zeros(len(order), dtype=torch.bool)
    mask[order[fold::folds]] = True
    return mask


def random_order(n: int, seed: int | Sequence[int] | np.random.Generator | torch.Generator) -> np.ndarray:
    """A random permutation of 0..n−1, by a seed or by a generator of NumPy or torch.

    A seed goes to `RandomState`, whose stream is the same in every version of NumPy.

    >>> random_order(5, seed=0)
    array([2, 0, 1, 3, 4])
    """
    if isinstance(seed, torch.Generator):
        return torch.randperm(n, generator=seed).numpy()
    generator = seed if isinstance(seed, np.random.Generator) else np.random.RandomState(seed)
    return generator.permutation(n)


def split_indices(n: int, *, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..n−1 at random into training and held-out rows: the latter are `share` of them, at least one of each.

    >>> split_indices(5, share=0.4, seed=0)
    (array([2, 0, 1]), array([3, 4]))
    """
    if n < 2:
        raise ValueError(f"a part to split must have at least 2 samples, got {n}")
    order = random_order(n, seed)
    kept = min(max(n - round(share * n), 1), n - 1)
    return order[:kept], order[kept:]


def split_by_sizes(order: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Consecutive parts of an order, one of each size, and last the rest.

    >>> split_by_sizes(np.array([2, 0, 1, 3, 4]), [2, 1])
    [array([2, 0]), array([1]), array([3, 4])]
    """
    return np.split(order, np.cumsum(sizes))
