"""From the body of a request to predictions: streamed to a temporary file, judged by its header, then read."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
from starlette.exceptions import HTTPException

from trueup.core.warning_capture import record_warnings
from trueup.core.wording import of_files
from trueup.io.formats import FORMATS, file_list
from trueup.io.predictions import Predictions, load
from trueup.io.sanity import looks_like_probabilities
from trueup.serve.limits import NO_NUMBERS, Shapes, declared, npy_bytes
from trueup.serve.settings import Settings

WORDS = {
    "say probs=True": "tick “Probabilities, not logits”",
    "; choose split=.*": "; write their names under “What is in the file?”",
    "logits need no from_probs": "untick “Probabilities, not logits” if they are logits",
    "log-probabilities of exact zeros come through from_probs": "send probabilities with exact zeros as probabilities",
}
"""What the library says, and what it is called on the page."""
WORDS_OF_LOGS = WORDS | {
    "say probs=True": "choose “probabilities” under “What is in the file?”",
    "logits need no from_probs": "choose “logits” under “What is in the file?” if they are logits",
}
"""The same on the page of monitors."""
SLOWEST = 1024
"""Bytes a second that an upload must make, after some patience: drops of it must not hold its place for ever."""


@dataclass(frozen=True, eq=False)
class Data:
    """What a user left with the server: the rows to calibrate on and, if the file has them, those to test on."""

    name: str
    val: Predictions
    test: Predictions | None = None
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> Predictions:
        """The rows that pictures are of: those to test on, if there are any."""
        return self.test or self.val

    @property
    def classes(self) -> int:
        """How many there are."""
        return int(self.val.logits.shape[1])

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for pair in (self.val, self.test) if pair for array in pair)


@dataclass(frozen=True)
class Options:
    """What a file does not say of itself."""

    probs: bool = False
    logits: str = "logits"
    """The name of the array, or those of the columns with commas between."""
    labels: str = "labels"


def clean(name: str) -> str:
    """The name of a file as it may be shown: no folders, no control characters, not too long.

    >>> clean("../../etc/net\\n.npz")
    'net.npz'
    """
    bare = "".join(letter for letter in name.replace("\\", "/").rpartition("/")[2] if letter.isprintable())
    return bare[-100:] or "unnamed"


def suffix(name: str) -> str:
    """The suffix of a file that can be read here, else one sentence that says which can."""
    found = os.path.splitext(name)[1].lower()
    if found not in FORMATS:
        raise ValueError(f"{name}: the suffix must be one of {' '.join(FORMATS)}, got {found!r}")
    return found


async def receive(chunks: AsyncIterator[bytes], path: Path, settings: Settings) -> None:
    """Write what arrives to a file, as long as it arrives and is not too much."""
    try:
        await _written(chunks, path, settings)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise HTTPException(507, "there is no space left here for an upload") from None


async def _written(chunks: AsyncIterator[bytes], path: Path, settings: Settings) -> None:
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
                raise HTTPException(413, too_long(settings))
            if monotonic() - began > settings.patience + total / SLOWEST:
                raise HTTPException(408, f"the upload came too slowly: {SLOWEST:,} bytes a second are the least")
            file.write(chunk)


def too_long(settings: Settings) -> str:
    """What is said of a file that is too large."""
    return f"the file is too large: at most {settings.upload_bytes / 2**20:,.0f} MB are taken here"


def read(path: Path, name: str, options: Options, settings: Settings, words: Mapping[str, str] = WORDS) -> Data:
    """Read predictions from a file that nobody has vouched for; errors call it by the name its owner knows."""
    try:
        if path.suffix == ".npy":
            _part(path)
        shapes = declared(path, settings)
        if path.suffix == ".parquet":
            _refuse_text(path, shapes, options)
        return _loaded(path, name, shapes, options)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise ValueError(_told(str(error), path, name, words)) from None


def _loaded(path: Path, name: str, shapes: Shapes, options: Options) -> Data:
    columns = options.logits.split(",") if "," in options.logits else options.logits
    splits = _splits(shapes, options)
    notes: tuple[str, ...] = ()

    def halves() -> list[Predictions]:
        return [load(path, logits=columns, labels=options.labels, probs=options.probs, split=half) for half in splits]

    if options.probs:  # only these warn, and what one user's file gives rise to must not be told to another
        with record_warnings() as messages:
            found = halves()
        notes = tuple(messages)
    else:
        found = halves()
        told = (looks_like_probabilities(half.logits) for half in found)
        notes = tuple(
            dict.fromkeys(f"{each}: say so under “What is in the file?” if they are" for each in told if each)
        )
    first, *others = found
    if not all(len(half.labels) for half in found):
        raise ValueError(f"{path}: there are no rows")
    classes = [half.logits.shape[1] for half in found]
    if len(set(classes)) > 1:
        raise ValueError(f"{path}: val and test must have as many classes, got {classes[0]} and {classes[1]}")
    return Data(name, _own(first), _own(others[0]) if others else None, notes)


def _refuse_text(path: Path, shapes: Shapes, options: Options) -> None:
    """Columns of text may be there, but not where numbers are to be read."""
    names = {"labels", "label", "probs", options.labels, options.logits, *options.logits.split(",")}
    wanted = "|".join(rf"{re.escape(name)}|{re.escape(name.removesuffix('s'))}s?_\d+" for name in sorted(names))
    for name, shape in shapes.items():
        if shape == NO_NUMBERS and re.fullmatch(f"(val_|test_)?({wanted})", name):
            raise ValueError(f"{path}: {name} must be a column of numbers")


def _splits(shapes: Shapes, options: Options) -> tuple[str | None, ...]:
    """Both halves of a file that has both, the only half of one that has one, else the whole."""
    names = ("labels", "label") if options.labels == "labels" else (options.labels,)
    halves = tuple(half for half in ("val", "test") if any(f"{half}_{name}" in shapes for name in names))
    whole = any(name in shapes for name in names)
    return (None,) if whole or not halves else halves


def _own(pair: Predictions) -> Predictions:
    """Arrays row by row, in memory of their own: not a view that would keep something larger alive."""
    return Predictions(*(np.ascontiguousarray(array) for array in pair))


def _part(path: Path) -> None:
    """Two arrays written one after the other, as `numpy.save` does to an open file, become a pair of files."""
    with open(path, "rb+") as file:
        if not (size := os.fstat(file.fileno()).st_size):
            return
        try:
            end = npy_bytes(file)[1]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if end >= size:
            raise ValueError(
                f"{path}: a .npy file comes with its labels: choose x.npy and x.labels.npy together"
                if end == size
                else f"{path}: the file is cut off: {end:,} bytes were promised, {size:,} came"
            )
        file.seek(end)
        with open(file_list(path)[1], "wb") as labels:
            shutil.copyfileobj(file, labels)
        file.truncate(end)


def _told(message: str, path: Path, name: str, words: Mapping[str, str]) -> str:
    for file, shown in ((file_list(path)[-1], name.replace(".npy", ".labels.npy")), (path, name)):
        message = message.replace(str(file), shown).replace(file.name, shown)
    return of_files(message, words)
