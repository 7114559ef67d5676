"""Folds for cross-validation that keep all copies of a sample in one fold."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup._core import native, splits
from trueup._core.arrays import as_weighted, warn_users
from trueup._core.clusters import Clusters
from trueup._core.errors import silence_warnings
from trueup._core.namespace import NUMPY
from trueup._core.registry import METHODS

_MIN_EXPECTED = 5.0  # expected number of disagreeing labels below which copies cannot be detected.
_MAX_DISAGREEMENT = 0.1  # ratio of observed to expected disagreement below which equal rows are copies.


def k_fold(logits: Any, labels: Any, n_folds: int, clusters: Clusters | None = None) -> list[tuple[Any, Any]]:
    """Return masks of the training and the held-out rows of each fold; clusters or copies stay in one fold.

    >>> z, y = np.float32([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), np.array([0, 1, 0])
    >>> k_fold(z, y, 2)[0]
    (array([False, False,  True]), array([ True,  True, False]))
    """
    if clusters is None and (code := _find_copies(logits, labels)) is not None:
        clusters = Clusters(code, list(range(int(code.max()) + 1)))
    return splits.k_fold(logits, labels, n_folds, clusters)


def merge_copies(
    z: np.ndarray, y: np.ndarray, w: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Merge copies of a sample into one row with their total weight; rows that are all repeated k times are kept once.

    With a common number of copies, discrete scores that are equal by chance stay separate rows.
    """
    code = _find_copies(z, y)
    if code is None:
        return z, y, w
    key = code * z.shape[1] + y
    _, first, sample, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    if w is None and (common := np.gcd.reduce(count)) > 1:
        kept = np.repeat(first, count // common)
        return z[kept], y[kept], None
    return as_weighted(z[first], y[first], np.bincount(sample, w))


def _find_copies(z: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the number of each distinct row if equal rows are copies of the same sample, else None.

    Labels of two equal rows of discrete scores differ with probability 1 − Σ q², for calibrated probabilities q.
    Labels of copies agree. The sums compare, for each row, the expected and the observed disagreement with the rows
    equal to it. q comes from a temperature and a bias per class: without the bias, rounded predictions of an event
    that is much rarer than predicted would be taken for copies.
    """
    hashed = native.hash_rows(z, np.zeros_like(y))
    if hashed is not None and not hashed[1]:
        return None
    _, code, count = np.unique(splits.row_uniform(z), return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(count[code] > 1)
    if not len(repeated):
        return None
    with silence_warnings():
        q = NUMPY.softmax(METHODS["bias_corrected_temperature"](z, y)(z[repeated]).astype(np.float64))
    expected = (1 - (q * q).sum(axis=1)).sum() / 2
    _, sample, copies = np.unique(code * z.shape[1] + y, return_inverse=True, return_counts=True)
    size = count[code[repeated]]
    observed = ((size - copies[sample[repeated]]) / (size - 1)).sum() / 2
    if expected < _MIN_EXPECTED or observed >= _MAX_DISAGREEMENT * expected:
        return None
    warn_users(
        f"{len(repeated)} of {len(z)} rows are copies of other rows, with the same labels: cross-validation keeps "
        "copies in one fold. For augmented copies, whose logits differ, pass clusters="
    )
    return code
