"""Everything that is saved, in versions that can be told apart: a file on disk is whole and of one version, or it is
broken."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import trueup
from trueup import load, save
from trueup.calibrators import Temperature, VarianceScaling
from trueup.io import load_logits, save_logits
from trueup.io.atomic import atomic_write
from trueup.monitor import Monitor


class Save(NamedTuple):
    """One kind of file."""

    file: str
    write: Callable[[Path, int], Any]
    """A version of it, to a path."""
    read: Callable[[Path], int]
    """Which version a file is; of one that is not whole, an error."""


def pair(version, rows=2000):
    """Three numbers a row, all of them the version, with a minus: three times 33 would be per cent."""
    return np.full((rows, 3), -float(version)), np.full(rows, version % 3)


def version_of(logits, labels=None):
    found = set(np.unique(logits))
    assert len(found) == 1, f"a mixture of versions {found}"
    version = -int(found.pop())
    assert labels is None or set(np.unique(labels)) == {version % 3}, "labels of another version"
    return version


def predictions(suffix):
    def write(path, version):
        trueup.save(pair(version), path)

    return Save(f"net{suffix}", write, lambda path: version_of(*trueup.load(path)))


def logits_alone(suffix):
    def write(path, version):
        save_logits(path, pair(version)[0])

    return Save(f"new{suffix}", write, lambda path: version_of(load_logits(path)))


def write_calibrator(path, version):
    trueup.save(Temperature(1.0 + version), path)


def write_recalibrator(path, version):
    save(VarianceScaling(1.0 + version), path)


def write_monitor(path, version):
    monitor = Monitor(3)
    monitor.update(*pair(0, version + 1))
    save(monitor, path)


@cache
def clamped():
    x, y = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    return trueup.clamp(torch.nn.Identity(), [(x, y)], objective=trueup.clamping.Objective(penalty=0.01))


def write_clamped(path, version):
    network = clamped()
    network.before.delta.fill_(-float(version))
    trueup.save(network, path)


def read_clamped(path):
    return version_of(trueup.load(path, model=torch.nn.Identity()).before.delta.numpy())


@cache
def found():
    """An audit, for pages."""
    from trueup.reports import report

    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 3))
    return report((3 * z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)), methods=["temperature"], progress=False).audit


def write_page(path, version):
    from trueup.reports import Report

    Report(found(), title=f"version {version}.").save(path)


def read_page(path):
    text = Path(path).read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    return int(text.partition("<title>version ")[2].partition(".")[0])


SAVES = {
    **{f"predictions {suffix}": predictions(suffix) for suffix in (".npz", ".npy", ".csv", ".parquet", ".safetensors")},
    **{f"logits {suffix}": logits_alone(suffix) for suffix in (".npz", ".npy", ".csv", ".parquet", ".safetensors")},
    "calibrator": Save(
        "calibrator.safetensors",
        write_calibrator,
        lambda path: round(float(trueup.load(path).temperature)) - 1,
    ),
    "recalibrator": Save(
        "recalibrator.safetensors", write_recalibrator, lambda path: round(float(load(path).scale)) - 1
    ),
    "monitor": Save("watch.safetensors", write_monitor, lambda path: load(path).rows - 1),
    "clamped network": Save("clamped.safetensors", write_clamped, read_clamped),
    "report": Save("report.html", write_page, read_page),
}
"""All that have a reader of ours, by name."""


def torch_checkpoint(path, version):
    """What training keeps, in the way it keeps it."""
    with atomic_write(path) as (draft,):
        torch.save({"version": version, "weights": torch.zeros(3000)}, draft)


WRITTEN = {
    **SAVES,
    "checkpoint": Save("state.pt", torch_checkpoint, lambda path: torch.load(path, weights_only=True)["version"]),
}
"""All of them by name."""


def file_contents(path):
    """All files that belong to a path, with their bytes."""
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.name != "filler" and file.is_file()}
