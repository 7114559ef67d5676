"""How often intervals by cluster and by row hold the truth, by simulation: sets of images whose pixels err together.

    python benchmarks/clusters.py            500 sets of 20 images in each world, some minutes
    python benchmarks/clusters.py --small    a smoke run of seconds; its shares mean nothing

Labels are drawn from the network's own probabilities, but the draws of one image go together (a Gaussian copula), so
that it is calibrated and yet an image's errors are common. Worlds make it too sure, let images differ in how sure they
are, or in size. The truth is that of 30,000 images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from trueup.convert import as_event
from trueup.metrics.hypothesis_tests import consistency_of_tally
from trueup.metrics.intervals import ScoredRows, intervals
from trueup.metrics.resampling import Resampling

METRICS = ("accuracy", "confidence", "nll", "brier", "ece", "rmsce", "aece", "sce")
EVENT = ("observed", "nll", "event_brier", "miscalibration", "ece", "auroc", "calibration_slope", "ici")
BAR = 0.92


class World(NamedTuple):
    """Images of four classes: what is said is `sharpness` times what is true, and more or less so in each image."""

    name: str
    sharpness: float = 1.0
    spread: float = 0.0
    """Of the logarithm of how sure an image should be."""
    unequal: bool = False
    event: bool = False


WORLDS = (
    World("calibrated"),
    World("too sure", sharpness=1.6),
    World("images differ", sharpness=1.2, spread=0.5),
    World("images of unequal size", sharpness=1.3, spread=0.5, unequal=True),
    World("one class as an event", sharpness=1.3, spread=0.5, event=True),
)


class Shares(NamedTuple):
    """How often intervals held the truth, by cluster and by row, and how often calibration was rejected."""

    by_cluster: dict[str, float]
    by_row: dict[str, float]
    rejected: float


def draw_images(
    images: int, pixels: int, world: World, *, classes: int = 4, common: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels and the image of each pixel; `common` is the correlation of an image's draws."""
    rng = np.random.default_rng(seed)
    size = np.full(images, pixels)
    if world.unequal:
        size = np.maximum((pixels * rng.lognormal(0.0, 0.6, images)).astype(int), 8)
    image = np.repeat(np.arange(images), size)
    z = rng.normal(size=(images, classes))[image] + 1.5 * rng.normal(size=(len(image), classes))
    shared = rng.normal(size=(images, classes))[image]
    u = ndtr(np.sqrt(common) * shared + np.sqrt(1 - common) * rng.normal(size=z.shape))
    gumbel = -np.log(-np.log(np.clip(u, 1e-15, 1 - 1e-15)))
    sure = np.exp(world.spread * rng.normal(size=images))[image][:, None]
    y = (z * sure + gumbel).argmax(axis=1)
    said = world.sharpness * z
    return (*as_event(said, y, 1), image) if world.event else (said, y, image)


def true_values(world: World, images: int) -> dict[str, float]:
    """Of very many images; a calibration error that cannot be told from 0 is 0."""
    names = EVENT if world.event else METRICS
    scored = ScoredRows.of(*draw_images(images, 32, world, seed=10**6)[:2])
    values = scored.values(names)
    found = intervals(scored.tally, values, Resampling(n_resamples=200), scored=scored)
    noisy = ("ece", "rmsce", "aece", "sce", "miscalibration", "ici")
    return {
        name: value if name not in noisy else 0.0 if found[name].low == 0 else (found[name].low + found[name].high) / 2
        for name, value in values.items()
    }


def simulate(
    world: World, *, sets: int, images: int = 20, pixels: int = 256, population: int = 30_000, seed: int = 0
) -> Shares:
    """Draw sets of images and hold the truth against their intervals."""
    truth = true_values(world, population)
    held = {kind: dict.fromkeys(truth, 0) for kind in ("cluster", "row")}
    rejected = 0
    for number in range(sets):
        z, y, image = draw_images(images, pixels, world, seed=seed + 1000 * (1 + WORLDS.index(world)) + number)
        for kind, clusters in (("cluster", image), ("row", None)):
            scored = ScoredRows.of(z, y, clusters=clusters)
            resampling = Resampling(n_resamples=300, seed=number)
            for name, found in intervals(scored.tally, scored.values(truth), resampling, scored=scored).items():
                held[kind][name] += found.low - 1e-9 <= truth[name] <= found.high + 1e-9
            if clusters is not None:
                rejected += consistency_of_tally(scored.tally, resampling).p_value <= 0.05
    shares = {kind: {name: count / sets for name, count in counts.items()} for kind, counts in held.items()}
    return Shares(shares["cluster"], shares["row"], rejected / sets)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--world", action="append", choices=[world.name for world in WORLDS])
    options = parser.parse_args(arguments)
    sets, population = (3, 500) if options.small else (options.sets, 30_000)
    missed = 0
    for world in WORLDS:
        if options.world and world.name not in options.world:
            continue
        found = simulate(world, sets=sets, images=options.images, population=population)
        print(f"\n{world.name}: {sets} sets of {options.images} images; calibration rejected in {found.rejected:.1%}")
        print(f"{'metric':20}{'by cluster':>12}{'by row':>10}")
        for name, share in found.by_cluster.items():
            low = share < BAR
            missed += low
            print(f"{name:20}{share:12.1%}{found.by_row[name]:10.1%}{'  below the bar' if low else ''}", flush=True)
    return 0 if options.small else missed


if __name__ == "__main__":
    raise SystemExit(main())
