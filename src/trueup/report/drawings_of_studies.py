"""Drawings of what studies found; `draw` knows them by their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.report import canvas, palette
from trueup.report.labels import label
from trueup.report.studies import GammaSweep, LearnedEpochs, MaxLogits, ShiftCurves, Starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = len(palette.SERIES)
"""As many curves can be told apart; of more, the oddest are named and the others drawn thin."""


def learned_epochs(record: LearnedEpochs, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A histogram a run, as outlines, in per cent of its samples."""
    ax = canvas.axes_for(ax)
    for place, name in enumerate(record.names):
        total = max(int(record.counts[place].sum() + record.never[place]), 1)
        words = f"{name}: mean {record.means[place]:.1f}, {100 * record.never[place] / total:.1f} % never"
        style = {key: value for key, value in canvas.line_style(place).items() if not key.startswith("marker")}
        ax.stairs(100 * record.counts[place] / total, record.edges, label=words, **style)
    ax.set(xlim=(record.edges[0], record.edges[-1]), ylim=(0, None))
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    if not record.names:
        canvas.nothing(ax, "no runs")
    canvas.dress(ax, "When samples were learned" if title is None else title, "Learned epoch", "Training samples (%)")
    canvas.legend(ax, at="upper right")
    return ax


def max_logits(record: MaxLogits, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A histogram a band of epochs, each in per cent of its own samples."""
    ax = canvas.axes_for(ax)
    for place, band in enumerate(record.bands):
        span = f"epoch {band.first:g}" if band.first == band.last else f"epochs {band.first:g}–{band.last:g}"
        words = f"{'never learned' if np.isinf(band.first) else span} ({band.count.sum():,})"
        shares = 100 * band.count / max(int(band.count.sum()), 1)
        ax.stairs(shares, record.edges, fill=True, label=words, linewidth=1.0, **canvas.fill_style(place))
    if not record.bands:
        canvas.nothing(ax, "no samples")
    ax.set_ylim(0, None)
    canvas.dress(
        ax, "Greatest logit by learned epoch" if title is None else title, "Greatest logit", "Samples of the band (%)"
    )
    apart = "" if np.isnan(record.auc) else f", AUC {record.auc:.3f}"
    canvas.legend(ax, title=f"range {record.range:.2f}{apart}", alignment="left")
    return ax


def gamma_sweep(record: GammaSweep, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """ECE on the left; loss and entropy, both in nats, on the right."""
    ax = canvas.axes_for(ax)
    other = ax.twinx()
    for side, values, name, place in (
        (ax, record.ece, "ECE", 0),
        (other, record.loss, "loss", 1),
        (other, record.entropy, "entropy", 2),
    ):
        side.plot(record.gammas, values, **canvas.line_style(place), label=name)
    canvas.dress(ax, "Exponent of the focal loss" if title is None else title, "γ", "ECE")
    canvas.second_axis(ax, other, "Loss and entropy (nats)")
    return ax


def starts(record: Starts, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A box a start, and every fit as a point."""
    ax = canvas.axes_for(ax)
    values = [found[np.isfinite(found)] for found in record.values]
    if values:
        line = {"color": canvas.ink(ax), "linewidth": 0.9}
        shown = ax.boxplot(
            values, widths=0.5, patch_artist=True, showfliers=False, medianprops=line, whiskerprops=line, capprops=line
        )
        for place, box in enumerate(shown["boxes"]):
            box.set(linewidth=0.9, **canvas.fill_style(place))
        for place, found in enumerate(values):
            point = {**canvas.line_style(place), "linestyle": "", "markeredgecolor": canvas.ink(ax)}
            ax.plot(np.full(len(found), place + 1.0), found, **point, markeredgewidth=0.4, zorder=3)
    else:
        canvas.nothing(ax, "no fits")
    words = "Fits from different starts" if title is None else title
    canvas.dress(ax, words, "Start", label(record.metric))
    names = [f"{canvas.shortened(name, 14)}\n({len(found)})" for name, found in zip(record.names, values, strict=True)]
    ax.set_xticks(range(1, len(names) + 1), labels=names)
    return ax


def shift_curves(record: ShiftCurves, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A curve a series; of many, those furthest from the mean are named."""
    ax = canvas.axes_for(ax)
    named = list(record.series)
    if len(named) > _CURVES:
        all_curves = np.array(list(record.series.values()))
        seen = ~np.isnan(all_curves)
        mean = np.where(seen, all_curves, 0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
        far = np.where(seen, np.abs(all_curves - mean), 0).sum(axis=1)
        chosen = set(np.argsort(-far, kind="stable")[: _CURVES - 2].tolist())
        others: dict[str, Any] = {"color": palette.GREY, "linewidth": 0.6}
        rest = [name for place, name in enumerate(named) if place not in chosen]
        for place, name in enumerate(rest):
            words = f"{len(rest)} others" if not place else None
            ax.plot(record.severities, record.series[name], **others, label=words, zorder=1)
        ax.plot(record.severities, mean, color=canvas.ink(ax), linewidth=2, label=f"mean of {len(named)}")
        named = [name for place, name in enumerate(named) if place in chosen]
    for place, name in enumerate(named):
        ax.plot(record.severities, record.series[name], **canvas.line_style(place), label=name)
    if not named:
        canvas.nothing(ax, "no rows")
    ax.set_xticks(record.severities)
    name = label(record.metric)
    canvas.dress(ax, f"{name} under shift" if title is None else title, "Severity of the shift", name)
    canvas.legend(ax)
    return ax
