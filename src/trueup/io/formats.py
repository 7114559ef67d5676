"""One reader for each file format, beside its writer: the only place that knows how bytes become columns.

A reader opens a file and lists its columns without reading the rows; then it reads a pair of them some rows at a time.
No reader ever unpickles. A writer takes the checked pair, contiguous, and the paths of the files; without labels only
the first of them. Nothing here imports torch, so that a small process can read a file.
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
from numpy.lib import format as npy_format
from safetensors import safe_open
from safetensors.numpy import save_file

from trueup.core.errors import InputError
from trueup.io.atomic import shorten

Pair: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""Logits with labels, or without where none were asked for."""


class Source(NamedTuple):
    """An open file: its columns, each described in words; `read(logits, labels, rows)`, which yields pairs; and
    `width(logits)`, how many numbers a row has.

    `logits` names one column (n, classes) or one column a class; `labels` may be None. At least one pair comes, though
    it may have no rows.
    """

    columns: dict[str, str]
    read: Callable[[Sequence[str], str | None, int], Iterator[Pair]]
    width: Callable[[Sequence[str]], int]


Reader: TypeAlias = Callable[[Path], AbstractContextManager[Source]]
Writer: TypeAlias = Callable[..., None]


def file_list(path: Path) -> tuple[Path, ...]:
    """The files that hold the pair: `x.npy` has its labels beside it in `x.labels.npy`, other formats are one file."""
    return (path, path.with_suffix(f".labels{path.suffix}")) if path.suffix.lower() == ".npy" else (path,)


def _matrix(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The only part as it is, or one column a part.

    >>> _matrix([np.array([1, 2]), np.array([3, 4])])
    array([[1, 3],
           [2, 4]])
    """
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


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
            shapes = ", ".join(f"{name} {columns[name].shape}" for name in names)
            raise InputError("logits and labels", "have as many rows as each other", shapes)
        n = columns[names[0]].shape[0]
        for start in range(0, max(n, 1), rows):
            parts = [columns[name].read(start, min(start + rows, n)) for name in names]
            yield _matrix(parts[: len(logits)]), parts[-1] if labels else None

    def width(logits: Sequence[str]) -> int:
        return sum(math.prod(columns[name].shape[1:]) for name in logits)

    return Source({name: f"{column.shape} {column.dtype}" for name, column in columns.items()}, read, width)


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
                _check_packing(member, path)
                # All members stay open at once, so that rows of logits and labels come side by side.
                bytes_ = stack.enter_context(archive.open(member))
                name = member.filename.removesuffix(".npy")
                columns[name] = _member(name, bytes_, member.file_size)
        yield _arrays(columns)


def _write_npz(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """Arrays `logits` and `labels` in a zip."""
    with open(path, "wb") as file:
        arrays = {"logits": z} if y is None else {"logits": z, "labels": y}
        np.savez(file, **arrays)  # type: ignore[arg-type]


_DEFLATED = 1032
"""How many bytes one byte of deflate can stand for at most."""


def _check_packing(member: zipfile.ZipInfo, path: Path) -> None:
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
    z = _memory_map(logits)
    columns = {"logits": _Column(z.shape, str(z.dtype), lambda start, stop: z[start:stop])}
    if labels.is_file():
        y = _memory_map(labels)
        columns["labels"] = _Column(y.shape, str(y.dtype), lambda start, stop: np.array(y[start:stop]))
    yield _arrays(columns)


def _write_npy(z: np.ndarray, y: np.ndarray | None, *paths: Path) -> None:
    """Each array in a file."""
    for rows, path in zip((z, y), paths, strict=False):
        with open(path, "wb") as file:
            np.save(file, rows, allow_pickle=False)  # type: ignore[arg-type]


def _memory_map(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        shape, by_columns, dtype = _npy_header(file, path.name)
        _refuse_objects(dtype, path.name)
        wanted, offset = math.prod(shape) * dtype.itemsize, file.tell()
    there = path.stat().st_size - offset
    if there != wanted:
        raise ValueError(f"{path.name} {shape} {dtype} takes {wanted} bytes, got {there}")
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order="F" if by_columns else "C")


@contextmanager
def _read_safetensors(path: Path) -> Iterator[Source]:
    with ExitStack() as stack:
        file = stack.enter_context(safe_open(path, framework="np"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        if any(tensor.get_dtype() not in _NUMPY_TYPES for tensor in slices.values()):
            file = stack.enter_context(safe_open(path, framework="pt"))
            slices = {name: file.get_slice(name) for name in slices}
        yield _arrays({name: _tensor_column(tensor) for name, tensor in slices.items()})


_NUMPY_TYPES = {
    **{f"F{8 * size}": f"f{size}" for size in (2, 4, 8)},
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    "BOOL": "?",
}
"""The types that NumPy has; torch is imported only for others, such as bfloat16, which become float32."""


def _tensor_column(tensor: Any) -> _Column:
    def read(start: int, stop: int) -> np.ndarray:
        if start == stop:  # a slice of no rows is refused
            return np.empty((0, *tensor.get_shape()[1:]), _NUMPY_TYPES.get(tensor.get_dtype(), "f4"))
        rows = tensor[start:stop]
        if not isinstance(rows, np.ndarray):
            rows = (rows.float() if tensor.get_dtype() not in _NUMPY_TYPES else rows).numpy()
        return np.array(rows)  # what comes is a view of the file

    return _Column(tuple(tensor.get_shape()), str(tensor.get_dtype()), read)


def _write_safetensors(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """Tensors `logits` and `labels`."""
    save_file({"logits": z, **({} if y is None else {"labels": y})}, path)


# Tables: .csv and .parquet come row by row.


@contextmanager
def _read_csv(path: Path) -> Iterator[Source]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        header = [name.strip() for name in next(csv.reader(file, strict=True), [])]
        if all(re.fullmatch(r"[-+.\de]*|nan|[-+]?inf", name, re.IGNORECASE) for name in header):
            raise ValueError(f"the first line must be a header of column names, got {','.join(header)[:80]!r}")
        if len(set(header)) < len(header):
            twice, _ = Counter(header).most_common(1)[0]
            raise ValueError(f"column names must differ, got {twice!r} twice")

        def read(logits: Sequence[str], labels: str | None, rows: int) -> Iterator[Pair]:
            position = {name: i for i, name in enumerate(header)}
            at, last = [position[name] for name in logits], position[labels] if labels else None
            file.seek(0)
            lines = csv.reader(file, strict=True)
            next(lines)
            filled = filter(None, lines)
            for part in count():
                z, y, n = array("d"), array("q"), 0
                for line in islice(filled, rows):
                    try:
                        if len(line) != len(header):
                            raise ValueError(f"{len(header)} fields wanted, got {len(line)}")
                        z.extend([float(line[i]) for i in at])
                        if last is not None:
                            y.append(_integer(line[last]))
                        n += 1
                    except (ValueError, OverflowError) as error:
                        raise ValueError(f"line {lines.line_num}: {error}") from None
                if n or not part:
                    yield np.frombuffer(z).reshape(n, len(at)), None if last is None else np.frombuffer(y, np.int64)
                if n < rows:
                    return

        yield Source(dict.fromkeys(header, ""), read, len)


def _write_csv(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """A column a class, and `label`."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*(f"logit_{k}" for k in range(z.shape[1])), *([] if y is None else ["label"])])
        # The shortest decimal that reads back as the same double, also for float32, since a reader parses doubles.
        if y is None:
            out.writerows(row.tolist() for row in z)
        else:
            out.writerows((*row.tolist(), label) for row, label in zip(z, y.tolist(), strict=True))


def _integer(text: str) -> int:
    """A label, also as 1.0, which is how a data frame writes whole numbers of a column that once had a gap."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"a label must be a whole number, got {text!r}") from None
        return int(number)


def _pyarrow() -> tuple[Any, Any]:
    """The library and its Parquet part, if it is there."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError(".parquet files need pyarrow: pip install 'trueup[parquet]'") from None
    return pa, pq


@contextmanager
def _read_parquet(path: Path) -> Iterator[Source]:
    """Columns of numbers, or of lists that all have the same length."""
    pa, pq = _pyarrow()
    with open(path, "rb") as start:
        # Arrow looks at the end alone, and of some that lost their beginning it never ends.
        if start.read(4) != b"PAR1":
            raise ValueError("the file lost its beginning, or it is no .parquet file")
    # A list of the footer takes its memory before any of its entries is seen, and each of them has a byte at least.
    size = path.stat().st_size
    limits = {"thrift_container_size_limit": min(size, 10**6), "thrift_string_size_limit": size}
    # Without pre-buffering a column is read page by page, not a row group at a time.
    options = {"pre_buffer": False, "buffer_size": 1 << 16, "page_checksum_verification": True}
    with pq.ParquetFile(path, **options, **limits) as file:
        schema, n = file.schema_arrow, file.metadata.num_rows
        if n < 0:
            raise ValueError(f"the file cannot have {n} rows")

        def batches(names: Sequence[str], rows: int) -> Iterator[Any]:
            for name in names:
                _require_numbers(schema.field(name).type, name)
            empty = pa.record_batch({name: pa.array([], schema.field(name).type) for name in names})
            yield from file.iter_batches(min(rows, n), columns=list(names)) if n else [empty]

        def read(logits: Sequence[str], labels: str | None, rows: int) -> Iterator[Pair]:
            seen = 0
            for batch in batches([*dict.fromkeys((*logits, *([labels] if labels else [])))], rows):
                seen += len(batch)
                parts = [_from_arrow(batch.column(name), name) for name in logits]
                yield _matrix(parts), _from_arrow(batch.column(labels), labels) if labels else None
            if seen != n:  # a damaged directory of pages makes arrow end early
                raise ValueError(f"{n} rows were promised, {seen} came")

        def width(logits: Sequence[str]) -> int:
            return sum(math.prod(_from_arrow(column, "").shape[1:]) for column in next(batches(logits, 1)).columns)

        yield Source({field.name: f"({n} rows) {field.type}" for field in schema}, read, width)


def _require_numbers(kind: Any, name: str) -> None:
    """Before it is read: a kilobyte can stand for a text of any length in each row."""
    pa, _ = _pyarrow()
    inner = kind
    while True:
        if isinstance(inner, pa.BaseExtensionType):
            inner = inner.storage_type
        elif hasattr(inner, "value_type"):  # of lists and dictionaries
            inner = inner.value_type
        else:
            break
    types = pa.types
    if not any(check(inner) for check in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)):
        raise InputError(name, "be an array of real numbers", str(kind))


def _from_arrow(column: Any, name: str) -> np.ndarray:
    """One arrow column as numbers (n,), or lists of one length as (n, length)."""
    pa, _ = _pyarrow()
    shape, missing, kind = [len(column)], column.null_count, column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.drop_null().value_lengths().to_numpy(zero_copy_only=False)
        low, high = (lengths.min(), lengths.max()) if len(lengths) else (getattr(kind, "list_size", 0),) * 2
        if low != high:
            raise InputError(name, "have the same length in each row", f"{low}..{high}")
        shape.append(low)
        column = column.flatten()
        missing += column.null_count
    if missing:
        raise InputError(name, "have no missing values", str(missing))
    # A copy, because what arrow lends is read-only.
    return np.array(column.to_numpy(zero_copy_only=False)).reshape(shape)


def _write_parquet(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """A column of lists, and `label`."""
    pa, pq = _pyarrow()
    # Numbers that are said never to be missing, and are not put into a dictionary, are read in half the time.
    number = pa.field("element", pa.from_numpy_dtype(z.dtype), nullable=False)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(z.reshape(-1)), type=pa.list_(number, z.shape[1]))
    columns = {"logits": lists, **({} if y is None else {"label": pa.array(y)})}
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in columns.items()])
    table = pa.table(list(columns.values()), schema=schema)
    group = max(1, (1 << 20) // z.shape[1])  # groups of a million numbers stream in little memory
    pq.write_table(table, path, row_group_size=group, write_page_checksum=True, use_dictionary=["label"])


FORMATS: dict[str, tuple[Reader, Writer]] = {
    ".npz": (_read_npz, _write_npz),
    ".npy": (_read_npy, _write_npy),
    ".csv": (_read_csv, _write_csv),
    ".parquet": (_read_parquet, _write_parquet),
    ".safetensors": (_read_safetensors, _write_safetensors),
}
