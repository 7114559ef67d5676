"""Shards: a folder, a pattern or a list, of local files or of anything that fsspec opens, and sums over them.

A sum is a map over the files and a reduction: on this thread, or on any `concurrent.futures.Executor`.
"""

from __future__ import annotations

import functools
import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from trueup.core.errors import Hint, InputError, message_of
from trueup.core.progress import track
from trueup.io.formats import FORMATS
from trueup.io.predictions import Predictions, open_predictions

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
    checked_before: bool = False
    """Whether the files were read before, and their logits are taken to be finite as they were then."""
    head_rows: int | None = None
    """How many rows are read at each file's beginning, if not all."""

    @classmethod
    def of(cls, where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any) -> Shards:
        """Find the files of a folder, a pattern such as `preds/*.parquet`, or a list, sorted by name.

        Addresses with `://` are listed and opened by fsspec.
        """
        sources = [where] if isinstance(where, str | os.PathLike) else where
        files = sorted(path for source in sources for path in _list_files(os.fspath(source)))
        # A .npy file of labels belongs to the one of logits beside it.
        paths = tuple(path for path in dict.fromkeys(files) if not path.endswith(".labels.npy"))
        if not paths:
            raise FileNotFoundError(f"{where}: no file of predictions ({' '.join(FORMATS)}) is there")
        return cls(paths, **options)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, path: str) -> Iterator[Predictions]:
        """The rows of one shard, some at a time; one of no rows gives an empty part."""
        with (
            _local_file(path) as local,
            open_predictions(local, logits=self.logits, labels=self.labels, probs=self.probs) as file,
        ):
            rows = self.rows or max(1, NUMBERS // max(1, file.width(self.split)))
            if self.head_rows is None:
                yield from file.stream(rows, self.split, checked_before=self.checked_before)
            else:
                head = file.stream(min(rows, self.head_rows), self.split, checked_before=self.checked_before)
                yield from islice(head, 1)

    def heads(self, most: int, rows: int) -> Shards:
        """The first of so many rows, of at most so many files, spread evenly over all."""
        paths = self.paths[:: -(-len(self) // most)]
        return replace(self, paths=paths, head_rows=max(64, -(-rows // len(paths))))

    def reread(self) -> Shards:
        """The same, to be read once more."""
        return replace(self, checked_before=True)

    def without(self, bad: Sequence[str]) -> Shards:
        """The others."""
        return replace(self, paths=tuple(path for path in self.paths if path not in bad))


def _list_files(where: str) -> list[str]:
    if "://" in where:
        return _list_remote_files(where)
    if Path(where).is_dir():
        return [str(path) for path in Path(where).iterdir() if path.suffix.lower() in FORMATS]
    if has_magic(where):
        return [path for path in glob(where, recursive=True) if Path(path).suffix.lower() in FORMATS]
    if not Path(where).exists():
        raise FileNotFoundError(f"{where}: no such file, folder or pattern")
    return [where]


def _list_remote_files(where: str) -> list[str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(where)
    names = system.glob(path) if has_magic(path) else system.ls(path, detail=False) if system.isdir(path) else [path]
    return [system.unstrip_protocol(name) for name in names if PurePosixPath(name).suffix.lower() in FORMATS]


@contextmanager
def _local_file(path: str) -> Iterator[Path]:
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


Task = Callable[[Predictions], Any]
"""What is made of some rows; the results must add up with `+`. It is sent to workers, so it must be importable."""


class BadShard(ValueError):
    """A shard that cannot be read, or does not belong with the others; `reason` is the error that reading it raised."""

    def __init__(self, reason: Exception | str) -> None:
        self.reason = reason
        super().__init__(reason)

    def message(self, hints: Mapping[Hint, str], names: Mapping[str, str]) -> str:
        """The reason, in an interface's own words."""
        return message_of(self.reason, hints, names) if isinstance(self.reason, Exception) else self.reason


class NoRows(BadShard):
    """Shards that have no rows at all."""


@dataclass(frozen=True)
class Part:
    """What came of one shard."""

    path: str
    rows: int
    classes: int
    value: Any
    """The sum over its rows; None if it has none."""
    error: Exception | None


def map_shards(
    task: Task,
    shards: Shards,
    *,
    combine: Callable[[Any, Any], Any] = operator.add,
    executor: Executor | None = None,
    skip_bad: bool = False,
    progress: bool = True,
    label: str = "shards",
) -> tuple[Any, int, tuple[str, ...]]:
    """Sum a task over all rows of all shards: the sum, how many rows, and which shards were bad and left out.

    Within a shard results are summed by `+`, then the shards' sums are combined.
    Shards are summed in their order, however they come back, so the result does not depend on the executor. A bad shard
    raises `BadShard` with its name, unless `skip_bad`; shards of different numbers of classes are always refused.
    """
    total, rows, bad, first = None, 0, [], None
    for part in track(_parts(task, shards, executor), total=len(shards), label=label, enabled=progress):
        if part.error is not None:
            if not skip_bad:
                raise BadShard(part.error)
            bad.append(part.path)
        elif part.rows:
            first = first or (part.path, part.classes)
            if part.classes != first[1]:
                raise BadShard(
                    f"shards must have the same classes: {first[0]} has {first[1]}, {part.path} {part.classes}"
                )
            total = part.value if total is None else combine(total, part.value)
            rows += part.rows
    if total is None:
        raise NoRows(f"no rows in {len(shards)} shards" + (f", {len(bad)} of which are bad" if bad else ""))
    return total, rows, tuple(bad)


def warn_of_bad_shards(bad: tuple[str, ...]) -> None:
    """Warn of shards that were left out."""
    if bad:
        warnings.warn(
            f"{len(bad)} bad shards were left out: {', '.join(bad[:5])}{' …' if bad[5:] else ''}", stacklevel=3
        )


def _parts(task: Task, shards: Shards, executor: Executor | None) -> Iterator[Part]:
    # Not with all paths: each task is sent by itself.
    run = functools.partial(_sum_shard, task, replace(shards, paths=()), executor is not None)
    if executor is None:
        yield from map(run, shards.paths)
        return
    futures = [executor.submit(run, path) for path in shards.paths]
    try:
        while futures:
            yield futures.pop(0).result()
    finally:
        for future in futures:
            future.cancel()


def _sum_shard(task: Task, shards: Shards, alone: bool, path: str) -> Part:
    """Sum a task over one shard; what is wrong with it is returned, not raised, so that the others go on.

    A worker beside others keeps to one thread.
    """
    before = torch.get_num_threads()
    if alone:
        torch.set_num_threads(1)
    total, rows, classes = None, 0, 0
    try:
        for part in shards.read(path):
            classes = part.logits.shape[1]
            if len(part.labels):
                value = task(part)
                total = value if total is None else total + value
                rows += len(part.labels)
    except (ValueError, OSError) as error:
        named = error.replace(file=path) if isinstance(error, InputError) else error
        if path not in str(named):
            named = ValueError(f"{path}: {error}")
        return Part(path, 0, 0, None, named.with_traceback(None))
    finally:
        if alone:
            torch.set_num_threads(before)
    return Part(path, rows, classes, total, None)
