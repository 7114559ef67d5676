"""Boxes: the confidence of detections that were matched to the truth elsewhere, and where it is wrong.

A row is one detection: its score, whether it hit an object, its class and its box. Matching boxes is the detector
library's job. Detections of one image are correlated.
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
"""Areas in pixels below which a box is small, and medium, as COCO has them."""
_RELATIVE = (0.01, 0.09)
"""The same of boxes in shares of the image: a tenth and three tenths of its sides."""


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
    """Matched detections as events: scores (n,) in [0, 1] and hits (n,), 1 where a detection is right.

    `classes` and `images` have a value for each detection, `boxes` (n, 4) the centre, width and height (cx, cy, w, h),
    in pixels with `image_size` = (width, height), else in shares of the image. The groups are the class, the size (of
    COCO in pixels) and the position, inner or outer; the clusters are the images. `evaluate(*table, **table.options())`
    then says where the scores are wrong, and `per_group("platt")(*table, groups=table.groups["class"])` repairs them.

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
        small, medium = _RELATIVE if image_size is None else SIZES
        groups["size"] = np.where(area < small, "small", np.where(area < medium, "medium", "large"))
        inner = (np.abs(centre - 0.5) <= 0.25).all(axis=1)
        groups["position"] = np.where(inner, "inner", "outer")
    together = None if images is None else _column(images, len(p), "images")
    z = from_probs(p, floor=floor, name="scores")
    return PredictionTable(z, y, groups=groups, class_names=("miss", "hit"), clusters=together, cluster_name="image")


def d_ece(
    scores: ArrayLike,
    hits: ArrayLike,
    boxes: ArrayLike | None = None,
    *,
    bins: int | Sequence[int] = 10,
    least: int = 1,
) -> float:
    """Detection ECE: the ECE over bins of the score and of the box, all at once.

    Σ_b n_b/n |mean hit − mean score| over the cells of a grid in (score, cx, cy, w, h), each in [0, 1] and cut in
    `bins` equal parts, or so many in each dimension; `boxes` (n, d) may have any of them. Cells are left-closed. Those
    with fewer than `least` detections count as right. What lies outside of [0, 1] is refused.

    >>> round(d_ece([0.9, 0.8, 0.3], [1, 0, 0], [[0.2, 0.5, 0.1, 0.1], [0.7, 0.5, 0.1, 0.1], [0.2, 0.5, 0.3, 0.3]]), 4)
    0.4

    Küppers, Kronenberger, Shantia & Haselhoff (2020), Multivariate confidence calibration for object detection.
    """
    p, y = _scores_and_hits(scores, hits)
    features = p[:, None]
    if boxes is not None:
        features = np.concatenate([features, _boxes(boxes, len(p), any_width=True)], axis=1)
    low, high = (float(f(features, initial=0.5)) for f in (np.min, np.max))
    if low < 0 or high > 1:
        raise InputError("boxes", "lie in [0, 1], in shares of the image", f"{low:.6g}..{high:.6g}")
    size = features.shape[1]
    counts = [bins] * size if isinstance(bins, (int, np.integer)) else list(bins)
    if len(counts) != size:
        raise InputError("bins", f"be one number, or one for each of {size} dimensions", f"{len(counts)} numbers")
    if not len(p):
        return float("nan")
    places = []
    for column, count in zip(features.T, counts, strict=True):
        edges = equal_width(count)
        places.append(np.minimum(np.searchsorted(edges, column, side="right") - 1, count - 1))
    _, cell = np.unique(np.stack(places, axis=1), axis=0, return_inverse=True)
    cell = cell.ravel()
    gap = np.abs(np.bincount(cell, y) - np.bincount(cell, p))
    return float(gap[np.bincount(cell) >= least].sum() / len(p))


def _scores_and_hits(scores: Any, hits: Any) -> tuple[np.ndarray, np.ndarray]:
    p = as_vector(scores, "scores")
    y = as_vector(hits, "hits", length=len(p))
    if not np.isin(y, (0.0, 1.0)).all():
        raise InputError("hits", "be 0 or 1", f"{y[~np.isin(y, (0.0, 1.0))][0]:g}", "matching boxes comes before")
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
        found = as_clusters(values, rows)
    except InputError as error:
        raise error.replace(argument=name) from None
    assert found is not None
    return np.array(found.names)[found.code] if rows else np.zeros(0)
