"""Arrays of a safetensors file, mapped from disk. bfloat16, which NumPy lacks, is read as float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import safe_open

_NUMBERS = ["F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"]
DTYPES = {name: f"<{name[0].lower()}{int(name[1:]) // 8}" for name in _NUMBERS} | {"BOOL": "?", "BF16": "<u2"}
"""The types that can be read; bfloat16 is the upper half of a float32."""


class TensorFile:
    """An open file: its metadata, and its arrays by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, framework="np") as checked:  # checks that sizes and positions fit the file
            self.metadata: dict[str, str] = checked.metadata() or {}
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self._tensors = header
        self._bytes = np.memmap(path, np.uint8, mode="r", offset=8 + size) if path.stat().st_size > 8 + size else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bytes = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(self._tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape of an array and its type as the file writes it."""
        return tuple(self._tensors[name]["shape"]), self._tensors[name]["dtype"]

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Copy an array, or some of its rows."""
        shape, dtype = self.describe(name)
        if dtype not in DTYPES:
            raise ValueError(f"the tensor {name} has the type {dtype}, which cannot be read")
        first, end = self._tensors[name]["data_offsets"]
        data = np.empty(0, np.uint8) if self._bytes is None else self._bytes[first:end]
        whole = data.view(DTYPES[dtype]).reshape(shape)
        rows = np.array(whole if start is None else whole[start:stop])
        return (rows.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else rows
