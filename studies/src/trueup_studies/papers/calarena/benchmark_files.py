"""The files of the CalArena benchmark: predictions to calibrate, and the published results of other methods.

Predictions are in `{benchmark}.h5`, with `{data set}/{model}/` → `probas_cal`, `labels_cal`, `probas_test` and
`labels_test`; of two classes the probabilities are those of class 1. Results are in `results/{benchmark}/{method}.csv`,
a row for each data set and model, with the columns `{method}_logloss` and `{method}_brier`. The folder may be the
benchmark's own, in which the predictions lie in `calibration_benchmarks`, or hold both by itself.

Berta, Holzmüller, Bach and Jordan (2026), CalArena: a large-scale post-hoc calibration benchmark.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trueup.io.atomic import errors_name_file
from trueup.io.predictions import Predictions

PREDICTIONS, RESULTS = "calibration_benchmarks", "results"
"""Folders inside that of the benchmark."""
ARRAYS = ("probas_cal", "labels_cal", "probas_test", "labels_test")
COLUMNS = {"nll": "logloss", "brier": "brier"}
"""Our name of a loss → that of the published tables."""
_FINEST = float(np.finfo(np.float32).eps) / 4
"""What 1 − p may be where p is 1 in single precision: half of the step below 1."""

Experiment = tuple[str, str, str]
"""Benchmark, data set and model."""


class PublishedLosses(NamedTuple):
    """What a published table says of one experiment."""

    nll: float
    brier: float
    fit_rows: int
    test_rows: int


def predictions_folder(data_dir: str) -> Path:
    """The folder with the predictions: the one given, or that inside it."""
    folder = Path(data_dir).expanduser().resolve()
    inner = folder / PREDICTIONS
    return inner if inner.is_dir() else folder


def results_folder(data_dir: str) -> Path:
    """The folder with the published results: inside the one given, or beside it."""
    folder = Path(data_dir).expanduser().resolve()
    return folder.parent / RESULTS if folder.name == PREDICTIONS else folder / RESULTS


def experiments(data_dir: str, *, benchmark: str | None = None) -> Iterator[dict[str, Any]]:
    """Settings for every experiment of the files in a folder, or of one file."""
    folder = predictions_folder(data_dir)
    files = {path.stem: path for path in sorted(folder.glob("*.h5"))}
    if not files:
        raise ValueError(f"{folder}: wanted a folder with the .h5 files of CalArena, found none")
    if benchmark is not None and benchmark not in files:
        raise ValueError(f"data must be one of {', '.join(files)}, got {benchmark!r}")
    for name, path in files.items():
        if benchmark in (None, name):
            yield from _experiments_of(name, path)


def load_experiment(settings: Mapping[str, Any]) -> tuple[Predictions, Predictions]:
    """The rows to fit to and the rows to measure on, as logits.

    Exact zeros of the probabilities are raised to half the smallest positive one, those to measure on as those to fit
    to. Nothing else is: the small probabilities of a network say how sure it is.
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
    """Probabilities of every class in double precision, whether or not those of two classes have one column.

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
    """Method → experiment → losses, of every table in a benchmark's folder; nothing if there is none."""
    tables = {}
    for path in sorted((results_folder(data_dir) / benchmark).glob("*.csv")):
        with errors_name_file(path), path.open(encoding="utf-8", newline="") as file:
            tables[path.stem] = dict(_read_lines(csv.DictReader(file), benchmark, path.stem))
    return tables


def _read_lines(
    lines: csv.DictReader[str], benchmark: str, method: str
) -> Iterator[tuple[Experiment, PublishedLosses]]:
    columns = {loss: f"{method}_{theirs}" for loss, theirs in COLUMNS.items()}
    wanted = ("dataset", "model", "cal_size", "test_size", *columns.values())
    if missing := [name for name in wanted if name not in (lines.fieldnames or ())]:
        raise ValueError(f"there is no column {missing[0]}; wanted {', '.join(wanted)}")
    for line in lines:
        losses = {loss: _loss(line[column]) for loss, column in columns.items()}
        sizes = int(float(line["cal_size"])), int(float(line["test_size"]))
        yield (benchmark, line["dataset"], line["model"]), PublishedLosses(losses["nll"], losses["brier"], *sizes)


def _loss(text: str) -> float:
    """A number; infinite where a method failed, so that it loses."""
    value = float(text or "nan")
    return math.inf if math.isnan(value) else value


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
    """What exact zeros are raised to; None if there are none."""
    if (p > 0).all():
        return None
    half = float(p[p > 0].min()) / 2
    # Of two classes 1 − p is no finer than the precision p was stored in, however small p itself can be.
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
