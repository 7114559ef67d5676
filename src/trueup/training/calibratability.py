"""Is a network calibrated, and is it still calibratable? What a loss leaves for a repair to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import stdtr

from trueup import metrics
from trueup.calibrators.histogram import Histogram
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import as_tensors
from trueup.core.bins import BINS, Bins
from trueup.core.row_scores import confidences_and_hits

SIZES = (50, 100, 200, 500, 1000, 2000, 5000)
FIGURES = ("accuracy", "nll", "ece", "ece_temperature", "ece_histogram", "temperature")
"""What is summed up over seeds."""
Selector: TypeAlias = Literal["val_ece", "val_nll", "ece"]


class Setting(NamedTuple):
    """What was trained: a loss, its coefficient (0 where it has none) and the seed of the run."""

    loss: str
    coefficient: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One run on the test half, before a repair and after it; repairs are fitted on the validation half."""

    loss: str
    coefficient: float
    seed: int
    accuracy: float
    nll: float
    ece: float
    """As the network says it: low if it is calibrated."""
    ece_temperature: float
    """After the temperature of 0.01 … 10 with the least validation ECE: low if it is calibratable."""
    ece_histogram: float
    """After histogram binning of the confidence, in 15 bins of equal width."""
    temperature: float
    val_ece: float
    """Before a repair, on the validation half, as the next: by these a coefficient may be chosen."""
    val_nll: float


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    std: float
    """Of the sample, so NaN of one seed."""
    p_value: float
    """Of the two-sample t-test against the reference's seeds; NaN where there is none."""
    mark: Literal["higher", "lower", ""]
    """Than the reference, if the test says so."""


@dataclass(frozen=True)
class Summary:
    """A loss with one coefficient, over its seeds."""

    loss: str
    coefficient: float
    seeds: int
    figures: Mapping[str, Spread]
    """By the names in `FIGURES`."""


@dataclass(frozen=True)
class Sensitivity:
    """How the figures of a loss depend on its coefficient."""

    loss: str
    summaries: tuple[Summary, ...]
    """By rising coefficient."""
    chosen: float
    """The coefficient with the least mean of the selector."""


@dataclass(frozen=True)
class SizeRow:
    """What repairs fitted on so many validation samples, drawn for the so-manieth time, make of the test half."""

    size: int
    repeat: int
    ece_temperature: float
    ece_histogram: float
    temperature: float


def settings(coefficients: Mapping[str, Sequence[float]], *, seeds: Iterable[int]) -> list[Setting]:
    """Every loss with each of its coefficients and every seed.

    >>> settings({"cross_entropy": [0], "focal": [1, 3]}, seeds=[0])[1:]
    [Setting(loss='focal', coefficient=1, seed=0), Setting(loss='focal', coefficient=3, seed=0)]
    """
    drawn = list(seeds)
    return [Setting(loss, value, seed) for loss, values in coefficients.items() for value in values for seed in drawn]


def calibratability(
    runs: Mapping[tuple[str, float, int], Any] | Callable[[Setting], Any],
    wanted: Iterable[tuple[str, float, int]] | None = None,
) -> tuple[Row, ...]:
    """Measure each run raw, after temperature scaling, and after histogram binning.

    A run is its two halves (val, test), each `logits, labels`, or what `train` gave. `runs` has them by (loss,
    coefficient, seed), or is a function that trains the setting it is given, called for those of `wanted` one by one.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> sure = (3 * z[:2000], y[:2000]), (3 * z[2000:], y[2000:])
    >>> [row] = calibratability({("cross_entropy", 0.0, 0): sure})
    >>> f"{row.ece:.4f} {row.ece_temperature:.4f} {row.ece_histogram:.4f} {row.temperature:.2f}"
    '0.2935 0.0237 0.0269 3.24'

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    if callable(runs):
        if wanted is None:
            raise ValueError("wanted must name the settings to train when runs is a function, got None")
        return tuple(_row(setting, runs(setting)) for setting in (Setting(*key) for key in wanted))
    keys = runs if wanted is None else wanted
    return tuple(_row(Setting(*key), runs[key]) for key in keys)


def summarise(
    rows: Iterable[Row], *, reference: tuple[str, float] = ("cross_entropy", 0.0), level: float = 0.05
) -> tuple[Summary, ...]:
    """Mean ± standard deviation over the seeds, with marks where a two-sample t-test tells a loss from the reference.

    t = (m₁ − m₂) / (s√(1/n₁ + 1/n₂)) on n₁ + n₂ − 2 degrees of freedom, s² the pooled variance; two-sided.

    >>> def row(loss, ece):
    ...     return Row(loss, 0.0, 0, 0.9, 0.3, ece, 0.01, 0.01, 1.5, 0.05, 0.3)
    >>> rows = [row("cross_entropy", 0.05), row("cross_entropy", 0.06), row("brier", 0.02), row("brier", 0.03)]
    >>> for summary in summarise(rows):
    ...     ece = summary.figures["ece"]
    ...     print(f"{summary.loss} {ece.mean:.4f} ± {ece.std:.4f}, p {ece.p_value:.4f} {ece.mark}".strip())
    cross_entropy 0.0550 ± 0.0071, p nan
    brier 0.0250 ± 0.0071, p 0.0513
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.loss, row.coefficient), []).append(row)
    if groups and reference not in groups:
        there = ", ".join(f"{loss} {coefficient:g}" for loss, coefficient in groups)
        raise ValueError(f"reference must be one of {there}, got {reference[0]} {reference[1]:g}")
    return tuple(
        _summary(key, group, None if key == reference else groups[reference], level) for key, group in groups.items()
    )


def sensitivity(rows: Iterable[Row], *, by: Selector = "val_ece") -> tuple[Sensitivity, ...]:
    """The figures of each loss along its coefficients, with the coefficient that the validation half prefers.

    `by="ece"` is the oracle, which looks at the test half: for replicating results that were chosen so.

    >>> seen = ((3, 0.04, 0.03), (1, 0.03, 0.05))
    >>> rows = [Row("focal", gamma, 0, 0.9, 0.3, ece, 0.01, 0.01, 1.5, val_ece, 0.3) for gamma, ece, val_ece in seen]
    >>> [found] = sensitivity(rows)
    >>> [s.coefficient for s in found.summaries], found.chosen, sensitivity(rows, by="ece")[0].chosen
    ([1, 3], 3, 1)
    """
    if by not in ("val_ece", "val_nll", "ece"):
        raise ValueError(f'by must be "val_ece", "val_nll" or "ece", got {by!r}')
    ordered = sorted(rows, key=lambda row: (row.loss, row.coefficient))
    found = []
    for loss, members in groupby(ordered, key=lambda row: row.loss):
        parts = [(c, list(group)) for c, group in groupby(members, key=lambda row: row.coefficient)]
        means = {c: float(np.mean([getattr(row, by) for row in group])) for c, group in parts}
        summaries = tuple(_summary((loss, c), group, None, 0.05) for c, group in parts)
        found.append(Sensitivity(loss, summaries, min(means, key=means.__getitem__)))
    return tuple(found)


def validation_sizes(
    val: tuple[Any, Any],
    test: tuple[Any, Any],
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    seed: int = 0,
) -> tuple[SizeRow, ...]:
    """What a repair is worth when it sees fewer validation samples.

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
    z, y = as_tensors(*val)
    there = len(y)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    chosen = [size for size in SIZES if size <= there] if sizes is None else list(sizes)
    if wrong := [size for size in chosen if not 1 <= size <= there]:
        raise ValueError(f"sizes must lie in 1..{there}, the validation samples, got {wrong[0]}")
    found = []
    for repeat in range(repeats):
        order = np.random.default_rng([seed, repeat]).permutation(there)
        found += [SizeRow(size, repeat, *_repaired((z[order[:size]], y[order[:size]]), test)) for size in chosen]
    return tuple(sorted(found, key=lambda row: (row.size, row.repeat)))


def _row(setting: Setting, run: Any) -> Row:
    val, test = (run.val, run.test) if hasattr(run, "val") else run
    if val is None or test is None:
        raise ValueError(
            f"{setting.loss} {setting.coefficient:g}, seed {setting.seed}: val and test must be there, got None"
        )
    after_temperature, after_histogram, temperature = _repaired(val, test)
    return Row(
        *setting,
        accuracy=metrics.accuracy(*test),
        nll=metrics.nll(*test),
        ece=metrics.ece(*test),
        ece_temperature=after_temperature,
        ece_histogram=after_histogram,
        temperature=temperature,
        val_ece=metrics.ece(*val),
        val_nll=metrics.nll(*val),
    )


def _repaired(val: tuple[Any, Any], test: tuple[Any, Any]) -> tuple[float, float, float]:
    """Test ECE after temperature and after histogram binning, and the temperature."""
    scaled, binned = Temperature.fit_ece_wide(*val), Histogram.fit(*val, bins=BINS)
    logits, labels = as_tensors(*test)
    # The confidence itself: in a row of log-probabilities it would be kept away from 0 and 1.
    # In double precision, for frequencies such as 3/5 lie on the edges of bins.
    confidence = binned.confidence(logits.double())
    after = (
        metrics.ece(scaled(logits), labels),
        Bins.of_scores(confidence, confidences_and_hits(logits, labels)[1]).ece(),
    )
    return *after, float(scaled.temperature)


def _summary(key: tuple[str, float], group: list[Row], reference: list[Row] | None, level: float) -> Summary:
    figures = {}
    for name in FIGURES:
        ours = np.array([getattr(row, name) for row in group])
        theirs = None if reference is None else np.array([getattr(row, name) for row in reference])
        p = math.nan if theirs is None else t_test(ours, theirs)
        mark: Literal["higher", "lower", ""] = ""
        if theirs is not None and p < level:
            mark = "higher" if ours.mean() > theirs.mean() else "lower"
        figures[name] = Spread(float(ours.mean()), _std(ours), p, mark)
    return Summary(*key, len(group), figures)


def _std(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else math.nan


def t_test(a: np.ndarray, b: np.ndarray) -> float:
    """The two-sided p-value, with pooled variance; of two constants 1 if they are equal, else 0."""
    freedom = len(a) + len(b) - 2
    if min(len(a), len(b)) < 2:
        return math.nan
    gap = float(a.mean() - b.mean())
    pooled = (a.var() * len(a) + b.var() * len(b)) / freedom
    if pooled == 0:
        return 1.0 if gap == 0 else 0.0
    return float(2 * stdtr(freedom, -abs(gap) / math.sqrt(pooled * (1 / len(a) + 1 / len(b)))))
