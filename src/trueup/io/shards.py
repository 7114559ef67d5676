"""Shards: a folder, a pattern or a list, of local files or of anything that fsspec opens, and sums over them.

A sum is a map over the files and a reduction: on this thread, or on any `concurrent.futures.Executor`.
"""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from glob import glob, has_magic
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import numpy as np

from trueup._core.errors import Hint, InputError, error_message
from trueup._core.native import limit_threads
from trueup._core.progress import track
from trueup.io.addresses import file_system
from trueup.io.atomic import StorageOptions, StrPath, warn_of_skipped
from trueup.io.formats import FORMATS
from trueup.io.predictions import Fields, PredictionFile, PredictionTable, concatenate, open_predictions, take_rows
from trueup.io.source import is_address, suffix_of

NUMBERS = 1 << 23
"""Logits read at a time, about: 32 MB of float32."""
SAMPLE_NUMBERS = 1 << 26
"""Logits taken into memory, about, where all are wanted at once: 256 MB of float32."""


@dataclass(frozen=True)
class Shards:
    """Files of predictions that together are one data set; nothing is read until it is asked for.

    >>> import tempfile, numpy as np, trueup
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(3):
    ...         trueup.save((np.zeros((4, 2)), [0, 1, 0, 1]), f"{folder}/{i}.npz")
    ...     shards = Shards.of(f"{folder}/*.npz")
    ...     len(shards), sum(len(part.labels) for path in shards.paths for part in shards.read(path))
    (3, 12)
    """

    paths: tuple[str, ...]
    rows: int | None = None
    """How many are read at a time; as many as make `NUMBERS` logits by default."""
    fields: Fields = field(default_factory=Fields)
    """What the columns are. Groups may also be keys of partitions such as `region=eu/part-0.parquet`, and a cluster may
    continue in another file."""
    split: str | None = None
    storage_options: StorageOptions = None
    """How fsspec opens addresses."""
    checked_before: bool = False
    """Whether the files were read before, and their logits are taken to be finite as they were then."""
    head_rows: int | None = None
    """How many rows are read at each file's beginning, if not all."""
    seed: int | None = None
    """With a seed each part has a random number a row in its columns, "draw", from 0 to 1."""

    @classmethod
    def of(cls, where: StrPath | Sequence[StrPath], **options: Any) -> Shards:
        """Find the files of a folder, a pattern such as `preds/*.parquet`, or a list, sorted by name.

        Folders inside that are called `key=value` are partitions, and belong to it. Addresses with `://` are listed and
        opened by fsspec. `options` are fields of the shards, or of their `fields`, as `load_table` takes them.
        """
        sources = [where] if isinstance(where, str | os.PathLike) else where
        storage = options.get("storage_options")
        files = sorted(path for source in sources for path in _list_files(os.fspath(source), storage))
        # A .npy file of labels belongs to the one of logits beside it.
        paths = tuple(path for path in dict.fromkeys(files) if not path.endswith(".labels.npy"))
        if not paths:
            raise FileNotFoundError(f"{where}: no file of predictions ({' '.join(FORMATS)}) is there")
        columns = {name: options.pop(name) for name in list(options) if name in Fields.__dataclass_fields__}
        return cls(paths, fields=Fields(**columns), **options)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, path: str) -> Iterator[PredictionTable]:
        """The rows of one shard, some at a time; one of no rows gives an empty part. Each unpacks as a pair."""
        with self.open(path) as file:
            rows = self.rows or max(1, NUMBERS // max(1, file.width(self.split)))
            head = self.head_rows
            tables = file.tables(min(rows, head or rows), self.split, checked_before=self.checked_before)
            yield from islice(tables, None if head is None else 1)

    def open(self, path: str) -> AbstractContextManager[PredictionFile]:
        """One shard."""
        return open_predictions(path, self.fields, storage_options=self.storage_options, partitions=partitions_of(path))

    def load(
        self, *, most: int = SAMPLE_NUMBERS, seed: int = 0, executor: Executor | None = None,
        skip_bad: bool = False, progress: bool = True,
    ) -> PredictionTable:  # fmt: skip
        """All rows in memory; of more than about `most` logits, rows drawn at random, and a warning tells how many.

        Each row is kept with the same probability, whatever the order of the files and of their rows.
        """
        task = functools.partial(_Drawn.of, most=most)
        drawn, rows, bad = map_shards(
            task, replace(self, seed=seed), executor=executor, skip_bad=skip_bad, progress=progress,
            label="reading shards",
        )  # fmt: skip
        warn_of_bad_shards(bad)
        table = concatenate(drawn.tables)
        if drawn.threshold < 1:
            drawn_rows = f"{len(table.labels):,} of them were drawn at random"
            warnings.warn(f"{rows:,} rows do not fit in memory: {drawn_rows}", stacklevel=2)
        return replace(table, skipped=0)

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


def _list_files(where: str, storage_options: StorageOptions = None) -> list[str]:
    if is_address(where):
        return _list_remote_files(where, storage_options)
    if Path(where).is_dir():
        return [str(path) for path in _files_below(Path(where))]
    if has_magic(where):
        return [path for path in glob(where, recursive=True) if suffix_of(path) in FORMATS]
    if not Path(where).exists():
        raise FileNotFoundError(f"{where}: no such file, folder or pattern")
    return [where]


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and "=" in path.name:
            yield from _files_below(path)
        elif suffix_of(path) in FORMATS and not path.name.startswith((".", "_")):
            yield path


def _list_remote_files(where: str, storage_options: StorageOptions) -> list[str]:
    system, path = file_system(where, storage_options)
    if has_magic(path):
        names = system.glob(path)
    elif system.isdir(path):
        names = [name for name in system.find(path) if _below_partitions(name, path)]
    else:
        names = [path]
    return [system.unstrip_protocol(name) for name in names if suffix_of(name) in FORMATS]


def _below_partitions(name: str, folder: str) -> bool:
    inner = PurePosixPath(name.lstrip("/")).relative_to(folder.strip("/") or ".").parts
    return all("=" in part for part in inner[:-1]) and not inner[-1].startswith((".", "_"))


def partitions_of(path: str) -> dict[str, str]:
    """The keys and values of folders called `key=value` on the way to a file.

    >>> partitions_of("data/region=eu/year=2024/part-0.parquet")
    {'region': 'eu', 'year': '2024'}
    """
    folders = path.replace("\\", "/").split("/")[:-1]
    pairs = (folder.partition("=") for folder in folders if "=" in folder)
    return {key: "(missing)" if value == _NO_VALUE else unquote(value) for key, _, value in pairs if key}


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class _Drawn:
    """Rows whose random numbers lie below a threshold, which is halved whenever they become too many."""

    tables: tuple[PredictionTable, ...]
    threshold: float
    most: int

    @classmethod
    def of(cls, part: PredictionTable, *, most: int) -> _Drawn:
        """Of a chunk."""
        return cls((part,), 1.0, most)._thin()

    def __add__(self, other: _Drawn) -> _Drawn:
        threshold = min(self.threshold, other.threshold)
        return _Drawn((*self._below(threshold), *other._below(threshold)), threshold, self.most)._thin()

    def _below(self, threshold: float) -> tuple[PredictionTable, ...]:
        if threshold >= 1:
            return self.tables
        return tuple(take_rows(table, table.columns["draw"] < threshold) for table in self.tables)

    def _thin(self) -> _Drawn:
        drawn = self
        while sum(np.size(table.logits) for table in drawn.tables) > drawn.most and drawn.threshold > 2**-40:
            drawn = replace(drawn, tables=drawn._below(drawn.threshold / 2), threshold=drawn.threshold / 2)
        return drawn


Task = Callable[[PredictionTable], Any]
"""What is made of some rows; the results must add up with `+`. It is sent to workers, so it must be importable."""


class BadShard(ValueError):
    """A shard that cannot be read, or does not belong with the others; `reason` is the error that reading it raised."""

    def __init__(self, reason: Exception | str) -> None:
        self.reason = reason
        super().__init__(reason)

    def message(self, hints: Mapping[Hint, str], names: Mapping[str, str]) -> str:
        """The reason, in an interface's own words."""
        return error_message(self.reason, hints, names) if isinstance(self.reason, Exception) else self.reason


class NoRows(BadShard):
    """Shards that have no rows at all."""


@dataclass(frozen=True)
class Part:
    """What came of one shard."""

    path: str
    rows: int
    n_classes: int
    value: Any
    """The sum over its rows; None if it has none."""
    error: Exception | None
    skipped: int = 0
    """How many rows had no label."""


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
    total, rows, bad, first, skipped = None, 0, [], None, 0
    # Not with all paths: each task is sent by itself.
    run = functools.partial(_sum_shard, task, replace(shards, paths=()), executor is not None)
    parts = map(run, shards.paths) if executor is None else executor.map(run, shards.paths)
    for part in track(parts, total=len(shards), label=label, enabled=progress):
        if part.error is not None:
            if not skip_bad:
                raise BadShard(part.error)
            bad.append(part.path)
            continue
        skipped += part.skipped
        if part.rows:
            first = first or (part.path, part.n_classes)
            if part.n_classes != first[1]:
                classes = f"{first[0]} has {first[1]}, {part.path} {part.n_classes}"
                raise BadShard(f"shards must have the same classes: {classes}")
            total = part.value if total is None else combine(total, part.value)
            rows += part.rows
    if not shards.checked_before and shards.head_rows is None:
        warn_of_skipped(skipped, f"{len(shards)} shards" if len(shards) > 1 else shards.paths[0])
    if total is None:
        raise NoRows(f"no rows in {len(shards)} shards" + (f", {len(bad)} of which are bad" if bad else ""))
    return total, rows, tuple(bad)


def warn_of_bad_shards(bad: tuple[str, ...]) -> None:
    """Warn of shards that were left out."""
    if bad:
        names = ", ".join(bad[:5]) + (" …" if bad[5:] else "")
        warnings.warn(f"{len(bad)} bad shards were left out: {names}", stacklevel=3)


def _sum_shard(task: Task, shards: Shards, alone: bool, path: str) -> Part:
    """Sum a task over one shard; what is wrong with it is returned, not raised, so that the others go on.

    A worker beside others keeps to one thread.
    """
    total, rows, classes, skipped = None, 0, 0, 0
    dice = None if shards.seed is None else np.random.default_rng([shards.seed, *PurePosixPath(path).name.encode()])
    try:
        with limit_threads(1) if alone else nullcontext():
            for part in shards.read(path):
                classes, skipped = part.logits.shape[1], skipped + part.skipped
                if dice is not None:
                    part = replace(part, columns={**part.columns, "draw": dice.random(len(part.labels))})
                if len(part.labels):
                    value = task(part)
                    total = value if total is None else total + value
                    rows += len(part.labels)
    except (ValueError, OSError) as error:
        named = error.replace(file=path) if isinstance(error, InputError) else error
        if path not in str(named):
            named = ValueError(f"{path}: {error}")
        return Part(path, 0, 0, None, named.with_traceback(None))
    return Part(path, rows, classes, total, None, skipped)
