"""Calibration of a network before and after post-hoc methods, by training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trueup import metrics
from trueup._core.arrays import as_arrays
from trueup._core.bins import BINS, Bins
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.splits import random_order
from trueup.calibrators.binning import Histogram
from trueup.calibrators.temperature import Temperature

SIZES = (50, 100, 200, 500, 1000, 2000, 5000)


class LossSetting(NamedTuple):
    """One training: a loss, its coefficient (0 if it has none) and the seed."""

    loss: str
    coefficient: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class CalibratabilityRow:
    """Scores of one run on the test half, raw and after post-hoc calibration on the validation half."""

    loss: str
    coefficient: float
    seed: int
    accuracy: float
    nll: float
    ece: float
    """Raw ECE: low if the network is calibrated."""
    ece_temperature: float
    """After the temperature in 0.01 … 10 with the lowest validation ECE: low if the network is calibratable."""
    ece_histogram: float
    """After histogram binning of the confidence, in 15 bins of equal width."""
    ece_temperature_histogram: float
    """After that temperature and then histogram binning."""
    temperature: float
    val_ece: float
    """Raw validation ECE; like `val_nll`, it can choose a coefficient."""
    val_nll: float


@dataclass(frozen=True)
class SizeRow:
    """Scores on the test half after calibration on one random draw of `size` validation samples."""

    size: int
    repeat: int
    ece_temperature: float
    ece_histogram: float
    ece_temperature_histogram: float
    temperature: float


def list_settings(coefficients: Mapping[str, Sequence[float]], *, seeds: Iterable[int]) -> list[LossSetting]:
    """List every loss with each of its coefficients and every seed.

    >>> list_settings({"cross_entropy": [0], "focal": [1, 3]}, seeds=[0])[1:]
    [LossSetting(loss='focal', coefficient=1, seed=0), LossSetting(loss='focal', coefficient=3, seed=0)]
    """
    all_seeds = list(seeds)
    return [LossSetting(loss, c, seed) for loss, values in coefficients.items() for c in values for seed in all_seeds]


def measure_calibratability(
    runs: Mapping[tuple[str, float, int], Any] | Callable[[LossSetting], Any],
    settings: Iterable[tuple[str, float, int]] | None = None,
) -> tuple[CalibratabilityRow, ...]:
    """Measure each run raw, after temperature scaling, and after histogram binning.

    A run is its two halves (val, test), each `logits, labels`, or the result of `train`. `runs` maps (loss,
    coefficient, seed) to runs, or is a function that trains one of `settings`. `trueup_studies.tables.tabulate` makes
    a table of the rows: mean ± standard deviation over the seeds.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> sure = (3 * z[:2000], y[:2000]), (3 * z[2000:], y[2000:])
    >>> [row] = measure_calibratability({("cross_entropy", 0.0, 0): sure})
    >>> f"{row.ece:.4f} {row.ece_temperature:.4f} {row.ece_histogram:.4f} {row.temperature:.2f}"
    '0.2935 0.0237 0.0269 3.24'

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    if callable(runs):
        if settings is None:
            raise ValueError("settings must name the losses to train when runs is a function, got None")
        return tuple(_row(setting, runs(setting)) for setting in (LossSetting(*key) for key in settings))
    keys = runs if settings is None else settings
    return tuple(_row(LossSetting(*key), runs[key]) for key in keys)


def validation_sizes(
    val: tuple[Any, Any], test: tuple[Any, Any], *, sizes: Sequence[int] | None = None, repeats: int = 5, seed: int = 0
) -> tuple[SizeRow, ...]:
    """Measure the calibration error after post-hoc calibration on fewer validation samples.

    Each repeat draws an order, and each size takes its first samples, so larger sizes include smaller ones. The default
    sizes are 50, 100, 200, 500, 1,000, 2,000 and 5,000, up to the number of samples.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> for row in validation_sizes((3 * z[:2000], y[:2000]), (3 * z[2000:], y[2000:]), sizes=[50, 2000], repeats=1):
    ...     print(f"{row.size} {row.ece_temperature:.4f} {row.ece_histogram:.4f}")
    50 0.0717 0.1764
    2000 0.0237 0.0269
    """
    z, y = as_arrays(*val)
    n = len(y)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    sizes = [size for size in SIZES if size <= n] if sizes is None else list(sizes)
    if wrong := [size for size in sizes if not 1 <= size <= n]:
        raise ValueError(f"sizes must lie in 1..{n}, the validation samples, got {wrong[0]}")
    rows = []
    for repeat in range(repeats):
        order = random_order(n, np.random.default_rng([seed, repeat]))
        rows += [SizeRow(size, repeat, *_calibrate((z[order[:size]], y[order[:size]]), test)) for size in sizes]
    return tuple(sorted(rows, key=lambda row: (row.size, row.repeat)))


def _row(setting: LossSetting, run: Any) -> CalibratabilityRow:
    val, test = (run.val, run.test) if hasattr(run, "val") else run
    if val is None or test is None:
        raise ValueError(
            f"{setting.loss} {setting.coefficient:g}, seed {setting.seed}: val and test are required, got None"
        )
    after_temperature, after_histogram, after_both, temperature = _calibrate(val, test)
    return CalibratabilityRow(
        *setting,
        accuracy=metrics.accuracy(*test),
        nll=metrics.nll(*test),
        ece=metrics.ece(*test),
        ece_temperature=after_temperature,
        ece_histogram=after_histogram,
        ece_temperature_histogram=after_both,
        temperature=temperature,
        val_ece=metrics.ece(*val),
        val_nll=metrics.nll(*val),
    )


def _calibrate(val: tuple[Any, Any], test: tuple[Any, Any]) -> tuple[float, float, float, float]:
    """Return the test ECE after temperature, after histogram binning and after both, and the temperature."""
    z, y = as_arrays(*val)
    logits, labels = as_arrays(*test)
    scaled = Temperature.fit_ece_wide(z, y)
    after = metrics.ece(scaled(logits), labels)
    raw, both = (_binned_ece((f(z), y), (f(logits), labels)) for f in (lambda x: x, scaled))
    return after, raw, both, float(scaled.temperature)


def _binned_ece(val: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    binned = Histogram.fit(*val, bins=BINS)
    # Score the confidence, since log-probabilities keep it away from 0 and 1. Use double precision, since frequencies
    # such as 3/5 lie on the edges of bins.
    return Bins.of_scores(binned.confidence(test[0].astype(np.float64)), scores_and_outcomes(*test)[1]).ece()
