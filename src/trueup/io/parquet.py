"""Parquet: columns of numbers or of lists, read in chunks of rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trueup._core.errors import Hint, InputError
from trueup.io.source import MISSING, Chunk, LabelParser, Plan, Source, as_list, join_chunks, matrix, object_array

MAX_TEXT_ROWS = 1 << 16
"""Largest number of rows whose texts are read without a dictionary."""


def pyarrow() -> tuple[Any, Any]:
    """Import pyarrow and its Parquet module, or raise an error with the remedy."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError(".parquet files need pyarrow: pip install 'trueup[parquet]'") from None
    return pa, pq


@contextmanager
def read_parquet(path: Path) -> Iterator[Source]:
    """Read columns of numbers, or of lists of equal length."""
    pa, pq = pyarrow()
    with open(path, "rb") as start:
        # Arrow reads only the end, and may never return for files that lost their beginning.
        if start.read(4) != b"PAR1":
            raise ValueError("the file lost its beginning, or it is no .parquet file")
    # Lists in the footer are allocated before their entries are read; each entry has at least one byte.
    size = path.stat().st_size
    limits = {"thrift_container_size_limit": min(size, 10**6), "thrift_string_size_limit": size}
    # Without pre-buffering a column is read page by page, not a row group at a time.
    options = {"pre_buffer": False, "buffer_size": 1 << 16, "page_checksum_verification": True}
    with pq.ParquetFile(path, **options, **limits) as file:
        schema, n = file.schema_arrow, file.metadata.num_rows
        if n < 0:
            raise ValueError(f"the file cannot have {n} rows")

        def batches(names: Sequence[str], rows: int) -> Iterator[Any]:
            empty = pa.record_batch({name: pa.array([], schema.field(name).type) for name in names})
            # A kilobyte of file may repeat a long text in millions of rows, so many texts are read as dictionaries.
            is_large = rows > MAX_TEXT_ROWS
            texts = [name for name in names if is_large and pa.types.is_string(schema.field(name).type)]
            with pq.ParquetFile(path, read_dictionary=texts, **options, **limits) as reader:
                yield from reader.iter_batches(min(rows, n), columns=list(names)) if n else [empty]

        yield arrow_source(schema, n, batches)


def arrow_source(schema: Any, n: int, batches: Callable[[Sequence[str], int], Iterator[Any]]) -> Source:
    """Return a source of `n` rows; `batches(names, rows)` yields record batches with these columns."""

    def read(plan: Plan, rows: int) -> Iterator[Chunk]:
        logits, labels, others, parse, gaps, absent = plan
        rows_read = 0
        names = [*dict.fromkeys((*logits, *([labels] if labels else []), *others))]
        # Text is read only in other columns, and as labels that are class names.
        plain = {*others, *([labels] if labels and parse and (parse.names or parse.binary) else [])} - {*logits}
        for name in names:
            if name not in plain:
                _require_numbers(schema.field(name).type, name, Hint.CLASSES if name == labels else None)
        for batch in batches(names, rows):
            rows_read += len(batch)
            columns = {name: batch.column(name) for name in names}
            parts = [_from_arrow(columns[x], x, math.nan if gaps else absent) for x in logits]
            y = _labels(columns[labels], labels, parse) if labels else None
            yield Chunk(matrix(parts), y, {name: columns[name] for name in others})
        if rows_read != n:  # a damaged directory of pages makes arrow end early
            raise ValueError(f"the file must have {n} rows, got {rows_read}")

    def width(logits: Sequence[str]) -> int:
        for name in logits:
            _require_numbers(schema.field(name).type, name)
        return sum(math.prod(_from_arrow(column, "").shape[1:]) for column in next(batches(logits, 1)).columns)

    described = {field.name: f"({n} rows) {field.type}" for field in schema}
    return Source(described, read, width, _class_names(schema.metadata))


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return the class names that Hugging Face `datasets` stores for its label columns."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: tuple(map(str, feature["names"]))
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _labels(column: Any, name: str, parse: LabelParser | None) -> np.ndarray:
    """Convert a column to labels, with `MISSING` for missing ones."""
    pa, _ = pyarrow()
    parse = parse or LabelParser(column=name)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    translated = parse.binary or not parse.takes_numbers
    if text or (whole and translated):
        return parse.array(object_array(as_list(column)))
    if whole and column.null_count:
        return np.array(column.cast(pa.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False))
    if pa.types.is_floating(kind):  # data frames write whole numbers with gaps as floats
        values = _from_arrow(column, name, math.nan)
        missing = np.isnan(values)
        if missing.any():
            values = values.astype(np.float64)  # half precision cannot hold MISSING
            present = values[~missing]
            translated |= bool(((np.abs(present) >= -MISSING) | (present != np.floor(present))).any())
        if translated:
            return parse.array(values)
        return np.where(missing, MISSING, values).astype(np.int64) if missing.any() else values
    return _from_arrow(column, name)


def _require_numbers(kind: Any, name: str, hint: Hint | None = None) -> None:
    """Reject other types before reading: a kilobyte can stand for a text of any length in each row."""
    pa, _ = pyarrow()
    inner, types = kind, pa.types
    # Extensions are stored as another type; lists and dictionaries hold values.
    while (stored := getattr(inner, "storage_type", getattr(inner, "value_type", None))) is not None:
        inner = stored
    if not any(check(inner) for check in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)):
        raise InputError(name, "be an array of real numbers", str(kind), hint)


def _from_arrow(column: Any, name: str, absent: float | None = None) -> np.ndarray:
    """Convert a column to numbers (n,), or to (n, length) from lists; `absent` replaces missing numbers."""
    pa, _ = pyarrow()
    shape, missing, kind = [len(column)], column.null_count, column.type
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if missing and is_list:
        raise InputError(name, "have no missing values", str(missing))
    if is_list:
        lengths = column.drop_null().value_lengths().to_numpy(zero_copy_only=False)
        low, high = (lengths.min(), lengths.max()) if len(lengths) else (getattr(kind, "list_size", 0),) * 2
        if low != high:
            hint = None if absent is None else Hint.NULL
            raise InputError(name, "have the same length in each row", f"{low}..{high}", hint)
        shape.append(low)
        column = column.flatten()
        missing += column.null_count
    if missing and absent is not None:
        number = column.type if pa.types.is_floating(column.type) else pa.float64()
        column, missing = column.cast(number).fill_null(pa.scalar(absent, number)), 0
    if missing:
        raise InputError(name, "have no missing values", str(missing))
    # A copy, because arrow's memory is read-only.
    return np.array(column.to_numpy(zero_copy_only=False)).reshape(shape)


def write_parquet(chunks: Iterator[Chunk], path: Path) -> None:
    """Write a column of lists, `label`, and the other columns with their types."""
    _, pq = pyarrow()
    first = next(chunks)
    if any(isinstance(column, np.ndarray) for column in first.others.values()):
        # The type of a column depends on all of its values.
        first = join_chunks([first, *chunks], _arrow)
    table = _table(first)
    width = first.logits.shape[1] if first.logits.ndim == 2 else 1
    group = max(1, (1 << 20) // max(1, width))  # groups of a million numbers stream in little memory
    with pq.ParquetWriter(path, table.schema, write_page_checksum=True, use_dictionary=["label"]) as file:
        for part in chain([table], map(_table, chunks)):
            file.write_table(part.cast(table.schema), row_group_size=group)


def _arrow(values: list[Any]) -> Any:
    """Convert values to a column; values without a common type become text."""
    pa, _ = pyarrow()
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else json.dumps(value, default=str) for value in values])


def _table(chunk: Chunk) -> Any:
    pa, _ = pyarrow()
    z, y = chunk.logits, chunk.labels
    columns = {}
    if z.ndim == 2:
        # Non-nullable numbers without a dictionary are read twice as fast.
        number = pa.field("element", pa.from_numpy_dtype(z.dtype), nullable=False)
        flat = pa.array(np.ascontiguousarray(z).reshape(-1))
        columns[chunk.name] = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(number, z.shape[1]))
    if y is not None:
        columns["label"] = pa.array(y)
    schema = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    schema += [pa.field(name, column.type) for name, column in chunk.others.items()]
    return pa.table([*columns.values(), *chunk.others.values()], schema=pa.schema(schema))
