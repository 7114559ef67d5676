"""Predictions to calibrate, written as the CalArena benchmark has them: scikit-learn's models and files of logits.

Each data set is split by a seed in 40 % to train, 30 % to calibrate and 30 % to test, stratified. A model of another
seed is another model of the file: `forest, seed 0`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trueup._core.splits import random_order, split_by_sizes
from trueup.io.predictions import Predictions
from trueup_studies.papers.post_hoc.logit_files import load_halves, logits_folder, sources

Arrays = tuple[np.ndarray, np.ndarray]
Experiment = tuple[str, str, str, Arrays, Arrays]
"""Benchmark, data set, model, and probabilities and labels to calibrate and to test."""
ROWS = 3000
"""At most, of a data set."""


def _classification(classes: int, rows: int, **options: Any) -> Callable[[], Arrays]:
    from sklearn.datasets import make_classification

    shape = {"n_features": 20, "n_informative": 10, "n_redundant": 4, "flip_y": 0.05, "class_sep": 0.8} | options
    return lambda: make_classification(rows, n_classes=classes, random_state=0, **shape)


def data_sets() -> Mapping[str, Callable[[], Arrays]]:
    """Name → features and labels of what scikit-learn brings or generates."""
    from sklearn import datasets as d

    def diabetes() -> Arrays:
        x, y = d.load_diabetes(return_X_y=True)
        return x, (y > np.median(y)).astype(int)

    def hastie() -> Arrays:
        x, y = d.make_hastie_10_2(ROWS, random_state=0)
        return x, (y > 0).astype(int)

    return {
        "breast_cancer": lambda: d.load_breast_cancer(return_X_y=True),
        "diabetes": diabetes,
        "moons": lambda: d.make_moons(3000, noise=0.3, random_state=0),
        "circles": lambda: d.make_circles(3000, noise=0.2, factor=0.5, random_state=0),
        "hastie": hastie,
        "quantiles_2": lambda: d.make_gaussian_quantiles(n_samples=ROWS, n_features=10, n_classes=2, random_state=0),
        "classes_2": _classification(2, ROWS),
        "noisy_2": _classification(2, ROWS, flip_y=0.3),
        "rare_2": _classification(2, ROWS, weights=[0.95]),
        "iris": lambda: d.load_iris(return_X_y=True),
        "wine": lambda: d.load_wine(return_X_y=True),
        "digits": lambda: d.load_digits(return_X_y=True),
        "blobs_6": lambda: d.make_blobs(ROWS, centers=6, cluster_std=4.0, n_features=5, random_state=0),
        "quantiles_4": lambda: d.make_gaussian_quantiles(n_samples=ROWS, n_features=6, n_classes=4, random_state=0),
        "classes_5": _classification(5, ROWS),
        "classes_10": _classification(10, ROWS, class_sep=1.5),
        "classes_20": _classification(20, ROWS, class_sep=2.0, flip_y=0.0),
    }


def stored_tables(folder: Path) -> Mapping[str, Callable[[], Arrays]]:
    """The tables of classes in a folder of data, where there are any: the first rows of each."""

    def load(path: Path) -> Arrays:
        with np.load(path, allow_pickle=False) as arrays:
            names = arrays.files
            x = arrays[next(name for name in names if arrays[name].ndim == 2)]
            y = arrays[next(name for name in names if arrays[name].ndim == 1)]
        return x[:ROWS], np.unique(y[:ROWS], return_inverse=True)[1]

    found = {name: folder / "tabular" / f"{name}.npz" for name in ("letter_recognition", "satellite")}
    return {name: (lambda path=path: load(path)) for name, path in found.items() if path.is_file()}


def models(seed: int) -> Mapping[str, Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier

    return {
        "forest": RandomForestClassifier(100, random_state=seed),
        "neighbours": KNeighborsClassifier(10),
        "naive Bayes": GaussianNB(),
        "boosting": HistGradientBoostingClassifier(random_state=seed, max_iter=60),
    }


def tabular(found: Mapping[str, Callable[[], Arrays]], seeds: int, kinds: int | None = None) -> Iterator[Experiment]:
    """Models of scikit-learn on each data set, trained anew for each seed."""
    from sklearn.model_selection import train_test_split

    for data, load in found.items():
        x, y = load()
        for seed in range(seeds):
            train, rest = train_test_split(np.arange(len(y)), train_size=0.4, random_state=seed, stratify=y)
            fit, test = train_test_split(rest, train_size=0.5, random_state=seed, stratify=y[rest])
            for name, model in list(models(seed).items())[:kinds]:
                model.fit(x[train], y[train])
                kind = "binary" if len(model.classes_) == 2 else "multiclass"
                halves = ((model.predict_proba(x[rows]), y[rows]) for rows in (fit, test))
                yield f"tabular-{kind}", data, f"{name}, seed {seed}", *halves


def networks(folder: Path, seeds: int) -> Iterator[Experiment]:
    """Every file of logits, as `trueup study post-hoc` splits it."""
    for source in sources(str(folder), splits=seeds):
        halves = load_halves({**source, "folder": str(logits_folder(str(folder)))})
        yield "networks-multiclass", source["data"], f"split {source['split']}", *(_as_probs(half) for half in halves)


def language(folder: Path, seeds: int) -> Iterator[Experiment]:
    """Stated confidences, which take few values, and the logits of a question's options."""
    for path in sorted((folder / "llm").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            lines = [line for line in csv.DictReader(file) if line["stated_confidence"]]
        p, y = np.array([[float(line["stated_confidence"]), float(line["correct"])] for line in lines]).T
        whole = np.stack([1 - p, p], axis=1), y.astype(int)
        yield from _splits("language-binary", path.stem, whole, seeds)
    for path in sorted((folder / "llm").glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            most = int(arrays["options"].max())  # no question has the options after these
            whole = _as_probs(Predictions(arrays["logits"][:, :most], arrays["labels"]))
        yield from _splits("language-multiclass", path.stem, whole, seeds)


def _splits(benchmark: str, data: str, whole: Arrays, seeds: int) -> Iterator[Experiment]:
    p, y = whole
    for seed in range(seeds):
        order = random_order(len(y), np.random.default_rng(seed))
        halves = ((p[rows], y[rows]) for rows in split_by_sizes(order, [len(y) // 2]))
        yield benchmark, data, f"split {seed}", *halves


def _as_probs(pair: Predictions) -> Arrays:
    z = np.asarray(pair.logits, dtype=float)
    return np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True)), np.asarray(pair.labels)


def write(folder: Path, experiments: Iterator[Experiment]) -> None:
    """A file for each benchmark, in single precision as the benchmark has it; class 1 alone of two."""
    import h5py

    folder.mkdir(parents=True, exist_ok=True)
    for benchmark, data, model, fit, test in experiments:
        with h5py.File(folder / f"{benchmark}.h5", "a") as file:
            group = file.create_group(f"{data}/{model}")
            for part, (p, y) in {"cal": fit, "test": test}.items():
                kept = p[:, 1] if p.shape[1] == 2 else p
                group.create_dataset(f"probas_{part}", data=kept.astype(np.float32), compression="gzip")
                group.create_dataset(f"labels_{part}", data=np.asarray(y, dtype=np.int32), compression="gzip")
