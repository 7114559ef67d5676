"""From the body of a request to predictions: streamed to a temporary file, read by a limited process, then checked.

Here is what an upload may take: its bytes while it arrives, and the memory and time of the process that reads it,
`trueup.serve.upload_reader`. Rows, classes and numbers are limited there too. All limits are in `Settings`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from trueup.core.arrays import as_logits, as_pair
from trueup.core.conversion import from_probs
from trueup.core.errors import Hint, InputError, message_of, record_warnings
from trueup.io.atomic import errors_name_file
from trueup.io.formats import FORMATS
from trueup.io.predictions import PredictionTable, looks_like_probabilities
from trueup.io.source import file_list, suffix_of
from trueup.serve import upload_reader
from trueup.serve.guard import SLOWEST
from trueup.serve.settings import Settings

HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x",
    Hint.CONFIDENCE: "a probability p of one event needs two columns in the file, 1 − p and p",
    Hint.PER_CENT: "divide per cent by 100",
    Hint.LOG_ODDS: "a log-odds x needs two columns in the file, 0 and x",
    Hint.RENORMALISE: "divide rounded probabilities by their sums before you write the file",
    Hint.FLATTEN: "tokens or pixels must be in the file as rows, one each",
    Hint.IGNORE_INDEX: "what is to be ignored must be left out of the file",
    Hint.PROBS: "tick “Probabilities, not logits” to read probabilities",
    Hint.SPLIT: "write their names under “What is in the file?”",
    Hint.NOT_PROBABILITIES: "untick “Probabilities, not logits” if they are logits",
    Hint.EXACT_ZEROS: "send probabilities with exact zeros as probabilities",
    Hint.LOAD_CALIBRATOR: "",
    Hint.LOAD_CLAMPED: "",
    Hint.LOAD_RECALIBRATOR: "",
    Hint.LOAD_MONITOR: "",
}
"""What to do instead, in the words of the page."""
MONITOR_HINTS = HINTS | {
    Hint.PROBS: "choose “probabilities” under “What is in the file?” to read probabilities",
    Hint.NOT_PROBABILITIES: "choose “logits” under “What is in the file?” if they are logits",
}
"""The same on the page of monitors."""
NO_SPACE = "there is no space left here for an upload"
WATCH_SECONDS = 0.1
"""How often the reader's memory is looked at where the system does not limit it."""


@dataclass(frozen=True, eq=False)
class Upload(ABC):
    """A file that a user left, with labels or without."""

    name: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows to calibrate on, or all, and classes."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes in memory."""

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.shape[1]


@dataclass(frozen=True, eq=False)
class UploadedData(Upload):
    """What a user uploaded: the rows to calibrate on and, if the file has them, those to test on."""

    val: PredictionTable
    test: PredictionTable | None = None

    @property
    def test_or_val(self) -> PredictionTable:
        """The rows that charts are of: those to test on, if there are any."""
        return self.test or self.val

    @property
    def shape(self) -> tuple[int, int]:
        """Rows to calibrate on, and classes."""
        rows, classes = self.val.logits.shape
        return rows, classes

    @property
    def size(self) -> int:
        """Bytes in memory."""
        tables = [table for table in (self.val, self.test) if table is not None]
        beside = [array for table in tables for array in (*table.groups.values(), table.clusters) if array is not None]
        return sum(array.nbytes for array in (*(array for table in tables for array in table), *beside))


@dataclass(frozen=True, eq=False)
class UnlabelledData(Upload):
    """Logits without labels: those of a new population."""

    logits: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and classes."""
        rows, classes = self.logits.shape
        return rows, classes

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return int(self.logits.nbytes)


@dataclass(frozen=True)
class Options:
    """What a file does not say of itself."""

    probs: bool = False
    logits: str = "logits"
    """The name of the array, or those of the columns with commas between."""
    labels: str = "labels"
    groups: tuple[str, ...] = ()
    """The columns whose groups are judged one by one."""
    clusters: str | None = None
    """The column that says which rows are correlated."""


def clean_name(name: str) -> str:
    """The name of a file as it may be shown: no folders, no control characters, not too long.

    >>> clean_name("../../etc/net\\n.npz")
    'net.npz'
    """
    bare = "".join(letter for letter in name.replace("\\", "/").rpartition("/")[2] if letter.isprintable())
    return bare[-100:] or "unnamed"


def require_suffix(name: str) -> str:
    """The suffix of a file that can be read here; an error lists those that can."""
    suffix = suffix_of(name)
    if suffix not in FORMATS:
        raise InputError("the suffix", f"be one of {' '.join(FORMATS)}", repr(suffix), file=name)
    return suffix


class DiskBudget:
    """Bytes on disk that all uploads may take together.

    >>> budget = DiskBudget(100)
    >>> with budget.share() as take:
    ...     take(60)
    >>> budget.used
    0
    """

    def __init__(self, most: int) -> None:
        self._most, self.used = most, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """What one upload takes, until its files are gone: a function that takes bytes, or refuses."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.used + size > self._most:
                raise HTTPException(503, "other uploads take all the space that is left; please try again in a minute")
            self.used, mine = self.used + size, mine + size

        try:
            yield take
        finally:
            self.used -= mine


async def receive(chunks: AsyncIterator[bytes], path: Path, settings: Settings, take: Callable[[int], None]) -> None:
    """Write what arrives to a file, as long as it arrives and is not too much."""
    try:
        await _write(chunks, path, settings, take)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise HTTPException(507, NO_SPACE) from None


async def _write(chunks: AsyncIterator[bytes], path: Path, settings: Settings, take: Callable[[int], None]) -> None:
    total, began = 0, monotonic()
    with open(path, "wb") as file:
        while True:
            try:
                async with asyncio.timeout(settings.patience):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise HTTPException(408, f"the upload stood still for {settings.patience:g} seconds") from None
            if chunk is None:
                return
            total += len(chunk)
            if total > settings.upload_bytes:
                raise HTTPException(413, too_large(settings))
            if monotonic() - began > settings.patience + total / SLOWEST:
                raise HTTPException(408, f"the upload came too slowly: {SLOWEST:,} bytes a second are the least")
            take(len(chunk))
            file.write(chunk)


def too_large(settings: Settings) -> str:
    """The message for a file that is too large."""
    return f"the file is too large: at most {settings.upload_bytes / 2**20:,.0f} MB are taken here"


def read(
    path: Path, name: str, options: Options, settings: Settings, hints: Mapping[Hint, str] = HINTS
) -> UploadedData:
    """Read predictions from a file that may be damaged or hostile; errors call it by the name its owner knows."""
    with _errors_name_upload(path, name, hints):
        return _check(_read_in_process(path, name, options, options.labels, settings), name, options)


def read_unlabelled(path: Path, name: str, options: Options, settings: Settings) -> UnlabelledData:
    """Read the logits alone, also of a file that has labels."""
    with _errors_name_upload(path, name, HINTS):
        (arrays,) = _read_in_process(path, name, replace(options, groups=(), clusters=None), None, settings)
        with record_warnings() as notes, errors_name_file(Path(name)):
            values = from_probs(arrays["logits"]) if options.probs else arrays["logits"]
            logits = np.ascontiguousarray(as_logits(values, doubt=False).numpy())
        if not len(logits):
            raise ValueError(f"{name}: there are no rows")
        return UnlabelledData(name, logits, notes=tuple(dict.fromkeys([*notes, *_doubts(options, logits)])))


@contextmanager
def _errors_name_upload(path: Path, name: str, hints: Mapping[Hint, str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        message = message_of(error, hints)
        for file, shown in ((file_list(path)[-1], name.replace(".npy", ".labels.npy")), (path, name)):
            message = message.replace(str(file), shown).replace(file.name, shown)
        raise ValueError(message) from None


def _read_in_process(
    path: Path, name: str, options: Options, labels: str | None, settings: Settings
) -> list[dict[str, np.ndarray]]:
    """The arrays of each split, as `upload_reader` wrote them."""
    with TemporaryDirectory(prefix="trueup-arrays-", dir=path.parent) as folder:
        request = upload_reader.Request(
            path=str(path),
            folder=folder,
            logits=options.logits,
            labels=labels,
            probs=options.probs,
            groups=list(options.groups),
            clusters=options.clusters,
            memory_bytes=settings.reader_bytes,
            seconds=settings.reader_seconds,
            rows=settings.rows,
            classes=settings.classes,
            numbers=settings.numbers,
        )
        return _run_reader(request, Path(folder), name, settings)


def _run_reader(
    request: upload_reader.Request, folder: Path, name: str, settings: Settings
) -> list[dict[str, np.ndarray]]:
    # Allocators and threads that reserve addresses in advance would use up the limit.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    command = [sys.executable, "-m", "trueup.serve.upload_reader", request.to_json()]
    with open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment)
    try:
        _wait(process, name, settings)
    finally:
        process.kill()
        process.wait()
    if not (folder / "result.json").exists():
        if process.returncode == -9 or b"alloc" in (folder / "stderr").read_bytes():
            raise _needs_memory(name, settings)
        raise ValueError(f"{name}: the file is damaged, and cannot be read")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if "splits" in result:
        return [
            {file.name.split(".")[1]: np.load(file) for file in sorted(folder.glob(f"{number}.*.npy"))}
            for number in range(len(result["splits"]))
        ]
    if result["error"]["kind"] == upload_reader.MEMORY:
        raise _needs_memory(name, settings)
    if result["error"]["kind"] == upload_reader.SPACE:
        raise HTTPException(507, NO_SPACE)
    raise upload_reader.error_from(result["error"], name)


def _wait(process: subprocess.Popen[bytes], name: str, settings: Settings) -> None:
    """Until the reader ends; an error if it takes more than it may."""
    end = monotonic() + settings.reader_seconds
    limited = sys.platform == "linux"  # elsewhere a process cannot limit its own memory
    while True:
        try:
            process.wait(end - monotonic() if limited else WATCH_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if monotonic() >= end:
                raise HTTPException(
                    413, f"{name}: the file takes too long to read: at most {settings.reader_seconds:g} seconds"
                ) from None
            if not limited and _resident_bytes(process.pid) > settings.reader_bytes:
                raise _needs_memory(name, settings) from None


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return 1024 * int(listed.stdout)
    return 0


def _needs_memory(name: str, settings: Settings) -> HTTPException:
    most = f"{settings.reader_bytes / 2**30:.3g} GB"
    return HTTPException(413, f"{name}: the file needs more memory than an upload may take: at most {most}")


def _check(parts: list[dict[str, np.ndarray]], name: str, options: Options) -> UploadedData:
    with record_warnings() as notes:  # what one user's file gives rise to must not be shown to another
        splits = [_check_split(arrays, name, options) for arrays in parts]
    notes += [doubt for split in splits for doubt in _doubts(options, np.asarray(split.logits))]
    if not all(len(split.labels) for split in splits):
        raise ValueError(f"{name}: there are no rows")
    classes = [split.logits.shape[1] for split in splits]
    if len(set(classes)) > 1:
        raise InputError("val and test", "have as many classes", f"{classes[0]} and {classes[1]}", file=name)
    return UploadedData(name, splits[0], splits[1] if len(splits) > 1 else None, notes=tuple(dict.fromkeys(notes)))


def _doubts(options: Options, logits: np.ndarray) -> list[str]:
    sentence = None if options.probs else looks_like_probabilities(logits)
    return [f"{sentence}: say so under “What is in the file?” if they are"] if sentence else []


def _check_split(arrays: Mapping[str, np.ndarray], name: str, options: Options) -> PredictionTable:
    with errors_name_file(Path(name)):
        values = from_probs(arrays["logits"]) if options.probs else arrays["logits"]
        # Row by row, in memory of their own: not a view that would keep something larger alive.
        z, y = (np.ascontiguousarray(array) for array in as_pair(values, arrays["labels"], doubt=False))
        groups = {column: arrays[f"names{k}"][arrays[f"group{k}"]] for k, column in enumerate(options.groups)}
        return PredictionTable(
            z, y, groups=groups, clusters=arrays.get("clusters"), cluster_name=options.clusters or "cluster"
        )
