"""Net benefit: whether acting on the probability of an event does more good than acting always or never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.decisions.decision_curve import NetBenefit, net_benefit
from trueup.report import style
from trueup.report.audit import Audit
from trueup.report.figures import Panel, Section, Table, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure


@dataclass(frozen=True, eq=False)
class DecisionCurve:
    """The decision curve of an event, as a figure."""

    curve: NetBenefit


def decision_curve(logits: Any, labels: Any, *, event: int = 1, weights: Any = None) -> DecisionCurve:
    """The net benefit of acting on P(event) ≥ t for thresholds t from 1 % to 99 %, with pointwise intervals.

    >>> rng = np.random.default_rng(0)
    >>> z = np.stack([np.zeros(2000), 2 * rng.normal(size=2000) - 1], axis=1)
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> summary(decision_curve(z, y))
    'Acting on the probability clearly beats acting always and never for thresholds 4 % to 80 %.'
    """
    return DecisionCurve(net_benefit(logits, labels, event=event, weights=weights))


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The curve of the chosen method on rows that did not fit it."""
    record = decision_curve(*audit.pairs[audit.chosen], weights=audit.weights)
    return Section(
        name="net-benefit",
        title="Is it worth acting on?",
        text="Act where the probability is at least a threshold t, which says what a false alarm costs: at 10 %, nine "
        "false alarms weigh as much as one event found. The curve is the net benefit, events found less false alarms "
        "at that price, for each row. It is worth having where it lies above acting always and above 0, acting never.",
        panels=(Panel("net-benefit-chart", "Net benefit, for each threshold", record),),
    )


def chart(record: DecisionCurve, *, height: int = 320) -> Figure:
    """The curve with its band, beside acting always and never."""
    c = record.curve
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "95 % interval",
            "x": np.concatenate([c.threshold, c.threshold[::-1]]),
            "y": np.concatenate([c.low, c.high[::-1]]),
            "fill": "toself",
            "fillcolor": style.BLUE,
            "opacity": 0.15,
            "line": {"width": 0},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "by probability",
            "x": c.threshold,
            "y": c.value,
            "line": {"color": style.BLUE, "width": 2},
            "hovertemplate": "at %{x:.0%}: %{y:.4f}<extra>by probability</extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "act always",
            "x": c.threshold,
            "y": c.treat_all,
            "line": {"color": style.VERMILION, "width": 1.5, "dash": "dash"},
            "hovertemplate": "at %{x:.0%}: %{y:.4f}<extra>act always</extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "act never",
            "x": c.threshold[[0, -1]],
            "y": [0.0, 0.0],
            "line": {"color": style.MUTED, "width": 1.2, "dash": "dot"},
            "hoverinfo": "skip",
        },
    ]
    figure = style.plotly_figure(traces, x="Threshold: act from this probability on", y="Net benefit", height=height)
    figure.update_xaxes(range=[0, 1], tickformat=".0%", dtick=0.2)
    return figure.update_yaxes(range=_range(c), nticks=6)


def draw(record: DecisionCurve, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """The curve with its band, beside acting always and never."""
    ax = style.axes_for(ax)
    c = record.curve
    x = 100 * c.threshold
    ax.fill_between(x, c.low, c.high, color=style.BLUE, alpha=0.15, linewidth=0)
    ax.plot(x, c.value, color=style.BLUE, linewidth=1.4, label="by probability")
    ax.plot(x, c.treat_all, color=style.VERMILION, linewidth=1.2, linestyle="--", label="act always")
    ax.axhline(0, color=style.IDEAL, linewidth=1.0, linestyle=":", label="act never")
    ax.set(xlim=(0, 100), ylim=_range(c))
    title = "Net benefit" if title is None else title
    style.set_labels(ax, title, "Threshold: act from this probability on (%)", "Net benefit")
    style.legend(ax, loc="upper right")
    return ax


def summary(record: DecisionCurve) -> str:
    """Where acting on the probability is worth it."""
    spans = [percent(a, 0) if a == b else f"{percent(a, 0)} to {percent(b, 0)}" for a, b in record.curve.useful]
    if not spans:
        return "At no threshold does acting on the probability clearly beat acting always or never."
    return f"Acting on the probability clearly beats acting always and never for thresholds {' and '.join(spans)}."


def numbers(record: DecisionCurve) -> Table:
    """A row for every tenth of the thresholds."""
    c = record.curve
    at = [i for i, t in enumerate(c.threshold) if round(100 * t) % 10 == 0 or round(100 * t) in (1, 2, 5)]
    head = ["Threshold", "By probability", "95 % interval", "Act always"]
    return head, [
        [percent(c.threshold[i], 0), f"{c.value[i]:.4f}", f"{c.low[i]:.4f} – {c.high[i]:.4f}", f"{c.treat_all[i]:.4f}"]
        for i in at
    ]


def _range(curve: NetBenefit) -> tuple[float, float]:
    """From a little below 0 to the most there is: acting always falls without end."""
    top = max(float(np.max(curve.high)), float(curve.treat_all[0]), 0.01)
    return -0.25 * top, 1.05 * top
