"""The files of the CalArena benchmark: predictions to calibrate, and the published results of other methods.

Predictions are in `{benchmark}.h5`, with `{data set}/{model}/` → `probas_cal`, `labels_cal`, `probas_test` and
`labels_test`; with two classes the probabilities are those of class 1. Results are in
`results/{benchmark}/{method}.csv`: one row per data set and model, with columns `{method}_logloss` and
`{method}_brier`. The folder is either the benchmark's own, with the predictions in `calibration_benchmarks`, or holds
the files itself.

Berta, Holzmüller, Bach and Jordan (2026), CalArena: a large-scale post-hoc calibration benchmark.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import read_csv

from trueup.io.atomic import errors_name_file
from trueup.io.predictions import Predictions

PREDICTIONS, RESULTS = "calibration_benchmarks", "results"
"""Subfolders of the benchmark's folder."""
ARRAYS = ("probas_cal", "labels_cal", "probas_test", "labels_test")
COLUMNS = {"nll": "logloss", "brier": "brier"}
"""Our name of a loss → its name in the published tables."""
_FINEST = float(np.finfo(np.float32).eps) / 4
"""Half the spacing of single precision just below 1: the error of 1 − p where p is stored as 1."""

Experiment = tuple[str, str, str]
"""Benchmark, data set and model."""


class PublishedLosses(NamedTuple):
    """The published losses of one experiment."""

    nll: float
    brier: float
    fit_rows: int
    test_rows: int


def predictions_folder(data_dir: str) -> Path:
    """Return the folder with the predictions: `data_dir` or its subfolder."""
    folder = Path(data_dir).expanduser().resolve()
    inner = folder / PREDICTIONS
    return inner if inner.is_dir() else folder


def results_folder(data_dir: str) -> Path:
    """Return the folder with the published results, in `data_dir` or next to it."""
    folder = Path(data_dir).expanduser().resolve()
    return folder.parent / RESULTS if folder.name == PREDICTIONS else folder / RESULTS


def experiments(data_dir: str, *, benchmark: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the settings of every experiment in a folder, or in one of its files."""
    folder = predictions_folder(data_dir)
    files = {path.stem: path for path in sorted(folder.glob("*.h5"))}
    if not files:
        raise ValueError(f"{folder}: expected a folder with the .h5 files of CalArena, found none")
    if benchmark is not None and benchmark not in files:
        raise ValueError(f"data must be one of {', '.join(files)}, got {benchmark!r}")
    for name, path in files.items():
        if benchmark in (None, name):
            yield from _experiments_of(name, path)


def load_experiment(settings: Mapping[str, Any]) -> tuple[Predictions, Predictions]:
    """Read the calibration rows and the test rows, as logits.

    Probabilities of exactly zero are raised to half the smallest positive calibration probability. Nothing else
    changes: small probabilities carry the network's confidence.
    """
    path = Path(settings["folder"]) / f"{settings['benchmark']}.h5"
    if _digest(path) != settings["digest"]:
        raise ValueError(f"{path}: the file has changed since the study began")
    where = f"{settings['data']}/{settings['model']}"
    with errors_name_file(path), _h5py().File(path, "r") as file:
        group = file[where]
        if missing := [name for name in ARRAYS if name not in group]:
            raise ValueError(f"{where} has no {missing[0]}")
        arrays = {name: np.asarray(group[name]) for name in ARRAYS}
    fit, test = (as_probs(arrays[name], f"{where}/{name}") for name in ("probas_cal", "probas_test"))
    floor = _floor(fit, arrays["probas_cal"]) or _floor(test, arrays["probas_test"]) or 1.0
    fit_logits, test_logits = (np.log(np.where(p > 0, p, floor)) for p in (fit, test))
    return (
        Predictions(fit_logits, arrays["labels_cal"].reshape(-1).astype(np.int64)),
        Predictions(test_logits, arrays["labels_test"].reshape(-1).astype(np.int64)),
    )


def as_probs(probs: np.ndarray, name: str = "probs") -> np.ndarray:
    """Return the probabilities of every class in double precision; one column means two classes.

    >>> as_probs(np.array([0.25, 1.0], dtype=np.float32))
    array([[0.75, 0.25],
           [0.  , 1.  ]])
    """
    p = np.asarray(probs, dtype=float)
    if p.ndim == 1 or (p.ndim == 2 and p.shape[1] == 1):
        p = np.stack([1 - p.reshape(-1), p.reshape(-1)], axis=1)
    sums = p.sum(axis=1)
    if p.size and not (np.isfinite(p).all() and p.min() >= 0):
        raise ValueError(f"{name} must be probabilities, got {p.min():.6g}..{p.max():.6g}")
    if len(p) and np.abs(sums - 1).max() > 1e-3:
        raise ValueError(f"{name} must sum to 1 in each row, got {sums[np.abs(sums - 1).argmax()]:.6g}")
    return p / sums[:, None]


def read_results(data_dir: str, benchmark: str) -> dict[str, dict[Experiment, PublishedLosses]]:
    """Read every table in a benchmark's folder: method → experiment → losses; a failed method has infinite loss."""
    tables = {}
    for path in sorted((results_folder(data_dir) / benchmark).glob("*.csv")):
        losses = [f"{path.stem}_{theirs}" for theirs in COLUMNS.values()]
        required = ["dataset", "model", *losses, "cal_size", "test_size"]
        kinds = {"dataset": str, "model": str, **dict.fromkeys(required[2:], float)}
        with errors_name_file(path):
            frame = read_csv(path, dtype=kinds, keep_default_na=False, na_values=["", "nan", "NaN"])
            if missing := [name for name in required if name not in frame]:
                raise ValueError(f"there is no column {missing[0]}; expected {', '.join(required)}")
            lines = frame[required].fillna(dict.fromkeys(losses, math.inf)).itertuples(index=False, name=None)
            tables[path.stem] = {
                (benchmark, data, model): PublishedLosses(nll, brier, int(fit_rows), int(test_rows))
                for data, model, nll, brier, fit_rows, test_rows in lines
            }
    return tables


def _experiments_of(benchmark: str, path: Path) -> Iterator[dict[str, Any]]:
    digest = _digest(path)
    with errors_name_file(path), _h5py().File(path, "r") as file:
        for data in file:
            for model in file[data]:
                probs = file[data][model][ARRAYS[0]]
                classes = 2 if probs.ndim == 1 else max(2, int(probs.shape[1]))
                known = {"benchmark": benchmark, "digest": digest, "data": data, "model": model}
                yield {**known, "classes": classes}


def _floor(p: np.ndarray, stored: np.ndarray) -> float | None:
    """Return the value for exact zeros; None if there are none."""
    if (p > 0).all():
        return None
    half = float(p[p > 0].min()) / 2
    # With two classes, 1 − p is only as fine as the precision in which p was stored.
    return max(half, _FINEST) if stored.ndim == 1 and (stored >= 1).any() else half


def _digest(path: Path) -> str:
    state = path.stat()
    return _digest_at(path, state.st_size, state.st_mtime_ns)


@lru_cache
def _digest_at(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise ImportError("the files of CalArena need h5py: pip install 'trueup[hdf5]'") from None
    return h5py
