"""The formats in which data sets are distributed, none of which may run code of its own."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar
from zipfile import is_zipfile

import numpy as np

from trueup.io.atomic import errors_name_file, require_file
from trueup.io.formats import FORMATS
from trueup.training.data.dataset import Part, Parts
from trueup.training.data.matlab import matrices
from trueup.training.data.sources import library

SIDE = 32
"""CIFAR images are SIDE × SIDE × 3."""
PIECE = 1 << 20
"""Bytes that are asked for at a time where a file promises how many there are."""


def idx(path: Path) -> np.ndarray:
    """Read bytes in the IDX format of MNIST, also compressed: 0 0 8 d, d sizes as big-endian int32, the bytes."""
    with errors_name_file(require_file(path)):
        opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            head = file.read(4)
            if head[:3] != b"\0\0\x08" or len(head) < 4:
                raise ValueError(f"an IDX file of bytes must begin with 0 0 8, got {list(head[:3])}")
            shape = tuple(int(size) for size in np.frombuffer(file.read(4 * head[3]), ">i4"))
            if len(shape) != head[3] or min(shape, default=0) < 0:
                raise ValueError(f"{head[3]} sizes must follow, got {shape}")
            wanted = math.prod(shape)
            content = _at_most(file, wanted + 1)
        if len(content) != wanted:
            found = len(content) if len(content) < wanted else "more"
            raise ValueError(f"the sizes {shape} need {wanted} bytes, got {found}")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _at_most(file: IO[bytes], most: int) -> bytes:
    """What is there, in pieces: neither what is promised nor what a packed file stands for is asked for at once."""
    pieces, left = [], most
    while left and (piece := file.read(min(PIECE, left))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def cifar_binary(path: Path, *, labels: int = 1) -> Part:
    """Read a binary batch of CIFAR: for each image its label bytes, the last of which counts, then its three planes."""
    with errors_name_file(require_file(path)):
        content = np.fromfile(path, np.uint8)
        row = labels + 3 * SIDE * SIDE
        if not content.size or content.size % row:
            raise ValueError(f"a batch must have {row} bytes an image, got {content.size} bytes")
        rows = content.reshape(-1, row)
        return Part(_upright(rows[:, labels:]), rows[:, labels - 1].astype(np.int64))


def cifar_pickle(path: Path, *, label: str = "labels") -> Part:
    """Read a batch of the Python version of CIFAR, the one torchvision keeps, without running what a pickle may name.

    Of all that a pickle can call, only what makes plain arrays of bytes is let through, and that by makers of ours.
    """
    with errors_name_file(require_file(path)):
        batch = _Bytes(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        if not isinstance(batch, dict) or not isinstance(batch.get("data"), _Array) or label not in batch:
            raise ValueError(f"a batch must be a mapping with data and {label}")
        pixels = batch["data"].value()
        if pixels.ndim != 2 or pixels.shape[1] != 3 * SIDE * SIDE:
            raise ValueError(f"data must have shape (n, {3 * SIDE * SIDE}), got {pixels.shape}")
        labels = batch[label]
        if not isinstance(labels, list) or not all(type(y) is int for y in labels):
            raise ValueError(f"{label} must be a list of whole numbers")
        return Part(_upright(pixels), np.array(labels, dtype=np.int64))


def npz(path: Path, inputs: str = "images") -> Parts:
    """Read train, val and test of one file: `train_images`, `train_labels` and so on, or `images` and `labels`."""
    with errors_name_file(require_file(path)), arrays_in(path) as found:
        keys = [key for key in ("train", "val", "test") if f"{key}_{inputs}" in found]
        prefixes = {key: f"{key}_" for key in keys} or {"train": ""}
        wanted = [f"{prefix}{what}" for prefix in prefixes.values() for what in (inputs, "labels")]
        if not {*wanted} <= found.keys():
            wish = "" if keys else f"train_{inputs} … or "
            raise ValueError(f"wanted the arrays {wish}{', '.join(wanted)}, got {', '.join(found) or 'none'}")
        parts = {key: Part(found[f"{p}{inputs}"], _vector(found[f"{p}labels"])) for key, p in prefixes.items()}
        for key, prefix in prefixes.items():
            if not np.isfinite(parts[key].inputs).all():
                raise ValueError(f"{prefix}{inputs} must be finite")
        return parts


@contextmanager
def arrays_in(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of an `.npz` file, to be used with `with`; each is read when it is asked for, and then once."""
    if not is_zipfile(path):
        raise ValueError("not an .npz file, which is an archive of arrays")
    read, _ = FORMATS[".npz"]
    with read(path) as source:
        yield _Arrays(source)


class _Arrays(Mapping[str, np.ndarray]):
    """Arrays of numbers by their names."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.columns)

    def __len__(self) -> int:
        return len(self._source.columns)

    def __contains__(self, name: object) -> bool:  # else it would be read to find out
        return name in self._source.columns

    def __getitem__(self, name: str) -> np.ndarray:
        ((array, _),) = self._source.read((name,), None, sys.maxsize)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be an array of numbers, got type {array.dtype}")
        return np.asarray(array)


def mat(path: Path) -> Part:
    """Read a file of SVHN: X (32, 32, 3, n), and y (n, 1), where 10 stands for the digit 0."""
    with errors_name_file(require_file(path)):
        found = matrices(path, ("X", "y"))
        if found.keys() != {"X", "y"} or found["X"].ndim != 4:
            told = ", ".join(f"{name} {array.shape}" for name, array in found.items())
            raise ValueError(f"wanted the arrays X (height, width, 3, n) and y, got {told or 'neither'}")
        return Part(np.moveaxis(found["X"], 3, 0), _vector(found["y"]) % 10)


def saved_dataset(folder: Path, *, inputs: str, labels: str, classes: tuple[str, ...]) -> Parts:
    """Read what `save_to_disk` of the Hugging Face library left: the parts train, validation (or val) and test.

    Where the classes have our names in another order, the labels are put in ours.
    """
    whole = library("datasets", "datasets").load_from_disk(str(folder))
    parts = {}
    for key, names in (("train", ("train",)), ("val", ("validation", "val")), ("test", ("test",))):
        part = next((whole[name] for name in names if name in whole), None)
        if part is None:
            continue
        theirs = list(getattr(part.features[labels], "names", None) or ())
        if theirs and len(theirs) != len(classes):
            raise ValueError(f"{folder}: {labels} must have {len(classes)} classes, got {len(theirs)}")
        y = np.asarray(part[labels], dtype=np.int64)
        if sorted(theirs) == sorted(classes):
            y = np.array([classes.index(name) for name in theirs], dtype=np.int64)[y]
        values = part[inputs]
        parts[key] = Part(list(values) if isinstance(values[0], str) else np.stack([np.asarray(v) for v in values]), y)
    missing = [key for key in ("train", "test") if key not in parts]
    if missing:
        raise ValueError(f"{folder}: wanted the parts train and test, got {', '.join(whole)}")
    return parts


def joined(parts: list[Part]) -> Part:
    """Batches, one after the other."""
    return Part(np.concatenate([p.inputs for p in parts]), np.concatenate([p.labels for p in parts]))


def _upright(planes: np.ndarray) -> np.ndarray:
    """Rows of three planes to images (n, H, W, 3), as every other file has them."""
    return planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


def _vector(labels: np.ndarray) -> np.ndarray:
    """Labels (n,) from (n,) or, as MedMNIST and SVHN write them, (n, 1)."""
    if labels.ndim not in (1, 2) or (labels.ndim == 2 and labels.shape[1] != 1):
        raise ValueError(f"labels must have shape (n,) or (n, 1), got {labels.shape}")
    if labels.dtype.kind not in "biu" and not (labels.dtype.kind == "f" and (labels == np.floor(labels)).all()):
        raise ValueError(f"labels must be whole numbers, got type {labels.dtype}")
    whole = labels.reshape(-1).astype(np.int64)
    if not (whole == labels.reshape(-1)).all():
        raise ValueError("labels must fit into 64 bits")
    return whole


class _Array:
    """What stands for an array while a pickle is read: it takes the state of one and interprets only bytes."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> np.ndarray:
        try:
            _, shape, kind, by_columns, content = self.state
            if kind.name != "u1":
                told = kind.name if isinstance(kind.name, str) else type(kind.name).__name__
                raise ValueError(f"arrays must be of bytes, got type {told}")
            raw = content.encode("latin1") if isinstance(content, str) else content
            return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns else "C")
        except (AttributeError, TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"an array's state is not as NumPy writes it: {error}") from None


class _Kind:
    """What stands for an array's type."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Bytes(pickle._Unpickler):
    """Reads nothing but plain data and arrays of bytes.

    It is Python's own reader, since that in C asks for the memory that a file promises, for a text or a place in its
    memo. Keys must be texts, for hashing a tuple of tuples of tuples can take for ever.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda *_: _Array()
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _Kind
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, _: text  # and how an array takes them; a copy each time could fill the memory
        raise ValueError(f"a batch must hold plain arrays, got a call of {module}.{name}")


def _pickle_step(code: bytes, keys: Callable[[Any], list[Any]] | None = None) -> None:
    """Have one step of a pickle refused, or its keys looked at first."""
    whole = pickle._Unpickler.dispatch[code[0]]

    def step(reader: Any) -> None:
        if keys is None or not all(type(key) is str for key in keys(reader)):
            raise ValueError("a batch must hold lists, arrays and mappings of texts alone")
        whole(reader)

    _Bytes.dispatch[code[0]] = step


_pickle_step(pickle.SETITEM, lambda reader: reader.stack[-2:-1])
_pickle_step(pickle.SETITEMS, lambda reader: reader.stack[::2])  # all since the last mark
_pickle_step(pickle.DICT, lambda reader: reader.stack[::2])
for _refused in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
    _pickle_step(_refused)
