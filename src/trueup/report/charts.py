"""Records as plotly figures for pages, in the colours of a light page, which `DARK` turns into those of a dark one."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.core.formatting import format_percent
from trueup.report import chart_rows, chart_studies, palette, studies
from trueup.report.records import ClassErrors, Comparison, Confidences, Reliability, RiskCoverage, TemperatureSweep
from trueup.report.style import BAND, DARK, GAP_OVER, GAP_UNDER, INK, MUTED, PAPER, figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["DARK", "chart"]


@singledispatch
def chart(record: Any, **options: Any) -> Figure:
    """An interactive figure of a record, as wide as its place, without a title of its own.

    >>> from trueup.report.records import reliability
    >>> chart(reliability([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1])).layout.xaxis.title.text
    'Confidence'
    """
    raise TypeError(f"record must be one of trueup.report's records, got {type(record).__name__}")


@chart.register(Reliability)
def _reliability(record: Reliability, *, height: int = 380, legend: bool = True) -> Figure:
    some = record.count > 0
    middle, width = (record.edges[1:] + record.edges[:-1])[some] / 2, np.diff(record.edges)[some]
    said, right, count = record.confidence[some], record.accuracy[some], record.count[some]
    gap = right - said
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": f"{format_percent(record.level)} band if calibrated",
            "x": middle,
            "y": (record.high - record.low)[some],
            "base": record.low[some],
            "width": width,
            "marker": {"color": BAND, "line": {"width": 0}},
            "hoverinfo": "skip",
        }
    ]
    for name, chosen, colour in (("says too much", gap < 0, GAP_OVER), ("says too little", gap > 0, GAP_UNDER)):
        if chosen.any():
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": middle[chosen],
                    "y": gap[chosen],
                    "base": said[chosen],
                    "width": 0.72 * width[chosen],
                    "marker": {"color": colour, "line": {"width": 0}},
                    "hoverinfo": "skip",
                }
            )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "accuracy",
            "x": said,
            "y": right,
            "customdata": np.stack([count, record.low[some], record.high[some]], axis=1),
            "marker": {"color": palette.BLUE, "size": 6 + 8 * np.sqrt(count / max(count.max(initial=1.0), 1.0))}
            | {"opacity": 1, "line": {"width": 1, "color": PAPER}},
            "cliponaxis": False,
            "hovertemplate": "says %{x:.1%}, right %{y:.1%}<br>if calibrated %{customdata[1]:.1%} to "
            "%{customdata[2]:.1%}<br>%{customdata[0]:,} rows<extra></extra>",
        }
    )
    shape = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "layer": "below"}
    drawn = figure(
        traces,
        x="Confidence",
        y="Accuracy",
        height=height,
        barmode="overlay",
        shapes=[shape | {"line": {"color": MUTED, "width": 1, "dash": "dot"}}],
        legend=legend,
    )
    drawn.update_xaxes(range=[0, 1.01], tickformat=".0%", dtick=0.2)
    return drawn.update_yaxes(range=[0, 1.02], tickformat=".0%", dtick=0.2)


@chart.register(Confidences)
def _confidences(record: Confidences, *, height: int = 300, top: float | None = None, legend: bool = True) -> Figure:
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    total = max(float((record.right + record.wrong).sum()), 1.0)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": middle,
            "y": count / total,
            "width": 0.86 * width,
            "customdata": count,
            "marker": {"color": colour, "line": {"width": 0}},
            "hovertemplate": f"near %{{x:.0%}} sure<br>{name}: %{{customdata:,}} rows<extra></extra>",
        }
        for name, count, colour in (("right", record.right, palette.BLUE), ("wrong", record.wrong, palette.VERMILION))
    ]
    high = 1.08 * (float((record.right + record.wrong).max(initial=0.0)) / total if top is None else top)
    traces += [
        {"type": "scatter", "mode": "lines", "x": [at, at], "y": [0, high], "hoverinfo": "skip"}
        | {"name": f"{name} {format_percent(at, 1)}", "line": {"color": INK, "width": 1.2, "dash": dash}}
        for name, at, dash in (("says", record.mean, "dot"), ("is right", record.accuracy, "solid"))
    ]
    options: dict[str, Any] = {"barmode": "stack", "legend_traceorder": "normal"}
    drawn = figure(traces, x="Confidence", y="Share of rows", height=height, legend=legend, **options)
    drawn.update_xaxes(range=[0, 1.01], tickformat=".0%", dtick=0.2)
    return drawn.update_yaxes(tickformat=".0%", nticks=5, range=[0, high or 1])


@chart.register(RiskCoverage)
def _risk_coverage(record: RiskCoverage, *, beside: RiskCoverage | None = None, height: int = 320) -> Figure:
    curves = [("before" if beside else "by confidence", record, palette.VERMILION if beside else palette.BLUE, "solid")]
    if beside is not None:
        curves.append(("after", beside, palette.BLUE, "solid"))
    last = beside or record
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": found.coverage,
            "y": found.risk,
            "line": {"color": colour, "width": 2, "dash": dash},
            "hovertemplate": f"{name}: %{{y:.2%}} wrong<br>among the surest %{{x:.0%}}<extra></extra>",
        }
        for name, found, colour, dash in curves
    ]
    ideal = {"color": MUTED, "width": 1.2, "dash": "dot"}
    traces.append(
        {"type": "scatter", "mode": "lines", "name": "best possible", "x": last.coverage, "y": last.best}
        | {"line": ideal, "hoverinfo": "skip"}
    )
    drawn = figure(traces, x="Share of rows kept, the surest first", y="Wrong among them", height=height)
    drawn.update_xaxes(range=[0, 1.01], tickformat=".0%", dtick=0.2)
    return drawn.update_yaxes(tickformat=".1~%", rangemode="tozero", nticks=6)


@chart.register(TemperatureSweep)
def _temperature_sweep(record: TemperatureSweep, *, height: int = 320) -> Figure:
    t = record.temperatures
    marks = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        | {"line": {"color": colour, "width": 1.2, "dash": dash}}
        for at, colour, dash in ((1.0, MUTED, "dot"), (record.best_nll, palette.BLUE, "solid"))
    ]
    traces = [
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
            ("log-loss (left)", record.nll, "y", palette.BLUE, "solid"),
            ("ECE (right)", record.ece, "y2", palette.VERMILION, "dash"),
        )
    ]
    drawn = figure(traces, x="Temperature", y="Log-loss (nats)", height=height, shapes=marks)
    second = drawn.layout.yaxis.to_plotly_json() | {"overlaying": "y", "side": "right", "showgrid": False}
    drawn.update_layout(yaxis2=second, margin_r=52)
    drawn.layout.yaxis2.title.text = "ECE"
    drawn.update_layout(yaxis2_rangemode="tozero", yaxis2_tickmode="auto")
    ticks = [v for v in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if t.min() <= v <= t.max()]
    drawn.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{v:g}" for v in ticks])
    return drawn.update_yaxes(nticks=6)


chart.register(Comparison, chart_rows.comparison)
chart.register(ClassErrors, chart_rows.class_errors)
chart.register(studies.LearnedEpochs, chart_studies.learned_epochs)
chart.register(studies.MaxLogits, chart_studies.max_logits)
chart.register(studies.GammaSweep, chart_studies.gamma_sweep)
chart.register(studies.Starts, chart_studies.starts)
chart.register(studies.ShiftCurves, chart_studies.shift_curves)
