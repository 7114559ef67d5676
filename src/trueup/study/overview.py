"""What there is to run: studies, their presets, how many runs each has, and which files are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trueup.study.cost import GPU_RATE, estimate
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
    flops: float | None
    """Floating-point operations of its networks; None where they are not counted."""
    gpu_hours: float | None
    """What these take at `cost.GPU_RATE`."""
    uncounted: tuple[str, ...]
    """What of its networks could not be counted, and why."""


def list_presets(data_dir: str | None = None) -> list[Preset]:
    """Every preset of every study, with the files that are missing.

    >>> [preset.preset for preset in list_presets("/nowhere") if preset.study == "rethinking"]
    ['digits', 'fashion_mnist', 'cifar10', 'trec', 'paper', 'paper-resnet110']
    """
    lines = []
    for name in STUDIES:
        study = STUDIES[name]
        for preset, data in study.presets().items() or [("", ())]:
            missing = missing_files(data, data_dir)
            options = Options(preset=preset or None, data_dir=data_dir)
            try:
                cells = len(study.cells(options))
                counted = estimate(study, options)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                cells, counted = None, None
            flops = None if counted is None or not counted.flops else counted.flops
            hours = None if counted is None or flops is None else counted.hours(GPU_RATE)
            uncounted = () if counted is None else counted.unknown
            lines.append(Preset(name, preset, tuple(data), tuple(missing), cells, flops, hours, uncounted))
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
