"""Logits to calibrate, in two halves: from the files of a folder, or drawn with faults that are known.

A folder is searched for `.npz` files. One with `val_` and `test_` halves is used as it is split. Any other is split in
halves at random, one array of it after the other: `logits`, or probabilities, which are told by the array's name
(`probs`) or by the file's (`…_probs.npz`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trueup.core.splits import random_order, split_by_sizes
from trueup.io.atomic import errors_name_file
from trueup.io.load_save import load
from trueup.io.predictions import Predictions
from trueup.study.grid import digest
from trueup.training.data.sources import folder_of

SPLITS = 3
"""Of what has no halves of its own."""
SYNTHETIC_ROWS = 2000
"""In each half of a synthetic data set."""


class SyntheticLogits(NamedTuple):
    """Logits whose labels follow other logits: those before a fault is put in."""

    classes: int
    power: float = 1.0
    """Of the size of each true logit: how crooked the map is."""
    scale: float = 1.0
    shift: float = 0.0
    """Standard deviation of what is added to each class."""
    mixing: float = 0.0
    """Standard deviation of what each class takes of each other."""

    def draw(self, n: int, seed: int) -> Predictions:
        """So many rows; the fault is the same whatever the seed."""
        rng, fault = np.random.default_rng([1, seed]), np.random.default_rng(0)
        true = 2 * rng.normal(size=(n, self.classes))
        labels = (true + rng.gumbel(size=true.shape)).argmax(axis=1)
        bent = np.sign(true) * np.abs(true) ** self.power
        mix = np.eye(self.classes) + self.mixing * fault.normal(size=(self.classes, self.classes))
        return Predictions(self.scale * bent @ mix + self.shift * fault.normal(size=self.classes), labels)


SYNTHETIC: Mapping[str, SyntheticLogits] = {
    "calibrated": SyntheticLogits(4),
    "overconfident": SyntheticLogits(10, scale=2.5),
    "underconfident": SyntheticLogits(3, scale=0.4),
    "biased": SyntheticLogits(10, scale=1.5, shift=1.0),
    "crooked": SyntheticLogits(5, power=1.6),
    "mixed": SyntheticLogits(6, scale=1.5, mixing=0.2),
}
"""Data sets that need no files."""


def sources(data_dir: str | None, *, data: str | None = None, splits: int | None = None) -> list[dict[str, Any]]:
    """Settings for every network in a folder and every split of it, or for what is drawn if there is no folder.

    >>> [source["data"] for source in sources(None, splits=1)]
    ['calibrated', 'overconfident', 'underconfident', 'biased', 'crooked', 'mixed']
    """
    splits = SPLITS if splits is None else splits
    sources = list(_synthetic_sources(splits) if data_dir is None else _file_sources(logits_folder(data_dir), splits))
    if data is None:
        return sources
    if chosen := [source for source in sources if source["data"] == data]:
        return chosen
    names = dict.fromkeys(source["data"] for source in sources)
    raise ValueError(f"data must be one of {', '.join(names)}, got {data!r}")


def load_halves(settings: Mapping[str, Any]) -> tuple[Predictions, Predictions]:
    """The half to fit on and the half to measure on, of one of the sources."""
    if "file" not in settings:
        whole = SYNTHETIC[settings["data"]].draw(2 * settings["rows"], settings["split"])
        return _halves(whole, np.arange(2 * settings["rows"]))
    path = Path(settings["folder"]) / settings["file"]
    if digest(path.read_bytes()) != settings["digest"]:
        raise ValueError(f"{path}: the file has changed since the study began")
    if settings["array"] is None:
        return load(path, split="val"), load(path, split="test")
    whole = load(path, logits=settings["array"], probs=settings["probs"])
    return _halves(whole, random_order(len(whole.labels), np.random.default_rng(settings["split"])))


def _halves(whole: Predictions, order: np.ndarray) -> tuple[Predictions, Predictions]:
    val, test = split_by_sizes(order, [len(order) // 2])
    return Predictions(whole.logits[val], whole.labels[val]), Predictions(whole.logits[test], whole.labels[test])


def find_folder(data_dir: str | None, *, data: str | None = None) -> str | None:
    """The folder of files: the one named, else the `logits` of the folder of data, if there are any.

    None where there is no such file, or where what is asked for is drawn.
    """
    if data_dir is not None:
        return str(logits_folder(data_dir))
    inner = folder_of(None).expanduser().resolve() / "logits"
    return str(inner) if data not in SYNTHETIC and any(inner.glob("*.npz")) else None


def logits_folder(data_dir: str) -> Path:
    """The folder itself, or its `logits` where that is one of many."""
    folder = Path(data_dir).expanduser().resolve()
    inner = folder / "logits"
    return inner if inner.is_dir() else folder


def _file_sources(folder: Path, splits: int) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ValueError(f"{folder}: wanted a folder with .npz files of logits, found none")
    for file in files:
        with errors_name_file(file), np.load(file, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if not name.endswith("labels")]
            shapes = {name: arrays[name].shape for name in names}
        known = {"file": file.name, "digest": digest(file.read_bytes())}
        if "val_logits" in names:
            classes = shapes["val_logits"][1]
            yield {"data": file.stem, **known, "array": None, "probs": False, "split": 0, "classes": classes}
            continue
        stem = file.stem.removesuffix("_probs")
        for name in names:
            data = stem if len(names) == 1 else f"{stem}_{name}"
            probs = name == "probs" or file.stem.endswith("_probs")
            source = {"data": data, **known, "array": name, "probs": probs, "classes": shapes[name][1]}
            yield from ({**source, "split": split} for split in range(splits))


def _synthetic_sources(splits: int) -> Iterator[dict[str, Any]]:
    for name, synthetic in SYNTHETIC.items():
        for split in range(splits):
            yield {"data": name, "rows": SYNTHETIC_ROWS, "classes": synthetic.classes, "split": split}
