"""The interface between readers and writers of all formats.

An open file has columns, found by names that the user gives or by default names. Its rows come in chunks, and labels
are numbers or names of classes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from glob import has_magic
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trueup._core.arrays import as_logits
from trueup._core.errors import Hint, InputError

MISSING = -(2**63)
"""The label of a row without one."""

MAX_INLINE_TEXT = 32
"""Longest text, in characters, that is stored in every row."""

_PROBABILITIES = re.compile(r"(.*_)?prob(s|_\d+)")

_GAPS = frozenset({"", "nan", "na", "null", "none"})
"""Spellings of an empty cell in tables, in lower case."""


def is_gap(value: Any) -> bool:
    """Return whether a cell is empty.

    >>> is_gap(" "), is_gap("NaN"), is_gap(None), is_gap("0")
    (True, True, True, False)
    """
    return value is None or (isinstance(value, str) and value.strip().lower() in _GAPS)


@dataclass(frozen=True)
class LabelParser:
    """Converts labels of a file to class numbers: whole numbers, or names of classes.

    Names are looked up first. If some names are numbers themselves, all labels must be names, since a number would be
    ambiguous. With `binary`, labels are right or wrong: 1 or 0, true or false.

    >>> parse = LabelParser(("cat", "dog"))
    >>> parse("dog"), parse("1"), parse(0.0), parse("") == MISSING
    (1, 1, 0, True)
    >>> LabelParser(("3", "5"))(5)
    1
    """

    names: tuple[str, ...] = ()
    binary: bool = False
    column: str = "labels"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        if self.binary:
            return {"true": 1, "false": 0, "True": 1, "False": 0, "TRUE": 1, "FALSE": 0}
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def takes_numbers(self) -> bool:
        """Whether a number may be a class number."""
        return not any(_is_integer(name) for name in self.names)

    def __call__(self, value: Any) -> int:
        """Parse one label."""
        if value is None:
            return MISSING
        if isinstance(value, bool | np.bool_) and (self.binary or not self.names):
            return int(value)
        text = str(value).strip()
        if text in self._numbers:
            return self._numbers[text]
        if is_gap(text):
            return MISSING
        try:
            number = int(text) if _is_integer(text) else float(text)
            if not float(number).is_integer() or (self.binary and number not in (0, 1)):
                raise ValueError
            if not self.takes_numbers:
                return self._numbers[str(int(number))]
            if not -(2**63) < number < 2**63:
                raise ValueError
            return int(number)
        except (ValueError, OverflowError, KeyError):
            raise self._refuse(value, text) from None

    def array(self, values: np.ndarray) -> np.ndarray:
        """Parse the labels of an array; whole numbers without translation are returned unchanged."""
        if values.ndim != 1 or values.dtype.kind not in "USObiuf":
            return values  # the check of the pair raises the error
        if values.dtype.kind in "biuf" and self.takes_numbers and not self.binary:
            return values
        return np.array([self(value) for value in values.tolist()], dtype=np.int64)

    def _refuse(self, value: Any, text: str) -> InputError:
        shown = repr(text) if isinstance(value, str) else text
        if self.binary:
            return InputError(self.column, "be 0 or 1, wrong or right", shown)
        if self.names:
            near = get_close_matches(text, self.names, n=1)
            listed = ", ".join(self.names[:8]) + (" …" if len(self.names) > 8 else "")
            hint = f"did you mean {near[0]}?" if near else Hint.CLASSES
            return InputError(self.column, f"be classes ({listed})", shown, hint)
        return InputError(self.column, "be whole numbers", shown, Hint.CLASSES)


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", text) is not None


class Chunk(NamedTuple):
    """Some rows of a file.

    `logits` are (n, classes), or (n,) if one column of numbers was requested. A label may be `MISSING`. `others` are
    columns as the format stores them: NumPy or Arrow arrays.
    """

    logits: np.ndarray
    labels: np.ndarray | None
    others: Mapping[str, Any]
    name: str = "logits"
    """The name of the numbers in a written file: `logits`, or `probs`."""


class Plan(NamedTuple):
    """The columns to read from a source."""

    logits: Sequence[str]
    """One column (n, classes), or one column per class."""
    labels: str | None = None
    others: Sequence[str] = ()
    """Columns that are returned unchanged."""
    parse: LabelParser | None = None
    gaps: bool = False
    """Whether an empty cell among the numbers is NaN instead of an error."""
    absent: float | None = None
    """Value of an empty cell among several classes, which is an absent option: −∞ for logits and NaN for probabilities.
    """


class Source(NamedTuple):
    """An open file: its columns, each with a description, and two functions.

    `read(plan, rows)` yields chunks of at most `rows` rows, at least one chunk, which may be empty. `width(logits)`
    returns the number of logits per row.
    """

    columns: dict[str, str]
    read: Callable[[Plan, int], Iterator[Chunk]]
    width: Callable[[Sequence[str]], int]
    class_names: Mapping[str, tuple[str, ...]] = {}
    """Class names by the column of labels, if the file has them."""
    hidden: frozenset[str] = frozenset()
    """Columns that are computed from others and are not in the file itself."""
    rows: Mapping[str, int] = {}
    """Number of rows of each column, in formats where it may differ."""


Reader: TypeAlias = Callable[..., AbstractContextManager[Source]]
"""Receives the path of the file, and options of CSV files."""
Writer: TypeAlias = Callable[..., None]
"""Receives an iterator of chunks and the paths of the files."""


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix that names the format, in lower case, with its compression.

    >>> suffix_of("a/net.JSONL.gz"), suffix_of("net.npz")
    ('.jsonl.gz', '.npz')
    """
    suffixes = PurePath(path).suffixes
    suffix = suffixes[-1].lower() if suffixes else ""
    return suffixes[-2].lower() + suffix if suffix == ".gz" and len(suffixes) > 1 else suffix


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a name is an address that fsspec opens, not a path.

    >>> is_address("s3://bucket/net.npz"), is_address("net.npz")
    (True, False)
    """
    return "://" in os.fspath(path)


def is_sharded(where: str) -> bool:
    """Return whether a name means several files: a folder, a pattern, or an address.

    >>> is_sharded("preds/*.parquet"), is_sharded("val.npz")
    (True, False)
    """
    return is_address(where) or Path(where).is_dir() or (has_magic(where) and not Path(where).exists())


def file_list(path: Path) -> tuple[Path, ...]:
    """Return the files that hold the pair: `x.npy` and `x.labels.npy`; other formats use one file."""
    return (path, path.with_suffix(f".labels{path.suffix}")) if path.suffix.lower() == ".npy" else (path,)


def matrix(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the only column unchanged, or stack one column per class; without columns, return an empty array.

    >>> matrix([np.array([1, 2]), np.array([3, 4])])
    array([[1, 3],
           [2, 4]])
    """
    if not parts:
        return np.empty(0)
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


def drop_missing(chunk: Chunk, *, gaps: bool = False) -> tuple[Chunk, int]:
    """Drop rows without a label or, if there may be gaps, without a number; return the number dropped.

    >>> chunk, dropped = drop_missing(Chunk(np.array([0.5, np.nan, 0.1]), np.array([1, 0, MISSING]), {}), gaps=True)
    >>> chunk.logits, chunk.labels, dropped
    (array([0.5]), array([1]), 2)
    """
    kept = np.ones(len(chunk.logits), bool)
    if chunk.labels is not None and chunk.labels.dtype == np.int64 and chunk.labels.shape == kept.shape:
        kept &= chunk.labels != MISSING
    if gaps and chunk.logits.dtype.kind == "f":
        kept &= ~np.isnan(chunk.logits.reshape(len(kept), -1)).any(axis=1)
    if kept.all():
        return chunk, 0
    labels = None if chunk.labels is None else chunk.labels[kept]
    others = {
        name: column[kept] if isinstance(column, np.ndarray) else column.take(np.flatnonzero(kept))
        for name, column in chunk.others.items()
    }
    return Chunk(chunk.logits[kept], labels, others), int((~kept).sum())


def join_chunks(parts: Sequence[Chunk], column_of: Callable[[list[Any]], Any]) -> Chunk:
    """Join the rows of several chunks; `column_of` makes each other column from all its values."""
    first = parts[0]
    labels = None if first.labels is None else np.concatenate([part.labels for part in parts])
    others = {name: column_of([x for part in parts for x in as_list(part.others[name])]) for name in first.others}
    return Chunk(np.concatenate([part.logits for part in parts]), labels, others, first.name)


def gather(chunks: Iterable[Chunk]) -> Chunk:
    """Join all chunks into one."""
    parts = list(chunks)
    return parts[0] if len(parts) == 1 else join_chunks(parts, simplify)


def plain_logits(logits: Any) -> np.ndarray:
    """Check logits and convert them to a type that files have: bfloat16 becomes float32."""
    return np.ascontiguousarray(as_logits(logits, padding=False))


def as_list(column: Any) -> list[Any]:
    """Return the values of a column as Python objects; rows with equal dictionary entries share one object."""
    if not hasattr(column, "dictionary"):
        return column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
    names = [*column.dictionary.to_pylist(), None]
    return [names[-1 if code is None else code] for code in column.indices.to_pylist()]


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return an array of objects, one per value; values may be lists."""
    return np.fromiter(values, object, len(values))


def simplify(column: Any) -> np.ndarray:
    """Convert a column or list to an array of integers, floats or short texts if all values are such, else of objects.

    An array of texts takes the memory of its longest text in every row, so long texts remain shared objects.

    >>> simplify([1, 2]).dtype.kind, simplify(["a", "b"]).dtype.kind, simplify([1, None]).dtype.kind
    ('i', 'U', 'O')
    """
    values = column if isinstance(column, list) else as_list(column)
    kinds = {type(value) for value in values}
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in values):
        return np.array(values, np.int64)
    if kinds in ({float}, {bool}) or (kinds == {str} and max(map(len, values)) <= MAX_INLINE_TEXT):
        return np.array(values)
    return object_array(values)


def group_values(column: Any) -> np.ndarray:
    """Convert a column of groups or clusters; empty cells form a group of their own.

    >>> group_values(np.array(["a", ""])).tolist()
    ['a', '(missing)']
    """
    return simplify(["(missing)" if value is None or value == "" else value for value in as_list(column)])


def numbers_of(column: Any, name: str) -> np.ndarray:
    """Convert a column to float64, with NaN for empty cells."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        return np.array(column, dtype=np.float64)
    numbers = []
    for row, value in enumerate(as_list(column)):
        try:
            numbers.append(math.nan if is_gap(value) else float(value))
        except (TypeError, ValueError):
            raise InputError(name, "be numbers", repr(value), where=f"row {row}") from None
    return np.array(numbers)


def find_columns(
    columns: Mapping[str, str], logits: str | Sequence[str], labels: str | None, probs: bool, split: str | None
) -> tuple[list[str], str | None]:
    """Find the columns of logits and, unless `labels` is None, of labels; else the error lists all columns.

    >>> find_columns({"logit_0": "", "logit_1": "", "label": ""}, "logits", "labels", False, None)
    (['logit_0', 'logit_1'], 'label')
    """
    prefix = f"{split}_" if split else ""
    if isinstance(logits, str):
        # The array of a .npy file is called logits here even if `probs` says that it holds probabilities.
        accepted = [prefix + name for name in (("probs", "logits") if probs and logits == "logits" else (logits,))]
        names = next(filter(None, (_numbered_columns(columns, name) for name in accepted)), [])
        missing = [] if names else accepted[:1]
    else:
        names = list(logits)
        missing = [name for name in names if name not in columns] if names else ["logits"]
    accepted = [] if labels is None else label_names(labels, split)
    label = next((name for name in accepted if name in columns), None)
    if missing or (accepted and label is None):
        missing += [] if label else accepted[:1]
        raise _missing(columns, missing, probs, split)
    if not probs and any(_PROBABILITIES.fullmatch(name) for name in names):
        raise InputError(names[0], "hold logits", "probabilities by its name", Hint.PROBS)
    return names, label


def label_names(labels: str, split: str | None) -> list[str]:
    """Return the accepted names of the label column.

    >>> label_names("labels", "val")
    ['val_labels', 'val_label']
    """
    prefix = f"{split}_" if split else ""
    return [prefix + name for name in (("labels", "label") if labels == "labels" else (labels,))]


def splits_in(columns: Mapping[str, str], labels: str = "labels") -> tuple[str | None, ...]:
    """Return the splits to read: val and test if both have labels, else the whole file (None), else the only split.

    >>> splits_in({"val_logits": "", "val_labels": "", "test_logits": "", "test_labels": ""})
    ('val', 'test')
    """

    def has(split: str | None) -> bool:
        return any(name in columns for name in label_names(labels, split))

    splits = tuple(split for split in ("val", "test") if has(split))
    return splits if len(splits) == 2 or (splits and not has(None)) else (None,)


def _numbered_columns(columns: Mapping[str, str], name: str) -> list[str]:
    """Find the array of this name, else numbered columns: `logits` is also `logit_0`, `logit_1`, …."""
    if name in columns:
        return [name]
    stem = re.escape(name.removesuffix("s"))
    matches = [match for column in columns if (match := re.fullmatch(rf"{stem}s?_(\d+)", column))]
    matches.sort(key=lambda match: int(match[1]))
    numbers = [int(match[1]) for match in matches]
    if numbers != list(range(len(numbers))):
        raise InputError(f"columns {matches[0].string} …", f"be numbered 0..{len(numbers) - 1}", _list(columns))
    return [match.string for match in matches]


_STATED_WORDS = ("confidence", "risk", "prob")
"""Parts of names of columns that may hold one probability per row."""


def _missing(columns: Mapping[str, str], missing: Sequence[str], probs: bool, split: str | None) -> InputError:
    splits = [name.removesuffix("_labels") for name in columns if name.endswith("_labels")]
    hint: Hint | str | None = _nearest(columns, missing)
    needs_numbers = not {"logits", "probs"}.isdisjoint(missing)
    one_per_row = not any(re.match(r"\(\d+, ", shape) for shape in columns.values())
    named = any(word in name.lower() for name in columns for word in _STATED_WORDS)
    if splits and not split:
        hint = Hint.SPLIT
    elif not probs and any(_PROBABILITIES.fullmatch(name) for name in columns):
        hint = Hint.PROBS
    elif needs_numbers and one_per_row and (named or (len(columns) == 2 and hint is None)):
        hint = Hint.STATED
    elif "logits" in missing and {"mean", "std"} <= set(columns):
        hint = Hint.FORECAST
    elif needs_numbers and hint is None and len(columns) >= 2:
        hint = Hint.COLUMNS
    choices = splits if hint is Hint.SPLIT else _suggest_columns(columns) if hint is Hint.COLUMNS else ()
    return InputError("the file", f"have {' and '.join(missing)}", _list(columns), hint, choices=choices)


_LABEL_WORDS = ("label", "target", "truth", "class", "outcome", "y")
"""Names of columns that may hold labels."""


def _suggest_columns(columns: Mapping[str, str]) -> tuple[str, str]:
    """Return columns of logits, separated by commas, and of labels, that may be meant.

    >>> _suggest_columns({"scores": "(600, 3) float64", "truth": "(600,) int64"})
    ('scores', 'truth')
    >>> _suggest_columns({"cat": "", "dog": "", "label": ""})
    ('cat,dog', 'label')
    """
    wide = next((name for name, shape in columns.items() if re.match(r"\(\d+, ", shape)), None)
    others = [name for name in columns if name != wide]
    label = next((name for name in others if name.lower().rstrip("s") in _LABEL_WORDS), others[-1])
    classes = [name for name in others if name != label]
    return wide or (",".join(classes) if len(classes) <= 10 else f"{classes[0]},…,{classes[-1]}"), label


def column_of_split(columns: Mapping[str, str], name: str, split: str | None) -> str:
    """Return the column of this name in a split: for `val` it is `val_region` if the file has one, else `region`.

    >>> column_of_split({"val_region": "", "patient": ""}, "region", "val")
    'val_region'
    """
    split_name = f"{split}_{name}"
    return split_name if split and split_name in columns else name


def row_columns(source: Source, like: str) -> list[str]:
    """Return the file's own columns with as many rows as the column `like`, without nested fields."""
    names = [name for name in source.columns if name not in source.hidden]
    if source.rows:  # arrays of another length do not belong to the rows
        names = [name for name in names if source.rows.get(name) == source.rows.get(like)]
    return [name for name in names if "." not in name or name.partition(".")[0] not in source.columns]


def require_columns(columns: Mapping[str, str], names: Sequence[str]) -> None:
    """Check that columns exist; else the error lists the columns and the nearest name.

    >>> require_columns({"category": "", "correct": ""}, ["categroy"])
    Traceback (most recent call last):
        ...
    trueup._core.errors.InputError: the file must have categroy, got 'category', 'correct'; did you mean category?
    """
    missing = [name for name in names if name not in columns]
    if missing:
        raise InputError("the file", f"have {' and '.join(missing)}", _list(columns), _nearest(columns, missing))


def _nearest(columns: Mapping[str, str], missing: Sequence[str]) -> str | None:
    near = [match for name in missing for match in get_close_matches(name, columns, n=1, cutoff=0.7)]
    return f"did you mean {' and '.join(near)}?" if near else None


def _list(columns: Mapping[str, str], most: int = 12) -> str:
    words = [f"{name!r} {description}".strip() for name, description in columns.items()]
    more = f", … {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) or "nothing") + more
