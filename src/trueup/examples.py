"""Data of the tutorials: downloaded once, checked, and kept; or read from a folder of one's own.

pip install 'trueup[examples]'
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np

from trueup._core.errors import InputError
from trueup.io.atomic import atomic_write

FOLDER = "TRUEUP_DATA"
"""Environment variable that names a folder with the files; nothing is downloaded for a file in it."""
CIFAR_IMAGES = "cifar-10-batches-bin/test_batch.bin"
SIDE = 32
"""Height and width of CIFAR's images in pixels."""


@dataclass(frozen=True)
class Example:
    """One public file.

    Parameters
    ----------
    path
        Its place in the folder `TRUEUP_DATA`, and in the cache.
    licence
        Its licence, printed with the download.
    source
        Who made it, and where it is described.
    url
        Its address; None if its source publishes it in another form only.
    sha256
        Checksum of what the address returns.
    """

    path: str
    licence: str
    source: str
    url: str | None = None
    sha256: str | None = None


EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        "cifar10_test": Example(
            "images/cifar10_test.npz",
            "no licence stated; free for research",
            "CIFAR-10, Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        "cifar10_resnet20": Example(
            "weights/cifar10_resnet20.th",
            "BSD 2-clause",
            "Yerlan Idelbayev, https://github.com/akamaster/pytorch_resnet_cifar10",
            "https://raw.githubusercontent.com/akamaster/pytorch_resnet_cifar10/66514ca38d5679354766dee91e912d8766bdd227/"
            "pretrained_models/resnet20-12fca82f.th",
            "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8",
        ),
        "mmlu_pro_Qwen3-14B": Example(
            "llm/mmlu_pro_Qwen3-14B.csv",
            "MIT",
            "the results of https://github.com/Linwei94/LLM-Calibration-Study, as a table with the columns category, "
            "stated_confidence, token_confidence and correct",
        ),
        "mmbench_Qwen-VL-Chat": Example(
            "llm/mmbench_Qwen-VL-Chat.npz",
            "MIT",
            "output/Qwen-VL-Chat/mmbench.pkl of https://github.com/EnSec-AI/VLM-Uncertainty-Bench, as the arrays "
            "logits (n, 6), labels, options and group",
        ),
    }
)
"""Files of the tutorials by name."""


def load(name: str) -> Path:
    """Return the path of an example file, and download the file first if it is not there.

    The folder that the environment variable `TRUEUP_DATA` names is searched first. A download is checked by its
    SHA-256 checksum and kept in the cache folder of the operating system; its source and licence are printed to
    standard error. Later calls need no network.

    Parameters
    ----------
    name
        Name of a file, one of `EXAMPLES`.

    Returns
    -------
    Path
        The file. `trueup.load`, `trueup.io.load_table`, `trueup.models.load_weights` and `numpy.load` read it.

    Examples
    --------
    >>> from trueup.examples import EXAMPLES
    >>> for name, example in EXAMPLES.items():
    ...     print(f"{name:<21} {example.licence}")
    cifar10_test          no licence stated; free for research
    cifar10_resnet20      BSD 2-clause
    mmlu_pro_Qwen3-14B    MIT
    mmbench_Qwen-VL-Chat  MIT
    """
    if name not in EXAMPLES:
        raise InputError("name", f"one of {', '.join(EXAMPLES)}", repr(name))
    example = EXAMPLES[name]
    folder = os.environ.get(FOLDER)
    if folder and (path := Path(folder) / example.path).is_file():
        return path
    if example.url is None:
        raise FileNotFoundError(
            f"{name} cannot be downloaded: it was made from {example.source} ({example.licence}). "
            f"Put it into a folder as {example.path}, and name the folder in the environment variable {FOLDER}"
        )
    return _download(name, example)


def _download(name: str, example: Example) -> Path:
    """Return a file of the cache, which is downloaded if it is missing."""
    try:
        import pooch
    except ImportError:
        raise ImportError("downloads need pooch: pip install 'trueup[examples]'") from None
    cache = Path(pooch.os_cache("trueup"))
    kept = cache / example.path
    if kept.is_file():
        return kept
    print(f"{name}: {example.source}. Licence: {example.licence}. Kept in {cache}.", file=sys.stderr)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        try:
            received = pooch.retrieve(str(example.url), f"sha256:{example.sha256}", fname="received", path=folder)
        except OSError as error:
            advice = f"With the file in a folder as {example.path}, name the folder in the variable {FOLDER}"
            raise OSError(f"{example.url} could not be downloaded ({error}). {advice}") from error
        with atomic_write(kept) as [draft]:
            if kept.suffix == ".npz":
                _save_test_images(Path(received), draft)
            else:
                copyfile(received, draft)
    return kept


def _save_test_images(archive: Path, path: Path) -> None:
    """Write CIFAR's test images, `images` (n, 32, 32, 3) and `labels` (n,), from its archive of binary records."""
    with tarfile.open(archive) as tar, path.open("wb") as file:
        member = tar.extractfile(CIFAR_IMAGES)
        if member is None:
            raise OSError(f"{archive}: {CIFAR_IMAGES} is not a file")
        records = np.frombuffer(member.read(), np.uint8).reshape(-1, 1 + 3 * SIDE**2)
        images = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        np.savez_compressed(file, images=images, labels=records[:, 0])
