"""Networks of the studies: trained once on a machine and kept there, or read from a file of weights."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.models.networks import Normalise, load_weights
from trueup.registry import LOSSES, NETWORKS
from trueup.study.grid import as_json
from trueup.training.augment import flip_and_crop
from trueup.training.data import load_data
from trueup.training.data.class_names import THINGS
from trueup.training.data.dataset import Data
from trueup.training.data.images import IMAGENET, pixels
from trueup.training.data.readers import npz
from trueup.training.data.sources import folder_of
from trueup.training.loop import train

VERSION = 1
"""Raised whenever the same settings would train other weights: those kept no longer count then."""
BATCH = 500
"""Images that a trained network is asked about at a time."""
SETTINGS = ("data", "network", "how", "network_seed")
"""What of a cell's settings its network depends on."""


@dataclass(frozen=True)
class Loader:
    """A part of a data set, in batches as the network takes them; it can be read again and again."""

    part: Dataset[Any]
    normalise: nn.Module
    batch: int = BATCH

    def __len__(self) -> int:
        return len(self.part)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in DataLoader(self.part, batch_size=self.batch):
            yield self.normalise(images), labels

    def some(self, count: int | None, seed: int) -> Loader:
        """So many samples drawn by the seed; all of them where there are no more."""
        if count is None or count >= len(self):
            return self
        chosen = np.random.RandomState(seed).permutation(len(self))[:count]
        return Loader(Subset(self.part, np.sort(chosen).tolist()), self.normalise, self.batch)

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Where pixels between 0 and 1 lie as the network takes them: one lower and one upper end a channel."""
        one = self.part[0][0]
        ends = torch.zeros_like(one)[None], torch.ones_like(one)[None]
        low, high = (self.normalise(end)[0].amax(dim=(1, 2), keepdim=True) for end in ends)
        return low, high


class Subject(NamedTuple):
    """A network with the samples that it has not learned from."""

    model: nn.Module
    """It takes what the loaders give, which is normalised."""
    val: Loader
    test: Loader


def trained(settings: Mapping[str, Any]) -> Subject:
    """The network of a cell's settings: that of a file of weights, else one kept from before, else trained now.

    `data`, `network` and `network_seed` name it. `how` says the rest: the `options` of the network; its `weights`, a
    file in the folder of data, or `loss`, `loss_options`, `epochs`, `augment` and other options of `train` (without
    either it stays as it was made); and the `sizes` of train, val and test, if these are to be drawn anew from all the
    samples. `folder` is that of data, `cache` that of weights, both of the machine. Of several processes that want the
    same network one trains it, and the others wait.

    >>> from tempfile import TemporaryDirectory
    >>> how = {"options": {"width": 2}, "epochs": 1, "sizes": [200, 100, 100]}
    >>> with TemporaryDirectory() as folder:
    ...     settings = {"data": "digits", "network": "cnn", "how": how, "network_seed": 0, "cache": folder}
    ...     subject = trained(settings)
    ...     again = trained(settings)
    >>> images, labels = next(iter(subject.test))
    >>> images.shape, subject.model(images).equal(again.model(images))
    (torch.Size([100, 1, 8, 8]), True)
    """
    how, seed = settings["how"], settings["network_seed"]
    data = _data(settings)
    if how.get("sizes"):
        data = _drawn(data, how["sizes"], seed)
    model = _made(settings["network"], data, how.get("options", {}), seed)
    normalise: nn.Module = nn.Identity() if data.normalisation is None else Normalise(*data.normalisation)
    if how.get("weights"):
        path = folder_of(settings.get("folder")) / how["weights"]
        if how.get("digest") not in (None, digest(path)):
            raise ValueError(f"{path}: the file has changed since the study began")
        with errors_name_file(require_file(path)):
            load_weights(model, path)
    elif "epochs" in how:
        _learned(model, data, normalise, settings)
    return Subject(model.eval(), Loader(data.val, normalise), Loader(data.test, normalise))


def digest(path: Path) -> str:
    """What tells a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def cache_of(settings: Mapping[str, Any]) -> Path:
    """The folder in which this machine keeps weights: the one named, else one in the user's cache."""
    named = settings.get("cache") or os.environ.get("TRUEUP_NETWORKS")
    return Path(named) if named else Path.home() / ".cache" / "trueup" / "networks"


def _learned(model: nn.Module, data: Data, normalise: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give the network the weights that were kept, or train it and keep them."""
    folder = cache_of(settings)
    folder.mkdir(parents=True, exist_ok=True)
    known = [VERSION, torch.__version__, *(settings[name] for name in SETTINGS)]
    key = hashlib.sha256(as_json(known, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{key}.safetensors"
    with FileLock(folder / f"{key}.lock"):  # the system opens it if its owner is killed
        if not path.exists():
            how = {**settings["how"]}
            for name in ("options", "sizes", "weights"):
                how.pop(name, None)
            loss = LOSSES[how.pop("loss", "cross_entropy")](**how.pop("loss_options", {}))
            augment = flip_and_crop if how.pop("augment", False) else None
            whole = nn.Sequential(normalise, model)
            epochs, seed = how.pop("epochs"), settings["network_seed"]
            train(whole, data, loss, epochs, augment=augment, seed=seed, progress=False, **how)
            with atomic_write(path) as (draft,):
                save_file({name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}, draft)
    with errors_name_file(path):  # also after training, so that nobody's weights are on another device
        model.cpu().load_state_dict(load_file(path))


def _data(settings: Mapping[str, Any]) -> Data:
    """The data set; of published weights for CIFAR-10, trained on all training images, halves of the test images."""
    folder = settings.get("folder")
    if settings["data"] == "cifar10" and settings["how"].get("weights"):
        return _halves(folder_of(folder) / "images")
    return load_data(settings["data"], folder, seed=settings["network_seed"])


def _halves(folder: Path) -> Data:
    images, labels = npz(folder / "cifar10_test.npz")["train"]
    path = folder / "cifar10_test_split.npz"
    with errors_name_file(require_file(path)), np.load(path, allow_pickle=False) as file:
        split = [file[f"{name}_index"] for name in ("val", "test")]
    val, test = (TensorDataset(pixels(images[index]), torch.from_numpy(labels[index])) for index in split)
    return Data("cifar10", "image", val, val, test, classes=THINGS, normalisation=IMAGENET)


def _drawn(data: Data, sizes: list[int], seed: int) -> Data:
    """The same samples, parted anew."""
    whole: ConcatDataset[Any] = ConcatDataset([data.train, data.val, data.test])
    if sum(sizes) > len(whole):
        raise ValueError(f"sizes must add up to at most {len(whole)} samples of {data.name}, got {sizes}")
    order = np.random.RandomState(seed).permutation(len(whole))
    ends = [0, *np.cumsum(sizes).tolist()]
    train_part, val, test = (Subset(whole, order[a:b].tolist()) for a, b in pairwise(ends))
    return replace(data, train=train_part, val=val, test=test)


def _made(name: str, data: Data, options: Mapping[str, Any], seed: int) -> nn.Module:
    """A network of the registry that takes the images of a data set."""
    wanted = inspect.signature(NETWORKS[name]).parameters
    one = data.val[0][0]
    has = {"channels": len(one), "inputs": one.numel(), "vocabulary": len(data.vocabulary)}
    fitting = {key: value for key, value in has.items() if key in wanted}
    made: nn.Module = NETWORKS[name](len(data.classes), **{**fitting, "seed": seed, **options})
    return made
