"""Readers of the formats of data sets; none of them runs code from a file."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
from codecs import encode
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from trueup.io.atomic import errors_name_file, require_file
from trueup.models.image_data import Part, Parts, label_vector, library
from trueup_studies.training.data.sources import Source

SIDE = 32
"""CIFAR images are SIDE × SIDE × 3."""
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINSTRING"),
    *("SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "EMPTY_LIST", "APPEND"),
    *("APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL"),
    *("STACK_GLOBAL", "REDUCE", "BUILD", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
}
"""Allowed pickle opcodes: those of CIFAR's files and of plain mappings of lists and arrays."""
PIECE = 1 << 20
"""Bytes read at a time where the file announces a number of bytes."""


def idx(path: Path) -> np.ndarray:
    """Read bytes in MNIST's IDX format, possibly compressed: 0 0 8 d, d sizes as big-endian int32, the bytes."""
    with errors_name_file(require_file(path)):
        opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            head = file.read(4)
            if head[:3] != b"\0\0\x08" or len(head) < 4:
                raise ValueError(f"an IDX file of bytes must begin with 0 0 8, got {list(head[:3])}")
            shape = tuple(int(size) for size in np.frombuffer(file.read(4 * head[3]), ">i4"))
            if len(shape) != head[3] or min(shape, default=0) < 0:
                raise ValueError(f"{head[3]} sizes must follow, got {shape}")
            size = math.prod(shape)
            content = _read_at_most(file, size + 1)
        if len(content) != size:
            got = len(content) if len(content) < size else "more"
            raise ValueError(f"the sizes {shape} need {size} bytes, got {got}")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _read_at_most(file: IO[bytes], most: int) -> bytes:
    """Read at most `most` bytes in pieces, since a damaged file may announce or unpack to any number."""
    pieces, left = [], most
    while left and (piece := file.read(min(PIECE, left))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def cifar_binary(path: Path, *, labels: int = 1) -> Part:
    """Read a binary batch of CIFAR: per image its label bytes, of which the final one counts, and three planes."""
    with errors_name_file(require_file(path)):
        content = np.fromfile(path, np.uint8)
        row = labels + 3 * SIDE * SIDE
        if not content.size or content.size % row:
            raise ValueError(f"a batch must have {row} bytes an image, got {content.size} bytes")
        rows = content.reshape(-1, row)
        return Part(_channels_last(rows[:, labels:]), rows[:, labels - 1].astype(np.int64))


def cifar_pickle(path: Path, *, label: str = "labels") -> Part:
    """Read a batch of the Python version of CIFAR, torchvision's format; no code of the pickle is run."""
    with errors_name_file(require_file(path)):
        batch = _CifarUnpickler(_check_opcodes(path.read_bytes()), encoding="latin1").load()
        if not isinstance(batch, dict) or type(batch.get("data")) is not np.ndarray or label not in batch:
            raise ValueError(f"a batch must be a mapping with data and {label}")
        pixels, labels = batch["data"], batch[label]
        if pixels.dtype != np.uint8:
            raise ValueError(f"data must be of bytes, got type {pixels.dtype}")
        if pixels.ndim != 2 or pixels.shape[1] != 3 * SIDE * SIDE:
            raise ValueError(f"data must have shape (n, {3 * SIDE * SIDE}), got {pixels.shape}")
        if not isinstance(labels, list) or not all(type(y) is int for y in labels):
            raise ValueError(f"{label} must be a list of whole numbers")
        return Part(_channels_last(pixels), np.array(labels, dtype=np.int64))


def _check_opcodes(content: bytes) -> io.BytesIO:
    """Reject opcodes that plain arrays, lists and mappings do not need; others can use any memory and time."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in OPCODES or (isinstance(argument, int) and argument > 2 * len(content) + 2**16):
            raise ValueError(f"a batch must hold plain arrays, got the pickle opcode {opcode.name} {argument or ''}")
    return io.BytesIO(content)


class _CifarUnpickler(pickle.Unpickler):
    """Unpickles plain data and arrays of bytes; rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # its module depends on the version of NumPy
        allowed = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): _byte_dtype, ("_codecs", "encode"): encode}
        if (module, name) not in allowed:
            raise ValueError(f"a batch must hold plain arrays, got a call of {module}.{name}")
        return allowed[module, name]


def _byte_dtype(name: str, *_: Any) -> np.dtype[Any]:
    """Return a copy of the byte dtype, since the pickle sets its state; a dtype of objects would be unsafe."""
    if name not in ("u1", "uint8"):
        raise ValueError(f"arrays must be of bytes, got type {name}")
    return np.dtype("u1", copy=True)


def mat(path: Path) -> Part:
    """Read a MATLAB file of SVHN: X (32, 32, 3, n), and y (n, 1), where 10 means the digit 0."""
    from scipy.io import loadmat

    with errors_name_file(require_file(path)):
        try:
            arrays = loadmat(path, variable_names=("X", "y"))
        except MemoryError:
            raise ValueError("the file asks for more memory than there is") from None
        arrays = {name: array for name, array in arrays.items() if name in ("X", "y")}
        if arrays.keys() != {"X", "y"} or arrays["X"].ndim != 4:
            shapes = ", ".join(f"{name} {np.shape(array)}" for name, array in arrays.items())
            raise ValueError(f"wanted the arrays X (height, width, 3, n) and y, got {shapes or 'neither'}")
        if arrays["X"].dtype.kind not in "biuf":
            raise ValueError(f"X must be an array of real numbers, got type {arrays['X'].dtype}")
        return Part(np.moveaxis(arrays["X"], 3, 0), label_vector(arrays["y"]) % 10)


def saved_dataset(folder: Path, *, inputs: str, labels: str, classes: tuple[str, ...]) -> Parts:
    """Read a folder of Hugging Face's `save_to_disk`: the parts train, validation (or val) and test.

    If the class names are ours in another order, the labels are reordered.
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


def saved_source(name: str, inputs: str, labels: str, classes: tuple[str, ...]) -> Source:
    """Describe a folder of Hugging Face's `save_to_disk` with the data set's name."""
    return Source(
        (f"{name}/dataset_dict.json",),
        lambda where: saved_dataset(where / name, inputs=inputs, labels=labels, classes=classes),
        identifying=(f"{name}/*/*.arrow",),
    )


def concatenate(parts: list[Part]) -> Part:
    """Concatenate batches."""
    return Part(np.concatenate([p.inputs for p in parts]), np.concatenate([p.labels for p in parts]))


def _channels_last(planes: np.ndarray) -> np.ndarray:
    """Reshape rows of three planes to images (n, H, W, 3)."""
    return planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
