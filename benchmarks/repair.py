"""Repair compared with its alternatives on shifted images: gain, loss without shift, and cost.

    python benchmarks/repair.py --plan --out docs                       all missing rows of the page, then its files.
    python benchmarks/repair.py --shifts blur --labels 200 --draws 3    some rows.
    python benchmarks/repair.py --small                                 a smoke test of seconds on random data.

TRUEUP_DATA names the folder of networks and images. Every measured row is added to a file of JSON lines (--store), so a
run can be stopped and continued. --out writes the means to repair.csv, and the figure and tables of the page repair.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from measured import made_from, table, write_csv
from trueup import metrics
from trueup.adaptation import AdaptOptions, Repaired, RepairOptions, adapt, repair
from trueup.adaptation.batch_norm import Crop, batch_norms, estimate, share_copy
from trueup.adaptation.composition import Composition
from trueup.adaptation.context import PARTS, prepare
from trueup.adaptation.forward_selection import paired_gain, row_losses, start_selection
from trueup.adaptation.input_maps import sample_at
from trueup.adaptation.last_layer import cross_fit_head, find_head, fit_correction
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt, gaussian_blur, gaussian_noise
from trueup.models.freezing import frozen
from trueup_studies.networks import CNN, Normalise, load_weights, resnet20, resnet32

Pair = tuple[Tensor, Tensor]


def white_balance(x: Tensor) -> Tensor:
    """A gain and an offset for each colour."""
    gains, offsets = torch.tensor([0.75, 1.0, 1.2]), torch.tensor([0.05, 0.0, -0.08])
    return (x * gains.reshape(3, 1, 1) + offsets.reshape(3, 1, 1)).clamp(0, 1)


def hue(x: Tensor, degrees: float = 40.0) -> Tensor:
    """Turn the colours about the grey axis."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / math.sqrt(3)
    turn = torch.eye(3) + sin * cross + (1 - cos) * cross @ cross
    return torch.einsum("cd,ndhw->nchw", turn, x).clamp(0, 1)


def camera(x: Tensor) -> Tensor:
    """Blur, white balance, vignetting, a tone curve and noise, one after the other."""
    x = gaussian_blur(x, 0.6) * torch.tensor([0.85, 1.0, 1.1]).reshape(3, 1, 1)
    height, width = ((torch.arange(n) + 0.5) / n * 2 - 1 for n in x.shape[2:])
    square = (height[:, None] ** 2 + width**2) / 2
    return gaussian_noise((x * (1 - 0.35 * square)).clamp(0, 1) ** 1.4, 0.01)


def clear_camera(x: Tensor) -> Tensor:
    """Blur, white balance, vignetting and a tone curve, without noise."""
    gains, offsets = (torch.tensor(v).reshape(3, 1, 1) for v in ([0.8, 1.0, 1.15], [0.03, 0.0, -0.03]))
    x = gaussian_blur(x, 0.6) * gains + offsets
    height, width = ((torch.arange(n) + 0.5) / n * 2 - 1 for n in x.shape[2:])
    return (x * (1 - 0.4 * (height[:, None] ** 2 + width**2) / 2)).clamp(0, 1) ** 1.3


def stripes(x: Tensor) -> Tensor:
    """An offset for each row."""
    offsets = 0.12 * torch.randn(x.shape[2], generator=torch.Generator().manual_seed(3))
    return (x + offsets[:, None]).clamp(0, 1)


def dark(x: Tensor) -> Tensor:
    """A quarter of the light, and noise."""
    return gaussian_noise(0.25 * x, 0.01)


def dirt(x: Tensor) -> Tensor:
    """Smudges on the lens, grey and blurred."""
    coarse = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(5))
    cover = F.interpolate(coarse, size=x.shape[2:], mode="bicubic")[0]
    cover = (2.2 * (cover - 0.45)).clamp(0, 0.9)
    return gaussian_blur(x, 0.5) * (1 - cover) + 0.35 * cover


def warm_light(x: Tensor) -> Tensor:
    """Other gains than those of `white_balance`, and a darker tone curve."""
    return (x * torch.tensor([1.15, 1.0, 0.75])[: x.shape[1]].reshape(-1, 1, 1)).clamp(0, 1) ** 1.2


def motion_blur(x: Tensor, side: int = 5) -> Tensor:
    """The mean of neighbouring pixels of a row."""
    return F.avg_pool2d(F.pad(x, (side // 2, side // 2, 0, 0), mode="replicate"), (1, side), stride=1)


def salt_and_pepper(x: Tensor, share: float = 0.04) -> Tensor:
    """Black and white pixels, each at half of the share."""
    drawn = torch.rand(len(x), 1, *x.shape[2:], generator=torch.Generator().manual_seed(7))
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn > 1 - share / 2, 1.0, x))


def rotation(x: Tensor, degrees: float) -> Tensor:
    """Turn about the centre, black outside."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return sample_at(x, torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]))


def zoom(x: Tensor, factor: float) -> Tensor:
    """Sample at positions scaled by a factor: below 1 objects get larger; black outside."""
    return sample_at(x, factor * torch.eye(2, 3))


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "five rare classes": lambda x: x,
    "long tail": lambda x: x,
    "rotation 15": lambda x: rotation(x, 15),
    "rotation -25": lambda x: rotation(x, -25),
    "upside down": lambda x: x.flip(2),
    "mirrored": lambda x: x.flip(3),
    "BGR": lambda x: x.flip(1),
    "inverted": lambda x: 1 - x,
    "zoom in 0.7": lambda x: zoom(x, 0.7),
    "zoom out 1.3": lambda x: zoom(x, 1.3),
    "warm light": warm_light,
    "motion blur": motion_blur,
    "salt and pepper": salt_and_pepper,
    "white balance": white_balance,
    "hue": hue,
    "gamma": lambda x: x**2.2,
    "blur": lambda x: gaussian_blur(x, 1.0),
    "clear camera": clear_camera,
    "camera": camera,
    "stripes": stripes,
    "dark": dark,
    "dirt": dirt,
    **{
        f"{name} {severity}": (lambda x, name=name, severity=severity: corrupt(x, name, severity))  # type: ignore[misc]
        for name in CORRUPTIONS
        for severity in (1, 3, 5)
    },
}
MIXES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "five rare classes": lambda rng: np.where(rng.permutation(10) < 5, 1.0, 0.15),
    "long tail": lambda rng: 0.6 ** rng.permutation(10),
}
"""Relative class frequencies of the fitted samples; the test images keep theirs."""
CAMERA = ("white balance", "hue", "gamma", "blur", "clear camera", "camera", "stripes", "dark", "dirt")
CAMERA += ("warm light", "motion blur", "salt and pepper", "gaussian_noise 3", "jpeg 3", "contrast 3")
GEOMETRY = ("rotation 15", "rotation -25", "upside down", "mirrored", "BGR", "inverted", "zoom in 0.7", "zoom out 1.3")
KINDS = {"none": ("none",), "class frequencies": tuple(MIXES), "geometry and channels": GEOMETRY, "camera": CAMERA}
"""Groups of shifts in the table of the page."""
LABELS = (200, 1000)
FIRST_DRAW = 200
"""First draw on the page; no rule was chosen on it or on a later one."""
MARK = "<!-- measured -->"
"""Line before and after the measured part of the page."""


@dataclass(frozen=True)
class Row:
    """One method on one network under one shift."""

    network: str
    shift: str
    method: str
    labels: int
    """Number of shifted samples, with labels or without."""
    draw: int
    nll: float
    accuracy: float
    ece: float
    equivalents: float
    seconds: float
    words: str
    tests: int = 0
    """Test images."""
    gain: float = 0.0
    """Decrease of the test loss from this method to `repair` on the same samples."""
    error: float = 0.0
    """Standard error of the gain, over test images."""
    baseline: float = 0.0
    """Test loss of the network itself on images without a shift, after temperature scaling on images without one."""


@dataclass(frozen=True)
class Subject:
    """A network with images to fit and to test on, in pixels."""

    name: str
    network: nn.Module
    normalise: Normalise
    fit: Pair
    test: Pair
    home: float
    """The temperature fitted to unshifted images."""
    clean: float
    """Test loss on unshifted images at this temperature."""


def batches(pair: Pair, size: int = 200) -> list[Pair]:
    """A loader."""
    return list(zip(pair[0].split(size), pair[1].split(size), strict=True))


def temperature(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Temperature alone."""
    return trueup.calibrate(s.network, batches(shifted_pair), progress=False), 1.0, ""


def clamping(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Neural Clamping."""
    clamped = trueup.clamp(s.network, batches(shifted_pair), seed=seed, progress=False)
    return clamped, clamped.fit_record.equivalents, ""


def batch_norm(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """New batch-norm statistics, then temperature."""
    model = _with_new_statistics(s, shifted_pair)
    after = trueup.METHODS["temperature"](*collect(model, batches(shifted_pair), progress=False))
    return Calibrated(model, after=after), 2.0, ""


def batch_norm_without_labels(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """New batch-norm statistics, the temperature of home."""
    from trueup.calibrators.temperature import Temperature

    return Calibrated(_with_new_statistics(s, shifted_pair), after=Temperature(s.home)), 1.0, ""


def _with_new_statistics(s: Subject, shifted_pair: Pair) -> nn.Module:
    with frozen(s.network):
        samples = Network(s.network, CalibrationSet.read(batches(shifted_pair), device="cpu"))
        black = s.normalise(torch.zeros(1, *shifted_pair[0].shape[1:]))[0]
        return share_copy(s.network, estimate(samples, None, 1.0, augment=Crop(black)))


def tent(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """TENT: one epoch of entropy minimisation over batch norm's scales and offsets; temperature by labels."""

    def entropy(z: Tensor, y: Tensor) -> Tensor:
        return -(torch.softmax(z, 1) * torch.log_softmax(z, 1)).sum(1).mean()

    return _train_affine(s, shifted_pair, seed, entropy, epochs=1)


def batch_norm_affine(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Batch norm's scales and offsets by labels, fifteen epochs of Adam; then temperature on the same samples."""
    return _train_affine(s, shifted_pair, seed, F.cross_entropy, epochs=15)


def _train_affine(
    s: Subject, shifted_pair: Pair, seed: int, loss: Callable[[Tensor, Tensor], Tensor], *, epochs: int
) -> tuple[nn.Module, float, str]:
    model = _with_new_statistics(s, shifted_pair)
    names = {f"{name}.{leaf}" for name in batch_norms(model) for leaf in ("weight", "bias")}
    affine = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if name in names}
    model = share_copy(model, affine)
    trained = [tensor for name, tensor in model.named_parameters() if name in names]
    for tensor in trained:
        tensor.requires_grad = True
    optimiser = torch.optim.Adam(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(shifted_pair[1]), generator=generator).split(100):
            optimiser.zero_grad()
            loss(model(shifted_pair[0][rows]), shifted_pair[1][rows]).backward()
            optimiser.step()
    after = trueup.METHODS["temperature"](*collect(model, batches(shifted_pair), progress=False))
    return Calibrated(model, after=after), 2.0 + 3.0 * epochs, ""


def fine_tune(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """All weights by labels with Adam, on crops and mirrored images; a held-out fifth sets rate, epoch and temperature.

    Batch norm starts from new statistics. The chosen epoch has the lowest held-out loss after its own temperature.
    """
    x, y = shifted_pair
    kept, generator = math.ceil(0.8 * len(y)), torch.Generator().manual_seed(seed)
    start, passes = _with_new_statistics(s, shifted_pair) if batch_norms(s.network) else s.network, 0.0
    rest = batches((x[kept:], y[kept:]))
    best: tuple[float, nn.Module, str] = math.inf, start, ""
    for rate in FINE_TUNING_RATES:
        model = deepcopy(start).train()
        for parameter in model.parameters():
            parameter.requires_grad = True
        optimiser, since_best = torch.optim.Adam(model.parameters(), lr=rate), 0
        lowest = math.inf
        for epoch in range(20 if kept <= 500 else 10):
            crop = Crop(s.normalise(torch.zeros(1, *x.shape[1:]))[0], 1000 * seed + epoch)
            for rows in torch.randperm(kept, generator=generator).split(64):
                batch = crop(x[rows])
                batch = torch.where(torch.rand(len(rows), 1, 1, 1, generator=generator) < 0.5, batch, batch.flip(3))
                optimiser.zero_grad()
                F.cross_entropy(model(batch), y[rows]).backward()
                optimiser.step()
            passes += 3.0
            pair = collect(model.eval(), rest, progress=False)
            loss = metrics.nll(trueup.METHODS["temperature"](*pair)(pair.logits), pair.labels)
            if loss < best[0]:
                best = loss, deepcopy(model), f"rate {rate:g}, epoch {epoch + 1}"
            lowest, since_best = (loss, 0) if loss < lowest else (lowest, since_best + 1)
            if since_best == FINE_TUNING_PATIENCE:
                break
            model.train()
    after = trueup.METHODS["temperature"](*collect(best[1], rest, progress=False))
    return Calibrated(best[1], after=after), passes, best[2]


FINE_TUNING_RATES, FINE_TUNING_PATIENCE = (1e-4, 3e-4, 1e-3), 3
"""Learning rates of Adam, and the number of epochs without a lower held-out loss that ends a run."""


def last_layer(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The last layer alone, with the ridge penalty of the lowest cross-validated loss, and always kept."""
    options = RepairOptions(parts=("head",))
    with prepare(
        s.network, batches(shifted_pair), normalise=None, options=options, seed=seed, progress=False
    ) as context:
        network, labels = context.network, context.network.labels
        name = find_head(s.network, lambda: network.call(next(iter(network.inputs)), None))
        assert name is not None
        _, z, features = replace(context, head=name).forward(Composition([]), 0.0)
        out = [fold.out.numpy() for fold in start_selection(context).folds]
        fitted = cross_fit_head([(rows, z.double().numpy(), features) for rows in out], labels.numpy())
        ridge = min(fitted, key=lambda ridge: row_losses(fitted[ridge], labels).mean())
        correction = fit_correction(z.double().numpy(), features, labels.numpy(), ridge)
    changed = dict(
        zip((f"{name}.weight", f"{name}.bias"), correction.layer(s.network.get_submodule(name)), strict=True)
    )
    after = trueup.METHODS["temperature"](fitted[ridge], labels.numpy())
    return Calibrated(share_copy(s.network, changed), after=after), 2.0, f"ridge {ridge:g}"


def untouched(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The network as it is."""
    return s.network, 0.0, ""


def head(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The last layer alone."""
    return _described(_repair(s, shifted_pair, seed, RepairOptions(parts=("head",))))


def repaired_by_labels(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair with labels."""
    return _described(_repair(s, shifted_pair, seed, RepairOptions()))


def repaired_with_weights(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair with labels, which may also fine-tune all weights."""
    return _described(_repair(s, shifted_pair, seed, RepairOptions(parts=(*PARTS, "weights"))))


def without_labels(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair without labels."""
    options = AdaptOptions(temperature=s.home)
    return _described(
        adapt(s.network, batches(shifted_pair), normalise=s.normalise, options=options, seed=seed, progress=False)
    )


def _repair(s: Subject, shifted_pair: Pair, seed: int, options: RepairOptions) -> Repaired:
    return repair(s.network, batches(shifted_pair), normalise=s.normalise, options=options, seed=seed, progress=False)


def _described(repaired: Repaired) -> tuple[nn.Module, float, str]:
    record = repaired.repair_record
    words = [*record.words, *(part for part in record.parts if part != "input")]
    return repaired, record.equivalents, ", ".join(words)


METHODS: dict[str, Callable[[Subject, Pair, int], tuple[nn.Module, float, str]]] = {
    "repair": repaired_by_labels,
    "untouched": untouched,
    "temperature": temperature,
    "clamp": clamping,
    "batch norm": batch_norm,
    "head": head,
    "TENT": tent,
    "batch norm affine": batch_norm_affine,
    "last layer": last_layer,
    "fine-tuning": fine_tune,
    "repair + weights": repaired_with_weights,
    "batch norm, no labels": batch_norm_without_labels,
    "repair, no labels": without_labels,
}


NEEDS_BATCH_NORM = ("batch norm", "TENT", "batch norm affine", "batch norm, no labels", "repair, no labels")


_OURS: dict[tuple[str, str, int, int], np.ndarray] = {}
"""Test losses of `repair` by network, shift, number of labels and draw."""


def measure(s: Subject, shift: str, method: str, n: int, draw: int) -> Row:
    """Fit to n shifted images and score on test images with the same shift."""
    x, y = s.fit
    rng = np.random.default_rng(draw)
    order = rng.permutation(len(y))
    if shift in MIXES:  # Efraimidis and Spirakis: a sample without replacement in proportion to weights
        weights = MIXES[shift](rng)[y.numpy()]
        order = np.argsort(-(rng.random(len(y)) ** (1 / weights)))
    chosen = torch.from_numpy(order[:n].copy())
    shifted_pair = s.normalise(SHIFTS[shift](x[chosen])), y[chosen]
    test = s.normalise(SHIFTS[shift](s.test[0])), s.test[1]

    def scored(method: str) -> tuple[float, str, float, tuple[Tensor, Tensor]]:
        started = perf_counter()
        network, equivalents, words = METHODS[method](s, shifted_pair, draw)
        seconds = perf_counter() - started
        return equivalents, words, seconds, collect(network, batches(test), progress=False)

    equivalents, words, seconds, pair = scored(method)
    scores = metrics.nll(*pair), metrics.accuracy(*pair), metrics.ece(*pair)
    gain, error = 0.0, 0.0
    if "no labels" not in method:
        key = s.name, shift, n, draw
        if key not in _OURS:
            _OURS.clear()
            _OURS[key] = _losses(*(pair if method == "repair" else scored("repair")[3]))
        gain, error = paired_gain(_losses(*pair), _OURS[key])
    return Row(
        s.name, shift, method, n, draw, *scores, equivalents, seconds, words, len(s.test[1]), gain, error, s.clean
    )


def _losses(logits: Tensor, labels: Tensor) -> np.ndarray:
    return row_losses(logits.double().numpy(), labels)


def real_subjects(names: Sequence[str], tests: int) -> list[Subject]:
    """CIFAR-10 ResNets in the folder TRUEUP_DATA, a transformer trained on its images, and two networks of clothes."""
    folder = Path(os.environ["TRUEUP_DATA"])
    with np.load(folder / "images/cifar10_test.npz") as file:
        x, y = torch.from_numpy(file["images"]).movedim(3, 1).float() / 255, torch.from_numpy(file["labels"]).long()
    with np.load(folder / "images/cifar10_test_split.npz") as file:
        fit, test = file["val_index"], file["test_index"][FIRST_TEST : FIRST_TEST + tests]
    clothes = np.load(folder / "images/fashion_mnist.npz")
    makers = {"resnet20": resnet20, "resnet32": resnet32}
    subjects = []
    for name in names:
        if name in CLOTHES:
            network: nn.Module = train_on_clothes(name, clothes)
            parts = [_clothes(clothes, part) for part in ("val", "test")]
            pairs = parts[0], (parts[1][0][:tests], parts[1][1][:tests])
            subjects.append(_subject(name, network, GREY, *pairs))
            continue
        if name == "vit":
            network = train_vit(folder)
        else:
            network = load_weights(makers[name](10), folder / f"weights/cifar10_{name}.th").eval()
        subjects.append(_subject(name, network, Normalise(), (x[fit], y[fit]), (x[test], y[test])))
    return subjects


FIRST_TEST = 2000
"""Number of the first test image; rules were chosen on earlier ones."""
GREY = Normalise((0.286,), (0.353,))
CLOTHES = ("clothes", "clothes, group norm")


def _clothes(file: np.lib.npyio.NpzFile, part: str) -> Pair:
    """Fashion-MNIST images in [0, 1] and labels."""
    images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    return torch.from_numpy(images)[:, None].float() / 255, torch.from_numpy(labels).long()


def train_on_clothes(name: str, file: np.lib.npyio.NpzFile, epochs: int = 8) -> nn.Module:
    """Train a small network with batch norm or group norm on 20,000 shifted images, or load its weights."""
    network = CNN(10, channels=1, width=16)
    if name != "clothes":
        for number, layer in enumerate(network.trunk):
            if isinstance(layer, nn.BatchNorm2d):
                network.trunk[number] = nn.GroupNorm(4, layer.num_features)
    weights = Path(__file__).with_name(f"repair-{name.replace(', ', '-').replace(' ', '-')}.safetensors")
    if weights.is_file():
        network.load_state_dict(load_file(weights))
        return network.eval()
    x, y = _clothes(file, "train")
    generator, crop = torch.Generator().manual_seed(0), Crop(GREY(torch.zeros(1, 1, 1, 1))[0], 0)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=epochs * math.ceil(len(y) / 128))
    for epoch in range(epochs):
        crop.seed = epoch
        for rows in torch.randperm(len(y), generator=generator).split(128):
            optimiser.zero_grad()
            F.cross_entropy(network(crop(GREY(x[rows]))), y[rows]).backward()
            optimiser.step()
            schedule.step()
    save_file(network.state_dict(), weights)
    return network.eval()


class ViT(nn.Module):
    """A small vision transformer: patches of 4×4, three layers, the mean of the tokens; it has no batch norm."""

    def __init__(self, classes: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([deepcopy(layer) for _ in range(depth)])
        for one in self.layers:
            for parameter in one.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            h = layer(h)
        return self.linear(self.norm(h).mean(dim=1))


def train_vit(folder: Path, epochs: int = 6) -> ViT:
    """Train for two or three minutes by AdamW on 20,000 shifted and mirrored images, or load the weights."""
    torch.manual_seed(0)
    network, weights = ViT(10), Path(__file__).with_name("repair-vit.safetensors")
    if weights.is_file():
        network.load_state_dict(load_file(weights))
        return network.eval()
    parts = [np.load(folder / f"images/cifar10_train{k}.npz") for k in (1, 2)]
    x = torch.from_numpy(np.concatenate([part["images"] for part in parts])).movedim(3, 1)
    y = torch.from_numpy(np.concatenate([part["labels"] for part in parts])).long()
    normalise, generator = Normalise(), torch.Generator().manual_seed(0)
    steps = epochs * math.ceil(len(y) / 128)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(128):
            batch = F.pad(x[rows].float() / 255, (2, 2, 2, 2), mode="reflect")
            top, left, mirror = torch.randint(0, 5, (3,), generator=generator).tolist()
            batch = batch[:, :, top : top + 32, left : left + 32]
            batch = batch.flip(3) if mirror > 1 else batch
            optimiser.zero_grad()
            F.cross_entropy(network(normalise(batch)), y[rows]).backward()
            optimiser.step()
            schedule.step()
    save_file(network.state_dict(), weights)
    return network.eval()


def drawn_subjects() -> list[Subject]:
    """A network that was never trained, on noise."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(160, 3, 16, 16, generator=generator), torch.randint(0, 10, (160,), generator=generator)
    norm = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), CNN(10)).eval()
    return [_subject("drawn", norm, Normalise(), (x[:100], y[:100]), (x[100:], y[100:]))]


def _subject(name: str, network: nn.Module, normalise: Normalise, fit: Pair, test: Pair) -> Subject:
    some = normalise(fit[0][:2000]), fit[1][:2000]
    home = trueup.METHODS["temperature"](*collect(network, batches(some), progress=False))
    z, y = collect(network, batches((normalise(test[0]), test[1])), progress=False)
    return Subject(name, network, normalise, fit, test, float(home.temperature), metrics.nll(home(z), y))


def read(path: Path) -> list[Row]:
    """The rows measured so far."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [Row(**json.loads(line)) for line in lines]
    # Two parallel runs may have measured the same row; it counts once.
    return list({(row.network, row.shift, row.method, row.labels, row.draw): row for row in rows}.values())


def means(rows: Sequence[Row]) -> list[list[str]]:
    """The means over draws of every network, number of samples, shift and method, headings first."""
    cells: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.network, row.labels, list(SHIFTS).index(row.shift), row.draw)):
        if row.draw >= FIRST_DRAW:
            cells.setdefault((row.network, row.labels, row.shift, row.method), []).append(row)
    columns = ["network", "samples", "shift", "method", "draws", "nll", "nll_sd", "accuracy", "ece"]
    lines = [[*columns, "forward_passes", "seconds", "last_draw_changes"]]
    for (network, labels, shift, method), group in cells.items():
        nll = [row.nll for row in group]
        spread = f"{np.std(nll, ddof=1):.4f}" if len(group) > 1 else ""
        numbers = [f"{np.mean([getattr(row, name) for row in group]):.4f}" for name in ("accuracy", "ece")]
        costs = [f"{np.mean([getattr(row, name) for row in group]):.1f}" for name in ("equivalents", "seconds")]
        names = [network, str(labels), shift, method, str(len(group))]
        lines.append([*names, f"{np.mean(nll):.4f}", spread, *numbers, *costs, group[-1].words])
    return lines


def _cells(rows: Sequence[Row], methods: Sequence[str]) -> dict[tuple[str, str, int, int], dict[str, Row]]:
    """Rows by method of each cell (network, shift, samples, draw) that has all the methods which apply to it."""
    cells: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in rows:
        if row.draw >= FIRST_DRAW:
            cells.setdefault((row.network, row.shift, row.labels, row.draw), {})[row.method] = row
    return {
        key: cell
        for key, cell in cells.items()
        if all(method in cell for method in methods if method != "batch norm" or key[0] in HAS_BATCH_NORM)
    }


def table_of_means(rows: Sequence[Row]) -> list[list[str]]:
    """One row per network and kind of shift, at the smallest number of labels: mean test losses over the cells."""
    text = [["network", "shifts", "untouched", "temperature", "batch norm + temperature", "repair", "cells"]]
    cells = {key: cell for key, cell in _cells(rows, ("repair", *SIMPLE)).items() if key[2] == LABELS[0]}
    for network, (kind, shifts) in product(TITLES, KINDS.items()):
        group = [cell for key, cell in cells.items() if key[0] == network and key[1] in shifts]
        if group:
            losses = [
                f"{np.mean([cell[method].nll for cell in group]):.3f}" if method in group[0] else "–"
                for method in (*SIMPLE, "repair")
            ]
            text.append([TITLES[network], kind, *losses, str(len(group))])
    return text


def summary(rows: Sequence[Row]) -> str:
    """The promises as Markdown lines, with the numbers that the rows show."""
    cells = _cells(rows, ("repair", *SIMPLE))
    ours = {key: cell["repair"] for key, cell in cells.items()}
    others = {key: [cell[method] for method in SIMPLE if method in cell] for key, cell in cells.items()}
    worse = [key for key in cells if any(other.gain < -2 * other.error - ROUNDING for other in others[key])]
    excess = [ours[key].nll - min(other.nll for other in others[key]) for key in cells]
    regret, difference = np.mean(np.maximum(excess, 0)), np.mean(excess)
    clean = [row for key, row in ours.items() if key[1] == "none"]
    kept = [row for row in clean if not row.words]
    text = [
        f"- In {len(worse)} of {len(cells)} cells `repair` was worse than the network itself, temperature scaling or "
        "batch norm + temperature by two standard errors. Its mean regret to the best of them in each cell is "
        f"{regret:.4f}; the mean difference is {difference:+.4f}.",
        f"- Without a shift {len(kept)} of {len(clean)} draws left the network as it is.",
        f"- The largest cost was {max(row.equivalents for row in ours.values()):.0f} forward passes over the samples.",
    ]
    for method, name in (("fine-tuning", "tuned fine-tuning of all weights"), ("last layer", "the last layer alone")):
        compared = _cells(rows, ("repair", method))
        for mine, call in (("repair", "`repair`"), ("repair + weights", '`repair` with `parts=(…, "weights")`')):
            pairs = [(key[2], cell[mine], cell[method]) for key, cell in compared.items() if mine in cell]
            if pairs:
                shares = [
                    f"{sum(_beats(a, b) for _, a, b in group)} of {len(group)} cells with {n:,} labels"
                    for n in sorted({pair[0] for pair in pairs})
                    if (group := [pair for pair in pairs if pair[0] == n])
                ]
                means = ", ".join(f"{np.mean([pair[i].nll for pair in pairs]):.3f}" for i in (1, 2))
                lower = sum(a.nll <= b.nll for _, a, b in pairs)
                text.append(
                    f"- {call} won or tied against {name} in {', '.join(shares)}. It had the lower loss in {lower} of "
                    f"{len(pairs)} (means {means})."
                )
    return "\n".join(text)


def _beats(ours: Row, other: Row) -> bool:
    """Check that a row is not worse by two standard errors; errors of two rows against `repair` add up."""
    return ours.nll - other.nll <= 2 * math.hypot(ours.error, other.error)


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean test loss of three methods under each shift, ResNet-20 with 200 labels."""
    from matplotlib.figure import Figure

    cells = {
        key: cell for key, cell in _cells(rows, ("repair", *SIMPLE)).items() if (key[0], key[2]) == ("resnet20", 200)
    }
    shifts = [shift for kind in KINDS.values() for shift in kind if any(key[1] == shift for key in cells)]
    figure = Figure(figsize=(6.4, 0.9 + 0.21 * len(shifts)), layout="constrained")
    ax = figure.subplots()
    for method, marker in (("temperature", "s"), ("batch norm", "^"), ("repair", "o")):
        losses = [np.mean([cell[method].nll for key, cell in cells.items() if key[1] == shift]) for shift in shifts]
        name = "batch norm + temperature" if method == "batch norm" else method
        ax.plot(losses, range(len(shifts)), marker, label=name, markersize=5)
    ax.axvline(next(iter(cells.values()))["repair"].baseline, color="0.6", linewidth=0.8, zorder=0)
    ax.set_yticks(range(len(shifts)), shifts)
    ax.invert_yaxis()
    ax.set_xlabel("Mean test log-loss (nats), ResNet-20, 200 labels\ngrey line: images without a shift")
    ax.legend()
    figure.savefig(path)


def write(rows: Sequence[Row], folder: Path, measured: str) -> None:
    """Write the means and the figure, and replace the measured part of the page."""
    write_csv(folder / "repair.csv", means(rows))
    draw_figure(rows, folder / "images/repair.svg")
    page = folder / "repair.md"
    before, _, after = page.read_text(encoding="utf-8").split(MARK)
    origin = (
        f"Made from {made_from(measured)} by `make bench-repair`; no number is typed by hand. "
        "A cell is one network, one shift, one number of labels and one draw of the labelled images."
    )
    picture = "![Mean test log-loss under each shift, of temperature scaling, batch norm with temperature, and repair]"
    parts = [MARK, origin, summary(rows), f"{picture}(images/repair.svg)", table(table_of_means(rows)), MARK]
    page.write_text(before + "\n\n".join(parts) + after, encoding="utf-8")


Cell = tuple[str, str, int, str, int]
"""Network, shift, number of labels, method and draw."""


def plan() -> list[Cell]:
    """The cells of the page, the most important ones first."""
    cells: list[Cell] = []

    def add(
        network: str, shifts: Sequence[str], n: int, draws: Sequence[int], methods: Sequence[str] = ("repair", *SIMPLE)
    ) -> None:
        cells.extend(
            (network, shift, n, method, FIRST_DRAW + draw) for draw in draws for shift in shifts for method in methods
        )

    grey = tuple(
        shift
        for shift in (*GEOMETRY, *CAMERA)
        if shift not in ("BGR", "white balance", "hue", "clear camera", "camera")
    )
    add("resnet20", (*MIXES, "rotation 15", "upside down", "BGR"), 200, range(3))
    for network in CLOTHES:
        add(network, (*MIXES, *grey), 200, [0])
    compared = ("repair", *SIMPLE, "last layer", "fine-tuning", "repair + weights")
    for network in ("vit", *CLOTHES):
        add(network, FINE_TUNED_COLOURS if network == "vit" else FINE_TUNED, 200, [0], compared)
    add("resnet20", (*GEOMETRY, *CAMERA), 200, [0])
    for network, n_draws in (("clothes", 20), ("clothes, group norm", 20), ("resnet20", 10)):
        add(network, ["none"], 200, range(n_draws))
    for grey_shift, colour_shift in zip(FINE_TUNED, FINE_TUNED_COLOURS, strict=True):
        for n, network in product((1000, 2500), ("vit", *CLOTHES)):
            add(network, [colour_shift if network == "vit" else grey_shift], n, [0], compared)
    add("resnet32", (*MIXES, "rotation 15", "upside down", "BGR", "camera"), 200, [0])
    add("resnet20", (*MIXES, "rotation 15", "upside down", "BGR", "camera"), 1000, [0])
    return list(dict.fromkeys(cells))


SIMPLE = ("untouched", "temperature", "batch norm")
FINE_TUNED = ("none", "long tail", "rotation -25", "inverted", "motion blur", "salt and pepper")
FINE_TUNED_COLOURS = ("none", "long tail", "rotation 15", "BGR", "camera", "salt and pepper")
"""Shifts on which repair is compared with fine-tuning, on grey and on coloured images."""
ROUNDING = 1e-6
"""Difference of losses that rounding makes."""
TITLES = {"resnet20": "ResNet-20", "clothes": "CNN, batch norm", "clothes, group norm": "CNN, group norm"}
"""Networks in the table of the page."""
HAS_BATCH_NORM = ("resnet20", "resnet32", "clothes", "drawn")
NETWORKS = ("resnet20", "resnet32", "vit", *CLOTHES, "drawn")


def _applies(subject: Subject, method: str) -> bool:
    return method not in NEEDS_BATCH_NORM or subject.name in HAS_BATCH_NORM


def main() -> None:
    """Measure missing rows, and write or print the means."""
    parser = argparse.ArgumentParser(description="Repair compared with its alternatives.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--plan", action="store_true", help="only cells of the page, also with other numbers of labels")
    parser.add_argument("--networks", nargs="+", default=NETWORKS[:-1], choices=NETWORKS[:-1])
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--labels", nargs="+", type=int, default=list(LABELS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=FIRST_DRAW)
    parser.add_argument("--tests", type=int, default=1000, help="test images")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which no further row starts")
    parser.add_argument("--store", type=Path, default=Path(__file__).with_name("repair-rows.jsonl"))
    parser.add_argument("--out", type=Path, help="folder of the page")
    parser.add_argument("--measured", default="HEAD", help="commit of the code that measured the rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    draws = range(options.first_draw, options.first_draw + options.draws)
    cells: list[Cell] = list(product(options.networks, options.shifts, options.labels, options.methods, draws))
    cells.sort(key=lambda cell: (cell[4], cell[1], cell[2]))
    if options.plan:
        allowed = {0: options.networks, 1: options.shifts, 3: options.methods}
        cells = [cell for cell in plan() if all(cell[at] in names for at, names in allowed.items())]
    if options.small:
        cells = list(product(["drawn"], ["none", "gamma"], [100], options.methods, [FIRST_DRAW]))
    rows = [] if options.small else read(options.store)
    done = {(row.network, row.shift, row.labels, row.method, row.draw) for row in rows}
    missing = [cell for cell in cells if cell not in done]
    names = list(dict.fromkeys(cell[0] for cell in missing))
    subjects = {s.name: s for s in (drawn_subjects() if options.small else real_subjects(names, options.tests))}
    end = perf_counter() + 60 * options.minutes
    for network, shift, n, method, draw in missing:
        if perf_counter() > end:
            break
        if not _applies(subjects[network], method):
            continue
        row = measure(subjects[network], shift, method, n, draw)
        rows.append(row)
        print(f"{network} {shift} {n} {method}: NLL {row.nll:.4f} {row.words}", flush=True)
        if not options.small:
            with options.store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    if options.out is not None:
        write(rows, options.out, options.measured)
    else:
        csv.writer(sys.stdout).writerows(means(rows))


if __name__ == "__main__":
    main()
