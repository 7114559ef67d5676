"""Charts with a row for each method or class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.core.formatting import format_percent
from trueup.report import palette
from trueup.report.labels import better, label
from trueup.report.records import ClassErrors, Comparison
from trueup.report.style import GAP_OVER, GAP_UNDER, INK, MUTED, PAPER, figure, plain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def comparison(record: Comparison, *, titles: Mapping[str, str] | None = None, chosen: str | None = None) -> Figure:
    """A dot with its interval for each method, the first on top and the others from the best to the worst."""
    names = [plain((titles or {}).get(name, name), 48) for name in record.methods]
    first = np.arange(len(names)) == 0
    order = np.append(0, 1 + np.argsort(-(better(record.metric) or -1) * record.value[1:], kind="stable"))[: len(names)]
    places = -np.argsort(order).astype(float)
    away = np.where(np.isnan(record.change_low), False, (record.change_high < 0) | (record.change_low > 0))
    good = away & (np.sign(record.change) == (better(record.metric) or -1))
    looks = [
        ("as it is", first, INK, "circle"),
        ("better", good & ~first, palette.BLUE, "circle"),
        ("worse", away & ~good & ~first, palette.VERMILION, "square"),
        ("no sure difference", ~away & ~first, MUTED, "circle-open"),
    ]
    traces: list[dict[str, Any]] = []
    for name, members, colour, symbol in looks:
        if members.any():
            k = np.flatnonzero(members)
            reach = np.nan_to_num(np.stack([record.high - record.value, record.value - record.low]), nan=0.0)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": record.value[k],
                    "y": places[k],
                    "text": [names[i] for i in k],
                    "customdata": np.stack([record.low[k], record.high[k]], axis=1),
                    "error_x": {"type": "data", "symmetric": False, "array": reach[0][k], "arrayminus": reach[1][k]}
                    | {"color": colour, "thickness": 1.6, "width": 0},
                    "marker": {"color": colour, "size": 9, "symbol": symbol, "line": {"width": 2, "color": colour}},
                    "hovertemplate": "%{text}<br>%{x:.4f}, true value %{customdata[0]:.4f} to "
                    "%{customdata[1]:.4f}<extra></extra>",
                }
            )
    notes = [
        {"x": 0, "xref": "paper", "xanchor": "left", "y": places[i], "yshift": 15, "showarrow": False}
        | {
            "text": f"<b>{name}</b>" if record.methods[i] == chosen else name,
            "font": {"color": INK, "size": 12.5},
            "bgcolor": PAPER,
            "borderpad": 1,
        }
        for i, name in enumerate(names)
    ]
    level = f"{label(record.metric)}, with {format_percent(record.level)} intervals"
    drawn = figure(traces, x=level, y="", height=96 + 42 * len(names), annotations=notes)
    drawn.update_layout(margin_l=8, margin_r=20)
    drawn.update_xaxes(showgrid=True, rangemode="tozero" if better(record.metric) < 0 else "normal", nticks=7)
    return drawn.update_yaxes(visible=False, range=[-len(names) + 0.35, 0.85])


def class_errors(record: ClassErrors, *, most: int = 20, top: float | None = None, legend: bool = True) -> Figure:
    """A bar for each class, the worst on top."""
    order = np.argsort(-record.error, kind="stable")[:most]
    names = [plain(record.names[k], 24) for k in order]
    more = (record.said > record.seen)[order]
    traces: list[dict[str, Any]] = []
    for name, chosen, colour in (("said too often", more, GAP_OVER), ("said too rarely", ~more, GAP_UNDER)):
        if chosen.any():
            k = np.flatnonzero(chosen)
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "x": record.error[order[k]],
                    "y": k,
                    "text": [names[i] for i in k],
                    "textposition": "none",
                    "customdata": np.stack([record.said[order[k]], record.seen[order[k]]], axis=1),
                    "marker": {"color": colour, "line": {"width": 0}},
                    "hovertemplate": "%{text}<br>error %{x:.4f}<br>said %{customdata[0]:.2%}, seen "
                    "%{customdata[1]:.2%}<extra></extra>",
                }
            )
    drawn = figure(traces, x=label("sce"), y="", height=90 + 22 * max(len(order), 4), bargap=0.35, legend=legend)
    drawn.update_xaxes(showgrid=True, rangemode="tozero", nticks=5)
    if top is not None:
        drawn.update_xaxes(range=[0, 1.04 * top])
    ticks = {"tickvals": list(range(len(order))), "ticktext": names, "showgrid": False}
    return drawn.update_yaxes(autorange="reversed", **ticks)
