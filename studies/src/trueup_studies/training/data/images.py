"""Data sets of images in the formats of torchvision, MedMNIST and Hugging Face, or as plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from trueup._core.splits import split_indices
from trueup.models.image_data import Part, Parts, library, npz, pixels, select
from trueup_studies.training.data.class_names import CELLS, CLOTHES, HUNDRED, TEN, THINGS
from trueup_studies.training.data.dataset import Data, add_validation_part, validate_parts
from trueup_studies.training.data.readers import cifar_binary, cifar_pickle, concatenate, idx, mat, saved_source
from trueup_studies.training.data.sources import Download, Source, obtain

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]

DIGITS: Normalisation = ((0.3053,), (0.3760,))
FASHION: Normalisation = ((0.2860,), (0.3530,))
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Also the normalisation of the common CIFAR-10 weights."""
CIFAR100: Normalisation = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
SVHN: Normalisation = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
HALVES: Normalisation = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def digits(folder: Path, seed: int) -> Data:
    """1,797 handwritten digits, 8 × 8, inside scikit-learn: a fifth each for testing and for validation."""
    whole = library("sklearn.datasets", "scikit-learn").load_digits()
    part = Part((whole.images / 16).astype(np.float32), whole.target.astype(np.int64))
    rest, test = split_indices(len(part.labels), share=0.2, seed=0)
    parts = add_validation_part({"train": select(part, rest), "test": select(part, test)}, share=0.25, seed=seed)
    return _data("digits", parts, TEN, DIGITS)


def fashion_mnist(folder: Path, seed: int | None) -> Data:
    """70,000 pictures of clothes, 28 × 28 (Xiao et al. 2017): 5,000 of the training images for validation."""
    names = {"train": "train", "test": "t10k"}

    def ubyte(where: Path) -> Parts:
        def part(name: str) -> Part:
            images, labels = (idx(_first(where, f"{name}-{what}-ubyte*")) for what in ("images-idx3", "labels-idx1"))
            return Part(images, labels.astype(np.int64))

        return {key: part(name) for key, name in names.items()}

    files = tuple(f"{name}-{what}-ubyte*" for name in names.values() for what in ("images-idx3", "labels-idx1"))
    sources = [
        Source(("fashion_mnist.npz",), lambda where: npz(where / "fashion_mnist.npz")),
        Source(files, ubyte),
        Source(tuple(f"FashionMNIST/raw/{f}" for f in files), lambda where: ubyte(where / "FashionMNIST" / "raw")),
        saved_source("fashion_mnist", "image", "label", CLOTHES),
    ]
    parts = obtain("fashion_mnist", folder, sources, _torchvision("FashionMNIST"))
    return _data("fashion_mnist", add_validation_part(parts, share=1 / 12, seed=seed), CLOTHES, FASHION)


def cifar10(folder: Path, seed: int | None) -> Data:
    """60,000 pictures, 32 × 32, of ten things (Krizhevsky 2009): 5,000 of the training images for validation."""
    batches = [f"data_batch_{i}" for i in range(1, 6)]
    sources = [
        Source(("cifar10.npz",), lambda where: npz(where / "cifar10.npz")),
        Source(("cifar10_train*.npz", "cifar10_test.npz"), _read_numbered),
        _cifar("cifar-10-batches-bin", ".bin", batches, "test_batch", cifar_binary),
        _cifar("cifar-10-batches-py", "", batches, "test_batch", cifar_pickle),
        saved_source("cifar10", "img", "label", THINGS),
    ]
    parts = obtain("cifar10", folder, sources, _torchvision("CIFAR10"))
    return _data("cifar10", add_validation_part(parts, share=0.1, seed=seed), THINGS, IMAGENET)


def cifar100(folder: Path, seed: int | None) -> Data:
    """60,000 pictures, 32 × 32, of a hundred things (Krizhevsky 2009): 5,000 training images for validation."""
    sources = [
        Source(("cifar100.npz",), lambda where: npz(where / "cifar100.npz")),
        _cifar("cifar-100-binary", ".bin", ["train"], "test", partial(cifar_binary, labels=2)),
        _cifar("cifar-100-python", "", ["train"], "test", partial(cifar_pickle, label="fine_labels")),
        saved_source("cifar100", "img", "fine_label", HUNDRED),
    ]
    parts = obtain("cifar100", folder, sources, _torchvision("CIFAR100"))
    return _data("cifar100", add_validation_part(parts, share=0.1, seed=seed), HUNDRED, CIFAR100)


def svhn(folder: Path, seed: int | None) -> Data:
    """99,289 house numbers, 32 × 32 (Netzer et al. 2011): the last tenth of the training images for validation."""
    files = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
    sources = [
        Source(("svhn.npz",), lambda where: npz(where / "svhn.npz")),
        Source(tuple(files.values()), lambda where: {key: mat(where / file) for key, file in files.items()}),
        saved_source("svhn", "image", "label", TEN),
    ]
    parts = dict(obtain("svhn", folder, sources, _torchvision("SVHN")))
    if "val" not in parts and "train" in parts:
        whole = parts["train"]
        cut = len(whole.labels) - round(len(whole.labels) / 10)
        parts["train"], parts["val"] = (select(whole, np.arange(a, b)) for a, b in ((0, cut), (cut, len(whole.labels))))
    return _data("svhn", parts, TEN, SVHN)


def bloodmnist(folder: Path, seed: int | None) -> Data:
    """17,092 blood cells, 28 × 28, of eight kinds (Acevedo et al. 2020; MedMNIST, Yang et al. 2023), its own split."""

    def fetch(target: Path) -> None:
        maker = import_module("medmnist").BloodMNIST
        target.mkdir(parents=True, exist_ok=True)
        maker(split="train", root=str(target), download=True)

    sources = [Source(("bloodmnist.npz",), lambda where: npz(where / "bloodmnist.npz"))]
    parts = obtain("bloodmnist", folder, sources, Download("medmnist", fetch))
    return _data("bloodmnist", add_validation_part(parts, share=0.1, seed=seed), CELLS, HALVES)


def _cifar(folder: str, ending: str, train: Sequence[str], test: str, read: Callable[[Path], Part]) -> Source:
    """Describe a folder of CIFAR batches."""

    def parts(where: Path) -> Parts:
        train_parts = [read(where / folder / f"{name}{ending}") for name in train]
        return {"train": concatenate(train_parts), "test": read(where / folder / f"{test}{ending}")}

    return Source(tuple(f"{folder}/{name}{ending}" for name in (*train, test)), parts)


def _read_numbered(where: Path) -> Parts:
    """Read training images from several files, and the test images."""
    train = concatenate([npz(path)["train"] for path in sorted(where.glob("cifar10_train*.npz"))])
    return {"train": train, "test": npz(where / "cifar10_test.npz")["train"]}


def _torchvision(name: str) -> Download:
    """Download with torchvision, which verifies checksums and uses folders that the sources know."""

    def fetch(target: Path) -> None:
        maker = getattr(import_module("torchvision.datasets"), name)
        target.mkdir(parents=True, exist_ok=True)
        for key in ("train", "test"):
            maker(str(target), download=True, **({"split": key} if name == "SVHN" else {"train": key == "train"}))

    return Download("torchvision", fetch)


def _first(where: Path, pattern: str) -> Path:
    return sorted(where.glob(pattern))[0]


def _data(name: str, parts: Parts, classes: tuple[str, ...], normalisation: Normalisation) -> Data:
    validate_parts(name, parts, len(classes))
    train, val, test = (
        TensorDataset(pixels(parts[key].inputs), torch.from_numpy(parts[key].labels))
        for key in ("train", "val", "test")
    )
    return Data(name, "image", train, val, test, classes=classes, normalisation=normalisation)
