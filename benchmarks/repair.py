"""Repair beside its alternatives on shifted images: what it regains, what it never loses, what it costs.

    python benchmarks/repair.py --out docs                 every row that is missing, then docs/repair.md
    python benchmarks/repair.py --shifts blur --labels 200 --draws 3      some rows
    python benchmarks/repair.py --small          a smoke run of seconds on drawn data; its figures mean nothing

The networks and images are in the folder that TRUEUP_DATA names. Rows go to a file of JSON lines as they are measured
(--store), so that a run can be stopped and taken up again; the page shows all rows of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from trueup import metrics
from trueup.adaptation import AdaptOptions, Repaired, RepairOptions, adapt, repair
from trueup.adaptation.batch_norm import Crop, batch_norms, estimate, share_copy
from trueup.adaptation.forward_selection import paired_gain, row_losses
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


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
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
TABLE = ("none", "white balance", "hue", "gamma", "blur", "clear camera", "camera", "stripes", "dark", "dirt")
MANY_LABELS = 5000
"""With so many, all weights can be trained anew: what the network could do at all under the shift."""
LABELS = (100, 200, 1000, 2500, MANY_LABELS)
FIRST_DRAW = 2
"""Those before it settled shifts, priors and rules; they are on no page."""


INTRODUCTION = """# Repair under a new camera

Written by `make bench-repair`. A network meets images that another camera took; some of them come with labels, or
without. Each cell is test negative log-likelihood (± its standard deviation over draws) / accuracy in per cent / ECE in
per cent, the mean over as many draws of the samples as stand in brackets. The last column is the cost of `repair` in
forward passes over the samples, and in seconds by the clock on one core of a machine that did other work besides.
Shifts act on calibration and test images alike. Methods without labels have the temperature of home, all others end in
one fitted to the labels. 'Regained' is the share of the log-likelihood lost to the shift that `repair` gives back, over
draws that have it, temperature and the unshifted images.

The shifts, priors and rules were settled on draws 0 and 1 of these same images with ResNet-20; some after a look at
others: how many samples judge the choice at once at draw 2 of white balance with 200 labels, the level of the score
tests at the p-values that draws 0 to 15 have with 100 and 200 labels, and another estimate of a teacher's curvature was
given up after draw 2 of blur without labels. That the whole way of a rung must be certain too was settled on draws 20
to 39 of unshifted images with the transformer; that few labels need only say that new batch-norm statistics do not
harm where inputs have moved, after a look at draws 2 to 6 of white balance, hue and gamma and at draw 2 of brightness,
darkness, colour cast and contrast with 200 labels, which are in the table of 200 samples all the same: it flatters
`repair` there. That a map taught without labels is left out unless answers are surer behind it was settled on draw 0,
after a look at draw 2 of every shift without labels. Tables begin at draw 2 and end before draw 20.

The shift called camera has noise, the clear camera has none. How far a network can come at all under a shift is in the
table of 5,000 samples: all weights trained on four fifths of them, which the other fifth calibrates.

Rows were measured as the code grew; those of draws 2 to 6 with 200 labels and most of draw 2 with more are from before
the last layer's correction measured rarely active units by others' spread. Twelve rows of ResNet-20 that it could have
changed were measured again, and their losses are the same to three digits; all of the transformer's were, and are the
same to six.
"""


@dataclass(frozen=True)
class Row:
    """One method on one network under one shift."""

    network: str
    shift: str
    method: str
    labels: int
    """Samples of the new place, with labels or without."""
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
    """By how much the test loss is below that of temperature on the same samples."""
    error: float = 0.0
    """Standard error of that, over test images."""


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


def batches(pair: Pair, size: int = 200) -> list[Pair]:
    """A loader."""
    return list(zip(pair[0].split(size), pair[1].split(size), strict=True))


def temperature(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Temperature alone."""
    return trueup.calibrate(s.network, batches(given), progress=False), 1.0, ""


def clamping(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Neural Clamping."""
    clamped = trueup.clamp(s.network, batches(given), seed=seed, progress=False)
    return clamped, clamped.fit_record.equivalents, ""


def batch_norm(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """New batch-norm statistics, then temperature."""
    model = _with_new_statistics(s, given)
    after = trueup.METHODS["temperature"](*collect(model, batches(given), progress=False))
    return Calibrated(model, after=after), 2.0, ""


def batch_norm_without_labels(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """New batch-norm statistics, the temperature of home."""
    from trueup.calibrators.temperature import Temperature

    return Calibrated(_with_new_statistics(s, given), after=Temperature(s.home)), 1.0, ""


def _with_new_statistics(s: Subject, given: Pair) -> nn.Module:
    with frozen(s.network):
        samples = Network(s.network, CalibrationSet.read(batches(given), device="cpu"))
        black = s.normalise(torch.zeros(1, *given[0].shape[1:]))[0]
        return share_copy(s.network, estimate(samples, None, 1.0, augment=Crop(black)))


def tent(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """TENT: entropy of the answers lowered by batch norm's scales and offsets, one epoch; temperature by labels."""

    def entropy(z: Tensor, y: Tensor) -> Tensor:
        return -(torch.softmax(z, 1) * torch.log_softmax(z, 1)).sum(1).mean()

    return _train_affine(s, given, seed, entropy, epochs=1)


def batch_norm_affine(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Batch norm's scales and offsets by labels, fifteen epochs of Adam; then temperature on the same samples."""
    return _train_affine(s, given, seed, F.cross_entropy, epochs=15)


def _train_affine(
    s: Subject, given: Pair, seed: int, loss: Callable[[Tensor, Tensor], Tensor], *, epochs: int
) -> tuple[nn.Module, float, str]:
    model = _with_new_statistics(s, given)
    names = {f"{name}.{leaf}" for name in batch_norms(model) for leaf in ("weight", "bias")}
    own = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if name in names}
    model = share_copy(model, own)
    trained = [tensor for name, tensor in model.named_parameters() if name in names]
    for tensor in trained:
        tensor.requires_grad = True
    optimiser = torch.optim.Adam(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(given[1]), generator=generator).split(100):
            optimiser.zero_grad()
            loss(model(given[0][rows]), given[1][rows]).backward()
            optimiser.step()
    after = trueup.METHODS["temperature"](*collect(model, batches(given), progress=False))
    return Calibrated(model, after=after), 2.0 + 3.0 * epochs, ""


def fine_tune(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """All weights by labels, four epochs of SGD with mirrored images; temperature on a fifth that was left out."""
    model = deepcopy(s.network).train()
    kept = math.ceil(0.8 * len(given[1]))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator, epochs = torch.Generator().manual_seed(seed), 4
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_iters=epochs * math.ceil(kept / 128))
    for _ in range(epochs):
        for rows in torch.randperm(kept, generator=generator).split(128):
            x = given[0][rows]
            x = torch.where(torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5, x, x.flip(3))
            optimiser.zero_grad()
            F.cross_entropy(model(x), given[1][rows]).backward()
            optimiser.step()
            schedule.step()
    model.eval()
    rest = given[0][kept:], given[1][kept:]
    after = trueup.METHODS["temperature"](*collect(model, batches(rest), progress=False))
    return Calibrated(model, after=after), 1.0 + 3.0 * epochs, ""


def head(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The last layer alone."""
    return _described(_repair(s, given, seed, RepairOptions(parts=("head",))))


def repaired_by_labels(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair with labels."""
    return _described(_repair(s, given, seed, RepairOptions()))


def without_labels(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair without labels."""
    options = AdaptOptions(temperature=s.home)
    return _described(
        adapt(s.network, batches(given), normalise=s.normalise, options=options, seed=seed, progress=False)
    )


def _repair(s: Subject, given: Pair, seed: int, options: RepairOptions) -> Repaired:
    return repair(s.network, batches(given), normalise=s.normalise, options=options, seed=seed, progress=False)


def _described(repaired: Repaired) -> tuple[nn.Module, float, str]:
    record = repaired.repair_record
    words = [*record.words, *(part for part in record.parts if part != "input")]
    return repaired, record.equivalents, ", ".join(words)


METHODS: dict[str, Callable[[Subject, Pair, int], tuple[nn.Module, float, str]]] = {
    "temperature": temperature,
    "clamp": clamping,
    "batch norm": batch_norm,
    "head": head,
    "TENT": tent,
    "batch norm affine": batch_norm_affine,
    "all weights": fine_tune,
    "repair": repaired_by_labels,
    "batch norm, no labels": batch_norm_without_labels,
    "repair, no labels": without_labels,
}


NEEDS_BATCH_NORM = ("batch norm", "TENT", "batch norm affine", "batch norm, no labels", "repair, no labels")


def measure(s: Subject, shift: str, method: str, n: int, draw: int) -> Row:
    """Fit to n shifted images and score on the test images, shifted alike."""
    x, y = s.fit
    chosen = torch.from_numpy(np.random.default_rng(draw).permutation(len(y))[:n])
    given = s.normalise(SHIFTS[shift](x[chosen])), y[chosen]
    test = s.normalise(SHIFTS[shift](s.test[0])), s.test[1]
    started = perf_counter()
    network, equivalents, words = METHODS[method](s, given, draw)
    seconds = perf_counter() - started
    pair = collect(network, batches(test), progress=False)
    scores = metrics.nll(*pair), metrics.accuracy(*pair), metrics.ece(*pair)
    if "no labels" in method:  # there is no temperature but that of home to be compared with
        gain, error = 0.0, 0.0
    else:
        alone = trueup.METHODS["temperature"](*collect(s.network, batches(given), progress=False))
        gain, error = paired_gain(_losses(alone(_plain_logits(s, shift, test[0])), test[1]), _losses(*pair))
    return Row(s.name, shift, method, n, draw, *scores, equivalents, seconds, words, len(s.test[1]), gain, error)


_PLAIN: dict[tuple[str, str], Tensor] = {}


def _plain_logits(s: Subject, shift: str, images: Tensor) -> Tensor:
    """The network's own logits of the test images, which no draw changes."""
    if (s.name, shift) not in _PLAIN:
        _PLAIN[s.name, shift] = collect(s.network, batches((images, s.test[1])), progress=False).logits
    return _PLAIN[s.name, shift]


def _losses(logits: Tensor, labels: Tensor) -> np.ndarray:
    return row_losses(logits.double().numpy(), labels)


def real_subjects(names: Sequence[str], tests: int, weights: Path) -> list[Subject]:
    """CIFAR-10 ResNets of the folder that TRUEUP_DATA names, and a transformer trained on its images."""
    folder = Path(os.environ["TRUEUP_DATA"])
    with np.load(folder / "images/cifar10_test.npz") as file:
        x, y = torch.from_numpy(file["images"]).movedim(3, 1).float() / 255, torch.from_numpy(file["labels"]).long()
    with np.load(folder / "images/cifar10_test_split.npz") as file:
        fit, test = file["val_index"], file["test_index"][:tests]
    makers = {"resnet20": resnet20, "resnet32": resnet32}
    subjects = []
    for name in names:
        if name == "vit":
            network: nn.Module = train_vit(folder, weights)
        else:
            network = load_weights(makers[name](10), folder / f"weights/cifar10_{name}.th").eval()
        subjects.append(_subject(name, network, Normalise(), (x[fit], y[fit]), (x[test], y[test])))
    return subjects


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


def train_vit(folder: Path, weights: Path, epochs: int = 6) -> ViT:
    """Two or three minutes of AdamW on 20,000 training images, shifted and mirrored; kept in a file beside this."""
    torch.manual_seed(0)
    network = ViT(10)
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
    return Subject(name, network, normalise, fit, test, float(home.temperature))


def read(path: Path) -> list[Row]:
    """The rows measured so far."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [Row(**json.loads(line)) for line in lines]
    # Two runs side by side may have measured the same; a draw counts once.
    return list({(row.network, row.shift, row.method, row.labels, row.draw): row for row in rows}.values())


def forget(path: Path, network: str) -> None:
    """Drop the rows of a network that is about to be trained anew: it will be another one."""
    kept = [row for row in read(path) if row.network != network]
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in kept), encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """The page in Markdown."""
    text, rows = [INTRODUCTION], [row for row in rows if row.draw >= FIRST_DRAW]
    for network in dict.fromkeys(row.network for row in rows):
        for n in sorted({row.labels for row in rows if row.network == network}):
            text += _section(network, n, [row for row in rows if (row.network, row.labels) == (network, n)])
    return "\n".join(text)


def _section(network: str, n: int, rows: Sequence[Row]) -> list[str]:
    methods = [name for name in METHODS if any(row.method == name for row in rows)]
    shifts = [name for name in SHIFTS if any(row.shift == name for row in rows)]
    tests = sorted({row.tests for row in rows})
    text = [f"## {network}, {n:,} samples", "", f"{' or '.join(f'{k:,}' for k in tests)} test images.", ""]
    text += ["| shift | " + " | ".join(methods) + " | regained | cost |", "|---|" + "---|" * (len(methods) + 2)]
    for shift in shifts:
        cells = [_cell([r for r in rows if (r.shift, r.method) == (shift, method)]) for method in methods]
        costs = [(r.equivalents, r.seconds) for r in rows if (r.shift, r.method) == (shift, "repair")]
        passes, seconds = zip(*costs, strict=True) if costs else ((), ())
        cost = f"{np.mean(passes):.0f} (most {max(passes):.0f}), {np.mean(seconds):.0f} s" if costs else "–"
        text.append(f"| {shift} | " + " | ".join(cells) + f" | {_regained(rows, shift)} | {cost} |")
    text += ["", *_costs(rows, methods), *_differences(rows, methods)]
    said = {r.shift: (r.draw, r.words) for r in sorted(rows, key=lambda r: r.draw) if r.method == "repair"}
    if said:
        text += ["", "What repair did:", ""]
    text += [f"- {name}, draw {draw}: {words or 'nothing but the temperature'}" for name, (draw, words) in said.items()]
    return [*text, ""]


def _costs(rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """What each method took, over its cells."""
    parts = []
    for method in methods:
        passes, seconds = zip(*((r.equivalents, r.seconds) for r in rows if r.method == method), strict=True)
        parts.append(f"{method} {np.mean(passes):.0f} ({np.mean(seconds):.0f} s)")
    return [f"- forward passes over the samples (and seconds), mean over cells: {'; '.join(parts)}"]


def _by_draw(rows: Sequence[Row], shift: str, method: str) -> dict[int, float]:
    return {r.draw: r.nll for r in rows if (r.shift, r.method) == (shift, method)}


def _regained(rows: Sequence[Row], shift: str) -> str:
    clean, alone = _by_draw(rows, "none", "temperature"), _by_draw(rows, shift, "temperature")
    ours = _by_draw(rows, shift, "repair")
    draws = sorted(clean.keys() & alone.keys() & ours.keys())
    lost = math.fsum(alone[d] - clean[d] for d in draws)
    if not draws or lost < 0.01 * len(draws):
        return "–"
    return f"{100 * math.fsum(alone[d] - ours[d] for d in draws) / lost:.0f} %"


def _differences(rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """Repair beside each other method, over the cells (shift and draw) that both have."""
    text = []
    for ours, others in (("repair", methods), ("repair, no labels", [m for m in methods if "no labels" in m])):
        for method in others:
            if method.startswith("repair") or ("no labels" in method) != ("no labels" in ours):
                continue
            pairs = [
                (mine[d], theirs[d])
                for shift in SHIFTS
                for mine, theirs in [(_by_draw(rows, shift, ours), _by_draw(rows, shift, method))]
                for d in mine.keys() & theirs.keys()
            ]
            if pairs:
                mean, other = np.mean(pairs, axis=0)
                text.append(
                    f"- {ours} beside {method}: mean NLL {mean:.4f} against {other:.4f} over {len(pairs)} cells of "
                    f"shift and draw; largest loss {max(a - b for a, b in pairs):+.4f}"
                )
    return [*text, *_never_worse([row for row in rows if row.method == "repair"])]


def _never_worse(rows: Sequence[Row]) -> list[str]:
    """In how many cells repair is worse than temperature by two standard errors, and what it costs where nothing is."""
    if not rows:
        return []
    worse = sum(row.gain < -2 * row.error for row in rows)
    text = [
        f"- repair worse than temperature by two standard errors over the test images: {worse} of {len(rows)} cells"
    ]
    if clean := [row for row in rows if row.shift == "none"]:
        touched = sum(row.gain != 0 for row in clean)
        change = 0.0 - float(np.mean([row.gain for row in clean]))
        text.append(f"- unshifted images: repair touched {touched} of {len(clean)} draws; mean change {change:+.4f}")
    return text


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    nll = [row.nll for row in rows]
    spread = f" ± {np.std(nll, ddof=1):.3f}" if len(rows) > 1 else ""
    accuracy, ece = (100 * np.mean([getattr(row, name) for row in rows]) for name in ("accuracy", "ece"))
    return f"{np.mean(nll):.3f}{spread} / {accuracy:.1f} / {ece:.1f} ({len(rows)})"


def _applies(subject: Subject, n: int, method: str) -> bool:
    if method in NEEDS_BATCH_NORM and not batch_norms(subject.network):
        return False
    return method == "temperature" or (method == "all weights") == (n == MANY_LABELS)


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Repair beside its alternatives.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet32", "vit"])
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--labels", nargs="+", type=int, default=list(LABELS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=FIRST_DRAW)
    parser.add_argument("--tests", type=int, default=5000, help="test images")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further row is begun")
    parser.add_argument("--store", type=Path, default=Path(__file__).with_name("repair-rows.jsonl"))
    parser.add_argument("--out", type=Path, help="folder of the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.small:
        subjects, sizes, shifts, first, draws = drawn_subjects(), [100], ["none", "gamma"], FIRST_DRAW, 1
    else:
        weights = Path(__file__).with_name("repair-vit.safetensors")  # the network of the rows that are kept
        if "vit" in options.networks and not weights.is_file():
            forget(options.store, "vit")
        subjects, sizes = real_subjects(options.networks, options.tests, weights), options.labels
        shifts, first, draws = options.shifts, options.first_draw, options.draws
    rows = [] if options.small else read(options.store)
    done = {(row.network, row.shift, row.method, row.labels, row.draw) for row in rows}
    end = perf_counter() + 60 * options.minutes
    cells = product(subjects, range(first, first + draws), shifts, sizes, options.methods)
    for subject, draw, shift, n, method in cells:
        if (subject.name, shift, method, n, draw) in done or not _applies(subject, n, method):
            continue
        if perf_counter() > end:
            break
        row = measure(subject, shift, method, n, draw)
        rows.append(row)
        print(f"{row.network} {shift} {n} {method}: NLL {row.nll:.4f} {row.words}", flush=True)
        if not options.small:
            with options.store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    text = page(rows)
    if options.out is not None:
        (options.out / "repair.md").write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
