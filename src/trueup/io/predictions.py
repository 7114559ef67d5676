"""Predictions and their files: .npz, .npy, .csv, .parquet and .safetensors, never pickles.

In a file the arrays are `logits` (n, classes) and `labels` (n,); in a table there is one column a class (`logit_0`,
`logit_1`, …) or a column of lists, plus `label`. A file with both halves has `val_logits`, `val_labels`, `test_logits`
and `test_labels`. Probabilities are read only when they are asked for.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trueup.core.arrays import Array, as_labels, as_logits, as_pair, as_tensors, from_probs
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.io.formats import FORMATS, file_list

PROBABILITIES = re.compile(r"(.*_)?prob(s|_\d+)")


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
    file = _parsed(path)
    if mmap and file.suffix.lower() != ".npy":
        raise ValueError(f"{file}: mmap=True needs a .npy file")
    parts = list(chunks(file, sys.maxsize, logits, labels, probs, split))
    whole = parts[0] if len(parts) == 1 else Predictions(*map(np.concatenate, zip(*parts, strict=True)))
    # On a plain load nothing may change when the file does.
    return whole if mmap or not isinstance(whole.logits, np.memmap) else whole._replace(logits=np.array(whole.logits))


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
    return chunks(_parsed(path), rows, logits, labels, probs, split)


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
    z, y = as_tensors(*predictions)
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
    file = _parsed(path)
    reader, _ = _format(file)
    with errors_name_file(file), reader(file) as source:
        names, _ = _resolve(source.columns, logits, None, probs, split)
        parts = [z for z, _ in source.read(names, None, sys.maxsize)]
        whole = np.concatenate(parts) if len(parts) > 1 else np.array(parts[0])
        return _plain(from_probs(whole) if probs else whole)


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
    file = _parsed(path)
    reader, _ = _format(file)
    with errors_name_file(file), reader(file) as source:
        return any(name in source.columns for name in _accepted(labels, split))


def _parsed(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    _format(file)
    return require_file(file)


def _format(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        pickled = "; pickles are never read or written, because they can run code"
        hint = pickled if suffix in (".pt", ".pth", ".pkl", ".pickle", ".joblib") else ""
        raise ValueError(f"{path}: the suffix must be one of {' '.join(FORMATS)}, got {path.suffix!r}{hint}")
    return FORMATS[suffix]


def chunks(
    path: Path,
    rows: int,
    logits: str | Sequence[str],
    labels: str,
    probs: bool,
    split: str | None,
    *,
    passed: bool = False,
) -> Iterator[Predictions]:
    """As `stream`, without a second look at every number of a file that has `passed` before."""
    reader, _ = _format(path)
    require_file(path)
    start = 0
    classes: int | None = None
    with errors_name_file(path), reader(path) as source:
        _expect_labels(path)
        names, label = _resolve(source.columns, logits, labels, probs, split)
        for z, y in source.read(names, label, rows):
            try:
                part = _checked(z, y, probs, passed)
                if classes not in (None, part.logits.shape[1]):
                    raise ValueError(f"logits must have {classes} classes as before, got {part.logits.shape[1]}")
            except ValueError as error:
                raise ValueError(f"from row {start} on, {error}" if start else str(error)) from None
            classes = part.logits.shape[1]
            start += len(part.logits)
            yield part


def _expect_labels(path: Path) -> None:
    """The labels of a .npy file are a file of their own."""
    for file in file_list(path):
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; the labels of {path.name} are wanted beside it")


def _checked(logits: np.ndarray, labels: Any, probs: bool, passed: bool = False) -> Predictions:
    if probs:
        return Predictions(*as_pair(from_probs(logits), labels))
    if passed:
        return Predictions(logits, as_labels(labels, logits))
    z, y = as_pair(logits, labels)
    # A memory map stays one: the door's view of it would forget that it is read-only.
    return Predictions(logits if isinstance(logits, np.memmap) and logits.dtype.isnative else z, y)


def _resolve(
    columns: Mapping[str, str], logits: str | Sequence[str], labels: str | None, probs: bool, split: str | None
) -> tuple[list[str], str | None]:
    """The columns' own names, or a ValueError with all that the file holds."""
    prefix = f"{split}_" if split else ""
    if isinstance(logits, str):
        # The array of a .npy file has no name of its own, so there `probs` alone says what it is.
        wanted = [prefix + name for name in (("probs", "logits") if probs and logits == "logits" else (logits,))]
        names = next(filter(None, (_find(columns, name) for name in wanted)), [])
        missing = [] if names else wanted[:1]
    else:
        names = list(logits)
        missing = [name for name in names if name not in columns] if names else ["logits"]
    accepted = [] if labels is None else _accepted(labels, split)
    label = next((name for name in accepted if name in columns), None)
    if missing or (accepted and label is None):
        missing += [] if label else accepted[:1]
        raise ValueError(f"wanted {' and '.join(missing)}, found {_listed(columns)}{_hint(columns, probs, split)}")
    if not probs and any(PROBABILITIES.fullmatch(name) for name in names):
        raise ValueError(f"{names[0]} holds probabilities by its name; say probs=True to read them")
    return names, label


def _accepted(labels: str, split: str | None) -> list[str]:
    prefix = f"{split}_" if split else ""
    return [prefix + name for name in (("labels", "label") if labels == "labels" else (labels,))]


def _find(columns: Mapping[str, str], name: str) -> list[str]:
    """The array of that name, else one column a class: `logits` is also `logit_0`, `logit_1`, …, by number."""
    if name in columns:
        return [name]
    stem = re.escape(name.removesuffix("s"))
    matches = [match for column in columns if (match := re.fullmatch(rf"{stem}s?_(\d+)", column))]
    matches.sort(key=lambda match: int(match[1]))
    numbers = [int(match[1]) for match in matches]
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"columns {matches[0].string} … must be numbered 0..{len(numbers) - 1}, got {_listed(columns)}"
        )
    return [match.string for match in matches]


def _listed(columns: Mapping[str, str], most: int = 12) -> str:
    words = [f"{name!r} {what}".strip() for name, what in columns.items()]
    more = f", … {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) or "nothing") + more


def _hint(columns: Mapping[str, str], probs: bool, split: str | None) -> str:
    halves = [name.removesuffix("_labels") for name in columns if name.endswith("_labels")]
    if halves and not split:
        return "; choose " + " or ".join(f"split={half!r}" for half in halves)
    if not probs and any(PROBABILITIES.fullmatch(name) for name in columns):
        return "; say probs=True to read probabilities"
    return ""
