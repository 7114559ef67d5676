"""Load, stream and save predictions: one call a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trueup.core.arrays import as_tensors
from trueup.core.errors import InputError
from trueup.io.atomic import atomic_write, require_file
from trueup.io.predictions import (
    Fields,
    PredictionFile,
    Predictions,
    PredictionTable,
    format_of,
    open_predictions,
    plain_logits,
)
from trueup.io.source import Chunk, file_list, is_address, suffix_of


def load(
    path: str | os.PathLike[str],
    *,
    logits: str | Sequence[str] = "logits",
    labels: str = "labels",
    probs: bool = False,
    confidence: str | None = None,
    correct: str | None = None,
    classes: Sequence[str] | None = None,
    class_axis: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
    split: str | None = None,
    mmap: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Predictions:
    """Read predictions from a file, whose suffix tells its format.

    `logits` names the array or, as a list, the columns; `split="val"` reads `val_logits` with `val_labels`;
    `probs=True` reads probabilities p as log p; `mmap=True` leaves the logits of a `.npy` file on disk. Labels come
    back as int64. `confidence` names a column of stated confidences in [0, 1] and `correct` the column that says
    whether each was right, 1 or 0 (default "correct"): the pair is then of two classes, wrong and right. `classes`
    names the classes where labels are texts. The path may be an address that fsspec opens, with its `storage_options`.
    Rows without a label or a confidence are left out, and a warning tells how many. Logits of tokens or pixels need
    `class_axis`: "first" for (n, K, …), "last" for (n, …, K); what is labelled `ignore_index` is left out. With
    `multilabel` the logits are log-odds (n, labels), each label an event of its own, and the labels 0 or 1 (n, labels).
    A file that does not hold what is wanted raises one `ValueError` that says what it holds.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/net.npz", probs=np.array([[0.8, 0.2]]), labels=np.array([1]))
    ...     load(f"{folder}/net.npz", probs=True)
    Predictions(1 rows, 2 classes, numpy float64)
    """
    with open_predictions(
        path, storage_options=storage_options, logits=logits, labels=labels, probs=probs, confidence=confidence,
        correct=correct, classes=classes, class_axis=class_axis, ignore_index=ignore_index, multilabel=multilabel,
    ) as file:  # fmt: skip
        if mmap and suffix_of(file.path) != ".npy":
            raise ValueError(f"{file.name}: mmap=True needs a .npy file")
        return file.load(split, mmap=mmap)


def load_table(
    path: str | os.PathLike[str],
    *,
    weights: str | None = None,
    groups: str | Sequence[str] = (),
    clusters: str | None = None,
    columns: str | Sequence[str] = (),
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> PredictionTable:
    """Read predictions as `load` does, with columns of weights, of groups, and any others that are named.

    `clusters` names the column that says which rows are correlated, such as those of one patient. Of tokens and pixels
    the clusters are the texts or images, of labels by the dozen the rows, and their groups the labels.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_text("stated,correct,region\\n0.9,1,eu\\n0.6,0,us\\n")
    ...     table = load_table(f"{folder}/a.csv", confidence="stated", groups="region")
    >>> np.exp(table.logits[:, 1]), table.labels, table.groups
    (array([0.9, 0.6]), array([1, 0]), {'region': array(['eu', 'us'], dtype='<U2')})
    """
    options |= {"weights": weights, "groups": _names(groups), "columns": _names(columns), "clusters": clusters}
    with open_predictions(path, storage_options=storage_options, **options) as file:
        return file.load_table(split)


def load_logits(
    path: str | os.PathLike[str],
    *,
    logits: str | Sequence[str] = "logits",
    probs: bool = False,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Read the logits alone, of a file that need not have labels: what a calibrator is applied to in use.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_logits(f"{folder}/new.csv", [[2.5, 0.5]])
    ...     load_logits(f"{folder}/new.csv")
    array([[2.5, 0.5]])
    """
    with open_predictions(path, storage_options=storage_options, logits=logits, probs=probs) as file:
        return file.load_logits(split)


def stream(
    path: str | os.PathLike[str],
    *,
    rows: int = 65536,
    logits: str | Sequence[str] = "logits",
    labels: str = "labels",
    probs: bool = False,
    confidence: str | None = None,
    correct: str | None = None,
    classes: Sequence[str] | None = None,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
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
    format_of(path)
    if not is_address(path):
        require_file(Path(path))

    def parts() -> Iterator[Predictions]:
        with open_predictions(
            path, storage_options=storage_options, logits=logits, labels=labels, probs=probs, confidence=confidence,
            correct=correct, classes=classes,
        ) as file:  # fmt: skip
            yield from file.stream(rows, split)

    return parts()


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    weights: str | None = None,
    groups: str | Sequence[str] = (),
    clusters: str | None = None,
    columns: str | Sequence[str] = (),
    **options: Any,
) -> PredictionTable:
    """Predictions from rows that are mappings, such as a `Dataset` of Hugging Face; options as those of `load_table`.

    The names of the classes come from the data set's own features, where it has them.

    >>> from_rows([{"logits": [2.0, 0.5], "label": 0}, {"logits": [0.0, 1.0], "label": 1}]).labels
    array([0, 1])
    """
    from trueup.io.prediction_table import source_of_records  # files of arrays need no tables

    held = rows if isinstance(rows, Sequence) or hasattr(rows, "features") else list(rows)
    features = getattr(rows, "features", None) or {}
    names = {name: tuple(feature.names) for name, feature in features.items() if getattr(feature, "names", None)}
    source = source_of_records(lambda: _number_rows(held), word="row")._replace(class_names=names)
    fields = Fields(weights=weights, groups=_names(groups), columns=_names(columns), clusters=clusters, **options)
    return PredictionFile(Path("rows"), "rows", source, fields).load_table()


def save(
    path: str | os.PathLike[str], predictions: tuple[Any, Any], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a pair of logits and labels to a file that is either complete or not there.

    The new file is written beside the old one and takes its place at once, so an interruption leaves the old one whole.
    Values and types survive (bfloat16 as float32, which holds it exactly); .csv and .jsonl keep values but not types.
    The clusters of a table that `collect` gave are written too, as a column of their name, `sample`. The path may be an
    address that fsspec opens, with its `storage_options`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(f"{folder}/net.csv", ([[2.5, 0.1]], [0]))
    ...     print(Path(folder, "net.csv").read_text(), end="")
    logit_0,logit_1,label
    2.5,0.1,0
    """
    _, write = format_of(path)
    z, y = as_tensors(*predictions, doubt=False, padding=False)
    clusters = getattr(predictions, "clusters", None)  # of pixels or tokens: intervals without them would be too narrow
    others = {} if clusters is None else {getattr(predictions, "cluster_name", "cluster"): np.asarray(clusters)}
    chunk = Chunk(plain_logits(z), np.ascontiguousarray(y.cpu().numpy()), others)
    with draft_files(path, storage_options) as drafts:
        write(iter([chunk]), *drafts)


def save_logits(path: str | os.PathLike[str], logits: Any, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write logits without labels, to a file that is either complete or not there."""
    _, write = format_of(path)
    chunk = Chunk(plain_logits(logits), None, {})
    with draft_files(path, storage_options, labels=False) as (draft,):
        write(iter([chunk]), draft)


@contextmanager
def draft_files(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, labels: bool = True
) -> Iterator[list[Path]]:
    """Drafts of the files of predictions at a path or an address, which take their places if the block ends well."""
    if is_address(path):
        from trueup.io.addresses import remote_files

        with remote_files(os.fspath(path), storage_options, labels=labels) as drafts:
            yield drafts
        return
    with atomic_write(*file_list(Path(path))[: 2 if labels else 1]) as drafts:
        yield drafts


def _number_rows(rows: Iterable[Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError("rows", "be mappings of names to values", type(row).__name__, where=f"row {number}")
        yield number, row


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
