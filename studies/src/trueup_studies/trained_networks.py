"""Networks of the studies: trained once per machine and cached, or read from a file of weights."""

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
"""Increased whenever the same settings would train other weights; cached weights no longer count then."""
BATCH = 500
"""Largest batch for a trained network, if it fits into one graph."""
LONG = 1000
"""Training samples from which checkpoints are written; with fewer, an epoch takes no longer than the file."""
SHIPPED = "weights"
"""Folder of the package with small trained networks, so that every machine has the same."""
RESIZES = {"squash": squash}
"""Name → function that resizes a picture for a network."""
SETTINGS = ("data", "network", "how", "network_seed")
"""Settings of a cell that its network depends on."""


@dataclass(frozen=True)
class Loader:
    """A part of a data set in normalised batches; it can be iterated repeatedly."""

    part: Dataset[Any]
    normalise: nn.Module
    batch_size: int = BATCH
    ahead: bool = False
    """Whether the next batch is read while one is in use."""
    name: str = ""
    """Unique description of these samples among those of the network."""

    def __len__(self) -> int:
        return len(self.part)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._normalise_batches(DataLoader(self.part, batch_size=self.batch_size))

    def batches_of(self, numbers: Sequence[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples with these indices, batch by batch."""
        generator = torch.Generator()  # otherwise the loader draws from the global generator
        return self._normalise_batches(DataLoader(self.part, batch_sampler=numbers, generator=generator))

    def _normalise_batches(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in read_ahead(batches) if self.ahead else batches:
            yield self.normalise(images), labels

    def sample(self, count: int | None, seed: int) -> Loader:
        """Draw `count` samples at random, or take all if there are no more."""
        if count is None or count >= len(self):
            return self
        indices = np.sort(random_order(len(self), seed)[:count])
        return replace(self, part=Subset(self.part, indices.tolist()), name=f"{self.name}, {count} by {seed}")

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """Normalised range of pixels in [0, 1]: the lower and the upper end per channel."""
        image = self.part[0][0]
        ends = torch.zeros_like(image)[None], torch.ones_like(image)[None]
        low, high = (self.normalise(end)[0].amax(dim=(1, 2), keepdim=True) for end in ends)
        return low, high


def read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the same batches, reading the next one while one is in use.

    A thread reads them, since reading rarely holds Python's lock. Processes would copy every batch through shared
    memory, and a daemon such as a Dask worker may not start any.

    >>> list(read_ahead([1, 2, 3]))
    [1, 2, 3]
    """
    iterator = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, iterator, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, iterator, None)
            yield batch


def resplit(val: Loader, test: Loader, seed: int) -> tuple[Loader, Loader]:
    """Split the samples of both halves anew at random, with the same sizes."""
    whole: ConcatDataset[Any] = ConcatDataset([val.part, test.part])
    first, second = split_by_sizes(random_order(len(whole), seed), [len(val), len(test)])[:2]
    halves = ((val, first), (test, second))
    new_val, new_test = (
        replace(half, part=Subset(whole, np.sort(rows).tolist()), name=f"{half.name}, split {seed}")
        for half, rows in halves
    )
    return new_val, new_test


class TrainedNetwork(NamedTuple):
    """A network with validation and test samples that it was not trained on."""

    model: nn.Module
    """The network; it takes the normalised inputs of the loaders."""
    val: Loader
    test: Loader


def load_or_train(settings: Mapping[str, Any]) -> TrainedNetwork:
    """Return the network of a cell's settings: from a file of weights, else from the cache, else trained now.

    `data`, `network` and `network_seed` name it. `how` has the `options` of the network. It also has `weights`, a file
    in the folder of data, or else options of `train` with `loss`, `loss_options`, `epochs` and `augment`. Without both,
    the network keeps its initial weights. `sizes` in `how` are those of a new split of all samples. `shift` is a
    corruption with its severity, applied to calibration and test images. `resize` names how pictures of several sizes
    are resized, in the place of a center crop. `KNOWN_WEIGHTS` or `how["split"]` says what the weights were trained on.
    Some small networks come with the package; `retrain` in `how` trains them instead. `folder` is the folder of data,
    `cache` that of weights, and `device` that of the network. If several processes need the same network, one trains it
    and the others wait.

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
    settings = {**settings, "how": how}  # the network does not depend on the shift
    data = _data(settings)
    if how.get("sizes"):
        data = _resplit(data, how["sizes"], seed)
    name, options = settings["network"], {"seed": seed, **how.get("options", {})}
    # Sizes come from validation images, since the training images of ImageNet are often missing.
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
        # A daemon, such as a Dask worker, may not start processes.
        folder, workers = cache_folder(settings), 0 if current_process().daemon else count_cores()
        parts = {name: decode_once(part, folder, workers=workers) for name, part in parts.items()}  # type: ignore[arg-type]
    if shift is not None:
        parts = {name: _shift(part, shift, seed=i) for i, (name, part) in enumerate(parts.items())}
    size = min(BATCH, graph_rows(parts["val"][0][0].numel()))
    val, test = (Loader(part, normalise, size, pictures, name) for name, part in parts.items())
    return TrainedNetwork(channels_last(model.to(settings.get("device") or "cpu")).eval(), val, test)


def channels_last(model: nn.Module) -> nn.Module:
    """Store the convolutions' weights in the fastest layout, which saves a third of the time on CPUs.

    Rounding differs slightly, as between CPUs.
    """
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _pictures(part: Dataset[Any], resize: str | None) -> Dataset[Any]:
    """Set the resizing of a part of pictures, or of a subset of them; other parts are returned unchanged."""
    whole, indices = (part.dataset, part.indices) if isinstance(part, Subset) else (part, None)
    if not isinstance(whole, Pictures):
        return part
    numbers = range(len(whole)) if indices is None else indices
    transform = whole.transform if resize is None else RESIZES[resize]
    return Pictures([whole.files[i] for i in numbers], [whole.labels[i] for i in numbers], transform)


def _require_own_classes(model: nn.Module, data: Data, settings: Mapping[str, Any]) -> None:
    """Reject weights that timm downloads for other classes, since their final layer would be random."""
    how, config = settings["how"], getattr(model, "pretrained_cfg", None) or {}
    published = config.get("num_classes", len(data.classes))
    if how.get("options", {}).get("pretrained") and "epochs" not in how and published != len(data.classes):
        raise ValueError(
            f"{data.name} must have {published:,} classes, as the published weights of {settings['network']} have, "
            f"got {len(data.classes):,}"
        )


def _own_normalisation(model: nn.Module, how: Mapping[str, Any], settings: Mapping[str, Any]) -> Normalisation | None:
    """Return the mean and standard deviation that timm names for the inputs of published weights.

    Files of ImageNet weights count as published weights, unless their split has another normalisation.
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
    """Images that a file of weights was not trained on, and their normalisation."""

    held_out: Literal["test", "last", "val"]
    """"test": all training images were seen, so the test images are halved; "last": the last tenth of the training
    images was held out; "val": the validation part that the data set's files name."""
    normalisation: Normalisation | None = None
    """Mean and standard deviation of each channel; None for those of timm's network, or else of the data set."""
    published: bool = False
    """Whether these are the paper's own weights."""


KNOWN_WEIGHTS = {
    "12fca82f0bebc4135bf1f32f6e3710e6": WeightsSplit("test", IMAGENET),
    "d509ac1820d7f25398913559d7e81a13": WeightsSplit("test", IMAGENET),
}
"""Digest of a file → its split: the common ResNets of CIFAR-10 (akamaster/pytorch_resnet_cifar10)."""
SPLIT_BY_FILES = ("bloodmnist", "imagenet")
"""Data sets whose files contain a validation part."""
SPLIT_BY_ORDER = ("cifar10", "cifar100", "svhn")
"""Data sets of which `load_data` can take the final tenth of the training images for validation."""
RELEASED_CIFAR100: Normalisation = ((0.4914, 0.4822, 0.4465), (0.2675, 0.2565, 0.2761))
"""Normalisation of CIFAR-100 in the code released with Neural Clamping; it differs from the data set's."""


def read_split(path: Path, data: str) -> WeightsSplit:
    """Read the file NAME.json next to the weights NAME.

    It has `held_out`, and optionally `mean` and `std` of each channel. `"published": true` marks the paper's weights;
    on CIFAR-100 these need `mean` and `std`.
    """
    side = path.with_suffix(".json")
    mean, std = map(list, RELEASED_CIFAR100)
    if not side.exists():
        released = as_json({"held_out": "last", "mean": mean, "std": std, "published": True})
        raise ValueError(
            f"{path}: the training images of these weights are unknown, so none is safe to calibrate on. Write "
            f'{side.name} next to them: {{"held_out": "test"}} if they saw all training images; "last" if the last '
            f'tenth was held out ({", ".join(SPLIT_BY_ORDER)}); "val" if the validation part of the files was held '
            f'out ({", ".join(SPLIT_BY_FILES)}). Add "mean" and "std" of each channel if they are not the data set\'s, '
            f'and "published": true for the paper\'s own weights. For the ResNet-110 released with Neural Clamping: '
            f"{released}"
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
    """Read the mean and standard deviation of each channel; None if neither is there.

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
    """Return the file name of a network that comes with the package; it does not depend on the version of torch."""
    how = {name: value for name, value in settings["how"].items() if name != "retrain"}
    known = [VERSION, *({**settings, "how": how}[name] for name in SETTINGS)]
    return f"{digest(as_json(known, sort_keys=True).encode())}.safetensors"


def cache_folder(settings: Mapping[str, Any]) -> Path:
    """Return the folder of cached weights: the named one, else one in the user's cache."""
    named = settings.get("cache") or os.environ.get("TRUEUP_NETWORKS")
    return Path(named) if named else Path.home() / ".cache" / "trueup" / "networks"


@contextmanager
def checkpoint_file(settings: Mapping[str, Any], known: Sequence[Any], samples: int) -> Iterator[Path | None]:
    """Yield a checkpoint file for a long training, so that a killed run can resume; None for a short one.

    The name depends on `known` and the folder of data. The file is removed when the block ends, and also when the
    training fails or the file is unreadable, since it would fail again. Processes with the same training wait for each
    other. None is also the result if the folder cannot be created.
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
    """Load the weights that come with the package, or cached ones; else train the network and cache its weights."""
    shipped = files("trueup_studies").joinpath(SHIPPED, shipped_name(settings))
    if not settings["how"].get("retrain") and shipped.is_file():
        model.cpu().load_state_dict(load(shipped.read_bytes()))
        return
    folder = cache_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    known = [VERSION, torch.__version__, *(settings[name] for name in SETTINGS)]
    key = digest(as_json(known, sort_keys=True).encode())
    path = folder / f"{key}.safetensors"
    with FileLock(folder / f"{key}.lock"):  # the system releases it if the owner is killed
        if not path.exists():
            how = {**settings["how"]}
            for name in ("options", "sizes", "weights", "retrain"):
                how.pop(name, None)
            how = with_current_names(how)
            loss = LOSSES[how.pop("loss", "cross_entropy")](**how.pop("loss_options", {}))
            data = replace(data, augment=flip_and_crop if how.pop("augment", False) else None)
            whole = nn.Sequential(normalise, model)
            epochs, seed = how.pop("epochs"), settings["network_seed"]
            how |= {"fabric": make_fabric(settings.get("device")), "seed": seed, "progress": False}
            with checkpoint_file(settings, known, len(data.train)) as checkpoint:  # type: ignore[arg-type]
                train(whole, data, loss, epochs, checkpoint=checkpoint, **how)
                with atomic_write(path) as (draft,):
                    save_file({name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}, draft)
    with errors_name_file(path):  # also after training, to return weights on the CPU
        model.cpu().load_state_dict(load_file(path))


def _data(settings: Mapping[str, Any]) -> Data:
    """Load the data set; for a file of weights, the images that it was not trained on."""
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
    """Split the test images in two fixed halves."""
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
    """Apply the shift to all samples, once."""
    images, labels = next(iter(DataLoader(part, batch_size=len(part))))  # type: ignore[arg-type]
    return TensorDataset(corrupt(images, *shift, seed=seed), labels)


def _resplit(data: Data, sizes: list[int], seed: int) -> Data:
    """Split all samples anew at random."""
    whole: ConcatDataset[Any] = ConcatDataset([data.train, data.val, data.test])
    if sum(sizes) > len(whole):
        raise ValueError(f"sizes must add up to at most {len(whole)} samples of {data.name}, got {sizes}")
    parts = split_by_sizes(random_order(len(whole), seed), sizes)[:3]
    train_part, val, test = (Subset(whole, indices.tolist()) for indices in parts)
    return replace(data, train=train_part, val=val, test=test)
