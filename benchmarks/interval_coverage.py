"""Coverage of the intervals and level of the tests of `evaluate` and `compare`, by simulation in twelve worlds.

    python benchmarks/interval_coverage.py                      1,000 data sets per world, written to docs/coverage.md
    python benchmarks/interval_coverage.py --replications 200   fewer data sets
    python benchmarks/interval_coverage.py --small              a smoke run of seconds, printed only

Counts are kept in --store after every 50 data sets, so that a run can be stopped and continued.

A network has five classes. Each of two networks confuses another pair of classes. An event happens if the sum of two
signals and noise is positive. Each of two methods sees one of the signals. So two methods always have the same true
metrics. True values are those of 200,000 rows with their exact probabilities as outcomes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax, logit, ndtr, softmax

from measured import made_from, table
from trueup import compare, from_probs
from trueup.metrics import Bins
from trueup.metrics.events import EVENT_METRICS, Points, log_odds
from trueup.metrics.table import DEFAULT, EVENT_DEFAULT

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
STORE = Path("build/coverage.jsonl")
BLOCK = 50
"""Data sets between two lines of the store."""
POPULATION_ROWS = 200_000
MIN_COVERAGE, MAX_REJECTIONS = 0.93, 0.07
ONE_SIDED = ("ece", "mce", "rmsce", "aece", "sce", "miscalibration", "ici")
"""Errors that are 0 in calibrated data, where the interval should start at 0."""
ALMOST_ZERO = 1e-3
MIN_EVENTS = 10
"""Worlds with fewer expected events are named apart."""


class World(NamedTuple):
    """Distribution of a data set."""

    name: str
    n: int
    event: bool = False
    temperature: float = 1.0
    """Factor of the log-odds or logits of the predictions; above 1 they are overconfident."""
    mean: float = 0.0
    """Mean of the latent variable of an event."""
    discrete: bool = False
    weighted: bool = False
    clusters: int = 0


class Draw(NamedTuple):
    """A data set: log-probabilities of two methods, labels, true probabilities, options."""

    logits: list[np.ndarray]
    labels: np.ndarray
    truth: np.ndarray
    """True probabilities given the first method's prediction, (n,) of an event or (n, classes)."""
    options: dict[str, Any]


WORLDS = (
    World("network, n = 200", 200),
    World("network, n = 5,000", 5000),
    World("network, T 1.25, n = 200", 200, temperature=1.25),
    World("network, T 1.25, n = 5,000", 5000, temperature=1.25),
    World("network, T 1.25, weights, n = 5,000", 5000, temperature=1.25, weighted=True),
    World("network, 10 clusters of 100", 1000, clusters=10),
    World("network, T 1.25, 20 clusters of 100", 2000, temperature=1.25, clusters=20),
    World("event, n = 200", 200, event=True),
    World("event, T 1.25, n = 5,000", 5000, event=True, temperature=1.25),
    World("event, 3 %, n = 200", 200, event=True, mean=-3.2),
    World("event, 3 %, n = 5,000", 5000, event=True, mean=-3.2),
    World("event, 6 scores, n = 200", 200, event=True, discrete=True),
)


def draw(world: World, rng: np.random.Generator, rows: int | None = None) -> Draw:
    """Draw a data set, or `rows` independent rows of the population."""
    n = rows or world.n
    options: dict[str, Any] = {}
    noise = rng.normal(size=n)
    if world.clusters and rows is None:
        cluster = np.arange(n) * world.clusters // n
        noise = math.sqrt(0.2) * rng.normal(size=world.clusters)[cluster] + math.sqrt(0.8) * noise
        options["clusters"] = cluster
    if world.weighted and rows is None:
        options["sample_weight"] = rng.exponential(size=n)
    if not world.event:
        z = 2 * rng.normal(size=(n, 5))
        probs = softmax(z, axis=1)
        labels = np.minimum((np.cumsum(probs, axis=1) < ndtr(noise)[:, None]).sum(axis=1), 4)
        confused = []
        for pair in ([0, 1], [2, 3]):
            p = probs.copy()
            p[:, pair] = p[:, pair].mean(axis=1, keepdims=True)
            confused.append(p)
        return Draw([world.temperature * np.log(p) for p in confused], labels, confused[0], options)
    levels = np.array([-1.5, -0.9, -0.3, 0.3, 0.9, 1.5])
    signals = levels[rng.integers(0, 6, (2, n))] if world.discrete else rng.normal(size=(2, n))
    labels = (world.mean + signals.sum(axis=0) + noise > 0).astype(np.int64)
    if world.discrete:
        given_signal = np.stack([ndtr(world.mean + signals + level) for level in levels]).mean(axis=0)
    else:
        given_signal = ndtr((world.mean + signals) / math.sqrt(2))
    stated = [1 / (1 + np.exp(-world.temperature * logit(p))) for p in given_signal]
    return Draw([from_probs(p) for p in stated], labels, given_signal[0], options)


def true_values(world: World) -> dict[str, float]:
    """Compute the metrics of the population."""
    population = draw(world, np.random.default_rng(123), POPULATION_ROWS)
    z, truth = population.logits[0], population.truth
    log_p = log_softmax(z, axis=1)
    p = np.exp(log_p)
    if world.event:
        score, outcome, classwise = p[:, 1], truth, np.stack([1 - truth, truth], axis=1)
        order = np.argsort(score)
        rows = np.stack([1 - truth[order], truth[order]])
        points = Points(score[order], log_odds(score[order]), rows, rows)
        values = {name: float(EVENT_METRICS[name](points)) for name in EVENT_DEFAULT if name in EVENT_METRICS}
    else:
        top = p.argmax(axis=1)
        score, outcome, classwise = p.max(axis=1), truth[np.arange(len(p)), top], truth
        values = {"accuracy": float(outcome.mean()), "confidence": float(score.mean())}
        values["brier"] = float(
            (truth * ((1 - p) ** 2 - p**2) + (p**2).sum(axis=1, keepdims=True) * truth).sum() / len(p)
        )
        values["entropy"] = float(-(p * log_p).sum(axis=1).mean())
        by_class = [Bins.from_scores(p[:, k], truth[:, k], np.linspace(0, 1, 16)).ece() for k in range(p.shape[1])]
        values["sce"] = float(np.mean(by_class))
    bins = Bins.from_scores(score, outcome, np.linspace(0, 1, 16))
    values |= {"ece": bins.ece(), "mce": bins.error("mce"), "rmsce": bins.error("rmsce")}
    edges = np.quantile(score, np.linspace(0, 1, 16)[1:-1])
    if not world.discrete:
        index = np.searchsorted(edges, score)
        values["aece"] = Bins.from_indices(index, score, outcome, np.linspace(0, 1, 16)).ece()
    else:
        index = np.unique(score.round(9), return_inverse=True)[1]
        values["aece"] = Bins.from_indices(index, score, outcome, np.linspace(0, 1, 7)).ece()
    values |= {"predicted": float(score.mean()), "observed": float(outcome.mean())}
    values["nll"] = float(-(classwise * log_p).sum(axis=1).mean())
    return values


Counts = dict[str, tuple[int, int]]
"""By name: how often an interval covered or a test rejected, and how often it was defined, for either method."""


def measure(world: World, seeds: range, truth: Mapping[str, float], *, n_resamples: int = 1000) -> Counts:
    """Count covering intervals and rejections of one world.

    "interval of X" counts the intervals that hold the true value of X. "test X" counts the rejections of calibrated
    predictions at 5 %. "difference in X" counts how often `compare` calls two equally good methods different.
    """
    is_calibrated = world.temperature == 1
    outcomes: dict[str, list[bool]] = {}

    def count(name: str, result: bool) -> None:
        outcomes.setdefault(name, []).append(bool(result))

    for seed in seeds:
        data = draw(world, np.random.default_rng([seed, 7]))
        options = data.options | {"n_resamples": n_resamples, "seed": seed}
        scores = compare({str(i): (z, data.labels) for i, z in enumerate(data.logits)}, **options)
        for name, change in scores.changes["1"].items():
            count(f"difference in {name}", change.low > 0 or change.high < 0)
        for method, test in scores.tests.items():
            for name in DEFAULT if not world.event else EVENT_DEFAULT:
                interval = scores[method, name]
                if is_calibrated and name in ONE_SIDED:
                    count(f"interval of {name}", interval.low <= ALMOST_ZERO)
                elif math.isfinite(interval.low):
                    count(f"interval of {name}", interval.low <= truth[name] <= interval.high)
            for name, p in {**test.components, "verdict": test.p_value}.items() if is_calibrated else ():
                count(f"test {name}", p <= 0.05)
    return {name: (sum(each), len(each)) for name, each in outcomes.items()}


def total(blocks: Sequence[Counts]) -> Counts:
    """Add the counts of blocks."""
    names = list(dict.fromkeys(name for block in blocks for name in block))
    return {name: tuple(sum(block.get(name, (0, 0))[i] for block in blocks) for i in (0, 1)) for name in names}


def page(counts: Mapping[str, Counts], data_sets: int, n_resamples: int) -> str:
    """Lay out the measured rates as a page of one table."""
    error = {rate: 2 * math.sqrt(rate * (1 - rate) / data_sets) for rate in (MIN_COVERAGE, MAX_REJECTIONS)}
    low, high = MIN_COVERAGE - error[MIN_COVERAGE], MAX_REJECTIONS + error[MAX_REJECTIONS]
    rows: dict[str, dict[str, str]] = {}
    missed: dict[str, list[str]] = {}
    for world, counted in counts.items():
        for name, (hits, n) in counted.items():
            rate = hits / n
            off = rate < low if name.startswith("interval") else rate > high
            rows.setdefault(name, {})[world] = f"{100 * rate:.1f}{'*' if off else ''}"
            if off:
                missed.setdefault(world, []).append(name)
    ordered = sorted(rows, key=lambda row: ("interval", "test", "difference").index(row.split()[0]))
    cells = [["", *(str(k + 1) for k in range(len(counts)))]]
    cells += [[row, *(rows[row].get(name, "") for name in counts)] for row in ordered]
    few = [world.name for world in WORLDS if world.mean < -2 and world.n * 0.03 < MIN_EVENTS]
    enough = {world: names for world, names in missed.items() if world not in few}
    return TEXT.format(
        origin=made_from(),
        data_sets=f"{data_sets:,}",
        resamples=f"{n_resamples:,}",
        low=100 * low,
        high=100 * high,
        zero=ALMOST_ZERO,
        few="; ".join(few) or "none",
        conclusion="; ".join(f"{world} ({', '.join(names)})" for world, names in enough.items()) or "none",
        worlds="\n".join(f"{k + 1}. {name}" for k, name in enumerate(counts)),
        table=table(cells),
    )


TEXT = """# Coverage of intervals and level of tests

Made from {origin} by `make bench-coverage`, with at least {data_sets} simulated data sets per world and {resamples}
resamples. No number is typed by hand. The worlds are:

{worlds}

T 1.25 means that the log-odds or logits of the predictions are 1.25 times too large. Each data set has two methods with
equal true metrics. Rows of intervals and tests count both methods.

- An *interval* row shows how often the 95 % interval of `evaluate` held the true value, in per cent. Errors of
  calibrated data are zero: they count as covered if the interval starts at {zero} or below.
- A *test* row shows how often a test at 5 % rejected calibrated data. "verdict" is the combination of all tests.
- A *difference* row shows how often `compare` called two methods with equal true metrics different.

A star marks a coverage below {low:.1f} % or a rejection above {high:.1f} %: 93 % and 7 % with two Monte-Carlo errors.
Stars outside worlds with fewer than ten expected events: {conclusion}. Fewer than ten events are expected in: {few}.

{table}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the worlds and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=1000, help="a multiple of 50")
    parser.add_argument("--resamples", type=int, default=1000, help="resamples per interval and test")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--worlds", type=str, default="", help="numbers of worlds to run, such as 1,3; by default all")
    parser.add_argument("--store", type=Path, default=STORE, help="file of the counts; delete it to start anew")
    options = parser.parse_args(arguments)
    worlds = [WORLDS[int(k) - 1] for k in options.worlds.split(",")] if options.worlds else list(WORLDS)
    truths = {world.name: true_values(world) for world in worlds}
    if options.small:
        for world in worlds:
            print(world.name, measure(world, range(2), truths[world.name], n_resamples=50), sep="\n  ")
        return
    options.store.parent.mkdir(parents=True, exist_ok=True)
    done = {(record["world"], record["block"]) for record in stored(options.store, options.resamples)}
    for block in range(options.replications // BLOCK):
        for world in worlds:
            if (world.name, block) in done:
                continue
            seeds = range(block * BLOCK, (block + 1) * BLOCK)
            counts = measure(world, seeds, truths[world.name], n_resamples=options.resamples)
            line = json.dumps({"world": world.name, "block": block, "n_resamples": options.resamples, "counts": counts})
            with options.store.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    blocks_wanted = options.replications // BLOCK
    records = [record for record in stored(options.store, options.resamples) if record["block"] < blocks_wanted]
    blocks = {world.name: [r["counts"] for r in records if r["world"] == world.name] for world in WORLDS}
    if data_sets := BLOCK * min(len(each) for each in blocks.values()):
        counts = {name: total(each) for name, each in blocks.items()}
        PAGE.write_text(page(counts, data_sets, options.resamples), encoding="utf-8")


def stored(path: Path, n_resamples: int) -> list[dict[str, Any]]:
    """Read the lines of the store with this number of resamples."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["n_resamples"] == n_resamples]


if __name__ == "__main__":
    main()
