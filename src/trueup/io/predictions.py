"""Predictions and their files: .npz, .npy, .csv, .parquet and .safetensors, never pickles.

In a file the arrays are `logits` (n, classes) and `labels` (n,); in a table there is one column a class (`logit_0`,
`logit_1`, …) or a column of lists, plus `label`. A file with both halves has `val_logits`, `val_labels`, `test_logits`
and `test_labels`. Probabilities are read only when they are asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trueup.core.arrays import (
    ROUNDING,
    Array,
    as_labels,
    as_logits,
    as_pair,
    as_tensors,
    from_probs,
    resolution,
    warn_of_zeros,
)
from trueup.core.errors import InputError
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.io.columns import find_columns, label_names, splits_in
from trueup.io.formats import FORMATS, Source, file_list


class Predictions(NamedTuple):
    """What a network said and what was true, in the order every function takes them: `fit(*predictions)`.

    >>> p = Predictions(np.array([[2.0, 0.0], [0.5, 1.5]]), np.array([0, 1]))
    >>> p.logits.argmax(axis=1) == p.labels
    array([ True,  True])
    """

    logits: Array
    labels: Array


def load(
    path: str | os.PathLike[str],
    *,
    logits: str | Sequence[str] = "logits",
    labels: str = "labels",
    probs: bool = False,
    split: str | None = None,
    mmap: bool = False,
) -> Predictions:
    """Read predictions from a file, whose suffix tells its format.

    `logits` names the array or, as a list, the columns; `split="val"` reads `val_logits` with `val_labels`;
    `probs=True` reads probabilities p as log p; `mmap=True` leaves the logits of a `.npy` file on disk. Labels come
    back as int64.
    A file that does not hold what is wanted raises one `ValueError` that says what it holds.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/net.npz", probs=np.array([[0.8, 0.2]]), labels=np.array([1]))
    ...     load(f"{folder}/net.npz", probs=True)
    Predictions(logits=array([[-0.22314355, -1.60943791]]), labels=array([1]))
    """
    with open_predictions(path, logits=logits, labels=labels, probs=probs) as file:
        if mmap and file.path.suffix.lower() != ".npy":
            raise ValueError(f"{file.path}: mmap=True needs a .npy file")
        return file.load(split, mmap=mmap)


@contextmanager
def open_predictions(
    path: str | os.PathLike[str],
    *,
    logits: str | Sequence[str] = "logits",
    labels: str = "labels",
    probs: bool = False,
) -> Iterator[PredictionFile]:
    """Open a file once, to look at what it holds and read any of its splits.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     z, y = np.zeros((5, 3)), np.zeros(5, int)
    ...     np.savez(f"{folder}/net.npz", val_logits=z, val_labels=y, test_logits=z, test_labels=y)
    ...     with open_predictions(f"{folder}/net.npz") as file:
    ...         {split: file.load(split).logits.shape for split in file.splits}
    {'val': (5, 3), 'test': (5, 3)}
    """
    file = Path(path)
    reader, _ = _format(file)
    require_file(file)
    with ExitStack() as stack:
        with errors_name_file(file):
            source = stack.enter_context(reader(file))
        yield PredictionFile(file, source, logits, labels, probs)


@dataclass(frozen=True)
class PredictionFile:
    """An open file of predictions, from `open_predictions`."""

    path: Path
    source: Source
    logits: str | Sequence[str]
    labels: str
    probs: bool

    @property
    def splits(self) -> tuple[str | None, ...]:
        """The splits to read: val and test if the file has both, else its whole (None), else the one it has."""
        return splits_in(self.source.columns, self.labels)

    def has_labels(self, split: str | None = None) -> bool:
        """Whether the file names labels."""
        return any(name in self.source.columns for name in label_names(self.labels, split))

    def load(self, split: str | None = None, *, mmap: bool = False) -> Predictions:
        """All rows of a split; see `load`."""
        parts = list(self.stream(sys.maxsize, split))
        whole = parts[0] if len(parts) == 1 else Predictions(*map(np.concatenate, zip(*parts, strict=True)))
        # On a plain load nothing may change when the file does.
        copied = not mmap and isinstance(whole.logits, np.memmap)
        return whole._replace(logits=np.array(whole.logits)) if copied else whole

    def load_logits(self, split: str | None = None) -> np.ndarray:
        """The logits alone; see `load_logits`."""
        with errors_name_file(self.path):
            names, _ = find_columns(self.source.columns, self.logits, None, self.probs, split)
            parts = [z for z, _ in self.source.read(names, None, sys.maxsize)]
            whole = np.concatenate(parts) if len(parts) > 1 else np.array(parts[0])
            return _plain(from_probs(whole) if self.probs else whole)

    def width(self, split: str | None = None) -> int:
        """How many logits a row has."""
        with errors_name_file(self.path):
            names, _ = find_columns(self.source.columns, self.logits, self.labels, self.probs, split)
            return self.source.width(names)

    def stream(self, rows: int, split: str | None = None, *, checked_before: bool = False) -> Iterator[Predictions]:
        """As `stream`; of a file `checked_before`, the logits are taken to be finite as they were then."""
        start = 0
        classes: int | None = None
        with errors_name_file(self.path):
            self._require_labels()
            names, label = find_columns(self.source.columns, self.logits, self.labels, self.probs, split)
            parts: Iterable[tuple[np.ndarray, Any]] = self.source.read(names, label, rows)
            floor = None
            if self.probs and rows == sys.maxsize:  # all of them are wanted at once anyway
                floor = _floor(parts := list(parts))
            elif self.probs:
                with open_predictions(self.path, logits=self.logits, labels=self.labels, probs=True) as first:
                    floor = _floor(first.source.read(names, None, rows))
            for z, y in parts:
                with _errors_name_row(start):
                    part = _check(z, y, self.probs, floor, checked_before)
                    if classes not in (None, part.logits.shape[1]):
                        raise InputError("logits", f"have {classes} classes as before", str(part.logits.shape[1]))
                classes = part.logits.shape[1]
                start += len(part.logits)
                yield part

    def _require_labels(self) -> None:
        """The labels of a .npy file are a file of their own."""
        for file in file_list(self.path):
            if not file.is_file():
                raise FileNotFoundError(f"{file}: no such file; the labels of {self.path.name} are wanted beside it")


def _floor(parts: Iterable[tuple[np.ndarray, Any]]) -> float | None:
    """What exact zeros are raised to, the same in all parts; None where there are none, or a part is not sound."""
    zeros = numbers = 0
    smallest = []  # positive number of each part
    for z, _ in parts:
        if not (z.dtype.kind == "f" and z.size and z.min() > -ROUNDING and z.max() < 2):  # false for NaN too
            return None  # the check of that part says what is wrong
        zeros, numbers = zeros + int((z <= 0).sum()), numbers + z.size
        smallest.append(z.min(initial=1.0, where=z > 0))
    if not zeros:
        return None
    warn_of_zeros(zeros, numbers, floor := resolution(np.array(smallest)))
    return floor


def stream(
    path: str | os.PathLike[str],
    *,
    rows: int = 65536,
    logits: str | Sequence[str] = "logits",
    labels: str = "labels",
    probs: bool = False,
    split: str | None = None,
) -> Iterator[Predictions]:
    """Read predictions at most `rows` at a time, each part checked, in the memory of about one part.

    The parts in their order are what `load` returns with the same options. There is always a first part, though a file
    of no rows makes it an empty one.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(f"{folder}/net.npz", (np.zeros((5, 3)), [0, 1, 2, 0, 1]))
    ...     [part.labels.tolist() for part in stream(f"{folder}/net.npz", rows=2)]
    [[0, 1], [2, 0], [1]]
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows must be a positive whole number, got {rows!r}")
    _format(Path(path))
    require_file(Path(path))
    return _stream(path, rows, split, logits=logits, labels=labels, probs=probs)


def _stream(path: str | os.PathLike[str], rows: int, split: str | None, **options: Any) -> Iterator[Predictions]:
    with open_predictions(path, **options) as file:
        yield from file.stream(rows, split)


def save(path: str | os.PathLike[str], predictions: tuple[Any, Any]) -> None:
    """Write a pair of logits and labels to a file that is either complete or not there.

    The new file is written beside the old one and takes its place at once, so an interruption leaves the old one whole.
    Values and types survive (bfloat16 as float32, which holds it exactly); a CSV file keeps values but not types.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(f"{folder}/net.csv", ([[2.5, 0.1]], [0]))
    ...     print(Path(folder, "net.csv").read_text(), end="")
    logit_0,logit_1,label
    2.5,0.1,0
    """
    _, write = _format(Path(path))
    z, y = as_tensors(*predictions, doubt=False)
    with atomic_write(*file_list(Path(path))) as drafts:
        write(_plain(z), np.ascontiguousarray(y.cpu().numpy()), *drafts)


def load_logits(
    path: str | os.PathLike[str],
    *,
    logits: str | Sequence[str] = "logits",
    probs: bool = False,
    split: str | None = None,
) -> np.ndarray:
    """Read the logits alone, of a file that need not have labels: what a calibrator is applied to in use.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_logits(f"{folder}/new.csv", [[2.5, 0.5]])
    ...     load_logits(f"{folder}/new.csv")
    array([[2.5, 0.5]])
    """
    with open_predictions(path, logits=logits, probs=probs) as file:
        return file.load_logits(split)


def save_logits(path: str | os.PathLike[str], logits: Any) -> None:
    """Write logits without labels, to a file that is either complete or not there."""
    _, write = _format(Path(path))
    with atomic_write(Path(path)) as (draft,):
        write(_plain(logits), None, draft)


def _plain(logits: Any) -> np.ndarray:
    z = as_logits(logits)
    z = z.float() if z.dtype == torch.bfloat16 else z
    return np.ascontiguousarray(z.cpu().numpy())


def has_labels(path: str | os.PathLike[str], *, labels: str = "labels", split: str | None = None) -> bool:
    """Whether a file names labels."""
    with open_predictions(path, labels=labels) as file:
        return file.has_labels(split)


ROWS_LOOKED_AT = 1000
"""Logits do not become distributions by chance, so a few rows are enough."""


def looks_like_probabilities(logits: Array) -> str | None:
    """One sentence if logits look like probabilities: z ≥ 0 with Σ z = 1 in each row.

    >>> looks_like_probabilities(np.array([[0.9, 0.1], [0.2, 0.8]]))
    'each row sums to 1 like probabilities, but was read as logits'
    >>> looks_like_probabilities(np.array([[2.0, -1.0]])) is None
    True
    """
    rows = np.asarray(logits[:ROWS_LOOKED_AT], dtype=np.float64)
    if rows.size and rows.min() >= 0 and np.abs(rows.sum(axis=1) - 1).max() <= 1e-3:
        return "each row sums to 1 like probabilities, but was read as logits"
    return None


def _format(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        pickled = "; pickles are never read or written, because they can run code"
        hint = pickled if suffix in (".pt", ".pth", ".pkl", ".pickle", ".joblib") else ""
        raise ValueError(f"{path}: the suffix must be one of {' '.join(FORMATS)}, got {path.suffix!r}{hint}")
    return FORMATS[suffix]


@contextmanager
def _errors_name_row(start: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise (error.replace(where=f"from row {start} on") if start else error) from None
    except ValueError as error:
        raise ValueError(f"from row {start} on, {error}" if start else str(error)) from None


def _check(logits: np.ndarray, labels: Any, probs: bool, floor: float | None, checked_before: bool) -> Predictions:
    if probs:
        return Predictions(*as_pair(from_probs(logits, floor=floor), labels))
    if checked_before:
        return Predictions(logits, as_labels(labels, logits))
    z, y = as_pair(logits, labels, doubt=False)  # whoever uses them first doubts them
    # A memory map stays one: the door's view of it would forget that it is read-only.
    return Predictions(logits if isinstance(logits, np.memmap) and logits.dtype.isnative else z, y)
