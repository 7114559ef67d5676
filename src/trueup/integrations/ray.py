"""Ray Data: its datasets as shards for `evaluate_shards` and `fit`, and calibrated columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trueup.calibrators.base import Calibrator
from trueup.io.distributed import FrameShards, Run, calibrated_column, frame_shards, needed_columns
from trueup.io.parquet import pyarrow
from trueup.io.predictions import Fields

__all__ = ["apply", "shards"]


def shards(dataset: Any, **fields: Any) -> FrameShards:
    """Make shards of a Ray dataset: each block becomes a tally on its worker, and the tallies are summed.

    Pass the result to `metrics.sharded.evaluate_shards` or `calibrators.sharded.fit`. Each sum runs the dataset once;
    a fit takes several, so `materialize` the dataset first. Workers need trueup.

    Parameters
    ----------
    dataset
        A `ray.data.Dataset`. Logits are one column of arrays, or one column per class.
    **fields
        Names of the columns, as in `trueup.load`: `logits`, `labels`, `probs`, `confidence`, `correct`,
        `sample_weight`, `groups`, `clusters`, `class_names`.

    Returns
    -------
    FrameShards
        The blocks.
    """
    pa, _ = pyarrow()
    names = Fields(**fields)
    selected = dataset.select_columns(needed_columns(_columns(dataset), names))

    def collect(run: Run) -> Iterable[bytes]:
        def sum_block(table: Any) -> Any:
            part = run("a block", table.combine_chunks().to_batches())
            return pa.table({"part": pa.array([part], pa.large_binary())})

        sums = selected.map_batches(sum_block, batch_format="pyarrow", batch_size=None)
        return (row["part"] for row in sums.iter_rows())

    try:
        blocks = dataset.num_blocks()
    except Exception:  # known only once the dataset is materialized
        blocks = 200
    return frame_shards(collect, blocks, names)


def apply(
    calibrator: Calibrator, dataset: Any, *, output: str = "calibrated", floor: float | None = None, **fields: Any
) -> Any:
    """Add a column of calibrated probabilities to a Ray dataset.

    Parameters
    ----------
    calibrator
        A fitted calibrator, such as ``trueup.load("calibrator.safetensors")``.
    dataset
        A `ray.data.Dataset`.
    output
        Name of the new column: a list per row, or a number if `confidence` is given.
    floor
        Replacement of exact zero probabilities: that of the rows of the fit. Without it, exact zeros are an error.
    **fields
        Names of the columns, as in `shards`.

    Returns
    -------
    ray.data.Dataset
        The dataset with one more column; it is computed lazily.
    """
    pa, _ = pyarrow()
    names = Fields(**fields)
    needed = needed_columns(_columns(dataset), names, labelled=False)

    def calibrate(table: Any) -> Any:
        batches = table.select(needed).combine_chunks().to_batches()
        columns = [calibrated_column(calibrator, names, floor, batch) for batch in batches]
        return table.append_column(output, pa.chunked_array(columns) if columns else pa.array([], pa.float64()))

    return dataset.map_batches(calibrate, batch_format="pyarrow")


def _columns(dataset: Any) -> dict[str, str]:
    schema = dataset.schema()
    return dict(zip(schema.names, map(str, schema.types), strict=True))
