"""What a study's rows show, as frozen records: when samples were learned, exponents, starts, and shifted inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.clamping.ablation import AblationRow
from trueup.clamping.shift_benchmark import ShiftBenchmarkRow
from trueup.models.shift import ShiftRow
from trueup.training.history import History
from trueup.training.learned import MaxLogits, max_logits

__all__ = [
    "GammaSweep",
    "LearnedEpochs",
    "MaxLogits",
    "ShiftCurves",
    "Starts",
    "gamma_sweep",
    "learned_epochs",
    "max_logits",
    "shift_curves",
    "starts",
]


@dataclass(frozen=True, eq=False)
class LearnedEpochs:
    """In which epochs the training samples were learned, for one or several runs."""

    names: tuple[str, ...]
    edges: np.ndarray
    """Halfway between whole epochs, so that every epoch lies inside one bin."""
    counts: np.ndarray
    """(runs, bins): samples learned."""
    never: np.ndarray
    """(runs,): samples that were wrong at the end."""
    means: np.ndarray
    """(runs,): the mean learned epoch of those that were learned; NaN if none was."""


@dataclass(frozen=True, eq=False)
class GammaSweep:
    """What the focal loss's exponent does to a clamped network, the mean where there are several fits of one."""

    gammas: np.ndarray
    ece: np.ndarray
    loss: np.ndarray
    """The objective at the end of the fit, on the calibration data."""
    entropy: np.ndarray
    """In nats."""


@dataclass(frozen=True, eq=False)
class Starts:
    """One metric of fits from several starts, with as many seeds as were run."""

    metric: str
    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class ShiftCurves:
    """One metric along the severity of a shift."""

    metric: str
    severities: np.ndarray
    series: Mapping[str, np.ndarray]
    """By name, one entry a severity; NaN where none was measured."""


def learned_epochs(runs: Mapping[str, Any], *, bins: int = 30) -> LearnedEpochs:
    """Histograms of the epochs in which samples were learned: the first from which on each stayed right.

    `runs` has each run's `History`, or what its `learned_epochs` gave, by name. There are at most `bins` bins, each
    of as many whole epochs.

    >>> record = learned_epochs({"cross-entropy": [1, 1, 2, np.inf], "focal": [2, 4, 4, 4]})
    >>> record.edges, record.counts.tolist(), record.never, record.means.round(4)
    (array([0.5, 1.5, 2.5, 3.5, 4.5]), [[2, 1, 0, 0], [0, 1, 0, 3]], array([1, 0]), array([1.3333, 3.5   ]))

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks, figure 4.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    epochs = [_epochs(name, run) for name, run in runs.items()]
    known = [found[np.isfinite(found)] for found in epochs]
    last = int(max((found.max() for found in known if len(found)), default=1))
    width = -(-last // bins)
    edges = np.arange(0.5, last + width, width)
    counts = np.array([np.histogram(found, edges)[0] for found in known], dtype=np.int64).reshape(-1, len(edges) - 1)
    never = np.array([np.isinf(found).sum() for found in epochs], dtype=np.int64)
    return LearnedEpochs(tuple(runs), edges, counts, never, np.array([_mean(found) for found in known]))


def gamma_sweep(rows: Iterable[AblationRow]) -> GammaSweep:
    """ECE, loss and entropy along the exponent γ, from the rows of fits at several γ.

    >>> def row(gamma, ece):
    ...     return AblationRow("", 0.9, 0.5, 0.3, ece, 0.0, 0.0, 1.2, 0.1, gamma, 0.4, 0)
    >>> record = gamma_sweep([row(1.0, 0.04), row(0.0, 0.02), row(1.0, 0.06)])
    >>> record.gammas, record.ece.round(4)
    (array([0., 1.]), array([0.02, 0.05]))

    Tang et al., "Neural Clamping" (2024), figure 2.
    """
    groups = _grouped(rows, lambda row: row.gamma)
    gammas = sorted(groups)
    ece, loss, entropy = (
        np.array([_mean([getattr(row, name) for row in groups[gamma]]) for gamma in gammas])
        for name in ("ece", "loss", "entropy")
    )
    return GammaSweep(np.array(gammas), ece, loss, entropy)


def starts(rows: Iterable[AblationRow], metric: str = "ece") -> Starts:
    """One metric by start, a number a seed, from the rows of `clamping.ablation.compare_starts`.

    >>> def row(start, ece):
    ...     return AblationRow(start, 0.9, 0.5, 0.3, ece, 0.0, 0.0, 1.2, 0.1, 1.0, 0.4, 0)
    >>> record = starts([row("random", 0.04), row("data", 0.02), row("random", 0.06)])
    >>> record.names, [found.tolist() for found in record.values]
    (('random', 'data'), [[0.04, 0.06], [0.02]])

    Tang et al., "Neural Clamping" (2024), figure 3.
    """
    groups = _grouped(rows, lambda row: row.method)
    return Starts(metric, tuple(groups), tuple(_column(group, metric) for group in groups.values()))


def shift_curves(
    rows: Iterable[ShiftRow] | Iterable[ShiftBenchmarkRow] | Mapping[str, Iterable[ShiftRow]], metric: str = "ece"
) -> ShiftCurves:
    """One metric along severities.

    Of the rows of `shift.evaluate_shift`, a curve a corruption; of such rows by method, or of those of
    `clamping.repair.repair`, a curve a method, the mean over corruptions.

    >>> rows = [ShiftRow("haze", s, 0.9, 0.3, ece, 0.5) for s, ece in ((0, 0.02), (1, 0.05))]
    >>> more = [ShiftRow("jpeg", 1, 0.9, 0.3, 0.07, 0.5)]
    >>> shift_curves([*rows, *more]).series
    {'haze': array([0.02, 0.05]), 'jpeg': array([ nan, 0.07])}
    >>> shift_curves({"raw": [*rows, *more]}).series["raw"].round(4)
    array([0.02, 0.06])

    Ovadia et al., "Can you trust your model's uncertainty?" (2019).
    """
    groups: dict[str, list[Any]]
    if isinstance(rows, Mapping):
        groups = {name: list(group) for name, group in rows.items()}
    else:
        groups = _grouped(rows, lambda row: row.method if isinstance(row, ShiftBenchmarkRow) else row.corruption)
    severities = sorted({row.severity for group in groups.values() for row in group})
    series = {}
    for name, group in groups.items():
        at = _grouped(group, lambda row: row.severity)
        series[name] = np.array([_mean(_column(at.get(severity, []), metric)) for severity in severities])
    return ShiftCurves(metric, np.array(severities), series)


def _epochs(name: str, run: Any) -> np.ndarray:
    epochs = run.learned_epochs() if isinstance(run, History) else np.asarray(run, dtype=np.float64)
    if epochs.ndim != 1 or not (epochs >= 1).all():
        raise ValueError(f"runs[{name!r}] must be learned epochs (n,), from 1 on, or infinite for those never learned")
    return epochs


def _grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _column(rows: list[Any], metric: str) -> np.ndarray:
    for row in rows:
        if not isinstance(getattr(row, metric, None), (int, float)):
            there = [name for name, value in vars(row).items() if isinstance(value, float)]
            raise ValueError(f"metric must be one of {', '.join(there)}, got {metric!r}")
    return np.array([getattr(row, metric) for row in rows], dtype=np.float64)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
