"""Turn the body of a request into predictions: stream it to a temporary file, read it in a limited process, check it.

`Settings` in settings.py holds the limits: bytes of an upload (counted in guard.py), memory and time of the
process that reads it. That process, `trueup.serve.upload_reader`, also limits rows and classes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from trueup._core.arrays import as_logits, as_pair, subtract_one
from trueup._core.errors import Hint, InputError, error_message, record_warnings
from trueup.convert import from_probs
from trueup.io.atomic import errors_name_file
from trueup.io.formats import FORMATS
from trueup.io.predictions import PredictionTable
from trueup.io.source import file_list, suffix_of
from trueup.serve import upload_reader
from trueup.serve.settings import ReaderLimits, Settings
from trueup.serve.temporary import temporary_prefix
from trueup.serve.upload_reader import Arrays, Options

HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x",
    Hint.CONFIDENCE: "a probability p of one event needs two columns in the file, 1 − p and p",
    Hint.PER_CENT: "divide percentages by 100",
    Hint.LOG_ODDS: "a log-odds x needs two columns in the file, 0 and x",
    Hint.RENORMALISE: "divide rounded probabilities by their sum before you write the file",
    Hint.FLATTEN: "the file must have one row per token or pixel",
    Hint.IGNORE_INDEX: "leave rows to be ignored out of the file",
    Hint.PROBS: "tick “Probabilities, not logits” to read probabilities",
    Hint.PROBABILITIES: 'send "probs": true if they are probabilities, or false if they are logits',
    Hint.PROBABILITIES_IN_FILE: "tick “Probabilities, not logits”; from real logits subtract 1, which changes nothing",
    Hint.COLUMNS: "enter the names of the columns under “What is in the file?”",
    Hint.SPLIT: "enter their names under “What is in the file?”",
    Hint.NOT_PROBABILITIES: "untick “Probabilities, not logits” if they are logits",
    Hint.EXACT_ZEROS: "send probabilities with exact zeros as probabilities",
    **dict.fromkeys((hint for hint in Hint if hint.name.startswith("LOAD_")), ""),
}
"""Remedies in the terms of the page."""
MONITOR_HINTS = HINTS | {
    Hint.PROBS: "choose “probabilities” under “What is in the file?” to read probabilities",
    Hint.PROBABILITIES_IN_FILE: "choose which they are under “What is in the file?”, or send probs=true or probs=false",
    Hint.NOT_PROBABILITIES: "choose “logits” under “What is in the file?” if they are logits",
}
"""Remedies in the terms of the page of monitors."""
READERS = 2
"""Number of files read at the same time; each may take as much memory as the settings allow."""
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
ENVIRONMENT["ARROW_DEFAULT_MEMORY_POOL"] = "system"
"""Environment of the reader; allocators and threads that reserve addresses in advance would use up its limit."""
NO_SPACE = "the server's disk has no space left for an upload"
WATCH_SECONDS = 0.1
"""Seconds between two checks of the reader's memory on systems that cannot limit it."""


@dataclass(frozen=True, eq=False)
class Upload:
    """An uploaded file: calibration rows and, if the file has them, test rows."""

    name: str
    val: PredictionTable
    test: PredictionTable | None = None
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def test_or_val(self) -> PredictionTable:
        """The rows for charts: the test rows if there are any."""
        return self.test or self.val

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of calibration rows and classes."""
        rows, classes = self.val.logits.shape
        return rows, classes

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        return self.shape[1]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        tables = [table for table in (self.val, self.test) if table is not None]
        arrays = [array for table in tables for array in (*table, *table.groups.values(), table.clusters)]
        return sum(array.nbytes for array in arrays if array is not None)

    def info(self) -> dict[str, Any]:
        """Return the fields of `models.DataInfo` except the id."""
        rows, classes = self.shape
        test_rows = None if self.test is None else len(self.test.labels)
        clusters = None if self.val.clusters is None else self.val.cluster_name
        content = {"rows": rows, "test_rows": test_rows, "n_classes": classes, "clusters": clusters}
        labelled, groups = isinstance(self, UploadedData), list(self.val.groups)
        return {"name": self.name, "notes": self.notes, "labelled": labelled, "groups": groups, **content}


class UploadedData(Upload):
    """Predictions with labels."""


class UnlabelledData(Upload):
    """Logits of a new population; its labels are an empty array."""


def clean_name(name: str) -> str:
    r"""Make a file's name safe to show: no folders, no control characters, at most 100 characters.

    >>> clean_name("../../etc/net\n.npz")
    'net.npz'
    """
    base = "".join(letter for letter in name.replace("\\", "/").rpartition("/")[2] if letter.isprintable())
    return base[-100:] or "unnamed"


class DiskBudget:
    """A limit on the disk space of all uploads.

    >>> budget = DiskBudget(100)
    >>> with budget.share() as reserve:
    ...     reserve(60)
    >>> budget.used
    0
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.used = limit, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one upload, or raises; they are released at the end."""
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if self.used + size > self._limit:
                raise HTTPException(503, "other uploads use all the space; please try again in a minute")
            self.used, reserved = self.used + size, reserved + size

        try:
            yield reserve
        finally:
            self.used -= reserved


class Receiver:
    """Receives uploads, with limits on their number, on the disk space and on the number of readers."""

    def __init__(self, settings: Settings, disk: DiskBudget) -> None:
        self._settings, self._disk = settings, disk
        self._arriving, self._reading = asyncio.Semaphore(settings.uploads), asyncio.Semaphore(READERS)

    @asynccontextmanager
    async def receive(self, request: Request, name: str) -> AsyncIterator[tuple[Path, str]]:
        """Write the body of a request to a temporary file, wait for a reader, and yield the path and a safe name."""
        name = clean_name(name)
        suffix = suffix_of(name)
        if suffix not in FORMATS:
            raise InputError("the suffix", f"be one of {' '.join(FORMATS)}", repr(suffix), file=name)
        if self._arriving.locked():
            raise HTTPException(503, "too many files are arriving; please try again in a minute")
        async with self._arriving:
            with self._disk.share() as reserve, TemporaryDirectory(prefix=temporary_prefix("upload")) as folder:
                path = Path(folder, f"upload{suffix}")
                try:
                    with open(path, "wb") as file:
                        async for chunk in request.stream():
                            reserve(len(chunk))
                            file.write(chunk)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise HTTPException(507, NO_SPACE) from None
                async with self._reading:
                    yield path, name


def read(path: Path, name: str, options: Options, settings: Settings, hints: Mapping[Hint, str] = HINTS) -> Upload:
    """Read predictions from a file that may be damaged or hostile; errors use the file's original name.

    If `options.labels` is None, only the logits are read.
    """
    try:
        return _check(_run_reader(path, name, options, settings), name, options)
    except ValueError as error:
        message = error_message(error, hints)
        for file, shown in ((file_list(path)[-1], name.replace(".npy", ".labels.npy")), (path, name)):
            message = message.replace(str(file), shown).replace(file.name, shown)
        raise ValueError(message) from None


def _run_reader(path: Path, name: str, options: Options, settings: Settings) -> list[Arrays]:
    """Run `upload_reader` and return the arrays of each split; raise if it exceeds its limits."""
    limit = f"{settings.reader_bytes / 2**30:.3g} GB"
    needs_memory = HTTPException(413, f"{name}: the file needs more memory than the limit of {limit}")
    limits = {limit.name: getattr(settings, limit.name) for limit in fields(ReaderLimits)}
    end = monotonic() + settings.reader_seconds
    limited = sys.platform == "linux"  # elsewhere a process cannot limit its own memory
    with TemporaryDirectory(prefix="trueup-arrays-", dir=path.parent) as directory:
        request = json.dumps([str(path), directory, asdict(options), limits])
        command = [sys.executable, "-m", "trueup.serve.upload_reader", request]
        environment, folder = {**os.environ, **ENVIRONMENT}, Path(directory)
        with open(folder / "stderr", "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(end - monotonic() if limited else WATCH_SECONDS)
                    break
                if monotonic() >= end:
                    late = f"reading the file takes longer than the limit of {settings.reader_seconds:g} seconds"
                    raise HTTPException(413, f"{name}: {late}")
                if not limited and _resident_bytes(process.pid) > settings.reader_bytes:
                    raise needs_memory
        finally:
            process.kill()
            process.wait()
        if not (folder / "result.json").exists():
            if process.returncode == -9 or b"alloc" in (folder / "stderr").read_bytes():
                raise needs_memory
            raise ValueError(f"{name}: the file is damaged and cannot be read")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result["kind"] == upload_reader.MEMORY:
            raise needs_memory
        if result["kind"] == upload_reader.SPACE:
            raise HTTPException(507, NO_SPACE)
        if result["kind"] != upload_reader.ARRAYS:
            raise upload_reader.error_from(result, name)
        files = [sorted(folder.glob(f"{number}.*.npy")) for number in range(result["splits"])]
        return [{file.name.split(".")[1]: np.load(file) for file in split} for split in files]


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return 1024 * int(listed.stdout)
    return 0


def _check(parts: list[Arrays], name: str, options: Options) -> Upload:
    with record_warnings() as notes, errors_name_file(Path(name)):  # one user must not see another's warnings
        tables = [_table(arrays, options) for arrays in parts]
    if not all(len(table.logits) for table in tables):
        raise ValueError(f"{name}: there are no rows")
    classes = [table.logits.shape[1] for table in tables]
    if len(set(classes)) > 1:
        raise InputError("val and test", "have equally many classes", f"{classes[0]} and {classes[1]}", file=name)
    kind = UnlabelledData if options.labels is None else UploadedData
    return kind(name, *tables, notes=tuple(dict.fromkeys(notes)))


def _table(arrays: Arrays, options: Options) -> PredictionTable:
    values = arrays["logits"]
    if options.probs is not None:
        values = from_probs(values) if options.probs else subtract_one(values)
    unlabelled = options.labels is None
    pair = (as_logits(values), np.empty(0, np.int64)) if unlabelled else as_pair(values, arrays["labels"])
    # Contiguous copies: a view would keep a larger array alive.
    z, y = (np.ascontiguousarray(array) for array in pair)
    groups = {
        column: arrays[f"names{k}"].astype(object)[arrays[f"group{k}"]] for k, column in enumerate(options.groups)
    }
    clusters: Any = {"clusters": arrays.get("clusters"), "cluster_name": options.clusters or "cluster"}
    return PredictionTable(z, y, groups=groups, **clusters)
