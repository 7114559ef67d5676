"""What a file says of its own size, read and judged before any of it is unpacked.

A compressed file of a few kilobytes may hold gigabytes, and a header may promise what is not there. Each format has one
function here that reads only its directory or header; a file that passes cannot fill the memory.
"""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from trueup.io.atomic import errors_name_file, require_file
from trueup.io.formats import check_packing, npy_header
from trueup.io.parquet import chunks_of, numbers_a_row
from trueup.io.parquet_pages import unpacked_bytes
from trueup.io.writers import pyarrow
from trueup.serve.settings import Settings

Shapes = dict[str, tuple[int, ...]]
NO_NUMBERS: tuple[int, ...] = ()
"""The shape of a column of text or the like. It must not be read: a kilobyte can stand for a text of any length in each
row."""

HEADER_BYTES = 4 << 20
"""The largest header of a .safetensors or .parquet file: thousands of columns fit in."""
PARSED = 256
"""Bytes that a byte of a .parquet file's footer may take in memory: a column without any facts takes three bytes there,
and 683 once it is parsed."""
PAGES = 100_000
"""The most pages of a .parquet file: one of a large file holds thousands of numbers."""
MEMBERS = 64
"""The most arrays in a .npz file."""


def declared(path: Path, settings: Settings) -> Shapes:
    """The arrays or columns a file says it has, refused with a ValueError if they exceed the settings.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/net.npz", logits=np.zeros((5, 3)), labels=np.zeros(5, int))
    ...     declared(Path(f"{folder}/net.npz"), Settings())
    {'logits': (5, 3), 'labels': (5,)}
    """
    require_file(path)
    with errors_name_file(path):
        shapes = _READERS[path.suffix.lower()](path, settings)
        _judge(shapes, settings)
    return shapes


def npy_bytes(file: IO[bytes]) -> tuple[tuple[int, ...], int]:
    """The shape of the array that a file begins with, and how many bytes it takes with its header."""
    shape, _, dtype = npy_header(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects; pickles are never read, because they can run code")
    return shape, file.tell() + math.prod(shape) * dtype.itemsize


def _judge(shapes: Mapping[str, tuple[int, ...]], settings: Settings) -> None:
    for name, shape in shapes.items():
        rows, columns = (*shape, 1)[0], math.prod(shape[1:])
        for found, most, what in (
            (rows, settings.rows, "rows"),
            (columns, settings.classes, "classes"),
            (rows * columns, settings.numbers, "numbers"),
        ):
            if found > most:
                raise ValueError(f"{name} has {found:,} {what}; at most {most:,} are taken here")


def _too_much(unpacked: int, settings: Settings) -> str:
    return f"it unpacks to {unpacked / 2**20:,.0f} MB; at most {settings.unpacked_bytes / 2**20:,.0f} MB are taken"


def _npz(path: Path, settings: Settings) -> Shapes:
    _check_directory(path)
    shapes = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        total = sum(member.file_size for member in members)
        if total > settings.unpacked_bytes:
            raise ValueError(_too_much(total, settings))
        for member in members:
            check_packing(member, path)
            if member.filename.endswith(".npy"):
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as stream:
                    try:
                        shapes[name], _ = npy_bytes(stream)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from None
    return shapes


def _check_directory(path: Path) -> None:
    """Read the end of the archive alone: a directory of millions of entries would fill the memory when parsed."""
    with open(path, "rb") as file:
        file.seek(-min(42, path.stat().st_size), io.SEEK_END)
        tail = file.read()
    end = tail[-22:]
    if len(end) < 22 or end[:4] != b"PK\x05\x06" or end[20:] != b"\0\0":
        raise ValueError("the archive is cut off, or it is no .npz file")
    entries = int.from_bytes(end[10:12], "little")
    if entries > MEMBERS or int.from_bytes(end[12:16], "little") > HEADER_BYTES or tail.startswith(b"PK\x06\x07"):
        raise ValueError(f"the archive has more than {MEMBERS} arrays")


def _npy(path: Path, settings: Settings) -> Shapes:
    with open(path, "rb") as file:
        return {"logits": npy_bytes(file)[0]}


def _csv(path: Path, settings: Settings) -> Shapes:
    longest = 40 * settings.classes + 1000  # a number in full precision takes about 25 characters
    with open(path, "rb") as file:
        first = file.readline(longest + 1)
        if first.count(b",") > settings.classes or len(first) > longest:
            raise ValueError(f"the first line names too many columns; at most {settings.classes:,} classes are taken")
        names = [name.strip() for name in next(csv.reader([first.decode("utf-8-sig")]), [])]
        rows = 0
        while line := file.readline(longest + 1):
            rows += 1
            if len(line) > longest:
                raise ValueError(f"line {rows + 1} has more than {longest:,} characters")
            if rows > settings.rows or rows * len(names) > settings.numbers:
                most = min(settings.rows, settings.numbers // max(len(names), 1))
                raise ValueError(f"it has too many rows; at most {most:,} are taken")
    return dict.fromkeys(names, (rows,))


def _parquet(path: Path, settings: Settings) -> Shapes:
    with open(path, "rb") as file:
        file.seek(-min(8, path.stat().st_size), io.SEEK_END)
        tail = file.read()
    if tail[4:] != b"PAR1":
        raise ValueError("the file is cut off, or it is no .parquet file")
    if int.from_bytes(tail[:4], "little") > min(HEADER_BYTES, settings.unpacked_bytes // PARSED):
        raise ValueError("it describes too many columns")
    _, pq = pyarrow()
    # A list of the footer takes its memory before any of its entries is seen; a column may have four.
    columns = settings.classes + MEMBERS
    limits = {"thrift_container_size_limit": 4 * columns, "thrift_string_size_limit": HEADER_BYTES}
    with pq.ParquetFile(path, pre_buffer=False, **limits) as file:
        facts, schema = file.metadata, file.schema_arrow
        if facts.num_columns > columns:
            raise ValueError(f"it has {facts.num_columns:,} columns; at most {settings.classes:,} classes are taken")
        chunks = chunks_of(path, file)
        values: Counter[str] = Counter()
        for column, chunk in chunks:
            values[column.split(".")[0]] += chunk.values
        if values.total() > 2 * settings.numbers:
            raise ValueError(f"it unpacks to {values.total():,} numbers; at most {settings.numbers:,} are taken")
        unpacked = unpacked_bytes(path, [chunk for _, chunk in chunks], most=PAGES)
    if unpacked > settings.unpacked_bytes:
        raise ValueError(_too_much(unpacked, settings))
    shapes, n = {}, facts.num_rows
    for field in schema:
        numeric, width = numbers_a_row(field.type)
        columns = max(width, values[field.name] // n if n else 0)
        shapes[field.name] = ((n, columns) if columns > 1 else (n,)) if numeric else NO_NUMBERS
    return shapes


def _safetensors(path: Path, settings: Settings) -> Shapes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError("its header is too long, or it is no .safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return {
        name: tuple(int(side) for side in entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    }


_READERS: dict[str, Callable[[Path, Settings], Shapes]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".csv": _csv,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
