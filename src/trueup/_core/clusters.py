"""Clusters: rows that are correlated with each other, such as the pixels of an image or the visits of a patient.

Intervals and tests then rest on the differences between clusters, not between rows. Sums are kept by block. A block is
one cluster or, with very many clusters, several whole clusters, so memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from trueup._core.arrays import is_tensor, to_array
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike

MAX_BLOCKS = 1024
"""Largest number of blocks; grouping clusters into this many hides less than 5 % of the noise."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """The cluster of each row, by number."""

    code: np.ndarray
    """(n,): 0..count − 1."""
    names: list[Hashable]
    name: str = "cluster"
    """The kind of cluster, such as "image" or "patient"."""

    @property
    def count(self) -> int:
        """The number of clusters."""
        return len(self.names)

    @property
    def block(self) -> np.ndarray:
        """The block of each row: its cluster, or a group of clusters if there are more than `MAX_BLOCKS`."""
        return self.code % MAX_BLOCKS if self.count > MAX_BLOCKS else self.code

    def hash_blocks(self, blocks: int = MAX_BLOCKS) -> np.ndarray:
        """Return the block of each row by a hash of its cluster's name, the same in every chunk of a stream."""
        of_name = np.array([crc32(str(name).encode()) % blocks for name in self.names], dtype=np.int64)
        return of_name[self.code] if len(of_name) else self.code

    def one_row_each(self, seed: int) -> np.ndarray:
        """Draw one row of each cluster at random. The rows are independent of each other and stay in order.

        >>> len(Clusters(np.array([0, 1, 0]), ["a", "b"]).one_row_each(0))
        2
        """
        order = np.random.default_rng(seed).permutation(len(self.code))
        return np.sort(order[np.unique(self.code[order], return_index=True)[1]])

    def take(self, rows: np.ndarray) -> Clusters:
        """Select the clusters of some rows."""
        kept, code = np.unique(self.code[rows], return_inverse=True)
        return Clusters(code, [self.names[k] for k in kept.tolist()], self.name)


ClustersLike: TypeAlias = ArrayLike | Mapping[str, ArrayLike] | Clusters | None
"""Cluster of each row, shape (n,), or a mapping from the clusters' name to them; with None rows are independent."""


def as_clusters(clusters: Any, rows: int, *, min_clusters: int = 1) -> Clusters | None:
    """Check one hashable value per row; None stays None. A mapping {kind: values} names the kind of cluster.

    >>> as_clusters({"image": ["a", "b", "a"]}, 3)
    Clusters(code=array([0, 1, 0]), names=['a', 'b'], name='image')
    >>> as_clusters([1, 2], 3)
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: clusters must have 3 entries, one for each row, got 2
    """
    if clusters is None:
        return None
    name = "cluster"
    if isinstance(clusters, Mapping):
        if len(clusters) != 1:
            got = f"{len(clusters)} columns"
            raise InputError("clusters", "be one column", got, "combine several columns into tuples of values")
        ((name, clusters),) = clusters.items()
    if isinstance(clusters, Clusters):
        checked = clusters
    elif isinstance(clusters, (str, bytes)) or not isinstance(clusters, Iterable):
        raise InputError("clusters", "have one value for each row", f"the single value {clusters!r}")
    else:
        checked = replace(_encode(clusters), name=str(name))
    if len(checked.code) != rows:
        raise InputError("clusters", f"have {rows} entries, one for each row", f"{len(checked.code)}")
    if rows and checked.count < min_clusters:
        got = f"{checked.count}: all rows are of {checked.names[0]!r}" if checked.count == 1 else f"{checked.count}"
        raise InputError("clusters", f"be at least {min_clusters}", got, "intervals need several clusters")
    return checked


def weighted_clusters(clusters: Any, sample_weight: Any, rows: int, *, min_clusters: int = 1) -> Clusters | None:
    """Check clusters and keep those of the rows that have weight, as `as_weighted` does."""
    checked = as_clusters(clusters, rows)
    if checked is not None and sample_weight is not None:
        checked = checked.take(np.asarray(sample_weight) > 0)
    return None if checked is None else as_clusters(checked, len(checked.code), min_clusters=min_clusters)


def _encode(clusters: Any) -> Clusters:
    values = to_array(clusters, "clusters") if is_tensor(clusters) else clusters
    if hasattr(values, "to_numpy"):  # a column of pandas
        values = values.to_numpy()
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=object)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1:
        raise InputError("clusters", "have one value for each row", f"shape {array.shape}")
    if array.dtype.kind in "iubSU":
        names, code = np.unique(array, return_inverse=True)
        return Clusters(code.astype(np.int64), names.tolist())
    values = array.tolist()
    number: dict[Hashable, int] = {}
    try:
        code = np.fromiter((number.setdefault(value, len(number)) for value in values), np.int64, len(values))
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise InputError("clusters", "be numbers, text or other hashable values", kinds) from None
    if any(value is None or value != value for value in number):
        row = next(i for i, value in enumerate(values) if value is None or value != value)
        raise InputError("clusters", "have a value in every row", f"{values[row]} in row {row}")
    # Sorted by name, so that the order of the rows does not matter.
    order = sorted(range(len(number)), key=[str(name) for name in number].__getitem__)
    rank = np.argsort(order)
    listed = list(number)
    return Clusters(rank[code] if len(rank) else code, [listed[k] for k in order])


def jackknife(whole: Any, without: np.ndarray) -> np.ndarray:
    """Return each cluster's contribution to the error of an estimate, (clusters, …); their squares sum to its variance.

    `without` are the estimates that leave out each cluster in turn. Quenouille (1956); Tukey (1958). With few clusters
    it is the most conservative of the common variances (MacKinnon, Nielsen & Webb 2023).

    >>> x = np.array([1.0, 2.0, 6.0])
    >>> parts = jackknife(x.mean(), (x.sum() - x) / 2)
    >>> round(float((parts**2).sum()), 6), round(float(x.var(ddof=1)) / 3, 6)
    (2.333333, 2.333333)
    """
    return (without - whole) * np.sqrt((len(without) - 1) / len(without))


def mean_error(sums: np.ndarray, weight: np.ndarray) -> float:
    """Return the standard error of ΣS/ΣW from each cluster's sum S and weight W; NaN with fewer than two clusters.

    >>> round(mean_error(np.array([1.0, 2.0, 6.0]), np.ones(3)) ** 2, 6)
    2.333333
    """
    if len(weight) < 2:
        return float("nan")
    whole, total = sums.sum(), weight.sum()
    return float(np.sqrt((jackknife(whole / total, (whole - sums) / (total - weight)) ** 2).sum()))


def block_sums(
    values: np.ndarray, sample_weight: np.ndarray | None, clusters: Clusters
) -> tuple[np.ndarray, np.ndarray]:
    """Sum one number per row by block, and return the sums and weights of the blocks that have weight."""
    block = clusters.block
    weight = np.bincount(block, sample_weight).astype(np.float64)
    sums = np.bincount(block, values if sample_weight is None else sample_weight * values)
    return sums[weight > 0], weight[weight > 0]


def degrees_of_freedom(weight: np.ndarray) -> float:
    """Return the degrees of freedom of a variance over clusters with these weights: G − 1 for G equal ones.

    The formula (ΣW²)²/ΣW⁴ − 1 is Satterthwaite's for clusters that vary as a whole. The result is at least 1.

    >>> degrees_of_freedom(np.ones(20))
    19.0
    """
    square = (weight / weight.max()) ** 2
    return float(max(square.sum() ** 2 / (square @ square) - 1, 1.0))


def t_quantile(tail: float, df: float) -> float:
    """Return the half-width of an interval in standard errors, by Student's t."""
    return float(-stdtrit(df, tail))


def z_of_t(t: float, df: float) -> float:
    """Return the standard normal value with the same tail probability as Student's t."""
    tail = stdtr(df, -abs(t))
    return float(np.copysign(-ndtri(max(tail, 1e-300)), t)) if t == t else t
