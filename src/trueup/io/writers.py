"""One writer for each file format.

Each takes the checked pair, contiguous, and the paths of the files; without labels only the first of them.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def pyarrow() -> tuple[Any, Any]:
    """The library and its Parquet part, if it is there."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError(".parquet files need pyarrow: pip install 'trueup[parquet]'") from None
    return pa, pq


def write_npz(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """Arrays `logits` and `labels` in a zip."""
    with open(path, "wb") as file:
        arrays = {"logits": z} if y is None else {"logits": z, "labels": y}
        np.savez(file, **arrays)  # type: ignore[arg-type]


def write_npy(z: np.ndarray, y: np.ndarray | None, *paths: Path) -> None:
    """Each array in a file."""
    for rows, path in zip((z, y), paths, strict=False):
        with open(path, "wb") as file:
            np.save(file, rows, allow_pickle=False)  # type: ignore[arg-type]


def write_csv(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """A column a class, and `label`."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*(f"logit_{k}" for k in range(z.shape[1])), *([] if y is None else ["label"])])
        # The shortest decimal that reads back as the same double, also for float32, since a reader parses doubles.
        if y is None:
            out.writerows(row.tolist() for row in z)
        else:
            out.writerows((*row.tolist(), label) for row, label in zip(z, y.tolist(), strict=True))


def write_parquet(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """A column of lists, and `label`."""
    pa, pq = pyarrow()
    # Numbers that are said never to be missing, and are not put into a dictionary, are read in half the time.
    number = pa.field("element", pa.from_numpy_dtype(z.dtype), nullable=False)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(z.reshape(-1)), type=pa.list_(number, z.shape[1]))
    columns = {"logits": lists, **({} if y is None else {"label": pa.array(y)})}
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in columns.items()])
    table = pa.table(list(columns.values()), schema=schema)
    group = max(1, (1 << 20) // z.shape[1])  # groups of a million numbers stream in little memory
    pq.write_table(table, path, row_group_size=group, write_page_checksum=True, use_dictionary=["label"])


def write_safetensors(z: np.ndarray, y: np.ndarray | None, path: Path) -> None:
    """Tensors `logits` and `labels`."""
    save_file({"logits": z, **({} if y is None else {"labels": y})}, path)
