"""Clamping compared with temperature scaling on real networks: gain under shift, loss without shift, and cost.

    python benchmarks/clamping.py               all bars without the sweep; a quarter of an hour on two cores.
    python benchmarks/clamping.py --full        all bars, within an hour.
    python benchmarks/clamping.py --sweep 2500  the sweep over all shifts with 2,500 images; two hours.
    python benchmarks/clamping.py --small       a smoke test of seconds on random data.

TRUEUP_DATA names the folder of networks and images. Costs are in forward passes over the calibration images. A backward
pass to the input counts with its measured cost.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from shift_benchmark import Images, ShiftBenchmarkRow, benchmark_shift
from trueup import metrics
from trueup.clamping import MapOptions, Objective, clamp
from trueup.clamping.published_recipes import code, paper
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS
from trueup_studies.networks import CNN, Normalise, load_weights, resnet20, resnet32

SLACK, WORSE = 0.0005, 0.002
"""Largest excess of the test NLL over temperature scaling: without shift, and under any shift."""
AT_ZERO, MOVED = 20.0, 80.0
"""Largest cost in forward passes of a fit that ends at δ = 0, and of any other fit."""
ORACLE = 0.9
"""Smallest share of the oracle's NLL gain that clamping must reach."""


class Bar(NamedTuple):
    """Required gain of clamping over temperature scaling under one shift."""

    corruption: str
    severity: int
    nll: float
    """Smallest relative decrease of the test NLL."""
    accuracy: float
    """Smallest gain in accuracy."""
    oracle: bool
    """Whether an oracle knows the shift."""


BARS = (
    Bar("brightness", 3, 0.19, 0.025, True),
    Bar("colour_cast", 3, 0.37, 0.055, True),
    Bar("contrast", 4, 0.33, 0.06, False),
    Bar("gaussian_noise", 3, 0.14, 0.09, False),
)


class Sizes(NamedTuple):
    """Sizes of a run."""

    plain: int = 2500
    shifted: int = 2500
    swept: int = 0
    """Calibration images at each corruption and severity; 0 skips the sweep."""
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    descent: int = 1500
    """Images for the published recipe."""
    epochs: int = 100
    repeated: int = 512
    batch: int = 500
    judged: bool = True


DEFAULT = Sizes()
FULL = Sizes(plain=5000, swept=1000, descent=2500)
SMALL = Sizes(
    plain=200, shifted=150, swept=100, severities=(3,), descent=60, epochs=2, repeated=60, batch=50, judged=False
)


class Subject(NamedTuple):
    """A network with its images."""

    name: str
    model: nn.Module
    normalise: Callable[[Tensor], Tensor]
    calibration: Images
    test: Images


def main() -> None:
    """Print the bars."""
    parser = argparse.ArgumentParser(description="Clamping compared with temperature scaling.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--full", action="store_true", help="every bar, within an hour")
    parser.add_argument("--sweep", type=int, help="only the sweep over all shifts, with this number of images")
    options = parser.parse_args()
    sizes = SMALL if options.small else FULL if options.full else DEFAULT
    subjects = drawn_subjects(sizes) if options.small else real_subjects()
    warnings.simplefilter("ignore")  # a smoke run's temperatures may end at bounds
    started = perf_counter()
    print(f"trueup {trueup.__version__}, torch {torch.__version__} on {torch.get_num_threads()} threads\n", flush=True)
    print_row("quantity", "clamping", "bar", "", "remark")
    first, second = subjects
    if options.sweep:
        judge_sweep(sizes._replace(swept=options.sweep), first)
    else:
        judge_all(sizes, first, second)
    print(f"\n{(perf_counter() - started) / 60:.1f} minutes")


def judge_all(sizes: Sizes, first: Subject, second: Subject) -> None:
    judge_untouched(sizes, first)
    judge_repeated(sizes, first)
    for subject in (first, second):
        judge_in_distribution(sizes, subject)
    for bar in BARS:
        judge_shift(sizes, first, bar)
    if sizes.swept:
        for bar in BARS:
            if bar.oracle:
                judge_shift(sizes, second, bar)
        judge_sweep(sizes, first)
    judge_descent(sizes, first)


def real_subjects() -> tuple[Subject, Subject]:
    """The two residual networks, with the halves of CIFAR-10's test images."""
    folder = os.environ.get("TRUEUP_DATA")
    if not folder:
        sys.exit("TRUEUP_DATA must name the folder of the networks and images; --small runs without it")
    root = Path(folder)
    with np.load(root / "images" / "cifar10_test.npz") as file:
        pixels = torch.from_numpy(file["images"]).permute(0, 3, 1, 2).float().div_(255).contiguous()
        labels = torch.from_numpy(file["labels"]).long()
    with np.load(root / "images" / "cifar10_test_split.npz") as file:
        val, test = (torch.from_numpy(file[name]).long() for name in ("val_index", "test_index"))
    halves = (pixels[val], labels[val]), (pixels[test], labels[test])
    return tuple(  # type: ignore[return-value]
        Subject(name, load_weights(make(), root / "weights" / f"cifar10_{name}.th"), Normalise(), *halves)
        for name, make in (("resnet20", resnet20), ("resnet32", resnet32))
    )


def drawn_subjects(sizes: Sizes) -> tuple[Subject, Subject]:
    """Two untrained networks that are overconfident on labels drawn from their own predictions."""
    generator = torch.Generator().manual_seed(0)
    normalise = Normalise((0.5,) * 3, (0.25,) * 3)
    subjects = []
    for seed in (0, 1):
        model = CNN(4, width=4, seed=seed)
        coarse = torch.rand(2 * sizes.plain, 3, 4, 4, generator=generator)
        pixels = F.interpolate(coarse, 8, mode="bilinear", align_corners=True)
        with torch.no_grad():
            logits = model.eval()(normalise(pixels))
        sharp = 3 * (logits - logits.mean(0)) / logits.std(0)
        model.head[-1].weight.data.mul_(3 / logits.std(0)[:, None])
        model.head[-1].bias.data.sub_(3 * logits.mean(0) / logits.std(0))
        labels = torch.multinomial(torch.softmax(sharp / 2, 1), 1, generator=generator)[:, 0]
        halves = (pixels[: sizes.plain], labels[: sizes.plain]), (pixels[sizes.plain :], labels[sizes.plain :])
        subjects.append(Subject(f"drawn {seed}", model, normalise, *halves))
    return subjects[0], subjects[1]


def judge_in_distribution(sizes: Sizes, subject: Subject) -> None:
    """Check that clamping loses nothing without a shift."""
    images_to_fit, unseen = (Loader(sizes, subject, half, sizes.plain) for half in ("calibration", "test"))
    scaled = temperature(subject.model, images_to_fit)
    began = perf_counter()
    clamped = clamp(subject.model, images_to_fit, progress=False)
    took = perf_counter() - began
    before, after = (metrics.nll(*collect(m, unseen, progress=False)) for m in (scaled, clamped))
    record = clamped.fit_record
    print_row(
        f"{subject.name}, in distribution, {record.samples:,} images: test NLL",
        f"{after:.4f}",
        f"≤ {before + SLACK:.4f}",
        verdict(sizes, after <= before + SLACK),
        f"temperature {before:.4f}; T {record.temperature:.3f}, ‖δ‖ {record.delta_norm:.2f}, {took:.0f} s",
    )
    judge_cost(sizes, f"{subject.name}, in distribution", record.delta_norm, record.equivalents)
    print_row("", "", "", "", record.verdict)


def judge_shift(sizes: Sizes, subject: Subject, bar: Bar) -> None:
    """Check the gain of clamping under one shift; on the second network the gain has no bar."""
    rows = repaired(sizes, subject, bar.corruption, bar.severity, sizes.shifted)
    scaled, clamped = rows["temperature"], rows["clamping"]
    setting = CORRUPTIONS[bar.corruption].settings[bar.severity - 1]
    what = f"{subject.name}, {bar.corruption} {setting}"
    ours = sizes._replace(judged=sizes.judged and subject.name == "resnet20")
    gone, gained = 1 - clamped.nll / scaled.nll, clamped.accuracy - scaled.accuracy
    print_row(
        f"{what}: test NLL",
        f"{-100 * gone:+.1f} %",
        f"≤ −{100 * bar.nll:.0f} %",
        verdict(ours, gone >= bar.nll),
        f"{scaled.nll:.4f} → {clamped.nll:.4f}; ‖δ‖ {clamped.delta_norm:.1f}, ECE {scaled.ece:.4f} → {clamped.ece:.4f}",
    )
    print_row(
        f"{what}: accuracy",
        f"{100 * gained:+.2f}",
        f"≥ {100 * bar.accuracy:.1f}",
        verdict(ours, gained >= bar.accuracy),
        f"{100 * scaled.accuracy:.2f} → {100 * clamped.accuracy:.2f} %",
    )
    if bar.oracle:
        known = rows["oracle"]
        share = (scaled.nll - clamped.nll) / (scaled.nll - known.nll)
        print_row(
            f"{what}: share of the oracle's gain",
            f"{100 * share:.0f} %",
            f"≥ {100 * ORACLE:.0f} %",
            verdict(sizes, share >= ORACLE),
            f"oracle {known.nll:.4f}, {100 * known.accuracy:.2f} %",
        )
    judge_cost(sizes, what, clamped.delta_norm, clamped.equivalents)


def judge_sweep(sizes: Sizes, subject: Subject) -> None:
    """Check that clamping is never worse than temperature scaling, and the cost of the most expensive fit."""
    worst: list[tuple[float, str]] = []
    costs: dict[bool, list[float]] = {False: [], True: []}
    for name in CORRUPTIONS:
        for severity in sizes.severities:
            rows = repaired(sizes, subject, name, severity, sizes.swept)
            scaled, clamped = rows["temperature"], rows["clamping"]
            worst.append((clamped.nll - scaled.nll, f"{name} {severity}"))
            costs[clamped.delta_norm > 0].append(clamped.equivalents)
            print_row(
                f"{subject.name}, {name} {severity}: test NLL",
                f"{worst[-1][0]:+.4f}",
                f"≤ {WORSE}",
                verdict(sizes, worst[-1][0] <= WORSE),
                f"{scaled.nll:.4f} → {clamped.nll:.4f}; {100 * scaled.accuracy:.2f} → {100 * clamped.accuracy:.2f} %, "
                f"ECE {scaled.ece:.4f} → {clamped.ece:.4f}, ‖δ‖ {clamped.delta_norm:.1f}, {clamped.equivalents:.0f}",
            )
    most, where = max(worst)
    print_row(
        "all corruptions and severities: the worst", f"{most:+.4f}", f"≤ {WORSE}", verdict(sizes, most <= WORSE), where
    )
    for moved, costs_of_kind in costs.items():
        if costs_of_kind:
            judge_cost(
                sizes, f"all corruptions: the most expensive of {len(costs_of_kind)}", float(moved), max(costs_of_kind)
            )


def judge_cost(sizes: Sizes, what: str, delta_norm: float, equivalents: float) -> None:
    most = MOVED if delta_norm else AT_ZERO
    passed = verdict(sizes, equivalents <= most)
    remark = "ended at δ ≠ 0" if delta_norm else "ended at δ = 0"
    print_row(f"{what}: forward-equivalents", f"{equivalents:.1f}", f"≤ {most:.0f}", passed, remark)


def judge_descent(sizes: Sizes, subject: Subject) -> None:
    """Check variable projection against the released recipe: a lower objective at a fifth of the cost."""
    images_to_fit = Loader(sizes, subject, "calibration", sizes.descent)
    objective = Objective(loss="focal", gamma=1.0, penalty=0.01, norm="l2")
    same: dict[str, Any] = {"objective": objective, "progress": False}
    random = MapOptions(start="random")
    began = perf_counter()
    theirs = clamp(
        subject.model, images_to_fit, recipe=partial(code, epochs=sizes.epochs), input_map=random, **same
    ).fit_record
    middle = perf_counter()
    ours = clamp(subject.model, images_to_fit, recipe="varpro", **same).fit_record
    took = middle - began, perf_counter() - middle
    what = f"{subject.name}, varpro, {sizes.descent:,} images"
    print_row(
        f"{what}: objective",
        f"{ours.objective:.6f}",
        f"≤ {theirs.objective:.6f}",
        verdict(sizes, ours.objective <= theirs.objective),
        f"of code in {sizes.epochs} epochs; T {ours.temperature:.4f} and {theirs.temperature:.4f}, "
        f"‖δ‖ {ours.delta_norm:.4f} and {theirs.delta_norm:.4f}",
    )
    share = ours.equivalents / theirs.equivalents
    print_row(
        f"{what}: forward-equivalents",
        f"{ours.equivalents:.1f}",
        f"≤ {theirs.equivalents / 5:.1f}",
        verdict(sizes, share <= 0.2),
        f"{theirs.equivalents:.0f} of code; a backward is {ours.backward_cost:.2f} forwards; "
        f"{took[1]:.0f} s and {took[0]:.0f} s",
    )


def judge_repeated(sizes: Sizes, subject: Subject) -> None:
    """Check that the paper's recipe is reproducible bit for bit, and depends on the seed."""
    images_to_fit = Loader(sizes, subject, "calibration", sizes.repeated)
    two = partial(paper, epochs=2, batch_size=max(1, sizes.repeated // 4))
    one, again, other = (
        clamp(subject.model, images_to_fit, recipe=two, input_map=MapOptions(start="random"), seed=seed, progress=False)
        for seed in (0, 0, 1)
    )
    same, differs = (torch.equal(one.before.delta, fit.before.delta) for fit in (again, other))
    same &= one.after.temperature == again.after.temperature
    print_row(
        f"{subject.name}, paper, two epochs: repeated bit for bit",
        "yes" if same else "no",
        "yes",
        verdict(sizes, same and not differs),
        f"T {float(one.after.temperature):.6f}, of another seed {float(other.after.temperature):.6f}",
    )


def judge_untouched(sizes: Sizes, subject: Subject) -> None:
    """Check that the caller's model and the global random state do not change, also after an exception."""
    model, images_to_fit = subject.model, Loader(sizes, subject, "calibration", sizes.repeated)
    model.train()
    next(iter(model.parameters())).requires_grad_(False)
    for what, fit in (
        ("a fit", lambda: clamp(model, images_to_fit, progress=False)),
        ("an exception inside a fit", lambda: clamp(model, images_to_fit, recipe=raising, progress=False)),
    ):
        before = state_of(model)
        with suppress(Interruption):
            fit()
        same = all(map(equal, before, state_of(model)))
        print_row(
            f"{subject.name}, after {what}: model and random state untouched",
            "yes" if same else "no",
            "yes",
            verdict(sizes, same),
            "",
        )
    next(iter(model.parameters())).requires_grad_(True)
    model.eval()


class Interruption(Exception):
    """An exception that stops a fit on purpose."""


def raising(problem: Any) -> Any:
    """Use the network as a recipe does, draw from the global generators, and fail."""
    problem.network.logits()
    torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    raise Interruption


def state_of(model: nn.Module) -> list[Any]:
    return [
        *(value.clone() for value in model.state_dict().values()),
        [module.training for module in model.modules()],
        [(p.requires_grad, p.grad is None) for p in model.parameters()],
        [len(module._forward_hooks) for module in model.modules()],
        torch.get_rng_state(),
        str(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
    ]


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@dataclass(frozen=True)
class Loader:
    """The first images of a half, in batches."""

    sizes: Sizes
    subject: Subject
    half: str
    most: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = getattr(self.subject, self.half)
        for at in range(0, min(self.most, len(images)), self.sizes.batch):
            chosen = slice(at, min(at + self.sizes.batch, self.most))
            yield self.subject.normalise(images[chosen]), labels[chosen]


def repaired(sizes: Sizes, subject: Subject, name: str, severity: int, most: int) -> dict[str, ShiftBenchmarkRow]:
    """Measure one shift by method, with calibration on one half of the images and tests on the other."""
    sides = (subject.calibration, most), (subject.test, sizes.shifted)
    halves = ((images[:size], labels[:size]) for (images, labels), size in sides)
    rows = benchmark_shift(subject.model, *halves, name, severity, normalise=subject.normalise, batch_size=sizes.batch)
    return {row.method: row for row in rows}


def temperature(model: nn.Module, images_to_fit: Any) -> Calibrated:
    return Calibrated(model, after=trueup.METHODS["temperature"](*collect(model, images_to_fit, progress=False)))


def verdict(sizes: Sizes, passed: bool) -> str:
    return ("PASS" if passed else "MISS") if sizes.judged else "-"


def print_row(what: str, value: str, bar: str, passed: str, remark: str) -> None:
    print(f"{what:<76} {value:>10} {bar:>11}  {passed:<4}  {remark}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
