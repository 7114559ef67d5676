"""What looks like a mistake in predictions that can be read."""

from __future__ import annotations

import numpy as np

from trueup.core.arrays import Array

LOOKED_AT = 1000
"""Rows: logits do not become distributions by chance, so a few tell."""


def looks_like_probabilities(logits: Array) -> str | None:
    """One sentence if logits look like probabilities: z ≥ 0 with Σ z = 1 in each row.

    >>> import numpy as np
    >>> looks_like_probabilities(np.array([[0.9, 0.1], [0.2, 0.8]]))
    'each row sums to 1 like probabilities, but was read as logits'
    >>> looks_like_probabilities(np.array([[2.0, -1.0]])) is None
    True
    """
    seen = np.asarray(logits[:LOOKED_AT], dtype=np.float64)
    if seen.size and seen.min() >= 0 and np.abs(seen.sum(axis=1) - 1).max() <= 1e-3:
        return "each row sums to 1 like probabilities, but was read as logits"
    return None
