"""Networks of the studies: trained once on a machine and kept there, or read from a file of weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from trueup._core import __version__
from trueup._core.executors import count_cores
from trueup._core.registry import LOSSES
from trueup._core.splits import random_order, split_by_sizes, split_indices
from trueup.clamping.calibration_set import graph_rows
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.models.corruptions import corrupt
from trueup.models.image_data import Pictures, npz, pixels
from trueup.models.networks import Normalise, load_weights
from trueup_studies.cost import SIZES
from trueup_studies.grid import as_json, digest
from trueup_studies.networks import build_network, network_options
from trueup_studies.training.augment import flip_and_crop
from trueup_studies.training.data import load_data
from trueup_studies.training.data.class_names import THINGS
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.data.image_folder import decode_once, squash
from trueup_studies.training.data.images import IMAGENET, Normalisation
from trueup_studies.training.data.sources import folder_of
from trueup_studies.training.loop import TrainingError, make_fabric, train
from trueup_studies.training.run_settings import with_current_names

VERSION = 1
"""Raised whenever the same settings would train other weights: those kept no longer count then."""
BATCH = 500
"""Images that a trained network is asked about at a time, if so many go into one graph."""
LONG = 1000
"""Training samples from which on a checkpoint is written: with fewer, an epoch takes hardly longer than the file."""
SHIPPED = "weights"
"""The folder of the package with the small networks of default settings, so that every machine has the same."""
RESIZES = {"squash": squash}
"""Name → how a picture is brought to the size that networks take."""
SETTINGS = ("data", "network", "how", "network_seed")
"""What of a cell's settings its network depends on."""


@dataclass(frozen=True)
class Loader:
    """A part of a data set, in batches as the network takes them; it can be read again and again."""

    part: Dataset[Any]
    normalise: nn.Module
    batch_size: int = BATCH
    ahead: bool = False
    """Whether a batch is read while the one before it is in use."""
    name: str = ""
    """Which samples these are, in words that no others of the same network have."""

    def __len__(self) -> int:
        return len(self.part)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._normalise_batches(DataLoader(self.part, batch_size=self.batch_size))

    def batches_of(self, numbers: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of these numbers, batch by batch."""
        own = torch.Generator()  # a loader draws a number from the global one
        return self._normalise_batches(DataLoader(self.part, batch_sampler=numbers, generator=own))

    def _normalise_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in read_ahead(batches) if self.ahead else batches:
            yield self.normalise(images), labels

    def sample(self, count: int | None, seed: int) -> Loader:
        """`count` random samples; all of them where there are no more."""
        if count is None or count >= len(self):
            return self
        indices = np.sort(random_order(len(self), seed)[:count])
        return replace(self, part=Subset(self.part, indices.tolist()), name=f"{self.name}, {count} by {seed}")

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """The range of pixels between 0 and 1 after normalisation: one lower and one upper end a channel."""
        image = self.part[0][0]
        ends = torch.zeros_like(image)[None], torch.ones_like(image)[None]
        low, high = (self.normalise(end)[0].amax(dim=(1, 2), keepdim=True) for end in ends)
        return low, high


def read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, each read while the one before it is in use.

    By a thread: reading holds no lock of Python's for long, and a daemon, as a worker of Dask is, may have no processes
    of its own, which would also send every batch through shared memory.

    >>> list(read_ahead([1, 2, 3]))
    [1, 2, 3]
    """
    rest = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, rest, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, rest, None)
            yield batch


def resplit(val: Loader, test: Loader, seed: int) -> tuple[Loader, Loader]:
    """The samples of both, split anew at random into as many and as many."""
    whole: ConcatDataset[Any] = ConcatDataset([val.part, test.part])
    first, second = split_by_sizes(random_order(len(whole), seed), [len(val), len(test)])[:2]
    halves = ((val, first), (test, second))
    new_val, new_test = (
        replace(half, part=Subset(whole, np.sort(rows).tolist()), name=f"{half.name}, split {seed}")
        for half, rows in halves
    )
    return new_val, new_test


class TrainedNetwork(NamedTuple):
    """A network with the validation and test samples that it was not trained on."""

    model: nn.Module
    """It takes what the loaders give, which is normalised."""
    val: Loader
    test: Loader


def load_or_train(settings: Mapping[str, Any]) -> TrainedNetwork:
    """The network of a cell's settings: that of a file of weights, else one kept from before, else trained now.

    `data`, `network` and `network_seed` name it. `how` says the rest: the `options` of the network; its `weights`, a
    file in the folder of data, or `loss`, `loss_options`, `epochs`, `augment` and other options of `train` (without
    either it keeps its initial weights); and the `sizes` of train, val and test, if all samples are to be split anew.
    `shift`, a corruption and its severity, is of the images that it is calibrated and tested on, and `resize` says how
    pictures of several sizes are brought to one, if not by their middle.
    What a file of weights was trained on is said by `known_split` or by `how["split"]`.
    Small networks of default settings come with the package, unless `how` says `retrain`.
    `folder` is that of data, `cache` that of weights, `device` where the network is wanted, all of the machine. Of
    several processes that want the same network one trains it, and the others wait.

    >>> from tempfile import TemporaryDirectory
    >>> how = {"options": {"width": 2}, "epochs": 1, "sizes": [200, 100, 100]}
    >>> with TemporaryDirectory() as folder:
    ...     settings = {"data": "digits", "network": "cnn", "how": how, "network_seed": 0, "cache": folder}
    ...     network = load_or_train(settings)
    ...     again = load_or_train(settings)
    >>> images, labels = next(iter(network.test))
    >>> images.shape, network.model(images).equal(again.model(images))
    (torch.Size([100, 1, 8, 8]), True)
    """
    how, seed = dict(settings["how"]), settings["network_seed"]
    shift, resize = how.pop("shift", None), how.pop("resize", None)
    settings = {**settings, "how": how}  # a network is the same whatever images it is tried on
    data = _data(settings)
    if how.get("sizes"):
        data = _resplit(data, how["sizes"], seed)
    name, options = settings["network"], {"seed": seed, **how.get("options", {})}
    # Of the validation images, which any data set has: those of ImageNet to train on are seldom there.
    model = build_network(name, network_options(name, replace(data, train=data.val), **options))
    _require_own_classes(model, data, settings)
    normalisation = _own_normalisation(model, how, settings) or data.normalisation
    normalise: nn.Module = nn.Identity() if normalisation is None else Normalise(*normalisation)
    if how.get("weights"):
        path = folder_of(settings.get("folder")) / how["weights"]
        if how.get("digest") not in (None, digest(path.read_bytes())):
            raise ValueError(f"{path}: the file has changed since the study began")
        with errors_name_file(require_file(path)):
            load_weights(model, path)
    elif "epochs" in how:
        _load_or_train_weights(model, data, normalise, settings)
    parts = {"val": data.val, "test": data.test}
    parts = {name: _pictures(part, resize) for name, part in parts.items()}
    pictures = any(isinstance(part, Pictures) for part in parts.values())
    if pictures:
        # A daemon, as a worker of Dask is, may have no processes of its own.
        folder, workers = cache_folder(settings), 0 if current_process().daemon else count_cores()
        parts = {name: decode_once(part, folder, workers=workers) for name, part in parts.items()}  # type: ignore[arg-type]
    if shift is not None:
        parts = {name: _shift(part, shift, seed=i) for i, (name, part) in enumerate(parts.items())}
    size = min(BATCH, graph_rows(parts["val"][0][0].numel()))
    val, test = (Loader(part, normalise, size, pictures, name) for name, part in parts.items())
    return TrainedNetwork(channels_last(model.to(settings.get("device") or "cpu")).eval(), val, test)


def channels_last(model: nn.Module) -> nn.Module:
    """The same network, its convolutions' weights laid out as they are fastest: a third less time on CPUs.

    Sums are rounded otherwise, as they are on another CPU.
    """
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _pictures(part: Dataset[Any], resize: str | None) -> Dataset[Any]:
    """Pictures, also some of them, brought to one size as it is wanted; what is none stays as it is."""
    whole, indices = (part.dataset, part.indices) if isinstance(part, Subset) else (part, None)
    if not isinstance(whole, Pictures):
        return part
    numbers = range(len(whole)) if indices is None else indices
    transform = whole.transform if resize is None else RESIZES[resize]
    return Pictures([whole.files[i] for i in numbers], [whole.labels[i] for i in numbers], transform)


def _require_own_classes(model: nn.Module, data: Data, settings: Mapping[str, Any]) -> None:
    """Refuse weights that timm fetches for other classes: of these the last layer would be drawn at random."""
    how, config = settings["how"], getattr(model, "pretrained_cfg", None) or {}
    own = config.get("num_classes", len(data.classes))
    if how.get("options", {}).get("pretrained") and "epochs" not in how and own != len(data.classes):
        raise ValueError(
            f"{data.name} must have {own:,} classes, as the published weights of {settings['network']} have, "
            f"got {len(data.classes):,}"
        )


def _own_normalisation(model: nn.Module, how: Mapping[str, Any], settings: Mapping[str, Any]) -> Normalisation | None:
    """Mean and standard deviation that a network of timm with published weights names for its inputs.

    Weights for ImageNet from a file are taken for these too, unless what is known of the file says another.
    """
    config = getattr(model, "pretrained_cfg", None)
    pretrained = how.get("options", {}).get("pretrained")
    if how.get("weights"):
        pretrained = settings["data"] == "imagenet" and _split_of(settings).normalisation is None
    return (tuple(config["mean"]), tuple(config["std"])) if config and pretrained else None


def _split_of(settings: Mapping[str, Any]) -> WeightsSplit:
    how = settings["how"]
    return KNOWN_WEIGHTS.get(how.get("digest", "")) or WeightsSplit(*how["split"])


class WeightsSplit(NamedTuple):
    """Which images a file of weights has never seen, and how it expects them."""

    held_out: Literal["test", "last", "val"]
    """"test": all training images were seen, so the test images are halved; "last": the last tenth of the training
    images was held out; "val": the validation part that the data set's files name."""
    normalisation: Normalisation | None = None
    """Mean and standard deviation of each channel; those of timm's network, or else of the data set, if None."""
    published: bool = False
    """Whether these are the paper's own."""


KNOWN_WEIGHTS = {
    "12fca82f0bebc4135bf1f32f6e3710e6": WeightsSplit("test", IMAGENET),
    "d509ac1820d7f25398913559d7e81a13": WeightsSplit("test", IMAGENET),
}
"""Digest of a file → its split: the common ResNets of CIFAR-10 (akamaster/pytorch_resnet_cifar10)."""
SPLIT_BY_FILES = ("bloodmnist", "imagenet")
"""Data sets whose files name a validation part."""
SPLIT_BY_ORDER = ("cifar10", "cifar100", "svhn")
"""Those of which `load_data` can take the last tenth of the training images for validation."""
RELEASED_CIFAR100: Normalisation = ((0.4914, 0.4822, 0.4465), (0.2675, 0.2565, 0.2761))
"""What the code released with Neural Clamping makes of CIFAR-100 for its networks: not the data set's own."""


def read_split(path: Path, data: str) -> WeightsSplit:
    """What the file NAME.json beside weights NAME says.

    That is `held_out`; `mean` and `std` of each channel if they are its own; and `"published": true` of weights that
    are the paper's, which on CIFAR-100 have a mean and std of their own.
    """
    side = path.with_suffix(".json")
    mean, std = map(list, RELEASED_CIFAR100)
    if not side.exists():
        released = as_json({"held_out": "last", "mean": mean, "std": std, "published": True})
        raise ValueError(
            f"{path}: which images these weights were trained on is not known, so none is safe to calibrate on; write "
            f'{side.name} beside them: {{"held_out": "test"}} if they saw all training images, "last" if the last '
            f'tenth of these was held out ({", ".join(SPLIT_BY_ORDER)}), "val" if the validation part of the files was '
            f'({", ".join(SPLIT_BY_FILES)}); "mean" and "std" of each channel if they are not the data set\'s; and '
            f'"published": true if they are the paper\'s own; for the ResNet-110 released with the code of Neural '
            f"Clamping it is {released}"
        )
    with errors_name_file(side):
        facts = json.loads(side.read_text(encoding="utf-8"))
        held_out = facts.get("held_out") if isinstance(facts, dict) else None
        known = ["test", *(["last"] if data in SPLIT_BY_ORDER else []), *(["val"] if data in SPLIT_BY_FILES else [])]
        if held_out not in known:
            raise ValueError(f"held_out must be one of {', '.join(known)} for {data}, got {held_out!r}")
        published = facts.get("published", False)
        if not isinstance(published, bool):
            raise ValueError(f"published must be true or false, got {published!r}")
        normalisation = _parse_normalisation(facts, channels=SIZES[data].shape[0])
        if normalisation is None and published and data == "cifar100":
            raise ValueError(
                f"the paper's weights for cifar100 need mean and std, got none; its released code has {mean} and {std}"
            )
    return WeightsSplit(held_out, normalisation, published)


def _parse_normalisation(facts: Mapping[str, Any], channels: int) -> Normalisation | None:
    """Mean and standard deviation of each channel; None where neither is named.

    >>> _parse_normalisation({"mean": [0.5], "std": [0.25]}, 1)
    ((0.5,), (0.25,))
    >>> _parse_normalisation({"mean": [0.5]}, 1)
    Traceback (most recent call last):
    ValueError: std must have a positive number for each of 1 channels, got None
    """
    if "mean" not in facts and "std" not in facts:
        return None
    pair = []
    for name, kind in (("mean", "finite"), ("std", "positive")):
        values: Any = facts.get(name)
        numbers = isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
        if not numbers or len(values) != channels or (kind == "positive" and min(values) <= 0):
            raise ValueError(f"{name} must have a {kind} number for each of {channels} channels, got {values!r}")
        pair.append(tuple(values))
    return pair[0], pair[1]


def shipped_name(settings: Mapping[str, Any]) -> str:
    """The file of a network that comes with the package: its settings, whatever the version of torch."""
    how = {name: value for name, value in settings["how"].items() if name != "retrain"}
    known = [VERSION, *({**settings, "how": how}[name] for name in SETTINGS)]
    return f"{digest(as_json(known, sort_keys=True).encode())}.safetensors"


def cache_folder(settings: Mapping[str, Any]) -> Path:
    """The folder in which this machine keeps weights: the one named, else one in the user's cache."""
    named = settings.get("cache") or os.environ.get("TRUEUP_NETWORKS")
    return Path(named) if named else Path.home() / ".cache" / "trueup" / "networks"


@contextmanager
def checkpoint_file(settings: Mapping[str, Any], known: Sequence[Any], samples: int) -> Iterator[Path | None]:
    """A file in which a long training is kept from epoch to epoch, so that a kill does not lose it; None for a short.

    `known` is what the training depends on, beside the folder of data. The file is removed when the block ends, also by
    a training that fails or a file that cannot be read: from there it would only fail again. Of several processes with
    the same training one does it, and then the next. Where no file can be written, there is none.
    """
    folder = cache_folder(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        samples = 0
    if samples < LONG:
        yield None
        return
    data = settings.get("folder") or settings.get("data_dir")
    content = as_json([__version__, torch.__version__, data, *known], sort_keys=True)
    path = folder / f"{digest(content.encode())}.ckpt"
    with FileLock(path.with_suffix(".lock")):
        try:
            yield path
        except (FloatingPointError, TrainingError, ValueError):
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _load_or_train_weights(model: nn.Module, data: Data, normalise: nn.Module, settings: Mapping[str, Any]) -> None:
    """Load the weights that come with the package, or from the cache; else train the network and keep them there."""
    shipped = files("trueup_studies").joinpath(SHIPPED, shipped_name(settings))
    if not settings["how"].get("retrain") and shipped.is_file():
        model.cpu().load_state_dict(load(shipped.read_bytes()))
        return
    folder = cache_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    known = [VERSION, torch.__version__, *(settings[name] for name in SETTINGS)]
    key = digest(as_json(known, sort_keys=True).encode())
    path = folder / f"{key}.safetensors"
    with FileLock(folder / f"{key}.lock"):  # the system opens it if its owner is killed
        if not path.exists():
            how = {**settings["how"]}
            for name in ("options", "sizes", "weights", "retrain"):
                how.pop(name, None)
            how = with_current_names(how)
            loss = LOSSES[how.pop("loss", "cross_entropy")](**how.pop("loss_options", {}))
            augment = flip_and_crop if how.pop("augment", False) else None
            whole = nn.Sequential(normalise, model)
            epochs, seed = how.pop("epochs"), settings["network_seed"]
            how |= {"augment": augment, "fabric": make_fabric(settings.get("device")), "seed": seed, "progress": False}
            with checkpoint_file(settings, known, len(data.train)) as checkpoint:  # type: ignore[arg-type]
                train(whole, data, loss, epochs, checkpoint=checkpoint, **how)
                with atomic_write(path) as (draft,):
                    save_file({name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}, draft)
    with errors_name_file(path):  # also after training, so that nobody's weights are on another device
        model.cpu().load_state_dict(load_file(path))


def _data(settings: Mapping[str, Any]) -> Data:
    """The data set; of a file of weights, the images that it has not seen."""
    folder, name, how = settings.get("folder"), settings["data"], settings["how"]
    if not how.get("weights"):
        return load_data(name, folder, seed=settings["network_seed"])
    split = _split_of(settings)
    if split.held_out == "test":
        fixed = folder_of(folder) / "images" / "cifar10_test_split.npz"
        fixed_split = name == "cifar10" and fixed.exists()
        data = _cifar10_test_halves(fixed.parent) if fixed_split else _test_halves(name, folder)
    else:
        data = load_data(name, folder, seed=None if split.held_out == "last" else 0)
    return data if split.normalisation is None else replace(data, normalisation=split.normalisation)


def _test_halves(name: str, folder: str | None) -> Data:
    """The test images in two halves, always the same ones."""
    data = load_data(name, folder, seed=0)
    n = len(data.test)  # type: ignore[arg-type]
    val, test = (Subset(data.test, index.tolist()) for index in split_indices(n, share=0.5, seed=0))
    return replace(data, val=val, test=test)


def _cifar10_test_halves(folder: Path) -> Data:
    images, labels = npz(folder / "cifar10_test.npz")["train"]
    path = folder / "cifar10_test_split.npz"
    with errors_name_file(require_file(path)), np.load(path, allow_pickle=False) as file:
        split = [file[f"{name}_index"] for name in ("val", "test")]
    val, test = (TensorDataset(pixels(images[index]), torch.from_numpy(labels[index])) for index in split)
    return Data("cifar10", "image", val, val, test, classes=THINGS, normalisation=IMAGENET)


def _shift(part: Dataset[Any], shift: tuple[str, int], seed: int) -> Dataset[Any]:
    """The same samples, shifted once for all."""
    images, labels = next(iter(DataLoader(part, batch_size=len(part))))  # type: ignore[arg-type]
    return TensorDataset(corrupt(images, *shift, seed=seed), labels)


def _resplit(data: Data, sizes: list[int], seed: int) -> Data:
    """The same samples in a new random split."""
    whole: ConcatDataset[Any] = ConcatDataset([data.train, data.val, data.test])
    if sum(sizes) > len(whole):
        raise ValueError(f"sizes must add up to at most {len(whole)} samples of {data.name}, got {sizes}")
    parts = split_by_sizes(random_order(len(whole), seed), sizes)[:3]
    train_part, val, test = (Subset(whole, indices.tolist()) for indices in parts)
    return replace(data, train=train_part, val=val, test=test)
