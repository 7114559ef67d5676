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
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from trueup._core.arrays import as_logits, as_pair
from trueup._core.errors import Hint, InputError, message_of, record_warnings
from trueup.convert import from_probs
from trueup.io.atomic import errors_name_file
from trueup.io.formats import FORMATS
from trueup.io.predictions import PredictionTable, looks_like_probabilities
from trueup.io.source import file_list, suffix_of
from trueup.serve import upload_reader
from trueup.serve.guard import SLOWEST
from trueup.serve.settings import Settings
from trueup.serve.temporary import temporary_prefix
from trueup.serve.upload_reader import Options as Options

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
    **dict.fromkeys((hint for hint in Hint if hint.name.startswith("LOAD_")), ""),
}
"""What to do instead, in the words of the page."""
MONITOR_HINTS = HINTS | {
    Hint.PROBS: "choose “probabilities” under “What is in the file?” to read probabilities",
    Hint.NOT_PROBABILITIES: "choose “logits” under “What is in the file?” if they are logits",
}
"""The same on the page of monitors."""
READERS = 2
"""Files read at a time: each may take as much memory as the settings allow."""
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
    def arrays(self) -> list[np.ndarray]:
        """All that it holds; first the logits to calibrate on, or all."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows to calibrate on, or all, and classes."""
        rows, classes = self.arrays[0].shape
        return rows, classes

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        return self.shape[1]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in self.arrays)

    def info(self) -> dict[str, Any]:
        """What the API says of it."""
        rows, classes = self.shape
        content: dict[str, Any] = {
            "rows": rows,
            "test_rows": None,
            "n_classes": classes,
            "labelled": False,
            "groups": [],
        }
        return {"name": self.name, "notes": list(self.notes), "clusters": None, **content}


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
    def arrays(self) -> list[np.ndarray]:
        """Of both tables."""
        tables = [table for table in (self.val, self.test) if table is not None]
        arrays = [array for table in tables for array in (*table, *table.groups.values(), table.clusters)]
        return [array for array in arrays if array is not None]

    def info(self) -> dict[str, Any]:
        """With labels, groups and clusters."""
        clusters = None if self.val.clusters is None else self.val.cluster_name
        test_rows = None if self.test is None else len(self.test.labels)
        more = {"labelled": True, "test_rows": test_rows, "groups": list(self.val.groups), "clusters": clusters}
        return super().info() | more


@dataclass(frozen=True, eq=False)
class UnlabelledData(Upload):
    """Logits without labels: those of a new population."""

    logits: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """The logits."""
        return [self.logits]


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


class Receiver:
    """Receives uploads: so many at once, within the budget of the disk, and so many read at a time."""

    def __init__(self, settings: Settings, disk: DiskBudget) -> None:
        self._settings, self._disk = settings, disk
        self._arriving, self._reading = asyncio.Semaphore(settings.uploads), asyncio.Semaphore(READERS)

    @asynccontextmanager
    async def receive(self, request: Request, name: str) -> AsyncIterator[tuple[Path, str]]:
        """The body of a request as a temporary file, which is its turn to be read, and the name to call it by."""
        name = clean_name(name)
        suffix = require_suffix(name)
        if int(request.headers.get("content-length") or 0) > self._settings.upload_bytes:
            raise HTTPException(413, _too_large(self._settings))
        if self._arriving.locked():
            raise HTTPException(503, "too many files are arriving; please try again in a minute")
        async with self._arriving:
            with self._disk.share() as take, TemporaryDirectory(prefix=temporary_prefix("upload")) as folder:
                path = Path(folder, f"upload{suffix}")
                try:
                    await _write(aiter(request.stream()), path, self._settings, take)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise HTTPException(507, NO_SPACE) from None
                async with self._reading:
                    yield path, name


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
                raise HTTPException(413, _too_large(settings))
            if monotonic() - began > settings.patience + total / SLOWEST:
                raise HTTPException(408, f"the upload came too slowly: {SLOWEST:,} bytes a second are the least")
            take(len(chunk))
            file.write(chunk)


def _too_large(settings: Settings) -> str:
    return f"the file is too large: at most {settings.upload_bytes / 2**20:,.0f} MB are taken here"


def read(
    path: Path, name: str, options: Options, settings: Settings, hints: Mapping[Hint, str] = HINTS
) -> UploadedData:
    """Read predictions from a file that may be damaged or hostile; errors call it by the name its owner knows."""
    with _errors_name_upload(path, name, hints):
        return _check(_read_in_process(path, name, options, settings), name, options)


def read_unlabelled(path: Path, name: str, options: Options, settings: Settings) -> UnlabelledData:
    """Read the logits alone, also of a file that has labels."""
    with _errors_name_upload(path, name, HINTS):
        (arrays,) = _read_in_process(path, name, replace(options, labels=None, groups=(), clusters=None), settings)
        with record_warnings() as notes, errors_name_file(Path(name)):
            values = from_probs(arrays["logits"]) if options.probs else arrays["logits"]
            logits = np.ascontiguousarray(as_logits(values, doubt=False))
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


def _read_in_process(path: Path, name: str, options: Options, settings: Settings) -> list[dict[str, np.ndarray]]:
    """The arrays of each split, as `upload_reader` wrote them."""
    with TemporaryDirectory(prefix="trueup-arrays-", dir=path.parent) as folder:
        request = upload_reader.Request(str(path), folder, options, settings)
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
    match result["error"]["kind"]:
        case upload_reader.MEMORY:
            raise _needs_memory(name, settings)
        case upload_reader.SPACE:
            raise HTTPException(507, NO_SPACE)
        case _:
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
