"""A clamped network's own part in a file: δ, T and the record of the fit in safetensors, never the network itself.

The header is JSON, under the schema of calibrators' files: {"schema": 1, "clamped": {"before": "Shift", "record": …,
"model": …, "weights": …}, "versions": …}. `model` holds the shape of every parameter and buffer of the network that was
clamped, and `weights` a few sums of them, so that a file is not put before another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from trueup.calibrators.temperature import Temperature
from trueup.clamping.fit_record import Clamped, FitRecord
from trueup.clamping.known_network import compare_shapes, compare_weights, model_shapes, project_weights
from trueup.clamping.maps import Affine, Shift
from trueup.io.artifacts import (
    Artifact,
    open_artifact,
    pack,
    require_safetensors_suffix,
    unpack,
    versions,
    write_artifact,
)
from trueup.models.calibrated import device_of

_TABLES = ("candidates", "gammas")
_KINDS: Mapping[str, type[Shift]] = {"Shift": Shift, "Affine": Affine}
_WEIGHTS = "weights"
"""An entry that files of former versions do not have."""


def save_clamped(clamped: Clamped, path: str | os.PathLike[str]) -> None:
    """Write δ, T and the record of a clamped network to a `.safetensors` file that is either complete or not there.

    The network's own weights are not in it. Nothing is rounded: what is loaded is the same bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.clamping.fit import clamp
    >>> model, x, y = nn.Identity(), torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> clamped = clamp(model, [(x, y)], penalty=0.01)
    >>> with TemporaryDirectory() as folder:
    ...     save_clamped(clamped, f"{folder}/net.safetensors")
    ...     bool((load_clamped(model, f"{folder}/net.safetensors")(x) == clamped(x)).all())
    True
    """
    require_safetensors_suffix(path)
    if not isinstance(clamped, Clamped):
        raise ValueError(f"clamped must be what clamp returns, got {type(clamped).__name__}")
    before, after = clamped.before, clamped.after
    if _KINDS.get(type(before).__name__) is not type(before) or not isinstance(after, Temperature):
        raise ValueError(
            "clamped must have a Shift or Affine before and a Temperature after the model, "
            f"got {type(before).__name__} and {type(after).__name__}"
        )
    record = asdict(clamped.fit_record)
    for table in _TABLES:
        record[table] = list(record[table].items())
    content = {
        "clamped": {
            "before": type(before).__name__,
            "record": pack(record, "record", None),
            "model": model_shapes(clamped.model),
            _WEIGHTS: project_weights(clamped.model),
        },
        "versions": versions(),
    }
    write_artifact(path, "clamped", content, {**dict(before.named_buffers()), "temperature": after.temperature})


def load_clamped(model: nn.Module, path: str | os.PathLike[str]) -> Clamped:
    """Put what `save_clamped` wrote around a model; if it was written for another one, an error names what differs."""
    with open_artifact(path, "clamped") as artifact:
        inside = _inside(artifact)
        compare_shapes(inside["model"], model_shapes(model), "clamped")
        if _WEIGHTS in inside:
            compare_weights(inside[_WEIGHTS], project_weights(model), "clamped")
        before, after = _parts(inside["before"], artifact.tensors())
        record = unpack(inside["record"], {})
        if "lam" in record:  # the penalty's name in older files
            record["penalty"] = record.pop("lam")
        for table in _TABLES:
            record[table] = dict(record[table])
        clamped = Clamped(model, before=before.to(device_of(model)), after=after.to(device_of(model)))
        try:
            clamped.fit_record = FitRecord(**record)
        except TypeError as error:
            raise ValueError(f"the record of the fit is none: {error}") from None
    return clamped


def _inside(artifact: Artifact) -> dict[str, Any]:
    inside = artifact.content.get("clamped")
    if not isinstance(inside, dict) or set(inside) - {_WEIGHTS} != {"before", "record", "model"}:
        raise ValueError("the header must tell of before, record and model")
    return inside


def _parts(kind: str, tensors: dict[str, Tensor]) -> tuple[Shift, Temperature]:
    if kind not in _KINDS:
        raise ValueError(f"no input map is called {kind!r}; there are: {', '.join(_KINDS)}")
    wanted = {"delta", "temperature"} | ({"scale"} if kind == "Affine" else set())
    optional = {"low", "high"} if "low" in tensors or "high" in tensors else set()
    if set(tensors) != wanted | optional:
        raise ValueError(f"the tensors must be {', '.join(sorted(wanted))}, got {', '.join(sorted(tensors))}")
    for name, tensor in tensors.items():  # a box may be open, at infinity
        if not bool((torch.isfinite(tensor) if name in wanted else ~torch.isnan(tensor)).all()):
            raise ValueError(f"the tensor {name} must be finite")
    after = Temperature(tensors.pop("temperature"))
    box = (tensors.pop("low"), tensors.pop("high")) if optional else None
    return _KINDS[kind](**tensors, box=box), after
