"""Logits to calibrate, in two halves: from the files of a folder, or synthetic with known faults.

A folder is searched for `.npz` files. One with `val_` and `test_` halves is used as it is split. Any other is split in
halves at random. Its arrays are `logits` or `probs`, or else one array per network; those are probabilities if the
file is called `…_probs.npz`. Other arrays are ignored.
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
from trueup.io.predictions import Predictions
from trueup_studies.grid import digest
from trueup_studies.training.data.sources import folder_of

SPLITS = 3
"""Random splits of a file without halves."""
SYNTHETIC_ROWS = 2000
"""Rows in each half of a synthetic data set."""
KINDS = ("logits", "probs", "probabilities")
"""Names of arrays of predictions."""
PROBS = "_probs"
"""Suffix of names of files with probabilities."""


class SyntheticLogits(NamedTuple):
    """Synthetic logits with a known fault; the labels follow the logits without it."""

    classes: int
    power: float = 1.0
    """Exponent of the magnitude of each true logit."""
    scale: float = 1.0
    shift: float = 0.0
    """Standard deviation of the offset of each class."""
    mixing: float = 0.0
    """Standard deviation of the off-diagonal entries of a random mixing matrix."""

    def draw(self, n: int, seed: int) -> Predictions:
        """Draw `n` rows; the fault does not depend on the seed."""
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
"""Synthetic data sets by name."""


def sources(data_dir: str | None, *, data: str | None = None, splits: int | None = None) -> list[dict[str, Any]]:
    """Return the settings of every network and split in a folder, or of the synthetic data sets without a folder.

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
    """Load the halves of a source: rows to fit on and rows to score."""
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
    """Return the folder of files: the named one, else `logits` in the folder of data.

    None if it has no files, or if the selected data set is synthetic.
    """
    if data_dir is not None:
        return str(logits_folder(data_dir))
    inner = folder_of(None).expanduser().resolve() / "logits"
    return str(inner) if data not in SYNTHETIC and any(inner.glob("*.npz")) else None


def logits_folder(data_dir: str) -> Path:
    """Return the folder's subfolder `logits` if it exists, else the folder."""
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
            if name in owners:  # one network has logits and probabilities
                name = name.replace(file.stem.removesuffix(PROBS), file.stem, 1)
            if name in owners:
                raise ValueError(f"{file} and {owners[name].name} both have {name!r}: give one of them another name")
            owners[name] = file
            source = {"data": name, **known, "array": array.name, "probs": array.probs, "classes": array.classes}
            yield from ({**source, "split": split} for split in range(1 if array.name is None else splits))


class _Array(NamedTuple):
    """Readable predictions in a file."""

    data: str
    name: str | None
    """None for a file in halves."""
    probs: bool
    classes: int


@cache
def _arrays(file: Path, content: str) -> list[_Array]:
    """Find the predictions in a file; reject an unusable file before any run. `content` keys the cache."""
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
    arrays = []
    for name in names:
        probs = named or name in KINDS[1:]
        data = stem if len(names) == 1 else f"{stem}_{name}"
        arrays.append(_Array(data, name, probs, _width(file, name, probs)))
    return arrays


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the numeric arrays."""
    shapes = {}
    with errors_name_file(file), np.load(file, allow_pickle=False) as arrays:
        for name in arrays.files:
            with suppress(ValueError):  # skip arrays of objects
                shapes[name] = getattr(arrays[name], "shape", None)
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _width(file: Path, array: str | None, probs: bool, split: str | None = None) -> int:
    """Return the number of classes; reject empty files and probabilities stored under another name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cell that reads it will warn
        logits = _read(file, array, probs, split).logits
    if not len(logits):
        raise ValueError(f"{file}: wanted predictions, got none at all")
    return int(logits.shape[1])


def _read(file: Path, array: str | None, probs: bool, split: str | None = None) -> Predictions:
    return load(file, logits=array or KINDS[probs], probs=probs or None, split=split)


def _synthetic_sources(splits: int) -> Iterator[dict[str, Any]]:
    for name, synthetic in SYNTHETIC.items():
        for split in range(splits):
            yield {"data": name, "rows": SYNTHETIC_ROWS, "classes": synthetic.classes, "split": split}
