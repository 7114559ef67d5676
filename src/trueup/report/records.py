"""What one network's logits show, as frozen records of numbers: whoever draws them computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.calibrators.temperature_search import inverse_temperature
from trueup.core.arrays import as_tensors
from trueup.core.bins import BINNED_ERRORS, BINS, Bins, equal_width, rounding_error
from trueup.core.loss_sums import temperature_sums
from trueup.core.row_scores import confidences as confidences_of
from trueup.core.row_scores import confidences_and_hits
from trueup.core.tally import Tally
from trueup.metrics import ranking
from trueup.metrics.hypothesis_tests import consistency_of_tally
from trueup.metrics.table import Scores
from trueup.models import shift

_POINTS, _FEW, _MANY = 61, 25, 10_000_000  # temperatures of a sweep; fewer for more than so many logits


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence in bins, with the band in which a calibrated network's accuracy would lie."""

    edges: np.ndarray
    """Of the bins, one more than there are bins; the other arrays have one entry a bin, NaN where it is empty."""
    count: np.ndarray
    confidence: np.ndarray
    """The mean in each bin."""
    accuracy: np.ndarray
    low: np.ndarray
    """Ends of the band."""
    high: np.ndarray
    level: float
    """The chance with which a calibrated network's accuracy lies in the band, bin by bin."""
    ece: float
    rows: int


@dataclass(frozen=True, eq=False)
class Confidences:
    """How often the network was how sure, right and wrong predictions apart."""

    edges: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    """Numbers of rows, as are those of `right`."""
    mean: float
    """Mean confidence."""
    accuracy: float


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate among the most certain rows, for the share of rows kept."""

    coverage: np.ndarray
    risk: np.ndarray
    aurc: float
    """The area under the curve, of all rows."""
    best: np.ndarray
    """The risk if every error came last: nobody can do better at this accuracy."""
    best_aurc: float


@dataclass(frozen=True, eq=False)
class ClassErrors:
    """The calibration error of each class."""

    names: tuple[str, ...]
    error: np.ndarray
    """Of the class's probability against its occurrence, in bins; their mean is the class-wise error of the table."""
    said: np.ndarray
    """Mean probability of the class."""
    seen: np.ndarray
    """How often the class occurred, as a share of the rows."""


@dataclass(frozen=True, eq=False)
class TemperatureSweep:
    """What dividing the logits by each temperature does."""

    temperatures: np.ndarray
    nll: np.ndarray
    ece: np.ndarray
    best_nll: float
    """The temperature of least NLL, of all positive numbers."""
    best_ece: float
    """The temperature of least ECE, of those swept."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """One metric of several methods on the same rows, with intervals, and how much each differs from the first."""

    metric: str
    methods: tuple[str, ...]
    value: np.ndarray
    low: np.ndarray
    """Ends of the interval of the true metric, which for binned errors may lie below the value; NaN if unknown."""
    high: np.ndarray
    change: np.ndarray
    """Less the first method's, paired; NaN for the first itself."""
    change_low: np.ndarray
    change_high: np.ndarray
    level: float


def reliability(
    logits: Any, labels: Any, *, bins: int = BINS, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Reliability:
    """The reliability diagram's numbers: accuracy and mean confidence in each bin of confidence.

    The band holds the middle `level` of Σ_i B_i / n_b over a bin's rows, B_i drawn right with chance c_i, the row's own
    confidence: what a calibrated network with these confidences would show.

    >>> record = reliability(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]), [0, 1, 1, 0], bins=2)
    >>> record.count, record.confidence.round(4), record.accuracy, f"{record.ece:.4f}"
    (array([0., 4.]), array([ nan, 0.75]), array([ nan, 0.75]), '0.0000')

    Bröcker and Smith (2007).
    """
    tally = Tally.of(logits, labels, bins=bins)
    test, top = consistency_of_tally(tally, level=level, n_resamples=resamples, seed=seed), tally.top
    seen = top.count, top.mean_confidence, top.accuracy, test.low, test.high
    return Reliability(equal_width(bins), *seen, level, top.ece(), tally.n)


def confidences(logits: Any, labels: Any, *, bins: int = 20) -> Confidences:
    """How many predictions of each confidence were right, and how many wrong.

    >>> record = confidences(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), [0, 1, 1], bins=4)
    >>> record.right, record.wrong, f"{record.mean:.4f} {record.accuracy:.4f}"
    (array([0., 0., 1., 1.]), array([0., 0., 0., 1.]), '0.8000 0.6667')
    """
    tally = Bins.of(logits, labels, bins=bins)
    n = tally.n or np.nan
    mean, accuracy = float(tally.confidence.sum() / n), float(tally.hits.sum() / n)
    return Confidences(tally.edges, tally.hits, tally.count - tally.hits, mean, accuracy)


def risk_coverage(logits: Any, labels: Any, *, points: int = 200) -> RiskCoverage:
    """The error rate R_k among the k most certain rows at evenly spread shares k/n, beside that of the best order.

    The area is (1/n) Σ_k R_k over all rows, whatever the number of points.

    >>> record = risk_coverage(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 1, 0, 1], points=2)
    >>> record.coverage, record.risk, record.best, f"{record.aurc:.4f}"
    (array([0.25, 1.  ]), array([0. , 0.5]), array([0. , 0.5]), '0.3333')

    Geifman, Uziel and El-Yaniv (2019).
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    z, y = as_tensors(logits, labels)
    curve = ranking.risk_coverage(z, y)
    n = len(curve.risk)
    wrong = np.repeat([0.0, 1.0], [n - (errors := round(n * curve.risk[-1]) if n else 0), errors])
    ideal = shift.risk_coverage_of(wrong, wrong)  # doubt that knows the errors
    at = np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(np.int64))
    return RiskCoverage(curve.coverage[at], curve.risk[at], curve.area(), ideal.risk[at], ideal.area())


def class_errors(logits: Any, labels: Any, *, bins: int = BINS, names: Sequence[str] | None = None) -> ClassErrors:
    """The calibration error of each class's probability: Σ_b (n_kb/n) |acc_kb − conf_kb| for class k.

    >>> record = class_errors(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]), [0, 0, 1], names=["cat", "dog"])
    >>> for row in zip(record.names, record.error, record.said, record.seen):
    ...     print("{} {:.4f} {:.4f} {:.4f}".format(*row))
    cat 0.3333 0.8000 0.6667
    dog 0.3333 0.2000 0.3333

    Nixon et al., "Measuring calibration in deep learning" (2019), called static calibration error there.
    """
    tally = Bins.of(logits, labels, bins=bins, classwise=True)
    classes = len(tally.count)
    named = tuple(str(k) for k in range(classes)) if names is None else tuple(map(str, names))
    if len(named) != classes:
        raise ValueError(f"names must have {classes} entries, one a class, got {len(named)}")
    n = tally.n or np.nan
    error = BINNED_ERRORS["ece"](tally.count, tally.confidence, tally.hits) if tally.n else np.full(classes, np.nan)
    return ClassErrors(named, error, tally.confidence.sum(axis=1) / n, tally.hits.sum(axis=1) / n)


def temperature_sweep(
    logits: Any, labels: Any, *, temperatures: Sequence[float] | None = None, bins: int = BINS
) -> TemperatureSweep:
    """NLL and ECE of softmax(z/T) along a range of temperatures.

    By default they rise in equal ratios and reach from a third of the lesser of 1 and the best T to three times the
    greater.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> record = temperature_sweep(2.5 * z, y)
    >>> f"{record.temperatures[0]:.2f} {record.temperatures[-1]:.2f} {record.best_nll:.4f}"
    '0.33 7.56 2.5187'

    Guo et al., "On calibration of modern neural networks" (2017).
    """
    z, y = as_tensors(logits, labels, at_least=1)
    best = 1 / inverse_temperature(z, y)[0]
    if temperatures is None:
        points = _POINTS if z.numel() <= _MANY else _FEW
        grid = np.geomspace(min(1.0, best) / 3, max(1.0, best) * 3, points)
    else:
        grid = np.array(temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not ((grid > 0) & np.isfinite(grid)).all():
            raise ValueError("temperatures must be a list of positive numbers")
    hits = confidences_and_hits(z, y, quick=True)[1]
    edges, unit = equal_width(bins), rounding_error(z)
    nll, ece = np.empty(len(grid)), np.empty(len(grid))
    for i, beta in enumerate((1 / grid).tolist()):
        nll[i] = temperature_sums(z, y, beta, quick=True)[0] / len(z)
        confidence, _ = confidences_of(z, beta=beta, quick=True)
        ece[i] = Bins.from_scores(confidence, hits, edges, rounding=unit).ece()
    return TemperatureSweep(grid, nll, ece, best, float(grid[ece.argmin()]))


def comparison(scores: Scores, metric: str = "ece") -> Comparison:
    """One metric of a table of methods, with its intervals, and the paired changes from the first method.

    >>> from trueup.metrics.table import compare
    >>> logits, labels = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 0, 1, 0]
    >>> record = comparison(compare(raw=(logits, labels), halved=(logits / 2, labels)), "nll")
    >>> record.methods, record.value.round(4), record.change.round(4)
    (('raw', 'halved'), array([0.5108, 0.5543]), array([   nan, 0.0435]))
    """
    if metric not in scores.metrics:
        raise ValueError(f"metric must be one of {', '.join(scores.metrics)}, got {metric!r}")
    values = [scores.values[name][metric] for name in scores.methods]
    changes = [found[metric] if (found := scores.changes.get(name)) else None for name in scores.methods]
    value, low, high = (np.array([getattr(v, key) for v in values]) for key in ("value", "low", "high"))
    by, by_low, by_high = (
        np.array([np.nan if c is None else getattr(c, key) for c in changes]) for key in ("value", "low", "high")
    )
    return Comparison(metric, scores.methods, value, low, high, by, by_low, by_high, scores.level)
