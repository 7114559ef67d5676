"""Figures that studies draw: each is a frozen record, the function that computes it, and its drawing by `draw`.

Learned epochs and greatest logits tell how a training loss treats easy and hard samples; exponents and starts belong to
Neural Clamping; shift curves show a metric along the severity of a corruption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup._core.arrays import as_logits, as_vector
from trueup.metrics import ranking
from trueup.models.shift import ShiftRow
from trueup.reports import figures, style
from trueup.reports.style import label
from trueup_studies.ablation import AblationRow
from trueup_studies.shift_benchmark import ShiftBenchmarkRow
from trueup_studies.training.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = len(style.SERIES)
"""As many curves can be distinguished; of more, the most extreme are named and the others drawn thin."""


@singledispatch
def draw(record: Any, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw a record of a study, or one of `trueup.reports`, on the axes given or on those of a new figure.

    The figure is `draw(record).figure`; `title=""` draws none.

    >>> ax = draw(learned_epochs({"cross-entropy": [1, 1, 2, np.inf]}))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Learned epoch', 'Training samples (%)')
    """
    return figures.draw(record, ax, title=title)


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
    known = [run[np.isfinite(run)] for run in epochs]
    last = int(max((run.max() for run in known if len(run)), default=1))
    width = -(-last // bins)
    edges = np.arange(0.5, last + width, width)
    counts = np.array([np.histogram(run, edges)[0] for run in known], dtype=np.int64).reshape(-1, len(edges) - 1)
    never = np.array([np.isinf(run).sum() for run in epochs], dtype=np.int64)
    return LearnedEpochs(tuple(runs), edges, counts, never, np.array([_mean(run) for run in known]))


def _epochs(name: str, run: Any) -> np.ndarray:
    epochs = run.learned_epochs() if isinstance(run, History) else np.asarray(run, dtype=np.float64)
    if epochs.ndim != 1 or not (epochs >= 1).all():
        raise ValueError(f"runs[{name!r}] must be learned epochs (n,), from 1 on, or infinite for those never learned")
    return epochs


@draw.register(LearnedEpochs)
def _draw_learned_epochs(record: LearnedEpochs, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A histogram a run, as outlines, in per cent of its samples."""
    ax = style.axes_for(ax)
    for index, name in enumerate(record.names):
        total = max(int(record.counts[index].sum() + record.never[index]), 1)
        words = f"{name}: mean {record.means[index]:.1f}, {100 * record.never[index] / total:.1f} % never"
        look = {key: value for key, value in style.line_style(index).items() if not key.startswith("marker")}
        ax.stairs(100 * record.counts[index] / total, record.edges, label=words, **look)
    ax.set(xlim=(record.edges[0], record.edges[-1]), ylim=(0, None))
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    if not record.names:
        style.write_empty(ax, "no runs")
    style.set_labels(
        ax, "When samples were learned" if title is None else title, "Learned epoch", "Training samples (%)"
    )
    style.legend(ax, loc="upper right")
    return ax


@dataclass(frozen=True)
class Band:
    """The greatest logits of the training samples that were learned in epochs first ≤ e ≤ last."""

    first: float
    last: float
    """Both infinite for the samples that were never learned."""
    count: np.ndarray
    """How many fall between each two edges."""


@dataclass(frozen=True)
class MaxLogits:
    """Greatest logits by learned epoch: wide and apart where a network distinguishes easy from hard samples."""

    edges: np.ndarray
    bands: tuple[Band, ...]
    range: float
    """95th percentile − 5th of the greatest logit, over all samples."""
    auc: float
    """The chance that a sample of the first band has a greater one than a sample of the last that was learned."""


def max_logits(logits: Any, learned: Any, *, bounds: Sequence[float] | None = None, bins: int = 30) -> MaxLogits:
    """Histograms of max_k z_k of the training samples, by the band of epochs in which each was learned.

    `learned` comes from `History.learned_epochs`. A band ends with each of `bounds`, and one with the last epoch; by
    default they are thirds of the samples that were learned. Those that never were have a band of their own, at the
    end. Logits are taken as they are: they must come from one network, in evaluation mode.

    >>> logits = [[9.0, 0.0], [8.0, 0.0], [5.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    >>> record = max_logits(logits, [1, 1, 2, 7, np.inf], bounds=[1], bins=2)
    >>> [(band.first, band.last, band.count.tolist()) for band in record.bands]
    [(1.0, 1.0, [0, 2]), (2.0, 7.0, [1, 1]), (inf, inf, [1, 0])]
    >>> f"{record.range:.4f} {record.auc:.4f}"
    '7.6000 1.0000'

    Wang, Feng & Zhang (2021), figure 5; the two numbers are ours.
    """
    z = as_logits(logits).astype(np.float64).max(axis=1)
    epochs = np.asarray(learned, dtype=np.float64)
    known = np.isfinite(epochs)
    as_vector(np.where(epochs == np.inf, 0.0, epochs), "learned", length=len(z))
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    seen = epochs[known]
    if bounds is None:
        bounds = np.quantile(seen, (1 / 3, 2 / 3), method="inverted_cdf").tolist() if len(seen) else []
    last = float(seen.max()) if len(seen) else 0.0
    ends = [*sorted({float(bound) for bound in bounds if bound < last}), last]
    edges = np.histogram_bin_edges(z, bins)
    groups = [z[known & (np.searchsorted(ends, epochs) == index)] for index in range(len(ends))]
    starts = [1.0, *(math.floor(end) + 1.0 for end in ends[:-1])]
    spans = [*zip(starts, ends, groups, strict=True), (math.inf, math.inf, z[~known])]
    bands = tuple(Band(a, b, np.histogram(group, edges)[0]) for a, b, group in spans if len(group))
    auc = math.nan
    apart = [group for group in groups if len(group)]
    if len(apart) > 1:
        first, final = apart[0], apart[-1]
        auc = ranking.roc_area(np.concatenate([first, final]), np.arange(len(first) + len(final)) < len(first))
    spread = float(np.subtract(*np.percentile(z, (95, 5)))) if len(z) else math.nan
    return MaxLogits(edges, bands, spread, auc)


@draw.register(MaxLogits)
def _draw_max_logits(record: MaxLogits, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A histogram a band of epochs, each in per cent of its own samples."""
    ax = style.axes_for(ax)
    for index, band in enumerate(record.bands):
        span = f"epoch {band.first:g}" if band.first == band.last else f"epochs {band.first:g}–{band.last:g}"
        words = f"{'never learned' if np.isinf(band.first) else span} ({band.count.sum():,})"
        shares = 100 * band.count / max(int(band.count.sum()), 1)
        ax.stairs(shares, record.edges, fill=True, label=words, linewidth=1.0, **style.fill_style(index))
    if not record.bands:
        style.write_empty(ax, "no samples")
    ax.set_ylim(0, None)
    style.set_labels(
        ax, "Greatest logit by learned epoch" if title is None else title, "Greatest logit", "Samples of the band (%)"
    )
    apart = "" if np.isnan(record.auc) else f", AUC {record.auc:.3f}"
    style.legend(ax, title=f"range {record.range:.2f}{apart}", alignment="left")
    return ax


@dataclass(frozen=True, eq=False)
class GammaSweep:
    """What the focal loss's exponent does to a clamped network, the mean where there are several fits of one."""

    gammas: np.ndarray
    ece: np.ndarray
    loss: np.ndarray
    """The objective at the end of the fit, on the calibration data."""
    entropy: np.ndarray
    """In nats."""
    stds: Mapping[str, np.ndarray]
    """The standard deviation over fits of ece, loss and entropy; NaN where there is one fit."""


def gamma_sweep(rows: Iterable[AblationRow]) -> GammaSweep:
    """ECE, loss and entropy along the exponent γ, from the rows of fits at several γ.

    >>> def row(gamma, ece):
    ...     return AblationRow("", 0.9, 0.5, 0.3, ece, 0.0, 0.0, 1.2, 0.1, gamma, 0.4, 0)
    >>> record = gamma_sweep([row(1.0, 0.04), row(0.0, 0.02), row(1.0, 0.06)])
    >>> record.gammas, record.ece.round(4), record.stds["ece"].round(4)
    (array([0., 1.]), array([0.02, 0.05]), array([   nan, 0.0141]))

    Tang et al., "Neural Clamping" (2024), figure 2.
    """
    groups = _group_by(rows, lambda row: row.gamma)
    gammas = sorted(groups)
    names = ("ece", "loss", "entropy")
    values = {name: [np.array([getattr(row, name) for row in groups[gamma]]) for gamma in gammas] for name in names}
    ece, loss, entropy = (np.array([_mean(fits) for fits in values[name]]) for name in names)
    stds = {name: np.array([fits.std(ddof=1) if len(fits) > 1 else np.nan for fits in values[name]]) for name in names}
    return GammaSweep(np.array(gammas), ece, loss, entropy, stds)


@draw.register(GammaSweep)
def _draw_gamma_sweep(record: GammaSweep, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """ECE on the left; loss and entropy, both in nats, on the right; a band of one standard deviation over fits."""
    ax = style.axes_for(ax)
    other = ax.twinx()
    for side, values, name, index in (
        (ax, record.ece, "ECE", 0),
        (other, record.loss, "loss", 1),
        (other, record.entropy, "entropy", 2),
    ):
        side.plot(record.gammas, values, **style.line_style(index), label=name)
        std = record.stds[name.lower()]
        side.fill_between(record.gammas, values - std, values + std, color=style.SERIES[index], alpha=0.15, linewidth=0)
    style.set_labels(ax, "Exponent of the focal loss" if title is None else title, "γ", "ECE")
    style.second_axis(ax, other, "Loss and entropy (nats)")
    return ax


@dataclass(frozen=True, eq=False)
class Starts:
    """One metric of fits from several starts, with as many seeds as were run."""

    metric: str
    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]


def starts(rows: Iterable[AblationRow], metric: str = "ece") -> Starts:
    """One metric by start, a number a seed, from the rows of `ablation.compare_starts`.

    >>> def row(start, ece):
    ...     return AblationRow(start, 0.9, 0.5, 0.3, ece, 0.0, 0.0, 1.2, 0.1, 1.0, 0.4, 0)
    >>> record = starts([row("random", 0.04), row("data", 0.02), row("random", 0.06)])
    >>> record.names, [values.tolist() for values in record.values]
    (('random', 'data'), [[0.04, 0.06], [0.02]])

    Tang et al., "Neural Clamping" (2024), figure 3.
    """
    groups = _group_by(rows, lambda row: row.method)
    return Starts(metric, tuple(groups), tuple(_column(group, metric) for group in groups.values()))


@draw.register(Starts)
def _draw_starts(record: Starts, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A box a start, and every fit as a point."""
    ax = style.axes_for(ax)
    values = [fits[np.isfinite(fits)] for fits in record.values]
    if values:
        line = {"color": style.text_color(ax), "linewidth": 0.9}
        boxes = ax.boxplot(
            values, widths=0.5, patch_artist=True, showfliers=False, medianprops=line, whiskerprops=line, capprops=line
        )
        for index, box in enumerate(boxes["boxes"]):
            box.set(linewidth=0.9, **style.fill_style(index))
        for index, fits in enumerate(values):
            point = {**style.line_style(index), "linestyle": "", "markeredgecolor": style.text_color(ax)}
            ax.plot(np.full(len(fits), index + 1.0), fits, **point, markeredgewidth=0.4, zorder=3)
    else:
        style.write_empty(ax, "no fits")
    words = "Fits from different starts" if title is None else title
    style.set_labels(ax, words, "Start", label(record.metric))
    names = [f"{style.shorten(name, 14)}\n({len(fits)})" for name, fits in zip(record.names, values, strict=True)]
    ax.set_xticks(range(1, len(names) + 1), labels=names)
    return ax


@dataclass(frozen=True, eq=False)
class ShiftCurves:
    """One metric along the severity of a shift."""

    metric: str
    severities: np.ndarray
    series: Mapping[str, np.ndarray]
    """By name, one entry a severity; NaN where none was measured."""


def shift_curves(
    rows: Iterable[ShiftRow] | Iterable[ShiftBenchmarkRow] | Mapping[str, Iterable[ShiftRow]], metric: str = "ece"
) -> ShiftCurves:
    """One metric along severities.

    Of the rows of `shift.evaluate_shift`, a curve a corruption; of such rows by method, or of those of
    `shift_benchmark`, a curve a method, the mean over corruptions.

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
        groups = _group_by(rows, lambda row: row.method if isinstance(row, ShiftBenchmarkRow) else row.corruption)
    severities = sorted({row.severity for group in groups.values() for row in group})
    series = {}
    for name, group in groups.items():
        at = _group_by(group, lambda row: row.severity)
        series[name] = np.array([_mean(_column(at.get(severity, []), metric)) for severity in severities])
    return ShiftCurves(metric, np.array(severities), series)


@draw.register(ShiftCurves)
def _draw_shift_curves(record: ShiftCurves, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A curve a series; of many, those furthest from the mean are named."""
    ax = style.axes_for(ax)
    named = list(record.series)
    if len(named) > _CURVES:
        all_curves = np.array(list(record.series.values()))
        seen = ~np.isnan(all_curves)
        mean = np.where(seen, all_curves, 0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
        far = np.where(seen, np.abs(all_curves - mean), 0).sum(axis=1)
        chosen = set(np.argsort(-far, kind="stable")[: _CURVES - 2].tolist())
        others: dict[str, Any] = {"color": style.GREY, "linewidth": 0.6}
        rest = [name for index, name in enumerate(named) if index not in chosen]
        for index, name in enumerate(rest):
            words = f"{len(rest)} others" if not index else None
            ax.plot(record.severities, record.series[name], **others, label=words, zorder=1)
        ax.plot(record.severities, mean, color=style.text_color(ax), linewidth=2, label=f"mean of {len(named)}")
        named = [name for index, name in enumerate(named) if index in chosen]
    for index, name in enumerate(named):
        ax.plot(record.severities, record.series[name], **style.line_style(index), label=name)
    if not named:
        style.write_empty(ax, "no rows")
    ax.set_xticks(record.severities)
    name = label(record.metric)
    style.set_labels(ax, f"{name} under shift" if title is None else title, "Severity of the shift", name)
    style.legend(ax)
    return ax


def panels(rows: int, columns: int, *, height: float = 2.6) -> tuple[Any, list[Any]]:
    """A figure that pyplot does not know of, with so many axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.COLUMN * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _group_by(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _column(rows: list[Any], metric: str) -> np.ndarray:
    for row in rows:
        if not isinstance(getattr(row, metric, None), (int, float)):
            metrics = [name for name, value in vars(row).items() if isinstance(value, float)]
            raise ValueError(f"metric must be one of {', '.join(metrics)}, got {metric!r}")
    return np.array([getattr(row, metric) for row in rows], dtype=np.float64)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
