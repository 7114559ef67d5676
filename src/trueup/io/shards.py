"""Where the shards are: a folder, a pattern or a list, of local files or of anything that fsspec opens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from trueup.io.formats import FORMATS
from trueup.io.predictions import Predictions, chunks

NUMBERS = 1 << 23
"""Logits read at a time, about: 32 MB of float32."""


@dataclass(frozen=True)
class Shards:
    """Files of predictions that together are one data set; nothing is read until it is asked for.

    >>> import numpy as np, trueup
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(3):
    ...         trueup.save(f"{folder}/{i}.npz", (np.zeros((4, 2)), [0, 1, 0, 1]))
    ...     shards = Shards.of(f"{folder}/*.npz")
    ...     len(shards), sum(len(part.labels) for path in shards.paths for part in shards.read(path))
    (3, 12)
    """

    paths: tuple[str, ...]
    rows: int | None = None
    """How many are read at a time; as many as make `NUMBERS` logits by default."""
    logits: str | tuple[str, ...] = "logits"
    labels: str = "labels"
    probs: bool = False
    split: str | None = None
    passed: bool = False
    """Whether the files were read before, and their logits are taken to be finite as they were then."""
    heads: int | None = None
    """How many rows are read at each file's beginning, if not all."""

    @classmethod
    def of(cls, where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any) -> Shards:
        """Find the files of a folder, a pattern such as `preds/*.parquet`, or a list, sorted by name.

        Addresses with `://` are listed and opened by fsspec.
        """
        places = [where] if isinstance(where, str | os.PathLike) else where
        found = sorted(path for place in places for path in _found(os.fspath(place)))
        # A .npy file of labels belongs to the one of logits beside it.
        paths = tuple(path for path in dict.fromkeys(found) if not path.endswith(".labels.npy"))
        if not paths:
            raise FileNotFoundError(f"{where}: no file of predictions ({' '.join(FORMATS)}) is there")
        return cls(paths, **options)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, path: str) -> Iterator[Predictions]:
        """The rows of one shard, some at a time; one of no rows gives an empty part."""
        with _local(path) as file:
            rows = self.rows or max(1, NUMBERS // next(self._parts(file, 1)).logits.shape[1])
            if self.heads is None:
                yield from self._parts(file, rows)
            else:
                yield from islice(self._parts(file, min(rows, self.heads)), 1)

    def _parts(self, file: Path, rows: int) -> Iterator[Predictions]:
        return chunks(file, rows, self.logits, self.labels, self.probs, self.split, passed=self.passed)

    def some(self, most: int, rows: int) -> Shards:
        """The first of so many rows, of at most so many files, spread evenly over all."""
        paths = self.paths[:: -(-len(self) // most)]
        return replace(self, paths=paths, heads=max(64, -(-rows // len(paths))))

    def again(self) -> Shards:
        """The same, to be read once more."""
        return replace(self, passed=True)

    def without(self, bad: Sequence[str]) -> Shards:
        """The others."""
        return replace(self, paths=tuple(path for path in self.paths if path not in bad))


def _found(where: str) -> list[str]:
    if "://" in where:
        return _found_remotely(where)
    if Path(where).is_dir():
        return [str(path) for path in Path(where).iterdir() if path.suffix.lower() in FORMATS]
    if has_magic(where):
        return [path for path in glob(where, recursive=True) if Path(path).suffix.lower() in FORMATS]
    if not Path(where).exists():
        raise FileNotFoundError(f"{where}: no such file, folder or pattern")
    return [where]


def _found_remotely(where: str) -> list[str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(where)
    names = system.glob(path) if has_magic(path) else system.ls(path, detail=False) if system.isdir(path) else [path]
    return [system.unstrip_protocol(name) for name in names if PurePosixPath(name).suffix.lower() in FORMATS]


@contextmanager
def _local(path: str) -> Iterator[Path]:
    """The file itself, or a copy that lasts as long as it is read."""
    if "://" not in path:
        yield Path(path)
        return
    from fsspec.core import url_to_fs

    system, remote = url_to_fs(path)
    name = PurePosixPath(remote).name
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, name)
        system.get_file(remote, str(target))
        beside = remote.removesuffix(".npy") + ".labels.npy"
        if name.endswith(".npy") and system.exists(beside):
            system.get_file(beside, str(target.with_suffix(".labels.npy")))
        yield target


def is_sharded(where: str) -> bool:
    """Whether a name means several files: a folder, a pattern, or an address.

    >>> is_sharded("preds/*.parquet"), is_sharded("val.npz")
    (True, False)
    """
    return "://" in where or Path(where).is_dir() or (has_magic(where) and not Path(where).exists())
