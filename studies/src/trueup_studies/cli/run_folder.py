"""Folders of `train` and data sets by name, for every verb that takes a network and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.options import require_name
from trueup.cli.output import SCHEMA, to_json
from trueup.cli.resolve import RUN, load_weights

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

WEIGHTS = "weights.safetensors"
"""File of the trained weights in a folder of `train`."""


def load_run(folder: str) -> tuple[nn.Module, str, int | None]:
    """Load the trained network of a folder; return it, the name of its data and the seed of their split."""
    from trueup_studies.networks import build_network

    run = read_run(Path(folder))
    network = build_network(run["network"], run["options"], normalisation=run["normalisation"])
    return load_weights(network, Path(folder) / WEIGHTS), run["data"], run["seed"]


def load_named(name: str, folder: Path | None, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Load the validation and test parts of a data set by its name."""
    from trueup_studies.training.data import DATASETS, load_data

    dataset = load_data(require_name("data set", DATASETS, name), folder, seed=seed)
    return dataset.val, dataset.test


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data with the schema number, atomically."""
    from trueup.io.atomic import atomic_write

    text = json.dumps(to_json({"schema": SCHEMA, **content}), indent=2, allow_nan=False)
    with atomic_write(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """Read the network, data and settings of a run of `train`."""
    from trueup.io.atomic import errors_name_file

    with errors_name_file(folder / RUN):
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if run.get("schema") != SCHEMA:
            raise ValueError(f"the schema must be {SCHEMA}, got {run.get('schema')!r}")
        return dict(run)
