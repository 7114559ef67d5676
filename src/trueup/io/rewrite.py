"""Write a file again with other logits and all of its other columns, for `trueup apply`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np

from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup.io.atomic import StorageOptions, StrPath, errors_name_file
from trueup.io.formats import ARRAYS, FORMATS
from trueup.io.load_save import draft_files
from trueup.io.predictions import PredictionFile
from trueup.io.source import MISSING, Chunk, LabelParser, as_list, object_array, row_columns, suffix_of

ROWS = 16384
"""Rows of a table that are processed at a time."""


def rewrite(
    file: PredictionFile,
    target: StrPath,
    function: Callable[[np.ndarray], np.ndarray],
    *,
    split: str | None = None,
    probs: bool = False,
    storage_options: StorageOptions = None,
) -> tuple[int, int]:
    """Write a file's rows with `function` of their logits and all other columns; return numbers of rows and classes.

    Columns keep their order, names and values; rows without a label stay. Logits become `logits` or `logit_0` …, or
    with `probs` their softmax `probs` or `prob_0` …. In tables, columns of classes given by name keep it. A stated
    confidence stays, and the new one follows as `<name>_calibrated`. Formats of arrays drop columns that they cannot
    hold, with a warning. The file is either complete or absent.
    """
    _, write = FORMATS[suffix_of(target)]
    is_array = suffix_of(target) in ARRAYS
    label = None if file.fields.confidence is not None else file.label_column(split)
    total = classes = 0

    def chunks() -> Iterator[Chunk]:
        nonlocal total, classes
        fields = file.fields
        plan = file.plan(split, labelled=False, others=())
        rows = sys.maxsize if suffix_of(file.path) in ARRAYS else ROWS
        floor = file.find_floor(plan, rows) if fields.probs or fields.confidence else None
        parse = LabelParser(file.class_names or (), column=label or "labels")
        axis = -1 if fields.class_axis == "last" else 1
        for chunk in file.source.read(plan._replace(others=_other_columns(file, plan.logits, split)), rows):
            columns = {_without_split(name, split): column for name, column in chunk.others.items()}
            if fields.confidence is not None:
                after, columns = _calibrated_confidence(file, chunk, columns, function, floor)
            else:
                after = np.asarray(function(file.to_logits(chunk.logits, floor)))
            labels, name = None, _without_split(label or "", split)
            if label is not None and is_array:
                labels = _label_array(columns.pop(name), parse)
            elif name in ("label", "labels"):
                columns = {"label" if key == name else key: column for key, column in columns.items()}
            total, classes = total + len(chunk.logits), after.shape[axis]
            numbers = NUMPY.softmax(after.astype(np.float64), axis).astype(after.dtype) if probs else after
            kept = numbers if fields.confidence is None or is_array else np.empty(len(after))
            if not is_array and not isinstance(fields.logits, str):
                columns = {**_class_columns(fields.logits, numbers), **columns}
                kept = np.empty(len(after))
            yield Chunk(kept, labels, columns, "probs" if probs else "logits")

    with errors_name_file(file.name):
        parts = chunks()
        first = next(parts)
        with draft_files(target, storage_options, labels=first.labels is not None) as drafts:
            write(chain([first], parts), *drafts)
    return total, classes


def _class_columns(names: Sequence[str], numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of the classes; absent options are empty cells."""
    cells = numbers
    if (absent := np.isneginf(numbers)).any():
        cells = numbers.astype(object)
        cells[absent] = None
    return {name: cells[:, k] for k, name in enumerate(names)}


def _calibrated_confidence(
    file: PredictionFile,
    chunk: Chunk,
    columns: Mapping[str, Any],
    function: Callable[[np.ndarray], np.ndarray],
    floor: float | None,
) -> tuple[np.ndarray, dict[str, Any]]:
    name = file.fields.confidence
    stated = np.asarray(chunk.logits, dtype=np.float64).reshape(-1)
    is_stated = ~np.isnan(stated)
    after = np.zeros((len(stated), 2))
    after[is_stated] = function(file.to_logits(stated[is_stated], floor))
    new = 1 / (1 + np.exp(after[:, 0] - after[:, 1]))
    values = [float(p) if ok else None for p, ok in zip(new, is_stated, strict=True)]
    updated: dict[str, Any] = {}
    for key, column in columns.items():
        updated[key] = column
        if key == name:
            updated[f"{name}_calibrated"] = object_array(values)
    return after, updated


def _other_columns(file: PredictionFile, logits: Sequence[str], split: str | None) -> list[str]:
    names = row_columns(file.source, logits[0])
    kept = [name for name in names if file.fields.confidence or name not in logits]
    if split is not None:
        kept = [name for name in kept if name.startswith(f"{split}_") or not name.startswith(("val_", "test_"))]
    return kept


def _without_split(name: str, split: str | None) -> str:
    return name.removeprefix(f"{split}_") if split else name


def _label_array(column: Any, parse: LabelParser) -> np.ndarray:
    labels = parse.array(column if isinstance(column, np.ndarray) else object_array(as_list(column)))
    if labels.dtype == np.int64 and (labels == MISSING).any():
        hint = "write .csv, .jsonl or .parquet"
        raise InputError(parse.column, "be there in each row of an array", "rows without", hint)
    return labels


def rewritten_name(path: str, root: str, target: str) -> str:
    """Return the path of a shard below the target folder, with its partitions.

    >>> rewritten_name("in/region=eu/0.csv", "in", "out")
    'out/region=eu/0.csv'
    """
    plain, base = path.replace("\\", "/"), root.replace("\\", "/").rstrip("/")
    inner = plain.removeprefix(f"{base}/")
    if inner == plain:
        *folders, name = PurePath(plain).parts
        inner = "/".join([*(folder for folder in folders if "=" in folder), name])
    return f"{target.rstrip('/')}/{inner}"
