"""Our calibrators beside the peers': the same data, the same process, turn by turn, and how good each answer is.

    python benchmarks/calibrators.py            the whole run, some minutes
    python benchmarks/calibrators.py --small    a smoke run of seconds; its ratios mean nothing and are not judged
    python benchmarks/calibrators.py --study    held-out likelihood on the real files, an hour or more

Times are of the fit alone, from float32 logits. A row passes if its ratio does and the answer beside it is as good as
it has to be. The rows on real data need the folder of them in TRUEUP_DATA.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

import peers
import trueup
from metrics import peak_growth, print_versions, shape
from peers import Answer
from timing import OURS, Run, Timing, contenders, race, stopwatch
from trueup import metrics
from trueup._core.registry import METHODS
from trueup.calibrators.auto import CANDIDATES

Pair = tuple[Tensor, Tensor]

TRUE_TEMPERATURE = 1.7
OTHERS = ("ets", "sms", "diagonal", "vector", "ms_odir", "platt", "beta", "temperature_brier", "isotonic_pooled")
"""Rivals of the automatic choice beside those it chooses from."""
SCALES = (0.02, 1.0, 5.0, 50.0, 500.0)


class Sizes(NamedTuple):
    """How much of everything a run does."""

    large: tuple[int, int] = (50_000, 1000)
    middle: tuple[int, int] = (10_000, 100)
    little: tuple[int, int] = (10_000, 10)
    temperatures: int = 5000
    rounds: int = 3
    seconds: float = 2.0
    judged: bool = True


WHOLE = Sizes()
SMALL = Sizes((500, 20), (500, 5), (500, 4), 50, rounds=1, seconds=0.0, judged=False)


class Quality(NamedTuple):
    """Whether an answer is as good as it has to be, and the figures that say so."""

    good: bool
    text: str


def main() -> None:
    """Print the table of ratios."""
    parser = argparse.ArgumentParser(description="Time our calibrators beside the peers'.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--study", action="store_true", help="held-out likelihood on the real files")
    parser.add_argument("--growth", choices=("temperature", "vector"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else WHOLE
    warnings.simplefilter("ignore")  # the peers' own, and ours of bounds in the smoke run's few rows
    if options.growth:
        print(growth_of(options.growth, sizes))
        return
    if options.path:
        print(*path_of(pair(*options.path)))
        return
    print_versions()
    if options.study:
        study()
        return
    print_row("what", "ours", "beside", "theirs", "ratio", "bar", "", "the answer")
    large, middle, little = pair(*sizes.large), pair(*sizes.middle), pair(*sizes.little)
    for data, bar in ((large, 12), (little, 4), (middle, 8)):
        judge_temperature(sizes, data, bar)
    del large
    judge_excess(sizes, little)
    for method, data, bar in (
        ("vector", little, 5),
        ("vector", middle, 8),
        ("dirichlet_odir", middle, 4),
        ("svs", little, 3),
        ("svs", middle, 3),
        ("sms", little, 3),
        ("sms", middle, 3),
    ):
        judge_linear(sizes, method, data, bar)
    for data in (little, middle):
        judge_path(sizes, data)
    for method, data, bar in (
        ("isotonic", middle, 1),
        ("isotonic_ovr", little, 1),
        ("isotonic_ovr", middle, 1),
        ("histogram", middle, 1),
        ("histogram_ovr", little, 1),
        ("histogram_ovr", middle, 1),
        ("bbq", little, 10),
    ):
        judge_binning(sizes, method, data, bar)
    judge_grid(sizes, middle)
    for method in ("temperature", "vector"):
        judge_memory(sizes, method)
    judge_oracle(sizes)


def pair(n: int, classes: int, seed: int = 2024) -> Pair:
    """Make float32 logits of a classifier that is too sure, and labels drawn from the softmax at the true T."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.empty(n, classes).normal_(generator=generator).mul_(3.0)
    labels = torch.empty(n, dtype=torch.int64)
    for z, y in zip(torch.split(logits, 500), torch.split(labels, 500), strict=True):  # leaves no memory to be reused
        gumbel = torch.empty_like(z).exponential_(generator=generator).log_().neg_()
        y.copy_(gumbel.add_(z, alpha=1 / TRUE_TEMPERATURE).argmax(1))
    return logits, labels


def ours(method: str, **options: Any) -> peers.Fit:
    """Put one of our methods behind the peers' interface."""

    def fit(logits: Tensor, labels: Tensor) -> Answer:
        fitted = METHODS[method](logits, labels, **options)

        def predict(z: Tensor) -> Tensor:
            return torch.log_softmax(fitted(z).double(), 1)

        held = {name: getattr(fitted, name, None) for name in ("weight", "bias")}
        return Answer(predict, float(getattr(fitted, "temperature", 1.0)), **held)

    return fit


def against(sizes: Sizes, fits: dict[str, peers.Fit], data: Pair) -> tuple[dict[str, Timing], dict[str, Answer]]:
    """Race the fits, each warmed up, and give what they found.

    Large data have a heat on a tenth of the rows: a peer that takes over three times as long as the best does not run
    on the whole.
    """
    warm = pair(500, 4)
    for fit in fits.values():
        fit(*warm)
    answers: dict[str, Answer] = {}

    def run(name: str, fit: peers.Fit) -> None:
        answers[name] = fit(*data)

    runs: dict[str, Run] = {name: partial(run, name, fit) for name, fit in fits.items()}
    if data[0].numel() > 10_000_000:
        tenth = (data[0][: len(data[0]) // 10], data[1][: len(data[1]) // 10])
        heats = {name: stopwatch(partial(fit, *tenth)) for name, fit in fits.items()}
        left_out = runs.keys() - contenders(runs, heats).keys()
        for name in left_out:
            del runs[name]
            print_row(
                "", "", name, f"{1e3 * heats[name]:,.1f} ms", "", "", "", "on a tenth of the rows: too slow to race"
            )
    return laps(sizes, runs), answers


def laps(sizes: Sizes, runs: dict[str, Run]) -> dict[str, Timing]:
    """Race the runs; where a lap of them all takes a minute, that one is enough."""
    first = {name: stopwatch(run) for name, run in runs.items()}
    if sum(first.values()) > 60:
        return {name: Timing(seconds, seconds) for name, seconds in first.items()}
    return race(runs, sizes.rounds, sizes.seconds)


def judge(
    sizes: Sizes,
    what: str,
    method: str,
    data: Pair,
    bar: float,
    quality: Callable[[Answer, Answer | None], Quality],
    **options: Any,
) -> None:
    """Judge a fit's time against the best peer's, and its answer; the slower peers follow unjudged."""
    timings, answers = against(sizes, {OURS: ours(method, **options), **peers.fitting(method)}, data)
    mine, answer = timings.pop(OURS), answers.pop(OURS)
    if not timings:
        print_row(what, str(mine), "", "no peer", "", f"≥ {bar:g}", "absent", quality(answer, None).text)
    for place, name in enumerate(sorted(timings, key=lambda name: timings[name].best)):
        found, ratio = quality(answer, answers[name]), timings[name].best / mine.best
        print_row(
            what if place == 0 else "",
            str(mine) if place == 0 else "",
            name,
            str(timings[name]),
            f"{ratio:.{1 if ratio >= 10 else 2}f}",
            f"≥ {bar:g}" if place == 0 else "",
            verdict(sizes, ratio >= bar and found.good) if place == 0 else "",
            found.text,
        )


def judge_temperature(sizes: Sizes, data: Pair, bar: float) -> None:
    """Judge the fit by likelihood; T must be that of the exact optimum to 1e-6."""
    exact = 1 / exact_beta(data)

    def quality(mine: Answer, theirs: Answer | None) -> Quality:
        off = abs(mine.temperature - exact)
        beside = "" if theirs is None else f", theirs {abs(theirs.temperature - exact):.0e}"
        return Quality(off <= 1e-6, f"T off by {off:.0e}{beside}")

    judge(sizes, f"temperature, {shape(data)}", "temperature", data, bar, quality)


def judge_excess(sizes: Sizes, data: Pair) -> None:
    """Judge how far the likelihood at T lies from the exact optimum, at all scales of the logits."""
    excess: dict[str, list[float]] = {}
    for scale in SCALES:
        scaled = (data[0] * scale, data[1])
        least = mean_nll(scaled, exact_beta(scaled, scale))
        for name, fit in {OURS: ours("temperature"), **peers.fitting("temperature")}.items():
            beta = 1 / fit(*scaled).temperature
            excess.setdefault(name, []).append(mean_nll(scaled, beta) - least)
    what = "temperature: excess NLL at scales .02 1 5 50 500"
    for name, found in excess.items():
        worst, each = f"{max(found):.1e}", " ".join(f"{e:.0e}" for e in found)
        if name == OURS:
            passed = verdict(sizes, max(found) <= 1e-9)
            print_row(what, worst, "limit", "1e-09", f"{max(found) / 1e-9:.2f}", "≤ 1", passed, each)
        else:
            print_row("", "", name, worst, "", "", "", each)


def judge_linear(sizes: Sizes, method: str, data: Pair, bar: float) -> None:
    """Judge a fit with many parameters; its objective must not be higher than the peer's, both in double."""

    def quality(mine: Answer, theirs: Answer | None) -> Quality:
        low = objective(method, data, mine)
        if theirs is None:
            return Quality(True, f"objective {low:.8f}")
        high = objective(method, data, theirs)
        return Quality(low <= high + 1e-9, f"objective {low:.8f}, theirs {high - low:+.1e}")

    options = {"penalty": 1.0} if method == "dirichlet_odir" else {}
    name = "dirichlet_odir at λ = 1" if options else method
    judge(sizes, f"{name}, {shape(data)}", method, data, bar, quality, **options)


def objective(method: str, data: Pair, answer: Answer) -> float:
    """The mean NLL of softmax(W u + b) with the penalty of the method."""
    z, labels = data
    n, classes = z.shape
    w, b = answer.weight, answer.bias
    if w is None or b is None:
        raise ValueError(f"{method} has no weights")
    u = z.double() if method == "vector" else torch.log_softmax(z.double() / answer.temperature, 1)
    log_q = torch.log_softmax((u * w if w.ndim == 1 else u @ w.T) + b, 1)
    nll = -float(log_q.gather(1, labels[:, None]).mean())
    diagonal = w if w.ndim == 1 else w.diagonal()
    off = 0.0 if w.ndim == 1 else float((w**2).sum() - (diagonal**2).sum())
    if method == "vector":
        return nll
    if method == "dirichlet_odir":
        return nll + off / (classes * (classes - 1)) + float((b**2).mean())
    return nll + classes / n * float(((diagonal - 1) ** 2).sum() + (b**2).sum()) + classes * (classes - 1) / n * off


def judge_path(sizes: Sizes, data: Pair) -> None:
    """Judge the search over seven penalties with five folds against one fit; it is stopped past fifteen fits' time."""
    answers: list[Answer] = []
    fresh = pair(len(data[0]), data[0].shape[1], seed=2025)
    one = stopwatch(lambda: answers.append(ours("dirichlet_odir", penalty=1.0)(*data)))
    try:
        path, loss = path_apart(data, timeout=10 + min(15 * one, 300)) if sizes.judged else path_of(data)
    except subprocess.TimeoutExpired:
        path, loss = float("inf"), float("inf")
    ratio, behind = path / one, loss - mean_loss(answers[0], fresh)
    print_row(
        f"dirichlet_odir, 7 λ × 5 folds, {shape(data)}",
        f"{1e3 * path:,.1f} ms",
        "ours at λ = 1",
        f"{1e3 * one:,.1f} ms",
        f"{ratio:.1f}",
        "≤ 12",
        verdict(sizes, ratio <= 12 and behind <= 0.002),
        f"NLL of fresh rows {loss:.5f}, less that at λ = 1 {behind:+.1e}",
    )


def path_of(data: Pair) -> tuple[float, float]:
    """Seconds of the search, and the NLL of fresh rows under what it found."""
    answers: list[Answer] = []
    seconds = stopwatch(lambda: answers.append(ours("dirichlet_odir")(*data)))
    return seconds, mean_loss(answers[0], pair(len(data[0]), data[0].shape[1], seed=2025))


def path_apart(data: Pair, timeout: float) -> tuple[float, float]:
    """The same in a process that can be stopped."""
    command = [sys.executable, __file__, "--path", *map(str, data[0].shape)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout).stdout
    seconds, loss = map(float, out.split())
    return seconds, loss


def judge_binning(sizes: Sizes, method: str, data: Pair, bar: float) -> None:
    """Judge a fit of bins or steps; its Brier score on fresh rows must not be higher than the peer's.

    Where the method maps the confidence alone, so does the score: how a peer shares the rest is the adapter's doing.
    """
    fresh = pair(len(data[0]), data[0].shape[1], seed=2025)

    def brier(answer: Answer) -> float:
        p = answer.predict(fresh[0]).exp()
        if method in ("isotonic", "histogram"):
            best = fresh[0].argmax(1, keepdim=True)
            return float(((p.gather(1, best) - (best == fresh[1][:, None]).double()) ** 2).mean())
        truth = torch.nn.functional.one_hot(fresh[1], p.shape[1])
        return float(((p - truth) ** 2).sum(1).mean())

    def quality(mine: Answer, theirs: Answer | None) -> Quality:
        low = brier(mine)
        if theirs is None:
            return Quality(True, f"Brier of fresh rows {low:.5f}")
        high = brier(theirs)
        return Quality(low <= high + 1e-4, f"Brier of fresh rows {low:.5f}, theirs {high - low:+.1e}")

    judge(sizes, f"{method}, {shape(data)}", method, data, bar, quality)


def judge_grid(sizes: Sizes, data: Pair) -> None:
    """Judge the grid by ECE against three seconds; a loop over a fiftieth of it must not find a lower one."""
    grid = [(i + 1) / 1000 for i in range(sizes.temperatures)]
    some = grid[49::50] if len(grid) > 500 else grid
    fit = METHODS["temperature_ece"]
    found: dict[str, float] = {}

    def run() -> None:
        found["T"] = float(fit(*data, temperatures=grid).temperature)

    timing = race({OURS: run}, sizes.rounds, 0.0)[OURS]
    naive = {t: naive_ece(data, t) for t in some}
    least = min(naive.values())
    whole = naive_ece(data, found["T"])
    few = naive_ece(data, float(fit(*data, temperatures=some).temperature))
    print_row(
        f"temperature_ece, {len(grid):,} T, {shape(data)}",
        str(timing),
        "limit",
        "3,000.0 ms",
        f"{timing.best / 3:.2f}",
        "≤ 1",
        verdict(sizes, timing.best <= 3 and whole <= least + 1e-9 and abs(few - least) <= 1e-9),
        f"ECE {whole:.7f}; on {len(some)} T {few:.7f}, the loop {few - least:+.0e}",
    )


def judge_memory(sizes: Sizes, method: str) -> None:
    """Judge what a fit takes on top of its input, in a fresh process."""
    n, classes = sizes.large
    limit = n * classes * 4 / 2**20 / 4
    command = [sys.executable, __file__, "--growth", method]
    if sizes.judged:
        grown = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    else:
        grown = growth_of(method, sizes)
    passed = "-" if np.isnan(grown) else verdict(sizes, grown < limit)
    what = f"{method}, {n:,} × {classes}: memory"
    print_row(
        what, f"{grown:.1f} MB", "a quarter of the input", f"{limit:.1f} MB", f"{grown / limit:.2f}", "< 1", passed
    )


def growth_of(method: str, sizes: Sizes) -> float:
    n, classes = sizes.large
    METHODS[method](*pair(2000, 10))
    data = pair(n, classes)
    return peak_growth(lambda: METHODS[method](*data))


def judge_oracle(sizes: Sizes) -> None:
    """Judge the figures published for one network."""
    folder = os.environ.get("TRUEUP_DATA")
    if folder is None:
        print_row("cifar10_densenet40", "", "", "", "", "", "absent", "TRUEUP_DATA is not set")
        return
    file = Path(folder) / "logits" / "cifar10_densenet40.npz"
    val, test = (trueup.load(file, split=split) for split in ("val", "test"))
    fitted = METHODS["temperature"](*val)
    after = fitted(test.logits)
    figures = (
        ("T", float(fitted.temperature), 2.8826, 1e-3),
        ("test NLL", metrics.nll(after, test.labels), 0.225086, 2e-6),
        ("test ECE", metrics.ece(after, test.labels), 0.009464, 2e-5),
    )
    for name, value, known, slack in figures:
        off = abs(value - known)
        passed = verdict(sizes, off <= slack)
        what = f"cifar10_densenet40, temperature: {name}"
        print_row(what, f"{value:.6f}", "published", f"{known:.6f}", f"{off / slack:.2f}", "≤ 1", passed)
    best = figures[1][1] + 0.002
    for method, published in (
        ("matrix", 0.009879),
        ("ms_odir", 0.009879),
        ("dirichlet", 0.010973),
        ("dirichlet_odir", None),
    ):
        after = METHODS[method](*val)(test.logits)
        nll, ece = metrics.nll(after, test.labels), metrics.ece(after, test.labels)
        near = published is None or ece <= published + 0.003
        print_row(
            f"cifar10_densenet40, {method}: test NLL",
            f"{nll:.6f}",
            "temperature's + .002",
            f"{best:.6f}",
            f"{nll / best:.3f}",
            "≤ 1",
            verdict(sizes, nll <= best and near),
            f"ECE {ece:.6f}" + (f", published {published:.6f}" if published else ""),
        )


def study() -> None:
    """Print held-out NLL of ours and probmetrics' on every real file, and how much the automatic choice regrets."""
    folder = os.environ.get("TRUEUP_DATA")
    if folder is None:
        sys.exit("--study needs the folder of real data in TRUEUP_DATA")
    print_row("file: mean NLL of held-out rows", "ours", "beside", "theirs", "excess", "bar", "", "")
    for name, splits in real_files(Path(folder) / "logits"):
        losses: dict[str, list[np.ndarray]] = {}
        for fit, test in splits:
            runs = {method: ours(method) for method in (*CANDIDATES["up to 30 classes"], *OTHERS, "auto")}
            runs |= {f"{m} {p}": f for m in ("sms", "svs", "ets") for p, f in peers.fitting(m).items()}
            for key, run in runs.items():
                losses.setdefault(key, []).append(row_losses(run(*fit), test))
        means = {key: float(np.mean([rows.mean() for rows in found])) for key, found in losses.items()}
        for key in losses:
            method, _, peer = key.partition(" ")
            if peer:
                excess = means[method] - means[key]
                passed = verdict(WHOLE, excess <= 5e-4)
                print_row(
                    f"{name}: {method}",
                    f"{means[method]:.5f}",
                    peer,
                    f"{means[key]:.5f}",
                    f"{excess:+.5f}",
                    "≤ .0005",
                    passed,
                )
        best = min((key for key in means if key != "auto" and " " not in key), key=lambda key: means[key])
        # The rows of all splits together: the mean regret beside the standard error of a split's.
        regret = [a - b for a, b in zip(losses["auto"], losses[best], strict=True)]
        mean = float(np.mean([r.mean() for r in regret]))
        error = float(np.mean([r.std() / np.sqrt(len(r)) for r in regret]))
        passed = verdict(WHOLE, mean <= error + 1e-12)
        print_row(
            f"{name}: auto",
            f"{means['auto']:.5f}",
            best,
            f"{means[best]:.5f}",
            f"{mean:+.5f}",
            f"≤ {error:.5f}",
            passed,
        )


def real_files(folder: Path) -> Iterator[tuple[str, list[tuple[Pair, Pair]]]]:
    """Give each network with its split, or five halvings where the file has none."""
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        if "val_logits" in held:
            parts = [
                torch.from_numpy(held[f"{part}_{kind}"]) for part in ("val", "test") for kind in ("logits", "labels")
            ]
            yield file.stem, [((parts[0], parts[1].long()), (parts[2], parts[3].long()))]
            continue
        labels = torch.from_numpy(held.pop("labels")).long()
        for name, probs in held.items():
            logits = torch.from_numpy(trueup.from_probs(probs))
            orders = [np.random.default_rng(seed).permutation(len(labels)) for seed in range(5)]
            halves = [(torch.from_numpy(o[: len(o) // 2]), torch.from_numpy(o[len(o) // 2 :])) for o in orders]
            splits = [((logits[a], labels[a]), (logits[b], labels[b])) for a, b in halves]
            yield file.stem.removesuffix("_probs") if len(held) == 1 else f"cifar10_{name}", splits


def exact_beta(data: Pair, scale: float = 1.0) -> float:
    """1/T of most likelihood in double, by a search for the root of the slope."""

    def slope(log_beta: float) -> float:
        total = 0.0
        for z, y in zip(torch.split(data[0], 5000), torch.split(data[1], 5000), strict=True):
            double = z.double()
            p = torch.softmax(np.exp(log_beta) * double, 1)
            total += float((p * double).sum() - double.gather(1, y[:, None]).sum())
        return total / scale

    middle = -np.log(TRUE_TEMPERATURE * scale)
    low, high = middle - 0.05, middle + 0.05
    while slope(low) > 0:
        low -= 0.3
    while slope(high) < 0:
        high += 0.3
    return float(np.exp(brentq(slope, low, high, xtol=1e-12, rtol=1e-14)))


def mean_nll(data: Pair, beta: float) -> float:
    return mean_loss(Answer(lambda z: torch.log_softmax(beta * z.double(), 1)), data)


def mean_loss(answer: Answer, data: Pair) -> float:
    return float(row_losses(answer, data).mean())


def row_losses(answer: Answer, data: Pair) -> np.ndarray:
    """The NLL of every row."""
    return -answer.predict(data[0]).gather(1, data[1][:, None])[:, 0].double().numpy()


def naive_ece(data: Pair, temperature: float) -> float:
    """ECE of fifteen right-closed bins, straight from its definition."""
    confidence, predicted = torch.softmax(data[0].double() / temperature, 1).max(1)
    hit = (predicted == data[1]).double()
    place = torch.bucketize(confidence, torch.arange(1, 15, dtype=torch.float64) / 15)
    return sum(abs(float((confidence - hit)[place == b].sum())) for b in range(15)) / len(hit)


def verdict(sizes: Sizes, passed: bool) -> str:
    return ("PASS" if passed else "MISS") if sizes.judged else "-"


def print_row(
    what: str, ours: str, beside: str, theirs: str, ratio: str, bar: str, verdict: str, answer: str = ""
) -> None:
    line = f"{what:<47} {ours:>17}  {beside:<22} {theirs:>17} {ratio:>8} {bar:>7}  {verdict:<6}  {answer}"
    print(line.rstrip(), flush=True)


if __name__ == "__main__":
    main()
