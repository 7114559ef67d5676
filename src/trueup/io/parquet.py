"""Reading .parquet files: what the footer and the pages say is compared before any of it is unpacked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from trueup.io import writers
from trueup.io.columns import Pair, Source, matrix
from trueup.io.parquet_footer import groups_of
from trueup.io.parquet_pages import Chunk, unpacked_bytes

HELD, AT_LEAST = 1 << 16, 128 << 20
"""How many bytes of numbers a byte of the file may stand for, of more than so many bytes: equal numbers are written as
a count, so that a few bytes may hold any number of them."""
_LONGEST = 10**6  # list of the footer that arrow takes if nothing else is said


@contextmanager
def read_parquet(path: Path) -> Iterator[Source]:
    """Columns of numbers, or of lists that all have the same length."""
    pa, pq = writers.pyarrow()
    with open(path, "rb") as start:
        # Arrow looks at the end alone, and of some that lost their beginning it never ends.
        if start.read(4) != b"PAR1":
            raise ValueError("the file lost its beginning, or it is no .parquet file")
    size = path.stat().st_size
    # A list of the footer takes its memory before any of its entries is seen, and each of them has a byte at least.
    limits = {"thrift_container_size_limit": min(size, _LONGEST), "thrift_string_size_limit": size}
    # Without pre-buffering a column is read page by page, not a row group at a time.
    options = {"pre_buffer": False, "buffer_size": 1 << 16, "page_checksum_verification": True}
    with pq.ParquetFile(path, **options, **limits) as file:
        schema, n = file.schema_arrow, file.metadata.num_rows

        def read(logits: Sequence[str], labels: str | None, rows: int) -> Iterator[Pair]:
            names = [*dict.fromkeys((*logits, *([labels] if labels else [])))]
            if n:
                kinds = {name: schema.field(name).type for name in names}
                _refuse_text(kinds, labels)
                _refuse_promises(path, size, file, kinds)
            empty = pa.record_batch({name: pa.array([], schema.field(name).type) for name in names})
            batches = file.iter_batches(min(rows, n), columns=names) if n else [empty]
            seen = 0
            for batch in batches:
                seen += len(batch)
                parts = [_numbers(batch.column(name), name) for name in logits]
                yield matrix(parts), _numbers(batch.column(labels), labels) if labels else None
            if seen != n:  # a damaged directory of pages makes arrow end early
                raise ValueError(f"{n} rows were promised, {seen} came")

        yield Source({field.name: f"({n} rows) {field.type}" for field in schema}, read)


def chunks_of(path: Path, file: Any, columns: Collection[str] | None = None) -> list[tuple[str, Chunk]]:
    """The pages of some or all columns of an open file, with their names; a ValueError if the footer is not sound."""
    # As arrow does, columns are told apart by their place: what the footer calls them elsewhere is of no account.
    paths = [file.schema.column(at).path for at in range(len(file.schema))]
    names = None if columns is None else set(columns)
    wanted = [at for at, path in enumerate(paths) if names is None or not names.isdisjoint(_above(path))]
    groups = groups_of(path)
    if any(len(group.chunks) != len(paths) for group in groups):
        raise ValueError(f"it says that it has {len(paths):,} columns, but its parts have others")
    return [(paths[at], group.chunks[at]) for group in groups for at in wanted]


def numbers_a_row(kind: Any) -> tuple[bool, int]:
    """Whether a column is of numbers, and how many its type gives to each row, also to one that is missing."""
    pa, _ = writers.pyarrow()
    types, width = pa.types, 1
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif hasattr(kind, "value_type"):  # of lists and dictionaries
            width *= getattr(kind, "list_size", 1)
            kind = kind.value_type
        else:
            return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)), width


def _above(path: str) -> Iterator[str]:
    """The columns that a path may lie in: a.b is in a, unless its name has a point."""
    return accumulate(path.split("."), "{}.{}".format)


def _refuse_text(kinds: dict[str, Any], labels: str | None) -> None:
    """Before it is read: a kilobyte can stand for a text of any length in each row."""
    pa, _ = writers.pyarrow()
    for name, kind in kinds.items():
        if not numbers_a_row(kind)[0] and not pa.types.is_null(kind):
            what = "labels" if name == labels else "logits"
            raise ValueError(f"{what} must be an array of real numbers, got {kind}")


def _refuse_promises(path: Path, size: int, file: Any, kinds: dict[str, Any]) -> None:
    """Compare what arrow would take memory for with what is there."""
    chunks = [chunk for _, chunk in chunks_of(path, file, kinds)]
    unpacked_bytes(path, chunks)
    by_type = file.metadata.num_rows * sum(numbers_a_row(kind)[1] for kind in kinds.values())
    numbers = max(by_type, sum(chunk.values for chunk in chunks))
    if 8 * numbers > max(AT_LEAST, HELD * size):
        raise ValueError(f"it says that it has {numbers:,} numbers in {size:,} bytes")


def _numbers(column: Any, name: str) -> np.ndarray:
    """One arrow column as numbers (n,), or lists of one length as (n, length)."""
    pa, _ = writers.pyarrow()
    shape, missing, kind = [len(column)], column.null_count, column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.drop_null().value_lengths().to_numpy(zero_copy_only=False)
        low, high = (lengths.min(), lengths.max()) if len(lengths) else (getattr(kind, "list_size", 0),) * 2
        if low != high:
            raise ValueError(f"{name} must have the same length in each row, got {low}..{high}")
        shape.append(low)
        column = column.flatten()
        missing += column.null_count
    if missing:
        raise ValueError(f"{name} must have no missing values, got {missing}")
    # A copy, because what arrow lends is read-only.
    return np.array(column.to_numpy(zero_copy_only=False)).reshape(shape)
