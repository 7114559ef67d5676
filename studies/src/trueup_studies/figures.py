"""Figures of studies: for each a frozen record, the function that computes it, and its drawing by `draw`.

The largest logits show how a training loss treats easy and hard samples. Exponents and starts belong to Neural
Clamping. Shift curves show a metric by the severity of a corruption.
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = len(style.SERIES)
"""Number of distinguishable curves; with more, only the most extreme are named and the others are thin."""

_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "||||", "----")
"""Hatches in matplotlib's notation, one per colour of `style.SERIES`."""


def fill_style(index: int) -> dict[str, Any]:
    """Return colour and hatch of the area with this index."""
    turn, at = divmod(index, len(style.SERIES))
    look = {"facecolor": style.SERIES[at] + "40", "edgecolor": style.SERIES[at]}
    return look | {"hatch": _HATCHES[(at + turn) % len(_HATCHES)]}


def second_axis(ax: Axes, other: Axes, name: str) -> None:
    """Label the right-hand axis, and list the curves of both axes in one legend above them."""
    other.set_ylabel(name, fontsize=style.TITLE_SIZE)
    other.tick_params(labelsize=style.TICK_SIZE)
    other.spines["top"].set_visible(False)
    ax.spines["right"].set_visible(True)
    style.legend(ax, other=other, loc="upper center", ncols=3 if len(ax.lines + other.lines) == 3 else 1)


@singledispatch
def draw(record: Any, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw a record of a study, or of `trueup.reports`, on `ax` or on the axes of a new figure.

    The figure is `draw(record).figure`; `title=""` draws no title.

    >>> ax = draw(max_logits([[9.0, 0.0], [8.0, 0.0], [1.0, 0.0]], [1, 2, np.inf]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('Largest logit', 'Samples of the band (%)')
    """
    return figures.draw(record, ax, title=title)


@dataclass(frozen=True)
class Band:
    """The largest logits of the training samples learned in epochs first ≤ e ≤ final."""

    first: float
    final: float
    """Infinite, like `first`, for the samples that were never learned."""
    count: np.ndarray
    """Number of samples in each bin."""


@dataclass(frozen=True)
class MaxLogits:
    """Largest logits by learned epoch: spread out and separate if a network distinguishes easy from hard samples."""

    edges: np.ndarray
    bands: tuple[Band, ...]
    range: float
    """95th minus 5th percentile of the largest logit, over all samples."""
    auc: float
    """Probability that a sample of the first band has a larger logit than one of the final learned band."""


def max_logits(logits: Any, learned: Any, *, bounds: Sequence[float] | None = None, bins: int = 30) -> MaxLogits:
    """Compute histograms of max_k z_k of the training samples, by the band of epochs in which each was learned.

    `learned` comes from `History.learned_epochs`. A band ends at each of `bounds` and at the final epoch; by default
    the bands are thirds of the learned samples. Samples that were never learned form the final band. The logits must
    come from one network in evaluation mode.

    >>> logits = [[9.0, 0.0], [8.0, 0.0], [5.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    >>> record = max_logits(logits, [1, 1, 2, 7, np.inf], bounds=[1], bins=2)
    >>> [(band.first, band.final, band.count.tolist()) for band in record.bands]
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
    finite = epochs[known]
    if bounds is None:
        bounds = np.quantile(finite, (1 / 3, 2 / 3), method="inverted_cdf").tolist() if len(finite) else []
    latest = float(finite.max()) if len(finite) else 0.0
    ends = [*sorted({float(bound) for bound in bounds if bound < latest}), latest]
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
    """Draw one histogram per band of epochs, in per cent of the band's samples."""
    ax = style.axes_for(ax)
    for index, band in enumerate(record.bands):
        span = f"epoch {band.first:g}" if band.first == band.final else f"epochs {band.first:g}–{band.final:g}"
        words = f"{'never learned' if np.isinf(band.first) else span} ({band.count.sum():,})"
        shares = 100 * band.count / max(int(band.count.sum()), 1)
        ax.stairs(shares, record.edges, fill=True, label=words, linewidth=1.0, **fill_style(index))
    if not record.bands:
        style.write_empty(ax, "no samples")
    ax.set_ylim(0, None)
    style.set_labels(
        ax, "Largest logit by learned epoch" if title is None else title, "Largest logit", "Samples of the band (%)"
    )
    apart = "" if np.isnan(record.auc) else f", AUC {record.auc:.3f}"
    style.legend(ax, title=f"range {record.range:.2f}{apart}", alignment="left")
    return ax


@dataclass(frozen=True, eq=False)
class GammaSweep:
    """Effect of the focal loss's exponent on a clamped network, averaged over fits."""

    gammas: np.ndarray
    ece: np.ndarray
    loss: np.ndarray
    """Objective at the end of the fit, on the calibration data."""
    entropy: np.ndarray
    """Mean entropy in nats."""
    stds: Mapping[str, np.ndarray]
    """Standard deviation of ece, loss and entropy over fits; NaN for one fit."""


def gamma_sweep(rows: Iterable[AblationRow]) -> GammaSweep:
    """Compute ECE, loss and entropy by the exponent γ, from the rows of fits at several γ.

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
    """Draw ECE on the left axis, loss and entropy in nats on the right, with bands of one standard deviation."""
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
    second_axis(ax, other, "Loss and entropy (nats)")
    return ax


@dataclass(frozen=True, eq=False)
class Starts:
    """One metric of fits from several starts, one value per seed."""

    metric: str
    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]


def starts(rows: Iterable[AblationRow], metric: str = "ece") -> Starts:
    """Collect one metric by start, one value per seed; the start is in the field `method` of the rows.

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
    """Draw a box per start, and every fit as a point."""
    ax = style.axes_for(ax)
    values = [fits[np.isfinite(fits)] for fits in record.values]
    if values:
        line = {"color": style.text_color(ax), "linewidth": 0.9}
        boxes = ax.boxplot(
            values, widths=0.5, patch_artist=True, showfliers=False, medianprops=line, whiskerprops=line, capprops=line
        )
        for index, box in enumerate(boxes["boxes"]):
            box.set(linewidth=0.9, **fill_style(index))
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
    """One metric by the severity of a shift."""

    metric: str
    severities: np.ndarray
    series: Mapping[str, np.ndarray]
    """Name → one value per severity; NaN where none was measured."""


def shift_curves(rows: Mapping[str, Iterable[ShiftRow]], metric: str = "ece") -> ShiftCurves:
    """Compute one metric by severity for each method, from the rows of `models.shift.evaluate_shift`.

    The metric is averaged over corruptions.

    >>> rows = [ShiftRow("haze", s, 0.9, 0.3, ece, 0.5) for s, ece in ((0, 0.02), (1, 0.05))]
    >>> more = [ShiftRow("jpeg", 1, 0.9, 0.3, 0.07, 0.5)]
    >>> shift_curves({"raw": [*rows, *more]}).series["raw"].round(4)
    array([0.02, 0.06])

    Ovadia et al., "Can you trust your model's uncertainty?" (2019).
    """
    groups = {name: list(group) for name, group in rows.items()}
    severities = sorted({row.severity for group in groups.values() for row in group})
    series = {}
    for name, group in groups.items():
        at = _group_by(group, lambda row: row.severity)
        series[name] = np.array([_mean(_column(at.get(severity, []), metric)) for severity in severities])
    return ShiftCurves(metric, np.array(severities), series)


@draw.register(ShiftCurves)
def _draw_shift_curves(record: ShiftCurves, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw one curve per series; with many series, name those furthest from the mean."""
    ax = style.axes_for(ax)
    named = list(record.series)
    if len(named) > _CURVES:
        all_curves = np.array(list(record.series.values()))
        seen = ~np.isnan(all_curves)
        mean = np.where(seen, all_curves, 0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
        distance = np.where(seen, np.abs(all_curves - mean), 0).sum(axis=1)
        chosen = set(np.argsort(-distance, kind="stable")[: _CURVES - 2].tolist())
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
    """Make a figure outside pyplot with rows × columns axes."""
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
