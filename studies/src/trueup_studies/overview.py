"""What there is to run: studies, their presets, how many runs each has, what it costs, and which files it wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trueup._core.executors import count_cores
from trueup_studies.cost import GPU_RATE, estimate, measure_rate
from trueup_studies.grid import STUDIES, Options, Study
from trueup_studies.training.data import DATASETS, find_files
from trueup_studies.training.data.sources import PLACES, folder_of


class Preset(NamedTuple):
    """One line of the list."""

    study: str
    preset: str
    data: tuple[str, ...]
    files: tuple[str, ...]
    """What it needs and is missing: data sets with the files they want, and files of weights."""
    found: tuple[str, ...]
    """What it wants and is there, with the folder."""
    optional: tuple[str, ...]
    """Files that it would take and that are not there, with what it does without them."""
    cells: int | None
    """Runs; None where the files that it depends on are missing."""
    flops: float | None
    """Floating-point operations of its networks; None where they are not counted."""
    gpu_hours: float | None
    """What these take at `cost.GPU_RATE`."""
    machine_hours: float | None
    """What they take on the cores of this machine."""
    uncounted: tuple[str, ...]
    """What of its networks could not be counted, and why."""


def list_presets(data_dir: str | None = None) -> list[Preset]:
    """Every preset of every study, with the files that it wants and what it costs.

    >>> [preset.preset for preset in list_presets("/nowhere") if preset.study == "rethinking"]
    ['digits', 'fashion_mnist', 'cifar10', 'trec', 'paper', 'paper-resnet110']
    """
    lines, rate = [], measure_rate() * count_cores()
    for name in STUDIES:
        study = STUDIES[name]
        for preset, data in study.presets().items() or [("", ())]:
            files, found, optional = _find(study, preset, data, data_dir)
            options = Options(preset=preset or None, data_dir=data_dir)
            try:
                cells = len(study.cells(options))
                counted = estimate(study, options)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                cells, counted = None, None
            flops = None if counted is None or not counted.flops else counted.flops
            gpu, here = (None if counted is None or flops is None else counted.hours(r) for r in (GPU_RATE, rate))
            uncounted = () if counted is None else counted.unknown
            lines.append(Preset(name, preset, tuple(data), files, found, optional, cells, flops, gpu, here, uncounted))
    return lines


def _find(
    study: Study, preset: str, data: Sequence[str], data_dir: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What a preset needs and has not, what it has, and what it could use."""
    folder = folder_of(data_dir)
    missing = missing_files(data, data_dir)
    found: list[str] = []
    optional: list[str] = []
    for name in (name for name in dict.fromkeys(data) if name in DATASETS):
        wanted, where = find_files(name, data_dir)
        found += [f"{name}: {where}"] if where is not None else [f"{name}: comes with scikit-learn"] * (not wanted)
    for file in study.files(preset):
        if any(folder.glob(file.path)):
            found.append(f"{file.path}: {folder}")
        else:
            (missing if file.needed else optional).append(f"{file.path}: {file.words}")
    return tuple(missing), tuple(found), tuple(optional)


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
