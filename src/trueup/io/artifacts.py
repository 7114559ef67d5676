"""Calibrators and their files: safetensors with a JSON header, which nothing but data can be in.

A file holds the constructor's arguments, since a calibrator is what its constructor makes of them. Tensors are stored
under names such as `steps.0.temperature`; the rest is in the header, where {"tensor": name} stands in a tensor's place:

    {"schema": 1, "calibrator": {"method": "Temperature", "config": {"temperature": {"tensor": "temperature"}},
     "certificate": …}, "classes": 10, "versions": {"trueup": "0.1.0", "torch": "2.13.0"}, "summary": …}

On loading, a method's name is looked up among the calibrators of this package, and nothing is imported by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trueup.core.module import ParametricModule
from trueup.core.optimize import Certificate
from trueup.core.version import __version__
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.io.headers import KEY, SCHEMA, header_content, safetensors_file
from trueup.registry import CALIBRATORS


class Header(NamedTuple):
    """What a file says of the calibrator it holds."""

    method: str
    """The class's name."""
    classes: int | None
    """How many classes it was fitted to, if the one who saved it said so."""
    versions: Mapping[str, str]
    summary: Any
    """What the one who saved it wrote about the fit."""


def save_calibrator(
    calibrator: Any, path: str | os.PathLike[str], *, classes: int | None = None, summary: Any = None
) -> None:
    """Write a calibrator, or a chain of them, to a `.safetensors` file that is either complete or not there.

    How the fit ended is kept with it; `classes` and `summary` (plain data) are for whoever reads the file. Nothing is
    rounded: what is loaded has the same parameters bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.calibrators.temperature import Temperature
    >>> with TemporaryDirectory() as folder:
    ...     save_calibrator(Temperature(1.7), f"{folder}/net.safetensors", summary={"fitted to": "val"})
    ...     load_calibrator(f"{folder}/net.safetensors"), read_header(f"{folder}/net.safetensors").summary
    (Temperature(temperature=1.7), {'fitted to': 'val'})
    """
    file = safetensors_file(path)
    if not _is_calibrator(calibrator):
        raise ValueError(f"calibrator must be a Calibrator, got {type(calibrator).__name__}")
    if classes is not None:
        calibrator(torch.zeros(1, classes))  # a calibrator of another number of classes says so
    tensors: dict[str, Tensor] = {}
    content = {
        "schema": SCHEMA,
        "calibrator": pack(calibrator, "", tensors)["calibrator"],
        "classes": classes,
        "versions": {"trueup": __version__, "torch": str(torch.__version__)},
        "summary": pack(summary, "summary", None),
    }
    with atomic_write(file) as (draft,):
        save_file(tensors, draft, metadata={KEY: json.dumps(content, allow_nan=False, ensure_ascii=False)})


def load_calibrator(path: str | os.PathLike[str]) -> Any:
    """Read a calibrator from a file that `save_calibrator` wrote; of anything else one sentence says what is wrong."""
    file = require_file(Path(path))
    with errors_name_file(file), safe_open(file, framework="pt") as stored:
        content = _entries(header_content(stored, "calibrator"), "header", _CONTENT)
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        found = unpack({"calibrator": content["calibrator"]}, tensors)
        if tensors:
            raise ValueError(f"no parameter refers to {', '.join(sorted(tensors))}")
        if content["classes"] is not None:
            if type(content["classes"]) is not int or not 2 <= content["classes"] <= MOST_CLASSES:
                raise ValueError(f"classes must be a whole number of 2..{MOST_CLASSES}, got {content['classes']!r}")
            found(torch.zeros(1, content["classes"]))  # parameters of another number of classes say so
    return found


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read what a file says of its calibrator, without the calibrator."""
    file = require_file(Path(path))
    with errors_name_file(file), safe_open(file, framework="pt") as stored:
        content = _entries(header_content(stored, "calibrator"), "header", _CONTENT)
        method = _entries(content["calibrator"], "calibrator", _CALIBRATOR)["method"]
        return Header(method, content["classes"], content["versions"], unpack(content["summary"], {}))


MOST_CLASSES = 1 << 24
"""Far more than any network has: what a damaged file says must not fill the memory."""

_CONTENT = {"schema", "calibrator", "classes", "versions", "summary"}
_CALIBRATOR = {"method", "config", "certificate"}


def pack(value: Any, name: str, tensors: dict[str, Tensor] | None) -> Any:
    """Plain data for the header, tensors put aside; whatever is no scalar is an object whose only key is its kind.

    `name` is what errors call the value, and what its tensors' names begin with; without a place for tensors there may
    be none in it.

    >>> pack({"steps": (1, float("inf"))}, "summary", None)
    {'dict': {'steps': {'tuple': [1, {'float': 'inf'}]}}}
    """
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": str(value)}
    if isinstance(value, (tuple, list, nn.ModuleList)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}}
    if tensors is not None and isinstance(value, Tensor):
        # Buffers may be views of one memory, which the format does not allow.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if tensors is not None and _is_calibrator(value):
        kind, prefix = type(value).__name__, f"{name}." if name else ""
        if CALIBRATORS.get(kind) is not type(value):
            raise ValueError(
                f"only calibrators of trueup itself can be saved, since no other could be found; got {kind}"
            )
        config = {key: pack(item, f"{prefix}{key}", tensors) for key, item in value.config().items()}
        ended = None if value.certificate is None else pack(asdict(value.certificate), name, None)
        return {"calibrator": {"method": kind, "config": config, "certificate": ended}}
    raise ValueError(f"{name} must be plain data to be saved, got {type(value).__name__}")


def _is_calibrator(value: Any) -> bool:
    return isinstance(value, ParametricModule) and hasattr(value, "certificate")


def _entries(value: Any, name: str, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != wanted:
        got = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"the {name} must have {', '.join(sorted(wanted))}, got {got}")
    return value


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack` was given; each tensor is taken out of `tensors` once.

    >>> unpack({"tuple": [1, {"float": "inf"}]}, {})
    (1, inf)
    """
    if not isinstance(value, (dict, list)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"the header has {json.dumps(value)[:80]} where a value was wanted")
    ((kind, inside),) = value.items()
    if kind == "float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if kind in ("list", "tuple") and isinstance(inside, list):
        return (list if kind == "list" else tuple)(unpack(item, tensors) for item in inside)
    if kind == "dict" and isinstance(inside, dict):
        return {key: unpack(item, tensors) for key, item in inside.items()}
    if kind == "tensor":
        if inside not in tensors:
            raise ValueError(f"the tensor {inside} is missing")
        return tensors.pop(inside)
    if kind == "calibrator":
        return _built(_entries(inside, "calibrator", _CALIBRATOR), tensors)
    raise ValueError(f"the header has {json.dumps(value)[:80]} where a value was wanted")


def _built(stored: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    method = stored["method"]
    if method not in CALIBRATORS:
        raise ValueError(f"no calibrator is called {method!r}; there are: {', '.join(sorted(CALIBRATORS))}")
    config = unpack({"dict": stored["config"]}, tensors)
    try:
        found = CALIBRATORS[method](**config)
    except Exception as error:
        raise ValueError(f"{method} does not take the parameters of the file: {error}") from None
    for name, parameter in found.named_buffers():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{method} does not take the parameters of the file: {name} must be finite")
    ended = unpack(stored["certificate"], {})
    if ended is not None:
        try:
            found.certificate = Certificate(**ended)
        except TypeError as error:
            raise ValueError(f"the certificate of {method} is none: {error}") from None
    return found
