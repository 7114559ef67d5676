"""Spark: its data frames as shards for `evaluate_shards` and `fit`, and calibrated columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trueup.calibrators.base import Calibrator
from trueup.io.distributed import FrameShards, Run, calibrated_column, frame_shards, needed_columns
from trueup.io.parquet import pyarrow
from trueup.io.predictions import Fields

__all__ = ["apply", "shards"]


def shards(frame: Any, **fields: Any) -> FrameShards:
    """Make shards of a Spark data frame: each partition becomes a tally on its worker, and the tallies are summed.

    Pass the result to `metrics.sharded.evaluate_shards` or `calibrators.sharded.fit`. Each sum runs the plan of the
    frame once; a fit takes several, so cache the frame first. The sum of each partition is sent to the driver. Workers
    need trueup.

    Parameters
    ----------
    frame
        A `pyspark.sql.DataFrame`. Logits are one column of arrays or vectors of Spark ML, or one column per class.
    **fields
        Names of the columns, as in `trueup.load`: `logits`, `labels`, `probs`, `confidence`, `correct`,
        `sample_weight`, `groups`, `clusters`, `class_names`.

    Returns
    -------
    FrameShards
        The partitions.
    """
    from pyspark import TaskContext

    pa, _ = pyarrow()
    names = Fields(**fields)
    needed = needed_columns(dict(frame.dtypes), names)
    # A name with a dot would mean a field of a struct.
    selected = frame.select(_columns(frame, needed)).toDF(*(f"column_{number}" for number in range(len(needed))))

    def collect(run: Run) -> Iterable[bytes]:
        def sum_partition(batches: Iterator[Any]) -> Iterator[Any]:
            context = TaskContext.get()
            name = "a partition" if context is None else f"partition {context.partitionId()}"
            rows = (pa.record_batch(batch.columns, names=needed) for batch in batches)
            yield pa.RecordBatch.from_pydict({"part": [run(name, rows)]})

        return (bytes(row["part"]) for row in selected.mapInArrow(sum_partition, "part binary").collect())

    try:
        partitions = selected.rdd.getNumPartitions()
    except Exception:  # Spark Connect has no RDDs
        partitions = 200
    return frame_shards(collect, partitions, names)


def apply(
    calibrator: Calibrator, frame: Any, *, output: str = "calibrated", floor: float | None = None, **fields: Any
) -> Any:
    """Add a column of calibrated probabilities to a Spark data frame, by `mapInArrow`.

    Parameters
    ----------
    calibrator
        A fitted calibrator, such as ``trueup.load("calibrator.safetensors")``.
    frame
        A `pyspark.sql.DataFrame`.
    output
        Name of the new column: an array per row, or a number if `confidence` is given.
    floor
        Replacement of exact zero probabilities: that of the rows of the fit. Without it, exact zeros are an error.
    **fields
        Names of the columns, as in `shards`.

    Returns
    -------
    pyspark.sql.DataFrame
        The frame with one more column; it is computed lazily.
    """
    from pyspark.sql import functions, types

    pa, _ = pyarrow()
    names = Fields(**fields)
    columns = _columns(frame, needed_columns(dict(frame.dtypes), names, labelled=False))
    staged = frame.withColumn(output, functions.struct(*columns))
    number = types.DoubleType()
    kind = number if names.confidence is not None else types.ArrayType(number)
    kept = [types.StructField(output, kind) if each.name == output else each for each in staged.schema.fields]

    def calibrate(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            at = batch.schema.get_field_index(output)
            rows = pa.RecordBatch.from_struct_array(batch.column(at))
            after = calibrated_column(calibrator, names, floor, rows)
            yield batch.set_column(at, output, after)

    return staged.mapInArrow(calibrate, types.StructType(kept))


def _columns(frame: Any, names: list[str]) -> list[Any]:
    """Select columns by name; vectors of Spark ML become arrays."""
    columns = []
    for name in names:
        column = frame[f"`{name}`"]
        if type(frame.schema[name].dataType).__name__ == "VectorUDT":
            from pyspark.ml.functions import vector_to_array

            column = vector_to_array(column)
        columns.append(column.alias(name))
    return columns
