"""ImageNet, or another folder of pictures with a subfolder per class."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from trueup._core.splits import split_indices
from trueup.io.atomic import atomic_write
from trueup.models.image_data import CROP, ENDINGS, Pictures, center_crop, library, list_classes, list_files, pixels
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.data.images import IMAGENET
from trueup_studies.training.data.sources import Source, obtain


class ListedLater(Dataset[tuple[Tensor, int]]):
    """The pictures of a folder with a subfolder per class, listed on first use, since there may be a million."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder, self.classes = folder, tuple(classes)

    @cached_property
    def pictures(self) -> Pictures:
        """The pictures; none without the folder."""
        return Pictures(*list_files(self.folder, self.classes))

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the pictures."""
        return self.pictures.files

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not len(self.pictures):
            raise ValueError(f"{self.folder}: wanted pictures ({', '.join(ENDINGS)}) in a folder for each class")
        return self.pictures[index]


class DecodedPictures(Dataset[tuple[Tensor, int]]):
    """Pictures decoded once into a memory-mapped file of bytes.

    Cropped pixels are rounded to bytes, as in the usual pipelines.
    """

    def __init__(self, path: Path, labels: Sequence[int]) -> None:
        self.path, self.labels = path, tuple(labels)
        self._bytes: np.memmap[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        [sample] = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        if self._bytes is None:  # opened here, so that each worker has its own
            self._bytes = np.memmap(self.path, np.uint8, "r", shape=(len(self.labels), 3, CROP, CROP))
        return [(torch.from_numpy(np.array(self._bytes[i])).float().div_(255), self.labels[i]) for i in indices]


def decode_once(part: Pictures, folder: Path, *, workers: int = 0) -> DecodedPictures:
    """Decode all pictures into a file of the folder with `workers` processes, unless it exists."""
    known = "\n".join(f"{path} {path.stat().st_size}" for path in part.files)
    known += "" if part.transform is center_crop else f"\n{part.transform.__name__}"
    path = folder / f"pictures-{hashlib.sha256(known.encode()).hexdigest()[:32]}.bin"
    folder.mkdir(parents=True, exist_ok=True)
    with library("filelock", "filelock").FileLock(f"{path}.lock"):  # the system releases it if the owner is killed
        for draft in folder.glob(f".{path.name}.*.tmp"):  # left by a killed process
            draft.unlink(missing_ok=True)
        if not path.exists():
            with atomic_write(path) as [draft], draft.open("wb") as out:
                for images, _ in DataLoader(part, batch_size=64, num_workers=workers):
                    out.write(images.mul(255).round().to(torch.uint8).numpy().tobytes())
    return DecodedPictures(path, part.labels)


def imagenet(folder: Path, seed: int) -> Data:
    """ILSVRC 2012 as torchvision's folders `train/<class>` and `val/<class>` (Russakovsky et al. 2015).

    The images of `val` are split in two fixed halves, for validation and for testing. Those of `train` may be missing,
    since published networks need none; the classes are then those of `val`.
    """
    used = ("val/*/[!.]*",)  # only the class names of train are used
    files = [Source(("train/*/*", "val/*/*"), Path, used), Source(("val/*/*",), Path, used)]
    root: Path = obtain("imagenet", folder, files)
    classes = list_classes(root / "train") or list_classes(root / "val")
    paths, labels = list_files(root / "val", classes)
    if not paths:
        raise ValueError(f"{root / 'val'}: wanted pictures ({', '.join(ENDINGS)}) in a folder for each class")
    val, test = (
        Pictures([paths[i] for i in half], [labels[i] for i in half])
        for half in split_indices(len(paths), share=0.5, seed=0)
    )
    train = ListedLater(root / "train", classes)
    return Data("imagenet", "image", train, val, test, classes=classes, normalisation=IMAGENET)


def squash(picture: np.ndarray) -> Tensor:
    """Scale both sides to 224 pixels: (3, 224, 224) in [0, 1].

    >>> squash(np.zeros((300, 400, 3), np.uint8)).shape
    torch.Size([3, 224, 224])
    """
    x = pixels(picture[None])
    size = (CROP, CROP)
    return F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False).clamp_(0, 1)[0]
