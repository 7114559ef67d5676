"""What the pages of a .parquet file say of their own size, which need not be what the file's footer says.

A reader unpacks what a page promises: a hundred bytes may stand for a list of two thousand million numbers. Only the
header before each page is read here (structs of Thrift's compact protocol), and no page is unpacked.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

# The types of fields, as the protocol numbers them.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
_BITS = {_I16: 16, _I32: 32, _I64: 64}
# The fields of a page's header, each after that of the struct it is in, and where pages of each kind tell their values.
_KIND, _UNPACKED, _PACKED = (0, 1), (0, 2), (0, 3)
_DATA, _INDEX, _DICTIONARY, _DATA_2 = range(4)
_VALUES = {_DATA: (5, 1), _DICTIONARY: (7, 1), _DATA_2: (8, 1)}
_DEEPEST = 3  # a page, its kind, its statistics
_LEAST_BYTES = 8  # of a page's header
_LENGTHS = (
    1 << 8,
    1 << 12,
    1 << 16,
    1 << 20,
    1 << 24,
)  # that are tried: nearly all are short, and no reader takes more

EXPANDS = {0: 1, 1: 22, 2: 1032, 4: 1 << 22, 5: 256, 6: 1 << 15, 7: 256}
"""How many bytes one byte can stand for at most, by the number of the compression: none, Snappy, gzip, Brotli, LZ4,
Zstandard, LZ4 without a frame. Others are read by nobody."""


class Chunk(NamedTuple):
    """The pages of a column: where they begin, how many values the footer promises of them, how they are compressed."""

    start: int
    values: int
    compression: int


def unpacked_bytes(path: Path, chunks: Iterable[Chunk], most: int | None = None) -> int:
    """Bytes that all pages unpack to by their own account; a ValueError if they are not what the footer promises.

    No more than `most` pages are looked at, and never more than the file has room for.
    """
    total = pages = 0
    with open(path, "rb", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        most = min(most or size, size // _LEAST_BYTES)
        for start, promised, compression in chunks:
            at, seen = start, 0
            if not 0 <= start < size:
                raise ValueError("a column begins outside the file")
            while seen < promised:  # as a reader does, which looks no further
                told, at = _header(file, at)
                kind, unpacked, packed = told.get(_KIND, -1), told.get(_UNPACKED, -1), told.get(_PACKED, -1)
                values = 0 if kind == _INDEX else told.get(_VALUES.get(kind), -1)
                if values < 0 or unpacked < 0 or packed < 0:
                    raise damaged()
                if kind in (_DATA, _DATA_2):
                    seen += values
                    if seen > promised:
                        raise ValueError(f"a page holds more than the {promised:,} values that the file says it has")
                elif values > unpacked:  # those of a dictionary, some of which may never be used
                    raise ValueError(f"a page cannot hold {values:,} values in {unpacked:,} bytes")
                if unpacked > EXPANDS.get(compression, 1) * packed:
                    raise ValueError(f"a page cannot unpack to {unpacked:,} bytes, since {packed:,} are there")
                total, at, pages = total + unpacked, at + packed, pages + 1
                if pages > most:
                    raise ValueError(f"it has more than {most:,} pages")
    return total


Told: TypeAlias = dict[tuple[int, int] | None, int]
"""Numbers of 32 bits in a page's header or the struct of its kind, by that struct's field and their own."""


def _header(file: IO[bytes], at: int) -> tuple[Told, int]:
    """What the page at this place tells, and where its content begins."""
    for length in _LENGTHS:
        file.seek(at)
        try:
            told, end = _told(file.read(length))
        except IndexError:  # it is longer, or the file ends
            continue
        return told, at + end
    raise ValueError("the header of a page is cut off")


def _told(data: bytes) -> tuple[Told, int]:
    """Walk through a struct, as readers do: a field of another type than theirs is passed over.

    Readers cut what has too many bits, and let the second entry of a field count: nobody honest writes either.
    """
    told: Told = {}
    inside: list[int] = []
    at = field = deep = 0
    while True:
        head = data[at]
        at += 1
        if not head:
            if not deep:
                return told, at
            field = inside.pop()
            deep -= 1
            continue
        kind = head & 15
        field, at = next_field(data, at, head, field, "header of a page")
        if kind in _BITS or kind == _BINARY:
            value = data[at]  # most have one byte, and a call for each would take half of the time
            if value < 128:
                at += 1
            else:
                value, at = natural(data, at, _BITS.get(kind, 31))
            if kind == _BINARY:
                at += value
            elif kind == _I32 and deep < 2:
                told[inside[0] if deep else 0, field] = signed(value)
        elif kind == _STRUCT and deep + 1 < _DEEPEST:
            inside.append(field)
            field, deep = 0, deep + 1
        elif kind in (_BYTE, _DOUBLE):
            at += 1 if kind == _BYTE else 8
        elif kind not in (_TRUE, _FALSE):
            raise damaged()


def next_field(data: bytes, at: int, head: int, before: int, what: str) -> tuple[int, int]:
    """The number of the field that begins with `head`, above the one before, and where its value begins."""
    if head > 15:
        field = before + (head >> 4)
    else:
        field, at = natural(data, at, 16)
        field = signed(field)
    if not before < field < 1 << 15:
        raise damaged(what)
    return field, at


def natural(data: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number of so many bits, seven to a byte, and where the next thing begins."""
    value = data[at]
    if value > 127:
        value -= 128
        for shift in range(7, 70, 7):
            at += 1
            byte = data[at]
            if byte < 128:
                value |= byte << shift
                break
            value |= byte - 128 << shift
        else:
            raise damaged()
        if value >> bits:
            raise damaged()
    return value, at + 1


def signed(value: int) -> int:
    """A number whose sign was written as its last bit."""
    return value >> 1 ^ -(value & 1)


def damaged(what: str = "header of a page") -> ValueError:
    """What is said of bytes that no writer writes."""
    return ValueError(f"the {what} is damaged")
