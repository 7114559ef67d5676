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
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from trueup import metrics
from trueup.clamping.batch_norm import Crop, batch_norms, estimate, share_copy
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt, gaussian_blur, gaussian_noise
from trueup.models.freezing import frozen
from trueup.models.networks import CNN, Normalise, load_weights, resnet20, resnet32

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
TABLE = ("none", "white balance", "hue", "gamma", "blur", "camera", "stripes", "dark", "dirt")
LABELS = (200, 1000, 2500)


INTRODUCTION = """# Repair under a new camera

Written by `make bench-repair`. A network meets images that another camera took; some of them come with labels, or
without. Each cell is test negative log-likelihood / accuracy in per cent / ECE in per cent, the mean over draws of the
samples; the last column is the cost of `repair` in forward passes over the samples. Shifts act on calibration and test
images alike. Methods without labels have the temperature of home, all others end in one fitted to the labels.
'Regained' is the share of the log-likelihood lost to the shift that `repair` gives back.
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
    return trueup.on_model(trueup.METHODS["temperature"])(s.network, batches(given), progress=False), 1.0, ""


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


def head(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """The last layer alone."""
    return _repaired(s, given, seed, parts=("head",))


def ladder(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair with labels."""
    return _repaired(s, given, seed)


def without_labels(s: Subject, given: Pair, seed: int) -> tuple[nn.Module, float, str]:
    """Repair without labels."""
    return _repaired(s, given, seed, labels=None, temperature=s.home)


def _repaired(s: Subject, given: Pair, seed: int, **options: Any) -> tuple[nn.Module, float, str]:
    repaired = trueup.repair(s.network, batches(given), normalise=s.normalise, seed=seed, progress=False, **options)
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
    "repair": ladder,
    "batch norm, no labels": batch_norm_without_labels,
    "repair, no labels": without_labels,
}


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
    return Row(s.name, shift, method, n, draw, *scores, equivalents, seconds, words, len(s.test[1]))


def real_subjects(names: Sequence[str], tests: int) -> list[Subject]:
    """CIFAR-10 ResNets of the folder that TRUEUP_DATA names."""
    folder = Path(os.environ["TRUEUP_DATA"])
    with np.load(folder / "images/cifar10_test.npz") as file:
        x, y = torch.from_numpy(file["images"]).movedim(3, 1).float() / 255, torch.from_numpy(file["labels"]).long()
    with np.load(folder / "images/cifar10_test_split.npz") as file:
        fit, test = file["val_index"], file["test_index"][:tests]
    makers = {"resnet20": resnet20, "resnet32": resnet32}
    subjects = []
    for name in names:
        network = load_weights(makers[name](10), folder / f"weights/cifar10_{name}.th").eval()
        subjects.append(_subject(name, network, Normalise(), (x[fit], y[fit]), (x[test], y[test])))
    return subjects


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
    return [Row(**json.loads(line)) for line in lines]


def page(rows: Sequence[Row]) -> str:
    """The page in Markdown."""
    text = [INTRODUCTION]
    for network in dict.fromkeys(row.network for row in rows):
        for n in sorted({row.labels for row in rows if row.network == network}):
            mine = [row for row in rows if (row.network, row.labels) == (network, n)]
            methods = [name for name in METHODS if any(row.method == name for row in mine)]
            draws = len({row.draw for row in mine})
            tests = max(row.tests for row in mine)
            seen = f"{draws} draw{'s' if draws > 1 else ''} of the samples, {tests:,} test images."
            text += [f"## {network}, {n:,} samples", "", seen, ""]
            text += [
                "| shift | " + " | ".join(methods) + " | regained | passes |",
                "|---|" + "---|" * (len(methods) + 2),
            ]
            clean = _mean(mine, "none", "temperature")
            for shift in [name for name in SHIFTS if any(row.shift == name for row in mine)]:
                cells = [_cell(mine, shift, method) for method in methods]
                alone, ours = _mean(mine, shift, "temperature"), _mean(mine, shift, "repair")
                share = "–"
                if clean and alone and ours and alone.nll > clean.nll + 0.01:
                    share = f"{100 * (alone.nll - ours.nll) / (alone.nll - clean.nll):.0f} %"
                cost = f"{ours.equivalents:.0f}" if ours else "–"
                text.append(f"| {shift} | " + " | ".join(cells) + f" | {share} | {cost} |")
            said = {row.shift: row.words for row in mine if row.method == "repair"}
            text += ["", "What repair did (last draw):", ""]
            text += [f"- {shift}: {words or 'nothing but the temperature'}" for shift, words in said.items()] + [""]
    return "\n".join(text)


def _mean(rows: Sequence[Row], shift: str, method: str) -> Row | None:
    some = [row for row in rows if (row.shift, row.method) == (shift, method)]
    if not some:
        return None
    means = {
        name: math.fsum(getattr(r, name) for r in some) / len(some)
        for name in ("nll", "accuracy", "ece", "equivalents")
    }
    return Row(**{**asdict(some[0]), **means})


def _cell(rows: Sequence[Row], shift: str, method: str) -> str:
    row = _mean(rows, shift, method)
    return "–" if row is None else f"{row.nll:.3f} / {100 * row.accuracy:.1f} / {100 * row.ece:.1f}"


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Repair beside its alternatives.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet32"])
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--labels", nargs="+", type=int, default=list(LABELS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--tests", type=int, default=5000, help="test images")
    parser.add_argument("--store", type=Path, default=Path("repair-rows.jsonl"))
    parser.add_argument("--out", type=Path, help="folder of the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.small:
        subjects, sizes, shifts, draws = drawn_subjects(), [100], ["none", "gamma"], 1
    else:
        subjects, sizes = real_subjects(options.networks, options.tests), options.labels
        shifts, draws = options.shifts, options.draws
    rows = [] if options.small else read(options.store)
    done = {(row.network, row.shift, row.method, row.labels, row.draw) for row in rows}
    for subject in subjects:
        for draw in range(draws):
            for shift in shifts:
                for n in sizes:
                    for method in options.methods:
                        if (subject.name, shift, method, n, draw) in done:
                            continue
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
