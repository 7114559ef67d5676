"""Wrong passes and wrong failures of `check`, by simulation with the true metric at the limit and next to it.

    python benchmarks/gate.py                      2,000 data sets per world, printed as a table
    python benchmarks/gate.py --worlds 0 2         some worlds only
    python benchmarks/gate.py --small              a smoke run of seconds

A pass is wrong if the true metric is beyond its limit, a failure if it is not. Exactly at the limit both are counted.
The limits next to it are half a standard error away. True values are those of 400,000 rows with their exact
probabilities as outcomes. The last row of a world checks all limits at once, each at its true value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax, softmax

from trueup.metrics import check

POPULATION_ROWS = 400_000
N_GROUPS = 4
MAX_ERRORS = 0.05
METRICS = {"ece": "maximum", "nll": "maximum", "groups": "maximum", "accuracy": "minimum"}


class World(NamedTuple):
    """Distribution of a data set."""

    name: str
    n: int
    temperature: float
    """Factor of the logits; above 1 they are overconfident."""
    shift: float = 0.0
    """Change of the first logit that the predictions miss in one of the groups."""


WORLDS = (
    World("overconfident", 1000, 1.5),
    World("overconfident, one worse group", 1000, 1.5, 1.0),
    World("nearly calibrated", 1000, 1.1),
    World("overconfident, 200 rows", 200, 1.5),
)


class Data(NamedTuple):
    """Predictions, true probabilities and groups."""

    logits: np.ndarray
    truth: np.ndarray
    groups: np.ndarray


def draw(world: World, rows: int, rng: np.random.Generator) -> Data:
    """Draw rows."""
    z, groups = 1.5 * rng.normal(size=(rows, 3)), rng.integers(0, N_GROUPS, rows)
    shift = world.shift * (groups == 0)[:, None] * np.array([1.0, 0.0, 0.0])
    return Data(world.temperature * z, softmax(z - shift, axis=1), groups)


def true_values(world: World) -> dict[str, float]:
    """Return the metrics of a large population, without the noise of labels."""
    data = draw(world, POPULATION_ROWS, np.random.default_rng(0))
    log_q, at = log_softmax(data.logits, axis=1), np.arange(POPULATION_ROWS)
    top = log_q.argmax(axis=1)
    confidence, right = np.exp(log_q[at, top]), data.truth[at, top]
    bins = np.ceil(15 * confidence).astype(int) - 1
    gaps = np.bincount(bins, right - confidence)
    by_group = np.bincount(data.groups, right - confidence) / np.bincount(data.groups)
    return {
        "ece": float(np.abs(gaps).sum() / POPULATION_ROWS),
        "nll": float(-(data.truth * log_q).sum(axis=1).mean()),
        "groups": float(np.abs(by_group).max()),
        "accuracy": float(right.mean()),
    }


def measure(world: World, replications: int, n_resamples: int) -> dict[str, list[int]]:
    """Count by metric: passes beyond the limit, passes and failures at it, failures within it."""
    truth, counts = true_values(world), {metric: [0, 0, 0, 0] for metric in (*METRICS, "all at once")}
    half_error: dict[str, float] = {}
    joint_limits = {side: {m: truth[m] for m, of in METRICS.items() if of == side} for side in ("maximum", "minimum")}
    for seed in range(replications):
        rng = np.random.default_rng([seed, world.n])
        data = draw(world, world.n, rng)
        labels = (rng.random((world.n, 1)) > data.truth.cumsum(axis=1)).sum(axis=1).clip(max=2)
        for metric, side in METRICS.items():
            groups = data.groups if metric == "groups" else None
            limits = {side: {metric: truth[metric]}}
            result = check(data.logits, labels, groups=groups, n_resamples=n_resamples, **limits).limits[0]
            half = half_error.setdefault(metric, (result.high - result.low) / 8)
            # The interval does not depend on the limit, so it also decides at the limits next to it.
            good, bad = (result.high, result.low) if side == "maximum" else (-result.low, -result.high)
            limit = truth[metric] if side == "maximum" else -truth[metric]
            hits = good <= limit - half, result.outcome == "passed", result.outcome == "failed", bad > limit + half
            counts[metric] = [count + hit for count, hit in zip(counts[metric], hits, strict=True)]
        joint = check(data.logits, labels, groups=data.groups, n_resamples=n_resamples, **joint_limits).outcome
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
    print(
        "| world | metric | passes beyond | passes at | failures at | failures within |",
        "|---|---|--:|--:|--:|--:|",
        sep="\n",
    )
    highest = 0.0
    for world in (WORLDS[i] for i in options.worlds):
        for metric, counts in measure(world, replications, options.resamples).items():
            shares = [count / replications for count in counts]
            highest = max(highest, *shares)
            print(f"| {world.name} | {metric} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |", flush=True)
    print(f"\nHighest share of {replications:,} data sets: {100 * highest:.1f} % (bar {100 * MAX_ERRORS:g} %)")


if __name__ == "__main__":
    main()
