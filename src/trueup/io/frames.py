"""Data frames as sources of predictions: polars, DuckDB, Arrow and pandas, through Arrow's stream interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from trueup._core.errors import InputError
from trueup.io.parquet import arrow_source, pyarrow
from trueup.io.source import Source


@runtime_checkable
class Frame(Protocol):
    """A table in memory or the result of a query: a DuckDB relation, or a data frame of polars, Arrow or pandas."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the rows as Arrow batches."""


def frame_source(frame: Frame) -> Source:
    """Read a data frame; numbers are not copied on the way where its memory is Arrow's.

    >>> import pyarrow as pa
    >>> list(frame_source(pa.table({"p": [0.1, 0.9], "label": [0, 1]})).columns)
    ['p', 'label']
    """
    if not isinstance(frame, Frame):
        hint = ".collect() makes a table of it" if hasattr(frame, "collect") else "con.sql(query) reads from DuckDB"
        raise InputError("path", "be a file, an address or a data frame", f"a {type(frame).__name__}", hint)
    pa, _ = pyarrow()
    table = pa.table(frame)
    names = table.column_names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError("the frame", "have columns with different names", f"two named {repeated[0]!r}")
    table = table.cast(pa.schema([field.with_type(_plain(field.type)) for field in table.schema]))

    def batches(names: Sequence[str], rows: int) -> Iterator[Any]:
        selected = table.select(list(names))
        yield from selected.to_batches(max_chunksize=rows) or [pa.RecordBatch.from_pylist([], schema=selected.schema)]

    return arrow_source(table.schema, len(table), batches)


def _plain(kind: Any) -> Any:
    """Return the type to read a column as: decimals of SQL are numbers, and views of texts are texts."""
    pa, _ = pyarrow()
    types = pa.types
    if types.is_decimal(kind):
        return pa.float64()
    if types.is_string_view(kind):
        return pa.string()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(_plain(kind.value_type))
    return kind
