"""What maps by group cost where groups are small, and how near they come to separate fits where they are large.

    python benchmarks/group_repair.py            the whole run, some minutes
    python benchmarks/group_repair.py --small    a smoke run of seconds

Log-loss on fresh rows of the same groups: of one map for all, of `per_group`, and of separate fits. Groups are alike,
or differ in how sure the scores are and how high.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from trueup import METHODS, metrics
from trueup.calibrators.groupwise import per_group

FITS = "temperature", "platt", "svs"


class Losses(NamedTuple):
    """Mean log-loss on fresh rows."""

    pooled: float
    mixed: float
    separate: float


def draw(groups: int, size: int, differ: float, rng: np.random.Generator) -> list[tuple[np.ndarray, ...]]:
    """Scores (0, odds), labels and groups of a calibration set and of a test set of the same groups."""
    slope, shift = np.exp(rng.normal(-0.4, differ / 2, groups)), rng.normal(0.3, differ, groups)
    parts = []
    for rows in (size, max(2000 // groups, 200)):
        group = np.repeat(np.arange(groups), rows)
        odds = rng.normal(-0.5, 1.5, len(group))
        labels = (rng.random(len(group)) < expit(slope[group] * odds + shift[group])).astype(np.int64)
        parts.append((np.stack([np.zeros_like(odds), odds], axis=1), labels, group))
    return parts


def compare(fit: str, *, groups: int, size: int, differ: float, simulations: int, seed: int = 0) -> Losses:
    """The three on several draws."""
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(simulations):
        (z, y, g), (new, answers, of) = draw(groups, size, differ, rng)
        pooled = METHODS[fit](z, y)(new)
        mixed = per_group(fit)(z, y, groups=g)(new, groups=of)
        separate = mixed.copy()
        if size >= 100:
            for k in range(groups):
                separate[of == k] = METHODS[fit](z[g == k], y[g == k])(new[of == k])
        losses.append([metrics.nll(out, answers) for out in (pooled, mixed, separate)])
    return Losses(*np.mean(losses, axis=0).tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smoke run")
    small = parser.parse_args(arguments).small
    print(f"{'method':14}{'groups':>8}{'rows each':>11}{'differ':>8}{'pooled':>9}{'by group':>10}{'separate':>10}")
    for fit in FITS:
        for groups, size, simulations in ((20, 20, 200), (50, 20, 100), (10, 5000, 20)):
            for differ in (0.0, 0.2, 0.6):
                number = 2 if small else simulations
                found = compare(fit, groups=groups, size=size, differ=differ, simulations=number)
                apart = f"{found.separate:10.4f}" if size >= 100 else f"{'–':>10}"
                told = f"{fit:14}{groups:>8}{size:>11}{differ:>8.1f}{found.pooled:>9.4f}{found.mixed:>10.4f}{apart}"
                print(told, flush=True)


if __name__ == "__main__":
    main()
