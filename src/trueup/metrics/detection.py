"""Object detection: the confidence of detections already matched to objects, and where it is wrong.

A row is one detection: its score, whether it hit an object, its class and its box. The detector's library matches the
boxes. Detections in one image are correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup._core.arrays import as_vector, to_array
from trueup._core.bins import equal_width
from trueup._core.clusters import as_clusters
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup.convert import from_probs
from trueup.io.predictions import PredictionTable

SIZES = (32.0**2, 96.0**2)
"""Areas in pixels below which a box is small or medium, as in COCO."""
_RELATIVE_SIZES = (0.01, 0.09)
"""The same limits as shares of the image's area: a tenth and three tenths of its sides."""


def from_detections(
    scores: ArrayLike,
    hits: ArrayLike,
    *,
    classes: ArrayLike | None = None,
    boxes: ArrayLike | None = None,
    images: ArrayLike | None = None,
    image_size: tuple[float, float] | None = None,
    floor: float | None = None,
) -> PredictionTable:
    """Turn matched detections into a table of events that `evaluate` scores.

    The groups are the class, the size (in pixels: that of COCO) and the position, inner or outer. The clusters are the
    images. `evaluate(*table, **table.options())` then shows where the scores are wrong. `per_group("platt")(*table,
    groups=table.groups["class"])` corrects them.

    Parameters
    ----------
    scores
        Score of each detection, shape (n,), in [0, 1].
    hits
        1 where a detection is right, else 0, shape (n,).
    classes
        Class of each detection, shape (n,).
    boxes
        Centre, width and height (cx, cy, w, h) of each box, shape (n, 4): in pixels with `image_size`, else as shares
        of the image.
    images
        Image of each detection, shape (n,).
    image_size
        Width and height of the images in pixels.
    floor
        Smallest probability; by default scores of exactly 0 and 1 are floored with a warning, see `from_probs`.

    Returns
    -------
    PredictionTable
        Log-probabilities of "miss" and "hit", labels, groups and clusters.

    Examples
    --------
    >>> boxes = [[0.5, 0.5, 0.9, 0.9], [0.1, 0.1, 0.05, 0.1]]
    >>> table = from_detections([0.9, 0.4], [1, 0], classes=["car", "dog"], boxes=boxes)
    >>> table.labels, {name: group.tolist() for name, group in table.groups.items()}
    (array([1, 0]), {'class': ['car', 'dog'], 'size': ['large', 'small'], 'position': ['inner', 'outer']})
    """
    p, y = _scores_and_hits(scores, hits)
    groups: dict[str, np.ndarray] = {}
    if classes is not None:
        groups["class"] = _column(classes, len(p), "classes")
    if boxes is not None:
        box = _boxes(boxes, len(p))
        area = box[:, 2] * box[:, 3]
        centre = box[:, :2] if image_size is None else box[:, :2] / np.asarray(image_size, dtype=np.float64)
        small, medium = _RELATIVE_SIZES if image_size is None else SIZES
        groups["size"] = np.where(area < small, "small", np.where(area < medium, "medium", "large"))
        inner = (np.abs(centre - 0.5) <= 0.25).all(axis=1)
        groups["position"] = np.where(inner, "inner", "outer")
    of_image = None if images is None else _column(images, len(p), "images")
    z = from_probs(p, floor=floor, name="scores")
    return PredictionTable(z, y, groups=groups, class_names=("miss", "hit"), clusters=of_image, cluster_name="image")


def d_ece(
    scores: ArrayLike,
    hits: ArrayLike,
    boxes: ArrayLike | None = None,
    *,
    bins: int | Sequence[int] = 10,
    least: int = 1,
) -> float:
    """Compute the detection ECE over a grid of the score and the box coordinates.

    Σ_b n_b/n |mean hit − mean score| runs over the cells of a grid in (score, cx, cy, w, h). Each coordinate lies in
    [0, 1]; cells are left-closed. Values outside [0, 1] are rejected.

    Parameters
    ----------
    scores
        Score of each detection, shape (n,), in [0, 1].
    hits
        1 where a detection is right, else 0, shape (n,).
    boxes
        Any of the box coordinates as shares of the image, shape (n, d).
    bins
        Number of equal parts of each dimension, or one number per dimension.
    least
        Cells with fewer detections than this count as calibrated.

    Returns
    -------
    float
        The error, between 0 and 1; NaN without rows.

    Examples
    --------
    >>> round(d_ece([0.9, 0.8, 0.3], [1, 0, 0], [[0.2, 0.5, 0.1, 0.1], [0.7, 0.5, 0.1, 0.1], [0.2, 0.5, 0.3, 0.3]]), 4)
    0.4

    References
    ----------
    Küppers, Kronenberger, Shantia & Haselhoff (2020), Multivariate confidence calibration for object detection,
    arXiv:2004.13546.
    """
    p, y = _scores_and_hits(scores, hits)
    features = p[:, None]
    if boxes is not None:
        features = np.concatenate([features, _boxes(boxes, len(p), any_width=True)], axis=1)
    low, high = (float(f(features, initial=0.5)) for f in (np.min, np.max))
    if low < 0 or high > 1:
        raise InputError("boxes", "lie in [0, 1], as shares of the image", f"{low:.6g}..{high:.6g}")
    size = features.shape[1]
    counts = [bins] * size if isinstance(bins, (int, np.integer)) else list(bins)
    if len(counts) != size:
        raise InputError("bins", f"be one number, or one for each of {size} dimensions", f"{len(counts)} numbers")
    if not len(p):
        return float("nan")
    cell_of_dimension = []
    for column, count in zip(features.T, counts, strict=True):
        edges = equal_width(count)
        cell_of_dimension.append(np.minimum(np.searchsorted(edges, column, side="right") - 1, count - 1))
    _, cell = np.unique(np.stack(cell_of_dimension, axis=1), axis=0, return_inverse=True)
    cell = cell.ravel()
    gap = np.abs(np.bincount(cell, y) - np.bincount(cell, p))
    return float(gap[np.bincount(cell) >= least].sum() / len(p))


def _scores_and_hits(scores: Any, hits: Any) -> tuple[np.ndarray, np.ndarray]:
    p = as_vector(scores, "scores")
    y = as_vector(hits, "hits", length=len(p))
    if not np.isin(y, (0.0, 1.0)).all():
        raise InputError("hits", "be 0 or 1", f"{y[~np.isin(y, (0.0, 1.0))][0]:g}", "match the boxes first")
    if len(p) and (p.min() < 0 or p.max() > 1):
        raise InputError("scores", "lie in [0, 1]", f"{p.min():.6g}..{p.max():.6g}")
    return p, y.astype(np.int64)


def _boxes(boxes: Any, rows: int, *, any_width: bool = False) -> np.ndarray:
    box = to_array(boxes, "boxes").astype(np.float64)
    if box.ndim != 2 or len(box) != rows or not (any_width or box.shape[1] == 4):
        raise InputError("boxes", f"have shape ({rows}, 4): cx, cy, w, h", str(box.shape))
    if not np.isfinite(box).all():
        raise InputError("boxes", "be finite", f"{int((~np.isfinite(box)).sum())} that are not")
    return box


def _column(values: Any, rows: int, name: str) -> np.ndarray:
    try:
        of_row = as_clusters(values, rows)
    except InputError as error:
        raise error.replace(argument=name) from None
    assert of_row is not None
    return np.array(of_row.names)[of_row.code] if rows else np.zeros(0)
