"""Arrays of numbers in files of MATLAB (version 5 to 7), read without trust in what a file says of its sizes."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

HEADER = 128
MATRIX, PACKED = 14, 15
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""How numbers lie in the file, by the kind of their element …"""
MEANT = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""… and as what they are meant, by the class of the array; others are texts, cells, structures and objects."""
FACTS = 1024
"""Bytes in which the class, the sides and the name of an array must fit."""


def matrices(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """The arrays of these names in a file; what else it holds is passed over.

    A file is a header of 128 bytes, then elements: a kind, a length, so many bytes. An array is an element of four: its
    class, its sides, its name, its numbers column by column; and it may be packed by zlib, as an element of its own.
    """
    content = memoryview(path.read_bytes())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:HEADER]))
    if order is None:
        raise ValueError("not a file of MATLAB, version 5 to 7")
    found = {}
    for kind, data in _elements(content[HEADER:], order):
        size, skipped = len(data), 0
        if kind == PACKED:
            (kind, size), skipped = struct.unpack(f"{order}II", _unpacked(data, 8)), 8
        if kind != MATRIX:
            raise ValueError(f"wanted arrays, got an element of kind {kind}")

        def beginning(most: int, data: memoryview = data, skipped: int = skipped) -> memoryview:
            return _unpacked(data, most + skipped)[skipped:] if skipped else data[:most]

        facts = list(islice(_elements(beginning(min(size, FACTS)), order), 3))
        name = bytes(facts[-1][1]).decode("latin-1") if len(facts) == 3 else ""
        if name in names:
            found[name] = _array(name, list(islice(_elements(beginning(size), order), 4)), order)
    return found


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while len(content) - at >= 8:
        kind, size = struct.unpack_from(f"{order}II", content, at)
        start = at + 8
        if kind >> 16:  # one of up to four bytes has its length and its bytes in one place
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        yield kind, content[start : start + size]
        at = start + size if kind == PACKED else start + size + -(start + size) % 8


def _unpacked(data: memoryview, most: int) -> memoryview:
    """At most so many bytes of what is packed; only those that come take memory."""
    return memoryview(zlib.decompressobj().decompress(data, most))


def _array(name: str, parts: list[tuple[int, memoryview]], order: str) -> np.ndarray:
    if len(parts) < 4:
        raise ValueError(f"{name} is cut off")
    (_, flags), (_, sides), _, (kind, numbers) = parts
    (facts,) = struct.unpack_from(f"{order}I", flags)
    meant, stored = MEANT.get(facts & 0xFF), STORED.get(kind)
    if meant is None or stored is None or facts & 0x800 or (stored[0] == "f" and meant[0] != "f"):
        raise ValueError(f"{name} must be an array of real numbers, got class {facts & 0xFF} of kind {kind}")
    shape = tuple(int(side) for side in np.frombuffer(sides, f"{order}i4"))
    wanted = math.prod(shape) * np.dtype(stored).itemsize
    if min(shape, default=0) < 0 or len(numbers) != wanted:
        raise ValueError(f"{name} {shape} takes {wanted} bytes, got {len(numbers)}")
    return np.frombuffer(numbers, order + stored).reshape(shape, order="F").astype(meant, copy=False)
