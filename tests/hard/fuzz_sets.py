"""Good files of data sets, in the formats in which they are distributed, and what must hold of what is read of them."""

import gzip
import pickle
import struct
import sys
from collections.abc import Mapping
from functools import partial

import numpy as np
from fuzz_readers import read_or_refuse, require
from mutations.sets import archive_of

FOLDERS = {"train": "20news-bydate-train", "test": "20news-bydate-test"}


def read_set(read, path):
    """Nothing of the file is run, and labels are whole numbers."""
    sys.modules.pop("evil", None)
    found = read_or_refuse(path, lambda: read(path))
    require("evil" not in sys.modules, "code was run that the file holds")
    for part in found.values() if isinstance(found, Mapping) else [found]:
        if isinstance(part, tuple):
            inputs, labels = part
            require(
                isinstance(inputs, np.ndarray) or all(type(text) is str for text in inputs),
                "inputs are of another kind",
            )
            require(labels.ndim == 1 and labels.dtype.kind in "if", f"labels {labels.dtype} {labels.shape}")
    return found is not None


def good(folder):
    """Files of images, and of texts and tables: group → (path, reader)."""
    from PIL import Image
    from scipy.io import savemat

    from trueup.models import image_data
    from trueup_studies.training.data import readers, tabular, text

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8), np.array([1, 0, 2], np.uint8)
    found = {"images": [], "texts": []}

    def put(group, name, content, read):
        path = folder / "sets" / name
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_bytes(content)
        found[group].append((path, partial(read_set, read)))
        return path

    small = images[:, :8, :8, 0]
    idx = struct.pack(">BBBB3i", 0, 0, 8, 3, *small.shape) + small.tobytes()
    put("images", "images.idx", idx, readers.idx)
    put("images", "images.idx.gz", gzip.compress(idx), readers.idx)
    rows = images.reshape(3, -1)
    binary = b"".join(bytes([y]) + row.tobytes() for y, row in zip(labels, rows, strict=True))
    put("images", "batch.bin", binary, readers.cifar_binary)
    batch = {"data": rows, "labels": labels.tolist(), "filenames": ["a.png", "b.png", "c.png"]}
    for protocol in (2, 4):
        put("images", f"batch{protocol}.pickle", pickle.dumps(batch, protocol), readers.cifar_pickle)
    # Compressed, as SVHN is: SciPy itself does not survive every damage of an uncompressed one.
    path = put("images", "house.mat", None, readers.mat)
    savemat(path, {"X": np.moveaxis(images, 0, 3), "y": labels[:, None]}, do_compression=True)
    np.savez_compressed(put("images", "images.npz", None, image_data.npz), images=images, labels=labels)
    for kind in ("png", "jpg"):
        Image.fromarray(images[0]).save(put("images", f"picture.{kind}", None, image_data.decode))

    put("texts", "moods.lines", b"3 a fine film\n0 dreadful\n4 at last !\n" * 5, text.read_labelled)
    put("texts", "kinds.lines", b"DESC:manner How did it end ?\nNUM:date When ?\n" * 5, text.read_questions)
    posts = {
        f"{each}/{group}/{i}": b"post" for each in FOLDERS.values() for group in ("sci.med", "sci.space") for i in "12"
    }
    tape = archive_of(posts)
    for name, content in (("posts.tar", tape), ("posts.tar.gz", gzip.compress(tape))):
        put("texts", name, content, lambda path: text.read_posts_archive(path, FOLDERS))
    wines = b'"acid";"sugar";"quality"\n' + b"7.4;1.9;5\n7.8;2.6;6\n" * 5
    put("texts", "wines.csv", wines, lambda path: tabular._plain(path, ";"))
    np.savez(put("texts", "table.npz", None, tabular._arrays), x=rng.normal(size=(5, 2)), y=rng.normal(size=5))
    return found
