"""Training, test and fold splits: the only rules by which rows are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup._core import native
from trueup._core.arrays import match_kind, to_array, upcast_half
from trueup._core.clusters import Clusters, block_sums, mean_error
from trueup._core.native import hash_rows


def stratified_folds(logits: Any, labels: Any, n_folds: int) -> np.ndarray:
    """Return the fold of each row: each class is spread evenly over the folds, and copies of a row at random.

    Within a label, rows are sorted by a hash of their content and of the number of their copy, and are assigned to
    folds in turn. The order of the rows does not matter, since only equal rows can change places. Hashing the content
    alone would put all copies of a row in one fold, which breaks cross-validation of discrete scores. Assigning copies
    in turn would make all folds alike, and steps that follow noise would seem to predict it.

    >>> z, y = np.float32([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), np.array([0, 0, 1, 0])
    >>> stratified_folds(z, y, 2)
    array([0, 1, 1, 0])
    """
    y = to_array(labels, "labels")
    fold = np.empty(len(y), np.int64)
    fold[np.lexsort((_copy_hash(logits, labels), y))] = np.arange(len(y)) % n_folds
    return fold


def cluster_folds(labels: Any, clusters: Clusters, n_folds: int) -> np.ndarray:
    """Return the fold of each row with all rows of a cluster in one fold; otherwise every fit would look too good.

    Clusters are sorted by their most frequent label and their size, and are assigned to folds in turn, forwards and
    backwards. There are never more folds than clusters.

    >>> clusters = Clusters(np.array([0, 0, 1, 1, 2]), ["a", "b", "c"])
    >>> cluster_folds(np.array([0, 0, 1, 1, 0]), clusters, 2)
    array([0, 0, 1, 1, 1])
    """
    y, n = to_array(labels, "labels"), clusters.count
    classes = int(y.max(initial=0)) + 1
    pair, count = np.unique(clusters.code * classes + y, return_counts=True)  # of a cluster and a label
    order = np.lexsort((pair, -count, pair // classes))
    first = np.unique(pair[order] // classes, return_index=True)[1]
    common = pair[order][first] % classes
    size = np.bincount(clusters.code, minlength=n)
    n_folds = min(n_folds, n)
    turn = np.arange(n) % (2 * n_folds)
    fold = np.empty(n, np.int64)
    fold[np.lexsort((-size, common))] = np.minimum(turn, 2 * n_folds - 1 - turn)
    return fold[clusters.code]


def random_groups(logits: Any, labels: Any, groups: int) -> np.ndarray:
    """Assign rows to groups as if at random, independent of their order.

    The spread of sums over groups then shows the noise of independent rows. The group follows from the hash of a row
    and the number of its copy. `stratified_folds` would hide the noise of the labels.

    >>> z, y = np.float32([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), np.array([0, 1, 0])
    >>> random_groups(z, y, 5)
    array([0, 4, 4])
    """
    return _remainder(_copy_hash(logits, labels), groups)


def hash_groups(logits: Any, labels: Any, groups: int) -> np.ndarray:
    """Assign rows to groups by a hash of three of their numbers, for streams, where copies cannot be counted.

    Neither the order of the rows nor their chunks matter, and copies of a row share a group. The compiled pass uses the
    same hash.

    >>> z, y = np.float32([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), np.array([0, 1, 0])
    >>> hash_groups(z, y, 5)
    array([2, 4, 2])
    """
    return _remainder(_quick_hash(logits, labels), groups)


def row_uniform(logits: Any, seed: int = 0) -> np.ndarray:
    """Return a pseudo-random number in [0, 1) for each row; equal rows get equal numbers.

    >>> row_uniform(np.float32([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]])).round(3)
    array([0.874, 0.468, 0.874])
    """
    z = to_array(logits, "logits")
    mixed = _mix_columns(np.full(len(z), seed, np.uint64), z)
    for factor in _FACTORS:
        mixed = _mix(mixed, mixed >> np.uint64(32), factor)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5)  # odd multipliers of the hash


def _quick_hash(logits: Any, labels: Any) -> np.ndarray:
    """Hash the label and three logits: the first, the label's and the final one."""
    z, y = to_array(logits, "logits"), to_array(labels, "labels")
    mixed = y.astype(np.uint64) * np.uint64(0x165667B19E3779F9)
    columns = (z[:, 0], z[np.arange(len(z)), y], z[:, -1])
    for column, factor in zip(columns, _FACTORS, strict=True):
        mixed = _mix(mixed, _bits(column), factor)
    return mixed


def _copy_hash(logits: Any, labels: Any) -> np.ndarray:
    """Hash the label, the whole row and the number of its copy; rows without copies keep their quick hash."""
    z, y = to_array(logits, "logits"), to_array(labels, "labels")
    hashed = hash_rows(z, y)
    mixed, repeat = (_quick_hash(z, y), True) if hashed is None else hashed
    shared = _find_repeats(mixed) if repeat else np.zeros(0, np.int64)
    if not len(shared):
        return mixed
    for chunk in native.row_chunks(len(shared), z.shape[1], native.LARGE_CHUNK):
        rows = shared[chunk]
        mixed[rows] = _mix_columns(mixed[rows], z[rows])
    order = shared[np.argsort(mixed[shared], kind="stable")]
    position = np.arange(len(order))
    first = np.concatenate([[True], np.diff(mixed[order]) != 0])
    copy = (position - np.maximum.accumulate(np.where(first, position, 0))).astype(np.uint64)
    # The first copy of a row keeps its hash, so that streams assign it to the same group.
    copies, copy = order[copy > 0], copy[copy > 0]
    mixed[copies] = _mix(_mix(mixed[copies], copy, _FACTORS[0]), copy, _FACTORS[1])
    return mixed


def _find_repeats(values: np.ndarray) -> np.ndarray:
    """Return the indices of values that occur more than once, sorting only values that share their low bits."""
    low_bits = (values & np.uint64((1 << (4 * len(values)).bit_length()) - 1)).view(np.int64)
    candidates = np.flatnonzero(np.bincount(low_bits)[low_bits] > 1)
    _, number_of, count = np.unique(values[candidates], return_inverse=True, return_counts=True)
    return candidates[count[number_of] > 1]


def _remainder(values: np.ndarray, groups: int) -> np.ndarray:
    """Compute values % groups; NumPy divides fast by a scalar, but has no fast remainder."""
    return (values - values // np.uint64(groups) * np.uint64(groups)).astype(np.int64)


def _mix(mixed: np.ndarray, value: np.ndarray, factor: int) -> np.ndarray:
    mixed = mixed + value
    mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _mix_columns(mixed: np.ndarray, values: np.ndarray) -> np.ndarray:
    bits = _bits(values)
    for k in range(bits.shape[1]):
        mixed = _mix(mixed, bits[:, k], _FACTORS[k % 3])
    return mixed


def _bits(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(upcast_half(values))
    bits = values.view(np.int64 if values.dtype == np.float64 else np.int32)
    return bits.astype(np.int64).view(np.uint64)


def k_fold(logits: Any, labels: Any, n_folds: int, clusters: Clusters | None = None) -> list[tuple[Any, Any]]:
    """Return masks of training and held-out rows of each of the `stratified_folds` that leaves neither empty.

    With clusters the folds are `cluster_folds`.

    >>> z, y = np.float32([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), np.array([0, 1, 0])
    >>> k_fold(z, y, 2)[0]
    (array([False, False,  True]), array([ True,  True, False]))
    """
    of_row = stratified_folds(logits, labels, n_folds) if clusters is None else cluster_folds(labels, clusters, n_folds)
    fold = match_kind(of_row, logits)
    masks = [(fold != k, fold == k) for k in range(n_folds)]
    return [(train, held_out) for train, held_out in masks if train.any() and held_out.any()]


def is_significant_gain(
    gain: np.ndarray, sample_weight: Any = None, *, min_z: float = 1.0, clusters: Clusters | None = None
) -> bool:
    """Return whether the mean gain of the rows exceeds `min_z` standard errors; n is (Σw)²/Σw².

    With clusters the standard error is that of the clusters.

    >>> is_significant_gain(np.array([1.0, 0.5, 0.0])), is_significant_gain(np.array([1.0, -0.5, -0.4]))
    (True, False)
    """
    w = np.ones(len(gain)) if sample_weight is None else np.asarray(sample_weight)
    mean = np.average(gain, weights=w)
    if clusters is not None:
        return bool(mean > min_z * mean_error(*block_sums(gain, w, clusters)))
    spread = np.sqrt(np.average((gain - mean) ** 2, weights=w))
    return bool(mean > min_z * spread * np.sqrt(w @ w) / w.sum())


def stratified_order(values: Any, labels: Any, ties: Any) -> Any:
    """Sort the rows by a value, then by label, then by `ties`; folds of every k-th row of this order are alike.

    >>> stratified_order([0.3, 0.1, 0.1], [0, 1, 0], [0.0, 0.0, 0.0])
    array([2, 1, 0])
    """
    return match_kind(np.lexsort((np.asarray(ties), np.asarray(labels), np.asarray(values))), values)


def fold_mask(order: Any, fold: int, n_folds: int) -> Any:
    """Return a mask of the rows of one fold, which takes every `n_folds`-th entry of an order.

    >>> fold_mask(np.array([3, 0, 2, 1]), 1, 2)
    array([ True,  True, False, False])
    """
    mask = np.zeros(len(order), dtype=bool)
    mask[np.asarray(order)[fold::n_folds]] = True
    return match_kind(mask, order)


def random_order(n: int, seed: int | Sequence[int] | np.random.Generator) -> np.ndarray:
    """Return a random permutation of 0..n−1, from a seed or a NumPy generator.

    A seed goes to `RandomState`, whose stream is the same in every version of NumPy.

    >>> random_order(5, seed=0)
    array([2, 0, 1, 3, 4])
    """
    generator = seed if isinstance(seed, np.random.Generator) else np.random.RandomState(seed)
    return generator.permutation(n)


def split_indices(n: int, *, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..n−1 at random into training and held-out rows; `share` of them are held out, at least one of each.

    >>> split_indices(5, share=0.4, seed=0)
    (array([2, 0, 1]), array([3, 4]))
    """
    if n < 2:
        raise ValueError(f"a part to split must have at least 2 samples, got {n}")
    order = random_order(n, seed)
    kept = min(max(n - round(share * n), 1), n - 1)
    return order[:kept], order[kept:]


def split_by_sizes(order: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Cut an order into consecutive parts of these sizes, followed by the rest.

    >>> split_by_sizes(np.array([2, 0, 1, 3, 4]), [2, 1])
    [array([2, 0]), array([1]), array([3, 4])]
    """
    return np.split(order, np.cumsum(sizes))
