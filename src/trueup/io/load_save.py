"""Load and save predictions and fitted values; read predictions in parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup.io.artifacts import is_artifact, load_artifact, save_artifact
from trueup.io.atomic import StorageOptions, StrPath, atomic_write, require_file
from trueup.io.frames import Frame
from trueup.io.prediction_table import source_of_records
from trueup.io.predictions import Fields, PredictionFile, Predictions, PredictionTable, format_of, open_predictions
from trueup.io.source import Chunk, file_list, is_address, plain_logits, suffix_of


def load(
    path: StrPath | Frame,
    *,
    model: Any = None,
    split: str | None = None,
    mmap: bool = False,
    storage_options: StorageOptions = None,
    **fields: Any,
) -> Any:
    """Read predictions, or a value that `save` wrote: a calibrator, a set rule, a threshold, a monitor, a network.

    The suffix of a file of predictions is its format: .npz, .npy, .csv, .jsonl, .parquet or .safetensors. An artifact
    is a .safetensors file that `save` wrote; its content is checked against its hash. Neither can run code.

    Parameters
    ----------
    path
        A file, an address that fsspec opens, or a data frame: a DuckDB relation, or one of polars, Arrow or pandas.
    model
        Network around which a clamped or repaired network is read; its weights are not in the file.
    split
        "val" reads the arrays `val_logits` and `val_labels`.
    mmap
        Leave the logits of a .npy file on disk.
    storage_options
        Options with which fsspec opens an address.
    **fields
        Names of the arrays or columns of predictions. `logits` names the array, or a list of columns; `labels` names
        the labels. `probs=True` reads probabilities p as log p; `probs=False` insists on logits that look like
        probabilities (1 is subtracted, which leaves the softmax unchanged). `confidence` names a column of stated
        confidences in [0, 1]. `correct` then names the column with 1 for right and 0 for wrong (default "correct"), and
        the two classes are wrong and right. `class_names` names the classes of labels that are texts. Logits of tokens
        or pixels need `class_axis`: "first" for (n, K, …), "last" for (n, …, K). Rows labelled `ignore_index` are left
        out. With `multilabel` the logits are log-odds (n, labels), and the labels are 0 or 1 (n, labels).

    Returns
    -------
    Predictions or the saved value
        Labels are int64. Rows without a label or a confidence are left out, and a warning gives their number.

    Raises
    ------
    ValueError
        If the file does not have the requested content. The message lists its content.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/net.npz", probs=np.array([[0.8, 0.2]]), labels=np.array([1]))
    ...     load(f"{folder}/net.npz", probs=True)
    Predictions(1 rows, 2 classes, numpy float64)
    """
    if isinstance(path, str | os.PathLike) and (model is not None or (not is_address(path) and is_artifact(path))):
        if fields or mmap or split is not None:
            raise InputError("the file", "hold predictions, to be read with options", "an artifact", file=path)
        return load_artifact(path, model=model)
    if table_fields := {"sample_weight", "groups", "clusters", "columns"} & fields.keys():
        raise TypeError(f"load reads only logits and labels; load_table also reads {', '.join(sorted(table_fields))}")
    with open_predictions(path, storage_options=storage_options, **fields) as file:
        if mmap and suffix_of(file.path) != ".npy":
            raise ValueError(f"{file.name}: mmap=True needs a .npy file")
        return file.load(split, mmap=mmap)


def load_table(
    path: StrPath | Frame,
    *,
    sample_weight: str | None = None,
    groups: str | Sequence[str] = (),
    clusters: str | None = None,
    columns: str | Sequence[str] = (),
    split: str | None = None,
    storage_options: StorageOptions = None,
    **options: Any,
) -> PredictionTable:
    r"""Read predictions as `load` does, with columns of weights, groups, clusters and others.

    With `class_axis` the clusters are the texts or images. With `multilabel` they are the rows, and the groups are the
    labels.

    Parameters
    ----------
    path
        A file, an address that fsspec opens, or a data frame: a DuckDB relation, or one of polars, Arrow or pandas.
    sample_weight
        Column of sample weights.
    groups
        Columns of groups.
    clusters
        Column that says which rows are correlated, such as those of one patient.
    columns
        Further columns to keep.
    split
        "val" reads the arrays `val_logits` and `val_labels`.
    storage_options
        Options with which fsspec opens an address.
    **options
        The fields of `load`.

    Returns
    -------
    PredictionTable
        Predictions with these columns.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_text("stated,correct,region\n0.9,1,eu\n0.6,0,us\n")
    ...     table = load_table(f"{folder}/a.csv", confidence="stated", groups="region")
    >>> np.exp(table.logits[:, 1]), table.labels, table.groups
    (array([0.9, 0.6]), array([1, 0]), {'region': array(['eu', 'us'], dtype='<U2')})
    """
    options |= {"sample_weight": sample_weight, "groups": groups, "columns": columns, "clusters": clusters}
    with open_predictions(path, storage_options=storage_options, **options) as file:
        return file.load_table(split)


def load_logits(
    path: StrPath | Frame,
    *,
    logits: str | Sequence[str] = "logits",
    probs: bool | None = None,
    split: str | None = None,
    storage_options: StorageOptions = None,
) -> np.ndarray:
    """Read only the logits of a file, which need not have labels, to apply a calibrator to them.

    Parameters
    ----------
    path
        A file, an address that fsspec opens, or a data frame: a DuckDB relation, or one of polars, Arrow or pandas.
    logits
        Name of the array, or a list of columns.
    probs
        True reads probabilities p as log p; False insists on logits that look like probabilities.
    split
        "val" reads the array `val_logits`.
    storage_options
        Options with which fsspec opens an address.

    Returns
    -------
    ndarray
        Logits, shape (n, classes).

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_logits(f"{folder}/new.csv", [[2.5, 0.5]])
    ...     load_logits(f"{folder}/new.csv")
    array([[2.5, 0.5]])
    """
    with open_predictions(path, storage_options=storage_options, logits=logits, probs=probs) as file:
        return file.load_logits(split)


def stream(
    path: StrPath, *, rows: int = 65536, split: str | None = None, storage_options: StorageOptions = None, **fields: Any
) -> Iterator[Predictions]:
    """Read predictions in parts of at most `rows` rows, each checked, with the memory of about one part.

    The parts in order are what `load` returns with the same options. There is always a first part, which is empty if
    the file has no rows.

    Parameters
    ----------
    path
        A file, or an address that fsspec opens.
    rows
        Largest number of rows per part.
    split
        "val" reads the arrays `val_logits` and `val_labels`.
    storage_options
        Options with which fsspec opens an address.
    **fields
        The fields of `load`.

    Returns
    -------
    iterator of Predictions
        The parts in order.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save((np.zeros((5, 3)), [0, 1, 2, 0, 1]), f"{folder}/net.npz")
    ...     [part.labels.tolist() for part in stream(f"{folder}/net.npz", rows=2)]
    [[0, 1], [2, 0], [1]]
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows must be a positive whole number, got {rows!r}")
    format_of(path)
    if not is_address(path):
        require_file(Path(path))
        if is_artifact(path):
            raise InputError("the file", "hold predictions", "an artifact", "load reads it", file=path)

    def parts() -> Iterator[Predictions]:
        with open_predictions(path, storage_options=storage_options, **fields) as file:
            yield from file.stream(rows, split)

    return parts()


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    sample_weight: str | None = None,
    groups: str | Sequence[str] = (),
    clusters: str | None = None,
    columns: str | Sequence[str] = (),
    **options: Any,
) -> PredictionTable:
    """Collect predictions from rows that are mappings, such as a Hugging Face `Dataset`.

    Class names come from the data set's features, if it has them.

    Parameters
    ----------
    rows
        Mappings of names to values.
    sample_weight
        Field with the weight of the row.
    groups
        Fields with groups.
    clusters
        Field that says which rows are correlated.
    columns
        Further fields to keep.
    **options
        The fields of `load`.

    Returns
    -------
    PredictionTable
        Predictions with these columns.

    Examples
    --------
    >>> from_rows([{"logits": [2.0, 0.5], "label": 0}, {"logits": [0.0, 1.0], "label": 1}]).labels
    array([0, 1])
    """
    held = rows if isinstance(rows, Sequence) or hasattr(rows, "features") else list(rows)
    features = getattr(rows, "features", None) or {}
    names = {name: tuple(feature.names) for name, feature in features.items() if getattr(feature, "names", None)}
    source = source_of_records(lambda: _number_rows(held), word="row")._replace(class_names=names)
    fields = Fields(sample_weight=sample_weight, groups=groups, columns=columns, clusters=clusters, **options)
    return PredictionFile(Path("rows"), "rows", source, fields).load_table()


def save(
    obj: Any,
    path: StrPath,
    *,
    class_names: Sequence[str] | None = None,
    n_classes: int | None = None,
    summary: Any = None,
    storage_options: StorageOptions = None,
) -> None:
    """Write predictions or a fitted value to a file that is either complete or absent.

    An interruption leaves the old file whole. Nothing is rounded: `load` returns the same numbers bit for bit.

    Parameters
    ----------
    obj
        Predictions, a pair (logits, labels), or a fitted value: a calibrator, a recalibrator of forecasts, a rule of
        prediction sets, a threshold, a monitor, or a clamped or repaired network (without its other weights).
    path
        The suffix is the format of predictions: .npz, .npy, .csv, .jsonl, .parquet or .safetensors. Values and types
        are kept, except that .csv and .jsonl have no types and bfloat16 becomes float32. A fitted value needs
        .safetensors. Predictions may go to an address that fsspec opens.
    class_names
        Names of the classes of a fitted value, in the order of the logits.
    n_classes
        Number of classes that it was fitted to; `load` checks it.
    summary
        A note on the fit, in plain data, which `io.read_header` returns.
    storage_options
        Options with which fsspec opens an address.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(([[2.5, 0.1]], [0]), f"{folder}/net.csv")
    ...     print(Path(folder, "net.csv").read_text(), end="")
    logit_0,logit_1,label
    2.5,0.1,0
    >>> from trueup.calibrators import Temperature
    >>> with TemporaryDirectory() as folder:
    ...     save(Temperature(1.7), f"{folder}/net.safetensors", class_names=["cat", "dog"])
    ...     load(f"{folder}/net.safetensors")
    Temperature(temperature=1.7)
    """
    if not isinstance(obj, tuple | list | PredictionTable):
        if storage_options is not None:
            raise InputError("storage_options", "be left out for what is not predictions", "some")
        save_artifact(obj, path, class_names=class_names, n_classes=n_classes, summary=summary)
        return
    for name, note in {"class_names": class_names, "n_classes": n_classes, "summary": summary}.items():
        if note is not None:
            raise InputError(name, "be left out for predictions", repr(note))
    _, write = format_of(path)
    z, y = as_arrays(*obj, padding=False)
    clusters = getattr(obj, "clusters", None)  # without those of pixels or tokens, intervals would be too narrow
    others = {} if clusters is None else {getattr(obj, "cluster_name", "cluster"): np.asarray(clusters)}
    chunk = Chunk(plain_logits(z), np.ascontiguousarray(y), others)
    with draft_files(path, storage_options) as drafts:
        write(iter([chunk]), *drafts)


def save_logits(path: StrPath, logits: ArrayLike, *, storage_options: StorageOptions = None) -> None:
    """Write logits without labels to a file that is either complete or absent.

    Parameters
    ----------
    path
        A file, or an address that fsspec opens; the suffix is the format.
    logits
        Logits, shape (n, classes).
    storage_options
        Options with which fsspec opens an address.
    """
    _, write = format_of(path)
    chunk = Chunk(plain_logits(logits), None, {})
    with draft_files(path, storage_options, labels=False) as (draft,):
        write(iter([chunk]), draft)


def draft_files(
    path: StrPath, storage_options: StorageOptions = None, *, labels: bool = True
) -> AbstractContextManager[list[Path]]:
    """Provide drafts of the files of predictions at a path or an address, which replace them if the block succeeds."""
    if is_address(path):
        from trueup.io.addresses import remote_files

        return remote_files(os.fspath(path), storage_options, labels=labels)
    return atomic_write(*file_list(Path(path))[: 2 if labels else 1])


def _number_rows(rows: Iterable[Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError("rows", "be mappings of names to values", type(row).__name__, where=f"row {number}")
        yield number, row
