"""How often intervals of groups hold together, and how often groups that are alike are said to differ, by simulation.

    python benchmarks/groups.py            the whole run, some minutes
    python benchmarks/groups.py --small    a smoke run of seconds; its shares mean nothing

Groups of 30 to 3,000 rows, base rates of .05 to .5, scores that are right, off by a number a group, or too sure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from trueup.metrics.groups import evaluate_groups

SIZES = 30, 3000
RATES = 0.05, 0.5
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(80)
_SHARES = _SHARES / _SHARES.sum()


class World(NamedTuple):
    """Log-odds of the truth: slope · (those of the score) + a shift a group; scores spread about the base rate."""

    name: str
    spread: float
    slope: float
    shift: float
    alike: bool
    """Whether groups differ in nothing that a common recalibration does not explain."""
    weighted: bool = False


WORLDS = (
    World("right", 1.0, 1.0, 0.0, True),
    World("one score a group", 0.0, 1.0, 0.0, True),
    World("off by group", 1.0, 1.0, 0.4, False),
    World("too sure", 1.5, 0.5, 0.0, True),
    World("too sure, off by group", 1.5, 0.5, 0.4, False),
    World("right, weighted", 1.0, 1.0, 0.0, True, weighted=True),
)


class Shares(NamedTuple):
    """Of simulations: all intervals held, and the groups were said to differ at 5 %; and the mean half-width."""

    together: float
    differ: float
    width: float


def simulate(world: World, *, simulations: int, groups: int = 20, seed: int = 0) -> Shares:
    """Draw groups, and hold their true differences against the intervals."""
    rng = np.random.default_rng(seed)
    together = differ = 0
    widths = []
    for _ in range(simulations):
        sizes = np.exp(rng.uniform(*np.log(SIZES), groups)).astype(int)
        centre = logit(rng.uniform(*RATES, groups))
        shift = rng.normal(0, world.shift, groups)
        group = np.repeat(np.arange(groups), sizes)
        odds = centre[group] + world.spread * rng.normal(size=len(group))
        truth = expit(world.slope * odds + shift[group])
        outcome = rng.random(len(group)) < truth
        weights = rng.gamma(2.0, size=len(group)) if world.weighted else None
        table = evaluate_groups(expit(odds), outcome, group, sample_weight=weights)
        nodes = centre[:, None] + world.spread * _NODES
        delta = (expit(world.slope * nodes + shift[:, None]) - expit(nodes)) @ _SHARES
        found = [table[g].difference for g in range(groups)]
        together += all(i.low <= d <= i.high for i, d in zip(found, delta, strict=True))
        differ += table.heterogeneity[""] <= 0.05
        widths.append(np.mean([(i.high - i.low) / 2 for i in found]))
    return Shares(together / simulations, differ / simulations, float(np.mean(widths)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate every world and print its shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smoke run")
    small = parser.parse_args(arguments).small
    print(f"{'groups':26}{'intervals hold':>16}{'said to differ':>16}{'half-width':>12}")
    for world in WORLDS:
        found = simulate(world, simulations=10 if small else 1000)
        print(f"{world.name:26}{found.together:>16.3f}{found.differ:>16.3f}{found.width:>12.4f}", flush=True)


if __name__ == "__main__":
    main()
