"""Files of forecasts of numbers: columns of means, standard deviations and targets, or of quantiles and targets."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from trueup._core.errors import Hint, InputError
from trueup.io.atomic import StorageOptions, StrPath, errors_name_file, warn_of_skipped
from trueup.io.formats import FORMATS
from trueup.io.load_save import draft_files
from trueup.io.predictions import open_predictions
from trueup.io.source import Chunk, Plan, Source, gather, numbers_of, require_columns, row_columns, simplify, suffix_of


@dataclass(frozen=True, eq=False)
class ForecastTable:
    """Forecasts of a file with their targets; it unpacks as the triple: `evaluate_forecasts(*table)`.

    >>> table = ForecastTable(np.zeros(2), np.ones(2), np.array([0.5, 1.0]), sample_weight=np.array([1.0, 2.0]))
    >>> mean, std, targets = table
    >>> targets, table.options()
    (array([0.5, 1. ]), {'sample_weight': array([1., 2.])})
    """

    forecast: np.ndarray
    """The means (n,), or the quantiles (n, m)."""
    spread: np.ndarray
    """The standard deviations (n,), or the levels (m,) of the quantiles."""
    targets: np.ndarray
    """Outcomes, shape (n,)."""
    sample_weight: np.ndarray | None = None
    """Weight of each row, shape (n,)."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the file, if requested."""
    clusters: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The cluster of each row, by the name of the column."""
    skipped: int = 0
    """Number of rows left out because they had no target or no forecast."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.triple)

    @property
    def triple(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(mean, std, targets), or (quantiles, levels, targets)."""
        return self.forecast, self.spread, self.targets

    @property
    def is_gaussian(self) -> bool:
        """Whether it has means and standard deviations instead of quantiles."""
        return self.forecast.ndim == 1

    def options(self) -> dict[str, Any]:
        """Return weights and clusters as keyword arguments, if there are any."""
        weights = {} if self.sample_weight is None else {"sample_weight": self.sample_weight}
        return {**weights, **({"clusters": dict(self.clusters)} if self.clusters else {})}


@dataclass(frozen=True)
class ForecastFields:
    """The names of a file's columns; see `load_forecasts`."""

    mean: str = "mean"
    std: str = "std"
    targets: str = "targets"
    quantiles: str | Sequence[str] | None = None
    levels: Sequence[float] | None = None
    sample_weight: str | None = None
    clusters: str | None = None

    def __post_init__(self) -> None:
        if self.quantiles is not None and (self.mean, self.std) != ("mean", "std"):
            raise InputError("quantiles", "come without mean and std", "both")


def load_forecasts(
    path: StrPath,
    *,
    every_column: bool = False,
    labelled: bool = True,
    storage_options: StorageOptions = None,
    **fields: Any,
) -> ForecastTable:
    r"""Read forecasts from a file of any format that `load` reads.

    Parameters
    ----------
    path
        A file, or an address that fsspec opens.
    every_column
        Keep all columns of the file in `columns`.
    labelled
        Whether to read targets; without them, no row is left out.
    storage_options
        Options with which fsspec opens an address.
    **fields
        Names of the columns. `mean` (default "mean"), `std` ("std") and `targets` ("targets" or "target") are a
        Gaussian forecast. `quantiles` names the columns of quantiles, a column of lists, or a pattern such as "q*".
        `levels` are the levels of the quantiles. The default is an array `levels` of the file, or the number that ends
        each column's name: q0.05, q05 and p5 are the level 0.05. `sample_weight` and `clusters` name further columns.

    Returns
    -------
    ForecastTable
        Forecasts and targets. Rows without either are left out, and a warning gives their number.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_text("q10,q90,target\n0.5,2.5,1.0\n1.5,3.0,2.0\n")
    ...     quantiles, levels, targets = load_forecasts(f"{folder}/a.csv", quantiles="q*")
    >>> levels, targets
    (array([0.1, 0.9]), array([1., 2.]))
    """
    columns = ForecastFields(**fields)
    with open_predictions(path, storage_options=storage_options) as file, errors_name_file(file.name):
        source = file.source
        target = _target(source, columns.targets) if labelled else None
        names, tau = _columns(source, columns)
        others = [name for name in (target, columns.sample_weight, columns.clusters) if name is not None]
        require_columns(source.columns, others)
        further = list(dict.fromkeys([*others, *(row_columns(source, names[0]) if every_column else [])]))
        if columns.quantiles is not None and tau is None:
            tau = _levels_in_file(source, names)
        chunk = gather(source.read(Plan(names, others=further, gaps=True), sys.maxsize))
        numbers, values = _matrix(chunk.logits, len(names)), chunk.others
        y = np.full(len(numbers), np.nan) if target is None else _vector(values[target], target)
        w = None if columns.sample_weight is None else _vector(values[columns.sample_weight], columns.sample_weight)
    clusters = {} if columns.clusters is None else {columns.clusters: simplify(values[columns.clusters])}
    kept = ~np.isnan(numbers).any(axis=1)
    kept &= kept if target is None else ~np.isnan(y)
    skipped = int((~kept).sum()) if labelled else 0
    if skipped:
        warn_of_skipped(skipped, os.fspath(path), "a target or a forecast")
        numbers, y, w = numbers[kept], y[kept], None if w is None else w[kept]
        clusters = {name: of_row[kept] for name, of_row in clusters.items()}
    if tau is not None:
        if numbers.shape[1] != len(tau):
            raise InputError("levels", f"be {numbers.shape[1]}, one for each quantile", str(len(tau)), file=path)
        return ForecastTable(numbers, tau, y, w, values, clusters, skipped)
    return ForecastTable(numbers[:, 0].copy(), numbers[:, 1].copy(), y, w, values, clusters, skipped)


def _columns(source: Source, fields: ForecastFields) -> tuple[list[str], np.ndarray | None]:
    """Return the columns of the forecast, and the levels of quantiles if they are known."""
    if fields.quantiles is None:
        names = [fields.mean, fields.std]
        require_columns(source.columns, names)
        return names, None
    patterns = [fields.quantiles] if isinstance(fields.quantiles, str) else list(fields.quantiles)
    names = []
    for name in patterns:
        matching = [column for column in source.columns if fnmatchcase(column, name)] if "*" in name else [name]
        if not matching:
            raise InputError("quantiles", f"name columns among {', '.join(source.columns)}", repr(name))
        names += matching
    require_columns(source.columns, names)
    if fields.levels is not None:
        return names, np.asarray(fields.levels, dtype=np.float64)
    return names, levels_of_names(names) if len(names) > 1 else None


def levels_of_names(names: Sequence[str]) -> np.ndarray:
    """Return the levels in the names of columns: a number below 1 is a level, any other is in per cent.

    >>> levels_of_names(["q0.05", "q_50", "p97.5"])
    array([0.05 , 0.5  , 0.975])
    """
    levels = []
    for name in names:
        match = re.search(r"(\d+(?:\.\d+)?)\s*%?$", name)
        number = match[1] if match else "0"
        level = float(number) if "." in number and float(number) < 1 else float(number) / 100
        if not 0 < level < 1:
            raise InputError(f"column {name!r}", "end in its level, as q0.05 or q05 do", "no such number", Hint.LEVELS)
        levels.append(level)
    return np.array(levels)


def _levels_in_file(source: Source, names: Sequence[str]) -> np.ndarray:
    if "levels" not in source.columns or not source.rows:
        raise InputError("levels", f"be known of the quantiles in {names[0]!r}", "none", Hint.LEVELS)
    (chunk,) = source.read(Plan(["levels"]), sys.maxsize)
    return np.asarray(chunk.logits, dtype=np.float64).reshape(-1)


def _target(source: Source, targets: str) -> str:
    names = ("targets", "target") if targets == "targets" else (targets,)
    present = [name for name in names if name in source.columns]
    if not present:
        require_columns(source.columns, names[:1])
    return present[0]


def _matrix(values: np.ndarray, columns: int) -> np.ndarray:
    if values.dtype.kind not in "fiub":
        raise InputError("forecasts", "be numbers", str(values.dtype))
    rows = values.astype(np.float64).reshape(len(values), -1) if values.size else np.empty((0, columns))
    if columns > 1 and rows.shape[1] != columns:
        raise InputError("forecasts", "have one number per row in each column", f"shape {values.shape}")
    return rows


def _vector(column: Any, name: str) -> np.ndarray:
    values = column.reshape(-1) if isinstance(column, np.ndarray) and column.shape[1:] == (1,) else column
    numbers = numbers_of(values, name)
    if numbers.ndim != 1:
        raise InputError(name, "have one number per row", f"shape {numbers.shape}")
    return numbers


def save_columns(path: StrPath, columns: Mapping[str, Any], *, storage_options: StorageOptions = None) -> None:
    """Write columns of one length to a file that is either complete or absent.

    Parameters
    ----------
    path
        A file, or an address that fsspec opens; the suffix is the format.
    columns
        Columns by name, each of shape (n,).
    storage_options
        Options with which fsspec opens an address.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_columns(f"{folder}/a.csv", {"mean": np.array([0.5]), "std": np.array([2.0])})
    ...     print(Path(folder, "a.csv").read_text(), end="")
    mean,std
    0.5,2.0
    """
    suffix = suffix_of(path)
    if suffix not in FORMATS or suffix == ".npy":
        formats = " ".join(name for name in FORMATS if name != ".npy")
        raise InputError("the suffix", f"be one of {formats}", repr(suffix), file=path)
    n = len(next(iter(columns.values()))) if columns else 0
    with draft_files(path, storage_options, labels=False) as (draft,):
        FORMATS[suffix][1](iter([Chunk(np.empty(n), None, columns)]), draft)
