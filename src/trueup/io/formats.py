"""One reader for each file format, beside its writer: the only place that knows how bytes become columns.

A reader opens a file and tells, without reading the rows, which columns it has; then it reads a pair of them some rows
at a time. No reader ever unpickles.
"""

from __future__ import annotations

import csv
import io
import math
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.lib import format as npy_format
from safetensors import safe_open

from trueup.io import writers
from trueup.io.atomic import shorten
from trueup.io.columns import Pair, Source, matrix
from trueup.io.parquet import read_parquet

Reader: TypeAlias = Callable[[Path], AbstractContextManager[Source]]
Writer: TypeAlias = Callable[..., None]


def file_list(path: Path) -> tuple[Path, ...]:
    """The files that hold the pair: `x.npy` has its labels beside it in `x.labels.npy`, other formats are one file."""
    return (path, path.with_suffix(f".labels{path.suffix}")) if path.suffix.lower() == ".npy" else (path,)


# Arrays: .npz, .npy and .safetensors know shapes and types before the first row is read.


class _Column(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], np.ndarray]  # rows start..stop, always asked for in order, so that a stream will do


def _arrays(columns: dict[str, _Column]) -> Source:
    def read(logits: Sequence[str], labels: str | None, rows: int) -> Iterator[Pair]:
        names = [*logits, *([labels] if labels else [])]
        lengths = {columns[name].shape[:1] for name in names}
        if len(lengths) > 1 or () in lengths:
            found = ", ".join(f"{name} {columns[name].shape}" for name in names)
            raise ValueError(f"logits and labels must have as many rows as each other, got {found}")
        n = columns[names[0]].shape[0]
        for start in range(0, max(n, 1), rows):
            parts = [columns[name].read(start, min(start + rows, n)) for name in names]
            yield matrix(parts[: len(logits)]), parts[-1] if labels else None

    return Source({name: f"{column.shape} {column.dtype}" for name, column in columns.items()}, read)


NPY_HEADER_BYTES = 10_000
"""What NumPy itself takes for a header it does not trust."""


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of the array that begins here in the file, whether it is stored by columns, and its type."""
    head = file.read(12)
    if head[:6] != npy_format.MAGIC_PREFIX or len(head) < 12:
        raise ValueError("this is not an array in the .npy format")
    short = head[6] == 1
    start = 10 if short else 12
    # Known before it is read: packed, a few kilobytes may stand for gigabytes of header.
    length = int.from_bytes(head[8:start], "little")
    if length > NPY_HEADER_BYTES:
        raise ValueError(f"the header of an array must have at most {NPY_HEADER_BYTES:,} bytes, got {length:,}")
    stream = io.BytesIO(head + file.read(start + length - len(head)))
    try:
        npy_format.read_magic(stream)
        # Version 3.0 differs only in the names of records, which are no logits.
        return (npy_format.read_array_header_1_0 if short else npy_format.read_array_header_2_0)(stream)
    except ValueError as error:
        raise ValueError(shorten(str(error))) from None
    except (Exception, MemoryError) as error:  # what Python's parser raises of deep nesting, not for want of memory
        raise ValueError(f"its header makes no sense: {error or type(error).__name__}") from None


def _npy_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        return npy_header(file)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: {error}") from None


def _refuse_objects(dtype: np.dtype[Any], name: str) -> None:
    if dtype.hasobject:
        raise ValueError(f"{name} holds pickled Python objects; pickles are never read, because they can run code")


@contextmanager
def _read_npz(path: Path) -> Iterator[Source]:
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        columns = {}
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                check_packing(member, path)
                # All members stay open at once, so that rows of logits and labels come side by side.
                bytes_ = stack.enter_context(archive.open(member))
                name = member.filename.removesuffix(".npy")
                columns[name] = _member(name, bytes_, member.file_size)
        yield _arrays(columns)


_DEFLATED = 1032
"""How many bytes one byte of deflate can stand for at most."""


def check_packing(member: zipfile.ZipInfo, path: Path) -> None:
    """Refuse sizes that the archive cannot hold, before memory is asked for."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile unpacks others without a bound on what comes out of one read.
        raise ValueError("its compression is none that NumPy writes")
    held = min(member.compress_size, path.stat().st_size)
    most = held if member.compress_type == zipfile.ZIP_STORED else _DEFLATED * held
    if member.file_size > most:
        raise ValueError(f"{member.filename} cannot unpack to {member.file_size} bytes, since {held} are there")


def _member(name: str, stream: IO[bytes], size: int) -> _Column:
    shape, by_columns, dtype = _npy_header(stream, name)
    n, row = (shape or (0,))[0], math.prod(shape[1:]) * dtype.itemsize
    left = size - stream.tell()

    def read(start: int, stop: int) -> np.ndarray:
        _refuse_objects(dtype, name)
        if left != n * row:  # known before memory is asked for; zipfile compares the checksum after the last byte
            raise ValueError(f"{name} {shape} {dtype} takes {n * row} bytes, got {left}")
        whole = stop - start == n
        if by_columns and not whole:
            raise ValueError(
                f"{name} is stored column by column (Fortran order), so it cannot be streamed; load it whole"
            )
        rows = np.empty((stop - start, *shape[1:]) if not by_columns else shape[::-1], dtype)
        _fill(rows, stream, name)
        return rows.T if by_columns else rows

    return _Column(shape, str(dtype), read)


def _fill(rows: np.ndarray, stream: IO[bytes], name: str) -> None:
    target, done = rows.reshape(-1).view(np.uint8), 0
    while done < target.size:
        data = stream.read(min(1 << 20, target.size - done))
        if not data:
            raise ValueError(f"{name} ends {target.size - done} bytes early")
        target[done : done + len(data)] = np.frombuffer(data, np.uint8)
        done += len(data)


@contextmanager
def _read_npy(path: Path) -> Iterator[Source]:
    logits, labels = file_list(path)
    z = _mapped(logits)
    columns = {"logits": _Column(z.shape, str(z.dtype), lambda start, stop: z[start:stop])}
    if labels.is_file():
        y = _mapped(labels)
        columns["labels"] = _Column(y.shape, str(y.dtype), lambda start, stop: np.array(y[start:stop]))
    yield _arrays(columns)


def _mapped(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        shape, by_columns, dtype = _npy_header(file, path.name)
        _refuse_objects(dtype, path.name)
        wanted, offset = math.prod(shape) * dtype.itemsize, file.tell()
    found = path.stat().st_size - offset
    if found != wanted:
        raise ValueError(f"{path.name} {shape} {dtype} takes {wanted} bytes, got {found}")
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order="F" if by_columns else "C")


@contextmanager
def _read_safetensors(path: Path) -> Iterator[Source]:
    with safe_open(path, framework="pt") as file:
        yield _arrays({name: _slice(file.get_slice(name)) for name in file.keys()})  # noqa: SIM118


def _slice(tensor: Any) -> _Column:
    def read(start: int, stop: int) -> np.ndarray:
        rows: torch.Tensor = tensor[start:stop]
        if rows.is_floating_point() and rows.dtype not in (torch.float16, torch.float32, torch.float64):
            rows = rows.float()  # NumPy has no bfloat16
        return np.array(rows.numpy())  # the tensor is a view of the file

    return _Column(tuple(tensor.get_shape()), str(tensor.get_dtype()), read)


# Tables: .csv, as .parquet, comes row by row.


@contextmanager
def _read_csv(path: Path) -> Iterator[Source]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        header = [name.strip() for name in next(lines, [])]
        if all(re.fullmatch(r"[-+.\de]*|nan|[-+]?inf", name, re.IGNORECASE) for name in header):
            raise ValueError(f"the first line must be a header of column names, got {','.join(header)[:80]!r}")
        if len(set(header)) < len(header):
            twice, _ = Counter(header).most_common(1)[0]
            raise ValueError(f"column names must differ, got {twice!r} twice")

        def read(logits: Sequence[str], labels: str | None, rows: int) -> Iterator[Pair]:
            place = {name: i for i, name in enumerate(header)}
            at, last = [place[name] for name in logits], place[labels] if labels else None
            filled = filter(None, lines)
            for part in count():
                z, y, n = array("d"), array("q"), 0
                for line in islice(filled, rows):
                    try:
                        if len(line) != len(header):
                            raise ValueError(f"{len(header)} fields wanted, got {len(line)}")
                        z.extend([float(line[i]) for i in at])
                        if last is not None:
                            y.append(_whole(line[last]))
                        n += 1
                    except (ValueError, OverflowError) as error:
                        raise ValueError(f"line {lines.line_num}: {error}") from None
                if n or not part:
                    yield np.frombuffer(z).reshape(n, len(at)), None if last is None else np.frombuffer(y, np.int64)
                if n < rows:
                    return

        yield Source(dict.fromkeys(header, ""), read)


def _whole(text: str) -> int:
    """A label, also as 1.0, which is how a data frame writes whole numbers of a column that once had a gap."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"a label must be a whole number, got {text!r}") from None
        return int(number)


FORMATS: dict[str, tuple[Reader, Writer]] = {
    ".npz": (_read_npz, writers.write_npz),
    ".npy": (_read_npy, writers.write_npy),
    ".csv": (_read_csv, writers.write_csv),
    ".parquet": (read_parquet, writers.write_parquet),
    ".safetensors": (_read_safetensors, writers.write_safetensors),
}
