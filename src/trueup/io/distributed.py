"""Rows of a distributed data frame as shards: its engine passes each partition as Arrow batches, and sums come back."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup._core.native import limit_threads
from trueup.io.parquet import arrow_source, pyarrow
from trueup.io.predictions import Fields, PredictionFile, PredictionTable, Zeros, floor_of
from trueup.io.shards import Part, Shards, Task, sum_tables
from trueup.io.source import Source

Run: TypeAlias = Callable[[str, Iterable[Any]], bytes]
"""A function of a partition's name and its Arrow batches; workers must be able to import this package."""
Collect: TypeAlias = Callable[[Run], Iterable[bytes]]
"""Runs a function on each partition of a data frame, and returns the results."""


@dataclass(frozen=True)
class FrameShards(Shards):
    """The partitions of a distributed data frame; the functions that take `Shards` take it too."""

    collect: Collect = field(kw_only=True)
    """The engine: it runs a function on each partition."""
    floor: float | None = None
    """Replacement of exact zero probabilities, from all rows."""

    def sums(self, task: Task, executor: Executor | None = None) -> Iterable[Part]:
        """Sum a task over each partition; see `Shards.sums`.

        Parameters
        ----------
        task
            A function of some rows, whose results add up with `+`.
        executor
            Must be None, since the engine of the data frame runs the task.

        Returns
        -------
        iterable of Part
            One result per partition.
        """
        if executor is not None:
            raise InputError("executor", "be left out: the engine of the data frame runs the sums", "an executor")
        run = functools.partial(_sum_partition, task, self.fields, self.floor, self.head_rows, self.seed)
        return map(pickle.loads, self.collect(run))  # the engine already runs our pickled functions


def frame_shards(collect: Collect, partitions: int, fields: Fields) -> FrameShards:
    """Make shards of a data frame; probabilities are first searched for exact zeros."""
    names = tuple(f"partition {number}" for number in range(max(partitions, 1)))
    floor = None
    if fields.probs or fields.confidence is not None:
        counts = [pickle.loads(one) for one in collect(functools.partial(_count_zeros, fields))]
        total = None if None in counts else sum(counts, Zeros(0, 0, 1.0))
        floor = floor_of(total, of_event=fields.confidence is not None)
    return FrameShards(names, fields=fields, collect=collect, floor=floor)


def needed_columns(columns: Mapping[str, str], fields: Fields, *, labelled: bool = True) -> list[str]:
    """Find the columns to read among those of a data frame, by name and type."""
    if fields.class_axis is not None or fields.multilabel:
        raise InputError("class_axis and multilabel", "be left out with data frames", "one", "flatten the rows first")
    file = PredictionFile(Path("the frame"), "the frame", Source(dict(columns), _read_nothing, len), fields)
    try:
        plan = file.plan(None, labelled=labelled, others=None if labelled else ())
    except InputError as error:
        raise error.replace(argument="the frame" if error.argument == "the file" else error.argument) from None
    return list(dict.fromkeys([*plan.logits, *([plan.labels] if plan.labels else []), *plan.others]))


def calibrated_column(calibrator: Any, fields: Fields, floor: float | None, batch: Any) -> Any:
    """Return the calibrated probabilities of a batch: a list per row, or a number for a confidence."""
    pa, _ = pyarrow()
    file = _open(batch, fields, "the frame")
    plan = file.plan(None, labelled=False, others=())
    (chunk,) = file.source.read(plan, sys.maxsize)
    is_given = np.ones(len(batch), bool)
    if fields.confidence is not None:
        is_given = ~np.isnan(np.asarray(chunk.logits, np.float64))
        chunk = chunk._replace(logits=chunk.logits[is_given])
    are_probs = bool(fields.probs) or fields.confidence is not None
    if floor is None and are_probs and (counted := file.count_zeros([chunk])) and counted.zeros:
        hint = "pass floor=, half the smallest positive probability of the rows of the fit"
        raise InputError("floor", "replace exact zeros, the same in each batch of rows", "None", hint)
    after = NUMPY.softmax(np.asarray(calibrator(file.to_logits(chunk.logits, floor)), np.float64), 1)
    if fields.confidence is None:
        return pa.FixedSizeListArray.from_arrays(pa.array(after.reshape(-1)), after.shape[1]).cast(
            pa.list_(pa.float64())
        )
    column = np.full(len(batch), np.nan)
    column[is_given] = after[:, 1]
    return pa.array(column, mask=~is_given)


def _read_nothing(*_: Any) -> Iterator[Any]:
    return iter(())


def _open(batch: Any, fields: Fields, name: str, floor: float | None = None) -> PredictionFile:
    """Open a batch of Arrow rows like a file; tensors of Ray are extension types, and their storage are lists."""
    pa, _ = pyarrow()
    columns = [column.storage if isinstance(column, pa.ExtensionArray) else column for column in batch.columns]
    plain = pa.record_batch(columns, names=batch.schema.names)
    source = arrow_source(plain.schema, len(plain), lambda names, rows: iter([plain.select(list(names))]))
    return PredictionFile(Path(name), name, source, fields, known_floor=floor)


def _sum_partition(
    task: Task, fields: Fields, floor: float | None, head_rows: int | None, seed: int | None,
    name: str, batches: Iterable[Any],
) -> bytes:  # fmt: skip
    """Sum a task over a partition, on one thread of a worker."""

    def tables() -> Iterator[PredictionTable]:
        left = sys.maxsize if head_rows is None else head_rows
        for batch in batches:
            yield from _open(batch.slice(0, left), fields, name, floor).tables(sys.maxsize)
            if (left := left - len(batch)) <= 0:
                return

    with limit_threads(1):
        return pickle.dumps(sum_tables(task, tables(), name, seed))


def _count_zeros(fields: Fields, name: str, batches: Iterable[Any]) -> bytes:
    """Count the exact zeros of a partition."""
    total: Zeros | None = Zeros(0, 0, 1.0)
    for batch in batches:
        file = _open(batch, fields, name)
        counted = file.count_zeros(file.source.read(file.plan(None, labelled=False, others=()), sys.maxsize))
        total = None if total is None or counted is None else total + counted
    return pickle.dumps(total)
