"""A calibrated network beside its calibrator in one folder, as Hugging Face's `save_pretrained` lays it out."""

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
"""The calibrator's file, beside `config.json` and `model.safetensors`."""


def save_pretrained(model: Calibrated, folder: str | os.PathLike[str], *, summary: Any = None, **options: Any) -> None:
    """Write a calibrated network to a folder: the network by its own `save_pretrained`, and `calibrator.safetensors`.

    Whoever does not know of the calibrator still reads the network from there; `from_pretrained` reads both.
    `summary`, plain data, is a note on the fit; `options` go to the network's `save_pretrained`.
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
    save(model.after, target / CALIBRATOR, n_classes=classes, summary=note)  # what it refuses costs nothing
    inner.save_pretrained(folder, **options)


def from_pretrained(folder: str | os.PathLike[str], model: nn.Module | None = None, **options: Any) -> Calibrated:
    """Read a calibrated network that `save_pretrained` wrote, ready to predict.

    The network is of the class that its `config.json` names, read by that class's own `from_pretrained` with
    `options`; or it is `model`, and only the calibrator is read.
    """
    file = Path(folder) / CALIBRATOR
    calibrator = load_artifact(file, "calibrator")
    if model is None:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(folder)
        names = config.architectures or []
        if not names or not hasattr(transformers, names[0]):
            got = ", ".join(names) or "none"
            raise InputError("config.json", "name a class of transformers", got, "give the network as model=")
        model = getattr(transformers, names[0]).from_pretrained(folder, **options)
    assert model is not None
    note = read_header(file).summary
    classes = note.get("outputs") if isinstance(note, dict) else None
    return Calibrated(model, after=calibrator, class_axis=classes)
