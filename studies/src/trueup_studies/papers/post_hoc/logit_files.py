"""Logits to calibrate, in two halves: from the files of a folder, or drawn with faults that are known.

A folder is searched for `.npz` files. One with `val_` and `test_` halves is used as it is split. Any other is split in
halves at random: its `logits` or `probs`, or where it has neither, one network's array after the other, which are
probabilities if the file's name says so (`…_probs.npz`). What else it holds is not looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import numpy as np

from trueup._core.splits import random_order, split_by_sizes
from trueup.io.atomic import errors_name_file
from trueup.io.load_save import load
from trueup.io.predictions import Predictions, looks_like_probabilities
from trueup_studies.grid import digest
from trueup_studies.training.data.sources import folder_of

SPLITS = 3
"""Of what has no halves of its own."""
SYNTHETIC_ROWS = 2000
"""In each half of a synthetic data set."""
KINDS = ("logits", "probs", "probabilities")
"""Names of arrays of predictions."""
PROBS = "_probs"
"""At the end of a file's name: its arrays are probabilities."""


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
        return _read(path, None, settings["probs"], "val"), _read(path, None, settings["probs"], "test")
    whole = _read(path, settings["array"], settings["probs"])
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
    owners: dict[str, Path] = {}
    for file in files:
        known = {"file": file.name, "digest": digest(file.read_bytes())}
        for array in _arrays(file, known["digest"]):
            name = array.data
            if name in owners:  # logits and probabilities of one network, or of two
                name = name.replace(file.stem.removesuffix(PROBS), file.stem, 1)
            if name in owners:
                raise ValueError(f"{file} and {owners[name].name} both have {name!r}: give one of them another name")
            owners[name] = file
            source = {"data": name, **known, "array": array.name, "probs": array.probs, "classes": array.classes}
            yield from ({**source, "split": split} for split in range(1 if array.name is None else splits))


class _Array(NamedTuple):
    """Predictions in a file, which can be read."""

    data: str
    name: str | None
    """None of a file in halves."""
    probs: bool
    classes: int


@cache
def _arrays(file: Path, content: str) -> list[_Array]:
    """What can be calibrated of a file with this content; a file that cannot be read so is refused before any run."""
    if not is_zipfile(file):
        raise ValueError(f"{file}: wanted a file as numpy.savez writes it, this is none")
    shapes = _shapes(file)
    stem, named = file.stem.removesuffix(PROBS), file.stem.endswith(PROBS)
    if halves := [kind for kind in KINDS[:2] if f"val_{kind}" in shapes]:
        probs = halves[0] != "logits"
        widths = {split: _width(file, None, probs, split) for split in ("val", "test")}
        if widths["val"] != widths["test"]:
            raise ValueError(f"{file}: wanted as many classes in both halves, got {widths['val']} and {widths['test']}")
        return [_Array(file.stem, None, probs, widths["val"])]
    rows = (shapes.get("labels") or (None,))[0]
    names = [name for name in KINDS if name in shapes]
    names = names or [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == rows]
    if not names or rows is None:
        raise ValueError(
            f"{file}: wanted arrays labels and logits or probs, or these of two halves as val_labels and test_labels, "
            f"found {', '.join(f'{name} {shape}' for name, shape in shapes.items()) or 'none'}"
        )
    found = []
    for name in names:
        probs = named or name in KINDS[1:]
        data = stem if len(names) == 1 else f"{stem}_{name}"
        found.append(_Array(data, name, probs, _width(file, name, probs)))
    return found


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of the arrays of numbers."""
    shapes = {}
    with errors_name_file(file), np.load(file, allow_pickle=False) as arrays:
        for name in arrays.files:
            with suppress(ValueError):  # objects, which nobody needs here, are not read
                shapes[name] = getattr(arrays[name], "shape", None)
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _width(file: Path, array: str | None, probs: bool, split: str | None = None) -> int:
    """The number of classes of what can be read and is no probability under another name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads it for a cell hears of it
        logits = _read(file, array, probs, split).logits
    if not len(logits):
        raise ValueError(f"{file}: wanted predictions, got none at all")
    if not probs and (words := looks_like_probabilities(logits)):
        names = "val_probs and test_probs" if split else "probs"
        raise ValueError(f"{file}: {words}; call what holds probabilities {names}")
    return int(logits.shape[1])


def _read(file: Path, array: str | None, probs: bool, split: str | None = None) -> Predictions:
    return load(file, logits=array or KINDS[probs], probs=probs, split=split)


def _synthetic_sources(splits: int) -> Iterator[dict[str, Any]]:
    for name, synthetic in SYNTHETIC.items():
        for split in range(splits):
            yield {"data": name, "rows": SYNTHETIC_ROWS, "classes": synthetic.classes, "split": split}
