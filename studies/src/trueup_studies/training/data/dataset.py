"""A data set for training: three parts, and what a network needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from trueup._core.splits import split_indices
from trueup.models.image_data import Parts, select

Kind: TypeAlias = Literal["image", "text", "characters", "tabular"]


@dataclass(frozen=True)
class Data:
    """A data set in three parts of pairs (inputs, labels), none of which shares a sample with another.

    Images are (C, H, W) with pixels in [0, 1], texts and characters whole numbers (length,), rows of a table float
    vectors that are already centred and scaled by the training part, as are the targets of a regression.
    """

    name: str
    kind: Kind
    train: Dataset[Any]
    val: Dataset[Any]
    test: Dataset[Any]
    classes: tuple[str, ...] = ()
    """The names of the classes, in the order of the labels; none for a regression."""
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Mean and standard deviation of each channel of images, not applied: `Normalise(*data.normalisation)` does it."""
    vocabulary: tuple[str, ...] = ()
    """The words or characters that the whole numbers stand for; of words, 0 is padding and 1 any other word."""
    target_mean: float = 0.0
    """What was subtracted from the targets of a regression …"""
    target_std: float = 1.0
    """… and by what they were divided then: targets · target_std + target_mean are in their own units."""


def validate_parts(name: str, parts: Parts, classes: int) -> Parts:
    """Return the parts, or raise if inputs and labels differ in number or labels are not classes."""
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
    """Take a share of the training part for validation, the last of it without a seed, unless the files did."""
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
