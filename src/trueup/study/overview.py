"""What there is to run: studies, their presets, how many runs each has, and which files are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trueup.study.grid import STUDIES, Options
from trueup.training.data import DATASETS, find_files
from trueup.training.data.sources import PLACES, folder_of


class Preset(NamedTuple):
    """One line of the list."""

    study: str
    preset: str
    data: tuple[str, ...]
    files: tuple[str, ...]
    """What of its data is missing, and which files would be wanted."""
    cells: int | None
    """Runs; None where the files that it depends on are missing."""


def list_presets(data_dir: str | None = None) -> list[Preset]:
    """Every preset of every study, with the files that are missing.

    >>> [preset.preset for preset in list_presets("/nowhere") if preset.study == "rethinking"]
    ['digits', 'fashion_mnist', 'cifar10', 'trec', 'paper']
    """
    lines = []
    for name in STUDIES:
        study = STUDIES[name]
        for preset, data in study.presets().items() or [("", ())]:
            missing = missing_files(data, data_dir)
            try:
                cells = len(study.cells(Options(preset=preset or None, data_dir=data_dir)))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                cells = None
            lines.append(Preset(name, preset, tuple(data), tuple(missing), cells))
    return lines


def missing_files(data: Sequence[str], data_dir: str | None) -> list[str]:
    """The data sets whose files are not there, each with the files it wants.

    >>> missing_files(["digits", "trec"], "/nowhere")
    ['trec: TREC.train.all + TREC.test.all; or train_5500.label + TREC_10.label; or trec/dataset_dict.json']
    """
    missing = []
    for name in dict.fromkeys(data):
        if name in DATASETS:
            wanted, where = find_files(name, data_dir)
            if wanted and where is None:
                missing.append(f"{name}: {wanted}")
    return missing


def places(data_dir: str | None) -> str:
    """Where files are looked for."""
    folder = folder_of(data_dir)
    return ", ".join(str(folder / place.format(name="NAME")) for place in PLACES)
