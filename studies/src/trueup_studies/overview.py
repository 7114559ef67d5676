"""List of studies and presets with their numbers of runs, costs and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trueup._core.executors import count_cores
from trueup_studies.cost import GPU_RATE, estimate, measure_rate
from trueup_studies.grid import STUDIES, Options, Study
from trueup_studies.training.data import DATASETS, find_files
from trueup_studies.training.data.sources import FOLDERS, folder_of


class Preset(NamedTuple):
    """One line of the list."""

    study: str
    preset: str
    data: tuple[str, ...]
    files: tuple[str, ...]
    """Missing files: data sets with their files, and files of weights."""
    present: tuple[str, ...]
    """Files that are present, with their folder."""
    optional: tuple[str, ...]
    """Absent optional files, with what happens without them."""
    cells: int | None
    """Number of runs; None if it depends on missing files."""
    flops: float | None
    """Floating-point operations of its networks; None if they are not counted."""
    gpu_hours: float | None
    """Hours of the networks at `cost.GPU_RATE`."""
    machine_hours: float | None
    """Hours of the networks on the cores of this machine."""
    uncounted: tuple[str, ...]
    """Networks that could not be counted, with the reason."""


def list_presets(data_dir: str | None = None) -> list[Preset]:
    """Return every preset of every study, with its files and cost.

    >>> [preset.preset for preset in list_presets("/nowhere") if preset.study == "rethinking"]
    ['digits', 'fashion_mnist', 'cifar10', 'trec', 'newsgroups20', 'fashion_mnist-fitted', 'trec-pooled', 'digits-30',
     'paper', 'paper-resnet110']
    """
    lines, rate = [], measure_rate() * count_cores()
    for name in STUDIES:
        study = STUDIES[name]
        for preset, data in study.presets().items() or [("", ())]:
            missing, present, optional = _find(study, preset, data, data_dir)
            options = Options(preset=preset or None, data_dir=data_dir)
            try:
                cells = len(study.cells(options))
                counted = estimate(study, options)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                cells, counted = None, None
            flops = None if counted is None or not counted.flops else counted.flops
            gpu, here = (None if counted is None or flops is None else counted.hours(r) for r in (GPU_RATE, rate))
            uncounted = () if counted is None else counted.unknown
            lines.append(
                Preset(name, preset, tuple(data), missing, present, optional, cells, flops, gpu, here, uncounted)
            )
    return lines


def _find(
    study: Study, preset: str, data: Sequence[str], data_dir: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the missing, present and absent optional files of a preset."""
    folder = folder_of(data_dir)
    missing = missing_files(data, data_dir)
    present: list[str] = []
    optional: list[str] = []
    for name in (name for name in dict.fromkeys(data) if name in DATASETS):
        files, where = find_files(name, data_dir)
        present += [f"{name}: {where}"] if where is not None else [f"{name}: comes with scikit-learn"] * (not files)
    for file in study.files(preset):
        if any(folder.glob(file.path)):
            present.append(f"{file.path}: {folder}")
        else:
            (missing if file.needed else optional).append(f"{file.path}: {file.words}")
    return tuple(missing), tuple(present), tuple(optional)


def missing_files(data: Sequence[str], data_dir: str | None) -> list[str]:
    """Return the data sets whose files are missing, each with the names of its files.

    >>> missing_files(["digits", "trec"], "/nowhere")
    ['trec: TREC.train.all + TREC.test.all; or train_5500.label + TREC_10.label; or trec/dataset_dict.json']
    """
    missing = []
    for name in dict.fromkeys(data):
        if name in DATASETS:
            files, where = find_files(name, data_dir)
            if files and where is None:
                missing.append(f"{name}: {files}")
    return missing


def search_folders(data_dir: str | None) -> str:
    """Return the folders that are searched for files."""
    folder = folder_of(data_dir)
    return ", ".join(str(folder / pattern.format(name="NAME")) for pattern in FOLDERS)
