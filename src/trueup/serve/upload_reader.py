"""Read one uploaded file in a separate process with limited memory: `python -m trueup.serve.upload_reader`.

A compressed file of a few kilobytes may contain gigabytes, and a header may declare arrays that are not there. This
process limits its own memory and time before it opens the file, so a bad file ends this process and not the server.
It does not import torch. It writes the arrays as `.npy` files and a `result.json`, which holds the error if there was
one; see `uploads.read`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueup._core.errors import Hint, InputError
from trueup.io import source as sources
from trueup.io.atomic import errors_name_file, require_file, shorten
from trueup.io.formats import FORMATS, npy_header
from trueup.serve.settings import ReaderLimits

Arrays = dict[str, np.ndarray]
ARRAYS, MEMORY, SPACE = "arrays", "memory", "space"
"""Kinds of `result.json`: the file was read, needs too much memory, or needs more space than the disk has."""
MAX_GROUPS = 1000
"""Largest number of groups per column: each is a row of a table."""


@dataclass(frozen=True)
class Options:
    """The user's description of a file."""

    probs: bool | None = None
    logits: str = "logits"
    """Name of the array, or names of the columns separated by commas."""
    labels: str | None = "labels"
    """Name of the labels; None if there are none, or they are not to be read."""
    groups: tuple[str, ...] = ()
    """Columns whose groups are evaluated separately."""
    clusters: str | None = None
    """Column of the clusters of correlated rows."""


def main() -> None:
    """Read a file; the only argument is JSON with its path, the output folder, the options and the limits."""
    path, folder, options, limits = json.loads(sys.argv[1])
    _limit(ReaderLimits(**limits))
    result: dict[str, Any]
    try:
        splits = _read(Path(path), Path(folder), Options(**options), ReaderLimits(**limits))
        result = {"kind": ARRAYS, "splits": splits}
    except MemoryError:
        result = {"kind": MEMORY}
    except InputError as error:
        result = {"kind": "input", "fields": vars(error) | {"got": shorten(error.got), "file": None}}
    except (OSError, ValueError, ImportError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC
        result = {"kind": SPACE if full else "other", "message": shorten(str(error))}
    Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


def error_from(result: dict[str, Any], file: str) -> ValueError:
    """Restore the error in `result.json`, for a file of that name."""
    if result["kind"] != "input":
        return ValueError(result["message"])
    hint = result["fields"]["hint"]
    return InputError(**result["fields"] | {"file": file, "hint": Hint(hint) if hint in set(Hint) else hint})


def _limit(limits: ReaderLimits) -> None:
    """Limit this process; on systems without such limits, the server monitors it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        size, seconds = limits.reader_bytes, 2 * math.ceil(limits.reader_seconds)
        for kind, limit in {"AS": size, "FSIZE": size, "CPU": seconds, "CORE": 0}.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))


def _read(path: Path, folder: Path, options: Options, limits: ReaderLimits) -> int:
    """Write the arrays of each split; return the number of splits."""
    labels = options.labels
    require_file(path)
    reader, _ = FORMATS[sources.suffix_of(path)]
    with ExitStack() as stack:
        with errors_name_file(path):
            if path.suffix == ".npy" and labels is not None:
                _split_npy(path)
            source = stack.enter_context(reader(path))
            splits = sources.splits_in(source.columns, labels or "labels")
            if labels is None:  # if the file has both halves, the test half is the new population
                both = all(any(name.startswith(f"{half}_") for name in source.columns) for half in ("val", "test"))
                splits = ("test",) if both else splits[-1:]
        for number, split in enumerate(splits):
            with errors_name_file(path):
                arrays = _read_split(source, split, options, limits)
            for name, array in arrays.items():
                np.save(folder / f"{number}.{name}.npy", array, allow_pickle=False)
    return len(splits)


def _read_split(source: sources.Source, split: str | None, options: Options, limits: ReaderLimits) -> Arrays:
    """Read `logits` and `labels`; per group column the codes of the rows and the names; and the codes of clusters."""
    columns = options.logits.split(",") if "," in options.logits else options.logits
    names, label = sources.find_columns(source.columns, columns, options.labels, bool(options.probs), split)
    wanted_columns = [name for name in (*options.groups, options.clusters) if name]
    others = [sources.column_of_split(source.columns, name, split) for name in wanted_columns]
    sources.require_columns(source.columns, others)
    if (width := source.width(names)) > limits.n_classes:
        raise ValueError(f"{names[0]} has {width:,} classes; at most {limits.n_classes:,} are accepted")
    parts, rows, max_rows = [], 0, min(limits.rows, limits.numbers // max(1, width))
    absent = math.nan if options.probs else -math.inf
    for chunk in source.read(sources.Plan(names, label, list(dict.fromkeys(others)), absent=absent), max_rows + 1):
        _, unlabelled = sources.drop_missing(chunk)
        if unlabelled:
            raise InputError(label or "labels", "be present in every row", f"{unlabelled:,} rows without")
        parts.append(chunk)
        rows += len(chunk.logits)
        if rows > max_rows:
            raise ValueError(f"{names[0]} has too many rows; at most {max_rows:,} with {width:,} classes are accepted")
    arrays = {"logits": _join([part.logits for part in parts])}
    if label is not None:
        arrays["labels"] = _join([np.asarray(part.labels) for part in parts])
    for number, column in enumerate(others[: len(options.groups)]):
        members, codes = _encode(parts, column)
        if len(members) > MAX_GROUPS:
            raise ValueError(f"{column} has {len(members):,} groups; at most {MAX_GROUPS:,} are accepted")
        arrays |= {f"group{number}": codes, f"names{number}": members}
    if options.clusters:
        _, arrays["clusters"] = _encode(parts, others[-1])
    return arrays


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _encode(parts: list[sources.Chunk], column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted distinct values of a column, and the code of each row's value."""
    if any(getattr(part.others[column], "ndim", 1) != 1 for part in parts):
        raise InputError(column, "have one value per row", "several")
    values = [value for part in parts for value in sources.group_values(part.others[column]).tolist()]
    if len({type(value) for value in values}) > 1:  # mixed types would need a pickle in a .npy file
        values = [str(value) for value in values]
    names = sorted(set(values))
    number = {name: k for k, name in enumerate(names)}
    return np.array(names), np.array([number[value] for value in values], dtype=np.int64)


def _split_npy(path: Path) -> None:
    """Split two arrays in one file, as `numpy.save` writes them to an open file, into a pair of files."""
    with open(path, "rb+") as file:
        size = os.fstat(file.fileno()).st_size
        shape, _, dtype = npy_header(file)
        if dtype.hasobject:
            raise ValueError("it holds pickled Python objects; pickles are never read, because they can run code")
        end = file.tell() + math.prod(shape) * dtype.itemsize
        if end > size:
            raise ValueError(f"the file is cut off: its header declares {end:,} bytes, it has {size:,}")
        if end == size:
            raise ValueError("a .npy file needs its labels: choose x.npy and x.labels.npy together")
        file.seek(end)
        with open(sources.file_list(path)[1], "wb") as labels:
            shutil.copyfileobj(file, labels)
        file.truncate(end)


if __name__ == "__main__":
    main()
