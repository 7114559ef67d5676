"""Coverage of the intervals of `judge_rate`, by simulation.

    python benchmarks/judges.py                      2,000 data sets per world, written to docs/judges-coverage.csv
    python benchmarks/judges.py --replications 500   fewer data sets
    python benchmarks/judges.py --small              a smoke run of seconds, printed only

Rates of right answers are 0.03 to 0.97. A judge is informative, lenient, harsh, useless or always says right, and gives
0 or 1, or scores. People label 50 to 500 answers, and the judge 3 to 5 times as many others. Some worlds have
correlated answers to each question, or strata with different shares of human labels. The lowest share of many is low
by chance, so a world below its bar is measured again with ten times as many data sets.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr

from measured import fill, table
from trueup.decisions import judge_rate

DOCS = Path(__file__).parents[1] / "docs"
TABLE, PAGE = DOCS / "judges-coverage.csv", DOCS / "how-to" / "judges.md"
JUDGES = {
    "informative": (0.95, 0.9),
    "lenient": (0.98, 0.5),
    "harsh": (0.7, 0.97),
    "useless": (0.6, 0.4),
    "constant": (1.0, 0.0),
}
"""Sensitivity and specificity."""
RATES = 0.03, 0.5, 0.7, 0.9, 0.97
MIN_COVERAGE = {50: 0.91, 100: 0.93}
"""Bars by the number of human labels."""
ESTIMATES = {"ppi": "PPI++", "rogan_gladen": "Rogan–Gladen", "people": "people alone", "error": "judge's error"}
STRATA = np.array([0.5, 0.3, 0.2])
"""Shares of the strata, whose rates differ."""
LABELS_BY_STRATUM = (28, 55, 37), (60, 54, 6)
"""Numbers of human labels: a smaller share of the first stratum, or very few of the last."""
CORRELATION = 0.3
"""Correlation of the latent quality of two answers to one question."""


class World(NamedTuple):
    """Distribution of a data set."""

    judge: str
    rate: float
    labels: int
    """Number of human labels."""
    times: int
    """Number of other answers, as a multiple of the human labels."""
    scores: bool = False
    questions: int = 0
    """Number of answers per question, if answers are correlated."""
    whole: bool = False
    """Whether people label all answers to some questions, instead of random answers."""
    strata: tuple[int, ...] = ()
    """Number of human labels in each stratum."""


def worlds() -> Iterator[World]:
    """Return all worlds."""
    for judge, rate, labels in product(JUDGES, RATES, (50, 100, 200)):
        yield World(judge, rate, labels, 5)
    for judge, rate in product(list(JUDGES)[:-1], RATES):
        yield World(judge, rate, 100, 5, scores=True)
    for judge, rate, whole in product(("informative", "lenient", "useless"), (0.5, 0.9), (False, True)):
        yield World(judge, rate, 500, 3, questions=10, whole=whole)
    for judge, rate, strata in product(("informative", "lenient", "useless"), (0.5, 0.85), LABELS_BY_STRATUM):
        yield World(judge, rate, sum(strata), 5, strata=strata)


def draw(world: World, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Draw judge's labels, human labels with NaN, and options."""
    n, total = world.labels, world.labels * (1 + world.times)
    rate, options = np.full(total, world.rate), {}
    noise, slips = rng.normal(size=(2, total))
    labelled = np.arange(total) < n
    if world.questions:
        question = np.arange(total) // world.questions
        common = rng.normal(size=(2, question[-1] + 1))[:, question]
        noise, slips = (
            np.sqrt(CORRELATION) * each + np.sqrt(1 - CORRELATION) * individual
            for each, individual in zip(common, (noise, slips), strict=True)
        )
        options["clusters"] = question
        labelled = labelled if world.whole else rng.permutation(labelled)
    if world.strata:
        stratum = np.repeat(np.arange(3), np.rint(STRATA * total).astype(int))
        rate = world.rate + np.array([-0.1, 0.1, 0.1])[stratum]
        labelled = np.arange(total) - np.searchsorted(stratum, stratum) < np.array(world.strata)[stratum]
        options["strata"] = stratum
    right = ndtr(noise) < rate
    sensitivity, specificity = JUDGES[world.judge]
    yes = np.where(right, sensitivity, 1 - specificity)
    judge = rng.beta(4 * yes, 4 * (1 - yes)) if world.scores else (ndtr(slips) < yes).astype(float)
    return judge, np.where(labelled, right, np.nan), options


def truth(world: World) -> float:
    """Return the true rate."""
    return world.rate + (float(STRATA @ (-0.1, 0.1, 0.1)) if world.strata else 0.0)


def bar(world: World) -> float:
    """Return the smallest coverage that is allowed."""
    return MIN_COVERAGE[min(world.labels, 100)]


def measure(world: World, replications: int) -> dict[str, float]:
    """Return the shares of data sets whose intervals hold the truth, and mean half-widths."""
    shares = measure_once(world, replications)
    if replications >= 1000 and min(shares[name] for name in ESTIMATES) < bar(world):
        return measure_once(world, 10 * replications)
    return shares


def measure_once(world: World, replications: int) -> dict[str, float]:
    """Return the shares over a number of data sets."""
    rate, counts = truth(world), dict.fromkeys(("ppi", "people", "error", "rogan_gladen", "undefined"), 0)
    sensitivity, specificity = JUDGES[world.judge]
    bias = rate * sensitivity + (1 - rate) * (1 - specificity) - rate
    widths = np.zeros(2)
    for seed in range(replications):
        judge, human, options = draw(world, np.random.default_rng([seed, world.labels, world.times]))
        result = judge_rate(judge, human, **options)
        other = judge_rate(judge, human, method="rogan-gladen", **options)
        counts["ppi"] += result.rate.low <= rate <= result.rate.high
        counts["people"] += result.people_alone.low <= rate <= result.people_alone.high
        counts["error"] += result.judge_error.low <= bias <= result.judge_error.high
        counts["rogan_gladen"] += other.rate.low <= rate <= other.rate.high
        counts["undefined"] += other.method == "ppi"
        widths += [(i.high - i.low) / 2 for i in (result.rate, result.people_alone)]
    shares = {name: count / replications for name, count in counts.items()}
    half_widths = {"half_width": widths[0] / replications, "half_width_people": widths[1] / replications}
    return {"data_sets": replications, **shares, **half_widths}


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Return the lowest coverage of each estimate by the number of human labels, as a table."""
    cells = [["human labels", "worlds", *ESTIMATES.values(), "bar"]]
    for labels, of_group in (("50", [50]), ("100", [100, 120]), ("200 or 500", [200, 500])):
        some = [record for record in records if int(record["labels"]) in of_group]
        lowest = (min((float(record[name]) for record in some), default=1.0) for name in ESTIMATES)
        least = MIN_COVERAGE[min(*of_group, 100)]
        cells.append([labels, str(len(some)), *(f"{100 * each:.1f} %" for each in lowest), f"{100 * least:.0f} %"])
    return table(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the worlds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=2000)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = list(worlds())[:: 30 if options.small else 1]
    replications = 5 if options.small else options.replications
    with ProcessPoolExecutor(options.workers) as pool:
        results = list(pool.map(partial(measure, replications=replications), chosen))
    records = [world._asdict() | result for world, result in zip(chosen, results, strict=True)]
    print(summary(records))
    if not options.small:
        with TABLE.open("w", newline="") as file:
            out = csv.DictWriter(file, list(records[0]), lineterminator="\n")
            out.writeheader()
            out.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in records)
        fill(PAGE, summary(records))


if __name__ == "__main__":
    main()
