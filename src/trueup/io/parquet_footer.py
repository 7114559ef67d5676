"""What the footer of a .parquet file says of its rows and columns.

Arrow says it too, but a footer that is damaged in some ways ends the whole process as soon as arrow is asked for a
column's facts. Here only a ValueError comes of it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

from trueup.io.parquet_pages import Chunk, damaged, natural, next_field, signed

# The types of values, as Thrift's compact protocol numbers them.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
_SHORT = {_I16: 16, _I32: 32, _I64: 64, _BINARY: 31}  # those that begin with a number of so many bits
_DEEPEST = 16
# Fields, each by its number and type: of the file, of its groups of rows, of their columns, of the facts of these.
_ROWS, _GROUPS = (3, _I64), (4, _LIST)
_COLUMNS, _ROWS_OF_GROUP = (1, _LIST), (3, _I64)
_FACTS = (3, _STRUCT)
_COMPRESSION, _VALUES, _START, _DICTIONARY = (4, _I32), (5, _I64), (9, _I64), (11, _I64)


class Group(NamedTuple):
    """Some rows of a file, and the pages of each of its columns."""

    rows: int
    chunks: list[Chunk]


def groups_of(path: Path) -> list[Group]:
    """The groups of rows in the order of the file; a ValueError if the footer contradicts itself."""
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(size - 8, 0))
        tail = file.read()
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size - 12:
            raise ValueError("the file is cut off, or it is no .parquet file")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        told, _ = _struct(data, 0, _DEEPEST)
        groups = [_group(group) for group in told.get(_GROUPS, ())]
        rows = told[_ROWS]
    except (IndexError, KeyError, AttributeError, TypeError):
        raise ValueError("its footer is damaged") from None
    if rows != sum(group.rows for group in groups):
        raise ValueError(f"it says that it has {rows:,} rows, but its parts have others")
    for group in groups:
        for chunk in group.chunks:
            # A row has a value in each column, be it that there is none.
            if not 0 <= group.rows <= chunk.values:
                raise ValueError(f"it says that a column has {chunk.values:,} values in {group.rows:,} rows")
    return groups


def _group(told: dict[tuple[int, int], Any]) -> Group:
    chunks = []
    for column in told[_COLUMNS]:
        facts = column[_FACTS]
        start, dictionary = facts[_START], facts.get(_DICTIONARY, 0)
        # A reader begins at the dictionary only if it stands before the data.
        start = dictionary if 0 < dictionary < start else start
        chunks.append(Chunk(start, facts[_VALUES], facts[_COMPRESSION]))
    return Group(told[_ROWS_OF_GROUP], chunks)


def _struct(data: bytes, at: int, deep: int) -> tuple[dict[tuple[int, int], Any], int]:
    """Fields by number and type, as readers know them: one of another type than theirs is passed over."""
    if not deep:
        raise damaged("footer")
    found: dict[tuple[int, int], Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        field, at = next_field(data, at, head, field, "footer")
        if kind in _SHORT:
            value = data[at]  # most have one byte, and a call for each would take half of the time
            if value < 128:
                at += 1
            else:
                value, at = natural(data, at, _SHORT[kind])
            if kind == _BINARY:
                at += value  # no text is wanted
            else:
                found[field, kind] = value >> 1 ^ -(value & 1)
        elif kind not in (_TRUE, _FALSE):
            found[field, kind], at = _value(data, at, kind, deep - 1)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, deep: int) -> tuple[Any, int]:
    if kind in _SHORT:
        value, at = natural(data, at, _SHORT[kind])
        return (None, at + value) if kind == _BINARY else (signed(value), at)
    if kind == _STRUCT:
        return _struct(data, at, deep)
    if kind in (_LIST, _SET) and deep:
        head = data[at]
        length, at = (head >> 4, at + 1) if head < 0xF0 else natural(data, at + 1, 31)
        values = []
        for _ in range(length):  # each takes a byte at least, so that a list too long soon comes to the end
            value, at = _value(data, at, head & 15, deep - 1)
            values.append(value)
        return values, at
    if kind in (_TRUE, _FALSE, _BYTE):  # the first two in lists, where each takes a byte
        return data[at], at + 1
    if kind == _DOUBLE:
        return data[at], at + 8
    raise damaged("footer")
