"""Is a network calibrated, and is it calibratable: what a post-hoc method can still gain after a training loss."""

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
    """What was trained: a loss, its coefficient (0 where it has none) and the seed of the run."""

    loss: str
    coefficient: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class CalibratabilityRow:
    """One run on the test half, raw and after post-hoc calibration, which is fitted on the validation half."""

    loss: str
    coefficient: float
    seed: int
    accuracy: float
    nll: float
    ece: float
    """Raw: low if the network is calibrated."""
    ece_temperature: float
    """After the temperature of 0.01 … 10 with the least validation ECE: low if it is calibratable."""
    ece_histogram: float
    """After histogram binning of the confidence, in 15 bins of equal width."""
    ece_temperature_histogram: float
    """After that temperature, then histogram binning."""
    temperature: float
    val_ece: float
    """Raw, on the validation half, as the next: by these a coefficient may be chosen."""
    val_nll: float


@dataclass(frozen=True)
class SizeRow:
    """The test half after calibration on `size` validation samples, in one of several draws of them."""

    size: int
    repeat: int
    ece_temperature: float
    ece_histogram: float
    ece_temperature_histogram: float
    temperature: float


def list_settings(coefficients: Mapping[str, Sequence[float]], *, seeds: Iterable[int]) -> list[LossSetting]:
    """Every loss with each of its coefficients and every seed.

    >>> list_settings({"cross_entropy": [0], "focal": [1, 3]}, seeds=[0])[1:]
    [LossSetting(loss='focal', coefficient=1, seed=0), LossSetting(loss='focal', coefficient=3, seed=0)]
    """
    all_seeds = list(seeds)
    return [LossSetting(loss, c, seed) for loss, values in coefficients.items() for c in values for seed in all_seeds]


def measure_calibratability(
    runs: Mapping[tuple[str, float, int], Any] | Callable[[LossSetting], Any],
    wanted: Iterable[tuple[str, float, int]] | None = None,
) -> tuple[CalibratabilityRow, ...]:
    """Measure each run raw, after temperature scaling, and after histogram binning.

    A run is its two halves (val, test), each `logits, labels`, or the result of `train`. `runs` has them by (loss,
    coefficient, seed), or is a function that trains a setting, called for each of `wanted`. `study.tables.tabulate`
    makes a table of the rows: mean ± standard deviation over the seeds.

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
        if wanted is None:
            raise ValueError("wanted must name the settings to train when runs is a function, got None")
        return tuple(_row(setting, runs(setting)) for setting in (LossSetting(*key) for key in wanted))
    keys = runs if wanted is None else wanted
    return tuple(_row(LossSetting(*key), runs[key]) for key in keys)


def validation_sizes(
    val: tuple[Any, Any], test: tuple[Any, Any], *, sizes: Sequence[int] | None = None, repeats: int = 5, seed: int = 0
) -> tuple[SizeRow, ...]:
    """Calibration error after post-hoc calibration on fewer validation samples.

    Each repeat draws an order, and a size takes its first samples, so that a larger one holds the smaller. The sizes
    are 50, 100, 200, 500, 1,000, 2,000 and 5,000 as far as there are samples, unless given.

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
            f"{setting.loss} {setting.coefficient:g}, seed {setting.seed}: val and test must be there, got None"
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
    """Test ECE after temperature, after histogram binning and after both in this order, and the temperature."""
    z, y = as_arrays(*val)
    logits, labels = as_arrays(*test)
    scaled = Temperature.fit_ece_wide(z, y)
    after = metrics.ece(scaled(logits), labels)
    raw, both = (_binned_ece((f(z), y), (f(logits), labels)) for f in (lambda x: x, scaled))
    return after, raw, both, float(scaled.temperature)


def _binned_ece(val: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    binned = Histogram.fit(*val, bins=BINS)
    # The confidence itself: in a row of log-probabilities it would be kept away from 0 and 1.
    # In double precision, for frequencies such as 3/5 lie on the edges of bins.
    return Bins.of_scores(binned.confidence(test[0].astype(np.float64)), scores_and_outcomes(*test)[1]).ece()
