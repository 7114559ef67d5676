"""Losses and CLUE on real data: what they leave to calibrate, what CLUE gains over cross-entropy, what they cost.

    python benchmarks/training.py           every bar, within an hour on two cores
    python benchmarks/training.py --small   a smoke run of seconds on drawn data; its figures mean nothing

The data are in the folder that TRUEUP_DATA names. A loss's coefficient is the published one; level and α of CLUE are
chosen by the validation NLL of Monte-Carlo predictions, never on test. Networks are trained in processes of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trueup
from trueup import losses, metrics
from trueup.io.predictions import Predictions
from trueup.metrics import ranking, regression
from trueup.models.dropout import moments
from trueup_studies.networks import CNN, MLP
from trueup_studies.papers.clue.mc_dropout import forecast, normalised_tensors, stack_samples
from trueup_studies.sequences import CharTransformer, TextCNN
from trueup_studies.tables import Column, Entry, tabulate
from trueup_studies.training.calibratability import CalibratabilityRow, measure_calibratability
from trueup_studies.training.data import load_data

OTHERS, CLUES, SAME = 1.1, 2.5, 1e-4
"""The most that a step may cost in steps of cross-entropy, of a loss and of CLUE; how far loss curves may part."""
PASSES = 10
"""Monte-Carlo passes at evaluation; in training CLUE does five."""
CE, SQUARED, GAUSSIAN = "cross_entropy", "squared error", "Gaussian NLL"
FIXED = {"label_smoothing": 0.05, "norm": 0.01, "focal": 3.0, "inverse_focal": 2.0}
MADE: dict[str, Callable[[], nn.Module]] = {
    CE: losses.CrossEntropy,
    "label_smoothing": lambda: losses.LabelSmoothing(smoothing=0.05),
    "norm": lambda: losses.Norm(strength=0.01, order=1),
    "focal": lambda: losses.Focal(gamma=3.0),
    "inverse_focal": lambda: losses.InverseFocal(gamma=2.0),
}
CLASSIFIED = ("accuracy", "nll", "ece", "uce", "corr(u, error)", "AUROC of u")
REGRESSED = ("rmse", "nll", "ence", "uce", "corr(u, error)", "AUROC of u")
TABLES = ("uci_boston", "uci_concrete", "uci_energy", "uci_wine", "uci_yacht")
CLASSIFICATIONS = ("fashion_mnist", "trec", "tinyshakespeare")


class Clue(NamedTuple):
    """CLUE at one level, with one share of the task's own loss, and in a regression with a variance head or not."""

    level: str
    alpha: float
    head: bool = False

    def __str__(self) -> str:
        return f"CLUE {self.level} α {self.alpha:g}{', variance head' if self.head else ''}"


Method: TypeAlias = str | Clue
Figures: TypeAlias = dict[str, float]
CANDIDATES = tuple(Clue(level, alpha) for level, alpha in product(("batch", "group", "sample"), (0.5, 0.9)))


class Sizes(NamedTuple):
    """How much of everything a run does."""

    seeds: int = 3
    splits: int = 5
    steps: tuple[tuple[str, int], ...] = (
        ("fashion_mnist", 1250),
        ("trec", 600),
        ("tinyshakespeare", 300),
        ("uci", 1000),
    )
    rounds: int = 60
    """Steps of each loss that are timed."""
    epochs: int = 5
    """Of the runs in one process and in two."""
    tables: tuple[str, ...] = TABLES
    candidates: tuple[Clue, ...] = CANDIDATES
    workers: int = 2
    drawn: bool = False
    """Data are drawn, and figures not judged."""


DEFAULT = Sizes()
SMALL = Sizes(
    seeds=2,
    splits=2,
    steps=(("fashion_mnist", 3), ("trec", 3), ("tinyshakespeare", 2), ("uci", 5)),
    rounds=2,
    epochs=1,
    tables=("uci_yacht",),
    candidates=(Clue("batch", 0.5), Clue("sample", 0.9)),
    workers=0,
    drawn=True,
)


class Subject(NamedTuple):
    """Data in three parts of tensors, and how a network is trained on them."""

    kind: str
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outputs: int
    words: int = 0
    batch: int = 128
    rate: float = 2e-3

    def network(self, seed: int, head: bool = False) -> nn.Module:
        if self.kind == "image":
            return CNN(self.outputs, channels=1, width=16, dropout=0.3, seed=seed)
        if self.kind == "text":
            return TextCNN(self.outputs, vocabulary=self.words, width=64, dropout=0.3, seed=seed)
        if self.kind == "characters":
            return CharTransformer(self.outputs, width=64, dropout=0.1, seed=seed)
        return MLP(1 + head, inputs=self.train[0].shape[1], hidden=(50, 50), dropout=0.1, seed=seed)


class Job(NamedTuple):
    """One network to train and to judge."""

    task: str
    method: Method
    seed: int
    """Of network and order; of a table, also the number of the split."""
    sizes: Sizes


class Judged(NamedTuple):
    """Monte-Carlo figures of a network, and for the table of losses the row of its plain predictions."""

    job: Job
    val: Figures
    test: Figures
    row: CalibratabilityRow | None


def main() -> None:
    """Print the bars."""
    parser = argparse.ArgumentParser(description="Losses and CLUE on real data.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds on drawn data")
    parser.add_argument("--curves", nargs=3, help=argparse.SUPPRESS, metavar=("FILE", "BATCH", "EPOCHS"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.curves:
        file, batch, epochs = options.curves
        curves(2, int(batch), int(epochs), Path(file))
        return
    sizes = SMALL if options.small else DEFAULT
    if not sizes.drawn and not os.environ.get("TRUEUP_DATA"):
        sys.exit("TRUEUP_DATA must name the folder of the data; --small runs without it")
    started = perf_counter()
    print(f"trueup {trueup.__version__}, torch {torch.__version__}, {sizes.workers or 1} processes of one thread")
    torch.set_num_threads(1)
    judge_costs(sizes)
    judge_processes(sizes)
    done = list(judged_all(sizes))
    print_losses(sizes, done)
    ranks = [print_classification(sizes, done, task) for task in CLASSIFICATIONS]
    print_advice("classification", ranks)
    ranks = [print_regression(sizes, done, task) for task in sizes.tables]
    print_advice("regression", ranks)
    print(f"\n{(perf_counter() - started) / 60:.1f} minutes")


def jobs_of(sizes: Sizes) -> list[Job]:
    """The long ones first, so that no process is left with one at the end."""
    seeds = range(sizes.seeds)
    jobs = [Job("tinyshakespeare", m, s, sizes) for m in (*sizes.candidates, CE) for s in seeds]
    jobs += [Job("fashion_mnist", m, s, sizes) for m in (*clues_for_images(sizes), *MADE) for s in seeds]
    jobs += [Job("trec", m, s, sizes) for m in (*sizes.candidates, CE) for s in seeds]
    with_head = [clue._replace(head=True) for clue in sizes.candidates]
    methods: list[Method] = [*sizes.candidates, *with_head, SQUARED, GAUSSIAN]
    return jobs + [Job(task, m, s, sizes) for task in sizes.tables for m in methods for s in range(sizes.splits)]


def clues_for_images(sizes: Sizes) -> Sequence[Clue]:
    default = Clue("batch", 0.5)  # the one that stands in the table of losses
    return sizes.candidates if default in sizes.candidates else (*sizes.candidates, default)


def judged_all(sizes: Sizes) -> Iterator[Judged]:
    jobs = jobs_of(sizes)
    if not sizes.workers:
        yield from map(judged, jobs)
        return
    with ProcessPoolExecutor(sizes.workers, get_context("spawn"), initializer=one_thread) as pool:
        for number, found in enumerate(pool.map(judged, jobs), start=1):
            print(f"\r{number} of {len(jobs)} networks", end="", file=sys.stderr, flush=True)
            yield found
    print(file=sys.stderr)


def one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def judged(job: Job) -> Judged:
    """Train a network and look at it."""
    table = job.task.startswith("uci")
    data = subject(job.task, job.seed if table else 0, job.sizes.drawn)
    head = job.method == GAUSSIAN or (isinstance(job.method, Clue) and job.method.head)
    network = data.network(job.seed, head)
    steps = dict(job.sizes.steps)["uci" if table else job.task]
    descend(network, data, step_loss(job.method, data.kind, steps), steps, job.seed)
    if table:
        return Judged(job, *(regression_figures(network, part, head) for part in (data.val, data.test)), None)
    figures = [classification_figures(network, part, data.kind) for part in (data.val, data.test)]
    row = plain_row(job, network, data) if job.task == "fashion_mnist" else None
    return Judged(job, *figures, row)


def descend(network: nn.Module, data: Subject, loss: Callable[..., Tensor], steps: int, seed: int) -> None:
    """AdamW with a cosine, each epoch in a new order."""
    torch.manual_seed(seed)
    x, y = data.train
    optimiser = torch.optim.AdamW(network.parameters(), lr=data.rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order = torch.empty(0, dtype=torch.int64)
    network.train()
    for _ in range(steps):
        if len(order) < min(data.batch, len(y)):
            order = torch.randperm(len(y))
        now, order = order[: data.batch], order[data.batch :]
        optimiser.zero_grad()
        loss(network, x[now], y[now]).backward()
        optimiser.step()
        schedule.step()
    network.eval()


def step_loss(method: Method, kind: str, steps: int) -> Callable[..., Tensor]:
    """The loss of a network on a batch."""
    if isinstance(method, Clue):
        measure: Any = partial(losses.error_and_entropy, class_axis="last" if kind == "characters" else None)
        if kind == "tabular":
            measure = partial(losses.error_and_variance, variance_head=method.head)
        level: Any = method.level
        return losses.CLUE(measure=measure, alpha=method.alpha, level=level, ramp=max(1, steps // 10))
    if method == SQUARED:
        return lambda network, x, y: F.mse_loss(network(x)[:, 0], y)
    if method == GAUSSIAN:
        return gaussian
    made = MADE[method]()
    if kind == "characters":
        return lambda network, x, y: made(network(x).movedim(-1, 1), y)
    return lambda network, x, y: made(network(x), y)


def gaussian(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = moments(network(x)[None], variance_head=True)
    return (found.within.log() + (y - found.mean).square() / found.within).mean() / 2


def classification_figures(network: nn.Module, part: tuple[Tensor, Tensor], kind: str) -> Figures:
    found = forecast([network], part, kind, PASSES)
    z, y = found.prediction, found.target
    values = (
        metrics.accuracy(z, y),
        metrics.nll(z, y),
        metrics.ece(z, y),
        metrics.uce(z, y),
        correlation(found.uncertainty, found.errors),
        metrics.misclassification_auroc(z, y, score="entropy"),
    )
    return dict(zip(CLASSIFIED, values, strict=True))


def regression_figures(network: nn.Module, part: tuple[Tensor, Tensor], head: bool) -> Figures:
    """In units of the training targets' standard deviation; an error is large if it is above the median."""
    found = forecast([network], part, "tabular", PASSES, head=head)
    numbers = (found.prediction, found.uncertainty.sqrt(), found.target)
    values = (
        regression.rmse(*numbers),
        regression.gaussian_nll(*numbers),
        regression.ence(*numbers),
        regression.variance_error(*numbers),
        correlation(found.uncertainty, found.errors),
        ranking.roc_area(found.uncertainty, found.errors > found.errors.median()),
    )
    return dict(zip(REGRESSED, values, strict=True))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def plain_row(job: Job, network: nn.Module, data: Subject) -> CalibratabilityRow:
    """One pass without dropout, as any network is used."""

    def predictions(part: tuple[Tensor, Tensor]) -> Predictions:
        with torch.no_grad():
            return Predictions(torch.cat([network(x) for x in part[0].split(500)]), part[1])

    name = "clue" if isinstance(job.method, Clue) else job.method
    key = (name, FIXED.get(name, 0.0), job.seed)
    return measure_calibratability({key: (predictions(data.val), predictions(data.test))})[0]


@cache
def subject(task: str, split: int, drawn: bool) -> Subject:
    if drawn:
        return drawn_subject(task, split)
    data = load_data(task, seed=split)
    parts = normalised_tensors(data)
    batch = {"image": 128, "text": 64, "characters": 32, "tabular": 64}[data.kind]
    return Subject(data.kind, *parts, outputs=max(1, len(data.classes)), words=len(data.vocabulary), batch=batch)


def drawn_subject(task: str, split: int) -> Subject:
    """Data of the same kind and of no meaning."""
    generator = torch.Generator().manual_seed(split)

    def whole_numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    n = 60
    if task == "fashion_mnist":
        parts = [(torch.rand(n, 1, 8, 8, generator=generator), whole_numbers(10, n)) for _ in range(3)]
        return Subject("image", *parts, outputs=10, batch=16)
    if task == "trec":
        parts = [(whole_numbers(50, n, 9), whole_numbers(6, n)) for _ in range(3)]
        return Subject("text", *parts, outputs=6, words=50, batch=16)
    if task == "tinyshakespeare":
        parts = [(whole_numbers(20, 8, 16), whole_numbers(20, 8, 16)) for _ in range(3)]
        return Subject("characters", *parts, outputs=20, batch=4)
    parts = [(torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)) for _ in range(3)]
    return Subject("tabular", *parts, outputs=1, batch=16)


def judge_costs(sizes: Sizes) -> None:
    """Judge the CPU time of a step against that of torch's cross-entropy, steps of all losses taking turns."""
    print_title("cost of a training step, in steps of torch's cross-entropy on the same network and batch")
    for task in CLASSIFICATIONS:
        data = subject(task, 0, sizes.drawn)
        network = data.network(0).train()
        optimiser = torch.optim.SGD(network.parameters(), lr=1e-6)
        x, y = (part[: data.batch] for part in data.train)
        clue = step_loss(Clue("batch", 0.5), data.kind, 1)
        runs = {"torch": of_logits(nn.CrossEntropyLoss(), data.kind), "CLUE, 5 passes of the head": clue}
        if data.kind == "image":
            runs |= {name: of_logits(make(), data.kind) for name, make in trueup.LOSSES.items()}
        took: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(sizes.rounds + 2):
            for name, loss in runs.items():
                start = process_time()
                optimiser.zero_grad()
                loss(network, x, y).backward()
                optimiser.step()
                took[name].append(process_time() - start)
        # The low tenth is what the step costs when nothing else disturbs it; the first two warm up.
        cost = {name: float(np.quantile(times[2:], 0.1)) for name, times in took.items()}
        for name in list(runs)[1:]:
            ratio, most = cost[name] / cost["torch"], CLUES if name.startswith("CLUE") else OTHERS
            passed = verdict(sizes, ratio <= most)
            beside = f"{1e3 * cost['torch']:.1f} ms → {1e3 * cost[name]:.1f} ms"
            print(f"{task:<16} {name:<28} {ratio:6.3f}   ≤ {most}  {passed:<4}  {beside}", flush=True)


def of_logits(loss: nn.Module, kind: str) -> Callable[..., Tensor]:
    if kind == "characters":
        return lambda network, x, y: loss(network(x).movedim(-1, 1), y)
    return lambda network, x, y: loss(network(x), y)


def judge_processes(sizes: Sizes) -> None:
    """Judge that two processes come to the loss curve of one with the doubled batch; the smoke run starts no others."""
    print_title("two gloo processes against one with the doubled batch: the loss curve of digits")
    one = curves(1, 64, sizes.epochs)
    two = curves(1, 64, sizes.epochs) if sizes.drawn else curves_of_two(sizes)
    for name in one:
        gap = max(abs(a - b) for a, b in zip(one[name], two[name], strict=True))
        ends = f"{one[name][-1]:.6f} and {two[name][-1]:.6f} after {sizes.epochs} epochs"
        print(f"{name:<45} {gap:9.1e}   ≤ {SAME:g}  {verdict(sizes, gap <= SAME):<4}  {ends}", flush=True)


def curves_of_two(sizes: Sizes) -> dict[str, list[float]]:
    """The loss curves of two processes, each with half of the batch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "curves.json"
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        run += ["--curves", str(file), "32", str(sizes.epochs)]
        done = subprocess.run(run, env=alone, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the run in two processes failed:\n{done.stderr[-2000:]}")
        return json.loads(file.read_text())


def curves(processes: int, batch: int, epochs: int, file: Path | None = None) -> dict[str, list[float]]:
    """Train a network without batch-norm and dropout: what each process does."""
    from lightning_fabric import Fabric

    from trueup_studies.training.loop import train

    fabric = Fabric(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
    fabric.launch()
    data = load_data("digits")
    train_part = TensorDataset(*stack_samples(data.train))
    found = {}
    kinds = {"focal, a loss of each sample": losses.Focal(), "CLUE at batch level": losses.CLUE(passes=1)}
    for name, loss in kinds.items():
        network = CNN(10, channels=1, width=8, batch_norm=False)
        parts = (train_part, None, None)
        done = train(network, parts, loss, epochs, batch_size=batch, lr=0.02, fabric=fabric, progress=False)
        found[name] = [epoch.loss for epoch in done.history.epochs]
    if file is not None and fabric.is_global_zero:
        file.write_text(json.dumps(found))
    return found


def print_losses(sizes: Sizes, done: Iterable[Judged]) -> None:
    """Print what each loss leaves to calibrate."""
    default = Clue("batch", 0.5)
    rows = [d.row for d in done if d.row is not None and (d.job.method in MADE or d.job.method == default)]
    print_title(
        f"Fashion-MNIST, {sizes.seeds} seeds, one pass without dropout: mean ± std; ▲ higher and ▼ lower than "
        "cross-entropy by a t-test at 5 %"
    )
    order = [*MADE, "clue"]
    named = [
        {**vars(row), "loss": f"{row.loss} {row.coefficient:g}" if row.coefficient else row.loss}
        for row in sorted(rows, key=lambda row: order.index(row.loss))
    ]
    columns = (
        Column("accuracy", "accuracy %", scale=100), Column("nll", "NLL"), Column("ece", "ECE %", scale=100),
        Column("ece_temperature", "after TS %", scale=100), Column("ece_histogram", "after HB %", scale=100),
        Column("temperature", "T"),
    )  # fmt: skip
    table = tabulate(named, by="loss", columns=columns, reference="cross_entropy")
    print(f"{'':<24}" + "".join(f"{column.heading:>18}" for column in columns))
    for name, entries in table.groups[""].items():
        print(f"{name:<24}" + "".join(f"{shown(entries[column.name]):>18}" for column in columns), flush=True)


def shown(entry: Entry) -> str:
    return f"{entry.mean:.3f} ± {entry.std:.3f}{ {'higher': '▲', 'lower': '▼', '': ' '}[entry.mark] }"


def print_classification(sizes: Sizes, done: Sequence[Judged], task: str) -> dict[Clue, float]:
    """Print CLUE beside cross-entropy, both asked by Monte-Carlo dropout; give the candidates' validation NLL."""
    print_title(f"{task}, {sizes.seeds} seeds, same network, dropout and {PASSES} passes: mean ± std, and CLUE − other")
    found = by_method(done, task)
    chosen, scores = chosen_of(found, sizes.candidates)
    print_heads(CLASSIFIED)
    print_figures(CE, found[CE])
    print_figures(f"{chosen}, chosen on validation", found[chosen])
    print_difference(CE, found[chosen], found[CE])
    print_candidates(found, sizes.candidates)
    return scores


def print_regression(sizes: Sizes, done: Sequence[Judged], task: str) -> dict[Clue, float]:
    """Print CLUE without and with a variance head beside both baselines."""
    baselines = f"{SQUARED}, whose variance is that of the passes, and {GAUSSIAN} with a variance head"
    print_title(f"{task}, {sizes.splits} splits, {PASSES} passes; baselines: {baselines}")
    found = by_method(done, task)
    print_heads(REGRESSED)
    for baseline in (SQUARED, GAUSSIAN):
        print_figures(baseline, found[baseline])
    every: dict[Clue, float] = {}
    for head in (False, True):
        candidates = [clue._replace(head=head) for clue in sizes.candidates]
        chosen, scores = chosen_of(found, candidates)
        every |= scores
        print_figures(f"{chosen}, chosen on validation", found[chosen])
        for baseline in (SQUARED, GAUSSIAN):
            print_difference(baseline, found[chosen], found[baseline])
        print_candidates(found, candidates)
    return every


def by_method(done: Iterable[Judged], task: str) -> dict[Method, list[Judged]]:
    found: dict[Method, list[Judged]] = {}
    for judged_one in done:
        if judged_one.job.task == task:
            found.setdefault(judged_one.job.method, []).append(judged_one)
    return {method: sorted(runs, key=lambda d: d.job.seed) for method, runs in found.items()}


def chosen_of(found: dict[Method, list[Judged]], candidates: Iterable[Clue]) -> tuple[Clue, dict[Clue, float]]:
    scores = {clue: float(np.mean([d.val["nll"] for d in found[clue]])) for clue in candidates}
    return min(scores, key=scores.__getitem__), scores


def print_advice(what: str, tasks: Sequence[dict[Clue, float]]) -> None:
    """Print which level and α came first on validation over all tasks, by their mean rank."""
    places = [
        {clue: place for place, clue in enumerate(sorted(scores, key=scores.__getitem__), start=1)} for scores in tasks
    ]
    mean = {clue: float(np.mean([ranked[clue] for ranked in places])) for clue in places[0]}
    order = sorted(mean, key=mean.__getitem__)
    print_title(f"{what}: level and α by mean rank of validation NLL over {len(tasks)} data sets; use the first")
    print("; ".join(f"{clue} ({mean[clue]:.1f})" for clue in order))


def print_title(text: str) -> None:
    print(f"\n{text}", flush=True)


def print_heads(names: Iterable[str]) -> None:
    print(f"{'':<52}" + "".join(f"{name:>19}" for name in names))


def print_figures(what: str, runs: Sequence[Judged]) -> None:
    print_values(what, [d.test for d in runs], "")


def print_difference(what: str, ours: Sequence[Judged], theirs: Sequence[Judged]) -> None:
    """Print CLUE − a baseline, seed by seed."""
    pairs = [{k: a.test[k] - b.test[k] for k in a.test} for a, b in zip(ours, theirs, strict=True)]
    print_values(f"  paired difference to {what}", pairs, "+")


def print_values(what: str, runs: Sequence[Figures], sign: str) -> None:
    columns = ([run[name] for run in runs] for name in runs[0])
    cells = (f"{np.mean(values):{sign}.4f} ± {spread(values):.4f}" for values in columns)
    print(f"{what:<52}" + "".join(f"{cell:>19}" for cell in cells), flush=True)


def spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def print_candidates(found: dict[Method, list[Judged]], candidates: Iterable[Clue]) -> None:
    cells = (f"{clue.level} α {clue.alpha:g} {np.mean([d.val['nll'] for d in found[clue]]):.4f}" for clue in candidates)
    print(f"  validation NLL: {', '.join(cells)}", flush=True)


def verdict(sizes: Sizes, passed: bool) -> str:
    return "-" if sizes.drawn else "PASS" if passed else "MISS"


if __name__ == "__main__":
    main()
