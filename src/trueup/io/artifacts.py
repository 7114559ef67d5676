"""Artifacts and their files: safetensors with a JSON header, which nothing but data can be in.

`write_artifact` and `open_artifact` are the one writer and reader of what was fitted: calibrators and recalibrators
here, clamped and repaired networks and monitors where they are defined.

A calibrator's file holds the constructor's arguments, since a calibrator is what its constructor makes of them. Tensors
are stored under names such as `steps.0.temperature`; the rest is in the header, where {"tensor": name} stands in a
tensor's place:

    {"schema": 1, "calibrator": {"method": "Temperature", "config": {"temperature": {"tensor": "temperature"}},
     "certificate": …}, "classes": 10, "versions": {"trueup": "0.1.0", "torch": "2.13.0"}, "summary": …}

A recalibrator's arguments are all tensors, each under its own name, with this header:

    {"schema": 1, "recalibrator": "VarianceScaling", "versions": {"trueup": "0.1.0", "torch": "2.13.0"}, "summary": …}

On loading, a class's name is looked up among those of this package, and nothing is imported by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trueup.core import __version__
from trueup.core.errors import Hint, InputError
from trueup.core.module import ParametricModule
from trueup.core.optimize import Certificate
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.registry import CALIBRATORS, RECALIBRATIONS, Lazy

SCHEMA = 1
"""Raised when a file of this version could be misread by an older one."""

RECALIBRATORS: Lazy[Any] = Lazy("recalibrator", RECALIBRATIONS.classes())
"""Class → itself: every recalibrator that a file can hold."""

KINDS: Mapping[str, tuple[str, Hint]] = {
    "calibrator": ("calibrator", Hint.LOAD_CALIBRATOR),
    "clamped": ("clamped network", Hint.LOAD_CLAMPED),
    "repaired": ("repaired network", Hint.LOAD_REPAIRED),
    "recalibrator": ("recalibrator", Hint.LOAD_RECALIBRATOR),
    "prediction_sets": ("rule of prediction sets", Hint.LOAD_PREDICTION_SETS),
    "conformal_regression": ("rule of conformal intervals", Hint.LOAD_CONFORMAL),
    "monitor": ("monitor", Hint.LOAD_MONITOR),
}
"""What a file may hold, by its entry in the header: its name, and what reads it."""

_KEY, _MONITOR_KEY = "trueup", "trueup_monitor"  # under which a file's metadata has the header


def write_artifact(
    path: str | os.PathLike[str], kind: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors and a header of plain data to a `.safetensors` file that is either complete or not there."""
    file = require_safetensors_suffix(path)
    try:
        header = json.dumps({"schema": SCHEMA, **content}, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"summary must be plain data to be saved: {error}") from None
    # Buffers may be views of one memory, which the format does not allow.
    stored = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with atomic_write(file) as (draft,):
        save_file(stored, draft, metadata={_MONITOR_KEY if kind == "monitor" else _KEY: header})


def versions() -> dict[str, str]:
    """What a file was written with."""
    return {"trueup": __version__, "torch": str(torch.__version__)}


class Artifact(NamedTuple):
    """An open file: its header, and its tensors, which are read when they are asked for."""

    content: dict[str, Any]
    tensors: Callable[[], dict[str, Tensor]]


@contextmanager
def open_artifact(
    path: str | os.PathLike[str], kind: str, entries: Collection[str] | None = None
) -> Iterator[Artifact]:
    """Open a file of one kind, whose header must have these entries; errors inside the block name the file.

    Of a file that holds another kind, the error says which function reads it.
    """
    file = require_file(Path(path))
    with errors_name_file(file), safe_open(file, framework="pt") as stored:
        content = _header(stored, kind)
        if entries is not None:
            _require_entries(content, "header", {"schema", *entries})
        yield Artifact(content, lambda: {name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118


def require_safetensors_suffix(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is called what it is."""
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ValueError(f"{file}: the suffix must be .safetensors, got {file.suffix!r}")
    return file


def _header(stored: Any, kind: str) -> dict[str, Any]:
    """The header of an open file that should hold one kind of thing."""
    title, _ = KINDS[kind]
    metadata = stored.metadata() or {}
    key = next((key for key in (_KEY, _MONITOR_KEY) if key in metadata), None)
    if key is None:
        raise InputError("the file", f"hold a {title}", ", ".join(stored.keys()) or "nothing")
    try:
        content = json.loads(metadata[key])
    except ValueError as error:
        raise ValueError(f"the header is not JSON: {error}") from None
    content = content if isinstance(content, dict) else {}
    held = ["monitor"] if key == _MONITOR_KEY else [other for other in KINDS if other in content]
    if held and kind not in held:
        other, hint = KINDS[held[0]]
        raise InputError("the file", f"hold a {title}", f"a {other}", hint)
    if content.get("schema") != SCHEMA:
        got = repr(content.get("schema"))
        raise InputError("the schema", f"be {SCHEMA}", got, "a newer version of trueup may read it")
    return content


def _require_entries(value: Any, name: str, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != wanted:
        got = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise InputError(f"the {name}", f"have {', '.join(sorted(wanted))}", got)
    return value


class Header(NamedTuple):
    """What a file says of the calibrator or recalibrator it holds."""

    method: str
    """The class's name."""
    classes: int | None
    """How many classes it was fitted to, if they were given on saving."""
    versions: Mapping[str, str]
    summary: Any
    """What was written about the fit on saving."""


def save_calibrator(
    calibrator: Any, path: str | os.PathLike[str], *, classes: int | None = None, summary: Any = None
) -> None:
    """Write a calibrator, or a chain of them, to a `.safetensors` file that is either complete or not there.

    The certificate of the fit is kept with it; `classes` and `summary` (plain data) are notes for readers of the file.
    Nothing is rounded: what is loaded has the same parameters bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.calibrators.temperature import Temperature
    >>> with TemporaryDirectory() as folder:
    ...     save_calibrator(Temperature(1.7), f"{folder}/net.safetensors", summary={"fitted to": "val"})
    ...     load_calibrator(f"{folder}/net.safetensors"), read_header(f"{folder}/net.safetensors").summary
    (Temperature(temperature=1.7), {'fitted to': 'val'})
    """
    require_safetensors_suffix(path)
    if not _is_calibrator(calibrator):
        raise ValueError(f"calibrator must be a Calibrator, got {type(calibrator).__name__}")
    if classes is not None:
        calibrator(torch.zeros(1, classes))  # a calibrator of another number of classes raises
    tensors: dict[str, Tensor] = {}
    content = {
        "calibrator": pack(calibrator, "", tensors)["calibrator"],
        "classes": classes,
        "versions": versions(),
        "summary": pack(summary, "summary", None),
    }
    write_artifact(path, "calibrator", content, tensors)


def load_calibrator(path: str | os.PathLike[str]) -> Any:
    """Read a calibrator from a file that `save_calibrator` wrote; of anything else one sentence says what is wrong."""
    with open_artifact(path, "calibrator", _ENTRIES["calibrator"]) as artifact:
        classes, tensors = artifact.content["classes"], artifact.tensors()
        calibrator = unpack({"calibrator": artifact.content["calibrator"]}, tensors)
        if tensors:
            raise ValueError(f"no parameter refers to {', '.join(sorted(tensors))}")
        if classes is not None:
            if type(classes) is not int or not 2 <= classes <= MOST_CLASSES:
                raise InputError("classes", f"be a whole number of 2..{MOST_CLASSES}", repr(classes))
            calibrator(torch.zeros(1, classes))  # parameters of another number of classes raise
    return calibrator


def save_recalibrator(recalibrator: Any, path: str | os.PathLike[str], *, summary: Any = None) -> None:
    """Write a recalibrator of regression to a `.safetensors` file that is either complete or not there.

    `summary`, plain data, is a note for readers of the file. What is loaded has the same parameters bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.calibrators.regression import VarianceScaling
    >>> with TemporaryDirectory() as folder:
    ...     save_recalibrator(VarianceScaling(1.7), f"{folder}/net.safetensors")
    ...     load_recalibrator(f"{folder}/net.safetensors")
    VarianceScaling(scale=1.7)
    """
    require_safetensors_suffix(path)
    name = type(recalibrator).__name__
    if name not in RECALIBRATORS or RECALIBRATORS[name] is not type(recalibrator):
        wanted = f"be one of {', '.join(RECALIBRATORS)}, since no other could be found again"
        raise InputError("recalibrator", wanted, name)
    content = {"recalibrator": name, "versions": versions(), "summary": summary}
    write_artifact(path, "recalibrator", content, recalibrator.config())


def load_recalibrator(path: str | os.PathLike[str]) -> Any:
    """Read a recalibrator that `save_recalibrator` wrote; of anything else one sentence says what is wrong."""
    with open_artifact(path, "recalibrator", _ENTRIES["recalibrator"]) as artifact:
        name = artifact.content["recalibrator"]
        if name not in RECALIBRATORS:
            raise ValueError(f"no recalibrator is called {name!r}; there are: {', '.join(sorted(RECALIBRATORS))}")
        try:
            return RECALIBRATORS[name](**artifact.tensors())
        except Exception as error:
            raise ValueError(f"{name} does not take the parameters of the file: {error}") from None


def read_header(path: str | os.PathLike[str], kind: Literal["calibrator", "recalibrator"] = "calibrator") -> Header:
    """Read what a file says of its calibrator or recalibrator, without its parameters.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.calibrators.regression import VarianceScaling
    >>> with TemporaryDirectory() as folder:
    ...     save_recalibrator(VarianceScaling(1.7), f"{folder}/net.safetensors", summary={"fitted to": "val"})
    ...     read_header(f"{folder}/net.safetensors", "recalibrator").summary
    {'fitted to': 'val'}
    """
    with open_artifact(path, kind, _ENTRIES[kind]) as artifact:
        content = artifact.content
        if kind == "recalibrator":
            return Header(content["recalibrator"], None, content["versions"], content["summary"])
        method = _require_entries(content["calibrator"], "calibrator", _CALIBRATOR)["method"]
        return Header(method, content["classes"], content["versions"], unpack(content["summary"], {}))


MOST_CLASSES = 1 << 24
"""Far more than any network has: what a damaged file says must not fill the memory."""

_ENTRIES = {
    "calibrator": {"calibrator", "classes", "versions", "summary"},
    "recalibrator": {"recalibrator", "versions", "summary"},
}
_CALIBRATOR = {"method", "config", "certificate"}


def pack(value: Any, name: str, tensors: dict[str, Tensor] | None) -> Any:
    """Plain data for the header, tensors put into `tensors`; what is no scalar is an object whose only key is its kind.

    `name` is what errors call the value, and what its tensors' names begin with. With `tensors=None` there may be none.

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
        tensors[name] = value
        return {"tensor": name}
    if tensors is not None and _is_calibrator(value):
        kind, prefix = type(value).__name__, f"{name}." if name else ""
        if CALIBRATORS.get(kind) is not type(value):
            raise ValueError(
                f"only calibrators of trueup itself can be saved, since no other could be found; got {kind}"
            )
        config = {key: pack(item, f"{prefix}{key}", tensors) for key, item in value.config().items()}
        certificate = None if value.certificate is None else pack(asdict(value.certificate), name, None)
        return {"calibrator": {"method": kind, "config": config, "certificate": certificate}}
    raise ValueError(f"{name} must be plain data to be saved, got {type(value).__name__}")


def _is_calibrator(value: Any) -> bool:
    return isinstance(value, ParametricModule) and hasattr(value, "certificate")


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
        return _build(_require_entries(inside, "calibrator", _CALIBRATOR), tensors)
    raise ValueError(f"the header has {json.dumps(value)[:80]} where a value was wanted")


def _build(stored: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    method = stored["method"]
    if method not in CALIBRATORS:
        raise ValueError(f"no calibrator is called {method!r}; there are: {', '.join(sorted(CALIBRATORS))}")
    config = unpack({"dict": stored["config"]}, tensors)
    try:
        calibrator = CALIBRATORS[method](**config)
    except Exception as error:
        raise ValueError(f"{method} does not take the parameters of the file: {error}") from None
    for name, parameter in calibrator.named_buffers():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{method} does not take the parameters of the file: {name} must be finite")
    certificate = unpack(stored["certificate"], {})
    if certificate is not None:
        try:
            calibrator.certificate = Certificate(**certificate)
        except TypeError as error:
            raise ValueError(f"the certificate of {method} is none: {error}") from None
    return calibrator
