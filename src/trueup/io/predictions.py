"""Predictions and their files: .npz, .npy, .csv, .jsonl, .parquet and .safetensors, never pickles.

In a file the arrays are `logits` (n, classes) and `labels` (n,). A table has one column per class (`logit_0`,
`logit_1`, …) or a column of lists, plus `label`. A file with both halves has `val_logits`, `val_labels`, `test_logits`
and `test_labels`. Probabilities and stated confidences are read only on request.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from trueup._core.arrays import ROUNDING, as_pair, subtract_one
from trueup._core.errors import InputError, silence_warnings
from trueup._core.formatting import format_percent, html_summary
from trueup._core.types import Array, ArrayLike
from trueup.io.atomic import StorageOptions, StrPath, errors_name_file, require_file, warn_of_skipped
from trueup.io.formats import FORMATS
from trueup.io.frames import Frame, frame_source
from trueup.io.source import (
    Chunk,
    LabelParser,
    Plan,
    Reader,
    Source,
    Writer,
    as_list,
    column_of_split,
    drop_missing,
    file_list,
    find_columns,
    group_values,
    is_address,
    label_names,
    numbers_of,
    plain_logits,
    require_columns,
    simplify,
    splits_in,
    suffix_of,
)


class Predictions(NamedTuple):
    """Predictions of a network and their true labels, in the order of every function: `fit(*predictions)`.

    >>> p = Predictions(np.array([[2.0, 0.0], [0.5, 1.5]]), np.array([0, 1]))
    >>> p.logits.argmax(axis=1) == p.labels
    array([ True,  True])
    """

    logits: Array
    """Logits, shape (n, classes)."""
    labels: Array
    """True classes, shape (n,)."""

    def __repr__(self) -> str:
        return f"Predictions({len(self.labels):,} rows, {self.logits.shape[-1]:,} classes, {_kind_of(self.logits)})"

    def _repr_html_(self) -> str:
        hits = "–"
        if len(self.labels) and self.logits.ndim == 2:
            right: Any = self.logits.argmax(-1) == self.labels
            hits = format_percent(float(right.sum()) / len(self.labels), 1)
        figures = {"rows": f"{len(self.labels):,}", "classes": f"{self.logits.shape[-1]:,}", "accuracy": hits}
        return html_summary("Predictions", figures | {"logits": _kind_of(self.logits)})


def _kind_of(array: Array) -> str:
    return f"{type(array).__module__.partition('.')[0]} {str(array.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """Predictions with further columns of a file; it unpacks as the pair, `fit(*table, **table.options())`.

    >>> table = PredictionTable(np.zeros((2, 3)), np.array([0, 2]), sample_weight=np.array([1.0, 2.0]))
    >>> z, y = table
    >>> y, table.options()
    (array([0, 2]), {'sample_weight': array([1., 2.])})
    """

    logits: Array
    """Logits, shape (n, classes)."""
    labels: Array
    """True classes, shape (n,)."""
    sample_weight: np.ndarray | None = None
    """Weight of each row, shape (n,)."""
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Groups of the rows, by the name of their column."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Other requested columns, by name."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, if known."""
    skipped: int = 0
    """Number of rows left out because they had no label, or no confidence."""
    clusters: np.ndarray | None = None
    """Cluster of each row, where rows are correlated: one image, text or patient."""
    cluster_name: str = "cluster"
    """The kind of cluster, such as an image: the name of its column."""

    def __iter__(self) -> Iterator[Array]:
        return iter((self.logits, self.labels))

    @property
    def pair(self) -> Predictions:
        """Logits and labels only."""
        return Predictions(self.logits, self.labels)

    def options(self) -> dict[str, Any]:
        """Return weights, groups and clusters as keyword arguments, if there are any."""
        clusters = None if self.clusters is None else {self.cluster_name: self.clusters}
        options = {"sample_weight": self.sample_weight, "groups": dict(self.groups) or None, "clusters": clusters}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Fields:
    """The names of a file's arrays or columns; see `load`."""

    logits: str | Sequence[str] = "logits"
    labels: str = "labels"
    probs: bool | None = None
    """True for probabilities. False insists on logits also if they look like probabilities."""
    confidence: str | None = None
    correct: str | None = None
    class_names: Sequence[str] | None = None
    sample_weight: str | None = None
    groups: str | Sequence[str] = ()
    columns: str | Sequence[str] = ()
    clusters: str | None = None
    class_axis: Literal["first", "last"] | None = None
    ignore_index: int = -100
    multilabel: bool = False
    sep: str | None = None
    """Separator of a CSV file; recognised by default, as is the decimal mark."""
    decimal: str | None = None

    def __post_init__(self) -> None:
        for name, columns in (("groups", self.groups), ("columns", self.columns)):
            object.__setattr__(self, name, (columns,) if isinstance(columns, str) else tuple(columns))
        if self.class_axis not in (None, "first", "last"):
            raise InputError("class_axis", 'be "first" (n, K, …) or "last" (n, …, K)', repr(self.class_axis))
        if self.multilabel and (self.class_axis or self.confidence):
            raise InputError("multilabel", "be left out with class_axis and confidence", "both")
        if self.confidence is None and self.correct is not None:
            raise InputError("correct", "come with confidence", f"correct={self.correct!r} alone")
        if self.confidence is not None and self.probs:
            raise InputError("probs", "be left out with confidence, which is a probability", "both")
        if self.class_names is not None and len(set(self.class_names)) < len(self.class_names):
            raise InputError("class_names", "have names that differ", ", ".join(self.class_names))

    def csv_options(self, path: str) -> dict[str, str]:
        """Return `sep` and `decimal`, if they were given."""
        options = {name: value for name, value in (("sep", self.sep), ("decimal", self.decimal)) if value is not None}
        if options and suffix_of(path) not in (".csv", ".csv.gz"):
            raise InputError(next(iter(options)), "be left out for files other than .csv", suffix_of(path) or path)
        return options

    @property
    def label_column(self) -> str:
        """The column of labels, or of right and wrong."""
        return self.labels if self.confidence is None else self.correct or "correct"


def from_multilabel(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    ignore_index: int = -100,
    probs: bool = False,
) -> PredictionTable:
    """Convert multi-label predictions to events: one two-class row per row and label.

    The event of a row is that the label applies. The clusters are the original rows, since the labels of one row are
    correlated. The groups are the labels: `evaluate(*table, **table.options())` scores all events (micro) and each
    label. `metrics.evaluate_labels` also gives the mean over the labels.

    Parameters
    ----------
    logits
        Log-odds of each label, shape (n, labels).
    targets
        1 where the label applies, else 0, shape (n, labels). Entries with `ignore_index` or NaN are left out.
    class_names
        Names of the labels.
    ignore_index
        The target of unknown entries.
    probs
        Read `logits` as probabilities.

    Returns
    -------
    PredictionTable
        Events with groups and clusters.

    Examples
    --------
    >>> table = from_multilabel(np.array([[2.0, -1.0], [0.5, 3.0]]), [[1, 0], [-100, 1]], class_names=["cat", "dog"])
    >>> table.labels, table.groups["label"], table.clusters
    (array([1, 0, 1]), array(['cat', 'dog', 'dog'], dtype='<U3'), array([0, 0, 1]))
    """
    from trueup.convert import label_events

    events = label_events(logits, targets, ignore_index=ignore_index, probs=probs)
    known = np.arange(np.shape(logits)[1]) if class_names is None else np.asarray(class_names)
    if len(known) != np.shape(logits)[1]:
        raise InputError("class_names", f"name the {np.shape(logits)[1]} labels", f"{len(known)} names")
    table = PredictionTable(events.logits, events.labels, groups={"label": known[events.label]})
    return replace(table, class_names=("no", "yes"), clusters=events.row, cluster_name="sample")


@contextmanager
def open_predictions(
    path: StrPath | Frame,
    fields: Fields | None = None,
    *,
    storage_options: StorageOptions = None,
    partitions: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Iterator[PredictionFile]:
    """Open a file once, to see its content and read any of its splits.

    Parameters
    ----------
    path
        A file, an address that fsspec opens, or a data frame.
    fields
        Names of the columns; alternatively give them as `options`.
    storage_options
        Options with which fsspec opens an address.
    partitions
        Values of columns that the folders' names give.
    **options
        The options of `load_table`.

    Yields
    ------
    PredictionFile
        The open file.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     z, y = np.zeros((5, 3)), np.zeros(5, int)
    ...     np.savez(f"{folder}/net.npz", val_logits=z, val_labels=y, test_logits=z, test_labels=y)
    ...     with open_predictions(f"{folder}/net.npz") as file:
    ...         {split: file.load(split).logits.shape for split in file.splits}
    {'val': (5, 3), 'test': (5, 3)}
    """
    fields = fields or Fields(**options)
    if not isinstance(path, str | os.PathLike):
        fields.csv_options("the frame")
        yield PredictionFile(Path("the frame"), "the frame", frame_source(path), fields)
        return
    name = os.fspath(path)
    reader, _ = format_of(name)
    with ExitStack() as stack:
        file = Path(name)
        if is_address(name):
            from trueup.io.addresses import local_copy

            file = stack.enter_context(local_copy(name, storage_options))
        require_file(file)
        with errors_name_file(name):
            source = stack.enter_context(reader(file, **fields.csv_options(name)))
        yield PredictionFile(file, name, source, fields, partitions)


@dataclass(frozen=True)
class Zeros:
    """Exact zeros among probabilities."""

    zeros: int
    numbers: int
    smallest: float
    """The smallest positive probability."""

    def __add__(self, other: Zeros) -> Zeros:
        smallest = min(self.smallest, other.smallest)
        return Zeros(self.zeros + other.zeros, self.numbers + other.numbers, smallest)


def floor_of(counted: Zeros | None, *, of_event: bool) -> float | None:
    """Return the replacement of exact zeros, with a warning; None without zeros."""
    if counted is None or not counted.zeros:
        return None
    from trueup.convert import DEFAULT_FLOOR, MAX_EVENT_FLOOR, resolution, warn_of_certain, warn_of_zeros

    smallest = np.array(counted.smallest)
    if of_event:
        floor = min(MAX_EVENT_FLOOR, resolution(smallest, least=DEFAULT_FLOOR))
        warn_of_certain(counted.zeros, counted.numbers // 2, floor)
    else:
        warn_of_zeros(counted.zeros, counted.numbers, floor := resolution(smallest))
    return floor


@dataclass(frozen=True)
class PredictionFile:
    """An open file of predictions, from `open_predictions`."""

    path: Path
    name: str
    """The name in errors: the path, or the address it came from."""
    source: Source
    fields: Fields
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Columns from folder names, constant in all rows: `region=eu/part-0.parquet`."""
    known_floor: float | None = None
    """Replacement of exact zero probabilities, if it is known from all rows of which this file has some."""

    @property
    def splits(self) -> tuple[str | None, ...]:
        """The splits to read: val and test if the file has both, else the whole file (None), else its only split."""
        return (None,) if self.fields.confidence else splits_in(self.source.columns, self.fields.labels)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, if they were given or are in the file."""
        if self.fields.confidence is not None:
            return None
        if self.fields.class_names is not None:
            return tuple(self.fields.class_names)
        if not isinstance(self.fields.logits, str):
            return tuple(self.fields.logits)
        labels = label_names(self.fields.labels, None)
        return next((self.source.class_names[name] for name in labels if name in self.source.class_names), None)

    def label_column(self, split: str | None = None) -> str | None:
        """Return the column of labels, or of right and wrong, if the file has it."""
        fields = self.fields
        names = label_names(fields.labels, split) if fields.confidence is None else [fields.label_column]
        return next((name for name in names if name in self.source.columns), None)

    def load(self, split: str | None = None, *, mmap: bool = False) -> Predictions:
        """Read all rows of a split; see `load`."""
        return self.load_table(split, mmap=mmap).pair

    def load_table(self, split: str | None = None, *, mmap: bool = False) -> PredictionTable:
        """Read all rows of a split with their weights, groups and columns; see `load_table`."""
        table = concatenate(list(self.tables(sys.maxsize, split)))
        warn_of_skipped(table.skipped, self.name)
        # Without mmap the arrays must not change when the file changes.
        copied = not mmap and isinstance(table.logits, np.memmap)
        return replace(table, logits=np.array(table.logits)) if copied else table

    def load_logits(self, split: str | None = None) -> np.ndarray:
        """Read only the logits; see `load_logits`."""
        with errors_name_file(self.name):
            plan = self.plan(split, labelled=False)
            parts = [chunk.logits for chunk in self.source.read(plan._replace(labels=None), sys.maxsize)]
            whole = np.concatenate(parts) if len(parts) > 1 else np.array(parts[0])
            return plain_logits(self.to_logits(whole, None))

    def width(self, split: str | None = None) -> int:
        """Return the number of logits per row."""
        if self.fields.confidence is not None:
            return 2
        with errors_name_file(self.name):
            return self.source.width(self.plan(split).logits)

    def stream(self, rows: int, split: str | None = None) -> Iterator[Predictions]:
        """Read in parts; see `stream`."""
        skipped = 0
        for table in self.tables(rows, split):
            skipped += table.skipped
            yield table.pair
        warn_of_skipped(skipped, self.name)

    def tables(self, rows: int, split: str | None = None) -> Iterator[PredictionTable]:
        """Read in parts as `stream` does, with weights, groups and columns; count rows without a label silently."""
        start, classes, fields = 0, None, self.fields
        is_flat = fields.class_axis is not None or fields.multilabel
        with errors_name_file(self.name):
            for file in file_list(self.path)[1:]:  # the labels of a .npy file
                if not file.is_file():
                    raise FileNotFoundError(f"{file}: no such file; the labels of {self.path.name} must be next to it")
            plan = self.plan(split)
            chunks: Iterable[Chunk] = self.source.read(plan, rows)
            floor = self.known_floor
            if floor is None and (fields.probs or fields.confidence):
                # One chunk needs no second reading.
                floor = self.floor(chunks := list(chunks)) if rows == sys.maxsize else self.find_floor(plan, rows)
            for chunk in chunks:
                kept, skipped = drop_missing(chunk, gaps=fields.confidence is not None)
                kept = kept._replace(others={name: kept.others[x] for name, x in self._further_columns(split).items()})
                clusters: np.ndarray | None = None
                groups: dict[str, np.ndarray] = {}
                with _errors_name_row(start):
                    if is_flat:
                        kept, clusters, groups = _flatten(kept, fields, start, self.class_names)
                    if fields.multilabel:  # checked as events before
                        z, y = Predictions(kept.logits, np.asarray(kept.labels))
                    else:
                        z, y = self._check(kept.logits, kept.labels, floor)
                    if classes not in (None, z.shape[1]):
                        raise InputError("logits", f"have {classes} classes as before", str(z.shape[1]))
                    classes, named = z.shape[1], None if fields.multilabel else fields.class_names
                    if named is not None and len(named) != classes:
                        raise InputError("class_names", f"name the {classes} classes", f"{len(named)} names")
                    weights = _weights(kept, fields.sample_weight)
                start += len(chunk.logits)
                groups |= {name: self._groups(kept, name) for name in fields.groups}
                columns = {name: simplify(kept.others[name]) for name in fields.columns}
                clusters = clusters if fields.clusters is None else self._groups(kept, fields.clusters)
                names = ("no", "yes") if fields.multilabel else self.class_names
                cluster_name = fields.clusters or "sample"
                yield PredictionTable(z, y, weights, groups, columns, names, skipped, clusters, cluster_name)

    def plan(self, split: str | None, *, labelled: bool = True, others: Sequence[str] | None = None) -> Plan:
        """Plan which columns to read; if one is missing, the error lists those of the file."""
        fields, columns = self.fields, self.source.columns
        if others is None:
            others = list(dict.fromkeys(self._further_columns(split).values()))
        if fields.confidence is not None:
            correct = fields.label_column if labelled else None
            require_columns(columns, [fields.confidence, *([correct] if correct else [])])
            parse = LabelParser(binary=True, column=fields.label_column)
            return Plan([fields.confidence], correct, others, parse, gaps=True)
        label_name = fields.labels if labelled else None
        names, label = find_columns(columns, fields.logits, label_name, bool(fields.probs), split)
        parse = LabelParser(self.class_names or (), column=label or "labels")
        return Plan(names, label, others, parse, absent=math.nan if fields.probs else -math.inf)

    def _further_columns(self, split: str | None) -> dict[str, str]:
        """Return the further columns to read, by the requested name."""
        fields, columns = self.fields, self.source.columns
        single = [name for name in (fields.sample_weight, fields.clusters) if name]
        requested = {name: column_of_split(columns, name, split) for name in (*single, *fields.groups, *fields.columns)}
        require_columns({**columns, **self.partitions}, list(requested.values()))
        return {name: column for name, column in requested.items() if column in columns}

    def find_floor(self, plan: Plan, rows: int) -> float | None:
        """Return the replacement of exact zero probabilities, reading the file a second time."""
        reader, _ = format_of(self.path)
        csv_options = self.fields.csv_options(self.name)
        with silence_warnings(message=".*: read as CSV"), reader(self.path, **csv_options) as again:
            return self.floor(again.read(plan._replace(labels=None, others=()), rows))

    def floor(self, chunks: Iterable[Chunk]) -> float | None:
        """Return the replacement of exact zeros, the same in all chunks; None without zeros or with invalid numbers."""
        return floor_of(self.count_zeros(chunks), of_event=self.fields.confidence is not None)

    def count_zeros(self, chunks: Iterable[Chunk]) -> Zeros | None:
        """Count exact zeros among probabilities; None if some are invalid, which a later check rejects."""
        counted = Zeros(0, 0, 1.0)
        for chunk in chunks:
            z = chunk.logits
            if self.fields.confidence is not None:
                z = _vector(drop_missing(chunk, gaps=True)[0].logits)
                z = np.stack([1 - z, z], axis=1) if z.ndim == 1 else z
            z = z if z.dtype.kind != "f" else np.where(np.isnan(z), 1.0, z)  # absent options are no zeros
            if not z.size:
                continue
            if not (z.dtype.kind == "f" and z.min() > -ROUNDING and z.max() < 2):
                return None
            counted += Zeros(int((z <= 0).sum()), z.size, float(z.min(initial=1.0, where=z > 0)))
        return counted

    def to_logits(self, values: np.ndarray, floor: float | None) -> np.ndarray:
        """Convert values of the file to logits."""
        if not self.fields.probs and self.fields.confidence is None:
            return subtract_one(values) if self.fields.probs is False else values
        from trueup.convert import from_probs  # imported only for probabilities

        if self.fields.confidence is not None:
            return from_probs(_vector(values), floor=floor, name=self.fields.confidence)
        return from_probs(values, floor=floor)

    def _check(self, values: np.ndarray, labels: Any, floor: float | None) -> Predictions:
        logits = self.to_logits(values, floor)
        z, y = as_pair(logits, labels, padding=False)
        # A memory map is returned itself: its checked view would lose the read-only flag.
        return Predictions(logits if isinstance(logits, np.memmap) and logits.dtype.isnative else z, y)

    def _groups(self, chunk: Chunk, name: str) -> np.ndarray:
        if name in chunk.others:
            return group_values(chunk.others[name])
        return np.full(len(chunk.logits), self.partitions[name], dtype=object)


def _flatten(
    chunk: Chunk, fields: Fields, start: int, class_names: Sequence[str] | None
) -> tuple[Chunk, np.ndarray, dict[str, np.ndarray]]:
    """Return one row per token, pixel or label, with its text, image or row, and its groups."""
    groups: dict[str, np.ndarray] = {}
    if fields.multilabel:
        options: dict[str, Any] = {"ignore_index": fields.ignore_index, "probs": bool(fields.probs)}
        table = from_multilabel(chunk.logits, np.asarray(chunk.labels), class_names=class_names, **options)
        z, y, sample, groups = table.logits, table.labels, np.asarray(table.clusters), dict(table.groups)
    else:
        # The pair is checked later, when probabilities have been converted to logits.
        z, y, sample = _pixels(chunk, fields)
    others = {name: np.asarray(as_list(column), dtype=object)[sample] for name, column in chunk.others.items()}
    return Chunk(z, y, others), sample + start, groups


def _pixels(chunk: Chunk, fields: Fields) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits, labels = chunk.logits, np.asarray(chunk.labels)
    if logits.ndim < 3:
        raise InputError("logits", "have more than 2 dimensions with class_axis", f"{logits.shape}")
    z = np.moveaxis(logits, 1, -1) if fields.class_axis == "first" else logits
    if labels.shape != z.shape[:-1]:
        raise InputError("labels", f"have shape {z.shape[:-1]} to match the logits", f"{labels.shape}")
    kept = labels.reshape(-1) != fields.ignore_index
    sample = np.flatnonzero(kept) // max(math.prod(labels.shape[1:]), 1)
    return z.reshape(-1, z.shape[-1])[kept], labels.reshape(-1)[kept], sample


_BY_ROW = ("logits", "labels", "sample_weight", "groups", "columns", "clusters")
"""The fields of a table with one entry per row."""


def concatenate(tables: Sequence[PredictionTable]) -> PredictionTable:
    """Concatenate the rows of several tables."""

    def join(parts: list[np.ndarray]) -> np.ndarray:
        same = len({part.dtype.kind for part in parts}) == 1
        return np.concatenate(parts if same else [part.astype(object) for part in parts])

    if len(tables) == 1:
        return tables[0]
    return replace(tables[0], **_map_rows(tables, join), skipped=sum(table.skipped for table in tables))


def take_rows(table: PredictionTable, rows: np.ndarray) -> PredictionTable:
    """Select rows of a table."""
    return replace(table, **_map_rows([table], lambda parts: parts[0][rows]))


def _map_rows(tables: Sequence[PredictionTable], function: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Apply a function to the arrays of all tables, for each field with one entry per row."""

    def apply(values: list[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {key: function([value[key] for value in values]) for key in values[0]}
        return None if values[0] is None else function(values)

    return {name: apply([getattr(table, name) for table in tables]) for name in _BY_ROW}


def _weights(chunk: Chunk, name: str | None) -> np.ndarray | None:
    if name is None:
        return None
    weights = numbers_of(chunk.others[name], name)
    if len(bad := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))):
        raise InputError(name, "be weights, finite and not negative", f"{weights[bad[0]]:g} in row {bad[0]}")
    return weights


def _vector(values: np.ndarray) -> np.ndarray:
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    return flat.astype(np.float64) if flat.dtype.kind in "biu" else flat


def format_of(path: StrPath) -> tuple[Reader, Writer]:
    """Return the reader and the writer of a file, by its suffix."""
    suffix = suffix_of(path)
    if suffix not in FORMATS:
        pickled = "; pickles are never read or written, because they can run code"
        hint = pickled if suffix in (".pt", ".pth", ".pkl", ".pickle", ".joblib") else ""
        raise ValueError(f"{os.fspath(path)}: the suffix must be one of {' '.join(FORMATS)}, got {suffix!r}{hint}")
    return FORMATS[suffix]


@contextmanager
def _errors_name_row(start: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise (error.replace(where=f"from row {start} on") if start else error) from None
    except ValueError as error:
        raise ValueError(f"from row {start} on, {error}" if start else str(error)) from None
