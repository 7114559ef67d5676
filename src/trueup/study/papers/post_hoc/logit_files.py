"""Logits to calibrate, in two halves: from the files of a folder, or drawn with faults that are known.

A folder is searched for `.npz` files. One with `val_` and `test_` halves is used as it is split. Any other is split in
halves at random, one array of it after the other: `logits`, or probabilities, which are told by the array's name
(`probs`) or by the file's (`…_probs.npz`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trueup.io.atomic import errors_name_file
from trueup.io.predictions import Predictions, load

SPLITS = 3
"""Of what has no halves of its own."""
DRAWN_ROWS = 2000
"""In each half of what is drawn."""


class Drawn(NamedTuple):
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


DRAWN: Mapping[str, Drawn] = {
    "calibrated": Drawn(4),
    "overconfident": Drawn(10, scale=2.5),
    "underconfident": Drawn(3, scale=0.4),
    "biased": Drawn(10, scale=1.5, shift=1.0),
    "crooked": Drawn(5, power=1.6),
    "mixed": Drawn(6, scale=1.5, mixing=0.2),
}
"""What is used without files."""


def sources(data_dir: str | None, *, data: str | None = None, splits: int | None = None) -> list[dict[str, Any]]:
    """Settings for every network in a folder and every split of it, or for what is drawn if there is no folder.

    >>> [source["data"] for source in sources(None, splits=1)]
    ['calibrated', 'overconfident', 'underconfident', 'biased', 'crooked', 'mixed']
    """
    splits = SPLITS if splits is None else splits
    found = list(_drawn(splits) if data_dir is None else _files(folder(data_dir), splits))
    if data is None:
        return found
    if chosen := [source for source in found if source["data"] == data]:
        return chosen
    names = dict.fromkeys(source["data"] for source in found)
    raise ValueError(f"data must be one of {', '.join(names)}, got {data!r}")


def halves(settings: Mapping[str, Any]) -> tuple[Predictions, Predictions]:
    """The half to fit on and the half to measure on, of one of the sources."""
    if "file" not in settings:
        drawn = DRAWN[settings["data"]].draw(2 * settings["rows"], settings["split"])
        return _cut(drawn, settings["rows"])
    path = Path(settings["folder"]) / settings["file"]
    if _digest(path) != settings["digest"]:
        raise ValueError(f"{path}: the file has changed since the study began")
    if settings["array"] is None:
        return load(path, split="val"), load(path, split="test")
    whole = load(path, logits=settings["array"], probs=settings["probs"])
    order = np.random.default_rng(settings["split"]).permutation(len(whole.labels))
    return _cut(Predictions(whole.logits[order], whole.labels[order]), len(order) // 2)


def _cut(whole: Predictions, at: int) -> tuple[Predictions, Predictions]:
    return Predictions(whole.logits[:at], whole.labels[:at]), Predictions(whole.logits[at:], whole.labels[at:])


def folder(data_dir: str) -> Path:
    """The folder itself, or its `logits` where that is one of many."""
    folder = Path(data_dir).expanduser().resolve()
    inner = folder / "logits"
    return inner if inner.is_dir() else folder


def _files(folder: Path, splits: int) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ValueError(f"{folder}: wanted a folder with .npz files of logits, found none")
    for file in files:
        with errors_name_file(file), np.load(file, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if not name.endswith("labels")]
            shapes = {name: arrays[name].shape for name in names}
        known = {"file": file.name, "digest": _digest(file)}
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


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _drawn(splits: int) -> Iterator[dict[str, Any]]:
    for name, drawn in DRAWN.items():
        for split in range(splits):
            yield {"data": name, "rows": DRAWN_ROWS, "classes": drawn.classes, "split": split}
