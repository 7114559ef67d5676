"""A data set for training: three parts, and what a network needs to know about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from trueup._core.splits import split_indices
from trueup.models.image_data import Parts, select

Kind: TypeAlias = Literal["image", "text", "characters", "tabular"]


@dataclass(frozen=True)
class Data:
    """A data set in three disjoint parts of pairs (inputs, labels).

    Images are (C, H, W) with pixels in [0, 1]; texts and characters are integers (length,). Rows of a table are float
    vectors. They and the targets of a regression are centred and scaled by the training part.
    """

    name: str
    kind: Kind
    train: Dataset[Any]
    val: Dataset[Any]
    test: Dataset[Any]
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of the labels; empty for a regression."""
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Mean and standard deviation of each channel of images, not applied: `Normalise(*data.normalisation)` does it."""
    vocabulary: tuple[str, ...] = ()
    """Words or characters by number; for words, 0 is padding and 1 any other word."""
    target_mean: float = 0.0
    """Mean of a regression's targets, which was subtracted."""
    target_std: float = 1.0
    """Standard deviation; targets · target_std + target_mean are in the original units."""
    augment: Callable[..., Any] | None = None
    """Function `(inputs, generator)` that changes a training batch."""


def validate_parts(name: str, parts: Parts, classes: int) -> Parts:
    """Return the parts; raise if inputs and labels differ in number or labels are out of range."""
    _require_train_and_test(parts)
    for key, (inputs, labels) in parts.items():
        if len(inputs) != len(labels):
            raise ValueError(f"{name}: {key} must have a label for each of its {len(inputs)} inputs, got {len(labels)}")
        if not len(labels):
            raise ValueError(f"{name}: {key} must have at least one sample, got none")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"{name}: labels of {key} must lie in 0..{classes - 1}, got {low}..{high}")
    return parts


def add_validation_part(parts: Parts, *, share: float, seed: int | None) -> Parts:
    """Split a share off the training part for validation, unless there is one; without a seed the final samples."""
    _require_train_and_test(parts)
    if "val" in parts:
        return parts
    n = len(parts["train"].labels)
    if seed is None:
        train, val = np.split(np.arange(n), [n - round(share * n)])
    else:
        train, val = split_indices(n, share=share, seed=seed)
    return {"train": select(parts["train"], train), "val": select(parts["train"], val), "test": parts["test"]}


def _require_train_and_test(parts: Parts) -> None:
    if not {"train", "test"} <= parts.keys():
        raise ValueError(f"the files must have the parts train and test, got {', '.join(parts) or 'none'}")
