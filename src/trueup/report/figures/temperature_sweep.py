"""What each temperature does to the negative log-likelihood and to the ECE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trueup.calibrators.temperature_search import inverse_temperature
from trueup.core.arrays import as_weighted
from trueup.core.bins import BINS, Bins, equal_width, rounding_error
from trueup.core.formatting import format_number
from trueup.core.loss_sums import temperature_sums
from trueup.core.native import as_float64
from trueup.core.row_scores import confidences, event_log_odds, is_event, scores_and_outcomes
from trueup.report import style
from trueup.report.audit import RAW, Audit
from trueup.report.figures import Panel, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

_POINTS, _FEW, _MANY = 61, 25, 10_000_000  # temperatures of a sweep; fewer for more than so many logits


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


def temperature_sweep(
    logits: Any,
    labels: Any,
    *,
    temperatures: Sequence[float] | None = None,
    bins: int = BINS,
    weights: Any = None,
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
    z, y, w = as_weighted(logits, labels, weights, at_least=1)
    best = 1 / inverse_temperature(z, y, w)[0]
    if temperatures is None:
        points = _POINTS if z.numel() <= _MANY else _FEW
        grid = np.geomspace(min(1.0, best) / 3, max(1.0, best) * 3, points)
    else:
        grid = np.array(temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not ((grid > 0) & np.isfinite(grid)).all():
            raise ValueError("temperatures must be a list of positive numbers")
    hits = scores_and_outcomes(z, y, quick=True)[1]
    odds = event_log_odds(z) if is_event(z, fold=False) else None
    edges, unit = equal_width(bins), rounding_error(z)
    each, total = (None, len(z)) if w is None else (w.cpu().numpy(), float(w.sum()))
    nll, ece = np.empty(len(grid)), np.empty(len(grid))
    for i, beta in enumerate((1 / grid).tolist()):
        nll[i] = temperature_sums(z, y, beta, w, quick=True)[0] / total
        if odds is None:
            score, _ = confidences(z, beta=beta, quick=True)
        else:
            score = as_float64(torch.sigmoid(beta * odds))
        ece[i] = Bins.from_scores(score, hits, edges, rounding=unit, weights=each).ece()
    return TemperatureSweep(grid, nll, ece, best, float(grid[ece.argmin()]))


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The sweep of the uncalibrated network."""
    record = temperature_sweep(*audit.pairs[RAW], bins=audit.bins, weights=audit.weights)
    above = "above 1 the network becomes less confident, below 1 more confident"
    if audit.scores.is_event:
        above = "above 1 every probability moves towards a half, below 1 away from it"
    return Section(
        name="sweep",
        title="What would a single temperature do?",
        text=f"Temperature scaling divides all logits by one number: {above}. The curves show what each "
        "temperature would do to the rows of this page; the fitted temperature comes from the calibration rows alone.",
        panels=(Panel("sweep-chart", "Log-loss and calibration error by temperature", record),),
    )


def chart(record: TemperatureSweep, *, height: int = 320) -> Figure:
    """NLL on the left and ECE on the right, with lines at 1 and at the best temperature."""
    t = record.temperatures
    lines = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        | {"line": {"color": colour, "width": 1.2, "dash": dash}}
        for at, colour, dash in ((1.0, style.MUTED, "dot"), (record.best_nll, style.BLUE, "solid"))
    ]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": t,
            "y": values,
            "yaxis": axis,
            "line": {"color": colour, "width": 2, "dash": dash},
            "hovertemplate": f"T = %{{x:.2f}}<br>{name} %{{y:.4f}}<extra></extra>",
        }
        for name, values, axis, colour, dash in (
            ("log-loss (left)", record.nll, "y", style.BLUE, "solid"),
            ("ECE (right)", record.ece, "y2", style.VERMILION, "dash"),
        )
    ]
    figure = style.plotly_figure(traces, x="Temperature", y="Log-loss (nats)", height=height, shapes=lines)
    second = figure.layout.yaxis.to_plotly_json() | {"overlaying": "y", "side": "right", "showgrid": False}
    figure.update_layout(yaxis2=second, margin_r=52)
    figure.layout.yaxis2.title.text = "ECE"
    figure.update_layout(yaxis2_rangemode="tozero", yaxis2_tickmode="auto")
    ticks = [v for v in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if t.min() <= v <= t.max()]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{v:g}" for v in ticks])
    return figure.update_yaxes(nticks=6)


def draw(record: TemperatureSweep, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """NLL on the left and ECE on the right, each with its least value marked."""
    ax = style.axes_for(ax)
    order = np.argsort(record.temperatures)
    t = record.temperatures[order]
    other = ax.twinx()
    for index, (axes, values, best, name) in enumerate(
        ((ax, record.nll[order], record.best_nll, "NLL"), (other, record.ece[order], record.best_ece, "ECE"))
    ):
        line = {**style.line_style(index), "marker": ""}
        axes.plot(t, values, **line, label=f"{name}, least at T = {best:.3g}")
        at = np.interp(np.log(best), np.log(t), values, left=np.nan, right=np.nan)
        axes.plot([best], [at], marker="os"[index], markersize=4, color=line["color"], linestyle="")
        axes.tick_params(axis="y", labelcolor=line["color"])
    ax.set_xscale("log")
    ax.axvline(1, color=style.IDEAL, linewidth=0.8, linestyle=":")
    style.set_labels(ax, "Temperature sweep" if title is None else title, "Temperature T", "NLL (nats)")
    style.second_axis(ax, other, "ECE")
    style.plain_log_ticks(ax, t)
    return ax


def summary(record: TemperatureSweep) -> str:
    """The best temperatures, and what they gain."""
    one = int(np.abs(np.log(record.temperatures)).argmin())
    return (
        f"The log-loss is least at temperature {record.best_nll:.2f} (line), the ECE at {record.best_ece:.2f}. "
        f"At 1, without calibration, they are {record.nll[one]:.3f} and {record.ece[one]:.3f}; "
        f"the least are {record.nll.min():.3f} and {record.ece.min():.3f}."
    )


def numbers(record: TemperatureSweep) -> Table:
    """A row for each of some twenty temperatures."""
    step = max(1, len(record.temperatures) // 20)
    each = list(zip(record.temperatures, record.nll, record.ece, strict=True))[::step]
    return ["Temperature", "Log-loss", "ECE"], [
        [f"{t:.3f}", format_number(nll), format_number(ece)] for t, nll, ece in each
    ]
