"""The house style of the charts on pages: colours of a light page, those of a dark one, and quiet axes."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from trueup.report import palette

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, MUTED, LINE, PAPER = "#1c2024", "#60646c", "#e3e5e8", "#ffffff"
"""Of text, lesser text, grid lines and the ground."""
BAND = "rgba(96,100,108,0.17)"
GAP_OVER, GAP_UNDER = "rgba(213,94,0,0.28)", "rgba(86,180,233,0.38)"

DARK = {
    INK: "#eceef0",
    MUTED: "#a0a6ae",
    LINE: "#2e3236",
    PAPER: "#121416",
    BAND: "rgba(160,166,174,0.22)",
    GAP_OVER: "rgba(240,136,62,0.38)",
    GAP_UNDER: "rgba(86,180,233,0.34)",
    palette.BLUE: "#4fa8e0",
    palette.VERMILION: "#f0883e",
    palette.GREEN: "#2fc498",
    palette.BLACK: "#eceef0",
    palette.GREY: "#8b929a",
}
"""What each colour becomes on a dark page: a page's script replaces the strings that equal a key, wherever they are."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif'


def figure(
    traces: list[dict[str, Any]], *, x: str, y: str, height: int = 340, legend: bool = True, **layout: Any
) -> Figure:
    """A figure in the house style: quiet axes, horizontal grid, no ground of its own, the legend, if any, above."""
    from plotly.graph_objects import Figure
    from plotly.graph_objects import layout as parts

    title = {"font": {"color": MUTED, "size": 12}, "standoff": 10}
    axis: dict[str, Any] = {
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"color": MUTED, "size": 12},
        "automargin": True,
        "fixedrange": True,
    }
    return Figure(
        traces,
        {
            "template": parts.Template(),
            "height": height,
            "autosize": True,
            "margin": {"l": 52, "r": 14, "t": 34 if legend else 14, "b": 46},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 12, "color": INK},
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": LINE, "font": {"family": FONT, "size": 12, "color": INK}},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "font": {"color": MUTED, "size": 12},
                "itemclick": False,
                "itemdoubleclick": False,
            },
            "showlegend": legend,
            "dragmode": False,
            "xaxis": axis | {"showgrid": False, "showline": True, "title": title | {"text": x}},
            "yaxis": axis | {"title": title | {"text": y}},
        },
    ).update_layout(**layout)


def plain(text: str, most: int = 40) -> str:
    """Somebody's words as plotly shows them, not as the markup that it would read in them."""
    return html.escape(text if len(text) <= most else text[: most - 1] + "…", quote=False)
