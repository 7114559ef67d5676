"""Artifacts: fitted values in a safetensors file with a JSON header. A file holds data only, never code.

A calibrator, a recalibrator, a prediction-set rule or a threshold is stored as its constructor's arguments. Arrays have
names such as `steps.0.weight`. The header has everything else, and {"tensor": name} in place of an array:

    {"schema": 2, "kind": "calibrator", "content": {"value": {"class": "Vector", "config": {"scale": {"tensor":
     "scale"}, …}}}, "class_names": null, "n_classes": 10, "versions": {"trueup": "0.3.0"}, "summary": …, "sha256": …}

Monitors and networks have a module with `to_artifact(value)` and `from_artifact(content, arrays, model)` instead.
`ARTIFACTS` lists the kinds, and loading looks classes up there: a file cannot import anything by name. Files of schema
1 are read through `OLD_ARGUMENTS`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from trueup._core import __version__
from trueup._core.arrays import warn_users
from trueup._core.errors import Hint, InputError
from trueup._core.registry import ARTIFACTS
from trueup.io.atomic import StrPath, atomic_write, errors_name_file, require_file
from trueup.io.safetensors_file import TensorFile

SCHEMA = 2
"""Increased when older versions could misread a file of this version."""

MAX_CLASSES = 1 << 24
"""Largest number of classes accepted from a file, so that a damaged file cannot exhaust memory."""

OLD_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "alpha": ("coverage", "level"),
    "at_most": ("max_risk",),
    "certainty": ("level",),
    "classes": ("n_classes",),
    "fold": ("top_label",),
    "folds": ("n_folds",),
    "last": ("output",),
    "names": ("class_names",),
    "weights": ("sample_weight",),
}
"""Argument names in files of schema 1 → names of today; the one in the signature is used.

An alpha is one minus a coverage or a level.
"""

_METADATA_KEYS = ("trueup", "trueup_monitor")  # the second is that of monitors of schema 1
_HEADER_ENTRIES = ("schema", "kind", "content", "class_names", "n_classes", "versions", "summary", "sha256")


class Header(NamedTuple):
    """The description of an artifact, without its arrays."""

    kind: str
    """Kind of the artifact, such as calibrator."""
    class_name: str | None
    """The class of the stored value, if the file holds its constructor's arguments."""
    class_names: tuple[str, ...] | None
    """Names of the classes of the fit, if known."""
    n_classes: int | None
    """Number of classes that it was fitted to, if known."""
    versions: Mapping[str, str]
    """Versions of the packages that wrote the file."""
    summary: Any
    """A note on the fit."""
    schema: int
    """Version of the format."""
    content: Any
    """Constructor arguments of the stored value."""

    def check_class_names(self, class_names: Sequence[str] | None, file: StrPath | None = None) -> None:
        """Reject predictions whose classes have other names or another order than those of the fit.

        Predictions without names, or with numbered columns in their order, fit any names.

        Parameters
        ----------
        class_names
            Names of the predictions' classes, in the order of the logits.
        file
            The file to name in the error.
        """
        fitted, of_file = _column_order(self.class_names), _column_order(class_names)
        unnamed_fits = not (fitted and of_file) and isinstance((fitted or of_file or ("",))[0], str)
        if fitted != of_file and not unnamed_fits:
            expected, got = (", ".join(names[:8]) if names else "unnamed" for names in (self.class_names, class_names))
            requirement = f"be those of the fit in their order ({expected})"
            raise InputError("classes", requirement, got, Hint.COLUMN_ORDER, file=file)


def _column_order(names: Sequence[str] | None) -> tuple[int | str, ...]:
    """Return the numbers that end names such as `logit_1`, or else the names; () for 0, 1, … in order.

    >>> _column_order(["logit_1", "logit_0"]), _column_order(["logit_0", "logit_1"]), _column_order(["cat", "dog"])
    ((1, 0), (), ('cat', 'dog'))
    """
    matches = [re.fullmatch(r"(?:.*_)?(\d+)", name) for name in names or ()]
    numbers = tuple(int(match[1]) for match in matches if match)
    if sorted(numbers) != list(range(len(names or ()))):
        return tuple(names or ())
    return () if list(numbers) == sorted(numbers) else numbers


def kind_of(value: Any) -> str | None:
    """Return the kind of artifact that a value is saved as; None if it cannot be saved.

    >>> kind_of(3) is None
    True
    """
    where = f"{type(value).__module__}:{type(value).__qualname__}"
    return next((name for name, kind in ARTIFACTS.items() if where in kind.classes.values()), None)


def save_artifact(
    value: Any,
    path: StrPath,
    *,
    class_names: Sequence[str] | None = None,
    n_classes: int | None = None,
    summary: Any = None,
) -> None:
    """Write a fitted value to a `.safetensors` file that is either complete or absent; see `save`."""
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ValueError(f"{file}: the suffix must be .safetensors, got {file.suffix!r}")
    kind = kind_of(value)
    if kind is None:
        titles = ", ".join(entry.title for entry in ARTIFACTS.values())
        raise InputError("obj", f"be predictions or one of trueup's own: {titles}", type(value).__name__)
    names = class_names if class_names is not None else getattr(value, "class_names", None)
    if names is not None:
        names = [str(name) for name in names]
        if n_classes not in (None, len(names)):
            raise InputError("class_names", f"name the {n_classes} classes", f"{len(names)} names")
        n_classes = len(names)
    if kind == "calibrator" and n_classes is not None:
        value(np.zeros((1, n_classes)))  # a calibrator of another number of classes raises
    arrays: dict[str, Any] = {}
    if codec := ARTIFACTS[kind].codec:
        content, arrays = import_module(codec).to_artifact(value)
    else:
        content = pack(value, "", arrays)
    versions = {"trueup": __version__, "numpy": np.__version__}
    values = (SCHEMA, kind, content, names, n_classes, versions, pack(summary, "summary", None))
    header = dict(zip(_HEADER_ENTRIES, values, strict=False))
    stored = {name: _as_stored(array) for name, array in arrays.items()}
    header["sha256"] = content_hash(header, stored)
    text = json.dumps(header, allow_nan=False, ensure_ascii=False)
    with atomic_write(file) as (draft,):
        save_file(stored, draft, metadata={_METADATA_KEYS[0]: text})


def load_artifact(path: StrPath, kind: str | None = None, *, model: Any = None) -> Any:
    """Read a fitted value from a file that `save` wrote.

    Parameters
    ----------
    path
        The file.
    kind
        Kind of artifact expected; a file of another kind raises an error.
    model
        Network around which a clamped or repaired network is read.

    Returns
    -------
    object
        The fitted value.
    """
    with open_artifact(path, kind) as (header, arrays):
        entry = ARTIFACTS[header.kind]
        if entry.needs_model and model is None:
            raise InputError("model", f"be the network of the {entry.title}, whose weights are not in the file", "None")
        if model is not None and not entry.needs_model:
            raise InputError("model", f"be left out for a {entry.title}", type(model).__name__)
        if entry.codec:
            return import_module(entry.codec).from_artifact(header.content, arrays, model)
        value = unpack(header.content, arrays)
        if arrays:
            raise ValueError(f"no parameter refers to {', '.join(sorted(arrays))}")
        if type(value).__name__ not in entry.classes:
            raise InputError("the content", f"be a {entry.title}", type(value).__name__)
        if header.kind == "calibrator" and header.n_classes is not None:
            value(np.zeros((1, header.n_classes)))  # parameters of another number of classes raise
        if header.class_names is not None:
            object.__setattr__(value, "class_names", header.class_names)
        return value


def read_header(path: StrPath, kind: str | None = None) -> Header:
    """Read the description of an artifact, without its arrays.

    Parameters
    ----------
    path
        The file.
    kind
        Kind of artifact expected; a file of another kind raises an error.

    Returns
    -------
    Header
        Kind, class, class names, versions and summary.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from trueup.calibrators.temperature import Temperature
    >>> with TemporaryDirectory() as folder:
    ...     save_artifact(Temperature(1.7), f"{folder}/net.safetensors", summary={"fitted to": "val"})
    ...     header = read_header(f"{folder}/net.safetensors")
    >>> header.kind, header.class_name, header.summary
    ('calibrator', 'Temperature', {'fitted to': 'val'})
    """
    with open_artifact(path, kind) as (header, _):
        return header


def is_artifact(path: StrPath) -> bool:
    """Return whether a file is a safetensors file with the header of an artifact."""
    file = Path(path)
    if file.suffix.lower() != ".safetensors" or not file.is_file() or not file.stat().st_size:
        return False
    with errors_name_file(file), TensorFile(require_file(file)) as tensors:
        return any(key in tensors.metadata for key in _METADATA_KEYS)


@contextmanager
def open_artifact(path: StrPath, kind: str | None = None) -> Iterator[tuple[Header, dict[str, np.ndarray]]]:
    """Read an artifact, check its hash, and name the file in errors inside the block."""
    file = require_file(Path(path))
    with errors_name_file(file):
        with TensorFile(file) as tensors:
            header, arrays = _read_header(tensors, kind)
        yield header, arrays


def _read_header(tensors: TensorFile, kind: str | None) -> tuple[Header, dict[str, np.ndarray]]:
    """Read the header and the arrays, and check them and their hash."""
    title = ARTIFACTS[kind].title if kind else "fitted value"
    key = next((key for key in _METADATA_KEYS if key in tensors.metadata), None)
    if key is None:
        raise InputError("the file", f"hold a {title}", ", ".join(tensors.names) or "nothing")
    try:
        header = json.loads(tensors.metadata[key])
    except ValueError as error:
        raise ValueError(f"the header is not JSON: {error}") from None
    header = header if isinstance(header, dict) else {}
    schema = header.get("schema")
    if schema == 1:
        header = _upgrade(header, monitor=key == _METADATA_KEYS[1])
        warn_users(f"{tensors.path}: a file of an older version has no hash, so damage goes unnoticed; save it again")
    elif schema != SCHEMA:
        raise InputError("the schema", f"be 1 or {SCHEMA}", repr(schema), "a newer version of trueup may read it")
    if set(header) != set(_HEADER_ENTRIES):
        raise InputError("the header", f"have {', '.join(sorted(_HEADER_ENTRIES))}", ", ".join(sorted(header)))
    _, stored_kind, content, names, classes, versions, summary, sha256 = (header[name] for name in _HEADER_ENTRIES)
    if stored_kind not in ARTIFACTS:
        raise ValueError(f"no kind of artifact is called {stored_kind!r}; there are: {', '.join(ARTIFACTS)}")
    if kind not in (None, stored_kind):
        hint = Hint[f"LOAD_{stored_kind.upper()}"]
        raise InputError("the file", f"hold a {title}", f"a {ARTIFACTS[stored_kind].title}", hint)
    arrays = {name: tensors.read(name) for name in tensors.names}
    if schema == SCHEMA and sha256 != content_hash(header, arrays):
        raise ValueError("the content does not match its SHA-256 hash: the file is damaged or was changed")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("class_names must be a list of names")
    if classes is not None and (type(classes) is not int or not 2 <= classes <= MAX_CLASSES):
        raise InputError("n_classes", f"be a whole number of 2..{MAX_CLASSES}", repr(classes))
    stored = content.get("value") if isinstance(content, dict) else None
    class_name = stored.get("class") if isinstance(stored, dict) else None
    names = None if names is None else tuple(names)
    return Header(stored_kind, class_name, names, classes, versions, unpack(summary, {}), schema, content), arrays


def content_hash(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Hash the header without its hash, and the names, types, shapes and bytes of the arrays (SHA-256)."""
    plain = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _upgrade(header: Mapping[str, Any], *, monitor: bool) -> dict[str, Any]:
    """Convert a header of schema 1 to schema 2."""
    kind = "monitor" if monitor else next((kind for kind in ARTIFACTS if kind in header), None)
    if kind is None:
        raise InputError("the header", f"have one of {', '.join(ARTIFACTS)}", ", ".join(sorted(header)))
    content = header if monitor else header[kind]
    if kind == "recalibrator":  # its arguments are arrays under their own names
        content = {"value": {"class": content, "config": None}}
    elif kind == "calibrator":
        content = {"calibrator": content}
    elif kind in ("prediction_sets", "conformal_regression"):
        config = content.get("dict") if isinstance(content, dict) else None
        content = {"value": {"class": header.get("rule", "PredictionSets"), "config": config or {}}}
    summary = header.get("summary") if kind == "calibrator" else pack(header.get("summary"), "summary", None)
    versions = header.get("versions", {})
    values = (1, kind, _value_of(content), None, header.get("classes"), versions, summary, None)
    return dict(zip(_HEADER_ENTRIES, values, strict=True))


def _value_of(stored: Any) -> Any:
    """Convert a value of schema 1, {"calibrator": {"method": …}}, to schema 2, {"value": {"class": …}}."""
    if isinstance(stored, list):
        return [_value_of(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    inner = stored.get("calibrator")
    if len(stored) == 1 and isinstance(inner, dict):
        return {"value": {"class" if key == "method" else key: _value_of(item) for key, item in inner.items()}}
    return {key: _value_of(item) for key, item in stored.items()}


def rename_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arguments of schema 1 to the names that a function has today.

    >>> def fit(*, level=0.9, top_label=False): ...
    >>> rename_arguments(fit, {"certainty": 0.95, "fold": True})
    {'level': 0.95, 'top_label': True}
    """
    known = inspect.signature(function).parameters
    renamed: dict[str, Any] = {}
    for name, value in arguments.items():
        new = next((new for new in OLD_ARGUMENTS.get(name, ()) if name not in known and new in known), name)
        renamed[new] = round(1 - value, 12) if name == "alpha" and new != name else value
    return renamed


def pack(value: Any, name: str, arrays: dict[str, Any] | None) -> Any:
    """Convert a value to plain data for the header, and put its arrays into `arrays`.

    Anything but a scalar becomes an object whose only key is its type. `name` names the value in errors and begins the
    names of its arrays. With `arrays=None` no arrays are allowed.

    >>> pack({"steps": (1, float("inf"))}, "summary", None)
    {'dict': {'steps': {'tuple': [1, {'float': 'inf'}]}}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": str(value)}
    prefix = f"{name}." if name else ""
    if arrays is not None and (kind := kind_of(value)) and not ARTIFACTS[kind].codec:
        if hasattr(value, "config"):
            config = value.config()
        else:
            config = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        packed = {key: pack(item, f"{prefix}{key}", arrays) for key, item in config.items()}
        stored = {"class": type(value).__name__, "config": packed}
        if getattr(value, "certificate", None) is not None:
            stored["certificate"] = pack(asdict(value.certificate), name, None)
        return {"value": stored}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: pack(item, f"{prefix}{key}", arrays) for key, item in value.items()}}
    if isinstance(value, Mapping) and arrays is not None:
        pairs = enumerate(value.items())
        return {"items": [[pack(key, name, None), pack(item, f"{prefix}{i}", arrays)] for i, (key, item) in pairs]}
    if arrays is not None and (isinstance(value, np.ndarray) or hasattr(value, "detach")):
        arrays[name] = value
        return {"tensor": name}
    if isinstance(value, (tuple, list)) or type(value).__name__ == "ModuleList":
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, f"{prefix}{i}", arrays) for i, item in enumerate(value)]}
    if arrays is not None and hasattr(value, "config"):
        raise ValueError(f"only trueup's own classes can be saved, got {type(value).__name__}")
    raise ValueError(f"{name} must be plain data to be saved, got {type(value).__name__}")


def unpack(value: Any, arrays: dict[str, Any]) -> Any:
    """Convert packed data back; each array is taken out of `arrays` once.

    >>> unpack({"tuple": [1, {"float": "inf"}]}, {})
    (1, inf)
    """
    if not isinstance(value, (dict, list)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind in ("list", "tuple") and isinstance(inner, list):
            return (list if kind == "list" else tuple)(unpack(item, arrays) for item in inner)
        if kind == "dict" and isinstance(inner, dict):
            return {key: unpack(item, arrays) for key, item in inner.items()}
        if kind == "items" and isinstance(inner, list):
            return {unpack(key, {}): unpack(item, arrays) for key, item in inner}
        if kind == "tensor":
            if inner not in arrays:
                raise ValueError(f"the tensor {inner} is missing")
            return arrays.pop(inner)
        if kind == "value" and isinstance(inner, dict):
            return _build(inner, arrays)
    raise ValueError(f"the header has {json.dumps(value)[:80]} instead of a value")


def _build(stored: Mapping[str, Any], arrays: dict[str, Any]) -> Any:
    """Construct a value from its class and the constructor's arguments."""
    name = stored.get("class")
    if set(stored) - {"certificate"} != {"class", "config"} or not isinstance(name, str):
        raise InputError("a stored value", "have class, config and certificate", ", ".join(sorted(stored)))
    where = {name: where for kind in ARTIFACTS.values() if not kind.codec for name, where in kind.classes.items()}
    if name not in where:
        raise ValueError(f"no class of a stored value is called {name!r}; there are: {', '.join(sorted(where))}")
    module, _, attribute = where[name].partition(":")
    cls = getattr(import_module(module), attribute)
    if stored["config"] is None:
        config = {key: arrays.pop(key) for key in list(arrays)}
    else:
        config = unpack({"dict": stored["config"]}, arrays)
    try:
        config = cls.upgrade(config) if hasattr(cls, "upgrade") else config
        value = cls(**rename_arguments(cls, config))
    except Exception as error:
        raise ValueError(f"{name} does not take the parameters of the file: {error}") from None
    if (certificate := unpack(stored.get("certificate"), {})) is None:
        return value
    from trueup._core.optimize import Certificate  # which imports scipy

    try:
        return value.with_certificate(Certificate(**certificate))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the certificate of {name} is not one: {error}") from None


def _as_stored(array: Any) -> np.ndarray:
    """Return an array with its own memory, as the format requires."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = (array.float() if str(array.dtype) == "torch.bfloat16" else array).numpy()
    return np.array(array, order="C")
