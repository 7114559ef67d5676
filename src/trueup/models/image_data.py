"""Images and labels from an `.npz` file, or pictures from a folder with a subfolder per class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from trueup._core.splits import split_indices
from trueup.io.atomic import errors_name_file, require_file
from trueup.io.formats import FORMATS
from trueup.io.source import Plan

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
"""Suffixes of the pictures that are read."""
SHORT, CROP = 256, 224
"""Pixels of the shorter side after scaling, and of each side of the center crop."""


class Part(NamedTuple):
    """Inputs of one part (an array or a list of texts), and their labels."""

    inputs: Any
    labels: np.ndarray


Parts: TypeAlias = Mapping[str, Part]
""""train" and "test" → part, and "val" if the files contain a validation part."""


def select(part: Part, index: Sequence[int] | np.ndarray) -> Part:
    """Select the samples of a part with these indices."""
    inputs = part.inputs[index] if isinstance(part.inputs, np.ndarray) else [part.inputs[i] for i in index]
    return Part(inputs, part.labels[index])


def npz(path: Path, inputs: str = "images") -> Parts:
    """Read train, val and test of one file: `train_images`, `train_labels` and so on, or `images` and `labels`."""
    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        keys = [key for key in ("train", "val", "test") if f"{key}_{inputs}" in arrays]
        prefixes = {key: f"{key}_" for key in keys} or {"train": ""}
        required = [f"{prefix}{what}" for prefix in prefixes.values() for what in (inputs, "labels")]
        if not {*required} <= arrays.keys():
            others = "" if keys else f"train_{inputs} … or "
            raise ValueError(f"wanted the arrays {others}{', '.join(required)}, got {', '.join(arrays) or 'none'}")
        parts = {key: Part(arrays[f"{p}{inputs}"], label_vector(arrays[f"{p}labels"])) for key, p in prefixes.items()}
        for key, prefix in prefixes.items():
            if not np.isfinite(parts[key].inputs).all():
                raise ValueError(f"{prefix}{inputs} must be finite")
        return parts


@contextmanager
def arrays_in(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open the arrays of an `.npz` file in a `with` statement; each array is read on first use."""
    if not is_zipfile(path):
        raise ValueError("not an .npz file, which is an archive of arrays")
    read, _ = FORMATS[".npz"]
    with read(path) as source:
        yield _Arrays(source)


class _Arrays(Mapping[str, np.ndarray]):
    """Numeric arrays by name."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.columns)

    def __len__(self) -> int:
        return len(self._source.columns)

    def __contains__(self, name: object) -> bool:  # without reading the array
        return name in self._source.columns

    def __getitem__(self, name: str) -> np.ndarray:
        (chunk,) = self._source.read(Plan((name,)), sys.maxsize)
        array = chunk.logits
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be an array of numbers, got type {array.dtype}")
        return np.asarray(array)


def label_vector(labels: np.ndarray) -> np.ndarray:
    """Return labels (n,) from (n,) or (n, 1), the shape in MedMNIST and SVHN."""
    if labels.ndim not in (1, 2) or (labels.ndim == 2 and labels.shape[1] != 1):
        raise ValueError(f"labels must have shape (n,) or (n, 1), got {labels.shape}")
    if labels.dtype.kind not in "biu" and not (labels.dtype.kind == "f" and (labels == np.floor(labels)).all()):
        raise ValueError(f"labels must be whole numbers, got type {labels.dtype}")
    whole = labels.reshape(-1).astype(np.int64)
    if not (whole == labels.reshape(-1)).all():
        raise ValueError("labels must fit into 64 bits")
    return whole


_CHANNELS = (1, 3, 4)


def pixels(images: np.ndarray) -> Tensor:
    """Convert images (n, H, W), (n, H, W, C) or (n, C, H, W), bytes or floats in [0, 1], to floats (n, C, H, W).

    Channels are first if only the second axis has size 1, 3 or 4.

    >>> pixels(np.zeros((5, 8, 8, 3))).shape, pixels(np.zeros((5, 3, 8, 8))).shape
    (torch.Size([5, 3, 8, 8]), torch.Size([5, 3, 8, 8]))
    """
    if images.ndim not in (3, 4):
        raise ValueError(f"images must have shape (n, H, W), (n, H, W, C) or (n, C, H, W), got {images.shape}")
    first = images.ndim == 4 and images.shape[1] in _CHANNELS and images.shape[3] not in _CHANNELS
    upright = images[:, None] if images.ndim == 3 else images if first else images.transpose(0, 3, 1, 2)
    if images.dtype == np.uint8:
        return torch.from_numpy(np.array(upright, order="C")).float().div_(255)
    return torch.from_numpy(np.array(upright, order="C", dtype=np.float32))


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures that are read on access, and resized by `transform`."""

    def __init__(
        self, files: Sequence[Path], labels: Sequence[int], transform: Callable[[np.ndarray], Tensor] | None = None
    ) -> None:
        self.files = tuple(files)
        self.labels = tuple(labels)
        self.transform = transform or center_crop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(decode(self.files[index])), self.labels[index]


def list_classes(folder: Path) -> tuple[str, ...]:
    """List the subfolders of a folder in alphabetical order."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()


def list_files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    """List the pictures in the class folders of a folder, and the number of the class of each."""
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS)
    numbers = {name: number for number, name in enumerate(classes)}
    if strange := next((path for path in paths if path.parent.name not in numbers), None):
        raise ValueError(f"{strange}: there is no class {strange.parent.name} in {folder.parent / 'train'}")
    return paths, [numbers[path.parent.name] for path in paths]


def load_folder(folder: Path, seed: int = 0) -> tuple[Pictures, Pictures] | None:
    """Load pictures for validation and testing; None if there are none.

    They are in folders `val` and `test` with a subfolder per class, or in class folders that are halved at random.
    Classes are numbered in alphabetical order.
    """
    halves = [folder / name for name in ("val", "test")]
    if all(half.is_dir() for half in halves):
        classes = tuple(sorted({name for half in halves for name in list_classes(half)}))
        val, test = (list_files(half, classes) for half in halves)
    else:
        paths, labels = list_files(folder, list_classes(folder))
        halves_of = split_indices(len(paths), share=0.5, seed=seed) if len(paths) > 1 else ((), ())
        val, test = (([paths[i] for i in rows], [labels[i] for i in rows]) for rows in halves_of)
    return (Pictures(*val), Pictures(*test)) if val[0] and test[0] else None


def decode(path: Path) -> np.ndarray:
    """Read the pixels of a picture with Pillow, (H, W, 3) bytes."""
    pillow = library("PIL.Image", "pillow")
    with errors_name_file(require_file(path)), pillow.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def center_crop(picture: np.ndarray) -> Tensor:
    """Scale the shorter side to 256 pixels and take the 224 × 224 in the middle, (3, 224, 224) in [0, 1].

    >>> center_crop(np.zeros((300, 400, 3), np.uint8)).shape
    torch.Size([3, 224, 224])
    """
    x = pixels(picture[None])
    height, width = x.shape[2:]
    scale = SHORT / min(height, width)
    size = (max(SHORT, round(scale * height)), max(SHORT, round(scale * width)))
    x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False).clamp_(0, 1)
    top, left = ((side - CROP) // 2 for side in size)
    return torch.clone(x[0, :, top : top + CROP, left : left + CROP])


def library(module: str, package: str) -> Any:
    """Import a module that only some data sets need."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"reading this data set needs {package}: pip install {package} ({error})") from None
