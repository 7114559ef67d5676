"""Data sets by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueup._core.registry import Registry
from trueup_studies.training.data.dataset import Data, Kind
from trueup_studies.training.data.sources import FileSearch, folder_of, only_look

__all__ = ["DATASETS", "Data", "Kind", "digest_files", "find_files", "load_data"]

DATASETS: Registry[Callable[..., Any]] = Registry(
    "data set",
    {
        **{
            name: f"trueup_studies.training.data.images:{name}"
            for name in ("digits", "fashion_mnist", "cifar10", "cifar100", "svhn", "bloodmnist")
        },
        "imagenet": "trueup_studies.training.data.image_folder:imagenet",
        **{
            name: f"trueup_studies.training.data.text:{name}"
            for name in ("newsgroups20", "trec", "sst5", "tinyshakespeare")
        },
        **{
            name: f"trueup_studies.training.data.tabular:{name}"
            for name in ("uci_boston", "uci_concrete", "uci_energy", "uci_wine", "uci_yacht")
        },
    },
)
"""Data set → function of (folder, seed) that reads it; its docstring describes the split."""
IMAGES = ("fashion_mnist", "cifar10", "cifar100", "svhn", "bloodmnist")
"""Data sets of images whose files have a fixed order."""
FEW_FILES = 100
"""Largest number of files whose content is hashed."""


def load_data(name: str = "digits", data_dir: str | os.PathLike[str] | None = None, *, seed: int | None = 0) -> Data:
    """Read a data set in three parts, train, val and test, downloading its files if they are missing.

    Files are searched for in `data_dir` and its folders `images`, `text`, `tabular` and the data set's name, in the
    formats of their libraries and sites. The default folder is that of the variable TRUEUP_DATA, else
    `~/.cache/trueup/data`. If they cannot be downloaded, FileNotFoundError names the files and folders.

    The seed draws the validation part from the training part, unless the files contain one. The test part does not
    depend on it, except for the UCI tables, where the seed is the number of the split. For images in files, `seed=None`
    takes the final training images for validation, which some published weights held out.

    >>> data = load_data("digits")
    >>> len(data.train), len(data.val), len(data.test), data.kind, len(data.classes)
    (1078, 360, 359, 'image', 10)
    >>> image, label = data.train[0]
    >>> image.shape
    torch.Size([1, 8, 8])
    """
    if name not in DATASETS:
        raise ValueError(f"name must be one of {', '.join(DATASETS)}, got {name!r}")
    if seed is None and name not in IMAGES:
        raise ValueError(f"seed may be None with {', '.join(IMAGES)}, got it with {name}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
        raise ValueError(f"seed must be a whole number in 0..2³²−1, got {seed!r}")
    data: Data = DATASETS[name](folder_of(data_dir), seed)
    return data


def find_files(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[str, Path | None]:
    """Return the files of a data set, and the folder that has them or None; nothing is read or downloaded.

    >>> find_files("tinyshakespeare", "/nowhere")
    ('tinyshakespeare.txt; or tinyshakespeare/input.txt', None)
    >>> find_files("digits")  # it comes with scikit-learn
    ('', None)
    """
    search = _search(name, data_dir)
    return ("", None) if search is None else (search.files, search.where)


def digest_files(name: str, data_dir: str | os.PathLike[str] | None = None) -> str | None:
    """Hash the content of a data set's files, or names and sizes if there are many; None without files."""
    search = _search(name, data_dir)
    if search is None or search.where is None:
        return None
    whole = hashlib.sha256()
    files = sorted({file for pattern in search.identifying for file in search.where.glob(pattern) if file.is_file()})
    for file in files:
        whole.update(f"{file.relative_to(search.where)} {file.stat().st_size}\n".encode())
        if len(files) <= FEW_FILES:
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()[:32]


def _search(name: str, data_dir: str | os.PathLike[str] | None) -> FileSearch | None:
    """Search for the files of a data set; None if it comes with a library."""
    token = only_look.set(True)
    try:
        DATASETS[name](folder_of(data_dir), 0)
    except FileSearch as search:
        return search
    finally:
        only_look.reset(token)
    return None
