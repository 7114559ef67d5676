"""Shards: a folder, a pattern or a list of files, local or opened by fsspec, and sums over them.

A sum is a map over the files and a reduction. It runs on this thread, or on any `concurrent.futures.Executor`.
"""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Approximate number of logits read at a time: 32 MB of float32."""
SAMPLE_NUMBERS = 1 << 26
"""Approximate number of logits held in memory if all rows are requested at once: 256 MB of float32."""


@dataclass(frozen=True)
class Shards:
    """Files of predictions that form one data set; nothing is read before it is needed.

    >>> import tempfile, numpy as np, trueup
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(3):
    ...         trueup.save((np.zeros((4, 2)), [0, 1, 0, 1]), f"{folder}/{i}.npz")
    ...     shards = Shards.of(f"{folder}/*.npz")
    ...     len(shards), sum(len(part.labels) for path in shards.paths for part in shards.read(path))
    (3, 12)
    """

    paths: tuple[str, ...]
    """Paths of the files."""
    rows: int | None = None
    """Number of rows read at a time; by default as many as have `NUMBERS` logits."""
    fields: Fields = field(default_factory=Fields)
    """Names of the columns. Groups may also be keys of partitions such as `region=eu/part-0.parquet`. A cluster may
    continue in another file."""
    split: str | None = None
    """The half to read of files that hold two: val or test."""
    storage_options: StorageOptions = None
    """Options with which fsspec opens addresses."""
    read_before: bool = False
    """Whether the files were read before, so that warnings need not be repeated."""
    head_rows: int | None = None
    """Number of rows to read at the beginning of each file; None reads all."""
    seed: int | None = None
    """With a seed, each row has a random number in [0, 1) in the column "draw"."""

    @classmethod
    def of(cls, where: StrPath | Sequence[StrPath], **options: Any) -> Shards:
        """Find the files of a folder, a pattern such as `preds/*.parquet`, or a list, sorted by name.

        Subfolders called `key=value` are partitions and belong to the folder. fsspec lists and opens addresses with
        `://`.

        Parameters
        ----------
        where
            A folder, a pattern, an address, or a list of them.
        **options
            Fields of `Shards`, or options of `load_table`.

        Returns
        -------
        Shards
            The files.
        """
        sources = [where] if isinstance(where, str | os.PathLike) else where
        storage = options.get("storage_options")
        files = sorted(path for source in sources for path in _list_files(os.fspath(source), storage))
        # A .npy file of labels belongs to the .npy file of logits.
        paths = tuple(path for path in dict.fromkeys(files) if not path.endswith(".labels.npy"))
        if not paths:
            raise FileNotFoundError(f"{where}: no file of predictions ({' '.join(FORMATS)}) is there")
        columns = {name: options.pop(name) for name in list(options) if name in Fields.__dataclass_fields__}
        return cls(paths, fields=Fields(**columns), **options)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, path: str) -> Iterator[PredictionTable]:
        """Yield the rows of one shard in parts; a shard without rows gives an empty part. Each unpacks as a pair.

        Parameters
        ----------
        path
            One of `paths`.

        Yields
        ------
        PredictionTable
            Some rows.
        """
        with self.open(path) as file:
            rows = self.rows or max(1, NUMBERS // max(1, file.width(self.split)))
            head = self.head_rows
            tables = file.tables(min(rows, head or rows), self.split)
            yield from islice(tables, None if head is None else 1)

    def open(self, path: str) -> AbstractContextManager[PredictionFile]:
        """Open one shard.

        Parameters
        ----------
        path
            One of `paths`.

        Returns
        -------
        context manager
            The open file.
        """
        return open_predictions(path, self.fields, storage_options=self.storage_options, partitions=partitions_of(path))

    def sums(self, task: Task, executor: Executor | None = None) -> Iterable[Part]:
        """Sum a task over each shard, in order; shards that cannot be read give their error.

        Parameters
        ----------
        task
            A function of some rows, whose results add up with `+`.
        executor
            Runs the shards in parallel; by default they run in this process.

        Returns
        -------
        iterable of Part
            One result per shard.
        """
        # The paths are left out, because each task is sent separately.
        run = functools.partial(_sum_shard, task, replace(self, paths=()), executor is not None)
        return map(run, self.paths) if executor is None else executor.map(run, self.paths)

    def load(
        self, *, most: int = SAMPLE_NUMBERS, seed: int = 0, executor: Executor | None = None,
        skip_bad: bool = False, progress: bool = True,
    ) -> PredictionTable:  # fmt: skip
        """Read all rows into memory, or a random sample if there are more than about `most` logits, with a warning.

        Each row is kept with the same probability, whatever the order of the files and of their rows.

        Parameters
        ----------
        most
            Approximate number of logits to keep.
        seed
            Seed of the sample.
        executor
            Executor that reads the shards; this thread by default.
        skip_bad
            Leave out unreadable shards with a warning instead of raising.
        progress
            Show progress.

        Returns
        -------
        PredictionTable
            The rows.
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
        """Return shards that read only the first rows: about `rows` rows of at most `most` files, spread evenly.

        Parameters
        ----------
        most
            Largest number of files.
        rows
            Approximate number of rows.

        Returns
        -------
        Shards
            Some of the files, limited to their first rows.
        """
        paths = self.paths[:: -(-len(self) // most)]
        return replace(self, paths=paths, head_rows=max(64, -(-rows // len(paths))))

    def reread(self) -> Shards:
        """Return the same shards for another reading, without repeated warnings.

        Returns
        -------
        Shards
            The same files.
        """
        return replace(self, read_before=True)

    def without(self, bad: Sequence[str]) -> Shards:
        """Return the shards without some files.

        Parameters
        ----------
        bad
            Paths to leave out.

        Returns
        -------
        Shards
            The other files.
        """
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
    """Return the keys and values of folders called `key=value` on the path of a file.

    >>> partitions_of("data/region=eu/year=2024/part-0.parquet")
    {'region': 'eu', 'year': '2024'}
    """
    folders = path.replace("\\", "/").split("/")[:-1]
    pairs = (folder.partition("=") for folder in folders if "=" in folder)
    return {key: "(missing)" if value == _NO_VALUE else unquote(value) for key, _, value in pairs if key}


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class _Drawn:
    """Rows whose random numbers lie below a threshold, which is halved whenever there are too many rows."""

    tables: tuple[PredictionTable, ...]
    threshold: float
    most: int

    @classmethod
    def of(cls, part: PredictionTable, *, most: int) -> _Drawn:
        """Draw from a chunk."""
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
"""A function of some rows. Results add up with `+`, and workers must be able to import the function."""


class BadShard(ValueError):
    """A shard that cannot be read or does not fit the others.

    Parameters
    ----------
    reason
        The original error.
    """

    def __init__(self, reason: Exception | str) -> None:
        self.reason = reason
        super().__init__(reason)

    def message(self, hints: Mapping[Hint, str], names: Mapping[str, str]) -> str:
        """Format the reason in an interface's own words.

        Parameters
        ----------
        hints
            Words for each hint.
        names
            Words for each argument.

        Returns
        -------
        str
            The message.
        """
        return error_message(self.reason, hints, names) if isinstance(self.reason, Exception) else self.reason


class NoRows(BadShard):
    """Shards without any rows."""


@dataclass(frozen=True)
class Part:
    """The result of one shard."""

    path: str
    rows: int
    n_classes: int
    value: Any
    """The sum over its rows; None without rows."""
    error: Exception | None
    skipped: int = 0
    """Number of rows without a label."""


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
    """Sum a task over all rows of all shards; return the sum, the number of rows, and the bad shards left out.

    Results within a shard are summed with `+`, then the sums of the shards are combined in their order. The result
    therefore does not depend on the executor. A bad shard raises `BadShard` with its name, unless `skip_bad`. Shards
    with different numbers of classes always raise.
    """
    total, rows, bad, first, skipped = None, 0, [], None, 0
    for part in track(shards.sums(task, executor), total=len(shards), label=label, enabled=progress):
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
    if not shards.read_before and shards.head_rows is None:
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
    """Sum a task over one shard; in a worker process (`alone`), it uses one thread."""
    with limit_threads(1) if alone else nullcontext():
        return sum_tables(task, shards.read(path), path, shards.seed)


def sum_tables(task: Task, tables: Iterable[PredictionTable], path: str, seed: int | None = None) -> Part:
    """Sum a task over tables of rows; errors are returned instead of raised, so that other shards continue."""
    total, rows, classes, skipped = None, 0, 0, 0
    generator = None if seed is None else np.random.default_rng([seed, *PurePosixPath(path).name.encode()])
    try:
        for part in tables:
            classes, skipped = part.logits.shape[1], skipped + part.skipped
            if generator is not None:
                part = replace(part, columns={**part.columns, "draw": generator.random(len(part.labels))})
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
