"""Wrong passes and wrong failures of `check`, by simulation with the true metric at the limit and next to it.

    python benchmarks/gate.py                      2,000 data sets per world, written to docs/check-errors.csv
    python benchmarks/gate.py --worlds 0 2         some worlds only; the file keeps the others
    python benchmarks/gate.py --small              a smoke run of seconds, printed only

A pass is wrong if the true metric is beyond its limit, a failure if it is not. Exactly at the limit both are counted.
The limits next to it are half a standard error away. True values are those of 400,000 rows with their exact
probabilities as outcomes. The last row of a world checks all limits at once, each at its true value.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax, ndtr, softmax

from measured import fill, table
from trueup.metrics import check

DOCS = Path(__file__).parents[1] / "docs"
TABLE, PAGE = DOCS / "check-errors.csv", DOCS / "how-to" / "check.md"
POPULATION_ROWS = 400_000
N_GROUPS = 4
MAX_ERRORS = 0.05
COLUMNS = ("world", "rows", "metric", "data_sets", "passes_beyond", "passes_at", "failures_at", "failures_within")
METRICS = {"ece": "maximum", "nll": "maximum", "groups": "maximum", "accuracy": "minimum"}
EVENT_METRICS = {"ece": "maximum", "nll": "maximum", "groups": "maximum", "auroc": "minimum"}
CORRELATION = 0.3
"""Correlation of the latent outcomes of two rows of a cluster."""


class World(NamedTuple):
    """Distribution of a data set."""

    name: str
    n: int
    temperature: float
    """Factor of the logits; above 1 they are overconfident."""
    shift: float = 0.0
    """Change of the first logit that the predictions miss in one of the groups."""
    log_odds: float | None = None
    """Mean log-odds of an event; without it there are three classes."""
    cluster_size: int = 0
    """Rows per cluster, if outcomes are correlated."""

    @property
    def metrics(self) -> dict[str, str]:
        """The metrics with a limit, and the argument of each limit."""
        return METRICS if self.log_odds is None else EVENT_METRICS


WORLDS = (
    World("overconfident", 1000, 1.5),
    World("overconfident, one worse group", 1000, 1.5, 1.0),
    World("nearly calibrated", 1000, 1.1),
    World("overconfident, 200 rows", 200, 1.5),
    World("rare event", 2000, 1.3, log_odds=-4.0),
    World("50 clusters of 20 rows", 1000, 1.5, cluster_size=20),
    World("a handful of rare events", 150, 1.3, log_odds=-4.0),
)


class Data(NamedTuple):
    """Predictions, true probabilities and groups."""

    logits: np.ndarray
    truth: np.ndarray
    groups: np.ndarray


def draw(world: World, rows: int, rng: np.random.Generator) -> Data:
    """Draw rows."""
    z, groups = 1.5 * rng.normal(size=(rows, 3)), rng.integers(0, N_GROUPS, rows)
    if world.log_odds is not None:
        z = np.stack([np.zeros(rows), world.log_odds + z[:, 0]], axis=1)
    shift = world.shift * (groups == 0)[:, None] * np.eye(z.shape[1])[0]
    return Data(world.temperature * z, softmax(z - shift, axis=1), groups)


def draw_labels(world: World, truth: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Draw labels, and return the cluster of each row if outcomes are correlated."""
    latent, clusters = rng.normal(size=len(truth)), None
    if world.cluster_size:
        clusters = np.arange(len(truth)) // world.cluster_size
        common = rng.normal(size=clusters[-1] + 1)[clusters]
        latent = np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * latent
    return (ndtr(latent)[:, None] > truth.cumsum(axis=1)[:, :-1]).sum(axis=1), clusters


def true_values(world: World) -> dict[str, float]:
    """Return the metrics of a large population, without the noise of labels."""
    data = draw(world, POPULATION_ROWS, np.random.default_rng(0))
    log_q, at = log_softmax(data.logits, axis=1), np.arange(POPULATION_ROWS)
    watched = log_q.argmax(axis=1) if world.log_odds is None else np.ones(POPULATION_ROWS, int)
    confidence, right = np.exp(log_q[at, watched]), data.truth[at, watched]
    bins = np.ceil(15 * confidence).astype(int) - 1
    gaps = np.bincount(bins, right - confidence)
    by_group = np.bincount(data.groups, right - confidence) / np.bincount(data.groups)
    order = np.argsort(confidence)
    lower = np.cumsum(1 - right[order]) - (1 - right[order]) / 2
    return {
        "ece": float(np.abs(gaps).sum() / POPULATION_ROWS),
        "nll": float(-(data.truth * log_q).sum(axis=1).mean()),
        "groups": float(np.abs(by_group).max()),
        "accuracy": float(right.mean()),
        "auroc": float(right[order] @ lower / (right.sum() * (1 - right).sum())),
    }


def measure(world: World, replications: int, n_resamples: int) -> dict[str, list[int]]:
    """Count by metric: passes beyond the limit, passes and failures at it, failures within it."""
    truth, counts = true_values(world), {metric: [0, 0, 0, 0] for metric in (*world.metrics, "all at once")}
    half_error: dict[str, float] = {}
    joint_limits: dict[str, dict[str, float]] = {"maximum": {}, "minimum": {}}
    for metric, side in world.metrics.items():
        joint_limits[side][metric] = truth[metric]
    for seed in range(replications):
        rng = np.random.default_rng([seed, world.n])
        data = draw(world, world.n, rng)
        labels, clusters = draw_labels(world, data.truth, rng)
        options: dict[str, Any] = {"n_resamples": n_resamples, "clusters": clusters}
        for metric, side in world.metrics.items():
            groups = data.groups if metric == "groups" else None
            limits = {side: {metric: truth[metric]}}
            result = check(data.logits, labels, groups=groups, **options, **limits).limits[0]
            half = half_error.setdefault(metric, (result.high - result.low) / 8)
            # The interval does not depend on the limit, so it also decides at the limits next to it.
            good, bad = (result.high, result.low) if side == "maximum" else (-result.low, -result.high)
            limit = truth[metric] if side == "maximum" else -truth[metric]
            hits = good <= limit - half, result.outcome == "passed", result.outcome == "failed", bad > limit + half
            counts[metric] = [count + hit for count, hit in zip(counts[metric], hits, strict=True)]
        joint = check(data.logits, labels, groups=data.groups, **options, **joint_limits).outcome
        counts["all at once"][1] += joint == "passed"
        counts["all at once"][2] += joint == "failed"
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the worlds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=2000)
    parser.add_argument("--resamples", type=int, default=300)
    parser.add_argument("--worlds", type=int, nargs="+", default=range(len(WORLDS)))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    replications = 3 if options.small else options.replications
    rows: dict[str, list[dict[str, Any]]] = {}
    if not options.small and TABLE.exists():
        with TABLE.open(newline="") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["world"], []).append(row)
    print("| world | metric | passes beyond | passes at | failures at | failures within |\n|---|---|--:|--:|--:|--:|")
    for world in (WORLDS[i] for i in options.worlds):
        rows[world.name] = []
        for metric, counts in measure(world, replications, options.resamples).items():
            shares = [round(count / replications, 4) for count in counts]
            rows[world.name].append(
                dict(zip(COLUMNS, (world.name, world.n, metric, replications, *shares), strict=True))
            )
            print(f"| {world.name} | {metric} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |", flush=True)
        if not options.small:
            with TABLE.open("w", newline="") as file:
                out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                out.writeheader()
                out.writerows(row for of_world in rows.values() for row in of_world)
    print(f"\n{summary(rows)}\n\nBar: {100 * MAX_ERRORS:g} %")
    if not options.small:
        fill(PAGE, summary(rows))


def summary(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the largest shares over the metrics of each world, in per cent, as a table."""
    cells = [["world", "rows", "data sets", "wrong passes", "wrong failures"]]
    for name, of_world in rows.items():
        shares = [
            max(100 * float(row[share]) for row in of_world for share in pair)
            for pair in (("passes_beyond", "passes_at"), ("failures_at", "failures_within"))
        ]
        n, data_sets = (f"{int(of_world[0][column]):,}" for column in ("rows", "data_sets"))
        cells.append([name, n, data_sets, *(f"{share:.1f}" for share in shares)])
    return table(cells)


if __name__ == "__main__":
    main()
