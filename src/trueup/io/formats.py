"""The table of file formats: suffix → reader and writer.

A reader opens a file and lists its columns without reading the rows; then it reads chunks of rows. No reader ever
unpickles. A writer receives chunks of checked rows and the paths of the files; without labels only the first path.
Arrays (.npz, .npy, .safetensors) are read here, text in prediction_table.py, parquet in parquet.py.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from safetensors.numpy import save_file

from trueup._core.errors import Hint, InputError
from trueup._core.registry import ARTIFACTS
from trueup.io import parquet, prediction_table
from trueup.io.atomic import shorten
from trueup.io.source import Chunk, Plan, Reader, Source, Writer, file_list, gather, matrix, simplify


class _Column(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], np.ndarray]  # rows start..stop; calls are in order, so a stream suffices


def _arrays(columns: dict[str, _Column]) -> Source:
    def read(plan: Plan, rows: int) -> Iterator[Chunk]:
        logits, labels, others, parse, _, _ = plan
        names = [*logits, *([labels] if labels else []), *others]
        lengths = {columns[name].shape[:1] for name in names}
        if len(lengths) > 1 or () in lengths:
            shapes = ", ".join(f"{name} {columns[name].shape}" for name in names)
            which = "logits and labels" if not others else f"logits, labels and {', '.join(others)}"
            raise InputError(which, "have as many rows as each other", shapes)
        n = columns[names[0]].shape[0]
        for start in range(0, max(n, 1), rows):
            parts = {name: columns[name].read(start, min(start + rows, n)) for name in dict.fromkeys(names)}
            y = parts[labels] if labels else None
            y = y if y is None or parse is None else parse.array(y)
            yield Chunk(matrix([parts[name] for name in logits]), y, {name: parts[name] for name in others})

    def width(logits: Sequence[str]) -> int:
        return sum(math.prod(columns[name].shape[1:]) for name in logits)

    described = {name: f"{column.shape} {column.dtype}" for name, column in columns.items()}
    lengths = {name: column.shape[0] for name, column in columns.items() if column.shape}
    return Source(described, read, width, rows=lengths)


def _arrays_of(chunks: Iterator[Chunk], suffix: str, kinds: str) -> dict[str, np.ndarray]:
    """Return logits, labels and other columns by name; columns that the format cannot hold are dropped with a warning.

    All rows are needed at once, since these formats begin with the number of rows.
    """
    chunk = gather(chunks)
    arrays = {chunk.name: np.ascontiguousarray(chunk.logits)} if chunk.logits.ndim > 1 else {}
    if chunk.labels is not None:
        arrays["labels"] = np.ascontiguousarray(chunk.labels)
    left_out = []
    for name, column in chunk.others.items():
        array = column if isinstance(column, np.ndarray) and column.dtype.kind != "O" else simplify(column)
        if name in arrays or array.dtype.kind not in kinds:
            left_out.append(name)
        else:
            arrays[name] = np.ascontiguousarray(array)
    if left_out:
        warnings.warn(f"{suffix} files cannot hold the columns {', '.join(left_out)}: they were left out", stacklevel=4)
    return arrays


NPY_HEADER_BYTES = 10_000
"""Largest header that NumPy accepts from files that it does not trust."""


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape of the array that begins here, whether it is in Fortran order, and its type."""
    head = file.read(12)
    if head[:6] != npy_format.MAGIC_PREFIX or len(head) < 12:
        raise ValueError("this is not an array in the .npy format")
    short = head[6] == 1
    start = 10 if short else 12
    # Checked before it is read: in an archive, a few kilobytes may unpack to gigabytes of header.
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
    except (Exception, MemoryError) as error:  # Python's parser raises MemoryError on deep nesting
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
                _check_packing(member, path)
                # All members stay open, so that rows of logits and labels can be read in turn.
                bytes_ = stack.enter_context(archive.open(member))
                name = member.filename.removesuffix(".npy")
                columns[name] = _member(name, bytes_, member.file_size)
        yield _arrays(columns)


def _write_npz(chunks: Iterator[Chunk], path: Path) -> None:
    """Write arrays `logits` and `labels` to a zip archive."""
    arrays = _arrays_of(chunks, ".npz", "biufU")
    if "file" in arrays:  # the name of an argument of np.savez
        arrays["file_"] = arrays.pop("file")
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


_DEFLATED = 1032
"""Largest number of bytes that one byte of deflate can expand to."""


def _check_packing(member: zipfile.ZipInfo, path: Path) -> None:
    """Reject sizes that the archive cannot hold, before memory is allocated."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile unpacks others without a limit on the size of one read.
        raise ValueError("its compression is not one that NumPy writes")
    held = min(member.compress_size, path.stat().st_size)
    most = held if member.compress_type == zipfile.ZIP_STORED else _DEFLATED * held
    if member.file_size > most:
        raise ValueError(f"{member.filename} cannot unpack to {member.file_size} bytes, since it has {held}")


def _member(name: str, stream: IO[bytes], size: int) -> _Column:
    shape, by_columns, dtype = _npy_header(stream, name)
    n, row = (shape or (0,))[0], math.prod(shape[1:]) * dtype.itemsize
    left = size - stream.tell()

    def read(start: int, stop: int) -> np.ndarray:
        _refuse_objects(dtype, name)
        if left != n * row:  # checked before memory is allocated; zipfile checks the CRC after the final byte
            raise ValueError(f"{name} {shape} {dtype} takes {n * row} bytes, got {left}")
        if by_columns and stop - start != n:
            reason = "is stored column by column (Fortran order), so it cannot be streamed; load it whole"
            raise ValueError(f"{name} {reason}")
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
    z = _memory_map(logits)
    columns = {"logits": _Column(z.shape, str(z.dtype), lambda start, stop: z[start:stop])}
    if labels.is_file():
        y = _memory_map(labels)
        columns["labels"] = _Column(y.shape, str(y.dtype), lambda start, stop: np.array(y[start:stop]))
    yield _arrays(columns)


def _write_npy(chunks: Iterator[Chunk], *paths: Path) -> None:
    """Write each array to a file."""
    arrays = _arrays_of(chunks, ".npy", "")
    for rows, path in zip(arrays.values(), paths, strict=False):
        with open(path, "wb") as file:
            np.save(file, rows, allow_pickle=False)


def _memory_map(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        shape, by_columns, dtype = _npy_header(file, path.name)
        _refuse_objects(dtype, path.name)
        required, offset = math.prod(shape) * dtype.itemsize, file.tell()
    available = path.stat().st_size - offset
    if available != required:
        raise ValueError(f"{path.name} {shape} {dtype} takes {required} bytes, got {available}")
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order="F" if by_columns else "C")


@contextmanager
def _read_safetensors(path: Path) -> Iterator[Source]:
    from trueup.io.artifacts import is_artifact, read_header  # other formats do without
    from trueup.io.safetensors_file import TensorFile

    if is_artifact(path):
        kind = read_header(path).kind
        raise InputError("the file", "hold predictions", f"a {ARTIFACTS[kind].title}", Hint[f"LOAD_{kind.upper()}"])
    with TensorFile(path) as file:
        yield _arrays({name: _Column(*file.describe(name), partial(file.read, name)) for name in file.names})


def _write_safetensors(chunks: Iterator[Chunk], path: Path) -> None:
    """Write tensors `logits` and `labels`."""
    save_file(_arrays_of(chunks, ".safetensors", "biuf"), path)


ARRAYS = (".npz", ".npy", ".safetensors")
"""Formats of arrays."""


FORMATS: dict[str, tuple[Reader, Writer]] = {
    ".npz": (_read_npz, _write_npz),
    ".npy": (_read_npy, _write_npy),
    ".csv": (prediction_table.read_csv, prediction_table.write_csv),
    ".csv.gz": (prediction_table.read_csv, prediction_table.write_csv),
    ".jsonl": (prediction_table.read_jsonl, prediction_table.write_jsonl),
    ".jsonl.gz": (prediction_table.read_jsonl, prediction_table.write_jsonl),
    ".parquet": (parquet.read_parquet, parquet.write_parquet),
    ".safetensors": (_read_safetensors, _write_safetensors),
}
"""Suffix → reader and writer."""
