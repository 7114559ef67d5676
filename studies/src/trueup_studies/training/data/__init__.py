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
"""Data set → the function of (folder, seed) that reads it; each says in its docstring how it is split."""
IMAGES = ("fashion_mnist", "cifar10", "cifar100", "svhn", "bloodmnist")
"""Those whose files have an order."""
FEW_FILES = 100
"""More than these are not read to tell them from others."""


def load_data(name: str = "digits", data_dir: str | os.PathLike[str] | None = None, *, seed: int | None = 0) -> Data:
    """Read a data set in three parts, train, val and test, fetching its files if they are not there.

    Files are looked for in `data_dir` and its folders `images`, `text`, `tabular` and that of the data set's name, in
    the formats of their own libraries and sites; by default in the folder that the variable TRUEUP_DATA names, else in
    `~/.cache/trueup/data`. Where they cannot be fetched either, FileNotFoundError says which were wanted where.
    The seed draws the validation part from the training part where the files do not name it; the test part does not
    depend on it, save for the tables of UCI, which have none of their own: there the seed is the number of the split.
    Of images in files `seed=None` takes the last ones of the training part, as some published weights were held out.

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
    """Which files a data set wants, and the folder that has them, None if there is none; nothing is read or fetched.

    >>> find_files("tinyshakespeare", "/nowhere")
    ('tinyshakespeare.txt; or tinyshakespeare/input.txt', None)
    >>> find_files("digits")  # it comes with scikit-learn
    ('', None)
    """
    search = _search(name, data_dir)
    return ("", None) if search is None else (search.wanted, search.where)


def digest_files(name: str, data_dir: str | os.PathLike[str] | None = None) -> str | None:
    """By what the files of a data set are told from others: a hash of their content, or of names and sizes if many.

    None where there is none.
    """
    search = _search(name, data_dir)
    if search is None or search.where is None:
        return None
    whole = hashlib.sha256()
    files = sorted({file for pattern in search.told_by for file in search.where.glob(pattern) if file.is_file()})
    for file in files:
        whole.update(f"{file.relative_to(search.where)} {file.stat().st_size}\n".encode())
        if len(files) <= FEW_FILES:
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()[:32]


def _search(name: str, data_dir: str | os.PathLike[str] | None) -> FileSearch | None:
    """What a data set wants and has; None of one that comes with a library."""
    token = only_look.set(True)
    try:
        DATASETS[name](folder_of(data_dir), 0)
    except FileSearch as search:
        return search
    finally:
        only_look.reset(token)
    return None
