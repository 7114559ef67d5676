"""A calibrated network and its calibrator in one folder, in the layout of Hugging Face's `save_pretrained`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from trueup._core.errors import InputError
from trueup.io.artifacts import load_artifact, read_header
from trueup.io.load_save import save
from trueup.models.calibrated import Calibrated

CALIBRATOR = "calibrator.safetensors"
"""File of the calibrator, next to `config.json` and `model.safetensors`."""


def save_pretrained(model: Calibrated, folder: str | os.PathLike[str], *, summary: Any = None, **options: Any) -> None:
    """Write a calibrated network to a folder: the network by its own `save_pretrained`, and `calibrator.safetensors`.

    Other programs can still read the network from the folder; `from_pretrained` reads both.

    Parameters
    ----------
    model
        The calibrated network.
    folder
        Target folder.
    summary
        A note on the fit, as plain data.
    **options
        Options of the network's `save_pretrained`.
    """
    if model.before is not None:
        raise InputError("model", "have no map before the network", type(model.before).__name__, "trueup.save keeps it")
    if model.after is None:
        raise InputError("model", "have a calibrator", "none", "the network's own save_pretrained does")
    inner: Any = model.model
    classifies = "Classification" in type(inner).__name__
    classes = getattr(getattr(inner, "config", None), "num_labels", None) if classifies else None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    note = {"outputs": model.class_axis, "summary": summary}
    save(model.after, target / CALIBRATOR, n_classes=classes, summary=note)  # first, since it may reject the calibrator
    inner.save_pretrained(folder, **options)


def from_pretrained(folder: str | os.PathLike[str], model: nn.Module | None = None, **options: Any) -> Calibrated:
    """Read a calibrated network from a folder of `save_pretrained`, ready to predict.

    Parameters
    ----------
    folder
        Folder of `save_pretrained`.
    model
        The network, if only the calibrator is to be read. By default the class in `config.json` reads it.
    **options
        Options of the network's `from_pretrained`.

    Returns
    -------
    Calibrated
        The calibrated network.
    """
    file = Path(folder) / CALIBRATOR
    calibrator = load_artifact(file, "calibrator")
    if model is None:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(folder)
        names = config.architectures or []
        if not names or not hasattr(transformers, names[0]):
            got = ", ".join(names) or "none"
            raise InputError("config.json", "name a transformers class", got, "pass the network as model=")
        model = getattr(transformers, names[0]).from_pretrained(folder, **options)
    assert model is not None
    note = read_header(file).summary
    classes = note.get("outputs") if isinstance(note, dict) else None
    return Calibrated(model, after=calibrator, class_axis=classes)
