"""What the pages of a .parquet file say of their own size, which need not be what the file's footer says.

A reader unpacks what a page promises: a hundred bytes may stand for a list of two thousand million numbers. Only the
header before each page is read here (structs of Thrift's compact protocol), and no page is unpacked.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, NamedTuple

PAGES = 100_000
"""The most that are looked at: a page of a large file holds thousands of numbers."""

# The types of fields, as the protocol numbers them.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
# The fields of a page's header.
_UNPACKED, _PACKED = (2, _I32), (3, _I32)
_DATA, _DICTIONARY, _DATA_2 = (5, _STRUCT), (7, _STRUCT), (8, _STRUCT)
_VALUES = (1, _I32)
_DEEPEST = 3  # a page, its kind, its statistics


class Chunk(NamedTuple):
    """Where the pages of a column begin, and how many values the footer promises of them."""

    start: int
    values: int


def unpacked_bytes(path: Path, chunks: list[Chunk]) -> int:
    """Bytes that all pages unpack to by their own account; a ValueError if they hold more than the footer promises."""
    total = pages = 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, promised in chunks:
            at, seen = start, 0
            while seen < promised and 0 <= at < len(data):
                header = _Thrift(data, at)
                fields = header.struct()
                kinds = [fields.get(kind, {}).get(_VALUES, 0) for kind in (_DATA, _DATA_2, _DICTIONARY)]
                sizes = [fields.get(size, -1) for size in (_UNPACKED, _PACKED)]
                seen += max(kinds[:2])
                pages += 1
                if min(*kinds, *sizes) < 0:
                    raise ValueError("the header of a page is damaged")
                if max(seen, *kinds) > promised:
                    raise ValueError(f"a page holds more than the {promised:,} values that the file says it has")
                if pages > PAGES:
                    raise ValueError(f"it has more than {PAGES:,} pages")
                total += sizes[0]
                at = header.at + sizes[1]
    return total


class _Thrift:
    """A place in some bytes, from which structs are read."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def struct(self, depth: int = _DEEPEST) -> dict[tuple[int, int], Any]:
        """Fields by number and type, as readers know them: one of another type than theirs is passed over."""
        found: dict[tuple[int, int], Any] = {}
        field = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            field = field + step if step else self._whole()
            if kind in (_I16, _I32, _I64):
                found[field, kind] = self._whole()
            elif kind == _STRUCT and depth > 1:
                found[field, kind] = self.struct(depth - 1)
            elif kind in (_BYTE, _DOUBLE, _BINARY):
                length = {_BYTE: 1, _DOUBLE: 8}.get(kind) or self._natural()
                self.at += length
            elif kind not in (_TRUE, _FALSE):
                raise ValueError("the header of a page is damaged")
        return found

    def _byte(self) -> int:
        if self.at >= len(self.data):
            raise ValueError("the header of a page is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def _natural(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("the header of a page is damaged")

    def _whole(self) -> int:
        value = self._natural()
        return value >> 1 ^ -(value & 1)
