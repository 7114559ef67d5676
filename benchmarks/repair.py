"""Repair compared with its alternatives on shifted images: gain, loss without shift, and cost.

    python benchmarks/repair.py --out docs                              all missing rows, then the files in docs.
    python benchmarks/repair.py --shifts blur --labels 200 --draws 3    some rows.
    python benchmarks/repair.py --small                                 a smoke test of seconds on random data.

TRUEUP_DATA names the folder of networks and images. Every measured row is added to a file of JSON lines (--store), so a
run can be stopped and continued. --out writes the means to repair.csv, and the figure and table of the page repair.md.
"""

from __future__ import annotations

import argparse
import csv
import io
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
"""Number of labels with which all weights are fine-tuned, as an upper bound of the possible gain."""
LABELS = (100, 200, 1000, 2500, MANY_LABELS)
FIRST_DRAW = 2
"""First reported draw; earlier draws were used to set priors and rules."""
FIGURE_SAMPLES = 1000
MARK = "<!-- table of means -->"
"""Line before and after the table in the page."""


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
    """Decrease of the test loss from temperature scaling on the same samples."""
    error: float = 0.0
    """Standard error of the gain, over test images."""


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
    """All weights by labels, four epochs of SGD with mirrored images; temperature on a held-out fifth."""
    model = deepcopy(s.network).train()
    kept = math.ceil(0.8 * len(shifted_pair[1]))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator, epochs = torch.Generator().manual_seed(seed), 4
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_iters=epochs * math.ceil(kept / 128))
    for _ in range(epochs):
        for rows in torch.randperm(kept, generator=generator).split(128):
            x = shifted_pair[0][rows]
            x = torch.where(torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5, x, x.flip(3))
            optimiser.zero_grad()
            F.cross_entropy(model(x), shifted_pair[1][rows]).backward()
            optimiser.step()
            schedule.step()
    model.eval()
    rest = shifted_pair[0][kept:], shifted_pair[1][kept:]
    after = trueup.METHODS["temperature"](*collect(model, batches(rest), progress=False))
    return Calibrated(model, after=after), 1.0 + 3.0 * epochs, ""


def head(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The last layer alone."""
    return _described(_repair(s, shifted_pair, seed, RepairOptions(parts=("head",))))


def repaired_by_labels(s: Subject, shifted_pair: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair with labels."""
    return _described(_repair(s, shifted_pair, seed, RepairOptions()))


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
    """Fit to n shifted images and score on test images with the same shift."""
    x, y = s.fit
    chosen = torch.from_numpy(np.random.default_rng(draw).permutation(len(y))[:n])
    shifted_pair = s.normalise(SHIFTS[shift](x[chosen])), y[chosen]
    test = s.normalise(SHIFTS[shift](s.test[0])), s.test[1]
    started = perf_counter()
    network, equivalents, words = METHODS[method](s, shifted_pair, draw)
    seconds = perf_counter() - started
    pair = collect(network, batches(test), progress=False)
    scores = metrics.nll(*pair), metrics.accuracy(*pair), metrics.ece(*pair)
    if "no labels" in method:  # without labels there is no temperature to compare with
        gain, error = 0.0, 0.0
    else:
        alone = trueup.METHODS["temperature"](*collect(s.network, batches(shifted_pair), progress=False))
        gain, error = paired_gain(_losses(alone(_plain_logits(s, shift, test[0])), test[1]), _losses(*pair))
    return Row(s.name, shift, method, n, draw, *scores, equivalents, seconds, words, len(s.test[1]), gain, error)


_PLAIN: dict[tuple[str, str], Tensor] = {}


def _plain_logits(s: Subject, shift: str, images: Tensor) -> Tensor:
    """The original network's logits of the test images, the same for all draws."""
    if (s.name, shift) not in _PLAIN:
        _PLAIN[s.name, shift] = collect(s.network, batches((images, s.test[1])), progress=False).logits
    return _PLAIN[s.name, shift]


def _losses(logits: Tensor, labels: Tensor) -> np.ndarray:
    return row_losses(logits.double().numpy(), labels)


def real_subjects(names: Sequence[str], tests: int, weights: Path) -> list[Subject]:
    """CIFAR-10 ResNets in the folder TRUEUP_DATA, and a transformer trained on its images."""
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
    """Train for two or three minutes by AdamW on 20,000 shifted and mirrored images, or load the weights."""
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
    # Two parallel runs may have measured the same row; it counts once.
    return list({(row.network, row.shift, row.method, row.labels, row.draw): row for row in rows}.values())


def forget(path: Path, network: str) -> None:
    """Drop the rows of a network that will be trained again, with other weights."""
    kept = [row for row in read(path) if row.network != network]
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in kept), encoding="utf-8")


def means(rows: Sequence[Row]) -> str:
    """The means over draws of every network, number of samples, shift and method, as CSV."""
    cells: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.network, row.labels, list(SHIFTS).index(row.shift), row.draw)):
        if row.draw >= FIRST_DRAW:
            cells.setdefault((row.network, row.labels, row.shift, row.method), []).append(row)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = ["network", "samples", "shift", "method", "draws", "nll", "nll_sd", "accuracy", "ece"]
    table.writerow([*columns, "forward_passes", "seconds", "last_draw_changes"])
    for key, group in cells.items():
        nll = [row.nll for row in group]
        spread = f"{np.std(nll, ddof=1):.4f}" if len(group) > 1 else ""
        numbers = [f"{np.mean([getattr(row, name) for row in group]):.4f}" for name in ("accuracy", "ece")]
        costs = [f"{np.mean([getattr(row, name) for row in group]):.1f}" for name in ("equivalents", "seconds")]
        table.writerow([*key, len(group), f"{np.mean(nll):.4f}", spread, *numbers, *costs, group[-1].words])
    return text.getvalue()


def comparison_table(rows: Sequence[Row]) -> str:
    """One Markdown row per network, number of samples and alternative: means over the cells that both have."""
    losses = {(r.network, r.labels, r.method, r.shift, r.draw): r.nll for r in rows if r.draw >= FIRST_DRAW}
    text = [
        "| network | samples | alternative | its NLL | NLL of repair | cells | worst case |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, n in sorted({(row.network, row.labels) for row in rows}):
        for method in METHODS:
            ours = "repair, no labels" if "no labels" in method else "repair"
            pairs = [
                (losses[network, n, ours, *key[3:]], loss)
                for key, loss in losses.items()
                if key[:3] == (network, n, method) and (network, n, ours, *key[3:]) in losses
            ]
            if method != ours and pairs:
                mean, other = np.mean(pairs, axis=0)
                cells = f"{len(pairs)} | {max(a - b for a, b in pairs):+.4f}"
                text.append(f"| {network} | {n:,} | {method} | {other:.4f} | {mean:.4f} | {cells} |")
    return "\n".join(text)


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean test NLL of three methods under the main shifts, ResNet-20."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    ax = figure.subplots()
    for method, marker in (("temperature", "s"), ("batch norm", "^"), ("repair", "o")):
        points = []
        for number, shift in enumerate(TABLE):
            key = ("resnet20", FIGURE_SAMPLES, shift, method)
            values = [r.nll for r in rows if (r.network, r.labels, r.shift, r.method) == key and r.draw >= FIRST_DRAW]
            if values:
                points.append((np.mean(values), number))
        ax.plot(
            *zip(*points, strict=True), marker, label="batch norm + temperature" if method == "batch norm" else method
        )
    ax.set_yticks(range(len(TABLE)), TABLE)
    ax.invert_yaxis()
    ax.set_xlabel(f"Test log-loss (nats), ResNet-20, {FIGURE_SAMPLES:,} labels")
    ax.legend()
    figure.savefig(path)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the means and the figure, and replace the table in the page."""
    (folder / "repair.csv").write_text(means(rows), encoding="utf-8")
    draw_figure(rows, folder / "images/repair.svg")
    page = folder / "repair.md"
    before, _, after = page.read_text(encoding="utf-8").split(MARK)
    page.write_text(f"{before}{MARK}\n{comparison_table(rows)}\n{MARK}{after}", encoding="utf-8")


def _applies(subject: Subject, n: int, method: str) -> bool:
    if method in NEEDS_BATCH_NORM and not batch_norms(subject.network):
        return False
    return method == "temperature" or (method == "all weights") == (n == MANY_LABELS)


def main() -> None:
    """Measure missing rows, and write or print the means."""
    parser = argparse.ArgumentParser(description="Repair compared with its alternatives.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet32", "vit"])
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--labels", nargs="+", type=int, default=list(LABELS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=FIRST_DRAW)
    parser.add_argument("--tests", type=int, default=5000, help="test images")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which no further row starts")
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
    if options.out is not None:
        write(rows, options.out)
    else:
        print(means(rows))


if __name__ == "__main__":
    main()
